"""Ctrl-C in a conversation has its effect whenever it is pressed, and the conversation goes on."""

from __future__ import annotations

import argparse
import builtins
import contextlib
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
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from ds4jax import parser
from ds4jax.commands import chat, common, interrupts
from ds4jax.request import ServiceError

REPO = Path(__file__).parents[1]


class Answer:
    """Three words that come at once."""

    def __init__(self) -> None:
        self.cancelled = False
        self.said: list[str] = []

    def cancel(self) -> None:
        self.cancelled = True

    def __iter__(self) -> Iterator[Any]:
        for word in ("some", "short", "words"):
            if self.cancelled:
                raise ServiceError("CANCELLED", "INTERRUPTED", "interrupted")
            self.said.append(word)
            yield SimpleNamespace(events=(parser.Content(word),))

    def partial(self) -> Any:
        return SimpleNamespace(ids=self.said)


class Session:
    """A conversation with nobody."""

    most = ctx = 100
    used = 0

    def __init__(self) -> None:
        self.kept: list[list[str]] = []

    def ask(self, text: str) -> Answer:
        return Answer()

    def keep(self, answer: Answer) -> None:
        self.kept.append(answer.said)

    def start(self, ctx: int) -> None:
        self.ctx = ctx

    def summary(self, answer: Answer, prompt: int) -> str:
        return "done"


class Talk:
    """One conversation whose lines are `lines`, with a press at the n-th line of code that runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lines: list[str], press_at: int) -> None:
        self.press_at = press_at
        self.steps = 0
        self.left = list(lines)
        self.left_when_pressed: int | None = None
        self.where = ""
        self.handled = False  # by the conversation's own handler
        self.session = Session()
        monkeypatch.setattr(builtins, "input", self.input)
        monkeypatch.setattr(common, "stdin_is_terminal", lambda: True)

    def input(self, prompt: str) -> str:
        if not self.left:
            raise EOFError
        return self.left.pop(0)

    def run(self) -> int | None:
        """Exit status, or None if KeyboardInterrupt came out."""
        shell = chat._Shell(argparse.Namespace(quiet=False), self.session)  # type: ignore[arg-type]
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return shell.loop()
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in (chat.__file__, interrupts.__file__):
            return None
        if event == "line":
            self.steps += 1
            if self.steps == self.press_at:
                self.left_when_pressed = len(self.left)
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                self.handled = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
                signal.raise_signal(signal.SIGINT)
        return self._trace


@pytest.fixture
def plain_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_press_at_every_line_of_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plain_handler: None
) -> None:
    lines = ["hello", "", "again", "/help", "/quit"]
    talk = Talk(monkeypatch, lines, press_at=0)
    assert talk.run() == 0 and len(talk.session.kept) == 2
    total = talk.steps
    assert total > 100
    seen = {"hint": 0, "interrupted": 0}
    for at in range(1, total + 1):
        capsys.readouterr()
        talk = Talk(monkeypatch, lines, press_at=at)
        status = talk.run()
        err = capsys.readouterr().err
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, talk.where
        if not talk.handled:  # before the handler is there, or after it is gone
            assert status is None, talk.where
            continue
        assert status == 0, talk.where
        effects = {"hint": "Ctrl-D leaves" in err, "interrupted": "[interrupted]" in err}
        assert any(effects.values()) or talk.left_when_pressed == 0, (talk.where, err)
        assert len(talk.session.kept) >= 1, (talk.where, "one line may be given up, not more")
        seen = {k: n + effects[k] for k, n in seen.items()}
    assert seen["hint"] > 20 and seen["interrupted"] > 20


def test_work_that_is_interrupted_ends_the_conversation(
    monkeypatch: pytest.MonkeyPatch, plain_handler: None
) -> None:
    talk = Talk(monkeypatch, ["/ctx 50", "never"], press_at=0)
    monkeypatch.setattr(Session, "start", lambda self, ctx: signal.raise_signal(signal.SIGINT))
    assert talk.run() is None and talk.left == ["never"]


def test_the_third_press_during_one_answer_leaves(
    monkeypatch: pytest.MonkeyPatch, plain_handler: None
) -> None:
    class Stubborn(Answer):
        def __iter__(self) -> Iterator[Any]:
            for n in range(1, 4):
                signal.raise_signal(signal.SIGINT)
                yield SimpleNamespace(events=(parser.Content(str(n)),))

    monkeypatch.setattr(Session, "ask", lambda self, text: Stubborn())
    assert Talk(monkeypatch, ["hello"], press_at=0).run() is None


def test_a_file_that_does_not_come_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plain_handler: None
) -> None:
    def wait(*_: Any, **__: Any) -> str:
        signal.raise_signal(signal.SIGINT)
        return "too late"

    monkeypatch.setattr(common, "read_text", wait)
    talk = Talk(monkeypatch, ["/read pipe", "hello"], press_at=0)
    assert talk.run() == 0 and len(talk.session.kept) == 1
    assert "error: /read pipe: interrupted" in capsys.readouterr().err


def test_a_timer_of_somebody_else_goes_on(plain_handler: None) -> None:
    rang: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rang.append(number))
    timer = signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with interrupts.Interrupts() as keyboard:
            assert keyboard.read(lambda: "line") == "line"
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
        end = time.monotonic() + 30
        while not rang and time.monotonic() < end:
            time.sleep(0.05)
        assert rang == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


# The press comes when the prompt stands there and reading has not begun: no Python code runs in
# between that could notice it.
_PRESSED_AT_THE_PROMPT = """
import argparse, ctypes, functools, readline, sys
from ds4jax.commands import chat
if "libedit" not in (readline.__doc__ or ""):
    readline.set_pre_input_hook(functools.partial(ctypes.CDLL(None)["raise"], 2))
    print("by itself")
chat._Shell(argparse.Namespace(quiet=True), None).loop()
"""


def test_a_press_just_before_reading_begins() -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _PRESSED_AT_THE_PROMPT], stdin=slave, stdout=slave, stderr=slave,
        cwd=REPO, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    seen, end = "", time.monotonic() + 90
    try:
        while len(re.findall("or Ctrl-D leaves", seen)) < 3:
            ready, _, _ = select.select([master], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the press has no effect: {seen!r}"
            seen += os.read(master, 65536).decode()
            if "by itself" not in seen and seen.endswith("> "):
                process.send_signal(signal.SIGINT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        os.close(master)
