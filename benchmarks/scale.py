"""How the driver's cost grows with trials: they only sleep, on a node with 100 logical CPUs.

    python -m benchmarks.scale                       # 10, 50 and 100 side by side, 200 trials each
    python -m benchmarks.scale --concurrent 100 --trials 2000
    python -m benchmarks.scale --concurrent 20 --trials 500 --profile

It is the product's own search (`tuning.search.search`: journal, sampler, Ray Tune) with another
trainable: the trials import no torch, take `--seconds` and report as often as ours do. `ideal` is
what the sleeping alone would allow. Driver CPU is the share of one core that the driver's process
used while the search ran. Starting a worker process costs seconds of CPU, a hundred of them minutes
of two cores: run it where nobody else works.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import pstats
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
from ray import tune

import tuning.search
from tuning.affordable import Budget
from tuning.config import SearchConfig
from tuning.searcher import JournalSearch

EIGHTHS = (1, 2, 4, 6, 8)


def sleeper(config: dict[str, Any], data: Any, folder: str, threads: int) -> None:
    """A trial that reports as often as ours do, and does nothing else."""
    for eighths in EIGHTHS:
        time.sleep(data.seconds / len(EIGHTHS))
        tune.report(
            {
                "error": config["learning_rate"] + 1 / eighths,
                "eighths": eighths,
                "epoch": eighths,
                "best_epoch": eighths,
                "n_epochs": 8,
                "seconds": data.seconds * eighths / 8,
            }
        )


def timed(spent: dict[str, float], name: str) -> Callable[..., Any]:
    """A method of the searcher that adds up its own time."""
    method = getattr(JournalSearch, name)

    def call(self: JournalSearch, *words: Any, **more: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(self, *words, **more)
        finally:
            spent[name] += time.perf_counter() - start

    return call


def measure(concurrent: int, trials: int, seconds: float, folder: Path) -> dict[str, Any]:
    """One search; its figures."""
    place = folder / f"{concurrent}-{trials}"
    names = ("suggest", "on_trial_result", "on_trial_complete")
    methods = {name: getattr(JournalSearch, name) for name in names}
    spent = dict.fromkeys(names, 0.0)
    for name in names:
        setattr(JournalSearch, name, timed(spent, name))
    tuning.search.trainable = sleeper
    data: Any = SimpleNamespace(table=SimpleNamespace(values=np.zeros((500, 8))), seconds=seconds)
    config = SearchConfig(
        trials=trials, time_budget=None, concurrent=concurrent, early_stopping=False
    )
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    study = tuning.search.search(data, config, place, Budget(config.seconds))
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    for name, method in methods.items():
        setattr(JournalSearch, name, method)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    done = [t for t in study.get_trials(deepcopy=False) if t.state.name == "COMPLETE"]
    # The beginning is the start of worker processes; the second half is the steady state.
    ends = sorted(t.datetime_complete for t in done)
    half = ends[len(ends) // 2 :]
    steady = (len(half) - 1) / max(1e-9, (half[-1] - half[0]).total_seconds())
    return {
        "concurrent": concurrent,
        "trials": trials,
        "finished": len(done),
        "seconds": round(wall, 1),
        "trials_per_second": round(trials / wall, 2),
        "steady": round(steady, 2),
        "ideal": round(concurrent / seconds, 2),
        "driver_cpu": round(cpu / wall, 2),
        "driver_ms_per_trial": round(1000 * cpu / trials, 1),
        **{f"{name}_ms": round(1000 * value / trials, 1) for name, value in spent.items()},
    }


def main() -> None:
    """Run the simulation and print a line per setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--concurrent", type=int, nargs="+", default=[10, 50, 100])
    parser.add_argument("--trials", type=int, nargs="+", default=[200])
    parser.add_argument("--seconds", type=float, default=4.0, help="of sleep in a trial (4)")
    parser.add_argument("--profile", action="store_true", help="where the driver's time goes")
    parser.add_argument("--output", type=Path, help="also write the figures there, as JSON")
    given = parser.parse_args()
    ray.init(
        address="local",
        num_cpus=100,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=200 * 2**20,
    )
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for concurrent in given.concurrent:
            for trials in given.trials:
                profile = cProfile.Profile()
                if given.profile:
                    profile.enable()
                figures.append(measure(concurrent, trials, given.seconds, Path(folder)))
                profile.disable()
                print(json.dumps(figures[-1]), flush=True)
                if given.profile:
                    pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
    if given.output:
        given.output.write_text(json.dumps(figures, indent=1) + "\n")
    ray.shutdown()


if __name__ == "__main__":
    main()
