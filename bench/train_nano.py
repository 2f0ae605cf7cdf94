"""Train ds4-nano, the model that ships in the package: `python -m bench.train_nano`.

The model is `ds4jax.model.sequences`, the differentiable form of the functions that serve requests;
nothing of it is written a second time here. This module holds what training adds: initial weights,
the loss, rounding of the experts to their shipped FP4 format with a straight-through gradient,
balancing of the router's bias, Muon and AdamW, checkpoints. Data is `bench.nano_corpus`;
`bench.nano_export` writes the trained weights as GGUF.

The run is a pure function of (corpus, seed, number of steps): batches are drawn on the device from
the step number, so a run that was interrupted and resumed equals one that was not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import Array, lax

from bench.nano_model import (
    Weights,
    as_params,
    fp4_experts,
    initial,
    load_weights,
    model_config,
    save_weights,
)
from ds4jax import model, tensors
from ds4jax.config import ModelConfig, RuntimeConfig

F32 = jnp.float32
QUIET = 1 << 15  # as in bench.nano_corpus, which needs packages that training does not


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the result, besides model and corpus."""

    steps: int = 12_500
    batch: int = 16  # sequences
    length: int = 768  # tokens of one
    learning_rate: float = 3e-3
    warmup: int = 200
    weight_decay: float = 0.1
    clip: float = 1.0
    quiet_weight: float = 0.1  # loss weight of prompt tokens
    noise: float = 0.08  # share of text tokens replaced in the input
    index_weight: float = 0.3
    balance_rate: float = 2e-3
    mix: tuple[float, float, float] = (0.3, 0.15, 0.55)  # text, snippets, chat
    seed: int = 0
    dtype: str = "bfloat16"
    remat: bool = False


@struct.dataclass
class OptimizerState:
    """Momentum of the stacked matrices, and AdamW's state of everything else."""

    momentum: Weights
    adam: Any


@struct.dataclass
class State:
    """What a checkpoint holds."""

    step: Array  # int32 []
    weights: Weights  # float32, and the hash layers' int32 tables
    optimizer: OptimizerState


@struct.dataclass
class Data:
    """Token streams on the device: ids as stored (with the QUIET bit), starts of documents."""

    ids: tuple[Array, ...]  # uint16
    starts: tuple[Array, ...]  # int32


@struct.dataclass
class Control:
    """What changes between calls of the one compiled program: training, or judging a stream."""

    mix: Array  # float32 [S], share of every stream
    quiet: Array  # float32 [], loss weight of prompt tokens
    noise: Array  # float32 [], share of replaced inputs
    learn: Array  # bool []; False: nothing changes, batches are numbered from 0
    total: Array  # int32 [], steps of the whole run


STREAMS = ("text", "snippets", "chat", "held_text", "held_chat")


def training(recipe: Recipe) -> Control:
    """Control values of training."""
    return Control(
        mix=jnp.array((*recipe.mix, 0.0, 0.0), F32), quiet=jnp.float32(recipe.quiet_weight),
        noise=jnp.float32(recipe.noise), learn=jnp.array(True), total=jnp.int32(recipe.steps),
    )  # fmt: skip


def judging(recipe: Recipe, stream: str) -> Control:
    """Control values that give the loss of one stream: no noise, prompts not counted."""
    mix = [float(name == stream) for name in STREAMS]
    return Control(
        mix=jnp.array(mix, F32), quiet=jnp.float32(0), noise=jnp.float32(0),
        learn=jnp.array(False), total=jnp.int32(recipe.steps),
    )  # fmt: skip


# --- the loss ---------------------------------------------------------------------------------


def _captures(cfg: ModelConfig) -> frozenset[str]:
    scored = {f"L{i}.router_ids" for i in range(cfg.num_layers)}
    return frozenset(scored | {f"L{i}.index_loss" for i in cfg.layers_of_ratio(4)})


def loss_fn(
    weights: Weights, tokens_BT: Array, target_BT: Array, share_BT: Array,
    *, cfg: ModelConfig, recipe: Recipe,
) -> tuple[Array, dict[str, Array]]:  # fmt: skip
    """Mean cross entropy in nats over weighted targets, plus the indexer's distillation.

    Returns: loss, and {"nll", "index" scalars, "load" float32 [L, E]: share of the routes}.
    """
    run = RuntimeConfig(dtype=recipe.dtype)  # type: ignore[arg-type]
    tree = as_params(cfg, fp4_experts(weights), tokens_BT.shape[1])
    logits, seen = model.sequences(
        tree, tokens_BT, cfg=cfg, run=run, capture=_captures(cfg), remat=recipe.remat
    )
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, target_BT)
    nll = jnp.sum(nll * share_BT) / jnp.sum(share_BT)
    index = [jnp.mean(seen[f"L{i}.index_loss"]) for i in cfg.layers_of_ratio(4)]
    index_loss = jnp.stack(index).mean() if index else jnp.float32(0)
    load = jnp.stack([
        jnp.mean(jax.nn.one_hot(seen[f"L{i}.router_ids"], cfg.num_experts, dtype=F32), axis=(0, 1))
        for i in range(cfg.num_layers)
    ])  # fmt: skip
    total = nll + recipe.index_weight * index_loss
    return total, {"nll": nll, "index": index_loss, "load": load}


