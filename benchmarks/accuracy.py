"""Imputers on the same hidden cells: ours, what was recorded of peers, and scikit-learn's.

    python -m benchmarks.accuracy                               # defaults and paper preset, small
    python -m benchmarks.accuracy --methods default --seeds 2   # what is reported
    python -m benchmarks.accuracy --methods tuned --seconds 300 --jobs 1
    python -m benchmarks.accuracy --summary                     # read what earlier calls measured

Cells come from the frozen masks in `../shared/bench` when they are there, otherwise from the
project's own simulator. Tables are the protocol's: every feature a number between 0 and 1; with
`--kinds real` the same cells are hidden in tables with their real dtypes, so that categories are
categories. Rows are appended to a CSV as they come: a call that is stopped goes on where it was.
What fails is recorded as failed, never dropped.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

SMALL = ("yacht", "diabetes", "climate", "credit", "raisin", "compressive", "wine", "obesity")
LARGE = ("spam", "bike", "california", "letter")
SHARED = Path(__file__).parents[2] / "shared" / "bench"
RESULTS = Path(__file__).parent / "accuracy.csv"
KEYS = ("dataset", "mechanism", "ratio", "seed", "kinds", "method")
FIGURES = ("rmse", "numeric", "standardised", "r2", "wd", "wd_draw", "accuracy", "seconds")
PEERS = ("hyperimpute", "missforest", "ice", "mean", "reference-remasker", "experts-alone")


def task(
    dataset: str, mechanism: str, ratio: float, seed: int, kinds: str
) -> tuple[pd.DataFrame, np.ndarray]:
    """The complete table and the cells to hide."""
    from remasker import datasets
    from remasker.metrics import protocol_scale
    from remasker.missingness import missing_mask

    table = datasets.load(dataset).table
    table = table[table.notna().all(axis=1)].reset_index(drop=True)
    masks = SHARED / "masks.npz"
    hidden = None
    if masks.is_file():
        with np.load(masks) as stored:
            key = f"{dataset}|{mechanism}|{ratio}|{seed}"
            if key in stored:
                hidden = np.unpackbits(stored[key])[: table.size].reshape(table.shape).astype(bool)
    if hidden is None:
        hidden = missing_mask(table, mechanism=mechanism, ratio=ratio, random_state=seed)
    if kinds == "protocol":
        table = pd.DataFrame(protocol_scale(table), columns=table.columns)
    return table, hidden


def gappy(table: pd.DataFrame, hidden: np.ndarray) -> pd.DataFrame:
    """The table without the hidden cells, whole columns where they are not touched."""
    result = table.copy()
    for j, name in enumerate(table.columns):
        if hidden[:, j].any():
            column = table[name]
            if column.dtype.kind in "iu":
                column = column.astype(float)
            result[name] = column.mask(hidden[:, j])
    return result


def impute(method: str, table: pd.DataFrame, kinds: str, seconds: float, seed: int) -> Any:
    """The completed table, and one draw where the method can draw."""
    from remasker.imputer import ReMaskerImputer

    given: Any = table.to_numpy(dtype=float) if kinds == "protocol" else table
    ours = {
        "default": lambda: ReMaskerImputer(random_state=seed),
        "pure": lambda: ReMaskerImputer(experts=None, random_state=seed),
        "paper": lambda: ReMaskerImputer.paper(random_state=seed),
    }
    if method in ours:
        imputer = ours[method]().fit(given)
        return imputer.transform(given), imputer.draw(given, n_draws=1, random_state=seed)[0]
    if method in ("tuned", "tuned-pure"):
        from tuning import tune

        with tempfile.TemporaryDirectory() as storage:
            experts = "auto" if method == "tuned" else None
            result = tune(
                given,
                name="table",
                storage=storage,
                trials=None,
                time_budget=seconds,
                experts=experts,
                random_state=seed,
            )
            return result.imputed, result.imputer.draw(given, n_draws=1, random_state=seed)[0]
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer

    theirs = {
        "sklearn-mean": SimpleImputer(),
        "sklearn-iterative": IterativeImputer(random_state=seed),
        "sklearn-knn": KNNImputer(),
    }
    return theirs[method].fit_transform(given), None


def measure(key: tuple[str, str, float, int, str, str], seconds: float) -> dict[str, Any]:
    """One imputer on one table."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dataset, mechanism, ratio, seed, kinds, method = key
    row: dict[str, Any] = dict(zip(KEYS, key, strict=True))
    try:
        from remasker import metrics

        table, hidden = task(dataset, mechanism, ratio, seed, kinds)
        started = time.perf_counter()
        imputed, drawn = impute(method, gappy(table, hidden), kinds, seconds, seed)
        row["seconds"] = round(time.perf_counter() - started, 1)
        frame = pd.DataFrame(imputed, columns=table.columns)
        row |= {
            "rmse": metrics.rmse(table, frame, hidden),
            "numeric": metrics.rmse(table, frame, hidden, "numeric"),
            "standardised": metrics.rmse(table, frame, hidden, "standardised"),
            "r2": metrics.r2(table, frame, hidden),
            "wd": metrics.wasserstein(table, frame),
        }
        if drawn is not None:
            row["wd_draw"] = metrics.wasserstein(table, pd.DataFrame(drawn, columns=table.columns))
        if kinds == "real" and table.dtypes.map(str).eq("category").any():
            row["accuracy"] = metrics.accuracy(table, frame, hidden)
    except Exception as error:
        row["rmse"] = f"failed: {type(error).__name__}: {error}"[:200]
    return {k: f"{v:.5f}" if k in FIGURES and isinstance(v, float) else v for k, v in row.items()}


