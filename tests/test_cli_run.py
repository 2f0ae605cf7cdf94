"""The commands that compute, on the model in the package and on the reference files."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from ds4jax import cli, evaluate, local
from ds4jax.commands import common, logits, progress, running
from ds4jax.model_file import open_model
from ds4jax.tokenizer import Tokenizer
from tests import little_effort
from tests.conftest import DATA

REPO = Path(__file__).parents[1]
W16 = DATA / "oracle" / "w16"
SAFE = ["--no-compile-cache", "--no-progress"]


def ban(*ids: int) -> list[str]:
    """Flags that keep the model from sampling these tokens."""
    return [word for i in ids for word in ("--logit-bias", f"{i}=-100")]


class Result(NamedTuple):
    """What one call of the command line gave."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)

    def failed(self, status: int = 1) -> str:
        """The one line of a failure."""
        assert self.status == status and self.out == "", (self.status, self.err)
        assert self.err.count("\n") == 1 and "internal error" not in self.err, self.err
        return self.err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls the command line in this process, without twins of flags in the environment."""
    for name in [n for n in os.environ if n.startswith("DS4JAX_")]:
        monkeypatch.delenv(name)

    def call(*arguments: Any) -> Result:
        capsys.readouterr()
        status = cli.main([str(a) for a in arguments])
        return Result(status, *capsys.readouterr())

    return call


class Warm(NamedTuple):
    """A model that was loaded and compiled by the real code, once, and where the programs are."""

    model: local.LocalModel
    cache: Path


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    cache = tmp_path_factory.mktemp("compiled")
    names = [
        "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    file = open_model("nano")
    tokenizer = Tokenizer.from_gguf(file.metadata, vocab_size=file.model_config.vocab_size)
    try:
        loaded = local.load(file, local.Options(compile_cache=cache))
        model = local.LocalModel.open(loaded, tokenizer)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    yield Warm(model, cache)
    model.close()


@pytest.fixture
def warm(compiled: Warm, monkeypatch: pytest.MonkeyPatch) -> local.LocalModel:
    """Commands that ask for the default run of the default model get the one that is there."""
    real_load, real_start = running.load, running.start

    def load(args: Any, model: Any, ctx: int, shown: Any, lanes: int = 1) -> local.Loaded:
        plain = (args.device, args.dtype, args.numerics, args.cpu_weights) == (
            "auto", None, "plain", "auto",
        )  # fmt: skip
        if model.name == "nano" and ctx == 4096 and lanes == 1 and plain:
            return compiled.model.loaded
        return real_load(args, model, ctx, shown, lanes)

    def start(loaded: local.Loaded, model: Any, shown: Any) -> local.LocalModel:
        if loaded is compiled.model.loaded:
            return compiled.model
        return real_start(loaded, model, shown)

    monkeypatch.setattr(running, "load", load)
    monkeypatch.setattr(running, "start", start)
    return compiled.model


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Any], Path]:
    """Writes a file: bytes and text as they are, everything else as JSON."""

    def make(name: str, value: Any) -> Path:
        path = tmp_path / name
        if isinstance(value, bytes):
            path.write_bytes(value)
        else:
            path.write_text(value if isinstance(value, str) else json.dumps(value), "utf-8")
        return path

    return make


# -- generate --------------------------------------------------------------------------------------


def test_generate_continues_a_text(run: Any, warm: local.LocalModel) -> None:
    tokenizer = warm.tokenizer
    assert tokenizer is not None
    flags = ["generate", "--raw", "-p", "def fibonacci(n):", "-n", 24, "--seed", 3, *SAFE]
    flags += ban(*tokenizer.specials.values())
    plain, data = run(*flags), run(*flags, "--json").json
    text = data["text"]
    assert plain.status == 0 and plain.out == (text if text.endswith("\n") else text + "\n")
    assert re.search(r"\[\w+\] prompt \d+ tokens in .* tokens/s.*seed 3\n", plain.err)
    assert text == tokenizer.decode(data["ids"]) and len(data["ids"]) == 24
    assert data["seed"] == 3 and data["reasoning"] == "" and data["tool_calls"] == []
    usage = data["usage"]
    assert usage["prompt_tokens"] == 1 + len(tokenizer.encode(str(flags[3]), markers=False))
    assert usage["output_tokens"] == 24 and data["finish_reason"] == "length"
    assert data["timings"]["total_seconds"] >= data["timings"]["first_token_seconds"] > 0
    assert data["speculation"] == {"proposed": 0, "verified": 0, "accepted": 0}
    expected = {"device": "cpu", "dtype": "float32", "numerics": "plain", "ctx": 4096}
    assert expected.items() <= data["settings"].items()


def test_generate_renders_one_user_message(run: Any, warm: local.LocalModel) -> None:
    def prompt_tokens(*flags: str) -> int:
        data = run("generate", "-p", "hi", "-n", 1, "--seed", 0, "--json", *flags, *SAFE).json
        return int(data["usage"]["prompt_tokens"])

    short, high, most = (prompt_tokens(f) for f in ("--nothink", "--think", "--think-max"))
    assert short == 4 + len(warm.tokenizer.encode("hi", markers=False))  # type: ignore[union-attr]
    assert short < high < most == prompt_tokens("--think-max", "--chat-profile", "auto")
    assert prompt_tokens("--nothink", "-sys", "be brief") > short
    assert prompt_tokens("--think", "--chat-profile", "v4-preview") == short


def test_reasoning_is_kept_apart(run: Any, warm: local.LocalModel) -> None:
    assert warm.tokenizer is not None
    flags = ["-p", "hi", "-n", 12, "--seed", 0, "--max-reasoning", 4, "--ignore-eos", *SAFE]
    flags += ban(*warm.tokenizer.specials.values())  # the marker that is forced comes all the same
    data = run("generate", *flags, "--json").json
    assert data["reasoning"] and data["text"] and data["usage"]["reasoning_tokens"] == 5
    plain = run("generate", *flags)
    assert data["reasoning"] in plain.err and data["reasoning"] not in plain.out
    assert plain.out.rstrip("\n") == data["text"].rstrip("\n")


def test_seeds(run: Any, warm: local.LocalModel) -> None:
    def ids(*flags: Any) -> tuple[list[int], int]:
        data = run("generate", "--raw", "-p", "import", "-n", 16, "--json", *flags, *SAFE).json
        return data["ids"], data["seed"]

    drawn, seed = ids()
    assert ids("--seed", seed) == (drawn, seed)
    assert ids("--seed", 0) == ids("--seed", 0) != ids("--seed", 1)
    greedy = [ids("--temp", 0, "--seed", s)[0] for s in (0, 1)]
    assert greedy[0] == greedy[1]
    assert ids("--temp", 1, "--top-k", 1, "--seed", 5)[0] == greedy[0]


def test_stops(run: Any, warm: local.LocalModel) -> None:
    flags = ["generate", "--raw", "-p", "import", "-n", 40, "--seed", 0, "--ignore-eos", "--json"]
    free = run(*flags, *SAFE).json
    stop = free["text"][5:8]
    by_text = run(*flags, "--stop", stop, *SAFE).json
    assert by_text["text"] == free["text"][: free["text"].index(stop)]
    assert (by_text["finish_reason"], by_text["stop_string"]) == ("stop", stop)
    token = free["ids"][4]
    by_id = run(*flags, "--stop-id", token, *SAFE).json
    assert by_id["ids"] == free["ids"][: free["ids"].index(token) + 1]
    assert (by_id["finish_reason"], by_id["stop_token"]) == ("stop", token)
    later = run(*flags, "--stop-id", token, "--min-tokens", 12, *SAFE).json
    assert len(later["ids"]) >= 12 and token not in later["ids"][:12]
    banned = run(*flags, "--logit-bias", f"{token}=-100", *SAFE).json
    assert token not in banned["ids"] and len(banned["ids"]) == 40
    limited = run(*flags[:-4], "-n", 4000, "--ignore-eos", "--time-limit", 0.05, "--json", *SAFE)
    assert limited.json["finish_reason"] == "time_limit"


def test_log_probabilities_and_token_lines(run: Any, warm: local.LocalModel) -> None:
    flags = ["generate", "--raw", "-p", "import", "-n", 5, "--seed", 0, "--ignore-eos", *SAFE]
    data = run(*flags, "--logprobs", 3, "--json").json
    assert len(data["logprobs"]) == 5
    for entry, token in zip(data["logprobs"], data["ids"], strict=True):
        values = [x for _, x in entry["top"]]
        assert entry["id"] == token and len(values) == 3
        assert values == sorted(values, reverse=True) and entry["logprob"] <= values[0] + 1e-6
        assert all(math.isfinite(x) and x <= 0 for x in values)
    lines = run(*flags, "--dump-tokens").out.splitlines()
    assert [int(line.split()[1]) for line in lines] == data["ids"]
    table = run(*flags, "--logprobs", 1).out.splitlines()
    assert [float(x.split()[2]) for x in table] == pytest.approx(
        [e["logprob"] for e in data["logprobs"]], abs=1e-4
    )


def test_prompts_from_everywhere(
    run: Any, warm: local.LocalModel, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail = ["-n", 6, "--seed", 0, "--json", *SAFE]
    text = "class A:\n    pass\n"
    expected = run("generate", "--raw", "-p", text, *tail).json["ids"]
    file = write("p.txt", text)
    assert run("generate", "--raw", "-f", file, *tail).json["ids"] == expected
    stdin = io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run("generate", "--raw", *tail).json["ids"] == expected
    ids = warm.tokenizer.encode_completion(text)  # type: ignore[union-attr]
    assert run("generate", "--ids", write("i.json", ids), *tail).json["ids"] == expected
    chat = {"messages": [{"role": "user", "content": "hi"}], "thinking": False}
    answer = run("generate", "-p", "hi", "--nothink", *tail).json["ids"]
    assert run("generate", "--chat", write("c.json", chat), *tail).json["ids"] == answer


def test_a_tool_call_is_shown_whole(
    run: Any, warm: local.LocalModel, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is made to say a call: whatever it samples is replaced on the way."""
    from ds4jax.plan import TokenResult
    from ds4jax.request import Tokens

    assert warm.tokenizer is not None
    said = (
        'ok\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n'
        '<｜DSML｜parameter name="at" string="true">here</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    script = iter(warm.tokenizer.encode(said, markers=True))
    real_take = local.Generation._take

    def take(self: Any, event: Any, live: Any) -> Any:
        if isinstance(event, Tokens) and (token := next(script, None)) is not None:
            event = Tokens(event.at, event.candidate, (TokenResult(token),))
        return real_take(self, event, live)

    monkeypatch.setattr(local.Generation, "_take", take)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    request = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "thinking": False}
    count = len(warm.tokenizer.encode(said, markers=True))
    file = write("c.json", request)
    result = run("generate", "--chat", file, "-n", count, "--ignore-eos", *SAFE)
    assert result.out == 'ok\n--- call look\n{"at": "here"}\n'


