"""Serving benchmarks over the real gRPC port: workloads H (natural, fixed, long) and S-mini.

    python -m bench.serve --workload H-fixed --cells 1,2,4 --json OUT.json [--model nano]
    python -m bench.serve --workload S-mini --json OUT.json

A fresh server process is started (per run for H, per cell for S), unless --address and --admin name
one that runs. Definitions and the report's form are `bench.report`; `bench.compare` compares runs
and `bench.page` draws them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.report import Record
from ds4jax.client import AsyncClient, Client, Connection, Delta, Finished, Options, RequestFailed
from ds4jax.client import Started as StartedEvent
from ds4jax.config import SamplingParams, StoppingCriteria

ROOT = Path(__file__).parents[1]
HUMANEVAL = Path(__file__).parent / "data" / "humaneval.jsonl"
IDENTITY = ("HumanEval/0", "HumanEval/1", "HumanEval/2")
LONG_TOKENS = 1195
WORKLOADS = ("H-natural", "H-fixed", "H-long", "S-mini")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request of a workload."""

    id: str
    options: Options


# ---- the server under test -----------------------------------------------------------------------


class Target:
    """A server to measure: its address, its operators' address, and its process if it is ours."""

    def __init__(self, address: str, admin: str, process: subprocess.Popen[str] | None) -> None:
        self.address = address
        self.admin = admin
        self.process = process

    def status(self) -> dict[str, Any]:
        """The server's state and counters, with plain names and numbers."""
        import grpc
        from ds4jax_server.pb import generation_pb2 as pb
        from ds4jax_server.pb import generation_pb2_grpc

        with Connection(address=self.admin).channel(grpc) as channel:
            stub = generation_pb2_grpc.AdminServiceStub(channel)
            wire = stub.GetStatus(pb.GetStatusRequest(), timeout=10)
        counters = {}
        for f in wire.counters.DESCRIPTOR.fields:
            value = getattr(wire.counters, f.name)
            counters[f.name] = list(value) if f.is_repeated else value
        return {
            "counters": counters,
            "configuration": dict(wire.configuration),
            "memory_plan": dict(wire.memory_plan),
            "lanes": wire.lanes_total,
            "active": wire.requests_active,
        }

    def idle_counters(self) -> dict[str, Any]:
        """Counters once nothing runs."""
        end = time.monotonic() + 30
        while True:
            status = self.status()
            if not status["active"] or time.monotonic() > end:
                return dict(status["counters"])
            time.sleep(0.05)


@contextmanager
def server(args: argparse.Namespace, *extra: str) -> Iterator[Target]:
    """The server that the flags name, or a fresh process for the time of the block.

    Raises:
        RuntimeError: it did not become ready.
    """
    if args.address:
        yield Target(args.address, args.admin, None)
        return
    with tempfile.TemporaryDirectory(prefix="ds4jax-bench-") as folder:
        yield from _own_server(args, folder, extra)


def _own_server(args: argparse.Namespace, folder: str, extra: Sequence[str]) -> Iterator[Target]:
    admin = f"unix:{folder}/admin"
    command = [
        sys.executable, "-m", "ds4jax_server", args.model, "--port", "0", "--admin", admin,
        "--no-progress", *(args.server_args.split() if args.server_args else ()), *extra,
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), str(ROOT / "server"), os.environ.get("PYTHONPATH", "")])
    log = open(f"{folder}/log", "w+")  # noqa: SIM115 (lives as long as the process)
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE,
        stderr=log, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        address = line.split()[2] if line.startswith("listening") else ""
        if not address:
            raise RuntimeError(f"the server did not start: {_tail(log)}")
        with Client(address) as client:
            end = time.monotonic() + args.start_timeout
            while not client.healthy():
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the server did not become ready: {_tail(log)}")
                time.sleep(0.2)
        yield Target(address, admin, process)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        log.close()


def _tail(log: Any) -> str:
    log.flush()
    log.seek(0)
    return str(log.read())[-2000:]


# ---- load ----------------------------------------------------------------------------------------


