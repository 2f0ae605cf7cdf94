"""Definitions of the benchmark reports, the comparison, the page, and a small run of each."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench import compare, page, report, serve
from bench.report import Record
from tests.serve_tools import fake, serving


def record(name: str, wave: int, issued: float, arrivals: list[tuple[float, int]]) -> Record:
    count = sum(n for _, n in arrivals)
    return Record(
        id=name, wave=wave, issued=issued, arrivals=arrivals, ids=list(range(count)),
        text=name, finish="length", prompt_tokens=10,
    )  # fmt: skip


def counters(**kwargs: Any) -> dict[str, Any]:
    return {"steps": 0, "output_tokens": 0, **kwargs}


A = record("a", 0, 10.0, [(11.0, 1), (12.0, 1), (13.0, 2)])
B = record("b", 0, 10.5, [(12.5, 1), (13.5, 1), (14.5, 1)])


def test_times_of_one_request() -> None:
    assert (A.ttft, A.tpot, A.gaps) == (1.0, 2 / 3, [1.0, 1.0])
    one = record("c", 0, 0.0, [(1.0, 1)])
    assert one.tpot is None and one.gaps == []
    assert record("d", 0, 0.0, []).ttft is None


def test_throughputs() -> None:
    rates = report.throughput([A, B])
    assert rates["wall_s"] == 4.5  # from the first issue to the last token
    assert rates["aggregate_tok_s"] == pytest.approx(7 / 4.5)
    assert rates["output_window_tok_s"] == pytest.approx(7 / 3.5)  # from the first first token
    # All decode from 12.5 to 13.0: two tokens of a arrive in there.
    assert rates["steady_decode_tok_s"] == pytest.approx(2 / 0.5)
    later = [
        record("a", 1, 110.0, [(111.0, 1), (112.0, 1), (113.0, 2)]),
        record("b", 1, 110.5, [(112.5, 1), (113.5, 1), (114.5, 1)]),
    ]
    assert report.throughput([A, B, *later]) == pytest.approx({**rates, "wall_s": 9.0})
    apart = [record("a", 0, 0.0, [(1.0, 1)]), record("b", 0, 0.0, [(2.0, 1)])]
    assert report.throughput(apart)["steady_decode_tok_s"] is None


def test_percentiles_are_numpys_and_small_samples_are_listed() -> None:
    assert report.percentile([1.0, 2.0, 4.0], 50) == 2.0
    assert report.percentile([1.0, 2.0], 95) == pytest.approx(1.95)
    assert report.percentile([], 50) is None
    assert report.spread([1.0, 3.0], {"median": 50}, 1e3) == {
        "median": 2000.0, "all": [1000.0, 3000.0],
    }  # fmt: skip
    assert "all" not in report.spread([1.0] * 20, {"median": 50})


def test_acceptance_of_the_worked_example() -> None:
    before = {"drafts_proposed": 10, "spec_steps": 2, "verified_at_depth": [4, 1]}
    after = {
        "drafts_proposed": 136, "drafts_verified": 126, "drafts_accepted": 29, "spec_steps": 20,
        "verified_at_depth": [22, 19, 5], "accepted_at_depth": [9, 3],
    }  # fmt: skip
    got = report.acceptance(before, after)
    assert (got["proposed"], got["verified"], got["accepted"]) == (126, 126, 29)
    assert got["rate"] == pytest.approx(0.230, abs=5e-4)
    assert got["mean_tokens_per_step"] == pytest.approx(2.61, abs=5e-3)
    assert [d["rate"] for d in got["per_depth"]] == [9 / 18, 3 / 18, 0.0]
    assert report.acceptance({}, {})["rate"] is None


def make_cell(records: list[Record], **kwargs: Any) -> dict[str, Any]:
    total = sum(r.tokens for r in records)
    after = counters(output_tokens=total, steps=10, prefill_tokens=20, prefill_seconds=2.0)
    return report.cell(
        records, concurrency=len(records), arm="none", before=counters(),
        after={**after, **kwargs},
    )  # fmt: skip


def test_a_valid_cell() -> None:
    cell = make_cell([A, B])
    assert cell["valid"] and cell["aggregate_tok_s"] and cell["prefill_tok_s"] == 10.0
    assert cell["tokens_per_event"] == pytest.approx(7 / 6)
    assert sum(cell["itl_histogram"]["counts"]) == 4
    assert cell["per_user_tok_s"] == pytest.approx(1 / ((2 / 3 + 1.0) / 2))


@pytest.mark.parametrize("spoilt", [
    {"output_tokens": 8}, {"preemptions": 1}, {"suspensions": 1}, {"compiles_after_ready": 1},
    {"non_finite": 1}, {"device_errors": 1},
])  # fmt: skip
def test_an_invalid_cell_has_reasons_and_no_throughput(spoilt: dict[str, int]) -> None:
    cell = make_cell([A, B], **spoilt)
    assert not cell["valid"] and len(cell["invalid_reasons"]) == 1
    assert cell["aggregate_tok_s"] is cell["per_user_tok_s"] is None
    odd = copy.deepcopy(A)
    odd.server_tokens = odd.tokens + 1
    assert "request a: the server counted" in make_cell([odd, B])["invalid_reasons"][0]
    failed = record("x", 0, 0.0, [])
    failed.error = "INTERNAL DEVICE_ERROR"
    assert not make_cell([failed])["valid"]


def test_identity_names_the_first_difference() -> None:
    other = copy.deepcopy(A)
    other.ids[2] = 99
    cells = [make_cell([A, B]), make_cell([copy.deepcopy(A)]), make_cell([other])]
    cells[2]["concurrency"] = 6
    found = report.identity(cells, {"a"})
    assert not found["pass"] and found["differences"] == [
        {"id": "a", "cell_a": "C2/none", "cell_b": "C6/none", "first_position": 2}
    ]
    assert report.identity(cells[:2])["pass"]
    serve.finish_cells(cells, {"a"})
    assert not cells[2]["valid"] and cells[2]["aggregate_tok_s"] is None and cells[0]["valid"]


def make_report(scale: float = 1.0, **kwargs: Any) -> dict[str, Any]:
    cell = make_cell([A, B])
    for name in compare.METRICS:
        cell[name] *= scale
    options: dict[str, Any] = dict(
        workload="H-fixed", cells=[cell], model={"name": "m", "fingerprint": "f"},
        server={}, requests_sha256="r", devices=[{"name": "cpu"}],
    )  # fmt: skip
    return report.make(**(options | kwargs))


def test_a_report_reads_back(tmp_path: Path) -> None:
    made = make_report()
    assert {
        "schema", "when", "workload", "code", "hardware", "software", "measured_limits", "model",
        "server", "requests_sha256", "cells", "identity", "notes",
    } == set(made)  # fmt: skip
    path = str(tmp_path / "r.json")
    report.write(made, path)
    assert report.read(path) == json.loads(json.dumps(made))
    (tmp_path / "bad.json").write_text('{"schema": 7}')
    for bad in ("bad.json", "none.json"):
        with pytest.raises(ValueError, match=bad):
            report.read(str(tmp_path / bad))


def test_what_must_not_be_compared_is_refused() -> None:
    one = make_report()
    for change, what in (
        ({"workload": "S-mini"}, "workload"), ({"requests_sha256": "x"}, "request list"),
        ({"model": {"name": "m", "fingerprint": "g"}}, "fingerprint"),
        ({"devices": [{"name": "gpu"}]}, "hardware"),
    ):  # fmt: skip
        with pytest.raises(compare.Incomparable, match=what):
            compare.check([one, make_report(**change)])
    compare.check([one, make_report(model={"name": "q", "fingerprint": "g"})], other_model=True)


@pytest.mark.parametrize(("a1", "b", "a2", "count", "says"), [
    (1.0, 1.10, 1.0, 3, "faster"), (1.0, 0.9, 1.0, 3, "slower"),
    (1.0, 1.10, 1.0, 2, "faster so far"), (1.0, 1.005, 1.0, 3, "no difference"),
    (1.0, 1.03, 1.02, 3, "no difference"), (1.0, 1.2, 1.05, 3, "repeat"),
])  # fmt: skip
def test_verdicts(a1: float, b: float, a2: float, count: int, says: str) -> None:
    triple = [make_report(x) for x in (a1, b, a2)]
    found = [
        r for _ in range(count) for r in compare.rows(*triple) if r.metric == compare.METRICS[0]
    ]
    assert says in compare.verdict(found)


def test_directions_must_agree_and_output_changes_are_told() -> None:
    up, down, base = make_report(1.1), make_report(0.9), make_report()
    rows = [compare.rows(base, x, base)[0] for x in (up, down, up)]
    assert compare.verdict(rows) == "no difference"
    assert "no second A" in compare.verdict([compare.rows(base, up, None)[0]])
    changed = copy.deepcopy(up)
    changed["cells"][0]["per_request"][0]["ids_sha256"] = "other"
    lines = compare.table([[base, changed, base]])
    assert "CHANGED in 2 responses" in lines[0] and "identical" in compare.table([[base, up]])[0]


def test_the_commands_of_the_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for i, scale in enumerate((1.0, 1.1, 1.0)):
        paths.append(str(tmp_path / f"{i}.json"))
        report.write(make_report(scale), paths[-1])
    assert compare.main(paths) == 0
    assert "faster so far" in capsys.readouterr().out
    assert compare.main([paths[0], str(tmp_path / "none.json")]) == 1
    assert page.main([paths[0], str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text()
    assert text.count("<svg") == 4 and "H-fixed" in text and "http" not in text.split("xmlns")[0]


def test_a_page_shows_what_is_wrong() -> None:
    made = make_report(notes="<b>")
    made["cells"][0] |= {"valid": False, "invalid_reasons": ["2 compiles"]}
    made["model"] |= {"approximate": True, "unqualified": True}
    text = page.page(made)
    assert "2 compiles" in text and "approximate:" in text and "unqualified:" in text
    assert "&lt;b&gt;" in text


def test_waves_share_the_identity_set() -> None:
    jobs = [serve.Job(id=str(i), options=serve.Options(prompt="x")) for i in range(24)]
    for width in range(1, 7):
        waves = serve.h_waves(width, jobs)
        assert [w[0].id for w in waves] == ["0", "1", "2"]
        flat = [j.id for w in waves for j in w]
        assert len(flat) == len(set(flat)) == 3 * width
    assert max(int(j.id) for j in waves[2]) == 17  # C6 uses 18 prompts
    assert [w[0].id for w in serve.h_waves(2, jobs, 7)] == ["0", "1", "2", "0", "1", "2", "0"]


def test_the_long_prompt_among_decoding_lanes(tmp_path: Path) -> None:
    out = str(tmp_path / "out.json")
    admin = f"unix:{tmp_path}/admin"
    executor = fake(max_ctx=8192, num_pages=400, step_seconds=0.005)
    with serving(executor, admin=admin) as s:
        arguments = ["--workload", "H-long", "--address", s.address, "--admin", admin,
                     "--json", out, "--tokens", "32"]  # fmt: skip
        assert serve.main(arguments) == 0
    made = report.read(out)
    assert made["identity"]["pass"] and made["identity"]["compared"] == 1
    alone, among = made["cells"]
    assert (alone["arm"], among["arm"]) == ("alone", "with 3")
    assert alone["prompt_tokens"] == 1195 and alone["completion_tokens"] == 32
    assert alone["prefill_tok_s"] > 0 and among["decoding_itl_ms"]["p95"] > 0


@pytest.mark.parametrize("broken", [False, True])
def test_the_long_prompt_on_servers_of_its_own(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, among others and in the smallest chunks; what differs shows no throughput."""
    folders = (tmp_path / str(n) for n in itertools.count())

    @contextmanager
    def server(args: Any, *extra: str) -> Iterator[serve.Target]:
        flags = dict(zip(extra[::2], extra[1::2], strict=True))
        chunk = int(flags.get("--prefill-chunk", 128))
        lanes = int(flags["--lanes"])
        executor = fake(max_ctx=8192, num_pages=400, num_slots=lanes, chunk_tokens=chunk)
        if broken and chunk == 8:
            executor.script = lambda lane: [65] * 40
        admin, facts = f"unix:{next(folders)}", {"approximate": True, "experts_per_token": 4}
        with serving(executor, admin=admin, model=facts) as s:
            yield serve.Target(s.address, admin, None)

    monkeypatch.setattr(serve, "server", server)
    out = str(tmp_path / "out.json")
    assert serve.main(["--workload", "H-long", "--json", out, "--no-limits"]) == 0
    made = report.read(out)
    alone, _, small = made["cells"]
    assert [c["arm"] for c in made["cells"]] == ["alone", "with 3", "chunks of 8"]
    assert alone["valid"] and small["server_counters"]["steps"] > 150 + 30
    assert made["identity"]["pass"] is small["valid"] is not broken
    assert (small["aggregate_tok_s"] is None) is broken
    assert made["model"]["approximate"] is True and made["model"]["experts_per_token"] == 4


