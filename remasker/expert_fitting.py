"""How the experts of `remasker.experts` are fitted: what they learn from, how they are weighed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from remasker.expert_models import EXPERTS, ExpertsConfig, Sample, input_knots, input_view
from remasker.experts import (
    LEAST_SIZE,
    MODEL,
    ColumnStack,
    Experts,
    HonestPredict,
    Predict,
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
from remasker.tasks import Run, one_by_one
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
#: What people read while the first stage is asked.
LOOKING = "fitting experts, first look"
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
    return fit_stacks(table, predict, honest=honest, config=config, seeds=[seed])[0]


def fit_stacks(
    table: EncodedTable,
    predict: Predict | None,
    *,
    seeds: Sequence[int],
    honest: HonestPredict | None = None,
    config: ExpertsConfig | None = None,
    run: Run = one_by_one,
) -> tuple[Experts, ...]:
    """As many as there are `seeds`, which share the first look at the table.

    A column in a round of a stack is a task by itself, so that all cores have work where one stack
    is all there is time for. A task says of every other column's lesson what its gaps are; so
    experts, which are large, travel once.
    """
    if not seeds:
        return ()
    config = config or ExpertsConfig()
    known, shown = known_cells(table)
    at = places(table.n_categories)
    counts = table.observed.sum(axis=0)
    columns = np.flatnonzero((counts < len(table)) & (counts >= MIN_OBSERVED)).tolist()
    if len(at) == 1:
        columns = []  # a single column has nothing to be predicted from
    teacher = _Teacher(
        predict=predict,
        honest=honest,
        prior=known.sum(axis=0) / np.maximum(1, shown.sum(axis=0)),
        columns=columns,
        rare=per_level(counts < MIN_OBSERVED, table.n_categories),
    )
    dealt = np.arange(len(table)) % config.n_folds
    random_states = [np.random.default_rng([seed, 1]) for seed in seeds]
    stacks = [
        _Growing(seed=seed, folds=random_state.permutation(dealt))
        for seed, random_state in zip(seeds, random_states, strict=True)
    ]
    rows_of = {j: _some_rows(table, j, config.max_rows, random_states[0]) for j in columns}
    own: Mapping[int, np.ndarray] = {}
    if len(columns) > MAX_ALONE and honest is not None:
        order = random_states[0].permutation(columns)
        own = _own_of_many(table, rows_of, honest, order, run)

    def make(j: int) -> Callable[[], _Lesson]:
        return partial(teacher.lesson, table.take(rows_of[j]), rows_of[j], j, own.get(j))

    targets = {j: known[rows_of[j], at[j]] for j in columns}
    last = n_rounds(config.rounds, len(columns))
    # Lessons of many columns would fill the memory: they are used once, and made when needed.
    lessons: dict[int, _Lesson] = {}
    gaps: dict[int, np.ndarray] = {}
    if last > 1:
        gaps = {j: ~table.observed[rows] for j, rows in rows_of.items()}
        made = run(map(make, columns), len(columns), LOOKING)
        lessons = dict(zip(columns, made, strict=True))
        for stack in stacks:
            stack.soft = {j: lesson.soft.copy() for j, lesson in lessons.items()}
    # Each round completes the rows of every column anew by the experts of all others.
    for r in range(last):
        tasks = (
            partial(
                _learn,
                replace(lessons[j], soft=stack.soft[j]) if lessons else make(j),
                targets[j],
                _dealt(stack.folds[rows_of[j]], config.n_folds),
                (stack.seed, r),
                config,
                stack.settings.get(j, {}),
                _questions(j, at[j], lessons, stack.soft, gaps) if r + 1 < last else None,
            )
            for stack in stacks
            for j in columns
        )
        doing = "fitting experts" + (f", round {r + 1} of {last}" if last > 1 else "")
        learned = iter(run(tasks, len(stacks) * len(columns), doing))
        for stack in stacks:
            stack.grow({j: next(learned) for j in columns}, at, gaps)
    return tuple(stack.grown(config, table.n_categories, teacher.prior) for stack in stacks)


def _some_rows(
    table: EncodedTable, j: int, most: int, random_state: np.random.Generator
) -> np.ndarray:
    """From which rows a column is learned."""
    return np.sort(random_state.permutation(np.flatnonzero(table.observed[:, j]))[:most])


@dataclass(frozen=True, kw_only=True)
class _Lesson:
    """The rows from which one column is learned, completed without a look at that column."""

    column: int
    place: slice
    #: What the first stage says of every cell, and what of this column; None: there is none.
    base: np.ndarray
    own: np.ndarray | None
    #: Which cells of the soft table are observed.
    shown: np.ndarray
    soft: np.ndarray
    is_number: bool


@dataclass(frozen=True, kw_only=True)
class _Teacher:
    """Makes lessons."""

    predict: Predict | None
    honest: HonestPredict | None
    prior: np.ndarray
    #: The columns that have experts.
    columns: list[int]
    #: Places in the soft table of columns that nobody can learn.
    rare: np.ndarray

    def lesson(
        self, table: EncodedTable, rows: np.ndarray, j: int, own: np.ndarray | None
    ) -> _Lesson:
        """Of column `j`; `table` holds its `rows`, `own` the model's honest word where known."""
        visible = table.observed.copy()
        visible[:, j] = False
        shown = EncodedTable(
            values=np.where(visible, table.values, 0),
            observed=visible,
            n_categories=table.n_categories,
        )
        place = places(table.n_categories)[j]
        base = np.tile(self.prior, (len(table), 1))
        if own is not None:
            base[:, place] = own
        elif self.predict is not None:
            base = rounded(self.predict(shown.values, shown.observed), table.n_categories)
            if self.honest is not None:
                # Gaps are filled by the same models as at work; only the target's own prediction
                # has to come from models that were not trained on it.
                said = rounded(self.honest(shown.values, shown.observed, rows), table.n_categories)
                base[:, place] = said[:, place]
        known, cells = known_cells(shown)
        start = start_of_gaps(base, self.prior, self.columns, table.n_categories)
        soft = np.where(cells, known, start)
        if own is not None:
            # Here the model fills no gaps, as it does at work: what it would fill says nothing.
            soft[:, self.rare] = self.prior[self.rare]
        return _Lesson(
            column=j,
            place=place,
            base=base,
            own=None if self.predict is None else base[:, place],
            shown=cells,
            soft=soft,
            is_number=not table.n_categories[j],
        )


