"""One configuration -> a stream of reports. Knows nothing of Ray.

A trial reports at fixed shares of its own horizon, counted in eighths. `epochs` is searched and the
learning rate is annealed over it, so the tenth epoch of one trial says nothing about the tenth of
another; a quarter of the way is comparable with a quarter of the way.
"""

from __future__ import annotations

import io
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from remasker.inference import Ensemble, normal_residuals
from remasker.model import ModelConfig
from remasker.table import EncodedTable
from remasker.training import Member, Trainer, TrainingConfig
from tuning.config import StorageError
from tuning.holdout import CellPrediction, Holdout, Judge, predict_cells
from tuning.space import split_settings

#: Where on the way a trial reports; 8 is the end.
EIGHTHS = (1, 2, 4, 6, 8)
#: Keys of a trial's configuration that are not settings.
BOOKKEEPING = ("number", "seed")
#: The first checkpoint comes sooner: if the time ends with no trial done, it is all there is.
FIRST_CHECKPOINT = 1.0
STATE, RESULT = "state.pt", "result.pt"


@dataclass(frozen=True, kw_only=True)
class TrialData:
    """What all trials of a run share; it travels once."""

    table: EncodedTable
    holdout: Holdout
    metric: str = "normalised"
    device: str = "cpu"
    #: Seconds of training that a crash may cost.
    checkpoint_seconds: float = 10.0

    def judge(self, cells: np.ndarray, hidden: np.ndarray | None = None) -> Judge:
        """The error on these cells, for models that saw none of the `hidden` (held-out) ones."""
        return Judge(
            self.table,
            cells,
            hidden=self.holdout.all if hidden is None else hidden,
            column_weight=self.holdout.column_weight,
            metric=self.metric,
        )


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What a trial leaves behind: its best weights and what they say of the held-out cells."""

    member: Member
    judged: CellPrediction
    reported: CellPrediction


Report = Callable[[dict[str, Any]], object]


def run_trial(
    config: Mapping[str, Any],
    data: TrialData,
    report: Report,
    folder: str | os.PathLike[str] | None = None,
) -> None:
    """Train one configuration, reporting as it goes; with a `folder`, survive being killed.

    `report` receives a dict: the share done (`eighths`), the error of the best weights so far on
    the judge cells, epochs and seconds. `folder` holds the training state, from which the same call
    goes on, and at the end the result.

    >>> from tuning.holdout import draw_holdout
    >>> values = np.random.default_rng(0).normal(size=(60, 3)).astype("float32")
    >>> table = EncodedTable(values=values, observed=values < 1, n_categories=(0, 0, 0))
    >>> data = TrialData(table=table, holdout=draw_holdout(table.observed, 0))
    >>> reports = []
    >>> run_trial({"width": 8, "epochs": 4, "seed": 1}, data, reports.append)
    >>> [(one["eighths"], one["epoch"]) for one in reports]
    [(2, 1), (4, 2), (6, 3), (8, 4)]
    """
    model_config, training_config = split_settings(
        {key: value for key, value in config.items() if key not in BOOKKEEPING}
    )
    trainer = _trainer(model_config, training_config, data, int(config["seed"]))
    judge = data.judge(data.holdout.judge)
    seconds = 0.0
    state = read_state(folder)
    if state is not None:
        trainer.load_state_dict(state["trainer"])
        seconds = state["seconds"]

    def result() -> TrialResult:
        return evaluate(trainer.member(), data)

    def tell(eighths: int, now: TrialResult) -> None:
        report(
            {
                "error": judge.error(judge.losses(now.judged)),
                "eighths": eighths,
                "epoch": trainer.epoch,
                "best_epoch": now.member.epochs,
                "n_epochs": trainer.n_epochs,
                "seconds": seconds,
            }
        )

    marks = milestones(trainer.n_epochs)
    saved, patience = time.perf_counter(), min(FIRST_CHECKPOINT, data.checkpoint_seconds)
    for epoch in trainer.epochs():
        seconds += epoch.seconds
        if folder is not None and time.perf_counter() - saved > patience:
            write_state(folder, trainer, seconds)
            saved, patience = time.perf_counter(), data.checkpoint_seconds
        eighths = marks.get(epoch.epoch, 8)
        if eighths < 8:
            tell(eighths, result())
    final = result()
    if folder is not None:
        # The state stays until the report has arrived: a worker killed in between goes on from it.
        write_state(folder, trainer, seconds)
        write_result(folder, final)
    tell(8, final)


def milestones(n_epochs: int) -> dict[int, int]:
    """After which epoch which share is done; the latest share where several fall together.

    >>> milestones(80)
    {10: 1, 20: 2, 40: 4, 60: 6, 80: 8}
    >>> milestones(2)
    {1: 4, 2: 8}
    """
    return {math.ceil(n_epochs * eighths / 8): eighths for eighths in EIGHTHS}


def joined(members: Sequence[Member], data: TrialData, trust: np.ndarray | None = None) -> Ensemble:
    """Models as one that is not calibrated yet; see `selection.shrinkage` for `trust`."""
    return Ensemble(
        members=tuple(members),
        n_categories=data.table.n_categories,
        residuals=normal_residuals(len(data.table.n_categories)),
        trust=trust,
        device=data.device,
    )


def evaluate(member: Member, data: TrialData) -> TrialResult:
    """What one model says of the held-out cells, none of which it sees."""
    shown = data.table.hide(data.holdout.all)
    every = predict_cells(joined([member], data), shown, data.holdout.all)
    judged = data.holdout.judge[data.holdout.all]
    return TrialResult(
        member=member,
        judged=CellPrediction(value=every.value[judged], chance=every.chance[judged]),
        reported=CellPrediction(value=every.value[~judged], chance=every.chance[~judged]),
    )


# ---------------------------------------------------------------------- on disk


def read_state(folder: str | os.PathLike[str] | None) -> dict[str, Any] | None:
    """The training state in a trial's folder, if there is a whole one.

    >>> read_state(None) is None
    True
    """
    return None if folder is None else _read(Path(folder) / STATE)


def write_state(folder: str | os.PathLike[str], trainer: Trainer, seconds: float) -> None:
    """Keep what another process needs to go on, the best weights so far among it."""
    state = {"trainer": trainer.state_dict(), "seconds": seconds, "seed": trainer.seed}
    _write(Path(folder) / STATE, state)


def write_result(folder: str | os.PathLike[str], result: TrialResult) -> None:
    """Keep what selection needs."""
    member = result.member
    _write(
        Path(folder) / RESULT,
        {
            "weights": dict(member.weights),
            "epochs": member.epochs,
            "seed": member.seed,
            "error": member.error,
            "judged": _tensors(result.judged),
            "reported": _tensors(result.reported),
        },
    )


def read_result(
    folder: str | os.PathLike[str], settings: Mapping[str, Any], data: TrialData
) -> TrialResult | None:
    """A trial's result: as it ended, or the best it had when it was cut short; None without."""
    model_config, training_config = split_settings(settings)
    stored = _read(Path(folder) / RESULT)
    if stored is not None:
        member = Member(
            model_config=model_config,
            training_config=training_config,
            weights=stored["weights"],
            seed=stored["seed"],
            epochs=stored["epochs"],
            error=stored["error"],
        )
        return TrialResult(
            member=member,
            judged=_prediction(stored["judged"]),
            reported=_prediction(stored["reported"]),
        )
    state = read_state(folder)
    if state is None or state["trainer"]["epoch"] == 0:
        return None
    # A trainer knows how to read its own state.
    trainer = _trainer(model_config, training_config, data, state["seed"])
    trainer.load_state_dict(state["trainer"])
    return evaluate(trainer.member(), data)


