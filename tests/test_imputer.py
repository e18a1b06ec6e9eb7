import copy
import inspect
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import fields

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import estimator_checks_generator

from remasker import InvalidConfigError, InvalidTableError, ProcessLostError, ReMaskerImputer
from remasker.experts import CHUNK_ROWS
from remasker.model import ModelConfig
from remasker.tasks import side_by_side
from remasker.training import TrainingConfig

TINY = {
    "width": 8,
    "encoder_depth": 1,
    "decoder_depth": 1,
    "epochs": 3,
    "experts": None,
    "n_members": 1,
    "random_state": 0,
}


@pytest.fixture(scope="module")
def table():
    random = np.random.default_rng(0)
    x = random.normal(size=200)
    frame = pd.DataFrame(
        {
            "x": x,
            "double": 2 * x + 0.1 * random.normal(size=200),
            "sign": np.where(x > 0, "up", "down"),
            "count": random.poisson(4, size=200),
        },
        index=random.permutation(200) + 1000,
    )
    frame["count"] = frame["count"].astype("Int64")
    return frame.mask(random.random(frame.shape) < 0.2)


@pytest.fixture(scope="module")
def fitted(table):
    return ReMaskerImputer(**TINY).fit(table)


@pytest.fixture(scope="module")
def learned(table):
    """A model that has really learned: slow enough to be shared."""
    return ReMaskerImputer(
        width=16,
        encoder_depth=1,
        decoder_depth=1,
        epochs=60,
        learning_rate=5e-3,
        random_state=0,
        experts=None,
    ).fit(table)


# ---------------------------------------------------------------------- the user's table is sacred


def test_observed_cells_dtypes_index_and_order_are_kept(fitted, table):
    completed = fitted.transform(table)
    assert not completed.isna().any(axis=None)
    assert completed.index.equals(table.index)
    assert completed.dtypes.equals(table.dtypes)
    pd.testing.assert_frame_equal(completed.where(table.notna()), table.where(table.notna()))


def test_the_input_itself_is_not_changed(table):
    before = table.copy(deep=True)
    ReMaskerImputer(**TINY).fit_transform(table)
    pd.testing.assert_frame_equal(table, before)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arrays_come_back_as_arrays_bit_for_bit(dtype):
    X = np.random.default_rng(0).normal(size=(40, 3)).astype(dtype)
    X[::3, 0] = np.nan
    completed = ReMaskerImputer(**TINY).fit_transform(X)
    observed = ~np.isnan(X)
    assert completed.dtype == X.dtype
    assert np.array_equal(completed[observed], X[observed])
    assert np.isfinite(completed).all()


# ---------------------------------------------------------------------- rows stand alone


def test_a_row_does_not_depend_on_rows_order_or_batches(fitted, table, monkeypatch):
    import remasker.inference

    together = fitted.transform(table)
    order = np.random.default_rng(1).permutation(len(table))
    monkeypatch.setattr(remasker.inference, "BATCH_ROWS", 7)
    shuffled = fitted.transform(table.iloc[order]).loc[table.index]
    alone = pd.concat([fitted.transform(table.iloc[[i]]) for i in range(20)])
    for name in ("x", "double"):
        scale = table[name].std()
        assert np.abs(together[name] - shuffled[name]).max() < 1e-5 * scale
        assert np.abs(together[name].iloc[:20] - alone[name]).max() < 1e-5 * scale
    assert together["sign"].equals(shuffled["sign"])


def test_new_rows_need_no_refitting(learned):
    new = pd.DataFrame(
        {
            "x": [1.5, None, -1.5],
            "double": [None, -3.0, None],
            "sign": [None, None, "down"],
            "count": pd.array([3, None, 5], dtype="Int64"),
        }
    )
    completed = learned.transform(new)
    assert completed["double"][0] == pytest.approx(3, abs=1.0)
    assert completed["x"][1] == pytest.approx(-1.5, abs=0.7)
    assert completed["sign"].tolist() == ["up", "down", "down"]


def test_columns_may_come_in_another_order(fitted, table):
    reordered = table[["sign", "count", "x", "double"]]
    completed = fitted.transform(reordered)
    assert completed.columns.equals(reordered.columns)
    pd.testing.assert_frame_equal(completed[table.columns], fitted.transform(table))


