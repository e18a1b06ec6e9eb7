"""TableEncoder and the estimator's containers: every kind there and back."""

from __future__ import annotations

import datetime
import json
import warnings
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from remasker import InvalidConfigError, InvalidTableError, ReMaskerImputer
from remasker.table import MAX_CATEGORIES, TableEncoder

TINY: dict[str, Any] = {
    "width": 8,
    "heads": 2,
    "encoder_depth": 1,
    "decoder_depth": 1,
    "epochs": 1,
    "device": "cpu",
    "random_state": 0,
}


def filled(frame: pd.DataFrame, value: float = 0.0, **settings: Any) -> pd.DataFrame:
    """Complete a table with the same encoded value in every gap."""
    encoder = TableEncoder(**settings).fit(frame)
    return encoder.complete(frame, np.full((len(frame), len(encoder.modelled)), value))


@pytest.mark.parametrize(
    ("cells", "dtype", "kind"),
    [
        ([1.5, None, 2.5], "float64", "number"),
        ([1.0, None, 7.0], "float32", "integer"),
        ([1, None, 7], "Int64", "integer"),
        ([1.5, None, 7], "Float64", "number"),
        ([1, None, 7], pd.ArrowDtype(pa.int16()), "integer"),
        ([Decimal("1.50"), None, Decimal("2.5")], object, "number"),
        ([Decimal(1), None, Decimal(7)], object, "integer"),
        ([Decimal("1.50"), None, Decimal(7)], pd.ArrowDtype(pa.decimal128(5, 2)), "number"),
        ([True, None, False], "boolean", "boolean"),
        ([True, None, False], object, "boolean"),
        (["a", None, "b"], object, "category"),
        (["a", None, "b"], "str", "category"),
        (["a", None, "b"], pd.ArrowDtype(pa.string()), "category"),
        (["a", None, "b"], "category", "category"),
        ([datetime.date(2020, 1, 1), None, datetime.date(2021, 1, 1)], object, "datetime"),
        (["2020-01-01", None, "2021-01-01"], "datetime64[s]", "datetime"),
        (["2020-01", None, "2021-03"], "period[M]", "datetime"),
        ([1, None, 2], "timedelta64[ns]", "timedelta"),
    ],
)
def test_the_dtype_decides_the_kind_and_is_kept(cells: list[Any], dtype: Any, kind: str) -> None:
    frame = pd.DataFrame({"x": pd.Series(cells, dtype=dtype)})
    assert TableEncoder().fit(frame).columns[0].kind == kind
    completed = filled(frame)["x"]
    assert completed.dtype == frame["x"].dtype
    assert completed.notna().all()
    assert repr(list(completed[[0, 2]])) == repr(list(frame["x"][[0, 2]]))


def test_integers_beyond_floats_survive() -> None:
    frame = pd.DataFrame({"x": pd.Series([2**63 - 1, None, 2**53 + 1], dtype="Int64")})
    assert filled(frame)["x"].tolist()[::2] == [2**63 - 1, 2**53 + 1]


def test_an_imputed_value_never_leaves_its_dtype() -> None:
    frame = pd.DataFrame({"x": pd.Series([100, None, 120], dtype="Int8")})
    assert filled(frame, 1e4)["x"].tolist() == [100, 127, 120]
    huge = pd.DataFrame({"x": [1e308, None, -1e308]})
    assert np.isfinite(filled(huge, 1e4)["x"]).all()


def test_a_decimal_has_the_digits_of_its_column() -> None:
    """What a database wrote as NUMERIC(3, 2) can be written there again."""
    frame = pd.DataFrame({"x": [Decimal("9.95"), None, Decimal("9.01")]})
    encoder = TableEncoder().fit(frame)
    assert repr(encoder.complete(frame, np.full((3, 1), 0.123))["x"][1]) == "Decimal('9.54')"
    assert repr(encoder.complete(frame, np.full((3, 1), 50.0))["x"][1]) == "Decimal('9.99')"
    # Also where the rows at hand hold none, and from a file.
    again = TableEncoder.from_dict(json.loads(json.dumps(encoder.to_dict())))
    empty = pd.DataFrame({"x": pd.Series([None, None], dtype=object)})
    assert again.complete(empty, np.zeros((2, 1)))["x"].tolist() == [Decimal("9.48")] * 2
    assert filled(pd.DataFrame({"x": [Decimal("-0.01"), None, Decimal("0.01")]}))["x"][1] == 0
    wide = pd.ArrowDtype(pa.decimal128(38, 10))
    huge = pd.DataFrame({"x": pd.Series([Decimal(10**27), None, Decimal(-1)], dtype=wide)})
    assert filled(huge, 1e4)["x"].dtype == wide


