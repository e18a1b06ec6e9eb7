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
import logging
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import ray
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch
from ray.tune.stopper import Stopper

from remasker.errors import InvalidConfigError
from remasker.memory import free_memory
from tuning.affordable import Affordable, AffordableSampler, Budget
from tuning.config import SearchConfig
from tuning.cost import CostModel
from tuning.space import make_space, warm_starts
from tuning.trial import FIRST_CHECKPOINT, TrialData, run_trial

#: ASHA stops nothing before so many trials have passed a rung: the first few decide nothing.
MIN_RIVALS = 4
#: A single trial may take this share of all the time there is: fewer trials are no search.
MAX_TRIAL_SHARE = 1 / 6
#: A worker that dies is replaced, and its trial goes on from its checkpoint, so many times.
MAX_DEATHS = 3
JOURNAL, TRIALS = "journal.log", "trials"
STUDY = "remasker"
STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


class JournalSearch(OptunaSearch):
    """Ray's OptunaSearch with honest endings: stopped is PRUNED, not finite is FAIL.

    It also takes up trials that an earlier process left running, gives every trial its number and
    its own seed, and lets no trial begin that could not end in time.
    """

    def __init__(
        self,
        *,
        study: optuna.Study,
        space: dict[str, BaseDistribution],
        fixed: Mapping[str, Any],
        cost: CostModel,
        budget: Budget,
        seed: int,
        on_end: Callable[[int, TrialState], None] = lambda number, state: None,
    ) -> None:
        super().__init__(
            space=space,
            metric="error",
            mode="min",
            sampler=study.sampler,
            storage=study._storage,
            study_name=study.study_name,
        )
        self.fixed, self.cost, self.budget, self.seed = dict(fixed), cost, budget, seed
        self.on_end = on_end
        self._study = study
        self.distributions = space
        self.deaths: dict[str, str] = {}
        self._left_running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]
        """The next configuration, or the end of the search when too little time is left."""
        typical = _median([t.user_attrs.get("seconds") for t in self._finished()])
        if self.budget.usable and self.budget.left_for_search() < max(1.0, 0.35 * typical):
            return Searcher.FINISHED
        if self._left_running:
            left = self._left_running.pop(0)
            self._ot_trials[trial_id] = taken_up(
                optuna.Trial(self._study, left._trial_id), self.distributions
            )
        point = super().suggest(trial_id)
        assert point is not None
        number = self._ot_trials[trial_id].number
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0]) // 2
        return {**self.fixed, **point, "number": number, "seed": seed}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Tell Optuna how a trial is doing, at its share of the horizon."""
        trial = self._ot_trials.get(trial_id)
        if trial is not None and _finite(result.get("error")):
            with warnings.catch_warnings():
                # A trial that was taken up may pass the same milestone twice.
                warnings.simplefilter("ignore")
                trial.report(result["error"], step=int(result["eighths"]))
            # By then it has a checkpoint, or it is about to end.
            if result["eighths"] == 8 or result["seconds"] > 2 * FIRST_CHECKPOINT:
                self.budget.usable = True

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tell Optuna how a trial ended, and why."""
        trial = self._ot_trials.get(trial_id)
        if trial is None or trial_id in self._completed_trials:
            return
        self._completed_trials.add(trial_id)
        result = result or {}
        state, failure = ending(result, died=error)
        if error:
            failure = self.deaths.get(trial_id, failure)
        if failure:
            trial.set_user_attr("failure", failure)
        for name in ("epoch", "best_epoch", "n_epochs", "eighths", "seconds"):
            if name in result:
                trial.set_user_attr(name, result[name])
        if state == TrialState.PRUNED and self.budget.over:
            trial.set_user_attr("stopped", "time")
        value = float(result["error"]) if state == TrialState.COMPLETE else None
        self._study.tell(trial, value, state=state)
        if result.get("epoch"):
            settings = {**self.fixed, **trial.params}
            self.cost.learn(settings, float(result["seconds"]), int(result["epoch"]))
        self.on_end(trial.number, state)

    def _finished(self) -> list[FrozenTrial]:
        trials: list[FrozenTrial] = self._study.get_trials(
            deepcopy=False, states=(TrialState.COMPLETE,)
        )
        return trials

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: the journal is the memory. Ray wants a file to rename."""
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        """Never used; see the module's description."""


