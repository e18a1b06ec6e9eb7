"""Random tables of every kind: never a crash, never a changed cell, never a silent gap.

Two hundred tables by default; REMASKER_EXAMPLES=1000 asks for a thousand.
"""

from __future__ import annotations

import datetime
import decimal
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from remasker import RemaskerError, ReMaskerImputer

EXAMPLES = int(os.environ.get("REMASKER_EXAMPLES", "200"))
TINY = {
    "width": 8,
    "heads": 2,
    "encoder_depth": 1,
    "decoder_depth": 1,
    "epochs": 1,
    "validation_fraction": 0.1,
    "device": "cpu",
    "random_state": 0,
}

floats = st.floats(allow_nan=False, allow_infinity=False)
smaller_floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
integers = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)
words = st.sampled_from(["a", "b", "NA", "", "é", "0"]) | st.text(max_size=6)
moments = st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2200, 1, 1))
spans = st.timedeltas(datetime.timedelta(-9999), datetime.timedelta(9999))


def series(values: list[Any], dtype: Any) -> pd.Series:
    return pd.Series(values, dtype=dtype)


def localized(values: list[Any], zone: str, unit: str) -> pd.Series:
    naive = pd.Series(values, dtype="datetime64[us]")
    return naive.dt.tz_localize("UTC").dt.tz_convert(zone).dt.as_unit(unit)


#: name -> (cells, the column they make). None marks a gap.
COLUMNS: dict[str, tuple[st.SearchStrategy[Any], Callable[[list[Any]], pd.Series]]] = {
    "float64": (floats, lambda v: series(v, "float64")),
    "float32": (smaller_floats, lambda v: series(v, "float32")),
    "float16": (st.floats(-100, 100, width=16), lambda v: series(v, "float16")),
    "tiny": (st.sampled_from([0.0, 5e-324, -0.0, 1e-300]), lambda v: series(v, "float64")),
    "constant": (st.just(0.1), lambda v: series(v, "float64")),
    "counts": (st.integers(0, 9).map(float), lambda v: series(v, "float64")),
    "Int64": (integers, lambda v: series(v, "Int64")),
    "Int8": (st.integers(-128, 127), lambda v: series(v, "Int8")),
    "UInt64": (st.integers(0, 2**64 - 1), lambda v: series(v, "UInt64")),
    "Float64": (floats, lambda v: series(v, "Float64")),
    "arrow int": (integers, lambda v: series(v, pd.ArrowDtype(pa.int64()))),
    "arrow float": (floats, lambda v: series(v, pd.ArrowDtype(pa.float64()))),
    "boolean": (st.booleans(), lambda v: series(v, "boolean")),
    "arrow bool": (st.booleans(), lambda v: series(v, pd.ArrowDtype(pa.bool_()))),
    "object bool": (st.booleans(), lambda v: series(v, object)),
    "object int": (st.integers(-(2**70), 2**70), lambda v: series(v, object)),
    "object float": (floats, lambda v: series(v, object)),
    "object str": (words, lambda v: series(v, object)),
    "str": (words, lambda v: series(v, "str")),
    "string": (words, lambda v: series(v, "string")),
    "arrow string": (words, lambda v: series(v, pd.ArrowDtype(pa.string()))),
    "category": (words, lambda v: series(v, object).astype("category")),
    "ordered": (
        st.sampled_from("abc"),
        lambda v: series(v, pd.CategoricalDtype(["c", "a", "b", "unused"], ordered=True)),
    ),
    "category int": (st.integers(0, 4), lambda v: series(v, pd.CategoricalDtype(range(5)))),
    "arrow dictionary": (
        st.sampled_from("abc"),
        lambda v: series(v, pd.ArrowDtype(pa.dictionary(pa.int32(), pa.string()))),
    ),
    "datetime ns": (moments, lambda v: series(v, "datetime64[ns]")),
    "datetime s": (moments, lambda v: series(v, "datetime64[us]").dt.as_unit("s")),
    "zone": (moments, lambda v: localized(v, "Europe/Rome", "us")),
    "arrow zone": (
        moments,
        lambda v: series(v, pd.ArrowDtype(pa.timestamp("us", "America/New_York"))),
    ),
    "arrow date": (st.dates(), lambda v: series(v, pd.ArrowDtype(pa.date32()))),
    "object date": (st.dates(), lambda v: series(v, object)),
    "object datetime": (moments, lambda v: series(v, object)),
    "timedelta": (spans, lambda v: series(v, "timedelta64[ns]")),
    "arrow duration": (spans, lambda v: series(v, pd.ArrowDtype(pa.duration("us")))),
    "day": (moments, lambda v: series(v, "datetime64[us]").dt.to_period("D")),
    "month": (moments, lambda v: series(v, "datetime64[us]").dt.to_period("M")),
    "decimal": (
        st.sampled_from(["0.5", "-7", "1.25", "1E+200", "1E-60", "99999999999999999999.99"]).map(
            decimal.Decimal
        ),
        lambda v: series(v, object),
    ),
    "arrow decimal": (
        st.decimals(-99, 99, places=2),
        lambda v: series(v, pd.ArrowDtype(pa.decimal128(4, 2))),
    ),
    "interval": (
        st.integers(0, 5),
        lambda v: series([None if x is None else pd.Interval(x, x + 1) for x in v], object),
    ),
    "interval dtype": (
        st.integers(0, 5),
        lambda v: pd.Series(
            pd.arrays.IntervalArray(
                [None if x is None else pd.Interval(x / 2, x + 1) for x in v],
                dtype=pd.IntervalDtype("float64", "right"),
            )
        ),
    ),
    "cut": (
        st.integers(0, 5),
        lambda v: pd.Series(pd.cut(pd.Series(v, dtype="float64"), [-np.inf, 1, 2.5, np.inf])),
    ),
    "sparse": (
        st.floats(0, 1),
        lambda v: series(v, "float64").astype(pd.SparseDtype("float64", np.nan)),
    ),
    "empty": (st.none(), lambda v: series(v, "float64")),
    # Of no kind: left alone, with a warning that names them.
    "list": (st.lists(st.integers(0, 1), max_size=2), lambda v: series(v, object)),
    "complex": (
        st.complex_numbers(allow_nan=False, allow_infinity=False),
        lambda v: series(v, "complex128"),
    ),
    # Sometimes refused.
    "mixed": (st.integers(0, 3) | st.sampled_from("ab"), lambda v: series(v, object)),
    "infinite": (st.sampled_from([1.0, np.inf, -np.inf]), lambda v: series(v, "float64")),
}


