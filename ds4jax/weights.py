"""Weights onto the device, from an opened model file.

Tensors go through in canonical order, piece by piece: packed bytes are checked on the host, brought
into the kernels' form, and written into buffers that are allocated once, so neither the host nor
the device ever holds a second copy of more than one piece. Which weights exist is the work of
`ds4jax.tensors`, how they are stored that of `ds4jax.stored`; weights without a file are made by
`ds4jax.synthetic`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ds4jax import model_file, params, stored, tensors
from ds4jax.config import CpuWeights, ModelConfig, RuntimeConfig
from ds4jax.errors import ModelFileError, Problem
from ds4jax.model_file import Draft, ModelFile
from ds4jax.params import Params
from ds4jax.stored import Packed, StoredTensor
from ds4jax.tensors import TensorSpec
from pallas_kernels import formats as device_formats
from pallas_kernels import packing
from pallas_kernels.packing import QuantArray

PIECE_BYTES = 32 << 20
"""Packed bytes of one piece."""

_ROW_AXIS = {"codes": -2, "scales": -1, "mins": -1, "supers": -1}

Progress = Callable[[int, str], None]
"""Called with packed bytes done so far and the name of the tensor being loaded."""

Leaf = Any  # QuantArray, or an array


@dataclasses.dataclass(frozen=True)
class Form:
    """How a tensor is kept on the device: packed in `format`, or plain in `dtype`."""

    format: str | None
    dtype: str

    @property
    def name(self) -> str:
        return self.format or self.dtype


def load(
    source: str | os.PathLike[str] | ModelFile,
    runtime: RuntimeConfig,
    *,
    cpu_weights: CpuWeights = "packed",
    progress: Progress | None = None,
    rocmfp2: str = "auto",
    check_values: bool = True,
    scan: bool | None = None,
) -> tuple[ModelConfig, Params]:
    """Loads all weights of a model.

    Args:
        source: as of `model_file.open_model`, or a model already opened.
        runtime: dtype, backend and max_ctx are used.
        cpu_weights: packed keeps quantised matrices packed; decoded turns them into the compute
            dtype at load (more memory, faster on a CPU).
        progress: called once per tensor.
        rocmfp2: reading of GGUF type 107, if `source` is to be opened.
        check_values: refuse NaN and invalid scale codes, numbers that are not finite and expert
            ids outside the model.
        scan: stack layers that repeat (None: on every backend but the reference).

    Returns: the configuration and the parameter tree, on JAX's default device.

    Raises:
        ModelFileError: if the model cannot be opened, or holds invalid values (all are listed).
    """
    if not isinstance(source, ModelFile):
        source = model_file.open_model(source, rocmfp2=rocmfp2)
    elif source.problems:
        raise ModelFileError(str(source.path), source.problems)
    cfg = source.model_config
    packed = cpu_weights == "packed" or runtime.backend != "reference"
    forms = {s.name: form_of(source.tensors[s.name], runtime, packed) for s in source.specs()}
    builder = Builder(cfg, runtime, source.specs(), forms, scan)
    held = [source.tensors[spec.name] for spec in source.specs()]
    problems = _load_all(
        source.reader, held, forms, builder, cfg.num_experts, check_values, progress
    )
    if problems:
        raise ModelFileError(str(source.path), problems)
    return cfg, builder.finish()


def load_draft(
    draft: Draft,
    target: ModelConfig,
    runtime: RuntimeConfig,
    *,
    cpu_weights: CpuWeights = "packed",
    progress: Progress | None = None,
    check_values: bool = True,
) -> tuple[params.Weights, ...]:
    """Loads a DSpark drafter: one dictionary of weights per stage, without a stack axis.

    Keys are those of a layer of ratio 0; the first stage has `main_proj` and `main_norm` besides,
    the last `norm`, `hc_head_*`, `markov_head.*` and, if the file has one, `confidence_head.proj`.

    Args: as of `load`; `target` is the model it drafts for.

    Raises:
        ModelFileError: if anything is wrong with the drafter, values included.
    """
    config = draft.require("drafter")
    num_experts = config.num_experts or target.num_experts
    stages = tensors.stage_config(target, config.num_stages)
    held = list(draft.tensors.values())
    packed = cpu_weights == "packed" or runtime.backend != "reference"
    forms = {t.spec.name: form_of(t, runtime, packed) for t in held}
    builder = Builder(stages, runtime, [t.spec for t in held], forms, scan=False)
    problems = _load_all(draft.reader, held, forms, builder, num_experts, check_values, progress)
    if problems:
        raise ModelFileError("drafter", problems)
    tree = builder.finish()
    return tuple(params.layer_weights(units[0], 0) for units in tree.groups)


def _load_all(
    reader: stored.Container,
    held: list[StoredTensor],
    forms: Mapping[str, Form],
    builder: Builder,
    num_experts: int,
    check_values: bool,
    progress: Progress | None,
) -> list[Problem]:
    """Loads tensors one after the other; returns the invalid values found."""
    problems: list[Problem] = []
    done = 0
    for one in held:
        if progress is not None:
            progress(done, one.spec.name)
        checked = num_experts if check_values else None
        _load_tensor(reader, one, forms[one.spec.name], builder, checked, problems)
        done += one.nbytes
    if progress is not None and not problems:
        progress(done, "")
    return problems


def form_of(held: StoredTensor, runtime: RuntimeConfig, packed: bool) -> Form:
    """Packed if the kernels know the format and the model takes the weight packed; else plain."""
    spec = held.spec
    dtype = np.dtype(params.weight_dtype(spec.key, jnp.dtype(runtime.dtype))).name
    if spec.kind == "table":
        return Form(None, "int32")
    if spec.kind == "norm" or spec.key.startswith("confidence_head"):
        return Form(None, "float32")
    known = device_formats.FORMATS.get(held.format) if held.native else None
    fits = known is not None and spec.shape[-1] % known.source_block == 0
    if packed and fits and spec.key in params.MATRIX_KEYS:
        return Form(held.format, dtype)
    return Form(None, dtype)


def _load_tensor(
    reader: stored.Container,
    held: StoredTensor,
    form: Form,
    builder: Builder,
    num_experts: int | None,
    problems: list[Problem],
) -> None:
    """Checks one tensor (with `num_experts` given) and brings it onto the device, piece by piece.

    Once anything is wrong nothing more is placed: only the complete list of findings is wanted.
    """
    spec = held.spec
    if spec.kind == "table":
        ids = reader.read_table(held)
        if num_experts is not None:
            problems += stored.table_problems(held, ids, num_experts)
        if not problems:
            builder.put(spec, ids, 0)
        return
    limit = PIECE_BYTES
    if form.format is None:  # decoded pieces are larger than packed ones
        limit = max(1, PIECE_BYTES * held.nbytes // (4 * math.prod(spec.shape)))
    for rows in stored.chunks(held, limit):
        piece = reader.read(held, rows)
        if num_experts is not None:
            problems += stored.piece_problems(held, piece, rows)
        if problems:
            continue
        if form.format is not None:
            builder.put_packed(spec, piece, rows.start)
        else:
            values = piece.decode()
            shape = (values.shape[0], *spec.shape[1:]) if len(spec.shape) > 1 else spec.shape
            builder.put(spec, values.reshape(shape), rows.start)


# --- buffers ----------------------------------------------------------------------------------


class Builder:
    """The tree under construction: one buffer per key and stack, filled in place.

    On a CPU the buffers are NumPy arrays that become device arrays at the end, one by one. On other
    platforms they live on the device, and every piece is packed there by a jitted update that takes
    the old buffer over (donation).
    """

    def __init__(
        self,
        cfg: ModelConfig,
        runtime: RuntimeConfig,
        specs: list[TensorSpec],
        forms: Mapping[str, Form],
        scan: bool | None,
        on_host: bool | None = None,
    ) -> None:
        self.cfg = cfg
        self.max_ctx = min(runtime.max_ctx, cfg.max_position_embeddings)
        self.on_host = jax.default_backend() == "cpu" if on_host is None else on_host
        self.layout = _layout(cfg, runtime, specs, forms, scan)
        self.forms = forms
        self.joined = runtime.backend != "reference"
        if self.joined:
            _check_kernels(specs, forms)
        self.slots = _slots(self.layout)  # layer -> (group, unit, entry)
        self.buffers: dict[tuple[int, int, str], Leaf] = {}
        self.top: dict[str, Leaf] = {}

    def put(self, spec: TensorSpec, values: Any, first: int) -> None:
        """Writes plain values (NumPy or JAX) into entries first.. of the tensor's first axis."""
        form = self.forms[spec.name]
        if isinstance(values, np.ndarray):
            values = values.astype(_np_dtype(form.dtype), copy=False)
        self._update(spec, values, None, first)

    def put_packed(self, spec: TensorSpec, piece: Packed, first: int) -> None:
        """Writes packed bytes into entries first.. of the tensor's first axis."""
        side = dict(piece.side)
        if piece.factor is not None:
            side["factor"] = np.broadcast_to(piece.factor, piece.data.shape[:-2])
        self._update(spec, piece.data, side, first)

    def put_bytes(self, spec: TensorSpec, data: Any, side: dict[str, Any], first: int) -> None:
        """As `put_packed`, for bytes (NumPy or JAX) that come from no file."""
        self._update(spec, data, side, first)

    def _update(self, spec: TensorSpec, data: Any, side: dict[str, Any] | None, first: int) -> None:
        if self.on_host:
            part: Leaf = np.asarray(data)
            if side is not None:
                arrays = {k: np.asarray(v) for k, v in side.items()}
                part = packing.pack(str(self.forms[spec.name].format), part, **arrays)
            half = self._half(spec)
            self._write(spec, lambda buffer, entry: _host_write(buffer, part, entry, first, half))
            return
        given = {k: jnp.asarray(v) for k, v in (side or {}).items()}
        array = jnp.asarray(data)
        self._write(
            spec,
            lambda buffer, entry: _device_write(
                buffer, array, given, jnp.asarray([entry, first], jnp.int32), self._half(spec)
            ),
        )

    def _half(self, spec: TensorSpec) -> int | None:
        """Which half of a joined matrix the tensor is, if any."""
        return params.JOINED.get(spec.key) if self.joined else None

    def place(self, spec: TensorSpec, make: Callable[[TensorSpec, int], Leaf]) -> tuple[Any, int]:
        """Where the tensor's buffer is kept and its entry there; made if it does not exist yet."""
        if spec.layer is None:
            if spec.key not in self.top:
                self.top[spec.key] = make(spec, 1)
            return spec.key, 0
        group, unit, entry = self.slots[spec.layer]
        key = (group, unit, spec.key if self._half(spec) is None else "ffn.experts.w13")
        if key not in self.buffers:
            self.buffers[key] = make(spec, self.layout[group].count)
        return key, entry

    def _write(self, spec: TensorSpec, fn: Callable[[Leaf, int], Leaf]) -> None:
        key, entry = self.place(spec, self._allocate)
        held: dict[Any, Leaf] = self.top if spec.layer is None else self.buffers
        held[key] = fn(held[key], entry)

    def shapes(self, spec: TensorSpec, count: int) -> Leaf:
        """Shapes and dtypes of the buffer of a stack of `count` layers."""
        found = abstract_leaf(spec, self.forms[spec.name].name, count)
        if self._half(spec) is not None:
            found = jax.eval_shape(packing.interleave, found, found)
        return found

    def _allocate(self, spec: TensorSpec, count: int) -> Leaf:
        xp: Any = np if self.on_host else jnp
        return jax.tree.map(lambda s: xp.zeros(s.shape, s.dtype), self.shapes(spec, count))

    def finish(self, on_device: Callable[[Leaf], Leaf] | None = None) -> Params:
        """The tree; buffers are given up one by one.

        Args: on_device: what makes a leaf of the tree of a buffer; None: a device array.
        """
        on_device = on_device or _on_device
        main, compress = params.rope_tables(self.cfg, self.max_ctx)
        groups = []
        for g, group in enumerate(self.layout):
            units: list[params.Weights] = [{} for _ in group.unit]
            for key in [k for k in self.buffers if k[0] == g]:
                units[key[1]][key[2]] = on_device(self.buffers.pop(key))
            groups.append(tuple(units))
        top = {k: jax.tree.map(_first, on_device(v)) for k, v in self.top.items()}
        return Params(
            top=top,
            groups=tuple(groups),
            rope_main=jnp.asarray(main),
            rope_compress=jnp.asarray(compress),
            layout=self.layout,
        )