def taken_up(trial: optuna.Trial, space: Mapping[str, BaseDistribution]) -> optuna.Trial:
    """A trial of an earlier process, complete even if that one died while proposing it."""
    for name, d in space.items():
        if name in trial.params:
            continue
        if isinstance(d, CategoricalDistribution):
            trial.suggest_categorical(name, d.choices)
        elif isinstance(d, IntDistribution):
            trial.suggest_int(name, d.low, d.high, step=d.step, log=d.log)
        elif isinstance(d, FloatDistribution):
            trial.suggest_float(name, d.low, d.high, step=d.step, log=d.log)
    return trial


def ending(result: Mapping[str, Any], *, died: bool) -> tuple[TrialState, str]:
    """How a trial ended, from its last report, and the reason if it failed.

    >>> ending({"error": 0.5, "eighths": 8}, died=False)[0].name
    'COMPLETE'
    >>> ending({"error": 0.5, "eighths": 2}, died=False)[0].name
    'PRUNED'
    >>> ending({"error": float("nan"), "eighths": 2}, died=False)
    (<TrialState.FAIL: 3>, 'the error is not finite')
    """
    if died:
        return TrialState.FAIL, "its worker process died, by a signal or for lack of memory"
    if result.get("failure"):
        return TrialState.FAIL, str(result["failure"])
    if "error" not in result:
        return TrialState.PRUNED, ""
    if not _finite(result["error"]):
        return TrialState.FAIL, "the error is not finite"
    if result["eighths"] < 8:
        return TrialState.PRUNED, ""
    return TrialState.COMPLETE, ""


def _finite(value: object) -> bool:
    return isinstance(value, int | float | np.number) and bool(np.isfinite(value))


def _median(values: list[Any]) -> float:
    known = [float(v) for v in values if v is not None]
    return float(np.median(known)) if known else 0.0


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
    """Ends the search when the last stage must begin."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """No single trial is ended by time."""
        return False

    def stop_all(self) -> bool:
        """Whether it is time."""
        return self.budget.over


# ---------------------------------------------------------------------- running it


def trainable(config: dict[str, Any], data: TrialData, folder: str, threads: int) -> None:
    """`run_trial` as Ray calls it: a failure becomes a report, so that it is not tried again."""
    import torch

    torch.set_num_threads(threads)
    place = Path(folder) / f"{config['number']:05d}"
    try:
        run_trial(config, data, tune.report, place)
    except Exception as error:
        reason = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {reason[0] if reason else ''}".strip(": ")
        tune.report({"error": float("nan"), "eighths": 0, "failure": text[:500]})


class Watch(tune.Callback):
    """Forwards what happens to the view, and remembers why workers died."""

    def __init__(self, search: JournalSearch, tell: Callable[[str, dict[str, Any]], None]) -> None:
        self.search, self.tell = search, tell

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A worker begins."""
        self.tell("start", dict(trial.config))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """A trial reports."""
        self.tell("report", {**trial.config, **result})

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A worker died; its trial is taken up by another."""
        self.search.deaths[trial.trial_id] = (
            f"its worker process died {MAX_DEATHS + 1} times, by a signal or for lack of memory"
        )
        self.tell("recover", dict(trial.config))


@contextlib.contextmanager
def ray_session(config: SearchConfig) -> Iterator[None]:
    """A Ray to run on: the one this process already has, a cluster, or one of our own.

    Only what was started here is ended here.
    """
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"address": config.address or "local"}
    if options["address"] == "local":
        options["include_dashboard"] = False
    if not config.verbose:
        options |= {"log_to_driver": False, "logging_level": logging.CRITICAL}
    with quiet_ray(config.verbose):
        try:
            ray.init(**options)
        except ConnectionError as error:
            raise InvalidConfigError(
                f"address: no Ray cluster answers at {config.address!r} ({error}); start one with "
                "`ray start --head`, or leave address out to run on this machine"
            ) from None
    try:
        yield
    finally:
        ray.shutdown()


def open_study(folder: Path, sampler: optuna.samplers.BaseSampler | None = None) -> optuna.Study:
    """The study in a run's folder, made if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_optuna():
        return optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL))),
            study_name=STUDY,
            sampler=sampler,
            direction="minimize",
            load_if_exists=True,
        )


