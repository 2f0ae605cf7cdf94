"""Training in reduced form: the loss falls, nothing overflows, a resumed run is the same run."""

from __future__ import annotations

import functools
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import nano_corpus, nano_model, nano_tasks, plot, train_nano
from ds4jax import chat
from pallas_kernels import rounding
from tests import little_effort, text_tools, tiny

CFG = tiny.config((0, 4), vocab_size=300, num_experts=4, moe_intermediate_size=32)
RECIPE = replace(
    train_nano.Recipe(), steps=24, batch=4, length=130, warmup=3, dtype="float32", remat=False,
    learning_rate=1e-2, balance_rate=2e-2, mix=(0.5, 0.25, 0.25),
)  # fmt: skip
PER_CALL = 4
Streams = dict[str, tuple[Any, Any]]


@functools.cache
def streams() -> Streams:
    """Text that can be learnt quickly: lines of a fixed alphabet, and quiet prompts."""
    rng = np.random.default_rng(0)
    words = [rng.integers(3, 300, 6) for _ in range(12)]

    def documents(count: int, quiet: bool) -> tuple[Any, Any]:
        out = []
        for _ in range(count):
            body = np.concatenate([words[i] for i in rng.integers(0, 12, 30)])
            ids = np.concatenate([[0], body, [1]]).astype(np.uint16)
            if quiet:
                ids[: len(ids) // 2] |= train_nano.QUIET
            out.append(ids)
        stream = nano_corpus.Stream.of(out)
        return stream.ids, stream.starts

    return {n: documents(8, quiet="chat" in n) for n in train_nano.STREAMS}


@functools.cache
def program() -> Any:
    """The training program, compiled once for all tests."""
    state = train_nano.fresh(CFG, RECIPE, train_nano.counts_of(streams(), CFG.vocab_size))
    step = functools.partial(train_nano.run_steps, count=PER_CALL, cfg=CFG, recipe=RECIPE)
    data, control = train_nano.on_device(streams()), train_nano.training(RECIPE)
    return little_effort.jit(step).lower(state, data, control).compile()


def run(**kwargs: Any) -> tuple[train_nano.State, list[dict[str, Any]]]:
    """Train; returns the state and everything reported."""
    seen: list[dict[str, Any]] = []
    state = train_nano.train(
        streams(), CFG, RECIPE, per_call=PER_CALL, evaluate_every=12, program=program(),
        report=seen.append, **kwargs,
    )  # fmt: skip
    return state, seen


def test_loss_falls_and_stays_finite() -> None:
    state, seen = run()
    assert seen[-1]["step"] == RECIPE.steps == int(state.step)
    assert seen[-1]["loss"] < 0.75 * seen[0]["loss"]
    assert seen[-1]["held_text"] < 0.75 * seen[0]["loss"] and np.isfinite(seen[-1]["held_chat"])
    assert all(np.isfinite(s["grad"]) and np.isfinite(s["index"]) for s in seen)
    assert all(bool(jnp.isfinite(w).all()) for w in state.weights.values())
    before = train_nano.fresh(CFG, RECIPE, train_nano.counts_of(streams(), 300)).weights
    still = {k for k, w in before.items() if bool((w == state.weights[k]).all())}
    assert still == {"layers.0.ffn.gate.tid2eid"}
    load = np.array(seen[-1]["load"])
    assert load.shape == (2, 4) and np.allclose(load.sum(axis=1), 1, atol=1e-3)


def test_an_interrupted_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, _ = run()
    file = tmp_path / "state.npz"
    run(checkpoint=file, checkpoint_every=4, stop_after=12)
    resumed, seen = run(checkpoint=file)
    assert seen[0]["step"] == 16
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        assert np.array_equal(a, b)
    with pytest.raises(ValueError, match="made with"):
        train_nano.load_checkpoint(file, whole, replace(RECIPE, seed=1))
    longer = train_nano.load_checkpoint(file, whole, replace(RECIPE, steps=99))
    assert int(longer.step) == 24


def test_judging_changes_nothing() -> None:
    state = train_nano.fresh(CFG, RECIPE, train_nano.counts_of(streams(), 300))
    data, control = train_nano.on_device(streams()), train_nano.judging(RECIPE, "held_text")
    after, info = program()(state, data, control)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        assert np.array_equal(a, b)
    again = program()(after, data, control)[1]
    assert np.array_equal(info["nll"], again["nll"])


def test_the_optimiser_holds_every_weight() -> None:
    learned = train_nano._learned(nano_model.initial(CFG, np.ones(300), 0))
    stacks, flat = train_nano.matrices(learned), train_nano.vectors(learned)
    assert {len(x.shape) for x in stacks.values()} == {3} and flat.keys() == {"decay", "plain"}
    back = train_nano.by_name(stacks, flat, learned)
    assert back.keys() == learned.keys()
    assert all(np.array_equal(back[k], learned[k]) for k in learned)


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8)])
def test_matrices_are_updated_orthogonally(shape: tuple[int, ...]) -> None:
    g = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    got = np.asarray(train_nano.orthogonal(jnp.asarray(g)))
    u, _, v = np.linalg.svd(g, full_matrices=False)
    size = np.linalg.svd(got, compute_uv=False)
    assert size.min() > 0.6 and size.max() < 1.3
    assert np.vdot(got, u @ v) > 0.95 * np.linalg.norm(got) * np.linalg.norm(u @ v)


