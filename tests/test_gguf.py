"""The GGUF table reader: valid files, every kind of bad one, and mutated ones."""

from __future__ import annotations

import json
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_files as mf
import numpy as np
import pytest

from ds4jax import gguf
from ds4jax.errors import ModelFileError

PAIRS: list[mf.Pair] = [
    ("general.architecture", mf.STRING, "test"),
    ("a.u8", mf.U8, 200),
    ("a.i8", mf.I8, -5),
    ("a.u16", mf.U16, 60000),
    ("a.i16", mf.I16, -30000),
    ("a.u32", mf.U32, 1 << 31),
    ("a.i32", mf.I32, -7),
    ("a.f32", mf.F32, 0.5),
    ("a.bool", mf.BOOL, 1),
    ("a.u64", mf.U64, (1 << 64) - 1),
    ("a.i64", mf.I64, -(1 << 62)),
    ("a.f64", mf.F64, 1e300),
    ("a.text", mf.STRING, "naïve ｜ text"),
    ("a.numbers", mf.ARRAY, (mf.I32, [0, 4, 128])),
    ("a.words", mf.ARRAY, (mf.STRING, ["", "a b", "Ġ世界"])),
    ("a.empty", mf.ARRAY, (mf.STRING, [])),
    ("a.flags", mf.ARRAY, (mf.BOOL, [1, 0])),
]
TABLE = [
    mf.Tensor("x.weight", [4, 3], 0, np.arange(12, dtype="<f4").tobytes()),
    mf.Tensor("y.weight", [32, 2, 2], 8, bytes(range(136))),
    mf.Tensor("z.weight", [2], 26, np.array([5, -6], "<i4").tobytes()),
]


def problems_of(path: Path) -> str:
    """All problems of a file that must be refused, one per line."""
    with pytest.raises(ModelFileError) as caught:
        gguf.open_gguf(path)
    assert caught.value.problems
    return "\n".join(str(p) for p in caught.value.problems)


