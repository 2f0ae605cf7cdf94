"""How often ds4-nano answers right: `python -m bench.nano_chat [MODEL] [--count N]`.

Held-out instances of the tasks of `bench.nano_tasks`, greedy answers, exact comparison: the content
must equal the right one, a tool call its name and arguments; the model must stop by itself, and in
thinking mode close its reasoning. Where every token of the right answer is the likeliest after
those before it, greedy decoding gives that answer: this is checked first, for whole sequences at
once, and only what fails the check is generated.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ds4jax
from bench import nano_corpus, nano_tasks
from bench.nano_tasks import Task
from bench.quality import read_tokenizer
from ds4jax import chat, model, model_file, weights
from ds4jax.config import ModelConfig, RuntimeConfig
from ds4jax.params import Params
from ds4jax.parser import TokenParser
from ds4jax.tokenizer import Tokenizer

LIMIT = 160
"""Tokens of an answer."""


@dataclass
class Lane:
    """One running answer."""

    index: int
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    fed: int = 0


def greedy(
    params: Params,
    cfg: ModelConfig,
    prompts: Sequence[list[int]],
    eos: int,
    *,
    lanes: int = 32,
    limit: int = LIMIT,
) -> list[list[int]]:
    """Greedy answers without the end marker; one without it at all ends in -1."""
    need = max(len(p) for p in prompts) + limit
    run = RuntimeConfig(max_ctx=-(-need // 128) * 128, num_slots=lanes)
    cache = ds4jax.init(cfg, run)
    index = np.arange(lanes, dtype=np.int32)
    nothing = np.full(lanes, -1, np.int32)

    @partial(jax.jit, donate_argnums=1)
    def step(params: Params, cache: Any, pos: jax.Array, token: jax.Array) -> tuple[Any, jax.Array]:
        zero = jnp.zeros(lanes, jnp.int32)
        plan = model.Plan(
            slot=jnp.asarray(index), pos=pos, token=token, run=zero, after=zero,
            table_idx=jnp.asarray(nothing), table_page=jnp.asarray(nothing),
            emit=jnp.asarray(index), num_rows=jnp.int32(lanes), num_emit=jnp.int32(lanes),
        )  # fmt: skip
        cache, out = model.forward(params, cache, plan, cfg=cfg, run=run, batched=True)
        return cache, jnp.argmax(out.logits, axis=-1).astype(jnp.int32)

    results: list[list[int]] = [[] for _ in prompts]
    waiting = iter(range(len(prompts)))
    active: list[Lane | None] = [_next(waiting, prompts) for _ in range(lanes)]
    while any(active):
        pos, token = np.zeros(lanes, np.int32), np.zeros(lanes, np.int32)
        for i, lane in enumerate(active):
            if lane is not None:
                pos[i] = lane.fed
                token[i] = (lane.prompt + lane.output)[lane.fed]
        cache, said = step(params, cache, jnp.asarray(pos), jnp.asarray(token))
        chosen = np.asarray(said)
        for i, lane in enumerate(active):
            if lane is None:
                continue
            lane.fed += 1
            if lane.fed < len(lane.prompt):
                continue
            new = int(chosen[i])
            if new != eos:
                lane.output.append(new)
            if new == eos or len(lane.output) >= limit:
                results[lane.index] = lane.output + ([] if new == eos else [-1])
                active[i] = _next(waiting, prompts)
    return results


def _next(waiting: Iterator[int], prompts: Sequence[list[int]]) -> Lane | None:
    index = next(waiting, None)
    return None if index is None else Lane(index, list(prompts[index]))


@dataclass(frozen=True)
class Answer:
    """A judged answer."""

    task: Task
    thinking: bool
    text: str
    right: bool


def judge(task: Task, prompt: chat.Prompt, ids: list[int], tok: Tokenizer) -> bool:
    """Whether the output is the right answer and ended by itself."""
    if ids and ids[-1] == -1:
        return False
    parser = TokenParser(tok, start=prompt.start, tools_declared=prompt.tools_declared)
    for token in ids:
        parser.push(token)
    parser.finish()
    said = parser.output
    if said.anomalies or parser.in_reasoning:
        return False
    if task.call is not None and not task.result:
        calls = [(c.name, json.loads(c.arguments)) for c in said.tool_calls]
        return calls == [(task.call.name, json.loads(task.call.arguments))]
    return not said.tool_calls and said.content == task.answer


def forced(
    params: Params, cfg: ModelConfig, documents: Sequence[tuple[list[int], list[int]]]
) -> list[bool]:
    """Whether every token of each answer is the likeliest; documents are (prompt, answer)."""
    step = jax.jit(
        lambda params, tokens: jnp.argmax(
            model.sequences(params, tokens, cfg=cfg, run=RuntimeConfig())[0], axis=-1
        )
    )
    out = [False] * len(documents)
    for length, lanes in ((192, 24), (768, 6)):
        fit = [
            i for i, (p, a) in enumerate(documents)
            if (len(p) + len(a) <= 192) == (length == 192) and len(p) + len(a) <= length
        ]  # fmt: skip
        for at in range(0, len(fit), lanes):
            chosen = fit[at : at + lanes]
            tokens = np.zeros((lanes, length), np.int32)
            for row, i in enumerate(chosen):
                both = documents[i][0] + documents[i][1]
                tokens[row, : len(both)] = both
            likeliest = np.asarray(step(params, jnp.asarray(tokens)))
            for row, i in enumerate(chosen):
                prompt, answer = documents[i]
                said = likeliest[row, len(prompt) - 1 : len(prompt) - 1 + len(answer)]
                out[i] = said.tolist() == answer
    return out


def ask(
    params: Params, cfg: ModelConfig, tok: Tokenizer, tasks: Sequence[tuple[Task, bool]]
) -> list[Answer]:
    """Put every (task, thinking) to the model."""
    prompts = [
        chat.render(task.request(thinking=thinking), nano_corpus.PROFILE)
        for task, thinking in tasks
    ]
    ids = [tok.encode_pieces(p.pieces) for p in prompts]
    right = [tok.encode_pieces(nano_corpus.answer_pieces(task, t)) for task, t in tasks]
    sure = forced(params, cfg, list(zip(ids, right, strict=True)))
    rest = [i for i, ok in enumerate(sure) if not ok]
    outputs = [r[:-1] for r in right]  # without the end marker
    if rest:
        said = greedy(params, cfg, [ids[i] for i in rest], tok.markers.eos)
        for i, output in zip(rest, said, strict=True):
            outputs[i] = output
    return [
        Answer(task, thinking, tok.decode([i for i in out if i >= 0]), judge(task, p, out, tok))
        for (task, thinking), p, out in zip(tasks, prompts, outputs, strict=True)
    ]


def questions(count: int, seed: int = 1) -> list[tuple[Task, bool]]:
    """`count` held-out instances of every kind that is judged, each with and without thinking."""
    out: list[tuple[Task, bool]] = []
    for name in nano_tasks.TASKS:
        if name in nano_tasks.OPEN_KINDS:
            continue
        stream = nano_tasks.stream(seed, held_out=True, name=name)
        seen: dict[str, Task] = {}
        for _ in range(50 * count):
            task = next(stream)
            seen.setdefault(f"{task.kind} {task.question} {task.result}", task)
            if len(seen) == count:
                break
        out += [(task, thinking) for task in seen.values() for thinking in (False, True)]
    return out


def rates(answers: Sequence[Answer]) -> dict[str, dict[str, float]]:
    """Share of right answers by kind, direct and with thinking."""
    sums: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for a in answers:
        sums[a.task.kind]["thinking" if a.thinking else "direct"].append(a.right)
    return {k: {m: float(np.mean(r)) for m, r in v.items()} for k, v in sums.items()}


def main() -> None:
    """Ask and print the rates."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.nano_chat")
    parser.add_argument("model", nargs="?", default="nano")
    parser.add_argument("--count", type=int, default=50, help="instances of a kind")
    parser.add_argument("--wrong", action="store_true", help="print wrong answers")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    source = model_file.open_model(args.model)
    tok = read_tokenizer(source)
    run = RuntimeConfig(max_ctx=2048)
    cfg, params = weights.load(source, run, cpu_weights="decoded", scan=False)
    answers = ask(params, cfg, tok, questions(args.count))
    found = rates(answers)
    for kind, by_mode in found.items():
        print(f"{kind:14}" + "".join(f" {m} {r * 100:5.1f} %" for m, r in by_mode.items()))
    if args.wrong:
        for a in answers:
            if not a.right:
                print(f"--- {a.task.question!r} ({'thinking' if a.thinking else 'direct'})")
                print(f"    said  {a.text!r}\n    right {a.task.answer!r}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