def test_columns_that_differ_are_listed(fitted, table):
    message = "the columns differ from those of fit: missing 'x'; not seen in fit: 'y'"
    with pytest.raises(InvalidTableError, match=message):
        fitted.transform(table.rename(columns={"x": "y"}))


# ---------------------------------------------------------------------- seeds


def test_same_seed_same_result(table):
    first, second = (ReMaskerImputer(**TINY).fit_transform(table) for _ in range(2))
    pd.testing.assert_frame_equal(first, second)
    other = ReMaskerImputer(**{**TINY, "random_state": 1}).fit_transform(table)
    assert not first.equals(other)


# ---------------------------------------------------------------------- draws


def test_draws_differ_in_the_gaps_and_nowhere_else(learned, table):
    draws = learned.draw(table, n_draws=3, random_state=0)
    again = learned.draw(table, n_draws=3, random_state=0)
    for drawn, repeated in zip(draws, again, strict=True):
        pd.testing.assert_frame_equal(drawn, repeated)
        pd.testing.assert_frame_equal(drawn.where(table.notna()), table.where(table.notna()))
        assert not drawn.isna().any(axis=None)
    assert not draws[0].equals(draws[1])


def test_columns_missing_together_keep_their_correlation(learned):
    blank = pd.DataFrame(
        {"x": [None] * 400, "double": [None] * 400, "sign": ["up"] * 400, "count": [4] * 400}
    ).astype({"x": float, "double": float, "count": "Int64"})
    drawn = learned.draw(blank, n_draws=1, random_state=0)[0]
    # Drawn independently of each other they would have none.
    assert drawn["x"].corr(drawn["double"]) > 0.6
    assert drawn["x"].std() > 0.2


@pytest.mark.slow
def test_intervals_hold_the_point_estimate_and_about_their_level(table):
    random = np.random.default_rng(3)
    x = random.normal(size=600)
    truth = pd.DataFrame({"x": x, "y": x + 0.5 * random.normal(size=600)})
    hidden = random.random(600) < 0.3
    gappy = truth.assign(y=truth["y"].mask(hidden))
    imputer = ReMaskerImputer(
        width=16,
        encoder_depth=1,
        decoder_depth=1,
        epochs=40,
        learning_rate=5e-3,
        random_state=0,
        experts=None,
    ).fit(gappy)
    low, high = imputer.intervals(gappy, level=0.9)
    point = imputer.transform(gappy)
    assert ((low["y"] <= point["y"]) & (point["y"] <= high["y"])).all()
    covered = ((low["y"] <= truth["y"]) & (truth["y"] <= high["y"]))[hidden].mean()
    assert 0.82 <= covered <= 0.97
    draws = np.stack([d["y"][hidden] for d in imputer.draw(gappy, n_draws=50, random_state=0)])
    ends = np.quantile(draws, [0.05, 0.95], axis=0)
    inside = (ends[0] <= truth["y"][hidden]) & (truth["y"][hidden] <= ends[1])
    assert 0.8 <= inside.mean() <= 0.97


def test_probabilities_sum_to_one_and_agree_with_the_point_estimate(learned, table):
    chances = learned.probabilities(table)["sign"]
    np.testing.assert_allclose(chances.sum(axis=1), 1, atol=1e-6)
    assert (chances.idxmax(axis=1) == learned.transform(table)["sign"]).all()


# ---------------------------------------------------------------------- scikit-learn's conventions

EXCLUDED = {
    # A table whose columns come in another order is fine: names say which is which.
    "check_dataframe_column_names_consistency",
}


