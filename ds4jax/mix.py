"""Codebook tables of the two MIX types (GGUF 105 and 106), read from untrusted bytes.

A tensor of these types means nothing without the codebooks that its writer put into GGUF metadata
(or into a file beside the GGUF). This module reads such a table, checks it, and compares it with
the tensors it claims to describe. It decodes no weights: `ds4jax.quant.decode` takes the arrays of
a `MixTable` as they are. NumPy only.

Layouts (little-endian; the fused form `GUMIXv1` and the name-keyed form `DMX2s1` are refused):

    head    8 bytes magic, u32 entries, u32 reserved
    P4MIXv1 u32 layer, E, out, in, C, K; u8 mode[E]; u8 rotation[E]; u16 book[E, 2, 8]
    GUMIXs1 u32 layer, surface, E, out, in, C, K; u8 mode[E]; u16 book[E, 2, 4]
    DMIXs1  u32 layer, class, type, slices, C, K; u8 mode; 3 bytes; u16 book[2, K]
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ds4jax import quant
from ds4jax.errors import MAX_KEPT, ModelFileError, Problem
from ds4jax.formats import U8, U16

METADATA_KEYS = (
    "deepseek4.p4mix.sidecar",
    "deepseek4.gumix.sidecar",
    "deepseek4.dmix.sidecar",
)
"""GGUF keys (arrays of u8) that hold one table each."""

FILE_SUFFIXES = (".p4mix.bin", ".gumix.bin", ".dmix.bin")
"""Endings that older releases append to the GGUF's file name, in the order of the keys."""

GUMIX_SURFACES = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
DMIX_CLASSES = ("attn_q_a", "attn_q_b", "attn_kv", "attn_output_a", "attn_output_b")
_FORMAT_OF_LEVELS = {8: "rocmfp3_mix", 4: "rocmfp2_mix"}
_TYPE_OF_FORMAT = {"rocmfp3_mix": 105, "rocmfp2_mix": 106}
_REFUSED = {
    b"GUMIXv1\0": "the fused gate/up form",
    b"DMX2s1\0\0": "the name-keyed form of other models",
}
_DAMAGED = "fetch the file again, or make it again with the exporter that wrote it"
MAX_LAYER = 1 << 16


@dataclass(frozen=True, kw_only=True, eq=False)
class MixTable:
    """Codebooks of one tensor. Shapes: expert tensors E leading, dense tensors none."""

    tensor: str  # GGUF name
    format: str  # "rocmfp3_mix" (8 levels) or "rocmfp2_mix" (4 levels)
    shape: tuple[int, int, int] | None  # experts, out, in as the table says; None: dense tensor
    modes: U8  # [E] or []: 0 fixed levels, 1 codebooks
    codebooks_bf16: U16  # [E, 2, K] or [2, K]: bits of bfloat16, code order


def parse(data: bytes | bytearray | memoryview | U8, source: str) -> dict[str, MixTable]:
    """Reads one side table.

    Nothing is allocated before the byte count that an entry claims is known to be there.

    Args:
        data: the whole table.
        source: metadata key or file name, for reports.

    Returns: tables by tensor name.

    Raises:
        ModelFileError: (a ValueError) with everything found: foreign or refused magic, counts
            beyond the data, unknown surface, class or type, a rotation, modes other than 0 and 1,
            codebooks not finite and strictly increasing, a tensor described twice, bytes left over.
    """
    reader = _Reader(bytes(data), source)
    tables = reader.read()
    if reader.problems:
        raise ModelFileError(source, reader.problems)
    return tables


