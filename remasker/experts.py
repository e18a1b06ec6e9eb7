"""The second stage at work: experts per incomplete column, stacked with the masked autoencoder.

The model completes the table; on the completed table each incomplete column is learned again by
the experts of `remasker.expert_models`; all of them, the model included, are weighed by their
predictions of observed cells that they have not seen. The improved table feeds the next round.
How they are fitted is in `remasker.expert_fitting`.

Everything happens in a *soft* table: one column per number, one per level of a category holding
its probability. Numbers and categories are then one problem: a category's levels are predicted
like numbers between 0 and 1 and weighed by their squared error (the Brier score).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from remasker.errors import ArtifactError, make_config
from remasker.expert_models import EXPERTS, ExpertsConfig, input_view
from remasker.gaussian_process import Arrays
from remasker.stacking import proper
from remasker.table import EncodedTable
from remasker.trees import predict_trees

#: The first stage: (values, visible) -> a soft prediction of every cell from the visible ones.
Predict = Callable[[np.ndarray, np.ndarray], np.ndarray]
#: The same for rows of the training table, whose numbers come third, by models that never saw them.
HonestPredict = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]

MODEL = "remasker"
#: Rows completed at a time, so that memory stays bounded.
CHUNK_ROWS = 4096
#: What fills a gap is rounded to so many digits. Sums in another order differ in the seventh digit:
#: rows of which the same is known would differ by the batch they came in, and trees and nearest
#: rows tell them apart by whatever sets them apart.
DIGITS = 4
#: No error is taken to be smaller than what is rounded away.
LEAST_SIZE = 10.0**-DIGITS


def places(n_categories: tuple[int, ...]) -> list[slice]:
    """Where each column sits in the soft table.

    >>> places((0, 3, 0))
    [slice(0, 1, None), slice(1, 4, None), slice(4, 5, None)]
    """
    stops = np.cumsum([max(1, k) for k in n_categories]).tolist()
    return [slice(stop - max(1, k), stop) for k, stop in zip(n_categories, stops, strict=True)]


def soften(
    values: np.ndarray, probabilities: np.ndarray, n_categories: tuple[int, ...]
) -> np.ndarray:
    """The soft table of a model's output: its numbers, and its probabilities side by side.

    >>> soften(np.array([[0.5, 9.0]]), np.array([[0.2, 0.8]]), (0, 2)).tolist()
    [[0.5, 0.2, 0.8]]
    """
    soft = np.empty((len(values), sum(max(1, k) for k in n_categories)))
    start = 0
    for j, place in enumerate(places(n_categories)):
        k = n_categories[j]
        soft[:, place] = probabilities[:, start : start + k] if k else values[:, j : j + 1]
        start += k
    return soft


def harden(soft: np.ndarray, n_categories: tuple[int, ...]) -> np.ndarray:
    """Numbers as they are, and the most likely level of each category.

    >>> harden(np.array([[0.5, 0.2, 0.8]]), (0, 2)).tolist()
    [[0.5, 1.0]]
    """
    parts = [
        soft[:, place].argmax(axis=1) if k else soft[:, place][:, 0]
        for k, place in zip(n_categories, places(n_categories), strict=True)
    ]
    return np.stack(parts, axis=1).astype(np.float32)


def per_level(columns: np.ndarray, n_categories: tuple[int, ...]) -> np.ndarray:
    """What is said of each column, said of its place in the soft table.

    >>> per_level(np.array([[True, False]]), (0, 2)).tolist()
    [[True, False, False]]
    """
    return np.repeat(columns, [max(1, k) for k in n_categories], axis=-1)


def known_cells(table: EncodedTable) -> tuple[np.ndarray, np.ndarray]:
    """The soft table of what is observed, and which of its cells that is."""
    n_categories = table.n_categories
    levels = [np.eye(k)[table.values[:, j].astype(int)] for j, k in enumerate(n_categories) if k]
    probabilities = np.concatenate(levels, axis=1) if levels else np.zeros((len(table), 0))
    soft = soften(table.values, probabilities, n_categories)
    return soft, per_level(table.observed, n_categories)


@dataclass(frozen=True, kw_only=True)
class ColumnStack:
    """How one column is predicted in one round; experts without weight are not kept."""

    column: int
    mean: np.ndarray
    knots: np.ndarray
    weights: dict[str, float]
    models: dict[str, Arrays]
    #: Which of the other columns of the soft table the experts look at; None: all.
    chosen: np.ndarray | None = None

    def predict(self, soft: np.ndarray, place: slice, model: np.ndarray) -> np.ndarray:
        """The column in these rows, from the other columns and the model's own prediction."""
        inputs = np.delete(soft, place, axis=1)
        if self.chosen is not None:
            inputs = inputs[:, self.chosen]
        result = np.tile(self.mean, (len(soft), 1))
        for name, weight in self.weights.items():
            said = model
            if name != MODEL:
                _, predict, view = EXPERTS[name]
                said = predict(self.models[name], input_view(inputs, self.knots, view))
            result += weight * (said - self.mean)
        return proper(np.round(result, DIGITS))


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Fitted experts: complete tables, say what they weigh, go to a file and back."""

    config: ExpertsConfig
    n_categories: tuple[int, ...]
    prior: np.ndarray
    rounds: tuple[tuple[ColumnStack, ...], ...]
    #: Per column of numbers, trees that say how large an error a row makes likely.
    sizes: Mapping[int, Arrays]
    #: d × 101: quantiles of (truth - prediction) of unseen observed numbers, in units of that size;
    #: NaN for other columns
    residuals: np.ndarray
    #: One record per column with experts; see `weights_table`.
    judged: tuple[dict[str, Any], ...]

    def complete(self, table: EncodedTable, base: np.ndarray | None) -> np.ndarray:
        """The soft table, completed; rows may be new, and do not influence each other.

        `base` is what the first stage predicts of every cell; None: there was none in `fit`.
        """
        result = np.empty((len(table), len(self.prior)))
        columns = [stack.column for stack in self.rounds[0]]
        if base is None:
            base = np.broadcast_to(self.prior, result.shape)
        for start in range(0, len(table), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            part = EncodedTable(
                values=table.values[rows],
                observed=table.observed[rows],
                n_categories=table.n_categories,
            )
            known, shown = known_cells(part)
            guess = rounded(base[rows], self.n_categories)
            current = np.where(
                shown, known, start_of_gaps(guess, self.prior, columns, self.n_categories)
            )
            last = current
            for stacks in self.rounds:
                last, current = (
                    current,
                    improve(current, guess, part.observed, stacks, self.n_categories),
                )
            # Rounds differ by the luck of their draws: two of them are better than the last.
            result[rows] = (last + current) / 2 if len(self.rounds) > 2 else current
        return result

    def impute(self, table: EncodedTable, base: np.ndarray | None) -> np.ndarray:
        """Every cell: a scaled number, or the code of the most likely level."""
        return harden(self.complete(table, base), self.n_categories)

    def ask(
        self, column: int, soft: np.ndarray, visible: np.ndarray, base: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """What the last round says of a column in otherwise complete rows; None: nothing.

        With the size of its errors, NaN for levels. `base` is the model's word of the column.
        """
        for stack in self.rounds[-1]:
            if stack.column == column:
                said = stack.predict(soft, places(self.n_categories)[column], base)
                return said, self._size(stack, soft, per_level(visible, self.n_categories))
        return None

    def error_sizes(self, table: EncodedTable, soft: np.ndarray) -> np.ndarray:
        """How far off the numbers of a completed table may be, cell by cell; NaN for others."""
        shown = per_level(table.observed, self.n_categories)
        result = np.full(table.values.shape, np.nan)
        for stack in self.rounds[-1]:
            result[:, stack.column] = self._size(stack, soft, shown)
        return result

    def _size(self, stack: ColumnStack, soft: np.ndarray, shown: np.ndarray) -> np.ndarray:
        if stack.column not in self.sizes:
            return np.full(len(soft), np.nan)
        seen = size_view(soft, shown, places(self.n_categories)[stack.column], stack.chosen)
        return np.maximum(predict_trees(self.sizes[stack.column], seen)[:, 0], LEAST_SIZE)

    def weights_table(self) -> list[dict[str, Any]]:
        """What each expert weighs in the last round, and whether the model added anything.

        `error` is the squared error of unseen cells over that of the column's mean; `gain` is how
        much of it the model's own prediction saves, with the standard error of that figure.
        """
        return [dict(record) for record in self.judged]

    # ------------------------------------------------------------------ on disk

    def to_tensors(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Arrays for a safetensors file, and the rest for JSON."""
        tensors = {"prior": self.prior, "residuals": self.residuals}
        for j, arrays in self.sizes.items():
            tensors |= {f"size.{j}.{key}": array for key, array in arrays.items()}
        layout = []
        for r, stacks in enumerate(self.rounds):
            layout.append([{"column": s.column, "weights": s.weights} for s in stacks])
            for stack in stacks:
                tensors[f"{r}.{stack.column}.mean"] = stack.mean
                tensors[f"{r}.{stack.column}.knots"] = stack.knots
                if stack.chosen is not None:
                    tensors[f"{r}.{stack.column}.chosen"] = stack.chosen
                for name, arrays in stack.models.items():
                    for key, array in arrays.items():
                        tensors[f"{r}.{stack.column}.{name}.{key}"] = array
        manifest = {
            "config": {**asdict(self.config), "experts": list(self.config.experts)},
            "n_categories": list(self.n_categories),
            "rounds": layout,
            "sizes": list(self.sizes),
            "judged": [dict(record) for record in self.judged],
        }
        return {key: np.ascontiguousarray(a) for key, a in tensors.items()}, manifest

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, np.ndarray], manifest: Mapping[str, Any]
    ) -> Experts:
        """What `to_tensors` gave away."""
        try:
            settings = {**manifest["config"], "experts": tuple(manifest["config"]["experts"])}
            rounds = []
            for r, stacks in enumerate(manifest["rounds"]):
                rounds.append(tuple(_read_stack(tensors, r, entry) for entry in stacks))
            return cls(
                config=make_config(ExpertsConfig, settings),
                n_categories=tuple(manifest["n_categories"]),
                prior=tensors["prior"],
                rounds=tuple(rounds),
                sizes={j: _part(tensors, f"size.{j}.") for j in manifest["sizes"]},
                residuals=tensors["residuals"],
                judged=tuple(manifest["judged"]),
            )
        except (KeyError, TypeError) as error:
            raise ArtifactError(
                f"the experts are damaged ({error}); save the model again"
            ) from error