# --- data -------------------------------------------------------------------------------------


def batch(
    data: Data, control: Control, number: Array, recipe: Recipe, vocab: int
) -> tuple[Array, Array, Array]:
    """Batch `number`: inputs and targets int32 [B, T], loss weights float32 [B, T].

    Rows of text start anywhere (one in five at a document), rows of the other streams at a
    document.
    """
    keys = jax.random.split(jax.random.fold_in(jax.random.key(recipe.seed), number), 6)
    size = recipe.batch
    kind = jax.random.choice(keys[0], len(STREAMS), (size,), p=control.mix)
    text = (kind == 0) | (kind == 3)
    rows = jnp.zeros((size, recipe.length + 1), jnp.uint16)
    for i, (ids, starts) in enumerate(zip(data.ids, data.starts, strict=True)):
        last = max(ids.shape[0] - recipe.length - 1, 1)
        first = starts[jax.random.randint(keys[1], (size,), 0, starts.shape[0])]
        anywhere = jax.random.randint(keys[2], (size,), 0, last)
        at_start = ~text | (jax.random.uniform(keys[3], (size,)) < 0.2)
        first = jnp.minimum(jnp.where(at_start, first, anywhere), last)
        at = first[:, None] + jnp.arange(recipe.length + 1, dtype=jnp.int32)[None, :]
        got = ids[jnp.minimum(at, ids.shape[0] - 1)]
        rows = jnp.where((kind == i)[:, None], got, rows)
    ids32 = (rows & (QUIET - 1)).astype(jnp.int32)
    inputs, target = ids32[:, :-1], ids32[:, 1:]
    share = jnp.where((rows[:, 1:] & QUIET) != 0, control.quiet, 1.0)
    # Text repeats over the epochs: a few wrong inputs keep the model from learning it by heart.
    noisy = jax.random.uniform(keys[4], inputs.shape) < control.noise
    noisy = noisy & (kind < 2)[:, None] & (inputs > 2)
    random = jax.random.randint(keys[5], inputs.shape, 3, vocab)
    return jnp.where(noisy, random, inputs), target, share


# --- one step ---------------------------------------------------------------------------------

