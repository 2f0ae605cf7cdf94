"""Between a prompt with its options and one lane: what may be generated, and what it says.

`lane_specs` resolves a request (budget, stop ids, reasoning limit, seed) into lanes; `Answer` takes
a lane's sampled tokens and gives reasoning, content and tool calls as they come, ends at a stop
string, and counts. Nothing here schedules, prints or knows a wire format; no JAX.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds4jax import config, parser, refusals
from ds4jax.chat import Prompt, StartState
from ds4jax.config import SamplingParams, StoppingCriteria
from ds4jax.plan import ExecutorLimits, LaneSpec, ReasoningLimit, TokenResult
from ds4jax.request import Ended, Finish, Tokens
from ds4jax.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class PromptIds:
    """A prompt as ids, and where its answer starts."""

    ids: tuple[int, ...]
    start: StartState = "content"
    tools_declared: bool = False


def chat_prompt(prompt: Prompt, tokenizer: Tokenizer) -> PromptIds:
    """Ids of a rendered chat.

    Raises:
        TokenizerError: a marker that the vocabulary lacks, or text that has no UTF-8 form.
    """
    ids = tuple(tokenizer.encode_pieces(prompt.pieces))
    return PromptIds(ids=ids, start=prompt.start, tools_declared=prompt.tools_declared)


def output_budget(prompt_len: int, stopping: StoppingCriteria, limits: ExecutorLimits) -> int:
    """Output tokens allowed: as many as asked for, else what fits into context and page pool.

    Raises:
        ServiceError: CONTEXT_LENGTH_EXCEEDED.
        ConfigError: fewer fit than the minimum that was asked for.
    """
    room = limits.max_ctx - prompt_len
    asked = stopping.max_output_tokens
    if room < (1 if asked is None else asked):
        raise refusals.context_length_exceeded(prompt_len, asked, limits.max_ctx)
    if asked is not None:
        return asked
    room = min(room, max(1, limits.num_pages * config.PAGE_TOKENS - prompt_len))
    if room < stopping.min_output_tokens:
        least = stopping.min_output_tokens
        text = f"min_output_tokens is {least}, there is room for {room} tokens"
        raise config.ConfigError("stopping", [text])
    return room


def stop_ids(stopping: StoppingCriteria, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end an answer: end of text and turn markers (unless ignored), then the user's."""
    own: tuple[int, ...] = ()
    if tokenizer is not None and not stopping.ignore_eos:
        m = tokenizer.markers
        own = (m.eos, m.bos, m.user, m.assistant)
    return tuple(dict.fromkeys((*own, *stopping.stop_token_ids)))


def reasoning_limit(
    stopping: StoppingCriteria, prompt: PromptIds, tokenizer: Tokenizer | None
) -> ReasoningLimit | None:
    """The limit on reasoning tokens, if one was asked for."""
    if stopping.max_reasoning_tokens is None or tokenizer is None:
        return None
    m = tokenizer.markers
    return ReasoningLimit(
        max_tokens=stopping.max_reasoning_tokens,
        starts_open=prompt.start == "reasoning",
        open_id=m.think_open,
        close_id=m.think_close,
        also_close_ids=(m.dsml,) if prompt.tools_declared else (),
    )


def lane_specs(
    prompt: PromptIds,
    sampling: SamplingParams,
    stopping: StoppingCriteria,
    *,
    limits: ExecutorLimits,
    tokenizer: Tokenizer | None,
    candidates: int = 1,
) -> tuple[LaneSpec, ...]:
    """One lane per candidate. An absent seed is drawn here; the lanes' `sampling.seed` tells it.

    Raises:
        ServiceError: the prompt and its output do not fit the context.
        ConfigError: ids outside the vocabulary, all of them banned, or less room than the minimum
            asked for.
    """
    check_ids(prompt.ids, "prompt", limits.vocab_size)
    check_ids(stopping.stop_token_ids, "stop_token_ids", limits.vocab_size)
    check_ids([i for i, _ in sampling.logit_bias], "logit_bias", limits.vocab_size)
    ends = stop_ids(stopping, tokenizer)
    banned = {i for i, bias in sampling.logit_bias if bias <= config.BAN}
    banned |= set(ends) if stopping.min_output_tokens else set()
    if len(banned) >= limits.vocab_size:
        raise config.ConfigError("logit_bias", ["bans every id of the vocabulary"])
    if sampling.seed is None:
        sampling = dataclasses.replace(sampling, seed=secrets.randbits(64))
    base = LaneSpec(
        prompt=np.array(prompt.ids, np.int32),
        sampling=sampling,
        max_output_tokens=output_budget(len(prompt.ids), stopping, limits),
        stop_ids=ends,
        min_output_tokens=stopping.min_output_tokens,
        reasoning=reasoning_limit(stopping, prompt, tokenizer),
    )
    return tuple(dataclasses.replace(base, candidate=c) for c in range(candidates))


