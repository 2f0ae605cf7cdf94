"""Progress on stderr: a bar at a time on a terminal, else a plain line of news every 5 seconds."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

from ds4jax.commands import common

PLAIN_SECONDS = 5.0


class Progress:
    """What a command is doing, as long as the block lasts.

    Args:
        shown: False keeps everything silent.
    """

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._bar: Any = None  # rich.progress.Progress
        self._task: Any = None
        self._stage = ""
        self._text = ""
        self._printed = ""
        self._began = 0.0
        self._stop = threading.Event()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._shown and not common.is_terminal(sys.stderr):
            self._ticker = threading.Thread(target=self._tick, daemon=True)
            self._ticker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._ticker is not None:
            self._ticker.join()
        self._end_bar()

    # ---- reports -------------------------------------------------------------------------------

    def load(self, done: int, total: int, name: str) -> None:
        """Bytes of weights that are on the device, and the tensor that is next."""
        self._bytes("load", done, total, name)

    def write(self, done: int, total: int, name: str) -> None:
        """Bytes of a source that are converted, and the tensor being written."""
        self._bytes("convert", done, total, name)

    def compile(self, done: int, count: int, name: str = "") -> None:
        """Programs compiled so far."""
        self._begin("compile")
        more = f"program {done + 1} of {count}" if done else "the first program"
        self._text = f"compile: {more}" if done < count else ""
        self._update(done, count, name, f"{done} of {count}" if done else "")

    def tokens(self, what: str, done: int, total: int) -> None:
        """Tokens gone through, of a known number."""
        self._begin(what)
        rate = done / max(1e-9, time.monotonic() - self._began)
        self._text = f"{what}: {done} of {total} tokens, {rate:.1f} tokens/s"
        self._update(done, total, f"{rate:.1f} tokens/s", f"{done} of {total}")

    def _bytes(self, stage: str, done: int, total: int, name: str) -> None:
        self._begin(stage)
        rate = common.size_text(int(done / max(1e-9, time.monotonic() - self._began)))
        sizes = f"{common.size_text(done)} of {common.size_text(total)}"
        self._text = f"{stage}: {sizes}, {rate}/s, {name or 'done'}"
        self._update(done, total, f"{rate}/s {name}", sizes)

    # ---- drawing -------------------------------------------------------------------------------

    def _begin(self, stage: str) -> None:
        if stage != self._stage:
            self._stage, self._began = stage, time.monotonic()
            self._end_bar()

    def _update(self, done: int, total: int, detail: str, amount: str) -> None:
        if not self._shown or self._ticker is not None:
            return
        if self._bar is None:
            self._start_bar(total)
        self._bar.update(self._task, completed=done, total=total, detail=detail, amount=amount)

    def _start_bar(self, total: int) -> None:
        from rich import progress as rich_progress
        from rich.console import Console

        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(bar_width=24),
            rich_progress.TextColumn("{task.fields[amount]}"),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TextColumn("[dim]{task.fields[detail]}", markup=True),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self._stage, total=total, detail="", amount="")
        self._bar.start()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _tick(self) -> None:
        while not self._stop.wait(PLAIN_SECONDS):
            text = self._text
            if text and text != self._printed:  # a line again would tell nothing
                print(text, file=sys.stderr, flush=True)
                self._printed = text
