"""Device forms of the weight formats: unpack(pack(bytes)) against recorded decoder output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels import formats, packing

unpack = jax.jit(packing.unpack)

SIDE = ("scale_e8m0", "codebooks_bf16", "modes")


def vector(data_dir: Path, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
    """Bytes, decoded weights and side arrays of one recorded format."""
    with np.load(data_dir / "vectors" / f"quant_{name}.npz") as z:
        side = {k: z[k] for k in SIDE if k in z}
        return z["packed"], z["decoded"], side


def same_but_subnormals(
    got: npt.NDArray[np.float32], want: npt.NDArray[np.float32]
) -> npt.NDArray[np.bool_]:
    """Bits equal; where a float32 subnormal is expected, a zero will do (XLA flushes on a CPU)."""
    tiny = (np.abs(want) < np.finfo(np.float32).tiny) & (want != 0)
    return (got.view(np.uint32) == want.view(np.uint32)) | (tiny & (got == 0))


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_unpack_gives_the_recorded_weights(data_dir: Path, name: str) -> None:
    packed, decoded, side = vector(data_dir, name)
    q = packing.pack(name, packed, **side)
    assert isinstance(q.codes, np.ndarray)
    got = np.asarray(unpack(q))
    ok = same_but_subnormals(got, decoded)
    assert ok.all(), f"{name}: {(~ok).sum()} of {ok.size} differ, first at {np.argwhere(~ok)[0]}"


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_packing_on_the_device_equals_packing_on_the_host(data_dir: Path, name: str) -> None:
    packed, _, side = vector(data_dir, name)
    host = packing.pack(name, packed, **side)

    @jax.jit
    def on_device(packed: Any, side: dict[str, Any]) -> packing.QuantArray:
        return packing.pack(name, packed, **side)

    device = on_device(packed, side)
    assert jax.tree.structure(host) == jax.tree.structure(device)
    for a, b in zip(host.arrays(), device.arrays(), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_abstract_describes_what_pack_makes(data_dir: Path, name: str) -> None:
    packed, decoded, side = vector(data_dir, name)
    q = packing.pack(name, packed, **side)
    want = packing.abstract(name, q.lead, *decoded.shape[-2:])
    assert jax.tree.structure(q) == jax.tree.structure(want)
    assert [(a.shape, a.dtype) for a in q.arrays()] == [(a.shape, a.dtype) for a in want.arrays()]
    assert q.shape == decoded.shape
    assert q.nbytes == want.nbytes == packing.nbytes(name, q.lead, *decoded.shape[-2:])


def test_device_bytes_at_real_sizes_are_the_bytes_of_the_file() -> None:
    for name, fmt in formats.FORMATS.items():
        rows, cols = 4096, 8192
        file_bytes = rows * packing.row_bytes(name, cols)
        if name == "hf_fp4_e2m1":
            file_bytes += rows * cols // 32
        # q4_k keeps its six-bit scales in whole bytes.
        slack = 1.03 if name == "q4_k" else 1.001
        assert file_bytes <= packing.nbytes(name, (), rows, cols) <= file_bytes * slack, fmt


def test_short_rows_are_padded_and_cut_again() -> None:
    rng = np.random.default_rng(0)
    for name, cols in (("rocmfp3", 32), ("rocmfp2_affine", 96), ("mxfp4", 160), ("q8_0", 64)):
        packed = rng.integers(0, 120, (3, packing.row_bytes(name, cols)), dtype=np.uint8)
        short = np.asarray(unpack(packing.pack(name, packed)))
        wide = np.concatenate([packed] * 8, -1)
        long = np.asarray(unpack(packing.pack(name, wide)))
        np.testing.assert_array_equal(np.concatenate([short] * 8, -1), long)


def test_stack_index_and_concat_keep_the_weights() -> None:
    rng = np.random.default_rng(1)
    shape = (2, 5, packing.row_bytes("rocmfp4", 64))
    parts = [packing.pack("rocmfp4", rng.integers(0, 120, shape, dtype=np.uint8)) for _ in range(3)]
    stacked = packing.stack(parts)
    assert stacked.shape == (3, 2, 5, 64)
    want = [np.asarray(unpack(p)) for p in parts]
    np.testing.assert_array_equal(np.asarray(unpack(stacked)), np.stack(want))
    taken = jax.jit(lambda q, i: packing.unpack(packing.index(q, i)))(stacked, np.int32(2))
    np.testing.assert_array_equal(np.asarray(taken), want[2])
    joined = packing.concat(parts)
    np.testing.assert_array_equal(np.asarray(unpack(joined)), np.concatenate(want))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: packing.pack("q9", b), "unknown weight format 'q9'; known: hf_fp4"),
        (lambda b: packing.pack("mxfp4", b), "rows of 18 bytes; blocks have 17 bytes"),
        (lambda b: packing.pack("rocmfp4", b.astype(np.int8)), "must be uint8"),
        (lambda b: packing.pack("rocmfp4", b, modes=b), "takes no side array modes"),
        (lambda b: packing.pack("rocmfp2_mix", b[:, :10]), "codebooks_bf16 .* is missing"),
        (lambda b: packing.pack("hf_fp4_e2m1", b[:, :16], scale_e8m0=b[:, :2]), "needs \\[4, 1\\]"),
        (lambda b: packing.abstract("q4_k", (), 4, 128), "need a positive multiple of 256"),
        (lambda b: packing.stack([]), "no matrices"),
        (lambda b: packing.index(packing.pack("rocmfp4", b), 0), "has no leading axis"),
    ],
)
def test_errors_name_what_is_wrong(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(np.zeros((4, 18), np.uint8))


@pytest.mark.parametrize("name", ["q4_k", "rocmfp4", "hf_fp8_e4m3_block128"])
def test_take_rows_is_unpack_then_index(data_dir: Path, name: str) -> None:
    packed, _, side = vector(data_dir, name)
    q = packing.pack(name, packed, **side)
    rows = np.asarray([3, packed.shape[0] - 1, 0, 3], np.int32)
    got = np.asarray(jax.jit(packing.take_rows)(q, rows))
    np.testing.assert_array_equal(got, np.asarray(unpack(q))[rows])