def _trainer(
    model_config: ModelConfig, training_config: TrainingConfig, data: TrialData, seed: int
) -> Trainer:
    # Report cells must not even stop the training: the trainer never learns that they exist.
    return Trainer(
        data.table.hide(data.holdout.report),
        model_config,
        training_config,
        held_out=data.holdout.judge,
        seed=seed,
        device=data.device,
    )


def _tensors(prediction: CellPrediction) -> dict[str, torch.Tensor]:
    return {
        "value": torch.from_numpy(np.ascontiguousarray(prediction.value)),
        "chance": torch.from_numpy(np.ascontiguousarray(prediction.chance)),
    }


def _prediction(stored: Mapping[str, torch.Tensor]) -> CellPrediction:
    return CellPrediction(value=stored["value"].numpy(), chance=stored["chance"].numpy())


def _write(path: Path, content: dict[str, Any]) -> None:
    """All or nothing: a process killed while writing leaves the older file."""
    buffer = io.BytesIO()
    torch.save(content, buffer)  # to a full disk it would fail with an error of its own
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
            try:
                file.write(buffer.getbuffer())
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        # `path` is RUN/trials/NUMBER/FILE.
        raise StorageError.of(path.parents[2], error, f" from {socket.gethostname()}") from error


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        return None
    return content
