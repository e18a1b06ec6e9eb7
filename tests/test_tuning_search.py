"""The search on a real, shared Ray, with models small enough to train in a second."""

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optuna
import pandas as pd
import pytest
import ray
from optuna.trial import TrialState

from remasker.errors import ArtifactError, InvalidConfigError
from remasker.expert_models import EXPERTS
from remasker.experts import MODEL
from remasker.imputer import ReMaskerImputer
from tuning import TuneResult, tune, tune_many
from tuning.affordable import Affordable, AffordableSampler, Budget
from tuning.choice import _affordable_copies
from tuning.config import RunExistsError, SearchConfig, SearchFailedError
from tuning.cost import CostModel
from tuning.export import read_run, reproduce
from tuning.folder import locked
from tuning.journal import open_study, read_study, records
from tuning.report import VOICES
from tuning.search import MIN_RIVALS, GentleASHA
from tuning.searcher import JournalSearch
from tuning.space import make_space, warm_starts

TINY = {"width": 8, "encoder_depth": 1, "decoder_depth": 1, "epochs": (2, 4), "batch_size": 64}
OPTIONS = {"time_budget": None, "space": TINY, "progress": False, "experts": None}


# ---------------------------------------------------------------------- without Ray


def test_every_expert_has_a_voice_on_the_page() -> None:
    heard = [name for experts, _ in VOICES.values() for name in experts]
    assert sorted(heard) == sorted([MODEL, *EXPERTS])


@pytest.fixture
def searcher(tmp_path: Path) -> JournalSearch:
    space, fixed = make_space(TINY, 100)
    study = open_study(tmp_path)
    return JournalSearch(
        study=study,
        space=space,
        fixed=fixed,
        cost=CostModel(n_rows=100, n_columns=3),
        budget=Budget(math.inf),
        seed=0,
    )


def report(eighths: int, error: float) -> dict:
    return {"error": error, "eighths": eighths, "seconds": 1.0, "epoch": 1, "n_epochs": 4}


def test_endings_reach_optuna_as_what_they_are(searcher: JournalSearch, tmp_path: Path) -> None:
    endings = {
        "whole": (report(8, 0.5), False),
        "stopped": (report(2, 0.7), False),
        "nan": (report(8, math.nan), False),
        "raised": ({**report(0, math.nan), "failure": "MemoryError: no"}, False),
        "died": (None, True),
    }
    for name, (result, died) in endings.items():
        assert searcher.suggest(name) is not None
        if result:
            searcher.on_trial_result(name, result)
        searcher.on_trial_complete(name, result, error=died)
    trials = read_study(tmp_path).get_trials()
    assert [t.state.name for t in trials] == ["COMPLETE", "PRUNED", "FAIL", "FAIL", "FAIL"]
    assert trials[1].intermediate_values == {2: 0.7}
    assert trials[3].user_attrs["failure"] == "MemoryError: no"
    assert "died" in trials[4].user_attrs["failure"]
    assert records(read_study(tmp_path))["state"].tolist().count("failed") == 3


def test_trials_left_running_are_taken_up_first(searcher: JournalSearch, tmp_path: Path) -> None:
    first = searcher.suggest("a")
    study = open_study(tmp_path)
    again = JournalSearch(
        study=study,
        space=searcher._space,
        fixed=searcher.fixed,
        cost=searcher.cost,
        budget=Budget(math.inf),
        seed=0,
    )
    assert again.suggest("b") == first
    again.on_trial_complete("b", report(8, 0.5))
    assert [t.state for t in study.get_trials()] == [TrialState.COMPLETE]


def test_a_trial_that_was_half_proposed_is_made_whole(
    searcher: JournalSearch, tmp_path: Path
) -> None:
    study = open_study(tmp_path)
    study.ask()
    again = JournalSearch(
        study=study,
        space=searcher._space,
        fixed=searcher.fixed,
        cost=searcher.cost,
        budget=Budget(math.inf),
        seed=0,
    )
    config = again.suggest("a")
    assert isinstance(config, dict)
    assert set(searcher._space) <= set(config)


def test_no_trial_begins_when_the_time_is_over(searcher: JournalSearch) -> None:
    searcher.budget = Budget(0.5)
    searcher.budget.usable = True
    assert searcher.suggest("a") == "FINISHED"


def test_asha_is_gentle_and_compares_shares() -> None:
    scheduler = GentleASHA()
    trials = [SimpleNamespace(trial_id=str(k)) for k in range(12)]
    actions = []
    for k, trial in enumerate(trials):
        scheduler.on_trial_add(None, trial)
        actions.append(scheduler.on_trial_result(None, trial, report(2, float(k))))
    assert actions[:MIN_RIVALS] == ["CONTINUE"] * MIN_RIVALS
    assert actions[MIN_RIVALS:] == ["STOP"] * (12 - MIN_RIVALS)
    best = SimpleNamespace(trial_id="best")
    scheduler.on_trial_add(None, best)
    for eighths in (1, 2, 4, 6, 8):
        assert scheduler.on_trial_result(None, best, report(eighths, -1.0)) == "CONTINUE"