async def one(client: AsyncClient, job: Job, wave: int) -> Record:
    """Issue one request and note when what arrives."""
    record = Record(id=job.id, wave=wave, issued=time.monotonic())
    record.seed = job.options.sampling.seed
    try:
        async for event in client.stream(job.options):
            if isinstance(event, Delta):
                if event.token_ids:
                    record.arrivals.append((time.monotonic(), len(event.token_ids)))
                    record.ids += event.token_ids
                record.text += event.reasoning + event.content
            elif isinstance(event, StartedEvent):
                record.prompt_tokens, record.seed = event.prompt_tokens, event.seed
            elif isinstance(event, Finished):
                record.finish = event.finish_reason
                record.server_first_token_s = event.timings.first_token
                record.server_tokens = event.usage.output_tokens
    except RequestFailed as error:
        record.error = f"{error.code} {error.reason}"
    return record


class Load:
    """One connection to the server for all requests of a run, opened before the first of them."""

    def __init__(self, address: str) -> None:
        self._runner = asyncio.Runner()
        self.client = self._runner.run(self._open(address))

    @staticmethod
    async def _open(address: str) -> AsyncClient:
        client = AsyncClient(address, retries=0)
        await client.model()
        return client

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self.client.close())
        self._runner.close()

    def run(self, work: Any) -> Any:
        """Run a coroutine."""
        return self._runner.run(work)

    def wave(self, jobs: Sequence[Job], wave: int) -> list[Record]:
        """All at once."""

        async def work() -> list[Record]:
            return list(await asyncio.gather(*[one(self.client, job, wave) for job in jobs]))

        return list(self.run(work()))

    def closed_loop(self, jobs: Sequence[Job], concurrency: int) -> list[Record]:
        """Always `concurrency` in flight until the list is done."""
        queue = list(reversed(jobs))
        records: list[Record] = []

        async def worker() -> None:
            while queue:
                records.append(await one(self.client, queue.pop(), 0))

        async def work() -> None:
            await asyncio.gather(*[worker() for _ in range(concurrency)])

        self.run(work())
        return records


# ---- workload H ----------------------------------------------------------------------------------


def humaneval() -> list[dict[str, str]]:
    """The prompts, in order."""
    lines = HUMANEVAL.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def h_job(problem: dict[str, str], args: argparse.Namespace) -> Job:
    """A prompt as one user message, without thinking, greedy."""
    text = f"Complete the following Python function.\n```python\n{problem['prompt']}```"
    natural = args.workload == "H-natural"
    stopping = StoppingCriteria(
        max_output_tokens=args.tokens or (512 if natural else 256), ignore_eos=not natural
    )
    options = Options(
        messages=[{"role": "user", "content": text}], effort="none", token_ids=True,
        sampling=SamplingParams(temperature=0.0, seed=0), stopping=stopping,
        speculate=args.arm != "none",
    )  # fmt: skip
    return Job(id=problem["id"], options=options)


def h_waves(width: int, jobs: Sequence[Job], count: int = 3) -> list[list[Job]]:
    """Waves of an identity prompt and its neighbours; more than three see the former again."""
    waves = []
    for w in range(count):
        first = 3 + w * (width - 1)
        waves.append([jobs[w % 3], *jobs[first : first + width - 1]])
    return waves


def run_h(args: argparse.Namespace) -> dict[str, Any]:
    """Fixed-concurrency waves, one server for all cells."""
    jobs = [h_job(p, args) for p in humaneval()]
    limits = measure_limits(args)
    host = report.host_facts()
    cells = []
    lanes = str(max(args.lanes, *args.cells))
    with server(args, "--lanes", lanes) as target, Load(target.address) as load:
        for width in args.cells:
            warm = [Job(id="warm-up", options=j.options) for j in jobs[-width:]]
            load.wave(warm, -1)
            before = target.idle_counters()
            records: list[Record] = []
            for number, wave in enumerate(h_waves(width, jobs, args.waves)):
                time.sleep(args.idle)
                records += load.wave(wave, number)
            after = target.idle_counters()
            cells.append(
                report.cell(
                    records, concurrency=width, arm=args.arm, before=before, after=after
                )
            )  # fmt: skip
            _say(cells[-1])
        finish_cells(cells, set(IDENTITY))
        return make_report(args, target, cells, limits, host, jobs, set(IDENTITY))


