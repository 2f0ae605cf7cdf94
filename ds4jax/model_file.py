"""A model as files: one object for a GGUF file, a checkpoint directory or the shipped model.

Opening reads headers only, checks them against the description of `ds4jax.tensors` and raises once
with everything that does not fit. The object then says what is stored how (`describe`), reads
packed bytes tensor by tensor, and finds invalid values. It places nothing on a device: that is
`ds4jax.weights`. No JAX here.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ds4jax import (
    checkpoint,
    formats,
    gguf,
    hparams,
    hparams_draft,
    mix,
    model_report,
    quant,
    stored,
    tensors,
)
from ds4jax.config import DraftConfig, ModelConfig
from ds4jax.errors import ModelFileError, Problem, printable
from ds4jax.stored import Packed, StoredTensor
from ds4jax.tensors import TensorSpec

Rocmfp2Option = Literal["auto", "s40", "fixed", "signed", "affine"]
ROCMFP2_OPTIONS: tuple[str, ...] = get_args(Rocmfp2Option)

NANO = "nano"
"""Name of the model that ships inside the package."""

READING_KEY = "ds4jax.rocmfp2_reading"
"""GGUF key with which a file says how its type 107 is meant."""

_SAMPLE_BYTES = 8 << 20  # of one tensor, to tell the reading of type 107

Progress = Callable[[int, str], None]
"""Called with bytes done so far and the name of the tensor being handled."""


@dataclass(frozen=True)
class Rocmfp2Choice:
    """Reading of type 107 in a file, and why: an option goes before the file's own word (the key
    that our converter writes), and that before the data."""

    option: str
    reading: str | None  # None: the file has no such tensor, or its data is not there
    reason: str
    tensors: int
    decided_by: Literal["option", "key", "data"] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Draft:
    """A DSpark drafter found beside or inside a model: kept, loaded only on request.

    `config` is None and `problems` says why if it cannot be used.
    """

    scheme: tensors.GGUFScheme | None  # None: published checkpoint names
    config: DraftConfig | None
    tensors: dict[str, StoredTensor]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    reader: stored.Container

    def read(self, spec: TensorSpec, rows: slice | None = None) -> Packed:
        """As `ModelFile.read`."""
        return _read(self.reader, self.tensors[spec.name], rows)

    def require(self, path: str) -> DraftConfig:
        """The configuration of a drafter that is to be used.

        Raises:
            ModelFileError: if anything is wrong with it.
        """
        if self.problems or self.config is None:
            raise ModelFileError(path, self.problems)
        return self.config


@dataclass(kw_only=True, eq=False)
class ModelFile:
    """An opened model. Make one with `open_model`."""

    path: Path
    kind: Literal["gguf", "checkpoint"]
    files: tuple[Path, ...]
    config: ModelConfig | None  # None only if opened with its problems kept
    tensors: dict[str, StoredTensor]  # by TensorSpec.name
    extra: dict[str, list[str]]  # names nothing asked for, by kind
    num_mtp: int  # older prediction blocks: kept, not loaded
    draft: Draft | None
    rocmfp2: Rocmfp2Choice
    metadata: dict[str, Any]  # GGUF pairs or config.json
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    reader: stored.Container = field(repr=False)
    _rows: list[dict[str, Any]] = field(repr=False)  # every tensor of the file, for `describe`

    @property
    def model_config(self) -> ModelConfig:
        """The configuration of a usable model.

        Raises:
            ModelFileError: if the model was opened in spite of its problems and has none.
        """
        if self.config is None:
            raise ModelFileError(str(self.path), self.problems)
        return self.config

    @property
    def tokenizer_source(self) -> dict[str, Any] | Path | None:
        """GGUF metadata with `tokenizer.ggml.*`, the path of tokenizer.json, or None."""
        if self.kind == "checkpoint":
            path = self.path / "tokenizer.json"
            return path if os.path.isfile(path) else None
        model = self.metadata.get("tokenizer.ggml.model", "none")
        return None if model == "none" else self.metadata

    def specs(self) -> list[TensorSpec]:
        """Specifications of the model's tensors that the file holds, in canonical order."""
        held = self.tensors
        return [spec for spec in tensors.specs(self.model_config) if spec.name in held]

    def read(self, spec: TensorSpec, rows: slice | None = None) -> Packed:
        """Packed bytes of a tensor, or of some entries of its first axis.

        Args:
            spec: one of `specs()`.
            rows: entries of the first axis (experts of a stack, rows of a matrix); None: all. A
                slice of a matrix with 128 x 128 scale tiles must start at a tile.

        Returns: a view of the mapped file where the file stores the tensor in one piece; a copy
            where experts are stored one by one.

        Raises:
            KeyError: if the file has no such tensor. ValueError: for a slice within a tile, or a
                table of expert ids (`read_table`).
        """
        if spec.kind == "table":
            raise ValueError(f"{spec.name} holds expert ids, not weights: use read_table")
        return _read(self.reader, self.tensors[spec.name], rows)

    def read_float32(self, spec: TensorSpec, rows: slice | None = None) -> npt.NDArray[np.float32]:
        """As `read`, decoded: float32 of the specification's shape (or of the slice).

        Raises:
            As `read`; ValueError also for a type that cannot be decoded.
        """
        values = self.read(spec, rows).decode()
        return values.reshape(-1, *spec.shape[1:]) if len(spec.shape) > 1 else values

    def read_table(self, spec: TensorSpec) -> npt.NDArray[np.int32]:
        """Expert ids of a hash-routed layer: int32 `[vocabulary, experts per token]`."""
        return self.reader.read_table(self.tensors[spec.name])

    def check_values(self, progress: Progress | None = None) -> list[Problem]:
        """Walks all weights and returns every invalid value: NaN or invalid scale codes, numbers
        that are not finite, expert ids outside the model. Reads the whole file, in pieces.
        """
        found: list[Problem] = []
        done = 0
        for spec in self.specs():
            held = self.tensors[spec.name]
            if progress is not None:
                progress(done, spec.name)
            found += stored.value_problems(self.reader, held, self.model_config.num_experts)
            done += held.nbytes
        return found

    def describe(self, with_tensors: bool = False) -> dict[str, Any]:
        """Everything known without reading weights, JSON-ready (`ds4jax inspect --json`)."""
        architecture = self._text("general.architecture")
        if self.kind == "checkpoint":
            names = self.metadata.get("architectures")
            first = names[0] if isinstance(names, list) and names else None
            architecture = first if isinstance(first, str) else self._text("model_type")
        out: dict[str, Any] = {
            "path": str(self.path),
            "kind": self.kind,
            "files": [p.name for p in self.files],
            "architecture": architecture,
            "name": self._text("general.name"),
            "config": None if self.config is None else dataclasses.asdict(self.config),
            "totals": model_report.totals(self._rows),
            "tokenizer": self._tokenizer(),
            "drafter": self._drafter(),
            "mtp": {"blocks": self.num_mtp, "loaded": False} if self.num_mtp else None,
            "rocmfp2": dataclasses.asdict(self.rocmfp2) if self.rocmfp2.tensors else None,
            "chat_profile_hints": self._profile_hints(),
            "problems": [p.as_dict() for p in self.problems],
            "notes": list(self.notes),
        }
        if with_tensors:
            out["tensors"] = self._rows
        return out

    def _text(self, key: str) -> str | None:
        """A text value of the metadata; None if it is absent or something else."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def _tokenizer(self) -> dict[str, Any] | None:
        source = self.tokenizer_source
        if source is None:
            return None
        if isinstance(source, Path):
            return {"source": source.name, "bytes": source.stat().st_size}
        prefix = "tokenizer.ggml."
        out: dict[str, Any] = {"source": "gguf"}
        for key in ("model", "pre", "bos_token_id", "eos_token_id", "padding_token_id"):
            value = source.get(prefix + key)
            out[key] = value if isinstance(value, (str, int)) else None
        for key in ("tokens", "merges"):
            value = source.get(prefix + key)
            out[key] = len(value) if isinstance(value, gguf.StringArray) else None
        out["chat_template"] = "tokenizer.chat_template" in source
        return out

    def _drafter(self) -> dict[str, Any] | None:
        if self.draft is None:
            return None
        held = self.draft.tensors.values()
        return {
            "scheme": self.draft.scheme or "checkpoint",
            "config": None if self.draft.config is None else dataclasses.asdict(self.draft.config),
            "tensors": len(self.draft.tensors),
            "bytes": sum(t.nbytes for t in held),
            "confidence_head": any(t.spec.key == "confidence_head.proj" for t in held),
            "problems": [p.as_dict() for p in self.draft.problems],
        }

    def _profile_hints(self) -> dict[str, Any]:
        hints = {k: self._text(f"general.{k}") for k in ("name", "version", "basename")}
        encoding = self.path / "encoding" / "encoding_dsv4.py"
        found = self.kind == "checkpoint" and os.path.isfile(encoding)
        return {**hints, "encoding_file": str(encoding) if found else None}


def open_model(
    path: str | os.PathLike[str],
    *,
    rocmfp2: str = "auto",
    keep_problems: bool = False,
) -> ModelFile:
    """Opens a model: a GGUF file (any shard of a split one), a checkpoint directory, or "nano".

    Args:
        path: what to open.
        rocmfp2: reading of GGUF type 107: auto (as the file says, else decided from the data), s40,
            fixed, signed, affine.
        keep_problems: return what can be read of an incomplete or damaged model, with its
            `problems`, instead of raising. For reports and for uses that need no weights.

    Raises:
        ModelFileError: listing everything found: the container's problems, settings that the model
            code does not implement, tensors missing, of wrong shape or type, or contradicting the
            configuration. With `keep_problems`, only if nothing can be read.
        ValueError: for an unknown reading.
    """
    if rocmfp2 not in ROCMFP2_OPTIONS:
        raise ValueError(f"rocmfp2 is {rocmfp2!r}, must be one of {list(ROCMFP2_OPTIONS)}")
    place = _resolve(path)
    problems: list[Problem] = []
    if os.path.isdir(place):
        model = _open_checkpoint(place, problems)
    else:
        model = _open_gguf(place, rocmfp2, problems)
    if model.problems and not keep_problems:
        raise ModelFileError(str(place), model.problems)
    return model


def open_draft(path: str | os.PathLike[str], target: ModelFile) -> Draft:
    """Opens a drafter that is a file (or checkpoint) of its own, for a target model.

    Raises:
        ModelFileError: if the container cannot be read or holds no drafter. What else is wrong is
            in the result's `problems` (`require` raises them).
    """
    place = _resolve(path)
    problems: list[Problem] = []
    draft: Draft | None
    if os.path.isdir(place):
        opened = checkpoint.open_checkpoint(place)
        names = stored.published_names(opened, problems)
        draft = _checkpoint_draft(opened, names, target.model_config)
    else:
        file = gguf.open_gguf(place)
        draft = _gguf_draft(file, target.model_config, stored.GGUFReader(file=file, tables={}))
    if draft is None:
        raise ModelFileError(
            str(place),
            [
                Problem(
                    file=place.name,
                    where="",
                    found="no DSpark context projection (main_proj)",
                    expected="a DSpark drafter",
                    fix="older MTP blocks (e_proj, h_proj) are another kind of drafter",
                )
            ],
        )
    return draft


def _resolve(path: str | os.PathLike[str]) -> Path:
    """The file or directory meant; "nano" is the packaged model unless something has that name."""
    if os.fspath(path) != NANO or os.path.exists(path):
        place = Path(path)
        if place.suffix == ".safetensors" and os.path.isfile(place):
            found, expected = "one file of a checkpoint", "the directory that holds it"
            problem = Problem(
                file=place.name,
                where="",
                found=found,
                expected=expected,
                fix=f"give {place.parent}",
            )
            raise ModelFileError(str(place), [problem])
        return place
    resource = importlib.resources.files("ds4jax") / "models" / "nano.gguf"
    return Path(str(resource))


def _read(reader: stored.Container, held: StoredTensor, rows: slice | None) -> Packed:
    return reader.read(held, slice(0, held.spec.shape[0]) if rows is None else rows)


# --- GGUF -------------------------------------------------------------------------------------


def _open_gguf(path: Path, option: str, problems: list[Problem]) -> ModelFile:
    file = gguf.open_gguf(path, problems)
    shapes = {name: t.shape for name, t in file.tensors.items()}
    config, num_mtp, reading = hparams.from_gguf(file.metadata, shapes, path.name)
    problems += reading.problems
    notes = [*file.notes, *reading.notes]
    tables = _side_tables(file, problems)
    reader = stored.GGUFReader(file=file, tables=tables)
    matched: dict[str, StoredTensor] = {}
    extra: dict[str, list[str]] = {}
    mtp: dict[str, StoredTensor] = {}
    draft = None
    if config is not None:
        matched = stored.match_gguf(tensors.specs(config), file, problems)
        mtp = _match_mtp(file, config, num_mtp, notes)
        draft = _gguf_draft(file, config, reader)
        held = (matched, mtp, draft.tensors if draft else {})
        taken = {part.name for group in held for t in group.values() for part in t.parts}
        taken |= {part.scale for t in matched.values() for part in t.parts if part.scale}
        taken |= {spec.gguf for spec in tensors.specs(config)}
        left = [name for name in file.tensors if name not in taken]
        extra = stored.extra_tensors(left, config, num_mtp, path.name, problems)
    choice, readings = _choose_reading(file, option, problems)
    matched = _with_reading(matched, choice)
    if draft is not None:
        draft = dataclasses.replace(draft, tensors=_with_reading(draft.tensors, choice))
    notes += (
        readings
        + model_report.extra_notes(extra, num_mtp)
        + _draft_notes(draft)
        + model_report.decoded_notes(matched)
    )
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, gguf.StringArray) else None
    if config is not None and count is not None and count != config.vocab_size:
        notes.append(f"{count} tokens for a vocabulary of {config.vocab_size}")
    return ModelFile(
        path=path,
        kind="gguf",
        files=file.files,
        config=config,
        tensors=matched,
        extra=extra,
        num_mtp=num_mtp,
        draft=draft,
        rocmfp2=choice,
        metadata=file.metadata,
        problems=tuple(problems),
        notes=tuple(notes),
        reader=reader,
        _rows=model_report.gguf_rows(file, matched, mtp, draft.tensors if draft else {}),
    )


def _side_tables(file: gguf.GGUFFile, problems: list[Problem]) -> dict[str, mix.MixTable]:
    """Codebooks of types 105 and 106, from metadata or from files beside the GGUF."""
    groups = []
    unread = False
    for key, suffix in zip(mix.METADATA_KEYS, mix.FILE_SUFFIXES, strict=True):
        data: Any = file.metadata.get(key)
        source = f"{file.path.name}: key {key}"
        beside = file.path.with_name(file.path.name + suffix)
        if data is None and os.path.isfile(beside):
            source = beside.name
            mapped = gguf.map_file(beside, problems)
            data = None if mapped is None else np.frombuffer(mapped, np.uint8)
        if data is None:
            continue
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8:
            problems.append(
                Problem(file=source, where="", found="no bytes", expected="an array of u8")
            )
        elif data.size > gguf.MAX_TABLE_BYTES:
            found, most = f"{data.size} bytes", f"at most {gguf.MAX_TABLE_BYTES} bytes"
            problems.append(Problem(file=source, where="", found=found, expected=most))
        else:
            try:
                groups.append(mix.parse(data, source))
            except ModelFileError as error:
                problems += error.problems
                unread = True
    if not unread:  # otherwise every tensor of theirs would seem to lack its codebooks
        held = {name: (t.type_id, t.shape) for name, t in file.tensors.items()}
        problems += mix.coverage_problems(groups, held, file.path.name)
    return {name: table for group in groups for name, table in group.items()}


def _match_mtp(
    file: gguf.GGUFFile, config: ModelConfig, num_mtp: int, notes: list[str]
) -> dict[str, StoredTensor]:
    """The older prediction blocks' tensors; they are not loaded, so differences are only notes."""
    separate = "mtp.0.e_proj.weight" in file.tensors
    count = num_mtp
    if separate:
        blocks = {n.split(".")[1] for n in file.tensors if n.startswith("mtp.")}
        count = len({b for b in blocks if b.isdigit()})
    if not 0 < count <= 16:
        return {}
    differences: list[Problem] = []
    specs = tensors.mtp_specs(config, count, separate)
    matched = stored.match_gguf(specs, file, differences)
    if differences:
        notes.append(f"MTP tensors differ in {len(differences)} places, first: {differences[0]}")
    return matched