def test_days_stay_days_and_zones_stay_zones() -> None:
    days = pd.to_datetime(["2020-01-01", None, "2020-01-04"])
    frame = pd.DataFrame({"day": days, "zone": days.tz_localize("UTC").tz_convert("Asia/Tokyo")})
    completed = filled(frame, 0.1)
    assert completed.loc[1, "day"] == pd.Timestamp("2020-01-03")
    assert str(completed["zone"].dtype).endswith("Asia/Tokyo]")


def test_a_kind_from_the_user() -> None:
    frame = pd.DataFrame({"zip": [94110, 10001, 94110, 60601], "n": ["1.5", "2", None, "9"]})
    encoder = TableEncoder(kinds={"zip": "category", "n": "number"}).fit(frame)
    assert [c.kind for c in encoder.columns] == ["category", "number"]
    assert encoder.columns[0].categories == (10001, 60601, 94110)
    completed = encoder.complete(frame, np.zeros((4, 2)))
    assert completed["n"].tolist() == ["1.5", "2", str((1.5 + 2 + 9) / 3), "9"]


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"x": (5, 1)}, "bounds of column 'x': the lower one is larger in (5, 1)"),
        ({"x": 5}, "bounds of column 'x': expected (low, high), got 5"),
        ({"n": (0.2, 0.8)}, "bounds of column 'n': no whole value lies within (0.2, 0.8)"),
        (
            {"c": (0, 1)},
            "bounds of column 'c': only numbers, dates and durations have bounds; its kind is "
            "'category'",
        ),
        ({"y": (0, 1)}, "bounds names column 'y', which the table does not have"),
        ("seen", "bounds: expected one of 'observed', got 'seen'"),
    ],
)
def test_bad_bounds(bounds: Any, message: str) -> None:
    frame = pd.DataFrame({"x": [1.5, 2], "n": [1, 2], "c": ["a", "b"]})
    with pytest.raises(InvalidConfigError) as raised:
        TableEncoder(bounds=bounds).fit(frame)
    assert str(raised.value) == message


def test_bounds_hold_and_survive_json() -> None:
    day = pd.Timestamp("2020-01-02")
    frame = pd.DataFrame({"x": [1.5, 2.25, None], "t": pd.to_datetime(["2020-01-01"] * 2 + [None])})
    frame.loc[1, "t"] = pd.Timestamp("2020-01-09")
    assert filled(frame, 1e3, bounds="observed").loc[2, "x"] == 2.25
    encoder = TableEncoder(bounds={"x": (None, np.inf), "t": (None, day)}).fit(frame)
    again = TableEncoder.from_dict(json.loads(json.dumps(encoder.to_dict(), allow_nan=False)))
    for one in (encoder, again):
        completed = one.complete(frame, np.full((3, 2), 1e3))
        assert completed.loc[2, "x"] > 100
        assert completed.loc[2, "t"] == day


def test_markers_are_gaps_but_zero_is_not_false() -> None:
    frame = pd.DataFrame(
        {
            "n": [0, 5, 7],
            "b": [False, True, True],
            "o": pd.Series([False, True, None], dtype=object),
            "s": ["0", "x", "?"],
            "l": pd.Series([1, 0, 1], dtype=pd.ArrowDtype(pa.int8())),
        }
    )
    encoder = TableEncoder(missing_values=[0, "?"]).fit(frame)
    gaps = {name: encoder.missing(frame[name]).tolist() for name in frame}
    assert gaps == {
        "n": [True, False, False],
        "b": [False] * 3,
        "o": [False, False, True],
        "s": [False, False, True],
        "l": [False, True, False],
    }


