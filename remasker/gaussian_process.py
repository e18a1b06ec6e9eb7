"""Gaussian processes as plain arrays: two kernels, the settings by marginal likelihood.

The processes behind the experts `smooth`, `warped`, `rough` and `rough_warped` of
`remasker.expert_models`, which says what an expert is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.linalg import lapack
from scipy.optimize import minimize
from scipy.spatial.distance import cdist

Arrays = dict[str, np.ndarray]

#: Rows compared with the stored ones at a time, so that memory stays bounded.
CHUNK_ROWS = 1024
HYPERPARAMETER_ROWS = 300


def squared_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Between every row of `a` and every row of `b`."""
    squared = a @ (-2 * b).T
    squared += (a * a).sum(axis=1)[:, None]
    squared += (b * b).sum(axis=1)
    return np.maximum(squared, 0, out=squared)


class Kernel(NamedTuple):
    """How alike two rows are, 1 at most, where every input is measured in its own length scale."""

    #: (rows, rows) -> their likeness, and its decay, which the gradient needs again.
    likeness: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
    #: (rows, how much each pair's decay matters) -> the gradient by the length scales' logarithms.
    gradient: Callable[[np.ndarray, np.ndarray], np.ndarray]


def _matern(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    distance = squared_distances(a, b)
    distance *= 3
    np.sqrt(distance, out=distance)
    decay = np.exp(-distance)
    distance += 1
    distance *= decay
    return distance, decay


def _matern_gradient(rows: np.ndarray, pull: np.ndarray) -> np.ndarray:
    crossed = (rows * (pull @ rows)).sum(axis=0)
    return 6 * ((pull.sum(axis=1)[:, None] * rows**2).sum(axis=0) - crossed)


def _exponential(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    likeness = cdist(a, b, "cityblock")
    likeness *= -_block_scale(a)
    np.exp(likeness, out=likeness)
    return likeness, likeness


def _exponential_gradient(rows: np.ndarray, pull: np.ndarray) -> np.ndarray:
    apart = [np.abs(np.subtract.outer(column, column)) for column in rows.T]
    return _block_scale(rows) * np.array([np.vdot(pull, distance) for distance in apart])


def _block_scale(rows: np.ndarray) -> float:
    """Makes the same length scales a sensible start for distances along the axes."""
    return 2 / float(np.sqrt(rows.shape[1]))


#: Matérn 3/2, for what bends smoothly.
SMOOTH = Kernel(_matern, _matern_gradient)
#: A product of exponentials, for what has steps and kinks along single inputs, as trees see it.
ROUGH = Kernel(_exponential, _exponential_gradient)


def fit_process(
    kernel: Kernel,
    inputs: np.ndarray,
    targets: np.ndarray,
    folds: np.ndarray,
    random_state: np.random.Generator,
    max_rows: int,
    before: Arrays | None = None,
) -> tuple[Arrays, np.ndarray]:
    """A Gaussian process: a linear part plus a kernel with a length scale per input.

    Two of them, averaged: each takes its hyperparameters from its own half of the rows, by
    penalised marginal likelihood. A row is predicted unseen by the one whose hyperparameters it
    did not choose, else noise with many inputs looks like knowledge. Leaving folds out has a
    closed form in the inverse kernel matrix: nothing is fitted again. A later round goes on from
    the hyperparameters of the one before, and soon has its own. At most `max_rows` are learned
    from: the cost is their cube.
    """
    center = inputs.mean(axis=0)
    mean, spread = targets.mean(axis=0), np.maximum(targets.std(axis=0), 1e-9)
    shifted, outputs = inputs - center, (targets - mean) / spread
    n, width = shifted.shape
    # Logarithms of the length scales and of the sizes of the kernel, the linear part and noise.
    start = np.r_[np.full(width, np.log(1.5 * np.sqrt(width))), -0.3, -1.0, -1.0]
    order = random_state.permutation(n)
    halves = [half[:HYPERPARAMETER_ROWS] for half in np.array_split(order, 2)]
    used = np.sort(order[:max_rows])
    rest = np.setdiff1d(np.arange(n), used)
    arrays: Arrays = {
        "center": center,
        "reference": shifted[used].astype(np.float32),
        "mean": mean,
    }
    unseen = np.empty((2, *targets.shape))
    for h, half in enumerate(halves):
        found = minimize(
            _negative_likelihood,
            start if before is None else before[f"settings_{h}"],
            args=(kernel, shifted[half], outputs[half], start),
            jac=True,
            method="L-BFGS-B",
            bounds=[(-3, 6)] * width + [(-5, 3), (-5, 3), (-6, 1)],
            options={"maxiter": 25 if before is None else 8},
        )
        curved, linear, _ = _covariance(kernel, shifted[used], shifted[used], found.x)
        inverse = _inverse(_noisy(curved + linear, found.x))[0]
        weights = inverse @ outputs[used]
        arrays[f"settings_{h}"] = found.x
        arrays[f"weights_{h}"] = weights * spread
        for fold in np.unique(folds[used]):
            block = np.flatnonzero(folds[used] == fold)
            surprise = np.linalg.solve(inverse[np.ix_(block, block)], weights[block])
            unseen[h, used[block]] = targets[used[block]] - surprise * spread
        # Rows beyond the limit were not seen by anyone.
        unseen[h, rest] = _posterior_mean(kernel, arrays, inputs[rest], h)
    result = unseen.mean(axis=0)
    result[halves[0]], result[halves[1]] = unseen[1, halves[0]], unseen[0, halves[1]]
    return arrays, result


def predict_process(kernel: Kernel, arrays: Arrays, inputs: np.ndarray) -> np.ndarray:
    """The mean of both posterior means."""
    both = [_posterior_mean(kernel, arrays, inputs, h) for h in (0, 1)]
    return (both[0] + both[1]) / 2


def _posterior_mean(kernel: Kernel, arrays: Arrays, inputs: np.ndarray, h: int) -> np.ndarray:
    reference = arrays["reference"].astype(np.float64)
    settings, width = arrays[f"settings_{h}"], reference.shape[1]
    lengths, size = np.exp(settings[:width]), np.exp(2 * settings[width])
    weights = size * arrays[f"weights_{h}"]
    slope = np.exp(2 * settings[width + 1]) / width * (reference.T @ arrays[f"weights_{h}"])
    result = np.empty((len(inputs), len(arrays["mean"])))
    for start in range(0, len(inputs), CHUNK_ROWS):
        part = inputs[start : start + CHUNK_ROWS] - arrays["center"]
        likeness, _ = kernel.likeness(part / lengths, reference / lengths)
        result[start : start + CHUNK_ROWS] = likeness @ weights + part @ slope + arrays["mean"]
    return result


def _covariance(
    kernel: Kernel, a: np.ndarray, b: np.ndarray, settings: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The kernel's part, the linear part, and the decay that the gradient needs again."""
    width = a.shape[1]
    lengths, size = np.exp(settings[:width]), np.exp(2 * settings[width])
    likeness, decay = kernel.likeness(a / lengths, b / lengths)
    linear = np.exp(2 * settings[width + 1]) / width * (a @ b.T)
    return size * likeness, linear, size * decay


def _noisy(covariance: np.ndarray, settings: np.ndarray) -> np.ndarray:
    covariance[np.diag_indices(len(covariance))] += np.exp(2 * settings[-1]) + 1e-6
    return covariance


def _inverse(covariance: np.ndarray) -> tuple[np.ndarray, float]:
    """Inverse of a positive definite matrix and half the logarithm of its determinant.

    Made in the matrix's own memory, which is lost: half of the time went into copies.

    >>> inverse, half_log_determinant = _inverse(np.array([[2.0, 1.0], [1.0, 2.0]]))
    >>> inverse.round(3).tolist(), round(half_log_determinant, 3)
    ([[0.667, -0.333], [-0.333, 0.667]], 0.549)
    """
    root, failed = lapack.dpotrf(covariance.T, lower=1, clean=0, overwrite_a=1)
    if failed:
        raise np.linalg.LinAlgError("the covariance is not positive definite")
    half_log_determinant = float(np.log(np.diag(root)).sum())
    inverse, _ = lapack.dpotri(root, lower=1, overwrite_c=1)
    at = np.arange(len(inverse))
    return np.where(at[:, None] >= at, inverse, inverse.T), half_log_determinant


def _negative_likelihood(
    settings: np.ndarray,
    kernel: Kernel,
    inputs: np.ndarray,
    outputs: np.ndarray,
    prior: np.ndarray,
) -> tuple[float, np.ndarray]:
    """With its gradient; averaged over the outputs, which share one kernel."""
    width = inputs.shape[1]
    curved, linear, decay = _covariance(kernel, inputs, inputs, settings)
    inverse, half_log_determinant = _inverse(_noisy(curved + linear, settings))
    weights = inverse @ outputs
    n_outputs = outputs.shape[1]
    slope = 0.5 * (inverse - weights @ weights.T / n_outputs)
    gradient = np.empty_like(settings)
    gradient[:width] = kernel.gradient(inputs / np.exp(settings[:width]), slope * decay)
    gradient[width] = 2 * (slope * curved).sum()
    gradient[width + 1] = 2 * (slope * linear).sum()
    gradient[width + 2] = 2 * np.exp(2 * settings[-1]) * np.trace(slope)
    # Few rows must not carve a narrow valley out of many inputs: length scales stay near the prior.
    trust = np.r_[np.full(width, 0.3), 0.2, 0.2, 0.2]
    value = 0.5 * (weights * outputs).sum() / n_outputs + half_log_determinant
    value += 0.5 * float(trust @ (settings - prior) ** 2)
    return value, gradient + trust * (settings - prior)