@pytest.mark.parametrize(
    ("estimator", "check"),
    [
        (estimator, check)
        for estimator, check in estimator_checks_generator(ReMaskerImputer(**TINY))
        if getattr(check, "func", check).__name__ not in EXCLUDED
    ],
    ids=lambda value: getattr(getattr(value, "func", None), "__name__", ""),
)
def test_scikit_learn_checks(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


def test_defaults_are_those_of_the_configurations():
    parameters = inspect.signature(ReMaskerImputer).parameters
    for config in (ModelConfig, TrainingConfig):
        for field in fields(config):
            assert parameters[field.name].default == field.default, field.name


def test_paper_preset_and_its_overrides():
    imputer = ReMaskerImputer.paper(epochs=10)
    settings = imputer.get_params()
    assert (settings["encoder_depth"], settings["decoder_depth"], settings["epochs"]) == (8, 4, 10)
    assert (settings["masking"], settings["masking_ratio"]) == ("uniform", 0.5)
    X = np.random.default_rng(0).normal(size=(30, 3))
    X[::4, 1] = np.nan
    completed = imputer.set_params(epochs=1, width=8, encoder_depth=1).fit_transform(X)
    # The paper's output cannot leave the range seen in fit.
    assert np.nanmin(X[:, 1]) <= completed[:, 1].min()
    assert completed[:, 1].max() <= np.nanmax(X[:, 1])


def test_in_a_pipeline_a_column_transformer_and_cross_validation(table):
    numeric = table[["x", "double", "count"]].astype(float)
    target = numeric["x"].fillna(0)
    pipeline = make_pipeline(ReMaskerImputer(**TINY), LinearRegression())
    assert np.isfinite(cross_val_score(pipeline, numeric, target, cv=2)).all()
    split = ColumnTransformer([("gaps", ReMaskerImputer(**TINY), ["x", "double"])])
    split.set_output(transform="pandas")
    assert split.fit_transform(table).columns.tolist() == ["gaps__x", "gaps__double"]
    assert clone(pipeline).get_params()["remaskerimputer__width"] == 8


def test_set_output_and_names(table):
    X = table[["x", "double"]].to_numpy()
    imputer = ReMaskerImputer(**TINY).set_output(transform="pandas")
    assert imputer.fit_transform(X).columns.tolist() == ["x0", "x1"]
    assert ReMaskerImputer(**TINY).fit(table).get_feature_names_out().tolist() == list(table)


def test_indicators_and_empty_columns(table):
    gappy = table.assign(empty=np.nan)
    with pytest.warns(UserWarning, match="column 'empty': nothing is observed"):
        imputer = ReMaskerImputer(**TINY, add_indicator=True, keep_empty_features=False).fit(gappy)
    completed = imputer.transform(gappy)
    assert completed.columns.tolist() == imputer.get_feature_names_out().tolist()
    assert "empty" not in completed
    assert completed["missingindicator_x"].tolist() == gappy["x"].isna().tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"masking": "copi"}, "did you mean 'copy'"),
        ({"epochs": 0}, "epochs: expected an integer of at least 1, got 0"),
        ({"width": "big"}, "width: expected an integer of at least 2, got 'big'"),
        ({"validation_fraction": 0.9}, "validation_fraction: expected a number from 0.0 to 0.5"),
        ({"output": "shared_tanh"}, "output 'shared_tanh' needs scaling 'minmax', got 'standard'"),
        ({"device": "gpu"}, "device: expected one of 'auto', 'cpu', 'cuda', 'mps', got 'gpu'"),
        ({"n_jobs": 0}, "n_jobs: expected a number of processes, -1 for one per core, got 0"),
        ({"n_jobs": "all"}, "n_jobs: expected a number of processes"),
        ({"exclude": ["X"]}, "exclude names column 'X', which the table does not have"),
    ],
)
def test_wrong_settings_are_refused_in_fit(table, settings, message):
    with pytest.raises(InvalidConfigError, match=message):
        ReMaskerImputer(**{**TINY, **settings}).fit(table)


def test_before_fit():
    with pytest.raises(NotFittedError):
        ReMaskerImputer().transform([[1.0]])


def test_ctrl_c_keeps_the_best_state_so_far(table, monkeypatch):
    from remasker.training import Trainer

    whole = Trainer.epochs

    def interrupted(self):
        for report in whole(self):
            yield report
            if report.epoch == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "epochs", interrupted)
    with pytest.warns(UserWarning, match="interrupted after epoch 2 of 3; keeping the best state"):
        imputer = ReMaskerImputer(**TINY).fit(table)
    assert not imputer.transform(table).isna().any(axis=None)


