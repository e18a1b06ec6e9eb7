"""The second stage: experts, their stack, and their way to disk and back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load, save
from scipy.optimize import check_grad
from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingRegressor

from remasker import gaussian_process, trees
from remasker.errors import ArtifactError, InvalidConfigError
from remasker.expert_fitting import MIN_OBSERVED, fit_experts, fit_stacks
from remasker.expert_models import EXPERTS, ExpertsConfig, Sample
from remasker.experts import Experts, places
from remasker.inference import Ensemble
from remasker.stacking import stack_weights
from remasker.table import EncodedTable
from remasker.tasks import side_by_side

SMALL = ExpertsConfig(n_trees=10, rounds=3)


def mixed_table(
    n: int = 150, seed: int = 0, missing: float = 0.3
) -> tuple[EncodedTable, np.ndarray]:
    """Two numbers and a category that know each other, one number that nobody knows."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=n)
    b = np.sin(2 * a) + 0.1 * rng.normal(size=n)
    level = (a > -0.5).astype(int) + (a > 0.5)
    truth = np.stack([a, b, level, rng.normal(size=n)], axis=1).astype(np.float32)
    observed = rng.random(truth.shape) >= missing
    observed[:, 3] |= ~observed.any(axis=1)
    values = np.where(observed, truth, 0).astype(np.float32)
    return EncodedTable(values=values, observed=observed, n_categories=(0, 0, 3, 0)), truth


@pytest.fixture(scope="module")
def fitted() -> tuple[EncodedTable, np.ndarray, Experts]:
    table, truth = mixed_table()
    return table, truth, fit_experts(table, None, config=SMALL)


def test_better_than_the_mean_for_numbers_and_categories(fitted):
    table, truth, experts = fitted
    completed = experts.impute(table, None)
    gaps = ~table.observed
    for j in (0, 1):
        assert ((completed - truth)[gaps[:, j], j] ** 2).mean() < 0.6 * truth[:, j].var()
    hits = (completed[:, 2] == truth[:, 2])[gaps[:, 2]].mean()
    assert hits > 1.2 * np.bincount(truth[:, 2].astype(int)).max() / len(truth)


def test_observed_cells_stay_and_probabilities_are_proper(fitted):
    table, _, experts = fitted
    assert np.array_equal(experts.impute(table, None)[table.observed], table.values[table.observed])
    chances = experts.complete(table, None)[:, places(table.n_categories)[2]]
    assert chances.min() >= 0
    assert np.allclose(chances.sum(axis=1), 1)


def test_rows_do_not_influence_each_other(fitted):
    table, _, experts = fitted
    whole = experts.complete(table, None)
    some = np.array([5, 3, 77])
    part = EncodedTable(
        values=table.values[some], observed=table.observed[some], n_categories=table.n_categories
    )
    assert np.allclose(experts.complete(part, None), whole[some])


@pytest.mark.slow
def test_same_seed_same_result(fitted):
    table, _, experts = fitted
    again = fit_experts(table, None, config=SMALL)
    other = fit_experts(table, None, config=SMALL, seed=1)
    assert np.array_equal(again.complete(table, None), experts.complete(table, None))
    assert not np.array_equal(other.complete(table, None), experts.complete(table, None))


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 2])
def test_stacks_side_by_side_are_those_one_by_one(rounds):
    table, _ = mixed_table()
    config = ExpertsConfig(n_trees=5, rounds=rounds, experts=("ridge", "trees", "smooth"))
    apart = [fit_experts(table, None, config=config, seed=seed) for seed in (3, 4)]
    together = fit_stacks(table, None, config=config, seeds=[3, 4], run=side_by_side(2))
    for one, other in zip(apart, together, strict=True):
        assert np.array_equal(one.complete(table, None), other.complete(table, None))
        assert one.weights_table() == other.weights_table()


def test_every_column_of_a_round_is_a_task_made_in_its_turn():
    table, _ = mixed_table()
    done = []

    def run(tasks, total, doing=""):
        assert iter(tasks) is iter(tasks)  # not a list: what they hold is not in memory at once
        results = [task() for task in tasks]
        assert len(results) == total
        done.append((doing, total))
        return results

    config = ExpertsConfig(rounds=2, experts=("ridge",))
    fit_stacks(table, None, config=config, seeds=[0, 1], run=run)
    incomplete = int((~table.observed).any(axis=0).sum())
    assert done == [
        ("fitting experts, first look", incomplete),
        ("fitting experts, round 1 of 2", 2 * incomplete),
        ("fitting experts, round 2 of 2", 2 * incomplete),
    ]
    assert fit_stacks(table, None, config=config, seeds=[]) == ()


