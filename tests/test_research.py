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
from tests import little_effort, tiny


def test_the_documented_examples_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "jit", little_effort.jit)
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
    step, run = tiny.prefill(), tiny.SERVED
    one = little_effort.jit(functools.partial(ds4jax.decode, cfg=cfg, run=run))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, 24), jnp.int32)
    cache, whole, _ = step(params, ds4jax.init(cfg, run), tokens, slot=1, start=0)
    assert int(cache.length[1]) == 24
    # Two programs round differently; one of them gives the same bits whatever came before.
    single, alone = ds4jax.init(cfg, run), []
    for t in range(24):
        single, last, _ = one(params, single, tokens[t : t + 1], slot_B=jnp.array([1]))
        assert np.abs(last[0] - whole[t]).max() < 1e-5 * np.abs(whole).max(), t
        alone.append(last[0])
    # A smaller length truncates, as far as the rings reach back.
    first = 24 - run.max_drafts
    cut = single.replace(length=single.length.at[1].set(first))
    for t in range(first, 24):
        cut, last, _ = one(params, cut, tokens[t : t + 1], slot_B=jnp.array([1]))
        assert np.array_equal(last[0], alone[t]), t
    # So does starting at 0, whatever the slot has held.
    again, tail, _ = step(params, cut, tokens, slot=1, start=0)
    assert np.array_equal(tail, whole) and int(again.length[1]) == 24


def test_captures_have_rows_and_unknown_names_are_refused() -> None:
    cfg, params = tiny.model()
    run, tokens = tiny.SERVED, jnp.arange(24, dtype=jnp.int32)
    _, _, seen = tiny.prefill()(params, ds4jax.init(cfg, run), tokens, slot=0, start=0)
    assert {k: v.shape for k, v in seen.items()} == {
        "L1.index_ids": (24, cfg.index_topk),
        "L2.streams_out": (24, cfg.hc_mult, cfg.hidden_size),
        "L3.router_weights": (24, cfg.num_experts_per_tok),
    }
    with pytest.raises(ValueError, match=r"L9\.attn_out"):
        ds4jax.prefill(
            params, ds4jax.init(cfg, run), tokens, cfg=cfg, run=run, capture=("L9.attn_out",)
        )


def test_too_few_pages_are_refused() -> None:
    cfg, _ = tiny.model()
    with pytest.raises(ValueError, match="num_pages"):
        ds4jax.init(cfg, ds4jax.RuntimeConfig(max_ctx=256, num_slots=2, num_pages=3))
