"""How the experts of `remasker.experts` are fitted: what they learn from, how they are weighed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from remasker.expert_models import EXPERTS, ExpertsConfig, Sample, input_knots, input_view
from remasker.experts import (
    LEAST_SIZE,
    MODEL,
    ColumnStack,
    Experts,
    HonestPredict,
    Predict,
    improve,
    known_cells,
    per_level,
    places,
    rounded,
    size_view,
    start_of_gaps,
)
from remasker.gaussian_process import Arrays
from remasker.stacking import MAX_INPUTS, choose_inputs, cross_fit, proper, stack_weights
from remasker.table import EncodedTable
from remasker.trees import fit_randomised

#: A column with fewer observed cells than this is left to the model. With 20 it was 1.24 times the
#: error (boot/frets, pscl/absentee, HistData/Mayer: 22 to 27 rows, three masks each).
MIN_OBSERVED = 8
#: With more incomplete columns than this there is one round: a further one costs their square.
MAX_CHAINED = 16
#: With more incomplete columns than `MAX_ALONE` the model is asked about some of them at a time, so
#: that so many looks at the table suffice.
MAX_ALONE, N_LOOKS = 60, 30
QUANTILES = np.linspace(0, 1, 101)
#: How large an error is likely to be is learned from so many unseen ones, by so many trees.
SIZE_ROWS, SIZE_TREES, SIZE_FOLDS, SIZE_LEAF = 2000, 50, 5, 10


def n_rounds(wanted: int, n_columns: int) -> int:
    """In how many rounds so many incomplete columns are learned.

    >>> n_rounds(3, 16), n_rounds(3, 17)
    (3, 1)
    """
    return wanted if n_columns <= MAX_CHAINED else 1


def fit_experts(
    table: EncodedTable,
    predict: Predict | None,
    *,
    honest: HonestPredict | None = None,
    config: ExpertsConfig | None = None,
    seed: int = 0,
) -> Experts:
    """Fit experts to the columns of `table` that have gaps.

    `predict` is the first stage; None starts from the columns' means and stacks experts alone.
    `honest` predicts rows of `table` by models that were not trained on them; without it the
    model is judged by cells that it was trained on, and overrated.

    Where column j is a target, it is hidden while the rest of its row is completed. Otherwise the
    other gaps of the row would be filled with knowledge of the very value that is to be predicted
    from them, and experts would trust filled cells that tell nothing where j is really missing.

    >>> rng = np.random.default_rng(0)
    >>> values = rng.normal(size=(80, 1)) + 0.1 * rng.normal(size=(80, 3))
    >>> observed = rng.random(values.shape) < 0.7
    >>> table = EncodedTable(
    ...     values=np.where(observed, values, 0), observed=observed, n_categories=(0, 0, 0)
    ... )
    >>> experts = fit_experts(table, None, config=ExpertsConfig(experts=("ridge",)))
    >>> completed = experts.impute(table, None)
    >>> bool(np.abs(completed - values)[~observed].mean() < 0.4)
    True
    """
    config = config or ExpertsConfig()
    random_state = np.random.default_rng([seed, 1])
    known, shown = known_cells(table)
    prior = known.sum(axis=0) / np.maximum(1, shown.sum(axis=0))
    at = places(table.n_categories)
    counts = table.observed.sum(axis=0)
    columns = np.flatnonzero((counts < len(table)) & (counts >= MIN_OBSERVED)).tolist()
    if len(at) == 1:
        columns = []  # a single column has nothing to be predicted from
    folds = random_state.permutation(np.arange(len(table)) % config.n_folds)
    rows_of = {}
    for j in columns:
        rows = random_state.permutation(np.flatnonzero(table.observed[:, j]))[: config.max_rows]
        rows_of[j] = np.sort(rows)
    own = None
    if len(columns) > MAX_ALONE and honest is not None:
        own = _own_of_many(table, rows_of, honest, random_state.permutation(columns))

    def lesson_of(j: int) -> _Lesson:
        return _lesson(table, rows_of[j], j, predict, honest, prior, columns, own)

    rounds: list[tuple[ColumnStack, ...]] = []
    judged: list[dict[str, Any]] = []
    fitted: dict[int, dict[str, Arrays]] = {}
    sizes: dict[int, Arrays] = {}
    residuals = np.full((len(at), len(QUANTILES)), np.nan)
    # Each round completes the rows of every column anew by the experts of all others.
    last = n_rounds(config.rounds, len(columns))
    # Lessons of many columns would fill the memory: they are used once, and made when needed.
    lessons = {j: lesson_of(j) for j in columns} if last > 1 else {}
    for r in range(last):
        stacks = []
        judged.clear()
        for j in columns:
            lesson = lessons[j] if lessons else lesson_of(j)
            targets = known[lesson.rows, at[j]]
            stack, models, record, unseen, fresh = _fit_column(
                j,
                np.delete(lesson.soft, at[j], axis=1),
                targets,
                None if predict is None else lesson.base[:, at[j]],
                _dealt(folds[lesson.rows], config.n_folds),
                np.random.default_rng([seed, 2, r, j]),
                config,
                fitted.get(j, {}),
            )
            stacks.append(stack)
            if r + 1 < last:
                fitted[j] = models
            judged.append(record)
            lesson.own = unseen
            if r + 1 == last and not table.n_categories[j]:
                seen = size_view(lesson.soft, lesson.shown, at[j], stack.chosen)
                sizes[j], residuals[j] = _fit_sizes(
                    seen[fresh],
                    (targets - unseen)[fresh],
                    np.random.default_rng([seed, 3, j]),
                )
        rounds.append(tuple(stacks))
        if r + 1 < last:
            for j, lesson in lessons.items():
                others = tuple(stack for stack in stacks if stack.column != j)
                visible = table.observed[lesson.rows]
                lesson.soft = improve(lesson.soft, lesson.base, visible, others, table.n_categories)
                lesson.soft[:, at[j]] = lesson.own
    return Experts(
        config=config,
        n_categories=table.n_categories,
        prior=prior,
        rounds=tuple(rounds),
        sizes=sizes,
        residuals=residuals,
        judged=tuple(judged),
    )


@dataclass(kw_only=True)
class _Lesson:
    """The rows from which one column is learned, completed without a look at that column."""

    rows: np.ndarray
    base: np.ndarray
    #: Which cells of the soft table are observed.
    shown: np.ndarray
    soft: np.ndarray
    own: np.ndarray


def _lesson(
    table: EncodedTable,
    rows: np.ndarray,
    j: int,
    predict: Predict | None,
    honest: HonestPredict | None,
    prior: np.ndarray,
    columns: list[int],
    own: Mapping[int, np.ndarray] | None = None,
) -> _Lesson:
    visible = table.observed[rows]
    visible[:, j] = False
    shown = EncodedTable(
        values=np.where(visible, table.values[rows], 0),
        observed=visible,
        n_categories=table.n_categories,
    )
    place = places(table.n_categories)[j]
    if own is not None:
        base = _first_guess(shown, None, prior)
        base[:, place] = own[j]
    else:
        base = _first_guess(shown, predict, prior)
    if honest is not None and own is None:
        # Gaps are filled by the same models as at work; only the target's own prediction has to
        # come from models that were not trained on it.
        said = rounded(honest(shown.values, shown.observed, rows), table.n_categories)
        base[:, place] = said[:, place]
    known, cells = known_cells(shown)
    soft = np.where(cells, known, start_of_gaps(base, prior, columns, table.n_categories))
    if own is not None:
        # Here the model fills no gaps, as it does at work: what it would have to fill says nothing.
        rare = per_level(table.observed.sum(axis=0) < MIN_OBSERVED, table.n_categories)
        soft[:, rare] = prior[rare]
    return _Lesson(rows=rows, base=base, shown=cells, soft=soft, own=base[:, :0])


def _fit_sizes(
    seen: np.ndarray, errors: np.ndarray, random_state: np.random.Generator
) -> tuple[Arrays, np.ndarray]:
    """Trees for how large an error is, and the distribution of unseen errors in units of that."""
    some = random_state.permutation(len(errors))[:SIZE_ROWS]
    folds = np.arange(len(some)) % min(SIZE_FOLDS, len(some))
    arrays, expected = fit_randomised(
        seen[some],
        np.abs(errors[some]),
        folds,
        random_state,
        n_trees=SIZE_TREES,
        min_leaf=SIZE_LEAF,
    )
    surprise = errors[some] / np.maximum(expected, LEAST_SIZE)
    return arrays, np.quantile(surprise, QUANTILES)


def _first_guess(table: EncodedTable, predict: Predict | None, prior: np.ndarray) -> np.ndarray:
    """What the first stage says of every cell; without one, the columns' means."""
    if predict is None:
        return np.tile(prior, (len(table), 1))
    return rounded(predict(table.values, table.observed), table.n_categories)


