"""Fitted models at work: point estimates, intervals, class probabilities, draws; all batched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from remasker.experts import (
    CHUNK_ROWS,
    LEAST_SIZE,
    Experts,
    HonestPredict,
    harden,
    known_cells,
    places,
    soften,
)
from remasker.model import MaskedAutoencoder
from remasker.table import EncodedTable
from remasker.tasks import Run, one_by_one
from remasker.training import Member, at_hand

BATCH_ROWS = 1024
#: With more columns than 64 a batch has fewer rows, so that its memory stays the same.
BATCH_CELLS = 2**16
#: Points of the stored distribution of held-out residuals.
QUANTILES = np.linspace(0, 1, 101)
#: With more incomplete columns than this, `draw` fills them in groups.
MAX_DRAW_PASSES = 32
#: Calibration asks about so many rows at most, and about columns in so many groups; of wide tables
#: about fewer rows, so that no more than `LOOK_CELLS` tokens are looked at.
LOOK_ROWS, MAX_LOOKS, LOOK_CELLS = 2000, 30, 2**21


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What a batch of rows is predicted to hold, cell by cell."""

    value: np.ndarray  # rows × d, scaled numbers
    scale: np.ndarray  # rows × d, expected error of `value`
    probabilities: np.ndarray  # rows × K, levels of the categorical columns side by side


@dataclass(kw_only=True)
class _Drawing:
    """Copies of a table, one below the other, while their gaps are drawn."""

    values: np.ndarray
    visible: np.ndarray
    #: The soft table: drawn where drawn, else what both stages say; of no columns without experts.
    soft: np.ndarray
    #: Which draw a row belongs to.
    copies: np.ndarray


