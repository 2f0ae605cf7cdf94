"""Safetensors checkpoint directory: config, index and tensor headers, memory-mapped and checked.

A header reader of its own because the report of a bad download must be complete (every missing
shard, every tensor out of place), and because an untrusted header must not exhaust the reader. It
knows nothing of any model; names and shapes are checked by `ds4jax.tensors`.

Layout of a shard: u64 header length, a JSON object from tensor name to {dtype, shape,
data_offsets}, tensor data (offsets count from the end of the header).
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from ds4jax import gguf
from ds4jax.errors import MAX_KEPT, ModelFileError, Problem, printable

DTYPES: dict[str, tuple[int, str]] = {
    "BOOL": (1, "?"), "U8": (1, "<u1"), "I8": (1, "<i1"),
    "F8_E4M3": (1, "<u1"), "F8_E5M2": (1, "<u1"), "F8_E8M0": (1, "<u1"),
    "I16": (2, "<i2"), "U16": (2, "<u2"), "F16": (2, "<f2"), "BF16": (2, "<u2"),
    "I32": (4, "<i4"), "U32": (4, "<u4"), "F32": (4, "<f4"),
    "F64": (8, "<f8"), "I64": (8, "<i8"), "U64": (8, "<u8"),
}  # fmt: skip
"""Bytes of an element and numpy type of the view; float8 and bfloat16 are seen as their bits."""

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
INFERENCE_CONFIG = "inference/config.json"

# Far above any real file (72,317 tensors of 130 header bytes), low enough to refuse quickly.
MAX_HEADER_BYTES = 24 << 20
MAX_CONFIG_BYTES = 1 << 20
MAX_ENTRY_CHARS = 2048
MAX_METADATA_CHARS = 1 << 20
MAX_SHARD_TENSORS = 1 << 17
MAX_TENSORS = 1 << 18
MAX_SHARDS = 4096
MAX_DIMS = 8

_AGAIN = "download or copy the file again, it is cut off or damaged"
_SPACE = re.compile(r"[ \t\n\r]*")
_SHARD_NAME = re.compile(r"^(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.safetensors$")


class CheckpointTensor(NamedTuple):
    """One tensor of a shard, with its place in the file (bytes from the file's start)."""

    name: str
    dtype: str  # safetensors tag, a key of DTYPES
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int
    complete: bool = True  # all its bytes are in the file


@dataclass(kw_only=True)
class Checkpoint:
    """A checked checkpoint directory. Arrays are read-only views of the mappings."""

    path: Path
    files: tuple[Path, ...]
    config: dict[str, Any]
    inference_config: dict[str, Any] | None
    tensors: dict[str, CheckpointTensor]
    index: dict[str, str]  # shard of each tensor as the index says; empty without an index
    notes: tuple[str, ...] = ()
    _maps: dict[str, npt.NDArray[np.uint8]] = field(repr=False)

    def packed(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, uint8 `[*shape[:-1], row bytes]`, without a copy.

        Raises:
            KeyError: if there is no such tensor.
            ModelFileError: if its bytes are not in the file (one opened with its problems kept).
        """
        t, flat = self._bytes(name)
        lead = t.shape[:-1]
        return flat.reshape(*lead, DTYPES[t.dtype][0] * (t.shape[-1] if t.shape else 1))

    def array(self, name: str) -> npt.NDArray[Any]:
        """A tensor as a numpy view: float8 as uint8, bfloat16 as uint16, the rest as itself.

        Raises:
            As `packed`.
        """
        t, flat = self._bytes(name)
        return flat.view(DTYPES[t.dtype][1]).reshape(t.shape)

    def _bytes(self, name: str) -> tuple[CheckpointTensor, npt.NDArray[np.uint8]]:
        t = self.tensors[name]
        if not t.complete:
            found: list[Problem] = []
            _outside(t.file, [t], len(self._maps[t.file]), found)
            raise ModelFileError(str(self.path), found)
        return t, self._maps[t.file][t.start : t.start + t.nbytes]


def open_checkpoint(
    path: str | os.PathLike[str], problems: list[Problem] | None = None
) -> Checkpoint:
    """Opens a checkpoint directory and checks its config, its index and every shard header.

    Args:
        path: the directory.
        problems: None: anything wrong raises. A list: findings are appended to it, and what can be
            read of the directory is returned (the config without the weights, for example).

    Raises:
        ModelFileError: with everything found wrong: no directory, no or invalid config, missing
            shards, invalid JSON, headers longer than the file, unknown dtypes, tensors outside
            the file, overlapping, named twice, or not where the index says. With a list given,
            only if there is no usable config.
    """
    root = Path(path)
    found: list[Problem] = []
    if not os.path.isdir(root):
        what = "a file" if os.path.exists(root) else "no such directory"
        _add(found, str(root), "", what, "a checkpoint directory", "check the path")
        raise ModelFileError(str(root), found)
    notes: list[str] = []
    config, inference = _configs(root, found, notes)
    names, index = _shards(root, found, notes)
    tensors, maps = _open_shards(root, names, found, notes)
    _check_index(index, tensors, set(maps), found)
    if found and (problems is None or not config):
        raise ModelFileError(str(root), found)
    if problems is not None:
        problems.extend(found)
    return Checkpoint(
        path=root,
        files=tuple(root / name for name in names),
        config=config,
        inference_config=inference,
        tensors=tensors,
        index=index,
        notes=tuple(notes),
        _maps=maps,
    )


def _open_shards(
    root: Path, names: list[str], problems: list[Problem], notes: list[str]
) -> tuple[dict[str, CheckpointTensor], dict[str, npt.NDArray[np.uint8]]]:
    """Tensors by name and mappings by file of every shard that can be read."""
    tensors: dict[str, CheckpointTensor] = {}
    maps: dict[str, npt.NDArray[np.uint8]] = {}
    for name in names:
        shard = _read_shard(root / name, problems, notes)
        if shard is None:
            continue
        maps[name] = np.frombuffer(shard[0], dtype=np.uint8)
        for tensor in shard[1]:
            if tensor.name in tensors:
                found = f"the name twice (also in {tensors[tensor.name].file})"
                fix = "the directory mixes two downloads: fetch it again"
                _add(problems, name, f"tensor {tensor.name}", found, "each tensor once", fix)
            tensors[tensor.name] = tensor
        if len(tensors) > MAX_TENSORS or len(problems) >= MAX_KEPT:
            found, expected = f"{len(tensors)} tensors so far", f"at most {MAX_TENSORS}"
            _add(problems, name, "", found, expected, "this is not a DeepSeek-V4 checkpoint")
            break
    return tensors, maps


def _add(
    problems: list[Problem], file: str, where: str, found: str, expected: str, fix: str = _AGAIN
) -> None:
    if len(problems) < MAX_KEPT:
        problems.append(
            Problem(
                file=printable(file),
                where=printable(where),
                found=printable(found, 300),
                expected=expected,
                fix=fix,
            )
        )


# --- config and index -------------------------------------------------------------------------


def _configs(
    root: Path, problems: list[Problem], notes: list[str]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """config.json and, if there is one, DeepSeek's own inference/config.json."""
    has_config, has_inference = (
        os.path.exists(root / CONFIG),
        os.path.exists(root / INFERENCE_CONFIG),
    )
    inference = _json_object(root / INFERENCE_CONFIG, problems) if has_inference else None
    if has_config:
        return _json_object(root / CONFIG, problems) or {}, inference
    if inference is not None:
        notes.append(f"no {CONFIG}; {INFERENCE_CONFIG} describes the model")
        return inference, inference
    ggufs = sorted(p.name for p in root.glob("*.gguf"))[:4]
    fix = f"fetch {CONFIG} of the same release into {root}"
    if ggufs:
        fix = f"for a GGUF give the file itself, here {', '.join(map(printable, ggufs))}"
    if not has_inference:
        _add(problems, CONFIG, "", "no such file", "the model's configuration", fix)
    return {}, None


def _json_object(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    """A small JSON object; what is wrong with it becomes a problem."""
    name = path.name if path.parent.name != "inference" else INFERENCE_CONFIG
    raw = _read_small(path, name, MAX_CONFIG_BYTES, problems)
    if raw is None:
        return None
    twice: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) < len(items):
            keys = [k for k, _ in items]
            twice.extend(sorted({k for k in keys if keys.count(k) > 1})[:8])
        return result

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        _add(problems, name, "", f"invalid JSON ({error})", "a JSON object in UTF-8")
        return None
    if not isinstance(value, dict):
        _add(problems, name, "", f"a JSON {type(value).__name__}", "a JSON object")
        return None
    for key in twice:
        _add(problems, name, f"key {key}", "the key twice", "each key once")
    return value


def _read_small(path: Path, name: str, limit: int, problems: list[Problem]) -> bytes | None:
    buffer = gguf.map_file(path, problems)
    if buffer is None:
        return None
    with buffer:
        if len(buffer) > limit:
            _add(problems, name, "", f"{len(buffer)} bytes", f"at most {limit} bytes of JSON")
            return None
        return buffer[:]


def _shards(
    root: Path, problems: list[Problem], notes: list[str]
) -> tuple[list[str], dict[str, str]]:
    """Shard names in order and the index (empty without one); missing files are problems."""
    if os.path.exists(root / INDEX):
        index = _read_index(root / INDEX, problems)
        names = sorted(set(index.values()))
        if len(names) > MAX_SHARDS:
            _add(problems, INDEX, "", f"{len(names)} shards", f"at most {MAX_SHARDS} shards")
            return [], {}
        missing = [name for name in names if not os.path.exists(root / name)]
        for name in missing:
            fix = f"fetch it into {root}"
            _add(problems, name, "", "no such file", "a shard that the index names", fix)
        return [name for name in names if name not in missing], index
    if os.path.exists(root / SINGLE):
        return [SINGLE], {}
    found = sorted(p.name for p in root.glob("*.safetensors"))
    if len(found) == 1 and not _SHARD_NAME.match(found[0]):
        notes.append(f"no {SINGLE}; {found[0]} is the only safetensors file and was taken")
        return found, {}
    if found:
        what = f"{len(found)} safetensors files without an index"
        _add(problems, INDEX, "", what, "the index of the shards", f"fetch it into {root}")
    else:
        expected = f"{SINGLE}, or {INDEX} with its shards"
        _add(problems, SINGLE, "", "no such file", expected, f"fetch the weights into {root}")
    return [], {}


def _read_index(path: Path, problems: list[Problem]) -> dict[str, str]:
    """The `weight_map` of an index; entries that cannot be used are problems."""
    raw = _read_small(path, INDEX, MAX_HEADER_BYTES, problems)
    text = _utf8(raw, INDEX, problems) if raw is not None else None
    if text is None:
        return {}
    weights: dict[str, str] = {}
    plain: set[str] = set()  # shard names found to be file names
    try:
        for name, shard in _index_items(text):
            if not isinstance(shard, str) or shard not in plain:
                if not isinstance(shard, str) or not shard or Path(shard).name != shard:
                    expected = "the name of a file in the same directory"
                    _add(problems, INDEX, f"tensor {name}", f"shard {shard!r}", expected)
                    continue
                plain.add(shard)
            if name in weights:
                _add(problems, INDEX, f"tensor {name}", "the name twice", "each name once")
            weights[name] = shard
            if len(weights) > MAX_TENSORS or len(problems) >= MAX_KEPT:
                raise ValueError(f"more than {MAX_TENSORS} tensors or too many problems")
    except (ValueError, RecursionError) as error:
        _add(problems, INDEX, "", f"invalid JSON ({error})", "an index with a weight_map")
        return {}
    if not weights:
        _add(problems, INDEX, "weight_map", "no entries", "a file name for every tensor")
    return weights


_USUAL_PAIR = re.compile(r',\s{0,64}"([^"\\\x00-\x1f]{1,512})": ?"([^"\\\x00-\x1f]{1,255})"')


def _index_items(text: str) -> Iterator[tuple[str, Any]]:
    """Tensor name and shard of every entry of the `weight_map`.

    Raises:
        ValueError: where the text is not JSON.
    """
    reader = _Object(text)
    for key in reader.keys(0):
        if key != "weight_map":
            reader.value(MAX_METADATA_CHARS)
            continue
        for name in reader.keys(reader.pos):
            yield name, reader.value(MAX_ENTRY_CHARS)
            while match := _USUAL_PAIR.match(text, reader.pos):
                reader.pos = match.end()
                yield match[1], match[2]
            reader.skip()


def _check_index(
    index: dict[str, str],
    tensors: dict[str, CheckpointTensor],
    opened: set[str],
    problems: list[Problem],
) -> None:
    """Every tensor of the index is in the shard it names (if that shard could be read)."""
    for name, shard in index.items():
        tensor = tensors.get(name)
        if shard in opened and (tensor is None or tensor.file != shard):
            found = "no such tensor" if tensor is None else f"the tensor in {tensor.file}"
            expected = f"the tensor in {shard}, as {INDEX} says"
            fix = "index and shards are of different downloads: fetch them again"
            _add(problems, shard, f"tensor {name}", found, expected, fix)


# --- shards -----------------------------------------------------------------------------------


class _Object:
    """Reads a JSON object entry by entry, so that no more than one value is held at a time."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self._decode = json.JSONDecoder().raw_decode

    def keys(self, start: int) -> Iterator[str]:
        """The keys of the object at `start`; the caller reads each value before the next key.

        Raises:
            ValueError: where the text is not JSON.
        """
        self.pos = self._skip(start)
        self._take("{")
        if self.text[self.pos : self.pos + 1] == "}":
            self.pos = self._skip(self.pos + 1)
            return
        while True:
            key = self.value(MAX_ENTRY_CHARS)
            if not isinstance(key, str):
                raise ValueError(f"a key that is not a string at character {self.pos}")
            self._take(":")
            yield key
            if self.text[self.pos : self.pos + 1] == "}":
                self.pos = self._skip(self.pos + 1)
                return
            self._take(",")

    def value(self, limit: int) -> Any:
        """The next value, of at most `limit` characters."""
        piece = self.text[self.pos : self.pos + limit]
        try:
            value, used = self._decode(piece)
        except json.JSONDecodeError as error:
            at = self.pos + error.pos
            raise ValueError(
                f"{error.msg} at character {at} (values here may take {limit} characters)"
            ) from None
        self.pos = self._skip(self.pos + used)
        return value

    def _take(self, char: str) -> None:
        if self.text[self.pos : self.pos + 1] != char:
            raise ValueError(f"expected {char!r} at character {self.pos}")
        self.pos = self._skip(self.pos + 1)

    def skip(self) -> None:
        """Passes over white space."""
        self.pos = self._skip(self.pos)

    def _skip(self, pos: int) -> int:
        match = _SPACE.match(self.text, pos)
        return match.end() if match else pos


def _utf8(raw: bytes, file: str, problems: list[Problem]) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        _add(problems, file, "header", f"invalid UTF-8 at its byte {error.start}", "UTF-8 text")
        return None


def _read_shard(
    path: Path, problems: list[Problem], notes: list[str]
) -> tuple[mmap.mmap, list[CheckpointTensor]] | None:
    """Maps one shard and reads its header."""
    buffer = gguf.map_file(path, problems)
    if buffer is None:
        return None
    size = len(buffer)
    length = int.from_bytes(buffer[:8], "little")
    if size < 8 or length > size - 8:
        found = f"a header of {length} bytes in a file of {size} bytes"
        _add(problems, path.name, "header", found, "a header inside the file")
        return None
    if length > MAX_HEADER_BYTES:
        found, expected = f"a header of {length} bytes", f"at most {MAX_HEADER_BYTES}"
        _add(problems, path.name, "header", found, expected)
        return None
    text = _utf8(buffer[8 : 8 + length], path.name, problems)
    if text is None:
        return None
    before = len(problems)
    tensors = _header_entries(path.name, text, 8 + length, size, problems)
    _outside(path.name, [t for t in tensors if not t.complete], size, problems)
    _check_layout(path.name, tensors, 8 + length, size, problems, notes, len(problems) == before)
    return buffer, tensors


def _header_entries(
    file: str, text: str, base: int, size: int, problems: list[Problem]
) -> list[CheckpointTensor]:
    """Every usable tensor of a header; the others are problems."""
    tensors: list[CheckpointTensor] = []
    names: set[str] = set()
    try:
        for name, entry in _items(text):
            if name == "__metadata__":
                continue
            if name in names:
                _add(problems, file, f"tensor {name}", "the name twice", "each tensor once")
            names.add(name)
            plain = entry if isinstance(entry, tuple) else _plain(file, name, entry, problems)
            tensor = None if plain is None else _entry(file, name, plain, base, size, problems)
            if tensor is not None:
                tensors.append(tensor)
            if len(names) > MAX_SHARD_TENSORS or len(problems) >= MAX_KEPT:
                raise ValueError(f"more than {MAX_SHARD_TENSORS} tensors or too many problems")
    except (ValueError, RecursionError) as error:
        _add(problems, file, "header", f"invalid JSON ({error})", "a safetensors header")
    return tensors


_Plain = tuple[str, tuple[int, ...], int, int]
"""Dtype, shape, first and last byte offset."""

_USUAL = re.compile(
    r', ?"([^"\\\x00-\x1f]{1,512})": ?\{"dtype": ?"([A-Z0-9_]{2,8})"'
    r', ?"shape": ?\[([1-9][0-9, ]{0,99})\]'
    r', ?"data_offsets": ?\[(\d{1,18}), ?(\d{1,18})\]\}'
)
"""An entry with the comma before it, in the usual spelling; others take the JSON decoder."""


def _items(text: str) -> Iterator[tuple[str, Any]]:
    """The entries of a header: name, and a `_Plain` for usual ones or the JSON value.

    Raises:
        ValueError: where the text is not one JSON object.
    """
    reader = _Object(text)
    for name in reader.keys(0):
        yield name, reader.value(MAX_METADATA_CHARS if name == "__metadata__" else MAX_ENTRY_CHARS)
        while match := _USUAL.match(text, reader.pos):
            reader.pos = match.end()
            name, dtype, shape, start, end = match.groups()
            dims = tuple(map(int, shape.split(",")))  # int() raises for a stray comma or space
            yield name, (dtype, dims, int(start), int(end))
        reader.skip()
    if text[reader.pos :].strip(" \t\n\r"):
        raise ValueError(f"text after the object at character {reader.pos}")


def _plain(file: str, name: str, entry: Any, problems: list[Problem]) -> _Plain | None:
    """One header entry out of its JSON value."""
    where = f"tensor {name}"
    if not isinstance(entry, dict):
        _add(problems, file, where, f"a JSON {type(entry).__name__}", "dtype, shape, data_offsets")
        return None
    dtype, shape, offsets = (entry.get(k) for k in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str):
        _add(problems, file, where, f"dtype {dtype!r}", "one of " + ", ".join(DTYPES))
    elif not _is_counts(shape):
        expected = f"up to {MAX_DIMS} dimensions, each above 0"
        _add(problems, file, where, f"shape {shape!r}", expected)
    elif not _is_counts(offsets) or len(offsets) != 2:
        _add(problems, file, where, f"data_offsets {offsets!r}", "two byte offsets")
    else:
        return dtype, tuple(shape), offsets[0], offsets[1]
    return None


def _entry(
    file: str, name: str, plain: _Plain, base: int, size: int, problems: list[Problem]
) -> CheckpointTensor | None:
    """One header entry, checked against the file size."""
    dtype, shape, start, end = plain
    kind = DTYPES.get(dtype)
    if kind is None:
        expected = "one of " + ", ".join(DTYPES)
        _add(problems, file, f"tensor {name}", f"dtype {dtype!r}", expected)
        return None
    if len(shape) > MAX_DIMS or 0 in shape:
        expected = f"up to {MAX_DIMS} dimensions, each above 0"
        _add(problems, file, f"tensor {name}", f"shape {list(shape)}", expected)
        return None
    nbytes = kind[0]
    for dim in shape:
        nbytes *= dim
    if end - start != nbytes:
        found = f"{end - start} bytes for {dtype} {list(shape)}"
        _add(problems, file, f"tensor {name}", found, f"{nbytes} bytes")
        return None
    return CheckpointTensor(name, dtype, shape, file, base + start, nbytes, base + end <= size)


def _outside(file: str, cut: list[CheckpointTensor], size: int, problems: list[Problem]) -> None:
    """Reports tensors whose bytes are not in the file: one by its name, more as a cut-off file."""
    if not cut:
        return
    end = max(t.start + t.nbytes for t in cut)
    if len(cut) == 1:
        found = f"data up to byte {end} of a file of {size} bytes"
        _add(problems, file, f"tensor {cut[0].name}", found, "data inside the file")
        return
    first = printable(cut[0].name)
    found = f"{size} bytes, with {len(cut)} tensors beyond them (the first is {first})"
    _add(problems, file, "", found, f"{end} bytes")


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in value
    )


def _check_layout(
    file: str,
    tensors: list[CheckpointTensor],
    base: int,
    size: int,
    problems: list[Problem],
    notes: list[str],
    complete: bool,
) -> None:
    """Overlaps are problems; bytes that belong to no tensor are worth a note."""
    furthest, reach = "", base
    used = 0
    for tensor in sorted(tensors, key=lambda t: t.start):
        end = tensor.start + tensor.nbytes
        if tensor.start < reach:
            shared = min(reach, end) - tensor.start
            found = f"{shared} bytes shared with tensor {furthest}"
            _add(problems, file, f"tensor {tensor.name}", found, "tensors that do not overlap")
        if end > reach:
            furthest, reach = tensor.name, end
        used += tensor.nbytes
    if complete and used < size - base:
        notes.append(f"{printable(file)}: {size - base - used} bytes belong to no tensor")
