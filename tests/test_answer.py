"""From a prompt with its options to lanes, and from sampled tokens to text."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ds4jax import parser
from ds4jax.answer import Answer, PromptIds, lane_specs, output_budget, stop_ids
from ds4jax.config import ConfigError, SamplingParams, StoppingCriteria
from ds4jax.plan import ExecutorLimits, TokenResult
from ds4jax.request import Ended, Finish, ServiceError, Tokens
from tests.text_tools import toy_tokenizer

LIMITS = ExecutorLimits(num_slots=4, max_ctx=100, num_pages=4, chunk_tokens=128, vocab_size=274)
TOY = toy_tokenizer()
M = TOY.markers


def prompt(text: str = "abc") -> PromptIds:
    return PromptIds(ids=tuple(TOY.encode(text, markers=True)))


def lanes(sampling: SamplingParams | None = None, candidates: int = 1, **stopping: object):  # type: ignore[no-untyped-def]
    return lane_specs(
        prompt(), sampling or SamplingParams(seed=0), StoppingCriteria(**stopping),  # type: ignore[arg-type]
        limits=LIMITS, tokenizer=TOY, candidates=candidates,
    )  # fmt: skip


# -- lanes -----------------------------------------------------------------------------------------


def test_a_lane_has_all_that_was_asked_for() -> None:
    (lane,) = lanes(max_output_tokens=7, min_output_tokens=2, stop_token_ids=(5, 5, M.eos))
    assert lane.prompt.dtype == np.int32 and lane.prompt.tolist() == list(b"abc")
    assert (lane.max_output_tokens, lane.min_output_tokens) == (7, 2)
    assert lane.stop_ids == (M.eos, M.bos, M.user, M.assistant, 5)
    assert lane.reasoning is None and lane.sampling.seed == 0


def test_end_markers_can_be_ignored_but_not_the_users_ids() -> None:
    assert lanes(ignore_eos=True, stop_token_ids=(5,))[0].stop_ids == (5,)
    assert lanes(ignore_eos=True)[0].stop_ids == ()


def test_candidates_differ_in_their_number_only() -> None:
    specs = lanes(candidates=3)
    assert [s.candidate for s in specs] == [0, 1, 2]
    same = [f.name for f in dataclasses.fields(specs[0]) if f.name not in ("candidate", "replay")]
    assert all(getattr(s, n) is getattr(specs[0], n) for s in specs for n in same)


def test_a_missing_seed_is_drawn_and_zero_is_a_seed() -> None:
    drawn = {lanes(SamplingParams())[0].sampling.seed for _ in range(8)}
    assert len(drawn) == 8 and all(s is not None and 0 <= s < 1 << 64 for s in drawn)
    assert lanes(SamplingParams(seed=0))[0].sampling.seed == 0


@pytest.mark.parametrize(("prompt_len", "asked", "budget"), [
    (3, None, 97), (99, None, 1), (3, 97, 97), (100, 0, 0), (3, 0, 0),
])  # fmt: skip
def test_budget(prompt_len: int, asked: int | None, budget: int) -> None:
    stopping = StoppingCriteria(max_output_tokens=asked)
    assert output_budget(prompt_len, stopping, LIMITS) == budget


@pytest.mark.parametrize(("prompt_len", "asked"), [(100, None), (3, 98), (100, 1), (101, 0)])
def test_what_does_not_fit_is_refused(prompt_len: int, asked: int | None) -> None:
    with pytest.raises(ServiceError) as caught:
        output_budget(prompt_len, StoppingCriteria(max_output_tokens=asked), LIMITS)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert caught.value.metadata["prompt_tokens"] == str(prompt_len)


def test_a_small_pool_bounds_the_budget_that_nobody_named() -> None:
    small = dataclasses.replace(LIMITS, max_ctx=4096, num_pages=2)
    assert output_budget(56, StoppingCriteria(), small) == 200
    with pytest.raises(ConfigError, match="min_output_tokens is 201, there is room for 200"):
        output_budget(56, StoppingCriteria(min_output_tokens=201), small)


@pytest.mark.parametrize(("kind", "bad"), [("stop", 274), ("stop", 999), ("bias", 274)])
def test_ids_outside_the_vocabulary_are_refused(kind: str, bad: int) -> None:
    with pytest.raises(ConfigError, match=f"is {bad}, must be in 0..273"):
        if kind == "stop":
            lanes(stop_token_ids=(3, bad))
        else:
            lanes(SamplingParams(seed=0, logit_bias=((bad, 1.0),)))


def test_something_must_be_left_to_say() -> None:
    size = LIMITS.vocab_size
    ends = stop_ids(StoppingCriteria(), TOY)
    most = tuple((i, -100.0) for i in range(size) if i not in ends)
    assert lanes(SamplingParams(seed=0, logit_bias=most))
    for sampling, stopping in (
        (SamplingParams(seed=0, logit_bias=tuple((i, -100.0) for i in range(size))), {}),
        (SamplingParams(seed=0, logit_bias=most), {"min_output_tokens": 1}),
    ):
        with pytest.raises(ConfigError, match="bans every id"):
            lanes(sampling, **stopping)


def test_reasoning_limit_knows_where_the_answer_starts() -> None:
    open_ = PromptIds(ids=(1, 2), start="reasoning", tools_declared=True)
    for given, starts_open, also in ((prompt(), False, ()), (open_, True, (M.dsml,))):
        (lane,) = lane_specs(
            given, SamplingParams(seed=0), StoppingCriteria(max_reasoning_tokens=4),
            limits=LIMITS, tokenizer=TOY,
        )  # fmt: skip
        limit = lane.reasoning
        assert limit is not None and limit.starts_open is starts_open
        assert (limit.max_tokens, limit.open_id, limit.close_id) == (4, M.think_open, M.think_close)
        assert limit.also_close_ids == also


# -- answers ---------------------------------------------------------------------------------------


def feed(answer: Answer, ids: list[int], ended: Ended | None = None):  # type: ignore[no-untyped-def]
    """All events of tokens that come one by one, and the result."""
    events = []
    for i, token in enumerate(ids):
        events += answer.push(Tokens(float(i), 0, (TokenResult(token),), 2, 1, 1))
    last, result = answer.finish(None if answer.done else ended or Ended(9.0, 0, Finish.LENGTH))
    return events + last, result


def content(events: list[parser.Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, parser.Content))


def test_text_reasoning_and_counts() -> None:
    answer = Answer(PromptIds(ids=(1,), start="reasoning"), StoppingCriteria(), TOY)
    ids = [*b"hm", M.think_close, *b"yes", M.eos]
    events, result = feed(answer, ids, Ended(9.0, 0, Finish.STOP, M.eos))
    assert content(events) == "yes"
    assert result.parsed is not None and result.parsed.reasoning == "hm"
    assert (result.finish_reason, result.stop_string, result.stop_token) == ("stop", None, None)
    assert result.ids == tuple(ids) and result.reasoning_tokens == 3
    assert (result.proposed, result.verified, result.accepted) == (14, 7, 7)
    assert (answer.first_token_at, answer.last_token_at) == (0.0, 6.0)


def test_a_stop_string_ends_it_and_is_not_shown() -> None:
    for include, shown in ((False, "one "), (True, "one END")):
        stopping = StoppingCriteria(stop_strings=("END", "nothing"))
        answer = Answer(prompt(), stopping, TOY, include_stop=include)
        events, result = feed(answer, list(b"one END two"))
        assert answer.done and content(events) == shown
        assert (result.finish_reason, result.stop_string) == ("stop", "END")
        assert len(result.ids) == 7, "tokens that came later are dropped"


def test_the_users_stop_id_is_reported_and_hidden() -> None:
    stop = ord("!")
    answer = Answer(prompt(), StoppingCriteria(stop_token_ids=(stop,)), TOY)
    events, result = feed(answer, list(b"hey!"), Ended(9.0, 0, Finish.STOP, stop))
    assert content(events) == "hey"
    assert (result.finish_reason, result.stop_token) == ("stop", stop)
    assert result.ids[-1] == stop


def test_ignored_turn_markers_do_not_end_the_text() -> None:
    answer = Answer(prompt(), StoppingCriteria(ignore_eos=True), TOY)
    events, _ = feed(answer, [*b"a", M.eos, M.user, *b"b"])
    assert content(events) == "ab" and not answer.done
    answer = Answer(prompt(), StoppingCriteria(), TOY)
    events, result = feed(answer, [*b"a", M.user, *b"b"])
    assert content(events) == "a" and answer.done and result.finish_reason == "stop"


def test_what_was_held_back_comes_at_the_end() -> None:
    answer = Answer(prompt(), StoppingCriteria(stop_strings=("END",)), TOY)
    pushed = answer.push(Tokens(0.0, 0, tuple(TokenResult(b) for b in b"aEN\xe2")))
    assert content(pushed) == "a"
    last, result = answer.finish(Ended(1.0, 0, Finish.TIME_LIMIT))
    assert content(last) == "EN\ufffd" and result.finish_reason == "time_limit"


def test_without_a_tokenizer_there_are_ids_only() -> None:
    answer = Answer(PromptIds(ids=(1,)), StoppingCriteria(stop_token_ids=(9,)), None)
    events, result = feed(answer, [3, 9], Ended(9.0, 0, Finish.STOP, 9))
    assert events == [] and result.parsed is None and result.stop_token == 9
    assert result.ids == (3, 9) and result.finish_reason == "stop"
