"""The checkpoint writer, read back by our own reader and by the public package."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from ds4jax import checkpoint, checkpoint_write
from ds4jax.checkpoint_write import CheckpointData

CONFIG = {"model_type": "deepseek_v4", "vocab_size": 7}


def tensors() -> list[CheckpointData]:
    rng = np.random.default_rng(0)
    bf16 = rng.standard_normal((5, 8)).astype(ml_dtypes.bfloat16).view(np.uint16)
    return [
        CheckpointData(name="embed.weight", dtype="BF16", shape=(5, 8), data=bf16),
        CheckpointData(name="a", dtype="F32", shape=(3,), data=np.arange(3, dtype="<f4")),
        CheckpointData(name="ids", dtype="I64", shape=(2, 2), data=np.arange(4, dtype="<i8")),
        CheckpointData(
            name="w.weight", dtype="I8", shape=(2, 16), data=rng.integers(0, 256, 32, np.uint8)
        ),
        CheckpointData(
            name="w.scale", dtype="F8_E8M0", shape=(2, 1), data=lambda: iter([b"\x7f", b"\x80"])
        ),
    ]


def check(path: Path) -> None:
    file = checkpoint.open_checkpoint(path)
    assert file.config == CONFIG
    assert set(file.tensors) == {t.name for t in tensors()}
    for tensor in tensors():
        read = file.tensors[tensor.name]
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        if isinstance(tensor.data, np.ndarray):
            expected = tensor.data.reshape(-1).view(np.uint8)
            assert (file.packed(tensor.name).reshape(-1) == expected).all()
    assert file.array("w.scale").tolist() == [[0x7F], [0x80]]


def test_one_shard(tmp_path: Path) -> None:
    size = checkpoint_write.write(
        tmp_path / "m", CONFIG, tensors(), files={"tokenizer.json": b"{}"}
    )
    assert size == 80 + 12 + 32 + 32 + 2
    assert sorted(os.listdir(tmp_path / "m")) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    check(tmp_path / "m")
    with safe_open(tmp_path / "m" / "model.safetensors", "np") as public:
        assert (public.get_tensor("a") == np.arange(3)).all()
        assert public.get_tensor("ids").tolist() == [[0, 1], [2, 3]]


def test_many_shards(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    checkpoint_write.write(tmp_path / "m", CONFIG, tensors(), shard_bytes=90)
    index = json.loads((tmp_path / "m" / checkpoint.INDEX).read_text())
    assert index["metadata"]["total_size"] == 158
    assert set(index["weight_map"]) == {t.name for t in tensors()}
    assert sorted(set(index["weight_map"].values())) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip
    check(tmp_path / "m")


def bad(**change: Any) -> list[CheckpointData]:
    fields: dict[str, Any] = {
        "name": "x", "dtype": "F32", "shape": (2,), "data": np.zeros(2, np.float32),
    } | change  # fmt: skip
    return [*tensors(), CheckpointData(**fields)]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (bad(name="a"), "tensor a is there twice"),
        (bad(dtype="F4"), "dtype 'F4', must be one of"),
        (bad(shape=(3,)), r"x: data of 8 bytes for F32 \[3\], must be 12 bytes"),
    ],
)
def test_failures_leave_nothing(tmp_path: Path, rows: list[CheckpointData], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        checkpoint_write.write(tmp_path / "m", CONFIG, rows)
    assert not os.listdir(tmp_path)


def test_what_exists_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "x").write_text("mine")
    with pytest.raises(FileExistsError, match="not an empty directory"):
        checkpoint_write.write(tmp_path / "m", CONFIG, tensors())
    assert os.listdir(tmp_path) == ["m"] and os.listdir(tmp_path / "m") == ["x"]


def test_too_little_room_is_said_before_writing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"needs \d+ bytes, \d+ are free"):
        checkpoint_write.write(tmp_path / "m", CONFIG, bad(shape=(1 << 40, 1 << 20)))
    assert not os.listdir(tmp_path)
