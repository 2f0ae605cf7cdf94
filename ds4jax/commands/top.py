"""`ds4jax top`: a live view of a server, through its admin service."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

from ds4jax.commands import common

_WIDTH = 24


def add(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "top",
        help="live view of a server",
        description="Watch a server: lanes, queue, tokens per second, pages, step times. ADDR is"
        " the one that `ds4jax serve --admin` was given.",
    )
    parser.add_argument("address", metavar="ADDR", type=common.address,
                        help="HOST:PORT or unix:PATH")  # fmt: skip
    parser.add_argument("--server-token-file", metavar="FILE", help="bearer token for it")
    parser.add_argument("--interval", type=common.number(0.1, 3600), default=1.0,
                        metavar="SECONDS", help="between two looks")  # fmt: skip
    parser.add_argument("--once", action="store_true", help="one look, then end")
    common.add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show until interrupted."""
    common.silence_grpc(args)
    try:
        import grpc
        from ds4jax_server.pb import generation_pb2_grpc

        from ds4jax.client import Connection
    except ImportError as error:
        raise common.Failure(f"{error.name} is missing: pip install 'ds4jax[server]'") from None
    connection = Connection(address=args.address, token=common.server_token(args))
    channel = connection.channel(grpc)
    stub = generation_pb2_grpc.AdminServiceStub(channel)
    try:
        if args.json:
            return _print_json(_look(stub, connection))
        if args.once or not common.is_terminal(_stdout()):
            print(render(_look(stub, connection), None))
            return 0
        return _watch(stub, connection, args.interval)
    finally:
        channel.close()


def _stdout() -> Any:
    import sys

    return sys.stdout


def _look(stub: Any, connection: Any) -> Any:
    import grpc
    from ds4jax_server.pb import generation_pb2 as pb

    from ds4jax.client import read_error

    try:
        return stub.GetStatus(pb.GetStatusRequest(), timeout=5.0, metadata=connection.metadata)
    except grpc.RpcError as error:
        failed = read_error(error)
        hint = ""
        if failed.code == "UNIMPLEMENTED":
            hint = ": this is not the admin address; start the server with --admin HOST:PORT"
        elif failed.code == "UNAUTHENTICATED":
            hint = "; the flag is --server-token-file"
        raise common.Failure(
            f"{connection.address}: {failed.code}: {failed.message}{hint}"
        ) from None


def _print_json(status: Any) -> int:
    from google.protobuf import json_format

    common.print_json(json_format.MessageToDict(status, preserving_proto_field_name=True))
    return 0


def _watch(stub: Any, connection: Any, interval: float) -> int:
    from rich.live import Live
    from rich.text import Text

    last: Rates | None = None
    with Live(auto_refresh=False, screen=True) as live:
        while True:
            status = _look(stub, connection)
            live.update(Text(render(status, last)), refresh=True)
            last = Rates.of(status)
            time.sleep(interval)


@dataclass(frozen=True)
class Rates:
    """Totals at one moment; the difference of two gives rates."""

    at: float
    output_tokens: int
    prefill_tokens: int
    steps: int

    @classmethod
    def of(cls, status: Any) -> Rates:
        """Those of a status."""
        c = status.counters
        return cls(
            at=status.status_time.ToNanoseconds() / 1e9, output_tokens=c.output_tokens,
            prefill_tokens=c.prefill_tokens, steps=c.steps,
        )  # fmt: skip


def render(status: Any, last: Rates | None) -> str:
    """The view as text; rates need an earlier look."""
    from ds4jax_server.pb import generation_pb2 as pb

    state = pb.GetStatusResponse.State.Name(status.state).removeprefix("STATE_").lower()
    up = status.status_time.ToNanoseconds() - status.start_time.ToNanoseconds()
    lines = [f"{status.model or 'model'}  {state}  up {_span(up / 1e9)}"]
    if status.loading_stage:
        lines.append(f"{status.loading_stage}  {_bar(status.loading_fraction)}")
        return "\n".join(lines)
    c = status.counters
    busy = sum(lane.HasField("slot") for lane in status.lanes)
    used = status.pages_total - status.pages_free
    share = used / max(1, status.pages_total)
    lines += [
        f"lanes {busy}/{status.lanes_total}   queued {status.requests_queued}"
        f"   active {status.requests_active}   requests {c.requests}",
        f"pages {_bar(share)} {used}/{status.pages_total}",
        _rates(status, last),
        f"step  decode {_ms(status.last_decode_step)}   prefill {_ms(status.last_prefill_step)}"
        f"   host {1e3 * c.host_seconds / max(1, c.steps):.2f} ms",
        f"preempted {c.preemptions}   suspended {c.suspensions}   slow {c.slow_clients}"
        f"   faults {c.non_finite + c.watchdog + c.device_errors}"
        f"   compiles after ready {c.compiles_after_ready}",
    ]
    if c.spec_steps:
        rate = c.drafts_accepted / max(1, c.drafts_verified)
        per_step = 1 + c.drafts_accepted / c.spec_steps
        lines.append(f"speculation  accepted {rate:.1%}   {per_step:.2f} tokens per step")
    lines.append("")
    lines.append(f"{'slot':>4}  {'state':<10} {'prompt':>14} {'output':>7}  request")
    for lane in status.lanes:
        slot = str(lane.slot) if lane.HasField("slot") else "-"
        prompt = f"{lane.prefilled_tokens}/{lane.prompt_tokens}"
        name = lane.request_id + (f" #{lane.candidate}" if lane.candidate else "")
        lines.append(f"{slot:>4}  {lane.state:<10} {prompt:>14} {lane.output_tokens:>7}  {name}")
    return "\n".join(lines)


def _rates(status: Any, last: Rates | None) -> str:
    now = Rates.of(status)
    if last is None or now.at <= last.at:
        return f"tokens  output {now.output_tokens}   prompt {now.prefill_tokens}"
    span = now.at - last.at
    output = (now.output_tokens - last.output_tokens) / span
    prompt = (now.prefill_tokens - last.prefill_tokens) / span
    steps = (now.steps - last.steps) / span
    return f"tokens/s  output {output:.1f}   prompt {prompt:.1f}   steps/s {steps:.1f}"


def _bar(share: float) -> str:
    full = round(_WIDTH * min(1.0, max(0.0, share)))
    return f"[{'#' * full}{'.' * (_WIDTH - full)}] {share:.0%}"


def _ms(duration: Any) -> str:
    return f"{duration.ToNanoseconds() / 1e6:.1f} ms"


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
