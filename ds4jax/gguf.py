"""GGUF container: key/value pairs and the tensor table, memory-mapped and checked.

A reader of its own because the public package refuses whole files that hold a type id it does not
know, and because an untrusted file must neither crash nor exhaust the reader: every count, length
and offset is compared with the file size before anything is allocated or skipped. It knows nothing
of any model; names and shapes are checked by `ds4jax.tensors`, bytes are decoded by `ds4jax.quant`.

Layout (versions 2 and 3, little-endian): magic, u32 version, u64 tensors, u64 pairs; the pairs; the
tensor table; padding to `general.alignment`; tensor data. ggml dimensions run fastest first, numpy
shapes are their reverse.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ds4jax import formats
from ds4jax.errors import MAX_KEPT, ModelFileError, Problem, printable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4

# Far above any real file, and low enough that a hostile one is refused in well under a second.
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_TABLE_BYTES = 32 << 20  # pairs and tensor table, each; official vocabularies take 5 MB
MAX_STRING_BYTES = 4 << 20
MAX_KEY_BYTES = (1 << 16) - 1
MAX_ARRAY_STRINGS = 1 << 20  # over all string arrays of a file
MAX_ALIGNMENT = 1 << 20
MAX_SHARDS = 1024
_MAX_BAD_STRINGS = 8
MAX_CUT_LISTED = 8
"""Tensors beyond the end of a file that its problem names."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_TRUNCATED = "download or copy the file again, it is cut off or damaged"
_DAMAGED = "the file is damaged: download or copy it again"
_RENAMED = "restore the name NAME-0000N-of-0000M.gguf the shard was published under"
_INSIDE = "data inside the file"


@dataclass(frozen=True)
class TypeInfo:
    """One on-disk tensor type: ggml name, decoder name, weights and bytes of a block.

    `packed` says that `ds4jax.quant` decodes `format` itself; the other standard types are decoded
    once, at load, by the public `gguf` package.
    """

    name: str
    format: str
    block: int
    nbytes: int
    packed: bool = True


def _other(name: str, block: int, nbytes: int) -> TypeInfo:
    return TypeInfo(name, name.lower(), block, nbytes, packed=False)


TYPES: dict[int, TypeInfo] = {
    **{
        f.type_id: TypeInfo(f.ggml_name, f.name, f.block, f.block_bytes)
        for f in formats.FORMATS.values()
        if f.type_id is not None
    },
    formats.ROCMFP2_TYPE_ID: TypeInfo("Q2_0_ROCMFP2", "rocmfp2", 32, 10),
    2: _other("Q4_0", 32, 18),
    3: _other("Q4_1", 32, 20),
    6: _other("Q5_0", 32, 22),
    7: _other("Q5_1", 32, 24),
    11: _other("Q3_K", 256, 110),
    13: _other("Q5_K", 256, 176),
    14: _other("Q6_K", 256, 210),
    17: _other("IQ2_XS", 256, 74),
    18: _other("IQ3_XXS", 256, 98),
    20: _other("IQ4_NL", 32, 18),
    21: _other("IQ3_S", 256, 110),
    22: _other("IQ2_S", 256, 82),
    23: _other("IQ4_XS", 256, 136),
    24: _other("I8", 1, 1),
    25: _other("I16", 1, 2),
    27: _other("I64", 1, 8),
    28: _other("F64", 1, 8),
}
"""Every type whose bytes this program can account for, by on-disk id."""

UNSUPPORTED_TYPES: dict[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    19: "IQ1_S",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    41: "Q1_0",
    42: "Q2_0 or TQ3_0 (two trees disagree)",
    108: "Q4_0_ROCMI4 or a renumbered Q2_0_ROCMFPX (two trees disagree)",
    109: "Q5_0_ROCMFPX",
    110: "Q7_0_ROCMFPX",
}
"""Ids that other programs write and this one does not read."""