def abstract(
    cfg: ModelConfig,
    runtime: RuntimeConfig,
    forms: Mapping[str, Form],
    *,
    scan: bool | None = None,
) -> Params:
    """The tree that a model's tensors in these forms become, as shapes and dtypes.

    Args:
        forms: form of every tensor, by name. scan: as of `load`.

    Raises:
        NotImplementedError: if the kernels cannot take the tensors in these forms.
    """
    specs = [s for s in tensors.specs(cfg) if s.name in forms]
    builder = Builder(cfg, runtime, specs, forms, scan, on_host=True)
    for spec in specs:
        builder.place(spec, builder.shapes)
    return builder.finish(on_device=lambda leaf: leaf)


def abstract_leaf(spec: TensorSpec, form: str, count: int) -> Leaf:
    """Shapes and dtypes of a tensor's stack of `count` layers.

    Args:
        form: a packed format, or the dtype of a plain weight.
    """
    if form in device_formats.FORMATS:
        *lead, rows, cols = spec.shape
        return packing.abstract(form, (count, *lead), rows, cols)
    return jax.ShapeDtypeStruct((count, *spec.shape), _np_dtype(form))


def _layout(
    cfg: ModelConfig,
    runtime: RuntimeConfig,
    specs: list[TensorSpec],
    forms: Mapping[str, Form],
    scan: bool | None,
) -> tuple[params.Group, ...]:
    types: list[dict[str, str]] = [{} for _ in range(cfg.num_layers)]
    for spec in specs:
        if spec.layer is not None:
            types[spec.layer][spec.key] = forms[spec.name].name
    wanted = runtime.backend != "reference" if scan is None else scan
    return params.group_layers(cfg, types, scan=wanted)


