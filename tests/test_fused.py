"""The step on kernels: the reference's results, the same bits however rows are batched, and a
program without copies of weights, without transfers, and with few launches."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax import cache as cache_lib
from ds4jax import fused, model, params, step, synthetic, tensors, weights
from ds4jax.config import ModelConfig, RuntimeConfig
from ds4jax.step import Bucket, LaneRows
from pallas_kernels import backend as backend_lib
from pallas_kernels import packing
from tests import little_effort, tiny

TYPES: dict[Any, str] = {
    "experts_gate_up": "rocmfp2_s40", "experts_down": "rocmfp3", "attention": "rocmfp4",
    "shared": "q8_0", "head": "q8_0",
}  # fmt: skip
SLOTS, BUCKET = 3, 24


def config(ratios: tuple[int, ...] = (4, 128, 4, 128), num_hash_layers: int = 1) -> ModelConfig:
    """Sizes that the kernels take."""
    return tiny.config(
        ratios, hidden_size=64, q_lora_rank=32, index_num_heads=16, num_experts=16,
        moe_intermediate_size=32, num_experts_per_tok=3,
        num_hash_layers=num_hash_layers,
    )  # fmt: skip


def runtime(backend: Any, **kwargs: Any) -> RuntimeConfig:
    """A run of three lanes in bfloat16."""
    base: dict[str, Any] = dict(
        dtype="bfloat16", max_ctx=256, num_slots=SLOTS, row_buckets=(8,), prefill_buckets=(BUCKET,)
    )  # fmt: skip
    return RuntimeConfig(backend=backend, **(base | kwargs))


@functools.cache
def made(cfg: ModelConfig, backend: Any) -> params.Params:
    """Random weights: the same ones for every backend, as stacks of layers that repeat."""
    return synthetic.init_random(cfg, jax.random.key(0), runtime(backend), types=TYPES, scan=True)


@functools.cache
def program(cfg: ModelConfig, backend: Any, bucket: Bucket) -> Any:
    """The compiled model, all rows emitted."""
    run = runtime(backend)

    def fn(p: Any, cache: Any, words: Any) -> Any:
        plan = step.unpack_plan(bucket, words)
        return model.forward(p, cache, plan, cfg=cfg, run=run, chunk=bucket.chunk)

    shapes = made(cfg, backend), cache_lib.abstract(cfg, run)
    words = jax.ShapeDtypeStruct((bucket.words,), jnp.int32)
    return little_effort.jit(fn, donate_argnums=1).lower(*shapes, words).compile()


def logits(
    cfg: ModelConfig, backend: Any, steps: Sequence[tuple[Bucket, list[LaneRows]]]
) -> dict[tuple[int, int], Any]:
    """Logits of every row by (slot, position)."""
    cache = cache_lib.init(cfg, runtime(backend))
    out = {}
    for bucket, lanes in steps:
        words = step.pack_plan(bucket, lanes, SLOTS)
        got: Any
        cache, got = program(cfg, backend, bucket)(made(cfg, backend), cache, words)
        for e in range(int(words[-1])):
            out[int(got.slot[e]), int(got.pos[e])] = np.asarray(got.logits[e])
    return out


def lane(slot: int, start: int, ids: Any, page: int) -> LaneRows:
    """Rows of one lane, all emitted."""
    return LaneRows(slot, start, np.asarray(ids, np.int32), [page, page + SLOTS], "all")


IDS, OTHER = (np.random.default_rng(s).integers(0, 64, 40).astype(np.int32) for s in (1, 2))


@pytest.mark.timeout(900)
def test_step_agrees_with_the_reference_and_keeps_bits_in_any_batch() -> None:
    # Experts by token: rounding cannot make a row choose other ones than the reference.
    cfg = config(num_hash_layers=4)
    assert max(g.count for g in made(cfg, "interpret").layout) > 1
    chunk = Bucket(BUCKET, BUCKET, prefill=True, chunk=True)
    count = 22
    whole = logits(cfg, "interpret", [(chunk, [lane(0, 0, IDS[:count], 0)])])
    pieces = logits(
        cfg, "interpret",
        [
            (chunk, [lane(2, 0, IDS[:7], 1), lane(0, 0, OTHER[:9], 2)]),
            (
                chunk,
                [lane(1, 0, OTHER[:4], 0), lane(0, 9, OTHER[9:12], 2), lane(2, 7, IDS[7:8], 1)],
            ),
            (chunk, [lane(2, 8, IDS[8:count], 1), lane(1, 4, OTHER[4:5], 0)]),
        ],
    )  # fmt: skip
    for i in range(count):
        np.testing.assert_array_equal(whole[0, i], pieces[2, i], err_msg=f"position {i}")
    for i in range(5):
        np.testing.assert_array_equal(pieces[0, i], pieces[1, i], err_msg=f"position {i}")
    right = logits(cfg, "reference", [(Bucket(BUCKET, BUCKET), [lane(0, 0, IDS[:count], 0)])])
    errors = [
        float(np.linalg.norm(whole[0, i] - right[0, i]) / np.linalg.norm(right[0, i]))
        for i in range(count)
    ]
    assert max(errors) < 0.05, errors


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_decoding_gives_the_bits_of_prefill() -> None:
    cfg = config((0, 4, 128, 4, 128))
    chunk, few = Bucket(BUCKET, BUCKET, prefill=True, chunk=True), Bucket(8, 8)
    whole = logits(
        cfg, "interpret",
        [(chunk, [lane(0, 0, IDS[:20], 0)]), (chunk, [lane(0, 20, IDS[20:], 0)])],
    )  # fmt: skip
    single = logits(
        cfg, "interpret",
        [
            (few, [lane(1, i, IDS[i : i + 1], 1), lane(2, i, OTHER[i : i + 1], 2)])
            for i in range(40)
        ],
    )  # fmt: skip
    for i in range(40):
        np.testing.assert_array_equal(whole[0, i], single[1, i], err_msg=f"position {i}")


# ---- the program that a GPU gets, inspected without one ----------------------------------------


def lowered(monkeypatch: Any, platform: str, cfg: ModelConfig, run: RuntimeConfig) -> Any:
    """The step traced and lowered for a GPU: (traced, module text)."""
    monkeypatch.setattr(backend_lib, "platform", lambda: platform)
    p = weights.abstract(cfg, run, synthetic.forms(cfg, run, TYPES))
    cache = cache_lib.abstract(cfg, run)
    bucket = Bucket(8, 8)
    program.cache_clear()

    def fn(p: Any, cache: Any, words: Any) -> Any:
        plan = step.unpack_plan(bucket, words)
        return model.forward(p, cache, plan, cfg=cfg, run=run)

    words = jax.ShapeDtypeStruct((bucket.words,), jnp.int32)
    traced = jax.jit(fn, donate_argnums=1).trace(p, cache, words)
    return traced, traced.lower(lowering_platforms=(platform,)).as_text()


def calls(jaxpr: Any) -> Iterator[str]:
    """Names of the Pallas calls of a program, a scan's body once."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield str(eqn.params.get("name") or eqn.params["name_and_src_info"].name)
            continue
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from calls(inner)


