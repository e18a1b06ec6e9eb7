"""Ratios of times, all measured in one run on one core; absolute times are this machine's.

    python -m benchmarks.speed                    # the training step and imputing
    python -m benchmarks.speed --quality yacht    # seconds until the paper preset's held-out error
    python -m benchmarks.speed --scale            # memory and time by rows and columns

Times are CPU times of the thread, so that a busy machine disturbs them less; each is a median with
its quartiles. `products` is the time of the linear layers' matrix products at the step's own
shapes, forward and both gradients: the part of a step that cannot be saved.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from remasker.model import ModelConfig
from remasker.table import EncodedTable
from remasker.tasks import one_thread
from remasker.training import Trainer, TrainingConfig

SHAPES = ((32, 4, 2), (32, 6, 4), (64, 8, 4))


def make_table(n_rows: int, n_columns: int, seed: int = 0) -> EncodedTable:
    """Correlated numbers with a fifth of the cells missing."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(n_rows, n_columns)) + random.normal(size=(n_rows, 1))
    observed = random.random(values.shape) > 0.2
    return EncodedTable(
        values=np.where(observed, values, 0).astype(np.float32),
        observed=observed,
        n_categories=(0,) * n_columns,
    )


def quartiles(times: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75])
    return float(low), float(middle), float(high)


def clock(task: Callable[[], Any], repeats: int) -> list[float]:
    """CPU seconds of each repetition."""
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        task()
        times.append(time.thread_time() - started)
    return times


def products(shape: tuple[int, int, int], tokens: tuple[int, int], ratio: float) -> float:
    """Seconds of the matrix products of one step: `tokens` in the encoder and in the decoder."""
    width, encoder, decoder = shape
    hidden = int(width * ratio)
    sides = [(width, 3 * width), (width, width), (width, hidden), (hidden, width)]
    total = 0.0
    for depth, n in ((encoder, tokens[0]), (decoder, tokens[1])):
        for inner, outer in sides:
            x, w, g = torch.randn(n, inner), torch.randn(inner, outer), torch.randn(n, outer)

            def step(x: torch.Tensor = x, w: torch.Tensor = w, g: torch.Tensor = g) -> None:
                _ = x @ w, g @ w.T, x.T @ g

            total += depth * quartiles(clock(step, 12))[1]
    return total


def steps(columns: tuple[int, ...], batches: tuple[int, ...], rounds: int = 9) -> None:
    """Products ÷ step and fast ÷ plain for each shape."""
    print("training step, MLP ratio 4; low | median | high of CPU ms, and of the share of products")
    print(
        f"{'shape':>10} {'cols':>4} {'batch':>5}  {'step':>22}  {'products÷step':>18}  "
        "plain÷fast  rows/s"
    )
    for n_columns in columns:
        for batch in batches:
            table = make_table(batch * 8, n_columns)
            for shape in SHAPES:
                model = ModelConfig(
                    width=shape[0],
                    encoder_depth=shape[1],
                    decoder_depth=shape[2],
                    mlp_ratio=4.0,
                    value_encoding="linear",
                )
                config = TrainingConfig(epochs=10**6, batch_size=batch, masking="random_ratio")
                times: dict[bool, list[float]] = {True: [], False: []}
                trainers = {fast: Trainer(table, model, config) for fast in times}
                for fast, trainer in trainers.items():
                    trainer.model.fast = fast
                epochs = {fast: trainer.epochs() for fast, trainer in trainers.items()}
                seen = int(batch * (1 + 0.8 * 0.5 * n_columns)), batch * (1 + n_columns)
                shares = []
                for _ in range(rounds):  # interleaved: a disturbance hits all
                    for fast, own in epochs.items():
                        times[fast] += [t / 8 for t in clock(partial(next, own), 1)]
                    shares.append(products(shape, seen, 4.0) / times[True][-1])
                low, middle, high = quartiles(times[True][1:])
                share = quartiles(shares[1:])
                gain = quartiles(times[False][1:])[1] / middle
                print(
                    f"{shape!s:>10} {n_columns:>4} {batch:>5}  "
                    f"{low * 1e3:6.1f} |{middle * 1e3:6.1f} |{high * 1e3:6.1f}  "
                    f"{share[0]:.2f} | {share[1]:.2f} | {share[2]:.2f}  "
                    f"{gain:>10.2f}  {batch / middle:>6.0f}",
                    flush=True,
                )