def _slots(layout: tuple[params.Group, ...]) -> dict[int, tuple[int, int, int]]:
    out = {}
    for g, group in enumerate(layout):
        for entry in range(group.count):
            for unit in range(len(group.unit)):
                out[group.first + entry * len(group.unit) + unit] = (g, unit, entry)
    return out


def _np_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _first(a: Any) -> Any:
    """The only entry of a stack."""
    shape = isinstance(a, jax.ShapeDtypeStruct)
    return jax.ShapeDtypeStruct(a.shape[1:], a.dtype) if shape else a[0]


def _on_device(leaf: Leaf) -> Leaf:
    return jax.tree.map(jnp.asarray, leaf)


def _fields(part: Leaf) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if not field.metadata.get("static") and value is not None:
            yield field.name, value


def _row_start(field: str, part: QuantArray, first: Any) -> Any:
    """Start of a piece of rows on a field's row axis (tile scales have one entry for 128 rows)."""
    tiles = field == "scales" and device_formats.get(part.format).scale == "tile"
    return first // 128 if tiles else first


def _check_kernels(specs: list[TensorSpec], forms: Mapping[str, Form]) -> None:
    """Gate and up of a layer's experts must be alike (every packed format has kernels)."""
    kinds: dict[int | None, set[str]] = {}
    for spec in specs:
        if spec.key in params.JOINED:
            kinds.setdefault(spec.layer, set()).add(forms[spec.name].name)
    for layer, found in kinds.items():
        if len(found) > 1:
            raise NotImplementedError(
                f"experts: the kernels take gate and up in one format, layer {layer} has"
                f" {' and '.join(sorted(found))}"
            )