def finish_cells(cells: list[dict[str, Any]], wanted: set[str] | None) -> None:
    """A cell whose hashes differ shows no throughput."""
    for difference in report.identity(cells, wanted)["differences"]:
        for cell in cells:
            if f"C{cell['concurrency']}/{cell['arm']}" == difference["cell_b"]:
                cell["valid"] = False
                reason = f"FAILED: other ids for {difference['id']}"
                if reason not in cell["invalid_reasons"]:
                    cell["invalid_reasons"].append(reason)
                for name in ("aggregate_tok_s", "output_window_tok_s", "steady_decode_tok_s"):
                    cell[name] = None


# ---- the long prompt -----------------------------------------------------------------------------


def long_job(target: Target, tokens: int) -> Job:
    """Exactly `LONG_TOKENS` ids from the data file."""
    text = "\n".join(p["prompt"] for p in humaneval()) * 4
    with Client(target.address) as client:
        ids = client.tokenize(text)[:LONG_TOKENS]
    if len(ids) < LONG_TOKENS:
        raise RuntimeError(f"the data file gives {len(ids)} tokens, {LONG_TOKENS} are needed")
    options = Options(
        tokens=ids, token_ids=True, sampling=SamplingParams(temperature=0.0, seed=0),
        stopping=StoppingCriteria(max_output_tokens=tokens, ignore_eos=True),
    )  # fmt: skip
    return Job(id="long", options=options)


async def long_among(client: AsyncClient, long: Job, others: Sequence[Job]) -> list[Record]:
    """The others first; the long one once they decode. Wave 1 holds those that decode meanwhile."""
    running = [asyncio.ensure_future(one(client, job, 1)) for job in others]
    await asyncio.sleep(1.0)
    record = await one(client, long, 0)
    rest = await asyncio.gather(*running)
    return [record, *rest]


def run_long(args: argparse.Namespace) -> dict[str, Any]:
    """One long prompt alone, then with three decoding lanes, then in the smallest chunks."""
    limits, host = measure_limits(args), report.host_facts()
    cells: list[dict[str, Any]] = []
    tokens = args.tokens or 32
    with server(args, "--lanes", "4") as target, Load(target.address) as load:
        long = long_job(target, tokens)
        load.wave([long], -1)
        before = target.idle_counters()
        alone = load.wave([long], 0)
        after = target.idle_counters()
        cells.append(
            report.cell(alone, concurrency=1, arm="alone", before=before, after=after)
        )  # fmt: skip
        _say(cells[-1])
        background = argparse.Namespace(**{**vars(args), "workload": "H-fixed", "tokens": 400})
        others = [h_job(p, background) for p in humaneval()[3:6]]
        before = target.idle_counters()
        among = load.run(long_among(load.client, long, others))
        after = target.idle_counters()
        made = report.cell(among, concurrency=4, arm="with 3", before=before, after=after)
        made["decoding_itl_ms"] = _gaps_during(among[0], among[1:])
        cells.append(made)
        _say(cells[-1])
        finish_cells(cells, {"long"})
        result = make_report(args, target, cells, limits, host, [long, *others], {"long"})
    if args.address:  # its chunks are what they are
        return result
    one_lane = ("--lanes", "1", "--prefill-chunk", "8")
    with server(args, *one_lane) as target, Load(target.address) as load:
        before = target.idle_counters()
        small = load.wave([long], 0)
        after = target.idle_counters()
        cells.append(
            report.cell(small, concurrency=1, arm="chunks of 8", before=before, after=after)
        )  # fmt: skip
        _say(cells[-1])
    finish_cells(cells, {"long"})
    result["cells"] = cells
    result["identity"] = report.identity(cells, {"long"})
    return result