def coverage_problems(
    tables: Iterable[Mapping[str, MixTable]],
    tensors: Mapping[str, tuple[int, tuple[int, ...]]],
    file: str,
) -> list[Problem]:
    """What keeps the tables of a file from describing its tensors of type 105 and 106 exactly once.

    Args:
        tables: results of `parse`, one per side table of the file.
        tensors: every tensor of the file: GGUF type id and numpy shape by name.
        file: name for reports.
    """
    problems: list[Problem] = []
    seen: dict[str, MixTable] = {}
    for group in tables:
        for name, table in group.items():
            if name in seen:
                problems.append(_problem(file, name, "codebooks in two side tables", "one"))
            seen[name] = table
            problems += _fit_problems(table, tensors.get(name), file)
    for name, (type_id, _) in tensors.items():
        if type_id in _TYPE_OF_FORMAT.values() and name not in seen:
            problems.append(
                _problem(
                    file,
                    name,
                    f"type {type_id} without codebooks",
                    f"an entry under one of the keys {', '.join(METADATA_KEYS)}",
                    "use the file with its side tables: fixed levels would give wrong numbers",
                )
            )
    return problems[:MAX_KEPT]


def _fit_problems(
    table: MixTable, tensor: tuple[int, tuple[int, ...]] | None, file: str
) -> list[Problem]:
    if tensor is None:
        return [_problem(file, table.tensor, "codebooks for it", "a tensor of that name")]
    type_id, shape = tensor
    expected = _TYPE_OF_FORMAT[table.format]
    problems = []
    if type_id != expected:
        levels = table.codebooks_bf16.shape[-1]
        problems.append(
            _problem(
                file,
                table.tensor,
                f"type {type_id} with codebooks of {levels} levels",
                f"type {expected}",
            )
        )
    if table.shape is not None and shape != table.shape:
        problems.append(
            _problem(
                file,
                table.tensor,
                f"shape {list(shape)}",
                f"{list(table.shape)} (experts, out, in), as its codebooks say",
            )
        )
    if table.shape is None and len(shape) != 2:
        problems.append(
            _problem(file, table.tensor, f"{len(shape)} dimensions", "2 for one pair of codebooks")
        )
    return problems


def _problem(file: str, where: str, found: str, expected: str, fix: str = _DAMAGED) -> Problem:
    return Problem(file=file, where=where, found=found, expected=expected, fix=fix)


class _Stop(Exception):
    """The rest of the table cannot be located."""


