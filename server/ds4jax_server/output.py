"""One candidate's answer on its way out: wire deltas and the last event.

Detokenising, parsing, stop strings and counting are `ds4jax.answer`'s, outside the engine thread.
The token ids are the truth; where a stop string ends the answer depends on them alone, however late
this code runs.
"""

from __future__ import annotations

from typing import Any

from ds4jax import parser
from ds4jax.answer import Answer, Result
from ds4jax.request import Ended, Tokens
from ds4jax.tokenizer import Tokenizer
from ds4jax_server.convert import Call
from ds4jax_server.pb import generation_pb2 as pb

_FINISH = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
    "time_limit": pb.FINISH_REASON_TIME_LIMIT,
}


class CandidateOutput:
    """State of one candidate.

    Attributes:
        answer: what has been said so far. result: the whole, once it has ended.
    """

    def __init__(self, call: Call, candidate: int, tokenizer: Tokenizer | None) -> None:
        self.candidate = candidate
        self.answer = Answer(
            call.prompt, call.stopping, tokenizer, include_stop=call.output.include_stop
        )
        self.result: Result | None = None
        self._call = call
        self._plan = call.output
        self._inline_open = False

    @property
    def done(self) -> bool:
        """Whether the answer has ended by its own text, before the scheduler said so."""
        return self.answer.done

    @property
    def finished(self) -> bool:
        """Whether the last event was made."""
        return self.result is not None

    @property
    def tokens(self) -> int:
        """Output tokens so far."""
        return self.answer.num_tokens

    def push(self, event: Tokens) -> Any | None:
        """A delta with what the tokens give, or None if there is nothing to show yet."""
        if self.done or self.finished:
            return None
        delta = pb.Delta(candidate=self.candidate)
        before = self.tokens
        events = self.answer.push(event)
        for token in event.tokens[: self.tokens - before]:
            if self._plan.token_ids:
                delta.token_ids.append(token.token)
            if self._plan.logprobs:
                row = delta.logprobs.add(token_id=token.token, logprob=token.logprob)
                for token_id, logprob in token.top:
                    row.top.add(token_id=token_id, logprob=logprob)
        self._put(delta, events)
        return delta if _has_content(delta) else None

    def finish(self, ended: Ended | None, timings: Any, cached: int) -> list[Any]:
        """The last delta, if there is one, and the last event. `ended` None: by its own text."""
        events, result = self.answer.finish(ended)
        self.result = result
        delta = pb.Delta(candidate=self.candidate)
        self._put(delta, events)
        finished = pb.Finished(
            candidate=self.candidate, timings=timings, finish_reason=_FINISH[result.finish_reason]
        )
        if result.parsed is not None:
            for call in result.parsed.tool_calls:
                finished.tool_calls.add(id=call.id, name=call.name, arguments_json=call.arguments)
            if result.parsed.truncated_call is not None:
                finished.truncated_call = result.parsed.truncated_call.name or ""
        if result.stop_string is not None:
            finished.stop_string = result.stop_string
        if result.stop_token is not None:
            finished.stop_token_id = result.stop_token
        finished.usage.CopyFrom(
            pb.Usage(
                prompt_tokens=len(self._call.prompt.ids), cached_tokens=cached,
                output_tokens=self.tokens, reasoning_tokens=result.reasoning_tokens,
                draft_proposed_tokens=result.verified, draft_accepted_tokens=result.accepted,
            )
        )  # fmt: skip
        return [delta, finished] if _has_content(delta) else [finished]

    def _put(self, delta: Any, events: list[parser.Event]) -> None:
        for event in events:
            if isinstance(event, parser.Reasoning):
                self._put_reasoning(delta, event.text)
                continue
            if self._inline_open:
                self._inline_open = False
                delta.content += "</think>"
            if isinstance(event, parser.Content):
                delta.content += event.text
            elif isinstance(event, parser.CallStart):
                piece = delta.tool_calls.add(index=event.index)
                piece.start.id, piece.start.name = event.id, event.name
            elif isinstance(event, parser.CallArguments):
                delta.tool_calls.add(index=event.index, arguments=event.text)
            else:
                delta.tool_calls.add(index=event.index).end.SetInParent()

    def _put_reasoning(self, delta: Any, text: str) -> None:
        if self._plan.reasoning == "separate":
            delta.reasoning += text
        elif self._plan.reasoning == "inline":
            if not self._inline_open:
                self._inline_open = True
                delta.content += "<think>"
            delta.content += text


def _has_content(delta: Any) -> bool:
    return bool(
        delta.reasoning or delta.content or delta.tool_calls or delta.token_ids or delta.logprobs
    )


def merge(into: Any, more: Any) -> None:
    """Append a later delta of the same candidate to an earlier one."""
    into.reasoning += more.reasoning
    into.content += more.content
    into.tool_calls.extend(more.tool_calls)
    into.token_ids.extend(more.token_ids)
    into.logprobs.extend(more.logprobs)
