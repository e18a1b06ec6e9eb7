"""What may be proposed: settings that fit the memory and the time that is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from tuning.cost import CostModel, peak_bytes
from tuning.space import nearest_value

#: A sampler looks at so many trials at most.
MANY_TRIALS = 300


class Budget:
    """The time of one call, and how much of it the last stage will need.

    An empty-handed end helps nobody: while no trial has left anything to use, the search may go on
    for as long again, on a machine so busy that starting took all the time.

    >>> budget = Budget(math.inf)
    >>> budget.left_for_search(), budget.over
    (inf, False)
    """

    def __init__(self, seconds: float, *, second_stage: bool = False) -> None:
        self.total = seconds
        self.started = time.monotonic()
        #: Whether a trial has left something that can be used.
        self.usable = False
        #: How slow this machine is, all that runs on it included; the search finds out.
        self.slowness = 1.0
        #: Seconds kept back for selecting, refitting, imputing and writing.
        self.reserve = 0.0 if math.isinf(seconds) else min(0.25 * seconds, 4 + 0.02 * seconds)
        if second_stage and not math.isinf(seconds):
            # Experts have gained more than further trials wherever both were measured.
            self.reserve = 0.5 * seconds

    @property
    def spent(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self.started

    @property
    def left(self) -> float:
        """Seconds of the whole call that are left."""
        return self.total - self.spent

    def left_for_search(self) -> float:
        """Seconds until the last stage must begin."""
        return self.total - self.reserve - self.spent

    @property
    def over(self) -> bool:
        """Whether searching has to end."""
        grace = 0.0 if self.usable else max(30.0, self.total)
        return self.left_for_search() + grace <= 0


class Affordable:
    """Settings that fit the memory and the time that is left.

    >>> from tuning.space import make_space, warm_starts
    >>> space, fixed = make_space(None, 100_000)
    >>> cost = CostModel(n_rows=100_000, n_columns=50)
    >>> affordable = Affordable(space, fixed, cost, seconds=lambda: 60.0, memory=1e9)
    >>> large = warm_starts(space, 100_000)[-1]
    >>> affordable(large), affordable(affordable.fit(large))
    (False, True)
    """

    def __init__(
        self,
        space: Mapping[str, BaseDistribution],
        fixed: Mapping[str, Any],
        cost: CostModel,
        *,
        seconds: Callable[[], float],
        memory: float,
    ) -> None:
        self.space, self.fixed, self.cost = space, fixed, cost
        self.seconds, self.memory = seconds, memory

    def __call__(self, point: Mapping[str, Any]) -> bool:
        """Whether this point can be paid."""
        settings = {**self.fixed, **point}
        needed = peak_bytes(settings, self.cost.n_rows, self.cost.n_columns)
        return needed <= self.memory and self.cost.seconds(settings) <= self.seconds()

    def fit(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """The same point made cheaper until it fits: first fewer epochs, then a smaller model."""
        point = dict(point)
        for name in ("epochs", "decoder_depth", "encoder_depth", "width", "batch_size"):
            distribution = self.space.get(name)
            for _ in range(12):
                if self(point):
                    return point
                if distribution is None:
                    break
                if name == "epochs":
                    excess = self.cost.seconds({**self.fixed, **point}) / max(1e-9, self.seconds())
                    wanted = point[name] / max(1.05, excess)
                else:
                    wanted = point[name] / 1.5
                cheaper = nearest_value(distribution, wanted)
                if isinstance(distribution, IntDistribution) and distribution.step == 1:
                    cheaper = max(distribution.low, math.floor(wanted))
                if cheaper is None or cheaper >= point[name]:
                    break
                point[name] = cheaper
        return point


class FewTrials:
    """A study that shows a sampler its best and its latest trials, once there are very many.

    The cost of a proposal grows with the trials that TPE looks at (75 ms at a thousand). It models
    the best 25 at most against the rest. What the cap does to the proposals was not measured.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._study = study

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)

    def _get_trials(self, *words: Any, **more: Any) -> list[FrozenTrial]:
        trials: list[FrozenTrial] = self._study._get_trials(*words, **more)
        if len(trials) <= MANY_TRIALS:
            return trials
        done = [t for t in trials if t.state == TrialState.COMPLETE]
        best = sorted(done, key=lambda t: t.value or 0.0)[: MANY_TRIALS // 5]
        kept = {t.number for t in (*best, *trials[-(MANY_TRIALS - len(best)) :])}
        return [t for t in trials if t.number in kept]


class AffordableSampler(optuna.samplers.TPESampler):
    """TPE over a space that is known from the start, which never proposes what cannot be paid.

    The trials of a study begin with the `first` points, each made to fit when its turn comes: by
    then finished trials have told what this machine can do. They take the place of TPE's random
    beginning.
    """

    def __init__(
        self,
        space: dict[str, BaseDistribution],
        affordable: Affordable,
        *,
        seed: int,
        first: Sequence[Mapping[str, Any]] = (),
        n_random: int = 10,
    ) -> None:
        super().__init__(
            seed=seed, multivariate=True, constant_liar=True, n_startup_trials=n_random
        )
        self._space, self._affordable, self._first = space, affordable, first
        self._random = optuna.samplers.RandomSampler(seed=seed)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """The whole space: it does not depend on what has been tried."""
        return {name: d for name, d in self._space.items() if not d.single()}

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """One of the first points, or draw until one can be paid; in the end make it cheaper."""
        if trial.number < len(self._first):
            fitted = self._affordable.fit(self._first[trial.number])
            return {name: fitted[name] for name in search_space}
        few: Any = FewTrials(study)
        single = {
            name: d.to_external_repr(d.to_internal_repr(_only(d)))
            for name, d in self._space.items()
            if d.single()
        }
        point: dict[str, Any] = {}
        for _ in range(20):
            point = super().sample_relative(few, trial, search_space) or {
                name: self._random.sample_independent(study, trial, name, distribution)
                for name, distribution in search_space.items()
            }
            if self._affordable({**single, **point}):
                return point
        fitted = self._affordable.fit({**single, **point})
        return {name: fitted[name] for name in point}


def _only(distribution: BaseDistribution) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[0]
    return distribution.low  # type: ignore[attr-defined]
