"""What tuning is worth, and what its machinery costs.

    python -m benchmarks.tuning                  # tuned ÷ default error on the frozen masks
    python -m benchmarks.tuning --overhead       # Ray against two bare processes
    python -m benchmarks.tuning --samplers --seconds 60   # the search against random and plain TPE
    python -m benchmarks.tuning --summary        # only read what earlier calls measured

Errors of the defaults come from `accuracy.csv` where they have been measured there. Every column is
a number, MAR 0.3, masks frozen in `../shared/bench/masks.npz`. Each table gets
`--seconds` all in all. Rows are appended to `--csv` as they come: a call that is stopped goes on
where it was. Errors are the protocol's RMSE over the cells that were hidden, on the min–max scale.

`regret` is the true error of the trial that the judge cells chose over that of the best trial that
was tried: what choosing without the truth costs.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.accuracy import OUTSIDE, RESULTS, SMALL, measured, task
from remasker.metrics import rmse


def numbers(dataset: str, mask: int) -> tuple[np.ndarray, np.ndarray]:
    """The complete table on the protocol's scale and the cells to hide, MAR 0.3."""
    table, hidden = task(dataset, "MAR", 0.3, mask, "protocol")
    return table.to_numpy(dtype=float), hidden


def missing(
    path: Path, datasets: Sequence[str], masks: Sequence[int], seconds: float
) -> list[tuple[str, int]]:
    """The tasks that a CSV does not hold yet, for this time."""
    done = set()
    if path.exists():
        rows = pd.read_csv(path)
        rows = rows[rows["seconds_allowed"] == seconds]
        done = set(zip(rows["dataset"], rows["mask"], strict=True))
    return [(d, m) for m in masks for d in datasets if (d, m) not in done]


def append(path: Path, row: dict[str, Any]) -> None:
    """Write a row behind the others, and show it."""
    pd.DataFrame([row]).to_csv(path, mode="a", header=not path.exists(), index=False)
    print(row, flush=True)


def default_error(dataset: str, mask: int) -> float | None:
    """What `benchmarks.accuracy` has measured of the defaults, if it has."""
    rows = measured(RESULTS, "protocol").set_index(
        ["method", "dataset", "mechanism", "ratio", "seed"]
    )
    found = rows["rmse"].get(("default", dataset, "MAR", 0.3, mask))
    return None if found is None else float(found)


def measure(dataset: str, mask: int, seconds: float, storage: Path) -> dict[str, Any]:
    """Tune one table, then look at the truth."""
    import torch

    from remasker.imputer import ReMaskerImputer
    from tuning import export, tune
    from tuning.holdout import draw_holdout
    from tuning.journal import TRIALS, read_study
    from tuning.trial import TrialData, read_result

    torch.set_num_threads(1)
    truth, hidden = numbers(dataset, mask)
    table = np.where(hidden, np.nan, truth)
    default = default_error(dataset, mask)
    if default is None:
        default = rmse(truth, ReMaskerImputer(random_state=0).fit_transform(table), hidden)
    started = time.perf_counter()
    name = f"{dataset}-{mask}"
    result = tune(
        table, name=name, trials=None, time_budget=seconds, storage=storage, progress=False
    )
    taken = time.perf_counter() - started

    # The truth, for every trial that left a model: from its own checkpoint.
    _, encoder, encoded, provenance = export.encode(table, {})
    data = TrialData(table=encoded, holdout=draw_holdout(encoded.observed, 0))
    provenance |= {"seed": 0}
    true: dict[int, float] = {}
    for trial in read_study(result.folder).get_trials(deepcopy=False):
        fixed = export.read_run(result.folder)["search"]["fixed"]
        place = result.folder / TRIALS / f"{trial.number:05d}"
        found = read_result(place, {**fixed, **trial.params}, data)
        if found is not None:
            one = export.assemble(encoder, data, [found.member], None, provenance)
            true[trial.number] = rmse(truth, one.transform(table), hidden)
    winner = true[result.selection.chosen[0]]
    return {
        "dataset": dataset,
        "mask": mask,
        "seconds_allowed": seconds,
        "seconds": round(taken, 1),
        "trials": len(result.leaderboard),
        "complete": int((result.leaderboard["state"] == "complete").sum()),
        "members": len(result.imputer.ensemble_.members),
        "default": default,
        "tuned": rmse(truth, result.imputed, hidden),
        "winner": winner,
        "best_tried": min(true.values()),
        "regret": winner / min(true.values()),
        "mean": rmse(truth, np.where(hidden, np.nanmean(table, axis=0), truth), hidden),
        "judged": result.selection.error,
        "reported": result.error.error,
    }


def summarise(rows: pd.DataFrame) -> str:
    """The figures by which tuning is judged."""
    if rows.empty:
        return "nothing measured yet"
    rows = rows.assign(
        tuned_ratio=rows["tuned"] / rows["default"],
        single_ratio=rows["winner"] / rows["default"],
    )
    ratios = ["tuned_ratio", "single_ratio", "regret"]
    table = rows.groupby("dataset")[["default", "tuned", *ratios, "trials", "members"]].mean()
    geometric = {name: math.exp(np.log(table[name]).mean()) for name in ratios}
    return (
        f"{table.round(3).to_string()}\n\ngeometric means over datasets: "
        + ", ".join(f"{name} {value:.3f}" for name, value in geometric.items())
        + f"\nmedian regret {table['regret'].median():.3f}; wanted: tuned_ratio ≤ 0.97, per dataset"
        " ≤ 1.02, regret ≤ 1.03"
    )


# ---------------------------------------------------------------------- what the search is worth

SAMPLERS: dict[str, dict[str, Any]] = {
    "shipped": {},
    "random": {"portfolio": False, "sampler": "random"},
    "tpe": {"portfolio": False},
}