_SCALARS: dict[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B",
    10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY, _BOOL = 8, 9, 7
_VALUE_NAMES = (
    "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64",
)  # fmt: skip

_SHARD_NAME = re.compile(r"^(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")


class StringArray(Sequence[str]):
    """A GGUF array of strings, checked at open and decoded when it is first used."""

    def __init__(self, buffer: mmap.mmap, start: int, count: int) -> None:
        self._buffer = buffer
        self._start = start
        self._count = count
        self._items: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.tolist()[index]

    def tolist(self) -> list[str]:
        """All strings, in order. The list is built once and must not be changed."""
        if self._items is None:
            pos, buffer, unpack = self._start, self._buffer, _U64.unpack_from
            items = []
            for _ in range(self._count):
                (length,) = unpack(buffer, pos)
                items.append(str(buffer[pos + 8 : pos + 8 + length], "utf-8"))
                pos += 8 + length
            self._items = items
        return self._items


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """One row of the tensor table, with its place in its file (bytes from the file's start)."""

    name: str
    dims: tuple[int, ...]  # ggml order, fastest first
    type_id: int
    file: str
    start: int
    nbytes: int
    complete: bool = True  # all its bytes are in the file

    @property
    def type(self) -> TypeInfo:
        """Block size and names of the tensor's type."""
        return TYPES[self.type_id]

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape in numpy order, slowest axis first."""
        return self.dims[::-1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (the fastest axis)."""
        return self.dims[0] // self.type.block * self.type.nbytes


@dataclass(kw_only=True)
class GGUFFile:
    """A checked GGUF file, all its shards included. Arrays are read-only views of the mapping."""

    path: Path
    files: tuple[Path, ...]
    version: int
    alignment: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    notes: tuple[str, ...] = ()
    _maps: dict[str, npt.NDArray[np.uint8]] = field(repr=False)

    def packed(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, uint8 `[*shape[:-1], row_bytes]`, without a copy.

        Raises:
            KeyError: if the file has no such tensor.
            ModelFileError: if its bytes are not in the file (one opened with its problems kept).
        """
        t = self.tensors[name]
        if not t.complete:
            found = f"{t.nbytes} bytes at byte {t.start}"
            raise ModelFileError(
                str(self.path), [_problem(t.file, f"tensor {name}", found, _INSIDE, _TRUNCATED)]
            )
        flat = self._maps[t.file][t.start : t.start + t.nbytes]
        return flat.reshape(*t.shape[:-1], t.row_bytes)


def open_gguf(path: str | os.PathLike[str], problems: list[Problem] | None = None) -> GGUFFile:
    """Opens a GGUF file, or all shards of a split one, and checks its whole table.

    Args:
        path: a `.gguf` file; any shard of a split file stands for all of them.
        problems: None: anything wrong raises. A list: findings are appended to it, and what can be
            read of the file is returned (metadata without tensor data, for example).

    Raises:
        ModelFileError: with everything found wrong: unreadable or cut-off files, bad magic,
            version, counts, strings, types or shapes, tensors outside the data section,
            misaligned, overlapping or named twice, missing or foreign shards. With a list given,
            only if no table could be read.
    """
    first = Path(path)
    found: list[Problem] = []
    shards = _shard_paths(first, found)
    tables = []
    for shard in shards:
        table = _read_table(shard, found)
        if table is not None:
            _check_split(table, found)
            tables.append(table)
    tensors = _merge(tables, found)
    if len(tables) == len(shards) > 1 and not found:
        total = tables[0].metadata.get("split.tensors.count", len(tensors))
        if total != len(tensors):
            what = f"{len(tensors)} tensors in {len(shards)} shards"
            expected = f"{total}, as the first shard says"
            fix = "the shards belong to different files: fetch them again together"
            found.append(_problem(first.name, "key split.tensors.count", what, expected, fix))
    if found and (problems is None or not tables):
        raise ModelFileError(str(first), found)
    if problems is not None:
        problems.extend(found)
    notes = []
    if len(shards) > 1 and shards[0] != first:
        notes.append(f"{first.name} is one of {len(shards)} shards; all of them were opened")
    return GGUFFile(
        path=first,
        files=tuple(shards),
        version=tables[0].version,
        alignment=tables[0].alignment,
        metadata=tables[0].metadata,
        tensors=tensors,
        notes=tuple(notes),
        _maps={t.name: np.frombuffer(t.buffer, dtype=np.uint8) for t in tables},
    )


def _problem(file: str, where: str, found: str, expected: str, fix: str) -> Problem:
    return Problem(
        file=printable(file),
        where=printable(where),
        found=printable(found, 300),
        expected=expected,
        fix=fix,
    )


# --- one file ---------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Table:
    """Parsed head of one file."""

    name: str
    buffer: mmap.mmap
    version: int
    metadata: dict[str, Any]
    alignment: int
    tensors: list[GGUFTensor]


class _Fatal(Exception):
    """Parsing cannot go on after this problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


def map_file(path: Path, problems: list[Problem]) -> mmap.mmap | None:
    """Maps a regular, non-empty file read-only; on failure adds one problem and returns None."""
    try:
        # O_NONBLOCK: a pipe with a model's name must be refused, not waited for.
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        found = getattr(error, "strerror", None) or str(error)
        fix = "check the path and its permissions"
        problems.append(_problem(str(path), "", found, "a readable file", fix))
        return None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size == 0:
            found = "an empty file" if stat.S_ISREG(info.st_mode) else "not a regular file"
            problems.append(_problem(path.name, "", found, "model data", _TRUNCATED))
            return None
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        found = f"a file that cannot be mapped ({error})"
        fix = "copy the file to a local disk"
        problems.append(_problem(path.name, "", found, "a file on a local disk", fix))
        return None
    finally:
        os.close(fd)


def _read_table(path: Path, problems: list[Problem]) -> _Table | None:
    buffer = map_file(path, problems)
    if buffer is None:
        return None
    parser = _Parser(path.name, buffer, problems)
    try:
        return parser.table()
    except _Fatal as stop:
        problems.append(stop.problem)
        return None


class _Parser:
    """Walks one mapped file front to back; `_Fatal` where the layout is lost."""

    def __init__(self, name: str, buffer: mmap.mmap, problems: list[Problem]) -> None:
        self.name = name
        self.buffer = buffer
        self.size = len(buffer)
        self.pos = 0
        self.limit = self.size  # end of the section being read
        self.strings_left = MAX_ARRAY_STRINGS
        self.problems = problems

    def problem(self, where: str, found: str, expected: str, fix: str = _DAMAGED) -> Problem:
        return _problem(self.name, where, found, expected, fix)

    def add(self, where: str, found: str, expected: str, fix: str = _DAMAGED) -> None:
        problem = self.problem(where, found, expected, fix)
        if len(self.problems) >= MAX_KEPT:
            raise _Fatal(problem)
        self.problems.append(problem)

    def need(self, count: int, what: str) -> None:
        """Fails unless `count` more bytes lie before the limit."""
        if count > self.size - self.pos:
            found = f"{count} bytes announced at byte {self.pos} of a file of {self.size} bytes"
            raise _Fatal(self.problem(what, found, _INSIDE, _TRUNCATED))
        if count > self.limit - self.pos:
            most = f"{MAX_TABLE_BYTES >> 20} MiB"
            found = f"{count} more bytes after {most} of names and values"
            raise _Fatal(self.problem(what, found, f"at most {most}"))

    def scalar(self, fmt: str, what: str) -> Any:
        size = struct.calcsize(fmt)
        self.need(size, what)
        (value,) = struct.unpack_from(fmt, self.buffer, self.pos)
        self.pos += size
        return value

    def text(self, what: str, limit: int) -> str:
        """A length-prefixed UTF-8 string of at most `limit` bytes; bad UTF-8 is kept escaped."""
        length = self.scalar("<Q", f"length of {what}")
        if length > limit and length <= self.size - self.pos:
            raise _Fatal(self.problem(what, f"{length} bytes of text", f"at most {limit} bytes"))
        self.need(length, what)
        raw = self.buffer[self.pos : self.pos + length]
        self.pos += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            shown = raw.decode("utf-8", "backslashreplace")
            self.add(f"{what} {shown}", f"invalid UTF-8 at its byte {error.start}", "UTF-8 text")
            return shown

    def table(self) -> _Table:
        version, num_tensors, num_pairs = self.head()
        self.limit = min(self.size, self.pos + MAX_TABLE_BYTES)
        metadata = self.pairs(num_pairs)
        alignment = self.alignment(metadata)
        self.limit = min(self.size, self.pos + MAX_TABLE_BYTES)
        rows = self.rows(num_tensors)
        start = -(-self.pos // alignment) * alignment
        return _Table(
            name=self.name,
            buffer=self.buffer,
            version=version,
            metadata=metadata,
            alignment=alignment,
            tensors=self.place(rows, start, alignment),
        )

    def head(self) -> tuple[int, int, int]:
        magic = self.buffer[:4]
        if magic != MAGIC:
            found = f"first bytes {magic.hex(' ')}"
            expected = "47 47 55 46 ('GGUF')"
            raise _Fatal(self.problem("magic", found, expected, "this is not a GGUF file"))
        self.pos = 4
        version = self.scalar("<I", "version")
        if version not in VERSIONS:
            fix = "convert the model again with a current converter"
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                fix = "the file is big-endian; convert it to little-endian"
            raise _Fatal(self.problem("version", str(version), "2 or 3", fix))
        num_tensors = self.scalar("<Q", "tensor count")
        num_pairs = self.scalar("<Q", "key count")
        left = self.size - self.pos
        for what, count, least, most in (
            ("tensor count", num_tensors, 24, MAX_TENSORS),
            ("key count", num_pairs, 13, MAX_PAIRS),
        ):
            if count > most or count * least > left:
                expected = f"at most {min(most, left // least)} for a file of {self.size} bytes"
                raise _Fatal(self.problem(what, str(count), expected))
        return version, num_tensors, num_pairs

    # --- key/value pairs

    def pairs(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for number in range(count):
            key = self.text(f"key {number}", MAX_KEY_BYTES)
            if not key:
                self.add(f"key {number}", "an empty name", "a name")
            kind = self.scalar("<I", f"type of key {key}")
            value = self.value(key, kind)
            if key in metadata:
                self.add(f"key {key}", "the key twice", "each key once")
            metadata[key] = value
        return metadata

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.text(f"key {key}", MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            found = f"value type {kind}"
            raise _Fatal(self.problem(f"key {key}", found, "a value type in 0..12"))
        value = self.scalar(_SCALARS[kind], f"key {key}")
        if kind != _BOOL:
            return value
        if value > 1:
            self.add(f"key {key}", f"a bool of value {value}", "0 or 1")
        return bool(value)

    def array(self, key: str) -> Any:
        kind = self.scalar("<I", f"element type of key {key}")
        count = self.scalar("<Q", f"length of key {key}")
        if kind == _STRING:
            return self.string_array(key, count)
        if kind not in _SCALARS:
            found = "an array of arrays" if kind == _ARRAY else f"element type {kind}"
            expected = "an array of numbers or strings"
            raise _Fatal(self.problem(f"key {key}", found, expected))
        dtype = np.dtype("?" if kind == _BOOL else _SCALARS[kind])
        self.need(count * dtype.itemsize, f"key {key} ({count} x {_VALUE_NAMES[kind]})")
        values = np.frombuffer(self.buffer, dtype=dtype, count=count, offset=self.pos)
        self.pos += count * dtype.itemsize
        return values

    def string_array(self, key: str, count: int) -> StringArray:
        self.need(count * 8, f"key {key} ({count} strings)")
        if count > self.strings_left:
            found = f"{count} strings"
            expected = f"at most {MAX_ARRAY_STRINGS} in all arrays of a file"
            raise _Fatal(self.problem(f"key {key}", found, expected))
        self.strings_left -= count
        start = pos = self.pos
        buffer, limit, unpack = self.buffer, self.limit, _U64.unpack_from
        bad: list[int] = []
        number_bad = 0
        for index in range(count):
            if limit - pos < 8:
                break
            (length,) = unpack(buffer, pos)
            pos += 8
            if length > limit - pos:
                break
            raw = buffer[pos : pos + length]
            if not raw.isascii():
                try:
                    raw.decode("utf-8")
                except UnicodeDecodeError:
                    number_bad += 1
                    if len(bad) < _MAX_BAD_STRINGS:
                        bad.append(index)
            pos += length
        else:
            self.pos = pos
            if number_bad:
                found = f"{number_bad} strings that are not UTF-8 (first at index {bad})"
                self.add(f"key {key}", found, "UTF-8 text")
            return StringArray(buffer, start, count)
        self.pos = pos
        self.need(limit - pos + 1, f"key {key}, string {index} of {count}")
        raise RuntimeError("unreachable: need() raises")

    def alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        ok = isinstance(value, int) and not isinstance(value, bool)
        if not ok or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
            expected = f"a power of two up to {MAX_ALIGNMENT}"
            raise _Fatal(self.problem("key general.alignment", repr(value)[:80], expected))
        return int(value)

    # --- tensor table

    def rows(self, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
        rows = []
        for number in range(count):
            name = self.text(f"name of tensor {number}", MAX_KEY_BYTES)
            num_dims = self.scalar("<I", f"tensor {name}")
            if num_dims > MAX_DIMS:
                found = f"{num_dims} dimensions"
                raise _Fatal(self.problem(f"tensor {name}", found, f"at most {MAX_DIMS}"))
            self.need(8 * num_dims + 12, f"tensor {name}")
            dims = struct.unpack_from(f"<{num_dims}Q", self.buffer, self.pos)
            kind, offset = struct.unpack_from("<IQ", self.buffer, self.pos + 8 * num_dims)
            self.pos += 8 * num_dims + 12
            rows.append((name, dims, kind, offset))
        return rows

    def place(
        self, rows: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> list[GGUFTensor]:
        """Checks every row against its type and the data section, then all of them for overlap."""
        tensors = []
        for name, dims, kind, offset in rows:
            nbytes = self.row_nbytes(name, dims, kind)
            if offset % alignment:
                expected = f"a multiple of the alignment {alignment}"
                self.add(f"tensor {name}", f"offset {offset}", expected)
            elif nbytes is not None:
                tensors.append(
                    GGUFTensor(
                        name=name,
                        dims=dims,
                        type_id=kind,
                        file=self.name,
                        start=start + offset,
                        nbytes=nbytes,
                        complete=start + offset + nbytes <= self.size,
                    )
                )
        self.outside([t for t in tensors if not t.complete], len(rows))
        self.overlaps(tensors)
        return tensors

    def outside(self, cut: list[GGUFTensor], total: int) -> None:
        """Reports tensors whose bytes are not in the file: one by its name, or a cut-off file."""
        if not cut:
            return
        if len(cut) == 1:
            found = f"{cut[0].nbytes} bytes at byte {cut[0].start} of a file of {self.size} bytes"
            self.add(f"tensor {cut[0].name}", found, _INSIDE, _TRUNCATED)
            return
        names = ", ".join(t.name for t in cut[:MAX_CUT_LISTED])
        names += ", ..." if len(cut) > MAX_CUT_LISTED else ""
        end = max(t.start + t.nbytes for t in cut)
        found = f"{self.size} bytes, with {len(cut)} of {total} tensors beyond them ({names})"
        self.add("", found, f"{end} bytes", _TRUNCATED)

    def row_nbytes(self, name: str, dims: tuple[int, ...], kind: int) -> int | None:
        """Bytes of a tensor, or None after adding what is wrong with its type or shape."""
        where = f"tensor {name}"
        if kind not in TYPES:
            known = UNSUPPORTED_TYPES.get(kind)
            found = f"type id {kind} ({known})" if known else f"unknown type id {kind}"
            fix = "requantise the tensor to one of these types" if known else _DAMAGED
            self.add(where, found, "one of " + ", ".join(t.name for t in TYPES.values()), fix)
            return None
        info = TYPES[kind]
        if not name:
            self.add(where, "an empty name", "a name")
        if not dims or 0 in dims:
            self.add(where, f"dimensions {list(dims)}", "one to four dimensions above 0")
            return None
        if dims[0] % info.block:
            found = f"rows of {dims[0]} values in type {info.name}"
            self.add(where, found, f"rows in multiples of {info.block}")
            return None
        count = dims[0] // info.block * info.nbytes
        for dim in dims[1:]:
            count *= dim
        return count

    def overlaps(self, tensors: list[GGUFTensor]) -> None:
        ordered = sorted(tensors, key=lambda t: t.start)
        last = ordered[0] if ordered else None  # the tensor that reaches furthest so far
        for tensor in ordered[1:]:
            if last is not None and last.start + last.nbytes > tensor.start:
                shared = min(last.start + last.nbytes, tensor.start + tensor.nbytes) - tensor.start
                found = f"{shared} bytes shared with tensor {last.name}"
                self.add(f"tensor {tensor.name}", found, "tensors that do not overlap")
            if last is None or tensor.start + tensor.nbytes > last.start + last.nbytes:
                last = tensor


# --- split files ------------------------------------------------------------------------------


def _shard_paths(path: Path, problems: list[Problem]) -> list[Path]:
    """All shards of `path` in order (itself if it is not split); missing ones are problems."""
    match = _SHARD_NAME.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= count <= MAX_SHARDS or not 1 <= int(match["no"]) <= count:
        found = f"shard {int(match['no'])} of {count}"
        expected = f"a shard number in 1..count and at most {MAX_SHARDS} shards"
        problems.append(_problem(path.name, "file name", found, expected, _RENAMED))
        return [path]
    names = [f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    shards = [path.with_name(name) for name in names]
    missing = [s for s in shards if s != path and not os.path.exists(s)]
    for shard in missing:
        expected, fix = f"all {count} shards side by side", f"put it into {path.parent}"
        problems.append(_problem(shard.name, "", "no such file", expected, fix))
    return [shard for shard in shards if shard not in missing]


def _check_split(table: _Table, problems: list[Problem]) -> None:
    """Compares `split.no` and `split.count` with the file name."""
    match = _SHARD_NAME.match(table.name)
    number, count = (int(match["no"]) - 1, int(match["count"])) if match else (0, 1)
    expected = {"split.no": number, "split.count": count}
    for key, want in expected.items():
        found = table.metadata.get(key, want)
        if key == "split.count" and not match and found == 0:
            continue
        if found != want:
            said = f"{want}, as the file name says"
            problems.append(_problem(table.name, f"key {key}", repr(found), said, _RENAMED))


def _merge(tables: list[_Table], problems: list[Problem]) -> dict[str, GGUFTensor]:
    """All tensors by name; a name that occurs twice is a problem."""
    merged: dict[str, GGUFTensor] = {}
    for tensor in _tensors(tables):
        if tensor.name in merged and len(problems) < MAX_KEPT:
            found = f"the name twice (also in {merged[tensor.name].file})"
            where = f"tensor {tensor.name}"
            problems.append(_problem(tensor.file, where, found, "each tensor once", _DAMAGED))
        merged[tensor.name] = tensor
    return merged


def _tensors(tables: list[_Table]) -> Iterator[GGUFTensor]:
    for table in tables:
        yield from table.tensors
