"""The written policy of remasker/table.py, case by case, with its exact messages."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from remasker import InvalidConfigError, InvalidTableError, ReMaskerImputer

TINY: dict[str, Any] = {
    "width": 8,
    "heads": 2,
    "encoder_depth": 1,
    "decoder_depth": 1,
    "epochs": 1,
    "device": "cpu",
    "random_state": 0,
}


def complete(frame: pd.DataFrame, **settings: Any) -> tuple[pd.DataFrame, list[str]]:
    """The completed table and what was said about it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        completed = ReMaskerImputer(**{**TINY, **settings}).fit_transform(frame)
    return completed, [str(w.message) for w in caught]


def refusal(
    frame: pd.DataFrame, error: type[Exception] = InvalidTableError, **settings: Any
) -> str:
    with pytest.raises(error) as raised:
        ReMaskerImputer(**{**TINY, **settings}).fit(frame)
    return str(raised.value)


def gaps_in(n_rows: int = 12, every: int = 3) -> np.ndarray:
    return np.arange(n_rows) % every == 0


def test_nothing_missing() -> None:
    frame = pd.DataFrame({"x": [1.5, 2.5, 4.0], "s": ["a", "b", "a"], "n": [1, 2, 3]})
    completed, said = complete(frame)
    pd.testing.assert_frame_equal(completed, frame)
    assert completed is not frame
    assert said == []


def test_constant_column() -> None:
    frame = pd.DataFrame({"x": [0.1, 0.1, 0.1, np.nan], "s": ["a", "a", None, "a"], "y": range(4)})
    completed, said = complete(frame)
    assert completed["x"].tolist() == [0.1] * 4
    assert completed["s"].tolist() == ["a"] * 4
    assert said == []


def test_column_without_any_observed_cell() -> None:
    frame = pd.DataFrame({"x": [1.5, np.nan, 3.5], "e": [np.nan] * 3, "o": [None] * 3})
    completed, said = complete(frame)
    assert completed["e"].isna().all()
    assert completed["x"].notna().all()
    assert said == [
        "column 'e', 'o': nothing is observed, so there is nothing to learn from; left missing"
    ]
    dropped, _ = complete(frame, keep_empty_features=False)
    assert dropped.columns.tolist() == ["x"]


def test_only_empty_columns() -> None:
    completed, said = complete(pd.DataFrame({"e": [np.nan, np.nan]}))
    assert completed["e"].isna().all()
    assert len(said) == 1


def test_row_with_nothing_observed() -> None:
    frame = pd.DataFrame({"x": [1.5, np.nan, 3.5], "s": ["a", None, "b"]})
    completed, said = complete(frame)
    assert completed.notna().all(axis=None)
    assert said == []


def test_one_row() -> None:
    completed, said = complete(pd.DataFrame({"x": [1.5], "y": [np.nan]}))
    assert completed["x"].tolist() == [1.5]
    assert said == [
        "column 'y': nothing is observed, so there is nothing to learn from; left missing"
    ]


def test_one_column() -> None:
    completed, said = complete(pd.DataFrame({"x": [1.5, np.nan, 3.5, 4.5]}))
    assert completed["x"].notna().all()
    assert said == []


def test_empty_tables() -> None:
    assert refusal(pd.DataFrame({"x": []})) == (
        "the table has no rows (0 sample(s)) while a minimum of 1 is required."
    )
    assert refusal(pd.DataFrame(index=[0, 1])) == (
        "the table has no columns: 0 feature(s) (shape=(2, 0)) while a minimum of 1 is required."
    )


def test_no_rows_at_transform() -> None:
    imputer = ReMaskerImputer(**TINY).fit(pd.DataFrame({"x": [1.5, 2.5]}))
    assert len(imputer.transform(pd.DataFrame({"x": pd.Series([], dtype="float64")}))) == 0


def test_column_names_that_appear_twice() -> None:
    frame = pd.DataFrame([[1, 2, 3]], columns=["a", "b", "a"])
    assert refusal(frame) == "column name 'a' appears more than once; rename the columns"


def test_infinity() -> None:
    frame = pd.DataFrame({"x": [1.5, np.inf, np.nan]}, index=["r1", "r2", "r3"])
    message = "column 'x': found inf in row 'r2'; replace it with a number or with a missing value"
    assert refusal(frame) == message
    imputer = ReMaskerImputer(**TINY).fit(pd.DataFrame({"x": [1.5, 2.5]}))
    with pytest.raises(InvalidTableError) as raised:
        imputer.transform(frame)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        ([1, "a", None], "int (1) and str ('a')"),
        (["b", 2.5, None], "str ('b') and float (2.5)"),
        ([True, "yes", None], "bool (True) and str ('yes')"),
    ],
)
def test_mixed_types(cells: list[Any], found: str) -> None:
    frame = pd.DataFrame({"x": pd.Series(cells, dtype=object), "y": [1.5, 2.5, 3.5]})
    assert refusal(frame) == (
        f"column 'x': mixes {found}; convert it to one type, or name it in exclude"
    )
    completed, said = complete(frame, exclude=["x"])
    assert completed["x"].tolist() == cells
    assert said == []


