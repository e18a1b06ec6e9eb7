"""How the driver's cost grows with trials: they only sleep, on a node with 100 logical CPUs.

    python -m benchmarks.scale                       # 10, 50 and 100 side by side, 200 trials each
    python -m benchmarks.scale --concurrent 100 --trials 2000
    python -m benchmarks.scale --concurrent 20 --trials 500 --profile

It is the product's own search (`tuning.search.search`: journal, sampler, Ray Tune) with another
trainable: the trials import no torch, take `--seconds` and report as often as ours do. `ideal` is
what the sleeping alone would allow. Driver CPU is the share of one core that the driver's process
used while the search ran. Starting a worker process costs seconds of CPU, a hundred of them minutes
of two cores: run it where nobody else works. The first trials wait for each other until all workers
are there, and the clock starts then. (Ray Tune gives the worker of a trial that ended to the trial
whose own worker is about to start, and ends that one: where trials end faster than processes start,
as a hundred on two cores do, the rest never start.)
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
from ray import tune

import tuning.search
from tuning.affordable import Budget
from tuning.config import SearchConfig
from tuning.ray_session import Pulse
from tuning.searcher import JournalSearch

EIGHTHS = (1, 2, 4, 6, 8)


def sleeper(config: dict[str, Any], data: Any, folder: str, threads: int) -> None:
    """A trial that reports as often as ours do, and does nothing else."""
    if config["number"] < data.concurrent:
        Path(data.folder, str(config["number"])).touch()
        while len(list(Path(data.folder).iterdir())) < data.concurrent:
            time.sleep(0.5)
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


def timed(spent: dict[str, float], begun: list[tuple[float, float]], name: str) -> Any:
    """A method of the searcher that adds up its own time, from the first report on."""
    method = getattr(JournalSearch, name)

    def call(self: JournalSearch, *words: Any, **more: Any) -> Any:
        start = time.perf_counter()
        if not begun and name == "on_trial_result":
            spent.update(dict.fromkeys(spent, 0.0))
            begun.append((start, cpu_seconds()))
        try:
            return method(self, *words, **more)
        finally:
            spent[name] += time.perf_counter() - start

    return call


def cpu_seconds() -> float:
    """What this process has used so far, of all cores."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(concurrent: int, trials: int, seconds: float, folder: Path) -> dict[str, Any]:
    """One search; its figures."""
    place = folder / f"{concurrent}-{trials}"
    names = ("suggest", "on_trial_result", "on_trial_complete")
    methods = {name: getattr(JournalSearch, name) for name in names}
    spent = dict.fromkeys(names, 0.0)
    begun: list[tuple[float, float]] = []
    for name in names:
        setattr(JournalSearch, name, timed(spent, begun, name))
    tuning.search.trainable = sleeper
    (folder / f"there-{concurrent}-{trials}").mkdir()
    data: Any = SimpleNamespace(
        table=SimpleNamespace(values=np.zeros((500, 8))),
        seconds=seconds,
        concurrent=concurrent,
        folder=str(folder / f"there-{concurrent}-{trials}"),
    )
    config = SearchConfig(
        trials=trials, time_budget=None, concurrent=concurrent, early_stopping=False
    )
    start = time.perf_counter()
    with Pulse(tuning.search.QUESTIONS, place) as pulse:
        study = tuning.search.search(data, config, place, Budget(config.seconds), pulse)
    wall, cpu = time.perf_counter() - begun[0][0], cpu_seconds() - begun[0][1]
    for name, method in methods.items():
        setattr(JournalSearch, name, method)
    done = [t for t in study.get_trials(deepcopy=False) if t.state.name == "COMPLETE"]
    return {
        "concurrent": concurrent,
        "trials": trials,
        "finished": len(done),
        "starting_workers": round(begun[0][0] - start, 1),
        "seconds": round(wall, 1),
        "trials_per_second": round(trials / wall, 2),
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