@st.composite
def tables(draw: st.DrawFn) -> pd.DataFrame:
    n_rows = draw(st.sampled_from([1, 2, 3, 12, 40]))
    chosen = draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=6, unique=True))
    columns = {}
    for name in chosen:
        cells, make = COLUMNS[name]
        gaps = draw(st.sampled_from([0.0, 0.2, 0.9, 1.0]))
        pool = draw(st.lists(cells, min_size=1, max_size=min(n_rows, 12)))
        random = np.random.default_rng(draw(st.integers(0, 99)))
        picked = [pool[i] for i in random.integers(len(pool), size=n_rows)]
        columns[name] = make([None if random.random() < gaps else cell for cell in picked])
    table = pd.DataFrame(columns)
    index = draw(st.sampled_from(["range", "duplicates", "dates", "levels"]))
    if index == "duplicates":
        table.index = pd.Index([7] * n_rows, name="id")
    elif index == "dates":
        table.index = pd.date_range("2020-01-01", periods=n_rows, tz="UTC")
    elif index == "levels":
        table.index = pd.MultiIndex.from_arrays([range(n_rows), ["x"] * n_rows])
    return table


def cells_of(column: pd.Series, chosen: np.ndarray) -> Any:
    """The chosen cells in a form whose equality is equality of every bit and every type."""
    if isinstance(column.dtype, np.dtype) and column.dtype.kind != "O":
        return column.to_numpy()[chosen].tobytes()
    return [(type(cell), repr(cell)) for cell in column.array[chosen]]


def check(before: pd.DataFrame, after: pd.DataFrame, spoken: str) -> None:
    assert list(after.columns) == list(before.columns)
    pd.testing.assert_index_equal(after.index, before.index)
    for name in before.columns:
        missing = before[name].isna().to_numpy()
        assert after[name].dtype == before[name].dtype, name
        assert cells_of(after[name], ~missing) == cells_of(before[name], ~missing), name
        if after[name].isna().any():
            assert f"{name!r}" in spoken, f"a gap remains in {name}, and nobody said so"


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="REMASKER_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
    # Every example trains a model: shrinking a failure takes minutes, and the table is small.
    phases=(Phase.reuse, Phase.generate),
)
@given(table=tables(), scaling=st.sampled_from(["standard", "minmax"]))
@pytest.mark.slow
def test_random_tables_of_every_kind(table: pd.DataFrame, scaling: str) -> None:
    original = table.copy(deep=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            imputer = ReMaskerImputer(scaling=scaling, **TINY).fit(table)
            completed = imputer.transform(table)
        except RemaskerError as error:
            refusal = str(error)
        else:
            refusal = ""
    if refusal:
        # Only these two kinds of column may be refused, and the message names the column.
        assert "'mixed'" in refusal or "'infinite'" in refusal
        assert {"mixed", "infinite"} & set(table.columns)
        return
    spoken = " ".join(str(w.message) for w in caught if issubclass(w.category, UserWarning))
    assert [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)] == []
    check(original, completed, spoken)
    check(original, table, " ".join(map(repr, table.columns)))
    # New rows, fewer of them, in another order of columns.
    shuffled = table.iloc[: len(table) // 2 + 1, ::-1]
    check(shuffled, imputer.transform(shuffled), spoken)
