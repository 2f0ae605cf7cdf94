"""The GGUF writer, read back by the public package and by our own reader."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf as public
import numpy as np
import pytest
from gguf import quants

from ds4jax import gguf, gguf_write, quant, quantize
from ds4jax.gguf_write import TensorData

METADATA: dict[str, Any] = {
    "general.architecture": "deepseek4",
    "a.bool": True,
    "a.int": 7,
    "a.negative": -7,
    "a.large": 1 << 40,
    "a.least": -(1 << 40),
    "a.float": 0.5,
    "a.u8": np.uint8(200),
    "a.i8": np.int8(-3),
    "a.u16": np.uint16(65535),
    "a.i16": np.int16(-300),
    "a.u64": np.uint64(2**63),
    "a.i64": np.int64(-1),
    "a.f64": np.float64(0.1),
    "a.text": "Grüße ｜",
    "a.texts": ["left right", "", "ü"],
    "a.ints": [0, 4, -128],
    "a.floats": [1.5, 2.5],
    "a.bools": [True, False],
    "a.u32s": np.array([1, 2**32 - 1], np.uint32),
    "a.bytes": np.arange(256, dtype=np.uint8),
    "a.none": np.zeros(0, np.int32),
}


def weights(rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, width)).astype(np.float32)


def tensors() -> list[TensorData]:
    x = weights(6, 64)
    out = []
    for name, kind in (("f32", 0), ("f16", 1), ("q8_0", 8), ("bf16", 30), ("mxfp4", 39)):
        packed = quantize.encode(name, x)
        out.append(TensorData(name=f"t.{name}", type_id=kind, shape=(2, 3, 64), data=packed))
    table = np.arange(10, dtype=np.int32).reshape(5, 2)
    out.append(TensorData(name="t.i32", type_id=26, shape=(5, 2), data=table))
    out.append(TensorData(name="t.norm", type_id=0, shape=(3,), data=np.ones(3, np.float32)))
    return out


def test_standard_types_are_read_by_the_public_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    size = gguf_write.write(path, METADATA, tensors())
    assert size == path.stat().st_size
    reader = public.GGUFReader(path)
    for key, value in METADATA.items():
        got = reader.fields[key].contents()
        if isinstance(value, np.ndarray):
            value = value.tolist()
        elif isinstance(value, np.generic):
            value = value.item()
        assert got == value, key
    kinds = {k: [t.name for t in reader.fields[k].types] for k in ("a.int", "a.large", "a.ints")}
    assert kinds == {"a.int": ["UINT32"], "a.large": ["UINT64"], "a.ints": ["ARRAY", "INT32"]}
    by_name = {t.name: t for t in reader.tensors}
    assert list(by_name) == [t.name for t in tensors()]
    for tensor in tensors():
        read = by_name[tensor.name]
        assert tuple(int(d) for d in read.shape) == tensor.shape[::-1]
        assert read.data.tobytes() == np.asarray(tensor.data).tobytes()
    x = weights(6, 64).reshape(2, 3, 64)
    np.testing.assert_array_equal(
        quants.dequantize(by_name["t.f16"].data, public.GGMLQuantizationType.F16),
        x.astype(np.float16).astype(np.float32),
    )


def test_every_type_of_ours_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    rows, x = [], weights(6, 256)
    for name in quantize.ENCODABLE:
        kind = quant.FORMATS[name].type_id
        assert kind is not None
        rows.append(
            TensorData(name=name, type_id=kind, shape=(6, 256), data=quantize.encode(name, x))
        )
    gguf_write.write(path, {"general.architecture": "deepseek4"}, rows)
    file = gguf.open_gguf(path)
    assert set(file.tensors) == set(quantize.ENCODABLE)
    for row in rows:
        assert file.tensors[row.name].shape == (6, 256)
        assert (file.packed(row.name) == row.data).all()
        np.testing.assert_array_equal(
            quant.decode(row.name, file.packed(row.name)),
            quant.decode(row.name, np.asarray(row.data)),
        )


def test_metadata_is_read_back_by_our_reader(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_write.write(path, METADATA, [])
    read = gguf.open_gguf(path).metadata
    assert list(read) == list(METADATA)
    for key, value in METADATA.items():
        got = read[key]
        got = got.tolist() if hasattr(got, "tolist") else got
        value = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
        assert got == value, key


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_alignment_is_obeyed(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "m.gguf"
    gguf_write.write(path, {"general.alignment": np.uint32(alignment)}, tensors())
    file = gguf.open_gguf(path)
    assert file.alignment == alignment
    assert all(t.start % alignment == 0 for t in file.tensors.values())
    assert path.stat().st_size % alignment == 0
    assert (file.packed("t.norm").view(np.float32) == 1).all()


def test_tensors_are_streamed(tmp_path: Path) -> None:
    piece = np.zeros(1 << 20, np.uint8)
    asked = []

    def pieces(name: str) -> Iterator[np.ndarray]:
        asked.append(name)
        for i in range(24):
            piece[:] = i
            yield piece

    rows = [
        TensorData(name=n, type_id=0, shape=(24, 1 << 18), data=lambda n=n: pieces(n))
        for n in ("a", "b")
    ]
    tracemalloc.start()
    gguf_write.write(tmp_path / "m.gguf", {}, rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20
    assert asked == ["a", "b"]
    file = gguf.open_gguf(tmp_path / "m.gguf")
    assert [int(x) for x in file.packed("b")[:, 5]] == list(range(24))


def test_any_buffer_will_do(tmp_path: Path) -> None:
    values = np.arange(8, dtype="<f4")
    raw = values.tobytes()
    parts = (raw[:4], bytearray(raw[4:8]), memoryview(raw)[8:16], values[4:].reshape(2, 2))
    rows = [TensorData(name="a", type_id=0, shape=(8,), data=lambda: iter(parts))]
    strided = np.arange(16, dtype="<f4")[::2]
    rows.append(TensorData(name="b", type_id=0, shape=(8,), data=strided))
    gguf_write.write(tmp_path / "m.gguf", {}, rows)
    file = gguf.open_gguf(tmp_path / "m.gguf")
    assert file.packed("a").view("<f4").tolist() == values.tolist()
    assert file.packed("b").view("<f4").tolist() == strided.tolist()


# Failures ---------------------------------------------------------------------------------------


def boom() -> Iterator[bytes]:
    yield bytes(64)
    raise RuntimeError("source went away")


@pytest.mark.parametrize(
    ("row", "error", "text"),
    [
        (TensorData(name="x", type_id=0, shape=(32,), data=boom), RuntimeError, "went away"),
        (
            TensorData(name="x", type_id=0, shape=(32,), data=lambda: [bytes(127)]),
            ValueError,
            r"x: data of 127 bytes for shape \[32\] of F32, must be 128 bytes",
        ),
        (
            TensorData(name="x", type_id=0, shape=(32,), data=lambda: [bytes(100)] * 3),
            ValueError,
            "data of 200 bytes or more",
        ),
        (
            TensorData(name="x", type_id=101, shape=(4, 33), data=np.zeros(4)),
            ValueError,
            "x: rows of 33 weights are not a multiple of the block of 32 of Q4_0_ROCMFP4_FAST",
        ),
        (TensorData(name="x", type_id=999, shape=(4,), data=np.zeros(4)), ValueError, "999"),
        (TensorData(name="x", type_id=0, shape=(), data=np.zeros(4)), ValueError, "1 to 4 sizes"),
        (
            TensorData(name="x", type_id=0, shape=(1, 0), data=np.zeros(0)),
            ValueError,
            "sizes above 0",
        ),
        (
            TensorData(name="x" * 64, type_id=0, shape=(1,), data=np.zeros(1)),
            ValueError,
            "1 to 63 bytes",
        ),
        (
            TensorData(name="ok", type_id=0, shape=(1,), data=np.zeros(1)),
            ValueError,
            "ok is there twice",
        ),
    ],
)
def test_failures_are_named_and_leave_nothing(
    tmp_path: Path, row: TensorData, error: type[Exception], text: str
) -> None:
    good = TensorData(name="ok", type_id=0, shape=(1,), data=np.zeros(1, np.float32))
    (tmp_path / "old.gguf").write_bytes(b"old")
    with pytest.raises(error, match=text):
        gguf_write.write(tmp_path / "old.gguf", {}, [good, row], overwrite=True)
    assert os.listdir(tmp_path) == ["old.gguf"]
    assert (tmp_path / "old.gguf").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("", 1, "1 to 65535 bytes"),
        ("k", None, "metadata k: values of type NoneType"),
        ("k", [], "one or more of"),
        ("k", [1, "a"], "one or more of"),
        ("k", [1 << 40], "metadata k"),
        ("k", 1 << 70, "beyond 64 bits"),
        ("k", np.zeros((2, 2)), "must have one axis"),
        ("k", np.zeros(2, np.complex64), "arrays of complex64"),
        ("k", np.float16(1), "float16"),
        ("general.alignment", 24, "power of two"),
        ("general.alignment", 0, "power of two"),
    ],
)
def test_metadata_that_cannot_be_written_is_named(
    tmp_path: Path, key: str, value: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        gguf_write.write(tmp_path / "m.gguf", {key: value}, [])
    assert not os.listdir(tmp_path)


def test_an_existing_file_is_replaced_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError, match="exists: choose another name"):
        gguf_write.write(path, {}, [])
    assert path.read_bytes() == b"old"
    gguf_write.write(path, {}, [], overwrite=True)
    assert path.read_bytes()[:4] == b"GGUF"
    assert struct.unpack("<I", path.read_bytes()[4:8]) == (3,)


def test_too_little_room_is_said_before_writing(tmp_path: Path) -> None:
    rows = [TensorData(name="a", type_id=0, shape=(1 << 30, 1 << 20), data=boom)]
    with pytest.raises(OSError, match=r"needs \d+ bytes, \d+ are free"):
        gguf_write.write(tmp_path / "m.gguf", {}, rows)
    assert not os.listdir(tmp_path)
