"""Decoding inside kernels: tiles equal the weights that `packing.unpack` rounds to bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import backend, decode, formats, packing
from tests.test_kernel_packing import vector

ROWS = 16


def matrix(data_dir: Path, name: str) -> packing.QuantArray:
    """Sixteen rows of a recorded format (128 where scales belong to 128 rows)."""
    packed, _, side = vector(data_dir, name)
    if packed.ndim == 3:
        packed, side = packed[1], {k: v[1] for k, v in side.items()}
    if formats.get(name).scale == "tile":
        return packing.pack(name, packed[:128], scale_e8m0=side["scale_e8m0"][:1]).map(jnp.asarray)
    if "scale_e8m0" in side:
        side["scale_e8m0"] = side["scale_e8m0"][:ROWS]
    return packing.pack(name, packed[:ROWS], **side).map(jnp.asarray)


def decoded(q: packing.QuantArray) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Tiles of the emulated kernel side by side, and their factors spread over them."""
    fmt = formats.get(q.format)
    names = packing.fields_of(q)
    blocks, width = fmt.padded(q.cols) // fmt.block, decode.tile_width("interpret")

    def kernel(*refs: Any) -> None:
        *weights, out_ref, factor_ref = refs
        by_name = dict(zip(names, weights, strict=True))

        def body(b: jax.Array, carry: int) -> int:
            raw = decode.load(fmt, by_name, (), 0, q.rows, b)
            for j, (tile, factor) in enumerate(decode.tiles(fmt, raw, "interpret")):
                at = pl.ds(b * fmt.block + width * j, width)
                ones = jnp.ones((q.rows,)) if factor is None else factor
                out_ref[:, at] = tile.astype(jnp.float32)
                factor_ref[:, at] = jnp.broadcast_to(ones[:, None], (q.rows, width))
            return carry

        jax.lax.fori_loop(0, blocks, body, 0)

    like = jax.ShapeDtypeStruct((q.rows, blocks * fmt.block), jnp.float32)
    call = backend.pallas(
        kernel,
        name="decode",
        grid=(1,),
        out_shape=(like, like),
        num_warps=4,
        num_stages=1,
        interpret=True,
    )
    tile, factor = call(*q.arrays())
    return np.asarray(tile)[:, : q.cols], np.asarray(factor)[:, : q.cols]


QUICK = ("hf_fp8_e4m3_block128", "mxfp4", "rocmfp2_s40", "rocmfp4")


@pytest.mark.parametrize(
    "name",
    [
        n if n in QUICK else pytest.param(n, marks=pytest.mark.slow)
        for n in sorted(decode.DECODABLE)
    ],
)
def test_tiles_are_the_weights_in_bfloat16(data_dir: Path, name: str) -> None:
    q = matrix(data_dir, name)
    tile, factor = decoded(q)
    # A power of two aside: exact, unless it meets the ends of the range.
    got = tile.astype(np.float64) * factor * 2.0 ** decode.shift(formats.get(name))
    exact = jnp.float32 if formats.get(name).scale == "tile" else jnp.bfloat16
    want = np.asarray(jax.jit(packing.unpack, static_argnums=1)(q, exact)).astype(np.float64)
    # mxfp4 tiles leave bfloat16's range at weights of 2^31; s40 has 2^-125 where a scale is 0.
    inside = (np.abs(want) > 1e-20) & (np.abs(want) < 1e9)
    assert inside.mean() > 0.3
    np.testing.assert_array_equal(got[inside], want[inside])
    zero = want == 0
    assert (np.abs(got[zero]) < 1e-30).all()


def test_every_format_but_one_has_a_decoder() -> None:
    assert set(formats.FORMATS) - decode.DECODABLE == {"iq2_xxs"}