@pytest.mark.slow
def test_packed_weights_give_the_same_tokens(run: Any) -> None:
    flags = ["generate", "--raw", "-p", "x", "-n", 12, "--seed", 0, "--ctx", 256, "--json", *SAFE]
    forms = [run(*flags, "--cpu-weights", form).json for form in ("packed", "decoded")]
    assert [f["settings"]["weights"] for f in forms] == ["packed", "decoded"]
    assert forms[0]["ids"] == forms[1]["ids"]


@pytest.mark.slow
def test_candidates(run: Any) -> None:
    flags = ["generate", "--raw", "-p", "x", "-n", 6, "--seed", 0, "--candidates", 2, *SAFE]
    data = run(*flags, "--json").json
    assert len(data["candidates"]) == 2 and data["usage"]["output_tokens"] == 12
    assert data["candidates"][0]["ids"] == data["ids"] != data["candidates"][1]["ids"]
    one, two = run(*flags).out.split("--- candidate 1\n")
    assert one == f"--- candidate 0\n{data['candidates'][0]['text']}\n"
    assert two == f"{data['candidates'][1]['text']}\n"


@pytest.mark.parametrize(("flags", "status", "says"), [
    (["-p", "x", "--raw", "--system", "y"], 2, "--raw and --system exclude each other"),
    (["-p", "x", "--markers"], 2, "--markers goes with --raw"),
    (["-p", ""], 2, "the prompt is empty"),
    (["-p", "x", "-n", "-1"], 2, "-n/--tokens: is '-1', must be an integer in 0..2147483647"),
    (["-p", "x", "--temp", "3"], 2, "--temp: is '3', must be a number in [0, 2]"),
    (["-p", "x", "--top-p", "0"], 2, "must be a number in (0, 1]"),
    (["-p", "x", "--seed", "18446744073709551616"], 2, "must be an integer in 0.."),
    (["-p", "x", "--candidates", "9"], 2, "must be an integer in 1..8"),
    (["-p", "x", "--device", "tpu"], 2, "argument --device: invalid choice: 'tpu'"),
    (["-p", "x", "--numerics", "exact"], 2, "argument --numerics: invalid choice"),
    (["-p", "x", "--logit-bias", "7"], 2, "must be ID=BIAS"),
    (["-p", "x", "--stop", ""], 2, "--stop: is empty, must have 1 to 256 characters"),
    (["-p", "x", *(f"--stop={i}" for i in range(17))], 2, "--stop must be at most 16"),
    (["-p", "x", "-n", "3", "--min-tokens", "5"], 2, "--min-tokens is 5, above --tokens = 3 (see"),
    (["-p", "x", "--raw", "--min-tokens", "5000"], 1, "tokens and --min-tokens 5000 are over the"),
    (["-p", "x", "--server-ca", "y"], 2, "--server-ca goes with --server: no server is asked"),
    (["-p", "x", "--colour"], 2, "unrecognized arguments: --colour (see ds4jax generate --help)"),
    (["-p", "x", "--logit-bias", "99999999=1"], 1, "entry 0 is 99999999, must be in 0..{last}"),
    (["-p", "x", "--stop-id", "{vocab}"], 1, "--stop-id: entry 0 is {vocab}, must be in 0..{last}"),
    (["-p", "x", "--ctx", "4000000"], 1, "--ctx 4000000: the model has {most} positions"),
    (["-p", "x", "--raw", "--ctx", "8", "-n", "7"], 1, "over the context of 8 tokens: raise --ctx"),
    (["-p", "x " * 300, "--ctx", "128"], 1, "and 1 token of output are over the context of 128"),
    (["-p", "x", "-f", "y"], 2, "not allowed with argument"),
    (["-f", "no/such/file"], 1, "--prompt-file no/such/file: No such file"),
    (["-f", "{dir}/latin.txt"], 1, "not UTF-8: byte 0xe9 at offset 3"),
    (["--ids", "{dir}/empty.json"], 1, "holds no ids"),
    (["--ids", "{dir}/big.json"], 1, "entry 1 is {vocab}, must be in 0..{last}"),
    (["--ids", "{dir}/latin.txt"], 1, "not UTF-8"),
    (["--ids", "{dir}/text.json"], 1, "entry 0 is 'a', must be an integer token id"),
    (["--chat", "{dir}/chat.json"], 1, "messages[0].role is 'robot'"),
    (["--chat", "{dir}/format.json"], 1, "response_format.json_object: decoding is not"),
    (["missing.gguf", "-p", "x"], 1, "MODEL 'missing.gguf': no such file or directory: give"),
    (["Hello there"], 1, "or nano (the default); a text goes after -p"),
    (["-p", "\udc80"], 1, "the prompt: messages[0].content holds a lone surrogate"),
    (["-p", "x", "--compile-cache", "{dir}/latin.txt"], 1, "--compile-cache {dir}/latin.txt: File"),
])  # fmt: skip
def test_generate_refuses(
    run: Any, tmp_path: Path, flags: list[str], status: int, says: str
) -> None:
    cfg = open_model("nano").model_config
    known = {
        "{dir}": str(tmp_path), "{vocab}": str(cfg.vocab_size), "{last}": str(cfg.vocab_size - 1),
        "{most}": str(cfg.max_position_embeddings),
    }  # fmt: skip

    def fill(text: str) -> str:
        for name, value in known.items():
            text = text.replace(name, value)
        return text

    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    chat = [{"role": "user", "content": "hi"}]
    for name, value in {
        "empty": [], "big": [1, cfg.vocab_size], "text": ["a"],
        "chat": {"messages": [{"role": "robot", "content": "hi"}]},
        "format": {"messages": chat, "response_format": {"type": "json_object"}},
    }.items():  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    assert fill(says) in run("generate", *map(fill, flags)).failed(status)