def test_import_is_light():
    """Neither torch nor ray nor optuna is loaded before something needs them."""
    code = (
        "import sys, remasker; heavy = {'torch', 'ray', 'optuna', 'pandas', 'sklearn'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "from remasker import ReMaskerImputer;"
        "assert not {'ray', 'optuna'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------- the second stage


@pytest.fixture(scope="module")
def with_experts(table, one_stack):
    return ReMaskerImputer(**{**TINY, "experts": "auto", "n_members": None}).fit(table)


def test_experts_keep_every_promise(with_experts, table, tmp_path):
    completed = with_experts.transform(table)
    assert not completed.isna().any(axis=None)
    assert completed.dtypes.equals(table.dtypes)
    pd.testing.assert_frame_equal(completed.where(table.notna()), table.where(table.notna()))
    loaded = ReMaskerImputer.load(with_experts.save(tmp_path / "model"))
    pd.testing.assert_frame_equal(loaded.transform(table), completed)
    alone = pd.concat([with_experts.transform(table.iloc[[i]]) for i in range(10)])
    assert np.abs(alone["x"] - completed["x"].iloc[:10]).max() < 1e-5 * table["x"].std()


def test_experts_find_what_an_untrained_model_misses(with_experts, table):
    hidden = table["double"].notna() & table["x"].notna()
    asked = table[hidden].assign(double=np.nan)
    error = with_experts.transform(asked)["double"] - table.loc[hidden, "double"]
    assert np.sqrt((error**2).mean()) < 0.3 * table["double"].std()


def test_draws_and_intervals_follow_the_experts(with_experts, table):
    low, high = with_experts.intervals(table)
    point = with_experts.transform(table)
    gap = table["double"].isna()
    assert (low["double"] <= point["double"])[gap].all()
    assert (point["double"] <= high["double"])[gap].all()
    draws = np.stack(
        [d["double"][gap] for d in with_experts.draw(table, n_draws=30, random_state=0)]
    )
    centre = np.abs(draws.mean(axis=0) - point["double"][gap].to_numpy())
    assert np.median(centre) < 0.5 * table["double"].std()
    assert (draws.std(axis=0) > 0).all()


def test_probabilities_and_drawn_levels_follow_the_experts(with_experts, table):
    asked = table[table["x"].notna() & table["sign"].notna()].assign(sign=None)
    truth = table.loc[asked.index, "sign"]
    chances, point = with_experts.probabilities(asked)["sign"], with_experts.transform(asked)
    assert (chances.idxmax(axis=1) == point["sign"]).all()
    np.testing.assert_allclose(chances.sum(axis=1), 1, atol=1e-6)
    right = np.mean(
        [(d["sign"] == truth).mean() for d in with_experts.draw(asked, 20, random_state=0)]
    )
    # An untrained Transformer by itself draws one level as often as the other.
    assert right > 0.8


@pytest.mark.slow
def test_intervals_around_the_experts_hold_about_their_level():
    random = np.random.default_rng(4)
    x = random.normal(size=(700, 2))
    truth = pd.DataFrame({"x": x[:, 0], "z": x[:, 1], "double": 2 * x[:, 0]})
    truth["y"] = x[:, 0] * x[:, 1] + 0.5 * random.normal(size=700)
    hidden = random.random((700, 4)) < [0.2, 0, 0.2, 0.3]
    gappy = truth.mask(hidden)
    imputer = ReMaskerImputer(epochs=20, width=16, random_state=0).fit(gappy)
    low, high = imputer.intervals(gappy, level=0.9)
    covered = ((low["y"] <= truth["y"]) & (truth["y"] <= high["y"]))[hidden[:, 3]].mean()
    assert 0.84 <= covered <= 0.96
    # What is known all but exactly has ends all but there, and what is not has them far apart.
    known, unknown = (hidden[:, 2] & (hidden[:, 0] == gap) for gap in (False, True))
    width = (high["double"] - low["double"]) / truth["double"].std()
    assert width[known].median() < 0.2
    assert width[known].max() < 0.4
    assert width[unknown].min() > 1.5
    draws = imputer.draw(gappy, 10, random_state=0)
    drawn, x = (np.stack([table[name] for table in draws]) for name in ("double", "x"))
    spread = drawn.std(axis=0) / truth["double"].std()
    assert spread[known].mean() < 0.1
    assert spread[unknown].mean() > 0.5
    # What is missing together is drawn together.
    assert np.abs(drawn - 2 * x)[:, unknown].mean() < 0.2
    assert np.corrcoef(drawn[:, unknown].ravel(), x[:, unknown].ravel())[0, 1] > 0.9
    held = ((low["double"] <= truth["double"]) & (truth["double"] <= high["double"]))[known]
    assert held.mean() > 0.8


def test_calibration_asks_only_models_that_have_not_seen_the_row(with_experts, table, monkeypatch):
    ensemble = with_experts.ensemble_
    encoded = with_experts.encoder_.encode(table)
    folds = np.arange(len(table)) % len(ensemble.members)
    asked = []
    monkeypatch.setattr(
        type(ensemble),
        "_calibrate",
        lambda self, part, cells: asked.extend(cells),
    )
    ensemble.calibrate_by_folds(encoded, folds)
    total = np.zeros(encoded.observed.shape, dtype=int)
    for models, cells in asked:
        (member,) = models.members
        fold = next(k for k, other in enumerate(ensemble.members) if other is member)
        assert (folds[cells.any(axis=1)] == fold).all()
        total += cells
    numeric = np.array(ensemble.n_categories) == 0
    # Every observed number once, each by itself in its row.
    assert (total == (encoded.observed & numeric)).all()
    assert all((cells.sum(axis=1) <= 1).all() for _, cells in asked)


@pytest.mark.slow
def test_same_seed_same_experts(with_experts, table):
    again = clone(with_experts).fit(table)
    pd.testing.assert_frame_equal(again.transform(table), with_experts.transform(table))


@pytest.mark.slow
def test_processes_side_by_side_change_nothing_but_the_time(
    with_experts, table, tmp_path, monkeypatch
):
    monkeypatch.setattr("remasker.fitting.train", None)  # of this process: nobody trains here
    several = clone(with_experts).set_params(n_jobs=2, verbose=True).fit(table)
    pd.testing.assert_frame_equal(several.transform(table), with_experts.transform(table))
    # What one call was given is no property of the model.
    assert ReMaskerImputer.load(several.save(tmp_path / "model")).n_jobs is None


@pytest.mark.slow
def test_a_killed_process_is_one_sentence():
    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ProcessLostError, match=r"was ended from outside.*--jobs 1"):
        side_by_side(2)([end, int], 2)
    assert side_by_side(2)([int, int], 2) == [0, 0]  # the next call has processes again


