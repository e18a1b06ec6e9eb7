"""The experts themselves: small regressors that are plain arrays once they are fitted.

Each is a pair of functions. ``fit(sample)`` returns arrays and the prediction of every row by a
model that has not seen it, or None where the rows are not for this expert; ``predict(arrays,
inputs)`` needs the arrays only, so an expert lives in a safetensors file and needs no pickle.
Targets are n × m: one column for a number, one per level for a category, whose predictions are then
probabilities. An expert sees the inputs as they are, their normal scores (which tame long tails),
or both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from remasker.errors import InvalidConfigError, check_integer, check_number, nearest
from remasker.gaussian_process import (
    CHUNK_ROWS,
    ROUGH,
    SMOOTH,
    Arrays,
    Kernel,
    fit_process,
    predict_process,
    squared_distances,
)
from remasker.trees import fit_boosted, fit_randomised, predict_trees

NEIGHBOURS = (1, 2, 3, 5, 8, 12, 20)
#: Boosting takes a model for each level.
MAX_BOOSTED_LEVELS = 8


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Which experts, how large, how often.

    >>> ExpertsConfig(experts=("rigde",))
    Traceback (most recent call last):
    remasker.errors.InvalidConfigError: experts: expected some of 'ridge', 'trees', 'neighbours', \
'smooth', 'warped', 'rough', 'rough_warped', 'boosted', got 'rigde'; did you mean 'ridge'?
    """

    experts: tuple[str, ...] = (
        "ridge",
        "trees",
        "neighbours",
        "smooth",
        "warped",
        "rough",
        "rough_warped",
        "boosted",
    )
    rounds: int = 3
    n_folds: int = 5
    #: Trees of a column, all folds together.
    n_trees: int = 100
    min_leaf: int = 1
    #: No expert learns from more rows than this. Nearest rows, which cost the square, and
    #: Gaussian processes, which cost the cube, learn from fewer.
    max_rows: int = 20_000
    max_near_rows: int = 5000
    max_smooth_rows: int = 1200
    #: Columns of fewer observed cells do without boosted trees.
    min_boosted_rows: int = 3000
    #: Pseudo-observations that pull the weights of the stack towards the column's mean.
    shrinkage: float = 5.0
    #: Pseudo-observations that pull them towards what each expert is worth by itself.
    evenness: float = 60.0

    def __post_init__(self) -> None:
        for name in self.experts:
            if name not in EXPERTS:
                raise InvalidConfigError(
                    f"experts: expected some of {', '.join(map(repr, EXPERTS))}, "
                    f"got {name!r}{nearest(name, EXPERTS)}"
                )
        check_integer("rounds", self.rounds, 1)
        check_integer("n_folds", self.n_folds, 2)
        check_integer("n_trees", self.n_trees, 1)
        check_integer("min_leaf", self.min_leaf, 1)
        check_integer("max_rows", self.max_rows, 10)
        check_integer("max_near_rows", self.max_near_rows, 10)
        check_integer("max_smooth_rows", self.max_smooth_rows, 10)
        check_integer("min_boosted_rows", self.min_boosted_rows, 10)
        check_number("shrinkage", self.shrinkage, 0.0, 1e6)
        check_number("evenness", self.evenness, 0.0, 1e6)


class Sample(NamedTuple):
    """What an expert learns from: n rows with m targets, each row in a fold."""

    inputs: np.ndarray
    targets: np.ndarray
    folds: np.ndarray
    random_state: np.random.Generator
    config: ExpertsConfig
    #: What the same expert had learned in the round before, from which it may go on.
    before: Arrays | None = None


# ---------------------------------------------------------------------- ridge


