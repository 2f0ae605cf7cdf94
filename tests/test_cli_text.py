"""The command line of text, files and the installation: results, flags, twins, failures, exits."""

from __future__ import annotations

import argparse
import functools
import hashlib
import http.server
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from text_tools import real_tokenizer, real_tokenizer_file, trained, vectors

import ds4jax
from ds4jax import cache, cli, commands, memory, system
from ds4jax.commands import common, download
from ds4jax.config import ModelConfig, RuntimeConfig
from ds4jax.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
ORACLE = DATA / "oracle" / "w16"
REPO = Path(__file__).parents[1]


class Result:
    """What one call of the command line gave."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def json(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls the command line in this process, without twins of flags in the environment."""
    for name in list(os.environ):
        if name.startswith("DS4JAX_"):
            monkeypatch.delenv(name)

    def call(*arguments: Any) -> Result:
        capsys.readouterr()
        status = cli.main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return call


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file that holds a tokenizer and nothing else, written by another library."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    data = Tokenizer.from_json(trained(400)).to_gguf_metadata()
    writer = GGUFWriter(path, "deepseek4")
    writer.add_name("Small-0731")
    writer.add_tokenizer_model(data["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(data["tokenizer.ggml.pre"])
    writer.add_token_list(data["tokenizer.ggml.tokens"])
    writer.add_token_merges(data["tokenizer.ggml.merges"])
    writer.add_token_types(data["tokenizer.ggml.token_type"])
    writer.add_eos_token_id(data["tokenizer.ggml.eos_token_id"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of the published tokenizer, which is loaded once for all tests."""
    directory = real_tokenizer_file().parent
    loaded = common.TextModel(real_tokenizer(), None, directory)
    opening = common.open_text_model

    def open_once(model: str) -> common.TextModel:
        return loaded if model == str(directory) else opening(model)

    monkeypatch.setattr(common, "open_text_model", open_once)
    return directory


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes a file into a fresh directory: text as it is, everything else as JSON."""

    def make(name: str, value: Any) -> Path:
        path = tmp_path / name
        if isinstance(value, bytes):
            path.write_bytes(value)
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            path.write_text(text, encoding="utf-8", newline="")
        return path

    return make


# -- tokenize and detokenize -----------------------------------------------------------------------


def test_tokenize_recorded_chats(run: Any, real: Path, write: Any) -> None:
    for case in vectors("chat/encode.json")["cases"]:
        result = run("tokenize", real, "--chat", write("case.json", case), "--json").json
        assert result["prompt"] == case["expected_prompt"], case["id"]
        assert result["ids"] == case["expected_ids"], case["id"]
        assert result["profile"] == case["profile"]


def test_tokenize_a_directory_without_weights(run: Any) -> None:
    directory = real_tokenizer_file().parent
    assert run("tokenize", directory, "-p", "Hello", "--json").json["ids"] == [19923]


def test_tokenize_texts(run: Any, real: Path, write: Any) -> None:
    for case in vectors("tokenizer.json")["special"]:
        plain = run("tokenize", real, "-p", case["text"], "--json").json
        assert plain["ids"] == case["ids_plain"]
        file = write("text.txt", case["text"])
        marked = run("tokenize", real, "-f", file, "--markers", "--bos", "--json").json
        ids = case["ids"] if case["ids"][0] == 0 else [0, *case["ids"]]
        assert marked["ids"] == ids and len(marked["pieces"]) == len(ids)


def test_tokenize_for_people(run: Any, real: Path, write: Any) -> None:
    text = "Hello <think>😀"
    result = run("tokenize", real, "-p", text, "--markers", "--show-special")
    assert result.out.splitlines() == [
        "  19923  'Hello'", "    223  ' '", " 128821  ⟦<think>⟧",
        "  28927  b'\\xf0\\x9f\\x98'", "    225  b'\\x80'",
    ]  # fmt: skip
    assert result.err == "5 tokens, 17 bytes\n"
    assert run("tokenize", real, "-p", text, "-q").err == ""
    chat = write("c.json", {"messages": [{"role": "user", "content": "<｜User｜>"}]})
    shown = run("tokenize", real, "--chat", chat, "--chat-profile", "v4-preview", "--show-special")
    expected = "⟦<｜begin▁of▁sentence｜>⟧⟦<｜User｜>⟧<｜User｜>⟦<｜Assistant｜>⟧⟦<think>⟧\n"
    assert shown.out == expected
    assert "profile v4-preview (option)" in shown.err


def test_profile_of_the_case_the_flag_and_the_twin(
    run: Any, real: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": "x"}]
    bare = write("bare.json", {"messages": messages})
    case = write("case.json", {"messages": messages, "profile": "v4-preview"})

    def profile(*arguments: Any) -> str:
        return str(run("tokenize", real, *arguments, "--json").json["profile"])

    assert profile("--chat", bare) == "v4-0731"
    assert profile("--chat", case) == "v4-preview"
    assert profile("--chat", case, "--chat-profile", "v4-0731") == "v4-0731"
    monkeypatch.setenv("DS4JAX_CHAT_PROFILE", "v4.1")
    assert profile("--chat", bare) == "v4.1"
    assert profile("--chat", case) == "v4-preview"


def test_tokenizer_from_gguf(run: Any, small: Path) -> None:
    text = "Hello, world! <think> 你好\n\n  é😀"
    ids = run("tokenize", small, "-p", text, "--json").json["ids"]
    assert ids == Tokenizer.from_json(trained(400)).encode(text, markers=False)
    ids_file = small.parent / "ids.json"
    ids_file.write_text(json.dumps(ids))
    assert run("detokenize", "-m", small, "--ids", ids_file).out == text


def test_profile_from_gguf(run: Any, small: Path, write: Any) -> None:
    chat = write("c.json", {"messages": [{"role": "user", "content": "x"}]})
    result = run("tokenize", small, "--chat", chat)
    assert "profile v4-0731 (general.name = 'Small-0731')" in result.err


def test_detokenize(run: Any, real: Path, write: Any) -> None:
    ids = write("ids.json", {"ids": [0, 19923, 28927, 225, 128822, 28927]})
    result = run("detokenize", real, "--ids", ids, "--json").json
    text = "<｜begin▁of▁sentence｜>Hello😀</think>\ufffd"
    assert result["text"] == text == "".join(result["pieces"]) + result["tail"]
    assert run("detokenize", real, "--ids", ids).out == text
    shown = run("detokenize", real, "--ids", ids, "--show-special").out
    assert shown == "⟦<｜begin▁of▁sentence｜>⟧Hello😀⟦</think>⟧\ufffd"


# -- parse -----------------------------------------------------------------------------------------


def test_parse_recorded_outputs(run: Any, real: Path, write: Any) -> None:
    for case in vectors("chat/parse.json")["cases"]:
        result = run("parse", "nano", "--text", write("case.json", case), "--json").json
        assert result == case["expected"], case["id"]
    for case in vectors("chat/parse_ids.json")["cases"]:
        result = run("parse", real, "--ids", write("case.json", case), "--json").json
        assert result == case["expected"], case["id"]


def test_parse_bare_input(run: Any, real: Path, write: Any) -> None:
    text = write("out.txt", "a</think>b")
    assert run("parse", "--text", text, "--json").json["content"] == "ab"
    result = run("parse", "--text", text, "--thinking", "--json").json
    assert (result["reasoning"], result["content"]) == ("a", "b")
    call = '<｜DSML｜invoke name="f"/>'
    text = write("call.txt", call)
    assert run("parse", "--text", text, "--json").json["content"] == call
    result = run("parse", "--text", text, "--tools", "--json").json
    assert result["tool_calls"] == [{"name": "f", "arguments": {}}]
    ids = write("ids.json", [67, 128822, 68])
    assert run("parse", real, "--ids", ids, "--thinking", "--json").json["reasoning"] == "a"


def test_parse_for_people(run: Any, write: Any) -> None:
    raw = 'r</think>c\n\n<｜DSML｜invoke name="f"/><｜DSML｜invoke name="g">'
    result = run("parse", "--text", write("x.txt", raw), "--thinking", "--tools")
    assert result.out.splitlines() == [
        "--- reasoning", "r", "--- content", "c", "--- call f", "{}", "--- truncated call g",
    ]  # fmt: skip


def test_parse_keeps_large_numbers(run: Any, write: Any) -> None:
    digits = "1234567890" * 600
    raw = f'<｜DSML｜invoke name="f"><｜DSML｜parameter name="n">{digits}</｜DSML｜invoke>'
    result = run("parse", "--text", write("x.txt", raw), "--tools", "--json")
    assert result.status == 0 and f'"n": {digits}' in result.out


# -- inspect ---------------------------------------------------------------------------------------


def test_inspect(run: Any) -> None:
    file = next(iter(sorted(ORACLE.glob("*.gguf"))))
    report = run("inspect", file, "--json", "--tensors", "--ctx", "1000", "--lanes", "3").json
    assert report["architecture"] == "deepseek4" and report["problems"] == []
    assert report["config"]["num_layers"] == 7
    assert len(report["tensors"]) == report["totals"]["tensors"]
    assert {"name", "type", "shape", "bytes"} <= report["tensors"][0].keys()
    assert report["tokenizer"] is None
    assert report["memory"]["ctx"] == 1000 and report["memory"]["lanes"] == 3
    assert report["chat_profile"]["profile"] == "v4-0731"
    people = run("inspect", file)
    assert people.status == 0 and "vocabulary 256" in people.out
    assert "none: commands that take ids work" in people.out


def test_inspect_tokenizer(run: Any, small: Path) -> None:
    result = run("inspect", small, "--json", "--tokenizer")
    assert result.status == 1  # it is no model
    report = json.loads(result.out)
    assert report["tokenizer"]["vocab_size"] == 400
    assert report["tokenizer"]["markers"]["<think>"] == 5
    assert report["tokenizer"]["problem"] is None and len(report["tokenizer"]["digest"]) == 64
    assert report["problems"] and "problem" in result.err


def test_inspect_a_damaged_file(run: Any, write: Any) -> None:
    file = next(iter(sorted(ORACLE.glob("*.gguf"))))
    cut = write("cut.gguf", file.read_bytes()[:-1000])
    result = run("inspect", cut, "--json")
    assert result.status == 1
    assert json.loads(result.out)["problems"]
    assert "would be refused" in result.err and "cut.gguf" in result.err
    bad = write("bad.gguf", b"not a model at all, but long enough to be read")
    result = run("inspect", bad, "--json")
    assert result.status == 1 and json.loads(result.out)["problems"]
    assert result.err.startswith("ds4jax inspect: error: ") and "bad.gguf" in result.err


CONFIG = {
    "vocab_size": 100, "hidden_size": 32, "num_layers": 5, "num_heads": 4, "head_dim": 24,
    "rope_head_dim": 8, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "sliding_window": 16,
    "compress_ratios": (0, 4, 128, 4, 128), "index_num_heads": 2, "index_head_dim": 16,
    "index_topk": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "num_hash_layers": 1, "swiglu_limits": (1.0,) * 5, "shared_swiglu_limits": (1.0,) * 5,
}  # fmt: skip


@pytest.mark.parametrize(
    "run_config",
    [
        RuntimeConfig(),
        RuntimeConfig(dtype="bfloat16", max_ctx=1000, num_slots=3, max_drafts=5),
        RuntimeConfig(max_ctx=129, num_slots=1, num_pages=7, max_drafts=15),
    ],
)
def test_memory_plan_is_what_the_cache_allocates(run_config: RuntimeConfig) -> None:
    config = ModelConfig(**CONFIG)
    expected = cache.plan_bytes(config, run_config)
    assert memory.cache_bytes(config, run_config) == expected
    plan = memory.plan(config, run_config, 1000)
    assert plan["total_bytes"] == 1000 + sum(expected.values())


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "files", "status", "message"),
    [
        (["tokenize", "hello there"], {}, 1, "MODEL 'hello there': no such file or directory: giv"),
        (["tokenize", "c.json/x", "-p", "x"], {"c.json": {}}, 1, "a text goes after -p"),
        (["tokenize", "a\0b", "-p", "x"], {}, 1, "MODEL 'a\\x00b': no such file"),
        (["detokenize", "no.gguf", "--ids", "i"], {"i": [1]}, 1, "or nano (the default)\n"),
        (["parse", "no.gguf", "--ids", "i"], {"i": [1]}, 1, "MODEL 'no.gguf': no such file or"),
        (["tokenize", "REAL", "--chat", "no.json"], {}, 1, "--chat no.json: No such file"),
        (["tokenize", "REAL", "--chat", "."], {}, 1, "--chat .: is a directory"),
        (["tokenize", "REAL", "--chat", "c.json"], {"c.json": "{"}, 1, "c.json: not JSON: Expec"),
        (["tokenize", "REAL", "--chat", "c.json"], {"c.json": '{"a": NaN}'}, 1, "NaN is not JSON"),
        (
            ["tokenize", "REAL", "--chat", "c.json"], {"c.json": {"messages": [], "seed": 1}},
            1, "seed is not a known field",
        ),
        (["tokenize", "REAL", "--chat", "c.json"], {"c.json": {"messages": []}}, 1, "at least one"),
        (["tokenize", "REAL", "--chat", "c.json"], {"c.json": {"cases": []}}, 1, "several cases"),
        (
            ["tokenize", "REAL", "--chat", "c.json"],
            {"c.json": {"messages": [{"role": "user", "content": "x"}], "profile": "v9"}},
            1, "profile is 'v9', must be one of v4-preview",
        ),
        (
            ["tokenize", "REAL", "--chat", "c.json"],
            {"c.json": {"messages": [{"role": "user", "content": "x"}],
                        "tools": [{"type": "function", "function": {"name": "f"}}],
                        "tool_choice": "required"}},
            1, "needs constrained decoding",
        ),
        (["tokenize", "REAL", "-f", "t"], {"t": b"ab\xff"}, 1, "not UTF-8: byte 0xff at offset 2"),
        (["tokenize", "REAL", "-p", "a\ud800"], {}, 1, "U+D800 at character 1"),
        (["tokenize", "REAL", "-p", "x", "-f", "y"], {}, 2, "not allowed with argument"),
        (["tokenize", "a", "-m", "b", "-p", "x"], {}, 2, "MODEL is 'a' and --model is 'b'"),
        (["tokenize", "REAL", "--colour"], {}, 2, "unrecognized arguments: --colour"),
        (["tokenize", "REAL", "--chat-profile", "v3"], {}, 2, "invalid choice: 'v3'"),
        (["detokenize", "REAL", "--ids", "i"], {"i": "[1, 2.5]"}, 1, "entry 1 is 2.5, must be an"),
        (["detokenize", "REAL", "--ids", "i"], {"i": "[true]"}, 1, "entry 0 is True"),
        (["detokenize", "REAL", "--ids", "i"], {"i": "7"}, 1, "must be a JSON list"),
        (["detokenize", "REAL", "--ids", "i"], {"i": "{}"}, 1, "must be a JSON list"),
        (["detokenize", "REAL", "--ids", "i"], {"i": "[129280]"}, 1, "must be in 0..129279"),
        (["parse", "REAL"], {}, 2, "give --ids FILE or --text FILE"),
        (["parse", "--text", "c.json"], {"c.json": {"raw": 1}}, 1, "raw must be a string"),
        (["parse", "--text", "c.json"], {"c.json": {"cases": []}}, 1, "several cases"),
        (["parse", "--text", "c.json"], {"c.json": {"raw": "", "x": 1}}, 1, "unknown field 'x'"),
        (["parse", "--text", "c.json"], {"c.json": {"ids": []}}, 1, "has no such field"),
        (["parse", "--text", "c.json"], {"c.json": {"raw": "", "thinking": 1}}, 1, "true or false"),
        (["inspect", "--ctx", "0"], {}, 2, "argument -c/--ctx: is '0', must be an integer in 1.."),
        (["inspect", "--ctx", "many"], {}, 2, "is 'many', must be an integer in 1..4194304 tokens"),
        (["inspect", "nowhere"], {}, 1, "nowhere"),
        (["download", "noslash"], {}, 2, "must be owner/name"),
        (["doctor", "--timeout", "nan"], {}, 2, "must be a number in [1, 3600]"),
        (["dance"], {}, 2, "invalid choice: 'dance'"),
    ],
)  # fmt: skip
def test_failures_are_one_line(
    run: Any, real: Path, write: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    arguments: list[str], files: dict[str, Any], status: int, message: str,
) -> None:  # fmt: skip
    for name, value in files.items():
        write(name, value)
    monkeypatch.chdir(tmp_path)
    result = run(*(real if a == "REAL" else a for a in arguments))
    assert (result.status, result.out) == (status, "")
    assert message in result.err
    assert result.err.count("\n") == 1 and result.err.startswith("ds4jax")
    assert ": error: " in result.err


def test_no_input_on_a_terminal(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "stdin_is_terminal", lambda: True)
    for command, flag in (("tokenize", "--prompt TEXT"), ("detokenize", "--ids FILE")):
        result = run(command)
        assert result.status == 2 and flag in result.err


def test_no_command(run: Any) -> None:
    result = run()
    assert (result.status, result.out) == (2, "") and "usage: ds4jax" in result.err


def test_help_and_version(run: Any) -> None:
    assert run("--version").out == f"ds4jax {ds4jax.__version__}\n"
    for command in commands.COMMANDS:
        result = run(command, "--help")
        assert result.status == 0 and "[DS4JAX_QUIET]" in result.out
    assert "(default: 4096)" in " ".join(run("inspect", "--help").out.split())


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 1, ""),
        (FileNotFoundError(2, "No such file", "x"), 1, "error: x: No such file\n"),
        (common.Failure("it failed"), 1, "error: it failed\n"),
        (common.UsageError("called wrongly"), 2, "error: called wrongly (see ds4jax parse --help)"),
        (ZeroDivisionError("division"), 1, "internal error: ZeroDivisionError: division; run it"),
    ],
)
def test_what_is_raised_and_how_it_ends(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, message: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(common, "read_text", fail)
    monkeypatch.setattr(cli, "_discard_stdout", lambda: None)
    result = run("parse", "--text", "x")
    assert result.status == status and message in result.err
    assert "Traceback" not in result.err
    if isinstance(error, ZeroDivisionError):
        assert "Traceback" in run("parse", "--text", "x", "-v").err


# -- twins of flags --------------------------------------------------------------------------------


def test_every_flag_has_a_twin(run: Any, monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    file = next(iter(sorted(ORACLE.glob("*.gguf"))))
    monkeypatch.setenv("DS4JAX_MODEL", str(file))
    monkeypatch.setenv("DS4JAX_CTX", "256")
    monkeypatch.setenv("DS4JAX_JSON", "yes")
    monkeypatch.setenv("DS4JAX_TENSORS", "0")
    report = run("inspect").json
    assert report["memory"]["ctx"] == 256 and "tensors" not in report
    assert run("inspect", "--ctx", "512").json["memory"]["ctx"] == 512
    assert run("inspect", "-c512").json["memory"]["ctx"] == 512
    other = run("inspect", ORACLE / "other.gguf")
    assert other.status == 1 and "other.gguf" in other.err


def test_twins_of_other_commands_do_not_matter(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4JAX_CTX", "nonsense")
    assert run("doctor", "--no-device", "--json").status in (0, 1)
    result = run("inspect")
    assert result.status == 2
    expected = "DS4JAX_CTX='nonsense', the twin of --ctx: is 'nonsense', must be an integer in 1.."
    assert expected in result.err


def test_a_flag_rules_out_the_twins_that_it_excludes(
    run: Any, real: Path, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    monkeypatch.setenv("DS4JAX_CHAT", str(write("c.json", {"messages": []})))
    assert run("tokenize", real, "-p", "Hello", "--json").json["ids"] == [19923]
    monkeypatch.setenv("DS4JAX_JSON", "maybe")
    result = run("tokenize", real, "-p", "x")
    assert result.status == 2 and "DS4JAX_JSON='maybe'" in result.err


def shared_flags() -> cli._Parser:
    parser = cli._Parser(prog="x")
    common.add_model(parser)
    common.add_capacity(parser)
    common.add_runtime(parser)
    common.add_sampling(parser)
    common.add_output(parser)
    return parser


def test_flags_for_commands_that_compute() -> None:
    parser = shared_flags()
    args = parser.parse_args([])
    assert (args.device, args.numerics, args.temp, args.seed) == ("auto", "plain", None, None)
    flags = "--seed 0 --temp 0 --stop a --stop b --think-max -n 5"
    args = parser.parse_args(["m", *flags.split()])
    assert (args.model, args.seed, args.temp, args.tokens) == ("m", 0, 0.0, 5)
    assert (args.stop, args.effort) == (["a", "b"], "max")
    parser.use_environment(
        {"DS4JAX_NOTHINK": "1", "DS4JAX_STOP": "x,y", "DS4JAX_VERBOSE": "2", "DS4JAX_SEED": "7",
         "DS4JAX_COMPILE_CACHE": "/c", "DS4JAX_NO_PROGRESS": "no", "DS4JAX_TEMP": ""},
        [],
    )  # fmt: skip
    args = parser.parse_args([])
    assert (args.effort, args.stop, args.verbose, args.seed) == ("none", ["x,y"], 2, 7)
    assert (args.compile_cache, args.no_progress, args.temp) == (Path("/c"), False, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--temp 2.1", "--temp: is '2.1', must be a number in [0, 2]"),
        ("--top-p 0", "must be a number in (0, 1]"),
        ("--temp nan", "must be a number in [0, 2]"),
        ("--seed -1", "must be an integer in 0..18446744073709551615"),
        ("--seed 1.0", "must be an integer"),
        ("--think --nothink", "not allowed with"),
        ("--device tpu", "invalid choice"),
        ("--te 1", "unrecognized arguments"),
    ],
)
def test_bad_flags(capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        shared_flags().parse_args(flags.split())
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_sizes_for_people() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1 kB", 999_499: "999 kB", 999_500: "1 MB",
             6_954_000_000: "6.95 GB", 160 * 10**9: "160 GB", 2 * 10**15: "2e+03 TB"}  # fmt: skip
    assert {n: common.size_text(n) for n in sizes} == sizes
    assert common.count_text(284_000_000_000) == "284B"


# -- the program as a process ----------------------------------------------------------------------


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPO, capture_output=True, timeout=120, **options
    )


def test_text_commands_do_not_import_jax(small: Path, tmp_path: Path) -> None:
    chat = tmp_path / "chat.json"
    chat.write_text('{"messages": [{"role": "user", "content": "x"}]}')
    ids = tmp_path / "ids.json"
    ids.write_text("[30, 31]")
    damaged = tmp_path / "bad.gguf"
    damaged.write_bytes(b"GGUF" + b"\xff" * 100)
    oracle = next(iter(sorted(ORACLE.glob("*.gguf"))))
    calls = [
        ["tokenize", str(small), "--chat", str(chat), "--json"],
        ["detokenize", str(small), "--ids", str(ids)],
        ["parse", str(small), "--ids", str(ids)],
        ["inspect", str(oracle), "--tokenizer"],
        ["inspect", str(ORACLE)],
        ["inspect", str(damaged)],
        ["doctor", "--no-device"],
        ["tokenize", "--help"],
    ]
    code = f"""
import json, sys
from ds4jax import cli
for call in json.loads({json.dumps(json.dumps(calls))}):
    cli.main(call)
    heavy = sorted({{"jax", "jaxlib", "flax", "grpc", "huggingface_hub"}} & set(sys.modules))
    assert not heavy, (call, heavy)
print("light")
"""
    done = process("-c", code)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().endswith("light\n")


def test_module_and_script(small: Path) -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = process(
        "-m", "ds4jax.cli", "tokenize", str(small), "--json", input="é ".encode(), env=environ
    )
    assert done.returncode == 0, done.stderr
    assert "".join(json.loads(done.stdout)["pieces"]) == "é " and "é".encode() in done.stdout
    done = process("-m", "ds4jax.cli", "detokenize", str(small), input=b"\xff", env=environ)
    assert done.returncode == 1
    assert done.stderr == (
        b"ds4jax detokenize: error: --ids -: not UTF-8: byte 0xff at offset 0;"
        b" convert it to UTF-8\n"
    )
    declared = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    assert 'ds4jax = "ds4jax.cli:main"' in declared


def test_a_closed_pipe_is_no_traceback(small: Path, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("word " * 40_000)
    command = [sys.executable, "-m", "ds4jax.cli", "tokenize", str(small), "-f", str(text)]
    with subprocess.Popen(
        command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.readline()
        running.stdout.close()
        errors = running.stderr.read()
        assert running.wait(timeout=60) == 1
    assert errors == b""


@pytest.mark.parametrize(
    ("closed", "out", "err"),
    [
        (">&-", b"", b"1 tokens, 1 bytes\n"),
        ("2>&-", b"     41  'A'\n", b""),
        ("<&- 2>&- >&-", b"", b""),
    ],
)
def test_streams_that_the_caller_closed(small: Path, closed: str, out: bytes, err: bytes) -> None:
    """Results and notes never take each other's place."""
    script = f'exec "$0" -m ds4jax.cli tokenize "$1" -f - {closed}'
    done = subprocess.run(
        ["sh", "-c", script, sys.executable, small], cwd=REPO, capture_output=True, timeout=60,
        input=b"A",
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, out, err)


# -- doctor ----------------------------------------------------------------------------------------


def facts(**changes: Any) -> system.Facts:
    """A healthy machine without a GPU, changed."""
    packages: dict[str, str | None] = dict.fromkeys(system.PACKAGES)
    packages |= {"jax": "0.10.2", "jaxlib": "0.10.2"} | changes.pop("packages", {})
    device = {"id": 0, "platform": "cpu", "kind": "cpu", "arch": "", "memory_bytes": 0}
    found = {"backend": "cpu", "devices": [device], "product_is_right": True}
    values = {
        "python": "3.12.1", "system": "Linux", "packages": packages, "environment": {},
        "jax": found, **changes,
    }  # fmt: skip
    return system.Facts(**values)


STRIX = system.GpuNode(node=1, gfx="gfx1151", memory_bytes=96 << 30)
R9700 = system.GpuNode(node=2, gfx="gfx1201", memory_bytes=32 << 30)
PAIR = {"jax-rocm7-plugin": "0.10.2", "jax-rocm7-pjrt": "0.10.2"}
CACHED = {"DS4JAX_COMPILE_CACHE": "/c", "XLA_FLAGS": "--xla_gpu_autotune_level=0"}
AMD: dict[str, Any] = {
    "gpus": (STRIX,), "amd_driver": True, "amd_access": True, "rocm_version": "7.2.0",
    "packages": PAIR, "environment": CACHED,
    "jax": {
        "backend": "gpu", "product_is_right": True,
        "devices": [{"id": 0, "platform": "gpu", "kind": "Radeon 8060S", "arch": "gfx1151",
                     "memory_bytes": 1}],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "level", "what", "fix"),
    [
        ({"python": "3.10.4"}, "error", "Python 3.10.4", "3.11"),
        ({"packages": {"jax": "0.9.1"}}, "error", "jax 0.9.1", ">=0.10.2"),
        ({"packages": {"jax": "0.13.0", "jaxlib": "0.13.0"}}, "error", "jax 0.13", "<0.13"),
        ({"packages": {"jaxlib": "0.11.0"}}, "error", "with jaxlib 0.11.0", "jaxlib==0.10.2"),
        ({"packages": {"jax": None}}, "error", "jax is not installed", "pip install"),
        ({**AMD, "packages": {}}, "error", "AMD GPU (gfx1151) without", "ds4jax[rocm]"),
        (
            {**AMD, "packages": {"jax-rocm7-plugin": "0.10.2"}},
            "error", "only jax-rocm7-plugin 0.10.2", "jax-rocm7-plugin jax-rocm7-pjrt",
        ),
        (
            {**AMD, "packages": {**PAIR, "jax-rocm7-pjrt": "0.10.1"}},
            "error", "versions differ", "'jax-rocm7-pjrt==0.10.2'",
        ),
        ({**AMD, "rocm_version": None, "jax": None}, "error", "ROCm libraries", "rocm[libraries]"),
        ({**AMD, "amd_driver": False}, "error", "no /dev/kfd", "--device /dev/kfd"),
        ({**AMD, "amd_access": False}, "error", "no access to /dev/kfd", "render,video"),
        (
            {**AMD, "gpus": (STRIX, R9700)},
            "warning", "different GPUs (gfx1151, gfx1201)", "ROCR_VISIBLE_DEVICES",
        ),
        (
            {**AMD, "gpus": (system.GpuNode(1, "gfx1036", 0),)},
            "note", "gfx1036: kernels are checked for gfx1151", "--device cpu",
        ),
        (
            {**AMD, "environment": {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}},
            "warning", "HSA_OVERRIDE_GFX_VERSION=11.0.0", "unset it",
        ),
        ({**AMD, "environment": {}}, "note", "compiled programs are not kept", "COMPILE_CACHE="),
        ({**AMD, "environment": {}}, "note", "XLA times its own", "--xla_gpu_autotune_level=0"),
        ({**AMD, "environment": {"JAX_PLATFORMS": "cpu"}}, "note", "JAX_PLATFORMS=cpu", "unset"),
        ({"nvidia_driver": "580.1"}, "error", "NVIDIA driver 580.1 without", "ds4jax[cuda]"),
        ({"gpus": (STRIX,)}, "error", "JAX sees only the CPU", "JAX_PLATFORMS"),
        ({"jax": {"error": "JAX ended with signal 11: x"}}, "error", "signal 11", "JAX_PLATFORMS"),
        (
            {"jax": {"error": "hipErrorInvalidImage"}},
            "error", "InvalidImage", "--xla_gpu_autotune_level=0",
        ),
        (
            {"jax": {**AMD["jax"], "product_is_right": False}},
            "error", "came out wrong", "HSA_OVERRIDE_GFX_VERSION",
        ),
        (AMD, "ok", "JAX computes right on gpu:0 Radeon 8060S", ""),
        ({}, "ok", "JAX computes right on cpu:0 cpu", ""),
    ],
)  # fmt: skip
def test_advice(changes: dict[str, Any], level: str, what: str, fix: str) -> None:
    advice = system.advise(facts(**changes))
    assert any(a.level == level and what in a.what and fix in a.fix for a in advice), advice


def test_healthy_machines_get_no_advice() -> None:
    for changes in ({}, AMD, {**AMD, "rocm_version": None}):
        assert [a.level for a in system.advise(facts(**changes))] == ["ok"]


def test_facts_of_an_amd_machine(tmp_path: Path) -> None:
    def put(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    nodes = "sys/class/kfd/kfd/topology/nodes"
    put(f"{nodes}/0/properties", "cpu_cores_count 32\ngfx_target_version 0\n")
    for node, version, size in ((1, 120001, 34), (10, 110501, 103), (2, 90402, 192)):
        put(f"{nodes}/{node}/properties", f"simd_count 64\ngfx_target_version {version}\n")
        put(f"{nodes}/{node}/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {size}\n")
    put(f"{nodes}/1/p2p_links/0/properties", "node_from 1\nnode_to 2\n")
    put("dev/kfd", "")
    put("opt/rocm/.info/version", "7.2.1-43\n")
    put("proc/meminfo", "MemTotal:       1000 kB\nMemFree: 1 kB\n")
    put("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 580.95.05  Release\n")
    found = system.gather({"XLA_FLAGS": "x", "HOME": "/h"}, tmp_path)
    assert [(g.node, g.gfx, g.memory_bytes, g.links) for g in found.gpus] == [
        (1, "gfx1201", 34, (2,)), (2, "gfx942", 192, ()), (10, "gfx1151", 103, ()),
    ]  # fmt: skip
    assert (found.amd_driver, found.amd_access) == (True, True)
    assert (found.rocm_version, found.nvidia_driver) == ("7.2.1", "580.95.05")
    assert (found.memory_bytes, found.environment) == (1_024_000, {"XLA_FLAGS": "x"})
    put("elsewhere/.info/version", "7.9\n")
    moved = system.gather({"ROCM_PATH": str(tmp_path / "elsewhere")}, tmp_path)
    assert moved.rocm_version == "7.9"
    empty = system.gather({}, tmp_path / "nothing")
    assert (empty.gpus, empty.amd_driver, empty.memory_bytes) == ((), False, 0)


def test_gfx_names() -> None:
    names = {
        110501: "gfx1151",
        120001: "gfx1201",
        90402: "gfx942",
        90500: "gfx950",
        90010: "gfx90a",
    }
    assert {n: system.gfx_name(n) for n in names} == names


def test_doctor(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    report = run("doctor", "--json").json
    assert report["works"] is True
    assert report["jax"]["devices"][0]["platform"] == "cpu"
    assert report["jax"]["product_is_right"] is True
    assert report["packages"]["jax"] == importlib.metadata.version("jax")
    assert report["environment"]["JAX_PLATFORMS"] == "cpu"
    people = run("doctor", "--no-device")
    assert people.status == 0 and "packages" in people.out


def test_doctor_survives_a_broken_jax(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    result = run("doctor")
    assert result.status == 1 and "JAX ended with status 1" in result.out
    assert "nonsense" in result.out
    assert system.probe_jax(0.01) == {"error": "JAX did not answer within 0.01 seconds"}


# -- download --------------------------------------------------------------------------------------

COMMIT = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of a model hub as fetching files needs."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    requests: list[tuple[str, str | None]]
    break_once: set[str]
    lie: set[str]

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        self.requests.append((f"{self.command} {self.path}", self.headers.get("Range")))
        name = self.path.removeprefix(f"/o/model/resolve/{COMMIT}/")
        if self.path.startswith("/api/models/o/model/revision/main"):
            data = json.dumps({"id": "o/model", "sha": COMMIT, "siblings": self.siblings()})
            self.send(data.encode(), {"Content-Type": "application/json"}, body=body)
        elif name in self.files:
            data = self.files[name]
            tag = hashlib.sha256(data).hexdigest()
            self.send(data, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, body=body, name=name)
        else:
            code = "RevisionNotFound" if "/revision/" in self.path and "o/model" in self.path else (
                "GatedRepo" if "gated" in self.path else "RepoNotFound")  # fmt: skip
            self.send_response(403 if code == "GatedRepo" else 404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def siblings(self) -> list[dict[str, Any]]:
        out = []
        for name, data in self.files.items():
            told = data + b"?" if name in self.lie else data
            entry: dict[str, Any] = {"rfilename": name, "size": len(data)}
            if name.endswith((".gguf", ".safetensors")):
                digest = hashlib.sha256(told).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 1}
            else:
                blob = b"blob %d\0" % len(data) + told
                entry["blobId"] = hashlib.sha1(blob).hexdigest()
            out.append(entry)
        return out

    def send(self, data: bytes, headers: dict[str, str], *, body: bool, name: str = "") -> None:
        start = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
        self.send_response(206 if self.headers.get("Range") else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if not body:
            return
        if name in self.break_once:
            self.break_once.discard(name)
            self.wfile.write(data[start : start + 11_000_000])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self.wfile.write(data[start:])


@pytest.fixture
def hub() -> Iterator[tuple[type[Hub], str]]:
    handler = type(
        "Handler", (Hub,), {"files": {}, "requests": [], "break_once": set(), "lie": set()}
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield handler, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


CHECKPOINT = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": b"1" * 1000,
    "model-00002-of-00002.safetensors": b"2" * 2000,
    "encoding/encoding_dsv4.py": b"REASONING_EFFORT_PROMPTS = {}",
    "README.md": b"read me",
}


def test_download_a_checkpoint(run: Any, hub: tuple[type[Hub], str], tmp_path: Path) -> None:
    handler, endpoint = hub
    handler.files = dict(CHECKPOINT)
    call = ("download", "o/model", "--endpoint", endpoint, "--dir", tmp_path / "m")
    result = run(*call)
    assert (result.status, result.out) == (0, f"{tmp_path / 'm'}\n"), result.err
    for name, data in CHECKPOINT.items():
        path = tmp_path / "m" / name
        assert (path.read_bytes() == data) if name != "README.md" else not path.exists()
    handler.requests.clear()
    again = run(*call, "--json").json
    assert again["revision"] == COMMIT and len(again["files"]) == 4
    assert len(handler.requests) == 1  # everything is here and right
    damaged = tmp_path / "m" / "model-00002-of-00002.safetensors"
    damaged.write_bytes(b"3" * 2000)
    assert run(*call, "-q").status == 0 and damaged.read_bytes() == b"2" * 2000


def test_download_goes_on_after_a_break(
    run: Any, hub: tuple[type[Hub], str], tmp_path: Path
) -> None:
    handler, endpoint = hub
    handler.files = {"m.gguf": os.urandom(12_000_000)}
    handler.break_once = {"m.gguf"}
    result = run("download", "o/model", "--endpoint", endpoint, "--dir", tmp_path, "-q")
    assert (result.status, result.out) == (0, f"{tmp_path / 'm.gguf'}\n"), result.err
    assert (tmp_path / "m.gguf").read_bytes() == handler.files["m.gguf"]
    ranges = [r for line, r in handler.requests if line.startswith("GET /o/") and r]
    assert ranges and all(r != "bytes=0-" for r in ranges)


def test_download_refuses_a_wrong_digest(
    run: Any, hub: tuple[type[Hub], str], tmp_path: Path
) -> None:
    for name in ("m.gguf", "config.json"):
        handler, endpoint = hub
        handler.files = {"m.gguf": b"123", "config.json": b"{}"}
        handler.lie = {name}
        result = run(
            "download", "o/model", "--endpoint", endpoint, "--dir", tmp_path, "--include", "*"
        )
        assert result.status == 1 and f"{name}: its digest is not" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["o/other"], "o/other at {}: no such repository (a private one needs HF_TOKEN)"),
        (["o/gated"], "access must be granted first"),
        (["o/model", "--revision", "v9"], "no revision 'v9'; check --revision"),
        (["o/model"], "o/model holds 2 GGUF models: choose with --include: a.gguf, b.gguf"),
        (["o/model", "--include", "*Q8*"], "--include *Q8*: matches none of the 4 files"),
        (["o/model", "--endpoint", "http://127.0.0.1:9"], "check the network, then run"),
        (["o/model", "--include", "a*", "--dir", "/dev/null/x"], "/dev/null"),
    ],
)
def test_download_failures(
    run: Any, hub: tuple[type[Hub], str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    handler, endpoint = hub
    shards = {f"b-0000{i}-of-00002.gguf": b"b" for i in (1, 2)}
    handler.files = {"a.gguf": b"a", **shards, "README.md": b""}
    result = run("download", "--endpoint", endpoint, "--dir", tmp_path, *arguments)
    assert result.status == 1 and message.format(endpoint) in result.err.splitlines()[-1]


def test_download_takes_every_shard(run: Any, hub: tuple[type[Hub], str], tmp_path: Path) -> None:
    handler, endpoint = hub
    handler.files = {f"q/b-0000{i}-of-00002.gguf": b"b" for i in (2, 1)} | {"x.json": b""}
    result = run("download", "o/model", "--endpoint", endpoint, "--dir", tmp_path)
    assert result.out == f"{tmp_path / 'q' / 'b-00001-of-00002.gguf'}\n"
    assert len(list(tmp_path.rglob("*.gguf"))) == 2 and not (tmp_path / "x.json").exists()


def test_download_without_the_extra(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    result = run("download", "o/model")
    assert result.status == 1 and "pip install 'ds4jax[download]'" in result.err


def test_download_checks_the_space(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = functools.partial(argparse.Namespace, total=0, used=0)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage(free=10))
    with pytest.raises(common.Failure, match=r"needs 11 B, 10 B are free"):
        download._check_space(tmp_path / "a" / "b", 11)
    download._check_space(tmp_path / "a", 10)
