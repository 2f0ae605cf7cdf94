"""Quantised matrices on the device: the array container, packing from file bytes, unpacking.

`QuantArray` holds one matrix, or a stack of matrices of one type, as a few integer arrays in the
word layout of `formats`. `pack` makes it from the bytes of a file (with NumPy on the host or with
JAX on the device: same code), `unpack` gives the weights back in plain JAX and defines what every
kernel multiplies by. This module does not read files and knows no tensor names.

The layout is private to this package: nothing outside may depend on the order of bits in `codes`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels import formats
from pallas_kernels.formats import Format

Array: TypeAlias = Any
"""A NumPy or JAX array (packing accepts both and answers in kind)."""

FIELDS = ("codes", "scales", "mins", "supers", "books", "factor")
"""Names of the arrays of a QuantArray."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuantArray:
    """Matrices [..., N, K] of one quantised format. Leading axes are free (layer, expert, ...).

    Attributes:
      codes: int32 [..., N, W]; the code words of a row, blocks in ascending K.
      scales: per row and group, groups first: int32 [..., G, N] (four one-byte or two float16
        scales a word), or float32 [..., K/128, N/128] for tile scales.
      mins: int32 [..., G, N]; minima of q4_k, None elsewhere.
      supers: int32 [..., K/256, N]; float16 `d` and, above it, `dmin` of a K format's super-block.
      books: bfloat16 [..., 2, levels]; code books of the mix formats.
      factor: float32 [...]; a factor of the whole matrix (nvfp4 only), 1 if the file has none. One
        more axis of 2 for two matrices joined by `interleave`.
      format: name of the format.
      rows: N.
      cols: K, without padding.
    """

    codes: Array
    scales: Array
    mins: Array | None = None
    supers: Array | None = None
    books: Array | None = None
    factor: Array | None = None
    format: str = dataclasses.field(metadata={"static": True})
    rows: int = dataclasses.field(metadata={"static": True})
    cols: int = dataclasses.field(metadata={"static": True})

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes."""
        return tuple(self.codes.shape[:-2])

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., N, K]."""
        return (*self.lead, self.rows, self.cols)

    @property
    def ndim(self) -> int:
        """Number of logical axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in self.arrays())

    def arrays(self) -> list[Array]:
        """The arrays present, in a fixed order."""
        return [a for a in (getattr(self, f) for f in FIELDS) if a is not None]

    def map(self, fn: Callable[[Array], Array]) -> QuantArray:
        """The same container with `fn` applied to each array (shape of N and K unchanged)."""
        new: dict[str, Any] = {
            f: None if getattr(self, f) is None else fn(getattr(self, f)) for f in FIELDS
        }
        return dataclasses.replace(self, **new)


def fields_of(q: QuantArray) -> list[str]:
    """Names of the arrays present, in the order of `QuantArray.arrays`."""
    return [f for f in FIELDS if getattr(q, f) is not None]


def index(q: QuantArray, i: Any) -> QuantArray:
    """`q` at position `i` (an int or an int32 scalar) of its first leading axis.

    Raises: ValueError if `q` has no leading axis.
    """
    if not q.lead:
        raise ValueError(f"index: {q.format} matrix of shape {q.shape} has no leading axis")
    return q.map(lambda a: a[i] if isinstance(i, int) else jnp.asarray(a)[i])


def stack(parts: Sequence[QuantArray]) -> QuantArray:
    """A new first axis over matrices of one format and shape.

    Raises: ValueError if there are none, or if formats or shapes differ.
    """
    return _join(parts, lambda arrays: _namespace(arrays[0]).stack(arrays), "stack")


def concat(parts: Sequence[QuantArray]) -> QuantArray:
    """Parts of a stack joined along the first leading axis.

    Raises: ValueError if there are none, or if formats or shapes (but for that axis) differ.
    """
    return _join(parts, lambda arrays: _namespace(arrays[0]).concatenate(arrays), "concat")


def pad_rows(q: QuantArray, rows: int) -> QuantArray:
    """Matrices of at least `rows` rows; those that are added hold nothing."""
    lacking = rows - q.rows
    if lacking <= 0:
        return q

    def padded(name: str) -> Array | None:
        a: Array | None = getattr(q, name)
        axis = {"codes": -2, "scales": -1, "mins": -1, "supers": -1}.get(name)
        if a is None or axis is None or a.shape[axis] != q.rows:  # a tile of scales has all rows
            return a
        width = [(0, 0)] * a.ndim
        width[axis] = (0, lacking)
        return jnp.pad(a, width)

    new: dict[str, Any] = {f: padded(f) for f in FIELDS}
    return dataclasses.replace(q, rows=rows, **new)


def _join(parts: Sequence[QuantArray], fn: Callable[[list[Array]], Array], what: str) -> QuantArray:
    if not parts:
        raise ValueError(f"{what}: no matrices given")
    kinds = {(q.format, q.rows, q.cols) for q in parts}
    if len(kinds) > 1:
        raise ValueError(f"{what}: matrices differ in (format, N, K): {sorted(kinds)}")
    new: dict[str, Any] = {}
    for f in FIELDS:
        arrays = [getattr(q, f) for q in parts]
        new[f] = None if arrays[0] is None else fn(arrays)
    return dataclasses.replace(parts[0], **new)


def abstract(format: str, lead: Sequence[int], rows: int, cols: int) -> QuantArray:
    """Shapes and dtypes of a packed matrix, as `jax.ShapeDtypeStruct` leaves.

    Args: format: name; lead: leading axes; rows: N; cols: K in weights.
    Raises: ValueError if K is no whole number of file blocks.
    """
    fmt = formats.get(format)
    _check_cols(fmt, cols)
    lead = tuple(lead)
    padded = fmt.padded(cols)

    def of(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, *shape), dtype)

    extra: dict[str, Any] = {}
    groups = padded // fmt.group
    if fmt.scale == "f16":
        scales = of((-(-groups // 2), rows), jnp.int32)
    elif fmt.scale == "tile":
        scales = of((padded // 128, -(-rows // 128)), jnp.float32)
    else:
        scales = of((-(-groups * fmt.scale_bytes // 4), rows), jnp.int32)
    if fmt.scale == "k":
        extra["supers"] = of((-(-padded // 256), rows), jnp.int32)
        if fmt.name == "q4_k":
            extra["mins"] = scales
    if fmt.books:
        extra["books"] = of((2, fmt.books), jnp.bfloat16)
    if fmt.name == "nvfp4":
        extra["factor"] = of((), jnp.float32)
    return QuantArray(
        codes=of((rows, padded * fmt.bits // 32), jnp.int32),
        scales=scales,
        format=format,
        rows=rows,
        cols=cols,
        **extra,
    )


RUN = 8
"""Rows that follow each other from one matrix where two are interleaved."""


def interleave(a: Any, b: Any) -> Any:
    """Two matrices [..., N, K] as one [..., 2 N, K]: eight rows of `a`, eight of `b`, and so on.

    Args: a, b: QuantArrays of one format (mix formats: with equal code books), or plain arrays.
    Raises: ValueError if they differ in kind or shape, or N is no multiple of 8.
    """
    same = type(a) is type(b) and a.shape == b.shape
    if not same or a.shape[-2] % RUN or (isinstance(a, QuantArray) and a.format != b.format):
        raise ValueError(
            f"interleave: {_kind(a)} and {_kind(b)} must be alike, with rows a multiple of {RUN}"
        )
    if not isinstance(a, QuantArray):
        return _interleave_rows(a, b, -2)
    new: dict[str, Any] = {"codes": _interleave_rows(a.codes, b.codes, -2), "rows": 2 * a.rows}
    for name in ("scales", "mins", "supers"):
        x, y = getattr(a, name), getattr(b, name)
        if x is not None and formats.get(a.format).scale == "tile":
            x, y = (_namespace(s).repeat(s, tile_rows(a) // RUN, -1) for s in (x, y))
            x, y = (s[..., : a.rows // RUN] for s in (x, y))
            new[name] = _namespace(x).stack([x, y], -1).reshape(*x.shape[:-1], -1)
        elif x is not None:
            new[name] = _interleave_rows(x, y, -1)
    if a.factor is not None:
        new["factor"] = _namespace(a.factor).stack([a.factor, b.factor], -1)
    return dataclasses.replace(a, **new)


def _kind(a: Any) -> str:
    return f"{getattr(a, 'format', getattr(a, 'dtype', type(a)))} {list(a.shape)}"


def _interleave_rows(a: Array, b: Array, axis: int) -> Array:
    at = a.ndim + axis
    x, y = (m.reshape(*m.shape[:at], -1, RUN, *m.shape[at + 1 :]) for m in (a, b))
    return _namespace(a).stack([x, y], at + 1).reshape(*a.shape[:at], -1, *a.shape[at + 1 :])


def tile_rows(q: QuantArray) -> int:
    """Rows that share a tile scale: 128, or 8 in interleaved matrices."""
    count = q.scales.shape[-1]
    return 128 if count == -(-q.rows // 128) else int(q.rows // count)


def nbytes(format: str, lead: Sequence[int], rows: int, cols: int) -> int:
    """Bytes on the device of matrices [*lead, rows, cols] in `format`."""
    return abstract(format, lead, rows, cols).nbytes


def row_bytes(format: str, cols: int) -> int:
    """Bytes of one row of `cols` weights in the file.

    Raises: ValueError if K is no whole number of file blocks.
    """
    fmt = formats.get(format)
    _check_cols(fmt, cols)
    return cols // fmt.source_block * fmt.source_bytes


def _check_cols(fmt: Format, cols: int) -> None:
    if cols <= 0 or cols % fmt.source_block:
        raise ValueError(
            f"{fmt.name}: rows of {cols} weights; need a positive multiple of {fmt.source_block}"
        )


def pack(
    format: str,
    packed: Array,
    *,
    scale_e8m0: Array | None = None,
    scale_f32: Array | None = None,
    codebooks_bf16: Array | None = None,
    modes: Array | None = None,
    factor: Array | None = None,
) -> QuantArray:
    """The device form of matrices given as the bytes of a file.

    Args:
      format: name of the format.
      packed: uint8 [..., N, row bytes]; NumPy (host) or JAX (device, also under jit).
      scale_e8m0: uint8 scales of the checkpoint formats: [..., N, K/32] (hf_fp4_e2m1) or
        [..., ceil(N/128), ceil(K/128)] (hf_fp8_e4m3_block128).
      scale_f32: float32 tile scales of hf_fp8_e4m3_block128, instead of `scale_e8m0`.
      codebooks_bf16: uint16 bits [..., 2, levels] of the mix formats.
      modes: uint8 [...] of the mix formats (0 fixed levels, 1 the code books).
      factor: float32 [...] (nvfp4: the factor of the whole matrix, if the file has one).
    Returns: QuantArray of the same kind of arrays; invalid scale bytes are kept as scale 0.
    Raises: ValueError on an unknown format, a row length that does not fit, or side arrays that are
      missing, surplus or of the wrong shape.
    """
    fmt = formats.get(format)
    xp = _namespace(packed)
    rows, cols = _check_packed(fmt, packed)
    side = {
        "scale_e8m0": scale_e8m0,
        "scale_f32": scale_f32,
        "codebooks_bf16": codebooks_bf16,
        "modes": modes,
        "factor": factor,
    }
    side = {k: v for k, v in side.items() if v is not None}
    _check_side(fmt, side, packed.shape[:-2], rows, cols)
    parts = _SPLIT[format](xp, fmt, packed, side)
    pad = fmt.padded(cols) - cols
    if fmt.layout:
        codes = _words(xp, fmt, _pad_last(xp, parts.pop("codes"), pad))
    else:
        codes = _iq2_words(xp, parts.pop("codes"))
    return QuantArray(
        codes=codes,
        **{k: _finish(xp, fmt, k, v, cols) for k, v in parts.items()},
        format=format,
        rows=rows,
        cols=cols,
    )


def _check_packed(fmt: Format, packed: Array) -> tuple[int, int]:
    if packed.dtype != np.uint8 or packed.ndim < 2:
        raise ValueError(
            f"{fmt.name}: packed must be uint8 [..., N, bytes], not {packed.dtype} {packed.shape}"
        )
    blocks, rest = divmod(packed.shape[-1], fmt.source_bytes)
    if rest or not blocks:
        raise ValueError(
            f"{fmt.name}: rows of {packed.shape[-1]} bytes; blocks have {fmt.source_bytes} bytes"
        )
    return packed.shape[-2], blocks * fmt.source_block


def _check_side(
    fmt: Format, side: dict[str, Array], lead: tuple[int, ...], rows: int, cols: int
) -> None:
    tiles = (*lead, -(-rows // 128), -(-cols // 128))
    need: dict[str, tuple[int, ...]] = {}
    optional: dict[str, tuple[int, ...]] = {}
    if fmt.name == "hf_fp4_e2m1":
        need = {"scale_e8m0": (*lead, rows, cols // 32)}
    elif fmt.scale == "tile":
        name = "scale_f32" if "scale_f32" in side else "scale_e8m0"
        need = {name: tiles}
    elif fmt.books:
        need = {"codebooks_bf16": (*lead, 2, fmt.books), "modes": lead}
    elif fmt.name == "nvfp4":
        optional = {"factor": lead}
    for name, shape in need.items():
        if name not in side:
            raise ValueError(f"{fmt.name}: side array {name} {list(shape)} is missing")
    for name, value in side.items():
        expected = (need | optional).get(name)
        if expected is None:
            raise ValueError(f"{fmt.name}: takes no side array {name}")
        if tuple(value.shape) != expected:
            raise ValueError(
                f"{fmt.name}: side array {name} has shape {list(value.shape)}, needs "
                f"{list(expected)}"
            )


def _namespace(a: Array) -> Any:
    return np if isinstance(a, np.ndarray) else jnp


def _pad_last(xp: Any, a: Array, n: int) -> Array:
    return xp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, n)]) if n else a


def _u32(xp: Any, a: Array) -> Array:
    return a.astype(xp.uint32)


def _as_int32(a: Array) -> Array:
    if isinstance(a, np.ndarray):
        return np.ascontiguousarray(a).view(np.int32)
    return jax.lax.bitcast_convert_type(a, jnp.int32)


def _words(xp: Any, fmt: Format, codes: Array) -> Array:
    """uint8 codes [..., N, K] (K whole blocks) -> int32 [..., N, W] in the layout of `formats`."""
    layout = _layout(fmt)
    lead = codes.shape[:-1]
    c = codes.reshape(*lead, -1, len(layout.fields), fmt.group_words, 2)
    words: list[Array] = [None] * layout.words
    for f, runs in enumerate(layout.stored):
        for half in (0, 1):
            code = _u32(xp, c[..., f, :, half])
            for w, low, n, pos in runs:
                bits = (code >> xp.uint32(low)) & xp.uint32((1 << n) - 1)
                term = bits << xp.uint32(pos + 16 * half)
                words[w] = term if words[w] is None else words[w] | term
    return _as_int32(xp.stack(words, -2).reshape(*lead, -1))


def _layout(fmt: Format) -> formats.Layout:
    if fmt.layout is None:
        raise ValueError(f"{fmt.name} has no field layout")
    return fmt.layout


def _iq2_words(xp: Any, pairs: Array) -> Array:
    """uint32 [..., N, K/32, 2] (table rows; four times seven signs, scale) -> int32 [..., N, W]."""
    rows, signs = pairs[..., 0], pairs[..., 1]
    two = xp.uint32((1 << 14) - 1)
    spread = xp.asarray(_IQ2_SPREAD)
    first = spread[(signs & two).astype(xp.int32)]
    second = spread[((signs >> xp.uint32(14)) & two).astype(xp.int32)] << xp.uint32(2)
    signs = first | second | (signs & xp.uint32(15 << 28))
    blocks = [a.reshape(*a.shape[:-1], -1, 8) for a in (rows, signs)]
    return _as_int32(_flat(xp.stack(blocks, -2), 3))


def _iq2_spread() -> npt.NDArray[np.uint32]:
    """Twice seven signs as in the file -> where `formats.iq2_sign` has those of units 0 and 1."""
    index = np.arange(1 << 14, dtype=np.uint32)
    out = np.zeros_like(index)
    for bit in range(14):
        out |= (index >> bit & 1) << formats.iq2_sign(*divmod(bit, 7))
    return out


_IQ2_SPREAD = _iq2_spread()


def _finish(xp: Any, fmt: Format, name: str, a: Array, cols: int) -> Array:
    """Scales as [..., N, groups] -> the stored form: padded, groups first, bytes in words."""
    if name in ("books", "factor") or fmt.scale == "tile":
        return a
    padded = fmt.padded(cols)
    # Bytes of one scale (a K format's super-block has two float16 values of 256 weights).
    size, group = 2 if fmt.scale == "f16" else fmt.scale_bytes, fmt.group
    if name == "supers":
        size, group = 4, 256
    a = _pad_last(xp, a, -(-(padded // group) * size // 4) * 4 - a.shape[-1])
    a = xp.swapaxes(_as_int32(_u32_of_bytes(xp, a.reshape(*a.shape[:-1], -1, 4))), -1, -2)
    return np.ascontiguousarray(a) if xp is np else a


def _u32_of_bytes(xp: Any, b: Array) -> Array:
    """uint8 [..., 4] -> uint32 [...], little-endian."""
    w = _u32(xp, b)
    low = w[..., 0] | w[..., 1] << xp.uint32(8)
    return low | w[..., 2] << xp.uint32(16) | w[..., 3] << xp.uint32(24)


# --- From file blocks to codes [..., N, K] and scales [..., N, groups] ---


def _blocks(fmt: Format, packed: Array) -> Array:
    return packed.reshape(*packed.shape[:-1], -1, fmt.source_bytes)


def _flat(a: Any, axes: int) -> Any:
    return a.reshape(*a.shape[:-axes], -1)


def _split_halves(xp: Any, q: Array) -> Array:
    """Bytes [..., n] with weights j and j + n in one byte -> codes [..., 2n]."""
    return xp.concatenate([q & xp.uint8(15), q >> xp.uint8(4)], -1)


def _no_negative_zero(xp: Any, codes: Array) -> Array:
    """Code 8 of FP4 (minus zero) means +0."""
    return xp.where(codes == 8, xp.uint8(0), codes)


def _device_scale(xp: Any, b: Array) -> Array:
    """UE4M3 half-scale bytes -> device scale bytes (`formats`): no subnormals, 0 for no scale.

    Invalid bytes (above 0x7e) count as 0.
    """
    return xp.asarray(_DEVICE_SCALE)[b.astype(xp.int32)]


def _device_scale_table() -> npt.NDArray[np.uint8]:
    table = np.zeros(256, np.uint8)
    for b in range(1, 0x7F):
        value = (b & 7) * 2.0**-10 if b < 8 else (8 + (b & 7)) * 2.0 ** ((b >> 3) - 11)
        fraction, exponent = math.frexp(value)
        table[b] = (exponent - 1 + 22) << 3 | int(fraction * 16 - 8)
    return table


_DEVICE_SCALE = _device_scale_table()


def _clear_dead(xp: Any, codes: Array, scales: Array, group: int, sign_bit: int) -> Array:
    """Magnitudes set to 0 where the scale is 0: kernels then need no test for it.

    The sign stays, since a negative level times scale 0 is -0.
    """
    c = codes.reshape(*scales.shape, group)
    return xp.where(scales[..., None] == 0, c & xp.uint8(sign_bit), c).reshape(codes.shape)


def _split_mxfp4(xp: Any, fmt: Format, packed: Array, side: dict[str, Array]) -> dict[str, Array]:
    b = _blocks(fmt, packed)
    codes = _no_negative_zero(xp, _split_halves(xp, b[..., 1:]))
    return {"codes": _flat(codes, 2), "scales": b[..., 0]}


def _split_hf_fp4(xp: Any, fmt: Format, packed: Array, side: dict[str, Array]) -> dict[str, Array]:
    codes = xp.stack([packed & xp.uint8(15), packed >> xp.uint8(4)], -1)
    scales = xp.asarray(side["scale_e8m0"]).astype(xp.uint8)
    return {"codes": _flat(_no_negative_zero(xp, codes), 2), "scales": scales}


def _split_nvfp4(xp: Any, fmt: Format, packed: Array, side: dict[str, Array]) -> dict[str, Array]:
    b = _blocks(fmt, packed)
    q = b[..., 4:].reshape(*b.shape[:-1], 4, 8)
    # The sign bit is ignored; 0x7f itself counts as 0, 0xff is 15 * 2^4 (device byte 0xef).
    raw = _flat(b[..., :4], 2)
    scales = _device_scale(xp, raw & xp.uint8(0x7F))
    scales = xp.where(raw == 0xFF, xp.uint8(0xEF), scales)
    codes = _flat(_no_negative_zero(xp, _split_halves(xp, q)), 3)
    factor = side.get("factor")
    if factor is None:
        factor = np.ones(packed.shape[:-2], np.float32)
    return {
        "codes": _clear_dead(xp, codes, scales, fmt.group, 8),
        "scales": scales,
        "factor": xp.asarray(factor, xp.float32),
    }


def _split_rocmfp4(xp: Any, fmt: Format, packed: Array, side: dict[str, Array]) -> dict[str, Array]:
    b = _blocks(fmt, packed)
    codes = _flat(_no_negative_zero(xp, _split_halves(xp, b[..., :16])), 2)
    scales = _device_scale(xp, _flat(b[..., 16:], 2))
    return {"codes": _clear_dead(xp, codes, scales, fmt.group, 8), "scales": scales}


def _split_q8_0(xp: Any, fmt: Format, packed: Array, side: dict[str, Array]) -> dict[str, Array]:
    b = _blocks(fmt, packed)
    return {"codes": _flat(b[..., 2:], 2), "scales": _flat(b[..., :2], 2)}


def _split_rocmfp8(xp: Any, fmt: Format, packed: Array, side: dict[str, Array]) -> dict[str, Array]:
    b = _blocks(fmt, packed)
    return {"codes": _flat(b[..., :32], 2), "scales": _device_scale(xp, b[..., 32])}


def _split_rocmfp6(xp: Any, fmt: Format, packed: Array, side: dict[str, Array]) -> dict[str, Array]:
    b = _blocks(fmt, packed)
    codes = _bit_codes(xp, b[..., :24], 6)
    mag = codes & xp.uint8(31)
    # Sign and magnitude -> level + 32; minus zero is -32.
    level = xp.where(
        codes > 32, xp.uint8(32) - mag, xp.where(codes == 32, xp.uint8(0), mag + xp.uint8(32))
    )
    return {"codes": _flat(level, 2), "scales": _device_scale(xp, _flat(b[..., 24:], 2))}


def _bit_codes(xp: Any, b: Array, bits: int) -> Array:
    """Little-endian bit string [..., bytes] -> uint8 codes of `bits` (3 or 6) bits."""
    b3 = _u32(xp, b.reshape(*b.shape[:-1], -1, 3))
    value = b3[..., 0] | b3[..., 1] << xp.uint32(8) | b3[..., 2] << xp.uint32(16)
    shifts = xp.arange(0, 24, bits, dtype=xp.uint32)
    codes = (value[..., None] >> shifts.reshape((1,) * value.ndim + (-1,))) & xp.uint32(
        (1 << bits) - 1
    )
    return _flat(codes.astype(xp.uint8), 2)


def _split_rocmfp3(xp: Any, fmt: Format, packed: Array, side: dict[str, Array]) -> dict[str, Array]:
    b = _blocks(fmt, packed)
    codes = _bit_codes(xp, b[..., :12], 3)
    codes = _flat(xp.where(codes == 4, xp.uint8(0), codes), 2)
    scales = _device_scale(xp, _flat(b[..., 12:], 2))
    return {"codes": _clear_dead(xp, codes, scales, fmt.group, 4), "scales": scales}


def _two_bit_codes(xp: Any, q: Array) -> Array:
    """Bytes [..., n] with four consecutive codes each -> [..., 4n]."""
    shifts = xp.asarray([0, 2, 4, 6], xp.uint8).reshape((1,) * q.ndim + (4,))
    return _flat((q[..., None] >> shifts) & xp.uint8(3), 2)


def _split_rocmfp2(xp: Any, fmt: Format, packed: Array, side: dict[str, Array]) -> dict[str, Array]:
    b = _blocks(fmt, packed)
    codes = _two_bit_codes(xp, b[..., :8])
    scales = b[..., 8:]
    if fmt.name == "rocmfp2_s40":
        # -4, -1, 1, 4 -> bit 1 sign, bit 0 outer.
        codes = xp.where(codes < 2, xp.uint8(3) - codes, codes - xp.uint8(2))
    if fmt.name == "rocmfp2_signed":
        scales = xp.where((scales & xp.uint8(0x7F)) == 0x7F, scales & xp.uint8(0x80), scales)
    else:
        scales = _device_scale(xp, scales)
    return {"codes": _flat(codes, 2), "scales": _flat(scales, 2)}


_FIXED_LEVELS = {4: (-1, 0, 1, 2), 8: (0, 1, 2, 4, 0, -1, -2, -4)}


def _split_mix(xp: Any, fmt: Format, packed: Array, side: dict[str, Array]) -> dict[str, Array]:
    b = _blocks(fmt, packed)
    codes = _two_bit_codes(xp, b[..., :8]) if fmt.books == 4 else _bit_codes(xp, b[..., :12], 3)
    meta = b[..., -2:]
    modes = xp.asarray(side["modes"]).reshape(*packed.shape[:-2], 1, 1, 1)
    fixed = modes == 0
    invalid = xp.where(fixed, meta > 0x7E, (meta & xp.uint8(0x7F)) == 0x7F)
    meta = xp.where(invalid, meta & xp.uint8(0x80), meta)
    bits = xp.asarray(side["codebooks_bf16"]).astype(xp.uint16)
    if xp is np:
        books = bits.view(jnp.bfloat16)
    else:
        books = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    levels = xp.asarray(np.asarray(_FIXED_LEVELS[fmt.books], np.float32).astype(jnp.bfloat16))
    levels = xp.broadcast_to(levels.reshape((1,) * (books.ndim - 1) + (-1,)), books.shape)
    books = xp.where(fixed[..., 0], levels, books)
    return {"codes": _flat(codes, 2), "scales": _flat(meta, 2), "books": books}


def _split_q4_k(xp: Any, fmt: Format, packed: Array, side: dict[str, Array]) -> dict[str, Array]:
    b = _blocks(fmt, packed)
    s, q = b[..., 4:16], b[..., 16:].reshape(*b.shape[:-1], 4, 32)
    six, four = xp.uint8(63), xp.uint8(15)
    up, down = xp.uint8(4), xp.uint8(6)
    scales = xp.concatenate(
        [s[..., :4] & six, (s[..., 8:] & four) | (s[..., :4] >> down << up)], -1
    )
    mins = xp.concatenate([s[..., 4:8] & six, (s[..., 8:] >> up) | (s[..., 4:8] >> down << up)], -1)
    codes = xp.stack([q & four, q >> up], -2)
    return {
        "codes": _flat(codes, 4),
        "scales": _flat(scales, 2),
        "mins": _flat(mins, 2),
        "supers": _flat(b[..., :4], 2),
    }


def _split_q2_k(xp: Any, fmt: Format, packed: Array, side: dict[str, Array]) -> dict[str, Array]:
    b = _blocks(fmt, packed)
    q = b[..., 16:80].reshape(*b.shape[:-1], 2, 1, 32)
    shifts = xp.asarray([0, 2, 4, 6], xp.uint8).reshape((1,) * (q.ndim - 2) + (4, 1))
    codes = (q >> shifts) & xp.uint8(3)
    return {
        "codes": _flat(codes, 4),
        "scales": _flat(b[..., :16], 2),
        "supers": _flat(b[..., 80:], 2),
    }


def _split_iq2_xxs(xp: Any, fmt: Format, packed: Array, side: dict[str, Array]) -> dict[str, Array]:
    b = _blocks(fmt, packed)
    w = _u32_of_bytes(xp, b[..., 2:].reshape(*b.shape[:-1], 8, 2, 4))
    return {"codes": w.reshape(*b.shape[:-2], -1, 2), "scales": _flat(b[..., :2], 2)}


def _split_hf_fp8(xp: Any, fmt: Format, packed: Array, side: dict[str, Array]) -> dict[str, Array]:
    if "scale_f32" in side:
        scales = xp.asarray(side["scale_f32"], xp.float32)
    else:
        e = _u32(xp, xp.asarray(side["scale_e8m0"]))
        bits = xp.where(e == 0, xp.uint32(0x00400000), e << xp.uint32(23))
        scales = (
            bits.view(np.float32) if xp is np else jax.lax.bitcast_convert_type(bits, jnp.float32)
        )
    scales = xp.swapaxes(scales, -1, -2)
    return {"codes": packed, "scales": np.ascontiguousarray(scales) if xp is np else scales}


_Split = Callable[[Any, Format, Array, dict[str, Array]], dict[str, Array]]
_SPLIT: dict[str, _Split] = {
    "q8_0": _split_q8_0,
    "q4_k": _split_q4_k,
    "q2_k": _split_q2_k,
    "iq2_xxs": _split_iq2_xxs,
    "mxfp4": _split_mxfp4,
    "hf_fp4_e2m1": _split_hf_fp4,
    "nvfp4": _split_nvfp4,
    "rocmfp4": _split_rocmfp4,
    "rocmfp4_fast": _split_rocmfp4,
    "rocmfp6": _split_rocmfp6,
    "rocmfp8": _split_rocmfp8,
    "rocmfp3": _split_rocmfp3,
    "rocmfp3_mix": _split_mix,
    "rocmfp2_mix": _split_mix,
    "rocmfp2_s40": _split_rocmfp2,
    "rocmfp2_m1012": _split_rocmfp2,
    "rocmfp2_signed": _split_rocmfp2,
    "rocmfp2_affine": _split_rocmfp2,
    "hf_fp8_e4m3_block128": _split_hf_fp8,
}


# --- From words to weights ---


def unpack(q: QuantArray, dtype: Any = jnp.float32) -> Array:
    """The weights of `q` in plain JAX: the definition of what the kernels multiply by.

    Computed in float32 and rounded once to `dtype`. In float32 the bits are those of the format's
    reference decoder, but for float32 subnormals, which XLA flushes to zero on a CPU.

    Returns: [..., N, K].
    """
    fmt = formats.get(q.format)
    weights = _WEIGHTS[q.format](q, fmt)
    if q.factor is not None:
        factor = q.factor[..., None, None]
        if q.factor.ndim > len(q.lead):
            runs = jnp.repeat(q.factor, RUN, -1)
            factor = jnp.tile(runs, q.rows // (2 * RUN))[..., None]
        weights = weights * factor
    return weights[..., : q.cols].astype(dtype)


def take_rows(q: QuantArray, rows_T: Array, dtype: Any = jnp.float32) -> Array:
    """Rows `rows_T` (int32) of one matrix, unpacked: an embedding lookup.

    Returns: [T, K].
    Raises: ValueError if `q` has leading axes.
    """
    if q.lead:
        raise ValueError(f"take_rows: needs one matrix [N, K], not {q.format} {list(q.shape)}")
    new: dict[str, Any] = {"codes": q.codes[rows_T], "rows": rows_T.shape[0]}
    if formats.get(q.format).scale == "tile":
        # A scale belongs to 128 rows: give each row a tile of its own.
        one_each = jnp.repeat(q.codes[rows_T], 128, 0)
        new = {"codes": one_each, "scales": q.scales[:, rows_T // 128], "rows": len(one_each)}
        return unpack(dataclasses.replace(q, **new), dtype)[::128]
    for name in ("scales", "mins", "supers"):
        if getattr(q, name) is not None:
            new[name] = getattr(q, name)[:, rows_T]
    return unpack(dataclasses.replace(q, **new), dtype)


def _codes(q: QuantArray, fmt: Format) -> Array:
    """uint32 codes [..., N, padded K]."""
    layout = _layout(fmt)
    words = jax.lax.bitcast_convert_type(q.codes, jnp.uint32)
    words = words.reshape(*words.shape[:-1], -1, layout.words, fmt.group_words)
    fields = []
    for runs in layout.stored:
        halves = []
        for half in (0, 1):
            code = jnp.zeros((), jnp.uint32)
            for w, low, n, pos in runs:
                bits = (words[..., w, :] >> jnp.uint32(pos + 16 * half)) & jnp.uint32((1 << n) - 1)
                code = code | bits << jnp.uint32(low)
            halves.append(code)
        fields.append(jnp.stack(halves, -1))
    return jnp.stack(fields, -3).reshape(*words.shape[:-3], -1)


def _scale_bytes(words: jax.Array) -> Array:
    """int32 [..., G/4, N] -> uint32 bytes [..., N, G]."""
    w = jnp.swapaxes(jax.lax.bitcast_convert_type(words, jnp.uint32), -1, -2)[..., None]
    shifts = jnp.asarray([0, 8, 16, 24], jnp.uint32).reshape((1,) * (w.ndim - 1) + (4,))
    return _flat((w >> shifts) & jnp.uint32(255), 2)


def _halves(words: jax.Array) -> Array:
    """int32 [..., G, N] holding two float16 values a word -> float32 [..., N, G, 2]."""
    w = jax.lax.bitcast_convert_type(jnp.swapaxes(words, -1, -2), jnp.float16)
    return w.astype(jnp.float32)


def _float_bits(bits: jax.Array) -> Array:
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.float32)


def ue4m3(b: jax.Array) -> Array:
    """Half-scale E4M3 bytes (sign bit off) -> float32: M * 2^-10 or (8 + M) * 2^(E - 11)."""
    e, m = b >> jnp.uint32(3), b & jnp.uint32(7)
    normal = _float_bits((e + jnp.uint32(119)) << jnp.uint32(23) | m << jnp.uint32(20))
    return jnp.where(e == 0, m.astype(jnp.float32) * 2.0**-10, normal)


def device_scale(b: jax.Array) -> Array:
    """Device scale bytes -> float32: 0, or (1 + M/8) * 2^(E - 22)."""
    e, m = b >> jnp.uint32(3), b & jnp.uint32(7)
    return jnp.where(
        b == 0, 0.0, _float_bits((e + jnp.uint32(105)) << jnp.uint32(23) | m << jnp.uint32(20))
    )


def _grouped(a: jax.Array, group: int) -> Array:
    return a.reshape(*a.shape[:-1], -1, group)


def _signed(code: jax.Array, sign_bit: int, mag: jax.Array) -> Array:
    """`mag` with the sign of code bit `sign_bit`."""
    bits = jax.lax.bitcast_convert_type(mag, jnp.uint32)
    sign = ((code >> jnp.uint32(sign_bit)) & jnp.uint32(1)) << jnp.uint32(31)
    return jax.lax.bitcast_convert_type(bits | sign, jnp.float32)


def _e2m1(code: jax.Array, half_range: float) -> Array:
    """FP4 code -> E2M1 times `half_range`: two exponent bits and one mantissa bit."""
    mag = code & jnp.uint32(7)
    normal = _float_bits((mag + jnp.uint32(252)) << jnp.uint32(22))
    value = jnp.where(mag < 2, mag.astype(jnp.float32) * 0.5, normal)
    return _signed(code, 3, value * half_range)


def _fp4_levels(code: jax.Array, fmt: Format) -> Array:
    if fmt.name in ("mxfp4", "hf_fp4_e2m1"):
        return _e2m1(code, 1.0)
    level = _e2m1(code, 2.0)
    return level if fmt.name == "nvfp4" else jnp.clip(level, -10.0, 10.0)


def _weights_e8m0(q: QuantArray, fmt: Format) -> Array:
    level = _grouped(_fp4_levels(_codes(q, fmt), fmt), fmt.group)
    e = _scale_bytes(q.scales)[..., : level.shape[-2]]
    # 2^(e - 127) as two normal factors: e = 0 alone would be a subnormal.
    low = e >> jnp.uint32(1)
    first = _float_bits((low + jnp.uint32(64)) << jnp.uint32(23))
    second = _float_bits((e - low + jnp.uint32(63)) << jnp.uint32(23))
    return _flat((level * first[..., None]) * second[..., None], 2)


def _weights_bytes(q: QuantArray, fmt: Format) -> Array:
    codes = _codes(q, fmt)
    if fmt.bits == 4:
        level = _fp4_levels(codes, fmt)
    elif fmt.bits == 8:
        level = jax.lax.bitcast_convert_type(codes << jnp.uint32(24), jnp.int32) >> 24
        level = level.astype(jnp.float32)
    elif fmt.bits == 6:
        level = codes.astype(jnp.int32).astype(jnp.float32) - 32.0
    elif fmt.bits == 3:
        mag = codes & jnp.uint32(3)
        value = jnp.where(mag == 3, 4.0, mag.astype(jnp.float32))
        level = _signed(codes, 2, value)
    elif fmt.name == "rocmfp2_s40":
        level = _signed(codes, 1, jnp.where((codes & jnp.uint32(1)) == 1, 4.0, 1.0))
    else:
        level = codes.astype(jnp.float32) - 1.0
    level = _grouped(level, fmt.group)
    b = _scale_bytes(q.scales)[..., : level.shape[-2]]
    if fmt.name == "rocmfp2_signed":
        scale = _signed(b, 7, ue4m3(b & jnp.uint32(127)))[..., None]
    else:
        scale = device_scale(b)[..., None]
    return _flat(level * scale, 2)


def _weights_affine(q: QuantArray, fmt: Format) -> Array:
    codes = _grouped(_codes(q, fmt), fmt.group).astype(jnp.float32)
    b = device_scale(_scale_bytes(q.scales))
    b = b.reshape(*b.shape[:-1], -1, 2)[..., : codes.shape[-2], :]
    return _flat(codes * b[..., :1] - b[..., 1:], 2)


def _weights_mix(q: QuantArray, fmt: Format) -> Array:
    if q.books is None:
        raise ValueError(f"{fmt.name}: code books are missing")
    codes = _grouped(_codes(q, fmt), fmt.group)
    b = _scale_bytes(q.scales)[..., : codes.shape[-2]]
    second = (b >> jnp.uint32(7))[..., None] == 1
    books = q.books.astype(jnp.float32)[..., None, None, None, :, :]
    level = jnp.zeros((), jnp.float32)
    for i in range(fmt.books):
        chosen = jnp.where(second, books[..., 1, i], books[..., 0, i])
        level = jnp.where(codes == i, chosen, level)
    return _flat(level * ue4m3(b & jnp.uint32(127))[..., None], 2)


def _weights_f16(q: QuantArray, fmt: Format) -> Array:
    level = jax.lax.bitcast_convert_type(_codes(q, fmt) << jnp.uint32(24), jnp.int32) >> 24
    level = _grouped(level.astype(jnp.float32), fmt.group)
    d = _flat(_halves(q.scales), 2)[..., : level.shape[-2]]
    return _flat(level * d[..., None], 2)


def _supers(q: QuantArray) -> tuple[jax.Array, jax.Array]:
    """`d` and `dmin` as float32 [..., N, K/256]."""
    if q.supers is None:
        raise ValueError(f"{q.format}: super-block scales are missing")
    s = _halves(q.supers)
    return s[..., 0], s[..., 1]


def _weights_k(q: QuantArray, fmt: Format) -> Array:
    codes = _grouped(_codes(q, fmt), fmt.group).astype(jnp.float32)
    per = 256 // fmt.group
    groups = codes.shape[-2]
    b = _scale_bytes(q.scales)[..., :groups]
    if fmt.name == "q2_k":
        scale, low = b & jnp.uint32(15), b >> jnp.uint32(4)
    elif q.mins is None:
        raise ValueError(f"{fmt.name}: minima are missing")
    else:
        scale, low = b, _scale_bytes(q.mins)[..., :groups]
    d, dmin = _supers(q)
    d = jnp.repeat(d, per, -1)[..., :groups]
    dmin = jnp.repeat(dmin, per, -1)[..., :groups]
    scale_f = d * scale.astype(jnp.float32)
    low_f = dmin * low.astype(jnp.float32)
    return _flat(scale_f[..., None] * codes - low_f[..., None], 2)


def _weights_iq2_xxs(q: QuantArray, fmt: Format) -> Array:
    words = jax.lax.bitcast_convert_type(q.codes, jnp.uint32)
    words = words.reshape(*words.shape[:-1], -1, 2, fmt.group_words)
    rows, signs = _flat(words[..., 0, :], 2), _flat(words[..., 1, :], 2)
    grid = jnp.asarray(formats.IQ2_GRID)
    tail = (1,) * rows.ndim
    row = (
        rows[..., None] >> jnp.asarray([0, 8, 16, 24], jnp.uint32).reshape(*tail, 4)
    ) & jnp.uint32(255)
    entry = grid[row.astype(jnp.int32)].astype(jnp.uint32)[..., None]
    step = jnp.arange(8, dtype=jnp.uint32).reshape(*tail, 1, 8)
    code = (entry >> (step * jnp.uint32(2))) & jnp.uint32(3)
    mag = jnp.where(code == 0, 8.0, jnp.where(code == 1, 25.0, 43.0))
    at = [[formats.iq2_sign(unit, weight) for weight in range(7)] for unit in range(4)]
    sign = (signs[..., None, None] >> jnp.asarray(at, jnp.uint32).reshape(*tail, 4, 7)) & 1
    eighth = jnp.sum(sign, -1, keepdims=True, dtype=jnp.uint32) & jnp.uint32(1)
    level = _signed(jnp.concatenate([sign, eighth], -1), 0, mag)
    d = jnp.repeat(_flat(_halves(q.scales), 2), 8, -1)[..., : signs.shape[-1]]
    scale = d * ((signs >> jnp.uint32(28)).astype(jnp.float32) + 0.5) * 0.25
    return _flat(scale[..., None, None] * level, 3)


def _weights_hf_fp8(q: QuantArray, fmt: Format) -> Array:
    codes = _codes(q, fmt)
    e, m = (codes >> jnp.uint32(3)) & jnp.uint32(15), codes & jnp.uint32(7)
    normal = _float_bits((e + jnp.uint32(120)) << jnp.uint32(23) | m << jnp.uint32(20))
    level = _signed(codes, 7, jnp.where(e == 0, m.astype(jnp.float32) * 2.0**-9, normal))
    scale = jnp.repeat(jnp.swapaxes(q.scales, -1, -2), tile_rows(q), -2)[..., : q.rows, :]
    return _flat(_grouped(level, 128) * scale[..., None], 2)


_Weights = Callable[[QuantArray, Format], jax.Array]
_BY_SCALE: dict[str, _Weights] = {
    "e5m3": _weights_bytes,
    "ue4m3": _weights_bytes,
    "e8m0": _weights_e8m0,
    "f16": _weights_f16,
    "k": _weights_k,
    "tile": _weights_hf_fp8,
}
_BY_NAME: dict[str, _Weights] = {
    "iq2_xxs": _weights_iq2_xxs,
    "rocmfp2_affine": _weights_affine,
    "rocmfp2_mix": _weights_mix,
    "rocmfp3_mix": _weights_mix,
}
_WEIGHTS = {name: _BY_NAME.get(name, _BY_SCALE[f.scale]) for name, f in formats.FORMATS.items()}
