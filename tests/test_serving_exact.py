"""A request's bytes depend on nothing but the request: a real model served over a real port.

The same requests are sent alone (A), among others in many ways (B), and alone again (A). Ids, text,
finish reason and the bits of the logprobs must agree. The default run covers the ways pairwise; the
full matrix and a long soak are marked slow.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ds4jax_server.pb import generation_pb2 as pb

from ds4jax.config import RuntimeConfig
from ds4jax.engine import DeviceExecutor
from tests import tiny
from tests.serve_tools import Running, failure, ids_of, quick, serving, text_of, until
from tests.text_tools import toy_tokenizer

VOCAB = toy_tokenizer().vocab_size
LANES = 6


def make_executor(
    chunk: int = 8, lanes: int = LANES, rows: tuple[int, ...] = (8,), **kwargs: Any
) -> DeviceExecutor:
    """Six lanes, one program: chunks of 8 rows are interleaved with decode steps of 8 rows."""
    cfg = tiny.config(vocab_size=VOCAB)
    run = RuntimeConfig(
        max_ctx=640, num_slots=lanes, row_buckets=rows, prefill_buckets=(chunk,),
        num_pages=20 if lanes == LANES else 3 * lanes,
    )  # fmt: skip
    order = np.random.default_rng(2).permutation(run.pages).tolist()
    made = DeviceExecutor(cfg, tiny.params(cfg, max_ctx=640), run, page_order=order, **kwargs)
    made.warm_up()
    return made


@pytest.fixture(scope="module")
def executor() -> DeviceExecutor:
    return make_executor()


@pytest.fixture(scope="module")
def server(executor: DeviceExecutor) -> Iterator[Running]:
    settings = quick(decode_steps_per_chunk=2)
    with serving(executor, settings=settings) as running:
        running.server.engine.start_profile(5000)
        STEPS.append(running.server.engine)
        yield running
        STEPS.clear()


STEPS: list[Any] = []
"""The engine whose steps a failure shows."""


def request(n: int) -> pb.GenerateRequest:
    """Request `n`: every third greedy, seeds from 0, all prompt lengths that matter, penalties."""
    length = (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 127, 129)[n % 12]
    rng = random.Random(n)
    sampling = pb.SamplingParams(seed=n // 2)
    if n % 3 == 0:
        sampling.temperature = 0.0
    if n % 4 == 1:
        sampling.top_p, sampling.frequency_penalty, sampling.penalty_window = 0.9, 0.5, 5
    out = pb.GenerateRequest(
        tokens=pb.TokenIds(ids=[rng.randrange(256) for _ in range(length)]), sampling=sampling,
        stopping=pb.StoppingCriteria(max_output_tokens=40 + 3 * (n % 7)),
        output=pb.OutputOptions(token_ids=True, top_logprobs=5),
    )  # fmt: skip
    if n % 5 == 4:
        out.stopping.ignore_eos = True
    return out


def outcome(messages: list[Any]) -> dict[str, Any]:
    """What must not change, and its digest."""
    rows = [r for m in messages if m.HasField("delta") for r in m.delta.logprobs]
    finished = messages[-1].finished
    out = {
        "ids": ids_of(messages),
        "text": text_of(messages),
        "finish": finished.finish_reason,
        "logprobs": [struct.pack("<f", r.logprob).hex() for r in rows],
        "top": [[(t.token_id, struct.pack("<f", t.logprob).hex()) for t in r.top] for r in rows],
    }
    text = json.dumps(out, sort_keys=True)
    return {**out, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def same(n: int, one: dict[str, Any], two: dict[str, Any], how: str) -> None:
    """Fail with the first position that differs and what both saw there."""
    if one["sha256"] == two["sha256"]:
        return
    at = next(
        (
            i
            for i, pair in enumerate(zip(one["top"], two["top"], strict=False))
            if pair[0] != pair[1]
        ),
        min(len(one["ids"]), len(two["ids"])),
    )
    rows = [x["top"][at] if at < len(x["top"]) else "ended" for x in (one, two)]
    steps = [r for engine in STEPS for r in list(engine._profile or ())[-200:]]
    widths = " ".join(f"{r.phase[0]}{r.lanes}x{r.rows}/{r.bucket}" for r in steps)
    pytest.fail(
        f"request {n}, {how}: first difference at output token {at}: {rows}\nlast steps: {widths}"
    )


def alone(server: Running, numbers: list[int]) -> dict[int, dict[str, Any]]:
    return {n: outcome(list(server.stub.Generate(request(n), timeout=120))) for n in numbers}


def together(
    server: Running, numbers: list[int], *, delays: Callable[[int], float] = lambda n: 0.0
) -> dict[int, dict[str, Any]]:
    """All at once, each after its delay."""
    results: dict[int, dict[str, Any]] = {}

    def one(n: int) -> None:
        time.sleep(delays(n))
        results[n] = outcome(list(server.stub.Generate(request(n), timeout=120)))

    threads = [threading.Thread(target=one, args=(n,)) for n in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def check(one: dict[int, dict[str, Any]], two: dict[int, dict[str, Any]], how: str) -> None:
    assert one.keys() == two.keys()
    for n in sorted(one):
        same(n, one[n], two[n], how)


@pytest.fixture(scope="module")
def first(server: Running) -> dict[int, dict[str, Any]]:
    """A: every request alone."""
    return alone(server, list(range(12)))


def test_the_requests_are_worth_comparing(first: dict[int, dict[str, Any]]) -> None:
    assert len({x["sha256"] for x in first.values()}) == len(first)
    assert all(len(set(x["ids"])) > 2 for x in first.values())
    assert pb.FINISH_REASON_LENGTH in {x["finish"] for x in first.values()}
    values = [v for x in first.values() for v in x["logprobs"]]
    assert len(set(values)) > 50


def test_the_same_alone_again(server: Running, first: dict[int, dict[str, Any]]) -> None:
    check(first, alone(server, list(first)), "alone again")


@pytest.mark.parametrize("width", [2, 4, 6])
def test_the_same_among_others(
    server: Running, first: dict[int, dict[str, Any]], width: int
) -> None:
    rng = random.Random(width)
    numbers = list(first)
    rng.shuffle(numbers)
    got: dict[int, dict[str, Any]] = {}
    for i in range(0, len(numbers), width):
        got |= together(server, numbers[i : i + width], delays=lambda n: 0.03 * ((n * 7) % 5))
    check(first, got, f"in groups of {width}")


def test_the_same_during_a_long_prefill(server: Running, first: dict[int, dict[str, Any]]) -> None:
    long = pb.GenerateRequest(
        tokens=pb.TokenIds(ids=[7, 9, 11] * 190), stopping=pb.StoppingCriteria(max_output_tokens=3)
    )
    call = server.stub.Generate(long, timeout=120)
    next(call)
    numbers = list(first)[:5]
    got = together(server, numbers)
    call.cancel()
    check({n: first[n] for n in numbers}, got, "during a long prefill")


@pytest.mark.parametrize("snapshots", [True, False])
def test_the_same_with_pauses_and_parking(
    executor: DeviceExecutor, server: Running, first: dict[int, dict[str, Any]], snapshots: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Lanes are suspended and parked at random steps, with and without host memory for them."""
    if not snapshots:
        park = executor.park
        monkeypatch.setattr(executor, "park", lambda lane: (park(lane), None)[1])
    scheduler = server.scheduler
    rng = random.Random(int(snapshots))
    stop = threading.Event()
    before = scheduler.counters.preemptions

    def disturb() -> None:
        while not stop.wait(0.002):
            for req in scheduler._front.requests():
                action = rng.random()
                if action < 0.15:
                    scheduler.park(req)
                elif action < 0.4:
                    scheduler.pause(req, rng.random() < 0.4)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        numbers = list(first)[:6] if snapshots else list(first)[6:]
        for _ in range(20):
            got = together(server, numbers)
            check({n: first[n] for n in numbers}, got, "paused and parked")
            if scheduler.counters.preemptions - before >= 12:
                break
    finally:
        stop.set()
        thread.join()
    assert scheduler.counters.preemptions - before >= 12


