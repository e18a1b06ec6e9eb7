from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remasker.errors import InvalidConfigError, InvalidTableError
from remasker.metrics import (
    accuracy,
    auroc,
    cka,
    pairwise_mutual_information,
    protocol_scale,
    r2,
    rmse,
    wasserstein,
)

BENCH = Path(__file__).parents[2] / "shared" / "bench"

Score = Callable[[pd.DataFrame, pd.DataFrame, np.ndarray], float]

SCORES: dict[str, Score] = {
    "rmse": rmse,
    "rmse numeric": lambda *tables: rmse(*tables, convention="numeric"),
    "rmse standardised": lambda *tables: rmse(*tables, convention="standardised"),
    "wasserstein": wasserstein,
    "wasserstein hidden": lambda *tables: wasserstein(*tables, convention="hidden"),
    "r2": r2,
    "accuracy": accuracy,
}


def example() -> tuple[pd.DataFrame, pd.DataFrame, np.ndarray]:
    """Five rows small enough to score by hand; the last three are hidden in every column."""
    truth = pd.DataFrame(
        {
            "age": [20, 40, 20, 30, 40],  # scaled 0, 1, 0, .5, 1
            "size": pd.Categorical(["S", "L", "S", "M", "L"], ["S", "M", "L"], ordered=True),
            "city": ["Bern", "Rome", "Bern", "Rome", "Bern"],  # scaled 0, 1, 0, 1, 0
            "flag": [False, True, True, False, True],
        }
    )
    imputed = pd.DataFrame(
        {
            "age": [20.0, 40.0, 25.0, 30.0, 30.0],  # errors .25, 0, -.5
            "size": ["S", "L", "M", "M", "L"],  # errors .5, 0, 0
            "city": ["Bern", "Rome", "Rome", "Rome", "Bern"],  # errors 1, 0, 0
            "flag": [False, True, True, False, True],  # no errors
        }
    )
    hidden = np.zeros((5, 4), dtype=bool)
    hidden[2:] = True
    return truth, imputed, hidden


# --- by hand --------------------------------------------------------------------------------


def test_rmse_by_hand() -> None:
    truth, imputed, hidden = example()
    squares = 0.25**2 + 0.5**2
    assert rmse(truth, imputed, hidden) == pytest.approx(np.sqrt((squares + 0.25 + 1) / 12))
    assert rmse(truth, imputed, hidden, "numeric") == pytest.approx(np.sqrt(squares / 3))


def test_standardised_rmse_by_hand() -> None:
    truth, imputed, hidden = example()
    deviations = [np.std([0, 1, 0, 0.5, 1]), np.std([0, 1, 0, 0.5, 1]), np.std([0, 1, 0, 1, 0])]
    errors = [np.sqrt((0.25**2 + 0.5**2) / 3), np.sqrt(0.25 / 3), np.sqrt(1 / 3)]
    expected = sum(e / d for e, d in zip(errors, deviations, strict=True)) / 4
    assert rmse(truth, imputed, hidden, "standardised") == pytest.approx(expected)


def test_columns_without_hidden_cells_do_not_dilute_the_standardised_scores() -> None:
    truth, imputed, hidden = example()
    hidden[:, 1:] = False
    only = (truth[["age"]], imputed[["age"]], hidden[:, :1])
    for name in ("rmse standardised", "wasserstein hidden", "r2"):
        assert SCORES[name](truth, imputed, hidden) == pytest.approx(SCORES[name](*only))


def test_wasserstein_by_hand() -> None:
    truth, imputed, hidden = example()
    # Sorted, rows differ by: age .25 and .5, size .5, city 1; over all five rows.
    assert wasserstein(truth, imputed) == pytest.approx((0.25 + 0.5 + 0.5 + 1) / 5)
    assert wasserstein(truth, imputed, hidden) == wasserstein(truth, imputed)
    spread, city = np.std([0, 1, 0, 0.5, 1]), np.std([0, 1, 0, 1, 0])
    expected = (0.75 / 3 / spread + 0.5 / 3 / spread + 1 / 3 / city) / 4
    assert wasserstein(truth, imputed, hidden, "hidden") == pytest.approx(expected)


