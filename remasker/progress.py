"""What a fit shows while it lasts: a bar for every model, then one for the experts."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from remasker.training import EpochReport


class FitProgress:
    """Bars on the standard error of a terminal, or nothing at all.

    >>> with FitProgress(shown=False, n_models=1) as progress:
    ...     progress.count("fitting experts, round 1 of 3", 1, 4)
    """

    def __init__(self, shown: bool, n_models: int) -> None:
        self.n_models = n_models
        self._tasks: dict[object, Any] = {}
        self._bars: Any = None
        if shown:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[unit]} {task.completed}/{task.total}"),
                TimeRemainingColumn(),
                console=Console(file=sys.stderr),
            )

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def epoch(self, model: int, report: EpochReport) -> None:
        """One model is so far."""
        error = "" if report.error is None else f", held-out error {report.error:.3f}"
        self._show(model, self._fitting(model) + error, "epoch", report.epoch, report.n_epochs)

    @contextlib.contextmanager
    def beats(self, n_epochs: int) -> Iterator[Sequence[Path | None]]:
        """A file per model that another process adds a byte to with every epoch, watched."""
        if self._bars is None:
            yield [None] * self.n_models
            return
        ended = threading.Event()
        # After Ctrl-C a process may still begin a file while the folder is being removed.
        with tempfile.TemporaryDirectory(prefix="remasker-", ignore_cleanup_errors=True) as folder:
            files = [Path(folder) / str(k) for k in range(self.n_models)]

            def watch() -> None:
                over = False
                while not over:
                    over = ended.wait(0.3)
                    for k, file in enumerate(files):
                        done = file.stat().st_size if file.exists() else 0
                        self._show(k, self._fitting(k), "epoch", done, n_epochs)

            watcher = threading.Thread(target=watch, daemon=True)
            watcher.start()
            try:
                yield files
            finally:
                ended.set()
                watcher.join()

    def count(self, what: str, done: int, total: int) -> None:
        """So many of some parts are done."""
        self._show(what, what, "done", done, total)

    def _fitting(self, model: int) -> str:
        return f"fitting model {model + 1} of {self.n_models}" if self.n_models > 1 else "fitting"

    def _show(self, key: object, said: str, unit: str, done: int, total: int) -> None:
        if self._bars is None:
            return
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(said, total=total, unit=unit)
        self._bars.update(self._tasks[key], completed=done, description=said)