def raw_file(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# --- valid files ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_reads_every_value_type_and_tensor(tmp_path: Path, version: int) -> None:
    file = gguf.open_gguf(mf.write_gguf(tmp_path / "m.gguf", PAIRS, TABLE, version=version))
    assert file.version == version
    for key, kind, value in PAIRS:
        got = file.metadata[key]
        if kind == mf.ARRAY:
            assert list(got) == list(value[1])
        else:
            assert got == value and isinstance(got, bool) == (kind == mf.BOOL)
    np.testing.assert_array_equal(
        file.packed("x.weight").view("<f4"), np.arange(12, dtype=np.float32).reshape(3, 4)
    )
    assert file.tensors["y.weight"].shape == (2, 2, 32)
    assert file.packed("y.weight").shape == (2, 2, 34)
    assert file.packed("y.weight").tobytes() == bytes(range(136))
    assert not file.packed("y.weight").flags.writeable
    assert file.packed("z.weight").view("<i4").tolist() == [5, -6]


def test_alignment_from_the_file_is_used(tmp_path: Path) -> None:
    pairs = [*PAIRS, ("general.alignment", mf.U32, 256)]
    file = gguf.open_gguf(mf.write_gguf(tmp_path / "m.gguf", pairs, TABLE, alignment=256))
    assert file.alignment == 256
    assert file.packed("z.weight").view("<i4").tolist() == [5, -6]


@pytest.mark.parametrize("checkpoint", ["w16", "w128"])
def test_oracle_files_have_the_types_they_should(data_dir: Path, checkpoint: str) -> None:
    root = data_dir / "oracle" / checkpoint
    files = sorted(root.glob("*.gguf"))
    assert len(files) >= 3
    for path in files:
        name = path.name.removeprefix("model.").removesuffix(".gguf")
        types = json.loads((root / f"gguf_{name}.types.json").read_text())
        file = gguf.open_gguf(path)
        assert {n: t.type.name.lower() for n, t in file.tensors.items()} == types


def test_strings_of_an_official_vocabulary_open_fast(tmp_path: Path) -> None:
    tokens = [f"token{i}é" for i in range(129280)]
    merges = [f"left{i} right{i}" for i in range(127741)]
    pairs = [("tokens", mf.ARRAY, (mf.STRING, tokens)), ("merges", mf.ARRAY, (mf.STRING, merges))]
    path = mf.write_gguf(tmp_path / "m.gguf", pairs, TABLE)
    start = time.process_time()
    file = gguf.open_gguf(path)
    assert time.process_time() - start < 1.0
    assert len(file.metadata["tokens"]) == 129280
    assert file.metadata["merges"][127740] == merges[-1]
    assert file.metadata["tokens"].tolist() == tokens


# --- split files ------------------------------------------------------------------------------


def write_split(folder: Path, count: int = 3) -> list[Path]:
    paths = []
    for i in range(count):
        path = folder / f"m-{i + 1:05d}-of-{count:05d}.gguf"
        pairs: list[mf.Pair] = [
            ("split.no", mf.U16, i),
            ("split.count", mf.U16, count),
            ("split.tensors.count", mf.I32, count),
        ]
        if i == 0:
            pairs += PAIRS
        data = np.full(4, i, "<f4").tobytes()
        mf.write_gguf(path, pairs, [mf.Tensor(f"t{i}", [4], 0, data)])
        paths.append(path)
    return paths


@pytest.mark.parametrize("given", [0, 2])
def test_any_shard_opens_all(tmp_path: Path, given: int) -> None:
    file = gguf.open_gguf(write_split(tmp_path)[given])
    assert sorted(file.tensors) == ["t0", "t1", "t2"]
    assert file.packed("t2").view("<f4").tolist() == [2.0] * 4
    assert file.metadata["a.u8"] == 200
    assert bool(file.notes) == (given != 0)


def test_every_missing_shard_is_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    paths[1].unlink()
    paths[2].unlink()
    text = problems_of(paths[0])
    assert "m-00002-of-00003.gguf" in text and "m-00003-of-00003.gguf" in text


def test_foreign_and_renamed_shards_are_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    os.replace(paths[2], paths[1])
    paths[0].rename(tmp_path / "renamed.gguf")
    assert "split.no" in problems_of(paths[1])
    assert "split.count" in problems_of(tmp_path / "renamed.gguf")


def test_a_tensor_in_two_shards_and_a_wrong_total_are_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path, 2)
    pairs: list[mf.Pair] = [("split.no", mf.U16, 1), ("split.count", mf.U16, 2)]
    mf.write_gguf(paths[1], pairs, [mf.Tensor("t0", [4], 0)])
    assert "the name twice (also in m-00001-of-00002.gguf)" in problems_of(paths[0])
    mf.write_gguf(paths[1], pairs, [mf.Tensor("t1", [4], 0), mf.Tensor("t2", [4], 0)])
    assert "split.tensors.count" in problems_of(paths[0])


@pytest.mark.parametrize("name", ["m-00004-of-00003.gguf", "m-00001-of-99999.gguf"])
def test_impossible_shard_numbers_are_refused(tmp_path: Path, name: str) -> None:
    mf.write_gguf(tmp_path / name, PAIRS, TABLE)
    assert "shard" in problems_of(tmp_path / name)


# --- bad files --------------------------------------------------------------------------------

HUGE = 1 << 63


def with_pair(*pair: Any) -> bytes:
    return mf.gguf_head([*PAIRS, pair], TABLE) + bytes(512)