def _read_stack(tensors: Mapping[str, np.ndarray], r: int, entry: Mapping[str, Any]) -> ColumnStack:
    start = f"{r}.{entry['column']}."
    models = {name: _part(tensors, f"{start}{name}.") for name in entry["weights"] if name != MODEL}
    return ColumnStack(
        column=entry["column"],
        mean=tensors[f"{start}mean"],
        knots=tensors[f"{start}knots"],
        weights=dict(entry["weights"]),
        models=models,
        chosen=tensors.get(f"{start}chosen"),
    )


def _part(tensors: Mapping[str, np.ndarray], start: str) -> Arrays:
    return {k.removeprefix(start): array for k, array in tensors.items() if k.startswith(start)}


def size_view(
    soft: np.ndarray, shown: np.ndarray, place: slice, chosen: np.ndarray | None
) -> np.ndarray:
    """What makes errors larger or smaller: the other cells of a row, and which of them are gaps."""
    inputs, seen = (np.delete(part, place, axis=1) for part in (soft, shown))
    if chosen is not None:
        inputs, seen = inputs[:, chosen], seen[:, chosen]
    return np.hstack([inputs, seen])


def rounded(soft: np.ndarray, n_categories: tuple[int, ...]) -> np.ndarray:
    """A soft table to `DIGITS` digits, whose probabilities still add up to 1.

    >>> rounded(np.array([[0.30000003, 0.5, 0.49999997]]), (0, 2)).tolist()
    [[0.3, 0.5, 0.5]]
    """
    result = np.round(soft.astype(np.float64), DIGITS)
    for place in places(n_categories):
        result[:, place] = proper(result[:, place])
    return result


def start_of_gaps(
    base: np.ndarray, prior: np.ndarray, columns: list[int], n_categories: tuple[int, ...]
) -> np.ndarray:
    """What gaps hold before the first round: the mean where experts come, else the model's word.

    Measured: experts that first look at a constant find more than experts that first look at the
    model's guesses, whose errors stay; the model joins with what it is worth when they are stacked.
    """
    start = base.copy()
    for j in columns:
        start[:, places(n_categories)[j]] = prior[places(n_categories)[j]]
    return start


def improve(
    current: np.ndarray,
    base: np.ndarray,
    observed: np.ndarray,
    stacks: tuple[ColumnStack, ...],
    n_categories: tuple[int, ...],
) -> np.ndarray:
    """One round: every gap predicted anew from the table as the round before left it."""
    improved = current.copy()
    for stack in stacks:
        place = places(n_categories)[stack.column]
        rows = np.flatnonzero(~observed[:, stack.column])
        if len(rows):
            improved[rows, place] = stack.predict(current[rows], place, base[rows, place])
    return improved
