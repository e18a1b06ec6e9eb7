"""The second stage: experts per incomplete column, stacked with the masked autoencoder.

The model completes the table; on the completed table each incomplete column is learned again by
the experts of `remasker.expert_models`; all of them, the model included, are weighed by their
predictions of observed cells that they have not seen. The improved table feeds the next round.

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
from remasker.expert_models import EXPERTS, ExpertsConfig, input_knots, input_view
from remasker.gaussian_process import Arrays
from remasker.stacking import MAX_INPUTS, choose_inputs, cross_fit, proper, stack_weights
from remasker.table import EncodedTable

#: The first stage: (values, visible) -> a soft prediction of every cell from the visible ones.
Predict = Callable[[np.ndarray, np.ndarray], np.ndarray]
#: The same for rows of the training table, whose numbers come third, by models that never saw them.
HonestPredict = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]

MODEL = "remasker"
#: A column with fewer observed cells than this is left to the model.
MIN_OBSERVED = 20
#: With more incomplete columns than this there is one round: a further one costs their square.
MAX_CHAINED = 16
#: With more incomplete columns than `MAX_ALONE` the model is asked about some of them at a time, so
#: that so many looks at the table suffice.
MAX_ALONE, N_LOOKS = 60, 30
#: Rows completed at a time, so that memory stays bounded.
CHUNK_ROWS = 4096
QUANTILES = np.linspace(0, 1, 101)


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


def _known(table: EncodedTable) -> tuple[np.ndarray, np.ndarray]:
    """The soft table of what is observed, and which of its cells that is."""
    n_categories = table.n_categories
    levels = [np.eye(k)[table.values[:, j].astype(int)] for j, k in enumerate(n_categories) if k]
    probabilities = np.concatenate(levels, axis=1) if levels else np.zeros((len(table), 0))
    soft = soften(table.values, probabilities, n_categories)
    return soft, np.repeat(table.observed, [max(1, k) for k in n_categories], axis=1)


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
        return proper(result)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Fitted experts: complete tables, say what they weigh, go to a file and back."""

    config: ExpertsConfig
    n_categories: tuple[int, ...]
    prior: np.ndarray
    rounds: tuple[tuple[ColumnStack, ...], ...]
    #: d × 101: quantiles of (truth - prediction) of unseen observed numbers; NaN for other columns
    residuals: np.ndarray
    #: One record per column with experts; see `weights_table`.
    judged: tuple[dict[str, Any], ...]

    def complete(self, table: EncodedTable, predict: Predict | None) -> np.ndarray:
        """The soft table, completed; rows may be new, and do not influence each other."""
        result = np.empty((len(table), len(self.prior)))
        columns = [stack.column for stack in self.rounds[0]]
        for start in range(0, len(table), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            part = EncodedTable(
                values=table.values[rows],
                observed=table.observed[rows],
                n_categories=table.n_categories,
            )
            known, shown = _known(part)
            base = _first_guess(part, predict, self.prior)
            current = np.where(shown, known, _start(base, self.prior, columns, self.n_categories))
            last = current
            for stacks in self.rounds:
                last, current = (
                    current,
                    _improve(current, base, part.observed, stacks, self.n_categories),
                )
            # Rounds differ by the luck of their draws: two of them are better than the last.
            result[rows] = (last + current) / 2 if len(self.rounds) > 2 else current
        return result

    def impute(self, table: EncodedTable, predict: Predict | None) -> np.ndarray:
        """Every cell: a scaled number, or the code of the most likely level."""
        return harden(self.complete(table, predict), self.n_categories)

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
                residuals=tensors["residuals"],
                judged=tuple(manifest["judged"]),
            )
        except (KeyError, TypeError) as error:
            raise ArtifactError(
                f"the experts are damaged ({error}); save the model again"
            ) from error


def _read_stack(tensors: Mapping[str, np.ndarray], r: int, entry: Mapping[str, Any]) -> ColumnStack:
    start = f"{r}.{entry['column']}."
    models = {
        name: {
            key.removeprefix(f"{start}{name}."): array
            for key, array in tensors.items()
            if key.startswith(f"{start}{name}.")
        }
        for name in entry["weights"]
        if name != MODEL
    }
    return ColumnStack(
        column=entry["column"],
        mean=tensors[f"{start}mean"],
        knots=tensors[f"{start}knots"],
        weights=dict(entry["weights"]),
        models=models,
        chosen=tensors.get(f"{start}chosen"),
    )


