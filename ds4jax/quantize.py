"""Encoding of float32 weights into the block formats, byte for byte as their writers do it.

NumPy only. The ROCmFP formats search every scale byte for the least squared error of a group,
optionally weighted by an importance vector (imatrix); all arithmetic is float32 and sums run in
index order, so the bytes equal those of the reference quantisers. Decoding is `ds4jax.quant`.

Shape letters here: R row, W weight of a row, N group of weights with one scale, L place in a group,
B block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4jax import formats
from ds4jax.formats import F32, FORMATS, I8, U8, Format

IntArray = npt.NDArray[np.intp]

CHUNK_WEIGHTS = 1 << 17
"""Weights encoded at a time; the search works on arrays of this size."""

MAX_SCALE_BYTE = 126
_BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))
_VALUE = formats.SCALE_UE4M3
with np.errstate(divide="ignore"):
    _INVERSE = np.where(_VALUE > 0, np.float32(1) / _VALUE, np.float32(0)).astype(np.float32)


# Rules from a scaled weight to its level ---------------------------------------------------------


def _snap_rocmfp4(a: F32) -> None:
    """Magnitudes to the nearest of 0 1 2 3 4 6 8 10, ties to the smaller, in place."""
    coarse = np.ceil(a * np.float32(0.5) - np.float32(0.5))
    coarse -= np.float32(2)
    np.clip(coarse, np.float32(0), np.float32(3), out=coarse)
    _snap_half_down(a, np.float32(4))
    coarse += coarse
    a += coarse


def _snap_half_down(a: F32, top: np.float32) -> None:
    a -= np.float32(0.5)
    np.ceil(a, out=a)
    np.minimum(a, top, out=a)


def _snap_rocmfp3(a: F32) -> None:
    """Magnitudes to 0 1 2 4 with thresholds 0.5 1.5 3, ties to the smaller, in place."""
    outer = np.greater(a, np.float32(3)).astype(np.float32)
    _snap_half_down(a, np.float32(2))
    outer += outer
    a += outer


def _snap_s40(a: F32) -> None:
    """Magnitudes to 1, or to 4 above 2.5, in place."""
    np.greater(a, np.float32(2.5), out=a)
    a *= np.float32(3)
    a += np.float32(1)


def _snap_rocmfp6(y: F32) -> None:
    """Signed values to the nearest integer in -32..31, halves away from zero, in place."""
    rounded = np.floor(np.abs(y) + _BELOW_HALF)
    np.copysign(rounded, y, out=y)
    np.clip(y, np.float32(-32), np.float32(31), out=y)


def _snap_rocmfp8(a: F32) -> None:
    """Magnitudes to the nearest integer up to 127, halves up, in place."""
    a += _BELOW_HALF
    np.floor(a, out=a)
    np.minimum(a, np.float32(127), out=a)


def _snap_fixed(y: F32) -> None:
    """Signed values to the nearest of -1 0 1 2, ties to the lower, in place."""
    above = [np.greater(y, np.float32(t)) for t in (-0.5, 0.5, 1.5)]
    np.copyto(y, np.float32(-1))
    for part in above:
        y += part


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """How one format turns scaled weights into codes, and where its scale search starts."""

    group: int  # weights per scale
    top: float  # largest level: the search starts at max|x| / top
    snap: Callable[[F32], None]  # in place: scaled weights (magnitudes unless `signed`) to levels
    signed: bool
    levels: I8  # in code order
    empty_code: int = 0  # weights that are not finite, groups of zeros


_RULES: dict[str, _Rule] = {
    "rocmfp4": _Rule(
        group=16, top=10, snap=_snap_rocmfp4, signed=False, levels=formats.LEVELS_ROCMFP4
    ),
    "rocmfp4_fast": _Rule(
        group=32, top=10, snap=_snap_rocmfp4, signed=False, levels=formats.LEVELS_ROCMFP4
    ),
    "rocmfp6": _Rule(
        group=16, top=31, snap=_snap_rocmfp6, signed=True, levels=formats.LEVELS_ROCMFP6
    ),
    "rocmfp8": _Rule(
        group=32, top=127, snap=_snap_rocmfp8, signed=False,
        levels=np.array([*range(128), *range(-128, 0)], np.int8),
    ),
    "rocmfp3": _Rule(
        group=16, top=4, snap=_snap_rocmfp3, signed=False, levels=formats.LEVELS_ROCMFP3
    ),
    "rocmfp2_s40": _Rule(
        group=16, top=4, snap=_snap_s40, signed=False, levels=formats.LEVELS_S40
    ),
    "rocmfp2_m1012": _Rule(
        group=16, top=2, snap=_snap_fixed, signed=True, levels=formats.LEVELS_FIXED, empty_code=1
    ),
}  # fmt: skip


def nearest_scale(target: F32) -> IntArray:
    """Scale byte in 1..126 whose value is nearest, ties to the smaller; 0 for targets <= 0.

    Args:
        target: float32, any shape; not finite counts as 0.
    """
    values = _VALUE[: MAX_SCALE_BYTE + 1]
    usable = np.isfinite(target) & (target > 0)
    clean = np.where(usable, target, np.float32(1))
    above = np.clip(np.searchsorted(values, clean), 2, MAX_SCALE_BYTE)
    nearer = np.abs(values[above] - clean) < np.abs(values[above - 1] - clean)
    return np.where(usable, above - 1 + nearer, 0)


# Search over scale bytes -------------------------------------------------------------------------


@dataclass
class _Side:
    """Groups still being searched in one direction, compacted as they drop out."""

    which: IntArray  # [N] place in the whole
    x_LN: F32
    weight_LN: F32 | None
    largest_N: F32
    start_N: IntArray

    def keep(self, mask: npt.NDArray[np.bool_]) -> _Side:
        """The groups under `mask`; the same object while most of them remain."""
        return _Side(
            self.which[mask],
            np.ascontiguousarray(self.x_LN[:, mask]),
            None if self.weight_LN is None else np.ascontiguousarray(self.weight_LN[:, mask]),
            self.largest_N[mask],
            self.start_N[mask],
        )


def _error(rule: _Rule, side: _Side, byte_N: IntArray) -> F32:
    """float32[N]: weighted squared error of every group at its scale byte, summed in order."""
    level = side.x_LN * _INVERSE[byte_N]
    rule.snap(level)
    level *= _VALUE[byte_N]
    np.subtract(side.x_LN, level, out=level)
    level *= level if side.weight_LN is None else side.weight_LN * level
    return sum_in_order(level)


def sum_in_order(x_LN: F32) -> F32:
    """Sums over the first axis, term after term (NumPy adds pairwise along a contiguous axis)."""
    if x_LN.shape[1] == 1:
        return np.asarray(np.add.accumulate(x_LN, axis=0)[-1])
    return np.asarray(np.add.reduce(x_LN, axis=0))


def _search(rule: _Rule, x_LN: F32, weight_LN: F32 | None) -> IntArray:
    """Scale byte of every group with the least error; equal errors go to the smaller byte.

    The order is the reference's: start at max|x| / top, then one down, one up, two down and so on;
    downwards a group stops for good where clipping its largest weight alone costs more than the
    best found. Upwards it stops where larger scales cannot give less: all levels are 0, or (no
    zero level) every weight has the inner level and lies below it.
    """
    magnitude = np.abs(x_LN)
    place = np.argmax(magnitude, axis=0)
    column = np.arange(x_LN.shape[1])
    largest = magnitude[place, column]
    weight_of_largest = None if weight_LN is None else weight_LN[place, column]
    best = np.full(x_LN.shape[1], np.inf, np.float32)
    best_byte = np.full(x_LN.shape[1], MAX_SCALE_BYTE + 1, np.intp)
    top = np.float32(rule.top)
    start = np.maximum(nearest_scale(largest / top), 1)
    whole = _Side(column, x_LN if rule.signed else magnitude, weight_LN, largest, start)
    whole = whole if (largest > 0).all() else whole.keep(largest > 0)

    def visit(side: _Side, byte_N: IntArray, live: npt.NDArray[np.bool_] | None) -> None:
        error = _error(rule, side, byte_N)
        old, old_byte = best[side.which], best_byte[side.which]
        better = (error < old) | ((error == old) & (byte_N < old_byte))
        if live is not None:
            better &= live
        best[side.which] = np.where(better, error, old)
        best_byte[side.which] = np.where(better, byte_N, old_byte)

    visit(whole, whole.start_N, None)
    down = up = whole
    least = np.float32(1 if rule.levels.all() else 0.5)
    for step in range(1, MAX_SCALE_BYTE):
        if len(down.which):
            byte = down.start_N - step
            clipped = down.largest_N - top * _VALUE[np.maximum(byte, 0)]
            cost = clipped * clipped
            if weight_of_largest is not None:
                cost = weight_of_largest[down.which] * clipped * clipped
            live = (byte >= 1) & ~((clipped > 0) & (cost > best[down.which]))
            down, byte = down.keep(live), byte[live]
            if len(byte):
                visit(down, byte, None)
        if len(up.which):
            byte = up.start_N + step
            below = up.largest_N * _INVERSE[byte - 1] < least
            live = (byte <= MAX_SCALE_BYTE) & ~below
            up, byte = up.keep(live), byte[live]
            if len(byte):
                visit(up, byte, None)
        if not len(down.which) and not len(up.which):
            break
    best_byte[best_byte > MAX_SCALE_BYTE] = MAX_SCALE_BYTE
    return np.where(largest > 0, best_byte, 0)


# Importance --------------------------------------------------------------------------------------


def _importance(rows_RW: F32, imatrix_W: F32) -> F32:
    """float32[R, W]: v * sqrt(mean(x^2) + x^2), 0 where v is not finite and positive."""
    square = np.where(np.isfinite(rows_RW), rows_RW, np.float32(0))
    square = square * square
    count = np.maximum(np.isfinite(rows_RW).sum(axis=1), 1).astype(np.float32)
    mean = sum_in_order(np.ascontiguousarray(square.T)) / count
    usable = np.where(np.isfinite(imatrix_W) & (imatrix_W > 0), imatrix_W, np.float32(0))
    return np.asarray(usable * np.sqrt(mean[:, None] + square))


def _by_group(rows_RW: F32, group: int) -> F32:
    """float32[L, N]: groups as columns, so that one operation serves all of them."""
    return np.ascontiguousarray(rows_RW.reshape(-1, group).T)


# Packing -----------------------------------------------------------------------------------------


def _pack_nibbles(codes_BW: U8) -> U8:
    packed: U8 = codes_BW[:, :16] | codes_BW[:, 16:] << np.uint8(4)
    return packed


def pack_bits(codes_BW: U8, width: int) -> U8:
    """Codes as one little-endian bit string per block (32 codes of 2, 3 or 6 bits)."""
    per_word = 4 if width == 2 else 24 // width
    word = np.zeros((len(codes_BW), 32 // per_word), np.uint32)
    for i in range(per_word):
        word |= codes_BW[:, i::per_word].astype(np.uint32) << np.uint32(width * i)
    used = per_word * width // 8
    return word.view(np.uint8).reshape(*word.shape, 4)[:, :, :used].reshape(len(codes_BW), -1)


_PACKERS: dict[str, Callable[[U8], U8]] = {
    "rocmfp4": _pack_nibbles,
    "rocmfp4_fast": _pack_nibbles,
    "rocmfp6": lambda codes: pack_bits(codes, 6),
    "rocmfp8": lambda codes: codes,
    "rocmfp3": lambda codes: pack_bits(codes, 3),
    "rocmfp2_s40": lambda codes: pack_bits(codes, 2),
    "rocmfp2_m1012": lambda codes: pack_bits(codes, 2),
}


def _codes(rule: _Rule, rows_NL: F32, byte_N: IntArray) -> U8:
    """uint8[N, L]: code of every weight at its group's scale."""
    scaled = rows_NL * _INVERSE[byte_N][:, None]
    bad = ~np.isfinite(rows_NL)
    scaled[bad] = 0
    level = scaled if rule.signed else np.abs(scaled)
    rule.snap(level)
    if not rule.signed:
        np.copysign(level, scaled, out=level)
    code_of_level = np.zeros(256, np.uint8)
    code_of_level[rule.levels[::-1].view(np.uint8)] = np.arange(len(rule.levels))[::-1]
    codes = code_of_level[level.astype(np.int8).view(np.uint8)]
    codes[bad] = rule.empty_code
    codes[byte_N == 0] = rule.empty_code
    return codes