class _Learned(NamedTuple):
    """What a task brings back: a column's stack, and all that others need of it."""

    stack: ColumnStack
    #: From which the same experts go on in the next round.
    settings: dict[str, Arrays]
    record: dict[str, Any]
    #: The stack's word on rows that it has not seen.
    unseen: np.ndarray
    #: What it says of gaps in other columns' lessons.
    answers: np.ndarray
    #: After the last round, of numbers: how large errors are, and their distribution.
    sizes: tuple[Arrays, np.ndarray] | None


def _learn(
    lesson: _Lesson | Callable[[], _Lesson],
    targets: np.ndarray,
    folds: np.ndarray,
    seed: tuple[int, int],
    config: ExpertsConfig,
    settings: Mapping[str, Arrays],
    questions: tuple[np.ndarray, np.ndarray] | None,
) -> _Learned:
    """One column in one round; `seed` is the stack's and the round's."""
    if not isinstance(lesson, _Lesson):
        lesson = lesson()
    stack, models, record, unseen, fresh = _fit_column(
        lesson.column,
        np.delete(lesson.soft, lesson.place, axis=1),
        targets,
        lesson.own,
        folds,
        np.random.default_rng([seed[0], 2, seed[1], lesson.column]),
        config,
        settings,
    )
    answers, sizes = np.empty((0, targets.shape[1])), None
    if questions is not None:
        answers = stack.predict(questions[0], lesson.place, questions[1])
    elif lesson.is_number:
        sizes = _fit_sizes(
            size_view(lesson.soft, lesson.shown, lesson.place, stack.chosen)[fresh],
            (targets - unseen)[fresh],
            np.random.default_rng([seed[0], 3, lesson.column]),
        )
    kept = {
        name: {key: array for key, array in arrays.items() if key.startswith("settings")}
        for name, arrays in models.items()
    }
    return _Learned(stack, kept, record, unseen, answers, sizes)


