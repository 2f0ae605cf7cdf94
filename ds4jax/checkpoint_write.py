"""Writing of checkpoint directories: config, safetensors shards, index.

Counterpart of `ds4jax.checkpoint`, and like it free of any model. Tensors are streamed; the
directory is made under a temporary name and renamed when it is complete, so a failure leaves
nothing behind. The public package cannot write the scale dtype of this family, nor stream.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4jax import checkpoint, gguf_write
from ds4jax.errors import printable

SHARD_BYTES = 5 << 30
"""A shard is closed before it grows beyond this."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointData:
    """One tensor to write. `data` holds or yields exactly the bytes of dtype and shape."""

    name: str
    dtype: str  # safetensors tag, a key of `checkpoint.DTYPES`
    shape: tuple[int, ...]
    data: gguf_write.Data

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensor."""
        count = checkpoint.DTYPES[self.dtype][0]
        for size in self.shape:
            count *= size
        return count


def write(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Iterable[CheckpointData],
    *,
    files: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write a checkpoint directory, completely or not at all.

    Args:
        path: target directory; must not exist, or be empty.
        config: contents of config.json.
        tensors: in the order of the shards. Data is asked for once, tensor after tensor.
        files: further files (tokenizer.json, ...) by name.
        shard_bytes: a tensor that would make a shard longer starts the next one.

    Returns: bytes of all shards.

    Raises:
        ValueError: for an unknown dtype, a name used twice, or data of a wrong byte count.
        FileExistsError: if the target is a file or a directory that is not empty.
        OSError: if the disk has too little room, or writing fails.
    """
    target = Path(path)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not an empty directory: choose another name")
    shards = _shards(tensors, shard_bytes)
    total = sum(t.nbytes for shard in shards for t in shard)
    free = shutil.disk_usage(target.parent).free
    if total > free:
        raise OSError(f"{target}: needs {total} bytes, {free} are free on its disk")
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    temporary.mkdir()
    try:
        names = _names(len(shards))
        for name, shard in zip(names, shards, strict=True):
            _write_shard(temporary / name, shard)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": total},
                "weight_map": {
                    t.name: n for n, s in zip(names, shards, strict=True) for t in s
                },
            }  # fmt: skip
            (temporary / checkpoint.INDEX).write_text(json.dumps(index, indent=1) + "\n")
        (temporary / checkpoint.CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        for name, content in (files or {}).items():
            (temporary / name).write_bytes(content)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return total


def _names(count: int) -> list[str]:
    if count == 1:
        return [checkpoint.SINGLE]
    return [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def _shards(tensors: Iterable[CheckpointData], shard_bytes: int) -> list[list[CheckpointData]]:
    shards: list[list[CheckpointData]] = [[]]
    size, seen = 0, set()
    for tensor in tensors:
        if tensor.dtype not in checkpoint.DTYPES:
            raise ValueError(
                f"{printable(tensor.name)}: dtype {tensor.dtype!r}, must be one of"
                f" {', '.join(checkpoint.DTYPES)}"
            )
        if tensor.name in seen:
            raise ValueError(f"tensor {printable(tensor.name)} is there twice")
        seen.add(tensor.name)
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write_shard(path: Path, tensors: list[CheckpointData]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            what = f"{tensor.dtype} {list(tensor.shape)}"
            gguf_write.write_pieces(file, tensor.name, tensor.data, tensor.nbytes, what)
        file.flush()
        os.fsync(file.fileno())