def test_to_disk_and_back_without_pickle(fitted):
    table, _, experts = fitted
    tensors, manifest = experts.to_tensors()
    back = Experts.from_tensors(load(save(tensors)), json.loads(json.dumps(manifest)))
    assert np.array_equal(back.complete(table, None), experts.complete(table, None))
    assert back.weights_table() == experts.weights_table()
    assert np.array_equal(back.residuals, experts.residuals, equal_nan=True)
    sizes = (who.error_sizes(table, experts.complete(table, None)) for who in (back, experts))
    assert np.array_equal(*sizes, equal_nan=True)


def test_what_stacks_weigh_is_averaged():
    table, _ = mixed_table()
    small = ExpertsConfig(n_trees=5, rounds=1, experts=("ridge", "trees"))
    stacks = tuple(fit_experts(table, None, config=small, seed=seed) for seed in (0, 1))
    ensemble = Ensemble(
        members=(), n_categories=table.n_categories, residuals=np.zeros((4, 101)), experts=stacks
    )
    one, other, both = (who.weights_table() for who in (*stacks, ensemble))
    assert [record["column"] for record in both] == [record["column"] for record in one]
    for a, b, mean in zip(one, other, both, strict=True):
        assert mean["error"] == pytest.approx((a["error"] + b["error"]) / 2)
        for name in ("ridge", "trees"):
            weights = [record["weights"].get(name, 0.0) for record in (a, b)]
            assert mean["weights"].get(name, 0.0) == pytest.approx(sum(weights) / 2)


def test_stacks_share_one_look_of_the_first_stage(monkeypatch):
    table, _ = mixed_table()
    small = ExpertsConfig(rounds=1, experts=("ridge",))
    stacks = tuple(fit_experts(table, None, config=small, seed=seed) for seed in (0, 1))
    looks = []

    def soft(self, values, visible):
        looks.append(len(values))
        return np.full((len(values), 6), 0.25)

    monkeypatch.setattr(Ensemble, "soft", soft)
    ensemble = Ensemble(
        members=(), n_categories=table.n_categories, residuals=np.zeros((4, 101)), experts=stacks
    )
    assert ensemble.complete(table).shape == (len(table), 6)
    assert looks == [len(table)]


def test_damaged_file_is_an_artifact_error(fitted):
    tensors, manifest = fitted[2].to_tensors()
    del tensors["prior"]
    with pytest.raises(ArtifactError, match="damaged"):
        Experts.from_tensors(tensors, manifest)


def test_residuals_are_those_of_unseen_cells(fitted):
    table, _, experts = fitted
    assert np.isnan(experts.residuals[2]).all()
    sizes = experts.error_sizes(table, experts.complete(table, None))
    assert np.isnan(sizes[:, 2]).all()
    noise = experts.residuals[3] * sizes[:, 3].mean()
    # Nothing predicts the last column: its residuals are as wide as the column.
    spread = table.values[table.observed[:, 3], 3].std()
    assert 0.8 * 1.64 * spread < noise[95] < 1.25 * 1.64 * spread


def test_errors_are_larger_where_what_matters_is_missing():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(300, 3)).astype(np.float32)
    values[:, 1] = 2 * values[:, 0]
    observed = rng.random(values.shape) < [0.7, 0.7, 1.0]
    table = EncodedTable(
        values=np.where(observed, values, 0), observed=observed, n_categories=(0, 0, 0)
    )
    experts = fit_experts(table, None, config=SMALL)
    soft = experts.complete(table, None)
    sizes = experts.error_sizes(table, soft)[:, 1]
    gaps = ~observed[:, 1]
    known, unknown = sizes[gaps & observed[:, 0]], sizes[gaps & ~observed[:, 0]]
    assert np.median(unknown) > 10 * np.median(known)
    missed = np.abs(soft - values)[gaps & ~observed[:, 0], 1].mean()
    assert 0.7 < np.mean(unknown) / missed < 1.4


