"""The commands serve and top: flags to settings, guardrails of start-up, the view."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from ds4jax_server.pb import generation_pb2 as pb
from ds4jax_server.pb import generation_pb2_grpc as pb_grpc

from ds4jax import cli, qualify
from ds4jax.client import Client
from ds4jax.commands import common, running, serve, top
from ds4jax.config import (
    DEFAULT_SLOTS,
    MAX_SLOTS,
    ConfigError,
    RuntimeConfig,
    StoppingCriteria,
)
from tests.serve_tools import fake, serving, until
from tests.text_tools import toy_tokenizer

ROOT = Path(__file__).parents[1]


def parse(*arguments: str) -> argparse.Namespace:
    parser = cli.build_parser()
    args = parser.parse_args(["serve", *arguments])
    args.from_environment = frozenset()
    return args


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """The command sends its log to the stderr of its own test."""
    yield
    logger = logging.getLogger("ds4jax")
    logger.handlers.clear()
    logger.propagate = True


@pytest.fixture(scope="module")
def nano() -> running.Opened:
    return running.open_model(parse("nano"))


# ---- guardrails --------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "says"), [
    (["--experts-per-token", "99"], "the model uses"),
    (["--experts-per-token", "1", "--exact"], "--exact refuses"),
    (["--allow-unqualified", "--exact"], "gives up what --exact demands"),
    (["--spec", "adaptive"], "does not speculate"),
    (["--spec", "fixed:7"], "does not speculate"),
    (["--draft", "x.gguf"], "does not speculate"),
    (["--spec", "sometimes"], "must be off, fixed:K or adaptive"),
    (["--prefill-chunk", "12"], "multiple of 8"),
    (["--no-port"], "needs --unix"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_before_loading(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "nano", *flags]) == 1
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_all_refusals_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--experts-per-token", "99", "--spec", "adaptive", "--prefill-chunk", "9"]
    assert cli.main(["serve", "nano", *flags]) == 1
    err = capsys.readouterr().err
    assert all(x in err for x in ("the model uses", "does not speculate", "multiple of 8"))


@pytest.mark.parametrize("flags", [
    ["--lanes", "0"], ["--queue", "0"], ["--port", "70000"], ["--coalesce", "-1"], ["--ddtree"],
    ["--windowed"], ["--layer-split", "2"], ["--http", "8080"],
])  # fmt: skip
def test_unknown_or_impossible_flags_are_usage_errors(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "nano", *flags]) == 2


def test_settings_of_the_server_are_checked_before_loading(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["serve", "nano", "--tls-cert", "/nowhere.pem"]) == 1
    err = capsys.readouterr().err
    assert "go together" in err and "no file /nowhere.pem" in err
    assert cli.main(["serve", "/nowhere.gguf"]) == 1


# ---- flags to settings -------------------------------------------------------------------------


def test_flags_reach_the_settings(nano: running.Opened) -> None:
    args = parse(
        "nano", "--port", "0", "--queue", "5", "--coalesce", "0", "--decode-steps-per-chunk", "3",
        "--grace", "7", "--slow-client-grace", "4", "--watchdog", "9", "--default-max-tokens", "11",
        "--admin", "127.0.0.1:0", "--metrics-port", "0", "--log-format", "json",
        "--queue-timeout", "12",
    )  # fmt: skip
    config = serve.server_config(args, nano, 512)
    assert (config.port, config.grace, config.default_max_tokens) == (0, 7.0, 11)
    s = config.scheduler
    assert (s.max_waiting, s.coalesce, s.decode_steps_per_chunk) == (5, 0.0, 3)
    assert (s.slow_client_grace, s.watchdog, s.queue_timeout) == (4.0, 9.0, 12.0)
    assert dict(config.shown)["ctx"] == "512" and "auth_token_file" not in dict(config.shown)


@pytest.mark.parametrize(("flags", "backend", "rows", "chunks"), [
    ([], "reference", (128,), (128,)),
    (["--prefill-chunk", "64"], "reference", (64,), (64,)),
    (["--lanes", "20", "--prefill-chunk", "16"], "reference", (16, 24), (16,)),
    ([], "triton", (1, 8), (128, 512, 2048)),
    (["--lanes", "9"], "triton", (1, 8, 16), (128, 512, 2048)),
    (["--lanes", "64", "--prefill-chunk", "512"], "triton", (1, 8, 16, 32, 64), (128, 512)),
    (["--lanes", "64", "--prefill-chunk", "64"], "triton", (1, 8, 16, 32, 64), (64,)),
])  # fmt: skip
def test_buckets(flags: list[str], backend: Any, rows: Any, chunks: Any) -> None:
    args = parse("nano", *flags)
    base = (128,) if backend == "reference" else (8,)
    run = RuntimeConfig(backend=backend, row_buckets=base, prefill_buckets=(128,))
    made = serve.serving_run(args, run)
    assert (made.row_buckets, made.prefill_buckets) == (rows, chunks)
    assert made.num_slots == args.lanes <= rows[-1]


def test_one_slot_limit_and_the_pool(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("nano").lanes == DEFAULT_SLOTS == RuntimeConfig().num_slots
    assert parse("nano", "--lanes", str(MAX_SLOTS)).lanes == MAX_SLOTS
    RuntimeConfig(num_slots=MAX_SLOTS)
    with pytest.raises(ConfigError, match=f"must be in 1..{MAX_SLOTS}"):
        RuntimeConfig(num_slots=MAX_SLOTS + 1)
    assert cli.main(["serve", "nano", "--lanes", str(MAX_SLOTS + 1)]) == 2
    assert str(MAX_SLOTS) in capsys.readouterr().err
    args = parse("nano", "--lanes", "3", "--kv-pool-tokens", "1000", "--experts-per-token", "2")
    made = serve.serving_run(args, RuntimeConfig())
    assert (made.num_slots, made.pages, made.num_experts_per_tok) == (3, 8, 2)


def test_the_loader_makes_an_executor_and_says_what_it_serves(
    nano: running.Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ds4jax.engine import DeviceExecutor

    warmed = []
    monkeypatch.setattr(DeviceExecutor, "warm_up", lambda self, progress: warmed.append(progress))
    monkeypatch.setattr(qualify, "difference", lambda executor: None)
    own = nano.file.model_config.num_experts_per_tok
    for flags, approximate in (([], False), (["--experts-per-token", str(own - 1)], True)):
        args = parse(
            "nano", "--lanes", "2", "--ctx", "512", "--quiet", "--device", "cpu",
            "--no-compile-cache", *flags,
        )  # fmt: skip
        reports: list[tuple[str, float]] = []
        executor, model = serve.loader(args, nano, 512)(lambda *a, r=reports: r.append(a))
        assert executor.limits.num_slots == 2 and executor.limits.max_ctx == 512
        assert model.tokenizer is nano.tokenizer and model.platform == "cpu"
        assert not model.unqualified
        settings = dict(model.settings)
        assert settings["row_buckets"] == "(128,)" and settings["num_slots"] == "2"
        assert model.approximate is approximate
        assert model.numerics_label == ("plain approximate" if approximate else "plain")
        assert len(model.digest) == len(model.fingerprint) == 64 and model.quantisation
        assert any(stage.startswith("loading") for stage, _ in reports)
        assert all(0 <= share <= 1 for _, share in reports)
        executor.close()
    assert len(warmed) == 2


def test_a_device_whose_answers_depend_on_load_is_refused_unless_allowed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert serve.qualified(parse("nano"), fake())
    monkeypatch.setattr(qualify, "difference", lambda executor: "token 3 is another one")
    with pytest.raises(common.Failure, match=r"token 3 is another one.*--allow-unqualified"):
        serve.qualified(parse("nano"), fake())
    assert not serve.qualified(parse("nano", "--allow-unqualified"), fake())
    assert "every response says so" in caplog.text


def test_a_load_that_fails_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object) -> object:
        def load(report: object) -> object:
            raise common.Failure("no room for it")

        return load

    monkeypatch.setattr(serve, "loader", broken)
    assert cli.main(["serve", "nano", "--port", "0"]) == 1
    err = capsys.readouterr().err
    assert "no room for it" in err and "Traceback" not in err


def test_an_address_in_use_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(metrics_port=0) as s:
        for flags in (
            ["--port", s.address.rpartition(":")[2]],
            ["--port", "0", "--metrics-port", str(s.server.metrics_port)],
            ["--port", "0", "--admin", s.address],
        ):
            assert cli.main(["serve", "nano", *flags]) == 1
            err = capsys.readouterr().err
            assert "cannot bind" in err and "Traceback" not in err


def test_without_grpc_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ds4jax_server", None)
    monkeypatch.setitem(sys.modules, "ds4jax_server.app", None)
    assert cli.main(["serve", "nano"]) == 1
    assert "ds4jax[server]" in capsys.readouterr().err


def test_json_log_lines_are_json() -> None:
    formatter = serve._Json()
    record = logging.LogRecord("ds4jax.server", logging.INFO, "f", 1, 'a "b"', (), None)
    assert json.loads(formatter.format(record))["message"] == 'a "b"'
    record = logging.LogRecord("ds4jax.request", logging.INFO, "f", 1, '{"code": "OK"}', (), None)
    assert json.loads(formatter.format(record))["code"] == "OK"


def test_with_a_json_log_all_of_stderr_is_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loader's notes are left out, and what the server says of itself is a line of the log."""

    def made(args: argparse.Namespace, *_: object) -> Any:
        def load(report: object) -> object:
            common.note(args, "a note")
            serve._LOG.info("ready")
            raise common.Failure("no room for it")

        return load

    monkeypatch.setattr(serve, "loader", made)
    assert cli.main(["serve", "nano", "--port", "0", "--log-format", "json"]) == 1
    *lines, last = capsys.readouterr().err.splitlines()
    assert [json.loads(x)["message"] for x in lines] == ["ready"] and "no room" in last


