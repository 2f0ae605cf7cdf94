"""The operators' service: state, drain, profile. On a port of its own, never on the public one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import timestamp_pb2

from ds4jax.scheduler import Scheduler
from ds4jax.telemetry import Snapshot
from ds4jax_server.engine import Engine
from ds4jax_server.errors import InvalidRequest, Violation, unsupported
from ds4jax_server.generation import duration
from ds4jax_server.incoming import Parsed, Workshop
from ds4jax_server.pb import generation_pb2 as pb
from ds4jax_server.service import unary_handler
from ds4jax_server.settings import ServerConfig

MAX_RECORDS = 20_000
"""Step records of one profile: they have to fit one reply."""

_SAME = (
    "steps", "prefill_steps", "decode_steps", "rows_real", "rows_padded", "prefill_tokens",
    "output_tokens", "prefill_seconds", "decode_seconds", "wait_seconds", "dispatch_seconds",
    "host_seconds", "host_cpu_seconds", "preemptions", "suspensions", "slow_clients", "non_finite",
    "watchdog", "device_errors", "self_tests", "requests", "spec_steps",
)  # fmt: skip
"""Counters that have the same name on the wire."""


class Admin:
    """AdminService over one engine."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self._started = time.time()
        self._workshop = Workshop()

    def handlers(self) -> list[Any]:
        """Generic handlers of the service."""
        methods = {
            "GetStatus": self._unary(self.get_status, pb.GetStatusRequest),
            "Drain": self._unary(self.drain, pb.DrainRequest),
            "FlushPrefixCache": self._unary(self.flush, pb.FlushPrefixCacheRequest),
            "StartProfile": self._unary(self.start_profile, pb.StartProfileRequest),
            "StopProfile": self._unary(self.stop_profile, pb.StopProfileRequest),
        }
        return [grpc.method_handlers_generic_handler("ds4jax.v1.AdminService", methods)]

    def _unary(self, method: Callable[[Parsed], Any], kind: Any) -> Any:
        return unary_handler(method, kind, self._workshop)

    def get_status(self, parsed: Parsed) -> Any:
        """GetStatus: state, lanes, counters."""
        out = pb.GetStatusResponse(
            start_time=_timestamp(self._started), status_time=_timestamp(time.time()),
            configuration=dict(self.config.shown), loading_stage=self.engine.stage,
            loading_fraction=self.engine.fraction,
        )  # fmt: skip
        executor = self.engine.executor
        if executor is None:
            out.state = pb.GetStatusResponse.STATE_LOADING
            return out
        scheduler = self.engine.scheduler
        out.state = (
            pb.GetStatusResponse.STATE_DRAINING if scheduler.draining
            else pb.GetStatusResponse.STATE_SERVING if self.engine.ready
            else pb.GetStatusResponse.STATE_UNHEALTHY
        )  # fmt: skip
        out.loading_stage = ""
        out.model = self.engine.model.name
        out.configuration.update(dict(self.engine.model.settings))
        out.lanes_total = scheduler.limits.num_slots
        out.requests_queued, out.requests_active = scheduler.waiting, scheduler.active
        for name, size in executor.memory_plan().items():
            out.memory_plan[name] = size
        view = scheduler.latest()
        if view is not None:
            _put_view(out, view)
        _put_counters(out.counters, scheduler, executor.counters())
        return out

    def drain(self, parsed: Parsed) -> Any:
        """Drain: see the proto."""
        self.engine.drain()
        return pb.DrainResponse()

    def flush(self, parsed: Parsed) -> Any:
        """FlushPrefixCache: there is none yet."""
        raise unsupported({"prefix_cache": "there is none, so there is nothing to flush"})

    def start_profile(self, parsed: Parsed) -> Any:
        """StartProfile: see the proto."""
        request = parsed.checked()
        records = request.max_records if request.HasField("max_records") else 10_000
        if not 1 <= records <= MAX_RECORDS:
            text = f"is {records}, must be in 1..{MAX_RECORDS}"
            raise InvalidRequest([Violation("max_records", text)])
        self.engine.start_profile(records)
        return pb.StartProfileResponse()

    def stop_profile(self, parsed: Parsed) -> Any:
        """StopProfile: the records as JSON lines."""
        records, dropped = self.engine.stop_profile()
        lines = "".join(json.dumps(r) + "\n" for r in records)
        return pb.StopProfileResponse(json_lines=lines.encode(), records_dropped=dropped)


def _timestamp(seconds: float) -> Any:
    out = timestamp_pb2.Timestamp()
    out.FromNanoseconds(int(seconds * 1e9))
    return out


def _put_view(out: Any, view: Snapshot) -> None:
    out.pages_total, out.pages_free = view.pages.total, view.pages.free
    out.last_decode_step.CopyFrom(duration(view.last_decode_seconds))
    out.last_prefill_step.CopyFrom(duration(view.last_prefill_seconds))
    for lane in view.lanes:
        row = out.lanes.add(
            request_id=lane.request_id, candidate=lane.candidate, state=lane.state.value,
            prompt_tokens=lane.prompt_tokens, prefilled_tokens=lane.prefilled_tokens,
            output_tokens=lane.output_tokens,
        )  # fmt: skip
        if lane.slot is not None:
            row.slot = lane.slot


def _put_counters(out: Any, scheduler: Scheduler, executor: Any) -> None:
    c = scheduler.counters
    for name in _SAME:
        setattr(out, name, getattr(c, name))
    out.drafts_proposed, out.drafts_verified, out.drafts_accepted = (
        c.proposed, c.verified, c.accepted,
    )  # fmt: skip
    out.compiles = int(executor["compiles"])
    out.compiles_after_ready = int(executor["compiles_after_ready"])
    out.compile_seconds = executor["compile_seconds"]
    out.host_syncs = int(executor["host_syncs"])
    for values, field in (
        (c.verified_at, out.verified_at_depth), (c.accepted_at, out.accepted_at_depth),
    ):  # fmt: skip
        field.extend(values.get(depth, 0) for depth in range(1 + max(values, default=-1)))
