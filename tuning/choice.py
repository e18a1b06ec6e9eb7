"""From finished trials to the models that are returned, and the error reported of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import ray

from remasker.inference import Ensemble
from remasker.table import EncodedTable, TableEncoder
from remasker.tasks import one_thread
from remasker.training import Member
from tuning import export
from tuning.affordable import Budget
from tuning.config import SearchConfig, SearchFailedError
from tuning.holdout import CellPrediction, average, draw_again, merge, predict_cells
from tuning.journal import TRIALS
from tuning.live import View
from tuning.second_stage import AGAIN, SecondStage, add_experts, on_ray, slots, two_stages
from tuning.selection import ErrorReport, Selection, error_report, select, shrink, shrinkage
from tuning.trial import TrialData, TrialResult, joined, read_result

#: Refitted models that are averaged, if there is time for them. Four of one setting by different
#: seeds have 0.97 of the error of one (five tables, masks 0 and 1; compressive 0.92).
REFITTED = 4
#: Where fewer cells report, their error is mostly luck: others are held out, so many times at most.
ENOUGH_CELLS, MOST_HOLDOUTS = 200, 5

Learn = Callable[[EncodedTable], Ensemble]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a search came to."""

    #: By the trials' numbers: members of an ensemble are found again by them.
    selection: Selection
    members: list[Member]
    #: What the members said of the report cells.
    found: CellPrediction
    second: SecondStage | None
    #: The members trained on all cells, and how many times each was.
    refitted: list[Member] | None
    n_copies: int
    #: How far each column's numbers are trusted; None: wholly.
    trust: np.ndarray | None
    #: Where the report cells are few: other cells, and what the same recipe, learned anew without
    #: them, said of them.
    more: tuple[tuple[np.ndarray, CellPrediction], ...] = ()


def choose(
    study: optuna.Study,
    fixed: Mapping[str, Any],
    folder: Path,
    data: TrialData,
    config: SearchConfig,
    budget: Budget,
    view: View,
) -> Choice:
    """Select trials by the judge cells; put experts on top, or train them on all cells."""
    numbers, results = _results(study, fixed, folder, data)
    judge = data.judge(data.holdout.judge)
    judged = [result.judged for result in results]
    selection = select(judge, judged, config.max_members)
    members = [results[k].member for k in selection.chosen]
    joint = average([judged[k] for k in selection.chosen])
    chosen = tuple(numbers[k] for k in selection.chosen)
    trials = study.get_trials(deepcopy=False)
    taken = [_whole_seconds(trials[number]) for number in chosen]
    second = None
    if config.experts is not None:
        view.tell("stage", {"text": "experts on top of the best"})
        second = add_experts(
            members[0],
            data,
            joint,
            config,
            budget,
            seconds=taken[0],
            n_compared=len(results),
            tell=lambda doing, done, total: view.tell(
                "stage", {"text": f"{doing}: {done} of {total}"}
            ),
        )
    refitted, n_copies = None, 0
    if config.refit and second is None:
        n_copies = _affordable_copies(config, taken, budget.left)
    if n_copies:
        view.tell("stage", {"text": "training the best once more, on all cells"})
        refitted = _refit(members, n_copies, data, config)
    choice = Choice(
        selection=replace(selection, chosen=chosen),
        members=members,
        found=average([results[k].reported for k in selection.chosen]),
        second=second,
        refitted=refitted,
        n_copies=n_copies,
        # The second stage shrinks by its own stacking.
        trust=shrinkage(judge, joint) if second is None else None,
    )
    learn: Learn
    if second is not None:
        effort, seconds = second.effort, second.seconds
        learn = partial(
            two_stages, winner=members[0], device=data.device, run=on_ray(config), effort=effort
        )
    else:
        seconds = max(taken) * math.ceil(len(taken) / slots(config))

        def learn(shown: EncodedTable) -> Ensemble:
            again = _refit(members, 1, replace(data, table=shown), config)
            return joined(again, data, choice.trust)

    if second is None or second.reported is not None:
        choice = replace(
            choice, more=_ask_again(learn, data, budget, view, seconds, members[0].seed)
        )
    return choice