def test_free_text_and_identifiers() -> None:
    frame = pd.DataFrame({"id": [f"p-{i}" for i in range(30)], "x": np.arange(30.0)})
    frame.loc[3] = [None, np.nan]
    completed, said = complete(frame)
    assert completed["id"].equals(frame["id"])
    assert completed["x"].notna().all()
    cause = "almost every value is different, so this is free text or an identifier"
    assert said == [
        f"column 'id': {cause}; left as it is (to model it anyway: kinds={{'id': 'category'}})"
    ]
    assert refusal(frame, text="raise") == (
        f"column 'id': {cause}; name it in exclude, or give its kind in kinds"
    )
    modelled, said = complete(frame, kinds={"id": "category"})
    assert modelled["id"].notna().all()
    assert said == []


def test_dtypes_of_no_kind() -> None:
    frame = pd.DataFrame(
        {
            "l": [[1], [2], None],
            "z": [1j, 2j, 3j],
            "x": [1.5, np.nan, 2.5],
        }
    )
    completed, said = complete(frame)
    pd.testing.assert_frame_equal(completed[["l", "z"]], frame[["l", "z"]])
    assert said == [
        f"column {name!r}: cannot model {what}; left as it is (convert it to model it)"
        for name, what in [
            ("l", "dtype object of list"),
            ("z", "dtype complex128"),
        ]
    ]


def test_bands_of_numbers_are_levels(tmp_path: Path) -> None:
    """What `pd.cut` makes, with open ends too, also after the model has been a file."""
    ages = np.linspace(10, 80, 60)
    frame = pd.DataFrame(
        {
            "age": ages,
            "band": pd.cut(ages, [-np.inf, 18, 40, np.inf]),
            "decade": pd.arrays.IntervalArray.from_breaks(np.arange(61.0)),
        }
    )
    frame.loc[::7, "band"] = frame.loc[::5, "decade"] = None
    completed, said = complete(frame)
    assert said == []
    assert completed.notna().all(axis=None)
    pd.testing.assert_series_equal(completed.dtypes, frame.dtypes)
    imputer = ReMaskerImputer(**TINY).fit(frame)
    imputer.save(tmp_path / "model")
    again = ReMaskerImputer.load(tmp_path / "model")
    pd.testing.assert_frame_equal(again.transform(frame), imputer.transform(frame))


def test_sparse_columns_are_seen_and_filled() -> None:
    rng = np.random.default_rng(0)
    weight = pd.Series(np.where(rng.random(80) < 0.3, rng.normal(size=80), 0.0))
    frame = pd.DataFrame(
        {
            "weight": weight.mask(rng.random(80) < 0.2).astype(pd.SparseDtype("float64", 0.0)),
            "rare": (weight > 1).astype(pd.SparseDtype("bool", False)),
            "x": weight + 0.1 * rng.normal(size=80),
        }
    )
    completed, said = complete(frame)
    assert said == []
    assert completed.notna().all(axis=None)
    pd.testing.assert_series_equal(completed.dtypes, frame.dtypes)
    kept = frame["weight"].notna()
    pd.testing.assert_series_equal(completed["weight"][kept], frame["weight"][kept])


def test_bands_of_dates_are_left_alone() -> None:
    days = pd.date_range("2026-01-01", periods=12)
    frame = pd.DataFrame({"week": pd.cut(days, 3), "x": range(12)})
    frame.loc[3, "week"] = None
    completed, said = complete(frame)
    pd.testing.assert_frame_equal(completed, frame)
    assert said == [
        "column 'week': cannot model levels of type Interval; left as it is (convert it to model "
        "it)"
    ]


def test_level_not_seen_in_fit() -> None:
    imputer = ReMaskerImputer(**TINY).fit(pd.DataFrame({"s": ["a", "b"] * 5, "x": range(10)}))
    new = pd.DataFrame({"s": ["a", "NEW", None], "x": [1.0, np.nan, 3.0]})
    completed = imputer.transform(new)
    assert completed["s"].tolist()[:2] == ["a", "NEW"]
    assert completed["s"][2] in ("a", "b")
    assert completed["x"].notna().all()
    assert not imputer.encoder_.encode(new).observed[1, 0]


