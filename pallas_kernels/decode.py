"""Inside kernels: packed words -> bfloat16 tiles of weights, ready for a matrix instruction.

One tile is [rows, 64 or 128] weights in ascending k. What it holds is the weight rounded once to
bfloat16 (as `packing.unpack` rounds it), times 2^-shift, a power of two that the caller takes out
again at the end: tiny exponents come free where a level's bits are used as the low bits of an
exponent.

The decoding arithmetic exists twice, for one result. `cuda` keeps two weights in one register and
uses packed bfloat16 instructions (inline assembly). `portable` is plain operations on float32, for
AMD and for emulation. This module does not loop over K and knows no grid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import backend, formats
from pallas_kernels.formats import Format

BLOCK_K = 128
"""Weights of a row that every kernel's block has a multiple of."""

Target = backend.Target

Array: TypeAlias = Any
Refs: TypeAlias = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Raw:
    """What is loaded for [rows, block] weights, before any arithmetic.

    Attributes:
      words: per set, per word group: int32 [rows, sub / 2]. Of iq2_xxs one set: the entries of
        `tables` for both units of eight weights in half a sub-block, and the sign words; int32
        [rows, 8], a column is a sub-block.
      half: int32 scalar; which half of the sub-blocks of iq2_xxs.
      scales, mins, supers: int32 words [rows], in order of their groups.
      tile: float32 [rows], scale of 128 x 128 tiles.
      books: float32 levels [2][levels] of the mix formats.
    """

    words: list[list[Array]]
    scales: tuple[Array, ...] = ()
    mins: tuple[Array, ...] = ()
    supers: tuple[Array, ...] = ()
    tile: Array | None = None
    books: tuple[tuple[Array, ...], ...] = ()
    half: Array = 0


def tile_width(target: Target) -> int:
    """Weights of a row in one tile, by what registers hold; no matter for results."""
    return 64 if target == "rocm" else BLOCK_K


def shift(fmt: Format) -> int:
    """Tiles hold weights times 2^-shift."""
    if fmt.scale == "e8m0":
        return 30
    if fmt.scale == "tile":
        return 0
    return {"nvfp4": 8, "rocmfp4": 8, "rocmfp4_fast": 8, "rocmfp3": 7, "rocmfp8": 1}.get(
        fmt.name, 0
    )


def columns(fmt: Format, target: Target) -> Array | None:
    """Where weights of a tile are, counted from its first, int32 [tile_width]; None: in a row.

    Tiles of iq2_xxs take the same part of each of eight sub-blocks, because the words of these are
    decoded side by side. Their order, 0 4 2 6 1 5 3 7, suits matrix instructions that take eight
    neighbours from a lane: it leaves a lane words that follow one another in memory.
    """
    if fmt.layout:
        return None
    number = jnp.arange(tile_width(target), dtype=jnp.int32)
    run = tile_step(fmt, target)
    div, rem, two = jax.lax.div, jax.lax.rem, jnp.int32(2)
    turn = div(number, jnp.int32(run))
    turned = 4 * rem(turn, two) + 2 * rem(div(turn, two), two) + div(turn, jnp.int32(4))
    return turned * fmt.sub + rem(number, jnp.int32(run))


def tile_step(fmt: Format, target: Target) -> int:
    """Weights of a tile that are neighbours."""
    width = tile_width(target)
    return width if fmt.layout else width // 8