@pytest.mark.parametrize("platform", ["rocm", "cuda"])
def test_program_for_a_gpu(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    cfg = config(num_hash_layers=0)
    traced, text = lowered(monkeypatch, platform, cfg, runtime("triton"))
    found = Counter(calls(traced.jaxpr.jaxpr))
    names = {"streams_mix", "streams_read", "qkv_inputs", "qkv_heads", "router"}
    assert names <= set(found)
    # One scan over pairs of layers; before it the streams' one, behind it three of the head.
    assert sum(found.values()) - 4 <= 20 + 18, found
    assert not re.search(r"infeed|outfeed|stablehlo\.(send|recv)|callback|@HostTransfer", text)
    # Every array of the cache comes back in its own buffer.
    arguments = text[text.index("@main(") : text.index("{\n", text.index("@main("))]
    aliased = arguments.count("tf.aliasing_output") + arguments.count("jax.buffer_donor")
    assert aliased == len(cache_lib.shapes(cfg, runtime("triton")))


def test_backends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def table(**kwargs: Any) -> Any:
        return fused.backends(runtime(**kwargs))

    with pytest.raises(NotImplementedError, match="no triton backend on cpu"):
        table(backend="triton")
    monkeypatch.setattr(backend_lib, "platform", lambda: "rocm")
    every = table(backend="triton", op_backends=(("router", "reference"),))
    assert every["dense"] == "triton" and every["router"] == "reference"
    assert any(note.startswith("router: reference (by name)") for note in every.notes)
    with pytest.raises(ValueError, match="no such operation: rooter"):
        table(backend="triton", op_backends=(("rooter", "reference"),))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"dtype": "float32"}, "the kernels compute in bfloat16 with plain numerics"),
        ({"numerics": "official"}, "not bfloat16 with official"),
    ],
)
def test_what_has_no_kernel_says_so(kwargs: dict[str, Any], match: str) -> None:
    cfg, run = config(), runtime("interpret", **kwargs)
    p = weights.abstract(cfg, run, synthetic.forms(cfg, run, TYPES))
    words = jax.ShapeDtypeStruct((Bucket(8, 8).words,), jnp.int32)

    def fn(p: Any, cache: Any, words: Any) -> Any:
        return model.forward(p, cache, step.unpack_plan(Bucket(8, 8), words), cfg=cfg, run=run)

    with pytest.raises(NotImplementedError, match=match):
        jax.eval_shape(fn, p, cache_lib.abstract(cfg, run), words)


