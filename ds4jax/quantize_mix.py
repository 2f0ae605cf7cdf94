"""Encoding of the two MIX types: fitting two codebooks per expert, and packing with given ones.

NumPy only. Half-blocks of an expert fall into two populations by their crest (flat or peaked); each
gets a codebook from a weighted Lloyd iteration, and every half-block then takes the book and scale
byte that reproduce it best. Packing equals the reference exporter byte for byte; the result means
nothing without its table, which `pack_table` writes and `ds4jax.mix` reads.

Shape letters: E expert, R row, W weight of a row, N half-block, L place in a half-block, K level.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4jax import formats, mix, quantize
from ds4jax.formats import F32, FORMATS, U8, U16

HALF = 16
CREST_SPLIT = np.float32(0.52)
BINS = 4097
LLOYD_ITERATIONS = 24
LEVELS = {"rocmfp2_mix": 4, "rocmfp3_mix": 8}


def _importance(width: int, imatrix: npt.NDArray[Any] | None) -> F32:
    if imatrix is None:
        return np.ones(width, np.float32)
    if imatrix.shape != (width,) or imatrix.dtype != np.float32:
        raise ValueError(f"imatrix is {imatrix.dtype} {imatrix.shape}, must be float32 ({width},)")
    usable = np.isfinite(imatrix) & (imatrix > 0)
    return np.where(usable, imatrix, np.float32(0)).astype(np.float32)


def fit(weights: Iterable[F32], levels: int, imatrix: npt.NDArray[Any] | None = None) -> U16:
    """Two codebooks for the weights of one expert (gate and up together, down alone).

    Every half-block is divided by its largest magnitude; those whose RMS stays below 0.52 of it
    train book 0, the others book 1. A book is fitted to a histogram over [-1, 1].

    Args:
        weights: float32 [..., n] arrays, n a multiple of 32, all finite.
        levels: 4 or 8.
        imatrix: float32 [n], importance of every input column, or None.

    Returns: uint16 [2, levels], bits of bfloat16, strictly increasing.
    """
    histogram = np.zeros((2, BINS))
    for part in weights:
        width = part.shape[-1]
        importance = _importance(width, imatrix)
        rows = part.reshape(-1, width)
        step = max(1, quantize.CHUNK_WEIGHTS // width)
        for i in range(0, len(rows), step):
            histogram += _histogram(rows[i : i + step], importance)
    return np.stack([_fit_book(h, levels) for h in histogram])


def _histogram(rows_RW: F32, importance_W: F32) -> npt.NDArray[np.float64]:
    x_NL = rows_RW.reshape(-1, HALF)
    largest = np.abs(x_NL).max(axis=1)
    weight_NL = np.broadcast_to(importance_W, rows_RW.shape).reshape(-1, HALF)
    used = largest > 0
    unit = x_NL[used] / largest[used, None]
    peaked = np.sqrt(np.mean(unit * unit, axis=1)) >= CREST_SPLIT
    place = np.rint((unit + 1) * ((BINS - 1) / 2)).astype(np.intp)
    place += peaked[:, None] * BINS
    weight = weight_NL[used].reshape(-1).astype(np.float64)
    count = np.bincount(place.reshape(-1), weight, minlength=2 * BINS).astype(np.float64)
    return count.reshape(2, BINS)


def _fit_book(mass: npt.NDArray[np.float64], levels: int) -> U16:
    """Lloyd iteration on a histogram, from its quantiles; bfloat16 bits, strictly increasing."""
    position = np.linspace(-1, 1, BINS)
    total = np.cumsum(mass)
    if total[-1] > 0:
        quantile = (np.arange(levels) + 0.5) / levels * total[-1]
        book = position[np.minimum(np.searchsorted(total, quantile), BINS - 1)]
    else:
        book = np.linspace(-1, 1, levels)
    for _ in range(LLOYD_ITERATIONS):
        book = np.sort(book)
        nearest = np.searchsorted((book[:-1] + book[1:]) / 2, position)
        weight = np.bincount(nearest, mass, minlength=levels)
        moment = np.bincount(nearest, mass * position, minlength=levels)
        book = np.where(weight > 0, moment / np.where(weight > 0, weight, 1), book)
    bits = quantize.encode("bf16", np.sort(book).astype(np.float32)).view("<u2").astype(np.uint16)
    return _strictly_increasing(bits)


def _strictly_increasing(bits: U16) -> U16:
    """Move equal levels to the next larger bfloat16."""
    wide = bits.astype(np.int32)
    order = np.where(wide & 0x8000, -(wide & 0x7FFF), wide)
    for i in range(1, len(order)):
        order[i] = max(order[i], order[i - 1] + 1)
    return np.where(order < 0, -order | 0x8000, order).astype(np.uint16)


def encode(
    format: str,
    weights: F32,
    codebooks_bf16: U16,
    imatrix: npt.NDArray[Any] | None = None,
) -> U8:
    """Pack weights with given codebooks (mode 1), byte for byte as the reference exporter does.

    Args:
        format: "rocmfp2_mix" or "rocmfp3_mix".
        weights: float32 [*lead, ..., n], all finite.
        codebooks_bf16: uint16 [*lead, 2, K], strictly increasing; lead are the experts, or ().
        imatrix: float32 [n] or None.

    Returns: uint8 [*lead, ..., row bytes].

    Raises:
        ValueError: unknown format, shapes that disagree, weights that are not finite.
    """
    if format not in LEVELS:
        raise ValueError(f"format {format!r} has no codebooks; choose one of {list(LEVELS)}")
    fmt = FORMATS[format]
    width = weights.shape[-1]
    row_bytes = fmt.row_bytes(width)
    lead = codebooks_bf16.shape[:-2]
    if codebooks_bf16.shape[-2:] != (2, LEVELS[format]) or weights.shape[: len(lead)] != lead:
        raise ValueError(
            f"{format}: codebooks are {codebooks_bf16.shape} for weights {weights.shape}, must be"
            f" [leading axes of the weights, 2, {LEVELS[format]}]"
        )
    if weights.dtype != np.float32 or not np.isfinite(weights).all():
        raise ValueError(f"{format}: weights must be float32 and finite; they are {weights.dtype}")
    importance = _importance(width, imatrix)
    out = np.empty((*weights.shape[:-1], row_bytes), np.uint8)
    experts = int(np.prod(lead))
    rows_ERW = weights.reshape(experts, -1, width)
    out_ERB = out.reshape(experts, -1, row_bytes)
    books_E2K = codebooks_bf16.reshape(experts, 2, -1)
    step = max(1, quantize.CHUNK_WEIGHTS // width)
    with np.errstate(all="ignore"):
        for rows, target, books in zip(rows_ERW, out_ERB, books_E2K, strict=True):
            for i in range(0, len(rows), step):
                part = _encode_rows(rows[i : i + step], books, importance)
                target[i : i + step] = part.reshape(-1, row_bytes)
    return out


def _encode_rows(rows_RW: F32, books_2K: U16, importance_W: F32) -> U8:
    x_LN = np.ascontiguousarray(rows_RW.reshape(-1, HALF).T)
    weight_LN = np.ascontiguousarray(
        np.broadcast_to(importance_W, rows_RW.shape).reshape(-1, HALF).T
    )
    levels_2K = (books_2K.astype(np.uint32) << 16).view(np.float32)
    largest = np.abs(x_LN).max(axis=0)
    best = np.full(x_LN.shape[1], np.inf, np.float32)
    meta = np.zeros(x_LN.shape[1], np.intp)
    code = np.full(x_LN.shape, np.argmin(np.abs(levels_2K[0])), np.uint8)
    for book, levels in enumerate(levels_2K):
        splits = np.float32(0.5) * (levels[:-1] + levels[1:])
        centre = quantize.nearest_scale(largest / np.abs(levels).max())
        for shift in range(-2, 3):
            byte = centre + shift
            usable = (byte >= 1) & (byte <= quantize.MAX_SCALE_BYTE) & (largest > 0)
            byte = np.clip(byte, 1, quantize.MAX_SCALE_BYTE)
            scale = formats.SCALE_UE4M3[byte]
            scaled = x_LN * (np.float32(1) / scale)
            trial = np.zeros(x_LN.shape, np.uint8)
            for split in splits:
                trial += scaled > split
            difference = x_LN - scale * levels[trial]
            difference *= weight_LN * difference
            error = quantize.sum_in_order(difference)
            better = usable & (error < best)
            best = np.where(better, error, best)
            meta = np.where(better, byte | book << 7, meta)
            code[:, better] = trial[:, better]
    codes = np.ascontiguousarray(code.T).reshape(-1, 2 * HALF)
    payload = quantize.pack_bits(codes, {4: 2, 8: 3}[levels_2K.shape[1]])
    return np.concatenate((payload, meta.astype(np.uint8).reshape(-1, 2)), axis=1)


def table_kind(table: mix.MixTable) -> str:
    """Which side table describes a tensor: "p4mix", "gumix" or "dmix"."""
    if table.shape is None:
        return "dmix"
    return "p4mix" if table.format == "rocmfp3_mix" else "gumix"


def pack_table(kind: str, tables: Sequence[mix.MixTable]) -> U8:
    """A side table, as `ds4jax.mix.parse` reads it.

    Args:
        kind: "p4mix" (type 105, down experts), "gumix" (type 106, experts) or "dmix" (attention).
        tables: one per tensor; names decide layer and place.

    Returns: uint8 [bytes], the value of the metadata key `deepseek4.<kind>.sidecar`.

    Raises:
        ValueError: for a tensor that such a table cannot describe.
    """
    magic = {"p4mix": b"P4MIXv1\0", "gumix": b"GUMIXs1\0", "dmix": b"DMIXs1\0\0"}[kind]
    places = {
        "p4mix": ("ffn_down_exps",),
        "gumix": mix.GUMIX_SURFACES,
        "dmix": mix.DMIX_CLASSES,
    }[kind]
    out = bytearray(magic + struct.pack("<2I", len(tables), 0))
    for table in tables:
        first, layer, leaf, *_ = table.tensor.split(".")
        if first != "blk" or leaf not in places or table_kind(table) != kind:
            raise ValueError(f"{kind}: cannot describe {table.tensor} of {table.format}")
        out += struct.pack("<I", int(layer))
        if kind != "p4mix":
            out += struct.pack("<I", places.index(leaf))
        levels = table.codebooks_bf16.shape[-1]
        if table.shape is None:
            type_id = int(FORMATS[table.format].type_id or 0)
            out += struct.pack("<4I", type_id, 1, 2, levels) + bytes([int(table.modes), 0, 0, 0])
        else:
            out += struct.pack("<5I", *table.shape, 2, levels)
            out += table.modes.tobytes()
        if kind == "p4mix":
            out += bytes(table.modes.size)
        out += table.codebooks_bf16.astype("<u2").tobytes()
    return np.frombuffer(bytes(out), np.uint8)
