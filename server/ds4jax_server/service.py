"""The RPCs: wire messages to requests of the scheduler, its events to wire messages.

Handlers run in asyncio and never touch the executor. Every message is parsed here, so that bytes
that are no message end as INVALID_ARGUMENT and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError

from ds4jax.chat_request import MAX_TOOL_BYTES, MAX_TOOLS
from ds4jax.config import MAX_LOGIT_BIAS, MAX_STOP_IDS, MAX_TOP_LOGPROBS
from ds4jax.request import Ended, Failed, Phase, Request, ServiceError, Started, Stream, Tokens
from ds4jax.scheduler import Scheduler
from ds4jax.tokenizer import TokenizerError
from ds4jax_server import errors
from ds4jax_server.convert import Call, Converter
from ds4jax_server.engine import Engine
from ds4jax_server.errors import InvalidRequest, Violation
from ds4jax_server.metrics import Metrics
from ds4jax_server.output import CandidateOutput, merge
from ds4jax_server.pb import generation_pb2 as pb
from ds4jax_server.request_log import RequestLog
from ds4jax_server.settings import (
    MAX_CANDIDATES,
    RECEIVE_BYTES,
    SEND_BYTES,
    SPARE_STREAMS,
    ServedModel,
    ServerConfig,
)

_LOG = logging.getLogger("ds4jax.server")
_INLINE_BYTES = 32 * 1024
"""Requests up to this size are converted in the event loop, larger ones in a thread."""
_PHASES = {
    Phase.QUEUED: pb.Progress.STATE_QUEUED,
    Phase.PREFILL: pb.Progress.STATE_PREFILL,
    Phase.DECODE: pb.Progress.STATE_DECODE,
}


def duration(seconds: float) -> Any:
    """A wire duration."""
    out = duration_pb2.Duration()
    out.FromNanoseconds(max(0, round(seconds * 1e9)))
    return out


class ClientGone(Exception):
    """Nobody is left to write to."""


@dataclass(frozen=True)
class Parsed:
    """What the bytes of a call were: a message (None: no message), and what is wrong with them."""

    message: Any
    violations: tuple[Violation, ...] = ()

    def checked(self) -> Any:
        """The message.

        Raises:
            InvalidRequest: there is none.
        """
        if self.message is None:
            raise InvalidRequest(self.violations)
        return self.message


def parse(kind: Any) -> Callable[[bytes], Parsed]:
    """A deserialiser that answers what it cannot read with violations instead of an exception.

    A oneof that was given twice is no error for protobuf (the last one wins), but one for us: which
    of two prompts was meant?
    """
    name = kind.DESCRIPTOR.name
    oneofs = {f.number: o for o in kind.DESCRIPTOR.oneofs for f in o.fields if len(o.fields) > 1}
    names = {f.number: f.name for f in kind.DESCRIPTOR.fields}

    def read(data: bytes) -> Parsed:
        try:
            message = kind.FromString(data)
        except DecodeError:
            text = f"is no {name}: malformed, nested too deeply, or text that is not UTF-8"
            return Parsed(None, (Violation("request", text, "MALFORMED_REQUEST"),))
        found = sorted({n for n in _field_numbers(data) if n in oneofs})
        if len({oneofs[n].name for n in found}) == len(found):
            return Parsed(message)
        text = f"holds {' and '.join(names[n] for n in found)}, must hold one of them"
        return Parsed(message, (Violation(oneofs[found[0]].name, text),))

    return read


def _field_numbers(data: bytes) -> Iterator[int]:
    """Field numbers at the top level of a well-formed message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        yield tag >> 3
        if tag & 7 == 0:
            _, at = _varint(data, at)
        elif tag & 7 == 2:
            size, at = _varint(data, at)
            at += size
        elif tag & 7 in (1, 5):
            at += 8 if tag & 7 == 1 else 4
        else:
            return  # a group: of no message of ours


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