def _questions(
    j: int,
    place: slice,
    lessons: Mapping[int, _Lesson],
    soft: Mapping[int, np.ndarray],
    gaps: Mapping[int, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of all other lessons that lack column `j`, with the first stage's word of it."""
    others = [i for i in lessons if i != j]
    rows = [soft[i][gaps[i][:, j]] for i in others]
    base = [lessons[i].base[gaps[i][:, j], place] for i in others]
    return np.concatenate(rows or [soft[j][:0]]), np.concatenate(base or [soft[j][:0, place]])


@dataclass(kw_only=True)
class _Growing:
    """A stack of experts, round after round."""

    seed: int
    folds: np.ndarray
    #: Each column's lesson, as the rounds so far have completed it.
    soft: dict[int, np.ndarray] = field(default_factory=dict)
    rounds: list[dict[int, _Learned]] = field(default_factory=list)

    @property
    def settings(self) -> dict[int, dict[str, Arrays]]:
        """What the last round's experts had learned."""
        last = self.rounds[-1] if self.rounds else {}
        return {j: learned.settings for j, learned in last.items()}

    def grow(
        self,
        learned: dict[int, _Learned],
        at: Sequence[slice],
        gaps: Mapping[int, np.ndarray],
    ) -> None:
        """One round more."""
        for j, column in learned.items():
            done = 0
            for i in self.soft if len(column.answers) else ():
                if i != j:
                    lacking = gaps[i][:, j]
                    n_rows = int(lacking.sum())
                    self.soft[i][lacking, at[j]] = column.answers[done : done + n_rows]
                    done += n_rows
        for j, soft in self.soft.items():
            soft[:, at[j]] = learned[j].unseen
        self.rounds.append(learned)

    def grown(
        self, config: ExpertsConfig, n_categories: tuple[int, ...], prior: np.ndarray
    ) -> Experts:
        """What works without what it was learned from."""
        sizes = {j: found.sizes for j, found in self.rounds[-1].items() if found.sizes}
        residuals = np.full((len(n_categories), len(QUANTILES)), np.nan)
        for j, (_, quantiles) in sizes.items():
            residuals[j] = quantiles
        return Experts(
            config=config,
            n_categories=n_categories,
            prior=prior,
            rounds=tuple(tuple(found.stack for found in r.values()) for r in self.rounds),
            sizes={j: arrays for j, (arrays, _) in sizes.items()},
            residuals=residuals,
            judged=tuple(found.record for found in self.rounds[-1].values()),
        )


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


def _own_of_many(
    table: EncodedTable,
    rows_of: Mapping[int, np.ndarray],
    honest: HonestPredict,
    columns: np.ndarray,
    run: Run,
) -> dict[int, np.ndarray]:
    """The model's honest prediction of each column, with a few others hidden beside it.

    Asking for one column at a time costs a look at the table for each: by an estimate from the time
    of one row, two hours at 300 × 500.
    """
    groups = np.array_split(columns, N_LOOKS)
    asked = [np.unique(np.concatenate([rows_of[j] for j in group])) for group in groups]
    tasks = (
        partial(_look, table.take(rows), rows, group, honest)
        for rows, group in zip(asked, groups, strict=True)
    )
    own, at = {}, places(table.n_categories)
    for said, rows, group in zip(run(tasks, len(groups), LOOKING), asked, groups, strict=True):
        for j in group:
            own[int(j)] = said[np.searchsorted(rows, rows_of[j])][:, at[j]]
    return own


def _look(
    table: EncodedTable, rows: np.ndarray, hidden: np.ndarray, honest: HonestPredict
) -> np.ndarray:
    visible = table.observed.copy()
    visible[:, hidden] = False
    said = honest(np.where(visible, table.values, 0), visible, rows)
    return rounded(said, table.n_categories)


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
