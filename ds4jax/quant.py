"""Weight formats: what the bytes of a tensor mean, as float32 numbers.

NumPy only. Every block format met in DeepSeek-V4 GGUF files and the FP4/FP8 of the published
checkpoint is decoded bit for bit as its reference decoder does it, invalid bytes are found
(`check`), and the reading of the ambiguous GGUF type 107 is guessed from data. Encoding is
`ds4jax.quantize`, the codebook tables of the MIX types are `ds4jax.mix`, packed forms on a device
belong to the kernels.

Shape letters here: N block, B byte of a block, W weight of a block, G group of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ds4jax import formats
from ds4jax.formats import (
    F32,
    FORMATS,
    I8,
    ROCMFP2_READINGS,
    ROCMFP2_TYPE_ID,
    U8,
    U16,
    Format,
    Rocmfp2Reading,
    TypeLayout,
    format_of_type,
    type_layout,
)

__all__ = [
    "FORMATS",
    "ROCMFP2_READINGS",
    "ROCMFP2_TYPE_ID",
    "Format",
    "Rocmfp2Guess",
    "Rocmfp2Reading",
    "TypeLayout",
    "check",
    "codebook_problems",
    "decode",
    "decode_other",
    "format_of_type",
    "guess_rocmfp2_reading",
    "type_layout",
]

CHUNK_WEIGHTS = 1 << 18
"""Weights decoded at a time: temporaries stay within a few MiB whatever the tensor's size."""


# Decoding ---------------------------------------------------------------------------------------


def _fp16(blocks_NB: U8, byte: int) -> F32:
    """float32[N, 1]: the half at `byte` of each block."""
    return np.ascontiguousarray(blocks_NB[:, byte : byte + 2]).view(np.float16).astype(np.float32)