def test_level_seen_once() -> None:
    frame = pd.DataFrame({"s": ["a"] * 20 + ["rare", None], "x": np.arange(22.0)})
    completed, said = complete(frame, validation_fraction=0.5)
    assert completed["s"][20] == "rare"
    assert completed["s"].notna().all()
    assert said == []


@pytest.mark.slow
def test_thousands_of_levels() -> None:
    frame = pd.DataFrame({"s": [f"w{i % 1000}" for i in range(3000)], "x": np.arange(3000.0)})
    holed = frame.assign(s=frame["s"].mask(gaps_in(3000, 50)))
    completed, said = complete(holed)
    kept = holed["s"].notna()
    assert completed["s"].notna().all()
    assert completed["s"][kept].equals(holed["s"][kept])
    assert said == []


def test_columns_missing_or_new_at_transform() -> None:
    imputer = ReMaskerImputer(**TINY).fit(pd.DataFrame({"a": [1.5, 2], "b": [1, 2], "c": [3, 4]}))
    for names, message in (
        (["a", "c"], "missing 'b'"),
        (["a", "b", "c", "d", "e"], "not seen in fit: 'd', 'e'"),
        (["a", "B", "c"], "missing 'b'; not seen in fit: 'B'"),
    ):
        with pytest.raises(InvalidTableError) as raised:
            imputer.transform(pd.DataFrame({name: [1.0] for name in names}))
        assert str(raised.value) == f"the columns differ from those of fit: {message}"
    reordered = imputer.transform(pd.DataFrame({"c": [3.0], "a": [np.nan], "b": [1.0]}))
    assert reordered.columns.tolist() == ["c", "a", "b"]
    assert reordered.notna().all(axis=None)


def test_numbers_of_very_different_magnitude() -> None:
    scale = np.linspace(1, 2, 12)
    frame = pd.DataFrame(
        {
            "tiny": 1e-300 * scale,
            "huge": 1e300 * scale,
            "far": 1e15 + scale,
            "wide": 10 ** (9 * scale),
        }
    )
    holed = frame.mask(np.stack([np.roll(gaps_in(), j) for j in range(4)], axis=1))
    completed, said = complete(holed)
    assert np.isfinite(completed).all(axis=None)
    assert (completed["tiny"].abs() < 1e-298).all()
    assert completed["far"].between(1e15 - 20, 1e15 + 20).all()
    assert said == []


def test_a_copy_of_another_column() -> None:
    frame = pd.DataFrame({"a": np.arange(12.0), "b": np.arange(12.0)})
    completed, said = complete(frame.mask(gaps_in()[:, None] & [True, False]))
    assert completed["b"].equals(frame["b"])
    assert completed.notna().all(axis=None)
    assert said == []


def test_indicators_as_scikit_learn_means_them() -> None:
    frame = pd.DataFrame({"a": [1.5, np.nan, 2.5], "b": [1.0, 2.0, 3.0]})
    completed, _ = complete(frame, add_indicator=True)
    assert completed.columns.tolist() == ["a", "b", "missingindicator_a"]
    assert completed["missingindicator_a"].tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kinds": {"x": "nmber"}},
            "kinds['x']: expected one of 'number', 'integer', 'datetime', 'timedelta', 'boolean', "
            "'category', 'ignored', got 'nmber'; did you mean 'number'?",
        ),
        (
            {"kinds": {"b": "number"}},
            "kinds['b']: a column of dtype bool cannot be of kind 'number'; expected 'boolean', "
            "'category', 'ignored', or convert the column",
        ),
        (
            {"exclude": ["tow"]},
            "exclude names column 'tow', which the table does not have; did you mean 'two'?",
        ),
        ({"text": "drop"}, "text: expected one of 'ignore', 'raise', got 'drop'"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    frame = pd.DataFrame({"x": [1.5, 2.5], "b": [True, False], "two": [1, 2]})
    assert refusal(frame, InvalidConfigError, **settings) == message


def test_words_among_numbers() -> None:
    frame = pd.DataFrame({"x": ["1", "2", "n/a"]})
    assert refusal(frame, kinds={"x": "number"}) == (
        "column 'x': expected numbers, found 'n/a' in row 2; list it in missing_values, or name "
        "the column in exclude"
    )
    completed, _ = complete(frame, kinds={"x": "integer"}, missing_values="n/a")
    assert completed["x"][2] in ("1", "2")


def test_boolean_has_two_levels() -> None:
    assert refusal(pd.DataFrame({"x": ["a", "b", "c"]}), kinds={"x": "boolean"}) == (
        "column 'x': kind 'boolean' has two levels, found 'a', 'b', 'c'; make it a category"
    )