def _gaps_during(long: Record, others: Sequence[Record]) -> dict[str, Any]:
    """Gaps of the decoding lanes that end while the long prompt is prefilled."""
    low, high = long.issued, long.first or long.issued
    gaps = [
        1e3 * (b - a)
        for r in others
        for (a, _), (b, _) in zip(r.arrivals, r.arrivals[1:], strict=False)
        if low <= b <= high
    ]
    return report.spread(gaps, {"median": 50, "p95": 95, "p99": 99})


# ---- workload S-mini -----------------------------------------------------------------------------


def s_jobs(target: Target, count: int, tokens: int, fixed: bool) -> list[Job]:
    """Prompts of 900 to 1,100 tokens cut from the data file, always the same ones."""
    rng = random.Random(1)
    pieces = [p["prompt"] for p in humaneval()]
    jobs = []
    with Client(target.address) as client:
        for n in range(count):
            text = f"Task {n}\n"
            while len(text) < 6000:
                rng.shuffle(pieces)
                text += "\n".join(pieces)
            ids = client.tokenize(text)
            length = rng.randint(900, 1100)
            if len(ids) < length:
                raise RuntimeError(f"a prompt has {len(ids)} tokens, {length} are needed")
            options = Options(
                tokens=ids[:length], token_ids=True, sampling=SamplingParams(seed=n),
                stopping=StoppingCriteria(max_output_tokens=tokens, ignore_eos=fixed),
            )  # fmt: skip
            jobs.append(Job(id=str(n), options=options))
    return jobs


def _short(jobs: Sequence[Job]) -> list[Job]:
    """Warm-up: the same prompts, 256 tokens at most."""
    import dataclasses

    out = []
    for job in jobs:
        most = min(256, job.options.stopping.max_output_tokens or 256)
        stopping = dataclasses.replace(job.options.stopping, max_output_tokens=most)
        options = dataclasses.replace(job.options, stopping=stopping)
        out.append(Job(id="warm-up", options=options))
    return out


def run_s(args: argparse.Namespace) -> dict[str, Any]:
    """Closed loop, a fresh server per cell."""
    limits, host = measure_limits(args), report.host_facts()
    cells: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    for width in args.cells:
        lanes = str(max(args.lanes, width))
        with server(args, "--lanes", lanes) as target, Load(target.address) as load:
            jobs = s_jobs(target, args.requests, args.tokens or 2048, args.fixed)
            warm = _short(jobs[: args.warm_up])
            load.closed_loop(warm, min(4, args.lanes))
            load.closed_loop(warm, width)
            before = target.idle_counters()
            records = load.closed_loop(jobs, width)
            after = target.idle_counters()
            invalid = []
            wanted = ("length",) if args.fixed else ("stop", "length")
            done = sum(r.finish in wanted for r in records)
            if done != len(jobs):
                invalid.append(f"{done} of {len(jobs)} finished with {' or '.join(wanted)}")
            cells.append(
                report.cell(
                    records, concurrency=width, arm=args.arm, before=before, after=after,
                    invalid=invalid,
                )
            )  # fmt: skip
            _say(cells[-1])
            finish_cells(cells, None)
            result = make_report(args, target, cells, limits, host, jobs, None)
    return result


# ---- report --------------------------------------------------------------------------------------


