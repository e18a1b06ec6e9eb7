"""What is shown while a search runs: one line of counts, one of errors, on a terminal only."""

from __future__ import annotations

import math
import sys
from typing import Any

from tuning.affordable import Budget
from tuning.config import SearchConfig


class View:
    """Counts what happens; draws it if somebody is looking.

    >>> with View(SearchConfig(progress=False), "credit", Budget(math.inf), 1.0) as view:
    ...     view.tell("start", {"number": 0})
    ...     view.tell("end", {"number": 0, "state": "complete", "error": 0.5})
    >>> view.summary()
    'credit: 1 of 40 trials done, 0 running, 0 stopped early, 0 failed'
    >>> view.standing()
    'best error 0.5000, column mean 1.0000 · no time limit'
    """

    def __init__(self, config: SearchConfig, name: str, budget: Budget, mean_error: float) -> None:
        self.config, self.name, self.budget, self.mean_error = config, name, budget, mean_error
        self.running: dict[int, str] = {}
        self.counts = {"complete": 0, "pruned": 0, "failed": 0}
        self.best = math.inf
        self.stage = ""
        self.shown = sys.stderr.isatty() if config.progress is None else config.progress
        self._live: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # Ray pickles the callbacks of a search; a terminal cannot be, and nobody unpickles them.
        return {**vars(self), "_live": None}

    def __enter__(self) -> View:
        if self.shown and not self.config.verbose:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                get_renderable=self._draw,
                console=Console(file=sys.stderr),
                refresh_per_second=2,
                transient=False,
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, event: str, what: dict[str, Any]) -> None:
        """Take in an event of the search: start, report, recover, end or stage."""
        number = int(what.get("number", -1))
        if event in ("start", "recover"):
            self.running[number] = "0 %"
        elif event == "report" and number in self.running:
            self.running[number] = f"{100 * what.get('eighths', 0) / 8:.0f} %"
            if what.get("eighths") == 8 and what["error"] == what["error"]:
                self.best = min(self.best, what["error"])
        elif event == "end":
            self.running.pop(number, None)
            self.counts[what["state"]] = self.counts.get(what["state"], 0) + 1
            if what["state"] == "complete" and what["error"] is not None:
                self.best = min(self.best, what["error"])
        elif event == "stage":
            self.stage = what["text"]

    def summary(self) -> str:
        """How many trials are where."""
        of = f" of {self.config.trials}" if self.config.trials else ""
        done = sum(self.counts.values())
        return (
            f"{self.name}: {done}{of} trials done, {len(self.running)} running, "
            f"{self.counts['pruned']} stopped early, {self.counts['failed']} failed"
        )

    def standing(self) -> str:
        """How good the best is, and how long it may still take."""
        best = "none yet" if math.isinf(self.best) else f"{self.best:.4f}"
        left = self.budget.total - self.budget.spent
        if math.isinf(left):
            clock = "no time limit"
        else:
            clock = f"{int(max(0, left)) // 60}:{int(max(0, left)) % 60:02d} left"
        return f"best error {best}, column mean {self.mean_error:.4f} · {clock}"

    def _draw(self) -> Any:
        from rich.text import Text

        now = "  ".join(f"#{number} {share}" for number, share in sorted(self.running.items()))
        lines = [self.summary(), self.standing(), self.stage or (f"running: {now}" if now else "")]
        return Text("\n".join(lines))
