"""What Ray Tune asks: the next configuration, and what to make of a trial's reports and end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from tuning.affordable import Budget
from tuning.cost import CostModel
from tuning.trial import FIRST_CHECKPOINT


class JournalSearch(OptunaSearch):
    """Ray's OptunaSearch with honest endings: stopped is PRUNED, not finite is FAIL.

    It also takes up trials that an earlier process left running, gives every trial its number and
    its own seed, and lets no trial begin that could not end in time. It counts itself how many may
    run side by side: `slots` may answer with another number whenever nodes come and go.
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
        slots: Callable[[], int] = lambda: 1,
        on_end: Callable[[int, TrialState, dict[str, Any]], None] = lambda *what: None,
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
        self.slots, self.on_end = slots, on_end
        self._study = study
        self.distributions = space
        self.deaths: dict[str, str] = {}
        #: What a worker said of storage that it could not write; the search ends with it.
        self.trouble = ""
        self._left_running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        self._seconds = [t.user_attrs.get("seconds") for t in finished]

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]
        """The next configuration, None while all slots are taken, or the end for lack of time."""
        if self.trouble or len(self._ot_trials) - len(self._completed_trials) >= self.slots():
            return None
        typical = _median(self._seconds)
        if self.budget.usable and self.budget.left_for_search() < max(1.0, 0.7 * typical):
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
        self.trouble = self.trouble or result.get("storage", "")
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
        result = result or {}
        if trial is None or trial_id in self._completed_trials or result.get("storage"):
            # A trial that could not write did not fail: it stays as it is, to be taken up again.
            return
        self._completed_trials.add(trial_id)
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
        if state == TrialState.COMPLETE:
            self._seconds.append(result.get("seconds"))
        self.on_end(trial.number, state, result)

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