def _own_of_many(
    table: EncodedTable,
    rows_of: Mapping[int, np.ndarray],
    honest: HonestPredict,
    columns: np.ndarray,
) -> dict[int, np.ndarray]:
    """The model's honest prediction of each column, with a few others hidden beside it.

    Asking for one column at a time costs a look at the table for each: by an estimate from the time
    of one row, two hours at 300 × 500.
    """
    own = {}
    at = places(table.n_categories)
    for group in np.array_split(columns, N_LOOKS):
        rows = np.unique(np.concatenate([rows_of[j] for j in group]))
        visible = table.observed[rows]
        visible[:, group] = False
        said = honest(np.where(visible, table.values[rows], 0), visible, rows)
        said = rounded(said, table.n_categories)
        for j in group:
            own[int(j)] = said[np.searchsorted(rows, rows_of[j])][:, at[j]]
    return own


def _dealt(folds: np.ndarray, n_folds: int) -> np.ndarray:
    """The folds of a column's rows; dealt out evenly where they are so few that one has hardly any.

    >>> _dealt(np.array([3, 0, 3, 3, 4, 3, 3, 3]), 4).tolist()
    [0, 0, 1, 1, 3, 2, 2, 3]
    """
    if np.bincount(folds, minlength=n_folds).min() > 1:
        return folds
    return np.argsort(np.argsort(folds, kind="stable")) * n_folds // len(folds)


