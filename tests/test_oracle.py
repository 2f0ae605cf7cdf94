"""The model against independent implementations: logits, activations, quantised files, primitives.

The reference data come from tiny checkpoints with random weights; three implementations agree on
them (float32, float64 written from the equations, and another engine). Programs are compiled once
per checkpoint and shared between tests.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from ds4jax import evaluate, functional, local, model_file, weights
from ds4jax.config import CpuWeights, ModelConfig, Numerics, RuntimeConfig
from ds4jax.evaluate import Evaluator, split
from ds4jax.params import Params
from pallas_kernels import hyper, rope, rounding
from tests import little_effort
from tests.conftest import DATA

F32 = npt.NDArray[np.float32]
ORACLE = DATA / "oracle"
MODELS = ("w16", "w128")

SPLITS = {
    "7, then one at a time": {"stepwise": 7},
    "one at a time": {"stepwise": 0},
    "131, then the rest": {"chunks": (131,)},
    "100,57,1,3,128,11": {"chunks": (100, 57, 1, 3, 128, 11)},
    "3,250,47": {"chunks": (3, 250, 47)},
}


@functools.cache
def reference(name: str) -> dict[str, npt.NDArray[Any]]:
    with np.load(ORACLE / name / "reference.npz") as data:
        return dict(data)


def run_config(numerics: Numerics = "plain") -> RuntimeConfig:
    """What the commands run on a CPU."""
    return local.runtime_config(local.Options(max_ctx=1024, numerics=numerics), "cpu")


@functools.cache
def evaluator(
    name: str,
    file: str = "",
    form: CpuWeights = "decoded",
    numerics: Numerics = "plain",
    scan: bool = False,
) -> Evaluator:
    """A checkpoint (or a file beside it), loaded; `scan`: with layers that repeat stacked."""
    run = run_config(numerics)
    cfg, params = weights.load(ORACLE / name / file, run, cpu_weights=form, scan=scan)
    if file:  # the files say another length; nothing else may differ, or programs are not shared
        own = evaluator(name).cfg
        cfg = dataclasses.replace(cfg, max_position_embeddings=own.max_position_embeddings)
        assert cfg == own
    return Evaluator(cfg, params, run)


def logits(e: Evaluator, ids: Sequence[int], pieces: Sequence[int] | None = None) -> F32:
    return np.concatenate(list(e.logits(ids, pieces)))


@functools.cache
def whole(name: str) -> F32:
    """Logits of a prefill in one piece."""
    return logits(evaluator(name), reference(name)["token_ids"])


def check(got: F32, expected: F32) -> None:
    """The tolerances that a correct float32 engine meets, with the worst place."""
    error = np.abs(got - expected)
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error.max() < 2e-3, f"{error.max()} at {worst}"
    assert error.mean() < 5e-5
    np.testing.assert_array_equal(got.argmax(-1), expected.argmax(-1))


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_whole_prefill(name: str) -> None:
    check(whole(name), reference(name)["logits"])


@pytest.mark.parametrize("pieces", SPLITS)
@pytest.mark.parametrize("name", MODELS)
def test_every_split_gives_the_same_bits(name: str, pieces: str) -> None:
    ids = reference(name)["token_ids"]
    sizes = split(len(ids), **SPLITS[pieces])
    assert sum(sizes) == len(ids)
    np.testing.assert_array_equal(logits(evaluator(name), ids, sizes), whole(name))


@pytest.mark.parametrize("name", MODELS)
def test_the_comparison_sees_a_wrong_token_far_back(name: str) -> None:
    """One other id at position 3 must be visible in the last logits."""
    ids = reference(name)["token_ids"].copy()
    ids[3] = (ids[3] + 1) % reference(name)["logits"].shape[1]
    got = logits(evaluator(name), ids)
    assert np.array_equal(got[:3], whole(name)[:3])
    assert np.abs(got[-1] - whole(name)[-1]).max() > 2e-3


def test_losses_are_those_of_the_logits() -> None:
    e = evaluator("w16")
    ids = np.random.default_rng(0).integers(0, e.cfg.vocab_size, 300)
    rows = logits(e, ids, [3, 297]).astype(np.float64)
    top = rows.max(-1)
    total = np.log(np.exp(rows - top[:, None]).sum(-1)) + top
    expected = (total - rows[np.arange(300), np.roll(ids, -1)])[:-1]
    got = e.losses(ids)
    assert got.shape == (299,) and got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


# Rounding turns a tiny difference at a boundary into a whole step: until the first such flip the
# logits agree tightly, afterwards only typical positions do.
@pytest.mark.parametrize(
    ("name", "numerics", "before"),
    [
        ("w16", "kv-fp8", 190),
        ("w16", "official", 190),
        pytest.param("w128", "kv-fp8", 190, marks=pytest.mark.slow),
        pytest.param("w128", "official", 190, marks=pytest.mark.slow),
    ],
)
def test_numerics_profiles(
    monkeypatch: pytest.MonkeyPatch, name: str, numerics: Numerics, before: int
) -> None:
    monkeypatch.setattr(evaluate, "_step", little_effort.evaluator_step())
    key = {"kv-fp8": "logits_kv_fp8", "official": "logits_official_sim"}[numerics]
    expected = reference(name)[key]
    ids = reference(name)["token_ids"][: len(expected)]
    got = logits(evaluator(name, numerics=numerics, scan=True), ids)
    error = np.abs(got - expected).max(-1)
    assert error[:before].max() < 1e-3
    assert np.median(error) < 2e-4
    assert (got.argmax(-1) == expected.argmax(-1)).mean() > 0.98
    distance = np.abs(reference(name)["logits"][: len(expected)] - expected).max(-1)
    assert np.median(distance) > 20 * np.median(error), "the profile changes nothing"


# -- quantised files -------------------------------------------------------------------------------

FILES = [(m, p.name) for m in MODELS for p in sorted((ORACLE / m).glob("model.*.gguf"))]


def exact(name: str, file: str) -> F32:
    """Logits that the decoded weights of a file give."""
    with np.load(ORACLE / name / file.replace("model.", "gguf_").replace(".gguf", ".npz")) as data:
        return np.asarray(data["logits_exact"])


def check_file(name: str, file: str, form: CpuWeights, count: int, scan: bool = False) -> None:
    expected = exact(name, file)[:count]
    ids = reference(name)["token_ids"][: len(expected)]
    check(logits(evaluator(name, file, form, scan=scan), ids), expected)


def test_all_files_are_found() -> None:
    assert len(FILES) == 9


@pytest.mark.parametrize(("name", "file"), FILES)
def test_decoded_weights_of_a_file(name: str, file: str) -> None:
    check_file(name, file, "decoded", 300)


@pytest.mark.parametrize("file", ["model.MXFP4_MOE.gguf", "model.Q4_0_ROCMFP4.gguf"])
def test_packed_weights(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.setattr(evaluate, "_step", little_effort.evaluator_step())
    check_file("w16", file, "packed", 140, scan=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file"), FILES)
def test_packed_weights_of_every_file(name: str, file: str) -> None:
    check_file(name, file, "packed", 140)


@pytest.mark.parametrize(("name", "file"), FILES)
def test_types_and_names_of_a_file(name: str, file: str) -> None:
    """The loader sees the type that the file's writer recorded, for every tensor."""
    place = ORACLE / name / file.replace("model.", "gguf_").replace(".gguf", ".types.json")
    recorded = json.loads(place.read_text())
    held = model_file.open_model(ORACLE / name / file).tensors.values()
    seen = {t.spec.gguf: t.type_name for t in held}
    assert len(seen) > 150
    assert {k: v.lower() for k, v in seen.items()} == {k: recorded[k].lower() for k in seen}