def test_the_first_points_are_made_to_fit_when_their_turn_comes() -> None:
    """A machine that was busy when a search began must not shorten all of its portfolio."""
    space, fixed = make_space(None, 1000)
    cost = CostModel(n_rows=1000, n_columns=8)
    points = warm_starts(space, 1000)
    dearest = max(cost.seconds(point) for point in points)
    cost.speed = 100.0
    affordable = Affordable(space, fixed, cost, seconds=lambda: dearest, memory=1e12)
    sampler = AffordableSampler(space, affordable, seed=0, first=points)
    study = optuna.create_study(sampler=sampler)
    busy = study.ask(space).params
    assert busy["epochs"] < points[0]["epochs"]
    cost.learn(busy, cost.seconds(busy) / 100)  # it was no slower than others, it turned out
    assert [study.ask(space).params for _ in points[1:]] == points[1:]
    assert study.ask(space).params not in points


def test_nothing_is_proposed_that_cannot_be_paid(tmp_path: Path) -> None:
    space, fixed = make_space(None, 20_000)
    cost = CostModel(n_rows=20_000, n_columns=30)
    affordable = Affordable(space, fixed, cost, seconds=lambda: 300.0, memory=1e9)
    sampler = AffordableSampler(space, affordable, seed=0, n_random=4)
    study = optuna.create_study(sampler=sampler)
    for k in range(12):
        trial = study.ask(space)
        assert cost.seconds({**fixed, **trial.params}) <= 300
        study.tell(trial, float(k))


def test_a_folder_is_run_by_one_process_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(RunExistsError, match="another process"), locked(tmp_path):
        pass


# ---------------------------------------------------------------------- on Ray


