"""What the second stage does with the time that is left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from remasker.fitting import n_stacks
from remasker.table import EncodedTable
from remasker.tasks import Task
from tuning import second_stage
from tuning.config import SearchConfig
from tuning.holdout import CellPrediction, draw_holdout
from tuning.second_stage import (
    BRIEF,
    LEAST,
    WHOLE,
    Effort,
    add_experts,
    affordable_effort,
    luck,
    on_ray,
    seconds_needed,
)
from tuning.trial import TrialData

RNG = np.random.default_rng(0)
OBSERVED = RNG.random((300, 3)) < 0.8
TABLE = EncodedTable(
    values=np.where(OBSERVED, RNG.normal(size=(300, 3)), 0).astype(np.float32),
    observed=OBSERVED,
    n_categories=(0, 0, 0),
)
DATA = TrialData(table=TABLE, holdout=draw_holdout(OBSERVED, 0))
SECONDS = 10.0


def needed(effort: Effort) -> float:
    """What one pass takes."""
    return seconds_needed(DATA, SECONDS, 2, effort=effort)


NEEDED = needed(WHOLE[0])


def predictions(cells: np.ndarray, noise: float) -> CellPrediction:
    """Predictions that are off by so much."""
    truth = TABLE.values[cells]
    return CellPrediction(
        value=truth + noise * RNG.normal(size=len(truth)), chance=np.zeros((len(truth), 0))
    )


def outcome(
    monkeypatch: pytest.MonkeyPatch,
    left: float,
    *,
    noise: float = 0.1,
    refit: bool = True,
    n_compared: int = 1,
) -> tuple[second_stage.SecondStage | None, list[EncodedTable]]:
    """Run `add_experts` with so much time left; with the tables that were learned from."""
    learned: list[EncodedTable] = []
    clock = SimpleNamespace(now=0.0)

    def two_stages(table: EncodedTable, *_: Any, effort: Effort) -> str:
        learned.append(table)
        clock.now += needed(effort)
        return f"ensemble {len(learned)}"

    class Budget:
        slowness = 1.0

        @property
        def left(self) -> float:
            return left - clock.now

    monkeypatch.setattr(second_stage, "two_stages", two_stages)
    monkeypatch.setattr(second_stage, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(second_stage, "slots", lambda config: 2)
    monkeypatch.setattr(
        second_stage, "predict_cells", lambda ensemble, table, cells: predictions(cells, noise)
    )
    found = predictions(DATA.holdout.judge, 0.5)
    budget: Any = Budget()
    winner: Any = None
    config = SearchConfig(refit=refit)
    stage = add_experts(winner, DATA, found, config, budget, seconds=SECONDS, n_compared=n_compared)
    return stage, learned


def test_without_time_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(monkeypatch, 0.9 * needed(BRIEF[-1])) == (None, [])


def test_with_time_for_one_pass_it_is_the_one_that_sees_every_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, learned = outcome(monkeypatch, 1.9 * needed(WHOLE[-1]))
    assert stage is not None
    assert stage.refitted
    # Nobody has been asked about the report cells: no figure is made up for it.
    assert stage.reported is None
    assert stage.gain is None
    assert [table is TABLE for table in learned] == [True]


def test_with_time_for_both_it_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, learned = outcome(monkeypatch, 2.2 * NEEDED)
    assert stage is not None
    assert stage.gain is not None
    assert stage.gain > 1
    assert stage.effort == WHOLE[0]
    assert stage.reported is not None
    assert len(stage.reported.value) == DATA.holdout.report.sum()
    # What is returned has seen every cell, what was judged none of those that were set aside.
    assert stage.ensemble == "ensemble 1"
    assert learned[0] is TABLE
    assert not (learned[1].observed & DATA.holdout.all).any()


def test_with_little_time_the_models_are_trained_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found on obesity, MCAR: for want of ten seconds no experts, and 17 % more error."""
    for effort, left in zip(
        WHOLE[:3], (2.2 * NEEDED, 1.9 * NEEDED, 1.9 * needed(WHOLE[1])), strict=True
    ):
        stage, _ = outcome(monkeypatch, left)
        assert stage is not None
        assert stage.gain is not None
        assert stage.effort == effort


def test_with_less_the_experts_learn_in_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found on obesity, MNAR: experts cost more than was left, so that there were none."""
    for effort, left in zip(BRIEF, (WHOLE[-1], BRIEF[0]), strict=True):
        stage, learned = outcome(monkeypatch, 0.99 * needed(left))
        assert stage is not None
        assert stage.effort == effort
        assert learned[0] is TABLE


def test_with_less_still_they_learn_from_fewer_rows() -> None:
    """Found on 6,259 × 10, two minutes: no experts at all, 1.3 times the default's error."""
    observed = RNG.random((6000, 3)) < 0.8
    table = EncodedTable(
        values=np.where(observed, RNG.normal(size=observed.shape), 0).astype(np.float32),
        observed=observed,
        n_categories=(0, 0, 0),
    )
    data = TrialData(table=table, holdout=draw_holdout(observed, 0))
    brief, least = (seconds_needed(data, 1.0, 2, effort=e) for e in (BRIEF[-1], LEAST[0]))
    assert least < 0.6 * brief
    for left, effort in ((1.01 * brief, BRIEF[-1]), (0.99 * brief, LEAST[0]), (0.9 * least, None)):
        budget: Any = SimpleNamespace(left=left, slowness=1.0)
        assert affordable_effort(data, 1.0, 2, budget) == effort