def test_what_follows_from_the_rest_is_exact():
    """A total of other columns: no shrinkage, no weight that is dropped may pull it to its mean."""
    rng = np.random.default_rng(0)
    parts = rng.normal(size=(120, 3))
    values = np.column_stack([parts, parts.sum(axis=1)]).astype(np.float32)
    observed = np.ones(values.shape, dtype=bool)
    observed[::4, 3] = False
    table = EncodedTable(
        values=np.where(observed, values, 0), observed=observed, n_categories=(0,) * 4
    )
    missed = (fit_experts(table, None, config=SMALL).impute(table, None) - values)[~observed]
    # 0.023 where shrinkage counted typical observations and the weights of some were dropped.
    assert np.sqrt((missed**2).mean()) < 0.01 * values[:, 3].std()


@pytest.mark.parametrize("missing", [pytest.param(0.3, marks=pytest.mark.slow), 0.7])
def test_noise_is_left_at_the_mean(missing):
    rng = np.random.default_rng(3)
    truth = rng.normal(size=(200, 5)).astype(np.float32)
    observed = rng.random(truth.shape) >= missing
    table = EncodedTable(
        values=np.where(observed, truth, 0), observed=observed, n_categories=(0,) * 5
    )
    completed = fit_experts(table, None, config=SMALL).impute(table, None)
    means = truth.sum(axis=0, where=observed) / observed.sum(axis=0)
    error = ((completed - truth)[~observed] ** 2).mean()
    assert error < 1.04 * ((means - truth)[~observed] ** 2).mean()


def oracle(truth: np.ndarray, noise: float):
    """A first stage that knows the numbers of the training rows, or nothing but noise."""
    rng = np.random.default_rng(9)
    said = truth + noise * rng.normal(size=truth.shape)

    def predict(values, visible):
        return said[: len(values)].astype(float)

    return predict, lambda values, visible, rows: said[rows].astype(float)


@pytest.mark.parametrize(("noise", "helps"), [(0.02, True), (30.0, False)])
def test_the_model_is_weighed_by_what_it_knows(noise, helps):
    rng = np.random.default_rng(4)
    truth = rng.normal(size=(150, 3))
    observed = rng.random(truth.shape) >= 0.3
    table = EncodedTable(
        values=np.where(observed, truth, 0), observed=observed, n_categories=(0, 0, 0)
    )
    config = ExpertsConfig(experts=("ridge",), rounds=1)
    predict, honest = oracle(truth, noise)
    experts = fit_experts(table, lambda v, o: predict(v, o)[: len(v)], honest=honest, config=config)
    for record in experts.weights_table():
        if helps:
            assert record["weights"]["remasker"] > 0.9
            assert record["gain"] > 2 * record["gain_standard_error"]
        else:
            assert record["weights"].get("remasker", 0) < 0.1
            assert record["gain"] < 2 * record["gain_standard_error"]


def test_the_target_is_hidden_from_the_first_stage():
    table, _ = mixed_table(60)
    seen = []

    def predict(values, visible):
        seen.append(visible.copy())
        return np.zeros((len(values), 6)) + 1 / 3

    fit_experts(table, predict, config=ExpertsConfig(experts=("ridge",), rounds=1))
    assert [bool(v[:, j].any()) for j, v in enumerate(seen)] == [False] * 4


def test_columns_without_experts_are_the_models():
    table, _ = mixed_table()
    observed = table.observed.copy()
    observed[:, 0] = True
    full = EncodedTable(values=table.values, observed=observed, n_categories=table.n_categories)
    experts = fit_experts(full, None, config=SMALL)
    assert 0 not in [record["column"] for record in experts.weights_table()]
    assert np.isfinite(experts.complete(table, None)).all()


def test_learning_is_bounded_on_large_tables():
    table, _ = mixed_table(400)
    config = ExpertsConfig(n_trees=5, max_rows=200, max_near_rows=100, max_smooth_rows=50, rounds=1)
    experts = fit_experts(table, None, config=config)
    assert {record["rows"] for record in experts.weights_table()} == {200}
    tensors, _ = experts.to_tensors()
    sizes = {name.split(".")[-2]: len(a) for name, a in tensors.items() if "reference" in name}
    processes = {"smooth", "warped", "rough", "rough_warped"}
    assert sizes.pop("neighbours") == 100
    assert sizes
    assert set(sizes) <= processes
    assert set(sizes.values()) == {50}