def imputing(n_rows: int = 2000, n_columns: int = 8) -> None:
    """Rows per second by the batch, row by row, and of scikit-learn."""
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer, KNNImputer

    from remasker import ReMaskerImputer

    table = make_table(n_rows, n_columns)
    gaps = np.where(table.observed, table.values, np.nan)
    pure = ReMaskerImputer(epochs=1, experts=None, n_members=1, random_state=0).fit(gaps)
    both = ReMaskerImputer(epochs=1, random_state=0).fit(gaps)
    theirs = {
        "IterativeImputer": IterativeImputer(random_state=0).fit(gaps),
        "KNNImputer": KNNImputer().fit(gaps),
    }

    def row_by_row() -> None:
        for i in range(50):
            pure.transform(gaps[i : i + 1])

    batched = n_rows / quartiles(clock(lambda: pure.transform(gaps), 5))[1]
    rows = {
        "row by row": 50 / quartiles(clock(row_by_row, 3))[1],
        "with experts": n_rows / quartiles(clock(lambda: both.transform(gaps), 3))[1],
    }
    for name, imputer in theirs.items():
        rows[name] = n_rows / quartiles(clock(partial(imputer.transform, gaps), 3))[1]
    print(f"\nimputing {n_rows} × {n_columns}: {batched:,.0f} rows/s in batches (pure ReMasker)")
    for name, rate in rows.items():
        print(f"  {batched / rate:8.1f} × {name} ({rate:,.0f} rows/s)")


def quality(dataset: str) -> None:
    """CPU seconds until the defaults' single model reaches the paper preset's held-out error.

    Its learning rate falls over its own horizon, so a longer training is another training.
    """
    from benchmarks.accuracy import gappy, task
    from remasker.holdout import hold_out
    from remasker.imputer import PAPER, ReMaskerImputer
    from remasker.inference import Ensemble, normal_residuals
    from remasker.table import TableEncoder

    table, hidden = task(dataset, "MAR", 0.3, 0, "protocol")
    frame = gappy(table, hidden)

    def curve(settings: dict[str, Any], scaling: str) -> tuple[list[tuple[float, float]], float]:
        encoder = TableEncoder(scaling=scaling, whole_numbers=False).fit(frame)
        encoded = encoder.encode(frame)
        spread = np.array([column.scale for column in encoder.modelled])
        held = hold_out(encoded.observed, 0.1, np.random.default_rng(0))
        estimator = ReMaskerImputer(**settings)
        trainer = Trainer(encoded, *estimator._configs(), held_out=held)
        rows = np.flatnonzero(held.any(axis=1))
        truth = encoder.in_units(encoded.values)[rows][held[rows]]
        points, spent, last = [], 0.0, time.thread_time()
        for report in trainer.epochs():
            spent += time.thread_time() - last
            if report.error is not None:
                ensemble = Ensemble(
                    members=(trainer.member(),),
                    n_categories=encoded.n_categories,
                    residuals=normal_residuals(len(spread)),
                )
                said = encoder.in_units(ensemble.impute(encoded.hide(held).take(rows)))
                points.append((spent, float(np.sqrt(np.mean((said[held[rows]] - truth) ** 2)))))
            last = time.thread_time()
        completed = encoder.in_units(ensemble.impute(encoded.hide(held)))
        return points, float(np.sqrt(np.mean((completed - table.to_numpy())[hidden] ** 2)))

    paper, paper_true = curve(PAPER, "minmax")
    goal = paper[-1][1]
    print(f"{dataset}: paper preset, 600 epochs: error {goal:.4f} in {paper[-1][0]:.0f} CPU s")
    usual = TrainingConfig().n_epochs(*table.shape)
    for times in HORIZONS:
        ours, ours_true = curve({"epochs": times * usual}, "standard")
        reached = next((spent for spent, error in ours if error <= goal), None)
        said = "not reached"
        if reached is not None:
            ratio = paper[-1][0] / reached
            said = f"there after {reached:.1f} CPU s ({ratio:.0f} times faster)"
        print(
            f"  defaults, {times} × their epochs: {said}; {ours[-1][1]:.4f} at the end, "
            f"after {ours[-1][0]:.0f} CPU s\n"
            f"  on the cells that were hidden: paper {paper_true:.4f}, defaults {ours_true:.4f}",
            flush=True,
        )
        if reached is not None:
            break