def test_a_large_table_has_one_stack_before_its_experts_learn_less() -> None:
    """Found on letter, 300 s: two stacks of fewer rounds were 2 % worse than the default's one."""
    observed = RNG.random((6000, 3)) < 0.8
    table = EncodedTable(values=observed * 1.0, observed=observed, n_categories=(0, 0, 0))
    data = TrialData(table=table, holdout=draw_holdout(observed, 0))
    two, one = (seconds_needed(data, 1.0, 2, effort=e) for e in WHOLE[-2:])
    assert one < 0.7 * two
    for left, effort in ((2.2 * two, WHOLE[-2]), (2.2 * one, WHOLE[-1]), (1.01 * one, WHOLE[-1])):
        budget: Any = SimpleNamespace(left=left, slowness=1.0)
        assert affordable_effort(data, 1.0, 2, budget)[-1] == effort[-1]
    # A table of few cells has several stacks anyway.
    assert n_stacks(TABLE, 1, 6) > 1


@pytest.mark.usefixtures("one_ray")
def test_tasks_on_ray_come_back_in_order_told_one_by_one_and_few_at_a_time() -> None:
    made, told = [], []

    def tasks() -> Iterator[Task]:
        for k in range(9):
            made.append(len(told))
            # The first is the slowest: others go on meanwhile.
            yield partial(_after, 0.5 if k == 0 else 0.0, k)

    run = on_ray(SearchConfig(), lambda doing, done, total: told.append((doing, done, total)))
    assert run(tasks(), 9, "sums") == list(range(9))
    assert told == [("sums", done, 9) for done in range(10)]
    assert made[:4] == [1, 1, 1, 1]  # two for each of two cores
    assert made[4:] == [2, 3, 4, 5, 6]  # then one for each that is over
    assert run([], 0) == []


def _after(seconds: float, result: int) -> int:
    time.sleep(seconds)
    return result


def test_what_is_worse_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _ = outcome(monkeypatch, 10 * NEEDED, noise=2.0)
    assert stage is None


def test_a_few_unlucky_cells_do_not_speak_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found on wine, mask 2: a difference within noise threw away 14 % of the error."""
    monkeypatch.setattr(second_stage, "paired_gain", lambda *_: -1.0)
    stage, _ = outcome(monkeypatch, 10 * NEEDED)
    assert stage is not None
    assert stage.gain == -1.0


def test_the_luck_of_the_chosen_does_not_speak_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found on yacht, MCAR 0.7: the best of many on the very cells that compare them."""
    monkeypatch.setattr(second_stage, "paired_gain", lambda *_: -3.0)
    assert outcome(monkeypatch, 10 * NEEDED, n_compared=1)[0] is None
    assert outcome(monkeypatch, 10 * NEEDED, n_compared=20)[0] is not None


def test_luck_is_what_the_best_of_equals_has() -> None:
    """A bound on the expectation, and no wild one."""
    for n in (2, 5, 20, 100):
        best = np.random.default_rng(n).normal(size=(4000, n)).max(axis=1).mean()
        assert best < luck(n) < best + 1


def test_gaps_cost_nothing() -> None:
    """Experts learn from observed cells: a table with more gaps is cheaper to learn."""
    sparse = DATA.table.hide(RNG.random(OBSERVED.shape) < 0.5)
    fewer = TrialData(table=sparse, holdout=DATA.holdout)
    assert seconds_needed(fewer, SECONDS, 2) < NEEDED


def test_a_complete_table_is_not_free() -> None:
    """Found on wine without gaps: 113 s of 75, since no column seemed to have experts."""
    table = EncodedTable(
        values=TABLE.values, observed=np.ones_like(OBSERVED), n_categories=(0, 0, 0)
    )
    complete = TrialData(table=table, holdout=draw_holdout(table.observed, 0))
    assert seconds_needed(complete, SECONDS, 2) >= NEEDED


def test_without_refitting_what_was_judged_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, learned = outcome(monkeypatch, 10 * NEEDED, refit=False)
    assert stage is not None
    assert not stage.refitted
    assert stage.gain is not None
    assert [bool((table.observed & DATA.holdout.all).any()) for table in learned] == [False]


def test_more_hands_need_less_time() -> None:
    assert seconds_needed(DATA, SECONDS, 4) < NEEDED < seconds_needed(DATA, SECONDS, 1)
    fast, slow = (seconds_needed(DATA, SECONDS, 2, slowness) for slowness in (0.5, 3.0))
    assert fast < NEEDED < slow
