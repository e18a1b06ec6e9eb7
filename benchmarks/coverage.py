"""Do 90 % intervals hold 90 % of the hidden cells, and how wide are they?

    python -m benchmarks.coverage yacht raisin compressive
    python -m benchmarks.coverage raisin --mechanism MCAR --ratio 0.7 --seed 0

For each dataset (a frozen mask): the share of hidden cells inside `intervals` and in the central
90 % of 40 draws; the score of the intervals (their width and, for every cell outside, twenty times
how far: Winkler) and of the draws (CRPS), in units of the columns' spread, smaller is better. With
the defaults and without experts.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from benchmarks.accuracy import SMALL, gappy, task
from remasker import ReMaskerImputer

LEVEL = 0.9


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("datasets", nargs="*", default=list(SMALL))
    parser.add_argument("--mechanism", default="MAR", choices=("MAR", "MCAR", "MNAR"))
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for dataset in args.datasets:
        table, hidden = task(dataset, args.mechanism, args.ratio, args.seed, "protocol")
        gaps = gappy(table, hidden).to_numpy(dtype=float)
        spread = np.nanstd(gaps, axis=0)
        truth = table.to_numpy(dtype=float)
        for experts in ("auto", None):
            imputer = ReMaskerImputer(experts=experts, random_state=0).fit(gaps)
            low, high = (end.to_numpy() for end in imputer.intervals(gaps, LEVEL))
            outside = np.maximum(low - truth, 0) + np.maximum(truth - high, 0)
            score = (high - low + 2 / (1 - LEVEL) * outside) / spread
            draws = np.stack(imputer.draw(gaps, n_draws=40, random_state=0))
            ends = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
            drawn = (ends[0] <= truth) & (truth <= ends[1])
            print(
                f"{dataset:12} {'with experts' if experts else 'ReMasker alone':14} "
                f"intervals {np.mean(outside[hidden] == 0):.3f}, score {score[hidden].mean():.3f}; "
                f"draws {drawn[hidden].mean():.3f}, "
                f"CRPS {crps((draws / spread)[:, hidden], (truth / spread)[hidden]):.4f}",
                flush=True,
            )


def crps(draws: np.ndarray, truth: np.ndarray) -> float:
    """How far draws are from the truth, less half of how far they are from each other.

    >>> round(crps(np.array([[0.0], [2.0]]), np.array([1.0])), 3)
    0.0
    """
    n = len(draws)
    ranks = 2 * np.arange(1, n + 1) - n - 1
    apart = (np.sort(draws, axis=0) * ranks[:, None]).sum(axis=0) / (n * (n - 1))
    return float((np.abs(draws - truth).mean(axis=0) - apart).mean())


if __name__ == "__main__":
    main()
