"""Experts on top of the search's winner, learned from all cells, then asked what they are worth.

The winner's configuration is trained on folds of rows and joined by the experts of
`remasker.experts`, twice. First with every observed cell: that is what the user gets. Then, if
there is time, without the cells that were set aside: the report cells say how good it is, the judge
cells whether it is worse than what the search had found, beyond doubt; if it is, it is thrown away.

In this order, because on a small table the cells that were set aside are worth more than any choice
(yacht, mask 2: 0.148 without them, 0.095 with), and experts have gained wherever both were
measured. Without time to ask, the error that is reported is that of the search's choice.

Where time is short the models below the experts are trained for fewer epochs: experts are worth
more (obesity, MCAR 0.3, 90 s: 0.184 without them, 0.157 with).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray

from remasker.expert_models import ExpertsConfig
from remasker.fitting import (
    Run,
    Task,
    alone,
    make_ensemble,
    make_plan,
    make_trainer,
    n_stacks,
    one_by_one,
    train_apart,
)
from remasker.inference import Ensemble
from remasker.table import EncodedTable
from remasker.training import Member
from tuning.affordable import Budget
from tuning.config import SearchConfig
from tuning.holdout import CellPrediction, predict_cells
from tuning.selection import paired_gain
from tuning.sharing import fits
from tuning.trial import TrialData

#: Models, each without a fold of the rows; an even number leaves no core idle.
FOLDS = 4
#: Of the winner's epochs, the first that leaves time for all else. With half of them models are 2 %
#: worse alone and no worse below experts, see `remasker.fitting.below_experts`.
SHARES = (1.0, 0.5, 0.25)
#: What the second pass may take, in units of the first.
AGAIN = 1.1
#: How many stacks of experts are averaged: they differ by the luck of their draws.
LEAST_STACKS, MOST_STACKS = 2, 6
#: Cells of each fold that calibrate intervals and draws.
CALIBRATION = 0.2
#: Standard errors by which experts must be worse to be thrown away. The search's choice was chosen
#: on the very cells that compare them, and these are few: on wine, mask 2, the gain was 0.7 of its
#: standard error by one seed and below zero by another, which cost 14 % of the true error.
DOUBT = 2.0
#: Of one stack, per row and incomplete column, on a machine of slowness 1 (measured at 0.5, from
#: 653 × 15 to 2,111 × 16: 2.8e-3 to 3.7e-3); and what of it the rows cost that nearest rows and
#: Gaussian processes do not learn from (california, 20,640 × 8: 34 s from 5,000 rows, 79 from all,
#: when a stack took 0.55 of what it takes now).
EXPERT_SECONDS, FURTHER_SHARE = 6.0e-3, 0.25


@dataclass(frozen=True, kw_only=True)
class SecondStage:
    """Two stages as one model, what it says of the held-out cells, and what it has seen."""

    ensemble: Ensemble
    #: What it said of the report cells; None if there was no time to ask.
    reported: CellPrediction | None
    #: By how many standard errors of the paired difference it is better than the search's choice.
    gain: float | None
    #: Whether the model that is returned has learned from all observed cells.
    refitted: bool
    #: The share of the winner's epochs for which its models were trained.
    share: float


def two_stages(
    table: EncodedTable,
    winner: Member,
    device: str,
    run: Run = one_by_one,
    *,
    share: float = 1.0,
) -> Ensemble:
    """The winner's configuration on folds of rows, and experts on top; decided by its seed."""
    plan = make_plan(table, FOLDS, CALIBRATION, experts=True, seed=winner.seed)
    training_config = winner.training_config
    if share < 1:
        epochs = training_config.n_epochs(*table.values.shape)
        training_config = replace(training_config, epochs=max(1, round(share * epochs)))
    make = partial(
        make_trainer,
        table,
        plan,
        winner.model_config,
        training_config,
        seed=winner.seed,
        device=device,
    )
    tasks = [partial(train_apart, make, k) for k in range(len(plan))]
    return make_ensemble(
        table,
        run(tasks),
        plan,
        n_experts=n_stacks(table, LEAST_STACKS, MOST_STACKS),
        seed=winner.seed,
        device=device,
        run=run,
    )


def seconds_needed(
    data: TrialData, seconds: float, side_by_side: int, slowness: float = 1.0
) -> float:
    """What one pass of the second stage takes, if one training of the winner takes `seconds`.

    The experts' share is a rate measured on the benchmark tables, on a machine of slowness 1.
    """
    gaps = (~data.table.observed).any(axis=0).sum()
    rate = EXPERT_SECONDS * slowness
    rows = min(len(data.table), ExpertsConfig.max_rows)
    near = min(rows, ExpertsConfig.max_near_rows)
    experts = rate * (near + FURTHER_SHARE * (rows - near)) * int(gaps)
    # A fold's model learns from the other folds' rows, in as many epochs.
    trainings = math.ceil(FOLDS / side_by_side) * seconds * (FOLDS - 1) / FOLDS
    stacks = math.ceil(n_stacks(data.table, LEAST_STACKS, MOST_STACKS) / side_by_side)
    return 3 + 1.1 * (trainings + stacks * experts)


def affordable_share(
    data: TrialData, seconds: float, side_by_side: int, budget: Budget
) -> float | None:
    """The share of the winner's epochs for which there is time; None: no time for experts at all.

    Rather fewer epochs and a second pass, which says how good it all is, than one pass with more.
    """
    for n_passes in (1 + AGAIN, 1.0):
        for share in SHARES:
            needed = seconds_needed(data, share * seconds, side_by_side, budget.slowness)
            if n_passes * needed <= budget.left:
                return share
    return None


def slots(config: SearchConfig) -> int:
    """Tasks that run side by side."""
    return max(1, fits(config, ray.cluster_resources()))


def add_experts(
    winner: Member,
    data: TrialData,
    found: CellPrediction,
    config: SearchConfig,
    budget: Budget,
    *,
    seconds: float,
) -> SecondStage | None:
    """The second stage, or None if it is worse than what was `found` or there is no time.

    `seconds` is what one training of the winner takes.
    """
    run = on_ray(config)
    share = affordable_share(data, seconds, slots(config), budget)
    if share is None:
        return None
    started = time.monotonic()
    ensemble, reported, gain = None, None, None
    if config.refit:
        ensemble = two_stages(data.table, winner, data.device, run, share=share)
    took = time.monotonic() - started
    if ensemble is None or budget.left > AGAIN * took:
        held = data.holdout.all
        shown = data.table.hide(held)
        before = two_stages(shown, winner, data.device, run, share=share)
        every = predict_cells(before, shown, held)
        judged = data.holdout.judge[held]
        mine = CellPrediction(value=every.value[judged], chance=every.chance[judged])
        reported = CellPrediction(value=every.value[~judged], chance=every.chance[~judged])
        gain = paired_gain(data.judge(data.holdout.judge), found, mine)
        if gain < -DOUBT:
            return None
        ensemble = ensemble or before
    return SecondStage(
        ensemble=ensemble, reported=reported, gain=gain, refitted=config.refit, share=share
    )


def on_ray(config: SearchConfig) -> Run:
    """Tasks side by side on the cluster, each on one thread."""

    def run(tasks: Sequence[Task]) -> list[Any]:
        remote = ray.remote(
            num_cpus=config.cpus_per_trial, num_gpus=config.gpus_per_trial, max_retries=3
        )(alone)
        results: list[Any] = ray.get([remote.remote(task) for task in tasks])
        return results

    return run
