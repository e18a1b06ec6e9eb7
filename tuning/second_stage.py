"""Experts on top of the search's winner, learned from all cells, then asked what they are worth.

The winner's configuration is trained on folds of rows and joined by the experts of
`remasker.experts`, twice. First with every observed cell: that is what the user gets. Then, if
there is time, without the cells that were set aside: the report cells say how good it is, the judge
cells whether it is worse than what the search had found, beyond doubt; if it is, it is thrown away.

In this order, because on a small table the cells that were set aside are worth more than any choice
(yacht, mask 2: 0.148 without them, 0.095 with), and experts have gained wherever both were
measured. Without time to ask, the error that is reported is that of the search's choice.

Where time is short the models below the experts are trained for fewer epochs, then a large table
has one stack of experts instead of two; where it is shorter still they learn in fewer rounds, and
then from fewer rows: any experts are worth more than none (obesity, MCAR 0.3, 90 s: 0.184 without
them, 0.157 with; 6,259 × 10, two minutes: 0.56 of a spread without, 0.51 with the least, 0.44 with
all).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import ray

from remasker.expert_fitting import n_rounds
from remasker.expert_models import ExpertsConfig
from remasker.fitting import (
    make_ensemble,
    make_plan,
    make_trainer,
    n_stacks,
    train_apart,
)
from remasker.inference import Ensemble
from remasker.stacking import MAX_INPUTS
from remasker.table import EncodedTable
from remasker.tasks import Run, Task, Tell, alone, one_by_one
from remasker.training import Member
from tuning.affordable import Budget
from tuning.config import SearchConfig
from tuning.holdout import CellPrediction, predict_cells
from tuning.selection import paired_gain
from tuning.sharing import fits
from tuning.trial import TrialData

#: Models, each without a fold of the rows; an even number leaves no core idle.
FOLDS = 4
#: What the second pass may take, in units of the first.
AGAIN = 1.1
#: How many stacks of experts are averaged: they differ by the luck of their draws.
LEAST_STACKS, MOST_STACKS = 2, 6
#: Standard errors by which experts must be worse to be thrown away, beyond those that the search's
#: choice owes to having been chosen. On wine, mask 2, the gain was 0.7 of its standard error by one
#: seed and below zero by another, which cost 14 % of the true error.
DOUBT = 2.0
#: Of one stack in all its rounds, per observed cell of an incomplete column, and more per input, on
#: a machine of slowness 1 (measured where trials found 0.5 to 0.8: 2.8e-3 with 8 inputs, 3.1e-3
#: with 16, 4.1e-3 and 5.2e-3 with 31 and 34, 5.4e-3 with 50, 8.6e-3 with 60 of 67).
CELL_SECONDS, INPUT_SECONDS = 4e-3, 1.3e-4
#: What of it the rows cost that nearest rows and Gaussian processes do not learn from (california,
#: 20,640 × 8: 80 s).
FURTHER_SHARE = 0.25


class Effort(NamedTuple):
    """What the second stage is made of, where time decides."""

    #: Of the winner's epochs. With half of them models are 2 % worse alone and no worse below
    #: experts, see `remasker.fitting.below_experts`.
    share: float = 1.0
    #: In which experts learn.
    rounds: int = ExpertsConfig.rounds
    #: From which they learn a column, at most.
    rows: int = ExpertsConfig.max_rows
    #: How many are averaged of a large table; of a small one more. A second stack is worth 0.3 % of
    #: the error, a second round up to 9 % (compressive, mask 0).
    stacks: int = LEAST_STACKS


#: The first that leaves time for all else.
WHOLE = (Effort(), Effort(0.5), Effort(0.25), Effort(0.25, stacks=1))
#: Where there is no time for these.
BRIEF = (Effort(0.25, 2, stacks=1), Effort(0.25, 1, stacks=1))
#: Where there is no time for these either, on a large table.
LEAST = (Effort(0.25, 1, 1500, stacks=1),)


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
    effort: Effort
    #: What a pass took.
    seconds: float


def two_stages(
    table: EncodedTable,
    winner: Member,
    device: str,
    run: Run = one_by_one,
    *,
    effort: Effort = WHOLE[0],
) -> Ensemble:
    """The winner's configuration on folds of rows, and experts on top; decided by its seed."""
    plan = make_plan(table, FOLDS, 0.0, experts=True, seed=winner.seed)
    training_config = winner.training_config
    if effort.share < 1:
        epochs = training_config.n_epochs(*table.values.shape)
        training_config = replace(training_config, epochs=max(1, round(effort.share * epochs)))
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
        run(tasks, len(tasks), "training the models below the experts"),
        plan,
        n_experts=n_stacks(table, effort.stacks, MOST_STACKS),
        seed=winner.seed,
        device=device,
        run=run,
        experts_config=ExpertsConfig(rounds=effort.rounds, max_rows=effort.rows),
    )


