"""Research use: the documented examples run, and the pure functions agree with themselves."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ds4jax
from tests import tiny


def test_the_documented_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "docs" / "research.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 2
    space: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/research.md", "exec"), space)
    cfg = space["cfg"]
    assert len(space["agreement"]) == cfg.num_layers
    assert space["agreement"][-1] == 1.0 and abs(space["kl"][-1]) < 1e-4
    assert max(space["kl"][:-1]) > 0.01
    assert len(space["change"]) == 4 and any(x != 0 for x in space["change"].values())
    assert "top-1 agreement" in capsys.readouterr().out


def test_prefill_decode_and_truncation_agree() -> None:
    cfg, params = tiny.model()
    run = ds4jax.RuntimeConfig(max_ctx=256, num_slots=2)
    step = jax.jit(functools.partial(ds4jax.prefill, cfg=cfg, run=run))
    one = jax.jit(functools.partial(ds4jax.decode, cfg=cfg, run=run))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, 24), jnp.int32)
    cache, whole, _ = step(params, ds4jax.init(cfg, run), tokens, slot=1)
    for t in range(20, 24):
        cut, _, _ = step(params, cache, tokens[:20], slot=1)
        for i in range(20, t + 1):
            cut, last, _ = one(params, cut, tokens[i : i + 1], slot_B=jnp.array([1]))
        assert np.array_equal(last[0], whole[t])
    # Truncation: positions from `start` on are fed again.
    again, tail, _ = step(params, cache, tokens, slot=1, start=0)
    assert np.array_equal(tail, whole) and int(again.length[1]) == 24


def test_captures_have_rows_and_unknown_names_are_refused() -> None:
    cfg, params = tiny.model()
    run = ds4jax.RuntimeConfig(max_ctx=128, num_slots=1)
    tokens = jnp.arange(9, dtype=jnp.int32)
    wanted = ("L1.index_ids", "L2.streams_out", "L3.router_weights")
    _, _, seen = ds4jax.prefill(
        params, ds4jax.init(cfg, run), tokens, cfg=cfg, run=run, capture=wanted
    )
    assert {k: v.shape for k, v in seen.items()} == {
        "L1.index_ids": (9, cfg.index_topk),
        "L2.streams_out": (9, cfg.hc_mult, cfg.hidden_size),
        "L3.router_weights": (9, cfg.num_experts_per_tok),
    }
    with pytest.raises(ValueError, match=r"L9\.attn_out"):
        ds4jax.prefill(
            params, ds4jax.init(cfg, run), tokens, cfg=cfg, run=run, capture=("L9.attn_out",)
        )


def test_too_few_pages_are_refused() -> None:
    cfg, _ = tiny.model()
    with pytest.raises(ValueError, match="num_pages"):
        ds4jax.init(cfg, ds4jax.RuntimeConfig(max_ctx=256, num_slots=2, num_pages=3))
