"""Which observed cells judge a trial, and what their error is.

Two disjoint sets of observed cells are drawn once per run, before anything is trained. The *judge*
cells rank, stop, select, ensemble and calibrate, and are used up by that. The *report* cells do
nothing but give the error that the user is told; where they are few, what is returned is learned
anew without other cells, which then report too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remasker.errors import InvalidTableError
from remasker.experts import places
from remasker.holdout import hold_out
from remasker.inference import Ensemble
from remasker.table import EncodedTable

JUDGE_SHARE = 0.10
REPORT_SHARE = 0.05
#: Fewer judge cells than this rank configurations by luck.
MIN_JUDGE_CELLS = 200
#: More say nothing new, and every trial predicts and stores all of them.
MAX_JUDGE_CELLS = 20_000
#: Both sets together never take more of the table, or of a column, than this.
MAX_SHARE = 0.20
MAX_COLUMN_SHARE = 0.30
METRICS = ("normalised", "rmse")


@dataclass(frozen=True, kw_only=True)
class Holdout:
    """Two disjoint sets of observed cells, rows × columns, and how much each column counts."""

    judge: np.ndarray
    report: np.ndarray
    column_weight: np.ndarray

    @property
    def all(self) -> np.ndarray:
        """Every cell that no trial may train on."""
        return self.judge | self.report


def draw_holdout(observed: np.ndarray, seed: int) -> Holdout:
    """Draw both sets from the observed cells, following the table's own gaps.

    >>> observed = np.random.default_rng(0).random((400, 5)) < [1, 1, 1, 0.7, 0.4]
    >>> holdout = draw_holdout(observed, seed=0)
    >>> bool((holdout.judge & holdout.report).any()), int(holdout.judge.sum()) > 80
    (False, True)
    >>> holdout.column_weight.round(1).tolist()
    [0.0, 0.0, 0.0, 0.3, 0.7]
    """
    random_state = np.random.default_rng([seed, 7])
    n_observed = int(observed.sum())
    n_judge, n_report = holdout_sizes(n_observed)
    share = MAX_COLUMN_SHARE * n_judge / max(1, n_judge + n_report)
    judge = _draw(observed, ~observed, n_judge, share, random_state)
    rest = observed & ~judge
    # The judge's rows lack more than real rows do: that ranks models all the same, but as an error
    # to report it was 1.7 to 3.6 times the true one where cells are missing at random.
    report = _draw(rest, ~observed, n_report, MAX_COLUMN_SHARE - share, random_state, like=observed)
    if not judge.any():
        raise InvalidTableError(
            f"the table has {n_observed} observed cells, too few to set some aside for judging "
            "models; fit ReMaskerImputer directly"
        )
    gaps = (~observed).sum(axis=0).astype(float)
    # A complete table has no gaps to look like: every column counts the same.
    weight = gaps if gaps.any() else np.ones(observed.shape[1])
    return Holdout(judge=judge, report=report, column_weight=weight / weight.sum())


def holdout_sizes(n_observed: int) -> tuple[int, int]:
    """How many cells judge and how many report.

    >>> holdout_sizes(1500), holdout_sizes(10_000), holdout_sizes(10**7)
    ((200, 100), (1000, 500), (20000, 10000))
    """
    judge = min(MAX_JUDGE_CELLS, max(MIN_JUDGE_CELLS, round(JUDGE_SHARE * n_observed)))
    judge = min(judge, int(MAX_SHARE * n_observed * 2 / 3))
    return judge, round(judge * REPORT_SHARE / JUDGE_SHARE)


def draw_again(
    observed: np.ndarray, holdout: Holdout, asked: np.ndarray, random_state: np.random.Generator
) -> np.ndarray:
    """Cells for one more hold-out: as many as both sets have, none that judges or was `asked`.

    >>> observed = np.random.default_rng(0).random((60, 5)) < 0.8
    >>> holdout = draw_holdout(observed, seed=0)
    >>> more = draw_again(observed, holdout, holdout.report, np.random.default_rng(0))
    >>> int(holdout.report.sum()), int(more.sum()), bool((more & holdout.all).any())
    (14, 39, False)
    """
    free = observed & ~holdout.judge & ~asked
    n_cells = sum(holdout_sizes(int(observed.sum())))
    return _draw(free, ~observed, n_cells, MAX_COLUMN_SHARE, random_state, like=observed)


def _draw(
    free: np.ndarray,
    missing: np.ndarray,
    n_cells: int,
    column_share: float,
    random_state: np.random.Generator,
    like: np.ndarray | None = None,
) -> np.ndarray:
    """About `n_cells` of the `free` cells, in the columns and patterns of the `missing` ones."""
    if not free.any() or n_cells < 1:
        return np.zeros_like(free)
    drawn = hold_out(free, n_cells / free.sum(), random_state, like=like)
    gaps = missing.sum(axis=0)
    if gaps.any():
        # `hold_out` tops a nearly complete table up from any column; cells of complete columns
        # say nothing about the gaps, so their number is drawn again where the gaps are.
        drawn &= gaps > 0
        wanted = (n_cells - drawn.sum()) * gaps / gaps.sum()
        for column in np.flatnonzero(wanted >= 0.5):
            spare = np.flatnonzero(free[:, column] & ~drawn[:, column])
            chosen = random_state.permutation(spare)[: round(wanted[column])]
            drawn[chosen, column] = True
    excess = int(drawn.sum()) - n_cells
    if excess > 0:
        drawn.flat[random_state.permutation(np.flatnonzero(drawn))[:excess]] = False
    for j in range(free.shape[1]):
        cells = np.flatnonzero(drawn[:, j])
        most = min(int(column_share * free[:, j].sum()), int(free[:, j].sum()) - 1)
        drawn[random_state.permutation(cells)[max(0, most) :], j] = False
    # A row that would be left blank keeps one cell, chosen at random.
    for blank in np.flatnonzero((drawn == free).all(axis=1) & free.any(axis=1)):
        drawn[blank, random_state.choice(np.flatnonzero(free[blank]))] = False
    return drawn


# ---------------------------------------------------------------------- what the cells say


@dataclass(frozen=True, kw_only=True)
class CellPrediction:
    """Predictions for a list of cells: numbers, and chances of levels (n × most levels)."""

    value: np.ndarray
    chance: np.ndarray


def average(predictions: Sequence[CellPrediction]) -> CellPrediction:
    """What an ensemble of these predicts, exactly as `Ensemble.predict` averages its members.

    >>> none = np.zeros((1, 0))
    >>> one, two = (CellPrediction(value=np.array([v]), chance=none) for v in (1.0, 2.0))
    >>> average([one, two]).value.tolist()
    [1.5]
    """
    return CellPrediction(
        value=np.mean([p.value for p in predictions], axis=0),
        chance=np.mean([p.chance for p in predictions], axis=0),
    )


def merge(parts: Sequence[tuple[np.ndarray, CellPrediction]]) -> CellPrediction:
    """What was said of disjoint sets of cells, as if it had been said of all together.

    >>> none = np.zeros((1, 0))
    >>> late, early = (np.array([[False, True]]), np.array([[True, False]]))
    >>> one, two = (CellPrediction(value=np.array([v]), chance=none) for v in (1.0, 2.0))
    >>> merge([(late, one), (early, two)]).value.tolist()
    [2.0, 1.0]
    """
    order = np.argsort(np.concatenate([np.flatnonzero(cells) for cells, _ in parts]))
    return CellPrediction(
        value=np.concatenate([said.value for _, said in parts])[order],
        chance=np.concatenate([said.chance for _, said in parts])[order],
    )


def predict_cells(ensemble: Ensemble, table: EncodedTable, cells: np.ndarray) -> CellPrediction:
    """Predict the cells marked in `cells` from the observed ones of `table`, in row-major order."""
    rows = np.flatnonzero(cells.any(axis=1))
    wanted = cells[rows]
    part = EncodedTable(
        values=np.ascontiguousarray(table.values[rows]),
        observed=np.ascontiguousarray(table.observed[rows]),
        n_categories=table.n_categories,
    )
    most = max(table.n_categories, default=0)
    value = np.empty(wanted.shape, dtype=np.float32)
    chance = np.zeros((*wanted.shape, most), dtype=np.float32)
    soft = ensemble.complete(part)
    for j, place in enumerate(places(table.n_categories)):
        if table.n_categories[j]:
            chance[:, j, : place.stop - place.start] = soft[:, place]
            value[:, j] = soft[:, place].argmax(axis=1)
        else:
            value[:, j] = soft[:, place.start]
    return CellPrediction(value=value[wanted], chance=chance[wanted])


class Judge:
    """The error of predictions for a fixed set of cells.

    Each cell's loss is normalised by its column: squared error over variance for numbers, log-loss
    over entropy for levels, so that knowing no more than a column's own distribution costs about 1.
    Columns are averaged in proportion to how often they are missing. With ``metric="rmse"`` a loss
    is the squared error on the protocol's min–max scale (levels as ordinal codes) and the error the
    root of their mean.

    >>> values = np.array([[0.0], [1.0], [2.0], [3.0]], dtype="float32")
    >>> table = EncodedTable(values=values, observed=np.ones((4, 1), bool), n_categories=(0,))
    >>> cells = np.array([[True], [False], [False], [False]])
    >>> judge = Judge(table, cells, hidden=cells, column_weight=np.ones(1), metric="rmse")
    >>> judge.error(judge.losses(CellPrediction(value=np.array([1.5]), chance=np.zeros((1, 0)))))
    0.5
    """

    def __init__(
        self,
        table: EncodedTable,
        cells: np.ndarray,
        *,
        hidden: np.ndarray,
        column_weight: np.ndarray,
        metric: str = "normalised",
    ) -> None:
        self.metric = metric
        self.rows, self.columns = np.nonzero(cells)
        self.truth = table.values[cells]
        self.n_columns = cells.shape[1]
        self.n_categories = np.array(table.n_categories)
        self._known = table.hide(hidden)
        present = np.bincount(self.columns, minlength=self.n_columns)
        weight = np.where(present > 0, column_weight, 0.0)
        # Where no gappy column could give a cell away, the cells there are have to do.
        weight = weight if weight.any() else (present > 0).astype(float)
        self.column_weight = weight / max(1e-300, weight.sum())
        self.weights = self.column_weight[self.columns] / np.maximum(1, present)[self.columns]
        self.unit = np.array([self._unit(table, j) for j in range(self.n_columns)])

    def __len__(self) -> int:
        return len(self.rows)

    def _unit(self, table: EncodedTable, j: int) -> float:
        """What a column's loss is divided by."""
        known = self._known.values[self._known.observed[:, j], j]
        levels = int(self.n_categories[j])
        if self.metric == "rmse":
            if levels:
                return float(max(1, levels - 1)) ** 2
            seen = table.values[table.observed[:, j], j]
            return float(np.ptp(seen)) ** 2 if len(seen) and np.ptp(seen) > 0 else 1.0
        if not levels:
            spread = float(np.var(known)) if len(known) else 0.0
            return spread if spread > 1e-12 else 1.0
        share = np.bincount(known.astype(int), minlength=levels) / max(1, len(known))
        entropy = float(-(share * np.log(np.maximum(share, 1e-12))).sum())
        # As in training: a nearly constant column must not outweigh all others.
        return max(entropy, 0.1)

    def losses(self, prediction: CellPrediction) -> np.ndarray:
        """The loss of every cell, in units of its column."""
        losses = (prediction.value.astype(np.float64) - self.truth) ** 2
        levels = self.n_categories[self.columns] > 0
        if levels.any():
            chance, truth = prediction.chance[levels], self.truth[levels].astype(int)
            if self.metric == "rmse":
                losses[levels] = (chance.argmax(axis=1) - truth) ** 2
            else:
                hit = np.take_along_axis(chance, truth[:, None], axis=1)[:, 0]
                losses[levels] = -np.log(np.maximum(hit, 1e-6))
        return losses / self.unit[self.columns]

    def error(self, losses: np.ndarray) -> float:
        """One number for all cells; smaller is better."""
        return self.finish(float(self.weights @ losses))

    def finish(self, mean: float) -> float:
        """The mean loss as the metric states it."""
        return float(np.sqrt(max(mean, 0.0))) if self.metric == "rmse" else float(mean)

    def baseline(self) -> CellPrediction:
        """The prediction that knows only a column's own mean, or the shares of its levels."""
        most = int(self.n_categories.max(initial=0))
        center = np.zeros(self.n_columns)
        share = np.zeros((self.n_columns, most))
        for j, levels in enumerate(self.n_categories):
            known = self._known.values[self._known.observed[:, j], j]
            if levels:
                counts = np.bincount(known.astype(int), minlength=levels) + 1e-3
                share[j, :levels] = counts / counts.sum()
            elif len(known):
                center[j] = known.mean()
        return CellPrediction(value=center[self.columns], chance=share[self.columns])

    def by_column(self, losses: np.ndarray) -> np.ndarray:
        """The error of each column; NaN for columns without a cell."""
        present = np.bincount(self.columns, minlength=self.n_columns)
        total = np.bincount(self.columns, weights=losses, minlength=self.n_columns)
        mean = np.where(present > 0, total / np.maximum(1, present), np.nan)
        return np.sqrt(mean) if self.metric == "rmse" else mean

    def bootstrap(self, losses: np.ndarray, n_samples: int = 200) -> np.ndarray:
        """The weighted mean loss in resampled tables: cells cluster by row, so rows are drawn.

        Give the difference of two models' losses and its spread is that of the paired difference.
        """
        _, row = np.unique(self.rows, return_inverse=True)
        n_rows = int(row.max(initial=-1)) + 1
        place = row * self.n_columns + self.columns
        size = n_rows * self.n_columns
        total = np.bincount(place, weights=losses, minlength=size).reshape(n_rows, -1)
        count = np.bincount(place, minlength=size).reshape(n_rows, -1).astype(float)
        random_state = np.random.default_rng(0)
        means = np.empty(n_samples)
        for k in range(n_samples):
            times = np.bincount(random_state.integers(n_rows, size=n_rows), minlength=n_rows)
            drawn = times @ count
            weight = np.where(drawn > 0, self.column_weight, 0.0)
            weight = weight / max(1e-300, weight.sum())
            means[k] = weight @ ((times @ total) / np.maximum(1, drawn))
        return means

    def standard_error(self, losses: np.ndarray) -> float:
        """How far the error would wander on other rows.

        >>> values = np.random.default_rng(0).normal(size=(100, 1)).astype("float32")
        >>> cells = np.ones((100, 1), dtype=bool)
        >>> table = EncodedTable(values=values, observed=cells, n_categories=(0,))
        >>> judge = Judge(table, cells, hidden=~cells, column_weight=np.ones(1))
        >>> 0.05 < judge.standard_error(values[:, 0] ** 2) < 0.3
        True
        """
        if len(np.unique(self.rows)) < 2:
            return float("nan")  # rows are drawn, and one row is always the same
        return float(np.std([self.finish(mean) for mean in self.bootstrap(losses)]))