def _fit_column(
    column: int,
    inputs: np.ndarray,
    targets: np.ndarray,
    own: np.ndarray | None,
    folds: np.ndarray,
    random_state: np.random.Generator,
    config: ExpertsConfig,
    before: Mapping[str, Arrays],
) -> tuple[ColumnStack, dict[str, Arrays], dict[str, Any], np.ndarray, np.ndarray]:
    """The stack and all models; what is known of it; its word on unseen rows, and whose counts."""
    models, unseen = {}, {}
    chosen, fresh = None, np.ones(len(targets), dtype=bool)
    if inputs.shape[1] > MAX_INPUTS:
        # Rows that chose the inputs would flatter them: others have to judge.
        fresh = folds >= 0.4 * config.n_folds
        chosen = choose_inputs(inputs[~fresh], targets[~fresh])
        inputs = inputs[:, chosen]
    knots = input_knots(inputs)
    for name in config.experts:
        fit, _, view = EXPERTS[name]
        seen = input_view(inputs, knots, view)
        fitted = fit(Sample(seen, targets, folds, random_state, config, before.get(name)))
        if fitted is not None:
            models[name], unseen[name] = fitted
    if own is not None:
        unseen[MODEL] = own
    mean = targets.mean(axis=0)
    said = np.stack(list(unseen.values()))
    pulls = config.shrinkage, config.evenness
    weights = stack_weights(said[:, fresh], targets[fresh], *pulls)
    kept = {name: float(w) for name, w in zip(unseen, weights, strict=True) if w > 0.01}
    # What those had that are not kept goes to the others, not to the mean.
    whole = float(weights.sum()) / max(sum(kept.values()), 1e-12)
    kept = {name: weight * whole for name, weight in kept.items()}
    stack = ColumnStack(
        column=column,
        mean=mean,
        knots=knots,
        weights=kept,
        models={name: models[name] for name in kept if name != MODEL},
        chosen=chosen,
    )
    # Weights are learned too: what they are worth shows on folds that did not learn them.
    judged = proper(mean + np.tensordot(weights, said - mean, axes=1))
    said, goals, parts = said[:, fresh], targets[fresh], folds[fresh]
    judged[fresh] = cross_fit(said, goals, parts, *pulls)
    variance = max(float(((targets - mean) ** 2).sum(axis=1).mean()), 1e-12)
    error = ((goals - judged[fresh]) ** 2).sum(axis=1) / variance
    record: dict[str, Any] = {
        "column": column,
        "rows": len(targets),
        "weights": kept,
        "error": float(error.mean()),
    }
    if own is not None and len(said) > 1:
        without = cross_fit(said[:-1], goals, parts, *pulls)
        gain = ((goals - without) ** 2).sum(axis=1) / variance - error
        record["gain"] = float(gain.mean())
        record["gain_standard_error"] = float(gain.std() / np.sqrt(len(gain)))
    return stack, models, record, judged, fresh
