"""How the tensors of the description are stored in a file, and their bytes.

Matches `ds4jax.tensors` specifications with what a GGUF file or a checkpoint holds, collecting
every difference, and reads matched tensors as packed bytes with their side arrays, without a copy
where the file allows. Values are decoded and checked by `ds4jax.quant`; which files make up a model
is the work of `ds4jax.model_file`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ds4jax import checkpoint, gguf, mix, quant, tensors
from ds4jax.config import ModelConfig
from ds4jax.errors import MAX_KEPT, Problem, printable
from ds4jax.tensors import TensorSpec

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

CHUNK_BYTES = 32 << 20
"""Packed bytes handled at a time when a whole file is walked."""

_INTEGER_TYPES = ("i8", "i16", "i32", "i64", "f64")
_RECONVERT = "the file does not fit its own configuration: convert or fetch it again"


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the file that holds a whole specified tensor, or one expert of it."""

    name: str
    scale: str | None = None
    rows: tuple[int, int] | None = None  # of the out axis: half of a fused gate/up tensor


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A specified tensor as a file holds it."""

    spec: TensorSpec
    format: str  # name that `ds4jax.quant` decodes; see `native`
    type_name: str  # as the producers call it, lower case
    type_id: int | None  # GGUF type; None in a checkpoint
    nbytes: int  # weights and scales
    file: str
    parts: tuple[Part, ...]  # one, or one per expert

    @property
    def native(self) -> bool:
        """Whether `ds4jax.quant.decode` knows the format (other types go through `gguf`)."""
        return self.type_id is None or gguf.TYPES[self.type_id].packed


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Packed weights in memory: what `ds4jax.quant` takes.

    `data` is uint8 `[*lead, row bytes]`, `side` holds the format's side arrays under the names that
    `quant.decode` gives them. `factor` multiplies every weight (float32, [] or one per expert); it
    exists for NVFP4 only.
    """

    format: str
    type_id: int | None
    data: U8
    side: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    factor: F32 | None = None

    def decode(self) -> F32:
        """The weights as float32 `[*lead, n]`, bit for bit the format's own decoder's.

        Raises:
            ValueError: if the format cannot be decoded.
        """
        if self.type_id is not None and not gguf.TYPES[self.type_id].packed:
            return quant.decode_other(self.type_id, self.data)
        values = quant.decode(self.format, self.data, **self.side)
        if self.factor is not None:
            values *= self.factor.reshape(
                self.factor.shape + (1,) * (values.ndim - self.factor.ndim)
            )
        return values

    def problems(self) -> list[str]:
        """Invalid bytes (NaN and invalid scale codes, numbers that are not finite), one a line."""
        if self.type_id is not None and not gguf.TYPES[self.type_id].packed:
            bad = int(np.count_nonzero(~np.isfinite(self.decode())))
            return [f"{self.format}: {bad} weights are not finite"] if bad else []
        found = quant.check(self.format, self.data, **self.side)
        if self.factor is not None and not np.isfinite(self.factor).all():
            found.append(f"{self.format}: tensor scale not finite")
        return found


class Container(Protocol):
    """What reading needs of an opened file: `GGUFReader` or `CheckpointReader`."""

    def read(self, stored: StoredTensor, lead: slice) -> Packed:
        """Entries `lead` of the first axis."""

    def read_table(self, stored: StoredTensor) -> npt.NDArray[np.int32]:
        """A table of expert numbers."""


