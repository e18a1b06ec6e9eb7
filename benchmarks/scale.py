"""How the driver's cost grows with trials: they only sleep, on a node with 100 logical CPUs.

    python -m benchmarks.scale                       # 10, 50 and 100 side by side, 200 trials each
    python -m benchmarks.scale --concurrent 100 --trials 2000

The trials import no torch and take `--seconds`; what is left is the price of Ray Tune, of Optuna's
proposals and of the journal. `ideal` is what the sleeping alone would allow. Driver CPU is the
share of one core that the driver's process used while the search ran. Starting a worker process
costs seconds of CPU, a hundred of them minutes of two cores: run it where nobody else works.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import optuna
import ray
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from ray import tune
from ray.tune.search.optuna import OptunaSearch


def sleeper(config: dict[str, Any], seconds: float, reports: int) -> None:
    """A trial that reports as often as ours do, and does nothing else."""
    for step in range(reports):
        time.sleep(seconds / reports)
        tune.report({"error": config["a"] + config["b"] / (step + 1), "step": step + 1})


def measure(
    concurrent: int, trials: int, seconds: float, folder: Path, sampler: str
) -> dict[str, Any]:
    """One search; its figures."""
    journal = folder / f"journal-{concurrent}-{trials}-{sampler}.log"
    kinds = {"random": optuna.samplers.RandomSampler, "tpe": optuna.samplers.TPESampler}
    proposing = [0.0]

    class Timed(OptunaSearch):
        def suggest(self, trial_id: str) -> Any:
            start = time.perf_counter()
            try:
                return super().suggest(trial_id)
            finally:
                proposing[0] += time.perf_counter() - start

    searcher = Timed(
        space={f: optuna.distributions.FloatDistribution(0, 1) for f in ("a", "b", "c", "d")},
        metric="error",
        mode="min",
        sampler=kinds[sampler](seed=0),
        storage=JournalStorage(JournalFileBackend(str(journal))),
    )
    runner = tune.with_resources(
        tune.with_parameters(sleeper, seconds=seconds, reports=8), {"cpu": 1}
    )
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    results = tune.Tuner(
        runner,
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            num_samples=trials,
            max_concurrent_trials=concurrent,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(name=journal.stem, storage_path=str(folder), verbose=0),
    ).fit()
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "concurrent": concurrent,
        "trials": trials,
        "finished": len(results) - results.num_errors,
        "seconds": round(wall, 1),
        "trials_per_second": round(trials / wall, 2),
        "ideal": round(concurrent / seconds, 2),
        "driver_cpu": round(cpu / wall, 2),
        "driver_ms_per_trial": round(1000 * cpu / trials, 1),
        "proposing_ms_per_trial": round(1000 * proposing[0] / trials, 1),
        "sampler": sampler,
    }


def main() -> None:
    """Run the simulation and print a line per setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--concurrent", type=int, nargs="+", default=[10, 50, 100])
    parser.add_argument("--trials", type=int, nargs="+", default=[200])
    parser.add_argument("--seconds", type=float, default=4.0, help="of sleep in a trial (4)")
    parser.add_argument("--sampler", choices=("random", "tpe"), default="tpe")
    parser.add_argument("--output", type=Path, help="also write the figures there, as JSON")
    given = parser.parse_args()
    os.environ |= {
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_GLOBAL_CHECKPOINT_S": "3600",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "RAY_AIR_NEW_OUTPUT": "0",
    }
    optuna.logging.set_verbosity(optuna.logging.WARNING)
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
                figures.append(
                    measure(concurrent, trials, given.seconds, Path(folder), given.sampler)
                )
                print(json.dumps(figures[-1]), flush=True)
    if given.output:
        given.output.write_text(json.dumps(figures, indent=1) + "\n")
    ray.shutdown()


if __name__ == "__main__":
    main()