def test_a_model_without_a_tokenizer_takes_ids(run: Any, write: Any) -> None:
    text = run("generate", W16, "-p", "x").failed()
    assert "the model has no tokenizer" in text and "--ids FILE" in text
    assert "no tokenizer" in run("chat", W16 / "model.Q8_0.gguf").failed()
    assert "no tokenizer" in run("score", W16, "-p", "x").failed()
    ids = write("i.json", [1, 2])
    assert "no tokenizer" in run("generate", W16, "--ids", ids, "--stop", "x").failed()


def test_a_pipe_that_closes_ends_quietly(
    run: Any, warm: local.LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(text: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(running, "write_out", closed)
    monkeypatch.setattr(cli, "_discard_stdout", lambda: None)
    result = run("generate", "--raw", "-p", "x", "--seed", 0, "-q", *SAFE)
    assert (result.status, result.out, result.err) == (1, "", "")
    assert warm.executor.page_counts().owned == 0


def test_what_is_wrong_is_said_without_jax() -> None:
    """Start-up of a wrong call must not take seconds."""
    script = (
        "import sys\n"
        "from ds4jax import cli\n"
        "for args in (['generate', 'missing.gguf', '-p', 'x'], ['generate', '-p', 'x', '-c', '1'],"
        " ['chat', '--ctx', '99999'], ['logits', '--ids', 'no', '-o', 'x.npz'],"
        " ['score', '--ids', 'no']):\n"
        "    assert cli.main(args) == 1, args\n"
        "sys.exit(any(m == 'jax' or m.startswith('jax.') for m in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 5


# -- chat ------------------------------------------------------------------------------------------


@pytest.fixture
def chat(run: Any, warm: local.LocalModel, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A conversation over piped stdin."""

    def call(lines: str | bytes, *flags: Any) -> Result:
        data = lines.encode() if isinstance(lines, str) else lines
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
        result = run("chat", "-n", 8, "--seed", 0, "--ignore-eos", *SAFE, *flags)
        assert isinstance(result, Result)
        return result

    return call


def test_chat_remembers(chat: Any, run: Any, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    result = chat(f"/nothink\nhello\n\nand you?\n/save {saved}\n/quit\nnever\n", "-sys", "short")
    assert result.status == 0 and "never" not in result.err
    messages = json.loads(saved.read_text())["messages"]
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [m["role"] for m in messages] == roles
    assert messages[0]["content"] == "short" and messages[3]["content"] == "and you?"
    assert result.out == "".join(
        m["content"].removesuffix("\n") + "\n" for m in messages if m["role"] == "assistant"
    )
    # The second answer is the one that the whole conversation gives.
    last = messages.pop()
    (tmp_path / "c.json").write_text(json.dumps({"messages": messages, "thinking": False}))
    again = run("generate", "--chat", tmp_path / "c.json", "-n", 8, "--seed", 0, "--ignore-eos",
                "--json", *SAFE).json  # fmt: skip
    assert again["text"] == last["content"]


def test_chat_commands(chat: Any, write: Any, tmp_path: Path) -> None:
    note = write("note.txt", "what\nis this?")
    result = chat(
        f"/help\n/think-max\n/think\n/nothink\n/ctx\n/read {note}\n/ctx\n/new\n/ctx\n"
        f"/foo\n/quit now\n/read\n/read {tmp_path}/none\n/save\n/save {tmp_path}\n/ctx x\n"
        "/ctx 99999999\n"
    )
    assert result.status == 0, "the end of the input ends it"
    most = open_model("nano").model_config.max_position_embeddings
    for line in (
        "/think  /think-max  /nothink", "thinking: max", "thinking: high", "thinking: none",
        "context: 0 of 4096 tokens used", "error: no command /foo", "/quit takes nothing after it",
        "error: /read needs a file", "none: No such file", "error: /save needs a file",
        f"error: /save {tmp_path}: Is a directory", "error: /ctx is 'x', must be an integer",
        f"must be an integer in 1..{most} ",
    ):  # fmt: skip
        assert line in result.err, line
    used = [int(n) for n in re.findall(r"context: (\d+) of", result.err)]
    assert used[0] == used[2] == 0 < used[1]


def test_chat_shows_reasoning_apart(chat: Any, warm: local.LocalModel) -> None:
    assert warm.tokenizer is not None
    result = chat("hi\n", "--max-reasoning", 3, *ban(*warm.tokenizer.specials.values()))
    assert result.status == 0 and len(result.out) > 1
    reasoning = result.err.split("/help\n", 1)[1].split("\n[length]")[0]
    assert reasoning and reasoning not in result.out


def test_chat_refuses_what_does_not_fit_and_goes_on(chat: Any) -> None:
    result = chat(("long " * 5000 + "\n/nothink\nhi\n").encode() + b"caf\xe9\n")
    assert result.status == 0
    assert "over the context of 4096: /new starts afresh" in result.err
    assert "error: a line is not UTF-8 and is left out" in result.err
    assert result.err.count("[length]") == 1, "the message in between is answered"


@pytest.mark.slow
def test_chat_changes_its_context(chat: Any) -> None:
    result = chat("/nothink\nhi\n/ctx 640\nhi again\n/ctx\n", "--ctx", 512)
    assert result.status == 0
    assert re.search(r"context: \d+ of 640 tokens used", result.err)
    assert result.err.count("[length]") == 2


# The terminal becomes the controlling one, so that Ctrl-C reaches the process.
_ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "ds4jax.cli", *sys.argv[1:]])
"""


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, arguments: list[str], where: Path) -> None:
        self.master, slave = pty.openpty()
        env = {k: v for k, v in os.environ.items() if not k.startswith("DS4JAX_")}
        env["PYTHONPATH"] = str(REPO)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ON_TERMINAL, *arguments], stdin=slave, stdout=slave,
            stderr=slave, cwd=where, env=env, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def expect(self, pattern: str, seconds: float = 90.0) -> str:
        """Read until the pattern has come; what came up to its end is taken."""
        end = time.monotonic() + seconds
        while (match := re.search(pattern, self.seen)) is None:
            ready, _, _ = select.select([self.master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.seen[-500:]!r}"
            try:
                data = os.read(self.master, 65536)
            except OSError:  # the other side is closed
                data = b""
            assert data, f"it ended without {pattern!r}: {self.seen[-500:]!r}"
            self.seen += data.decode("utf-8", "replace")
        taken, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return taken

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_chat_on_a_terminal(compiled: Warm, tmp_path: Path) -> None:
    assert compiled.model.tokenizer is not None
    markers = ban(*compiled.model.tokenizer.specials.values())
    terminal = Terminal(
        ["chat", "--compile-cache", str(compiled.cache), "--ignore-eos", "--seed", "0",
         "--max-reasoning", "40", *markers], tmp_path,
    )  # fmt: skip
    try:
        terminal.expect(r"\n.*> ")
        terminal.send("hello\n")
        assert "hello" in terminal.expect("\x1b\\[2m"), "reasoning is dim"
        terminal.expect("\x1b\\[0m")
        terminal.expect(r"\w")
        terminal.send("\x03")
        terminal.expect(r"\[interrupted\]")
        terminal.expect(r"context \d+ of 4096.*\n.*> ")
        terminal.send("\x03")
        terminal.expect(r"/quit or Ctrl-D leaves.*\n.*> ")
        terminal.send("/save talk.json\n")
        # Ctrl-D means the end only where a line is being read.
        terminal.expect(r"2 messages in talk.json[^>]*> ")
        terminal.send("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()
    user, answer = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert user["content"] == "hello" and answer["reasoning_content"] and answer["content"]


def test_generate_can_be_interrupted(compiled: Warm, tmp_path: Path) -> None:
    """From another directory, with the programs of an earlier start."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("DS4JAX_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "ds4jax.cli", "generate", "--raw", "-p", "x", "--ignore-eos",
         "--compile-cache", str(compiled.cache)], cwd=tmp_path,
        env=env | {"PYTHONPATH": str(REPO)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        errors = process.stderr.read().decode()
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def test_plain_progress_tells_news_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.01)
    with progress.Progress(shown=True) as shown:
        for done, text in ((0, "compile: the first program\n"), (1, "compile: program 2 of 3\n")):
            shown.compile(done, 3)
            end, seen = time.monotonic() + 30, ""
            while text not in seen and time.monotonic() < end:
                time.sleep(0.01)
                seen += capsys.readouterr().err
            time.sleep(0.1)
            assert seen + capsys.readouterr().err == text
        shown.compile(3, 3)
        time.sleep(0.1)
    assert capsys.readouterr().err == "", "what is done needs no line"


# -- logits and score ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle() -> dict[str, Any]:
    with np.load(W16 / "reference.npz") as data:
        return dict(data)


@pytest.fixture
def quick_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """`logits` and `score` are compared with each other: what users get is `test_oracle`'s."""
    monkeypatch.setattr(evaluate, "_step", little_effort.evaluator_step())


@pytest.mark.usefixtures("quick_step")
def test_logits_of_a_file(run: Any, write: Any, tmp_path: Path, oracle: dict[str, Any]) -> None:
    count = 140
    ids = write("ids.json", oracle["token_ids"][:count].tolist())
    out = tmp_path / "out.npz"
    flags = ["logits", W16, "--ids", ids, "--output", out, "--ctx", 1024, "--dtype", "float32"]
    seen = []
    for split in (["--stepwise", 130], ["--stepwise", 0], ["--chunks", "100,1,3"], []):
        result = run(*flags, *split, *SAFE)
        assert result.status == 0 and result.out == ""
        with np.load(out) as data:
            assert sorted(data.files) == ["ids", "logits"]
            assert data["logits"].dtype == np.float32 and data["logits"].shape == (count, 256)
            np.testing.assert_array_equal(data["ids"], oracle["token_ids"][:count])
            seen.append(data["logits"])
    for other in seen[1:]:
        np.testing.assert_array_equal(other, seen[0])
    assert np.abs(seen[0] - oracle["logits"][:count]).max() < 2e-3
    report = run(*flags, "--json", *SAFE).json
    assert (report["tokens"], report["pieces"], report["bytes"]) == (140, 1, out.stat().st_size)
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".part"] == []


@pytest.mark.parametrize(("flags", "status", "says"), [
    (["--stepwise", "5"], 2, "--stepwise 5: there are only 4 ids"),
    (["--chunks", "3,2"], 2, "--chunks add up to 5, there are only 4 ids"),
    (["--chunks", "0,2"], 2, "must be an integer in 1.."),
    (["--chunks", "2", "--stepwise", "1"], 2, "not allowed with argument"),
    (["--ctx", "3"], 1, "4 tokens are over --ctx 3: raise --ctx (the model allows 1048576)"),
    (["--output", "no/dir/x.npz"], 1, "--output no/dir/x.npz: no directory no/dir"),
])  # fmt: skip
def test_logits_refuses(
    run: Any, write: Any, tmp_path: Path, flags: list[str], status: int, says: str
) -> None:
    ids = write("ids.json", [1, 2, 3, 4])
    result = run("logits", W16, "--ids", ids, "--output", tmp_path / "x.npz", *flags)
    assert says in result.failed(status)
    assert not (tmp_path / "x.npz").exists()


def test_logits_of_a_model_that_is_cut_off(run: Any, write: Any, tmp_path: Path) -> None:
    """One line, whatever hangs on the part that is not there."""
    ids, flags = write("ids.json", [1, 2]), ["--output", tmp_path / "x.npz"]
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_bytes((W16 / "config.json").read_bytes())
    whole = (W16 / "model.safetensors").read_bytes()
    for size in (len(whole) // 2, len(whole) - 1, 1000, 4):
        (directory / "model.safetensors").write_bytes(whole[:size])
        text = run("logits", directory, "--ids", ids, *flags).failed()
        assert "model.safetensors" in text and "download or copy the file again" in text
    whole = (W16 / "model.Q8_0.gguf").read_bytes()
    for size in (len(whole) // 2, len(whole) - 5000, 10000, 4):
        file = write("cut.gguf", whole[:size])
        text = run("logits", file, "--ids", ids, *flags).failed()
        assert "cut.gguf" in text and "download or copy the file again" in text


def test_logits_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(b"old")

    def blocks(bad: float) -> Iterator[Any]:
        yield np.zeros((2, 3), np.float32)
        yield np.array([[0, bad, 1]], np.float32)

    with pytest.raises(common.Failure, match="the logits after id 2 are not finite"):
        logits.write_npz(path, blocks(np.nan), [1, 2, 3], 3)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    logits.write_npz(path, blocks(7.0), [1, 2, 3], 3)
    with np.load(path) as data:
        assert data["logits"].tolist() == [[0, 0, 0], [0, 0, 0], [0, 7, 1]]


@pytest.mark.usefixtures("quick_step")
def test_score(run: Any, write: Any, tmp_path: Path) -> None:
    text = "import os\n\n\ndef main():\n    print(os.name)\n"
    data = run("score", "-f", write("t.py", text), "--json", "--logprobs", *SAFE).json
    assert data["tokens"] == len(data["logprobs"]) == len(data["ids"]) - 1
    assert data["nats"] == pytest.approx(-sum(data["logprobs"]))
    assert data["nats_per_token"] == pytest.approx(data["nats"] / data["tokens"])
    assert data["perplexity"] == pytest.approx(math.exp(data["nats_per_token"]))
    assert data["bits_per_byte"] == pytest.approx(data["nats"] / math.log(2) / len(text))
    plain = run("score", "-p", text, *SAFE)
    found = re.fullmatch(r"(\d+) tokens, ([\d.]+) nats per token, .*bits per byte\n", plain.out)
    assert found and int(found[1]) == data["tokens"]
    assert float(found[2]) == pytest.approx(data["nats_per_token"], abs=1e-4)
    # The same numbers as the logits give.
    out = tmp_path / "l.npz"
    ids = write("i.json", data["ids"])
    assert run("logits", "--ids", ids, "-o", out, *SAFE).status == 0
    with np.load(out) as arrays:
        rows = arrays["logits"].astype(np.float64)[:-1]
    top = rows.max(-1, keepdims=True)
    logp = rows - top - np.log(np.exp(rows - top).sum(-1, keepdims=True))
    expected = logp[np.arange(len(rows)), data["ids"][1:]]
    np.testing.assert_allclose(data["logprobs"], expected, atol=1e-5)


@pytest.mark.parametrize(("flags", "status", "says"), [
    (["-p", ""], 1, "there is nothing to score"),
    (["-p", "some text here", "--ctx", "2"], 1, "tokens are over --ctx 2: raise --ctx (the model"),
    (["-p", "x", "--ids", "y"], 2, "not allowed with argument"),
    (["-p", "\x01\x02" * 1050000], 1, "are over the model's"),
    (["-p", "\x01\x02" * 3000, "--ctx", "64"], 1, "positions: use fewer"),
])  # fmt: skip
def test_score_refuses(run: Any, flags: list[str], status: int, says: str) -> None:
    assert says in run("score", *flags).failed(status)


# -- convert ---------------------------------------------------------------------------------------


def test_convert_and_back(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "small.gguf"
    flags = ["-t", "rocmfp4", "-t", "embedding=q8_0", "--name", "small"]
    report = run("convert", W16, out, *flags, "--json", "--no-progress").json
    assert report["path"] == str(out) and report["bytes"] == out.stat().st_size
    by_name = {t["name"]: t["target"] for t in report["tensors"]}
    assert by_name["blk.3.ffn_down_exps.weight"] == "rocmfp4"
    assert by_name["token_embd.weight"] == "q8_0"
    assert "exists" in run("convert", W16, out, *flags).failed()
    again = run("convert", W16, out, *flags, "--overwrite", "--no-progress")
    assert again.status == 0 and again.out == f"{out}\n" and "to rocmfp4:" in again.err
    directory = tmp_path / "checkpoint"
    assert run("convert", out, directory, "-q").out == f"{directory}\n"
    assert open_model(directory).model_config == open_model(out).model_config


@pytest.mark.parametrize(("flags", "status", "says"), [
    (["x.gguf", "-t", "fp5"], 2, "-t/--type: type 'fp5' is unknown: give one of default"),
    (["x.gguf", "-t", "heads=q8_0"], 2, "class 'heads' is unknown"),
    (["x.gguf", "-t", "head=rocm"], 2, "type 'rocm' is unknown: types are keep, q8_0"),
    (["x", "-t", "q8_0"], 2, "--type goes with an OUT that ends in .gguf"),
    (["x.gguf", "--imatrix", "none.npz"], 1, "none.npz: no imatrix"),
    (["no/dir/x.gguf"], 1, "/no/dir/x.gguf: no directory "),
])  # fmt: skip
def test_convert_refuses(
    run: Any, tmp_path: Path, flags: list[str], status: int, says: str
) -> None:
    flags[0] = str(tmp_path / flags[0])
    assert says in run("convert", W16, *flags, "--no-progress").failed(status)
    assert list(tmp_path.iterdir()) == []
