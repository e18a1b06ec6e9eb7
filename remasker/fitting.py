"""From a table to an ensemble: who leaves out what, the models, the experts, the calibration.

With experts every model leaves out a fold of rows, so that each row has a model that can speak of
it honestly: a stack that weighs a model by cells which it has trained on overrates it. Without
experts every model leaves out a few cells, so that together they have seen all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from remasker.expert_fitting import fit_stacks
from remasker.expert_models import ExpertsConfig
from remasker.holdout import hold_out
from remasker.inference import Ensemble, normal_residuals
from remasker.model import ModelConfig
from remasker.table import EncodedTable
from remasker.tasks import Run, one_by_one
from remasker.training import EpochReport, Member, Trainer, TrainingConfig

#: Models where the caller does not say how many.
N_MEMBERS, N_FOLDS = 2, 3
#: Rows × incomplete columns that all stacks of experts together learn from, where one is enough.
STACK_WORK = 6000
#: Of a complete table's cells, the share that is hidden from the experts.
HIDDEN_OF_COMPLETE = 0.1
#: Steps of a model below experts where nobody chose the epochs, at most. Four tables of 5,600 to
#: 20,640 rows with half as many, or fewer: errors within 0.2 %, a fifth of the time saved.
STEPS_BELOW_EXPERTS = 1000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which rows and cells each of the models leaves out."""

    #: members × rows × columns: cells that judge and calibrate a member
    held_out: np.ndarray
    #: rows: the member that does not learn from a row; None where all learn from all
    folds: np.ndarray | None

    def __len__(self) -> int:
        return len(self.held_out)


def make_plan(
    table: EncodedTable, n_members: int, validation_fraction: float, *, experts: bool, seed: int
) -> Plan:
    """Decide by the seed who leaves out what.

    >>> table = EncodedTable(
    ...     values=np.zeros((6, 2)), observed=np.ones((6, 2), dtype=bool), n_categories=(0, 0)
    ... )
    >>> np.bincount(make_plan(table, 3, 0.1, experts=True, seed=0).folds).tolist()
    [2, 2, 2]
    """
    random = np.random.default_rng(seed)
    folds = None
    if experts and 1 < n_members <= len(table):
        folds = random.permutation(np.arange(len(table)) % n_members)
    held_out = np.zeros((n_members, *table.observed.shape), dtype=bool)
    for k in range(n_members if validation_fraction else 0):
        held_out[k] = hold_out(table.observed, validation_fraction, random)
        if folds is not None:
            held_out[k, folds != k] = False
    return Plan(held_out=held_out, folds=folds)


def below_experts(config: TrainingConfig, plan: Plan) -> TrainingConfig:
    """How the models of a stack are trained: where nobody chose the epochs, briefly.

    Measured with half the epochs, eight tasks: the models alone 2 % worse, with experts 0.2 %
    better. With a quarter, at 30 and 61 columns: 8 to 17 % worse alone, 0 to 0.3 % with experts.

    >>> table = EncodedTable(
    ...     values=np.zeros((600, 8)), observed=np.ones((600, 8), dtype=bool), n_categories=(0,) * 8
    ... )
    >>> plan = make_plan(table, 3, 0.1, experts=True, seed=0)
    >>> TrainingConfig().n_epochs(400, 8), below_experts(TrainingConfig(), plan).epochs
    (128, 64)
    >>> below_experts(TrainingConfig(epochs=7), plan).epochs
    7

    Of large tables no more than `STEPS_BELOW_EXPERTS`:

    >>> large = Plan(held_out=np.zeros((3, 60_000, 8), dtype=bool), folds=np.zeros(60_000))
    >>> TrainingConfig().n_epochs(40_000, 8), below_experts(TrainingConfig(), large).epochs
    (7, 2)
    """
    if plan.folds is None or config.epochs is not None:
        return config
    n_members, n_rows, n_columns = plan.held_out.shape
    learned = n_rows - n_rows // n_members
    share = min(max(8 / n_columns, 0.25), 0.5)
    epochs = share * config.n_epochs(learned, n_columns)
    most = STEPS_BELOW_EXPERTS * config.batch_size / max(1, learned)
    return replace(config, epochs=max(1, round(min(epochs, most))))