def _gguf_draft(
    file: gguf.GGUFFile, config: ModelConfig, reader: stored.GGUFReader
) -> Draft | None:
    scheme = tensors.gguf_draft_scheme(file.tensors)
    if scheme is None:
        return None
    shapes = {name: t.shape for name, t in file.tensors.items()}
    draft, reading = hparams_draft.draft_config(
        file.metadata, shapes, config, scheme, file.path.name
    )
    problems = reading.problems
    matched: dict[str, StoredTensor] = {}
    if draft is not None:
        specs = tensors.draft_specs(config, draft, scheme)
        matched = stored.match_gguf(specs, file, problems)
        merged = file.metadata.get("general.architecture") == hparams.ARCHITECTURE
        prefix = f"{scheme}." if merged else ""
        known = {spec.gguf for spec in specs}
        unknown = [n for n in file.tensors if n.startswith(prefix) and n not in known]
        problems += _unknown_draft(file.path.name, unknown)
    return Draft(
        scheme=scheme,
        config=draft,
        tensors=matched,
        problems=tuple(problems),
        notes=tuple(reading.notes),
        reader=reader,
    )


def _unknown_draft(file: str, names: list[str]) -> list[Problem]:
    return [
        Problem(
            file=file,
            where=f"tensor {printable(name)}",
            found="a drafter tensor of unknown name",
            expected="tensors of a DSpark drafter only",
            fix="use a drafter of the same release as the model",
        )
        for name in names[:100]
    ]


