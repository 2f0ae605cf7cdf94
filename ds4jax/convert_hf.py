"""Conversion of a model into a checkpoint directory (safetensors), without loss.

The counterpart of `ds4jax.convert`: every tensor goes into the smallest checkpoint dtype that holds
its decoded values exactly, so the result computes the same logits. Experts in MXFP4 become the
published FP4, FP8 stays FP8, formats with few significant bits become BF16, the rest F32.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds4jax import (
    checkpoint_write,
    hparams_write,
    quant,
    quantize,
    stored,
    tensors,
    tokenizer,
)
from ds4jax.checkpoint_write import CheckpointData
from ds4jax.convert import (
    PIECE_BYTES,
    Converted,
    ConvertedTensor,
    Progress,
    in_order,
    valid,
)
from ds4jax.model_file import Draft, ModelFile
from ds4jax.stored import StoredTensor
from ds4jax.tensors import TensorSpec

EXACT_IN_BF16 = (
    "bf16", "mxfp4", "rocmfp4", "rocmfp4_fast", "rocmfp3", "rocmfp2_s40", "rocmfp2_m1012",
    "rocmfp2_signed",
)  # fmt: skip
"""Formats whose values have at most 8 significant bits (a short level times a 4-bit scale)."""

_FP8 = "hf_fp8_e4m3_block128"


def convert(
    model: ModelFile,
    out: str | os.PathLike[str],
    *,
    draft: Draft | None = None,
    workers: int | None = None,
    shard_bytes: int = checkpoint_write.SHARD_BYTES,
    progress: Progress | None = None,
) -> Converted:
    """Write a model as a checkpoint directory under the published names.

    Args:
        model: the source, opened without problems.
        out: target directory; must not exist, or be empty.
        draft: drafter to put into `mtp.*`; None: the one in the source, if any.
        workers: threads; None: one per core.
        shard_bytes: bytes of a shard.
        progress: called as pieces are written.

    Raises:
        ValueError: if config.json cannot hold the configuration, or for invalid values in the
            source. Nothing is left behind.
        FileExistsError, OSError: as `checkpoint_write.write`.
    """
    notes: list[str] = []
    chosen = draft or model.draft
    if chosen is not None and (chosen.config is None or chosen.problems):
        first = str(chosen.problems[0]) if chosen.problems else "no configuration"
        notes.append(f"the drafter cannot be used and is left out: {first}")
        chosen = None
    if model.num_mtp:
        notes.append(f"{model.num_mtp} MTP block(s) of the older kind are left out")
    items = [_Item(spec, model.tensors[spec.name], model.reader) for spec in model.specs()]
    if chosen is not None and chosen.config is not None:
        for spec in tensors.draft_specs(model.model_config, chosen.config):
            if spec.name in chosen.tensors:
                items.append(_Item(spec, chosen.tensors[spec.name], chosen.reader))
    config = hparams_write.hf_config(
        model.model_config,
        chosen.config if chosen is not None else None,
        fp8=any(i.held.format == _FP8 for i in items),
        fp4=any(i.dtype == "I8" for i in items),
    )
    counter = _Counter(sum(i.held.nbytes for i in items), progress)
    threads = workers or os.cpu_count() or 1
    rows = [row for item in items for row in _rows(item, counter, threads)]
    nbytes = checkpoint_write.write(
        out, config, rows, files=_tokenizer_files(model, notes), shard_bytes=shard_bytes
    )
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.name] = row.nbytes
    report = tuple(
        ConvertedTensor(
            name=item.spec.hf,
            source=item.held.type_name,
            target=item.dtype,
            nbytes=sum(sizes[name] for name in item.names()),
            error=None,
        )
        for item in items
    )
    return Converted(path=Path(out), nbytes=nbytes, tensors=report, notes=tuple(notes))


@dataclass(frozen=True)
class _Item:
    """One specified tensor on its way; experts are written one by one."""

    spec: TensorSpec
    held: StoredTensor
    reader: stored.Container

    @property
    def dtype(self) -> str:
        """Safetensors dtype of the weights."""
        if self.spec.kind == "table":
            return "I64"
        format = self.held.format
        if format in ("hf_fp4_e2m1", "mxfp4") and self.spec.num_experts is not None:
            return "I8"
        if format == _FP8:
            return "F8_E4M3"
        if format == "f16":
            return "F16"
        return "BF16" if format in EXACT_IN_BF16 or format == "hf_fp4_e2m1" else "F32"

    def names(self) -> list[str]:
        """Names of the weight tensors in the checkpoint."""
        count = self.spec.num_experts
        if count is None:
            return [self.spec.hf]
        return [self.spec.hf.replace(tensors.EXPERT, str(e)) for e in range(count)]


class _Counter:
    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def add(self, nbytes: int, name: str) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total, name)


def _rows(item: _Item, counter: _Counter, workers: int) -> Iterator[CheckpointData]:
    """What one specified tensor becomes: weights and scales, for every expert."""
    spec, held = item.spec, item.held
    names = item.names()
    for expert, name in enumerate(names):
        alone = spec.num_experts is None
        shape = spec.shape if alone else spec.shape[1:]
        leads = _leads(item, expert)
        share = held.nbytes // len(names)

        def data(
            make: Callable[[_Item, slice], npt.NDArray[Any]],
            leads: list[slice] = leads,
            count: int = share,
            name: str = name,
        ) -> Callable[[], Iterator[npt.NDArray[Any]]]:
            def pieces() -> Iterator[npt.NDArray[Any]]:
                yield from in_order(partial(make, item), leads, workers)
                counter.add(count, name)

            return pieces

        stem = name.removesuffix(".weight")
        if item.dtype == "I8":
            packed = (*shape[:-1], shape[-1] // 2)
            yield CheckpointData(name=name, dtype="I8", shape=packed, data=data(_fp4))
            scale = (*shape[:-1], shape[-1] // 32)
            yield CheckpointData(
                name=f"{stem}.scale", dtype="F8_E8M0", shape=scale, data=data(_fp4_scale, count=0)
            )
        elif item.dtype == "F8_E4M3":
            yield CheckpointData(name=name, dtype="F8_E4M3", shape=shape, data=data(_stored))
            tiles = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
            dtype = "F32" if held.type_name.endswith("_f32") else "F8_E8M0"
            yield CheckpointData(
                name=f"{stem}.scale", dtype=dtype, shape=tiles, data=data(_fp8_scale, count=0)
            )
        else:
            make = {"I64": _table, "BF16": _bf16, "F16": _stored, "F32": _f32}[item.dtype]
            yield CheckpointData(name=name, dtype=item.dtype, shape=shape, data=data(make))


def _leads(item: _Item, expert: int) -> list[slice]:
    if item.spec.num_experts is not None:
        return [slice(expert, expert + 1)]
    if item.spec.kind == "table":
        return [slice(0, item.spec.shape[0])]
    return list(stored.chunks(item.held, PIECE_BYTES))


def _read(item: _Item, lead: slice) -> stored.Packed:
    return valid(item.reader.read(item.held, lead), item.held.parts[0].name)


def _stored(item: _Item, lead: slice) -> npt.NDArray[Any]:
    return _read(item, lead).data


def _fp4(item: _Item, lead: slice) -> npt.NDArray[Any]:
    packed = _read(item, lead)
    if packed.format == "hf_fp4_e2m1":
        return packed.data
    return quantize.hf_from_mxfp4(packed.data)[0]


def _fp4_scale(item: _Item, lead: slice) -> npt.NDArray[Any]:
    packed = item.reader.read(item.held, lead)
    if packed.format == "hf_fp4_e2m1":
        return packed.side["scale_e8m0"]
    return quantize.hf_from_mxfp4(packed.data)[1]


def _fp8_scale(item: _Item, lead: slice) -> npt.NDArray[Any]:
    (scale,) = item.reader.read(item.held, lead).side.values()
    return scale


def _bf16(item: _Item, lead: slice) -> npt.NDArray[Any]:
    packed = _read(item, lead)
    if packed.format == "bf16":
        return packed.data
    values = packed.decode()
    out = quantize.encode("bf16", values)
    if not np.array_equal(quant.decode("bf16", out), values):
        raise ValueError(
            f"{item.held.parts[0].name}: values of {packed.format} do not fit bfloat16 exactly;"
            " convert the tensor to f32 or q8_0 first"
        )
    return out


def _f32(item: _Item, lead: slice) -> npt.NDArray[Any]:
    return _read(item, lead).decode().astype("<f4", copy=False)


def _table(item: _Item, lead: slice) -> npt.NDArray[Any]:
    ids = item.reader.read_table(item.held)
    if (ids < 0).any():
        raise ValueError(f"{item.held.parts[0].name}: negative expert ids: the source is damaged")
    return ids.astype("<i8")


def _tokenizer_files(model: ModelFile, notes: list[str]) -> dict[str, bytes]:
    source = model.tokenizer_source
    if source is None:
        notes.append("the source has no tokenizer; the checkpoint serves token ids only")
        return {}
    if isinstance(source, Path):
        paths = [source, source.parent / "tokenizer_config.json"]
        return {p.name: p.read_bytes() for p in paths if p.is_file()}
    made = tokenizer.Tokenizer.from_gguf(source)
    settings: dict[str, Any] = {
        "bos_token": made.token(made.markers.bos),
        "eos_token": made.token(made.markers.eos),
        "pad_token": made.token(made.markers.pad),
        "add_bos_token": False,
        "add_eos_token": False,
    }
    template = source.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    return {
        "tokenizer.json": hparams_write.tokenizer_json(made).encode(),
        "tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=1).encode(),
    }