class _Reader:
    def __init__(self, data: bytes, source: str) -> None:
        self.data = data
        self.source = source
        self.pos = 0
        self.entry = 0
        self.problems: list[Problem] = []
        self.tables: dict[str, MixTable] = {}

    def add(self, found: str, expected: str, where: str = "") -> None:
        if len(self.problems) < MAX_KEPT:
            where = where or f"entry {self.entry}"
            self.problems.append(_problem(self.source, where, found, expected))

    def take(self, count: int, what: str) -> bytes:
        left = len(self.data) - self.pos
        if count > left:
            self.add(f"{what} of {count} bytes with {left} bytes left", "all of its bytes")
            raise _Stop
        self.pos += count
        return self.data[self.pos - count : self.pos]

    def numbers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}I", self.take(4 * count, "entry head"))

    def read(self) -> dict[str, MixTable]:
        try:
            self._read()
        except _Stop:
            pass
        else:
            if self.pos != len(self.data):
                self.add(
                    f"{len(self.data) - self.pos} bytes after the last entry", "none", "the end"
                )
        return self.tables

    def _read(self) -> None:
        if len(self.data) < 16:
            self.add(f"{len(self.data)} bytes", "a head of 16 bytes", "the head")
            raise _Stop
        magic = self.take(8, "magic")
        if magic in _REFUSED:
            self.add(f"magic {magic!r}: {_REFUSED[magic]}", "P4MIXv1, GUMIXs1 or DMIXs1", "magic")
            raise _Stop
        kinds = {
            b"P4MIXv1\0": (self._p4mix, 24 + 2 + 32),
            b"GUMIXs1\0": (self._gumix, 28 + 1 + 16),
            b"DMIXs1\0\0": (self._dmix, 24 + 4 + 16),
        }
        if magic not in kinds:
            self.add(f"magic {magic!r}", "P4MIXv1, GUMIXs1 or DMIXs1", "magic")
            raise _Stop
        read_entry, least = kinds[magic]
        count, _ = self.numbers(2)
        fits = (len(self.data) - self.pos) // least
        if count > fits:
            self.add(
                f"{count} entries", f"at most {fits}, which is what the bytes hold", "the head"
            )
            raise _Stop
        for self.entry in range(count):
            read_entry()

    def _p4mix(self) -> None:
        layer, experts, out, width, books, levels = self.numbers(6)
        name = f"blk.{layer}.ffn_down_exps.weight"
        self._counts(name, layer, books, levels, 8)
        modes, rotations = (
            self._bytes(name, experts, "modes"),
            self._bytes(name, experts, "rotation"),
        )
        if rotations.any():
            self.add(
                f"{name}: a rotation in {np.count_nonzero(rotations)} experts", "none (all bytes 0)"
            )
        self._finish(name, (experts, out, width), modes, 8)

    def _gumix(self) -> None:
        layer, surface, experts, out, width, books, levels = self.numbers(7)
        known = surface < len(GUMIX_SURFACES)
        leaf = GUMIX_SURFACES[surface] if known else f"surface{surface}"
        if not known:
            self.add(f"surface {surface}", "0 gate, 1 up or 2 down")
        name = f"blk.{layer}.{leaf}.weight"
        self._counts(name, layer, books, levels, 4)
        self._finish(name, (experts, out, width), self._bytes(name, experts, "modes"), 4)

    def _dmix(self) -> None:
        layer, kind, type_id, _slices, books, levels = self.numbers(6)
        known = kind < len(DMIX_CLASSES)
        leaf = DMIX_CLASSES[kind] if known else f"class{kind}"
        if not known:
            self.add(f"class {kind}", f"0..{len(DMIX_CLASSES) - 1} ({', '.join(DMIX_CLASSES)})")
        name = f"blk.{layer}.{leaf}.weight"
        expected = {105: 8, 106: 4}.get(type_id)
        if expected is None:
            self.add(f"{name}: type {type_id}", "105 or 106")
            raise _Stop
        self._counts(name, layer, books, levels, expected)
        mode = self._bytes(name, 4, "mode")[:1].reshape(())
        self._finish(name, None, mode, expected)

    def _counts(self, name: str, layer: int, books: int, levels: int, expected: int) -> None:
        if layer >= MAX_LAYER:
            self.add(f"layer {layer}", f"a layer below {MAX_LAYER}")
        if (books, levels) != (2, expected):
            self.add(f"{name}: {books} codebooks of {levels} levels", f"2 of {expected}")
            raise _Stop

    def _bytes(self, name: str, count: int, what: str) -> U8:
        if count == 0:
            self.add(f"{name}: 0 experts", "at least 1")
        return np.frombuffer(self.take(count, f"{name}: {what}"), np.uint8)

    def _finish(
        self, name: str, shape: tuple[int, int, int] | None, modes: U8, levels: int
    ) -> None:
        raw = self.take(modes.size * 4 * levels, f"{name}: codebooks")
        books = np.frombuffer(raw, "<u2").astype(np.uint16).reshape(*modes.shape, 2, levels)
        if (modes > 1).any():
            found = sorted({int(m) for m in modes.reshape(-1)} - {0, 1})
            self.add(f"{name}: codebook modes {found}", "0 (fixed levels) or 1 (codebooks)")
        for text in quant.codebook_problems(name, books, modes):
            self.add(text, "levels that are finite and strictly increasing")
        if name in self.tables:
            self.add(f"{name} a second time", "each tensor once")
        self.tables[name] = MixTable(
            tensor=name,
            format=_FORMAT_OF_LEVELS[levels],
            shape=shape,
            modes=modes,
            codebooks_bf16=books,
        )
