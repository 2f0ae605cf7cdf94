"""One Generate call on its way out: the events of its request become messages in their order.

It waits for events, sends signs of life while there are none, and lets a client that does not read
hold up nobody but itself. What a candidate says is `output`; which calls exist is `service`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any
from urllib.parse import quote

from google.protobuf import duration_pb2

from ds4jax import refusals
from ds4jax.request import Ended, Failed, Phase, Request, Started, Stream, Tokens
from ds4jax.scheduler import Scheduler
from ds4jax_server.convert import Call
from ds4jax_server.engine import Engine
from ds4jax_server.metrics import Metrics
from ds4jax_server.output import CandidateOutput, merge
from ds4jax_server.pb import generation_pb2 as pb
from ds4jax_server.settings import ServedModel, ServerConfig

_PHASES = {
    Phase.QUEUED: pb.Progress.STATE_QUEUED,
    Phase.PREFILL: pb.Progress.STATE_PREFILL,
    Phase.DECODE: pb.Progress.STATE_DECODE,
}


ECHO_CHARACTERS = 1 << 16
"""Of an echoed prompt in one message."""
FAILED_SECONDS = 0.25
"""For a client to take a message that it has not read when its request fails."""
PENDING_BYTES = 1 << 18
"""A collected delta of this size goes out before its time."""


def duration(seconds: float) -> Any:
    """A wire duration."""
    out = duration_pb2.Duration()
    out.FromNanoseconds(max(0, round(seconds * 1e9)))
    return out


class ClientGone(Exception):
    """Nobody is left to write to."""


class Run:
    """One Generate call: its request, its candidates, and what has been sent.

    Args:
        request_id: until the request says another one. began: when the call came.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        metrics: Metrics,
        context: Any,
        request_id: str,
        began: float,
    ) -> None:
        self.engine = engine
        self.config = config
        self.metrics = metrics
        self.context = context
        self.id = request_id
        self.began = began
        self.call: Call | None = None
        self.request: Request | None = None
        self.scheduler: Scheduler | None = None
        self.outputs: list[CandidateOutput] = []
        self.started: Started | None = None
        self.reason = ""  # of the status that it ended with
        left = context.time_remaining()
        self.deadline: float | None = None if left is None else began + left
        self._pending: dict[int, Any] = {}
        self._stream = Stream(config.stream_events, config.stream_bytes, self._notify)
        self._wake = asyncio.Event()
        self._signalled = False
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._patience = max(1.0, config.scheduler.slow_client_grace)
        self._gave_up = False
        self._last_sent = began
        self._last_delta = began

    # ---- the engine's side ---------------------------------------------------------------------

    def _notify(self) -> None:
        """Called by the engine thread after every event. A failure is told even when earlier
        events have not been looked at yet: the call may wait for a client that does not read."""
        if not self._signalled or self._stream.failure is not None:
            self._signalled = True
            self.engine.handover.add(self._wake_up)

    def _wake_up(self) -> None:
        self._wake.set()
        if self._task is not None and self._stream.failure is not None:
            self._loop.call_later(FAILED_SECONDS, self._overdue, self._task)

    # ---- the call ------------------------------------------------------------------------------

    async def go(self, call: Call, model: ServedModel) -> None:
        """Submit the request and send what comes of it, to the end.

        Raises:
            ServiceError: it ended with a status. ClientGone: nobody listens any more.
        """
        self.call = call
        self.scheduler = self.engine.scheduler
        self.outputs = [
            CandidateOutput(call, c, model.tokenizer) for c in range(len(call.lanes))
        ]  # fmt: skip
        request = Request(
            id=self.id, lanes=call.lanes, deadline=self.deadline,
            time_limit=call.stopping.time_limit, stream=self._stream,
        )  # fmt: skip
        self.scheduler.submit(request)
        self.request = request
        self.metrics.active.inc()
        await self.context.send_initial_metadata(self._initial_metadata(model))
        while not all(o.finished for o in self.outputs):
            await self._wait()
            await self._handle_events(model)

    def _initial_metadata(self, model: ServedModel) -> tuple[tuple[str, str], ...]:
        out = [
            ("x-request-id", self.id),
            ("ds4jax-model", quote(model.id, safe=" /")),
            ("ds4jax-numerics", model.numerics_label),
        ]
        if model.approximate:
            out.append(("ds4jax-approximate", f"experts_per_token={model.experts_per_token}"))
        if model.unqualified:
            out.append(("ds4jax-unqualified", "answers may depend on load"))
        return tuple(out)

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """Usage of a call that failed after it had started."""
        if self.started is None or self.call is None:
            return ()
        return (
            ("ds4jax-prompt-tokens", str(len(self.call.prompt.ids))),
            ("ds4jax-output-tokens", str(sum(o.tokens for o in self.outputs))),
        )

    async def _wait(self) -> None:
        """Until there are events; meanwhile collected deltas and signs of life go out in time."""
        assert self.call is not None
        while not self._wake.is_set():
            now = time.monotonic()
            due = self._last_sent + self.call.output.progress
            if self._pending:
                due = min(due, self._last_delta + self.call.output.min_delta)
            if due <= now:
                await self._on_time(now)
                continue
            # Not `wait_for`: its task of its own takes two more rounds of the loop to wake the
            # call, and each round may wait for the engine thread to let the interpreter go.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due - now):
                    await self._wake.wait()

    async def _on_time(self, now: float) -> None:
        assert self.call is not None and self.request is not None
        if self._pending and self._last_delta + self.call.output.min_delta <= now:
            await self._flush()
            return
        p = self.request.progress
        await self._send(
            pb.GenerateResponse(
                progress=pb.Progress(
                    state=_PHASES[p.phase], queue_position=p.queue_position,
                    tokens_done=p.done, tokens_total=p.total,
                )
            )
        )  # fmt: skip

    async def _handle_events(self, model: ServedModel) -> None:
        assert self.request is not None and self.call is not None
        self._wake.clear()
        self._signalled = False
        while (event := self.request.stream.pop()) is not None:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Started):
                await self._start(event, model)
            elif isinstance(event, Tokens):
                await self._tokens(event)
            else:
                output = self.outputs[event.candidate]
                if not output.finished:
                    await self._finish(output, event)

    async def _start(self, event: Started, model: ServedModel) -> None:
        assert self.call is not None
        self.started = event
        lane = self.call.lanes[0]
        started = pb.Started(
            request_id=self.id, model=model.name, chat_profile=model.chat_profile,
            numerics=model.numerics_label, prompt_tokens=len(lane.prompt),
            cached_tokens=event.cached_tokens, seed=lane.sampling.seed,
            max_output_tokens=lane.max_output_tokens, queue_time=duration(event.queue_s),
        )  # fmt: skip
        await self._send(pb.GenerateResponse(started=started))
        if self.call.output.echo:
            text = self.call.prompt_text
            for output in self.outputs:
                for at in range(0, len(text), ECHO_CHARACTERS):
                    piece = text[at : at + ECHO_CHARACTERS]
                    delta = pb.Delta(candidate=output.candidate, content=piece)
                    await self._send(pb.GenerateResponse(delta=delta))

    async def _tokens(self, event: Tokens) -> None:
        assert self.call is not None and self.request is not None and self.scheduler is not None
        output = self.outputs[event.candidate]
        delta = output.push(event)
        if delta is not None:
            await self._delta(delta)
        if output.done and not output.finished:
            self.scheduler.stop_candidate(self.request, event.candidate)
            await self._finish(output, None)

    async def _delta(self, delta: Any) -> None:
        assert self.call is not None
        if not self.call.output.min_delta:
            await self._send(pb.GenerateResponse(delta=delta))
            return
        if delta.candidate in self._pending:
            merge(self._pending[delta.candidate], delta)
        else:
            self._pending[delta.candidate] = delta
        late = time.monotonic() - self._last_delta >= self.call.output.min_delta
        if late or self._pending[delta.candidate].ByteSize() >= PENDING_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        self._last_delta = time.monotonic()
        for delta in pending.values():
            await self._send(pb.GenerateResponse(delta=delta))

    async def _finish(self, output: CandidateOutput, ended: Ended | None) -> None:
        assert self.call is not None
        last = output.answer.last_token_at
        at = ended.at if ended is not None else last or 0.0
        timings = self._timings(output, at)
        for item in output.finish(ended, timings, 0):
            if isinstance(item, pb.Delta):
                await self._delta(item)
            else:
                await self._flush()
                await self._send(pb.GenerateResponse(finished=item))

    def _timings(self, output: CandidateOutput, at: float) -> Any:
        assert self.started is not None and self.request is not None
        arrival, first = self.began, output.answer.first_token_at
        timings = pb.Timings(queue=duration(self.started.queue_s), total=duration(at - arrival))
        if first is not None:
            timings.prefill.CopyFrom(duration(first - self.started.at))
            timings.first_token.CopyFrom(duration(first - arrival))
        return timings

    async def _send(self, message: Any) -> None:
        """Write one message; a client that does not read holds up nobody but itself."""
        self._last_sent = time.monotonic()
        task = asyncio.ensure_future(self.context.write(message))
        self._task = task
        failed = self._stream.failure is not None  # then only what was said before it is left
        seconds = FAILED_SECONDS if failed else self._patience
        patience = self._loop.call_later(seconds, self._overdue, task)
        try:
            await task
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
            if self._stream.failure is not None:
                raise self._stream.failure.error from None
            if self._gave_up:
                raise refusals.slow_client(self._stream.unread, self._patience) from None
            raise
        except Exception as error:  # of gRPC's own: the call is over
            raise ClientGone from error
        finally:
            patience.cancel()
            self._task = None

    def _overdue(self, task: asyncio.Task[None]) -> None:
        """A write takes long. While lanes run the scheduler judges that, afterwards nobody else."""
        if task.done() or self.scheduler is None or self.request is None:
            return
        if self._stream.failure is None and self.scheduler.is_active(self.request):
            self._loop.call_later(self._patience, self._overdue, task)
        else:
            self._gave_up = True
            task.cancel()

    # ---- the end -------------------------------------------------------------------------------

    @property
    def deadline_passed(self) -> bool:
        """Whether the client's deadline is over."""
        return self.deadline is not None and time.monotonic() >= self.deadline - 0.005

    def close(self, cause: str) -> None:
        """Cancel what may still run."""
        if self.request is None or self.scheduler is None:
            return
        self.metrics.active.dec()
        if not all(o.finished for o in self.outputs):
            self.scheduler.cancel(self.request, cause)

    def record(self, code: str, now: float) -> None:
        """Count the finished call."""
        metrics = self.metrics
        first = self.outputs[0].result if self.outputs and code == "OK" else None
        metrics.requests.labels(code, first.finish_reason if first is not None else "").inc()
        metrics.duration.observe(now - self.began)
        if self.started is not None and self.call is not None and self.request is not None:
            metrics.queue.observe(self.started.queue_s)
            metrics.prompt_tokens.labels("computed").inc(len(self.call.prompt.ids))
            for output in self.outputs:
                self._record_output(output)

    def _record_output(self, output: CandidateOutput) -> None:
        metrics = self.metrics
        assert self.request is not None and self.started is not None
        first, last = output.answer.first_token_at, output.answer.last_token_at
        if first is not None and last is not None:
            metrics.ttft.observe(first - self.began)
            metrics.prefill.observe(first - self.started.at)
            if output.tokens > 1:
                metrics.tpot.observe((last - first) / (output.tokens - 1))
        reasoning = output.answer.reasoning_tokens
        metrics.output_tokens.labels("reasoning").inc(reasoning)
        metrics.output_tokens.labels("content").inc(output.tokens - reasoning)
        for reason, count in output.answer.anomalies.items():
            metrics.anomalies.labels(reason).inc(count)


def _being_cancelled() -> bool:
    """Whether the call itself is cancelled, not only the write that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
