"""One candidate's answer on its way out: sampled tokens in, wire deltas and the last event out.

Detokenising, parsing, stop strings and counting happen here, outside the engine thread. The token
ids are the truth; where a stop string ends the answer depends on them alone, however late this code
runs.
"""

from __future__ import annotations

from typing import Any

from ds4jax import parser
from ds4jax.request import Ended, Finish, Tokens
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
        done: the answer has ended by its own text (stop string or turn marker), before the
            scheduler said so; tokens that still come are dropped.
        finished: the last event was made.
        tokens: output tokens so far.
    """

    def __init__(self, call: Call, candidate: int, tokenizer: Tokenizer | None) -> None:
        self.candidate = candidate
        self.done = False
        self.finished = False
        self.tokens = 0
        self.first_token_at: float | None = None
        self.last_token_at = 0.0
        self.proposed = 0
        self.verified = 0
        self.accepted = 0
        self.finish_name = ""
        self._call = call
        self._plan = call.output
        self._parser: parser.TokenParser | None = None
        self._turn_ids: frozenset[int] = frozenset()
        self._inline_open = False
        if tokenizer is not None:
            self._parser = parser.TokenParser(
                tokenizer,
                start=call.prompt.start,
                tools_declared=call.prompt.tools_declared,
                stop_strings=call.stop_strings,
                include_stop_string=call.output.include_stop,
            )
            m = tokenizer.markers
            self._turn_ids = frozenset((m.bos, m.user, m.assistant))

    @property
    def reasoning_tokens(self) -> int:
        """Output tokens that belong to the reasoning."""
        return self._parser.reasoning_tokens if self._parser else 0

    @property
    def anomalies(self) -> dict[str, int]:
        """What the model did wrong, by reason."""
        return dict(self._parser.output.anomalies) if self._parser else {}

    def push(self, event: Tokens) -> Any | None:
        """A delta with what the tokens give, or None if there is nothing to show yet."""
        if self.done or self.finished:
            return None
        delta = pb.Delta(candidate=self.candidate)
        self.proposed += event.proposed
        self.verified += event.verified
        self.accepted += event.accepted
        for token in event.tokens:
            if self.first_token_at is None:
                self.first_token_at = event.at
            self.last_token_at = event.at
            self.tokens += 1
            if self._plan.token_ids:
                delta.token_ids.append(token.token)
            if self._plan.logprobs:
                row = delta.logprobs.add(token_id=token.token, logprob=token.logprob)
                for token_id, logprob in token.top:
                    row.top.add(token_id=token_id, logprob=logprob)
            if self._parser is not None and self._shown(token.token):
                self._put(delta, self._parser.push(token.token))
                if self._parser.done:
                    self.done = True
                    break
        return delta if _has_content(delta) else None

    def _shown(self, token: int) -> bool:
        if self._call.ignore_eos and token in self._turn_ids:
            return False
        return token not in self._call.user_stop_ids or self._plan.include_stop

    def finish(self, ended: Ended | None, timings: Any, prompt: int, cached: int) -> list[Any]:
        """The last delta, if there is one, and the last event. `ended` None: ended by its text."""
        self.finished = True
        out: list[Any] = []
        reason = ended.finish.value if ended is not None else Finish.STOP.value
        finished = pb.Finished(candidate=self.candidate, timings=timings)
        if self._parser is not None:
            delta = pb.Delta(candidate=self.candidate)
            self._put(delta, self._parser.finish())
            if _has_content(delta):
                out.append(delta)
            parsed = self._parser.output
            if ended is None or ended.stop_token not in self._call.user_stop_ids:
                reason = parser.finish_reason(reason, parsed)  # type: ignore[arg-type]
            for call in parsed.tool_calls:
                finished.tool_calls.add(id=call.id, name=call.name, arguments_json=call.arguments)
            if parsed.truncated_call is not None:
                finished.truncated_call = parsed.truncated_call.name or ""
            if parsed.matched_stop is not None:
                finished.stop_string = parsed.matched_stop
        if ended is not None and ended.stop_token in self._call.user_stop_ids:
            finished.stop_token_id = ended.stop_token
        self.finish_name = reason
        finished.finish_reason = _FINISH[reason]
        finished.usage.CopyFrom(
            pb.Usage(
                prompt_tokens=prompt, cached_tokens=cached, output_tokens=self.tokens,
                reasoning_tokens=self.reasoning_tokens, draft_proposed_tokens=self.verified,
                draft_accepted_tokens=self.accepted,
            )
        )  # fmt: skip
        out.append(finished)
        return out

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
