"""From a refusal to a gRPC status with typed details. No policy, no service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from ds4jax.request import ServiceError

DOMAIN = "ds4jax"
INVALID_REQUEST = "INVALID_REQUEST"
MESSAGE_BYTES = 800
DETAIL_BYTES = 3000
"""A status travels in HTTP/2 trailers, and clients refuse trailers of more than 8 KiB."""
ECHO_CHARACTERS = 80
"""Of a value that the client sent and an error shows."""


@dataclass(frozen=True)
class Violation:
    """One field that is wrong: its path as in the proto, what was found and what is allowed."""

    field: str
    description: str
    reason: str = INVALID_REQUEST


class InvalidRequest(ServiceError):
    """A request with wrong fields; carries every violation."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = tuple(violations)
        reasons = {v.reason for v in self.violations}
        text = "; ".join(f"{v.field}: {v.description}" for v in self.violations[:20])
        more = len(self.violations) - 20
        super().__init__(
            "INVALID_ARGUMENT",
            reasons.pop() if len(reasons) == 1 else INVALID_REQUEST,
            text + (f"; and {more} more" if more > 0 else ""),
        )


def unsupported(features: Mapping[str, str]) -> ServiceError:
    """UNIMPLEMENTED for options that exist and cannot be honoured; feature -> why or what else."""
    text = "; ".join(f"{name} is not supported: {why}" for name, why in features.items())
    return ServiceError(
        "UNIMPLEMENTED", "FEATURE_UNSUPPORTED", text, metadata={"feature": ",".join(features)}
    )


def model_not_found(asked: str, served: str) -> ServiceError:
    """A model that is not the one served here."""
    asked = asked if len(asked) <= ECHO_CHARACTERS else asked[:ECHO_CHARACTERS] + "..."
    return ServiceError(
        "NOT_FOUND",
        "MODEL_NOT_FOUND",
        f"model {asked!r} is not served here, {served!r} is: leave the field empty or name that",
        metadata={"model": asked, "served": served},
    )


def reply_too_large(size: int, limit: int) -> ServiceError:
    """A reply over the size of one message."""
    return ServiceError(
        "RESOURCE_EXHAUSTED",
        "REPLY_TOO_LARGE",
        f"the reply would have {size} bytes or more, at most {limit} are sent: ask for it in parts",
        metadata={"max_send_bytes": str(limit)},
    )


def no_request(seconds: float) -> ServiceError:
    """A call that was opened and never said what it wants."""
    return ServiceError(
        "DEADLINE_EXCEEDED",
        "REQUEST_NOT_RECEIVED",
        f"the call was opened {seconds:g} s ago and its request has not come",
    )


def model_loading(stage: str) -> ServiceError:
    """The port answers before the model does."""
    return ServiceError(
        "UNAVAILABLE",
        "MODEL_LOADING",
        f"the model is being loaded ({stage}): try again shortly",
        retry_after=2.0,
    )


def unauthenticated(given: bool) -> ServiceError:
    """No token, or a wrong one."""
    found = "a wrong token" if given else "no token"
    return ServiceError(
        "UNAUTHENTICATED",
        "INVALID_TOKEN" if given else "TOKEN_REQUIRED",
        f"the call carries {found}: send the metadata 'authorization: Bearer TOKEN'",
    )


@dataclass(frozen=True)
class _Status(grpc.Status):  # type: ignore[misc]
    code: Any
    details: str
    trailing_metadata: Any


def status_of(
    error: ServiceError, request_id: str, metadata: tuple[tuple[str, str], ...] = ()
) -> Any:
    """The status for `abort_with_status`: details, and more trailing metadata."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    details: list[Any] = [info, error_details_pb2.RequestInfo(request_id=request_id)]
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, InvalidRequest):
        room = DETAIL_BYTES - sum(d.ByteSize() for d in details)
        details.append(_bad_request(error.violations, room))
    packed = []
    for detail in details:
        wrapped = any_pb2.Any()
        wrapped.Pack(detail)
        packed.append(wrapped)
    code = getattr(grpc.StatusCode, error.code)
    text = error.message.encode("utf-8", "replace")[:MESSAGE_BYTES].decode("utf-8", "ignore")
    status = status_pb2.Status(code=code.value[0], message=text, details=packed)
    made = rpc_status.to_status(status)
    return _Status(made.code, made.details, (*made.trailing_metadata, *metadata))


def _bad_request(violations: Iterable[Violation], room: int) -> Any:
    """As many violations as there is room for; the last one then says that there are more."""
    bad = error_details_pb2.BadRequest()
    for violation in violations:
        bad.field_violations.add(
            field=violation.field[:200], description=violation.description[:300],
            reason=violation.reason,
        )  # fmt: skip
        if bad.ByteSize() > room:
            del bad.field_violations[-1]
            bad.field_violations[-1].description += " (and there are more violations)"
            break
    return bad