def _rocm(fmt: Format, rows_RW: F32, imatrix_W: F32 | None) -> U8:
    rule = _RULES[fmt.name]
    finite = np.isfinite(rows_RW)
    clean = np.where(finite, rows_RW, np.float32(0))
    weight = None if imatrix_W is None else _importance(rows_RW, imatrix_W)
    if weight is None and not finite.all():
        weight = np.ones_like(rows_RW)
    if weight is not None:
        weight[~finite] = 0
    x_LN = _by_group(clean, rule.group)
    if fmt.name == "rocmfp8" and imatrix_W is None:
        byte = nearest_scale(np.abs(x_LN).max(axis=0) / np.float32(127))
    else:
        byte = _search(rule, x_LN, None if weight is None else _by_group(weight, rule.group))
    codes = _codes(rule, rows_RW.reshape(-1, rule.group), byte).reshape(-1, fmt.block)
    scales = byte.astype(np.uint8).reshape(len(codes), -1)
    return np.concatenate((_PACKERS[fmt.name](codes), scales), axis=1)


# Other formats -----------------------------------------------------------------------------------


def _affine(fmt: Format, rows_RW: F32, imatrix_W: F32 | None) -> U8:
    """Type 107 with a scale and an offset per block: three one-dimensional searches in turn."""
    finite = np.isfinite(rows_RW)
    x_LN = _by_group(np.where(finite, rows_RW, np.float32(0)), 32)
    weight = np.ones_like(rows_RW) if imatrix_W is None else _importance(rows_RW, imatrix_W)
    weight[~finite] = 0
    weight_LN = _by_group(weight, 32)
    counted = (weight_LN > 0) | ~(weight_LN > 0).any(axis=0)
    counted &= _by_group(finite.astype(np.float32), 32) > 0
    low = np.where(counted, x_LN, np.float32(np.inf)).min(axis=0)
    high = np.where(counted, x_LN, np.float32(-np.inf)).max(axis=0)
    zero = ~counted.any(axis=0) | ((low == 0) & (high == 0))
    low[zero] = high[zero] = 0
    offset = np.maximum(np.float32(0), -low)
    scale = np.maximum((high + offset) / np.float32(3), np.float32(2.0**-10))
    s, o = nearest_scale(scale), nearest_scale(offset)

    def codes_at(s_N: IntArray, o_N: IntArray) -> F32:
        code = (x_LN + _VALUE[o_N]) / _VALUE[s_N] + np.float32(0.5)
        np.floor(code, out=code)
        return np.clip(code, np.float32(0), np.float32(3), out=code)

    def error(s_N: IntArray, o_N: IntArray) -> F32:
        code = codes_at(s_N, o_N)
        code *= _VALUE[s_N]
        code -= _VALUE[o_N]
        np.subtract(x_LN, code, out=code)
        code *= weight_LN * code
        return sum_in_order(code)

    best = error(s, o)
    for axis, first in ((0, 1), (1, 0), (0, 1)):
        for byte in range(first, MAX_SCALE_BYTE + 1):
            trial = [s, o]
            current = trial[axis]
            trial[axis] = np.full_like(current, byte)
            found = error(trial[0], trial[1])
            better = (found < best) | ((found == best) & (byte < current))
            best = np.where(better, found, best)
            moved = np.where(better, byte, current)
            s, o = (moved, o) if axis == 0 else (s, moved)
    codes = codes_at(s, o)
    codes[~np.isfinite(codes)] = 0
    codes[:, zero] = 0
    s, o = np.where(zero, 0, s), np.where(zero, 0, o)
    packed = pack_bits(np.ascontiguousarray(codes.T).astype(np.uint8), 2)
    return np.concatenate((packed, np.stack((s, o), axis=1).astype(np.uint8)), axis=1)