class Services:
    """Generation and model service over one engine."""

    def __init__(self, engine: Engine, config: ServerConfig, metrics: Metrics) -> None:
        self.engine = engine
        self.config = config
        self.metrics = metrics
        self.log = RequestLog(config)
        self._converter: Converter | None = None

    def handlers(self) -> list[Any]:
        """Generic handlers of the public services."""
        generation = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.generate, parse(pb.GenerateRequest), pb.GenerateResponse.SerializeToString
            ),
            "CountTokens": self._unary(self.count_tokens, pb.CountTokensRequest),
            "Tokenize": self._unary(self.tokenize, pb.TokenizeRequest),
            "Detokenize": self._unary(self.detokenize, pb.DetokenizeRequest),
        }
        models = {
            "ListModels": self._unary(self.list_models, pb.ListModelsRequest),
            "GetModel": self._unary(self.get_model, pb.GetModelRequest),
        }
        return [
            grpc.method_handlers_generic_handler("ds4jax.v1.GenerationService", generation),
            grpc.method_handlers_generic_handler("ds4jax.v1.ModelService", models),
        ]

    @staticmethod
    def _unary(method: Callable[[Any], Awaitable[Any]], kind: Any) -> Any:
        return unary_handler(method, kind)

    # ---- the model -----------------------------------------------------------------------------

    def converter(self, asked: str) -> Converter:
        """Conversions for the model that was asked for.

        Raises:
            ServiceError: it is not loaded, or it is another one.
        """
        model = self.engine.model
        if asked not in ("", model.id, model.name):
            raise errors.model_not_found(asked, model.name)
        if self._converter is None:
            self._converter = Converter(model, self.engine.scheduler.limits, self.config)
        return self._converter

    async def _checked(self, parsed: Parsed) -> tuple[Any, Converter]:
        """Checks of the input that every request with one shares."""
        request = parsed.checked()
        converter = self.converter(request.model)
        found = await _maybe_thread(request, lambda: converter.check(request))
        if parsed.violations or found:
            raise InvalidRequest([*parsed.violations, *found])
        features = converter.unsupported_input(request)
        if features:
            raise errors.unsupported(features)
        return request, converter

    async def count_tokens(self, parsed: Parsed) -> Any:
        """CountTokens: see the proto."""
        request, converter = await self._checked(parsed)
        prompt, _ = await _maybe_thread(request, lambda: converter.prompt(request))
        room = max(0, converter.limits.max_ctx - len(prompt.ids))
        return pb.CountTokensResponse(prompt_tokens=len(prompt.ids), available_tokens=room)

    async def tokenize(self, parsed: Parsed) -> Any:
        """Tokenize: see the proto."""
        request, converter = await self._checked(parsed)
        tokenizer = converter.model.tokenizer
        assert tokenizer is not None
        if request.WhichOneof("input") == "chat":
            prompt, text = await _maybe_thread(request, lambda: converter.prompt(request))
            ids = prompt.ids
        else:
            text = request.text
            encode = tokenizer.encode if request.no_bos else tokenizer.encode_completion
            ids = await _maybe_thread(
                request, lambda: encode(request.text, markers=request.parse_markers)
            )
        out = pb.TokenizeResponse(ids=ids, prompt=text)
        if request.pieces:
            out.pieces.extend(tokenizer.bytes_of(i) for i in ids)
        return out

    async def detokenize(self, parsed: Parsed) -> Any:
        """Detokenize: see the proto."""
        request = parsed.checked()
        converter = self.converter(request.model)
        if converter.model.tokenizer is None:
            raise errors.unsupported({"detokenize": "the model has no tokenizer"})
        try:
            return pb.DetokenizeResponse(text=converter.model.tokenizer.decode(request.ids))
        except TokenizerError as error:
            raise InvalidRequest([Violation("ids", str(error), "INVALID_TOKEN_ID")]) from None

    async def list_models(self, parsed: Parsed) -> Any:
        """ListModels: the one model."""
        parsed.checked()
        return pb.ListModelsResponse(models=[self.model_message()])

    async def get_model(self, parsed: Parsed) -> Any:
        """GetModel: see the proto."""
        self.converter(parsed.checked().name)
        return self.model_message()

    def model_message(self) -> Any:
        """The served model as a message."""
        model, limits = self.engine.model, self.engine.scheduler.limits
        queue = self.config.scheduler.max_waiting
        sampling = pb.SamplingParams(
            temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0,
            frequency_penalty=0.0, presence_penalty=0.0,
        )  # fmt: skip
        return pb.Model(
            name=model.name, display_name=model.display_name, context_length=limits.max_ctx,
            vocab_size=model.vocab_size, chat_profile=model.chat_profile,
            numerics=model.numerics_label, dtype=model.dtype, quantisation=model.quantisation,
            digest=model.digest, approximate=model.approximate,
            experts_per_token=model.experts_per_token, has_tokenizer=model.tokenizer is not None,
            default_sampling=sampling, unqualified=model.unqualified,
            fingerprint=model.fingerprint,
            limits=pb.Limits(
                lanes=limits.num_slots, queue=queue,
                max_output_tokens=self.config.default_max_tokens or limits.max_ctx,
                max_receive_bytes=RECEIVE_BYTES, max_send_bytes=SEND_BYTES, max_tools=MAX_TOOLS,
                max_tool_bytes=MAX_TOOL_BYTES, max_stop_strings=16,
                max_stop_token_ids=MAX_STOP_IDS, max_logit_bias=MAX_LOGIT_BIAS,
                max_top_logprobs=MAX_TOP_LOGPROBS,
                max_candidates=min(MAX_CANDIDATES, limits.num_slots),
                kv_pages=limits.num_pages, prefill_chunk=limits.chunk_tokens,
                max_concurrent_streams=limits.num_slots + queue + SPARE_STREAMS,
            ),
            capabilities=pb.Capabilities(
                chat=model.tokenizer is not None, tools=model.tokenizer is not None,
                logprobs=True, speculation=model.has_drafter,
            ),
        )  # fmt: skip

    # ---- generate ------------------------------------------------------------------------------

    async def generate(self, parsed: Parsed, context: Any) -> None:
        """Generate: see the proto."""
        began = time.monotonic()
        request_id = _request_id(parsed.message, context)
        run = _Run(self, request_id, began, context)
        code = "OK"
        try:
            message = parsed.checked()
            converter = self.converter(message.model)
            extra = parsed.violations
            call = await _maybe_thread(message, lambda: converter.call(message, extra))
            await run.go(call, converter.model)
        except ServiceError as error:
            code = error.code
            run.error = error
            await context.abort_with_status(
                errors.status_of(error, request_id, run.trailing_metadata())
            )
        except ClientGone:
            code = "DEADLINE_EXCEEDED" if run.deadline_passed else "CANCELLED"
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            code = "INTERNAL"
            run.error = _unexpected(error)
            await context.abort_with_status(errors.status_of(run.error, request_id))
        except asyncio.CancelledError:
            code = "DEADLINE_EXCEEDED" if run.deadline_passed else "CANCELLED"
            raise
        finally:
            run.close("deadline" if code == "DEADLINE_EXCEEDED" else "client")
            run.record(code)