def _joined_fields(buffer: Leaf, part: Leaf) -> Iterator[tuple[str, Any, Any, int]]:
    """Field by field: name, buffer with its halves on an axis of 2, a half's piece, that axis."""
    plain = not isinstance(part, QuantArray)
    fields = [("plain", part)] if plain else list(_fields(part))
    for name, value in fields:
        whole = buffer if plain else getattr(buffer, name)
        at, run = (-2 if name in ("plain", "codes") else -1), packing.RUN
        if name == "books":  # one for both: alike in matrices that may be joined
            yield name, whole[..., None], value[..., None], value.ndim
            continue
        if name == "factor":
            value, run = value[..., None], 1
        elif name == "scales" and device_formats.get(part.format).scale == "tile":
            repeat = packing.tile_rows(part) // run
            xp: Any = np if isinstance(value, np.ndarray) else jnp
            value, run = xp.repeat(value, repeat, -1)[..., : part.rows // run], 1
        axis = value.ndim + at
        new = (*value.shape[:axis], -1, 1, run, *value.shape[axis + 1 :])
        old = (*whole.shape[: axis + 1], -1, 2, run, *whole.shape[axis + 2 :])
        yield name, whole.reshape(old), value.reshape(new), axis + 1


def _host_write(buffer: Leaf, part: Leaf, entry: int, first: int, half: int | None = None) -> Leaf:
    """Assigns a piece in place; `first` counts experts where there are any, else rows."""
    if half is not None:
        for _, whole, value, of_halves in _joined_fields(buffer, part):
            at: list[Any] = [slice(None)] * value.ndim
            at[0] = slice(first, first + value.shape[0])
            if whole.shape[of_halves + 1] == 2:
                at[of_halves] = slice(half, half + 1)
            whole[(entry, *at)] = value
        return buffer
    if not isinstance(part, QuantArray):
        buffer[entry, first : first + part.shape[0]] = part
        return buffer
    for name, value in _fields(part):
        axis = _ROW_AXIS.get(name)
        place: list[Any] = [slice(None)] * value.ndim
        if part.lead:
            place[0] = slice(first, first + part.lead[0])
        elif axis is not None:
            start = _row_start(name, part, first)
            place[axis] = slice(start, start + value.shape[axis])
        getattr(buffer, name)[(entry, *place)] = value
    return buffer


@functools.partial(jax.jit, donate_argnums=0, static_argnames="half")
def _device_write(
    buffer: Leaf,
    data: jax.Array,
    side: dict[str, jax.Array],
    at: jax.Array,
    half: int | None = None,
) -> Leaf:
    """Packs a piece (or takes it plain) and writes it at [entry, first], in place."""
    entry, first = at[0], at[1]
    zero = jnp.int32(0)
    if half is not None:
        piece: Any = data
        if isinstance(buffer, QuantArray):
            piece = packing.pack(buffer.format, data, **side)
        done: dict[str, Any] = {}
        for name, whole, value, of_halves in _joined_fields(buffer, piece):
            where: list[Any] = [entry, first, *(zero,) * (value.ndim - 1)]
            if whole.shape[of_halves + 1] == 2:
                where[of_halves + 1] = jnp.int32(half)
            old = buffer if name == "plain" else getattr(buffer, name)
            made = jax.lax.dynamic_update_slice(whole, value[None].astype(old.dtype), where)
            done[name] = made.reshape(old.shape)
        return done["plain"] if "plain" in done else dataclasses.replace(buffer, **done)
    if not isinstance(buffer, QuantArray):
        at_plain = (entry, first, *(zero,) * (data.ndim - 1))
        return jax.lax.dynamic_update_slice(buffer, data[None].astype(buffer.dtype), at_plain)
    part = packing.pack(buffer.format, data, **side)
    new: dict[str, Any] = {}
    for name, value in _fields(part):
        starts: list[Any] = [zero] * value.ndim
        axis = _ROW_AXIS.get(name)
        if part.lead:
            starts[0] = first
        elif axis is not None:
            starts[axis] = _row_start(name, part, first)
        old = getattr(buffer, name)
        new[name] = jax.lax.dynamic_update_slice(
            old, value[None].astype(old.dtype), (entry, *starts)
        )
    return dataclasses.replace(buffer, **new)
