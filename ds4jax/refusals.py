"""Every way the scheduler ends a request with a status: one function per situation.

Code and reason are those of the interface; the text says what was received, the limit and the fix,
and never quotes a prompt.
"""

from __future__ import annotations

from ds4jax.pages import pages_for
from ds4jax.plan import ExecutorLimits
from ds4jax.request import Request, ServiceError


def impossible(request: Request, limits: ExecutorLimits) -> ServiceError | None:
    """What makes this request impossible for good on an executor with these limits, or None."""
    spec = request.lanes[0]
    prompt, budget = len(spec.prompt), spec.max_output_tokens
    if len(request.lanes) > limits.num_slots:
        return ServiceError(
            "INVALID_ARGUMENT",
            "TOO_MANY_CANDIDATES",
            f"{len(request.lanes)} candidates need as many lanes; the server has"
            f" {limits.num_slots}: lower candidate_count",
        )
    if prompt + budget > limits.max_ctx:
        return context_length_exceeded(prompt, budget, limits.max_ctx)
    need = pages_for(spec.max_rows)
    if need > limits.num_pages:
        return ServiceError(
            "RESOURCE_EXHAUSTED",
            "REQUEST_TOO_LARGE_FOR_POOL",
            f"the request needs {need} pages of 128 tokens, the whole pool has"
            f" {limits.num_pages}: shorten the prompt or max_output_tokens",
            metadata={"pages": str(need), "pool_pages": str(limits.num_pages)},
        )
    return None


def context_length_exceeded(
    prompt: int, budget: int | None, max_ctx: int, *, at_least: bool = False
) -> ServiceError:
    """Prompt and output budget together are over the context.

    Args:
        budget: None: none was given. at_least: the prompt has this many tokens or more.
    """
    asked = "at least 1 output token" if budget is None else f"{budget} output tokens"
    count = f"at least {prompt}" if at_least else str(prompt)
    return ServiceError(
        "INVALID_ARGUMENT",
        "CONTEXT_LENGTH_EXCEEDED",
        f"a prompt of {count} tokens and {asked} are over the context of {max_ctx} tokens:"
        " shorten the prompt or lower max_output_tokens",
        metadata={
            "prompt_tokens": str(prompt),
            "max_output_tokens": "" if budget is None else str(budget),
            "context_length": str(max_ctx),
        },
    )


def deadline_not_met(left: float, estimate: float) -> ServiceError:
    """The deadline lies before the estimated start."""
    return ServiceError(
        "DEADLINE_EXCEEDED",
        "DEADLINE_NOT_MET",
        f"the deadline is in {max(0.0, left):.3f} s, the estimated start in {estimate:.3f} s:"
        " allow more time",
        metadata={"estimated_start_seconds": f"{estimate:.3f}"},
    )


def deadline_passed(after: float) -> ServiceError:
    """The deadline passed while the request was queued or running."""
    return ServiceError(
        "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", f"the deadline passed after {after:.3f} s"
    )


def queue_timeout(after: float) -> ServiceError:
    """No lane became free within the server's own limit."""
    return ServiceError(
        "DEADLINE_EXCEEDED",
        "QUEUE_TIMEOUT",
        f"no lane became free within {after:.3f} s: try again later",
        retry_after=1.0,
    )


def duplicate_id(request_id: str) -> ServiceError:
    """A call with this id is still running."""
    return ServiceError(
        "ALREADY_EXISTS",
        "DUPLICATE_REQUEST_ID",
        f"request_id {request_id!r} belongs to a call that is still running: use another",
        metadata={"request_id": request_id},
    )


def queue_full(waiting: int, limit: int, retry_after: float) -> ServiceError:
    """No place in the queue."""
    return ServiceError(
        "RESOURCE_EXHAUSTED",
        "QUEUE_FULL",
        f"{waiting} requests are waiting, the limit is {limit}: try again later",
        metadata={"queue_limit": str(limit)},
        retry_after=max(1.0, retry_after),
    )


def draining() -> ServiceError:
    """The server takes nothing new."""
    return ServiceError(
        "UNAVAILABLE", "DRAINING", "the server is draining: try another one", retry_after=5.0
    )


def shutting_down() -> ServiceError:
    """The grace period is over."""
    return ServiceError(
        "UNAVAILABLE",
        "SHUTTING_DOWN",
        "the server stopped before the request ended: send it again to another one",
        retry_after=5.0,
    )


def slow_client(unread: int, grace: float) -> ServiceError:
    """The client left its stream full for too long."""
    return ServiceError(
        "RESOURCE_EXHAUSTED",
        "SLOW_CLIENT",
        f"the client left {unread} events unread for {grace:g} s: read faster",
    )


def device_error(message: str) -> ServiceError:
    """The device failed under a running request."""
    return ServiceError("INTERNAL", "DEVICE_ERROR", message)


def non_finite() -> ServiceError:
    """The model gave NaN or infinity."""
    return ServiceError(
        "INTERNAL",
        "NON_FINITE_LOGITS",
        "the model gave a logit that is not finite; the request was ended",
    )


def unhealthy(why: str, retry_after: float) -> ServiceError:
    """New requests while the device has not passed its self-test."""
    return ServiceError(
        "UNAVAILABLE",
        "DEVICE_ERROR",
        f"the device has not passed its self-test: {why}",
        retry_after=max(1.0, retry_after),
    )