MATRIX_MOMENTUM = 0.95
MATRIX_RMS = 0.2
"""Root mean square of a matrix' update at rate 1: what AdamW's are, so that they share a rate."""


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW up to the learning rate, for what `matrices` leaves; decay on embedding and head."""
    return optax.chain(
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(recipe.weight_decay, mask={"decay": True, "plain": False}),
    )


def orthogonal(g_BNM: Array) -> Array:
    """The nearest orthogonal matrix of each, roughly: every singular value comes near 1.

    Five steps of the Newton-Schulz iteration of the Muon optimiser (K. Jordan, 2024), in float32.
    """
    wide = g_BNM.shape[1] <= g_BNM.shape[2]
    x = g_BNM if wide else g_BNM.transpose(0, 2, 1)
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True)) + 1e-12)
    for _ in range(5):
        a = x @ x.transpose(0, 2, 1)
        x = 3.4445 * x + (2.0315 * (a @ a) - 4.775 * a) @ x
    return x if wide else x.transpose(0, 2, 1)


def matrices(weights: Weights) -> Weights:
    """The weights that take orthogonal updates, stacked by size: [B, N, M] under "NxM"."""
    found: dict[str, list[Array]] = {}
    for name in sorted(weights):
        w = weights[name]
        if _group(name, w) == "matrix":
            found.setdefault(f"{w.shape[-2]}x{w.shape[-1]}", []).append(
                w.reshape(-1, *w.shape[-2:])
            )
    return {size: jnp.concatenate(found[size]) for size in sorted(found)}


def vectors(weights: Weights) -> Weights:
    """All other weights as two vectors: "decay" (embedding, head) and "plain"."""
    found: dict[str, list[Array]] = {"decay": [], "plain": []}
    for name in sorted(weights):
        if (group := _group(name, weights[name])) != "matrix":
            found[group].append(weights[name].reshape(-1))
    return {k: jnp.concatenate(v) for k, v in found.items()}


def by_name(stacks: Weights, flat: Weights, like: Weights) -> Weights:
    """Inverse of `matrices` and `vectors` for weights of the shapes of `like`."""
    out: Weights = {}
    at = dict.fromkeys((*stacks, *flat), 0)
    for name in sorted(like):
        w = like[name]
        group, size, source = _group(name, w), w.size, flat
        if group == "matrix":
            group, source = f"{w.shape[-2]}x{w.shape[-1]}", stacks
            size //= w.shape[-2] * w.shape[-1]
        out[name] = source[group][at[group] : at[group] + size].reshape(w.shape)
        at[group] += size
    return out


def _group(name: str, w: Array) -> str:
    if w.ndim < 2 or "hc_" in name or name.endswith("ape"):
        return "plain"
    return "decay" if name.startswith(("embed", "head")) else "matrix"


def learning_rate(step: Array, total: Array, recipe: Recipe) -> Array:
    """Linear warm-up, then linear to 0 at the end of the run."""
    done = step.astype(F32)
    rise = (done + 1.0) / recipe.warmup
    fall = (total.astype(F32) - done) / (total.astype(F32) - recipe.warmup + 1.0)
    return recipe.learning_rate * jnp.minimum(jnp.minimum(rise, fall), 1.0)


def _learned(weights: Weights) -> Weights:
    return {k: v for k, v in weights.items() if v.dtype == F32 and not k.endswith("gate.bias")}


def updated(
    learned: Weights, grads: Weights, opt: OptimizerState, rate: Array, recipe: Recipe
) -> tuple[Weights, OptimizerState, Array]:
    """One step of Muon on the matrices and of AdamW on the rest; and the norm of the gradient."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    grads = {k: g * jnp.minimum(1.0, recipe.clip / (norm + 1e-12)) for k, g in grads.items()}
    gradient, momentum, stacks = matrices(grads), {}, matrices(learned)
    for size, g in gradient.items():
        momentum[size] = MATRIX_MOMENTUM * opt.momentum[size] + g
        ahead = MATRIX_MOMENTUM * momentum[size] + g  # Nesterov
        step = MATRIX_RMS * max(g.shape[1:]) ** 0.5 * orthogonal(ahead)
        stacks[size] = stacks[size] - rate * (step + recipe.weight_decay * stacks[size])
    flat = vectors(learned)
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        steps, adam = optimizer(recipe).update(vectors(grads), opt.adam, flat)
    flat = {k: v - rate * steps[k] for k, v in flat.items()}
    return by_name(stacks, flat, learned), OptimizerState(momentum=momentum, adam=adam), norm


def train_step(
    state: State, data: Data, control: Control, number: Array, *, cfg: ModelConfig, recipe: Recipe
) -> tuple[State, dict[str, Array]]:
    """One optimiser step on batch `number`, or (`control.learn` False) its loss alone.

    The selection bias of a router moves against its load, by a fixed step.
    """
    tokens, target, share = batch(data, control, number, recipe, cfg.vocab_size)
    learned = _learned(state.weights)

    def objective(learned: Weights) -> tuple[Array, dict[str, Array]]:
        return loss_fn(state.weights | learned, tokens, target, share, cfg=cfg, recipe=recipe)

    (_, info), grads = jax.value_and_grad(objective, has_aux=True)(learned)
    rate = jnp.where(control.learn, learning_rate(state.step, control.total, recipe), 0.0)
    learned, opt, info["grad"] = updated(learned, grads, state.optimizer, rate, recipe)
    weights = state.weights | learned
    pull = recipe.balance_rate * rate / recipe.learning_rate
    for spec in tensors.specs(cfg):
        if spec.key == "ffn.gate.bias":
            load = info["load"][spec.layer]
            weights[spec.name] = weights[spec.name] + pull * jnp.sign(jnp.mean(load) - load)
    opt = jax.tree.map(lambda new, old: jnp.where(control.learn, new, old), opt, state.optimizer)
    step = state.step + control.learn.astype(jnp.int32)
    return State(step=step, weights=weights, optimizer=opt), info


def run_steps(
    state: State, data: Data, control: Control, *, count: int, cfg: ModelConfig, recipe: Recipe
) -> tuple[State, dict[str, Array]]:
    """`count` steps in one program; the information of every step, stacked."""

    def body(state: State, i: Array) -> tuple[State, dict[str, Array]]:
        number = jnp.where(control.learn, state.step, i)
        return train_step(state, data, control, number, cfg=cfg, recipe=recipe)

    out: tuple[State, dict[str, Array]] = lax.scan(body, state, jnp.arange(count, dtype=jnp.int32))
    return out


