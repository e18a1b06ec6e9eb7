"""Trees as plain arrays: extremely randomised ones, boosted ones, and the walk down all of them.

The forests behind the experts `trees` and `boosted` of `remasker.expert_models`, which says what
an expert is. scikit-learn grows them; what is kept are four arrays, with a left child right after
its parent, and a walk that is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor

from remasker.gaussian_process import Arrays
from remasker.lanes import compiled

#: Trees of more rows than this have leaves of so many more.
LEAF_ROWS = 5000
#: Boosting many trees of few leaves: so many, each believed so much.
N_BOOSTED, BOOSTED_RATE = 200, 0.1


def fit_randomised(
    inputs: np.ndarray,
    targets: np.ndarray,
    folds: np.ndarray,
    random_state: np.random.Generator,
    n_trees: int,
    min_leaf: int,
) -> tuple[Arrays, np.ndarray]:
    """Extremely randomised trees, a forest per fold; together they are the forest that is kept."""
    names = np.unique(folds)
    # scikit-learn wants a single target flat.
    goals = targets[:, 0] if targets.shape[1] == 1 else targets
    # Forests of many rows are no larger than those of some: their leaves hold more.
    min_leaf = max(min_leaf, round(len(inputs) / LEAF_ROWS))
    unseen = np.empty_like(targets)
    kept = []
    for fold in names:
        forest = ExtraTreesRegressor(
            n_estimators=max(1, n_trees // len(names)),
            min_samples_leaf=min_leaf,
            random_state=int(random_state.integers(2**31 - 1)),
        ).fit(inputs[folds != fold], goals[folds != fold])
        arrays = _join([_of_forest(tree.tree_) for tree in forest.estimators_])
        unseen[folds == fold] = predict_trees(arrays, inputs[folds == fold])
        kept.append(arrays)
    return _join(kept), unseen


def fit_boosted(
    inputs: np.ndarray, targets: np.ndarray, folds: np.ndarray
) -> tuple[Arrays, np.ndarray]:
    """Boosted trees per fold and target, each as many; what is kept is the mean of the folds'.

    >>> inputs = np.linspace(0, 1, 400)[:, None]
    >>> arrays, unseen = fit_boosted(inputs, (inputs > 0.5) * 1.0, np.arange(400) % 2)
    >>> np.abs(predict_trees(arrays, np.array([[0.2], [0.8]]))).round(1).tolist()
    [[0.0], [1.0]]
    """
    width = targets.shape[1]
    unseen = np.empty_like(targets)
    kept = []
    for fold in np.unique(folds):
        trees = []
        for c in range(width):
            model = HistGradientBoostingRegressor(
                max_iter=N_BOOSTED,
                learning_rate=BOOSTED_RATE,
                l2_regularization=1.0,
                early_stopping=False,
            ).fit(inputs[folds != fold], targets[folds != fold, c])
            # The walk averages, boosting adds up; and what it starts from is in each tree.
            start = float(model._baseline_prediction.item())
            size = N_BOOSTED * width
            trees += [
                _of_boosting(tree[0].nodes, c, width, start * width, size)
                for tree in model._predictors
            ]
        arrays = _join(trees)
        unseen[folds == fold] = predict_trees(arrays, inputs[folds == fold])
        kept.append(arrays)
    return _join(kept), unseen


def predict_trees(arrays: Arrays, inputs: np.ndarray) -> np.ndarray:
    """The mean of what the leaves say that each row comes to."""
    result = np.zeros((len(inputs), arrays["value"].shape[1]))
    _walk(
        np.ascontiguousarray(inputs, dtype=np.float32),
        arrays["feature"],
        arrays["threshold"],
        arrays["right"],
        arrays["value"],
        arrays["roots"],
        result,
    )
    return result / len(arrays["roots"])


@compiled
def _walk(
    inputs: Any, feature: Any, threshold: Any, right: Any, value: Any, roots: Any, result: Any
) -> None:
    """A tree at a time, so that its nodes stay near, all rows down to their leaves."""
    for root in roots:
        for row in range(len(inputs)):
            node = root
            while feature[node] >= 0:
                low = inputs[row, feature[node]] <= threshold[node]
                node = node + 1 if low else right[node]
            for c in range(value.shape[1]):
                result[row, c] += value[right[node], c]


def _of_forest(tree: Any) -> Arrays:
    leaf = tree.children_left < 0
    return _arrays(leaf, tree.feature, tree.threshold, tree.children_right, tree.value[leaf, :, 0])


def _of_boosting(nodes: np.ndarray, c: int, width: int, start: float, size: int) -> Arrays:
    leaf = nodes["is_leaf"].astype(bool)
    value = np.zeros((int(leaf.sum()), width))
    value[:, c] = size * nodes["value"][leaf] + start
    return _arrays(leaf, nodes["feature_idx"], nodes["num_threshold"], nodes["right"], value)


def _arrays(
    leaf: np.ndarray,
    feature: np.ndarray,
    threshold: np.ndarray,
    right: np.ndarray,
    value: np.ndarray,
) -> Arrays:
    """One tree: `feature` < 0 is a leaf, whose `right` is the row of `value` it answers with."""
    return {
        "feature": np.where(leaf, -1, feature).astype(np.int16),
        "threshold": np.where(leaf, 0, threshold).astype(np.float32),
        "right": np.where(leaf, np.cumsum(leaf) - 1, right).astype(np.int32),
        "value": value.astype(np.float32),
        "roots": np.zeros(1, dtype=np.int32),
    }


def _join(forests: Sequence[Arrays]) -> Arrays:
    nodes, leaves = 0, 0
    joined = []
    for forest in forests:
        leaf = forest["feature"] < 0
        right = forest["right"] + np.where(leaf, leaves, nodes).astype(np.int32)
        joined.append({**forest, "right": right, "roots": forest["roots"] + np.int32(nodes)})
        nodes, leaves = nodes + len(leaf), leaves + int(leaf.sum())
    return {name: np.concatenate([part[name] for part in joined]) for name in forests[0]}
