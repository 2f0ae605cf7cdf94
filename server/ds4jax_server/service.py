"""The RPCs: wire messages to requests of the scheduler, its events to wire messages.

Handlers run in asyncio and never touch the executor. What a call costs before it is a request (its
bytes, checks and prompt) is done by the `Workshop`, what follows by `generation`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

import grpc

from ds4jax.chat_request import MAX_TOOL_BYTES, MAX_TOOLS
from ds4jax.config import MAX_LOGIT_BIAS, MAX_STOP_IDS, MAX_STOP_STRINGS, MAX_TOP_LOGPROBS
from ds4jax.request import ServiceError
from ds4jax.tokenizer import TokenizerError
from ds4jax_server import errors
from ds4jax_server.convert import MAX_COUNTED, Call, Converter, is_request_id
from ds4jax_server.engine import Engine
from ds4jax_server.errors import InvalidRequest, Violation
from ds4jax_server.generation import ClientGone, Run
from ds4jax_server.incoming import Incoming, Parsed, Workshop, reader
from ds4jax_server.metrics import Metrics
from ds4jax_server.pb import generation_pb2 as pb
from ds4jax_server.request_log import RequestLog
from ds4jax_server.settings import (
    FIRST_MESSAGE_SECONDS,
    MAX_CANDIDATES,
    RECEIVE_BYTES,
    SEND_BYTES,
    SPARE_STREAMS,
    ServerConfig,
)

_LOG = logging.getLogger("ds4jax.server")
STATUS_SECONDS = 1.0
_IDS_AT_ONCE = 1 << 14


class Services:
    """Generation and model service over one engine."""

    def __init__(self, engine: Engine, config: ServerConfig, metrics: Metrics) -> None:
        self.engine = engine
        self.config = config
        self.metrics = metrics
        self.log = RequestLog(config)
        self.workshop = Workshop()
        self._converter: Converter | None = None

    def handlers(self) -> list[Any]:
        """Generic handlers of the public services."""
        generation = {
            "Generate": grpc.stream_stream_rpc_method_handler(
                self.generate, reader(pb.GenerateRequest), pb.GenerateResponse.SerializeToString
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

    def _unary(self, method: Callable[[Parsed], Any], kind: Any) -> Any:
        return unary_handler(method, kind, self.workshop)

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

    def _checked(self, parsed: Parsed) -> tuple[Any, Converter]:
        """Checks of the input that every request with one shares."""
        request = parsed.checked()
        converter = self.converter(request.model)
        found = [*parsed.violations, *converter.check(request)]
        if found:
            raise InvalidRequest(found)
        features = converter.unsupported_input(request)
        if features:
            raise errors.unsupported(features)
        return request, converter

    def count_tokens(self, parsed: Parsed) -> Any:
        """CountTokens: see the proto."""
        request, converter = self._checked(parsed)
        prompt, _ = converter.prompt(request)
        room = max(0, converter.limits.max_ctx - len(prompt.ids))
        return pb.CountTokensResponse(prompt_tokens=len(prompt.ids), available_tokens=room)

    def tokenize(self, parsed: Parsed) -> Any:
        """Tokenize: see the proto."""
        request, converter = self._checked(parsed)
        tokenizer = converter.model.tokenizer
        assert tokenizer is not None
        if request.WhichOneof("input") == "chat":
            prompt, text = converter.prompt(request)
            ids = list(prompt.ids)
        else:
            text = request.text
            encode = tokenizer.encode if request.no_bos else tokenizer.encode_completion
            ids = encode(request.text, markers=request.parse_markers)
        out = pb.TokenizeResponse(ids=ids, prompt=text)
        if request.pieces:
            out.pieces.extend(tokenizer.bytes_of(i) for i in ids)
        return out

    def detokenize(self, parsed: Parsed) -> Any:
        """Detokenize: see the proto."""
        request = parsed.checked()
        converter = self.converter(request.model)
        tokenizer = converter.model.tokenizer
        if tokenizer is None:
            raise errors.unsupported({"detokenize": "the model has no tokenizer"})
        if len(request.ids) > MAX_COUNTED:
            why = f"has {len(request.ids)} entries, at most {MAX_COUNTED}"
            raise InvalidRequest([Violation("ids", why)])
        text = bytearray()
        for at in range(0, len(request.ids), _IDS_AT_ONCE):
            try:
                text += b"".join(map(tokenizer.bytes_of, request.ids[at : at + _IDS_AT_ONCE]))
            except TokenizerError as error:
                raise InvalidRequest([Violation("ids", str(error), "INVALID_TOKEN_ID")]) from None
            if len(text) > SEND_BYTES:
                raise errors.reply_too_large(len(text), SEND_BYTES)
        return pb.DetokenizeResponse(text=text.decode("utf-8", "replace"))

    def list_models(self, parsed: Parsed) -> Any:
        """ListModels: the one model."""
        parsed.checked()
        return pb.ListModelsResponse(models=[self.model_message()])

    def get_model(self, parsed: Parsed) -> Any:
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
                max_tool_bytes=MAX_TOOL_BYTES, max_stop_strings=MAX_STOP_STRINGS,
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

    async def generate(self, messages: Any, context: Any) -> None:
        """Generate: see the proto. `messages` holds one, as for every method here."""
        began = time.monotonic()
        name, problems = metadata_id(context)
        run = Run(self.engine, self.config, self.metrics, context, name, began)
        code = "OK"
        try:
            await run.go(await self._read(messages, run, problems), self.engine.model)
        except ServiceError as error:
            code, run.reason = error.code, error.reason
            await _end(context, errors.status_of(error, run.id, run.trailing_metadata()))
        except ClientGone:
            code = "DEADLINE_EXCEEDED" if run.deadline_passed else "CANCELLED"
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            told = _unexpected(error)
            code, run.reason = told.code, told.reason
            await _end(context, errors.status_of(told, run.id))
        except asyncio.CancelledError:
            code = "DEADLINE_EXCEEDED" if run.deadline_passed else "CANCELLED"
            raise
        finally:
            run.close("deadline" if code == "DEADLINE_EXCEEDED" else "client")
            now = time.monotonic()
            run.record(code, now)
            self.log.write(run.id, code, run, now)

    async def _read(self, messages: Any, run: Run, problems: tuple[Violation, ...]) -> Call:
        incoming = await first_message(messages)
        return await self.workshop.run(
            incoming.size, lambda: self._call(incoming, run, problems)
        )  # fmt: skip

    def _call(self, incoming: Incoming, run: Run, problems: tuple[Violation, ...]) -> Call:
        """From bytes to a checked request; none of what was made on the way is kept."""
        parsed = incoming.parse()
        message = parsed.message
        if message is not None and is_request_id(message.request_id):
            run.id, problems = message.request_id, ()
        message = parsed.checked()
        converter = self.converter(message.model)
        return converter.call(message, (*parsed.violations, *problems))


async def _end(context: Any, status: Any) -> None:
    """End a call with a status. It has left us then, and waits for a client that does not read:
    the call takes no more room here."""
    try:
        async with asyncio.timeout(STATUS_SECONDS):
            await context.abort_with_status(status)
    except TimeoutError:
        raise asyncio.CancelledError from None


def _unexpected(error: Exception) -> ServiceError:
    """A mistake of ours: logged whole, told as INTERNAL without its text."""
    _LOG.error("a handler failed", exc_info=error)
    return ServiceError("INTERNAL", "INTERNAL_ERROR", f"the server failed: {type(error).__name__}")


def metadata_id(context: Any) -> tuple[str, tuple[Violation, ...]]:
    """The id that a call brought in its metadata, or a new one, and what is wrong with it."""
    made = f"req-{uuid.uuid4().hex}"
    for key, value in context.invocation_metadata() or ():
        if key == "x-request-id" and value:
            if isinstance(value, str) and is_request_id(value):
                return value, ()
            text = "must be at most 128 printable ASCII characters"
            return made, (Violation("x-request-id", text),)
    return made, ()


async def first_message(messages: Any) -> Incoming:
    """The request of a call.

    Methods take a stream of requests, although clients send one (on the wire that is the same):
    the library waits for a single request without end, before any code of ours runs.

    Raises:
        ServiceError: none came in time, or none at all.
    """
    try:
        async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
            incoming: Incoming = await anext(aiter(messages))
    except TimeoutError:
        raise errors.no_request(FIRST_MESSAGE_SECONDS) from None
    except StopAsyncIteration:
        raise InvalidRequest([Violation("request", "is missing")]) from None
    return incoming


def unary_handler(method: Callable[[Parsed], Any], kind: Any, workshop: Workshop) -> Any:
    """Handler of a unary rpc: a `ServiceError` becomes a typed status."""

    def work(incoming: Incoming) -> Any:
        reply = method(incoming.parse())
        if reply.ByteSize() > SEND_BYTES:
            raise errors.reply_too_large(reply.ByteSize(), SEND_BYTES)
        return reply

    async def handle(messages: Any, context: Any) -> Any:
        request_id, problems = metadata_id(context)
        try:
            if problems:
                raise InvalidRequest(problems)
            incoming = await first_message(messages)
            return await workshop.run(incoming.size, lambda: work(incoming))
        except ServiceError as error:
            await context.abort_with_status(errors.status_of(error, request_id))
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            await context.abort_with_status(errors.status_of(_unexpected(error), request_id))

    return grpc.stream_unary_rpc_method_handler(
        handle, reader(kind), lambda m: m.SerializeToString()
    )