def run(keys: Iterable[tuple[Any, ...]], jobs: int, seconds: float, path: Path) -> None:
    """Measure what is not in the CSV yet, several at a time, appending as they end."""
    done = set()
    if path.is_file():
        with path.open() as file:
            done = {tuple(row[k] for k in KEYS) for row in csv.DictReader(file)}
    waiting = [key for key in keys if tuple(map(str, key)) not in done]
    if not waiting:
        return
    fresh = not path.is_file()
    with path.open("a", newline="") as file, ProcessPoolExecutor(jobs) as pool:
        writer = csv.DictWriter(file, [*KEYS, *FIGURES], lineterminator="\n")
        if fresh:
            writer.writeheader()
        futures = [pool.submit(measure, key, seconds) for key in waiting]
        for count, future in enumerate(as_completed(futures), start=1):
            row = future.result()
            writer.writerow(row)
            file.flush()
            print(
                f"[{count}/{len(waiting)}]",
                *(row[k] for k in KEYS),
                row["rmse"],
                f"{row.get('seconds', '')} s",
                file=sys.stderr,
                flush=True,
            )


def summarise(path: Path, kinds: str = "protocol") -> str:
    """RMSE per table beside the peers, ratios as geometric means, wins, and a paired test."""
    ours = pd.read_csv(path)
    ours = ours[ours["kinds"] == kinds]
    baselines = SHARED / "baselines.csv"
    if baselines.is_file() and kinds == "protocol":
        ours = pd.concat([ours, pd.read_csv(baselines)])
    ours["rmse"] = pd.to_numeric(ours["rmse"], errors="coerce")
    ours["ratio"] = ours["ratio"].astype(float)
    table = ours.pivot_table(
        index=["mechanism", "ratio", "dataset", "seed"], columns="method", values="rmse"
    )
    mine = [m for m in ("default", "pure", "tuned", "tuned-pure", "paper") if m in table]
    peers = [m for m in (*PEERS, "sklearn-mean", "sklearn-iterative", "sklearn-knn") if m in table]
    table = table.loc[table[mine].notna().any(axis=1), [*mine, *peers]]
    lines = [table.round(4).to_string(na_rep="–"), ""]
    for method, peer in itertools.product(mine, [*peers, "paper"]):
        if peer == method or peer not in table:
            continue
        pair = table[[method, peer]].dropna()
        if pair.empty:
            continue
        logs = np.log(pair[method] / pair[peer])
        error = logs.std(ddof=1) / np.sqrt(len(logs)) if len(logs) > 1 else float("nan")
        lines.append(
            f"{method} ÷ {peer}: {np.exp(logs.mean()):.3f} (log ± {error:.3f}), better on "
            f"{int((logs < 0).sum())} of {len(logs)}; worst {np.exp(logs.max()):.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--datasets", nargs="+", default=list(SMALL), choices=(*SMALL, *LARGE))
    parser.add_argument("--methods", nargs="+", default=["default", "paper"])
    parser.add_argument("--mechanisms", nargs="+", default=["MAR"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--kinds", default="protocol", choices=("protocol", "real"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=300, help="time of one `tune`")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--summary", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if not args.summary:
        keys = itertools.product(
            args.datasets, args.mechanisms, args.ratios, args.seeds, [args.kinds], args.methods
        )
        # One thread per process: two side by side beat one on two threads.
        os.environ["OMP_NUM_THREADS"] = "1"
        run(keys, args.jobs, args.seconds, args.csv)
    print(summarise(args.csv, args.kinds))


if __name__ == "__main__":
    main()