@pytest.fixture(scope="module")
def run(
    one_ray: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[pd.DataFrame, TuneResult, Path]:
    rng = np.random.default_rng(0)
    size = rng.normal(size=150)
    table = pd.DataFrame(
        {
            "size": size,
            "weight": 2 * size + 0.3 * rng.normal(size=150),
            "colour": np.where(size > 0, "red", "blue"),
        }
    )
    table.loc[rng.random(150) < 0.3, "weight"] = np.nan
    table.loc[rng.random(150) < 0.2, "colour"] = None
    storage = tmp_path_factory.mktemp("runs")
    result = tune(table, name="demo", trials=4, storage=storage, concurrent=1, **OPTIONS)
    return table, result, storage


def test_one_call_gives_everything(run: tuple[pd.DataFrame, TuneResult, Path]) -> None:
    table, result, storage = run
    # Ray was there before: it is used and left alone.
    assert ray.is_initialized()
    assert result.imputed.isna().sum().sum() == 0
    known = table["weight"].notna()
    assert (result.imputed["weight"][known] == table["weight"][known]).all()
    assert len(result.leaderboard) == 4
    assert result.error.n_cells > 0
    assert list(result.error.columns.index) == ["size", "weight", "colour"]
    folder = storage / "demo"
    written = {"model", "imputed.csv", "leaderboard.csv", "journal.log", "run.json", "report.html"}
    assert written <= {path.name for path in folder.iterdir()}
    assert not (folder / ".ray").exists()
    record = json.loads((folder / "run.json").read_text())
    assert record["state"] == "finished"
    assert record["error"]["columns"][1]["column"] == "weight"
    assert record["refitted"] * len(record["members"]) == len(result.imputer.ensemble_.members)
    page = (folder / "report.html").read_text()
    assert page.count("<svg") >= 4
    assert "http" not in page
    again = ReMaskerImputer.load(folder / "model").transform(table)
    pd.testing.assert_frame_equal(again, result.imputed)


def test_export_and_one_command_repeat_the_winner(
    run: tuple[pd.DataFrame, TuneResult, Path], tmp_path: Path
) -> None:
    table, result, storage = run
    exported = ReMaskerImputer.load(result.export(tmp_path / "model"))
    pd.testing.assert_frame_equal(exported.transform(table), result.imputed)
    repeated = reproduce(storage / "demo", table)
    for one, other in zip(
        repeated.ensemble_.members, result.imputer.ensemble_.members, strict=True
    ):
        for name, weight in one.weights.items():
            assert np.allclose(weight.numpy(), other.weights[name].numpy(), atol=1e-6), name
    with pytest.raises(ValueError, match="not the one"):
        reproduce(storage / "demo", table.head(100))


@pytest.mark.slow
def test_a_name_is_taken_once_and_a_run_can_be_extended(
    run: tuple[pd.DataFrame, TuneResult, Path],
) -> None:
    table, _, storage = run
    with pytest.raises(RunExistsError, match="resume=True, or choose another name"):
        tune(table, name="demo", trials=4, storage=storage, **OPTIONS)
    with pytest.raises(RunExistsError, match="another table"):
        tune(table.head(90), name="demo", trials=4, storage=storage, resume=True, **OPTIONS)
    more = tune(
        table,
        name="demo",
        trials=6,
        storage=storage,
        resume=True,
        time_budget=None,
        experts=None,
        progress=False,
    )
    assert len(more.leaderboard) == 6
    states = {t.state for t in read_study(storage / "demo").get_trials()}
    assert TrialState.RUNNING not in states


@pytest.mark.slow
def test_same_seed_same_winner_same_imputations(
    run: tuple[pd.DataFrame, TuneResult, Path], tmp_path: Path
) -> None:
    table, first, _ = run
    # `first` has 4 trials; its folder was extended since, its result was not.
    second = tune(table, name="again", trials=4, storage=tmp_path, concurrent=1, **OPTIONS)
    assert second.selection.chosen == first.selection.chosen
    pd.testing.assert_frame_equal(second.imputed, first.imputed)


@pytest.mark.slow
def test_trials_that_fail_are_recorded_and_all_failing_is_one_error(
    run: tuple[pd.DataFrame, TuneResult, Path], tmp_path: Path
) -> None:
    table, _, _ = run
    with pytest.raises(
        SearchFailedError, match="all 3 trials failed; the first: TrainingDivergedError"
    ):
        tune(
            table,
            name="bad",
            trials=3,
            storage=tmp_path,
            time_budget=None,
            progress=False,
            space={**TINY, "learning_rate": 1.0, "clip": 1e9, "average": 0.0, "weight_decay": 10.0},
        )
    board = records(read_study(tmp_path / "bad"))
    assert (board["state"] == "failed").all()
    assert board["failure"].str.len().gt(10).all()


@pytest.mark.slow
def test_several_tables_share_one_cluster_and_refitting_uses_all_cells(
    run: tuple[pd.DataFrame, TuneResult, Path], tmp_path: Path
) -> None:
    table, _, _ = run
    both = tune_many(
        {"one": table, "two": table.head(100)}, trials=2, storage=tmp_path, refit=True, **OPTIONS
    )
    assert list(both) == ["one", "two"]
    # Each ran its own trials: on other tables the errors are others.
    assert set(both["one"].leaderboard["error"]).isdisjoint(both["two"].leaderboard["error"])
    for name, result in both.items():
        assert result.imputed.isna().sum().sum() == 0
        assert (tmp_path / name / "model" / "model.json").exists()
        assert read_run(tmp_path / name)["search"]["refit"]
    repeated = reproduce(tmp_path / "one", table)
    pd.testing.assert_frame_equal(repeated.transform(table), both["one"].imputed)


@pytest.mark.slow
def test_the_time_budget_covers_the_whole_call(
    run: tuple[pd.DataFrame, TuneResult, Path], tmp_path: Path
) -> None:
    table, _, _ = run
    started = time.monotonic()
    result = tune(
        table, name="timed", trials=None, time_budget="40s", storage=tmp_path, progress=False
    )
    done = (result.leaderboard["state"] == "complete").any()
    # A machine too busy to finish one trial may take longer, but not come back with nothing.
    assert time.monotonic() - started < (50 if done else 100)
    assert result.imputed.isna().sum().sum() == 0


def test_what_cannot_be_is_said_before_anything_starts(tmp_path: Path) -> None:
    table = pd.DataFrame({"a": [1.0, None, 3.0] * 30, "b": np.arange(90.0)})
    with pytest.raises(InvalidConfigError, match="did you mean 'trials'"):
        tune(table, trails=3)
    with pytest.raises(InvalidConfigError, match="plain folder name"):
        tune(table, name="../x", storage=tmp_path)
    with pytest.raises(InvalidConfigError, match="did you mean 'width'"):
        tune(table, space={"widht": 3}, storage=tmp_path)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ArtifactError, match="cannot write"):
        tune(table, storage=tmp_path / "file")
    assert not (tmp_path / "table").exists()
    with pytest.raises(ArtifactError, match="not a run"):
        read_run(tmp_path)


def test_concurrent_trials_need_no_more_than_there_is(one_ray: None, tmp_path: Path) -> None:
    table = pd.DataFrame({"a": [1.0, None, 3.0] * 30, "b": np.arange(90.0)})
    with pytest.raises(InvalidConfigError, match="gpus_per_trial"):
        tune(table, storage=tmp_path, gpus_per_trial=1, **OPTIONS)
    assert SearchConfig().concurrent is None


@pytest.mark.parametrize(
    ("left", "taken", "copies"),
    [(math.inf, [10.0], 4), (math.inf, [10.0] * 3, 2), (16.0, [10.0], 2), (14.0, [10.0], 0)],
)
def test_members_are_refitted_as_often_as_time_allows(
    left: float, taken: list[float], copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuning.choice.slots", lambda config: 2)
    assert _affordable_copies(SearchConfig(), taken, left) == copies
