"""`ds4jax serve`: one resident model behind a gRPC port.

Flags to settings, and the guardrails of start-up: what cannot be honoured is refused here with its
reason, before a byte of weights is read. The server itself is the package `ds4jax_server`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import sys
from typing import TYPE_CHECKING, Any

from ds4jax.commands import common, running
from ds4jax.config import DEFAULT_SLOTS, MAX_SLOTS

if TYPE_CHECKING:
    from ds4jax_server.settings import Loader, ServedModel, ServerConfig

    from ds4jax.config import RuntimeConfig
    from ds4jax.local import Loaded
    from ds4jax.plan import Executor

_LOG = logging.getLogger("ds4jax.server")
MAX_DIGEST_BYTES = 2 << 30
"""Weight files up to this size are hashed at start, larger ones are not."""


def add(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over gRPC",
        description="Serve one model over gRPC: the port answers at once, health is NOT_SERVING"
        " until every program is compiled. SIGTERM drains, a second one stops.",
    )
    common.add_model(parser)
    _add_addresses(parser)
    common.add_context(parser, "4096, or what the model allows")
    _add_capacity(parser)
    _add_security(parser)
    common.add_runtime(parser)
    parser.add_argument("--log-format", choices=("text", "json"), default="text",
                        help="of the log on stderr")  # fmt: skip
    parser.add_argument("--log-prompts", action="store_true",
                        help="log the text of prompts; never on unless given")  # fmt: skip
    common.add_output(parser)
    parser.set_defaults(run=run)


def _add_addresses(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("addresses")
    group.add_argument("--host", default="127.0.0.1", help="address to bind")
    group.add_argument("--port", type=common.integer(0, 65535), default=50051,
                       help="TCP port; 0 is any free one")  # fmt: skip
    group.add_argument("--no-port", action="store_true", help="no TCP port: --unix alone")
    group.add_argument("--unix", metavar="PATH", help="unix socket to listen on as well")
    group.add_argument("--admin", metavar="ADDR",
                       help="HOST:PORT or unix:PATH of the operators' service; off")  # fmt: skip
    group.add_argument("--metrics-port", type=common.integer(0, 65535), metavar="PORT",
                       help="Prometheus metrics; off")  # fmt: skip
    group.add_argument("--metrics-host", default="127.0.0.1", metavar="HOST",
                       help="address of the metrics port")  # fmt: skip


def _add_capacity(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("capacity and scheduling")
    group.add_argument("--lanes", type=common.integer(1, MAX_SLOTS), default=DEFAULT_SLOTS,
                       metavar="N", help="requests computed at the same time")  # fmt: skip
    group.add_argument("--queue", type=common.integer(1, 1 << 16), default=64, metavar="N",
                       help="requests that may wait")  # fmt: skip
    group.add_argument("--kv-pool-tokens", type=common.integer(128, 1 << 31, "tokens"),
                       metavar="TOKENS", help="cache shared by all lanes; lanes x ctx")  # fmt: skip
    group.add_argument("--prefill-chunk", type=common.integer(8, 1 << 16, "tokens"),
                       metavar="TOKENS", help="grid of prefill, a multiple of 8; 128 on a CPU,"
                       " else 2048")  # fmt: skip
    group.add_argument("--decode-steps-per-chunk", type=common.integer(1, 1 << 16), default=8,
                       metavar="N", help="decode steps after every chunk of a prompt")  # fmt: skip
    group.add_argument("--queue-timeout", type=common.number(0.001, 86400), metavar="SECONDS",
                       help="longest wait for a lane; none")  # fmt: skip
    group.add_argument("--coalesce", type=common.number(0, 10), default=0.02, metavar="SECONDS",
                       help="wait for company when idle")  # fmt: skip
    group.add_argument("--default-max-tokens", type=common.integer(1, 1 << 31, "tokens"),
                       metavar="N", help="longest answer of requests that name none;"
                       " what fits")  # fmt: skip
    group.add_argument("--grace", type=common.number(0, 86400), default=30.0, metavar="SECONDS",
                       help="time for running requests at SIGTERM")  # fmt: skip
    group.add_argument("--slow-client-grace", type=common.number(0, 86400), default=30.0,
                       metavar="SECONDS", help="time for a client to read again")  # fmt: skip
    group.add_argument("--watchdog", type=common.number(0.1, 86400), default=60.0,
                       metavar="SECONDS", help="longest step")  # fmt: skip
    group.add_argument("--no-prefix-cache", action="store_true",
                       help="accepted: there is no prefix cache yet")  # fmt: skip
    guard = parser.add_argument_group("guardrails")
    guard.add_argument("--experts-per-token", type=common.integer(1, 256), metavar="N",
                       help="fewer experts than the model's own: a labelled"
                       " approximation")  # fmt: skip
    guard.add_argument("--exact", action="store_true",
                       help="refuse every setting that leaves the model's mathematics")  # fmt: skip
    guard.add_argument("--allow-unqualified", action="store_true",
                       help="serve on a device whose answers depend on load")  # fmt: skip
    guard.add_argument("--spec", default="off", metavar="off|fixed:K|adaptive",
                       help="speculative decoding")  # fmt: skip
    guard.add_argument("--draft", metavar="MODEL", help="draft model")


def _add_security(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("security")
    group.add_argument("--tls-cert", metavar="FILE", help="certificate chain, PEM")
    group.add_argument("--tls-key", metavar="FILE", help="its private key, PEM")
    group.add_argument("--tls-client-ca", metavar="FILE",
                       help="only clients with a certificate of this authority")  # fmt: skip
    group.add_argument("--auth-token-file", metavar="FILE",
                       help="only calls with this bearer token")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    common.silence_grpc(args)
    try:
        from ds4jax_server import app
        from ds4jax_server.settings import host_port
    except ImportError as error:
        raise common.Failure(
            f"the server needs the extra packages of 'ds4jax[server]' ({error.name} is missing):"
            " pip install 'ds4jax[server]'"
        ) from None
    model = running.open_model(args)
    _refuse(args, model)
    ctx = running.context_of(args, model)
    config = server_config(args, model, ctx)
    _set_up_logging(args)
    if args.log_format == "json":  # then nothing else is on stderr
        args = argparse.Namespace(**{**vars(args), "quiet": True})

    def announce(server: app.Server) -> None:
        names = [host_port(config.host, server.port)] if server.port is not None else []
        names += [f"unix:{config.unix}"] if config.unix else []
        print(f"listening on {' and '.join(names)}", flush=True)

    return app.run(config, loader(args, model, ctx), lanes=args.lanes, announce=announce)


# -- guardrails ------------------------------------------------------------------------------------


def _refuse(args: argparse.Namespace, model: running.Opened) -> None:
    """Combinations that are not served.

    Raises:
        Failure: all of them, with reasons.
    """
    cfg = model.file.model_config
    problems = []
    wanted, own = args.experts_per_token, cfg.num_experts_per_tok
    if wanted is not None and wanted > own:
        problems.append(f"--experts-per-token {wanted}: the model uses {own}: give at most that")
    if args.exact and wanted is not None and wanted < own:
        problems.append(
            f"--experts-per-token {wanted} is an approximation of the model's {own} and --exact"
            " refuses one: leave one of them out"
        )
    if args.exact and args.allow_unqualified:
        problems.append("--allow-unqualified gives up what --exact demands: leave one of them out")
    kind = args.spec.partition(":")[0]
    if kind not in ("off", "fixed", "adaptive"):
        problems.append(f"--spec {args.spec}: must be off, fixed:K or adaptive")
    elif kind != "off" or args.draft is not None:
        problems.append(
            "--spec, --draft: this version does not speculate, and plain decoding in its place"
            " would be a silent change: leave them out"
        )
    if args.prefill_chunk is not None and args.prefill_chunk % 8:
        problems.append(f"--prefill-chunk {args.prefill_chunk}: must be a multiple of 8")
    if args.no_port and not args.unix:
        problems.append("--no-port needs --unix PATH")
    if problems:
        raise common.Failure("; ".join(problems))


# -- settings --------------------------------------------------------------------------------------


def server_config(args: argparse.Namespace, model: running.Opened, ctx: int) -> ServerConfig:
    """Settings of the server.

    Raises:
        ConfigError: listing every value that cannot work.
    """
    from ds4jax_server.settings import ServerConfig

    from ds4jax.scheduler import SchedulerConfig

    hidden = {"run", "model_flag", "from_environment", "given", "command", "auth_token_file"}
    shown = {k: str(v) for k, v in sorted(vars(args).items()) if k not in hidden and v is not None}
    return ServerConfig(
        host=args.host,
        port=None if args.no_port else args.port,
        unix=args.unix,
        admin=args.admin,
        metrics_port=args.metrics_port,
        metrics_host=args.metrics_host,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        tls_client_ca=args.tls_client_ca,
        auth_token_file=args.auth_token_file,
        grace=args.grace,
        default_max_tokens=args.default_max_tokens,
        log_prompts=args.log_prompts,
        log_format=args.log_format,
        scheduler=SchedulerConfig(
            max_waiting=args.queue,
            coalesce=args.coalesce,
            decode_steps_per_chunk=args.decode_steps_per_chunk,
            queue_timeout=args.queue_timeout,
            slow_client_grace=args.slow_client_grace,
            watchdog=args.watchdog,
        ),
        shown=tuple({**shown, "model": model.name, "ctx": str(ctx)}.items()),
    )


def serving_run(args: argparse.Namespace, run: RuntimeConfig) -> RuntimeConfig:
    """The run of a loaded model with the capacity and buckets of a server.

    Raises:
        ConfigError: values out of range.
    """
    from ds4jax import local

    chunk = args.prefill_chunk
    rows = run.row_buckets
    chunks = run.prefill_buckets
    if run.backend != "reference":
        rows = local.up_to(args.lanes, local.GPU_ROWS)
        top = chunk or local.GPU_CHUNKS[-1]
        chunks = (*(t for t in local.GPU_CHUNKS if t < top), top)
    elif chunk is not None:
        rows = chunks = (chunk,)
    if rows[-1] < args.lanes:
        rows = (*rows, -(-args.lanes // 8) * 8)
    pool = args.kv_pool_tokens
    return dataclasses.replace(
        run,
        num_slots=args.lanes,
        num_pages=None if pool is None else -(-pool // 128),
        row_buckets=rows,
        prefill_buckets=chunks,
        num_experts_per_tok=args.experts_per_token,
    )


def loader(args: argparse.Namespace, model: running.Opened, ctx: int) -> Loader:
    """What the engine thread calls: load, allocate, compile."""

    def load(report: Any) -> Any:
        from ds4jax.engine import DeviceExecutor

        with running.progress(args) as shown:
            stored = max(1, model.file.describe()["totals"]["bytes"])

            def on_load(done: int, total: int, name: str) -> None:
                report(f"loading {name}", min(1.0, done / stored))
                shown_load(done, total, name)

            shown_load = shown.load
            shown.load = on_load  # type: ignore[method-assign]
            loaded = running.load(args, model, ctx, shown, lanes=args.lanes)
            run_config = serving_run(args, loaded.run)
            report("allocating", 0.0)

            def on_program(name: str, number: int, count: int, seconds: float) -> None:
                report(f"compiling {name}", number / count)
                shown.compile(number, count, name)

            try:
                executor = DeviceExecutor(loaded.cfg, loaded.params, run_config)
                shown.compile(0, 1)
                executor.warm_up(on_program)
            except MemoryError as error:  # with the table of the plan
                raise common.Failure(str(error)) from None
        report("checking that lanes do not depend on each other", 1.0)
        served = served_model(args, model, loaded, run_config)
        served = dataclasses.replace(served, unqualified=not qualified(args, executor))
        _LOG.info("ready: %d lanes of %d tokens", args.lanes, ctx)
        return executor, served

    return load


def qualified(args: argparse.Namespace, executor: Executor) -> bool:
    """Whether answers of this executor depend on their requests alone.

    Raises:
        Failure: they do not, and nobody has allowed that.
    """
    from ds4jax import qualify

    found = qualify.difference(executor)
    if found is None:
        return True
    text = f"this device is not qualified: its answers depend on load ({found})"
    if not args.allow_unqualified:
        raise common.Failure(f"{text}; --allow-unqualified serves on it all the same")
    _LOG.warning("%s; every response says so", text)
    return False


def served_model(
    args: argparse.Namespace, model: running.Opened, loaded: Loaded, run_config: RuntimeConfig
) -> ServedModel:
    """What the server says of its model."""
    from ds4jax_server.settings import ServedModel

    cfg = model.file.model_config
    experts = run_config.num_experts_per_tok or cfg.num_experts_per_tok
    digest, quantisation = _digest(model), _quantisation(model)
    facts = [digest or str(model.file.path), quantisation, run_config.numerics, run_config.dtype,
             loaded.plan.form, str(experts)]  # fmt: skip
    return ServedModel(
        id=model.file.path.stem or model.name,
        display_name=str(model.file.metadata.get("general.name") or model.name),
        vocab_size=cfg.vocab_size,
        tokenizer=model.tokenizer,
        chat_profile=running.chat_profile(args, model),
        numerics=run_config.numerics,
        dtype=run_config.dtype,
        quantisation=quantisation,
        digest=digest,
        fingerprint=hashlib.sha256("\n".join(facts).encode()).hexdigest(),
        experts_per_token=experts,
        approximate=experts < cfg.num_experts_per_tok,
        platform=loaded.platform,
        settings=tuple(
            (name, str(getattr(run_config, name)))
            for name in ("backend", "row_buckets", "prefill_buckets", "samplers", "pages",
                         "num_slots", "max_ctx", "max_drafts")
        ),
    )  # fmt: skip


def _quantisation(model: running.Opened) -> str:
    """Types of the weights by falling share of bytes."""
    by_type = model.file.describe()["totals"]["by_type"]
    order = sorted(by_type, key=lambda name: -by_type[name]["bytes"])
    return "+".join(name for name in order if by_type[name]["bytes"])


def _digest(model: running.Opened) -> str:
    """SHA-256 of the weight file, or empty if it is large or not one file."""
    path = model.file.path
    if len(model.file.files) != 1 or not path.is_file() or path.stat().st_size > MAX_DIGEST_BYTES:
        return ""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# -- log -------------------------------------------------------------------------------------------


class _Json(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        out: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname.lower(),
                               "logger": record.name}  # fmt: skip
        if record.name == "ds4jax.request":  # its message is JSON already
            return json.dumps(out)[:-1] + ", " + message[1:]
        out["message"] = message
        if record.exc_info:
            out["exception"] = self.formatException(record.exc_info)
        return json.dumps(out, ensure_ascii=False)


def _set_up_logging(args: argparse.Namespace) -> None:
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(_Json() if args.log_format == "json" else text)
    logger = logging.getLogger("ds4jax")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.WARNING if args.quiet else logging.INFO)
    logger.propagate = False
