"""The journal of a run: Optuna's study in one file of the run's folder, and the only memory.

One process at a time writes to it (`folder.locked` sees to that), anybody may read it at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._storage import JournalOperation
from optuna.trial import TrialState

from remasker.errors import InvalidConfigError
from tuning.config import StorageError

JOURNAL, TRIALS = "journal.log", "trials"
STUDY = "remasker"
STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


class Journal(JournalFileBackend):
    """The journal's file; after a write that failed it takes no other and ends with a whole line.

    A disk that is full takes half a line. Whatever were written behind it could never be read.
    Optuna's own lock would cost three calls to the file server for each line.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / JOURNAL
        self.failure: StorageError | None = None
        super().__init__(str(self.path))

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append lines, all or none."""
        if self.failure is not None:
            raise self.failure
        try:
            size = self.path.stat().st_size
            lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
            with open(self.path, "ab") as file:
                file.write(lines.encode())
                file.flush()
                # What a trial has come to outlives a power failure; the twenty lines before need
                # not: they cost a wait for the disk each.
                if any(log["op_code"] == JournalOperation.SET_TRIAL_STATE_VALUES for log in logs):
                    os.fsync(file.fileno())
        except OSError as error:
            self.failure = StorageError.of(self.folder, error)
            with contextlib.suppress(OSError, UnboundLocalError):
                os.truncate(self.path, size)
            raise self.failure from error


def open_study(folder: Path, sampler: optuna.samplers.BaseSampler | None = None) -> optuna.Study:
    """The study in a run's folder, for writing; made if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    drop_half_a_line(folder / JOURNAL)
    with quiet_optuna():
        return optuna.create_study(
            storage=JournalStorage(Journal(folder)),
            study_name=STUDY,
            sampler=sampler,
            direction="minimize",
            load_if_exists=True,
        )


def read_study(folder: Path) -> optuna.Study:
    """The study of an existing run, for reading: nothing is written."""
    if not (folder / JOURNAL).is_file():
        raise InvalidConfigError(f"{folder} is not a run: it has no {JOURNAL}")
    try:
        return optuna.load_study(storage=JournalStorage(Journal(folder)), study_name=STUDY)
    except KeyError:
        raise InvalidConfigError(f"{folder} is a run without any trial yet") from None


def drop_half_a_line(path: Path) -> None:
    """A process that was killed while writing leaves half a line; it is no record of anything."""
    if path.is_file():
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna's log lines wait while this lasts."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def trials_left(study: optuna.Study, trials: int | None) -> int | None:
    """How many trials are still to be run; None without a limit."""
    if trials is None:
        return None
    over = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
    return max(0, trials - len(study.get_trials(deepcopy=False, states=over)))


def records(study: optuna.Study, fixed: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """A row per trial: number, state, error, how far it came, seconds, reason, configuration."""
    rows = []
    for trial in study.get_trials(deepcopy=False):
        if trial.state == TrialState.WAITING:
            continue
        told = trial.intermediate_values
        attributes = trial.user_attrs
        last = told[max(told)] if told else None
        error = trial.value if trial.state == TrialState.COMPLETE else last
        rows.append(
            {
                "number": trial.number,
                "state": STATES[trial.state],
                "error": error,
                "epochs_done": attributes.get("epoch"),
                "best_epoch": attributes.get("best_epoch"),
                "eighths": attributes.get("eighths", max(told, default=0)),
                "seconds": attributes.get("seconds"),
                "failure": attributes.get("failure", ""),
                **(fixed or {}),
                **trial.params,
            }
        )
    return pd.DataFrame(rows)