@pytest.mark.parametrize("experts", [None, "default"])
def test_draws_of_a_column_of_few_values_are_such_values(experts):
    random = np.random.default_rng(0)
    grade = random.choice([0.0, 0.25, 1.0], size=200)
    table = np.column_stack([grade, grade + random.normal(size=200) / 4])
    table[:60, 0] = np.nan
    settings = {} if experts else {"experts": None}
    imputer = ReMaskerImputer(epochs=5, random_state=0, **settings).fit(table)
    draws = np.stack(imputer.draw(table, n_draws=4, random_state=0))
    assert set(np.unique(draws[:, :, 0])) == {0.0, 0.25, 1.0}
    assert len(np.unique(draws[:, :60, 1])) == 60, "what was observed stays"
    # The estimate is a mean, which lies between them.
    assert len(np.unique(imputer.transform(table)[:60, 0])) > 3


def test_rows_of_a_long_table_are_completed_by_threads_with_the_same_result(table, with_experts):
    long = pd.concat([table] * 40, ignore_index=True)
    assert len(long) > CHUNK_ROWS
    alone = with_experts.transform(long)
    several = copy.copy(with_experts).set_params(n_jobs=2)
    pd.testing.assert_frame_equal(several.transform(long), alone)
    short = with_experts.transform(table.reset_index(drop=True))
    pd.testing.assert_frame_equal(alone.iloc[: len(table)], short)


@pytest.mark.slow
def test_a_model_of_a_complete_table_has_experts_too(table, one_stack, tmp_path):
    """Learned from a table without gaps, used on one with: before, by a briefly trained model."""
    complete = table.dropna()
    imputer = ReMaskerImputer(**{**TINY, "experts": "auto", "n_members": None}).fit(complete)
    weighed = {record["column"] for record in imputer.ensemble_.weights_table()}
    assert weighed == set(range(complete.shape[1]))
    pd.testing.assert_frame_equal(imputer.transform(complete), complete)
    filled = imputer.transform(table)
    assert not filled.isna().any(axis=None)
    gaps = (table["double"].isna() & table["x"].notna()).to_numpy()
    error = filled["double"][gaps] - 2 * table["x"][gaps]
    assert error.std() < 0.5 * table["double"].std()