def fresh(cfg: ModelConfig, recipe: Recipe, counts_V: np.ndarray[Any, Any]) -> State:
    """The state before the first step."""
    weights = initial(cfg, counts_V, recipe.seed)
    learned = _learned(weights)
    momentum = {k: jnp.zeros_like(v) for k, v in matrices(learned).items()}
    opt = OptimizerState(momentum=momentum, adam=optimizer(recipe).init(vectors(learned)))
    return State(step=jnp.int32(0), weights=weights, optimizer=opt)


# --- checkpoints ------------------------------------------------------------------------------


def save_checkpoint(path: Path, state: State, recipe: Recipe) -> None:
    """Write the whole state; a crash while writing leaves the older file in place."""
    leaves = jax.tree.leaves(state)
    partial_file = path.with_suffix(".part.npz")
    np.savez(
        partial_file,
        recipe=np.array(json.dumps(asdict(recipe))),
        **{f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)},
    )
    partial_file.replace(path)


def load_checkpoint(path: Path, like: State, recipe: Recipe) -> State:
    """Read what `save_checkpoint` wrote. The run may have become longer or shorter since.

    Raises:
        ValueError: it belongs to another recipe.
    """
    leaves, tree = jax.tree.flatten(like)
    with np.load(path) as arrays:
        stored = str(arrays["recipe"])
        made, wanted = (
            asdict(Recipe()) | json.loads(x) for x in (stored, json.dumps(asdict(recipe)))
        )
        if made | {k: wanted[k] for k in ("steps", "warmup")} != wanted:
            raise ValueError(f"{path}: made with {stored}, this run is {asdict(recipe)}")
        read = [jnp.asarray(arrays[f"leaf{i}"]) for i in range(len(leaves))]
    state: State = jax.tree.unflatten(tree, read)
    return state


# --- the run ----------------------------------------------------------------------------------


def read_streams(folder: Path) -> dict[str, tuple[Any, Any]]:
    """Streams of a saved corpus: name -> (ids, starts of documents)."""
    with np.load(folder / "corpus.npz") as arrays:
        names = [k.removesuffix(".ids") for k in arrays.files if k.endswith(".ids")]
        return {n: (arrays[f"{n}.ids"], arrays[f"{n}.starts"]) for n in names}


def counts_of(streams: dict[str, tuple[Any, Any]], vocab: int) -> np.ndarray[Any, Any]:
    """How often every token occurs in the training streams."""
    ids = np.concatenate([streams[n][0] & np.uint16(QUIET - 1) for n in STREAMS[:3]])
    return np.bincount(ids.astype(np.int64), minlength=vocab).astype(np.float64)


def on_device(streams: dict[str, tuple[Any, Any]]) -> Data:
    """The streams as the training program takes them."""
    return Data(
        ids=tuple(jnp.asarray(streams[n][0]) for n in STREAMS),
        starts=tuple(jnp.asarray(streams[n][1]) for n in STREAMS),
    )


Program = Callable[[State, Data, Control], tuple[State, dict[str, Array]]]


def train(
    streams: dict[str, tuple[Any, Any]],
    cfg: ModelConfig,
    recipe: Recipe,
    *,
    per_call: int = 20,
    evaluate_every: int = 1000,
    checkpoint: Path | None = None,
    checkpoint_every: int = 1000,
    stop_after: int | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
    program: Program | None = None,
    init: dict[str, np.ndarray[Any, Any]] | None = None,
) -> State:
    """Train from the beginning, or from `checkpoint` if that file exists.

    Args:
        per_call: steps of one call of the program. report: called with numbers after every call.
        stop_after: stop at this step although the recipe goes on (with `checkpoint`, to resume).
        program: compiled `run_steps`, if there is one already.
        init: weights to begin with, instead of fresh ones.
    """
    state = fresh(cfg, recipe, counts_of(streams, cfg.vocab_size))
    if init is not None:
        state = state.replace(  # type: ignore[attr-defined]
            weights={k: jnp.asarray(v) for k, v in init.items()}
        )
    if checkpoint is not None and checkpoint.exists():
        state = load_checkpoint(checkpoint, state, recipe)
    data, learn = on_device(streams), training(recipe)
    advance = program or jax.jit(
        partial(run_steps, count=per_call, cfg=cfg, recipe=recipe), donate_argnums=0
    )
    end = min(recipe.steps, stop_after or recipe.steps)
    begun, step = time.time(), int(state.step)
    while step < end:
        state, info = advance(state, data, learn)
        step += per_call
        numbers: dict[str, Any] = {
            "step": step,
            "loss": float(jnp.mean(info["nll"])),
            "index": float(jnp.mean(info["index"])),
            "grad": float(jnp.max(info["grad"])),
            "load": np.asarray(jnp.mean(info["load"], axis=0)).round(4).tolist(),
        }
        if step % evaluate_every < per_call or step >= end:
            for name in ("held_text", "held_chat"):
                state, info = advance(state, data, judging(recipe, name))
                numbers[name] = float(jnp.mean(info["nll"]))
        numbers["seconds"] = round(time.time() - begun, 2)
        if checkpoint is not None and (step % checkpoint_every < per_call or step >= end):
            save_checkpoint(checkpoint, state, recipe)
        if report is not None:
            report(numbers)
    return state


