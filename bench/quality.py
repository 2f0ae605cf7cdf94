"""What every weight format costs in quality: `python -m bench.quality [MODEL] [--json OUT]`.

For each class of matrices and each format that can be written, the class alone is rounded to the
format, with and without importance weights, and the model is judged on held-out text: bits per
byte, divergence from the float model, agreement of the likeliest token. Also: what the indexer's
choice is worth. MODEL should hold plain float weights (`bench.nano_export` writes such a file); the
packaged model works, and is then its own reference.

    --markdown docs/quality.md --plot docs/quality.svg   write table and chart
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from bench import imatrix, nano_corpus, nano_model, nano_tasks, plot
from ds4jax import chat, model, model_file, params, quant, quantize, sequence, tensors
from ds4jax.config import ModelConfig, RuntimeConfig
from ds4jax.convert_types import class_of
from ds4jax.formats import FORMATS
from ds4jax.tokenizer import Tokenizer

FORMATS_MEASURED = (
    "q8_0", "rocmfp8", "rocmfp6", "rocmfp4", "rocmfp4_fast", "mxfp4", "rocmfp3", "rocmfp2_s40",
)  # fmt: skip
CLASSES = (
    "experts_gate_up", "experts_down", "attention", "shared", "embedding", "head", "compressor",
    "indexer", "router",
)  # fmt: skip

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Score:
    """How a set of weights does on the held-out rows."""

    bits_per_byte: float
    kl: float  # nats per token, from the float model
    top1: float  # share of tokens with the same likeliest token as the float model


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    tensors: str
    format: str
    imatrix: bool
    bits_per_weight: float
    score: Score


def read_weights(source: model_file.ModelFile) -> Arrays:
    """All weights as float32 (tables int32) by `TensorSpec.name`."""
    return {
        s.name: source.read_table(s) if s.kind == "table" else source.read_float32(s)
        for s in source.specs()
    }


def read_tokenizer(source: model_file.ModelFile) -> Tokenizer:
    """The model's tokenizer."""
    kept = source.tokenizer_source
    return Tokenizer.from_path(kept) if isinstance(kept, Path) else Tokenizer.from_gguf(kept or {})