def test_gate_and_up_of_two_formats_are_refused() -> None:
    cfg, run = config(), runtime("interpret")
    forms = synthetic.forms(cfg, run, TYPES)
    forms["layers.1.ffn.experts.w3"] = weights.Form("rocmfp4", "bfloat16")
    with pytest.raises(NotImplementedError, match="gate and up in one format, layer 1 has"):
        weights.abstract(cfg, run, forms)


def test_experts_of_iq2_xxs_run_on_kernels() -> None:
    cfg = config((4,), num_hash_layers=0)
    cfg = dataclasses.replace(cfg, hidden_size=256, moe_intermediate_size=256)
    run = runtime("interpret")
    types = TYPES | {"experts_gate_up": "iq2_xxs", "experts_down": "q2_k"}
    p = weights.abstract(cfg, run, synthetic.forms(cfg, run, types))
    words = jax.ShapeDtypeStruct((Bucket(8, 8).words,), jnp.int32)

    def fn(p: Any, cache: Any, words: Any) -> Any:
        return model.forward(p, cache, step.unpack_plan(Bucket(8, 8), words), cfg=cfg, run=run)

    traced = str(jax.make_jaxpr(fn)(p, cache_lib.abstract(cfg, run), words))
    assert "experts_up_iq2_xxs" in traced
    assert "experts_down_q2_k" in traced


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("format", ["rocmfp2_s40", "iq2_xxs"])
def test_gate_and_up_become_one_matrix(format: str, on_host: bool) -> None:
    cfg, run = dataclasses.replace(config(), hidden_size=256), runtime("interpret")
    forms = synthetic.forms(cfg, run, TYPES | {"experts_gate_up": format})
    chosen = [s for s in tensors.specs(cfg) if s.key in params.JOINED and s.layer == 1]
    builder = weights.Builder(cfg, run, chosen, forms, scan=False, on_host=on_host)
    parts = []
    for spec in chosen:
        bytes_ = packing.row_bytes(format, cfg.hidden_size)
        data = np.random.default_rng(len(parts)).integers(
            0, 256, (*spec.shape[:-1], bytes_), dtype=np.uint8
        )
        for first in (0, 8):  # in two pieces of experts
            builder.put_bytes(spec, data[first : first + 8], {}, first)
        parts.append(packing.pack(format, data))
    [joined] = [v for k, v in builder.buffers.items() if k[2] == "ffn.experts.w13"]
    order = [params.JOINED[s.key] for s in chosen]
    want = packing.interleave(*(parts[order.index(i)] for i in (0, 1)))
    for name in ("codes", "scales"):
        np.testing.assert_array_equal(getattr(joined, name)[0], getattr(want, name))
