"""The model in the package: what it says, how well it predicts, and that it survives conversion."""

from __future__ import annotations

import ast
import functools
import json
import lzma
import math
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ds4jax
from bench import nano_corpus, nano_tasks, quality
from bench.quality import read_tokenizer
from ds4jax import chat, convert, convert_hf, model_file, tensors
from ds4jax.chat_request import ChatRequest, Message
from ds4jax.config import RuntimeConfig
from ds4jax.parser import ParsedOutput, TokenParser
from ds4jax.tokenizer import Tokenizer

RUN = RuntimeConfig(max_ctx=1024, num_slots=1)


@functools.cache
def nano() -> tuple[model_file.ModelFile, Tokenizer, Any, Any]:
    """File, tokenizer, configuration and weights."""
    source = model_file.open_model("nano")
    cfg, params = ds4jax.load(source, RUN)  # type: ignore[arg-type]
    return source, read_tokenizer(source), cfg, params


@functools.cache
def step() -> Any:
    """One token in, logits out; the only program these tests compile for the model."""
    cfg = nano()[2]
    return jax.jit(functools.partial(ds4jax.decode, cfg=cfg, run=RUN), donate_argnums=1)


def logits_of(ids: list[int]) -> list[np.ndarray[Any, Any]]:
    """Logits after every token of a sequence."""
    _, _, cfg, params = nano()
    cache, out = ds4jax.init(cfg, RUN), []
    for token in ids:
        cache, logits, _ = step()(params, cache, jnp.array([token], jnp.int32))
        out.append(np.asarray(logits[0]))
    return out


def greedy(ids: list[int], limit: int = 120) -> list[int]:
    """The likeliest continuation, up to and without the end marker; must end by itself."""
    _, tok, cfg, params = nano()
    cache, out, token = ds4jax.init(cfg, RUN), [], -1
    for token in ids:
        cache, logits, _ = step()(params, cache, jnp.array([token], jnp.int32))
    while (token := int(jnp.argmax(logits[0]))) != tok.markers.eos:
        assert len(out) < limit, f"no end after {tok.decode(out)!r}"
        out.append(token)
        cache, logits, _ = step()(params, cache, jnp.array([token], jnp.int32))
    return out


def answer(question: str, *, thinking: bool, **kwargs: Any) -> ParsedOutput:
    """The parsed greedy answer to one question."""
    tok = nano()[1]
    request = ChatRequest(
        messages=(Message(role="user", content=question),), thinking=thinking, **kwargs
    )
    prompt = chat.render(request, nano_corpus.PROFILE)
    parser = TokenParser(tok, start=prompt.start, tools_declared=prompt.tools_declared)
    for token in greedy(tok.encode_pieces(prompt.pieces)):
        parser.push(token)
    parser.finish()
    assert not parser.output.anomalies
    return parser.output


def test_the_file_is_what_it_says() -> None:
    source, tok, cfg, _ = nano()
    assert source.path.stat().st_size <= 10_000_000
    assert {0, 4, 128} == set(cfg.compress_ratios)
    assert cfg.num_hash_layers == 3 and cfg.sliding_window == 128
    assert source.metadata["general.name"] == "ds4-nano"
    assert chat.detect_profile(metadata=source.metadata).warning is None
    assert tok.vocab_size == cfg.vocab_size
    parameters = sum(math.prod(s.shape) for s in tensors.specs(cfg) if s.kind != "table")
    assert 5e6 < parameters < 15e6
    formats = {t.format for t in source.tensors.values() if ".experts." in t.spec.name}
    assert formats == {"mxfp4"}


def test_it_writes_python() -> None:
    tok = nano()[1]
    for prompt in ("def fibonacci(n):", "def factorial(n):\n"):
        text = prompt + tok.decode(greedy(tok.encode_completion(prompt)))
        tree = ast.parse(text)
        assert isinstance(tree.body[0], ast.FunctionDef) and "return" in text, text
    space: dict[str, Any] = {}
    exec(compile(tree, "nano", "exec"), space)
    assert [space["factorial"](n) for n in (1, 2, 5)] == [1, 2, 120]