def check_ids(ids: Sequence[int], what: str, vocab_size: int) -> None:
    """Every id must be of the vocabulary.

    Raises:
        ConfigError: naming the first that is not.
    """
    for i, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            text = f"entry {i} is {token}, must be in 0..{vocab_size - 1}, the model's vocabulary"
            raise config.ConfigError(what, [text])


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished answer. `parsed` is None for a model without a tokenizer."""

    finish_reason: parser.FinishReason
    tokens: tuple[TokenResult, ...]  # the stop token, if one ended it, among them
    parsed: parser.ParsedOutput | None
    stop_string: str | None
    stop_token: int | None  # one of the user's stop ids
    reasoning_tokens: int
    proposed: int  # draft tokens made, given a row, and agreed with
    verified: int
    accepted: int

    @property
    def ids(self) -> tuple[int, ...]:
        """Output token ids."""
        return tuple(t.token for t in self.tokens)


class Answer:
    """The answer of one candidate while it is generated.

    Args:
        prompt: where the answer starts. stopping: stop strings and ids.
        tokenizer: None for a model without one: ids only, no events.
        include_stop: whether a matched stop string or id is shown.

    Attributes:
        done: the answer has ended by its own text (a stop string); later tokens are dropped.
        first_token_at, last_token_at: seconds on the scheduler's clock.
    """

    def __init__(
        self,
        prompt: PromptIds,
        stopping: StoppingCriteria,
        tokenizer: Tokenizer | None,
        *,
        include_stop: bool = False,
    ) -> None:
        self.done = False
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self._tokens: list[TokenResult] = []
        self._user_stops = frozenset(stopping.stop_token_ids)
        self._include_stop = include_stop
        self._hidden: frozenset[int] = frozenset() if include_stop else self._user_stops
        self._proposed = self._verified = self._accepted = 0
        self._parser: parser.TokenParser | None = None
        if tokenizer is not None:
            self._parser = parser.TokenParser(
                tokenizer,
                start=prompt.start,
                tools_declared=prompt.tools_declared,
                stop_strings=stopping.stop_strings,
                include_stop_string=include_stop,
            )
            if stopping.ignore_eos:  # turn markers would end the parser's turn
                m = tokenizer.markers
                self._hidden |= {m.bos, m.user, m.assistant}

    def push(self, event: Tokens) -> list[parser.Event]:
        """What one step's tokens say; nothing once `done`."""
        out: list[parser.Event] = []
        if self.done:
            return out
        self._proposed += event.proposed
        self._verified += event.verified
        self._accepted += event.accepted
        for token in event.tokens:
            if self.first_token_at is None:
                self.first_token_at = event.at
            self.last_token_at = event.at
            self._tokens.append(token)
            if self._parser is None or token.token in self._hidden:
                continue
            out += self._parser.push(token.token)
            if self._parser.done:
                self.done = True
                break
        return out

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return len(self._tokens)

    @property
    def reasoning_tokens(self) -> int:
        """Output tokens so far that belong to the reasoning."""
        return self._parser.reasoning_tokens if self._parser is not None else 0

    @property
    def anomalies(self) -> dict[str, int]:
        """What the model did wrong so far, by reason."""
        return dict(self._parser.output.anomalies) if self._parser is not None else {}

    def finish(self, ended: Ended | None) -> tuple[list[parser.Event], Result]:
        """The last events and the whole answer. `ended` None: by its own text (`done`)."""
        events = self._parser.finish() if self._parser is not None else []
        parsed = self._parser.output if self._parser is not None else None
        stop_token = None
        if ended is not None and ended.stop_token in self._user_stops:
            stop_token = ended.stop_token
        ending: parser.Ending = (ended.finish if ended is not None else Finish.STOP).value
        reason: parser.FinishReason = ending
        if parsed is not None and stop_token is None:
            reason = parser.finish_reason(ending, parsed)
        return events, Result(
            finish_reason=reason,
            tokens=tuple(self._tokens),
            parsed=parsed,
            stop_string=parsed.matched_stop if parsed is not None else None,
            stop_token=stop_token,
            reasoning_tokens=self._parser.reasoning_tokens if self._parser is not None else 0,
            proposed=self._proposed,
            verified=self._verified,
            accepted=self._accepted,
        )