def test_candidates_are_the_same_alone_and_among_others(server: Running) -> None:
    def pair() -> list[list[int]]:
        req = request(1)
        req.candidate_count = 2
        req.sampling.seed = 0
        out = list(server.stub.Generate(req, timeout=120))
        return [ids_of(out, 0), ids_of(out, 1)]

    one = pair()
    box: list[list[list[int]]] = []
    thread = threading.Thread(target=lambda: box.append(pair()))
    thread.start()
    together(server, [2, 3, 4])
    thread.join()
    assert one[0] != one[1] and box == [one]


def test_candidates_that_share_a_prefill_are_those_that_do_not(
    executor: DeviceExecutor, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three candidates of a prompt of 17 chunks; then each computes them all by itself."""

    def run() -> list[dict[str, Any]]:
        req = request(11)
        req.candidate_count = 3
        out = list(server.stub.Generate(req, timeout=120))
        return [outcome(only(out, c)) for c in range(3)]

    counters = server.scheduler.counters
    before = counters.forked_tokens, counters.prefill_tokens
    shared = run()
    assert counters.forked_tokens - before[0] == 2 * 128
    assert counters.prefill_tokens - before[1] == 129 + 2
    monkeypatch.setattr(executor, "fork", lambda *args: False)
    monkeypatch.setattr(server.scheduler, "_can_fork", True)
    assert run() == shared
    assert counters.prefill_tokens - before[1] == 129 + 2 + 3 * 129
    assert len({x["sha256"] for x in shared}) == 3
    monkeypatch.setattr(server.scheduler, "_can_fork", True)


def only(messages: list[Any], candidate: int) -> list[Any]:
    """Deltas and end of one candidate, as if there were no other."""
    out = []
    for m in messages:
        alone = pb.GenerateResponse()
        alone.CopyFrom(m)
        event = getattr(alone, m.WhichOneof("event"))
        if getattr(event, "candidate", None) == candidate:
            event.candidate = 0
            out.append(alone)
    return out


def test_reported_seeds_reproduce(server: Running) -> None:
    req = request(1)
    req.sampling.ClearField("seed")
    runs = [list(server.stub.Generate(req, timeout=120)) for _ in range(2)]
    seeds = [r[0].started.seed for r in runs]
    assert seeds[0] != seeds[1] and ids_of(runs[0]) != ids_of(runs[1])
    req.sampling.seed = seeds[0]
    assert outcome(list(server.stub.Generate(req, timeout=120))) == outcome(runs[0])


def test_nothing_was_compiled_and_nothing_leaked(
    executor: DeviceExecutor, server: Running, first: dict[int, dict[str, Any]]
) -> None:
    until(lambda: server.scheduler.active == 0 and not executor._lanes)
    counters = executor.counters()
    assert (counters["compiles_after_ready"], counters["traces_after_ready"]) == (0, 0)
    counts = executor.page_counts()
    assert counts.free == counts.total
    run = executor.run
    contexts, helpers = 1, 8
    shapes = len(run.row_buckets) + len(run.prefill_buckets)
    assert executor.num_programs <= shapes * contexts * len(run.samplers) + helpers


def test_a_forced_nan_ends_one_call_only(
    executor: DeviceExecutor, server: Running, first: dict[int, dict[str, Any]]
) -> None:
    """The cache of one live lane is spoilt from inside the engine thread."""
    sick = request(5)
    sick.stopping.max_output_tokens = 200
    sick.stopping.ignore_eos = True
    call = server.stub.Generate(sick, timeout=120)
    next(call)
    scheduler = server.scheduler
    until(lambda: scheduler.counters.output_tokens > 0 and bool(executor._lanes))
    box: dict[int, dict[str, Any]] = {}
    thread = threading.Thread(target=lambda: box.update(together(server, [0, 1, 2])))
    thread.start()

    def spoil() -> None:
        length = len(sick.tokens.ids)
        lane = next(x for x in scheduler._lanes.values() if len(x.spec.prompt) == length)
        raw = executor._cache.raw.at[:, lane.ref.slot].set(np.nan)
        executor._cache = executor._cache.replace(raw=raw)  # type: ignore[attr-defined]

    scheduler._front.post(spoil)
    found = failure(lambda: list(call))
    assert (found["code"], found["reason"]) == ("INTERNAL", "NON_FINITE_LOGITS")
    thread.join()
    check({n: first[n] for n in (0, 1, 2)}, dict(sorted(box.items())), "beside a lane with NaN")
    until(lambda: scheduler.healthy)
    check({5: first[5]}, alone(server, [5]), "after a lane with NaN")


# ---- slow --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("width", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("order", range(4))
def test_the_full_matrix(
    server: Running, first: dict[int, dict[str, Any]], width: int, order: int
) -> None:
    rng = random.Random(100 * width + order)
    numbers = list(range(36))
    one = first | alone(server, list(range(12, 36))) if order == 0 else None
    one = one or alone(server, numbers)
    rng.shuffle(numbers)
    got: dict[int, dict[str, Any]] = {}
    pauses = {n: rng.random() * 0.2 for n in numbers}
    for i in range(0, len(numbers), width):
        got |= together(server, numbers[i : i + width], delays=pauses.__getitem__)
    check(one, got, f"order {order}, in groups of {width}")
    check(one, alone(server, sorted(numbers)), "alone again")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", [16, 128])
def test_the_same_with_other_chunks(
    server: Running, first: dict[int, dict[str, Any]], chunk: int
) -> None:
    with serving(make_executor(chunk), settings=quick()) as other:
        check(first, alone(other, list(first)), f"in chunks of {chunk}")
        check(first, together(other, list(first)), f"together in chunks of {chunk}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_switch_that_breaks_the_row_tiling_is_noticed(
    server: Running, first: dict[int, dict[str, Any]]
) -> None:
    """The comparisons can fail: rows computed together, in programs of two sizes."""
    broken = make_executor(chunk=128, lanes=12, rows=(8, 16), batched=True)
    with serving(broken, settings=quick(decode_steps_per_chunk=1)) as other:
        one = alone(other, list(first))
        with pytest.raises(pytest.fail.Exception, match="first difference"):
            check(first, one, "computed together")
        with pytest.raises(pytest.fail.Exception, match="first difference"):
            for _ in range(5):  # more than eight at once, if the machine lets them
                check(one, together(other, list(first)), "among eleven others")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sixty_four_lanes(server: Running, first: dict[int, dict[str, Any]]) -> None:
    many = list(range(70))
    one = first | alone(server, many[12:])
    with serving(make_executor(chunk=128, lanes=64, rows=(64,)), settings=quick()) as other:
        check(one, together(other, many), "among 63 others")
        assert other.scheduler.counters.decode_steps > 0


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_soak_of_a_thousand_requests(
    executor: DeviceExecutor, server: Running, first: dict[int, dict[str, Any]]
) -> None:
    """Random lengths, cancels, deadlines and slow readers over the port; memory stays flat."""
    import grpc
    import psutil

    process = psutil.Process()
    compiled = executor.counters()["compiles_after_ready"]  # counts the whole process
    rng = random.Random(77)
    codes: dict[str, int] = {}
    lock = threading.Lock()
    sizes = []

    def one(n: int, kind: str) -> None:
        timeout = 0.05 if kind == "deadline" else 300
        call = server.stub.Generate(request(n % 12), timeout=timeout)
        try:
            messages = []
            for i, message in enumerate(call):
                messages.append(message)
                if kind == "cancel" and i == n % 4:
                    call.cancel()
                if kind == "slow":
                    time.sleep(0.02)
            same(n % 12, first[n % 12], outcome(messages), f"in the soak as {n}")
            code = "OK"
        except grpc.RpcError as error:
            code = error.code().name
        with lock:
            codes[f"{kind} {code}"] = codes.get(f"{kind} {code}", 0) + 1

    for batch in range(50):
        kinds = rng.choices(["good", "slow", "cancel", "deadline"], [6, 1, 2, 1], k=20)
        threads = [
            threading.Thread(target=one, args=(20 * batch + i, kind))
            for i, kind in enumerate(kinds)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sizes.append(process.memory_info().rss)
    assert sum(codes.values()) == 1000
    allowed = {
        "good OK", "slow OK", "cancel OK", "cancel CANCELLED", "deadline OK",
        "deadline DEADLINE_EXCEEDED",
    }  # fmt: skip
    assert set(codes) <= allowed, codes
    until(lambda: server.scheduler.active == 0 and not executor._lanes)
    assert executor.page_counts().free == executor.limits.num_pages
    assert executor.counters()["compiles_after_ready"] == compiled
    assert max(sizes[10:]) < 1.1 * sizes[10], "memory grows"