def test_forests_of_many_rows_are_no_larger(monkeypatch):
    inputs = np.random.default_rng(0).normal(size=(1000, 2))
    folds = np.arange(1000) % 2
    sizes = []
    for rows in (slice(250), slice(1000)):
        random_state, config = np.random.default_rng(0), ExpertsConfig(n_trees=4)
        monkeypatch.setattr("remasker.trees.LEAF_ROWS", 250)
        given = inputs[rows], inputs[rows, :1], folds[rows]
        arrays, unseen = EXPERTS["trees"][0](Sample(*given, random_state, config))
        sizes.append(len(arrays["feature"]))
        assert np.mean((unseen - inputs[rows, :1]) ** 2) < 0.1
    assert sizes[1] < 1.5 * sizes[0]


def test_a_complete_or_nearly_empty_table_has_no_experts():
    table, _ = mixed_table(10)
    experts = fit_experts(table, None, config=SMALL)
    assert experts.weights_table() == []
    assert np.isfinite(experts.complete(table, None)).all()


def test_constant_and_single_columns():
    rng = np.random.default_rng(0)
    observed = rng.random((60, 3)) >= 0.3
    values = np.where(observed, [1.0, 0.0, 0.5], 0).astype(np.float32)
    values[:, 2] = np.where(observed[:, 2], rng.normal(size=60), 0)
    table = EncodedTable(values=values, observed=observed, n_categories=(2, 0, 0))
    completed = fit_experts(table, None, config=SMALL).impute(table, None)
    assert (completed[:, 0] == 1).all()
    assert np.allclose(completed[:, 1], 0, atol=1e-6)
    single = EncodedTable(values=values[:, 2:], observed=observed[:, 2:], n_categories=(0,))
    assert np.isfinite(fit_experts(single, None, config=SMALL).complete(single, None)).all()


def test_misspelt_expert_is_answered():
    with pytest.raises(InvalidConfigError, match="did you mean 'trees'"):
        ExpertsConfig(experts=("tres",))


# ---------------------------------------------------------------------- the experts themselves


def regression(n: int = 120, m: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(n, 3))
    targets = np.stack([np.sin(inputs[:, 0]), inputs[:, 1] ** 2], axis=1)[:, :m]
    return inputs, targets + 0.05 * rng.normal(size=(n, m)), np.arange(n) % 5


@pytest.mark.parametrize("name", EXPERTS)
def test_unseen_predictions_do_not_know_their_targets(name):
    inputs, targets, folds = regression()
    fit, predict, _ = EXPERTS[name]
    config = ExpertsConfig(n_trees=20, min_boosted_rows=10)
    arrays, unseen = fit(Sample(inputs, targets, folds, np.random.default_rng(0), config))
    assert predict(arrays, inputs).shape == unseen.shape == targets.shape
    noise = np.random.default_rng(1).normal(size=targets.shape)
    _, unseen = fit(Sample(inputs, noise, folds, np.random.default_rng(0), config))
    assert np.corrcoef(unseen.ravel(), noise.ravel())[0, 1] < 0.2


def test_trees_agree_with_scikit_learn():
    inputs, targets, _ = regression()
    inputs = inputs.astype(np.float32)
    forest = ExtraTreesRegressor(10, random_state=0).fit(inputs, targets)
    arrays = trees._join([trees._of_forest(tree.tree_) for tree in forest.estimators_])
    assert np.allclose(trees.predict_trees(arrays, inputs), forest.predict(inputs), atol=1e-5)
    twice = trees._join([arrays, arrays])
    assert np.allclose(trees.predict_trees(twice, inputs), forest.predict(inputs), atol=1e-5)


def test_boosted_trees_agree_with_scikit_learn():
    inputs, targets, folds = regression(400)
    arrays, unseen = trees.fit_boosted(inputs, targets, folds)
    wanted, honest = np.zeros_like(targets), np.empty_like(targets)
    for fold in range(5):
        for c in (0, 1):
            model = HistGradientBoostingRegressor(
                max_iter=200, learning_rate=0.1, l2_regularization=1.0, early_stopping=False
            ).fit(inputs[folds != fold], targets[folds != fold, c])
            honest[folds == fold, c] = model.predict(inputs[folds == fold])
            wanted[:, c] += model.predict(inputs) / 5
    assert np.allclose(trees.predict_trees(arrays, inputs), wanted, atol=1e-5)
    assert np.allclose(unseen, honest, atol=1e-5)


