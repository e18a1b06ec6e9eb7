"""How good is what is returned, where the cells that say so are few?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from remasker.table import EncodedTable
from tuning import choice
from tuning.holdout import CellPrediction, draw_again, draw_holdout, merge
from tuning.trial import TrialData

RNG = np.random.default_rng(0)


def data_of(n_rows: int, n_columns: int = 4, share: float = 0.8) -> TrialData:
    """Numbers, of which so many are observed."""
    observed = RNG.random((n_rows, n_columns)) < share
    observed[~observed.any(axis=1), 0] = True
    values = np.where(observed, RNG.normal(size=observed.shape), 0).astype(np.float32)
    table = EncodedTable(values=values, observed=observed, n_categories=(0,) * n_columns)
    return TrialData(table=table, holdout=draw_holdout(observed, 0))


def ask(
    monkeypatch: pytest.MonkeyPatch, data: TrialData, left: float
) -> tuple[tuple[tuple[np.ndarray, CellPrediction], ...], list[EncodedTable], list[str]]:
    """Ask again, at ten seconds each; with what was learned from, and what the user was told."""
    learned: list[EncodedTable] = []
    told: list[str] = []

    class Budget:
        @property
        def left(self) -> float:
            return left - 10 * len(learned)

    def learn(table: EncodedTable) -> Any:
        learned.append(table)

    monkeypatch.setattr(
        choice,
        "predict_cells",
        lambda ensemble, table, cells: CellPrediction(
            value=table.values[cells], chance=np.zeros((int(cells.sum()), 0))
        ),
    )
    view: Any = SimpleNamespace(tell=lambda kind, words: told.append(words["text"]))
    budget: Any = Budget()
    return choice._ask_again(learn, data, budget, view, 10.0, 1), learned, told


def test_few_cells_are_joined_by_others_that_nobody_has_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = data_of(100)
    more, learned, told = ask(monkeypatch, data, np.inf)
    assert len(more) == len(learned) == len(told) > 1
    asked = data.holdout.report.copy()
    for (cells, said), table in zip(more, learned, strict=True):
        assert not (cells & (asked | data.holdout.judge)).any()
        assert not (cells & ~data.table.observed).any()
        # What is asked has not seen them, and has seen all others.
        assert (table.observed == (data.table.observed & ~cells)).all()
        assert table.observed.any(axis=0).all()
        assert table.observed.any(axis=1).all()
        assert len(said.value) == cells.sum()
        asked |= cells
    assert asked.sum() >= choice.ENOUGH_CELLS or len(more) == choice.MOST_HOLDOUTS - 1


def test_enough_cells_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_of(2000)
    assert data.holdout.report.sum() >= choice.ENOUGH_CELLS
    assert ask(monkeypatch, data, np.inf)[0] == ()


def test_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, data_of(30), 10.0)[0] == ()
    assert len(ask(monkeypatch, data_of(30), 25.0)[0]) == 2


@pytest.mark.parametrize("n_rows", [8, 12, 20])
def test_a_handful_of_rows_keeps_something_to_learn_from(
    monkeypatch: pytest.MonkeyPatch, n_rows: int
) -> None:
    data = data_of(n_rows, share=0.7)
    _, learned, _ = ask(monkeypatch, data, np.inf)
    for table in learned:
        assert table.observed.any(axis=1).all()
        assert (table.observed.any(axis=0) >= data.table.observed.any(axis=0)).all()


def test_merged_predictions_stand_where_their_cells_are() -> None:
    data = data_of(60)
    first = data.holdout.report
    second = draw_again(data.table.observed, data.holdout, first, np.random.default_rng(1))
    parts = [
        (cells, CellPrediction(value=data.table.values[cells], chance=np.ones((cells.sum(), 2))))
        for cells in (second, first)
    ]
    joint = merge(parts)
    assert (joint.value == data.table.values[first | second]).all()
    assert joint.chance.shape == (len(joint.value), 2)
