"""Do 90 % intervals hold 90 % of the hidden cells?

    python -m benchmarks.coverage yacht raisin compressive

For each dataset (MAR 0.3, frozen mask `--seed`): the share of hidden cells inside the central 90 %
of 50 draws, and inside `intervals`; with the defaults and without experts.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from benchmarks.accuracy import SMALL, gappy, task
from remasker import ReMaskerImputer


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("datasets", nargs="*", default=list(SMALL))
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for dataset in args.datasets:
        table, hidden = task(dataset, "MAR", 0.3, args.seed, "protocol")
        truth = table.to_numpy(dtype=float)
        gaps = gappy(table, hidden).to_numpy(dtype=float)
        for experts in ("auto", None):
            imputer = ReMaskerImputer(experts=experts, random_state=0).fit(gaps)
            draws = np.stack(imputer.draw(gaps, n_draws=50, random_state=0))[:, hidden]
            low, high = np.quantile(draws, [0.05, 0.95], axis=0)
            drawn = np.mean((low <= truth[hidden]) & (truth[hidden] <= high))
            ends = [end.to_numpy() for end in imputer.intervals(gaps)]
            inside = np.mean((ends[0] <= truth)[hidden] & (truth <= ends[1])[hidden])
            name = "with experts" if experts else "ReMasker alone"
            print(f"{dataset:12} {name:15} draws {drawn:.3f}  intervals {inside:.3f}", flush=True)


if __name__ == "__main__":
    main()