def _choose_reading(
    file: gguf.GGUFFile, option: str, problems: list[Problem]
) -> tuple[Rocmfp2Choice, list[str]]:
    """Decides the reading of type 107 for the whole file."""
    held = [t for t in file.tensors.values() if t.type_id == formats.ROCMFP2_TYPE_ID]
    if not held:
        return Rocmfp2Choice(option, None, "the file has no tensor of type 107", 0), []
    said = file.metadata.get(READING_KEY)
    known = isinstance(said, str) and said in formats.ROCMFP2_READINGS
    if option != "auto":
        notes = []
        if known and said != option:
            notes = [f"type 107 is read as {option}, the file says {said} ({READING_KEY})"]
        return Rocmfp2Choice(option, option, "chosen by option", len(held), "option"), notes
    if known:
        note = f"type 107 is read as {said} (key {READING_KEY}); --rocmfp2 overrides"
        return Rocmfp2Choice(option, str(said), f"key {READING_KEY}", len(held), "key"), [note]
    if said is not None:
        expected = f"one of {', '.join(formats.ROCMFP2_READINGS)}"
        problems.append(
            Problem(
                file=file.path.name,
                where=f"key {READING_KEY}",
                found=printable(repr(said)),
                expected=expected,
                fix="choose the reading: --rocmfp2 s40, fixed, signed or affine",
            )
        )
        return Rocmfp2Choice(option, None, f"key {READING_KEY} is no reading", len(held)), []
    complete = [t for t in held if t.complete]
    experts = [t for t in complete if len(t.dims) == 3]
    if not complete:
        reason = "the data of type 107 is not in the file"
        return Rocmfp2Choice(option, None, reason, len(held)), []
    chosen = (experts or complete)[0]
    rows = file.packed(chosen.name).reshape(-1, chosen.row_bytes)
    try:
        sample = rows[: max(1, _SAMPLE_BYTES // chosen.row_bytes)]
        guess = quant.guess_rocmfp2_reading(sample)
    except ValueError as error:
        problems.append(
            Problem(
                file=chosen.file,
                where=f"tensor {printable(chosen.name)}",
                found=str(error),
                expected="data that tells the reading of type 107",
                fix="choose it: --rocmfp2 s40, fixed, signed or affine",
            )
        )
        return Rocmfp2Choice(option, None, str(error), len(held)), []
    reason = f"{printable(chosen.name)}: {guess.reason}"
    note = f"type 107 is read as {guess.reading} ({reason}); --rocmfp2 overrides"
    return Rocmfp2Choice(option, guess.reading, reason, len(held), "data"), [note]


def _with_reading(
    matched: dict[str, StoredTensor], choice: Rocmfp2Choice
) -> dict[str, StoredTensor]:
    """Puts the chosen reading's format name into every tensor of type 107."""
    if choice.reading is None:
        return matched
    format = next(f for r, f in formats.ROCMFP2_READINGS.items() if r == choice.reading)
    return {
        name: dataclasses.replace(t, format=format) if t.format == "rocmfp2" else t
        for name, t in matched.items()
    }


# --- checkpoint -------------------------------------------------------------------------------


def _open_checkpoint(path: Path, problems: list[Problem]) -> ModelFile:
    file = checkpoint.open_checkpoint(path, problems)
    source = checkpoint.CONFIG
    if file.config is file.inference_config:
        source = checkpoint.INFERENCE_CONFIG
    config, reading = hparams.from_hf(file.config, source)
    problems += reading.problems
    notes = [*file.notes, *reading.notes]
    names = stored.published_names(file, problems)
    reader = stored.CheckpointReader(file=file)
    matched: dict[str, StoredTensor] = {}
    extra: dict[str, list[str]] = {}
    mtp: dict[str, StoredTensor] = {}
    draft, num_mtp = None, 0
    if config is not None and (file.tensors or file.index):
        specs = tensors.specs(config)
        matched = stored.match_checkpoint(specs, file, names, problems)
        draft = _checkpoint_draft(file, names, config)
        num_mtp = 0 if draft else _count_mtp(names)
        if num_mtp:
            differences: list[Problem] = []
            blocks = tensors.mtp_specs(config, num_mtp)
            mtp = stored.match_checkpoint(blocks, file, names, differences)
            if differences:
                what = f"{len(differences)} places, first: {differences[0]}"
                notes.append(f"MTP tensors differ in {what}")
        held = (matched, mtp, draft.tensors if draft else {})
        taken = {
            n for group in held for t in group.values() for p in t.parts for n in (p.name, p.scale)
        }
        wanted = _published_of(specs)
        left = [
            published
            for published, actual in names.items()
            if actual not in taken and published.removesuffix(".scale") not in wanted
        ]
        extra = stored.extra_tensors(left, config, num_mtp, path.name, problems)
    notes += model_report.extra_notes(extra, num_mtp) + _draft_notes(draft)
    return ModelFile(
        path=path,
        kind="checkpoint",
        files=file.files,
        config=config,
        tensors=matched,
        extra=extra,
        num_mtp=num_mtp,
        draft=draft,
        rocmfp2=Rocmfp2Choice("auto", None, "a checkpoint has no type 107", 0),
        metadata=file.config,
        problems=tuple(problems),
        notes=tuple(notes),
        reader=reader,
        _rows=model_report.checkpoint_rows(file, matched, mtp, draft.tensors if draft else {}),
    )


def _published_of(specs: list[TensorSpec]) -> set[str]:
    """Published names (and stems, for scales) that specifications stand for: not extra tensors,
    even if they did not fit."""
    out = set()
    for spec in specs:
        for expert in range(spec.num_experts or 1):
            name = spec.hf.replace(tensors.EXPERT, str(expert))
            out |= {name, name.removesuffix(".weight")}
    return out


def _count_mtp(names: dict[str, str]) -> int:
    count = 0
    while f"mtp.{count}.e_proj.weight" in names:
        count += 1
    return count


def _checkpoint_draft(
    file: checkpoint.Checkpoint, names: dict[str, str], config: ModelConfig
) -> Draft | None:
    if "mtp.0.main_proj.weight" not in names:
        return None
    shapes = {published: file.tensors[actual].shape for published, actual in names.items()}
    draft, reading = hparams_draft.draft_config(
        file.config, shapes, config, None, checkpoint.CONFIG
    )
    problems = reading.problems
    matched: dict[str, StoredTensor] = {}
    if draft is not None:
        specs = tensors.draft_specs(config, draft)
        matched = stored.match_checkpoint(specs, file, names, problems)
        known = _published_of(specs)
        unknown = [
            n
            for n in names
            if n.startswith("mtp.")
            and n.removesuffix(".scale") not in known
            and not n.endswith(".bias_vl")
        ]
        problems += _unknown_draft(file.path.name, unknown)
    return Draft(
        scheme=None,
        config=draft,
        tensors=matched,
        problems=tuple(problems),
        notes=tuple(reading.notes),
        reader=stored.CheckpointReader(file=file),
    )


def _draft_notes(draft: Draft | None) -> list[str]:
    if draft is None or not draft.problems:
        return [] if draft is None else list(draft.notes)
    count = len(draft.problems)
    return [
        *draft.notes,
        f"the drafter cannot be used ({count} problems): {draft.problems[0]}",
    ]