def _first_guess(table: EncodedTable, predict: Predict | None, prior: np.ndarray) -> np.ndarray:
    if predict is None:
        return np.tile(prior, (len(table), 1))
    return np.array(predict(table.values, table.observed), dtype=np.float64)


def _start(
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


def _improve(
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


# ---------------------------------------------------------------------- fitting


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
    known, shown = _known(table)
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
            stack, models, record, unseen = _fit_column(
                j,
                np.delete(lesson.soft, at[j], axis=1),
                targets,
                None if predict is None else lesson.base[:, at[j]],
                folds[lesson.rows],
                np.random.default_rng([seed, 2, r, j]),
                config,
                fitted.get(j, {}),
            )
            stacks.append(stack)
            if r + 1 < last:
                fitted[j] = models
            judged.append(record)
            lesson.own = unseen
            if not table.n_categories[j]:
                missed = targets - unseen
                residuals[j] = np.quantile(missed[np.isfinite(missed)], QUANTILES)
        rounds.append(tuple(stacks))
        if r + 1 < last:
            for j, lesson in lessons.items():
                others = tuple(stack for stack in stacks if stack.column != j)
                visible = table.observed[lesson.rows]
                lesson.soft = _improve(
                    lesson.soft, lesson.base, visible, others, table.n_categories
                )
                lesson.soft[:, at[j]] = lesson.own
    return Experts(
        config=config,
        n_categories=table.n_categories,
        prior=prior,
        rounds=tuple(rounds),
        residuals=residuals,
        judged=tuple(judged),
    )


@dataclass(kw_only=True)
class _Lesson:
    """The rows from which one column is learned, completed without a look at that column."""

    rows: np.ndarray
    base: np.ndarray
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
        base[:, place] = honest(shown.values, shown.observed, rows)[:, place]
    known, cells = _known(shown)
    soft = np.where(cells, known, _start(base, prior, columns, table.n_categories))
    if own is not None:
        # Here the model fills no gaps, as it does at work: what it would have to fill says nothing.
        rare = table.observed.sum(axis=0) < MIN_OBSERVED
        rare = np.repeat(rare, [max(1, k) for k in table.n_categories])
        soft[:, rare] = prior[rare]
    return _Lesson(rows=rows, base=base, soft=soft, own=base[:, :0])


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
        for j in group:
            own[int(j)] = said[np.searchsorted(rows, rows_of[j])][:, at[j]]
    return own


def _fit_column(
    column: int,
    inputs: np.ndarray,
    targets: np.ndarray,
    own: np.ndarray | None,
    folds: np.ndarray,
    random_state: np.random.Generator,
    config: ExpertsConfig,
    before: Mapping[str, Arrays],
) -> tuple[ColumnStack, dict[str, Arrays], dict[str, Any], np.ndarray]:
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
        models[name], unseen[name] = fit(
            seen, targets, folds, random_state, config, before.get(name)
        )
    if own is not None:
        unseen[MODEL] = own
    mean = targets.mean(axis=0)
    said = np.stack(list(unseen.values()))
    weights = stack_weights(said[:, fresh], targets[fresh], config.shrinkage)
    kept = {name: float(w) for name, w in zip(unseen, weights, strict=True) if w > 0.01}
    stack = ColumnStack(
        column=column,
        mean=mean,
        knots=knots,
        weights=kept,
        models={name: models[name] for name in kept if name != MODEL},
        chosen=chosen,
    )
    # Weights are learned too: what they are worth shows on folds that did not learn them.
    said, goals, parts = said[:, fresh], targets[fresh], folds[fresh]
    judged = np.full_like(targets, np.nan)
    judged[fresh] = cross_fit(said, goals, parts, config.shrinkage)
    variance = max(float(((targets - mean) ** 2).sum(axis=1).mean()), 1e-12)
    error = ((goals - judged[fresh]) ** 2).sum(axis=1) / variance
    record: dict[str, Any] = {
        "column": column,
        "rows": len(targets),
        "weights": kept,
        "error": float(error.mean()),
    }
    if own is not None and len(said) > 1:
        without = cross_fit(said[:-1], goals, parts, config.shrinkage)
        gain = ((goals - without) ** 2).sum(axis=1) / variance - error
        record["gain"] = float(gain.mean())
        record["gain_standard_error"] = float(gain.std() / np.sqrt(len(gain)))
    return stack, models, record, judged