def _q8_0(rows_RW: F32) -> U8:
    x_BW = rows_RW.reshape(-1, 32)
    scale = np.abs(x_BW).max(axis=1) / np.float32(127)
    inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0)).astype(np.float32)
    level = x_BW * inverse[:, None]
    magnitude = np.abs(level)
    _snap_rocmfp8(magnitude)
    np.copysign(magnitude, level, out=level)
    codes = level.astype(np.int8).view(np.uint8)
    return np.concatenate((scale.astype("<f2")[:, None].view(np.uint8), codes), axis=1)


def _mxfp4(rows_RW: F32) -> U8:
    x_BW = rows_RW.reshape(-1, 32)
    largest = np.abs(x_BW).max(axis=1)
    exponent = np.floor(np.log2(largest.astype(np.float64)).astype(np.float32))
    byte = np.where(largest > 0, np.maximum(exponent - 2 + 127, 0), 0).astype(np.uint8)
    step = np.ldexp(np.float32(1), byte.astype(np.int32) - 128)[:, None]
    magnitude = np.abs(x_BW)
    code = np.zeros(x_BW.shape, np.uint8)
    doubled = formats.LEVELS_FP4[:8].astype(np.float32)
    for low, high in itertools.pairwise(doubled):
        code += magnitude > (low + high) * np.float32(0.5) * step
    code |= ((x_BW < 0) & (code > 0)).astype(np.uint8) << 3
    return np.concatenate((byte[:, None], _pack_nibbles(code)), axis=1)