def test_r2_by_hand() -> None:
    truth, imputed, hidden = example()
    # age: (0 .5 1) against (.25 .5 .5); size: (0 .5 1) against (.5 .5 1); city: (0 1 0) and (1 1 0)
    squares = [
        np.corrcoef(*pair)[0, 1] ** 2
        for pair in (
            ([0, 0.5, 1], [0.25, 0.5, 0.5]),
            ([0, 0.5, 1], [0.5, 0.5, 1]),
            ([0, 1, 0], [1, 1, 0]),
        )
    ]
    assert r2(truth, imputed, hidden) == pytest.approx((sum(squares) + 1) / 4)


def test_r2_of_constants() -> None:
    truth = np.array([[0.1, 5.0], [0.3, 5.0], [0.7, 5.0]])
    hidden = np.full(truth.shape, True)
    mean_imputed = np.full(truth.shape, 0.1 + 0.2)
    assert r2(truth, mean_imputed, hidden) == 0.0
    with pytest.raises(InvalidTableError, match="no column has two hidden cells with different"):
        r2(truth[:, 1:], truth[:, 1:], hidden[:, 1:])


def test_accuracy_by_hand() -> None:
    assert accuracy(*example()) == pytest.approx(7 / 9)


def test_cka_by_hand() -> None:
    a, b = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([[0.0], [1.0], [0.0], [1.0]])
    assert cka(a, b) == pytest.approx(np.corrcoef(a[:, 0], b[:, 0])[0, 1] ** 2)


def test_scale_by_hand() -> None:
    truth, _, _ = example()
    expected = [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1], [0.5, 0.5, 1, 0], [1, 1, 0, 1]]
    np.testing.assert_array_equal(protocol_scale(truth), expected)


def test_scale_of_dates_gaps_and_constants() -> None:
    table = pd.DataFrame(
        {
            "day": pd.to_datetime(["2024-01-01", None, "2024-01-03", "2024-01-05"]).tz_localize(
                "UTC"
            ),
            "span": pd.to_timedelta([1, 2, None, 5], unit="D"),
            "same": [3, 3, 3, 3],
            "none": [np.nan] * 4,
            "flag": pd.Categorical([True, False, None, True]),
        }
    )
    nan = np.nan
    expected = [
        [0, 0, 0, nan, 1],
        [nan, 0.25, 0, nan, 0],
        [0.5, nan, 0, nan, nan],
        [1, 1, 0, nan, 1],
    ]
    np.testing.assert_array_equal(protocol_scale(table), expected)


# --- properties -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCORES)
def test_perfect_imputation(name: str) -> None:
    truth, _, hidden = example()
    best = 1.0 if name in ("r2", "accuracy") else 0.0
    assert SCORES[name](truth, truth, hidden) == pytest.approx(best)


@pytest.mark.parametrize("name", SCORES)
def test_neither_units_nor_row_order_nor_index_matter(name: str) -> None:
    truth, imputed, hidden = example()
    score = SCORES[name](truth, imputed, hidden)
    order = [3, 1, 4, 0, 2]
    shuffled = (truth.iloc[order], imputed.iloc[order].reset_index(drop=True), hidden[order])
    assert SCORES[name](*shuffled) == pytest.approx(score)
    pounds = (truth.assign(age=truth.age * 7 - 3), imputed.assign(age=imputed.age * 7 - 3), hidden)
    assert SCORES[name](*pounds) == pytest.approx(score)


@pytest.mark.parametrize("name", set(SCORES) - {"accuracy"})
def test_arrays_score_like_frames(name: str) -> None:
    truth, imputed, hidden = example()
    columns = [0]
    frames = (truth.iloc[:, columns], imputed.iloc[:, columns], hidden[:, columns])
    arrays = (frames[0].to_numpy(), frames[1].to_numpy(), frames[2])
    score = SCORES[name](*frames)
    assert SCORES[name](*arrays) == pytest.approx(score)
    assert SCORES[name](frames[0], arrays[1], pd.DataFrame(frames[2])) == pytest.approx(score)


def test_an_object_array_fills_a_mixed_frame() -> None:
    truth, imputed, hidden = example()
    assert rmse(truth, imputed.to_numpy(), hidden) == rmse(truth, imputed, hidden)