def test_excluded_columns_are_not_looked_at() -> None:
    frame = pd.DataFrame({"y": [1, "mixed", None], "x": [1.5, 2.5, np.nan]})
    encoder = TableEncoder(exclude="y").fit(frame)
    assert [c.name for c in encoder.modelled] == ["x"]
    assert encoder.complete(frame, np.zeros((3, 1)))["y"].tolist() == [1, "mixed", None]


def test_the_most_frequent_of_too_many_levels() -> None:
    words = [f"w{i}" for i in range(MAX_CATEGORIES + 50)] * 2 + ["w299"] * 3
    frame = pd.DataFrame({"x": pd.Series(words).astype("category")})
    encoder = TableEncoder().fit(frame)
    assert len(encoder.columns[0].categories) == MAX_CATEGORIES
    assert "w299" in encoder.columns[0].categories
    assert not encoder.encode(frame).observed.all()
    assert encoder.gaps(frame).sum() == 0


def test_a_column_that_is_empty_at_transform_gets_the_dtype_of_fit() -> None:
    frame = pd.DataFrame(
        {
            "s": ["a", "b"],
            "b": [True, False],
            "t": pd.to_datetime(["2020-01-01", "2020-01-03"]),
            "c": pd.Categorical(["u", "v"]),
        }
    )
    encoder = TableEncoder().fit(frame)
    empty = pd.DataFrame({name: [np.nan, np.nan] for name in frame})
    completed = encoder.complete(empty, np.zeros((2, 4)))
    assert completed.notna().all(axis=None)
    assert completed.dtypes.map(str).tolist() == frame.dtypes.map(str).tolist()


@pytest.mark.parametrize("name", [0, None, ("a", 1), "é"])
def test_any_name_survives_the_schema(name: Any) -> None:
    frame = pd.DataFrame({"z": [1.5, None]})
    frame.columns = pd.Index([name], tupleize_cols=False)
    encoder = TableEncoder().fit(frame)
    again = TableEncoder.from_dict(json.loads(json.dumps(encoder.to_dict())))
    assert again.columns == encoder.columns


def test_polars_in_and_out() -> None:
    table = pl.DataFrame(
        {
            "x": [1.5, None, 3.25, float("nan")],
            "n": pl.Series([2**53 + 1, None, 3, 4], dtype=pl.Int64),
            "b": [True, None, False, True],
            "s": ["a", None, "b", "a"],
            "c": pl.Series(["u", None, "v", "u"], dtype=pl.Categorical),
            "e": pl.Series(["lo", None, "hi", "lo"], dtype=pl.Enum(["lo", "hi"])),
            "d": [datetime.date(2020, 1, 1), None, datetime.date(2020, 2, 1)] * 1 + [None],
            "z": pl.Series([datetime.datetime(2020, 1, 1), None] * 2).dt.replace_time_zone("UTC"),
            "struct": [{"k": 1}, None, {"k": 2}, {"k": 3}],
        }
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        completed = ReMaskerImputer(**TINY).fit_transform(table)
    assert ["'struct'" in str(w.message) for w in caught] == [True]
    assert completed.schema == table.schema
    assert completed.drop("struct").null_count().sum_horizontal().item() == 0
    assert not completed["x"].is_nan().any()
    for name in table.columns:
        kept = table[name].is_not_null()
        if name == "x":
            kept &= table[name].is_not_nan()
        assert completed[name].filter(kept).to_list() == table[name].filter(kept).to_list()
    with pytest.raises(InvalidTableError, match="expected a polars DataFrame, got LazyFrame"):
        ReMaskerImputer(**TINY).fit(table.lazy())


def test_object_arrays_keep_their_objects() -> None:
    table = np.array([[1.5, "a", True], [None, "b", None], [2.5, None, False]], dtype=object)
    completed = ReMaskerImputer(**TINY).fit_transform(table)
    assert completed.dtype == object
    assert completed[0].tolist() == [1.5, "a", True]
    assert not pd.isna(completed).any()
