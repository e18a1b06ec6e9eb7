import numpy as np
import pytest

from remasker.errors import InvalidTableError
from remasker.table import EncodedTable
from tuning.holdout import MAX_SHARE, CellPrediction, Judge, average, draw_holdout

SHAPES = {
    "many gaps": lambda rng: rng.random((300, 6)) < [1, 1, 0.9, 0.7, 0.5, 0.2],
    "nearly complete": lambda rng: rng.random((400, 5)) < [1, 1, 1, 1, 0.99],
    "complete": lambda rng: np.ones((200, 4), dtype=bool),
    "tiny": lambda rng: rng.random((12, 3)) < 0.7,
    "one cell a row": lambda rng: np.eye(4, dtype=bool)[rng.integers(4, size=100)],
}


@pytest.mark.parametrize("shape", [s for s in SHAPES if s != "one cell a row"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_both_sets_are_observed_disjoint_and_never_the_last(shape: str, seed: int) -> None:
    observed = SHAPES[shape](np.random.default_rng(seed))
    holdout = draw_holdout(observed, seed)
    held = holdout.all
    assert not (held & ~observed).any()
    assert not (holdout.judge & holdout.report).any()
    assert held.sum() <= MAX_SHARE * observed.sum() + 1
    left = observed & ~held
    assert left.any(axis=1)[observed.any(axis=1)].all()
    assert left.any(axis=0)[observed.any(axis=0)].all()
    assert np.isclose(holdout.column_weight.sum(), 1)


def test_cells_fall_where_the_gaps_are() -> None:
    observed = SHAPES["nearly complete"](np.random.default_rng(0))
    holdout = draw_holdout(observed, 0)
    assert holdout.judge[:, :4].sum() == 0
    assert holdout.judge[:, 4].sum() >= 70
    complete = draw_holdout(np.ones((200, 4), dtype=bool), 0)
    assert (complete.judge.sum(axis=0) > 5).all()


def test_beside_a_reported_cell_as_much_is_missing_as_beside_a_real_gap() -> None:
    observed = np.random.default_rng(0).random((2000, 6)) < 0.7
    held = draw_holdout(observed, 0)

    def beside(cells: np.ndarray, lacking: np.ndarray) -> float:
        return float((cells.sum(axis=1) * lacking.sum(axis=1)).sum() / cells.sum())

    real = beside(~observed, ~observed)
    assert beside(held.report, ~observed | held.report) == pytest.approx(real, rel=0.1)
    # The judge's rows lack their own gaps and another's: what is asked of the others can fail.
    assert beside(held.judge, ~observed | held.judge) > 1.15 * real


def test_a_table_that_can_spare_nothing_is_refused() -> None:
    with pytest.raises(InvalidTableError, match="too few"):
        draw_holdout(SHAPES["one cell a row"](np.random.default_rng(0)), 0)


def test_same_seed_same_cells() -> None:
    observed = SHAPES["many gaps"](np.random.default_rng(0))
    one, other, third = (draw_holdout(observed, seed) for seed in (3, 3, 4))
    assert (one.judge == other.judge).all()
    assert (one.judge != third.judge).any()


@pytest.fixture
def mixed() -> tuple[EncodedTable, np.ndarray]:
    rng = np.random.default_rng(0)
    values = np.stack([rng.normal(size=2000), rng.integers(3, size=2000)], axis=1).astype("float32")
    table = EncodedTable(values=values, observed=rng.random((2000, 2)) < 0.8, n_categories=(0, 3))
    return table, draw_holdout(table.observed, 0).judge


@pytest.mark.parametrize("metric", ["normalised", "rmse"])
def test_knowing_nothing_costs_one_and_the_truth_nothing(
    mixed: tuple[EncodedTable, np.ndarray], metric: str
) -> None:
    table, cells = mixed
    judge = Judge(table, cells, hidden=cells, column_weight=np.array([0.5, 0.5]), metric=metric)
    truth = CellPrediction(value=judge.truth, chance=np.eye(3)[judge.truth.astype(int) % 3])
    assert judge.error(judge.losses(truth)) == pytest.approx(0, abs=1e-6)
    mean = judge.error(judge.losses(judge.baseline()))
    assert mean > 0.1
    if metric == "normalised":
        assert mean == pytest.approx(1, abs=0.15)


def test_columns_count_as_often_as_they_are_missing(
    mixed: tuple[EncodedTable, np.ndarray],
) -> None:
    table, cells = mixed
    judge = Judge(table, cells, hidden=cells, column_weight=np.array([0.9, 0.1]))
    losses = np.where(judge.columns == 0, 1.0, 0.0)
    assert judge.error(losses) == pytest.approx(0.9)
    assert judge.by_column(losses).tolist() == [1.0, 0.0]


def test_averaging_is_that_of_an_ensemble() -> None:
    parts = [CellPrediction(value=np.array([v]), chance=np.array([[v, 1 - v]])) for v in (0.2, 0.4)]
    joint = average(parts)
    assert joint.value[0] == pytest.approx(0.3)
    assert joint.chance[0].tolist() == pytest.approx([0.3, 0.7])