def seconds_needed(
    data: TrialData,
    seconds: float,
    side_by_side: int,
    slowness: float = 1.0,
    effort: Effort = WHOLE[0],
) -> float:
    """What one pass of the second stage takes, if one training of the winner takes `seconds`.

    The experts' part is a rate measured on the benchmark tables, on a machine of slowness 1.
    """
    known = data.table.observed.sum(axis=0)
    incomplete = known < len(data.table)
    # Of a complete table all columns are learned.
    known = np.minimum(known[incomplete] if incomplete.any() else known, effort.rows)
    near = np.minimum(known, ExpertsConfig.max_near_rows)
    cells = float((near + FURTHER_SHARE * (known - near)).sum())
    rounds = n_rounds(effort.rounds, len(known))
    n_inputs = min(MAX_INPUTS, sum(max(1, k) for k in data.table.n_categories))
    per_cell = (CELL_SECONDS + INPUT_SECONDS * n_inputs) * slowness
    experts = per_cell * cells * rounds / ExpertsConfig.rounds
    # A fold's model learns from the other folds' rows, in as many epochs.
    training = effort.share * seconds * (FOLDS - 1) / FOLDS
    trainings = math.ceil(FOLDS / side_by_side) * training
    # A round's columns, of all stacks, are learned side by side.
    columns = max(1, len(known))
    tasks = n_stacks(data.table, effort.stacks, MOST_STACKS) * columns
    return 3 + 1.1 * (trainings + math.ceil(tasks / side_by_side) * experts / columns)


def affordable_effort(
    data: TrialData, seconds: float, side_by_side: int, budget: Budget
) -> Effort | None:
    """The effort for which there is time; None: no time for experts at all.

    Rather fewer epochs and a second pass, which says how good it all is, than one pass with more;
    but rather all rounds of experts, and all rows, than a second pass.
    """
    for efforts, n_passes in itertools.product((WHOLE, BRIEF, LEAST), (1 + AGAIN, 1.0)):
        for effort in efforts:
            needed = seconds_needed(data, seconds, side_by_side, budget.slowness, effort)
            if n_passes * needed <= budget.left:
                return effort
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
    n_compared: int,
    tell: Tell = lambda doing, done, total: None,
) -> SecondStage | None:
    """The second stage, or None if it is worse than what was `found` or there is no time.

    `seconds` is what one training of the winner takes; `found` was the best of `n_compared`.
    """
    run = on_ray(config, tell)
    effort = affordable_effort(data, seconds, slots(config), budget)
    if effort is None:
        return None
    started = time.monotonic()
    ensemble, reported, gain = None, None, None
    if config.refit:
        ensemble = two_stages(data.table, winner, data.device, run, effort=effort)
    took = time.monotonic() - started
    if ensemble is None or budget.left > AGAIN * took:
        started = time.monotonic()
        run = on_ray(config, lambda doing, *so_far: tell(f"how good it is, {doing}", *so_far))
        held = data.holdout.all
        shown = data.table.hide(held)
        before = two_stages(shown, winner, data.device, run, effort=effort)
        every = predict_cells(before, shown, held)
        judged = data.holdout.judge[held]
        mine = CellPrediction(value=every.value[judged], chance=every.chance[judged])
        reported = CellPrediction(value=every.value[~judged], chance=every.chance[~judged])
        gain = paired_gain(data.judge(data.holdout.judge), found, mine)
        if gain < -DOUBT - luck(n_compared):
            return None
        ensemble = ensemble or before
        took = time.monotonic() - started
    return SecondStage(
        ensemble=ensemble,
        reported=reported,
        gain=gain,
        refitted=config.refit,
        effort=effort,
        seconds=took,
    )


def luck(n: int) -> float:
    """By how many standard errors the best of `n` that are equally good looks better, at most.

    What was chosen was chosen by its error on the very cells on which experts are compared with it.
    Found on yacht, MCAR 0.7: the best of 17 trials was 2 standard errors ahead, experts were thrown
    away, and the error was 6 % above the column mean's instead of 8 % below.

    >>> luck(1), round(luck(20), 1)
    (0.0, 2.4)
    """
    return math.sqrt(2 * math.log(n))


def on_ray(config: SearchConfig, tell: Tell = lambda doing, done, total: None) -> Run:
    """Tasks side by side on the cluster, each on one thread; `tell` is told how many are done."""

    def run(tasks: Iterable[Task], total: int, doing: str = "") -> list[Any]:
        remote = ray.remote(
            num_cpus=config.cpus_per_trial, num_gpus=config.gpus_per_trial, max_retries=3
        )(alone)
        results: dict[int, Any] = {}
        begun: dict[ray.ObjectRef[Any], int] = {}
        waiting = enumerate(tasks)
        # What waits for its turn would fill the object store.
        most = 2 * slots(config)
        tell(doing, 0, total)
        while len(results) < total:
            for k, task in itertools.islice(waiting, most - len(begun)):
                begun[remote.remote(task)] = k
            (ready, *_), _ = ray.wait([*begun])
            results[begun.pop(ready)] = ray.get(ready)
            tell(doing, len(results), total)
        return [results[k] for k in range(total)]

    return run