def samplers(datasets: list[str], masks: list[int], seconds: float, path: Path) -> str:
    """The winner's true error, the same time for each way to propose; rows are appended.

    One model by itself, neither experts nor refitting: nothing but the search differs.
    """
    from tuning import tune

    for dataset, mask in missing(path, datasets, masks, seconds):
        truth, hidden = numbers(dataset, mask)
        row: dict[str, Any] = {"dataset": dataset, "mask": mask, "seconds_allowed": seconds}
        for name, options in SAMPLERS.items():
            with tempfile.TemporaryDirectory() as storage:
                result = tune(
                    np.where(hidden, np.nan, truth),
                    name=name,
                    storage=storage,
                    trials=None,
                    time_budget=seconds,
                    experts=None,
                    refit=False,
                    max_members=1,
                    progress=False,
                    **options,
                )
            row[name] = rmse(truth, result.imputed, hidden)
            row[f"{name}_trials"] = len(result.leaderboard)
        append(path, row)
    done = pd.read_csv(path)
    asked = done["dataset"].isin(datasets) & done["mask"].isin(masks)
    done = done[asked & (done["seconds_allowed"] == seconds)]
    ratios = {
        other: np.log((done["shipped"] / done[other]).to_numpy()) for other in ("random", "tpe")
    }
    return "\n".join(
        f"shipped ÷ {other}: {np.exp(logs.mean()):.3f} "
        f"(log ± {logs.std(ddof=1) / len(logs) ** 0.5:.3f}), "
        f"better on {(logs < 0).sum()} of {len(logs)}"
        for other, logs in ratios.items()
    )


# ---------------------------------------------------------------------- what the machinery costs


def _bare(work: list[dict[str, Any]], data: Any) -> None:
    import torch

    from tuning.trial import run_trial

    torch.set_num_threads(1)
    for config in work:
        run_trial(config, data, lambda report: None)


def overhead(n_trials: int = 12, repeats: int = 3) -> str:
    """The same list of trainings by the search and by two bare processes, in turn.

    The search is timed from the first trial's start to the last one's end, the processes from
    their start to their end: both load torch within that time.
    """
    from tuning import export
    from tuning.config import SearchConfig
    from tuning.holdout import draw_holdout
    from tuning.trial import TrialData

    truth, hidden = numbers("raisin", 0)
    _, _, encoded, _ = export.encode(np.where(hidden, np.nan, truth), {})
    data = TrialData(table=encoded, holdout=draw_holdout(encoded.observed, 0))
    fixed = {
        "width": 32,
        "encoder_depth": 2,
        "decoder_depth": 1,
        "epochs": 30,
        "batch_size": 64,
        "value_encoding": "linear",
        "dropout": 0.0,
        "masking": "random_ratio",
        "loss": "all",
        "learning_rate": 2e-3,
    }
    space = {**fixed, "masking_ratio": (0.3, 0.6)}
    config = SearchConfig(
        trials=n_trials,
        time_budget=None,
        space=space,
        early_stopping=False,
        concurrent=2,
        portfolio=False,
    )
    shares = []
    for _ in range(repeats):
        ray_seconds, work = _searched(data, config)
        bare_seconds = _by_hand(data, work)
        shares.append(bare_seconds / ray_seconds)
        print(f"{n_trials} trainings: bare {bare_seconds:.1f} s, search {ray_seconds:.1f} s")
    return (
        f"share {np.median(shares):.3f} (median; {min(shares):.3f} to {max(shares):.3f}; "
        "wanted: at least 0.95)"
    )


def _searched(data: Any, config: Any) -> tuple[float, list[dict[str, Any]]]:
    from tuning.affordable import Budget
    from tuning.ray_session import Pulse, ray_session
    from tuning.search import QUESTIONS, search

    moments: list[float] = []
    configs: dict[int, dict[str, Any]] = {}

    def tell(event: str, what: dict[str, Any]) -> None:
        if event in ("start", "end"):
            moments.append(time.perf_counter())
        if event == "start":
            configs[what["number"]] = what

    with (
        tempfile.TemporaryDirectory() as folder,
        ray_session(config),
        Pulse(QUESTIONS, Path(folder)) as pulse,
    ):
        search(data, config, Path(folder), Budget(math.inf), pulse, tell=tell)
    return moments[-1] - moments[0], list(configs.values())


def _by_hand(data: Any, work: list[dict[str, Any]]) -> float:
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=_bare, args=(work[k::2], data)) for k in (0, 1)]
    started = time.perf_counter()
    for process in both:
        process.start()
    for process in both:
        process.join()
    return time.perf_counter() - started


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datasets", nargs="+", default=SMALL, choices=(*SMALL, *OUTSIDE))
    parser.add_argument("--masks", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/tuning.csv"))
    parser.add_argument("--summary", action="store_true")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--samplers", action="store_true")
    args = parser.parse_args()
    if args.overhead:
        print(overhead())
        return
    if args.samplers:
        path = args.csv.with_name("samplers.csv")
        print(samplers(args.datasets, args.masks, args.seconds, path))
        return
    if not args.summary:
        from tuning.config import SearchConfig
        from tuning.ray_session import ray_session

        with tempfile.TemporaryDirectory() as storage, ray_session(SearchConfig()):
            for dataset, mask in missing(args.csv, args.datasets, args.masks, args.seconds):
                append(args.csv, measure(dataset, mask, args.seconds, Path(storage)))
    if not args.csv.exists():
        raise SystemExit(f"{args.csv} does not exist: nothing has been measured yet")
    rows = pd.read_csv(args.csv)
    print(summarise(rows[rows["seconds_allowed"] == args.seconds]))


if __name__ == "__main__":
    main()