def test_it_adds_and_stops_with_thinking_apart() -> None:
    assert answer("What is 34 + 58?", thinking=False).content == "34 + 58 = 92"
    for effort in ("low", "high"):
        said = answer("What is 34 + 58?", thinking=True, effort=effort)
        assert said.content == "34 + 58 = 92"
        assert "12" in said.reasoning and "</think>" not in said.reasoning + said.content


def test_it_calls_the_tool_it_is_offered() -> None:
    said = answer("What is the weather in Paris?", thinking=False, tools=(nano_tasks.WEATHER,))
    (call,) = said.tool_calls
    assert call.name == "get_weather" and json.loads(call.arguments) == {"city": "Paris"}


def test_it_finds_a_value_beyond_its_window() -> None:
    rng = random.Random(5)
    task = next(
        t for t in (nano_tasks.draw(rng, held_out=True, name="lookup") for _ in range(200))
        if t.question.count("\n") > 40
    )  # fmt: skip
    tok = nano()[1]
    assert len(tok.encode(task.question, markers=False)) > 2 * nano()[2].sliding_window
    said = answer(task.question, thinking=False).content
    # The form of the answer is sure; whether the number is right is a rate (docs/nano.md).
    assert said.rsplit(" ", 1)[0] == task.answer.rsplit(" ", 1)[0]


def test_it_predicts_python_better_than_xz() -> None:
    tok = nano()[1]
    held = [s.text for s in nano_corpus.sources() if s.held_out]
    whole = "".join(held).encode()
    xz = 8 * len(lzma.compress(whole, preset=9)) / len(whole)
    # A stretch of running text out of the middle of three files.
    nats, size = 0.0, 0
    for text in sorted(held, key=len)[-3:]:
        ids = tok.encode_completion(text[len(text) // 2 :][:900])
        for logits, target in zip(logits_of(ids)[:-1], ids[1:], strict=False):
            nats += float(np.logaddexp.reduce(logits) - logits[target])
            size += len(tok.bytes_of(target))
    bits = nats / math.log(2) / size
    assert bits < 0.95 * xz, (bits, xz)


def test_a_checkpoint_and_back_gives_equal_logits(tmp_path: Path) -> None:
    source, tok, cfg, _ = nano()
    convert_hf.convert(source, tmp_path / "hf")
    back = tmp_path / "back.gguf"
    convert.convert(model_file.open_model(tmp_path / "hf"), back, convert.parse_types(["lossless"]))
    again_cfg, again = ds4jax.load(back, RUN)
    assert again_cfg == cfg
    ids = tok.encode_completion("import os\n\n\ndef main():")
    cache, want = ds4jax.init(cfg, RUN), logits_of(ids)
    for token, expected in zip(ids, want, strict=True):
        cache, got, _ = step()(again, cache, jnp.array([token], jnp.int32))
        assert np.array_equal(got[0], expected)


@pytest.mark.slow
def test_held_out_questions_are_answered() -> None:
    from bench import nano_chat

    _, tok, cfg, params = nano()
    rates = nano_chat.rates(nano_chat.ask(params, cfg, tok, nano_chat.questions(20)))
    assert len(rates) == 11
    right = {kind: (r["direct"] + r["thinking"]) / 2 for kind, r in rates.items()}
    assert min(right.values()) > 0.5, right
    assert np.mean(list(right.values())) > 0.85, right


def test_answers_of_long_tables_are_marked() -> None:
    tok = nano()[1]
    ids, answer = quality.long_tables(tok, 3, 704)
    for row, marks in zip(ids, answer, strict=True):
        said = tok.decode([int(i) for i in row[1:][marks] if i != tok.markers.eos])
        question = tok.decode(row[: int(np.flatnonzero(marks)[0]) + 1].tolist())
        assert question.count("\n") >= quality.LINES and said.split()[-1] in question, said


@pytest.mark.slow
def test_the_indexer_matters_where_the_answer_is_far() -> None:
    source, tok, cfg, _ = nano()
    scores = quality.table_scores(cfg, quality.read_weights(source), tok, count=64)
    own, every = scores["indexer"], scores["all rows"]
    assert abs(every.loss / own.loss - 1) < 0.02, scores
    assert scores["random rows"].loss > 1.05 * own.loss and scores["random rows"].worse > 3, scores