# -- activations -----------------------------------------------------------------------------------

LAYER_KINDS = {"w16": ("L0", "L2", "L3", "L4"), "w128": ("L3", "L6")}


def captured(name: str) -> dict[str, npt.NDArray[Any]]:
    """Activations of the recorded layers, from a model that ends with the last of them."""
    with np.load(ORACLE / name / "activations.npz") as data:
        wanted = {k.replace("q_step2", "q") for k in data.files if k[0] == "L"}
    e = evaluator(name)
    count = max(int(layer[1:]) for layer in LAYER_KINDS[name]) + 1
    cfg, params = first_layers(e.cfg, e._params, count)
    run = RuntimeConfig(max_ctx=256, num_slots=1)
    step = little_effort.jit(
        functools.partial(functional.prefill, cfg=cfg, run=run, capture=frozenset(wanted))
    )
    tokens = jnp.asarray(reference(name)["token_ids"][:136])
    return {k: np.asarray(v) for k, v in step(params, functional.init(cfg, run), tokens)[2].items()}


def first_layers(cfg: ModelConfig, params: Params, count: int) -> tuple[ModelConfig, Params]:
    """The model cut off after `count` layers."""
    cut = {
        k: getattr(cfg, k)[:count]
        for k in ("compress_ratios", "swiglu_limits", "shared_swiglu_limits")
    }
    hashed = min(cfg.num_hash_layers, count)
    small = dataclasses.replace(cfg, num_layers=count, num_hash_layers=hashed, **cut)
    assert [g.count * len(g.unit) for g in params.layout] == [1] * cfg.num_layers
    kept = {"groups": params.groups[:count], "layout": params.layout[:count]}
    return small, params.replace(**kept)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["w16", pytest.param("w128", marks=pytest.mark.slow)])
