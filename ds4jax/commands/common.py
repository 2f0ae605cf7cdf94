"""What commands share: flags that several have, reading input, printing results, failing.

Results go to stdout, everything else to stderr. Nothing here imports more than the standard library
at module level.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

if TYPE_CHECKING:
    from ds4jax.tokenizer import Tokenizer

DEFAULT_MODEL = "nano"
_MAX_INPUT_BYTES = 1 << 30


class Failure(Exception):
    """The command could not do its work; printed as one line, exit status 1."""


class UsageError(Exception):
    """The command was called wrongly; printed as one line, exit status 2."""


# -- flags -----------------------------------------------------------------------------------------


def integer(low: int, high: int, unit: str = "") -> Callable[[str], int]:
    """A flag type: an integer in low..high."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            rule = f"must be an integer in {low}..{high}{' ' + unit if unit else ''}"
            raise argparse.ArgumentTypeError(f"is {text!r}, {rule}")
        return value

    return parse


def number(low: float, high: float, *, open_low: bool = False) -> Callable[[str], float]:
    """A flag type: a number in [low, high], or (low, high] if `open_low`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (low < value if open_low else low <= value) or not value <= high:
            bracket = "(" if open_low else "["
            raise argparse.ArgumentTypeError(
                f"is {text!r}, must be a number in {bracket}{low:g}, {high:g}]"
            )
        return value

    return parse


def text_of(low: int, high: int) -> Callable[[str], str]:
    """A flag type: a text of low..high characters."""

    def parse(text: str) -> str:
        if not low <= len(text) <= high:
            found = f"has {len(text)} characters" if text else "is empty"
            raise argparse.ArgumentTypeError(f"{found}, must have {low} to {high} characters")
        return text

    return parse


_SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")


def address(text: str) -> str:
    """A flag type: where a server listens."""
    host, colon, port = text.rpartition(":")
    if text.startswith(_SCHEMES):
        good = bool(text.partition(":")[2].strip("/"))
    else:
        good = bool(host and colon) and port.isdecimal() and 0 < int(port) < 1 << 16
    if not good or any(c.isspace() for c in text):
        raise argparse.ArgumentTypeError(f"is {text!r}, must be HOST:PORT or unix:PATH")
    return text


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model, as first positional argument or `-m`; `model_of` reads it."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"GGUF file, checkpoint directory, or {DEFAULT_MODEL} (the default)",
    )
    parser.add_argument("-m", "--model", dest="model_flag", metavar="MODEL", help="the same")


def model_of(args: argparse.Namespace) -> str:
    """The model that was asked for.

    Raises:
        UsageError: two different ones.
    """
    flag = args.model_flag
    if args.model is None:
        return flag or DEFAULT_MODEL
    if flag and flag != args.model and "model_flag" not in args.from_environment:
        raise UsageError(f"MODEL is {args.model!r} and --model is {flag!r}: give one of them")
    return str(args.model)


def existing_model_of(args: argparse.Namespace) -> str:
    """As `model_of`; one that is not there is refused in words of the command line.

    Raises:
        Failure: there is no such file or directory.
    """
    name = model_of(args)
    check_exists(name, "; a text goes after -p" if "prompt" in args else "")
    return name


def check_exists(model: str, hint: str = "") -> None:
    """Refuse a model that is not there.

    Raises:
        Failure: naming it.
    """
    if model == DEFAULT_MODEL:
        return
    try:
        os.stat(model)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte
        raise Failure(
            f"MODEL {model!r}: no such file or directory: give a GGUF file, a checkpoint"
            f" directory, or {DEFAULT_MODEL} (the default){hint}"
        ) from None
    except OSError:  # whoever reads it says what is wrong
        pass


def add_output(parser: argparse.ArgumentParser, *, json: bool = True) -> None:
    """--json (if there is such a form), -q, -v."""
    group = parser.add_argument_group("output")
    if json:
        group.add_argument("--json", action="store_true", help="one JSON value on stdout")
    group.add_argument("-q", "--quiet", action="store_true", help="no notes on stderr")
    group.add_argument(
        "-v", "--verbose", action="count", default=0, help="more on stderr; tracebacks of failures"
    )


def add_chat_profile(parser: argparse.ArgumentParser, profiles: tuple[str, ...]) -> None:
    """--chat-profile, the prompt format."""
    parser.add_argument(
        "--chat-profile",
        choices=("auto", *profiles),
        default="auto",
        help="prompt format of the checkpoint; auto: told from its files",
    )


def add_rocmfp2(parser: argparse.ArgumentParser) -> None:
    """--rocmfp2, the reading of GGUF type 107."""
    parser.add_argument(
        "--rocmfp2",
        choices=("auto", "s40", "fixed", "signed", "affine"),
        default="auto",
        help="reading of the ROCmFP2 format (GGUF type 107); auto: as the file says, else told from"
        " the data",
    )


def add_capacity(parser: argparse.ArgumentParser) -> None:
    """--ctx and --lanes: what state is allocated for."""
    parser.add_argument(
        "-c", "--ctx", type=integer(1, 1 << 22, "tokens"), default=4096, metavar="TOKENS",
        help="longest sequence, prompt and output together",
    )  # fmt: skip
    parser.add_argument(
        "--lanes", type=integer(1, 1024), default=1, metavar="N",
        help="sequences computed at the same time",
    )  # fmt: skip


def add_context(parser: argparse.ArgumentParser, default: str) -> None:
    """--ctx of a command that runs one sequence at a time; `default` is told in the help."""
    parser.add_argument(
        "-c", "--ctx", type=integer(1, 1 << 22, "tokens"), metavar="TOKENS",
        help=f"longest sequence, prompt and output together; {default}",
    )  # fmt: skip


def add_runtime(parser: argparse.ArgumentParser) -> None:
    """Flags of every command that computes with a model."""
    group = parser.add_argument_group("device and numerics")
    group.add_argument("--device", choices=("auto", "rocm", "cpu", "cuda"), default="auto",
                       help="kind of device; auto: a GPU if there is one")  # fmt: skip
    group.add_argument("--dtype", choices=("float32", "bfloat16"),
                       help="compute type; float32 on a CPU, else bfloat16")  # fmt: skip
    group.add_argument("--numerics", choices=("plain", "kv-fp8", "official"), default="plain",
                       help="rounding of cached activations")  # fmt: skip
    add_chat_profile(parser, ("v4-0731", "v4-preview"))
    add_rocmfp2(parser)
    group.add_argument("--cpu-weights", choices=("auto", "packed", "decoded"), default="auto",
                       help="weights on a CPU: as stored, or decoded once (more memory, faster);"
                       " auto: decoded if that takes at most half of the free memory")  # fmt: skip
    cache = group.add_mutually_exclusive_group()
    cache.add_argument("--compile-cache", type=Path, metavar="DIR",
                       help="compiled programs for the next start; ~/.cache/ds4jax")  # fmt: skip
    cache.add_argument("--no-compile-cache", action="store_true",
                       help="compile everything at every start")  # fmt: skip
    group.add_argument("--no-progress", action="store_true", help="no progress on stderr")


def add_server(parser: argparse.ArgumentParser) -> None:
    """--server and what goes with it: the model runs elsewhere."""
    group = parser.add_argument_group("server")
    group.add_argument("--server", metavar="ADDR", type=address,
                       help="ask this server (HOST:PORT or unix:PATH) instead of loading"
                       " a model")  # fmt: skip
    group.add_argument("--server-token-file", metavar="FILE", help="bearer token for it")
    group.add_argument("--server-ca", metavar="FILE",
                       help="its certificate authority, PEM: use TLS")  # fmt: skip


def server_token(args: argparse.Namespace) -> str | None:
    """The bearer token of `--server-token-file`, if it was given."""
    if args.server_token_file is None:
        return None
    return read_text(args.server_token_file, "--server-token-file").strip()


def silence_grpc(args: argparse.Namespace) -> None:
    """Before gRPC is imported: what it logs of a failed call is told by the call's own error."""
    if not args.verbose:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")