class _Run:
    """One Generate call: its request, its candidates, and what has been sent."""

    def __init__(self, services: Services, request_id: str, began: float, context: Any) -> None:
        self.services = services
        self.id = request_id
        self.began = began
        self.context = context
        self.call: Call | None = None
        self.request: Request | None = None
        self.scheduler: Scheduler | None = None
        self.outputs: list[CandidateOutput] = []
        self.started: Started | None = None
        self.error: ServiceError | None = None
        self.deadline: float | None = None
        self._pending: dict[int, Any] = {}
        self._wake = asyncio.Event()
        self._signalled = False
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._last_sent = began
        self._last_delta = began

    # ---- the engine's side ---------------------------------------------------------------------

    def _notify(self) -> None:
        """Called by the engine thread after every event."""
        if not self._signalled:
            self._signalled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
                self._loop.call_soon_threadsafe(self._wake_up)

    def _wake_up(self) -> None:
        self._wake.set()
        request = self.request
        blocked = self._task is not None and not self._task.done()
        if blocked and request is not None and request.stream.failure is not None:
            assert self._task is not None
            self._task.cancel()  # the client does not read: do not wait for it

    # ---- the call ------------------------------------------------------------------------------

    async def go(self, call: Call, model: ServedModel) -> None:
        self.call = call
        config, engine = self.services.config, self.services.engine
        self.scheduler = engine.scheduler
        self.outputs = [
            CandidateOutput(call, c, model.tokenizer) for c in range(len(call.lanes))
        ]  # fmt: skip
        left = self.context.time_remaining()
        if left is not None:
            self.deadline = self.began + left
        request = Request(
            id=self.id, lanes=call.lanes, deadline=self.deadline,
            time_limit=call.stopping.time_limit,
            stream=Stream(config.stream_events, config.stream_bytes, self._notify),
        )  # fmt: skip
        self.scheduler.submit(request)
        self.request = request
        self.services.metrics.active.inc()
        await self.context.send_initial_metadata(self._initial_metadata(model))
        while not all(o.finished for o in self.outputs):
            await self._wait()
            await self._handle_events(model)

    def _initial_metadata(self, model: ServedModel) -> tuple[tuple[str, str], ...]:
        out = [
            ("x-request-id", self.id),
            ("ds4jax-model", model.id),
            ("ds4jax-numerics", model.numerics_label),
        ]
        if model.approximate:
            out.append(("ds4jax-approximate", f"experts_per_token={model.experts_per_token}"))
        if model.unqualified:
            out.append(("ds4jax-unqualified", "device pair"))
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
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), due - now)

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
            for output in self.outputs:
                delta = pb.Delta(candidate=output.candidate, content=self.call.prompt_text)
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
        if time.monotonic() - self._last_delta >= self.call.output.min_delta:
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
        try:
            await task
        except asyncio.CancelledError:
            failure = self.request.stream.failure if self.request is not None else None
            if failure is not None and not _being_cancelled():
                raise failure.error from None
            raise
        except Exception as error:  # of gRPC's own: the call is over
            raise ClientGone from error
        finally:
            self._task = None

    # ---- the end -------------------------------------------------------------------------------

    @property
    def deadline_passed(self) -> bool:
        """Whether the client's deadline is over."""
        return self.deadline is not None and time.monotonic() >= self.deadline - 0.005

    def close(self, cause: str) -> None:
        """Cancel what may still run."""
        if self.request is None or self.scheduler is None:
            return
        self.services.metrics.active.dec()
        if not all(o.finished for o in self.outputs):
            self.scheduler.cancel(self.request, cause)

    def record(self, code: str) -> None:
        """Metrics and the log line."""
        now = time.monotonic()
        metrics = self.services.metrics
        names: list[str] = [o.result.finish_reason for o in self.outputs if o.result] or [""]
        for name in names:
            metrics.requests.labels(code, name).inc()
        metrics.duration.observe(now - self.began)
        if self.started is not None and self.call is not None and self.request is not None:
            metrics.queue.observe(self.started.queue_s)
            metrics.prompt_tokens.labels("computed").inc(len(self.call.prompt.ids))
            for output in self.outputs:
                self._record_output(output)
        self.services.log.write(self.id, code, self, now)

    def _record_output(self, output: CandidateOutput) -> None:
        metrics = self.services.metrics
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


