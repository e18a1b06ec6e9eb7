"""The search: Optuna proposes, Ray Tune runs, the journal in the run's folder remembers.

The journal is the only memory. Ray's own experiment state is thrown away, so that continuing a run,
extending it, and surviving a killed driver are one thing: open the journal, take up the trials that
were running from their checkpoints, and ask for the rest.

Epochs and early stopping. `epochs` is searched, and each trial anneals its learning rate over its
own horizon, so rungs are shares of that horizon (`trial.EIGHTHS`), never epochs. ASHA may end a
trial at a quarter and at half of its way if it is in the worse half there. It is gentle: nothing is
stopped before `MIN_RIVALS` trials have passed the same rung.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import ray
from optuna.distributions import BaseDistribution
from optuna.trial import TrialState
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.stopper import Stopper

from remasker.errors import InvalidConfigError, RemaskerError
from remasker.memory import free_memory
from tuning.affordable import Affordable, AffordableSampler, Budget
from tuning.config import SearchConfig, StorageError
from tuning.cost import CostModel
from tuning.journal import STATES, TRIALS, open_study, quiet_optuna, trials_left
from tuning.preflight import capacity
from tuning.ray_session import HeadLost, Pulse, quiet_ray
from tuning.searcher import JournalSearch
from tuning.second_stage import seconds_needed
from tuning.sharing import fits
from tuning.space import make_space, warm_starts
from tuning.trial import TrialData, run_trial

#: ASHA stops nothing before so many trials have passed a rung: the first few decide nothing.
MIN_RIVALS = 4
#: A single trial may take this share of all the time there is: fewer trials are no search.
MAX_TRIAL_SHARE = 1 / 6
#: A worker that dies is replaced, and its trial goes on from its checkpoint, so many times.
MAX_DEATHS = 3
#: How many trials wait where an autoscaler may still start nodes, if that is more than run.
MIN_WAITING = 8


class GentleASHA(ASHAScheduler):
    """ASHA over shares of the horizon that stops nothing while rivals are few."""

    def __init__(self) -> None:
        super().__init__(
            time_attr="eighths",
            metric="error",
            mode="min",
            max_t=8,
            grace_period=2,
            reduction_factor=2,
            # The last report ends the function anyway; stopping it there would only race with it.
            stop_last_trials=False,
        )
        self._passed: dict[int, set[str]] = {}

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Stop a trial in the worse half of at least `MIN_RIVALS` at the same rung."""
        action: str = super().on_trial_result(tune_controller, trial, result)
        passed = self._passed.setdefault(int(result.get("eighths", 0)), set())
        passed.add(trial.trial_id)
        if action == TrialScheduler.STOP and len(passed) <= MIN_RIVALS:
            return str(TrialScheduler.CONTINUE)
        return action


class EndInTime(Stopper):
    """Ends the search when the last stage must begin, or when it cannot go on."""

    def __init__(self, budget: Budget, search: JournalSearch, pulse: Pulse) -> None:
        self.budget, self.search, self.pulse = budget, search, pulse

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """No single trial is ended by time."""
        return False

    def stop_all(self) -> bool:
        """Whether it is time. Ray Tune asks several times a second."""
        self.pulse.check()
        return self.budget.over or bool(self.search.trouble)


# ---------------------------------------------------------------------- running it


def trainable(config: dict[str, Any], data: TrialData, folder: str, threads: int) -> None:
    """`run_trial` as Ray calls it: a failure becomes a report, so that it is not tried again."""
    import torch

    torch.set_num_threads(threads)
    place = Path(folder) / f"{config['number']:05d}"
    try:
        run_trial(config, data, tune.report, place)
    except StorageError as error:
        tune.report({"error": float("nan"), "eighths": 0, "storage": str(error)})
    except Exception as error:
        reason = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {reason[0] if reason else ''}".strip(": ")
        tune.report({"error": float("nan"), "eighths": 0, "failure": text[:500]})