#: Multiples of the default's epochs that are tried until one reaches the paper's error.
HORIZONS = (1, 2, 3)
ROWS = (10**3, 10**4, 10**5, 10**6)
COLUMNS = (5, 20, 50, 100, 200, 500)


def point(n_rows: int, n_columns: int) -> None:
    """Fit and transform one table in this process; its figures on one line."""
    from remasker import ReMaskerImputer

    table = make_table(n_rows, n_columns)
    gaps = np.where(table.observed, table.values, np.float32("nan"))
    del table
    imputer = ReMaskerImputer(epochs=1, batch_size=256, experts=None, n_members=1, random_state=0)
    imputer.fit(gaps[:64])  # compiles what was not yet
    fit = clock(partial(imputer.fit, gaps), 1)[0]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    transform = clock(partial(imputer.transform, gaps), 1)[0]
    print(fit, transform, peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)


def scale() -> None:
    """Time and peak memory of one epoch and one `transform` by rows and by columns."""
    print(
        "pure ReMasker, one model, one epoch, batches of 256 rows; CPU seconds, a process for each"
    )

    def measure(n_rows: int, n_columns: int) -> tuple[float, float]:
        words = [sys.executable, "-m", "benchmarks.speed", "--point", str(n_rows), str(n_columns)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            print(f"{n_rows:>8} × {n_columns:<4} failed: {done.stderr.strip().splitlines()[-1:]}")
            return np.nan, np.nan
        fit, transform, peak, last = map(float, done.stdout.split())
        print(
            f"{n_rows:>8} × {n_columns:<4} fit {fit:8.2f} s, peak {peak:.2f} GB; "
            f"transform {transform:8.2f} s, peak {last:.2f} GB",
            flush=True,
        )
        return fit, transform

    for name, sizes in (
        ("rows", [(n, 10) for n in ROWS]),
        ("columns", [(10**3, n) for n in COLUMNS]),
    ):
        times = np.array([measure(*size) for size in sizes])
        counts = [n if name == "rows" else d for n, d in sizes]
        for what, own in zip(("fit", "transform"), times.T, strict=True):
            slopes = np.diff(np.log(own)) / np.diff(np.log(counts))
            print(f"{what} grows with {name} to the power " + ", ".join(f"{s:.2f}" for s in slopes))
    measure(10**6, 20)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--columns", nargs="+", type=int, default=[8, 16, 57])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--quality", nargs="+", metavar="DATASET", default=[])
    parser.add_argument("--scale", action="store_true")
    parser.add_argument("--point", nargs=2, type=int, metavar=("ROWS", "COLUMNS"))
    args = parser.parse_args()
    with one_thread():
        run(args)


def run(args: argparse.Namespace) -> None:
    """What the command line asks for."""
    if args.point:
        point(*args.point)
    elif args.scale:
        scale()
    elif args.quality:
        for dataset in args.quality:
            quality(dataset)
    else:
        steps(tuple(args.columns), tuple(args.batches))
        imputing()


if __name__ == "__main__":
    main()