def measure_limits(args: argparse.Namespace) -> dict[str, Any]:
    """Limits of the device, in a process of their own; nothing for a server elsewhere."""
    if args.address or args.no_limits:
        return {}
    out = subprocess.run(
        [sys.executable, "-m", "bench.limits"], cwd=ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return dict(json.loads(out.stdout))


def make_report(
    args: argparse.Namespace,
    target: Target,
    cells: list[dict[str, Any]],
    limits: dict[str, Any],
    host: dict[str, Any],
    jobs: Sequence[Job],
    compared: set[str] | None,
) -> dict[str, Any]:
    """The report of this run."""
    with Client(target.address) as client:
        model = client.model()
    status = target.status()
    counters = status["counters"]
    listed = [
        {"id": j.id, "messages": j.options.messages, "tokens": j.options.tokens,
         "stopping": str(j.options.stopping), "sampling": str(j.options.sampling)}
        for j in jobs
    ]  # fmt: skip
    fixed = "S-mini-F" if args.workload == "S-mini" and args.fixed else args.workload
    devices = limits.pop("devices", [])
    notes = args.notes or (
        "acceptance of fixed-length text is not typical" if args.workload == "H-fixed" else ""
    )
    return report.make(
        workload=fixed, cells=cells, limits=limits, devices=devices, host=host,
        compared=compared, notes=notes,
        requests_sha256=report.sha256(json.dumps(listed)),
        model={
            "name": model.display_name, "sha256": model.digest or "not hashed",
            "quantisation": model.quantisation, "experts_per_token": model.experts_per_token,
            "bytes_resident_per_device": [sum(status["memory_plan"].values())],
            "approximate": model.approximate, "unqualified": model.unqualified, "draft": None,
            "fingerprint": model.fingerprint,
        },
        server={
            **status["configuration"], "profile": model.numerics, "dtype": model.dtype,
            "placement_sha256": None, "memory_plan": status["memory_plan"],
            "prefill_chunk": model.limits.prefill_chunk,
            "buckets": {
                kind: status["configuration"].get(f"{kind}_buckets") for kind in ("row", "prefill")
            },
            "compile": {
                "count_before_ready": counters["compiles"] - counters["compiles_after_ready"],
                "seconds": counters["compile_seconds"],
                "count_after_ready": counters["compiles_after_ready"],
            },
        },
    )  # fmt: skip


def _say(cell: dict[str, Any]) -> None:
    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    print(
        f"C{cell['concurrency']} {cell['arm']}: {cell['completion_tokens']} tokens,"
        f" {number(cell['aggregate_tok_s'])} tok/s, window {number(cell['output_window_tok_s'])},"
        f" ttft {number(cell['ttft_s']['median'], 3)} s, tpot"
        f" {number(cell['tpot_ms']['median'])} ms, host"
        f" {number(cell['server_counters']['host_ms_per_step'], 3)} ms/step"
        f" ({number(cell['server_counters']['host_cpu_ms_per_step'], 3)} of CPU)"
        + ("" if cell["valid"] else f"  INVALID: {'; '.join(cell['invalid_reasons'])}"),
        file=sys.stderr,
    )


def main(argv: list[str] | None = None) -> int:
    """Run a workload."""
    parser = argparse.ArgumentParser(prog="bench.serve", description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, default="H-natural")
    parser.add_argument("--json", required=True, metavar="OUT", help="report file; - is stdout")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--cells", default="", metavar="1,2,..", help="concurrencies")
    parser.add_argument("--lanes", type=int, default=6)
    parser.add_argument("--tokens", type=int, help="output tokens; the workload's own number")
    parser.add_argument("--waves", type=int, default=3, help="waves of workload H")
    parser.add_argument("--idle", type=float, default=1.0, help="seconds between waves")
    parser.add_argument("--requests", type=int, default=88, help="of workload S-mini")
    parser.add_argument("--warm-up", type=int, default=8, help="requests, of workload S-mini")
    parser.add_argument("--fixed", action="store_true", help="S-mini: ignore the end of text")
    parser.add_argument("--arm", default="none", help="name of what is varied")
    parser.add_argument("--server-args", default="", help="more flags for the server")
    parser.add_argument("--address", help="measure a server that runs (with --admin)")
    parser.add_argument("--admin", help="its operators' address")
    parser.add_argument("--start-timeout", type=float, default=1800.0, metavar="SECONDS")
    parser.add_argument("--no-limits", action="store_true", help="do not measure the device")
    parser.add_argument("--notes", default="")
    args = parser.parse_args(argv)
    if bool(args.address) != bool(args.admin):
        parser.error("--address and --admin go together")
    default = "1,2,4,6" if args.workload == "S-mini" else "1,2,3,4"
    args.cells = [int(x) for x in (args.cells or default).split(",")]
    runs = {"H-long": run_long, "S-mini": run_s}
    try:
        result = runs.get(args.workload, run_h)(args)
    except RuntimeError as error:
        print(f"bench.serve: {error}", file=sys.stderr)
        return 1
    report.write(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