def raw_pair(kind: int, body: bytes) -> bytes:
    """One key with a body of any bytes, and room behind it."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + mf.text("key") + struct.pack("<I", kind)
    return head + body + bytes(64)


def array_head(kind: int, count: int) -> bytes:
    return struct.pack("<IQ", kind, count)


def table_with(*rows: mf.Tensor) -> bytes:
    head = mf.gguf_head(PAIRS, [*TABLE, *rows])
    return head + bytes(4096)


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "an empty file"),
    "only magic": (lambda: b"GGUF", "version"),
    "magic": (lambda: b"GGML" + bytes(64), "not a GGUF file"),
    "version 1": (lambda: mf.gguf_head(PAIRS, TABLE, version=1), "found 1, expected 2 or 3"),
    "version 4": (lambda: mf.gguf_head(PAIRS, TABLE, version=4), "found 4, expected 2 or 3"),
    "big-endian": (lambda: b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(64), "big-endian"),
    "tensor count": (lambda: mf.gguf_head(PAIRS, TABLE, num_tensors=HUGE), "tensor count"),
    "key count": (lambda: mf.gguf_head(PAIRS, TABLE, num_pairs=HUGE), "key count"),
    "many keys": (
        lambda: mf.gguf_head([], [], num_pairs=gguf.MAX_PAIRS + 1) + bytes(1 << 21),
        "key count",
    ),
    "key length": (
        lambda: b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE) + bytes(64),
        "data inside the file",
    ),
    "string length": (lambda: raw_pair(8, struct.pack("<Q", HUGE)), "data inside the file"),
    "string too long": (
        lambda: (
            raw_pair(8, struct.pack("<Q", gguf.MAX_STRING_BYTES + 1))
            + bytes(gguf.MAX_STRING_BYTES + 2)
        ),
        "at most",
    ),
    "array count": (lambda: raw_pair(9, array_head(4, HUGE)), "data inside the file"),
    "array overflow": (lambda: raw_pair(9, array_head(10, HUGE >> 2)), "data inside the file"),
    "string array count": (lambda: raw_pair(9, array_head(8, HUGE)), "data inside the file"),
    "string array element": (
        lambda: raw_pair(9, array_head(8, 2) + mf.text("ok") + struct.pack("<Q", HUGE)),
        "string 1 of 2",
    ),
    "array of arrays": (
        lambda: raw_pair(9, array_head(9, 1) + array_head(9, 1) * 8),
        "an array of arrays",
    ),
    "element type": (lambda: raw_pair(9, array_head(77, 1)), "element type 77"),
    "value type": (lambda: raw_pair(13, b""), "value type 13"),
    "bool": (lambda: with_pair("b", mf.BOOL, 7), "0 or 1"),
    "duplicate key": (lambda: with_pair("a.u8", mf.U8, 1), "the key twice"),
    "empty key": (lambda: with_pair("", mf.U8, 1), "an empty name"),
    "key not UTF-8": (lambda: with_pair(b"k\xff", mf.U8, 1), "invalid UTF-8"),
    "value not UTF-8": (lambda: with_pair("k", mf.STRING, b"\xc3("), "invalid UTF-8"),
    "token not UTF-8": (
        lambda: with_pair("k", mf.ARRAY, (mf.STRING, ["good", b"\xed\xa0\x80"])),
        "1 strings that are not UTF-8 (first at index [1])",
    ),
    "alignment 0": (lambda: with_pair("general.alignment", mf.U32, 0), "power of two"),
    "alignment 24": (lambda: with_pair("general.alignment", mf.U32, 24), "power of two"),
    "alignment text": (lambda: with_pair("general.alignment", mf.STRING, "32"), "power of two"),
    "dimensions": (
        lambda: table_with(mf.Tensor("t", [1] * 5, 0)),
        "tensor t: found 5 dimensions",
    ),
    "dimension count": (
        lambda: table_with(mf.Tensor("t", [1], 0, num_dims=0xFFFFFFFF)),
        "4294967295 dimensions",
    ),
    "no dimensions": (lambda: table_with(mf.Tensor("t", [], 0)), "tensor t: found dimensions []"),
    "zero dimension": (lambda: table_with(mf.Tensor("t", [4, 0], 0)), "dimensions [4, 0]"),
    "huge dimension": (
        lambda: table_with(mf.Tensor("t", [HUGE, HUGE, HUGE, HUGE], 0, offset=256)),
        "tensor t",
    ),
    "unknown type": (lambda: table_with(mf.Tensor("t", [32], 77)), "unknown type id 77"),
    "unsupported type": (lambda: table_with(mf.Tensor("t", [32], 110)), "Q7_0_ROCMFPX"),
    "row length": (lambda: table_with(mf.Tensor("t", [33], 101)), "rows in multiples of 32"),
    "offset": (lambda: table_with(mf.Tensor("t", [4], 0, offset=HUGE)), "data inside the file"),
    "misaligned": (lambda: table_with(mf.Tensor("t", [4], 0, offset=257)), "offset 257"),
    "overlap": (
        lambda: table_with(mf.Tensor("t", [4], 0, offset=64)),
        "tensor t: found 16 bytes shared with tensor y.weight",
    ),
    "duplicate tensor": (lambda: table_with(mf.Tensor("x.weight", [4], 0)), "the name twice"),
    "empty name": (lambda: table_with(mf.Tensor("", [4], 0)), "an empty name"),
    "name not UTF-8": (lambda: table_with(mf.Tensor(b"t\xfe", [4], 0)), "invalid UTF-8"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file_is_refused_with_its_reason(tmp_path: Path, case: str) -> None:
    make, expected = BAD[case]
    path = raw_file(tmp_path / "bad.gguf", make())
    text = problems_of(path)
    assert expected in text
    assert "bad.gguf" in text


def test_everything_wrong_with_a_table_is_reported_at_once(tmp_path: Path) -> None:
    rows = [
        mf.Tensor("unknown", [32], 77, offset=192),
        mf.Tensor("misaligned", [4], 0, offset=193),
        mf.Tensor("outside", [4], 0, offset=1 << 40),
        mf.Tensor("zero", [0], 0, offset=192),
        mf.Tensor("x.weight", [4], 0, offset=256),
    ]
    path = raw_file(tmp_path / "bad.gguf", table_with(*rows))
    with pytest.raises(ModelFileError) as caught:
        gguf.open_gguf(path)
    found = {p.where for p in caught.value.problems}
    assert found == {
        "tensor unknown", "tensor misaligned", "tensor outside", "tensor zero", "tensor x.weight",
    }  # fmt: skip


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = mf.write_gguf(tmp_path / "m.gguf", PAIRS, TABLE).read_bytes()
    end = len(whole) - 24  # of the last tensor's eight bytes; padding follows
    path = tmp_path / "cut.gguf"
    for size in range(0, end):
        path.write_bytes(whole[:size])
        problems_of(path)
    path.write_bytes(whole[:end])
    gguf.open_gguf(path)


def test_a_file_cut_inside_its_data_says_so_once(data_dir: Path, tmp_path: Path) -> None:
    whole = (data_dir / "oracle/w16/model.Q4_0_ROCMFP4_FAST.gguf").read_bytes()
    path = raw_file(tmp_path / "cut.gguf", whole[: len(whole) // 2])
    with pytest.raises(ModelFileError) as caught:
        gguf.open_gguf(path)
    assert len(caught.value.problems) == 1
    assert f"{len(whole) // 2} bytes, with" in str(caught.value.problems[0])


def test_problems_can_be_kept_instead_of_raised(data_dir: Path, tmp_path: Path) -> None:
    whole = (data_dir / "oracle/w16/model.Q4_0_ROCMFP4_FAST.gguf").read_bytes()
    path = raw_file(tmp_path / "cut.gguf", whole[: len(whole) // 2])
    problems: list[Any] = []
    file = gguf.open_gguf(path, problems)
    assert problems and file.metadata["general.name"] == "w16"
    assert len(file.tensors) == 212
    whole_tensors = [n for n, t in file.tensors.items() if t.complete]
    assert 0 < len(whole_tensors) < 212
    assert file.packed(whole_tensors[0]).size
    cut = next(n for n, t in file.tensors.items() if not t.complete)
    with pytest.raises(ModelFileError, match="data inside the file"):
        file.packed(cut)
    with pytest.raises(ModelFileError):
        gguf.open_gguf(raw_file(tmp_path / "not.gguf", b"nothing"), [])


def test_things_that_are_no_files_are_refused(tmp_path: Path) -> None:
    assert "No such file" in problems_of(tmp_path / "absent.gguf")
    assert "not a regular file" in problems_of(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in problems_of(tmp_path / "pipe.gguf")
    problems_of(Path("bad\0name.gguf"))
    problems_of(tmp_path / ("x" * 5000))


def test_names_from_the_file_cannot_break_the_report(tmp_path: Path) -> None:
    row = mf.Tensor("evil\x1b[31m\n" + "n" * 1000, [32], 77)
    text = problems_of(raw_file(tmp_path / "bad.gguf", table_with(row)))
    assert "\x1b" not in text and "\n" not in text and len(text) < 1200


# --- hostile sizes ----------------------------------------------------------------------------


def bounded(path: Path, seconds: float = 1.0, megabytes: float = 128) -> None:
    """Opening `path` ends in a ModelFileError, quickly and within memory."""
    start = time.process_time()
    problems_of(path)
    assert time.process_time() - start < seconds
    tracemalloc.start()
    try:
        problems_of(path)
        assert tracemalloc.get_traced_memory()[1] < megabytes * 2**20
    finally:
        tracemalloc.stop()


def test_sparse_giants_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    size = 1 << 40
    heads = {
        "strings": raw_pair(9, array_head(8, 1 << 36))[:-64],
        "many strings": raw_pair(9, array_head(8, 1 << 20))[:-64] + struct.pack("<Q", 1 << 38),
        "bytes": raw_pair(9, array_head(0, 1 << 39))[:-64],
        "text": raw_pair(8, struct.pack("<Q", 1 << 39))[:-64],
        "keys": mf.gguf_head([], [], num_pairs=1 << 16),
        "tensors": mf.gguf_head([], [], num_tensors=1 << 16),
    }
    for name, head in heads.items():
        path.write_bytes(head)
        os.truncate(path, size)
        start = time.process_time()
        problems_of(path)
        assert time.process_time() - start < 1.0, name


def test_a_table_full_of_problems_stays_bounded(tmp_path: Path) -> None:
    row = mf.text("tensor.name") + struct.pack("<IQIQ", 1, 3, 101, 5)
    head = mf.gguf_head([], [], num_tensors=gguf.MAX_TENSORS)
    bounded(raw_file(tmp_path / "bad.gguf", head[:24] + row * gguf.MAX_TENSORS))


def test_a_large_table_of_valid_looking_strings_is_read_fast(tmp_path: Path) -> None:
    """Its memory is measured by the resident size of a process, in the tests of model files."""
    words = array_head(8, gguf.MAX_ARRAY_STRINGS) + mf.text("ab€𝄞") * gguf.MAX_ARRAY_STRINGS
    path = raw_file(tmp_path / "bad.gguf", raw_pair(9, words)[:-65])
    start = time.process_time()
    problems_of(path)
    assert time.process_time() - start < 2.0


# --- mutations --------------------------------------------------------------------------------

_INTERESTING = [0, 1, 4, 8, 9, 31, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1]


def mutated(rng: random.Random, data: bytes, head: int) -> bytes:
    """One to four changes, mostly in the head: bytes, 4- or 8-byte numbers, cuts, repeats."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(head if rng.random() < 0.95 else max(1, len(out)))
        at = min(at, max(0, len(out) - 1))
        action = rng.randrange(6)
        if action <= 1 and out:
            out[at] = rng.randrange(256)
        elif action == 2:
            out[at : at + 8] = struct.pack("<Q", rng.choice(_INTERESTING))
        elif action == 3:
            out[at : at + 4] = struct.pack("<I", rng.choice(_INTERESTING) & 0xFFFFFFFF)
        elif action == 4 and rng.random() < 0.3:
            del out[at:]
        else:
            piece = bytes(out[at : at + rng.randrange(1, 64)])
            where = rng.randrange(max(1, min(head, len(out))))
            out[where : where + (0 if action == 5 else len(piece))] = piece
    return bytes(out)


def run_mutations(tmp_path: Path, count: int, seed: int) -> tuple[int, int]:
    """(refused, accepted) of `count` mutated files; anything but a ModelFileError fails."""
    rng = random.Random(seed)
    path = tmp_path / "m.gguf"
    whole = mf.write_gguf(path, PAIRS, TABLE).read_bytes()
    head = len(mf.gguf_head(PAIRS, TABLE))
    refused = accepted = 0
    for number in range(count):
        path.write_bytes(mutated(rng, whole, head))
        start = time.process_time()
        try:
            file = gguf.open_gguf(path)
        except ModelFileError as error:
            assert error.problems
            str(error)
            refused += 1
        else:
            accepted += 1
            for name in file.tensors:
                file.packed(name)
            for value in file.metadata.values():
                if isinstance(value, gguf.StringArray):
                    value.tolist()
        assert time.process_time() - start < 1.0, f"mutation {number} of seed {seed}"
    return refused, accepted


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    refused, accepted = run_mutations(tmp_path, 1500, seed=1)
    assert refused > 500 and accepted > 50


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    refused, accepted = run_mutations(tmp_path, 40000, seed=2)
    assert refused > 13000 and accepted > 1300
