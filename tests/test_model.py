"""Forms of the model that must agree: scanned and unrolled layers, rows alone and together."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax import cache as cache_lib
from ds4jax import functional, model
from ds4jax import params as params_lib
from ds4jax.config import RuntimeConfig
from ds4jax.params import Params
from tests import little_effort, tiny

RATIOS = (4, 128, 4, 128)


def restack(cfg: Any, params: Params) -> Params:
    """The same weights with repeated layers stacked."""
    layers = [w for _, w in params.layers()]
    layout = params_lib.group_layers(cfg, scan=True)
    groups = tuple(
        tuple(
            {
                k: jnp.asarray(
                    np.stack([layers[g.first + r * len(g.unit) + u][k] for r in range(g.count)])
                )
                for k in layers[g.first + u]
            }
            for u in range(len(g.unit))
        )
        for g in layout
    )
    return params.replace(groups=groups, layout=layout)  # type: ignore[attr-defined]


def test_grouping_finds_the_longest_repeat() -> None:
    flash = tiny.config((0, 0, *(4, 128) * 20, 4), num_hash_layers=3)
    got = [(g.first, len(g.unit), g.count) for g in params_lib.group_layers(flash, scan=True)]
    assert got == [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 2, 20)]
    unrolled = params_lib.group_layers(flash, scan=False)
    assert [(g.first, g.count) for g in unrolled] == [(i, 1) for i in range(43)]
    types: list[dict[str, str]] = [{"attn.wq_a": "q8_0"} for _ in range(43)]
    types[20]["attn.wq_a"] = "f32"
    cut = params_lib.group_layers(flash, types, scan=True)
    assert max(g.count for g in cut) == 11 and sum(len(g.unit) * g.count for g in cut) == 43


@pytest.mark.parametrize("ratios", [(4,), (128, 4, 0, 4, 4), (0, 0, 0), (128, 128, 128, 4)])
def test_every_layer_is_in_one_group(ratios: tuple[int, ...]) -> None:
    cfg = tiny.config(ratios, num_hash_layers=1)
    infos = params_lib.layer_infos(cfg)
    for scan in (False, True):
        seen = [
            params_lib.repeat_info(g, info, r)
            for g in params_lib.group_layers(cfg, scan=scan)
            for r in range(g.count)
            for info in g.unit
        ]
        assert tuple(seen) == infos


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True])
def test_scanned_layers_agree_with_unrolled_ones(batched: bool) -> None:
    cfg = tiny.config(RATIOS, num_hash_layers=0)
    params = tiny.params(cfg, max_ctx=256)
    stacked = restack(cfg, params)
    assert [g.count for g in stacked.layout] != [1] * len(RATIOS)
    run = RuntimeConfig(max_ctx=256, num_slots=1)
    tokens = np.random.default_rng(0).integers(0, 64, 136).astype(np.int32)
    index = jnp.arange(136, dtype=jnp.int32)
    plan = functional._rows(jnp.zeros_like(index), index, jnp.asarray(tokens), index, index[::-1])

    @jax.jit
    def step(p: Params) -> Any:
        return model.forward(
            p, functional.init(cfg, run), plan, cfg=cfg, run=run, batched=batched, chunk=batched
        )

    (cache_a, a), (cache_b, b) = step(params), step(stacked)
    scale = np.abs(np.asarray(a.logits)).max()
    assert np.abs(np.asarray(a.logits - b.logits)).max() < 1e-4 * scale
    for field in dataclasses.fields(cache_lib.Cache):
        x, y = (np.asarray(getattr(c, field.name)) for c in (cache_a, cache_b))
        rows = x if field.name in ("table", "length", "tokens") else None
        if rows is not None:
            assert np.array_equal(x, y), field.name


def test_rows_together_agree_with_rows_alone() -> None:
    """The batched form (what kernels compute) against the exact one.

    Chunks longer than the rings, several lanes in a step, and decode after them.
    """
    cfg = tiny.config(RATIOS, num_hash_layers=0)
    params = restack(cfg, tiny.params(cfg, max_ctx=512))
    assert [g.count for g in params.layout] == [2]
    run = RuntimeConfig(max_ctx=512, num_slots=3)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 64, (3, 320)).astype(np.int32)

    def plan(parts: list[tuple[int, int, int]], padded: int = 0) -> model.Plan:
        slot = np.concatenate([np.full(n, s) for s, _, n in parts]).astype(np.int32)
        pos = np.concatenate([np.arange(a, a + n) for _, a, n in parts]).astype(np.int32)
        index = np.concatenate([np.arange(n) for _, _, n in parts]).astype(np.int32)
        after = np.concatenate([n - 1 - np.arange(n) for _, _, n in parts]).astype(np.int32)
        fill = max(0, padded - len(slot))
        count = jnp.int32(len(slot))
        columns = (slot, pos, tokens[slot, pos], index, after)
        empty = np.zeros((5, fill), np.int32)
        empty[0] = run.num_slots  # the trash slot
        arrays = (np.append(x, e) for x, e in zip(columns, empty, strict=True))
        made = functional._rows(*(jnp.asarray(x, jnp.int32) for x in arrays))
        return made.replace(num_rows=count, num_emit=count)

    def forward(cache: Any, rows: model.Plan, batched: bool, chunk: bool) -> Any:
        return model.forward(params, cache, rows, cfg=cfg, run=run, batched=batched, chunk=chunk)

    step = little_effort.jit(forward, static_argnames=("batched", "chunk"))
    steps = [
        ([(1, 0, 129), (0, 0, 171)], True),
        ([(0, 171, 100), (2, 0, 200)], True),
        ([(0, 271, 1), (1, 129, 1), (2, 200, 1)], False),
        ([(1, 130, 1), (2, 201, 1), (0, 272, 1)], False),
    ]
    exact, together = functional.init(cfg, run), functional.init(cfg, run)
    for parts, chunk in steps:
        exact, a = step(exact, plan(parts, padded=300), batched=False, chunk=False)
        together, b = step(together, plan(parts), batched=True, chunk=chunk)
        error = np.abs(np.asarray(a.logits)[: len(b.logits)] - np.asarray(b.logits)).max(-1)
        assert error.max() < 1e-3, (parts, int(error.argmax()))
