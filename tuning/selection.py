"""From trial records to a decision: ranking, ensemble, shrinkage, the error that is reported.

Pure functions on arrays and tables; nothing here knows how a trial was run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tuning.holdout import CellPrediction, Judge, average

#: A greedy ensemble chosen on a few hundred cells overfits: it starts from the best few only.
CANDIDATES = 3
MAX_MEMBERS = 5


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which trials make the model, best first, and their joint error on the judge cells."""

    chosen: tuple[int, ...]
    error: float
    standard_error: float
    #: What each further member gained, in standard errors of the paired difference.
    gains: tuple[float, ...] = ()


def rank(judge: Judge, judged: Sequence[CellPrediction]) -> list[int]:
    """Positions of the trials, smallest error on the judge cells first.

    >>> from remasker.table import EncodedTable
    >>> cells = np.array([[True], [False]])
    >>> table = EncodedTable(values=np.zeros((2, 1)), observed=cells | True, n_categories=(0,))
    >>> judge = Judge(table, cells, hidden=cells, column_weight=np.ones(1))
    >>> none = np.zeros((1, 0))
    >>> rank(judge, [CellPrediction(value=np.array([v]), chance=none) for v in (2.0, 1.0)])
    [1, 0]
    """
    errors = [judge.error(judge.losses(prediction)) for prediction in judged]
    return [int(k) for k in np.argsort(errors, kind="stable")]


def paired_gain(judge: Judge, old: CellPrediction, new: CellPrediction) -> float:
    """How much smaller the new error is, in standard errors of the paired difference over rows."""
    difference = judge.losses(old) - judge.losses(new)
    gain = float(judge.weights @ difference)
    spread = float(np.std(judge.bootstrap(difference)))
    if spread == 0:
        return 0.0 if gain == 0 else float(np.copysign(np.inf, gain))
    return gain / spread


def select(
    judge: Judge,
    judged: Sequence[CellPrediction],
    max_members: int = MAX_MEMBERS,
    *,
    n_candidates: int = CANDIDATES,
) -> Selection:
    """The best trial, joined by others only while each brings more than one standard error.

    Members are drawn from the `n_candidates` best trials first; when all of these are in, from the
    next best.

    >>> from remasker.table import EncodedTable
    >>> truth = np.random.default_rng(0).normal(size=(200, 1)).astype("float32")
    >>> cells = np.ones((200, 1), dtype=bool)
    >>> table = EncodedTable(values=truth, observed=cells, n_categories=(0,))
    >>> judge = Judge(table, cells, hidden=~cells, column_weight=np.ones(1))
    >>> noise = np.random.default_rng(1).normal(size=(2, 200))
    >>> trials = [CellPrediction(value=truth[:, 0] + e, chance=np.zeros((200, 0))) for e in noise]
    >>> len(select(judge, trials).chosen)
    2
    """
    order = rank(judge, judged)
    chosen, gains = [order[0]], []
    while len(chosen) < max_members:
        now = average([judged[k] for k in chosen])
        pool = [k for k in order[: max(n_candidates, len(chosen) + 1)] if k not in chosen]
        scored = [
            (paired_gain(judge, now, average([judged[k] for k in (*chosen, other)])), other)
            for other in pool
        ]
        if not scored or max(scored)[0] <= 1.0:
            break
        gain, other = max(scored)
        chosen.append(other)
        gains.append(gain)
    losses = judge.losses(average([judged[k] for k in chosen]))
    return Selection(
        chosen=tuple(chosen),
        error=judge.error(losses),
        standard_error=judge.standard_error(losses),
        gains=tuple(gains),
    )


def shrinkage(judge: Judge, prediction: CellPrediction, n_folds: int = 5) -> np.ndarray | None:
    """A factor per column, from 0 (use the column's mean) to 1 (trust the model); None: all 1.

    Numbers only; a column of levels keeps 1. The factor that would have been best on a column's own
    cells is pulled toward the one pooled over all columns, the more the fewer cells it has. It is
    used only if, estimated on some rows and applied to the others, it lowers the error.

    >>> from remasker.table import EncodedTable
    >>> truth = np.random.default_rng(0).normal(size=(300, 2)).astype("float32")
    >>> cells = np.ones((300, 2), dtype=bool)
    >>> table = EncodedTable(values=truth, observed=cells, n_categories=(0, 0))
    >>> judge = Judge(table, cells, hidden=~cells, column_weight=np.ones(2))
    >>> useless = np.random.default_rng(1).normal(size=(300, 2)) * [0, 1] + truth * [1, 0]
    >>> shrinkage(judge, CellPrediction(value=useless[cells], chance=np.zeros((600, 0)))).round(1)
    array([0.9, 0.1])
    """
    factors = _factors(judge, prediction, np.ones(len(judge), dtype=bool))
    center = judge.baseline().value
    # Folds by row: cells of one row belong together.
    fold = judge.rows % n_folds
    shrunk = prediction.value.astype(np.float64).copy()
    for k in range(n_folds):
        learned = _factors(judge, prediction, fold != k)[judge.columns]
        part = fold == k
        shrunk[part] = (center + learned * (prediction.value - center))[part]
    gain = paired_gain(judge, prediction, CellPrediction(value=shrunk, chance=prediction.chance))
    return factors if gain > 1.0 else None