_LOCAL = {
    "model_flag": "--model", "ctx": "--ctx", "device": "--device", "dtype": "--dtype",
    "numerics": "--numerics", "chat_profile": "--chat-profile", "rocmfp2": "--rocmfp2",
    "cpu_weights": "--cpu-weights", "compile_cache": "--compile-cache",
    "no_compile_cache": "--no-compile-cache",
}  # fmt: skip
"""Flags about a model in this process; a server has its own."""


def check_server_flags(args: argparse.Namespace) -> None:
    """Refuse flags that would have no effect, with --server or without it.

    Twins in the environment are for whichever command they fit, and are not refused.

    Raises:
        UsageError: naming them.
    """
    if args.server is None:
        for dest in ("server_token_file", "server_ca"):
            if dest in args.given:
                flag = "--" + dest.replace("_", "-")
                raise UsageError(f"{flag} goes with --server: no server is asked")
        return
    flags = [flag for dest, flag in _LOCAL.items() if dest in args.given]
    flags += ["MODEL"] if args.model is not None else []
    if flags:
        server = "DS4JAX_SERVER" if "server" in args.from_environment else "--server"
        raise UsageError(
            f"{', '.join(flags)} and {server} exclude each other: model, context and device are"
            " the server's"
        )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Flags of commands that generate; what is not given is left to the service's defaults."""
    group = parser.add_argument_group("sampling and stopping")
    group.add_argument("-n", "--tokens", type=integer(0, (1 << 31) - 1, "tokens"), metavar="N",
                       help="longest output; what fits")  # fmt: skip
    group.add_argument("--temp", type=number(0, 2), metavar="T", help="temperature; 1, 0 is greedy")
    group.add_argument("--top-p", type=number(0, 1, open_low=True), metavar="P",
                       help="mass of the nucleus; 1")  # fmt: skip
    group.add_argument("--top-k", type=integer(0, (1 << 31) - 1), metavar="K",
                       help="tokens to choose from; 0 is all")  # fmt: skip
    group.add_argument("--min-p", type=number(0, 1), metavar="P",
                       help="least probability, relative to the largest; 0")  # fmt: skip
    group.add_argument("--repetition-penalty", type=number(0, 1e6, open_low=True), metavar="R",
                       help="for tokens of prompt and output; 1 is none")  # fmt: skip
    group.add_argument("--frequency-penalty", type=number(-2, 2), metavar="F",
                       help="per occurrence in the output; 0")  # fmt: skip
    group.add_argument("--presence-penalty", type=number(-2, 2), metavar="F",
                       help="for tokens of the output; 0")  # fmt: skip
    group.add_argument("--penalty-window", type=integer(1, (1 << 31) - 1), metavar="N",
                       help="tokens that the penalties look back; all")  # fmt: skip
    group.add_argument("--logit-bias", action="append", type=_bias, metavar="ID=BIAS",
                       help="added to a token's logit, -100 bans it; may be repeated")  # fmt: skip
    group.add_argument("--seed", type=integer(0, (1 << 64) - 1), metavar="S",
                       help="of the random draws, 0 included; random")  # fmt: skip
    group.add_argument("--stop", action="append", type=text_of(1, 256), metavar="TEXT",
                       help="end the answer before this text; may be repeated")  # fmt: skip
    group.add_argument("--stop-id", action="append", type=integer(0, (1 << 31) - 1), metavar="ID",
                       help="end the answer at this token; may be repeated")  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true",
                       help="go on after the end of the turn")  # fmt: skip
    group.add_argument("--min-tokens", type=integer(0, (1 << 31) - 1), default=0, metavar="N",
                       help="shortest output: nothing that ends it is drawn before")  # fmt: skip
    group.add_argument("--max-reasoning", type=integer(0, (1 << 31) - 1), metavar="N",
                       help="longest reasoning, then it is closed; no limit")  # fmt: skip
    group.add_argument("--time-limit", type=number(0, 1e9, open_low=True), metavar="SECONDS",
                       help="end the answer after this time; no limit")  # fmt: skip
    think = group.add_mutually_exclusive_group()
    think.add_argument("--think", dest="effort", action="store_const", const="high",
                       help="think before answering (the default)")  # fmt: skip
    think.add_argument("--think-max", dest="effort", action="store_const", const="max",
                       help="think with the highest effort")  # fmt: skip
    think.add_argument("--nothink", dest="effort", action="store_const", const="none",
                       help="answer at once")  # fmt: skip