def tile_start(fmt: Format, target: Target, block: Array, tile: int) -> Array:
    """Column of the first weight of a block's tile."""
    at = tile_step(fmt, target) * tile
    if fmt.layout:
        return block * fmt.block + at
    two = jnp.int32(2)
    half = jax.lax.rem(block, two)
    return jax.lax.div(block, two) * (2 * fmt.block) + half * (fmt.sub // 2) + at


def tables(format: str) -> dict[str, npt.NDArray[np.int32]]:
    """What kernels look up to decode a format, by name.

    The entry of an iq2_xxs table row has the even weights in its low half and the odd ones in the
    high half: of pair p bit p where the magnitude is 25, bit 4 + p where it is 43.
    """
    if format != "iq2_xxs":
        return {}
    step = 2 * np.arange(8, dtype=np.int32)
    code = formats.IQ2_GRID[:, None] >> step & 3
    at = step // 4 + 16 * (step // 2 % 2)
    entries = np.sum((code == 1) << at | (code == 2) << (at + 4), 1)
    return {"grid": np.asarray(entries, np.int32)}


def load(
    fmt: Format, refs: Refs, lead: tuple[Any, ...], row: Array, rows: int, block: Array
) -> Raw:
    """Load one block of `rows` rows from `row` on.

    Args:
      refs: references to the arrays of a QuantArray by field name.
      lead: scalar indices of its leading axes.
      row: first row, a multiple of `rows`. block: number of the block.
    """
    at = pl_ds(row, rows)
    if not fmt.layout:
        return _load_iq2(fmt, refs, lead, at, block)
    first = block * fmt.block_words
    groups = [
        _load_group(fmt, refs, lead, at, first, g) for g in range(fmt.sets * fmt.layout.words)
    ]
    per_set = fmt.layout.words
    words = [groups[i : i + per_set] for i in range(0, len(groups), per_set)]

    def column(name: str, per_block: int) -> tuple[Array, ...]:
        return tuple(
            plgpu.load(refs[name].at[(*lead, block * per_block + i, at)]) for i in range(per_block)
        )

    per = fmt.block // fmt.group * fmt.scale_bytes
    if fmt.scale == "f16":
        return Raw(words=words, scales=column("scales", per // 2))
    if fmt.scale == "k":
        # A block of a K format is 128 (q4_k) or 256 weights; its super-block has 256.
        super_ = plgpu.load(refs["supers"].at[(*lead, block * fmt.block // 256, at)])
        mins = column("mins", per // 4) if fmt.name == "q4_k" else ()
        return Raw(words=words, scales=column("scales", per // 4), mins=mins, supers=(super_,))
    if fmt.scale == "tile":
        ref = refs["scales"]
        # 128 rows a tile, or eight in interleaved matrices.
        count, total = ref.shape[-1], refs["codes"].shape[-2]
        run = 128 if count == -(-total // 128) else total // count
        which = (row + jnp.arange(rows, dtype=jnp.int32)) // run
        return Raw(words=words, tile=plgpu.load(ref.at[(*lead, block, which)]))
    books: tuple[tuple[Array, ...], ...] = ()
    if fmt.books:
        books = tuple(
            tuple(
                plgpu.load(refs["books"].at[(*lead, jnp.int32(b), jnp.int32(i))]).astype(
                    jnp.float32
                )
                for i in range(fmt.books)
            )
            for b in (0, 1)
        )
    return Raw(words=words, scales=column("scales", per // 4), books=books)


def _load_group(
    fmt: Format, refs: Refs, lead: tuple[Any, ...], at: Any, first: Array, group: int
) -> Array:
    start = first + fmt.group_words * group
    return plgpu.load(refs["codes"].at[(*lead, at, pl_ds(start, fmt.group_words))])


def _load_iq2(fmt: Format, refs: Refs, lead: tuple[Any, ...], at: Any, block: Array) -> Raw:
    """Looks up the table rows. Two blocks share their words, four a word of scales."""
    two = jnp.int32(2)
    both, half = jax.lax.div(block, two), jax.lax.rem(block, two)
    first = both * (2 * fmt.group_words)
    rows = _load_group(fmt, refs, lead, at, first, 0)
    rows = jax.lax.shift_right_logical(rows, jnp.broadcast_to(16 * half, rows.shape))
    entries = [plgpu.load(refs["grid"].at[_shr(rows, 8 * u) & jnp.int32(255)]) for u in range(2)]
    # Triton decodes in the layout of what is loaded last: here neighbouring words, so that what was
    # looked up changes its layout, once, and nothing else does.
    signs = _load_group(fmt, refs, lead, at, first, 1)
    scales = plgpu.load(refs["scales"].at[(*lead, jax.lax.div(both, two), at)])
    scales = jnp.where(jax.lax.rem(both, two) == 1, _shr(scales, 16), scales)
    return Raw(words=[[*entries, signs]], scales=(scales,), half=half)


def pl_ds(start: Any, size: int) -> Any:
    """Slice of `size` from `start`."""
    return jax.experimental.pallas.ds(start, size)


# --- Arithmetic on pairs: two neighbouring weights of a row ---


def _both(half: int) -> Array:
    """A 16-bit pattern in both halves of an int32."""
    word = (half << 16) | half
    return jnp.int32(word - (1 << 32) if word >> 31 else word)


def _bf16(value: float) -> int:
    """Bits of a value that bfloat16 holds exactly."""
    bits = int(np.float32(value).view(np.uint32))
    if bits & 0xFFFF:
        raise ValueError(f"{value} is no bfloat16")
    return bits >> 16


def _as_f32(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _as_i32(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _asm(code: str, *args: Array) -> Array:
    """One packed instruction on int32 operands."""
    shape = jax.ShapeDtypeStruct(args[0].shape, jnp.int32)
    args = tuple(jnp.broadcast_to(a, shape.shape) for a in args)
    [out] = plgpu.elementwise_inline_asm(
        code,
        args=args,
        constraints="=r" + ",r" * len(args),
        pack=1,
        result_shape_dtypes=[shape],
    )
    return out


Pair: TypeAlias = Any
Scale: TypeAlias = Any


class Cuda:
    """A pair is an int32 word of two bfloat16, a scale such a word with equal halves."""

    def bits(self, word: Array, *, tiny: bool = False) -> Pair:
        """The pair with these bfloat16 bits. tiny: exponents below 4, subnormals among them."""
        del tiny
        return word

    def and_or(self, a: Array, mask: Array, b: Array) -> Array:
        """(a & mask) | b, in one instruction where mask and b are both constants, too."""
        return _asm("lop3.b32 $0, $1, $2, $3, 0xEA;", a, mask, b)

    def shift_add(self, a: Array, left: int, b: Array) -> Array:
        """(a << left) + b, one multiply-add."""
        return _asm("mad.lo.s32 $0, $1, $2, $3;", a, jnp.int32(1 << left), b)

    def times_add(self, a: Array, b: Array, c: Array) -> Array:
        """a * b + c of integers."""
        return _asm("mad.lo.s32 $0, $1, $2, $3;", a, b, c)

    def rounded(self, x: Array) -> Array:
        """The bits of a float32 (no NaN) rounded to bfloat16, in both halves of an int32."""
        return _asm_pack(x, x)

    def mul(self, a: Pair, s: Scale) -> Pair:
        """a * s, rounded to bfloat16."""
        return _asm("mul.rn.bf16x2 $0, $1, $2;", a, s)

    def fma(self, a: Pair, s: Scale, c: Scale) -> Pair:
        """a * s + c, rounded once to bfloat16."""
        return _asm("fma.rn.bf16x2 $0, $1, $2, $3;", a, s, c)

    def sub(self, a: Pair, b: Pair) -> Pair:
        """a - b where that is exact."""
        return _asm("sub.rn.bf16x2 $0, $1, $2;", a, b)

    def clamp(self, a: Pair, half: int) -> Pair:
        """Magnitudes at most the bfloat16 with bits `half`."""
        return _asm("min.xorsign.abs.bf16x2 $0, $1, $2;", a, _both(half))

    def affine_f32(self, a: Pair, s: Array, minus: Array | None) -> Pair:
        """a * s - minus with float32 scales, rounded once to bfloat16."""
        lo, hi = _as_f32(a << 16) * s, _as_f32(a & jnp.int32(-65536)) * s
        if minus is not None:
            lo, hi = lo - minus, hi - minus
        return _asm_pack(lo, hi)

    def choose(self, bits: Array, position: int, a: Scale, b: Scale) -> Pair:
        """Per half: a where bit `position` is set, else b."""
        ones = (_shr(bits, position) & _both(1)) * jnp.int32(0xFFFF)
        return (a & ones) | (b & ~ones)

    def halves(self, a: Pair, *, exact: bool) -> tuple[Array, Array]:
        """The two weights as bfloat16."""
        del exact
        lo, hi = a.astype(jnp.int16), _shr(a, 16).astype(jnp.int16)
        as_bf16 = jax.lax.bitcast_convert_type
        return as_bf16(lo, jnp.bfloat16), as_bf16(hi, jnp.bfloat16)

    def constant(self, value: float) -> Scale:
        """A number that bfloat16 holds exactly."""
        return _both(_bf16(value))

    def times(self, s: Scale, value: float) -> Scale:
        """s * value."""
        return self.mul(s, self.constant(value))

    def signed(self, s: Scale, flag: Scale) -> Scale:
        """s with the sign bit of `flag`."""
        return s | flag

    def bits_of(self, s: Scale) -> Array:
        """The bfloat16 bits of a scale in both halves of an int32."""
        return s

    def level(self, value: Array) -> Scale:
        """A float32 scalar (a bfloat16 value) as a scale."""
        top = _as_i32(value) & jnp.int32(-65536)
        return top | _shr(top, 16)

    def e5m3(self, words: Sequence[Array], *, up: int, unit: float = 1.0) -> list[Scale]:
        """Scales of device bytes times `unit`: value * 2^(32 * up - 105).

        With up > 0 a zero byte is not 0.
        """
        mask, fixed = _both(0x0FF0), _both(up << 12)
        put = (lambda w: self.and_or(w, mask, fixed)) if up else (lambda w: w & mask)
        even, odd = [put(w << 4) for w in words], [put(_shr(w, 4)) for w in words]
        if unit != 1.0:
            even, odd = ([self.times(x, unit) for x in part] for part in (even, odd))
        return _broadcast_halves(even, odd)

    def ue4m3(self, words: Sequence[Array]) -> list[Scale]:
        """Scales of UE4M3 bytes without bit 7, value as it is."""
        even = [self.times((w << 4) & _both(0x07F0), 2.0**119) for w in words]
        odd = [self.times(_shr(w, 4) & _both(0x07F0), 2.0**119) for w in words]
        return _broadcast_halves(even, odd)

    def flags(self, words: Sequence[Array]) -> list[Scale]:
        """Bit 7 of the bytes as a sign bit."""
        even = [(w << 8) & _both(0x8000) for w in words]
        odd = [w & _both(0x8000) for w in words]
        return _broadcast_halves(even, odd)

    def e8m0(self, words: Sequence[Array], up: int) -> list[Scale]:
        """2^(e - 127 + up); 0 for e = 0, infinity past the range."""
        even = [self.times((w << 7) & _both(0x7F80), 2.0**up) for w in words]
        odd = [self.times(_shr(w, 1) & _both(0x7F80), 2.0**up) for w in words]
        return _broadcast_halves(even, odd)


class Portable:
    """A pair is (low, high) in float32, rounded at the end; a scale is float32."""

    def __init__(self, *, flush_safe: bool) -> None:
        # Emulation on a CPU flushes float32 subnormals: tiny pairs are kept times 2^64 there.
        self._up = 64 if flush_safe else 0

    def bits(self, word: Array, *, tiny: bool = False) -> Pair:
        """As `Cuda.bits`."""
        lo, hi = word << 16, word & jnp.int32(-65536)
        if not (tiny and self._up):
            return _as_f32(lo), _as_f32(hi), 0
        return self._lifted(lo), self._lifted(hi), self._up

    def _lifted(self, bits: Array) -> Array:
        mag = bits & jnp.int32(0x7FFFFFFF)
        small = _shr(mag, 16).astype(jnp.float32) * jnp.float32(2.0 ** (self._up - 133))
        value = jnp.where(mag < 0x00800000, small, _as_f32(mag) * jnp.float32(2.0**self._up))
        return jnp.where(bits < 0, -value, value)

    def and_or(self, a: Array, mask: Array, b: Array) -> Array:
        """As `Cuda.and_or`."""
        return (a & mask) | b

    def shift_add(self, a: Array, left: int, b: Array) -> Array:
        """As `Cuda.shift_add`."""
        return (a << left) + b

    def times_add(self, a: Array, b: Array, c: Array) -> Array:
        """As `Cuda.times_add`."""
        # Says again what a change of layout hides: a multiplication of 24 bits will do.
        return a * (b & jnp.int32(0x7FFF)) + c

    def rounded(self, x: Array) -> Array:
        """As `Cuda.rounded`."""
        bits = _as_i32(x)
        top = (bits + jnp.int32(0x7FFF) + (_shr(bits, 16) & jnp.int32(1))) & jnp.int32(-65536)
        return top | _shr(top, 16)

    def mul(self, a: Pair, s: Scale) -> Pair:
        """As `Cuda.mul`, rounded later."""
        lo, hi, up = a
        s = s * jnp.float32(2.0**-up) if up else s
        return lo * s, hi * s, 0

    def fma(self, a: Pair, s: Scale, c: Scale) -> Pair:
        """As `Cuda.fma`, rounded later; a * s is exact in float32."""
        lo, hi, up = self.mul(a, s)
        return lo + c, hi + c, up

    def sub(self, a: Pair, b: Pair) -> Pair:
        """As `Cuda.sub`."""
        return a[0] - b[0], a[1] - b[1], a[2]

    def clamp(self, a: Pair, half: int) -> Pair:
        """As `Cuda.clamp`."""
        lo, hi, up = a
        top = float(np.uint32(half << 16).view(np.float32)) * 2.0**up
        return jnp.clip(lo, -top, top), jnp.clip(hi, -top, top), up

    def affine_f32(self, a: Pair, s: Array, minus: Array | None) -> Pair:
        """As `Cuda.affine_f32`."""
        lo, hi, up = self.mul(a, s)
        return (lo, hi, up) if minus is None else (lo - minus, hi - minus, up)

    def choose(self, bits: Array, position: int, a: Scale, b: Scale) -> Pair:
        """As `Cuda.choose`."""
        lo = (bits & jnp.int32(1 << position)) != 0
        hi = (bits & _both(1 << position) & jnp.int32(-65536)) != 0
        a_lo, a_hi = (a[0], a[1]) if isinstance(a, tuple) else (a, a)
        b_lo, b_hi = (b[0], b[1]) if isinstance(b, tuple) else (b, b)
        return jnp.where(lo, a_lo, b_lo), jnp.where(hi, a_hi, b_hi), 0

    def halves(self, a: Pair, *, exact: bool) -> tuple[Array, Array]:
        """The two weights as bfloat16. exact: they are bfloat16 values already."""
        if not exact:
            return a[0].astype(jnp.bfloat16), a[1].astype(jnp.bfloat16)
        tops = [_shr(_as_i32(x), 16).astype(jnp.int16) for x in a[:2]]
        lo, hi = (jax.lax.bitcast_convert_type(t, jnp.bfloat16) for t in tops)
        return lo, hi

    def constant(self, value: float) -> Scale:
        """A number."""
        return jnp.float32(value)

    def times(self, s: Scale, value: float) -> Scale:
        """s * value."""
        return s * jnp.float32(value)

    def signed(self, s: Scale, flag: Scale) -> Scale:
        """s with the sign bit of `flag`."""
        return _as_f32(_as_i32(s) | flag)

    def bits_of(self, s: Scale) -> Array:
        """As `Cuda.bits_of`."""
        top = _as_i32(s) & jnp.int32(-65536)
        return top | _shr(top, 16)

    def level(self, value: Array) -> Scale:
        """A float32 scalar as a scale."""
        return value

    def _bytes(self, words: Sequence[Array]) -> list[Array]:
        return [_shr(w, 8 * i) & jnp.int32(255) for w in words for i in range(4)]

    def e5m3(self, words: Sequence[Array], *, up: int, unit: float = 1.0) -> list[Scale]:
        """As `Cuda.e5m3`."""
        scales = [_as_f32((b << 20) | jnp.int32(up << 28)) for b in self._bytes(words)]
        return scales if unit == 1.0 else [self.times(s, unit) for s in scales]

    def ue4m3(self, words: Sequence[Array]) -> list[Scale]:
        """As `Cuda.ue4m3`."""
        out = []
        for b in self._bytes(words):
            b = b & jnp.int32(127)
            normal = _as_f32((b << 20) + jnp.int32(119 << 23))
            out.append(jnp.where(b < 8, b.astype(jnp.float32) * jnp.float32(2.0**-10), normal))
        return out

    def flags(self, words: Sequence[Array]) -> list[Scale]:
        """Bit 7 of the bytes as the sign bit of a float32."""
        return [(b << 24) & jnp.int32(-(1 << 31)) for b in self._bytes(words)]

    def e8m0(self, words: Sequence[Array], up: int) -> list[Scale]:
        """As `Cuda.e8m0`."""
        return [_as_f32(b << 23) * jnp.float32(2.0**up) for b in self._bytes(words)]


Arith: TypeAlias = Cuda | Portable


def _broadcast_halves(even: Sequence[Array], odd: Sequence[Array]) -> list[Scale]:
    """Pairs of bytes (0, 2) and (1, 3) of each word -> scales in byte order."""
    out: list[Scale] = []
    for e, o in zip(even, odd, strict=True):
        for selector in ("0x1010", "0x3232"):
            out.extend(_asm(f"prmt.b32 $0, $1, $1, {selector};", p) for p in (e, o))
    return out


def _asm_pack(lo: Array, hi: Array) -> Array:
    [out] = plgpu.elementwise_inline_asm(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        args=[lo, hi],
        constraints="=r,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(lo.shape, jnp.int32)],
    )
    return out


def _shr(w: Array, n: int) -> Array:
    """Logical shift right."""
    return jax.lax.shift_right_logical(w, jnp.broadcast_to(jnp.int32(n), w.shape)) if n else w


def _move(w: Array, left: int) -> Array:
    """Shift left, or right if negative."""
    return w << left if left > 0 else _shr(w, -left)


# --- One sub-block per field ---


Segments = tuple[tuple[int, int], ...]
"""Where code bits go: (first code bit, half-word position of it), highest code bit first."""


def _place(fmt: Format, raw: Raw, i: int) -> tuple[list[Array], tuple[formats.Run, ...]]:
    """Words of the set that holds sub-block `i`, and its runs in them."""
    if fmt.layout is None:
        raise ValueError(f"{fmt.name} has no field layout")
    fields = fmt.layout.fields
    return raw.words[i // len(fields)], fields[i % len(fields)]


def _field(
    arith: Arith, fmt: Format, raw: Raw, i: int, segments: Segments, fixed: int = 0
) -> Array:
    """Code bits of sub-block `i` at new places, with constant half-word bits added."""
    words, runs = _place(fmt, raw, i)
    out: Array | None = _both(fixed) if fixed else None
    for (word, left), mask in _moves(runs, segments).items():
        part = _move(words[word], left)
        out = part & _both(mask) if out is None else arith.and_or(part, _both(mask), out)
    return out


def _gathered(arith: Arith, fmt: Format, words: list[Array]) -> list[Array]:
    """The word groups that the layout puts together from those of a set."""
    out = []
    for pieces in fmt.layout.gathered if fmt.layout else ():
        parts = [(_shr(words[source], right), _both(mask)) for source, right, mask in pieces]
        word = parts[0][0] & parts[0][1]
        for part, mask in parts[1:]:
            word = arith.and_or(part, mask, word)
        out.append(word)
    return out


def _moves(runs: Sequence[formats.Run], segments: Segments) -> dict[tuple[int, int], int]:
    """Runs as {(word group, shift left): mask after the shift}; equal shifts together."""
    moves: dict[tuple[int, int], int] = {}
    for word, low, n, pos in runs:
        start, to = next((b, p) for b, p in segments if low >= b)
        to += low - start
        key = (word, to - pos)
        moves[key] = moves.get(key, 0) | ((1 << n) - 1) << to
    return moves


def tiles(fmt: Format, raw: Raw, target: Target) -> Iterator[tuple[Array, Array | None]]:
    """Tiles [rows, tile_width] of a loaded block in ascending k, each decoded when it is asked for.

    Their weights are neighbours unless `columns` says otherwise.

    Yields: (bfloat16 tile, float32 [rows] factor of the product with this tile, or None).
    """
    arith: Arith = Cuda() if target == "cuda" else Portable(flush_safe=target == "interpret")
    if not fmt.layout:
        yield from ((tile, None) for tile in _tiles_iq2(raw, arith, tile_step(fmt, target)))
        return
    raw = dataclasses.replace(
        raw, words=[[*set_, *_gathered(arith, fmt, set_)] for set_ in raw.words]
    )
    pair, exact = _PAIRS[fmt.name](fmt, raw, arith), fmt.name in _EXACT
    per = tile_width(target) // fmt.sub
    for first in range(0, fmt.block // fmt.sub, per):
        parts = []
        for i in range(first, first + per):
            lo, hi = arith.halves(pair(i), exact=exact)
            parts.append(jnp.stack([lo, hi], -1).reshape(lo.shape[0], fmt.sub))
        yield _side_by_side(parts), raw.tile


def _side_by_side(parts: Sequence[Array]) -> Array:
    """[rows, n] each, a power of two of them -> [rows, parts * n], part after part."""
    rows, n = parts[0].shape
    count, depth = len(parts), 0
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [jnp.stack([parts[i], parts[i + half]], -1) for i in range(half)]
        depth += 1
    # Axes now: row, weight, then the bits of the part's number, highest first.
    order = (0, *range(2, depth + 2), 1)
    return jnp.transpose(parts[0], order).reshape(rows, count * n)


_Pairs = Callable[[int], Pair]
"""Decodes sub-block i of a block."""


def _pairs_fp4(fmt: Format, raw: Raw, arith: Arith) -> _Pairs:
    """E2M1 bits as the low bits of a bfloat16 exponent: value * 2^-126."""
    e8m0 = fmt.scale == "e8m0"
    scales = arith.e8m0(raw.scales, 96) if e8m0 else arith.e5m3(raw.scales, up=7)

    def pair(i: int) -> Pair:
        p = arith.bits(_field(arith, fmt, raw, i, ((3, 15), (0, 6))), tiny=True)
        if fmt.name.startswith("rocmfp4"):
            # The largest level is 10, not 12: 5 * 2^-126 in E2M1 units.
            p = arith.clamp(p, 0x01A0)
        return arith.mul(p, scales[i][:, None])

    return pair


def _pairs_rocmfp3(fmt: Format, raw: Raw, arith: Arith) -> _Pairs:
    """Magnitudes 0, 1, 2, 4 are exponents 0..3: level * 2^-126."""
    scales = arith.e5m3(raw.scales, up=7)

    def pair(i: int) -> Pair:
        bits = _field(arith, fmt, raw, i, ((2, 15), (0, 7)))
        return arith.mul(arith.bits(bits, tiny=True), scales[i][:, None])

    return pair


def _pairs_s40(fmt: Format, raw: Raw, arith: Arith) -> _Pairs:
    """Sign and a step of 2 in the exponent (level 4 or 1), added to the bits of the scale."""
    scales = [arith.bits_of(s) for s in arith.e5m3(raw.scales, up=0, unit=2.0**105)]

    def pair(i: int) -> Pair:
        words, runs = _place(fmt, raw, i)
        bits = scales[i][:, None]
        for (word, left), mask in _moves(runs, ((1, 15), (0, 8))).items():
            bits = arith.shift_add(words[word] & _both(mask >> left), left, bits)
        return arith.bits(bits)

    return pair


def _pairs_linear2(fmt: Format, raw: Raw, arith: Arith) -> _Pairs:
    """Codes in the mantissa: (4 + code) s - 5 s."""
    if fmt.name == "rocmfp2_signed":
        flags = arith.flags(raw.scales)
        scales = [arith.signed(s, f) for s, f in zip(arith.ue4m3(raw.scales), flags, strict=True)]
        x, unit = 2, 1.0
    else:
        scales = arith.e5m3(raw.scales, up=0)
        x, unit = 107, 2.0**105

    def pair(i: int) -> Pair:
        bits = _field(arith, fmt, raw, i, ((0, 5),), (x + 127) << 7)
        minus = arith.times(scales[i], -5.0 * unit)
        return arith.fma(arith.bits(bits), scales[i][:, None], minus[:, None])

    return pair


def _pairs_affine(fmt: Format, raw: Raw, arith: Arith) -> _Pairs:
    """code * s - o, both of a sub-block."""
    fixed = (107 + 127) << 7
    one = arith.bits(_both(fixed))
    scales = arith.e5m3(raw.scales, up=0)

    def pair(i: int) -> Pair:
        code = arith.sub(arith.bits(_field(arith, fmt, raw, i, ((0, 5),), fixed)), one)
        offset = arith.times(scales[2 * i + 1], -(2.0**105))
        return arith.fma(code, scales[2 * i][:, None], offset[:, None])

    return pair


def _pairs_rocmfp6(fmt: Format, raw: Raw, arith: Arith) -> _Pairs:
    """(128 + code) s - 160 s."""
    scales = arith.e5m3(raw.scales, up=0)

    def pair(i: int) -> Pair:
        bits = _field(arith, fmt, raw, i, ((0, 0),), (105 + 7 + 127) << 7)
        minus = arith.times(scales[i], -160.0 * 2.0**105)
        return arith.fma(arith.bits(bits), scales[i][:, None], minus[:, None])

    return pair


def _byte(raw: Raw, i: int) -> Array:
    """Words with the bytes of sub-block `i` of an eight-bit format lowest in each half."""
    return _move(raw.words[i // 2][0], -8 * (i % 2))


def _signed_byte(raw: Raw, i: int, arith: Arith, exponent: int) -> Pair:
    """int8 codes times 2^(exponent - 7); `exponent` odd, so that bit 7 can double 2^exponent."""
    fixed = _both((exponent + 127) << 7)
    byte = _byte(raw, i)
    value = arith.bits(arith.and_or(byte, _both(0x7F), fixed))
    return arith.sub(value, arith.bits(arith.and_or(byte, _both(0x80), fixed)))


def _pairs_rocmfp8(fmt: Format, raw: Raw, arith: Arith) -> _Pairs:
    del fmt
    scales = arith.e5m3(raw.scales, up=0)
    return lambda i: arith.mul(_signed_byte(raw, i, arith, 111), scales[i][:, None])


def _f16_halves(words: Sequence[Array]) -> list[Array]:
    """Two float16 per word -> float32."""
    out = []
    for w in words:
        for part in (w, _shr(w, 16)):
            half = jax.lax.bitcast_convert_type(part.astype(jnp.int16), jnp.float16)
            out.append(half.astype(jnp.float32))
    return out


def _pairs_q8_0(fmt: Format, raw: Raw, arith: Arith) -> _Pairs:
    del fmt
    scales = _f16_halves(raw.scales)
    return lambda i: arith.affine_f32(_signed_byte(raw, i, arith, 7), scales[i][:, None], None)


def _pairs_k(fmt: Format, raw: Raw, arith: Arith) -> _Pairs:
    """(d * scale) * code - dmin * min."""
    d, dmin = _f16_halves(raw.supers)
    by = [_shr(w, 8 * i) for w in raw.scales for i in range(4)]
    if fmt.name == "q2_k":
        scale = [b & jnp.int32(15) for b in by]
        low = [_shr(b, 4) & jnp.int32(15) for b in by]
    else:
        scale = [b & jnp.int32(255) for b in by]
        low = [_shr(w, 8 * i) & jnp.int32(255) for w in raw.mins for i in range(4)]
    base = arith.bits(_both(_bf16(128.0)))

    def pair(i: int) -> Pair:
        s, minus = d * scale[i].astype(jnp.float32), dmin * low[i].astype(jnp.float32)
        bits = _field(arith, fmt, raw, i, ((0, 0),), _bf16(128.0))
        return arith.affine_f32(arith.sub(arith.bits(bits), base), s[:, None], minus[:, None])

    return pair


def _pairs_mix(fmt: Format, raw: Raw, arith: Arith) -> _Pairs:
    """Levels from the code book that bit 7 of the scale byte names."""
    scales = arith.ue4m3(raw.scales)
    second = [_shr(w, 8 * i + 7) & jnp.int32(1) for w in raw.scales for i in range(4)]
    books = [[arith.level(x) for x in book] for book in raw.books]

    def pair(i: int) -> Pair:
        code = _field(arith, fmt, raw, i, ((0, 0),))
        other = second[i] == 1
        levels = [jnp.where(other, b, a)[:, None] for a, b in zip(*books, strict=True)]
        for bit in range(fmt.bits):
            levels = [
                arith.choose(code, bit, levels[j + 1], levels[j]) for j in range(0, len(levels), 2)
            ]
        return arith.mul(levels[0], scales[i][:, None])

    return pair


def _pairs_hf_fp8(fmt: Format, raw: Raw, arith: Arith) -> _Pairs:
    """E4M3 bits four places up: value * 2^-120. The tile scale multiplies the product."""
    del fmt
    one = arith.constant(2.0**120)

    def pair(i: int) -> Pair:
        byte = _byte(raw, i)
        bits = arith.and_or(byte << 4, _both(0x07F0), (byte << 8) & _both(0x8000))
        return arith.mul(arith.bits(bits, tiny=True), one)

    return pair


def _tiles_iq2(raw: Raw, arith: Arith, run: int) -> Iterator[Array]:
    """Tiles of `run` weights of each of the eight sub-blocks.

    A sub-block has three magnitudes only: they are rounded once, and weights choose among their
    bits: the smallest, plus the difference to one of the others.
    """
    *entries, signs = raw.words[0]
    d = _as_i32(_f16_halves(raw.scales)[0])[:, None]
    # |d| (s + 0.5) / 4 times 8; times a magnitude that has 22 significant bits: float32 is exact.
    odd = _shr(signs, 27) & jnp.int32(30) | jnp.int32(1)
    eight = _as_f32(d & jnp.int32(0x7FFFFFFF)) * odd.astype(jnp.float32)
    low, middle, high = (arith.rounded(eight * jnp.float32(m / 8)) for m in (8, 25, 43))
    middle, high = ((level - low) & jnp.int32(0x7FFF) for level in (middle, high))
    known = signs & jnp.int32((1 << 28) - 1)
    eighth = known ^ _shr(known, 16)
    eighth = eighth ^ _shr(eighth, 8)
    eighth = eighth ^ _shr(eighth, 4)
    signs = (known | eighth << 28) ^ (d >> 31)
    signs = jax.lax.shift_right_logical(signs, jnp.broadcast_to(2 * raw.half, signs.shape))

    def terms(k: int) -> tuple[Array, Array]:
        """Of weights k and k + 1 of the half: two words whose sum is the pair."""
        unit, p = k // 8, k % 8 // 2
        first, second = (_shr(entries[unit], shift) & _both(1) for shift in (p, 4 + p))
        sign = signs << (15 - 4 * p - unit)
        word = arith.times_add(first, middle, low)
        return arith.and_or(sign, _both(0x8000), word), second * high

    for first in range(0, 16, run):
        both = zip(*map(terms, range(first, first + run, 2)), strict=True)
        # Summed as an axis: else RDNA 3 decodes in the layout of the product, twice over.
        words = jnp.sum(jnp.stack([_joined(part) for part in both], -1), -1)
        weights = jnp.stack(arith.halves(arith.bits(words), exact=True), -1)
        # The bits of the number of the sub-block in reverse: see `columns`.
        weights = weights.reshape(weights.shape[0], 2, 2, 2, run)
        yield jnp.transpose(weights, (0, 3, 2, 1, 4)).reshape(weights.shape[0], -1)


def _joined(parts: Sequence[Array]) -> Array:
    """[rows, n] each, a power of two of them -> [rows, n, 2, ...]: [rows, n, parts] reshaped."""
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [jnp.stack([parts[i], parts[i + half]], -1) for i in range(half)]
    return parts[0]


_PAIRS: dict[str, Callable[[Format, Raw, Arith], _Pairs]] = {
    "q8_0": _pairs_q8_0,
    "q4_k": _pairs_k,
    "q2_k": _pairs_k,
    "mxfp4": _pairs_fp4,
    "hf_fp4_e2m1": _pairs_fp4,
    "nvfp4": _pairs_fp4,
    "rocmfp4": _pairs_fp4,
    "rocmfp4_fast": _pairs_fp4,
    "rocmfp6": _pairs_rocmfp6,
    "rocmfp8": _pairs_rocmfp8,
    "rocmfp3": _pairs_rocmfp3,
    "rocmfp3_mix": _pairs_mix,
    "rocmfp2_mix": _pairs_mix,
    "rocmfp2_s40": _pairs_s40,
    "rocmfp2_m1012": _pairs_linear2,
    "rocmfp2_signed": _pairs_linear2,
    "rocmfp2_affine": _pairs_affine,
    "hf_fp8_e4m3_block128": _pairs_hf_fp8,
}

_EXACT = frozenset(
    n for n in _PAIRS if _PAIRS[n] in (_pairs_fp4, _pairs_rocmfp3, _pairs_s40, _pairs_hf_fp8)
) | {"rocmfp2_m1012", "rocmfp2_signed"}
"""Formats whose weights bfloat16 holds exactly."""

DECODABLE: frozenset[str] = frozenset({*_PAIRS, "iq2_xxs"})
"""Formats that kernels can decode."""
