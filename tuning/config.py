"""How to search: the options, checked when they are given."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remasker.errors import (
    InvalidConfigError,
    RemaskerError,
    check_choice,
    check_integer,
    check_number,
)
from tuning.holdout import METRICS


class SearchFailedError(RemaskerError):
    """No trial of a search gave a model."""


class RunExistsError(InvalidConfigError):
    """The run's folder is taken, or it belongs to another table."""


class StorageError(RemaskerError):
    """The storage of a run took no more: it is full, read-only or gone."""

    @classmethod
    def of(cls, folder: str | os.PathLike[str], error: OSError, where: str = "") -> StorageError:
        """What the operating system says of a folder, and the way out.

        >>> str(StorageError.of("runs/a", OSError(28, "No space left"))).split(";")[0]
        'runs/a cannot be written any more (No space left)'
        """
        return cls(
            f"{os.fspath(folder)} cannot be written any more{where} ({error.strerror or error}); "
            "the run stopped and keeps all that was written: make room there, or make it writable "
            "again, and continue with resume=True"
        )


class ClusterLostError(RemaskerError):
    """The head of the cluster is gone, and with it everything that ran."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How to search; every default suits someone who reads nothing.

    `trials` and `time_budget` ("90s", "10m", "1h30m", seconds) both end the search, whichever comes
    first; the time covers the whole call. Either may be None, not both. Without a time budget and
    with ``concurrent=1`` the same `random_state` gives the same winner and the same imputations.

    >>> SearchConfig(trials=20, time_budget="1h30m").seconds
    5400.0
    >>> SearchConfig(time_budget="soon")
    Traceback (most recent call last):
    remasker.errors.InvalidConfigError: time_budget: expected seconds or a text such as '90s', \
'10m' or '1h30m', got 'soon'
    """

    trials: int | None = 40
    time_budget: str | float | None = "10m"
    storage: str | os.PathLike[str] = "runs"
    metric: str = "normalised"
    space: Mapping[str, Any] | None = None
    random_state: int = 0
    concurrent: int | None = None
    cpus_per_trial: float = 1
    gpus_per_trial: float = 0
    address: str | None = None
    resume: bool = False
    early_stopping: bool = True
    portfolio: bool = True
    #: What proposes when the portfolio is through: "tpe" or "random".
    sampler: str = "tpe"
    max_members: int = 5
    experts: str | None = "auto"
    #: Whether what is returned learns from all cells in the end, if time allows.
    refit: bool = True
    #: None: "cuda" if a trial has a GPU, otherwise "cpu".
    device: str | None = None
    #: How much training a crash may cost.
    checkpoint_seconds: float = 10.0
    #: None: a live view on a terminal, nothing elsewhere.
    progress: bool | None = None
    verbose: bool = False
    #: Set by `tune_many`: where the searches that share the slots are listed.
    sharing: str | None = None

    def __post_init__(self) -> None:
        if self.trials is not None:
            check_integer("trials", self.trials, 1)
        if self.trials is None and self.time_budget is None:
            raise InvalidConfigError("trials and time_budget are both None: the search has no end")
        if self.seconds <= 0:
            raise InvalidConfigError(
                f"time_budget: expected more than 0 seconds, got {self.time_budget!r}"
            )
        check_choice("metric", self.metric, METRICS)
        check_choice("sampler", self.sampler, ("tpe", "random"))
        check_integer("random_state", self.random_state, 0)
        if self.concurrent is not None:
            check_integer("concurrent", self.concurrent, 1)
        check_number("cpus_per_trial", self.cpus_per_trial, 0, 1024, open_low=True)
        check_number("gpus_per_trial", self.gpus_per_trial, 0, 1024)
        if self.experts is not None:
            check_choice("experts", self.experts, ("auto",))
        check_choice("device", self.trial_device.split(":")[0], ("cpu", "cuda", "mps"))
        check_integer("max_members", self.max_members, 1)
        check_number("checkpoint_seconds", self.checkpoint_seconds, 0, 86400)
        if self.space is not None and not isinstance(self.space, Mapping):
            raise InvalidConfigError(
                f"space: expected a dict such as {{'width': [32, 64]}}, got {self.space!r}"
            )

    @property
    def trial_device(self) -> str:
        """Where trials train.

        >>> SearchConfig().trial_device, SearchConfig(gpus_per_trial=0.25).trial_device
        ('cpu', 'cuda')
        """
        return self.device or ("cuda" if self.gpus_per_trial else "cpu")

    @property
    def seconds(self) -> float:
        """The time budget in seconds; infinite without one."""
        return math.inf if self.time_budget is None else parse_time(self.time_budget)


def parse_time(text: str | float) -> float:
    """Seconds from a number or a text.

    >>> parse_time("10m"), parse_time("1h30m"), parse_time(5), parse_time("2.5")
    (600.0, 5400.0, 5.0, 2.5)
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    pattern = r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m(?:in)?)?(?:(\d+(?:\.\d+)?)s?)?"
    match = re.fullmatch(pattern, str(text).strip().lower())
    if not match or not any(match.groups()):
        raise InvalidConfigError(
            f"time_budget: expected seconds or a text such as '90s', '10m' or '1h30m', got {text!r}"
        )
    return float(
        sum(
            float(part) * unit
            for part, unit in zip(match.groups(), (3600, 60, 1), strict=True)
            if part
        )
    )
