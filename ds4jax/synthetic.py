"""Random weights of a model's real sizes and formats, made on the device, without any file.

For measurements at full size and for tests of shapes. The numbers are plausible (finite
activations, spread logits, routing that uses all experts) but mean nothing. Packed formats get
random codes under fixed scales, so that every decoder runs on its ordinary path.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax import formats as file_formats
from ds4jax import params, stored, tensors
from ds4jax.config import ModelConfig, RuntimeConfig
from ds4jax.params import Params
from ds4jax.tensors import TensorClass, TensorSpec
from ds4jax.weights import PIECE_BYTES, Builder, Form
from pallas_kernels import formats as device_formats

# Root mean square of the levels that random codes give, and the scale bytes of a block.
_UE4M3: dict[str, tuple[float, tuple[int, ...]]] = {
    "rocmfp4": (5.36, (16, 17)),
    "rocmfp4_fast": (5.36, (16,)),
    "rocmfp6": (18.2, (24, 25)),
    "rocmfp8": (73.9, (32,)),
    "rocmfp3": (2.29, (12, 13)),
    "rocmfp3_mix": (2.29, (12, 13)),
    "rocmfp2_mix": (1.22, (8, 9)),
    "rocmfp2_s40": (2.92, (8, 9)),
    "rocmfp2_m1012": (1.22, (8, 9)),
    "rocmfp2_signed": (1.22, (8, 9)),
    "nvfp4": (5.85, (0, 1, 2, 3)),
}
# First byte of each half-precision scale, and its value for weights of standard deviation 1.
_FP16: dict[str, tuple[tuple[int, float], ...]] = {
    "q8_0": ((0, 1 / 73.9),),
    "q4_k": ((0, 1 / 257), (2, 7.5 / 257)),
    "q2_k": ((80, 1 / 13.9), (82, 1.5 / 13.9)),
    "iq2_xxs": ((0, 1 / 50.0),),
}
_CODE_STD = 1.118  # of codes 0..3, around 1.5

HOST_SIZE = 1 << 20
"""Numbers up to which a piece is drawn on the host."""

Template = tuple[tuple[int, int], ...]
"""Bytes of a block that are fixed: (position, value)."""


def init_random(
    cfg: ModelConfig,
    key: jax.Array,
    runtime: RuntimeConfig,
    *,
    types: Mapping[TensorClass, str] | None = None,
    scan: bool | None = None,
) -> Params:
    """Random parameters of a model.

    Args:
        key: a JAX random key.
        runtime: dtype, backend and max_ctx are used, as in `weights.load`.
        types: packed format by tensor class ("experts_gate_up": "rocmfp2_s40", ...); classes that
            are not named are plain, in the dtype a file of floats would be loaded in.
        scan: stack layers that repeat (None: on every backend but the reference).

    Raises:
        ValueError: for a class or format that does not exist, a class that is never packed, or rows
            that are no whole number of blocks.
    """
    specs = [s for s in tensors.specs(cfg) if s.required]
    kinds = forms(cfg, runtime, types)
    builder = Builder(cfg, runtime, specs, kinds, scan)
    for number, spec in enumerate(specs):
        one = jax.random.fold_in(key, number)
        form = kinds[spec.name]
        if form.format is not None:
            _put_packed(builder, spec, form.format, one)
        elif len(spec.shape) > 1 and spec.kind not in ("table", "hyper_connection"):
            _put_plain(builder, spec, one)
        else:
            builder.put(spec, _special(cfg, spec, one), 0)
    return builder.finish()


def forms(
    cfg: ModelConfig, runtime: RuntimeConfig, types: Mapping[TensorClass, str] | None = None
) -> dict[str, Form]:
    """The form of every tensor, by name.

    Args, Raises: as of `init_random`.
    """
    specs = [s for s in tensors.specs(cfg) if s.required]
    return {s.name: _form(s, dict(types or {}), runtime) for s in specs}


def _form(spec: TensorSpec, types: dict[TensorClass, str], runtime: RuntimeConfig) -> Form:
    dtype = np.dtype(params.weight_dtype(spec.key, jnp.dtype(runtime.dtype))).name
    if spec.kind == "table":
        return Form(None, "int32")
    format = types.get(spec.kind)
    if format is None or spec.key not in params.MATRIX_KEYS:
        return Form(None, dtype)
    known = device_formats.get(format)
    if spec.shape[-1] % known.source_block:
        raise ValueError(
            f"{spec.name}: rows of {spec.shape[-1]} weights are no multiple of the block of"
            f" {known.source_block} of {format}"
        )
    return Form(format, dtype)


def _std(spec: TensorSpec) -> float:
    """Standard deviation of a matrix: products keep the size of their inputs."""
    return 1.0 if spec.kind == "embedding" else spec.shape[-1] ** -0.5


def _host(key: jax.Array) -> np.random.Generator:
    """A host generator for tensors too small to be worth a compilation."""
    return np.random.default_rng(np.asarray(jax.random.bits(key, (4,), jnp.uint32)))


def _special(cfg: ModelConfig, spec: TensorSpec, key: jax.Array) -> Any:
    """Vectors, tables and hyper-connection maps."""
    if spec.kind == "table":
        first = _host(key).integers(0, cfg.num_experts, (spec.shape[0], 1))
        return (first + np.arange(spec.shape[1])) % cfg.num_experts  # distinct in a row
    if spec.kind == "norm" or spec.key.endswith("_scale"):
        return np.ones(spec.shape, np.float32)
    if spec.key.endswith(("_base", "gate.bias")):
        return np.zeros(spec.shape, np.float32)
    scale = 1.0 if spec.kind == "sink" else spec.shape[-1] ** -0.5
    return scale * _host(key).standard_normal(spec.shape, np.float32)


def _put_plain(builder: Builder, spec: TensorSpec, key: jax.Array) -> None:
    nbytes = 4 * math.prod(spec.shape)
    for rows in stored.slices(spec.shape, nbytes, PIECE_BYTES):
        shape = (rows.stop - rows.start, *spec.shape[1:])
        one = jax.random.fold_in(key, rows.start)
        if math.prod(shape) <= HOST_SIZE:
            piece: Any = _std(spec) * _host(one).standard_normal(shape, np.float32)
        else:
            piece = _normal(one, shape, _std(spec))
        builder.put(spec, piece, rows.start)


@functools.partial(jax.jit, static_argnames=("shape", "std"))
def _normal(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    return std * jax.random.normal(key, shape, jnp.float32)


def _put_packed(builder: Builder, spec: TensorSpec, format: str, key: jax.Array) -> None:
    fmt = file_formats.FORMATS[format]
    row_bytes = fmt.row_bytes(spec.shape[-1])
    nbytes = math.prod(spec.shape[:-1]) * row_bytes
    fixed = _template(format, _std(spec))
    mask = 0xBF if format == "hf_fp8_e4m3_block128" else 0xFF  # no NaN, at most 1.875
    for rows in stored.slices(spec.shape, nbytes, PIECE_BYTES):
        lead = (rows.stop - rows.start, *spec.shape[1:-1])
        shape = (*lead, row_bytes // fmt.block_bytes, fmt.block_bytes)
        one = jax.random.fold_in(key, rows.start)
        if math.prod(shape) <= HOST_SIZE:
            data: Any = _host(one).integers(0, 256, shape, np.uint8) & np.uint8(mask)
            for at, value in fixed:
                data[..., at] = value
        else:
            data = _codes(one, shape, fixed, mask)
        side = _side(format, lead, spec.shape[-1], _std(spec))
        builder.put_bytes(spec, data.reshape(*lead, row_bytes), side, rows.start)


@functools.partial(jax.jit, static_argnames=("shape", "fixed", "mask"))
def _codes(key: jax.Array, shape: tuple[int, ...], fixed: Template, mask: int) -> jax.Array:
    """Random blocks [..., bytes] with fixed bytes at the same places of each."""
    data = jax.random.bits(key, shape, jnp.uint8) & jnp.uint8(mask)
    for at, value in fixed:
        data = data.at[..., at].set(jnp.uint8(value))
    return data


def _template(format: str, std: float) -> Template:
    """The scale bytes of a block whose weights should have standard deviation `std`."""
    if format in _UE4M3:
        rms, places = _UE4M3[format]
        return tuple((at, _ue4m3(std / rms)) for at in places)
    if format == "rocmfp2_affine":
        scale = std / _CODE_STD
        return ((8, _ue4m3(scale)), (9, _ue4m3(1.5 * scale)))
    if format == "mxfp4":
        return ((0, _e8m0(std / 5.85) + 1),)  # its levels are doubled
    out = []
    for at, factor in _FP16.get(format, ()):
        low, high = np.float16(factor * std).tobytes()
        out += [(at, low), (at + 1, high)]
    return tuple(out)


def _ue4m3(value: float) -> int:
    """Nearest scale byte other than 0."""
    return 1 + int(np.abs(file_formats.SCALE_UE4M3[1:127] - value).argmin())


def _e8m0(value: float) -> int:
    return 127 + round(math.log2(value))


def _side(format: str, lead: tuple[int, ...], cols: int, std: float) -> dict[str, Any]:
    """Side arrays of a piece of `lead` rows."""
    if format == "hf_fp4_e2m1":
        scale = np.uint8(_e8m0(std / 2.92))
        return {"scale_e8m0": np.full((*lead, cols // 32), scale)}
    if format == "hf_fp8_e4m3_block128":
        tiles = (*lead[:-1], -(-lead[-1] // 128), -(-cols // 128))
        return {"scale_e8m0": np.full(tiles, np.uint8(_e8m0(std / 0.61)))}
    if format in ("rocmfp3_mix", "rocmfp2_mix"):
        levels = 8 if format == "rocmfp3_mix" else 4
        outer = lead[:-1]
        return {
            "codebooks_bf16": np.zeros((*outer, 2, levels), np.uint16),
            "modes": np.zeros(outer, np.uint8),  # fixed levels
        }
    return {}