# --- GGUF -------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class GGUFReader:
    """Reads matched tensors of a GGUF file."""

    file: gguf.GGUFFile
    tables: Mapping[str, mix.MixTable]

    def read(self, stored: StoredTensor, lead: slice) -> Packed:
        """See `Container`; a view of the mapped file."""
        name = stored.parts[0].name
        shape = stored.spec.shape
        data = self.file.packed(name)
        data = data.reshape(*shape[:-1], -1)
        side: dict[str, npt.NDArray[Any]] = {}
        table = self.tables.get(name)
        if table is not None:
            side = {"codebooks_bf16": table.codebooks_bf16, "modes": table.modes}
        factor: F32 | None = None
        if stored.parts[0].scale is not None:
            flat: F32 = self.file.packed(stored.parts[0].scale).view("<f4").reshape(-1)
            factor = flat[0] if flat.size == 1 else flat
            factor = np.asarray(factor, np.float32)
        if len(shape) > 1:
            data = data[lead]
            if table is not None and table.modes.ndim:
                side = {key: value[lead] for key, value in side.items()}
            if factor is not None and factor.ndim:
                factor = factor[lead]
        return Packed(
            format=stored.format, type_id=stored.type_id, data=data, side=side, factor=factor
        )

    def read_table(self, stored: StoredTensor) -> npt.NDArray[np.int32]:
        """See `Container`."""
        dtype = "<i8" if stored.format == "i64" else "<i4"
        raw = self.file.packed(stored.parts[0].name).view(dtype)
        return _as_int32(raw.reshape(stored.spec.shape))


def match_gguf(
    specs: Iterable[TensorSpec], file: gguf.GGUFFile, problems: list[Problem]
) -> dict[str, StoredTensor]:
    """Finds every specified tensor in a GGUF file; what is missing or different is a problem.

    Returns: stored tensors by `spec.name`, only those that fit.
    """
    out = {}
    for spec in specs:
        tensor = file.tensors.get(spec.gguf)
        if tensor is None:
            if spec.required:
                expected = f"{_shape(spec.shape)} ({spec.hf.replace(tensors.EXPERT, '*')})"
                _add(problems, file.path.name, spec.gguf, "no such tensor", expected)
            continue
        ok = True
        if _squeezed(tensor.shape) != _squeezed(spec.shape):
            _add(
                problems, tensor.file, spec.gguf,
                f"shape {_shape(tensor.shape)}", f"{_shape(spec.shape)} as the configuration says",
            )  # fmt: skip
            ok = False
        format = tensor.type.format
        if (spec.kind == "table") != (format in ("i32", "i64")) or (
            spec.kind != "table" and format in _INTEGER_TYPES
        ):
            expected = "type I32" if spec.kind == "table" else "a type that holds weights"
            _add(problems, tensor.file, spec.gguf, f"type {tensor.type.name}", expected)
            ok = False
        if ok:
            scale = _gguf_factor(spec, file, problems) if format == "nvfp4" else None
            out[spec.name] = StoredTensor(
                spec=spec,
                format=format,
                type_name=tensor.type.name.lower(),
                type_id=tensor.type_id,
                nbytes=tensor.nbytes,
                file=tensor.file,
                parts=(Part(spec.gguf, scale),),
            )
    return out


def _gguf_factor(spec: TensorSpec, file: gguf.GGUFFile, problems: list[Problem]) -> str | None:
    """Name of an NVFP4 tensor's own scale (one number, or one per expert), if there is one."""
    name = spec.gguf.removesuffix(".weight") + ".scale"
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    count = 1
    for dim in tensor.shape:
        count *= dim
    if tensor.type.format != "f32" or count not in (1, spec.shape[0]):
        found = f"{tensor.type.name} {_shape(tensor.shape)}"
        _add(problems, tensor.file, name, found, f"F32, one number or {spec.shape[0]}")
        return None
    return name


