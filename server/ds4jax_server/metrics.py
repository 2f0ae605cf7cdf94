"""Prometheus metrics of the server, and the side port that shows them.

Names are stable, units are base units. What the scheduler counts itself is read when somebody asks;
the rest is observed where it happens.
"""

from __future__ import annotations

import platform
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client as prom
from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)

import ds4jax
from ds4jax.telemetry import StepRecord
from ds4jax_server.engine import Engine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_FAST = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LANES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.port: int | None = None  # of the side port, once it is bound
        r = self.registry
        self.requests = prom.Counter(
            "ds4jax_requests", "Requests that ended.", ["code", "finish_reason"], registry=r
        )
        self.active = prom.Gauge(
            "ds4jax_requests_active", "Requests that have not ended.", registry=r
        )
        self.ttft = prom.Histogram(
            "ds4jax_time_to_first_token_seconds", "From arrival to the first token.",
            buckets=_SECONDS, registry=r,
        )  # fmt: skip
        self.tpot = prom.Histogram(
            "ds4jax_time_per_output_token_seconds", "Per output token after the first.",
            buckets=_FAST, registry=r,
        )  # fmt: skip
        self.duration = prom.Histogram(
            "ds4jax_request_duration_seconds", "From arrival to the end.",
            buckets=_SECONDS, registry=r,
        )  # fmt: skip
        self.queue = prom.Histogram(
            "ds4jax_queue_duration_seconds", "From arrival to a lane.",
            buckets=_SECONDS, registry=r,
        )  # fmt: skip
        self.prefill = prom.Histogram(
            "ds4jax_prefill_duration_seconds", "From the lane to the first token.",
            buckets=_SECONDS, registry=r,
        )  # fmt: skip
        self.prompt_tokens = prom.Counter(
            "ds4jax_prompt_tokens", "Prompt tokens of requests that started.", ["source"],
            registry=r,
        )  # fmt: skip
        self.output_tokens = prom.Counter(
            "ds4jax_output_tokens", "Output tokens sent.", ["kind"], registry=r
        )
        self.lanes = prom.Histogram(
            "ds4jax_batch_lanes", "Lanes of a decode step.", ["path"], buckets=_LANES, registry=r
        )
        self.step = prom.Histogram(
            "ds4jax_step_duration_seconds", "Duration of a step.", ["phase"],
            buckets=_FAST, registry=r,
        )  # fmt: skip
        self.anomalies = prom.Counter(
            "ds4jax_parser_anomalies", "Mistakes of the model in its markup.", ["reason"],
            registry=r,
        )  # fmt: skip
        self.prompt_tokens.labels("computed")
        self.prompt_tokens.labels("cached")
        for kind in ("reasoning", "content"):
            self.output_tokens.labels(kind)
        self._lanes = {path: self.lanes.labels(path) for path in ("single", "batched")}
        self._step = {phase: self.step.labels(phase) for phase in ("prefill", "decode")}

    def watch(self, engine: Engine) -> None:
        """Add what the engine counts itself."""
        self.registry.register(_EngineCollector(engine))

    def on_step(self, record: StepRecord) -> None:
        """Observe one step; called in the engine thread."""
        self._step[record.phase].observe(record.seconds)
        if record.phase == "decode":
            self._lanes["single" if record.lanes == 1 else "batched"].observe(record.lanes)

    def serve(self, port: int, host: str) -> Callable[[], None]:
        """Show them at http://host:port/metrics; returns what ends it.

        Raises:
            OSError: the address cannot be bound.
        """
        server = _MetricsServer(host, port)
        server.set_app(prom.make_wsgi_app(self.registry))
        thread = threading.Thread(target=server.serve_forever, name="ds4jax-metrics", daemon=True)
        thread.start()
        self.port = server.server_port

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return close