def text_rows(tok: Tokenizer, *, held_out: bool, rows: int, length: int) -> npt.NDArray[np.int32]:
    """Rows [N, length + 1] of standard-library text, spread over the files."""
    ids: list[int] = []
    for source in nano_corpus.sources():
        if source.held_out == held_out:
            ids += tok.encode_completion(source.text)
            if not held_out and len(ids) > 40 * rows * length:
                break
    step = max(1, (len(ids) - length - 1) // max(rows - 1, 1))
    starts = [min(i * step, len(ids) - length - 1) for i in range(rows)]
    return np.array([ids[s : s + length + 1] for s in starts], np.int32)


class Judge:
    """The float model's answers on fixed rows, and how other weights compare with them."""

    def __init__(
        self, cfg: ModelConfig, weights: Arrays, tok: Tokenizer, row_NT: npt.NDArray[np.int32]
    ) -> None:
        self.cfg, self.rows = cfg, row_NT
        self.device = {k: jnp.asarray(v) for k, v in weights.items()}
        special = set(tok.specials.values())
        targets = row_NT[:, 1:]
        self.bytes = sum(len(tok.bytes_of(int(t))) for t in targets.reshape(-1) if t not in special)
        self._logits = jax.jit(partial(_logits, cfg=cfg))
        self._compare = jax.jit(_compare)
        self._reference = [np.asarray(self._logits(self.device, row[None, :-1])) for row in row_NT]

    def score(self, changed: Arrays, logits: Callable[..., Array] | None = None) -> Score:
        """Score of the weights with some of them changed."""
        weights = self.device | {k: jnp.asarray(v) for k, v in changed.items()}
        run = logits or self._logits
        sums = np.zeros(3)
        for row, reference in zip(self.rows, self._reference, strict=True):
            got = run(weights, row[None, :-1])
            sums += np.asarray(self._compare(got, reference, row[None, 1:]), np.float64)
        count = self.rows[:, 1:].size
        return Score(
            bits_per_byte=float(sums[0] / math.log(2) / self.bytes),
            kl=float(sums[1] / count), top1=float(sums[2] / count),
        )  # fmt: skip


def _logits(weights: dict[str, Array], token_BT: Array, *, cfg: ModelConfig) -> Array:
    tree = nano_model.as_params(cfg, weights, token_BT.shape[1])
    return model.sequences(tree, token_BT, cfg=cfg, run=RuntimeConfig())[0]


def _compare(got: Array, reference: Array, target_BT: Array) -> Array:
    """Sums over tokens: negative log-likelihood, divergence from the reference, agreement."""
    p, q = jax.nn.log_softmax(reference), jax.nn.log_softmax(got)
    nll = -jnp.sum(jnp.take_along_axis(q, target_BT[:, :, None], axis=-1))
    kl = jnp.sum(jnp.exp(p) * (p - q))
    same = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
    return jnp.stack([nll, kl, jnp.sum(same, dtype=jnp.float32)])


def rounded(
    cfg: ModelConfig, weights: Arrays, tensor_class: str, format: str, importance: Arrays
) -> tuple[Arrays, float]:
    """The weights of one class as `format` stores them, and its bits per weight."""
    out: Arrays = {}
    for spec in tensors.specs(cfg):
        if class_of(spec) != tensor_class:
            continue
        w, vector = weights[spec.name], importance.get(spec.gguf)
        parts = w if spec.num_experts else w[None]
        vectors = [None] * len(parts) if vector is None else list(np.broadcast_to(
            vector, (len(parts), w.shape[-1])
        ))  # fmt: skip
        coded = [
            quant.decode(format, quantize.encode(format, part, v))
            for part, v in zip(parts, vectors, strict=True)
        ]
        out[spec.name] = np.stack(coded).reshape(w.shape)
    fmt = FORMATS[format]
    return out, 8.0 * fmt.block_bytes / fmt.block


def table(
    judge: Judge, weights: Arrays, importance: Arrays,
    classes: Sequence[str] = CLASSES, formats: Sequence[str] = FORMATS_MEASURED,
) -> Iterator[Row]:  # fmt: skip
    """Every class in every format; with importance too where the format can use it."""
    for name in classes:
        for format in formats:
            for use in (False, True):
                if use and format not in quantize.TAKES_IMATRIX:
                    continue
                vectors = importance if use else {}
                changed, bits = rounded(judge.cfg, weights, name, format, vectors)
                yield Row(
                    tensors=name, format=format, imatrix=use, bits_per_weight=bits,
                    score=judge.score(changed),
                )  # fmt: skip


def _choices(cfg: ModelConfig, rows: int) -> dict[str, tuple[ModelConfig, Any]]:
    """Ways to choose compressed rows: the configuration, and what stands in for the scores."""

    def random(q: Array, weight: Array, keys: Array) -> Array:
        shape = (q.shape[0], q.shape[1], keys.shape[1])
        return jax.random.uniform(jax.random.key(7), shape)

    def newest(q: Array, weight: Array, keys: Array) -> Array:
        number = jnp.arange(keys.shape[1], dtype=jnp.float32)
        return jnp.broadcast_to(number, (q.shape[0], q.shape[1], keys.shape[1]))

    own = sequence.index_scores
    return {
        "indexer": (cfg, own), "all rows": (replace(cfg, index_topk=rows), own),
        "random rows": (cfg, random), "newest rows": (cfg, newest),
    }  # fmt: skip


def indexer_scores(judge: Judge) -> dict[str, Score]:
    """The model with other choices of compressed rows than its indexer's."""
    out = {}
    for name, (cfg, scores) in _choices(judge.cfg, judge.rows.shape[1]).items():
        with mock.patch.object(sequence, "index_scores", scores):
            out[name] = judge.score({}, jax.jit(partial(_logits, cfg=cfg)))
    return out


@dataclass(frozen=True)
class TableScore:
    """Answers to questions about long tables.

    Attributes:
      loss: nats per token of the right answer. right: share of answers that greedy decoding gives.
      worse: mean over its standard error of each question's loss less the indexer's.
    """

    loss: float
    right: float
    worse: float = 0.0


LINES = 35
"""Lines that a long table has, at least: more than twice what the window holds."""


def long_tables(tok: Tokenizer, count: int, length: int) -> tuple[Any, Any]:
    """Held-out questions about long tables: ids int32 [N, length + 1], answer targets [N, length].

    Shorter ones are filled up with token 0 behind their end.
    """
    rng, encoder = random.Random(11), nano_corpus.Encoder(tok)
    ids, answers = [], []
    for task in nano_tasks.stream(rng.randrange(1 << 30), held_out=True, name="lookup"):
        if task.question.count("\n") < LINES:
            continue
        pieces = chat.render(task.request(thinking=False), nano_corpus.PROFILE).pieces
        prompt = encoder.pieces(pieces)
        whole = prompt + encoder.pieces(nano_corpus.answer_pieces(task, False))
        if len(whole) > length + 1:
            continue
        ids.append(whole + [0] * (length + 1 - len(whole)))
        answers.append([len(prompt) - 1 <= i < len(whole) - 1 for i in range(length)])
        if len(ids) == count:
            break
    return np.array(ids, np.int32), np.array(answers)


def table_scores(
    cfg: ModelConfig, weights: Arrays, tok: Tokenizer, *, count: int = 120, length: int = 704
) -> dict[str, TableScore]:
    """What the choice of compressed rows is worth where the answer lies beyond the window."""
    ids, answer = long_tables(tok, count, length)
    device = {k: jnp.asarray(v) for k, v in weights.items()}
    out: dict[str, TableScore] = {}
    base = np.zeros(0)
    for name, (changed, scores) in _choices(cfg, length).items():
        with mock.patch.object(sequence, "index_scores", scores):
            run = jax.jit(partial(_answers, cfg=changed))
            parts = [
                run(device, ids[i : i + 8, :-1], ids[i : i + 8, 1:], answer[i : i + 8])
                for i in range(0, count, 8)
            ]
        loss, right = (np.concatenate([np.asarray(p[j]) for p in parts]) for j in (0, 1))
        base = loss if name == "indexer" else base
        more = loss - base
        error = float(np.std(more, ddof=1)) / count**0.5
        out[name] = TableScore(
            loss=float(loss.mean()), right=float(right.mean()),
            worse=float(more.mean()) / error if error else 0.0,
        )  # fmt: skip
    return out


def _answers(
    weights: dict[str, Array], token_BT: Array, target_BT: Array, answer_BT: Array, *,
    cfg: ModelConfig,
) -> tuple[Array, Array]:  # fmt: skip
    """Of every row: mean loss of the answer's tokens, and whether all of them are the likeliest."""
    p = jax.nn.log_softmax(_logits(weights, token_BT, cfg=cfg))
    loss = -jnp.take_along_axis(p, target_BT[:, :, None], axis=-1)[:, :, 0]
    mine = jnp.where(answer_BT, loss, 0.0)
    right = jnp.all((jnp.argmax(p, axis=-1) == target_BT) | ~answer_BT, axis=-1)
    return jnp.sum(mine, axis=-1) / jnp.sum(answer_BT, axis=-1, dtype=jnp.float32), right


def markdown(
    rows: Sequence[Row], choices: dict[str, Score], tables: dict[str, TableScore], base: Score,
    judge: Judge, source: str,
) -> str:  # fmt: skip
    """The page that goes into the documentation."""
    count = judge.rows[:, 1:].size
    lines = [
        "# Quality of the weight formats", "",
        "Written by `python -m bench.quality`. Each line rounds one class of matrices of"
        f" `{source}` to one format and leaves the rest in float32, on {count:,} held-out tokens of"
        f" Python's standard library in sequences of {judge.rows.shape[1] - 1}. The float model"
        f" needs {base.bits_per_byte:.4f} bits per byte; *change* is relative to that. KL is the"
        " divergence from the float model in thousandths of a nat per token, *top-1* the share of"
        " tokens with the same likeliest token. *imatrix*: with importance weights gathered from"
        " training text by `python -m bench.imatrix`, as `ds4jax convert --imatrix` uses them.",
        "", "The experts were trained under FP4 rounding: MXFP4 holds them exactly.", "",
        "![bits per byte](quality.svg)", "",
    ]  # fmt: skip
    for name in dict.fromkeys(r.tensors for r in rows):
        lines += [
            f"## {name}", "",
            "| format | bits | imatrix | bits per byte | change | KL/1000 | top-1 |",
            "|---|---:|---|---:|---:|---:|---:|",
        ]  # fmt: skip
        for r in rows:
            if r.tensors == name:
                s = r.score
                change = (s.bits_per_byte / base.bits_per_byte - 1) * 100
                lines.append(
                    f"| {r.format} | {r.bits_per_weight:.2f} | {'yes' if r.imatrix else ''} |"
                    f" {s.bits_per_byte:.4f} | {change:+.2f} % | {s.kl * 1000:.2f} |"
                    f" {s.top1 * 100:.1f} % |"
                )
        lines.append("")
    lines += ["## What the indexer's choice is worth", ""]
    lines += ["| compressed rows of ratio 4 | bits per byte | change |", "|---|---:|---:|"]
    for name, s in choices.items():
        change = (s.bits_per_byte / choices["indexer"].bits_per_byte - 1) * 100
        lines.append(f"| {name} | {s.bits_per_byte:.4f} | {change:+.2f} % |")
    top_k, window = judge.cfg.index_topk, judge.cfg.sliding_window
    lines += [
        "",
        f"Each choice but the second takes {top_k} rows; the window holds {window} tokens.", "",
        f"Held-out questions for one value of a table of {LINES} lines or more; *error* is the"
        " difference from the indexer's loss over its standard error:", "",
        "| compressed rows of ratio 4 | nats per token of the answer | change | error | right |",
        "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name, t in tables.items():
        change = (t.loss / tables["indexer"].loss - 1) * 100
        lines.append(
            f"| {name} | {t.loss:.4f} | {change:+.1f} % | {t.worse:+.1f} | {t.right * 100:.0f} % |"
        )
    return "\n".join(lines) + "\n"


def chart(rows: Sequence[Row], base: Score) -> str:
    """Loss over size, one line per class, formats without importance weights."""
    series: dict[str, list[tuple[float, float]]] = {}
    for r in sorted(rows, key=lambda r: r.bits_per_weight):
        if not r.imatrix and r.tensors not in ("router",):
            change = (r.score.bits_per_byte / base.bits_per_byte - 1) * 100
            series.setdefault(r.tensors, []).append((r.bits_per_weight, change))
    return plot.lines(
        "Loss of one class rounded alone", "bits per weight", "bits per byte, change in %", series
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.quality")
    parser.add_argument("model", nargs="?", default="nano")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--classes", nargs="+", default=CLASSES)
    parser.add_argument("--formats", nargs="+", default=FORMATS_MEASURED)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    source = model_file.open_model(args.model)
    cfg, weights, tok = source.model_config, read_weights(source), read_tokenizer(source)
    judge = Judge(cfg, weights, tok, text_rows(tok, held_out=True, rows=args.rows,
                                               length=args.length))  # fmt: skip
    base = judge.score({})
    print(f"float model: {base.bits_per_byte:.4f} bits per byte")
    training = text_rows(tok, held_out=False, rows=16, length=args.length)
    plain = params.group_layers(cfg, scan=False)
    tree = nano_model.as_params(cfg, judge.device, args.length, plain)
    importance = imatrix.gather(tree, cfg, training[:, :-1])
    choices = indexer_scores(judge)
    tables = table_scores(cfg, weights, tok)
    for name, s in choices.items():
        t = tables[name]
        print(f"{name:12} {s.bits_per_byte:.4f} bits/byte, long tables {t.loss:.4f} nats")
    rows = []
    for row in table(judge, weights, importance, args.classes, args.formats):
        rows.append(row)
        s = row.score
        print(
            f"{row.tensors:16} {row.format:13} {'imatrix' if row.imatrix else '       '}"
            f" {s.bits_per_byte:.4f} bits/byte  KL {s.kl:.5f}  top-1 {s.top1:.3f}", flush=True,
        )  # fmt: skip
    if args.json:
        report = {"float": asdict(base), "rows": [asdict(r) for r in rows],
                  "indexer": {k: asdict(v) for k, v in choices.items()},
                  "tables": {k: asdict(v) for k, v in tables.items()}}  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1))
    if args.markdown:
        args.markdown.write_text(
            markdown(rows, choices, tables, base, judge, Path(args.model).name)
        )
    if args.plot:
        args.plot.write_text(chart(rows, base))


if __name__ == "__main__":
    main()
