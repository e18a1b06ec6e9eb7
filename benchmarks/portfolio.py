"""Learn the settings that a search tries first, and write them to `tuning/portfolio.json`.

    python -m benchmarks.portfolio --pool 32         # about an hour: a pool on every small dataset
    python -m benchmarks.portfolio --write           # choose from what was measured, and write

The pool (entries made by hand, and random points of the default space) is trained on every dataset
and mask, one model each; true errors and seconds go to a CSV, one row each, so that a call that is
stopped goes on where it was. Entries are then chosen greedily, from the default on: each is the one
that most lowers the mean, over tables, of log(best entry's error ÷ best of the pool) per second.
Leaving one dataset out at a time says what the portfolio is worth on a table that it has not seen;
random entries of the pool that take as long are what it has to beat.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.accuracy import SMALL, run
from benchmarks.tuning import numbers
from remasker import imputer
from remasker.metrics import rmse
from tuning.space import DEFAULT_SPACE

CSV = Path(__file__).with_name("portfolio.csv")
KEYS, FIGURES = ("name", "dataset", "mask"), ("error", "seconds", "entry")
#: No entry costs more than so many times the default.
DEAREST = 4
#: What a search can make of the paper's preset: it varies nothing else.
PAPER = {name: value for name, value in imputer.PAPER.items() if name in DEFAULT_SPACE}
LARGER = {"width": 64, "encoder_depth": 4, "decoder_depth": 2, "learning_rate": 0.002}
#: What RESULTS.md speaks for, on some table at least.
BY_HAND: tuple[dict[str, Any], ...] = (
    {"name": "default", "settings": {}},
    {"name": "paper", "settings": PAPER, "epochs": 2.0},
    {
        "name": "random ratios, linear",
        "settings": {"masking": "random_ratio", "value_encoding": "linear"},
    },
    {"name": "random ratios", "settings": {"masking": "random_ratio"}},
    {"name": "copies and ratios", "settings": {"masking": "copy+random_ratio"}},
    {"name": "patient", "settings": {"learning_rate": 0.003}, "epochs": 2.0},
    {"name": "wide", "settings": LARGER, "epochs": 1.5},
    {"name": "nested copies", "settings": {"masking": "nested_copy"}},
    {
        "name": "patient nested copies",
        "settings": {"masking": "nested_copy", "learning_rate": 0.003},
        "epochs": 2.0,
    },
    {
        "name": "wide nested copies",
        "settings": {"masking": "nested_copy", **LARGER},
        "epochs": 1.5,
    },
    {"name": "half nested copies", "settings": {"masking": "nested_copy+copy"}},
    {"name": "hasty", "settings": {"learning_rate": 0.006}, "epochs": 0.5},
)


def pool(size: int, seed: int = 0) -> list[dict[str, Any]]:
    """Entries to choose from: those made by hand, then random points."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    from tuning.cost import seconds_per_epoch

    entries = list(BY_HAND)
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
            elif isinstance(d, IntDistribution):
                settings[name] = int(rng.integers((d.high - d.low) // d.step + 1) * d.step + d.low)
        epochs = float(np.round(np.exp(rng.uniform(np.log(0.5), np.log(2))), 1))
        # What a search of a few minutes could not pay is of no use at its beginning.
        if epochs * seconds_per_epoch(settings, 800, 10) > DEAREST * seconds_per_epoch({}, 800, 10):
            continue
        name = f"drawn {len(entries) - len(BY_HAND)}"
        entries.append({"name": name, "settings": settings, "epochs": epochs})
    return entries


def measure(entry: dict[str, Any], dataset: str, mask: int) -> dict[str, Any]:
    """The true error of one entry on one table, and its seconds on one core."""
    import torch

    from remasker.training import TrainingConfig

    torch.set_num_threads(1)
    truth, hidden = numbers(dataset, mask)
    epochs = round(entry.get("epochs", 1.0) * TrainingConfig().n_epochs(*truth.shape))
    # One model by itself, as a trial is.
    model = imputer.ReMaskerImputer(
        **entry["settings"], epochs=max(1, epochs), experts=None, n_members=1, random_state=0
    )
    started = time.perf_counter()
    completed = model.fit_transform(np.where(hidden, np.nan, truth))
    return {
        "name": entry["name"],
        "dataset": dataset,
        "mask": mask,
        "error": round(rmse(truth, completed, hidden), 6),
        "seconds": round(time.perf_counter() - started, 1),
        "entry": json.dumps(entry),
    }


def choose(errors: pd.DataFrame, cost: pd.Series, size: int, first: str = "default") -> list[str]:
    """Greedy choice from a table of errors, entries × tables; the default is always first.

    >>> names = ["default", "x", "y"]
    >>> errors = pd.DataFrame({"a": [1.0, 0.5, 0.9], "b": [1.0, 1.1, 0.6]}, index=names)
    >>> choose(errors, pd.Series(1.0, index=names), 3)
    ['default', 'x', 'y']
    >>> choose(errors, pd.Series([1.0, 9.0, 1.0], index=names), 2)
    ['default', 'y']
    """
    scores = (errors / errors.min()).map(np.log)
    chosen = [first]
    while len(chosen) < min(size, len(scores)):
        now = scores.loc[chosen].min()
        gain = {
            name: float((now - np.minimum(now, scores.loc[name])).mean()) / cost[name]
            for name in errors.index.astype(str)
            if name not in chosen
        }
        chosen.append(max(gain, key=gain.__getitem__))
    return chosen


def left_out(errors: pd.DataFrame, cost: pd.Series, size: int) -> pd.DataFrame:
    """Best entry's error ÷ the pool's best, on datasets that had no say in the choice.

    `random` is the mean over draws of entries that together cost as much, `cost` is in units of the
    default.
    """
    rng = np.random.default_rng(0)
    draws = [rng.permutation(len(errors)) for _ in range(200)]
    rows = {}
    for dataset in errors.columns.get_level_values(0).unique():
        chosen = choose(errors.drop(columns=dataset, level=0), cost, size)
        mine = errors[dataset] / errors[dataset].min()
        spent = float(cost[chosen].sum())
        # At least one, and then as many as there is time for.
        within = [d[: max(1, int((cost.iloc[d].cumsum() <= spent).sum()))] for d in draws]
        rows[dataset] = {
            "portfolio": mine.loc[chosen].min().mean(),
            "default": mine.loc["default"].mean(),
            "random": np.mean([mine.iloc[some].min().mean() for some in within]),
            "cost": spent,
        }
    table = pd.DataFrame(rows).T
    table.loc["all"] = table.mean()
    return table


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.portfolio",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pool", type=int, default=0, help="measure a pool of so many settings")
    parser.add_argument("--datasets", nargs="+", default=SMALL, choices=SMALL)
    parser.add_argument("--masks", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--size", type=int, default=6, help="entries of the portfolio")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.pool:
        tasks = {
            (entry["name"], dataset, mask): partial(measure, entry, dataset, mask)
            for mask in args.masks
            for dataset in args.datasets
            for entry in pool(args.pool)
        }
        run(tasks, KEYS, FIGURES, args.jobs, CSV)
    if not CSV.exists():
        raise SystemExit(f"{CSV} does not exist: measure first, with --pool 32")
    done = pd.read_csv(CSV)
    # Tables on which some entry is missing cannot compare entries.
    table = done.pivot_table(index="name", columns=["dataset", "mask"], values=["error", "seconds"])
    table = table.dropna(axis=1)
    errors, seconds = (
        pd.DataFrame(table.xs(figure, axis=1, level=0)) for figure in ("error", "seconds")
    )
    cost = np.exp(np.log(seconds / seconds.loc["default"]).mean(axis=1))
    print(f"{len(errors)} entries on {errors.shape[1]} tables; leaving each dataset out:")
    print(left_out(errors, cost, args.size).round(3).to_string())
    names = choose(errors, cost, args.size)
    print("chosen:", ", ".join(f"{name} ({cost[name]:.1f} x the default's time)" for name in names))
    if args.write:
        from tuning.space import PORTFOLIO

        by_name = {json.loads(text)["name"]: json.loads(text) for text in done["entry"]}
        masks = sorted(errors.columns.get_level_values(1).unique())
        command = (
            f"python -m benchmarks.portfolio --pool {len(by_name)} "
            f"--masks {' '.join(map(str, masks))} --size {args.size} --write"
        )
        content = json.loads(PORTFOLIO.read_text()) | {"made_by": command}
        # The paper's setting is always tried, last.
        names = [name for name in names if name != "paper"] + ["paper"]
        lines = ",\n  ".join(json.dumps(by_name[name]) for name in names)
        head = ",\n ".join(
            f"{json.dumps(k)}: {json.dumps(content[k])}" for k in ("made_by", "notes")
        )
        PORTFOLIO.write_text(f'{{\n {head},\n "entries": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