def _f16(rows_RW: F32) -> U8:
    half = rows_RW.astype("<f2")
    if (np.isinf(half) & np.isfinite(rows_RW)).any():
        largest = float(np.abs(rows_RW[np.isfinite(rows_RW)]).max())
        raise ValueError(f"f16: weight of magnitude {largest:g} is above 65504; use bf16 or f32")
    return half.view(np.uint8)


def _bf16(rows_RW: F32) -> U8:
    bits = np.ascontiguousarray(rows_RW).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    quiet = bits >> 16 | np.uint32(0x40)
    return np.where(np.isnan(rows_RW), quiet, rounded).astype("<u2").view(np.uint8)


def _f32(rows_RW: F32) -> U8:
    return np.ascontiguousarray(rows_RW).astype("<f4").view(np.uint8)


_PLAIN: dict[str, Callable[[F32], U8]] = {
    "q8_0": _q8_0,
    "mxfp4": _mxfp4,
    "f16": _f16,
    "bf16": _bf16,
    "f32": _f32,
}

ENCODABLE = (*_PLAIN, *_RULES, "rocmfp2_affine")
"""Formats that `encode` writes."""

TAKES_IMATRIX = (*_RULES, "rocmfp2_affine")
"""Formats whose search can be weighted by importance; the others refuse an imatrix."""


