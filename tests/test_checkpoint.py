"""The checkpoint reader: valid directories, every kind of bad one, and mutated headers."""

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
import safetensors.numpy

from ds4jax import checkpoint
from ds4jax.errors import ModelFileError

CONFIG = {"architectures": ["DeepseekV4ForCausalLM"]}
ENTRIES: dict[str, mf.Entry] = {
    "a.weight": ("BF16", (4, 6)),
    "b.weight": ("F8_E4M3", (128, 128)),
    "b.scale": ("F8_E8M0", (1, 1)),
    "c": ("F32", (3,)),
    "d.tid2eid": ("I64", (5, 2)),
    "e.weight": ("I8", (2, 16)),
}


def make(root: Path, shards: int = 1) -> Path:
    return mf.write_checkpoint(root / "model", CONFIG, ENTRIES, shards)


def problems_of(root: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        checkpoint.open_checkpoint(root)
    assert caught.value.problems
    return "\n".join(str(p) for p in caught.value.problems)


# --- valid directories ------------------------------------------------------------------------


def test_views_agree_with_the_public_library(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "w": rng.standard_normal((7, 5)).astype(np.float32),
        "h": rng.standard_normal((3, 2)).astype(np.float16),
        "bytes": rng.integers(0, 255, (9,), np.uint8),
        "ids": rng.integers(0, 9, (4, 2), np.int64),
        "codes": rng.integers(-128, 127, (2, 3, 4), np.int8),
    }
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors", {"format": "pt"})
    file = checkpoint.open_checkpoint(tmp_path)
    assert set(file.tensors) == set(arrays) and not file.notes
    for name, want in arrays.items():
        got = file.array(name)
        assert got.dtype == want.dtype and not got.flags.writeable
        np.testing.assert_array_equal(got, want)
        assert file.packed(name).tobytes() == want.tobytes()
        assert file.packed(name).shape == (*want.shape[:-1], want.shape[-1] * want.itemsize)


@pytest.mark.parametrize("shards", [1, 3])
def test_dtypes_and_shapes(tmp_path: Path, shards: int) -> None:
    file = checkpoint.open_checkpoint(make(tmp_path, shards))
    assert {n: (t.dtype, t.shape) for n, t in file.tensors.items()} == ENTRIES
    assert len(file.files) == shards
    assert bool(file.index) == (shards > 1)
    assert file.array("a.weight").dtype == np.uint16
    assert file.array("b.scale").dtype == np.uint8


def test_oracle_checkpoints_open(data_dir: Path) -> None:
    for name, count in (("w16", 359), ("w128", 596)):
        file = checkpoint.open_checkpoint(data_dir / "oracle" / name)
        assert len(file.tensors) == count


def test_a_single_file_of_another_name_is_taken_with_a_note(tmp_path: Path) -> None:
    root = make(tmp_path)
    (root / "model.safetensors").rename(root / "weights.safetensors")
    file = checkpoint.open_checkpoint(root)
    assert set(file.tensors) == set(ENTRIES) and "weights.safetensors" in file.notes[0]


def test_deepseeks_own_config_serves_without_config_json(tmp_path: Path) -> None:
    root = make(tmp_path)
    (root / "inference").mkdir()
    (root / "config.json").rename(root / "inference" / "config.json")
    file = checkpoint.open_checkpoint(root)
    assert file.config == CONFIG and file.notes


def test_bytes_of_no_tensor_are_noted(tmp_path: Path) -> None:
    root = make(tmp_path)
    os.truncate(root / "model.safetensors", os.path.getsize(root / "model.safetensors") + 5)
    assert "5 bytes belong to no tensor" in checkpoint.open_checkpoint(root).notes[0]


# --- bad directories --------------------------------------------------------------------------


def test_no_directory_and_no_config(tmp_path: Path) -> None:
    assert "no such directory" in problems_of(tmp_path / "absent")
    root = make(tmp_path)
    assert "a checkpoint directory" in problems_of(root / "config.json")
    (root / "config.json").unlink()
    assert "config.json: found no such file" in problems_of(root)
    (root / "model.gguf").write_bytes(b"GGUF")
    assert "here model.gguf" in problems_of(root)


def test_an_empty_directory_lacks_both(tmp_path: Path) -> None:
    text = problems_of(tmp_path)
    assert "config.json" in text and "model.safetensors" in text


def test_every_missing_shard_is_named(tmp_path: Path) -> None:
    root = make(tmp_path, shards=4)
    for i in (2, 3):
        (root / f"model-0000{i}-of-00004.safetensors").unlink()
    text = problems_of(root)
    assert "model-00002-of-00004.safetensors" in text
    assert "model-00003-of-00004.safetensors" in text


def test_shards_without_an_index(tmp_path: Path) -> None:
    root = make(tmp_path, shards=2)
    (root / checkpoint.INDEX).unlink()
    assert "2 safetensors files without an index" in problems_of(root)


def test_index_and_shards_that_disagree(tmp_path: Path) -> None:
    root = make(tmp_path, shards=2)
    index = json.loads((root / checkpoint.INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))
    index["weight_map"] |= {"a.weight": second, "absent": first}
    (root / checkpoint.INDEX).write_text(json.dumps(index))
    text = problems_of(root)
    assert "tensor a.weight: found the tensor in model-00001" in text
    assert "tensor absent: found no such tensor" in text


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    root = make(tmp_path, shards=2)
    mf.write_shard(root / "model-00002-of-00002.safetensors", ENTRIES)
    assert "the name twice" in problems_of(root)


INDEXES = {
    "not JSON": ("{", "invalid JSON"),
    "a list": ("[1, 2]", "invalid JSON"),
    "no weight_map": ('{"metadata": {}}', "no entries"),
    "weight_map a list": ('{"weight_map": []}', "invalid JSON"),
    "a path": ('{"weight_map": {"a": "../../etc/passwd"}}', "in the same directory"),
    "a number": ('{"weight_map": {"a": 5}}', "in the same directory"),
    "the directory above": ('{"weight_map": {"a": ".."}}', "not a regular file"),
    "twice": ('{"weight_map": {"a": "x", "a": "y"}}', "the name twice"),
    "deep": ('{"weight_map": ' + '{"a":' * 3000, "invalid JSON"),
    "long name": ('{"weight_map": {"a": "' + "x" * 400 + '"}}', "no such file"),
    "bad UTF-8": (b'{"weight_map": {"\xff": "x"}}', "invalid UTF-8"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_bad_indexes(tmp_path: Path, case: str) -> None:
    content, expected = INDEXES[case]
    root = make(tmp_path, shards=2)
    raw = content if isinstance(content, bytes) else content.encode()
    (root / checkpoint.INDEX).write_bytes(raw)
    assert expected in problems_of(root)


CONFIGS = {
    "not JSON": (b"{", "invalid JSON"),
    "a list": (b"[]", "a JSON list"),
    "deep": (b'{"a":' + b"[" * 100000, "invalid JSON"),
    "bad UTF-8": (b'{"a": "\xff"}', "invalid JSON"),
    "twice": (b'{"a": 1, "a": 2}', "key a: found the key twice"),
    "empty": (b"", "an empty file"),
    "too large": (b" " * (checkpoint.MAX_CONFIG_BYTES + 1), "at most"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_bad_configs(tmp_path: Path, case: str) -> None:
    content, expected = CONFIGS[case]
    root = make(tmp_path)
    (root / "config.json").write_bytes(content)
    assert expected in problems_of(root)


def header(text: str | bytes, size: int = 512, length: int | None = None) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(size)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), name: str = "t") -> str:
    value = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    return f'{{"ok": {{"dtype":"F32","shape":[4],"data_offsets":[64,80]}}, "{name}": ' + (
        json.dumps(value) + "}"
    )


HUGE = 1 << 63
HEADERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "an empty file"),
    "seven bytes": (lambda: bytes(7), "a header of"),
    "length": (lambda: header("{}", length=HUGE), f"a header of {HUGE} bytes"),
    "length in a sparse file": (
        lambda: (
            struct.pack("<Q", checkpoint.MAX_HEADER_BYTES + 1)
            + bytes(checkpoint.MAX_HEADER_BYTES + 2)
        ),
        "at most",
    ),
    "not JSON": (lambda: header("x" * 50), "invalid JSON"),
    "a list": (lambda: header("[1]"), "invalid JSON"),
    "cut": (lambda: header(entry()[:-3]), "invalid JSON"),
    "deep": (lambda: header('{"t": ' + "[" * 100000), "invalid JSON"),
    "text behind": (lambda: header(entry() + "x"), "text after the object"),
    "bad UTF-8": (lambda: header(b'{"\xff": 1}'), "invalid UTF-8"),
    "entry": (lambda: header('{"t": [1]}'), "a JSON list"),
    "dtype": (lambda: header(entry("F7")), "dtype 'F7'"),
    "dtype number": (lambda: header(entry(5)), "dtype 5"),
    "dtype list": (lambda: header(entry(["F32"])), "dtype ['F32']"),
    "no dtype": (lambda: header(entry(None)), "dtype None"),
    "shape": (lambda: header(entry(shape=[2, -1])), "shape [2, -1]"),
    "shape zero": (lambda: header(entry(shape=[0], offsets=[0, 0])), "shape [0]"),
    "shape text": (lambda: header(entry(shape="2")), "shape '2'"),
    "shape float": (lambda: header(entry(shape=[2.0])), "shape [2.0]"),
    "dimensions": (lambda: header(entry(shape=[1] * 9)), "up to 8 dimensions"),
    "huge shape": (lambda: header(entry(shape=[HUGE, HUGE])), "8 bytes for F32"),
    "offsets": (lambda: header(entry(offsets=[8])), "two byte offsets"),
    "offsets backwards": (lambda: header(entry(offsets=[8, 0])), "-8 bytes for F32"),
    "offsets negative": (lambda: header(entry(offsets=[-8, 0])), "two byte offsets"),
    "size": (lambda: header(entry(offsets=[0, 12])), "12 bytes for F32 [2]"),
    "beyond": (lambda: header(entry(offsets=[HUGE, HUGE + 8])), "data inside the file"),
    "overlap": (lambda: header(entry(offsets=[72, 80])), "8 bytes shared with tensor ok"),
    "twice": (lambda: header(entry(name="ok")), "tensor ok: found the name twice"),
    "long entry": (lambda: header('{"t": {"dtype": "' + "F" * 5000 + '"}}'), "invalid JSON"),
    "digits": (lambda: header(f'{{"t": {"9" * 5000}}}'), "tensor t"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_bad_headers(tmp_path: Path, case: str) -> None:
    build, expected = HEADERS[case]
    root = make(tmp_path)
    (root / "model.safetensors").write_bytes(build())
    text = problems_of(root)
    assert expected in text and "model.safetensors" in text


def test_every_truncation_of_a_shard_is_refused(tmp_path: Path) -> None:
    root = make(tmp_path)
    path = root / "model.safetensors"
    whole = path.read_bytes()
    for size in [*range(0, 600, 3), *range(600, len(whole), 1997), len(whole) - 1]:
        path.write_bytes(whole[:size])
        problems_of(root)


def test_a_cut_off_shard_is_one_problem(tmp_path: Path) -> None:
    root = make(tmp_path)
    path = root / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    assert "data inside the file" in problems_of(root), "one tensor is named"
    os.truncate(path, 8 + int.from_bytes(path.read_bytes()[:8], "little"))
    problems: list[Any] = []
    file = checkpoint.open_checkpoint(root, problems)
    (problem,) = problems
    assert f"with {len(file.tensors)} tensors beyond them" in problem.found
    name, tensor = next(iter(file.tensors.items()))
    assert not tensor.complete
    for read in (file.packed, file.array):
        with pytest.raises(ModelFileError, match="data inside the file"):
            read(name)


def test_problems_can_be_kept_instead_of_raised(tmp_path: Path) -> None:
    root = make(tmp_path, shards=2)
    (root / "model-00002-of-00002.safetensors").unlink()
    problems: list[Any] = []
    file = checkpoint.open_checkpoint(root, problems)
    assert file.config == CONFIG and "a.weight" in file.tensors
    assert [p.file for p in problems] == ["model-00002-of-00002.safetensors"]
    (root / "config.json").unlink()
    with pytest.raises(ModelFileError):
        checkpoint.open_checkpoint(root, [])


# --- hostile sizes ----------------------------------------------------------------------------

HOSTILE = {
    "objects": '{"__metadata__": {"a": [' + "{}," * 4_000_000,
    "problems": '{"t0": 1' + ',"t": 1' * 2_000_000 + "}",
    "one long string": '{"' + "𝄞" * 5_000_000,
    "wide": '{"t": 1' + "," * 20_000_000,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_stay_bounded(tmp_path: Path, case: str) -> None:
    root = make(tmp_path)
    raw = HOSTILE[case].encode()[: checkpoint.MAX_HEADER_BYTES]
    if case == "one long string":
        raw = raw[: len(raw) // 4 * 4 - 2]
    (root / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    start = time.process_time()
    problems_of(root)
    assert time.process_time() - start < 1.0
    tracemalloc.start()
    try:
        problems_of(root)
        assert tracemalloc.get_traced_memory()[1] < 180 * 2**20
    finally:
        tracemalloc.stop()


def test_a_header_of_an_unsharded_flash_opens_fast(tmp_path: Path) -> None:
    entries = {f"layers.0.ffn.experts.{i}.w1.weight": ("I8", (8, 4)) for i in range(72000)}
    root = mf.write_checkpoint(tmp_path / "m", CONFIG, entries)
    start = time.process_time()
    assert len(checkpoint.open_checkpoint(root).tensors) == 72000
    assert time.process_time() - start < 1.5


# --- mutations --------------------------------------------------------------------------------


def run_mutations(tmp_path: Path, count: int, seed: int) -> tuple[int, int]:
    """(refused, accepted) of `count` mutated shards, indexes and configs."""
    rng = random.Random(seed)
    root = make(tmp_path, shards=2)
    files = [p for p in sorted(root.iterdir())]
    originals = {p: p.read_bytes() for p in files}
    heads = {p: len(raw) if p.suffix == ".json" else 460 for p, raw in originals.items()}
    letters = b'{}[]",:0123456789.-eE\\ut\xff\x00 '
    refused = accepted = 0
    for number in range(count):
        path = rng.choice(files)
        out = bytearray(originals[path])
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(min(heads[path], len(out)) or 1)
            action = rng.randrange(4)
            if action == 0 and out:
                out[at] = rng.choice(letters)
            elif action == 1:
                out[at:at] = bytes(rng.choice(letters) for _ in range(rng.randint(1, 30)))
            elif action == 2:
                del out[at : at + rng.randint(1, 40)]
            elif rng.random() < 0.2:
                del out[at:]
        path.write_bytes(bytes(out))
        start = time.process_time()
        try:
            file = checkpoint.open_checkpoint(root)
        except ModelFileError as error:
            assert error.problems
            str(error)
            refused += 1
        else:
            accepted += 1
            for name in file.tensors:
                file.array(name)
                file.packed(name)
        assert time.process_time() - start < 1.0, f"mutation {number} of seed {seed}"
        path.write_bytes(originals[path])
    return refused, accepted


def test_mutated_directories_are_read_or_refused(tmp_path: Path) -> None:
    refused, accepted = run_mutations(tmp_path, 600, seed=3)
    assert refused > 300 and accepted > 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_mutated_directories_are_read_or_refused(tmp_path: Path) -> None:
    refused, accepted = run_mutations(tmp_path, 20000, seed=4)
    assert refused > 7000 and accepted > 300
