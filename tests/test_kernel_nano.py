"""The shipped model on kernels: sizes far below those of the real ones, all of them odd."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import kernel_timing
from ds4jax import cache as cache_lib
from ds4jax import local, model, model_file, sampling, step, weights
from ds4jax.config import RuntimeConfig
from ds4jax.step import Bucket, LaneRows
from pallas_kernels import backend as backend_lib
from pallas_kernels import dense
from tests import little_effort

IDS = np.arange(100, 116, dtype=np.int32)


def logits(backend: Any) -> Any:
    """Of every row of a chunk, in bfloat16."""
    run = RuntimeConfig(
        dtype="bfloat16", backend=backend, max_ctx=256, num_slots=1, prefill_buckets=(16,)
    )
    bucket = Bucket(16, 16, prefill=True, chunk=backend != "reference")
    cfg, p = weights.load(model_file.open_model("nano"), run)
    words = step.pack_plan(bucket, [LaneRows(0, 0, IDS, range(run.pages), "all")], 1)

    def fn(p: Any, cache: Any, words: Any) -> Any:
        plan = step.unpack_plan(bucket, words)
        return model.forward(p, cache, plan, cfg=cfg, run=run, chunk=bucket.chunk)[1].logits

    return np.asarray(little_effort.jit(fn)(p, cache_lib.init(cfg, run), words))


@pytest.mark.slow
def test_kernels_agree_with_the_reference() -> None:
    got, want = logits("interpret"), logits("reference")
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    # Rounding to bfloat16 may choose another expert here and there.
    assert np.median(error) < 0.05 and error.max() < 0.5
    assert np.mean(got.argmax(1) == want.argmax(1)) >= 0.75


@pytest.mark.parametrize(("platform", "bucket"), [
    ("cuda", Bucket(1, 1, "greedy")),
    pytest.param("rocm", Bucket(512, 1, prefill=True, chunk=True), marks=pytest.mark.slow),
])  # fmt: skip
def test_programs_of_a_gpu(monkeypatch: pytest.MonkeyPatch, platform: Any, bucket: Bucket) -> None:
    """Every kernel takes the sizes: no program of a server raises as it is traced."""
    monkeypatch.setattr(backend_lib, "platform", lambda: platform)
    file = model_file.open_model("nano")
    cfg, run = file.model_config, local.runtime_config(local.Options(max_ctx=512), platform)
    assert bucket.rows in (*run.row_buckets, *run.prefill_buckets)
    p = weights.abstract(
        cfg, run, {s.name: weights.form_of(file.tensors[s.name], run, True) for s in file.specs()}
    )
    fn = functools.partial(step.run_step, cfg=cfg, run=run, bucket=bucket)
    words = jax.ShapeDtypeStruct((bucket.words,), jnp.int32)
    lanes = jax.eval_shape(lambda: sampling.init_lanes(run))
    traced = jax.jit(fn).trace(p, cache_lib.abstract(cfg, run), lanes, words)
    assert "experts_up_mxfp4" in str(traced.jaxpr)


@pytest.mark.parametrize("format", ["q8_0", "rocmfp4", "q4_k", "hf_fp8_e4m3_block128", None])
def test_products_of_a_few_rows_of_weights(format: str | None) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 256)), jnp.bfloat16)
    if format is None:
        w: Any = jnp.asarray(rng.standard_normal((2, 4, 256)), jnp.float32)
    else:
        w = kernel_timing.random_weights(format, (2,), 4, 256)
    got = dense.dense(x, w, layer=1, backend="interpret", out_dtype=jnp.float32)
    want = dense.reference(x, w, layer=1, out_dtype=jnp.float32)
    assert got.shape == (3, 4)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-2 * float(jnp.abs(want).max()))
