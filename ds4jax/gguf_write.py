"""Writing of GGUF v3 files: typed key/value pairs and streamed tensors of any type.

Counterpart of `ds4jax.gguf`, and like it free of any model. The public package writes only types it
knows, and neither atomically nor as a stream; this writer keeps one chunk of one tensor in memory,
writes to a temporary file beside the target and renames it when all is on disk. Nothing is left
behind by a failure.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ds4jax import quant
from ds4jax.errors import printable

MAX_NAME_BYTES = 63
"""Longest tensor name other programs accept."""

MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

_KIND_OF_DTYPE = {
    "uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6,
    "bool": 7, "uint64": 10, "int64": 11, "float64": 12,
}  # fmt: skip
_STRING, _ARRAY = 8, 9

Piece = bytes | bytearray | memoryview | npt.NDArray[Any]
Data = npt.NDArray[Any] | Callable[[], Iterable[Piece]]
"""Bytes of a tensor: an array in storage order, or a function that yields them piece by piece."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorData:
    """One tensor to write. `data` holds or yields exactly the bytes that type and shape ask for."""

    name: str
    type_id: int
    shape: tuple[int, ...]  # numpy order, slowest axis first
    data: Data

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensor.

        Raises:
            ValueError: for an unknown type, or rows that are no whole number of blocks.
        """
        layout = quant.type_layout(self.type_id)
        if not 1 <= len(self.shape) <= MAX_DIMS or min(self.shape) < 1:
            raise ValueError(
                f"{self.name}: shape {list(self.shape)}, must be 1 to {MAX_DIMS} sizes above 0"
            )
        if self.shape[-1] % layout.block:
            raise ValueError(
                f"{self.name}: rows of {self.shape[-1]} weights are not a multiple of the block of"
                f" {layout.block} of {layout.ggml_name}; choose another type for it"
            )
        weights = int(np.prod(self.shape, dtype=object))
        return weights // layout.block * layout.block_bytes


def write(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Iterable[TensorData],
    *,
    overwrite: bool = False,
) -> int:
    """Write a GGUF v3 file, completely or not at all.

    Args:
        path: target; its directory must exist.
        metadata: values by key. NumPy scalars and arrays state their type; of plain Python values
            a bool, a str, a float (f32), an int (u32, or the smallest of i32, u64, i64 that holds
            it) and lists of one kind (ints i32, floats f32, str, bool) are understood.
            "general.alignment" is obeyed.
        tensors: in the order of the file. Data is asked for once, tensor after tensor.
        overwrite: replace an existing file; otherwise it is refused.

    Returns: bytes of the file.

    Raises:
        ValueError: for a name, value, shape or type that cannot be written, or data of a wrong
            byte count, naming it.
        FileExistsError: if the target exists and `overwrite` is false.
        OSError: if the disk has too little room, or writing fails.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists: choose another name or allow overwriting")
    rows = list(tensors)
    alignment = _alignment(metadata)
    head = _head(metadata, rows, alignment)
    total = len(head) + sum(_padded(t.nbytes, alignment) for t in rows)
    free = shutil.disk_usage(target.parent).free
    if total > free:
        raise OSError(f"{target}: needs {total} bytes, {free} are free on its disk")
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    try:
        with open(temporary, "xb") as file:
            file.write(head)
            for tensor in rows:
                _write_tensor(file, tensor, alignment)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    return total