def _halves(levels_NW: I8, scale_N2: F32, out_NW: F32) -> None:
    """Scale the first and the second half of each block by its own factor."""
    half = (len(out_NW), 2, out_NW.shape[1] // 2)
    np.multiply(levels_NW.reshape(half), scale_N2[:, :, None], out=out_NW.reshape(half))


def _nibbles(q: U8, tables: tuple[I8, I8], axis: int) -> I8:
    """Levels of the low nibbles, then of the high ones, joined along `axis`."""
    return np.concatenate((tables[0][q], tables[1][q]), axis=axis)


def _words12(payload_NB: U8) -> U16:
    """A little-endian bit string cut into words of 12 bits."""
    triple = payload_NB.reshape(len(payload_NB), -1, 3).astype(np.uint16)
    word = np.empty((*triple.shape[:2], 2), np.uint16)
    word[..., 0] = triple[..., 0] | (triple[..., 1] & 15) << 8
    word[..., 1] = triple[..., 1] >> 4 | triple[..., 2] << 4
    return word.reshape(len(payload_NB), -1)


def _bits12(payload_NB: U8, table: npt.NDArray[Any]) -> I8:
    """Levels of a little-endian bit string, looked up 12 bits at a time."""
    levels: I8 = table[_words12(payload_NB)].view(np.int8)
    return levels


def _quads(payload_NB: U8, table: npt.NDArray[Any]) -> I8:
    """Levels of two-bit codes, four to a byte."""
    levels: I8 = table[payload_NB].view(np.int8)
    return levels


def _q8_0(b: U8, out: F32) -> None:
    np.multiply(b[:, 2:].view(np.int8), _fp16(b, 0), out=out)


def _mxfp4(b: U8, out: F32) -> None:
    np.multiply(_nibbles(b[:, 1:], formats.FP4_NIBBLES, 1), formats.SCALE_MXFP4[b[:, :1]], out=out)


def _nvfp4(b: U8, out: F32) -> None:
    levels = _nibbles(b[:, 4:].reshape(-1, 4, 8), formats.FP4_NIBBLES, 2)
    np.multiply(levels, formats.SCALE_NVFP4[b[:, :4], None], out=out.reshape(-1, 4, 16))


def _rocmfp4(b: U8, out: F32) -> None:
    _halves(_nibbles(b[:, :16], formats.ROCMFP4_NIBBLES, 1), formats.SCALE_UE4M3[b[:, 16:]], out)


def _rocmfp4_fast(b: U8, out: F32) -> None:
    np.multiply(
        _nibbles(b[:, :16], formats.ROCMFP4_NIBBLES, 1), formats.SCALE_UE4M3[b[:, 16:]], out=out
    )


def _rocmfp6(b: U8, out: F32) -> None:
    _halves(_bits12(b[:, :24], formats.ROCMFP6_PAIRS), formats.SCALE_UE4M3[b[:, 24:]], out)


def _rocmfp8(b: U8, out: F32) -> None:
    np.multiply(b[:, :32].view(np.int8), formats.SCALE_UE4M3[b[:, 32:]], out=out)


def _rocmfp3(b: U8, out: F32) -> None:
    _halves(_bits12(b[:, :12], formats.ROCMFP3_QUADS), formats.SCALE_UE4M3[b[:, 12:]], out)


def _rocmfp2_s40(b: U8, out: F32) -> None:
    _halves(_quads(b[:, :8], formats.S40_QUADS), formats.SCALE_UE4M3[b[:, 8:]], out)


def _rocmfp2_fixed(b: U8, out: F32) -> None:
    _halves(_quads(b[:, :8], formats.FIXED_QUADS), formats.SCALE_UE4M3[b[:, 8:]], out)


def _rocmfp2_signed(b: U8, out: F32) -> None:
    flip = np.where(b[:, 8:] > 0x7F, np.float32(-1), np.float32(1))
    _halves(_quads(b[:, :8], formats.FIXED_QUADS), flip * formats.SCALE_UE4M3[b[:, 8:] & 0x7F], out)


def _rocmfp2_affine(b: U8, out: F32) -> None:
    np.multiply(_quads(b[:, :8], formats.CODE_QUADS), formats.SCALE_UE4M3[b[:, 8:9]], out=out)
    out -= formats.SCALE_UE4M3[b[:, 9:]]


def _q4_k(b: U8, out: F32) -> None:
    s = b[:, 4:16]
    scale, low = np.empty((2, len(b), 8), np.uint8)
    scale[:, :4], low[:, :4] = s[:, :4] & 63, s[:, 4:8] & 63
    scale[:, 4:] = (s[:, 8:] & 15) | s[:, :4] >> 6 << 4
    low[:, 4:] = s[:, 8:] >> 4 | s[:, 4:8] >> 6 << 4
    q = b[:, 16:].reshape(-1, 4, 1, 32)
    codes = np.concatenate((q & 15, q >> 4), axis=2).reshape(-1, 8, 32)
    _minus_min(codes, _fp16(b, 0) * scale, _fp16(b, 2) * low, out)


def _q2_k(b: U8, out: F32) -> None:
    q = b[:, 16:80].reshape(-1, 2, 1, 2, 16)
    shift = np.array((0, 2, 4, 6), np.uint8)[:, None, None]
    codes = ((q >> shift) & 3).reshape(-1, 16, 16)
    _minus_min(codes, _fp16(b, 80) * (b[:, :16] & 15), _fp16(b, 82) * (b[:, :16] >> 4), out)


def _minus_min(codes_NGW: npt.NDArray[Any], scale_NG: F32, low_NG: F32, out: F32) -> None:
    grouped = out.reshape(codes_NGW.shape)
    np.multiply(codes_NGW, scale_NG[:, :, None], out=grouped)
    grouped -= low_NG[:, :, None]


def _iq2_xxs(b: U8, out: F32) -> None:
    group = b[:, 2:].reshape(-1, 8, 8)
    word = np.ascontiguousarray(group[:, :, 4:]).view("<u4")
    scale = _fp16(b, 0)[:, :, None] * (np.float32(0.5) + (word >> 28).astype(np.float32))
    scale *= np.float32(0.25)
    signs = formats.IQ2_SIGNS[(word >> np.array((0, 7, 14, 21), np.uint32)) & 127]
    levels = formats.IQ2_GRID[group[:, :, :4]] * signs
    np.multiply(levels.reshape(-1, 8, 32), scale, out=out.reshape(-1, 8, 32))


def _plain(dtype: str) -> Callable[[U8, F32], None]:
    def decode_plain(b: U8, out: F32) -> None:
        out[...] = np.ascontiguousarray(b).view(dtype)

    return decode_plain


def _bf16(b: U8, out: F32) -> None:
    bits = np.ascontiguousarray(b).view("<u2").astype(np.uint32) << 16
    out[...] = bits.view(np.float32)


_BLOCK_DECODERS: dict[str, Callable[[U8, F32], None]] = {
    "f32": _plain("<f4"),
    "f16": _plain("<f2"),
    "bf16": _bf16,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q4_k": _q4_k,
    "iq2_xxs": _iq2_xxs,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "rocmfp4": _rocmfp4,
    "rocmfp4_fast": _rocmfp4_fast,
    "rocmfp6": _rocmfp6,
    "rocmfp8": _rocmfp8,
    "rocmfp3": _rocmfp3,
    "rocmfp2_s40": _rocmfp2_s40,
    "rocmfp2_m1012": _rocmfp2_fixed,
    "rocmfp2_signed": _rocmfp2_signed,
    "rocmfp2_affine": _rocmfp2_affine,
}


def _hf_fp4(packed: U8, scale_e8m0: U8, out: F32) -> None:
    """Published FP4: byte k of a row holds weights 2k (low nibble) and 2k + 1 (high nibble)."""
    blocks, scale_N1 = packed.reshape(-1, 16), scale_e8m0.reshape(-1, 1)
    out_NW = out.reshape(-1, 32)
    for part in _chunks(len(blocks), 32):
        levels = formats.FP4_PAIRS[blocks[part]].view(np.int8)
        np.multiply(levels, formats.SCALE_E8M0_HALF[scale_N1[part]], out=out_NW[part])


def _hf_fp8(packed: U8, scale: F32, out: F32) -> None:
    """Published FP8: one scale to a tile of 128 x 128 weights."""
    rows, columns = packed.shape[-2:]
    tiles = scale.reshape(-1, *scale.shape[-2:])
    matrices = zip(
        packed.reshape(-1, rows, columns), out.reshape(-1, rows, columns), tiles, strict=True
    )
    for matrix, target, tile in matrices:
        for i in range(len(tile)):
            part = slice(128 * i, 128 * (i + 1))
            factor = np.repeat(tile[i], 128)[:columns]
            np.multiply(formats.VALUE_E4M3[matrix[part]], factor, out=target[part])


def _mix_table(codebooks_2K: U16) -> F32:
    """float32[2 * words, 4]: the four levels of a word (8 or 12 bits of code) in either book."""
    books = (codebooks_2K.astype(np.uint32) << 16).view(np.float32)
    width = {4: 2, 8: 3}[books.shape[1]]
    word = np.arange(1 << 4 * width)
    codes = (word[:, None] >> width * np.arange(4)) & ((1 << width) - 1)
    return np.ascontiguousarray(books[:, codes].reshape(-1, 4))


def _mix(fmt: Format, packed: U8, codebooks_bf16: U16, modes: U8, out: F32) -> None:
    """Two codebooks per expert (leading axes of `packed`), one of them chosen per half-block."""
    fixed = _rocmfp3 if fmt.name == "rocmfp3_mix" else _rocmfp2_fixed
    payload = fmt.block_bytes - 2
    experts = modes.size
    blocks_ENB = packed.reshape(experts, -1, fmt.block_bytes)
    out_ENW = out.reshape(experts, -1, fmt.block)
    books_E2K = codebooks_bf16.reshape(experts, *codebooks_bf16.shape[-2:])
    for blocks, target, books, mode in zip(
        blocks_ENB, out_ENW, books_E2K, modes.reshape(-1), strict=True
    ):
        table = _mix_table(books) if mode else None
        for part in _chunks(len(blocks), fmt.block):
            if table is None:
                fixed(blocks[part], target[part])
                continue
            code, meta = blocks[part, :payload], blocks[part, payload:]
            word = (code if payload == 8 else _words12(code)).reshape(-1, 2, 4)
            second = (meta[:, :, None] >> 7).astype(np.intp)
            scale = formats.SCALE_UE4M3[meta & 0x7F]
            np.multiply(
                table[word + second * (len(table) // 2)].reshape(-1, 2, 16),
                scale[:, :, None],
                out=target[part].reshape(-1, 2, 16),
            )


def _chunks(blocks: int, block: int) -> list[slice]:
    step = max(1, CHUNK_WEIGHTS // block)
    return [slice(i, min(i + step, blocks)) for i in range(0, blocks, step)]


@dataclass(frozen=True)
class _Side:
    """Arrays that belong to a format beside its bytes, checked against them."""

    scale_e8m0: U8 | None = None
    scale_f32: F32 | None = None
    codebooks_bf16: U16 | None = None
    modes: U8 | None = None


_SIDE_OF: dict[str, tuple[tuple[str, ...], ...]] = {
    "hf_fp4_e2m1": (("scale_e8m0",),),
    "hf_fp8_e4m3_block128": (("scale_e8m0",), ("scale_f32",)),
    "rocmfp2_mix": (("codebooks_bf16", "modes"),),
    "rocmfp3_mix": (("codebooks_bf16", "modes"),),
}
"""Sets of side arrays a format takes, exactly one of them."""


def _prepare(format: str, packed: npt.NDArray[Any], given: dict[str, Any]) -> tuple[Format, _Side]:
    """Check the arguments of `decode` and `check` before anything is computed or allocated."""
    fmt = FORMATS.get(format)
    if fmt is None:
        raise ValueError(f"format {format!r} is unknown; known formats are {sorted(FORMATS)}")
    if not isinstance(packed, np.ndarray) or packed.dtype != np.uint8 or packed.ndim == 0:
        found = f"{getattr(packed, 'dtype', type(packed))} {getattr(packed, 'shape', '')}"
        raise ValueError(
            f"{format}: packed is {found}, must be a uint8 array [..., bytes]; use .view(np.uint8)"
        )
    fmt.row_weights(packed.shape[-1])
    names = tuple(name for name, value in given.items() if value is not None)
    allowed = _SIDE_OF.get(format, ((),))
    if names not in allowed:
        raise ValueError(
            f"{format}: side arrays given are {list(names)}, must be"
            f" {' or '.join(str(list(a)) for a in allowed)}"
        )
    side = _Side(**given)
    if format == "hf_fp4_e2m1":
        _expect(format, "scale_e8m0", side.scale_e8m0, np.uint8,
                (*packed.shape[:-1], packed.shape[-1] // 16))  # fmt: skip
    elif format == "hf_fp8_e4m3_block128":
        if packed.ndim < 2:
            raise ValueError(f"{format}: packed is {packed.shape}, must be [..., out, in]")
        tiles = (*packed.shape[:-2], -(-packed.shape[-2] // 128), -(-packed.shape[-1] // 128))
        if side.scale_f32 is not None:
            _expect(format, "scale_f32", side.scale_f32, np.float32, tiles)
        else:
            _expect(format, "scale_e8m0", side.scale_e8m0, np.uint8, tiles)
    elif side.modes is not None:
        levels = 8 if format == "rocmfp3_mix" else 4
        lead = np.shape(side.modes)
        if lead != packed.shape[: len(lead)] or len(lead) >= packed.ndim:
            raise ValueError(
                f"{format}: modes is {lead}, must be the leading axes of packed {packed.shape}"
            )
        _expect(format, "modes", side.modes, np.uint8, lead)
        _expect(format, "codebooks_bf16", side.codebooks_bf16, np.uint16, (*lead, 2, levels))
    return fmt, side


def _expect(format: str, name: str, array: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    found = (getattr(array, "dtype", None), np.shape(array))
    if found != (np.dtype(dtype), shape):
        raise ValueError(
            f"{format}: {name} is {found[0]} {found[1]}, must be {np.dtype(dtype)} {shape}"
        )


def decode(
    format: str,
    packed: U8,
    *,
    scale_e8m0: U8 | None = None,
    scale_f32: F32 | None = None,
    codebooks_bf16: U16 | None = None,
    modes: U8 | None = None,
) -> F32:
    """The float32 numbers of packed weights, bit for bit those of the format's own decoder.

    Temporaries are a few MiB beside the result, so a tensor may be decoded whole or, to hold less
    of it at once, in slices of rows (of 128 rows for hf_fp8_e4m3_block128). Invalid scale bytes
    decode as the reference decoders have it (0 in the ROCmFP formats, NaN in E8M0 scales of the
    checkpoint); use `check` to find them.

    Args:
        format: a key of `FORMATS`, except "i32" whose values are no weights.
        packed: uint8 [..., row bytes]; each row a whole number of blocks.
        scale_e8m0: hf_fp4_e2m1: uint8 [..., n / 32]; hf_fp8_e4m3_block128: uint8
            [..., ceil(out / 128), ceil(in / 128)].
        scale_f32: hf_fp8_e4m3_block128 of Base checkpoints: float32, shape as above.
        codebooks_bf16: rocmfp2_mix, rocmfp3_mix: uint16 [*lead, 2, 4 or 8], bits of bfloat16.
        modes: rocmfp2_mix, rocmfp3_mix: uint8 [*lead], 0 fixed levels, 1 codebooks; lead are the
            leading axes of packed (experts), or () for one pair of books.

    Returns: float32 [..., n].

    Raises:
        ValueError: unknown format, wrong byte count, side arrays missing or of wrong shape, or a
            mode other than 0 and 1.
    """
    given = {
        "scale_e8m0": scale_e8m0,
        "scale_f32": scale_f32,
        "codebooks_bf16": codebooks_bf16,
        "modes": modes,
    }
    fmt, side = _prepare(format, packed, given)
    if format == "i32":
        raise ValueError("i32: these are indices, not weights; use packed.view('<i4')")
    out = np.empty((*packed.shape[:-1], fmt.row_weights(packed.shape[-1])), np.float32)
    if not out.size:
        return out
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if format == "hf_fp4_e2m1":
            _hf_fp4(packed, cast(U8, side.scale_e8m0), out)
        elif format == "hf_fp8_e4m3_block128":
            scale = side.scale_f32
            if scale is None:
                scale = formats.SCALE_E8M0[cast(U8, side.scale_e8m0)]
            _hf_fp8(packed, scale, out)
        elif side.modes is not None:
            _refuse_modes(format, side.modes)
            _mix(fmt, packed, cast(U16, side.codebooks_bf16), side.modes, out)
        else:
            blocks, target = packed.reshape(-1, fmt.block_bytes), out.reshape(-1, fmt.block)
            for part in _chunks(len(blocks), fmt.block):
                _BLOCK_DECODERS[format](blocks[part], target[part])
    return out


def _refuse_modes(format: str, modes: U8) -> None:
    if (np.asarray(modes) > 1).any():
        found = sorted({int(m) for m in np.asarray(modes).reshape(-1)} - {0, 1})
        raise ValueError(f"{format}: codebook modes {found} are unknown, must be 0 or 1")


def decode_other(type_id: int, packed: U8) -> F32:
    """Decode a standard GGUF type without a packed form of ours, through the `gguf` package.

    Args:
        type_id: GGUF type (Q4_0, Q5_1, Q5_K, Q6_K, IQ4_XS and the like; our standard ones too).
        packed: uint8 [..., row bytes].

    Returns: float32 [..., n].

    Raises:
        ValueError: a type the package does not know or cannot decode, or a wrong byte count.
    """
    layout = type_layout(type_id)
    if not isinstance(packed, np.ndarray) or packed.dtype != np.uint8 or packed.ndim == 0:
        raise ValueError(f"{layout.ggml_name}: packed must be a uint8 array [..., bytes]")
    if packed.shape[-1] % layout.block_bytes:
        raise ValueError(
            f"{layout.ggml_name}: a row of {packed.shape[-1]} bytes is not a multiple of its block"
            f" of {layout.block_bytes} bytes ({layout.block} weights)"
        )
    import gguf
    from gguf import quants

    weights = packed.shape[-1] // layout.block_bytes * layout.block
    out = np.empty((*packed.shape[:-1], weights), np.float32)
    blocks, target = packed.reshape(-1, layout.block_bytes), out.reshape(-1, layout.block)
    try:
        kind = gguf.GGMLQuantizationType(type_id)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for part in _chunks(len(blocks), layout.block):
                target[part] = quants.dequantize(blocks[part], kind).reshape(-1, layout.block)
    except (NotImplementedError, ValueError) as error:
        raise ValueError(
            f"GGUF type {type_id} ({layout.ggml_name}) cannot be decoded by the gguf package"
            f" ({error}); convert the file to a supported type"
        ) from error
    return out


# Checking ---------------------------------------------------------------------------------------

_UE4M3_COLUMNS = {
    "rocmfp4": 16, "rocmfp4_fast": 16, "rocmfp6": 24, "rocmfp8": 32, "rocmfp3": 12,
    "rocmfp2_s40": 8, "rocmfp2_m1012": 8, "rocmfp2_signed": 8, "rocmfp2_affine": 8,
    "rocmfp2_mix": 8, "rocmfp3_mix": 12,
}  # fmt: skip
"""First scale byte of a block; the scales reach to its end."""

_FP16_COLUMNS = {
    "f16": (0,), "q8_0": (0,), "q4_k": (0, 2), "q2_k": (80, 82), "iq2_xxs": (0,),
}  # fmt: skip
"""First byte of each half-precision number of a block."""


def check(
    format: str,
    packed: U8,
    *,
    scale_e8m0: U8 | None = None,
    scale_f32: F32 | None = None,
    codebooks_bf16: U16 | None = None,
    modes: U8 | None = None,
) -> list[str]:
    """Every kind of invalid byte in packed weights, one line each; empty when all is well.

    Reads scale bytes only where there are blocks, all bytes where each is a number (FP8, floats).
    A line says what is invalid, how often, and where first.

    Args: as of `decode`.

    Raises:
        ValueError: as `decode` does for arguments that do not fit (but unknown modes are reported).
    """
    given = {
        "scale_e8m0": scale_e8m0,
        "scale_f32": scale_f32,
        "codebooks_bf16": codebooks_bf16,
        "modes": modes,
    }
    fmt, side = _prepare(format, packed, given)
    blocks = packed.reshape(-1, fmt.block_bytes)
    rows = packed.shape[:-1]
    problems: list[str] = []

    def find(what: str, test: Callable[[slice], Any], unit: str = "block") -> None:
        problems.extend(_find(fmt, rows, len(blocks), what, test, unit))

    if side.scale_e8m0 is not None:
        problems += _find_in("scale byte 255 (NaN)", side.scale_e8m0, side.scale_e8m0 == 255)
    if side.scale_f32 is not None:
        problems += _find_in("scale not finite", side.scale_f32, ~np.isfinite(side.scale_f32))
    if side.modes is not None:
        problems += _mix_problems(fmt, packed, cast(U16, side.codebooks_bf16), side.modes)
    elif format in _UE4M3_COLUMNS:
        first = _UE4M3_COLUMNS[format]
        mask = 0x7F if format == "rocmfp2_signed" else 0xFF
        find(
            "invalid scale byte (valid: 0x00..0x7e)",
            lambda part: _high(blocks[part, first:] & np.uint8(mask)) > 0x7E,
        )
        unsigned = problems and fmt.type_id == ROCMFP2_TYPE_ID and mask == 0xFF
        if unsigned and (blocks[:, first:] > 0x7F).any():
            problems[-1] += "; bytes with bit 7 set occur in the reading 'signed' only"
    elif format == "mxfp4":
        find("scale byte 255 (NaN)", lambda part: (blocks[part, :1] == 255).any(axis=1))
    elif format == "nvfp4":
        find(
            "scale byte 0x7f or 0xff (NaN)",
            lambda part: _high(blocks[part, :4] & np.uint8(127)) == 127,
        )
    elif format == "hf_fp8_e4m3_block128":
        find("code 0x7f or 0xff (NaN)", lambda part: blocks[part, 0] & 127 == 127, "weight")
    elif format in ("f32", "bf16"):
        find("number not finite", lambda part: _nonfinite(format, blocks[part]), "weight")
    for byte in _FP16_COLUMNS.get(format, ()):
        find(
            "half-precision number not finite" if format == "f16" else
            f"half-precision scale at byte {byte} not finite",
            lambda part, byte=byte: blocks[part, byte + 1] & 0x7C == 0x7C,  # type: ignore[misc]
            "weight" if format == "f16" else "block",
        )  # fmt: skip
    return problems


def _high(bytes_NC: U8) -> U8:
    """Largest byte of each row; column by column, since NumPy reduces short axes slowly."""
    out = bytes_NC[:, 0].copy()
    for column in range(1, bytes_NC.shape[1]):
        np.maximum(out, bytes_NC[:, column], out=out)
    return out


def _nonfinite(format: str, blocks_NB: U8) -> npt.NDArray[np.bool_]:
    whole = np.ascontiguousarray(blocks_NB)
    if format == "f32":
        bad = ~np.isfinite(whole.view("<f4")[:, 0])
    else:
        bad = (whole.view("<u2")[:, 0] & 0x7F80) == 0x7F80
    return cast("npt.NDArray[np.bool_]", bad)


def _find(
    fmt: Format,
    rows: tuple[int, ...],
    blocks: int,
    what: str,
    test: Callable[[slice], Any],
    unit: str,
) -> list[str]:
    count, first = 0, -1
    for part in _chunks(blocks, max(1, CHUNK_WEIGHTS >> 20)):
        bad = test(part)
        found = int(np.count_nonzero(bad))
        if found and first < 0:
            first = part.start + int(np.argmax(bad))
        count += found
    if not count:
        return []
    row, block = divmod(first, blocks // max(1, int(np.prod(rows))))
    where = tuple(int(i) for i in np.unravel_index(row, rows)) if rows else ()
    return [
        f"{fmt.name}: {what} in {count} of {blocks} {unit}s, first in row {where} {unit} {block}"
    ]


def _find_in(what: str, array: npt.NDArray[Any], bad: npt.NDArray[np.bool_]) -> list[str]:
    count = int(np.count_nonzero(bad))
    if not count:
        return []
    first = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
    return [f"{what} in {count} of {array.size} places, first at {first}"]


def _mix_problems(fmt: Format, packed: U8, codebooks_bf16: U16, modes: U8) -> list[str]:
    modes = np.asarray(modes)
    problems = _find_in(f"{fmt.name}: codebook mode neither 0 nor 1", modes, modes > 1)
    problems += codebook_problems(fmt.name, codebooks_bf16, modes)
    first = _UE4M3_COLUMNS[fmt.name]
    meta = packed.reshape(modes.size, -1, fmt.block_bytes)[:, :, first:]
    count, where = 0, ""
    for expert, mode in enumerate(modes.reshape(-1)):
        bad = _high(meta[expert] & np.uint8(0x7F if mode == 1 else 0xFF)) > 0x7E
        found = int(np.count_nonzero(bad))
        if found and not count:
            where = f"expert {expert}, block {int(np.argmax(bad))} of its {meta.shape[1]}"
        count += found
    if count:
        total = meta.shape[0] * meta.shape[1]
        problems.append(
            f"{fmt.name}: invalid scale byte in {count} of {total} blocks, first in {where}"
        )
    return problems


def codebook_problems(what: str, codebooks_bf16: U16, modes: U8) -> list[str]:
    """Codebooks of mode 1 that are not finite and strictly increasing, one line in all.

    Args:
        what: name for the report.
        codebooks_bf16: uint16 [*lead, 2, K].
        modes: uint8 [*lead].
    """
    levels = (codebooks_bf16.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        bad = ~(np.isfinite(levels).all(axis=-1) & (np.diff(levels) > 0).all(axis=-1))
    bad &= np.asarray(modes)[..., None] == 1
    return _find_in(f"{what}: codebook not finite and strictly increasing", bad, bad)


# Type 107 ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rocmfp2Guess:
    """Reading of type 107 taken from data, with the figures that led to it."""

    reading: Rocmfp2Reading
    format: str  # its format name
    blocks: int  # with a scale other than zero, looked at for the figures below
    code_shares: tuple[float, float, float, float]
    mean_scale_step: float  # mean of (byte 9 - byte 8)
    share_second_above: float  # blocks whose byte 9 exceeds byte 8
    sign_bits: int  # blocks with bit 7 in byte 8 or 9
    reason: str


def guess_rocmfp2_reading(packed: U8, max_blocks: int = 1 << 16) -> Rocmfp2Guess:
    """Which of the four readings the writer of a type-107 tensor meant.

    A byte 8 or 9 with bit 7 set occurs in `signed` only. Otherwise: affine if the second byte is
    above the first by more than 2.5 on average; else fixed if code 3 is rare (share below 0.6 of
    code 0's); else s40. Meant for weights of a routed expert, a few thousand blocks or more.

    Args:
        packed: uint8 [..., bytes], any number of blocks of 10 bytes.
        max_blocks: the figures come from this many blocks, evenly spread; bit 7 from all of them.

    Raises:
        ValueError: if `packed` holds no block with a scale other than zero, or is no whole number
            of blocks.
    """
    fmt, _ = _prepare("rocmfp2_s40", packed, {})
    blocks = packed.reshape(-1, fmt.block_bytes)
    sign_bits = int(np.count_nonzero((blocks[:, 8] | blocks[:, 9]) > 0x7F))
    sample = blocks[:: max(1, -(-len(blocks) // max_blocks))]
    sample = sample[(sample[:, 8:] & 0x7F).any(axis=1)]
    if not len(sample):
        raise ValueError("type 107: no block with a scale other than zero to tell the reading from")
    codes = _quads(np.ascontiguousarray(sample[:, :8]), formats.CODE_QUADS)
    shares = np.bincount(codes.reshape(-1), minlength=4) / codes.size
    step = (sample[:, 9] & 0x7F).astype(np.int16) - (sample[:, 8] & 0x7F)
    mean_step = float(step.mean())
    reading: Rocmfp2Reading
    if sign_bits:
        reading, reason = "signed", f"bit 7 of a scale byte is set in {sign_bits} blocks"
    elif mean_step > 2.5:
        reading, reason = "affine", f"mean(byte 9 - byte 8) = {mean_step:.2f} > 2.5"
    elif shares[3] < 0.6 * shares[0]:
        reading = "fixed"
        reason = f"share of code 3 = {shares[3]:.3f} < 0.6 * share of code 0 = {shares[0]:.3f}"
    else:
        reading = "s40"
        reason = (
            f"mean(byte 9 - byte 8) = {mean_step:.2f} <= 2.5 and share of code 3 ="
            f" {shares[3]:.3f} >= 0.6 * share of code 0 = {shares[0]:.3f}"
        )
    return Rocmfp2Guess(
        reading=reading,
        format=ROCMFP2_READINGS[reading],
        blocks=len(sample),
        code_shares=cast("tuple[float, float, float, float]", tuple(float(x) for x in shares)),
        mean_scale_step=mean_step,
        share_second_above=float((step > 0).mean()),
        sign_bits=sign_bits,
        reason=reason,
    )