def _unexpected(error: Exception) -> ServiceError:
    """A mistake of ours: logged whole, told as INTERNAL without its text."""
    _LOG.error("a handler failed", exc_info=error)
    return ServiceError("INTERNAL", "INTERNAL_ERROR", f"the server failed: {type(error).__name__}")


def _request_id(message: Any, context: Any) -> str:
    if message is not None and message.request_id:
        return str(message.request_id)[:128]
    for key, value in context.invocation_metadata() or ():
        if key == "x-request-id" and isinstance(value, str) and 0 < len(value) <= 128:
            return value
    return f"req-{uuid.uuid4().hex}"


async def _maybe_thread(request: Any, work: Callable[[], Any]) -> Any:
    """Run `work` here if the request is small, else in a thread."""
    if request.ByteSize() <= _INLINE_BYTES:
        return work()
    return await asyncio.to_thread(work)


def unary_handler(method: Callable[[Any], Awaitable[Any]], kind: Any) -> Any:
    """Handler of a unary rpc: a `ServiceError` becomes a typed status."""

    async def handle(parsed: Parsed, context: Any) -> Any:
        request_id = _request_id(None, context)
        try:
            return await method(parsed)
        except ServiceError as error:
            await context.abort_with_status(errors.status_of(error, request_id))
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            await context.abort_with_status(errors.status_of(_unexpected(error), request_id))

    return grpc.unary_unary_rpc_method_handler(handle, parse(kind), lambda m: m.SerializeToString())
