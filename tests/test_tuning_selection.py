import numpy as np
import pandas as pd

from remasker.table import EncodedTable
from tuning.holdout import CellPrediction, Judge
from tuning.selection import error_report, leaderboard, paired_gain, rank, select, shrinkage

RNG = np.random.default_rng(0)
TRUTH = RNG.normal(size=(400, 2)).astype("float32")
CELLS = np.ones((400, 2), dtype=bool)
TABLE = EncodedTable(values=TRUTH, observed=CELLS, n_categories=(0, 0))
JUDGE = Judge(TABLE, CELLS, hidden=~CELLS, column_weight=np.ones(2))


def prediction(noise: float, seed: int, shared: float = 0.0) -> CellPrediction:
    own = np.random.default_rng(seed).normal(size=TRUTH.shape)
    common = np.random.default_rng(99).normal(size=TRUTH.shape)
    value = TRUTH + noise * own + shared * common
    return CellPrediction(value=value[CELLS], chance=np.zeros((CELLS.sum(), 0)))


def test_the_best_is_first() -> None:
    assert rank(JUDGE, [prediction(1.0, 1), prediction(0.2, 2), prediction(0.5, 3)]) == [1, 2, 0]


def test_errors_of_their_own_average_out_and_common_ones_do_not() -> None:
    independent = select(JUDGE, [prediction(0.5, seed) for seed in range(6)])
    assert len(independent.chosen) >= 3
    common = select(JUDGE, [prediction(0.0, seed, shared=0.5) for seed in range(6)])
    assert len(common.chosen) == 1


def test_an_ensemble_is_no_larger_than_allowed_and_no_worse() -> None:
    trials = [prediction(0.5, seed) for seed in range(9)]
    chosen = select(JUDGE, trials, max_members=4)
    assert len(chosen.chosen) <= 4
    best = min(JUDGE.error(JUDGE.losses(trial)) for trial in trials)
    assert chosen.error <= best
    assert chosen.standard_error > 0
    assert select(JUDGE, trials, max_members=1).chosen == (rank(JUDGE, trials)[0],)


def test_a_worse_model_is_no_gain() -> None:
    assert paired_gain(JUDGE, prediction(0.2, 1), prediction(0.9, 2)) < -1
    assert paired_gain(JUDGE, prediction(0.2, 1), prediction(0.2, 1)) == 0


def test_a_column_that_nothing_predicts_is_shrunk_and_a_good_one_is_not() -> None:
    value = np.stack([TRUTH[:, 0], RNG.normal(size=400)], axis=1)
    factors = shrinkage(JUDGE, CellPrediction(value=value[CELLS], chance=np.zeros((800, 0))))
    assert factors[0] > 0.85
    assert factors[1] < 0.25


def test_a_good_model_is_left_alone() -> None:
    assert shrinkage(JUDGE, prediction(0.05, 1)) is None


def test_the_report_stands_beside_the_mean() -> None:
    report = error_report(JUDGE, prediction(0.5, 1), ["a", "b"])
    assert abs(report.error - 0.25) < 0.05
    assert abs(report.mean_error - 1) < 0.05
    assert 0 < report.standard_error < 0.1
    assert report.columns.loc["a", "cells"] == 400
    assert "column mean" in str(report)


def test_the_leaderboard_puts_finished_trials_first() -> None:
    records = pd.DataFrame(
        {
            "number": range(5),
            "state": ["pruned", "complete", "failed", "complete", "pruned"],
            "error": [0.1, 0.5, np.nan, 0.4, 0.3],
            "eighths": [2, 8, 0, 8, 4],
        }
    )
    assert leaderboard(records)["number"].tolist() == [3, 1, 4, 0, 2]
    assert leaderboard(records.iloc[:0]).empty


def test_one_row_does_not_say_how_far_an_error_wanders() -> None:
    cells = np.array([[True, True], [False, False]])
    table = EncodedTable(
        values=np.array([[0.0, 2.0], [1.0, 1.0]], dtype=np.float32),
        observed=cells | True,
        n_categories=(0, 0),
    )
    judge = Judge(table, cells, hidden=cells, column_weight=np.full(2, 0.5))
    said = CellPrediction(value=np.zeros(2), chance=np.zeros((2, 0)))
    report = error_report(judge, said, ["a", "b"])
    assert np.isnan(report.standard_error)
    assert "± unknown (normalised, 2 cells" in str(report)
