from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remasker.errors import InvalidConfigError, InvalidTableError
from remasker.missingness import MECHANISMS, missing_mask, simulate_missing

MASKS = Path(__file__).parents[2] / "shared" / "bench" / "masks.npz"

needs_frozen_masks = pytest.mark.skipif(not MASKS.exists(), reason=f"{MASKS} is not here")


def numbers(n_rows: int = 3000, n_columns: int = 12, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).gamma(2.0, size=(n_rows, n_columns))


def mixed(n_rows: int = 400) -> pd.DataFrame:
    generator = np.random.default_rng(1)
    return pd.DataFrame(
        {
            "whole": generator.integers(0, 9, n_rows),
            "large": generator.integers(2**60, 2**61, n_rows),
            "unsigned": generator.integers(2**60, 2**61, n_rows).astype(np.uint64),
            "nullable": pd.array(generator.integers(0, 9, n_rows), dtype="Int64"),
            "single": generator.normal(size=n_rows).astype(np.float32),
            "flag": generator.random(n_rows) < 0.5,
            "size": pd.Categorical(
                generator.choice(["S", "M", "L"], n_rows), ["S", "M", "L"], ordered=True
            ),
            "city": generator.choice(["Bern", "Rome"], n_rows),
            "day": pd.Timestamp("2024-01-01") + pd.to_timedelta(np.arange(n_rows), unit="D"),
            "zoned": pd.Timestamp("2024-01-01", tz="Asia/Seoul")
            + pd.to_timedelta(np.arange(n_rows), unit="h"),
            "span": pd.to_timedelta(np.arange(n_rows), unit="min"),
            "anything": pd.Series([1, "one", None, 2.5] * (n_rows // 4), dtype=object),
        }
    )


def slope_of_hidden_on(inputs: np.ndarray, hidden: np.ndarray) -> float:
    """Standard deviation of the logit that best explains `hidden` from `inputs`."""
    from sklearn.linear_model import LogisticRegression

    scaled = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)
    return float(LogisticRegression(C=1e4).fit(scaled, hidden).decision_function(scaled).std())


# --- the mechanisms -------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    mechanism=st.sampled_from(MECHANISMS),
    ratio=st.floats(0.02, 0.98),
    n_columns=st.integers(2, 14),
    seed=st.integers(0, 2**32 - 1),
)
def test_rates_and_number_of_columns(
    mechanism: str, ratio: float, n_columns: int, seed: int
) -> None:
    table = numbers(n_rows=1500, n_columns=n_columns)
    hidden = missing_mask(table, mechanism, ratio, random_state=seed)
    n_chosen = min(n_columns, 8)
    touched = hidden.any(axis=0)
    assert touched.sum() == (n_chosen - n_chosen // 2 if mechanism == "MAR" else n_chosen)
    # Six standard deviations of a binomial rate; a logistic model only makes it narrower.
    tolerance = 6 * np.sqrt(ratio * (1 - ratio) / len(table))
    assert np.abs(hidden[:, touched].mean(axis=0) - ratio).max() < tolerance


def test_mar_gaps_depend_on_the_complete_columns_with_unit_variance() -> None:
    table = numbers(20000, 6)
    hidden = missing_mask(table, "MAR")
    outputs = hidden.any(axis=0)
    assert outputs.sum() == 3
    for position in np.flatnonzero(outputs):
        assert 0.9 < slope_of_hidden_on(table[:, ~outputs], hidden[:, position]) < 1.1


def test_mnar_gaps_in_the_inputs_depend_on_nothing() -> None:
    table = numbers(20000, 6)
    inputs = ~missing_mask(table, "MAR").any(axis=0)
    hidden = missing_mask(table, "MNAR")
    for position in np.flatnonzero(inputs):
        assert slope_of_hidden_on(table, hidden[:, position]) < 0.1


@pytest.mark.parametrize("seed", range(8))
def test_large_inputs_mean_more_gaps_because_weights_are_positive(seed: int) -> None:
    table = numbers(5000, 2)
    hidden = missing_mask(table, "MAR", random_state=seed)
    output = int(hidden.any(axis=0).argmax())
    inputs = table[:, 1 - output]
    assert inputs[hidden[:, output]].mean() > inputs[~hidden[:, output]].mean() + 0.5


def test_mnar_is_mar_with_the_inputs_hidden_too() -> None:
    table = numbers()
    mar, mnar = missing_mask(table, "MAR"), missing_mask(table, "MNAR")
    outputs = mar.any(axis=0)
    np.testing.assert_array_equal(mar[:, outputs], mnar[:, outputs])
    assert mnar.any(axis=0).sum() == 2 * outputs.sum() == 8


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_same_seed_same_gaps(mechanism: str) -> None:
    table = numbers(500)
    first = missing_mask(table, mechanism, random_state=7)
    np.testing.assert_array_equal(first, missing_mask(table, mechanism, random_state=7))
    assert (first != missing_mask(table, mechanism, random_state=8)).any()


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("change", [lambda t: 7 * t - 3, lambda t: t.astype(np.float32)])
def test_units_do_not_matter(mechanism: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    table = np.round(numbers(500), 2)
    same = missing_mask(table, mechanism) == missing_mask(change(table), mechanism)
    assert same.mean() > 0.999


# --- which columns --------------------------------------------------------------------------


def test_named_columns_are_the_chosen_ones_whatever_their_order_and_number() -> None:
    table = pd.DataFrame(numbers(), columns=list("abcdefghijkl"))
    named = list("abcdefghij")
    hidden = missing_mask(table, "MCAR", columns=named, max_columns=2)
    assert list(table.columns[hidden.any(axis=0)]) == named
    np.testing.assert_array_equal(
        missing_mask(table, "MAR", columns=named), missing_mask(table, "MAR", columns=named[::-1])
    )


def test_array_columns_are_positions() -> None:
    hidden = missing_mask(numbers(), "MCAR", columns=[3, 5])
    assert np.flatnonzero(hidden.any(axis=0)).tolist() == [3, 5]


def test_no_limit() -> None:
    assert missing_mask(numbers(), "MCAR", max_columns=None).any(axis=0).all()


def test_one_named_column_depends_on_the_others_under_mar() -> None:
    table = pd.DataFrame(numbers(20000, 4), columns=list("abcd"))
    hidden = missing_mask(table, "MAR", columns="c")
    assert hidden.any(axis=0).tolist() == [False, False, True, False]
    others = table[["a", "b", "d"]].to_numpy()
    assert 0.9 < slope_of_hidden_on(others, hidden[:, 2]) < 1.1
    assert slope_of_hidden_on(table[["c"]].to_numpy(), hidden[:, 2]) < 0.1


def test_one_column_depends_on_itself_under_mnar() -> None:
    table = numbers(20000, 1)
    hidden = missing_mask(table, "MNAR")
    assert abs(hidden.mean() - 0.3) < 0.02
    assert 0.9 < slope_of_hidden_on(table, hidden[:, 0]) < 1.1


def test_one_column_has_nothing_to_depend_on_under_mar() -> None:
    with pytest.raises(InvalidTableError) as error:
        missing_mask(numbers(50, 1), "MAR")
    assert str(error.value) == (
        "table: MAR needs a second column for the gaps to depend on, got one column; "
        "use mechanism='MCAR' or 'MNAR'"
    )


# --- any kind of table ----------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_kind_of_column(mechanism: str) -> None:
    table = mixed()
    before = table.copy(deep=True)
    incomplete = simulate_missing(table, mechanism, max_columns=None)
    hidden = missing_mask(table, mechanism, max_columns=None)
    pd.testing.assert_frame_equal(table, before)
    np.testing.assert_array_equal(incomplete.isna().to_numpy(), hidden | table.isna().to_numpy())
    assert incomplete.index.equals(table.index)
    for name in table:
        kept = incomplete[name].notna()
        assert (incomplete[name][kept] == table[name][kept]).all(), name


def test_dtypes_are_kept_where_a_gap_fits() -> None:
    incomplete = simulate_missing(mixed(), "MCAR", max_columns=None)
    changed = {"whole": "float64", "large": "Int64", "unsigned": "UInt64", "flag": "boolean"}
    expected = {name: changed.get(name, dtype) for name, dtype in mixed().dtypes.items()}
    assert incomplete.dtypes.to_dict() == expected
    untouched = simulate_missing(mixed(), "MCAR", columns=["single"])
    assert untouched.dtypes.to_dict() == mixed().dtypes.to_dict()


@pytest.mark.parametrize(
    ("given_dtype", "expected"),
    [("float64", "float64"), ("float32", "float32"), ("int64", "float64"), ("bool", "float32")],
)
def test_arrays_come_back_as_floats(given_dtype: str, expected: str) -> None:
    table = np.arange(400).reshape(100, 4).astype(given_dtype)
    incomplete = simulate_missing(table, "MCAR")
    hidden = missing_mask(table, "MCAR")
    assert incomplete.dtype == expected
    np.testing.assert_array_equal(np.isnan(incomplete), hidden)
    np.testing.assert_array_equal(incomplete[~hidden], table[~hidden])


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_cells_already_missing_stay_so_and_do_not_count(mechanism: str) -> None:
    table = numbers(20000, 6)
    gaps = np.random.default_rng(5).random(table.shape) < 0.4
    table[gaps] = np.nan
    hidden = missing_mask(table, mechanism, random_state=2)
    assert not (hidden & gaps).any()
    assert np.isnan(simulate_missing(table, mechanism, random_state=2))[gaps].all()
    for position in np.flatnonzero(hidden.any(axis=0)):
        rate = hidden[:, position][~gaps[:, position]].mean()
        assert abs(rate - 0.3) < 0.03


def test_rate_is_that_of_the_values_even_where_gaps_follow_the_input() -> None:
    table = pd.DataFrame(numbers(20000, 2), columns=["age", "income"])
    present = table["income"] < table["income"].median()
    table["age"] = table["age"].where(present)
    hidden = missing_mask(table, "MAR", columns="age")[:, 0]
    assert abs(hidden[present].mean() - 0.3) < 0.02


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_constant_and_empty_columns(mechanism: str) -> None:
    table = np.column_stack([np.ones(2000), np.full(2000, np.nan), np.zeros(2000)])
    hidden = missing_mask(table, mechanism, ratio=0.5)
    assert not hidden[:, 1].any()
    touched = [position for position in (0, 2) if hidden[:, position].any()]
    assert all(abs(hidden[:, position].mean() - 0.5) < 0.1 for position in touched)


def test_a_single_row() -> None:
    assert missing_mask(np.array([[1.0, 2.0, 3.0]]), "MNAR").shape == (1, 3)


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        (
            {"mechanism": "mar"},
            "mechanism: expected one of 'MCAR', 'MAR', 'MNAR', got 'mar'; did you mean 'MAR'?",
        ),
        ({"ratio": 1.0}, "ratio: expected a number between 0 and 1, got 1.0"),
        ({"ratio": 0}, "ratio: expected a number between 0 and 1, got 0"),
        ({"ratio": float("nan")}, "ratio: expected a number between 0 and 1, got nan"),
        ({"max_columns": 0}, "max_columns: expected at least 1 or None, got 0"),
        (
            {"columns": ["weight", "agee"]},
            "columns: the table has no column 'agee'; did you mean 'age'?",
        ),
        ({"columns": ["age", "age"]}, "columns: 'age' is named twice"),
        ({"columns": []}, "columns: expected at least one column, got none"),
    ],
)
@pytest.mark.parametrize("function", [missing_mask, simulate_missing])
def test_impossible_settings(
    function: Callable[..., object], settings_: dict[str, object], message: str
) -> None:
    table = pd.DataFrame({"age": [1.0, 2.0], "weight": [3.0, 4.0]})
    with pytest.raises(InvalidConfigError) as error:
        function(table, **settings_)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.zeros((0, 3)), "table: expected rows and columns, got shape (0, 3)"),
        (np.zeros(3), "table: expected rows and columns, got an array of shape (3,)"),
        (
            np.array([["a", "b"]]),
            "table: expected an array of numbers, got dtype <U1; "
            "pass a DataFrame for other kinds of columns",
        ),
        (
            pd.DataFrame({"age": [1.0, np.inf]}),
            "column 'age': infinite value in row 1; replace it with a number or a gap",
        ),
        (
            pd.DataFrame([[1, 2]], columns=["age", "age"]),
            "table: column 'age' occurs twice; rename one",
        ),
    ],
)
def test_impossible_tables(table: np.ndarray | pd.DataFrame, message: str) -> None:
    with pytest.raises(InvalidTableError) as error:
        missing_mask(table, "MCAR")
    assert str(error.value) == message