# --- checkpoint -------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class CheckpointReader:
    """Reads matched tensors of a checkpoint; stacked experts are gathered one by one."""

    file: checkpoint.Checkpoint

    def read(self, stored: StoredTensor, lead: slice) -> Packed:
        """See `Container`; a view for single tensors, a copy of the chosen experts for stacks."""
        if stored.spec.num_experts is not None and len(stored.parts) > 1:
            chosen = stored.parts[lead]
            pairs = [self._arrays(stored, part) for part in chosen]
            data = np.stack([p[0] for p in pairs]) if pairs else np.empty((0,), np.uint8)
            side = {k: np.stack([p[1][k] for p in pairs]) for k in (pairs[0][1] if pairs else ())}
            return Packed(format=stored.format, type_id=None, data=data, side=side)
        data, side = self._arrays(stored, stored.parts[0])
        if len(stored.spec.shape) > 1:
            side = {k: v[_scale_rows(stored, k, lead)] for k, v in side.items()}
            data = data[lead]
        return Packed(format=stored.format, type_id=None, data=data, side=side)

    def _arrays(self, stored: StoredTensor, part: Part) -> tuple[U8, dict[str, Any]]:
        data = self.file.packed(part.name)
        side = {}
        if part.scale is not None:
            scale = self.file.array(part.scale)
            side["scale_f32" if scale.dtype == np.float32 else "scale_e8m0"] = scale
        if part.rows is not None:
            tile = 128 if stored.format == "hf_fp8_e4m3_block128" else 1
            first, last = part.rows
            data = data[..., first:last, :]
            side = {k: v[..., first // tile : -(-last // tile), :] for k, v in side.items()}
        return data, side

    def read_table(self, stored: StoredTensor) -> npt.NDArray[np.int32]:
        """See `Container`."""
        return _as_int32(self.file.array(stored.parts[0].name))


def _scale_rows(stored: StoredTensor, key: str, lead: slice) -> slice:
    """The entries of a scale array that belong to entries `lead` of the first weight axis.

    Raises:
        ValueError: for rows of 128 x 128 tiles that do not start at a tile.
    """
    if stored.format != "hf_fp8_e4m3_block128" or len(stored.spec.shape) > 2:
        return lead
    first, last, step = lead.indices(stored.spec.shape[0])
    if first % 128 or step != 1:
        raise ValueError(
            f"rows {first}..{last} of {stored.spec.name} do not start at a tile of 128"
        )
    return slice(first // 128, -(-last // 128))


def match_checkpoint(
    specs: Iterable[TensorSpec],
    file: checkpoint.Checkpoint,
    names: Mapping[str, str],
    problems: list[Problem],
) -> dict[str, StoredTensor]:
    """Finds every specified tensor in a checkpoint; what is missing or different is a problem.

    Args:
        names: name in the file by published name (`published_names`).

    Returns: stored tensors by `spec.name`, only those that fit.
    """
    finder = _Finder(file, names, problems)
    out = {}
    for spec in specs:
        stored = finder.experts(spec) if spec.num_experts else finder.single(spec)
        if stored is not None:
            out[spec.name] = stored
    return out


def published_names(file: checkpoint.Checkpoint, problems: list[Problem]) -> dict[str, str]:
    """Name in the file of every tensor, by its published spelling."""
    if tensors.uses_published_names(file.tensors.keys() | file.index.keys()):
        return {name: name for name in file.tensors}
    out: dict[str, str] = {}
    for name in file.tensors:
        published = tensors.published_name(name)
        if published in out:
            where = file.tensors[name].file
            _add(problems, where, name, f"the same tensor as {out[published]}", "each tensor once")
        out[published] = name
    return out


class _Finder:
    """Looks specified tensors up in one checkpoint."""

    def __init__(
        self, file: checkpoint.Checkpoint, names: Mapping[str, str], problems: list[Problem]
    ) -> None:
        self.file = file
        self.names = names
        self.problems = problems
        self.opened = {t.file for t in file.tensors.values()}

    def single(self, spec: TensorSpec) -> StoredTensor | None:
        """An ordinary tensor."""
        part = self.part(spec.hf, spec.stem)
        if part is None:
            self.missing(spec, spec.hf)
            return None
        kind = self.storage(spec, part, spec.shape)
        return None if kind is None else self.stored(spec, kind, (part,))

    def experts(self, spec: TensorSpec) -> StoredTensor | None:
        """Experts stored one by one, or stacked as transformers stores them."""
        count = spec.shape[0]
        parts, absent = [], []
        for expert in range(count):
            name = spec.hf.replace(tensors.EXPERT, str(expert))
            part = self.part(name, name.removesuffix(".weight"))
            if part is None:
                absent.append(name)
            else:
                parts.append(part)
        if not parts and not any(self.lost(name) for name in absent):
            return self.stacked(spec)
        for name in absent:
            self.missing(spec, name)
        if not parts:
            return None
        kinds = {self.storage(spec, part, spec.shape[1:]) for part in parts}
        if absent or None in kinds:
            return None
        if len(kinds) > 1:
            found = "experts of different types: " + ", ".join(sorted(k[1] for k in kinds if k))
            _add(self.problems, self.place(parts[0].name), spec.name, found, "one type")
            return None
        kind = kinds.pop()
        return None if kind is None else self.stored(spec, kind, tuple(parts))

    def stacked(self, spec: TensorSpec) -> StoredTensor | None:
        prefix, leaf = spec.stem.split(f".{tensors.EXPERT}.")
        fused = "down_proj" if leaf == "w2" else "gate_up_proj"
        stem = f"{prefix}.{fused}"
        part = self.part(stem, stem) or self.part(f"{stem}.weight", stem)
        if part is None:
            self.missing(spec, spec.hf)
            return None
        experts, out, width = spec.shape
        shape = spec.shape
        if fused == "gate_up_proj":
            shape = (experts, 2 * out, width)
            rows = (0, out) if leaf == "w1" else (out, 2 * out)
            part = Part(part.name, part.scale, rows)
        kind = self.storage(spec, part, shape)
        if kind is not None and kind[0] == "hf_fp8_e4m3_block128" and part.rows and out % 128:
            found, expected = f"{out} rows of 128 x 128 tiles", "whole tiles in gate and up"
            _add(self.problems, self.place(part.name), part.name, found, expected)
            return None
        return None if kind is None else self.stored(spec, kind, (part,))

    def part(self, name: str, stem: str) -> Part | None:
        actual = self.names.get(name)
        return None if actual is None else Part(actual, self.names.get(f"{stem}.scale"))

    def place(self, name: str) -> str:
        return self.file.tensors[name].file

    def lost(self, name: str) -> bool:
        """Whether a tensor is in a shard that could not be opened (a problem of its own)."""
        shard = self.file.index.get(name)
        return shard is not None and shard not in self.opened

    def missing(self, spec: TensorSpec, name: str) -> None:
        if not spec.required or self.lost(name):
            return
        shown = name.replace(tensors.EXPERT, "*")
        shape = spec.shape if spec.num_experts is None else spec.shape[1:]
        where = self.file.path.name
        _add(self.problems, where, shown, "no such tensor", f"{_shape(shape)} in the checkpoint")

    def storage(
        self, spec: TensorSpec, part: Part, shape: tuple[int, ...]
    ) -> tuple[str, str] | None:
        """Format and type name of one stored tensor, or None after saying what does not fit."""
        tensor = self.file.tensors[part.name]
        scale = self.file.tensors[part.scale] if part.scale is not None else None
        expected, kinds = _expected_scale(tensor.dtype, shape)
        format = _FORMAT_OF_DTYPE.get(tensor.dtype)
        if (spec.kind == "table") != (tensor.dtype in ("I32", "I64")):
            format = None
        if format is None:
            wanted = "I64 or I32" if spec.kind == "table" else "BF16, F32, F16, F8_E4M3 or I8 (FP4)"
            self.differs(tensor, f"dtype {tensor.dtype}", wanted)
            return None
        stored = (*shape[:-1], shape[-1] // 2) if format == "hf_fp4_e2m1" else shape
        ok = True
        if _squeezed(tensor.shape) != _squeezed(stored):
            wanted = f"{_shape(stored)} as the configuration says"
            self.differs(tensor, f"{tensor.dtype} of shape {_shape(tensor.shape)}", wanted)
            ok = False
        if expected is None:
            if scale is not None:
                self.differs(scale, f"scales beside a {tensor.dtype} tensor", "no scales")
                ok = False
            return (format, tensor.dtype.lower()) if ok else None
        wanted = f"{' or '.join(kinds)} of shape {_shape(expected)}"
        if scale is None:
            self.differs(tensor, f"{tensor.dtype} without a .scale tensor", wanted)
            return None
        if scale.dtype not in kinds or scale.shape != expected:
            self.differs(scale, f"{scale.dtype} of shape {_shape(scale.shape)}", wanted)
            ok = False
        name = "fp4" if format == "hf_fp4_e2m1" else tensor.dtype.lower()
        suffix = "_f32" if scale.dtype == "F32" else ""
        return (format, f"{name}{suffix}") if ok else None

    def differs(self, tensor: checkpoint.CheckpointTensor, found: str, expected: str) -> None:
        _add(self.problems, tensor.file, tensor.name, found, expected)

    def stored(
        self, spec: TensorSpec, kind: tuple[str, str], parts: tuple[Part, ...]
    ) -> StoredTensor:
        total = 0
        for part in parts:
            share = 2 if part.rows is not None else 1
            total += self.file.tensors[part.name].nbytes // share
            if part.scale is not None:
                total += self.file.tensors[part.scale].nbytes // share
        return StoredTensor(
            spec=spec,
            format=kind[0],
            type_name=kind[1],
            type_id=None,
            nbytes=total,
            file=self.place(parts[0].name),
            parts=parts,
        )


_FORMAT_OF_DTYPE = {
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "F8_E4M3": "hf_fp8_e4m3_block128",
    "I8": "hf_fp4_e2m1",
    "U8": "hf_fp4_e2m1",
    "I32": "i32",
    "I64": "i64",
}


def _expected_scale(
    dtype: str, shape: tuple[int, ...]
) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Shape and dtypes of the scales of a tensor, or None if it has none."""
    if dtype == "F8_E4M3" and len(shape) > 1:
        tiles = (-(-shape[-2] // 128), -(-shape[-1] // 128))
        return (*shape[:-2], *tiles), ("F8_E8M0", "U8", "F32")
    if dtype in ("I8", "U8"):
        return (*shape[:-1], shape[-1] // 32), ("F8_E8M0", "U8")
    return None, ()


# --- tensors that nothing asked for -----------------------------------------------------------


def extra_tensors(
    names: Iterable[str], cfg: ModelConfig, num_mtp: int, file: str, problems: list[Problem]
) -> dict[str, list[str]]:
    """Sorts the tensors that no specification took; those that contradict the configuration are
    problems.

    Args:
        names: GGUF or published names.

    Returns: names by kind: "vision", "draft", "router bias", "table", "unknown", ...
    """
    out: dict[str, list[str]] = {}
    beyond: dict[int, list[str]] = {}
    for name in names:
        layer = tensors.layer_number(name)
        kind = tensors.foreign_kind(name)
        leaf = tensors.layer_leaf(name)
        if kind == "v4.1":
            fix = "DeepSeek-V4.1 is another architecture; use a DeepSeek-V4 file"
            _add(problems, file, name, "a tensor of DeepSeek-V4.1", "tensors of V4", fix)
        elif layer is not None and layer >= cfg.num_layers + num_mtp:
            beyond.setdefault(layer, []).append(name)
        elif kind is not None or leaf is None or layer is None:
            out.setdefault(kind or "unknown", []).append(name)
        elif leaf[1] in ("compress", "index") and layer < cfg.num_layers:
            ratio = cfg.compress_ratios[layer]
            expected = f"none: the compression ratio of layer {layer} is {ratio}"
            _add(problems, file, name, "such a tensor", expected, _RECONVERT)
        else:
            kind = {"hash": "table", "scored": "router bias"}.get(leaf[1], "unknown")
            out.setdefault(kind, []).append(name)
    for layer, held in sorted(beyond.items()):
        found = f"{len(held)} tensors ({held[0]}, ...)"
        expected = f"layers 0..{cfg.num_layers - 1}, as the configuration says"
        _add(problems, file, f"layer {layer}", found, expected, _RECONVERT, tensor=False)
    return out


# --- values -----------------------------------------------------------------------------------


def chunks(stored: StoredTensor, max_bytes: int = CHUNK_BYTES) -> Iterator[slice]:
    """Slices of the first axis that take at most about `max_bytes` packed bytes each."""
    return slices(stored.spec.shape, stored.nbytes, max_bytes)


def slices(shape: tuple[int, ...], nbytes: int, max_bytes: int) -> Iterator[slice]:
    """Cuts the first axis of an array of `nbytes` into pieces of at most about `max_bytes`.

    Matrices are cut at multiples of 128 rows, so that tiles of scales stay whole; vectors are not.
    """
    if len(shape) < 2:
        yield slice(0, shape[0])
        return
    step = max(1, max_bytes * shape[0] // max(nbytes, 1))
    if len(shape) == 2:
        step = max(128, step // 128 * 128)
    for first in range(0, shape[0], step):
        yield slice(first, min(first + step, shape[0]))


def value_problems(reader: Container, stored: StoredTensor, num_experts: int) -> list[Problem]:
    """Bytes of one tensor that no valid file holds: NaN scales, invalid codes, bad expert ids."""
    if stored.spec.kind == "table":
        return table_problems(stored, reader.read_table(stored), num_experts)
    problems: list[Problem] = []
    for lead in chunks(stored):
        problems += piece_problems(stored, reader.read(stored, lead), lead)
    return problems


_BAD_VALUES = "the data is damaged or of another type: fetch or convert the file again"


def piece_problems(stored: StoredTensor, piece: Packed, lead: slice) -> list[Problem]:
    """Invalid bytes in entries `lead` of a tensor, as read."""
    problems: list[Problem] = []
    where = stored.parts[0].name if len(stored.parts) == 1 else stored.spec.name
    entries = f" (entries {lead.start}..{lead.stop - 1})" if len(stored.spec.shape) > 1 else ""
    for text in piece.problems():
        _add(problems, stored.file, where, text + entries, "valid scales and numbers", _BAD_VALUES)
    return problems


def table_problems(
    stored: StoredTensor, ids: npt.NDArray[np.int32], num_experts: int
) -> list[Problem]:
    """Expert ids outside the model."""
    problems: list[Problem] = []
    bad = int(np.count_nonzero((ids < 0) | (ids >= num_experts)))
    if bad:
        found = f"{bad} of {ids.size} expert ids outside the model"
        expected = f"ids in 0..{num_experts - 1}"
        _add(problems, stored.file, stored.parts[0].name, found, expected, _BAD_VALUES)
    return problems


def _add(
    problems: list[Problem],
    file: str,
    where: str,
    found: str,
    expected: str,
    fix: str = _RECONVERT,
    *,
    tensor: bool = True,
) -> None:
    if len(problems) < MAX_KEPT:
        place = printable(where)
        problems.append(
            Problem(
                file=printable(file),
                where=f"tensor {place}" if tensor else place,
                found=printable(found, 300),
                expected=expected,
                fix=fix,
            )
        )


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(d) for d in shape) + "]"


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading ones: writers may drop them."""
    first = 0
    while first < len(shape) - 1 and shape[first] == 1:
        first += 1
    return shape[first:]


def _as_int32(values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Expert ids as int32; ids that do not fit become -1, which every check refuses."""
    if values.dtype == np.int32:
        return values
    fits = (values >= 0) & (values < 1 << 31)
    return np.where(fits, values, -1).astype(np.int32)