def _padded(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


def _alignment(metadata: Mapping[str, Any]) -> int:
    value = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    if not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise ValueError(
            f"general.alignment is {value}, must be a power of two in 8..{MAX_ALIGNMENT}"
        )
    return value


def _head(metadata: Mapping[str, Any], tensors: Sequence[TensorData], alignment: int) -> bytes:
    out = bytearray(b"GGUF")
    out += struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        if not key or len(key.encode()) > 65535:
            raise ValueError(f"metadata key {printable(key)!r} must be of 1 to 65535 bytes")
        out += _string(key)
        try:
            out += _value(value)
        except (ValueError, OverflowError, struct.error) as error:
            raise ValueError(f"metadata {printable(key)}: {error}") from error
    seen: set[str] = set()
    offset = 0
    for tensor in tensors:
        if not 1 <= len(tensor.name.encode()) <= MAX_NAME_BYTES:
            raise ValueError(
                f"tensor name {printable(tensor.name)!r} must be of 1 to {MAX_NAME_BYTES} bytes"
            )
        if tensor.name in seen:
            raise ValueError(f"tensor {printable(tensor.name)} is there twice")
        seen.add(tensor.name)
        nbytes = tensor.nbytes
        out += _string(tensor.name)
        out += struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
        out += struct.pack("<IQ", tensor.type_id, offset)
        offset += _padded(nbytes, alignment)
    out += bytes(_padded(len(out), alignment) - len(out))
    return bytes(out)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise ValueError(f"array of shape {value.shape}, must have one axis")
        return _array(value)
    if isinstance(value, (list, tuple)):
        return _list(value)
    scalar = value if isinstance(value, np.generic) else _typed(value)
    kind = _KIND_OF_DTYPE.get(scalar.dtype.name)
    if kind is None:
        raise ValueError(f"values of type {scalar.dtype} cannot be written")
    return struct.pack("<I", kind) + scalar.astype(scalar.dtype.newbyteorder("<")).tobytes()


def _typed(value: Any) -> np.generic:
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, float):
        return np.float32(value)
    if isinstance(value, int):
        for kind in (np.uint32, np.int32, np.uint64, np.int64):
            limits = np.iinfo(kind)
            if limits.min <= value <= limits.max:
                return kind(value)
        raise ValueError(f"{value} is beyond 64 bits")
    raise ValueError(f"values of type {type(value).__name__} cannot be written")


def _array(array: npt.NDArray[Any]) -> bytes:
    kind = _KIND_OF_DTYPE.get(array.dtype.name)
    if kind is None:
        raise ValueError(f"arrays of {array.dtype} cannot be written")
    raw = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
    return struct.pack("<IIQ", _ARRAY, kind, len(array)) + raw


def _list(items: Sequence[Any]) -> bytes:
    kinds = {type(x) for x in items}
    if kinds == {str}:
        head = struct.pack("<IIQ", _ARRAY, _STRING, len(items))
        return head + b"".join(_string(x) for x in items)
    dtypes: dict[type, Any] = {bool: np.bool_, int: np.int32, float: np.float32}
    if len(kinds) == 1 and (kind := kinds.pop()) in dtypes:
        return _array(np.array(items, dtypes[kind]))
    raise ValueError("a list must hold one or more of str, bool, int or float; or use numpy arrays")


def _write_tensor(file: BinaryIO, tensor: TensorData, alignment: int) -> None:
    layout = quant.type_layout(tensor.type_id)
    what = f"shape {list(tensor.shape)} of {layout.ggml_name}"
    count = write_pieces(file, tensor.name, tensor.data, tensor.nbytes, what)
    file.write(bytes(_padded(count, alignment) - count))


def write_pieces(file: BinaryIO, name: str, data: Data, expected: int, what: str) -> int:
    """Write the bytes of one tensor, piece by piece, and count them.

    Args:
        name: of the tensor, for the message.
        data: array, or function that yields pieces.
        expected: bytes there must be.
        what: why so many, for the message.

    Returns: `expected`.

    Raises:
        ValueError: if the data has another length.
    """
    count = 0
    for piece in (data,) if isinstance(data, np.ndarray) else data():
        array = piece if isinstance(piece, np.ndarray) else np.frombuffer(piece, np.uint8)
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        count += len(raw)
        if count > expected:
            break
        file.write(raw.data)
    if count != expected:
        more = "or more " if count > expected else ""
        raise ValueError(
            f"{name}: data of {count} bytes {more}for {what}, must be {expected} bytes"
        )
    return count
