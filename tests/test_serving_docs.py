"""docs/serving.md: its example runs; its flags, reasons and metrics are those of the code."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
from ds4jax_server.metrics import Metrics
from ds4jax_server.pb import generation_pb2 as pb
from google.protobuf import json_format

from ds4jax import chat_request, cli
from tests.serve_tools import fake, serving

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
CODES = {
    "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE",
    "RESOURCE_EXHAUSTED", "ALREADY_EXISTS", "UNIMPLEMENTED", "UNAUTHENTICATED",
}  # fmt: skip


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    with serving(fake(max_ctx=1024)) as s:
        exec(compile(code.replace("127.0.0.1:50051", s.address), "docs/serving.md", "exec"), {})
    out = capsys.readouterr().out
    assert "Usage(" in out and "Started(" in out and "Delta(" in out and "Finished(" in out


def test_the_request_for_other_clients_is_one() -> None:
    (text,) = re.findall(r"-d '(.*?)'", PAGE)
    request = json_format.Parse(text, pb.GenerateRequest())
    assert request.text and request.stopping.max_output_tokens == 32
    json.loads(text)


def flags(command: str) -> set[str]:
    parser = cli.build_parser()
    (choices,) = [
        a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)
    ]  # fmt: skip
    actions = choices[command]._actions
    return {o for a in actions for o in a.option_strings if o.startswith("--")}


def test_flags_are_those_of_the_command() -> None:
    serve = flags("serve")
    own = serve - flags("score") - {"--lanes", "--help"}  # score: computes, and serves nothing
    documented = set(re.findall(r"`?(--[a-z][a-z-]+)", PAGE))
    assert own <= documented, f"not documented: {sorted(own - documented)}"
    others = flags("generate") | {"--workload", "--json"}
    assert documented - others <= serve, f"no such flag: {sorted(documented - others - serve)}"


def test_reasons_are_those_of_the_code() -> None:
    found = set()
    for path in (ROOT / "ds4jax/refusals.py", *(ROOT / "server/ds4jax_server").glob("*.py")):
        found |= set(re.findall(r'"([A-Z]+(?:_[A-Z]+)+)"', path.read_text("utf-8")))
    documented = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", PAGE))
    assert documented - CODES == (found | {chat_request.NO_CALL}) - CODES


def test_metrics_are_those_of_the_code() -> None:
    names = {m.name.removeprefix("ds4jax_") for m in Metrics().registry.collect()}
    source = (ROOT / "server/ds4jax_server/metrics.py").read_text("utf-8")
    names |= set(re.findall(r'"ds4jax_([a-z_]+)"', source))
    names |= {"prefix_cache_lookups", "prefix_cache_hits"}
    names = {x.removesuffix("_total") for x in names} - {"prefix_cache_"}
    table = PAGE[PAGE.index("| metric") : PAGE.index("## Measure")]
    documented = {x.removesuffix("_total") for x in re.findall(r"`([a-z_]+)`", table)}
    assert documented - {"ds_jax"} == names
