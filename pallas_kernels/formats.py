"""Device forms of the quantised weight formats: which bits of a word hold which weight.

This module is data and index rules only. `packing` moves bytes by these rules, `decode` turns words
into weights inside kernels. It is not the definition of the file formats (bytes on disk); those are
read in `packing` block by block.

Word layout. A row of K weights is padded with zeros to a multiple of `block` and cut into blocks.
A block is cut into sub-blocks of `sub` weights that share a scale (16 or 32); weight `r` of a
sub-block belongs to word `r // 2` and to the low (`r % 2 == 0`) or high 16-bit half of it. So
`sub / 2` words hold the sub-blocks of a *word group*, one sub-block per *field*, and one shift and
one mask give two neighbouring weights in one 32-bit register, ready for a matrix instruction that
takes 16-bit pairs along K. A code whose width is no power of two is split over planes (3 bits =
2 + 1, 6 bits = 4 + 2); the planes of a block follow each other.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Run = tuple[int, int, int]
"""(lowest code bit, number of bits, bit position in the half-word)."""

ScaleKind = Literal["e5m3", "ue4m3", "e8m0", "f16", "k", "tile"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plane:
    """One bit plane: where each field of a half-word keeps its bits of the code."""

    first_bit: int
    bits: int
    fields: tuple[tuple[Run, ...], ...]

    @property
    def per_half(self) -> int:
        """Fields in a 16-bit half-word."""
        return len(self.fields)


def plain_plane(first_bit: int, bits: int) -> Plane:
    """Fields of `bits` bits one after the other from bit 0 of the half-word."""
    fields = tuple(((0, bits, bits * f),) for f in range(16 // bits))
    return Plane(first_bit=first_bit, bits=bits, fields=fields)


# Four E2M1-like codes (bit 3 sign, bits 2..0 magnitude) in a half-word, so that few shifts bring
# them to the bfloat16 position (sign 15, exponent 8..7, mantissa 6).
_FP4_PLANE = Plane(
    first_bit=0,
    bits=4,
    fields=(
        ((3, 1, 15), (0, 3, 6)),
        ((3, 1, 12), (0, 3, 3)),
        ((3, 1, 14), (0, 3, 9)),
        ((3, 1, 13), (0, 3, 0)),
    ),
)

# Eight codes of sign (bit 1) and outer level (bit 0), for sign 15 and exponent bit 8.
_S40_PLANE = Plane(
    first_bit=0,
    bits=2,
    fields=(*(((1, 1, 15 - f), (0, 1, 8 - f)) for f in range(7)), ((1, 1, 1), (0, 1, 0))),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """Device form of one format.

    Attributes:
      name: name of the format (as in the reference vectors).
      source_block: weights in a block on disk.
      source_bytes: bytes of that block.
      planes: bit planes of the code words. Empty for iq2_xxs, whose 32 weights are one word of four
        table rows and one word of signs and scale: a block is 16 words of the first kind, then the
        16 of the second.
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
    planes: tuple[Plane, ...]
    group: int
    scale: ScaleKind
    books: int = 0
    scale_bytes: int = 1

    @property
    def bits(self) -> int:
        """Code bits per weight."""
        return sum(p.bits for p in self.planes) if self.planes else 2

    @property
    def block(self) -> int:
        """Weights in a device block."""
        if not self.planes:
            return 512
        return max(128, self.sub * max(p.per_half for p in self.planes))

    @property
    def sub(self) -> int:
        """Weights in a sub-block."""
        return min(self.group, 32)

    @property
    def group_words(self) -> int:
        """Words of a word group."""
        return self.sub // 2

    @property
    def block_words(self) -> int:
        """int32 words of a device block, all planes."""
        return self.block * self.bits // 32

    def padded(self, k: int) -> int:
        """`k` rounded up to whole device blocks."""
        return -(-k // self.block) * self.block


_TWO_BIT = (plain_plane(0, 2),)
_EIGHT_BIT = (plain_plane(0, 8),)


def _format(
    name: str,
    block: int,
    nbytes: int,
    planes: tuple[Plane, ...],
    group: int,
    scale: ScaleKind,
    books: int = 0,
    scale_bytes: int = 1,
) -> Format:
    return Format(
        name=name,
        source_block=block,
        source_bytes=nbytes,
        planes=planes,
        group=group,
        scale=scale,
        books=books,
        scale_bytes=scale_bytes,
    )


_ALL = (
    _format("q8_0", 32, 34, _EIGHT_BIT, 32, "f16"),
    _format("q4_k", 256, 144, (plain_plane(0, 4),), 32, "k"),
    _format("q2_k", 256, 84, _TWO_BIT, 16, "k"),
    _format("iq2_xxs", 256, 66, (), 256, "f16"),
    _format("mxfp4", 32, 17, (_FP4_PLANE,), 32, "e8m0"),
    _format("hf_fp4_e2m1", 32, 16, (_FP4_PLANE,), 32, "e8m0"),
    _format("nvfp4", 64, 36, (_FP4_PLANE,), 16, "e5m3"),
    _format("rocmfp4", 32, 18, (_FP4_PLANE,), 16, "e5m3"),
    _format("rocmfp4_fast", 32, 17, (_FP4_PLANE,), 32, "e5m3"),
    _format("rocmfp6", 32, 26, (plain_plane(0, 4), plain_plane(4, 2)), 16, "e5m3"),
    _format("rocmfp8", 32, 33, _EIGHT_BIT, 32, "e5m3"),
    _format("rocmfp3", 32, 14, (plain_plane(0, 2), plain_plane(2, 1)), 16, "e5m3"),
    _format("rocmfp3_mix", 32, 14, (plain_plane(0, 2), plain_plane(2, 1)), 16, "ue4m3", 8),
    _format("rocmfp2_mix", 32, 10, _TWO_BIT, 16, "ue4m3", 4),
    _format("rocmfp2_s40", 32, 10, (_S40_PLANE,), 16, "e5m3"),
    _format("rocmfp2_m1012", 32, 10, _TWO_BIT, 16, "e5m3"),
    _format("rocmfp2_signed", 32, 10, _TWO_BIT, 16, "ue4m3"),
    _format("rocmfp2_affine", 32, 10, _TWO_BIT, 32, "e5m3", scale_bytes=2),
    _format("hf_fp8_e4m3_block128", 128, 128, _EIGHT_BIT, 128, "tile"),
)

FORMATS: dict[str, Format] = {f.name: f for f in _ALL}


def get(name: str) -> Format:
    """The device form of format `name`.

    Raises: ValueError, listing the known names.
    """
    if name not in FORMATS:
        raise ValueError(f"unknown weight format {name!r}; known: {', '.join(sorted(FORMATS))}")
    return FORMATS[name]
