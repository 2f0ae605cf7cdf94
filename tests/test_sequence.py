"""The differentiable form of the model equals the serving form, and its gradients are right."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ds4jax
from ds4jax import model, sequence
from ds4jax.config import RuntimeConfig
from pallas_kernels import indexer
from tests import little_effort, tiny

RUN = RuntimeConfig(max_ctx=384, num_slots=1)


@functools.cache
def server(run: RuntimeConfig) -> Any:
    """The form that serves requests, for the default model."""
    return jax.jit(functools.partial(ds4jax.prefill, cfg=tiny.config(), run=run))


def served(tokens: jax.Array, run: RuntimeConfig = RUN) -> jax.Array:
    """Logits of one sequence by the form that serves requests."""
    cfg, params = tiny.model()
    if tokens.shape == (24,):
        return tiny.prefill()(params, ds4jax.init(cfg, tiny.SERVED), tokens, slot=0, start=0)[1]
    return server(run)(params, ds4jax.init(cfg, run), tokens)[1]


@pytest.mark.parametrize("length", [24, pytest.param(261, marks=pytest.mark.slow)])
def test_equals_the_serving_form(length: int) -> None:
    cfg, params = tiny.model()
    rng = np.random.default_rng(length)
    tokens = jnp.asarray(rng.integers(0, cfg.vocab_size, (2, length)), jnp.int32)
    program = little_effort.jit(lambda p, t: model.sequences(p, t, cfg=cfg, run=RUN))
    got, _ = program(params, tokens)
    for lane in range(2):
        want = served(tokens[lane])
        assert np.abs(got[lane] - want).max() < 2e-4 * np.abs(want).max()
        assert np.array_equal(jnp.argmax(got[lane], -1), jnp.argmax(want, -1))


@pytest.mark.slow
def test_rounded_numerics_agree_too() -> None:
    cfg, params = tiny.model()
    run = RuntimeConfig(max_ctx=384, num_slots=1, numerics="kv-fp8")
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, 64, (1, 140)), jnp.int32)
    got, _ = model.sequences(params, tokens, cfg=cfg, run=run)
    want, plain = served(tokens[0], run), served(tokens[0])
    scale = np.abs(want).max()
    assert np.abs(got[0] - want).max() < np.abs(plain - want).max()
    assert np.median(np.abs(got[0] - want)) < 1e-5 * scale


def test_selection_is_the_indexers() -> None:
    rng = np.random.default_rng(1)
    scores = jnp.asarray(rng.integers(0, 6, (1, 40, 10)), jnp.float32)  # many ties
    seen = sequence.visible(40, 10, 4)
    mask = np.asarray(sequence.select(scores, seen, top_k=3)[0])
    count = jnp.sum(seen, axis=-1, dtype=jnp.int32)
    rows = np.asarray(indexer.select(jnp.where(seen, scores[0], -jnp.inf), count, top_k=3))
    for t in range(40):
        assert np.flatnonzero(mask[t]).tolist() == rows[t][rows[t] != indexer.NONE].tolist()


def test_gradients_match_finite_differences() -> None:
    # Everything is chosen: a step cannot change the choice, the loss is smooth.
    cfg = tiny.config((4, 128), index_topk=64, num_experts_per_tok=4)
    params = tiny.params(cfg)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 64, (1, 140)), jnp.int32)

    def loss(p: Any) -> jax.Array:
        logits, _ = model.sequences(p, tokens, cfg=cfg, run=RUN, remat=True)
        return -jnp.mean(jax.nn.log_softmax(logits[0])[jnp.arange(139), tokens[0, 1:]][None])

    def moved(p: Any, key: str, layer: int, by: jax.Array) -> Any:
        groups = list(p.groups)
        groups[layer] = ({**groups[layer][0], key: groups[layer][0][key] + by},)
        return p.replace(groups=tuple(groups))

    program = little_effort.jit(jax.value_and_grad(loss, allow_int=True))
    _, grads = program(params)
    for layer, key in (
        (0, "attn.wkv"), (0, "attn.wq_a"), (0, "attn.compressor.wgate"), (1, "attn.compressor.ape"),
        (1, "attn.attn_sink"), (1, "ffn.experts.w2"), (0, "hc_ffn_fn"), (1, "ffn.gate"),
    ):  # fmt: skip
        g = np.asarray(grads.groups[layer][0][key])
        # Along the gradient, so that the difference stands clear of rounding.
        step = jnp.asarray(g / np.sqrt((g * g).sum()) * 1e-2, jnp.float32)
        up, down = (program(moved(params, key, layer, by))[0] for by in (step, -step))
        want = float(np.sqrt((g * g).sum()) * 2e-2)
        assert want > 1e-6, key
        assert abs(float(up - down) - want) < 0.05 * want + 2e-6, key


def test_the_indexer_learns_from_attention_alone() -> None:
    cfg = tiny.config((128, 4))
    params = tiny.params(cfg)
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, 64, (2, 140)), jnp.int32)

    def index_loss(p: Any) -> jax.Array:
        names = frozenset({"L1.index_loss"})
        _, got = model.sequences(p, tokens, cfg=cfg, run=RUN, capture=names)
        return jnp.mean(got["L1.index_loss"])

    program = little_effort.jit(jax.value_and_grad(index_loss, allow_int=True))
    before, grads = program(params)
    grads = jax.tree.map(np.asarray, grads)
    for layer, (weights,) in enumerate(grads.groups):
        for key, g in weights.items():
            if g.dtype != np.float32:
                continue
            own = key.startswith("attn.indexer.")
            assert bool((g != 0).any()) == own, (layer, key)

    def moved(p: Any, g: Any) -> Any:
        if g.dtype != np.float32:
            return p
        return jnp.asarray(np.asarray(p) - np.float32(0.05) * g / (np.abs(g).max() + 1e-9))

    step = jax.tree.map(moved, params, grads)
    assert program(step)[0] < before


def test_another_backend_is_refused() -> None:
    cfg, params = tiny.model()
    run = RuntimeConfig(backend="interpret")
    with pytest.raises(ValueError, match="reference"):
        model.sequences(params, jnp.zeros((1, 8), jnp.int32), cfg=cfg, run=run)