def fit_ridge(sample: Sample) -> tuple[Arrays, np.ndarray]:
    """A linear model; its penalty is the one whose leave-one-out error is smallest."""
    inputs, targets, folds = sample.inputs, sample.targets, sample.folds
    n = len(inputs)
    center, mean = inputs.mean(axis=0), targets.mean(axis=0)
    left, singular, _ = np.linalg.svd(inputs - center, full_matrices=False)
    along = left.T @ (targets - mean)
    best = (np.inf, 1.0)
    for penalty in n * np.logspace(-4, 1, 11):
        kept = singular**2 / (singular**2 + penalty)
        leverage = np.minimum((left**2 * kept).sum(axis=1) + 1 / n, 0.99)
        error = (targets - mean - left @ (kept[:, None] * along)) / (1 - leverage)[:, None]
        best = min(best, (float((error**2).mean()), penalty))
    penalty = best[1]

    def solve(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        middle, level = inputs[rows].mean(axis=0), targets[rows].mean(axis=0)
        shifted = inputs[rows] - middle
        gram = shifted.T @ shifted + penalty * len(rows) / n * np.eye(inputs.shape[1])
        slope = np.linalg.solve(gram, shifted.T @ (targets[rows] - level))
        return slope, level - middle @ slope

    unseen = np.empty_like(targets)
    for fold in np.unique(folds):
        slope, offset = solve(np.flatnonzero(folds != fold))
        unseen[folds == fold] = inputs[folds == fold] @ slope + offset
    slope, offset = solve(np.arange(n))
    return {"slope": slope, "offset": offset}, unseen


def predict_ridge(arrays: Arrays, inputs: np.ndarray) -> np.ndarray:
    """The linear model at work."""
    return inputs @ arrays["slope"] + arrays["offset"]


# ---------------------------------------------------------------------- trees


def fit_trees(sample: Sample) -> tuple[Arrays, np.ndarray]:
    """Extremely randomised trees."""
    return fit_randomised(
        sample.inputs,
        sample.targets,
        sample.folds,
        sample.random_state,
        n_trees=sample.config.n_trees,
        min_leaf=sample.config.min_leaf,
    )


def fit_boosted_trees(sample: Sample) -> tuple[Arrays, np.ndarray] | None:
    """Boosted trees, where rows are many enough for them and levels few enough."""
    n_rows, n_targets = sample.targets.shape
    if n_rows < sample.config.min_boosted_rows or n_targets > MAX_BOOSTED_LEVELS:
        return None
    return fit_boosted(sample.inputs, sample.targets, sample.folds)


# ---------------------------------------------------------------------- nearest rows


def fit_neighbours(sample: Sample) -> tuple[Arrays, np.ndarray]:
    """Nearest rows, near ones counting more; how many, and in which metric, is cross-validated.

    The metrics: all inputs alike, or each as much as it correlates with the target.
    """
    inputs, targets, folds = sample.inputs, sample.targets, sample.folds
    max_rows = sample.config.max_near_rows
    spread = np.maximum(inputs.std(axis=0), 1e-9)[:, None] * np.maximum(targets.std(axis=0), 1e-9)
    covariance = (inputs - inputs.mean(axis=0)).T @ (targets - targets.mean(axis=0)) / len(inputs)
    correlation = np.abs(covariance / spread).max(axis=1)
    stored = np.ones(len(inputs), dtype=bool)
    if len(inputs) > max_rows:
        stored[sample.random_state.permutation(len(inputs))[max_rows:]] = False
    best: tuple[float, int, np.ndarray, np.ndarray] | None = None
    for metric in (np.ones(inputs.shape[1]), correlation + 0.02):
        scaled = inputs * metric
        unseen = np.empty((len(NEIGHBOURS), *targets.shape))
        for fold in np.unique(folds):
            known = stored & (folds != fold)
            asked = folds == fold
            near, far = _nearest(scaled[known], scaled[asked])
            for i, k in enumerate(NEIGHBOURS):
                unseen[i, asked] = _average(targets[known], near, far, k)
        errors = ((unseen - targets) ** 2).mean(axis=(1, 2))
        i = int(errors.argmin())
        if best is None or errors[i] < best[0]:
            best = (float(errors[i]), i, metric, unseen[i])
    assert best is not None
    _, i, metric, chosen = best
    arrays = {
        "metric": metric,
        "reference": (inputs * metric)[stored].astype(np.float32),
        "targets": targets[stored].astype(np.float32),
        "n_neighbours": np.array([NEIGHBOURS[i]]),
    }
    return arrays, chosen


def predict_neighbours(arrays: Arrays, inputs: np.ndarray) -> np.ndarray:
    """The average of the nearest stored rows."""
    k = int(arrays["n_neighbours"][0])
    near, far = _nearest(arrays["reference"].astype(np.float64), inputs * arrays["metric"], k)
    return _average(arrays["targets"], near, far, k)


def _nearest(
    reference: np.ndarray, queries: np.ndarray, k: int = NEIGHBOURS[-1]
) -> tuple[np.ndarray, np.ndarray]:
    """Indices and distances of the k nearest, nearest first."""
    k = min(k, len(reference))
    near = np.empty((len(queries), k), dtype=np.int64)
    far = np.empty((len(queries), k))
    for start in range(0, len(queries), CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        squared = squared_distances(queries[part], reference)
        some = np.argpartition(squared, k - 1, axis=1)[:, :k]
        values = np.take_along_axis(squared, some, axis=1)
        order = np.argsort(values, axis=1, kind="stable")
        near[part] = np.take_along_axis(some, order, axis=1)
        far[part] = np.sqrt(np.take_along_axis(values, order, axis=1))
    return near, far


def _average(targets: np.ndarray, near: np.ndarray, far: np.ndarray, k: int) -> np.ndarray:
    k = min(k, near.shape[1])
    weight = 1 / (far[:, :k] + 0.05 * far[:, k - 1 : k] + 1e-6)
    weight /= weight.sum(axis=1, keepdims=True)
    return np.einsum("nk,nkm->nm", weight, targets[near[:, :k]])


# ---------------------------------------------------------------------- Gaussian processes


def fit_gaussian(kernel: Kernel, sample: Sample) -> tuple[Arrays, np.ndarray]:
    """A Gaussian process with the kernel, from as many rows as the configuration allows."""
    return fit_process(
        kernel,
        sample.inputs,
        sample.targets,
        sample.folds,
        sample.random_state,
        max_rows=sample.config.max_smooth_rows,
        before=sample.before,
    )


Fit = Callable[[Sample], tuple[Arrays, np.ndarray] | None]
Predict = Callable[[Arrays, np.ndarray], np.ndarray]

#: How to fit, how to predict, and which view of the inputs to look at.
EXPERTS: dict[str, tuple[Fit, Predict, str]] = {
    "ridge": (fit_ridge, predict_ridge, "both"),
    "trees": (fit_trees, predict_trees, "raw"),
    "neighbours": (fit_neighbours, predict_neighbours, "raw"),
    "smooth": (partial(fit_gaussian, SMOOTH), partial(predict_process, SMOOTH), "raw"),
    "warped": (partial(fit_gaussian, SMOOTH), partial(predict_process, SMOOTH), "scores"),
    "rough": (partial(fit_gaussian, ROUGH), partial(predict_process, ROUGH), "raw"),
    "rough_warped": (partial(fit_gaussian, ROUGH), partial(predict_process, ROUGH), "scores"),
    "boosted": (fit_boosted_trees, predict_trees, "raw"),
}


# ---------------------------------------------------------------------- views of the inputs

_LEVELS = np.linspace(0, 1, 65)
_SCORES = ndtri(np.clip(_LEVELS, 0.008, 0.992))


def input_knots(inputs: np.ndarray) -> np.ndarray:
    """Quantiles of every input: all that `input_view` has to remember."""
    return np.quantile(inputs, _LEVELS, axis=0)


def input_view(inputs: np.ndarray, knots: np.ndarray, view: str) -> np.ndarray:
    """The inputs as one kind of expert sees them.

    >>> inputs = np.array([[0.0], [1.0], [2.0], [1000.0]])
    >>> input_view(inputs, input_knots(inputs), "scores").round(1).ravel().tolist()
    [-2.4, -0.4, 0.4, 2.4]
    """
    if view == "raw":
        return inputs
    scores = np.zeros_like(inputs)
    for c in range(inputs.shape[1]):
        values, which = np.unique(knots[:, c], return_inverse=True)
        if len(values) > 1:
            # A value that many rows share stands in the middle of their ranks.
            middle = np.bincount(which, _SCORES) / np.bincount(which)
            scores[:, c] = np.interp(inputs[:, c], values, middle)
    return scores if view == "scores" else np.hstack([inputs, scores])