def _bias(text: str) -> tuple[int, float]:
    """A flag type: ID=BIAS."""
    token, equals, bias = text.partition("=")
    if not equals or not token.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"is {text!r}, must be ID=BIAS, like 1312=-100")
    return int(token), number(-100, 100)(bias)


# -- input -----------------------------------------------------------------------------------------


def read_bytes(name: str, flag: str) -> bytes:
    """Contents of a file, or of stdin if `name` is `-`.

    Raises:
        Failure: naming `flag`.
    """
    if name == "-":
        return sys.stdin.buffer.read()
    path = Path(name)
    try:
        if path.is_dir():
            raise Failure(f"{flag} {name}: is a directory, must be a file")
        if path.stat().st_size > _MAX_INPUT_BYTES:
            raise Failure(f"{flag} {name}: larger than {_MAX_INPUT_BYTES} bytes; is this the file?")
        return path.read_bytes()
    except OSError as error:
        raise Failure(f"{flag} {name}: {error.strerror or error}; check the path") from None
    except ValueError as error:  # a zero byte in the name
        raise Failure(f"{flag} {name!r}: {error}") from None


def read_text(name: str, flag: str, *, bom: bool = True) -> str:
    """As `read_bytes`, as text; `bom` False drops a byte order mark.

    Raises:
        Failure: also for bytes that are not UTF-8, with the place.
    """
    data = read_bytes(name, flag)
    place = flag if flag == "stdin" else f"{flag} {name}"
    try:
        return data.decode("utf-8" if bom else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise Failure(
            f"{place}: not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start};"
            " convert it to UTF-8"
        ) from None


def read_json(name: str, flag: str) -> Any:
    """As `read_text`, parsed strictly.

    Raises:
        Failure: also for what is not JSON.
    """
    from ds4jax.chat_request import strict_json

    try:
        return strict_json(read_text(name, flag, bom=False))
    except ValueError as error:
        raise Failure(f"{flag} {name}: not JSON: {error}") from None


def token_ids(value: Any, where: str) -> list[int]:
    """`value` if it is a list of integers.

    Raises:
        Failure: with the first entry that is none.
    """
    if not isinstance(value, list):
        raise Failure(f"{where}: must be a JSON list of token ids, like [19923, 3]")
    for i, item in enumerate(value):
        if type(item) is not int:
            raise Failure(f"{where}: entry {i} is {item!r}, must be an integer token id")
    return value


class TextModel(NamedTuple):
    """The parts of a model that need no weights."""

    tokenizer: Tokenizer
    metadata: dict[str, Any] | None  # of a GGUF file
    checkpoint: Path | None  # directory


def open_text_model(model: str) -> TextModel:
    """Tokenizer and hints of a model; its weights need not be there.

    `model` may also be a tokenizer.json itself.

    Raises:
        ModelFileError, TokenizerError: what is wrong with the file.
    """
    from ds4jax.tokenizer import Tokenizer

    path = Path(model)
    if path.is_dir():
        return TextModel(Tokenizer.from_path(path), None, path)
    if path.suffix == ".json":
        return TextModel(Tokenizer.from_path(path), None, None)
    from ds4jax import gguf, model_file

    if model == model_file.NANO and not path.exists():
        opened = model_file.open_model(model, keep_problems=True)
        path, metadata = opened.path, opened.metadata
    else:
        metadata = gguf.open_gguf(path, []).metadata
    tokenizer = Tokenizer.from_gguf(metadata, source=str(path))
    return TextModel(tokenizer, metadata, None)


# -- output ----------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """One line of JSON on stdout."""
    from ds4jax.chat_request import dump_json

    print(dump_json(value))


def note(args: argparse.Namespace, text: str) -> None:
    """A line on stderr, unless -q."""
    if not args.quiet:
        print(text, file=sys.stderr)


def size_text(count: int) -> str:
    """Bytes for people: powers of 1000, three digits."""
    return f"{count} B" if count < 1000 else _scaled(count, (" kB", " MB", " GB", " TB"))


def count_text(count: int) -> str:
    """A number for people, three digits."""
    return str(count) if count < 1000 else _scaled(count, ("k", "M", "B", "T"))


def _scaled(count: int, units: tuple[str, ...]) -> str:
    steps = next((i for i in range(1, len(units)) if count < 999.5 * 1000**i), len(units))
    return f"{count / 1000**steps:.3g}{units[steps - 1]}"


def is_terminal(stream: TextIO) -> bool:
    """Whether a person reads (or types) at the other end."""
    try:
        return os.isatty(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False


def stdin_is_terminal() -> bool:
    """Whether a person would have to type the input."""
    return is_terminal(sys.stdin)