def main() -> None:
    """Build the corpus if need be, train, write weights, log and loss curve."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.train_nano")
    parser.add_argument("--out", type=Path, default=Path("build/nano"))
    parser.add_argument("--corpus", type=Path, help="folder of a saved corpus (default: --out)")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--learning-rate", type=float, default=Recipe.learning_rate)
    parser.add_argument("--warmup", type=int, help="steps (default: 200, at most a tenth)")
    parser.add_argument("--dtype", default=Recipe.dtype, choices=("bfloat16", "float32"))
    parser.add_argument("--length", type=int, default=Recipe.length, help="tokens of a sequence")
    parser.add_argument(
        "--mix", type=float, nargs=3, default=Recipe.mix, help="share of text, snippets, chat"
    )
    parser.add_argument("--noise", type=float, default=Recipe.noise, help="share of wrong inputs")
    parser.add_argument("--init", type=Path, help="folder of trained weights to go on from")
    parser.add_argument(
        "--remat", action="store_true", help="compute activations again: less memory, slower"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-call", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, help="resume from and write to this file")
    parser.add_argument("--checkpoint-every", type=int, default=1000, help="steps")
    parser.add_argument("--stop-after", type=int)
    args = parser.parse_args()
    folder = args.corpus or args.out
    args.out.mkdir(parents=True, exist_ok=True)
    if not (folder / "corpus.npz").exists():
        from bench import nano_corpus

        print("building the corpus (about three minutes)")
        nano_corpus.build(
            vocab_size=nano_corpus.VOCAB, conversations=nano_corpus.CONVERSATIONS
        ).save(folder)
    recipe = replace(
        Recipe(), steps=args.steps, batch=args.batch, learning_rate=args.learning_rate,
        dtype=args.dtype, seed=args.seed, length=args.length, mix=tuple(args.mix),
        remat=args.remat, noise=args.noise,
        warmup=args.warmup or max(1, min(Recipe.warmup, args.steps // 10)),
    )  # fmt: skip
    log = args.out / "log.jsonl"
    if args.checkpoint is None or not args.checkpoint.exists():
        log.unlink(missing_ok=True)
    state = _with_bar(recipe, log, partial(
        train, read_streams(folder), model_config(), recipe, per_call=args.per_call,
        checkpoint=args.checkpoint, checkpoint_every=args.checkpoint_every,
            stop_after=args.stop_after,
        init=load_weights(args.init) if args.init else None,
    ))  # fmt: skip
    if stats := jax.devices()[0].memory_stats():
        print(f"peak device memory {stats.get('peak_bytes_in_use', 0) / 2**30:.1f} GiB")
    save_weights(args.out, state.weights)
    (args.out / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1))
    from bench import plot

    (args.out / "loss.svg").write_text(plot.loss_curve(log))
    print(f"weights, log and loss curve are in {args.out}")


def _with_bar(recipe: Recipe, log: Path, run: Callable[..., State]) -> State:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (BarColumn(), MofNCompleteColumn(), Remaining(), TextColumn("{task.description}"))
    with Progress(*columns) as bar, log.open("a") as file:
        task = bar.add_task("compiling", total=recipe.steps)

        def report(numbers: dict[str, Any]) -> None:
            file.write(json.dumps(numbers) + "\n")
            file.flush()
            shown = f"loss {numbers['loss']:.3f} index {numbers['index']:.3f}"
            if "held_text" in numbers:
                line = f"step {numbers['step']:5} {numbers['seconds']:7.1f} s  {shown}"
                line += f"  held-out text {numbers['held_text']:.3f}"
                bar.console.print(f"{line} chat {numbers['held_chat']:.3f}")
            bar.update(task, completed=numbers["step"], description=shown)

        return run(report=report)


if __name__ == "__main__":
    main()