def shrink(judge: Judge, prediction: CellPrediction, trust: np.ndarray | None) -> CellPrediction:
    """What a model that is trusted so far would have said of the judge's cells.

    >>> from remasker.table import EncodedTable
    >>> cells = np.array([[True], [False]])
    >>> table = EncodedTable(values=np.zeros((2, 1)), observed=cells | True, n_categories=(0,))
    >>> judge = Judge(table, cells, hidden=cells, column_weight=np.ones(1))
    >>> said = CellPrediction(value=np.array([2.0]), chance=np.zeros((1, 0)))
    >>> shrink(judge, said, np.array([0.5])).value.tolist()
    [1.0]
    """
    if trust is None:
        return prediction
    return CellPrediction(value=prediction.value * trust[judge.columns], chance=prediction.chance)


def _factors(judge: Judge, prediction: CellPrediction, used: np.ndarray) -> np.ndarray:
    """Least squares of (truth - mean) on (prediction - mean) per column, pooled over columns."""
    center = judge.baseline().value
    numeric = (judge.n_categories[judge.columns] == 0) & used
    x = np.where(numeric, prediction.value - center, 0.0)
    y = np.where(numeric, judge.truth - center, 0.0)
    per_unit = 1 / judge.unit[judge.columns]
    xy = np.bincount(judge.columns, weights=x * y * per_unit, minlength=judge.n_columns)
    xx = np.bincount(judge.columns, weights=x * x * per_unit, minlength=judge.n_columns)
    count = np.bincount(judge.columns, weights=numeric.astype(float), minlength=judge.n_columns)
    pooled = float(np.clip(xy.sum() / xx.sum(), 0, 1)) if xx.sum() > 0 else 1.0
    own = np.clip(np.divide(xy, xx, out=np.full_like(xy, pooled), where=xx > 0), 0, 1)
    # Thirty cells of one column are mostly noise: they count as much as the pool at fifty.
    trust = count / (count + 50)
    factors = trust * own + (1 - trust) * pooled
    return np.where(judge.n_categories == 0, factors, 1.0)


# ---------------------------------------------------------------------- what the user is told


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """An error with its uncertainty, beside that of the column mean on the same cells.

    `columns` has a row per column: `error`, `mean_error`, `cells` and `weight`.
    """

    metric: str
    error: float
    standard_error: float
    mean_error: float
    n_cells: int
    columns: pd.DataFrame
    #: Whose error this is: what is returned may have learned more since.
    of: str = "what is returned"
    #: How often cells were held out, and what is returned was learned anew without them.
    n_holdouts: int = 1

    def __str__(self) -> str:
        known = np.isfinite(self.standard_error)
        spread = f"± {self.standard_error:.4f}" if known else "± unknown"
        held_out = f" of {self.n_holdouts} hold-outs" if self.n_holdouts > 1 else ""
        return (
            f"{self.error:.4f} {spread} ({self.metric}, {self.n_cells} cells{held_out}; "
            f"column mean {self.mean_error:.4f})"
        )


def error_report(
    judge: Judge,
    prediction: CellPrediction,
    names: Sequence[object],
    baseline: CellPrediction | None = None,
) -> ErrorReport:
    """Measure a prediction on cells that took part in nothing else, and the `baseline` on the same.

    >>> from remasker.table import EncodedTable
    >>> cells = np.array([[True], [True], [False], [False]])
    >>> values = np.array([[0.0], [1.0], [0.0], [1.0]], dtype="float32")
    >>> table = EncodedTable(values=values, observed=cells | True, n_categories=(0,))
    >>> judge = Judge(table, cells, hidden=cells, column_weight=np.ones(1))
    >>> report = error_report(
    ...     judge, CellPrediction(value=np.array([0.0, 1.0]), chance=np.zeros((2, 0))), ["a"]
    ... )
    >>> report.error, report.mean_error
    (0.0, 1.0)
    """
    losses = judge.losses(prediction)
    of_mean = judge.losses(baseline or judge.baseline())
    columns = pd.DataFrame(
        {
            "error": judge.by_column(losses),
            "mean_error": judge.by_column(of_mean),
            "cells": np.bincount(judge.columns, minlength=judge.n_columns),
            "weight": judge.column_weight,
        },
        index=pd.Index(list(names), name="column"),
    )
    return ErrorReport(
        metric=judge.metric,
        error=judge.error(losses),
        standard_error=judge.standard_error(losses),
        mean_error=judge.error(of_mean),
        n_cells=len(judge),
        columns=columns,
    )


def leaderboard(records: pd.DataFrame) -> pd.DataFrame:
    """Trials in order: finished ones by error, then stopped ones by how far they came, then failed.

    >>> states = ["failed", "complete", "pruned"]
    >>> records = pd.DataFrame({"state": states, "error": [None, 0.5, 0.4], "eighths": [0, 8, 2]})
    >>> leaderboard(records)["state"].tolist()
    ['complete', 'pruned', 'failed']
    """
    if records.empty:
        return records
    place = {"complete": 0, "pruned": 1, "running": 2, "failed": 3}
    keys = pd.DataFrame(
        {
            "state": records["state"].map(place).fillna(4),
            "eighths": -pd.to_numeric(records["eighths"]).fillna(0),
            "error": pd.to_numeric(records["error"]).fillna(np.inf),
        }
    )
    order = keys.sort_values(["state", "eighths", "error"], kind="stable").index
    return records.loc[order].reset_index(drop=True)
