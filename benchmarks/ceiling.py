"""How low can an error be? Experts that may learn from the complete table.

    python -m benchmarks.ceiling                    # MAR 0.3, masks 0 to 2, eight tables
    python -m benchmarks.ceiling --datasets wine

Every hidden cell is predicted from just the cells that are visible in its row, by the product's own
experts, but they learn from all other rows *as they were before anything was hidden*, a stack for
each pattern of gaps. No imputer can know that much. What is left of an error there is noise in
the table; what lies between it and `ReMaskerImputer()` is what more learning could still gain
with such experts. No strict bound: other models may see more in the same rows.
"""

from __future__ import annotations

import argparse
import itertools
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import RESULTS, SMALL, TASK, measured, run, task

KEYS, FIGURES = ("dataset", "mechanism", "ratio", "seed"), ("rmse",)
N_FOLDS = 5


def ceiling(values: np.ndarray, hidden: np.ndarray, seed: int = 0) -> np.ndarray:
    """The table with hidden cells predicted by experts of the complete one.

    >>> rng = np.random.default_rng(0)
    >>> values = rng.normal(size=(100, 1)) + 0.1 * rng.normal(size=(100, 3))
    >>> hidden = np.zeros(values.shape, dtype=bool)
    >>> hidden[:20, 0] = True
    >>> error = (ceiling(values, hidden) - values)[hidden]
    >>> bool(np.sqrt((error**2).mean()) < 0.25), bool(np.abs(error).min() > 0)
    (True, True)
    """
    from remasker.expert_models import EXPERTS, ExpertsConfig, Sample, input_knots, input_view
    from remasker.stacking import cross_fit

    config = ExpertsConfig()
    mean, spread = values.mean(axis=0), np.maximum(values.std(axis=0), 1e-9)
    scaled = (values - mean) / spread
    random_state = np.random.default_rng(seed)
    folds = random_state.permutation(np.arange(len(values)) % N_FOLDS)
    result = np.where(hidden, 0.0, scaled)
    patterns, which = np.unique(hidden, axis=0, return_inverse=True)
    for p, pattern in enumerate(patterns):
        if pattern.all():
            continue  # nothing is visible: the mean
        inputs = scaled[:, ~pattern]
        knots = input_knots(inputs)
        rows = np.flatnonzero(which.ravel() == p)
        for j in np.flatnonzero(pattern):
            targets = scaled[:, [j]]
            said = []
            for name in config.experts:
                fit, _, view = EXPERTS[name]
                seen = input_view(inputs, knots, view)
                fitted = fit(Sample(seen, targets, folds, random_state, config))
                if fitted is not None:
                    said.append(fitted[1])
            unseen = cross_fit(np.stack(said), targets, folds, config.shrinkage)
            result[rows, j] = unseen[rows, 0]
    return result * spread + mean


def measure(key: tuple[str, str, float, int]) -> dict[str, Any]:
    """One table with one mask."""
    from remasker.tasks import one_thread

    table, hidden = task(*key, "protocol")
    values = table.to_numpy(dtype=float)
    with one_thread():
        error = (ceiling(values, hidden) - values)[hidden]
    figures = {"rmse": f"{np.sqrt((error**2).mean()):.5f}"}
    return dict(zip(KEYS, key, strict=True)) | figures


def summarise(path: Path) -> str:
    """The ceiling beside what was measured on the same cells, as ratios to the default."""
    import pandas as pd

    found = pd.read_csv(path).astype({"ratio": float}).set_index(TASK)["rmse"]
    others = measured(RESULTS, "protocol").pivot_table(index=TASK, columns="method", values="rmse")
    table = others.reindex(found.index)[["default", "hyperimpute", "missforest"]]
    table.insert(0, "ceiling", found)
    ratios = pd.DataFrame(
        {
            "ceiling ÷ default": table["ceiling"] / table["default"],
            "ceiling ÷ hyperimpute": table["ceiling"] / table["hyperimpute"],
            "ceiling ÷ missforest": table["ceiling"] / table["missforest"],
        }
    )
    means = np.exp(np.log(ratios).mean()).round(3)
    shown = pd.concat([table.round(4), ratios.round(3)], axis=1)
    return f"{shown.to_string()}\n\ngeometric means\n{means.to_string()}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ceiling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--datasets", nargs="+", default=list(SMALL), metavar="DATASET")
    parser.add_argument("--mechanisms", nargs="+", default=["MAR"], help="MCAR has many patterns")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--csv", type=Path, default=RESULTS.with_name("ceiling.csv"))
    args = parser.parse_args()
    keys = itertools.product(args.datasets, args.mechanisms, args.ratios, args.seeds)
    run({key: partial(measure, key) for key in keys}, KEYS, FIGURES, args.jobs, args.csv)
    print(summarise(args.csv))


if __name__ == "__main__":
    main()