def test_hash_tables_share_the_load() -> None:
    counts = 1e4 / np.arange(1.0, 301.0)  # as skewed as text
    table = nano_model.hash_table(counts, 4, 2, 0)
    assert table.shape == (300, 2) and (table[:, 0] != table[:, 1]).all()
    load = np.bincount(table.reshape(-1), np.repeat(counts, 2), 4)
    assert load.max() < 1.1 * load.min()


def test_experts_are_rounded_with_a_straight_gradient() -> None:
    weights = {k: v for k, v in nano_model.initial(CFG, np.ones(300), 0).items()}
    name = "layers.1.ffn.experts.w1"
    got = nano_model.fp4_experts(weights)
    assert np.allclose(got[name], rounding.fp4_round_trip(weights[name]), atol=1e-7)
    assert not np.array_equal(got[name], weights[name])
    assert got["embed"] is weights["embed"]
    grad = jax.grad(lambda w: jnp.sum(nano_model.fp4_experts({name: w})[name]))(weights[name])
    assert np.array_equal(grad, np.ones_like(grad))


def test_weights_survive_files_of_limited_size(tmp_path: Path) -> None:
    weights = nano_model.initial(CFG, np.ones(300), 0)
    paths = nano_model.save_weights(tmp_path, weights, limit=40_000)
    assert len(paths) > 1
    read = nano_model.load_weights(tmp_path)
    assert all(np.array_equal(read[k], weights[k]) for k in weights)
    with pytest.raises(FileNotFoundError, match="train first"):
        nano_model.load_weights(tmp_path / "nothing")


def test_shares_choose_the_tasks() -> None:
    rng = random.Random(0)
    shares = {"sort": 1.0, "count": 3.0}
    kinds = [nano_tasks.draw(rng, held_out=False, shares=shares).kind for _ in range(400)]
    assert set(kinds) == {"sort", "count"} and 60 < kinds.count("sort") < 140


def test_tasks_know_their_answers_and_keep_the_held_out_apart() -> None:
    rng = random.Random(0)
    seen: dict[str, int] = {}
    for _ in range(600):
        task = nano_tasks.draw(rng, held_out=False)
        seen[task.kind] = seen.get(task.kind, 0) + 1
        assert task.kind in nano_tasks.OPEN_KINDS or not task.held_out
        if task.kind == "returns":
            code = next(x for x in task.question.split("\n\n") if x.startswith("def "))
            found = re.search(r"What (?:does|is) (.+?)(?: return)?\?", task.question)
            assert found
            call = found[1]
            space: dict[str, Any] = {}
            exec(code, space)
            assert repr(eval(call, space)) == task.answer
        if task.kind in ("sum", "difference", "product"):
            left, right = task.answer.split(" = ")
            assert eval(left) == int(right)
    assert set(seen) >= {"sum", "sort", "returns", "tool call", "tool answer", "write"}
    assert all(nano_tasks.draw(rng, held_out=True, name="sum").held_out for _ in range(5))


def test_generated_functions_are_python() -> None:
    rng = random.Random(0)
    for which in range(len(nano_tasks.FUNCTIONS)):
        _, code = nano_tasks.function_source(rng, which)
        space: dict[str, Any] = {}
        exec(code, space)
    assert space


@pytest.mark.parametrize("thinking", [False, True])
def test_a_document_is_the_rendered_conversation(thinking: bool) -> None:
    tok = text_tools.toy_tokenizer()
    rng = random.Random(3)
    for _ in range(20):
        task = nano_tasks.draw(rng, held_out=False)
        prompt = chat.render(task.request(thinking=thinking), nano_corpus.PROFILE)
        answer = nano_corpus.answer_pieces(task, thinking)
        text = "".join(p.text for p in answer)
        assert text.endswith("<｜end▁of▁sentence｜>")
        assert ("</think>" in text) == thinking
        assert task.call is not None or task.answer in text
        ids = tok.encode_pieces([*prompt.pieces, *answer])
        assert ids[0] == tok.markers.bos and ids[-1] == tok.markers.eos


def test_line_ends_are_split_without_changing_the_text() -> None:
    files = nano_corpus.sources()[:3]
    tok = nano_corpus.train_tokenizer((s.text for s in files), 600)
    ends = nano_corpus.LineEnds(tok)
    assert ends.parts
    ids = np.array(tok.encode(files[0].text, markers=False), np.uint16)
    split = ends.split(ids, random.Random(0), 1.0, 0.5)
    assert len(split) > len(ids)
    assert tok.decode(split.tolist()) == tok.decode(ids.tolist()) == files[0].text
    digits = [i for i in range(tok.vocab_size) if i not in tok.specials.values()
              and sum(c.isdigit() for c in tok.decode([i])) > 1]  # fmt: skip
    assert digits == []


def test_the_loss_curve_is_drawn(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.0, "held_text": 4.5}\n')
    svg = plot.loss_curve(log)
    assert svg.startswith("<svg") and "held-out text" in svg and svg.rstrip().endswith("</svg>")
