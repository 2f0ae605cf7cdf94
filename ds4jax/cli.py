"""The command line: `ds4jax COMMAND` or `python -m ds4jax.cli COMMAND`.

Declares the commands of `ds4jax.commands`, fills flags that were not given from their environment
twins (`--ctx` from `DS4JAX_CTX`), runs one command and turns what it raises into one line and an
exit status: 0 done, 1 failed, 2 called wrongly, 130 interrupted. JAX is not imported here.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import ds4jax
from ds4jax import commands
from ds4jax.commands.common import Failure, UsageError
from ds4jax.errors import ModelFileError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class _Formatter(argparse.HelpFormatter):
    """Help with defaults and environment twins."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        twin = _twin(action)
        if twin is None or text is argparse.SUPPRESS:
            return action.help
        if action.default is not None and action.nargs != 0 and action.default != []:
            text += " (default: %(default)s)"
        return f"{text} [{twin}]"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and whose flags have environment twins."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Formatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def use_environment(self, environ: Mapping[str, str], arguments: Sequence[str]) -> None:
        """Take the defaults of flags from their twins in `environ`.

        A flag among `arguments` rules out the twins of those that exclude it.
        """
        excluded = {
            id(action)
            for group in self._mutually_exclusive_groups
            if any(_is_given(action, arguments) for action in group._group_actions)
            for action in group._group_actions
        }
        taken = set()
        for action in self._actions:
            twin = _twin(action)
            text = environ.get(twin, "") if twin else ""
            if not text or id(action) in excluded or _is_given(action, arguments):
                continue
            try:
                value = _from_text(action, text)
            except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
                flag = action.option_strings[-1]
                self.error(f"{twin}={text!r}, the twin of {flag}: {error}")
            if value is not None:
                self.set_defaults(**{action.dest: value})
                action.required = False
                taken.add(action.dest)
        self.set_defaults(from_environment=frozenset(taken))

    def given(self, arguments: Sequence[str]) -> frozenset[str]:
        """Destinations of the flags that stand among the arguments."""
        return frozenset(a.dest for a in self._actions if _is_given(a, arguments))


def _is_given(action: argparse.Action, arguments: Sequence[str]) -> bool:
    """Whether a flag stands among the arguments, in any of its forms."""
    return any(
        item == option or item.startswith(option + "=" if option[:2] == "--" else option)
        for option in action.option_strings
        for item in arguments
    )


def _twin(action: argparse.Action) -> str | None:
    """Name of the environment variable that stands for a flag."""
    if action.dest in ("help", "version"):
        return None
    for option in action.option_strings:
        if option.startswith("--"):
            return "DS4JAX_" + option[2:].replace("-", "_").upper()
    return None


def _from_text(action: argparse.Action, text: str) -> Any:
    """Value of a flag from its environment twin; None leaves the default."""
    if isinstance(action, argparse._CountAction):
        return int(text)
    if action.nargs == 0:
        lowered = text.strip().lower()
        if lowered not in (*_TRUE, *_FALSE):
            raise ValueError(f"must be one of {', '.join((*_TRUE, *_FALSE))}")
        return action.const if lowered in _TRUE else None
    convert = action.type if callable(action.type) else str
    many = action.nargs is not None or isinstance(action, argparse._AppendAction)
    values = [convert(part) for part in (text.split(",") if action.nargs is not None else [text])]
    for value in values:
        if action.choices is not None and value not in action.choices:
            raise ValueError(f"must be one of {', '.join(map(str, action.choices))}")
    return values if many else values[0]


def build_parser() -> argparse.ArgumentParser:
    """The whole command line as a parser."""
    return _build()[0]


def _build() -> tuple[_Parser, Mapping[str, _Parser]]:
    parser = _Parser(
        prog="ds4jax",
        description="DeepSeek-V4-Flash inference in JAX. Every flag has a twin in the environment:"
        " --some-flag is DS4JAX_SOME_FLAG.",
    )
    parser.add_argument("--version", action="version", version=f"ds4jax {ds4jax.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name in commands.COMMANDS:
        importlib.import_module(f"ds4jax.commands.{name}").add(subparsers)
    return parser, subparsers.choices


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None: those of the process.

    Returns: the exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    parser, by_name = _build()
    try:
        if arguments and arguments[0] in by_name:
            by_name[arguments[0]].use_environment(os.environ, arguments[1:])
        args, unknown = parser.parse_known_args(arguments)
        chosen = by_name.get(args.command, parser)
        if unknown:
            chosen.error(f"unrecognized arguments: {' '.join(unknown)}")
        args.given = chosen.given(arguments[1:])
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else USAGE
    if args.command is None:
        parser.print_help(sys.stderr)
        return USAGE
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    prog = f"ds4jax {args.command}"
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return FAILED
    except UsageError as error:
        return _report(prog, f"{error} (see {prog} --help)", USAGE)
    except Exception as error:
        if getattr(args, "verbose", 0):
            traceback.print_exc()
        return _report(prog, _describe(error), FAILED)


def _describe(error: Exception) -> str:
    """What to print for a failure; errors of this package say it themselves."""
    if isinstance(error, ModelFileError) and len(error.problems) == 1:
        return str(error.problems[0])
    own = type(error).__module__.partition(".")[0] in ("ds4jax", "ds4jax_server")
    if own or isinstance(error, Failure):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return (
        f"internal error: {type(error).__name__}: {error}; run it again with -v for a traceback"
        " and report it"
    )


def _report(prog: str, message: str, status: int) -> int:
    print(f"{prog}: error: {message}", file=sys.stderr)
    return status


def _prepare_streams() -> None:
    """Text is UTF-8 whatever the locale; a lone surrogate is written as its escape.

    A stream that the caller closed is empty, or leads nowhere: without one in its place results end
    in an error, and notes come out among the results.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _discard_stdout() -> None:
    """The reader of a pipe is gone: keep the interpreter from failing at its final flush."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass


if __name__ == "__main__":
    sys.exit(main())