def read_study(folder: Path) -> optuna.Study:
    """The study of an existing run."""
    if not (folder / JOURNAL).is_file():
        raise InvalidConfigError(f"{folder} is not a run: it has no {JOURNAL}")
    return open_study(folder)


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna's log lines wait while this lasts."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def search(
    data: TrialData,
    config: SearchConfig,
    folder: Path,
    budget: Budget,
    *,
    space: tuple[dict[str, BaseDistribution], dict[str, Any]] | None = None,
    seed: int | None = None,
    tell: Callable[[str, dict[str, Any]], None] = lambda event, what: None,
) -> optuna.Study:
    """Run trials until one of the limits; the study that comes back is also in the folder.

    Needs a running Ray; see `ray_session`.
    """
    n_rows, n_columns = data.table.values.shape
    distributions, fixed = space or make_space(config.space, n_rows)
    seed = config.random_state if seed is None else seed
    n_workers = concurrent_trials(config, ray.cluster_resources())
    cost = CostModel(n_rows=n_rows, n_columns=n_columns)
    timed = not math.isinf(budget.total)
    if timed:
        cost.measure(data.table)
    affordable = Affordable(
        distributions,
        fixed,
        cost,
        seconds=lambda: min(
            MAX_TRIAL_SHARE * (budget.total - budget.reserve) * n_workers,
            max(5.0, 0.5 * budget.left_for_search()),
        ),
        memory=0.6 * free_memory() / n_workers,
    )
    points = warm_starts(distributions, n_rows) if config.portfolio else []
    study = open_study(folder)
    # A run that goes on must not draw its first random points once more.
    drawn = (seed + len(study.get_trials(deepcopy=False))) % 2**32
    study.sampler = AffordableSampler(
        distributions, affordable, seed=drawn, n_first=len(points) or 10
    )
    if not study.get_trials(deepcopy=False):
        for point in points:
            study.enqueue_trial(affordable.fit(point), skip_if_exists=True)
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    budget.usable = budget.usable or bool(done)
    n_left = trials_left(study, config.trials)
    if n_left == 0 or budget.over:
        return study

    seconds: list[float] = []

    def on_end(number: int, state: TrialState) -> None:
        trial = study.get_trials(deepcopy=False)[number]
        if state == TrialState.COMPLETE:
            seconds.append(float(trial.user_attrs.get("seconds", 0.0)))
            if config.refit and config.experts is None and timed:
                # The members are refitted side by side; the dearest of them decides.
                rounds = math.ceil(config.max_members / n_workers)
                likely = 1.15 * rounds * float(np.quantile(seconds, 0.75))
                budget.reserve = min(0.4 * budget.total, 4 + 0.02 * budget.total + likely)
        place = folder / TRIALS / f"{number:05d}"
        if state == TrialState.COMPLETE:
            (place / "state.pt").unlink(missing_ok=True)
        elif seconds:
            # Nobody will ask for the weights of a stopped trial once another has finished.
            shutil.rmtree(place, ignore_errors=True)
        tell("end", {"number": number, "state": STATES[state], "error": trial.value})

    with quiet_optuna():
        searcher = JournalSearch(
            study=study,
            space=distributions,
            fixed=fixed,
            cost=cost,
            budget=budget,
            seed=seed,
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
    scratch = folder / ".ray"
    with quiet_optuna(), quiet_ray(config.verbose):
        tune.Tuner(
            runner,
            tune_config=tune.TuneConfig(
                search_alg=searcher,
                scheduler=GentleASHA() if config.early_stopping else FIFOScheduler(),
                num_samples=-1 if n_left is None else n_left,
                max_concurrent_trials=n_workers,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name="trials",
                storage_path=str(scratch.absolute()),
                stop=EndInTime(budget),
                failure_config=tune.FailureConfig(max_failures=MAX_DEATHS),
                callbacks=[Watch(searcher, tell)],
                verbose=2 if config.verbose else 0,
            ),
        ).fit()
    shutil.rmtree(scratch, ignore_errors=True)
    return study


def concurrent_trials(config: SearchConfig, resources: Mapping[str, float]) -> int:
    """How many trials run side by side; an error when not even one fits.

    >>> concurrent_trials(SearchConfig(), {"CPU": 2.0})
    2
    >>> concurrent_trials(SearchConfig(gpus_per_trial=1), {"CPU": 2.0})
    Traceback (most recent call last):
    remasker.errors.InvalidConfigError: gpus_per_trial: a trial asks for 1 GPU, the cluster has 0
    """
    fits = []
    for name, wanted in (("CPU", config.cpus_per_trial), ("GPU", config.gpus_per_trial)):
        there = resources.get(name, 0)
        if wanted > there:
            raise InvalidConfigError(
                f"{name.lower()}s_per_trial: a trial asks for {wanted:g} {name}, the cluster has "
                f"{there:g}"
            )
        if wanted:
            fits.append(int(there / wanted))
    limit = min(fits) if fits else 1
    wanted_side_by_side = config.concurrent or limit
    return max(1, min(wanted_side_by_side, limit, config.trials or wanted_side_by_side))


def trials_left(study: optuna.Study, trials: int | None) -> int | None:
    """How many trials are still to be run; None without a limit."""
    if trials is None:
        return None
    over = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
    return max(0, trials - len(study.get_trials(deepcopy=False, states=over)))


@contextlib.contextmanager
def quiet_ray(verbose: bool) -> Iterator[None]:
    """Ray Tune without its log lines, its files beside ours, and its change of directory."""
    settings = {
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_GLOBAL_CHECKPOINT_S": "3600",
        "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
        "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
        "RAY_AIR_NEW_OUTPUT": "0",
        # Ctrl-C stops at once: the journal and the checkpoints are all that is needed to go on.
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
    }
    before = {name: os.environ.get(name) for name in settings}
    loggers = [logging.getLogger(name) for name in ("ray", "ray.tune", "ray.train")]
    levels = [logger.level for logger in loggers]
    os.environ.update(settings)
    if not verbose:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            if not verbose:
                warnings.simplefilter("ignore")
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def records(study: optuna.Study, fixed: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """A row per trial: number, state, error, how far it came, seconds, reason, configuration."""
    rows = []
    for trial in study.get_trials(deepcopy=False):
        if trial.state == TrialState.WAITING:
            continue
        told = trial.intermediate_values
        attributes = trial.user_attrs
        last = told[max(told)] if told else None
        error = trial.value if trial.state == TrialState.COMPLETE else last
        rows.append(
            {
                "number": trial.number,
                "state": STATES[trial.state],
                "error": error,
                "epochs_done": attributes.get("epoch"),
                "best_epoch": attributes.get("best_epoch"),
                "eighths": attributes.get("eighths", max(told, default=0)),
                "seconds": attributes.get("seconds"),
                "failure": attributes.get("failure", ""),
                **(fixed or {}),
                **trial.params,
            }
        )
    return pd.DataFrame(rows)
