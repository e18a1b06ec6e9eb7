from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from remasker.errors import InvalidConfigError
from remasker.table import EncodedTable
from tuning.holdout import draw_holdout
from tuning.trial import STATE, TrialData, milestones, read_result, run_trial

TINY = {"width": 8, "encoder_depth": 1, "decoder_depth": 1, "epochs": 8, "learning_rate": 0.01}


@pytest.fixture(scope="module")
def data() -> TrialData:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    one = rng.normal(size=120)
    values = np.stack([one, one + 0.2 * rng.normal(size=120), (one > 0)], axis=1).astype("float32")
    table = EncodedTable(
        values=values, observed=rng.random(values.shape) < 0.8, n_categories=(0, 0, 2)
    )
    return TrialData(table=table, holdout=draw_holdout(table.observed, 0))


def test_reports_come_at_shares_of_the_horizon(data: TrialData) -> None:
    reports: list[dict] = []
    run_trial({**TINY, "seed": 1, "number": 0}, data, reports.append)
    assert [r["eighths"] for r in reports] == [1, 2, 4, 6, 8]
    assert [r["epoch"] for r in reports] == [1, 2, 4, 6, 8]
    errors = [r["error"] for r in reports]
    assert np.isfinite(errors).all()
    assert errors[-1] <= errors[0]


@pytest.mark.parametrize("n_epochs", [1, 2, 3, 5, 8, 100])
def test_the_last_milestone_is_the_end(n_epochs: int) -> None:
    marks = milestones(n_epochs)
    assert marks[n_epochs] == 8
    assert list(marks) == sorted(marks)


def test_same_seed_same_result(data: TrialData, tmp_path: Path) -> None:
    for name in "ab":
        run_trial({**TINY, "seed": 1}, data, lambda report: None, tmp_path / name)
    one, other = (read_result(tmp_path / name, TINY, data) for name in "ab")
    assert one is not None
    assert other is not None
    assert (one.judged.value == other.judged.value).all()


def test_a_trial_that_was_killed_goes_on_as_if_nothing_had_happened(
    data: TrialData, tmp_path: Path
) -> None:
    data = replace(data, checkpoint_seconds=0.0)
    run_trial({**TINY, "seed": 1}, data, lambda report: None, tmp_path / "whole")

    class Killed(BaseException):
        pass

    def die_half_way(report: dict) -> None:
        if report["eighths"] == 4:
            raise Killed

    with pytest.raises(Killed):
        run_trial({**TINY, "seed": 1}, data, die_half_way, tmp_path / "broken")
    cut_short = read_result(tmp_path / "broken", TINY, data)
    assert cut_short is not None
    assert cut_short.member.epochs <= 4
    reports: list[dict] = []
    run_trial({**TINY, "seed": 1}, data, reports.append, tmp_path / "broken")
    assert [r["eighths"] for r in reports] == [6, 8]
    whole, broken = (read_result(tmp_path / n, TINY, data) for n in ("whole", "broken"))
    assert whole is not None
    assert broken is not None
    assert np.allclose(whole.judged.value, broken.judged.value)
    assert whole.member.epochs == broken.member.epochs


def test_report_cells_influence_nothing(data: TrialData, tmp_path: Path) -> None:
    values = data.table.values.copy()
    numeric = data.holdout.report.copy()
    numeric[:, 2] = False
    values[numeric] += 100
    changed = TrialData(
        table=EncodedTable(
            values=values, observed=data.table.observed, n_categories=data.table.n_categories
        ),
        holdout=data.holdout,
    )
    for name, each in (("a", data), ("b", changed)):
        run_trial({**TINY, "seed": 1}, each, lambda report: None, tmp_path / name)
    one, other = read_result(tmp_path / "a", TINY, data), read_result(tmp_path / "b", TINY, changed)
    assert one is not None
    assert other is not None
    assert (one.judged.value == other.judged.value).all()


def test_an_unknown_setting_is_refused(data: TrialData) -> None:
    with pytest.raises(InvalidConfigError, match="width"):
        run_trial({"widht": 8, "seed": 0}, data, lambda report: None)


def test_nothing_to_read_is_nothing(data: TrialData, tmp_path: Path) -> None:
    assert read_result(tmp_path, TINY, data) is None
    assert not (tmp_path / STATE).exists()