def test_a_server_that_does_not_start_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out.json")
    missing = f"{tmp_path}/none.gguf"
    assert serve.main(["--model", missing, "--json", out, "--no-limits"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("bench.serve: the server did not start") and missing in err


@pytest.mark.parametrize("workload", ["H-natural", "H-fixed", "S-mini"])
def test_a_small_run_over_a_real_port(workload: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out.json")
    admin = f"unix:{tmp_path}/admin"
    with serving(fake(max_ctx=8192, num_pages=400), admin=admin) as s:
        arguments = [
            "--workload", workload, "--address", s.address, "--admin", admin, "--cells", "1,3",
            "--tokens", "8", "--idle", "0", "--json", out, "--requests", "6", "--warm-up", "2",
        ]  # fmt: skip
        assert serve.main(arguments) == 0
    made = report.read(out)
    assert made["identity"]["pass"] and made["workload"] == workload
    for cell, width in zip(made["cells"], (1, 3), strict=True):
        assert cell["valid"], cell["invalid_reasons"]
        assert cell["concurrency"] == width
        assert cell["requests"] == (6 if workload == "S-mini" else 3 * width)
        if workload != "H-natural":
            assert cell["mean_completion_tokens"] <= 8
        assert cell["grpc_overhead_ms"]["median"] > 0
    assert page.page(made)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_throughput_rises_with_concurrency(tmp_path: Path) -> None:
    """The shipped model on this machine, which must have nothing else to do."""
    out = str(tmp_path / "out.json")
    arguments = ["--workload", "H-fixed", "--cells", "1,3,6", "--tokens", "64", "--json", out,
                 "--server-args", "--device cpu", "--no-limits"]  # fmt: skip
    assert serve.main(arguments) == 0
    cells = {c["concurrency"]: c for c in report.read(out)["cells"]}
    assert all(c["valid"] for c in cells.values())
    rates = [cells[n]["aggregate_tok_s"] for n in (1, 3, 6)]
    assert rates == sorted(rates)
    assert cells[6]["tpot_ms"]["median"] < 6 * cells[1]["tpot_ms"]["median"]
    # Work of the scheduler. On few cores its wall time has waits for a core in it: the model's
    # own threads hold them while the next step runs.
    assert 0.0 < cells[6]["server_counters"]["host_cpu_ms_per_step"] < 1.0
    assert cells[6]["server_counters"]["host_ms_per_step"] < 2.0
    assert report.read(out)["identity"]["pass"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_grpc_adds_to_the_first_token(tmp_path: Path) -> None:
    """The same, over enough requests that a 95th percentile is not just the worst of them."""
    out = str(tmp_path / "out.json")
    arguments = ["--workload", "H-fixed", "--cells", "1", "--waves", "24", "--tokens", "16",
                 "--idle", "0.1", "--json", out, "--server-args", "--device cpu",
                 "--no-limits"]  # fmt: skip
    assert serve.main(arguments) == 0
    (cell,) = report.read(out)["cells"]
    assert cell["valid"] and cell["requests"] == 24
    assert cell["grpc_overhead_ms"]["p95"] < 2.0