def test_activations_of_every_layer_kind(name: str) -> None:
    """In the order of computation, so that the first failure names the part that is wrong."""
    got = captured(name)
    with np.load(ORACLE / name / "activations.npz") as data:
        expected = dict(data)
    compared = 0
    for key, want in expected.items():
        if key.startswith("margin"):
            continue
        have = got[key.replace("q_step2", "q")]
        have = have[::2] if key.endswith("q_step2") else have
        if key.endswith("index_ids"):
            check_selection(key, have, want, expected[f"margin.index.{key[1]}"])
        elif key.endswith("router_ids"):
            np.testing.assert_array_equal(np.sort(have), np.sort(want), err_msg=key)
        elif key.endswith("router_weights"):
            ids = key.replace("weights", "ids")
            check_rows(key, by_id(have, got[ids]), by_id(want, expected[ids]))
        else:
            check_rows(key, have.reshape(want.shape), want)
        compared += 1
    assert compared == 13 * len(LAYER_KINDS[name]) + sum("index_ids" in k for k in expected)


def by_id(values: npt.NDArray[Any], ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.take_along_axis(values, np.argsort(ids, axis=-1), axis=-1)


def check_rows(key: str, have: npt.NDArray[Any], want: npt.NDArray[Any]) -> None:
    """Largest error of every row over the row's largest value."""
    have, want = (a.reshape(len(a), -1) for a in (have, want))
    error = np.abs(have - want).max(1) / np.maximum(np.abs(want).max(1), 1e-30)
    assert error.max() < 1e-4, f"{key}: {error.max()} at position {error.argmax()}"


def check_selection(
    key: str, have: npt.NDArray[Any], want: npt.NDArray[Any], margin: npt.NDArray[Any]
) -> None:
    """The same rows selected, wherever the choice is not within rounding of another one."""
    for position, (a, b) in enumerate(zip(have, want, strict=True)):
        chosen = {int(x) for x in a if x != np.iinfo(np.int32).max}
        same = chosen == {int(x) for x in b if x >= 0}
        assert same or margin[position] < 5e-5, f"{key}: position {position}"


# -- primitives ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def primitives() -> dict[str, npt.NDArray[Any]]:
    with np.load(ORACLE / "primitives.npz") as data:
        return dict(data)


def test_rope_frequencies_and_rotation(primitives: dict[str, npt.NDArray[Any]]) -> None:
    p = primitives
    main = rope.inverse_frequencies(64, 10000.0)
    compress = rope.yarn_frequencies(
        64, 160000.0, factor=16.0, original_len=65536, beta_fast=32.0, beta_slow=1.0
    )
    np.testing.assert_allclose(main, p["flash_inv_freq_main"], rtol=1e-12)
    np.testing.assert_allclose(compress, p["flash_inv_freq_compress"], rtol=1e-12)
    table = jnp.asarray(rope.angle_tables(compress, int(p["rope_pos"].max()) + 1))
    cs = jax.jit(rope.cos_sin)(table, jnp.asarray(p["rope_pos"].astype(np.int32)))
    turn = jax.jit(rope.rotate, static_argnames="inverse")
    np.testing.assert_allclose(turn(p["rope_x"], cs), p["rope_y"], atol=2e-6)
    np.testing.assert_allclose(turn(p["rope_y"], cs, inverse=True), p["rope_x"], atol=2e-6)
    np.testing.assert_allclose(turn(p["rope_x"], cs, inverse=True), p["rope_y_inverse"], atol=2e-6)


@pytest.mark.parametrize("prefix", ["hc4", "hc2"])
def test_hyper_connection_maps(primitives: dict[str, npt.NDArray[Any]], prefix: str) -> None:
    p = {k[4:]: jnp.asarray(v) for k, v in primitives.items() if k.startswith(f"{prefix}_")}
    read = functools.partial(hyper.read, iters=20, hc_eps=1e-6, rms_eps=1e-6)
    x, post, comb = jax.jit(read)(p["streams"], p["fn"], p["scale"], p["base"])
    np.testing.assert_allclose(x, p["collapsed"], atol=1e-5)
    np.testing.assert_allclose(post, p["post"], atol=1e-6)
    np.testing.assert_allclose(comb, p["comb"], atol=1e-6)
    np.testing.assert_allclose(comb.sum(1), 1, atol=1e-5)  # the last step makes columns sum to 1


def test_roundings(primitives: dict[str, npt.NDArray[Any]]) -> None:
    p = primitives
    fp8 = jax.jit(lambda x: rounding.fp8_round_trip(x, x.shape[1]))(p["fp8_x"])
    np.testing.assert_array_equal(fp8, p["fp8_y"])
    np.testing.assert_array_equal(jax.jit(rounding.fp4_round_trip)(p["fp4_x"]), p["fp4_y"])
    check_rows("hadamard", np.asarray(jax.jit(rounding.hadamard)(p["hadamard_x"])), p["hadamard_y"])