def test_natural_gaps_in_the_truth_are_left_out() -> None:
    truth, imputed, hidden = example()
    more_rows = pd.concat([truth, truth.iloc[:1]], ignore_index=True)
    more_rows.loc[5, ["age", "city"]] = None
    more_rows["size"] = more_rows["size"].where(more_rows.index < 5)
    filled = pd.concat([imputed, imputed.iloc[:1]], ignore_index=True)
    shown = np.vstack([hidden, np.zeros((1, 4), dtype=bool)])
    assert rmse(more_rows, filled, shown) == pytest.approx(rmse(truth, imputed, hidden))
    assert wasserstein(more_rows, filled) == pytest.approx(wasserstein(truth, imputed))
    shown[5, 0] = True
    with pytest.raises(InvalidTableError) as error:
        rmse(more_rows, filled, shown)
    assert str(error.value) == (
        "truth: column 'age' has no value in row 5, which is hidden; "
        "hide only cells whose true value is known"
    )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), widths=st.tuples(st.integers(1, 6), st.integers(1, 6)))
def test_cka_is_symmetric_bounded_and_blind_to_rotation(seed: int, widths: tuple[int, int]) -> None:
    generator = np.random.default_rng(seed)
    a, b = (generator.normal(size=(30, width)) for width in widths)
    rotation = np.linalg.qr(generator.normal(size=(widths[0], widths[0])))[0]
    assert 0 <= cka(a, b) <= 1
    assert cka(a, b) == pytest.approx(cka(b, a))
    assert cka(3 * a @ rotation + 5, b) == pytest.approx(cka(a, b))


# --- AUROC and mutual information -----------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_auroc_of_signal_and_noise() -> None:
    generator = np.random.default_rng(0)
    target = np.repeat(["a", "b", "c"], 100)
    noise = generator.normal(size=(300, 3))
    assert auroc(noise, target) == pytest.approx(0.5, abs=0.1)
    informed = pd.DataFrame({"noise": noise[:, 0], "clue": target})
    assert auroc(informed, pd.Series(target, dtype="category")) > 0.99
    assert auroc(noise, target) == auroc(noise, target)


def test_auroc_of_two_numeric_classes_does_not_depend_on_their_names() -> None:
    generator = np.random.default_rng(1)
    target = np.repeat([0, 1], 60)
    table = generator.normal(size=(120, 2)) + target[:, None]
    score = auroc(table, target)
    assert 0.75 < score < 0.98
    assert auroc(table, target.astype(bool)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ([0, 1], "target: expected 4 values, got 2"),
        ([0, 1, None, 1], "target: some labels are missing; drop those rows first"),
        ([1, 1, 1, 1], "target: expected at least two classes, got one"),
        (
            [0, 0, 0, 1],
            "target: class '1' has a single row, so no fold can both learn and predict it; "
            "drop that row, or use a regression score for numbers",
        ),
    ],
)
def test_impossible_targets(target: list[int], message: str) -> None:
    with pytest.raises(InvalidTableError) as error:
        auroc(np.zeros((4, 2)), target)
    assert str(error.value) == message


def test_mutual_information_of_the_papers_diabetes() -> None:
    from sklearn.datasets import load_diabetes

    table = load_diabetes().data
    assert pairwise_mutual_information(table) == pytest.approx(0.1106, abs=1e-3)


@pytest.mark.filterwarnings("error")
def test_mutual_information_of_every_kind_of_pair() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=2000)
    coin = np.where(x > 0, "heads", "tails")
    pairs = {
        "numbers": pd.DataFrame({"x": x, "y": x + generator.normal(size=2000)}),
        "mixed": pd.DataFrame({"coin": coin, "x": x}),
        "mixed, the other way": pd.DataFrame({"x": x, "coin": coin}),
        "categories": pd.DataFrame({"coin": coin, "flag": x > 0}),
        "many categories": pd.DataFrame({"third": np.digitize(x, [-1, 0]).astype(str), "c": coin}),
    }
    expected = {"numbers": np.log(2) / 2}
    for name, table in pairs.items():
        found = pairwise_mutual_information(table)
        assert found == pytest.approx(expected.get(name, np.log(2)), abs=0.05), name
        gaps = table.mask(generator.random(table.shape) < 0.3)
        assert pairwise_mutual_information(gaps) == pytest.approx(found, abs=0.08), name


