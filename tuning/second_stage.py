"""Experts on top of the search's winner: is it worth it, and with all cells in the end.

The winner's configuration is trained on folds of rows and joined by the experts of
`remasker.experts`, twice. First without the cells that were set aside: the judge cells say whether
the second stage is better than what the search had found, the report cells how good it is. Then, if
it is and time allows, with every observed cell: that is what the user gets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from remasker.fitting import (
    N_FOLDS,
    Run,
    make_ensemble,
    make_plan,
    make_trainer,
    one_by_one,
    one_thread,
    train,
)
from remasker.inference import Ensemble
from remasker.table import EncodedTable
from remasker.training import Member
from tuning.affordable import Budget
from tuning.config import SearchConfig
from tuning.holdout import CellPrediction, predict_cells
from tuning.selection import paired_gain
from tuning.trial import TrialData

#: Stacks of experts that are averaged: they differ by the luck of their draws.
N_STACKS = 2
#: Cells of each fold that calibrate intervals and draws.
CALIBRATION = 0.2


@dataclass(frozen=True, kw_only=True)
class SecondStage:
    """Two stages as one model, what it says of the held-out cells, and what it has seen."""

    ensemble: Ensemble
    judged: CellPrediction
    reported: CellPrediction
    #: By how many standard errors of the paired difference it is better than the search's choice.
    gain: float
    #: Whether the model that is returned has learned from all observed cells.
    refitted: bool


def two_stages(table: EncodedTable, winner: Member, device: str, run: Run = one_by_one) -> Ensemble:
    """The winner's configuration on folds of rows, and experts on top; decided by its seed."""
    plan = make_plan(table, N_FOLDS, CALIBRATION, experts=True, seed=winner.seed)
    tasks = [partial(_train, table, plan, k, winner, device) for k in range(len(plan))]
    return make_ensemble(
        table,
        run(tasks),
        plan,
        n_experts=N_STACKS,
        seed=winner.seed,
        device=device,
        run=run,
    )


def _train(table: EncodedTable, plan: Any, k: int, winner: Member, device: str) -> Member:
    trainer = make_trainer(
        table,
        plan,
        k,
        winner.model_config,
        winner.training_config,
        seed=winner.seed,
        device=device,
    )
    return train(trainer)


def add_experts(
    winner: Member,
    data: TrialData,
    found: CellPrediction,
    config: SearchConfig,
    budget: Budget,
    *,
    seconds: float,
) -> SecondStage | None:
    """The second stage, or None if it is no better than what was `found` or there is no time.

    `seconds` is what one training of the winner took.
    """
    run = on_ray(config)
    side_by_side = max(1, int(ray.cluster_resources().get("CPU", 1) // config.cpus_per_trial))
    if budget.left < 5 + 1.3 * seconds * math.ceil(N_FOLDS / side_by_side):
        return None
    started = time.monotonic()
    held = data.holdout.all
    shown = data.table.hide(held)
    ensemble = two_stages(shown, winner, data.device, run)
    every = predict_cells(ensemble, shown, held)
    judged = data.holdout.judge[held]
    mine = CellPrediction(value=every.value[judged], chance=every.chance[judged])
    reported = CellPrediction(value=every.value[~judged], chance=every.chance[~judged])
    judge = data.judge(data.holdout.judge)
    gain = paired_gain(judge, found, mine)
    if gain <= 0:
        return None
    # With all cells it takes a little longer than without.
    refit = budget.left > 1.2 * (time.monotonic() - started)
    if refit:
        ensemble = two_stages(data.table, winner, data.device, run)
    return SecondStage(ensemble=ensemble, judged=mine, reported=reported, gain=gain, refitted=refit)


def on_ray(config: SearchConfig) -> Run:
    """Tasks side by side on the cluster, each on one thread."""

    def call(task: Callable[[], Any]) -> Any:
        with one_thread():
            return task()

    def run(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        remote = ray.remote(
            num_cpus=config.cpus_per_trial, num_gpus=config.gpus_per_trial, max_retries=3
        )(call)
        results: list[Any] = ray.get([remote.remote(task) for task in tasks])
        return results

    return run