# ---- top ---------------------------------------------------------------------------------------


def test_top_shows_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    admin = f"unix:{tmp_path}/admin"
    with serving(fake(step_seconds=0.005), admin=admin) as s, Client(s.address) as client:
        stream = client.stream(
            prompt="x" * 200, request_id="watched", stopping=StoppingCriteria(ignore_eos=True)
        )
        for _ in range(100):
            next(stream)
        with grpc.insecure_channel(admin) as channel:
            stub = pb_grpc.AdminServiceStub(channel)
            first = stub.GetStatus(pb.GetStatusRequest())
            until(lambda: s.scheduler.counters.steps > first.counters.steps + 5)
            second = stub.GetStatus(pb.GetStatusRequest())
        text = top.render(second, top.Rates.of(first))
        assert "models/fake  serving" in text and "lanes 1/6" in text and "watched" in text
        assert "tokens/s  output" in text and "decode" in text and "201/201" in text
        assert cli.main(["top", admin, "--once"]) == 0
        assert "watched" in capsys.readouterr().out
        assert cli.main(["top", admin, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["lanes"][0]["request_id"] == "watched"
        assert cli.main(["top", s.address]) == 1
        assert "not the admin address" in capsys.readouterr().err
        stream.close()  # type: ignore[attr-defined]
    assert cli.main(["top", "127.0.0.1:1"]) == 1


def test_top_while_loading_and_with_speculation() -> None:
    status = pb.GetStatusResponse(
        state=pb.GetStatusResponse.STATE_LOADING, loading_stage="loading embed",
        loading_fraction=0.5,
    )  # fmt: skip
    text = top.render(status, None)
    assert "loading embed" in text and "50%" in text
    status = pb.GetStatusResponse(state=pb.GetStatusResponse.STATE_SERVING)
    status.counters.spec_steps = 18
    status.counters.drafts_verified, status.counters.drafts_accepted = 126, 29
    assert "accepted 23.0%   2.61 tokens per step" in top.render(status, None)


def test_a_token_is_asked_for_and_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    token, admin = tmp_path / "token", f"unix:{tmp_path}/admin"
    token.write_text("secret\n")
    with serving(auth_token_file=str(token), admin=admin) as s:
        for command in (
            ["top", admin, "--once"], ["generate", "--server", s.address, "-p", "x", "-n", "2"],
            ["chat", "--server", s.address],
        ):  # fmt: skip
            monkeypatch.setattr(sys, "stdin", io.StringIO("/quit\n"))
            assert cli.main(command) == 1
            assert "the flag is --server-token-file" in capsys.readouterr().err
            assert cli.main([*command, "--server-token-file", str(token)]) == 0
            capsys.readouterr()


# ---- --server of generate and chat -------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Any:
    executor = fake(max_ctx=2048, script=lambda lane: SCRIPTS.get(int(lane.sampling.seed or 0)))
    with serving(executor) as s:
        yield s.address


SCRIPTS = {
    5: toy_tokenizer().encode("hm</think>yes", markers=True),
    6: toy_tokenizer().encode("plain", markers=False),
}


def test_generate_from_a_server(
    served: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--server", served]
    assert cli.main(["generate", *at, "-p", "hi", "--seed", "5"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "yes\n" and "hm" in shown.err and "[stop]" in shown.err
    assert cli.main(["generate", *at, "-p", "hi", "--seed", "5", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["text"], out["reasoning"], out["seed"]) == ("yes", "hm", 5)
    assert out["finish_reason"] == "stop" and out["settings"]["server"] == served
    assert out["usage"]["output_tokens"] == len(SCRIPTS[5]) + 1
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    ids = tmp_path / "ids.json"
    ids.write_text("[1, 2, 3]")
    for more in (
        ["--raw", "-p", "x"], ["--raw", "--markers", "-p", "x<think>"], ["--chat", str(chat)],
        ["--ids", str(ids)], ["-p", "x", "-sys", "be brief", "--nothink"],
    ):  # fmt: skip
        assert cli.main(["generate", *at, *more, "--seed", "6", "--json"]) == 0
        out = json.loads(capsys.readouterr().out)
        assert "plain" in (out["text"] + out["reasoning"])
    assert (
        cli.main(["generate", *at, "-p", "x", "--seed", "6", "--logprobs", "2", "--nothink"]) == 0
    )
    assert len(capsys.readouterr().out.splitlines()) == len(SCRIPTS[6]) + 1
    assert cli.main(["generate", *at, "-p", "x", "--candidates", "2", "-n", "3", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["candidates"]) == 2


def test_errors_of_a_server_are_one_line(
    served: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ids, chat = tmp_path / "ids.json", tmp_path / "chat.json"
    ids.write_text("[1, 999999]")
    chat.write_text(json.dumps({"messages": [{"role": "tool", "content": "x"}]}))
    for arguments, says in (
        (["--server", served, "-p", "x" * 9000], "over the context"),
        (["--server", served, "-p", "x", "--candidates", "7"], "--candidates is 7, must be in 1.."),
        (["--server", served, "-p", "x", "--stop-id", "999999"], "--stop-id: entry 0 is 999999"),
        (["--server", served, "-p", "x", "--logit-bias", "99999=1"], "--logit-bias: entry 0 is 99"),
        (
            ["--server", served, "-p", "x", "--min-tokens", "9999"],
            "INVALID_ARGUMENT: --min-tokens is",
        ),
        (["--server", served, "--ids", str(ids)], "--ids: entry 1 is 999999, must be in 0.."),
        (["--server", served, "--chat", str(chat)], "--chat: messages[0]"),
        (["--server", served, "-p", "x", "--server-ca", str(ids)], "holds no certificates in PEM"),
        (["--server", served, "-p", "x", "--server-ca", "/nowhere"], "--server-ca /nowhere: No su"),
        (["--server", "127.0.0.1:1", "-p", "x"], "a server with TLS needs --server-ca"),
        (["--server", served, "-p", "\udcff"], "cannot be sent"),
    ):
        assert cli.main(["generate", *arguments]) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and says in err
    assert cli.main(["generate", "--server", served, "--markers", "-p", "x"]) == 2


@pytest.mark.parametrize(("arguments", "says"), [
    (["generate", "-p", "x", "--ctx", "9"], "--ctx and --server exclude each other"),
    (["generate", "-p", "x", "--device", "cpu", "--dtype", "float32", "--numerics", "plain"],
     "--device, --dtype, --numerics and --server exclude"),
    (["generate", "-p", "x", "--rocmfp2", "auto", "--cpu-weights", "auto"],
     "--rocmfp2, --cpu-weights and --server exclude"),
    (["generate", "-p", "x", "--no-compile-cache"], "--no-compile-cache and"),
    (["generate", "-p", "x", "nano"], "MODEL and --server"),
    (["chat", "-m", "nano", "--chat-profile", "auto"], "--model, --chat-profile and --server"),
    (["chat", "-c9"], "--ctx and --server"),
])  # fmt: skip
def test_flags_about_a_model_here_do_not_go_with_a_server(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert cli.main([*arguments, "--server", "127.0.0.1:1"]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
    monkeypatch.setenv("DS4JAX_SERVER", "127.0.0.1:1")
    assert cli.main(arguments) == 2
    assert says.replace("--server", "DS4JAX_SERVER") in capsys.readouterr().err


def test_twins_of_flags_about_a_model_here_do_no_harm(
    served: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS4JAX_CTX", "9")
    monkeypatch.setenv("DS4JAX_MODEL", "other")
    monkeypatch.setenv("DS4JAX_SERVER_CA", "nowhere")
    assert cli.main(["generate", "nano", "-n", "0", "-p", "x", "-c", "1"]) == 1, "no server here"
    assert "--server" not in capsys.readouterr().err
    monkeypatch.delenv("DS4JAX_SERVER_CA")
    assert cli.main(["generate", "-p", "hi", "--seed", "5", "--server", served]) == 0
    assert capsys.readouterr().out == "yes\n"


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:70000", "unix:",
                                     "a b:1", "dns:///"])  # fmt: skip
def test_addresses_are_checked(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["top", address], ["generate", "-p", "x", f"--server={address}"]):
        assert cli.main(arguments) == 2
        err = capsys.readouterr().err
        assert f"is {address!r}, must be HOST:PORT or unix:PATH" in err and err.count("\n") == 1


def test_chat_with_a_server(
    served: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    saved = tmp_path / "talk.json"
    lines = f"first\n/nothink\n/ctx\n/ctx 99\n/save {saved}\n/new\n/quit\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert cli.main(["chat", "--server", served, "--seed", "5"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == "yes"
    assert "cannot change" in shown.err and "thinking: none" in shown.err
    assert "of 2048 tokens used" in shown.err
    talk = json.loads(saved.read_text())["messages"]
    assert [m["content"] for m in talk] == ["first", "yes"]
    assert talk[1]["reasoning_content"] == "hm"
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert cli.main(["chat", "--server", "127.0.0.1:1"]) == 1


# ---- the process itself ------------------------------------------------------------------------


@pytest.mark.slow
def test_serve_from_the_command_line(tmp_path: Path) -> None:
    """The shipped model: ready, one answer, the same one locally, SIGTERM, exit 0."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")])}
    command = [
        sys.executable, "-m", "ds4jax.cli", "serve", "nano", "--port", "0", "--lanes", "2",
        "--device", "cpu", "--admin", f"unix:{tmp_path}/admin", "--no-progress",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[2]
        with Client(address, timeout=120) as client:
            assert not client.healthy()
            until(client.healthy, 240)
            served = client.generate(
                messages=[{"role": "user", "content": "hi"}], token_ids=True, effort="none",
                sampling=_greedy(), stopping=StoppingCriteria(max_output_tokens=12),
            )  # fmt: skip
        local = subprocess.run(
            [sys.executable, "-m", "ds4jax.cli", "generate", "nano", "-p", "hi", "--nothink",
             "--temp", "0", "-n", "12", "--json", "--device", "cpu"],
            cwd=ROOT, env=env, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert json.loads(local.stdout)["ids"] == list(served.token_ids)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "ready: 2 lanes" in err and "request_id=" in err
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def _greedy() -> Any:
    from ds4jax.config import SamplingParams

    return SamplingParams(temperature=0.0, seed=0)


def test_common_flags_are_there() -> None:
    args = parse("nano", "--numerics", "kv-fp8", "--cpu-weights", "packed", "-c", "99")
    assert (args.numerics, args.cpu_weights, args.ctx) == ("kv-fp8", "packed", 99)
    assert common.DEFAULT_MODEL == "nano"
