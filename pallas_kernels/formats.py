"""Device forms of the quantised weight formats: which bits of a word hold which weight.

This module is data and index rules only. `packing` moves bytes by these rules, `decode` turns words
into weights inside kernels. It is not the definition of the file formats (bytes on disk); those are
read in `packing` block by block.

Word layout. A row of K weights is padded with zeros to a multiple of `block` and cut into blocks.
A block is cut into sub-blocks of `sub` weights that share a scale (16 or 32); weight `r` of a
sub-block belongs to word `r // 2` and to the low (`r % 2 == 0`) or high 16-bit half of it. So
`sub / 2` words, a *word group*, hold one sub-block per *field*, and one shift and one mask give two
neighbouring weights in one 32-bit register, ready for a matrix instruction that takes 16-bit pairs
along K. Both halves of a word have the same layout. Where fewer operations decode it so, a set of
several word groups has its fields together: those that fit a word whole, then those gathered from
the bits left over in all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import numpy as np
import numpy.typing as npt

Run = tuple[int, int, int, int]
"""(word group of the set, lowest code bit, number of bits, bit position in the half-word)."""

ScaleKind = Literal["e5m3", "ue4m3", "e8m0", "f16", "k", "tile"]


Piece = tuple[int, int, int]
"""(word group of the set, shift right, mask of a half-word after the shift)."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A set of word groups and where each of its fields (sub-blocks) keeps its code.

    Attributes:
      words: word groups.
      fields: runs per field. Groups from `words` on are gathered ones.
      gathered: groups that decoding puts together from bits of the others, so that a field of
        theirs takes one shift and one mask, too.
    """

    words: int
    fields: tuple[tuple[Run, ...], ...]
    gathered: tuple[tuple[Piece, ...], ...] = ()

    @functools.cached_property
    def stored(self) -> tuple[tuple[Run, ...], ...]:
        """`fields` by the word groups in memory alone."""
        return tuple(tuple(r for run in runs for r in self._stored(run)) for runs in self.fields)

    def _stored(self, run: Run) -> list[Run]:
        word, low, count, pos = run
        if word < self.words:
            return [run]
        pieces = self.gathered[word - self.words]
        return [
            (source, low + b, 1, pos + b + right)
            for b in range(count)
            for source, right, mask in pieces
            if mask >> (pos + b) & 1
        ]


def _plain(bits: int) -> Layout:
    """Fields of `bits` bits one after the other from bit 0 of the half-word."""
    return Layout(1, tuple(((0, 0, bits, bits * f),) for f in range(16 // bits)))


# Four E2M1-like codes (bit 3 sign, bits 2..0 magnitude) in a half-word, so that few shifts bring
# them to the bfloat16 position (sign 15, exponent 8..7, mantissa 6).
_FP4 = Layout(
    1,
    (
        ((0, 3, 1, 15), (0, 0, 3, 6)),
        ((0, 3, 1, 12), (0, 0, 3, 3)),
        ((0, 3, 1, 14), (0, 0, 3, 9)),
        ((0, 3, 1, 13), (0, 0, 3, 0)),
    ),
)

# The same in two half-words: three codes each, and two more of the four bits left over in both.
_FP4_TWO = Layout(
    2,
    (
        *(((w, 3, 1, 15 - 3 * f), (w, 0, 3, 6 - 3 * f)) for w in range(2) for f in range(3)),
        *(((2, 3, 1, p), (2, 0, 3, p - 9)) for p in (14, 11)),
    ),
    gathered=(((0, 0, 0x4800), (1, 7, 0x00D8), (0, 8, 0x0024)),),
)

# Eight codes of sign (bit 1) and outer level (bit 0), for sign 15 and exponent bit 8.
_S40 = Layout(
    1,
    (*(((0, 1, 1, 15 - f), (0, 0, 1, 8 - f)) for f in range(7)), ((0, 1, 1, 1), (0, 0, 1, 0))),
)

# Sign (bit 2) and magnitude (bits 1..0) for sign 15 and exponent 8..7: four whole codes a word;
# bits 14, 12, 10 and 0 of three words make four more.
_FP3 = Layout(
    3,
    (
        *(((w, 2, 1, 15 - 2 * f), (w, 0, 2, 7 - 2 * f)) for w in range(3) for f in range(4)),
        *(((3, 2, 1, p), (3, 0, 2, p - 8)) for p in (14, 12, 10)),
        ((0, 2, 1, 0), (1, 1, 1, 0), (2, 0, 1, 0)),
    ),
    gathered=(((0, 0, 0x5400), (1, 7, 0x00A8), (2, 8, 0x0054)),),
)

# Three plain bits a code: five whole codes a word, and a sixteenth from the three top bits.
_PLAIN3 = Layout(
    3,
    (
        *(((w, 0, 3, 3 * f),) for w in range(3) for f in range(5)),
        ((0, 0, 1, 15), (1, 1, 1, 15), (2, 2, 1, 15)),
    ),
)

# Two whole six-bit codes a word; the four bits left in three words make two more.
_PLAIN6 = Layout(
    3,
    (
        *(((w, 0, 6, 6 * f),) for w in range(3) for f in range(2)),
        ((0, 0, 4, 12), (1, 4, 2, 12)),
        ((2, 0, 4, 12), (1, 4, 2, 14)),
    ),
)


def iq2_sign(unit: int, weight: int) -> int:
    """Bit of an iq2_xxs sign word that holds the sign of `weight` (0..6) of a unit of eight.

    Even weights are in the low half, odd ones in the high half, the four units of a sub-block side
    by side. The eighth sign makes the number of set ones even; the four bits where it would be, 28
    to 31, hold the scale.
    """
    return 16 * (weight % 2) + 4 * (weight // 2) + unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """Device form of one format.

    Attributes:
      name: name of the format (as in the reference vectors).
      source_block: weights in a block on disk.
      source_bytes: bytes of that block.
      layout: of the code words. None for iq2_xxs, whose sub-block (32 weights) is a word of four
        table rows, one a byte, and a word of signs and scale (`iq2_sign`). Eight words of the first
        kind and the eight of the second that follow are two blocks: one has the first half of each
        of the eight sub-blocks, the next the second.
      group: weights that share a scale.
      scale_bytes: bytes of a group in the byte forms: 1, or 2 (affine: scale, then offset).
      scale: how scales are kept. One byte per group, four bytes in an int32 word: "e5m3", which is
        0 or (1 + M/8) * 2^(E - 22) with E in the upper five bits and M in the lower three (every
        UE4M3 half-scale, without its subnormals); "ue4m3", the UE4M3 byte itself with a flag in bit
        7; "e8m0". Otherwise "f16", one float16 per group, two in a word; "k", the two-level scales
        of the K formats; "tile", float32 per 128 x 128.
      books: levels in a code book (0: fixed levels).
    """

    name: str
    source_block: int
    source_bytes: int
    layout: Layout | None
    group: int
    scale: ScaleKind
    books: int = 0
    scale_bytes: int = 1

    @property
    def bits(self) -> int:
        """Code bits per weight."""
        return 16 * self.layout.words // len(self.layout.fields) if self.layout else 2

    @property
    def block(self) -> int:
        """Weights in a device block."""
        return max(128, self.sub * len(self.layout.fields)) if self.layout else 128

    @property
    def sets(self) -> int:
        """Sets of word groups in a block."""
        return self.block // (self.sub * len(self.layout.fields)) if self.layout else 1

    @property
    def sub(self) -> int:
        """Weights in a sub-block."""
        return min(self.group, 32)

    @property
    def group_words(self) -> int:
        """Words of a word group."""
        return self.sub // 2 if self.layout else 8

    @property
    def block_words(self) -> int:
        """int32 words of a device block."""
        return self.block * self.bits // 32

    def padded(self, k: int) -> int:
        """`k` rounded up to whole device blocks."""
        return -(-k // self.block) * self.block


def _format(
    name: str,
    block: int,
    nbytes: int,
    layout: Layout | None,
    group: int,
    scale: ScaleKind,
    **more: int,
) -> Format:
    return Format(
        name=name,
        source_block=block,
        source_bytes=nbytes,
        layout=layout,
        group=group,
        scale=scale,
        **more,
    )


_ALL = (
    _format("q8_0", 32, 34, _plain(8), 32, "f16"),
    _format("q4_k", 256, 144, _plain(4), 32, "k"),
    _format("q2_k", 256, 84, _plain(2), 16, "k"),
    _format("iq2_xxs", 256, 66, None, 256, "f16"),
    _format("mxfp4", 32, 17, _FP4, 32, "e8m0"),
    _format("hf_fp4_e2m1", 32, 16, _FP4, 32, "e8m0"),
    _format("nvfp4", 64, 36, _FP4_TWO, 16, "e5m3"),
    _format("rocmfp4", 32, 18, _FP4_TWO, 16, "e5m3"),
    _format("rocmfp4_fast", 32, 17, _FP4, 32, "e5m3"),
    _format("rocmfp6", 32, 26, _PLAIN6, 16, "e5m3"),
    _format("rocmfp8", 32, 33, _plain(8), 32, "e5m3"),
    _format("rocmfp3", 32, 14, _FP3, 16, "e5m3"),
    _format("rocmfp3_mix", 32, 14, _PLAIN3, 16, "ue4m3", books=8),
    _format("rocmfp2_mix", 32, 10, _plain(2), 16, "ue4m3", books=4),
    _format("rocmfp2_s40", 32, 10, _S40, 16, "e5m3"),
    _format("rocmfp2_m1012", 32, 10, _plain(2), 16, "e5m3"),
    _format("rocmfp2_signed", 32, 10, _plain(2), 16, "ue4m3"),
    _format("rocmfp2_affine", 32, 10, _plain(2), 32, "e5m3", scale_bytes=2),
    _format("hf_fp8_e4m3_block128", 128, 128, _plain(8), 128, "tile"),
)

FORMATS: dict[str, Format] = {f.name: f for f in _ALL}


def get(name: str) -> Format:
    """The device form of format `name`.

    Raises: ValueError, listing the known names.
    """
    if name not in FORMATS:
        raise ValueError(f"unknown weight format {name!r}; known: {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


_IQ2_HEX = (
    "0000000200050008000a00110014002000220028002a00410044005000580061"
    "006400800082008a00a201010104011001150140018401980200020202220282"
    "04010404041004210424044004420448046004810484049004a4050005020508"
    "05200546056905800591060906100640068406a4080008050808081408280841"
    "0844085008520888090409400a020a1410011004101010211040106010841090"
    "10951100110811201150115a1180122412451400140814201425144914801518"
    "156216001616180118041810184018811900190519a01a5120002002200a2044"
    "2061208020822129214822002202240124042410244024562500254125642690"
    "2808282028942a44400140044010401840214024404040484056406040814084"
    "4090410041204161418041854201421042484256426844004408442044804499"
    "4512452446004801480448104840484549004958496149824a454a9050005008"
    "501150195020508050885104514251a4529154905492550a5601565458005811"
    "5819586459405a08600460106040606861006155621862606400640565106512"
    "6584684280008002800a80418082810481188140821184018404841084158440"
    "8460850085468594860986408660880289048a11900490109024904090a19116"
    "91809245940094229444955198819920a002a050a085a109a200a418a850a904"
)
IQ2_GRID: npt.NDArray[np.int32] = np.frombuffer(bytes.fromhex(_IQ2_HEX), ">u2").astype(np.int32)
"""Rows of the iq2_xxs table: eight 2-bit values (0, 1, 2 for 8, 25, 43), first in the low bits."""