def test_boosting_is_for_many_rows_of_few_levels():
    table, _ = mixed_table(400)

    def voices(**settings):
        config = ExpertsConfig(experts=("ridge", "boosted"), rounds=1, shrinkage=0.0, **settings)
        experts = fit_experts(table, None, config=config)
        tensors, manifest = experts.to_tensors()
        back = Experts.from_tensors(load(save(tensors)), json.loads(json.dumps(manifest)))
        assert np.array_equal(back.complete(table, None), experts.complete(table, None))
        return {name for record in experts.weights_table() for name in record["weights"]}

    assert voices() == {"ridge"}
    assert voices(min_boosted_rows=100) == {"ridge", "boosted"}
    inputs, targets, folds = regression(400, 1)
    many = np.tile(targets, 9)
    config = ExpertsConfig(min_boosted_rows=100)
    fit = EXPERTS["boosted"][0]
    assert fit(Sample(inputs, many, folds, np.random.default_rng(0), config)) is None


@pytest.mark.parametrize("kernel", [gaussian_process.SMOOTH, gaussian_process.ROUGH])
def test_gaussian_process_gradient(kernel):
    inputs, targets, _ = regression(30)
    start = np.r_[np.zeros(3), -0.3, -1.0, -1.0]
    point = start + 0.1

    def value(s):
        return gaussian_process._negative_likelihood(s, kernel, inputs, targets, start)[0]

    def gradient(s):
        return gaussian_process._negative_likelihood(s, kernel, inputs, targets, start)[1]

    assert check_grad(value, gradient, point) < 1e-3


@pytest.mark.parametrize("kernel", [gaussian_process.SMOOTH, gaussian_process.ROUGH])
def test_gaussian_process_closed_form_is_leaving_out(kernel):
    inputs, targets, folds = regression(60, 1)
    arrays, unseen = gaussian_process.fit_process(
        kernel, inputs, targets, folds, np.random.default_rng(0), max_rows=60
    )
    out = folds == 0
    shifted = inputs - arrays["center"]
    direct = []
    for h in (0, 1):
        settings = arrays[f"settings_{h}"]
        curved, linear, _ = gaussian_process._covariance(kernel, shifted, shifted, settings)
        covariance = gaussian_process._noisy(curved + linear, settings)
        inner = np.linalg.solve(covariance[np.ix_(~out, ~out)], (targets - arrays["mean"])[~out])
        direct.append(covariance[np.ix_(out, ~out)] @ inner + arrays["mean"])
    # Each row by the process whose hyperparameters it did not choose.
    assert np.isclose(unseen[out], direct, atol=1e-4).any(axis=0).all()


def test_rough_process_sees_steps_that_a_smooth_one_blurs():
    rng = np.random.default_rng(0)
    inputs = rng.uniform(-2, 2, size=(300, 3))
    targets = (
        np.sign(inputs[:, :1]) + np.sign(inputs[:, 1:2] - 1) + 0.05 * rng.normal(size=(300, 1))
    )
    sample = Sample(inputs, targets, np.arange(300) % 5, rng, ExpertsConfig())
    errors = [((EXPERTS[name][0](sample)[1] - targets) ** 2).mean() for name in ("smooth", "rough")]
    assert errors[1] < 0.8 * errors[0]


def test_many_columns_choose_their_inputs_and_are_judged_by_others(monkeypatch):
    for name, value in (("MAX_INPUTS", 8), ("MAX_ALONE", 10), ("N_LOOKS", 4)):
        monkeypatch.setattr(f"remasker.expert_fitting.{name}", value)
    monkeypatch.setattr("remasker.stacking.MAX_INPUTS", 8)
    rng = np.random.default_rng(0)
    values = rng.normal(size=(100, 2)) @ rng.normal(size=(2, 24)) + 0.3 * rng.normal(size=(100, 24))
    values[:, :12] = rng.normal(size=(100, 12))  # half of them nothing but noise
    observed = rng.random(values.shape) < 0.8
    values = np.where(observed, values, 0).astype(np.float32)
    table = EncodedTable(values=values, observed=observed, n_categories=(0,) * 24)
    hidden_together = []

    def predict(values, visible):
        return np.zeros(values.shape)

    def honest(values, visible, rows):
        hidden_together.append((~visible).all(axis=0).sum())
        return np.zeros(values.shape)

    config = ExpertsConfig(experts=("ridge",))
    experts = fit_experts(table, predict, honest=honest, config=config)
    assert hidden_together == [6] * 4
    assert all(len(stack.chosen) == 8 for stack in experts.rounds[0])
    errors = np.array([record["error"] for record in experts.weights_table()])
    assert errors[:12].mean() > 0.95  # noise is not mistaken for knowledge
    assert errors[12:].mean() < 0.5
    again = Experts.from_tensors(*experts.to_tensors())
    base = predict(table.values, table.observed)
    np.testing.assert_array_equal(experts.impute(table, base), again.impute(table, base))