@dataclass(kw_only=True)
class Ensemble:
    """The members of an artifact as one model. One member is an ensemble too."""

    members: tuple[Member, ...]
    n_categories: tuple[int, ...]
    #: d × 101: quantiles of held-out (truth - value) / scale, which make intervals and draws honest
    residuals: np.ndarray
    #: The second stage, which has the last word on point estimates; several are averaged.
    experts: tuple[Experts, ...] = ()
    #: d: how far the models' numbers are trusted; less than 1 draws them to the column's mean
    trust: np.ndarray | None = None
    device: str = "cpu"
    _models: list[MaskedAutoencoder] = field(default_factory=list, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_models": []}

    @property
    def models(self) -> list[MaskedAutoencoder]:
        """The members' models, built when first needed."""
        if not self._models:
            device = at_hand(self.device)
            self._models = [m.build(self.n_categories).to(device) for m in self.members]
        return self._models

    @property
    def levels(self) -> list[tuple[int, slice]]:
        """Each categorical column with its place among the levels."""
        stops = np.cumsum(self.n_categories)
        return [(j, slice(stops[j] - k, stops[j])) for j, k in enumerate(self.n_categories) if k]

    @property
    def batch_rows(self) -> int:
        """Rows of a batch: a power of two, which divides what callers cut tables into."""
        fitting = BATCH_CELLS // max(1, len(self.n_categories))
        return min(BATCH_ROWS, 1 << max(3, fitting.bit_length() - 1))

    def predict(self, values: np.ndarray, visible: np.ndarray) -> Predicted:
        """Predict every cell of these rows from the visible ones."""
        device = at_hand(self.device)
        shown = torch.from_numpy(np.ascontiguousarray(visible)).to(device)
        numbers = torch.from_numpy(np.ascontiguousarray(values)).to(device)
        outputs = []
        with torch.inference_mode():
            for model in self.models:
                value, log_scale, logits = model(numbers, shown)
                chances = [logits[:, place].softmax(dim=1) for _, place in self.levels]
                outputs.append(
                    (value, log_scale.exp().square(), torch.cat(chances, 1) if chances else logits)
                )
        value, variance, chance = (
            torch.stack(part).float().cpu().numpy() for part in zip(*outputs, strict=True)
        )
        if self.trust is not None:
            value *= self.trust.astype(np.float32)  # 0 is a column's mean
        return Predicted(
            value=value.mean(axis=0),
            # Members that disagree are less sure than each of them says.
            scale=np.sqrt(variance.mean(axis=0) + value.var(axis=0)),
            probabilities=chance.mean(axis=0),
        )

    def batches(self, table: EncodedTable) -> Iterator[tuple[slice, Predicted]]:
        """Predictions for a table, some rows at a time, so that memory stays bounded."""
        for start in range(0, len(table), self.batch_rows):
            rows = slice(start, start + self.batch_rows)
            yield rows, self.predict(table.values[rows], table.observed[rows])

    def soft(self, values: np.ndarray, visible: np.ndarray) -> np.ndarray:
        """The models' prediction as the second stage wants it; see `remasker.experts`."""
        table = EncodedTable(values=values, observed=visible, n_categories=self.n_categories)
        return self._first_stage(table)[0]

    def _first_stage(self, table: EncodedTable) -> tuple[np.ndarray, np.ndarray]:
        """The models' soft prediction, and the error that they expect of each number."""
        soft = np.empty((len(table), sum(max(1, k) for k in self.n_categories)))
        scale = np.empty(table.values.shape)
        for rows, predicted in self.batches(table):
            soft[rows] = soften(predicted.value, predicted.probabilities, self.n_categories)
            scale[rows] = predicted.scale
        return soft, scale

    def complete(self, table: EncodedTable, run: Run = one_by_one) -> np.ndarray:
        """The soft prediction of every cell by both stages."""
        parts = np.array_split(np.arange(len(table)), range(CHUNK_ROWS, len(table), CHUNK_ROWS))
        assert self.models is not None  # built here, not by each of several threads
        tasks = (partial(self._complete, table.take(rows)) for rows in parts)
        return np.concatenate(run(tasks, len(parts), "filling gaps"))

    def _complete(self, table: EncodedTable) -> np.ndarray:
        return self._refined(table, self.soft(table.values, table.observed))

    def _refined(self, table: EncodedTable, base: np.ndarray) -> np.ndarray:
        """The models' soft prediction after the experts, if there are any, had their say."""
        if not self.experts:
            return base
        return np.mean([experts.complete(table, base) for experts in self.experts], axis=0)

    def impute(self, table: EncodedTable, run: Run = one_by_one) -> np.ndarray:
        """The most likely value of every cell: a scaled number, or the code of a level."""
        return harden(self.complete(table, run), self.n_categories)

    def chances(self, table: EncodedTable) -> dict[int, np.ndarray]:
        """The chance of every level in every row of each categorical column; 1 where observed."""
        known, shown = known_cells(table)
        soft = np.where(shown, known, self.complete(table))
        at = places(self.n_categories)
        return {j: soft[:, at[j]] for j, k in enumerate(self.n_categories) if k}

    def weights_table(self) -> list[dict[str, Any]]:
        """`Experts.weights_table`, averaged over the stacks."""
        table = []
        for records in zip(*(stack.weights_table() for stack in self.experts), strict=True):
            experts = sorted({name for record in records for name in record["weights"]})
            weights = {
                name: float(np.mean([record["weights"].get(name, 0.0) for record in records]))
                for name in experts
            }
            means = {
                name: float(np.mean([record[name] for record in records]))
                for name, value in records[0].items()
                if isinstance(value, float)
            }
            table.append({**records[0], **means, "weights": weights})
        return table

    def honest(self, folds: np.ndarray) -> HonestPredict:
        """Predictions of training rows, each by the member that left out the row's fold."""
        members = [self.alone(index) for index in range(len(self.members))]

        def predict(values: np.ndarray, visible: np.ndarray, rows: np.ndarray) -> np.ndarray:
            said = np.empty((len(rows), sum(max(1, k) for k in self.n_categories)))
            for fold, member in enumerate(members):
                mine = folds[rows] == fold
                said[mine] = member.soft(values[mine], visible[mine])
            return said

        return predict

    def alone(self, index: int) -> Ensemble:
        """One member by itself, without experts."""
        models = self._models[index : index + 1]
        member = self.members[index : index + 1]
        return replace(self, members=member, experts=(), _models=models)

    def intervals(self, table: EncodedTable, level: float) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends that hold `level` of the truth; 0 for categories."""
        ends = [(1 - level) / 2, (1 + level) / 2]
        low, high = (
            np.array([np.interp(end, QUANTILES, row) for row in self.residuals]) for end in ends
        )
        base, scale = self._first_stage(table)
        soft = self._refined(table, base)
        bounds = np.stack([scale * low, scale * high])
        if self.experts:
            sizes = np.mean([experts.error_sizes(table, soft) for experts in self.experts], axis=0)
            surprise = np.mean([experts.residuals for experts in self.experts], axis=0)
            for j in np.flatnonzero(np.isfinite(surprise).all(axis=1)):
                edges = np.interp(ends, QUANTILES, surprise[j])
                bounds[:, :, j] = edges[:, None] * sizes[:, j]
                bounds[:, :, j] += [[-LEAST_SIZE], [LEAST_SIZE]]  # what was rounded away
        bounds += harden(soft, self.n_categories)
        bounds[:, :, [j for j, _ in self.levels]] = 0
        return bounds[0], bounds[1]

    def draw(
        self, table: EncodedTable, n_draws: int, random_state: np.random.Generator
    ) -> Iterator[np.ndarray]:
        """Complete the table `n_draws` times, each time column after column.

        A drawn cell is shown before the next column is drawn, so that columns which are missing
        together keep their correlation. Where there are experts, they say what to draw: one stack
        for a table, the next for the next, as they differ too.
        """
        missing = ~table.observed
        rates = missing.mean(axis=0)
        columns = np.flatnonzero(rates)[np.argsort(rates[rates > 0], kind="stable")]
        groups = np.array_split(columns, max(1, min(len(columns), MAX_DRAW_PASSES)))
        completed = self.complete(table) if self.experts else np.empty((len(table), 0))
        per_chunk = max(1, 16 * self.batch_rows // max(1, len(table)))
        for start in range(0, n_draws, per_chunk):
            copies = np.arange(start, min(start + per_chunk, n_draws))
            drawing = _Drawing(
                values=np.tile(table.values, (len(copies), 1)),
                visible=np.tile(table.observed, (len(copies), 1)),
                soft=np.tile(completed, (len(copies), 1)),
                copies=np.repeat(copies, len(table)),
            )
            for group in groups:
                rows = np.flatnonzero((~drawing.visible[:, group]).any(axis=1))
                for part in np.array_split(rows, max(1, -(-len(rows) // self.batch_rows))):
                    if len(part):
                        self._draw_cells(drawing, part, group, random_state)
            yield from drawing.values.reshape(len(copies), *table.values.shape)

    def _draw_cells(
        self,
        drawing: _Drawing,
        rows: np.ndarray,
        columns: np.ndarray,
        random_state: np.random.Generator,
    ) -> None:
        predicted = self.predict(drawing.values[rows], drawing.visible[rows])
        base = soften(predicted.value, predicted.probabilities, self.n_categories)
        levels, at = dict(self.levels), places(self.n_categories)
        for j in columns:
            gaps = ~drawing.visible[rows, j]
            chance = random_state.random(len(rows))
            surprise = np.interp(chance, QUANTILES, self.residuals[j])
            said, step = base[:, at[j]], predicted.scale[:, j] * surprise
            for k, experts in enumerate(self.experts):
                mine = np.flatnonzero(gaps & (drawing.copies[rows] % len(self.experts) == k))
                known = drawing.soft[rows[mine]], drawing.visible[rows[mine]]
                answer = experts.ask(j, *known, said[mine]) if len(mine) else None
                if answer is not None:
                    said[mine], sizes = answer
                    step[mine] = sizes * np.interp(chance[mine], QUANTILES, experts.residuals[j])
            if j in levels:
                total = np.cumsum(said, axis=1)
                drawn = (chance[:, None] * total[:, -1:] > total).sum(axis=1)
                soft = np.eye(said.shape[1])[drawn]
            else:
                drawn = said[:, 0] + step
                soft = drawn[:, None]
            drawing.values[rows[gaps], j] = drawn[gaps]
            drawing.visible[rows[gaps], j] = True
            if self.experts:
                drawing.soft[rows[gaps], at[j]] = soft[gaps]

    def calibrate(self, table: EncodedTable, held_out: np.ndarray) -> None:
        """Learn the distribution of errors from held-out cells that no member has trained on.

        They are rows × columns; with another leading dimension each member is asked about cells of
        its own.
        """
        if held_out.ndim == 2:
            self._calibrate(table, [(self, held_out)])
        else:
            self._calibrate(table, [(self.alone(k), cells) for k, cells in enumerate(held_out)])

    def calibrate_by_folds(self, table: EncodedTable, folds: np.ndarray) -> None:
        """The same where every row has a member that has not trained on it.

        That member is asked about each number by itself, so that the rest of the row shows what it
        really shows.
        """
        numeric = np.flatnonzero((np.array(self.n_categories) == 0) & table.observed.any(axis=0))
        groups = np.array_split(numeric, max(1, min(len(numeric), MAX_LOOKS)))
        n_rows = min(LOOK_ROWS, 1 + LOOK_CELLS // max(1, len(groups) * table.values.shape[1]))
        some = np.unique(np.linspace(0, len(table) - 1, n_rows).astype(int))
        part, folds = table.take(some), folds[some]
        asked = []
        for group, k in itertools.product(groups, range(len(self.members))):
            cells = np.zeros_like(part.observed)
            cells[:, group] = part.observed[:, group] & (folds == k)[:, None]
            asked.append((self.alone(k), cells))
        self._calibrate(part, asked)

    def _calibrate(self, table: EncodedTable, asked: Sequence[tuple[Ensemble, np.ndarray]]) -> None:
        """Ask models about hidden cells and remember the distribution of what they missed.

        Columns with few cells lean on the others: residuals come in units of the predicted scale,
        so they can be pooled.
        """
        outcomes = [np.empty((0, table.values.shape[1]))]
        for models, hidden in asked:
            rows = np.flatnonzero(hidden.any(axis=1))
            part = table.hide(hidden).take(rows)
            outcome = np.empty(part.values.shape)
            for batch, predicted in models.batches(part):
                missed = table.values[rows][batch] - predicted.value
                outcome[batch] = missed / predicted.scale
            outcomes.append(np.where(hidden[rows], outcome, np.nan))
        outcome = np.concatenate(outcomes)
        numeric = np.array(self.n_categories) == 0
        pooled = outcome[:, numeric]
        pooled = pooled[np.isfinite(pooled)]
        if len(pooled):
            # A handful of residuals says little of the tails: a normal distribution stands in.
            known = len(pooled) / (len(pooled) + 20)
            normal = normal_residuals(1)[0]
            common = known * np.quantile(pooled, QUANTILES) + (1 - known) * normal
            for j in np.flatnonzero(numeric):
                own = outcome[np.isfinite(outcome[:, j]), j]
                trust = len(own) / (len(own) + 50)
                self.residuals[j] = (1 - trust) * common + (
                    trust * np.quantile(own, QUANTILES) if len(own) else 0
                )


def normal_residuals(n_columns: int) -> np.ndarray:
    """Quantiles of a standard normal, for columns whose residuals nobody has seen.

    >>> normal_residuals(1).shape
    (1, 101)
    """
    ends = torch.linspace(0.5 / 101, 1 - 0.5 / 101, 101, dtype=torch.float64)
    return np.tile(torch.special.ndtri(ends).numpy(), (n_columns, 1))