class Watch(tune.Callback):
    """Forwards what happens to the view, and remembers why workers died."""

    def __init__(self, search: JournalSearch, tell: Callable[[str, dict[str, Any]], None]) -> None:
        self.search, self.tell = search, tell
        self.died: dict[str, list[str | None]] = {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A worker begins."""
        self.tell("start", dict(trial.config))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """A trial reports."""
        self.tell("report", {**trial.config, **result})

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A worker died; its trial is taken up by another.

        A node that is lost is no fault of the trial. It may be noticed only after the worker, so
        all deaths are judged anew each time.
        """
        died = self.died.setdefault(trial.trial_id, [])
        died.append(node_of(trial))
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        trial.run_metadata.num_failures = sum(node is None or node in alive for node in died)
        self.search.deaths[trial.trial_id] = (
            f"its worker process died {MAX_DEATHS + 1} times, by a signal or for lack of memory"
        )
        self.tell("recover", dict(trial.config))


def node_of(trial: Any) -> str | None:
    """The node of the worker that died last under this trial; None if Ray does not know it."""
    try:
        with open(trial.pickled_error_file, "rb") as file:  # Ray Tune wrote it a moment ago
            actor = ray._private.state.actors(pickle.load(file).actor_id)
        return str(actor["Address"]["NodeID"])
    except Exception:  # private names: without them, every death counts against the trial
        return None


def search(
    data: TrialData,
    config: SearchConfig,
    folder: Path,
    budget: Budget,
    pulse: Pulse,
    *,
    space: tuple[dict[str, BaseDistribution], dict[str, Any]] | None = None,
    seed: int | None = None,
    share: Callable[[int], int] = lambda slots: slots,
    tell: Callable[[str, dict[str, Any]], None] = lambda event, what: None,
) -> optuna.Study:
    """Run trials until one of the limits; the study that comes back is also in the folder.

    Needs a running Ray, see `ray_session`, and a `pulse` that asks it `QUESTIONS`. `share` says how
    many of the slots are ours.
    """
    n_rows, n_columns = data.table.values.shape
    distributions, fixed = space or make_space(config.space, n_rows)
    seed = config.random_state if seed is None else seed
    check_resources(config, pulse["grown"])

    def slots() -> int:
        ours = share(cluster_slots(config, pulse["now"], pulse["grown"]))
        return max(1, min(ours, config.concurrent or ours, config.trials or ours))

    cost = CostModel(n_rows=n_rows, n_columns=n_columns)
    timed = not math.isinf(budget.total)
    if timed:
        cost.measure(data.table)
        budget.slowness = cost.factor
    affordable = Affordable(
        distributions,
        fixed,
        cost,
        seconds=lambda: min(
            MAX_TRIAL_SHARE * (budget.total - budget.reserve) * slots(),
            max(5.0, 0.5 * budget.left_for_search()),
        ),
        memory=trial_memory(config, slots()),
    )
    points = warm_starts(distributions, n_rows) if config.portfolio else []
    study = open_study(folder)
    # A run that goes on must not draw its first random points once more.
    drawn = (seed + len(study.get_trials(deepcopy=False))) % 2**32
    n_random = 10**9 if config.sampler == "random" else max(4, len(points) or 10)
    study.sampler = AffordableSampler(
        distributions, affordable, seed=drawn, first=points, n_random=n_random
    )
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    budget.usable = budget.usable or bool(done)
    n_left = trials_left(study, config.trials)
    if n_left == 0 or budget.over:
        return study

    seconds: list[float] = []

    def on_end(number: int, state: TrialState, last: Mapping[str, Any]) -> None:
        if state == TrialState.COMPLETE:
            seconds.append(float(last.get("seconds", 0.0)))
            dear = float(np.quantile(seconds, 0.75))
            budget.slowness = cost.factor
            if config.experts is not None and timed:
                # Both passes of the second stage, if they leave the search a third of the time.
                likely = 2.2 * seconds_needed(data, dear, slots(), budget.slowness)
                budget.reserve = min(0.67 * budget.total, max(0.25 * budget.total, likely))
            elif config.refit and timed:
                # The members are refitted side by side; the dearest of them decides.
                likely = 1.15 * dear * math.ceil(config.max_members / slots())
                budget.reserve = min(0.4 * budget.total, 4 + 0.02 * budget.total + likely)
        place = folder / TRIALS / f"{number:05d}"
        if state == TrialState.COMPLETE:
            (place / "state.pt").unlink(missing_ok=True)
        elif seconds:
            # Nobody will ask for the weights of a stopped trial once another has finished.
            shutil.rmtree(place, ignore_errors=True)
        error = last["error"] if state == TrialState.COMPLETE else None
        tell("end", {"number": number, "state": STATES[state], "error": error})

    with quiet_optuna():
        searcher = JournalSearch(
            study=study,
            space=distributions,
            fixed=fixed,
            cost=cost,
            budget=budget,
            seed=seed,
            slots=slots,
            on_end=on_end,
        )
    runner = tune.with_resources(
        tune.with_parameters(
            trainable,
            data=data,
            folder=str(folder / TRIALS),
            threads=max(1, int(config.cpus_per_trial)),
        ),
        {"cpu": config.cpus_per_trial, "gpu": config.gpus_per_trial},
    )
    # Ray keeps trainables by name for the whole cluster: under one name, of two searches at once
    # one would run the other's trials, on the other's table.
    runner.__name__ = f"trial_{secrets.token_hex(8)}"
    scratch = folder / ".ray"
    with (
        storage_trouble(study, searcher, folder),
        lost_head(pulse),
        quiet_optuna(),
        quiet_ray(config.verbose),
    ):
        tune.Tuner(
            runner,
            tune_config=tune.TuneConfig(
                search_alg=searcher,
                scheduler=GentleASHA() if config.early_stopping else FIFOScheduler(),
                num_samples=-1 if n_left is None else n_left,
                # How many run side by side is the searcher's affair: here it could not change.
                max_concurrent_trials=None,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name="trials",
                storage_path=str(scratch.absolute()),
                stop=EndInTime(budget, searcher, pulse),
                failure_config=tune.FailureConfig(max_failures=MAX_DEATHS),
                callbacks=[Watch(searcher, tell)],
                verbose=2 if config.verbose else 0,
            ),
        ).fit()
    shutil.rmtree(scratch, ignore_errors=True)
    return study


@contextlib.contextmanager
def storage_trouble(study: optuna.Study, searcher: JournalSearch, folder: Path) -> Iterator[None]:
    """Whoever could not write, a worker, the journal or Ray: one error that names the storage."""
    try:
        yield
    except Exception:
        failure = study._storage._backend.failure or unwritable(folder)  # type: ignore[attr-defined]
        if failure is not None:
            raise failure from None
        raise
    if searcher.trouble:
        raise StorageError(searcher.trouble)


@contextlib.contextmanager
def lost_head(pulse: Pulse) -> Iterator[None]:
    """A head that is gone becomes one error, whichever of Ray's calls was the first to notice."""
    try:
        yield
    except HeadLost:
        ray.shutdown()
        raise pulse.error() from None
    except Exception as error:
        if isinstance(error, RemaskerError) or not pulse.gone():
            raise
        ray.shutdown()
        raise pulse.error() from error


def unwritable(folder: Path) -> StorageError | None:
    """Try to write as much as a small checkpoint takes."""
    probe = folder / f".probe.{os.getpid()}"
    try:
        probe.write_bytes(bytes(2**20))
    except OSError as error:
        return StorageError.of(folder, error)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None


# ---------------------------------------------------------------------- side by side


def check_resources(config: SearchConfig, resources: Mapping[str, float]) -> None:
    """Refuse what would wait for ever.

    >>> check_resources(SearchConfig(gpus_per_trial=1), {"CPU": 2.0})
    Traceback (most recent call last):
    remasker.errors.InvalidConfigError: gpus_per_trial: a trial asks for 1 GPU, the cluster has 0
    """
    for name, wanted in (("CPU", config.cpus_per_trial), ("GPU", config.gpus_per_trial)):
        there = resources.get(name, 0)
        if wanted > there:
            raise InvalidConfigError(
                f"{name.lower()}s_per_trial: a trial asks for {wanted:g} {name}, the cluster has "
                f"{there:g}"
            )


def cluster_slots(
    config: SearchConfig, now: Mapping[str, float], grown: Mapping[str, float]
) -> int:
    """How many trials find a place, of the resources there are now and when fully grown.

    An autoscaler starts nodes for trials that wait. As many wait as run: the cluster doubles each
    time, and no trial is proposed long before there is a place for it, knowing less.

    >>> cluster_slots(SearchConfig(), {"CPU": 2.0}, {"CPU": 2.0})
    2
    >>> cluster_slots(SearchConfig(), {"CPU": 16.0}, {"CPU": 160.0})
    32
    """
    now_fit = fits(config, now)
    return max(1, now_fit, min(fits(config, grown), max(MIN_WAITING, 2 * now_fit)))


def trial_memory(config: SearchConfig, slots: int) -> float:
    """Bytes for one trial: a part of what the smallest node has for all that run on it."""
    if config.sharing:  # the other tables' trials run beside ours
        slots = max(slots, fits(config, ray.cluster_resources()))
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    workers = [node for node in nodes if node.get("CPU", 0) >= config.cpus_per_trial]
    if len(nodes) == 1 or not workers:
        return 0.6 * free_memory() / slots
    return min(
        0.6 * node["memory"] / max(1, min(slots, node["CPU"] // config.cpus_per_trial))
        for node in workers
    )


#: What the head is asked during a search.
QUESTIONS: dict[str, Callable[[], Any]] = {"now": ray.cluster_resources, "grown": capacity}