def make_trainer(
    table: EncodedTable,
    plan: Plan,
    model_config: ModelConfig,
    training_config: TrainingConfig,
    k: int,
    *,
    seed: int,
    device: str = "cpu",
) -> Trainer:
    """The trainer of the plan's member `k`."""
    rows = np.ones(len(table), dtype=bool) if plan.folds is None else plan.folds != k
    return Trainer(
        table.take(rows),
        model_config,
        training_config,
        held_out=plan.held_out[k, rows],
        seed=seed + k,
        device=device,
    )


def train(trainer: Trainer, tell: Callable[[EpochReport], Any] = lambda report: None) -> Member:
    """Drain a trainer."""
    for report in trainer.epochs():
        tell(report)
    return trainer.member()


def train_here(
    trainers: Iterable[Trainer], tell: Callable[[int, EpochReport], None]
) -> list[Member]:
    """One after the other; Ctrl-C ends it with what there is by then."""
    members: list[Member] = []
    for k, trainer in enumerate(trainers):
        try:
            members.append(train(trainer, partial(tell, k)))
        except KeyboardInterrupt:
            if trainer.epoch == 0 and not members:
                raise
            warnings.warn(
                f"interrupted after epoch {trainer.epoch} of {trainer.n_epochs}; "
                "keeping the best state so far",
                stacklevel=4,
            )
            if trainer.epoch:
                members.append(trainer.member())
            break
    return members


def train_apart(make: Callable[[int], Trainer], k: int, beats: Path | None = None) -> Member:
    """Member `k` as a task for another process, where the file `beats` gets a byte per epoch."""
    if beats is None:
        return train(make(k))
    with beats.open("wb", buffering=0) as file:
        return train(make(k), lambda report: file.write(b"."))


def n_stacks(table: EncodedTable, least: int = 1, most: int = 4) -> int:
    """How many stacks of experts are averaged: on a small table they are cheap, and differ most.

    Measured on 308 × 6, one stack: errors of 0.093 to 0.111 by the luck of its folds.

    >>> observed = np.ones((300, 4), dtype=bool)
    >>> observed[:9, :3] = False
    >>> small = EncodedTable(values=np.zeros((300, 4)), observed=observed, n_categories=(0,) * 4)
    >>> n_stacks(small), n_stacks(small.take(np.arange(3000) % 300)), n_stacks(small, 2, 6)
    (4, 1, 6)
    """
    incomplete = int((~table.observed).any(axis=0).sum())
    work = len(table) * (incomplete or table.observed.shape[1])
    return int(np.clip(least * STACK_WORK // max(1, work), least, most))


def with_gaps(table: EncodedTable, seed: int) -> EncodedTable:
    """What experts learn from: a complete table says nothing of gaps to come, so it gets some.

    >>> table = EncodedTable(
    ...     values=np.ones((500, 4)), observed=np.ones((500, 4), dtype=bool), n_categories=(0,) * 4
    ... )
    >>> with_gaps(table, seed=0).observed.mean(axis=0).round(1).tolist()
    [0.9, 0.9, 0.9, 0.9]
    >>> with_gaps(with_gaps(table, seed=0), seed=1).observed.mean(axis=0).round(1).tolist()
    [0.9, 0.9, 0.9, 0.9]
    """
    if not table.observed.all():
        return table
    random_state = np.random.default_rng([seed, 4])
    return table.hide(random_state.random(table.observed.shape) < HIDDEN_OF_COMPLETE)


def make_ensemble(
    table: EncodedTable,
    members: Sequence[Member],
    plan: Plan,
    *,
    n_experts: int,
    seed: int,
    device: str = "cpu",
    run: Run = one_by_one,
    experts_config: ExpertsConfig | None = None,
) -> Ensemble:
    """Join trained members, fit `n_experts` stacks of experts on top of them, calibrate."""
    ensemble = Ensemble(
        members=tuple(members),
        n_categories=table.n_categories,
        residuals=normal_residuals(len(table.n_categories)),
        device=device,
    )
    # A plan that was interrupted leaves rows of which nobody can speak honestly, and experts learn
    # a column from the others.
    if plan.folds is not None and len(members) == len(plan) and table.values.shape[1] > 1:
        honest = ensemble.honest(plan.folds)
        ensemble.experts = fit_stacks(
            with_gaps(table, seed),
            ensemble.soft,
            honest=honest,
            config=experts_config,
            seeds=range(seed, seed + n_experts),
            run=run,
        )
    if plan.folds is not None:
        ensemble.calibrate_by_folds(table, plan.folds)
    else:
        ensemble.calibrate(table, plan.held_out[: len(members)])
    return ensemble
