"""Learn the settings that a search tries first, and write them to `tuning/portfolio.json`.

    python -m benchmarks.portfolio --pool 40         # hours: a pool of settings on every dataset
    python -m benchmarks.portfolio --write           # choose from what was measured, and write

The pool (the hand-made entries and random points of the default space) is trained on every dataset
and mask of `benchmarks.tuning`; true errors go to a CSV, one row each, so that a call that is
stopped goes on where it was. Entries are then chosen greedily: each is the one that most lowers the
mean, over datasets, of log(best entry's error ÷ best of the pool). Leaving one dataset out at a
time says what the portfolio is worth on a table that it has not seen.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.accuracy import SMALL
from benchmarks.tuning import numbers
from remasker.metrics import rmse

CSV = Path("benchmarks/portfolio.csv")
#: No entry costs more than so many times the default.
DEAREST = 4


def pool(size: int, seed: int = 0) -> list[dict[str, Any]]:
    """Entries to choose from: the portfolio as it is, then random points."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    from tuning.cost import seconds_per_epoch
    from tuning.space import DEFAULT_SPACE, read_portfolio

    entries = read_portfolio()
    rng = np.random.default_rng(seed)
    while len(entries) < size:
        settings: dict[str, Any] = {}
        for name, d in DEFAULT_SPACE.items():
            if isinstance(d, CategoricalDistribution):
                settings[name] = d.choices[rng.integers(len(d.choices))]
            elif isinstance(d, FloatDistribution):
                low, high = (np.log(d.low), np.log(d.high)) if d.log else (d.low, d.high)
                drawn = rng.uniform(low, high)
                settings[name] = float(f"{np.exp(drawn) if d.log else drawn:.2g}")
            else:
                settings[name] = int(rng.integers((d.high - d.low) // d.step + 1) * d.step + d.low)
        epochs = float(np.round(np.exp(rng.uniform(np.log(0.5), np.log(2))), 1))
        # What a search of a few minutes could not pay is of no use at its beginning.
        if epochs * seconds_per_epoch(settings, 800, 10) > DEAREST * seconds_per_epoch({}, 800, 10):
            continue
        entries.append({"name": f"drawn {len(entries)}", "settings": settings, "epochs": epochs})
    return entries


def measure(entry: dict[str, Any], dataset: str, mask: int) -> float:
    """The true error of one entry on one table."""
    import torch

    from remasker.imputer import ReMaskerImputer
    from remasker.training import TrainingConfig

    torch.set_num_threads(1)
    truth, hidden = numbers(dataset, mask)
    epochs = round(entry.get("epochs", 1.0) * TrainingConfig().n_epochs(*truth.shape))
    # One model by itself, as a trial is.
    imputer = ReMaskerImputer(
        **entry["settings"], epochs=max(1, epochs), experts=None, n_members=1, random_state=0
    )
    return rmse(truth, imputer.fit_transform(np.where(hidden, np.nan, truth)), hidden)


def choose(errors: pd.DataFrame, size: int, first: str = "default") -> list[str]:
    """Greedy choice from a table of errors, entries × datasets; the default is always first.

    >>> names = ["default", "x", "y"]
    >>> errors = pd.DataFrame({"a": [1.0, 0.5, 0.9], "b": [1.0, 1.1, 0.6]}, index=names)
    >>> choose(errors, 3)
    ['default', 'x', 'y']
    """
    scores = np.log(errors / errors.min())
    chosen = [first]
    while len(chosen) < min(size, len(scores)):
        now = scores.loc[chosen].min()
        gain = {
            name: float((now - np.minimum(now, row)).mean())
            for name, row in scores.iterrows()
            if name not in chosen
        }
        chosen.append(max(gain, key=gain.__getitem__))
    return chosen


def left_out(errors: pd.DataFrame, size: int) -> pd.DataFrame:
    """Best entry's error ÷ the pool's best, on datasets that had no say in the choice."""
    rows = {}
    for dataset in errors.columns:
        chosen = choose(errors.drop(columns=dataset), size)
        best = errors[dataset].min()
        rows[dataset] = {
            "portfolio": errors.loc[chosen, dataset].min() / best,
            "default": errors.loc["default", dataset] / best,
        }
    return pd.DataFrame(rows).T


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pool", type=int, default=0, help="measure a pool of so many settings")
    parser.add_argument("--datasets", nargs="+", default=SMALL, choices=SMALL)
    parser.add_argument("--masks", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    entries = pool(max(args.pool, 8))
    done = pd.read_csv(CSV) if CSV.exists() else pd.DataFrame(columns=["name", "dataset", "mask"])
    known = set(zip(done["name"], done["dataset"], done["mask"], strict=True))
    for mask in args.masks if args.pool else ():
        for dataset in args.datasets:
            for entry in entries:
                if (entry["name"], dataset, mask) in known:
                    continue
                error = measure(entry, dataset, mask)
                with open(CSV, "a", newline="") as file:
                    writer = csv.writer(file)
                    if file.tell() == 0:
                        writer.writerow(["name", "dataset", "mask", "error", "entry"])
                    writer.writerow([entry["name"], dataset, mask, error, json.dumps(entry)])
    if not CSV.exists():
        raise SystemExit(f"{CSV} does not exist: measure first, with --pool 40")
    done = pd.read_csv(CSV)
    errors = done.pivot_table(index="name", columns="dataset", values="error").dropna()
    print(left_out(errors, args.size).round(3).to_string())
    names = choose(errors, args.size)
    print("chosen:", ", ".join(names))
    if args.write:
        from tuning.space import PORTFOLIO

        by_name = {json.loads(text)["name"]: json.loads(text) for text in done["entry"]}
        content = json.loads(PORTFOLIO.read_text())
        content["made_by"] = (
            f"python -m benchmarks.portfolio --pool {len(by_name)} --size {args.size} --write"
        )
        content["entries"] = [by_name[name] for name in names]
        PORTFOLIO.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