def test_mutual_information_needs_two_columns() -> None:
    with pytest.raises(InvalidTableError) as error:
        pairwise_mutual_information(np.zeros((9, 1)))
    assert str(error.value) == (
        "table: expected two columns that share at least 4 rows without gaps, "
        "got a table of shape (9, 1)"
    )


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCORES)
def test_gaps_left_in_the_imputed_table(name: str) -> None:
    truth, imputed, hidden = example()
    imputed.loc[[1, 3], "city"] = None
    with pytest.raises(InvalidTableError) as error:
        SCORES[name](truth, imputed, hidden)
    assert str(error.value) == (
        "imputed: column 'city' still has 2 missing values, the first in row 1; fill them first"
    )


def test_mismatches() -> None:
    truth, imputed, hidden = example()
    cases: list[tuple[Callable[[], float], str]] = [
        (
            lambda: rmse(truth, imputed.iloc[1:], hidden),
            "imputed: expected the truth's shape (5, 4), got (4, 4)",
        ),
        (
            lambda: rmse(truth, imputed, hidden[:, :1]),
            "hidden: expected the truth's shape (5, 4), got (5, 1)",
        ),
        (
            lambda: rmse(truth, imputed, np.zeros_like(hidden)),
            "hidden: no cell is hidden, so there is nothing to score",
        ),
        (
            lambda: rmse(truth, imputed[["size", "age", "city", "flag"]], hidden),
            "imputed: expected column 'age', got 'size'; bring the columns into the truth's order",
        ),
        (
            lambda: rmse(truth, imputed.assign(city="Paris"), hidden),
            "column 'city': 'Paris' in row 0 is not one of the truth's 2 categories",
        ),
        (
            lambda: rmse(truth, imputed.assign(age="old"), hidden),
            "column 'age': expected values of the truth's dtype int64, got str",
        ),
        (
            lambda: rmse(truth[["city"]], imputed[["city"]], hidden[:, :1], "numeric"),
            "hidden: no cell of a numeric column is hidden; use convention='protocol'",
        ),
        (
            lambda: accuracy(truth[["age"]], imputed[["age"]], hidden[:, :1]),
            "hidden: no cell of a categorical column is hidden; "
            "give categories the dtype 'category' or use rmse",
        ),
        (
            lambda: cka(np.zeros((3, 2)), np.zeros((4, 2))),
            "cka: expected two matrices with the same number of rows, got shapes (3, 2) and (4, 2)",
        ),
        (
            lambda: cka(np.zeros((3, 2)), np.eye(3)),
            "cka: all rows of a representation are equal or undefined",
        ),
    ]
    for call, message in cases:
        with pytest.raises(InvalidTableError) as error:
            call()
        assert str(error.value).replace("got object", "got str") == message


def test_unknown_conventions() -> None:
    truth, imputed, hidden = example()
    with pytest.raises(InvalidConfigError) as error:
        rmse(truth, imputed, hidden, "standardized")
    assert str(error.value) == (
        "convention: expected one of 'protocol', 'numeric', 'standardised', got 'standardized'; "
        "did you mean 'standardised'?"
    )
    with pytest.raises(InvalidConfigError) as error:
        wasserstein(truth, imputed, convention="hidden")
    assert str(error.value) == "hidden: convention 'hidden' needs the matrix of hidden cells"


# --- beside the published baselines ---------------------------------------------------------


@pytest.mark.skipif(
    not (BENCH / "masks.npz").exists() or not (BENCH / "baselines.csv").exists(),
    reason=f"no frozen masks and baselines in {BENCH}",
)
def test_mean_imputation_scores_as_in_the_baselines() -> None:
    baselines = pd.read_csv(BENCH / "baselines.csv").query("method == 'mean'")
    baselines = baselines.astype({"rmse": float, "wd": float})  # other methods say "failed"
    assert len(baselines) >= 48
    with np.load(BENCH / "masks.npz") as frozen:
        for row in baselines.itertuples():
            truth = frozen[f"{row.dataset}|X"].astype(float)
            packed = frozen[f"{row.dataset}|{row.mechanism}|{row.ratio}|{row.seed}"]
            hidden = np.unpackbits(packed)[: truth.size].reshape(truth.shape).astype(bool)
            means = np.nanmean(np.where(hidden, np.nan, truth), axis=0)
            imputed = np.where(hidden, means, truth)
            assert rmse(truth, imputed, hidden) == pytest.approx(row.rmse, abs=1e-4), row
            assert wasserstein(truth, imputed) == pytest.approx(row.wd, abs=1e-4), row