def test_chosen_inputs_and_several_rounds(monkeypatch):
    """Rows that chose the inputs do not judge the stack, but the next round needs them too."""
    for module in ("expert_fitting", "stacking"):
        monkeypatch.setattr(f"remasker.{module}.MAX_INPUTS", 4)
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(150, 8))
    truth[:, :4] = rng.normal(size=(150, 1)) + 0.3 * truth[:, :4]
    observed = np.ones(truth.shape, dtype=bool)
    observed[:, :4] = rng.random((150, 4)) < 0.7
    values = np.where(observed, truth, 0).astype(np.float32)
    table = EncodedTable(values=values, observed=observed, n_categories=(0,) * 8)
    experts = fit_experts(table, None, config=SMALL)
    assert len(experts.rounds) == 3
    completed = experts.impute(table, None)
    for j in range(4):
        gaps = ~observed[:, j]
        assert ((completed - truth)[gaps, j] ** 2).mean() < 0.3 * truth[:, j].var()


@pytest.mark.parametrize("seed", range(4))
def test_few_rows_of_many_inputs_are_enough_to_choose_and_to_judge(seed):
    """The eight rows of one of these columns have come into hardly more than one fold."""
    rng = np.random.default_rng(seed)
    observed = rng.permuted(np.tile(np.arange(12) >= 4, (120, 1)), axis=1).T
    values = np.where(observed, rng.normal(size=observed.shape), 0).astype(np.float32)
    table = EncodedTable(values=values, observed=observed, n_categories=(0,) * 120)
    experts = fit_experts(table, None, config=ExpertsConfig(experts=("ridge",)))
    assert np.isfinite(experts.complete(table, None)).all()
    assert np.isfinite([record["error"] for record in experts.weights_table()]).all()


def test_the_last_digits_of_the_first_stage_are_no_knowledge():
    """Rows alike but for rounding errors: trees and nearest rows would tell them apart."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(120, 3)).astype(np.float32)
    observed = np.ones(truth.shape, dtype=bool)
    truth[:, 1:] = truth[:, :1] + 0.1 * truth[:, 1:]
    observed[MIN_OBSERVED - 1 :, 1:] = False  # so few cells are left to the first stage
    observed[60:90, 0] = False
    table = EncodedTable(
        values=np.where(observed, truth, 0), observed=observed, n_categories=(0, 0, 0)
    )

    def predict(values, visible):
        return np.tile(values[:, :1], 3) + 1e-7 * rng.normal(size=values.shape)

    experts = fit_experts(table, predict, config=SMALL)
    asked = table.hide(np.ones(truth.shape, dtype=bool))
    base = predict(asked.values, asked.observed)
    assert np.ptp(experts.complete(asked, base)[:, 0]) < 1e-3


def test_few_rows_leave_the_word_to_all_who_are_worth_it():
    rng = np.random.default_rng(0)
    errors = {0.0: 0.0, ExpertsConfig.evenness: 0.0}
    for _ in range(100):
        truth = rng.normal(size=(1012, 1))
        common = 0.5 * rng.normal(size=truth.shape)  # experts err alike
        said = truth + common + 0.2 * rng.normal(size=(7, *truth.shape))
        for evenness in errors:
            weights = stack_weights(said[:, :12], truth[:12], ExpertsConfig.shrinkage, evenness)
            rest = np.tensordot(weights, said[:, 12:], axes=1)
            errors[evenness] += float(((rest - truth[12:]) ** 2).mean())
    assert errors[ExpertsConfig.evenness] < 0.99 * errors[0.0]


def test_an_expert_that_is_never_wrong_has_the_word_alone():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(20, 1))
    said = np.stack([truth + 0.3 * rng.normal(size=truth.shape), truth])
    assert stack_weights(said, truth, 5.0, 60.0) == pytest.approx([0.0, 1.0], abs=1e-6)


def test_experts_that_know_nothing_get_next_to_nothing():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(300, 1))
    said = rng.normal(size=(6, *truth.shape))
    plain, even = (stack_weights(said, truth, 5.0, evenness) for evenness in (0.0, 60.0))
    assert even.sum() < 0.25
    assert np.allclose(even, plain)  # nobody is better than the mean: nobody is preferred