def encode(format: str, weights: npt.NDArray[Any], imatrix: npt.NDArray[Any] | None = None) -> U8:
    """Pack float32 weights, byte for byte as the reference quantiser of the format does.

    Temporaries are bounded by a few times `CHUNK_WEIGHTS` (or one row, if that is longer).

    Args:
        format: one of `ENCODABLE`.
        weights: float32 [..., n], n a multiple of the format's block. In the ROCmFP formats weights
            that are not finite are left out of the search and become the level nearest to zero.
        imatrix: float32 [n], importance of every input column; values not finite or <= 0 count as
            0. Only for the formats of `TAKES_IMATRIX`.

    Returns: uint8 [..., row bytes].

    Raises:
        ValueError: unknown format, wrong dtype or shape, an imatrix the format has no use for,
            weights that are not finite (q8_0, mxfp4) or above the range (f16).
    """
    if format not in ENCODABLE:
        raise ValueError(f"format {format!r} cannot be written; choose one of {sorted(ENCODABLE)}")
    fmt = FORMATS[format]
    if weights.dtype != np.float32 or weights.ndim == 0:
        raise ValueError(
            f"{format}: weights are {weights.dtype} {weights.shape}, must be float32 [..., n]"
        )
    width = weights.shape[-1]
    row_bytes = fmt.row_bytes(width)
    if imatrix is not None:
        if format not in TAKES_IMATRIX:
            raise ValueError(f"{format}: has no use for an imatrix; {list(TAKES_IMATRIX)} have")
        if imatrix.shape != (width,) or imatrix.dtype != np.float32:
            raise ValueError(
                f"{format}: imatrix is {imatrix.dtype} {imatrix.shape}, must be float32 ({width},)"
            )
    out = np.empty((*weights.shape[:-1], row_bytes), np.uint8)
    if not out.size:
        return out
    rows_RW, target = weights.reshape(-1, width), out.reshape(-1, row_bytes)
    step = max(1, CHUNK_WEIGHTS // width)
    with np.errstate(all="ignore"):
        for i in range(0, len(rows_RW), step):
            target[i : i + step] = _encode_rows(fmt, rows_RW[i : i + step], imatrix).reshape(
                -1, row_bytes
            )
    return out


def _encode_rows(fmt: Format, rows_RW: F32, imatrix_W: F32 | None) -> U8:
    if fmt.name == "rocmfp2_affine":
        return _affine(fmt, rows_RW, imatrix_W)
    if fmt.name in _RULES:
        return _rocm(fmt, rows_RW, imatrix_W)
    if fmt.name in ("q8_0", "mxfp4") and not np.isfinite(rows_RW).all():
        count = int(np.count_nonzero(~np.isfinite(rows_RW)))
        raise ValueError(f"{fmt.name}: {count} weights are not finite; repair the source")
    return _PLAIN[fmt.name](rows_RW)


# Lossless repacking ------------------------------------------------------------------------------


def mxfp4_from_hf(packed: U8, scale_e8m0: U8) -> U8:
    """Published FP4 as GGUF MXFP4: the same nibbles and scales in another order, nothing lost.

    Args:
        packed: uint8 [..., n / 2], low nibble first.
        scale_e8m0: uint8 [..., n / 32].

    Returns: uint8 [..., n / 32 * 17].

    Raises:
        ValueError: if shapes or dtypes disagree.
    """
    lead, groups = packed.shape[:-1], packed.shape[-1] // 16
    if packed.dtype != np.uint8 or packed.shape[-1] % 16:
        raise ValueError(
            f"FP4: packed is {packed.dtype} {packed.shape}, must be uint8 [..., multiple of 16]"
        )
    if scale_e8m0.dtype != np.uint8 or scale_e8m0.shape != (*lead, groups):
        raise ValueError(
            f"FP4: scale is {scale_e8m0.dtype} {scale_e8m0.shape}, must be uint8 {(*lead, groups)}"
        )
    out = np.empty((*lead, groups, 17), np.uint8)
    q = packed.reshape(*lead, groups, 2, 8)
    first, second = q[..., 0, :], q[..., 1, :]
    out[..., 0] = scale_e8m0
    out[..., 1::2] = (first & 15) | second << 4
    out[..., 2::2] = first >> 4 | (second & 0xF0)
    return out.reshape(*lead, groups * 17)


def hf_from_mxfp4(packed: U8) -> tuple[U8, U8]:
    """GGUF MXFP4 as published FP4: the inverse of `mxfp4_from_hf`.

    Args:
        packed: uint8 [..., n / 32 * 17].

    Returns: packed uint8 [..., n / 2] and scale_e8m0 uint8 [..., n / 32].

    Raises:
        ValueError: if rows are no whole number of blocks.
    """
    groups = FORMATS["mxfp4"].row_weights(packed.shape[-1]) // 32
    lead = packed.shape[:-1]
    block = packed.reshape(*lead, groups, 17)
    even, odd = block[..., 1::2], block[..., 2::2]
    out = np.empty((*lead, groups, 2, 8), np.uint8)
    out[..., 0, :] = (even & 15) | odd << 4
    out[..., 1, :] = even >> 4 | (odd & 0xF0)
    return out.reshape(*lead, groups * 16), np.ascontiguousarray(block[..., 0])