class _Handler(WSGIRequestHandler):
    """Silent, and gone if its client says nothing."""

    timeout = 10.0

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """A thread per scrape, some at a time; whatever clients do goes unnoticed by others."""

    daemon_threads = True
    request_queue_size = 64  # with the usual 5, a few idle connections delay a scrape by seconds

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        self.address_family, *_, address = found[0]
        self._places = threading.Semaphore(16)
        super().__init__((str(address[0]), int(address[1])), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve it in a thread, or close it if too many are served."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread of one scrape."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _EngineCollector:
    """Counters of scheduler and executor, read at the moment of a scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        executor = self._engine.executor
        if executor is None:
            return
        scheduler, model = self._engine.scheduler, self._engine.model
        c = scheduler.counters
        info = GaugeMetricFamily(
            "ds4jax_build_info", "What is running.",
            labels=["version", "jax", "platform", "model", "quantisation"],
        )  # fmt: skip
        info.add_metric(
            [ds4jax.__version__, _version("jax"), model.platform, model.id, model.quantisation], 1
        )
        yield info
        yield _gauge("ds4jax_requests_queued", "Requests in the queue.", scheduler.waiting)
        view = scheduler.latest()
        if view is not None:
            yield _gauge("ds4jax_kv_pages_used", "Pages owned by lanes.", view.pages.owned)
            yield _gauge("ds4jax_kv_pages_total", "Pages of the pool.", view.pages.total)
            yield _gauge("ds4jax_lanes_parked", "Lanes without pages.", view.parked)
        steps = CounterMetricFamily(
            "ds4jax_steps", "Steps by program size.", labels=["phase", "bucket"]
        )
        for (phase, rows), count in sorted(c.by_bucket.copy().items()):
            steps.add_metric([phase, str(rows)], count)
        yield steps
        rows_by = {"real": c.rows_real, "padded": c.rows_padded}
        yield _by("ds4jax_step_rows", "Rows of steps.", "kind", rows_by)
        spent = {
            "wait": c.wait_seconds, "dispatch": c.dispatch_seconds, "host": c.host_seconds,
        }  # fmt: skip
        yield _by("ds4jax_engine_seconds", "Engine thread: device, calls, rest.", "what", spent)
        for what in ("lookups", "hits"):
            yield _counter(f"ds4jax_prefix_cache_{what}", f"Prefix cache {what}.", 0)
        yield _counter("ds4jax_spec_drafts", "Lane steps that verified drafts.", c.spec_steps)
        yield _counter("ds4jax_spec_proposed_tokens", "Draft tokens made.", c.proposed)
        yield _by("ds4jax_spec_draft_tokens", "Draft tokens verified.", "position", c.verified_at)
        yield _by(
            "ds4jax_spec_accepted_tokens", "Draft tokens accepted.", "position", c.accepted_at
        )
        yield _by("ds4jax_cancelled", "Requests ended before time.", "reason", c.cancelled)
        slow = {"suspended": c.suspensions, "ended": c.slow_clients}
        yield _by("ds4jax_slow_client", "Lanes suspended, requests ended.", "reason", slow)
        yield _counter("ds4jax_preemptions", "Lanes parked.", c.preemptions)
        yield _counter("ds4jax_forked_tokens", "Prefill that candidates shared.", c.forked_tokens)
        faults = {"non_finite": c.non_finite, "watchdog": c.watchdog, "device": c.device_errors}
        yield _by("ds4jax_faults", "Faults of lanes and device.", "reason", faults)
        yield _counter("ds4jax_health_changes", "Changes of health.", scheduler.health_changes)
        yield from self._executor_metrics(executor)

    def _executor_metrics(self, executor: Any) -> Iterator[Metric]:
        counters = executor.counters()
        for name, key, text in (
            ("ds4jax_compilations", "compiles", "Programs compiled."),
            ("ds4jax_compile_seconds", "compile_seconds", "Time spent compiling."),
        ):
            named = {k.partition(":")[2]: v for k, v in counters.items() if k.startswith(f"{key}:")}
            named["other"] = counters[key] - sum(named.values())
            yield _by(name, text, "program", named)
        yield _counter(
            "ds4jax_compilations_after_ready", "Must stay 0.", counters["compiles_after_ready"]
        )
        memory = GaugeMetricFamily(
            "ds4jax_device_memory_bytes", "Planned bytes.", labels=["device", "kind"]
        )
        for kind, size in executor.memory_plan().items():
            memory.add_metric(["0", kind], size)
        yield memory


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _by(name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in sorted(dict(values).items()):
        family.add_metric([str(key)], value)
    return family


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return f"unknown (python {platform.python_version()})"