def _ask_again(
    learn: Learn, data: TrialData, budget: Budget, view: View, seconds: float, seed: int
) -> tuple[tuple[np.ndarray, CellPrediction], ...]:
    """Hold out other cells while those that report are few and there is time.

    `learn` takes about so many `seconds`.
    """
    random_state = np.random.default_rng(seed)
    asked = data.holdout.report
    more: list[tuple[np.ndarray, CellPrediction]] = []
    while asked.sum() < ENOUGH_CELLS and 1 + len(more) < MOST_HOLDOUTS:
        cells = draw_again(data.table.observed, data.holdout, asked, random_state)
        if not cells.any() or AGAIN * seconds > budget.left:
            break
        view.tell("stage", {"text": f"asking how good it is, by {int(asked.sum())} cells so far"})
        shown = data.table.hide(cells)
        more.append((cells, predict_cells(learn(shown), shown, cells)))
        asked = asked | cells
    return tuple(more)


def _results(
    study: optuna.Study, fixed: Mapping[str, Any], folder: Path, data: TrialData
) -> tuple[list[int], list[TrialResult]]:
    """The finished trials' numbers and results; if none finished, of those that were cut short."""
    trials = study.get_trials(deepcopy=False)
    for states in (("COMPLETE",), ("PRUNED", "RUNNING")):
        found = {
            trial.number: read_result(
                folder / TRIALS / f"{trial.number:05d}", {**fixed, **trial.params}, data
            )
            for trial in trials
            if trial.state.name in states
        }
        kept = {number: result for number, result in found.items() if result is not None}
        if kept:
            return list(kept), list(kept.values())
    reasons = [t.user_attrs["failure"] for t in trials if "failure" in t.user_attrs]
    if reasons:
        raise SearchFailedError(f"all {len(reasons)} trials failed; the first: {reasons[0]}")
    raise SearchFailedError(
        "the time ended before any trial had got far enough to be used; give a larger time_budget"
    )


def _whole_seconds(trial: optuna.trial.FrozenTrial) -> float:
    """What a trial took, or would have taken had it not been cut short."""
    told = trial.user_attrs
    done, wanted = told.get("epoch") or 1, told.get("n_epochs") or 1
    return float(told.get("seconds", 0.0)) * max(1.0, wanted / done)


def _affordable_copies(config: SearchConfig, taken: Sequence[float], left: float) -> int:
    """How often members that took so long can be refitted, side by side; 0 if there is no time."""
    wanted = math.ceil(REFITTED / len(taken))
    return max(
        (
            n
            for n in range(1, wanted + 1)
            if 2 + 1.3 * max(taken) * math.ceil(n * len(taken) / slots(config)) < left
        ),
        default=0,
    )


def _refit(
    members: Sequence[Member], n_copies: int, data: TrialData, config: SearchConfig
) -> list[Member]:
    """The members trained on all observed cells, so many times each, side by side."""

    def one(member: Member, table: EncodedTable, device: str, copy: int) -> Member:
        with one_thread():
            return export.refit_member(member, table, device, copy)

    task = ray.remote(num_cpus=config.cpus_per_trial, num_gpus=config.gpus_per_trial)(one)
    shared = ray.put(data.table)
    refitted: list[Member] = ray.get(
        [task.remote(m, shared, data.device, k) for k in range(n_copies) for m in members]
    )
    return refitted


def outcome(data: TrialData, encoder: TableEncoder, choice: Choice) -> ErrorReport:
    """The error on the report cells, and whose it is."""
    judge = data.judge(data.holdout.report)
    second = choice.second
    again = choice.refitted is not None or (second is not None and second.refitted)
    of = "what is returned, before it learned from all cells" if again else "what is returned"
    if second is None:
        reported = shrink(judge, choice.found, choice.trust)
    elif second.reported is None:
        reported = choice.found
        of = "the search's choice, before experts and before it learned from all cells"
    else:
        reported = second.reported
    parts = [(data.holdout.report, reported), *choice.more]
    baselines = [(cells, data.judge(cells, hidden=cells).baseline()) for cells, _ in choice.more]
    baselines.append((data.holdout.report, judge.baseline()))
    report = error_report(
        data.judge(np.any([cells for cells, _ in parts], axis=0)),
        merge(parts),
        [column.name for column in encoder.modelled],
        merge(baselines),
    )
    return replace(report, of=of, n_holdouts=len(parts))