# --- beside HyperImpute's simulator ---------------------------------------------------------


@needs_frozen_masks
@pytest.mark.parametrize(
    ("mechanism", "ratio"),
    [("MAR", 0.1), ("MAR", 0.3), ("MAR", 0.7), ("MCAR", 0.3), ("MNAR", 0.3)],
)
def test_same_rates_and_structure_as_the_frozen_masks(mechanism: str, ratio: float) -> None:
    with np.load(MASKS) as frozen:
        for key in (key for key in frozen if key.endswith("|X")):
            table = frozen[key]
            packed = frozen[f"{key[:-2]}|{mechanism}|{ratio}|0"]
            theirs = np.unpackbits(packed)[: table.size].reshape(table.shape).astype(bool)
            ours = missing_mask(table, mechanism, ratio)
            assert ours.any(axis=0).sum() == theirs.any(axis=0).sum(), key
            rates = [mask[:, mask.any(axis=0)].mean() for mask in (ours, theirs)]
            tolerance = 6 * np.sqrt(ratio * (1 - ratio) / (4 * len(table)))
            assert abs(rates[0] - rates[1]) < tolerance, key


@needs_frozen_masks
def test_same_strength_of_dependence_as_the_frozen_masks() -> None:
    with np.load(MASKS) as frozen:
        table = frozen["california|X"]
        packed = frozen["california|MAR|0.3|0"]
    theirs = np.unpackbits(packed)[: table.size].reshape(table.shape).astype(bool)
    for mask in (theirs, missing_mask(table, "MAR", 0.3)):
        outputs = mask.any(axis=0)
        for position in np.flatnonzero(outputs):
            assert 0.9 < slope_of_hidden_on(table[:, ~outputs], mask[:, position]) < 1.1
