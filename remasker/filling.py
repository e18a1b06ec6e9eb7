"""Numbers and codes back into cells of the user's own dtype."""

from __future__ import annotations

import datetime
import decimal
import math
from typing import Any

import numpy as np
import pandas as pd
from pandas.api import types

from remasker.columns import (
    NUMBERS,
    REFUSALS,
    Column,
    dense,
    digits_of,
    is_decimal,
    is_dictionary,
    is_text,
)
from remasker.errors import InvalidTableError


def fill(series: pd.Series, missing: np.ndarray, filled: np.ndarray, column: Column) -> Any:
    """An array: `series` with the cells in `missing` replaced, in its own dtype if that holds them.

    `filled` has one number, in the column's units, or one code for each missing cell.
    """
    if isinstance(series.dtype, pd.SparseDtype):
        return pd.arrays.SparseArray(
            fill(dense(series), missing, filled, column), dtype=series.dtype
        )
    present = series[~missing]
    dtypes: list[Any] = [series.dtype, object]
    if not len(present):
        # pandas reads an empty column as float64, which says nothing: rather the dtype of `fit`.
        says_nothing = types.is_float_dtype(series.dtype) and column.kind not in NUMBERS
        dtypes.insert(0 if says_nothing else 1, _dtype_of_fit(column))
    for dtype in dtypes:
        try:
            # A bool column can hold no gap while it is being filled.
            home = series.astype(object if dtype == "bool" else dtype)
            array = _put(home, missing, _values(filled, column, present, home.dtype))
            return array.astype(bool) if dtype == "bool" else array
        except REFUSALS:
            continue
    raise InvalidTableError(f"column {column.name!r}: dtype {series.dtype} cannot hold its values")


def _dtype_of_fit(column: Column) -> Any:
    if column.dtype == "category":
        return pd.CategoricalDtype(list(column.categories))
    return column.dtype


def _put(series: pd.Series, missing: np.ndarray, values: Any) -> Any:
    dtype = series.dtype
    if isinstance(dtype, np.dtype):
        array = series.to_numpy(copy=True)
        if dtype.kind == "O":
            array[missing] = np.fromiter(values, dtype=object, count=len(values))
            return array
        values = np.asarray(values)
        if values.dtype.kind == "O":
            values = np.asarray(values.tolist())
        # numpy itself would read the text '5' as a number, and a duration as one too.
        if not np.can_cast(values.dtype, dtype, casting="same_kind"):
            raise TypeError(f"{dtype} cannot hold {values.dtype}")
        array[missing] = values
        return array
    if is_dictionary(dtype):
        cells = series.astype(object).to_numpy(copy=True)
        cells[missing] = values
        return pd.Series(cells, dtype=dtype).array
    if isinstance(dtype, pd.CategoricalDtype):
        new = [level for level in dict.fromkeys(values) if level not in dtype.categories]
        if new:  # The table at hand declares fewer levels than fit saw.
            series = series.cat.add_categories(new)
    extension = series.array.copy()
    extension[missing] = pd.Series(values, dtype=series.dtype).array
    return extension


def _values(filled: np.ndarray, column: Column, present: pd.Series, dtype: Any) -> Any:
    """The missing cells as `dtype` would have them."""
    if column.categorical:
        levels = np.empty(len(column.categories), dtype=object)
        levels[:] = column.categories
        return levels[filled.astype(int)]
    objects = types.is_object_dtype(dtype)
    text = is_text(present) if objects else types.is_string_dtype(dtype)
    if column.kind == "datetime":
        example = present.iloc[0] if objects and len(present) else None
        return _moments(filled, column, dtype, example, text)
    if column.kind == "timedelta":
        spans = pd.to_timedelta(_within(filled, *_TIMEDELTAS), unit="us").as_unit(_unit(dtype))
        return [str(span) for span in spans] if text else list(spans) if objects else spans
    if is_decimal(dtype) or (objects and _holds_decimals(column, present)):
        return _decimals(filled, column, present, dtype)
    if text or objects:
        whole = column.step == 1
        numbers = [int(number) if whole else float(number) for number in filled]
        return [str(number) for number in numbers] if text else numbers
    if types.is_integer_dtype(dtype):
        return _integers(filled, np.dtype(getattr(dtype, "numpy_dtype", dtype)))
    if types.is_float_dtype(dtype):
        narrow = np.dtype(getattr(dtype, "numpy_dtype", dtype))
        limit = float(np.finfo(narrow).max)
        return np.clip(filled, -limit, limit).astype(narrow)
    raise TypeError(f"{dtype} cannot hold numbers")


def _holds_decimals(column: Column, present: pd.Series) -> bool:
    if len(present):
        return isinstance(present.iloc[0], decimal.Decimal)
    return column.digits is not None


def _decimals(filled: np.ndarray, column: Column, present: pd.Series, dtype: Any) -> Any:
    """Decimal numbers of as many digits as the others, before the point and after it."""
    if is_decimal(dtype):
        digits = dtype.pyarrow_dtype.scale
        before = dtype.pyarrow_dtype.precision - digits
    else:
        digits = digits_of(present) if column.digits is None else column.digits
        largest = max(abs(column.low), abs(column.high))
        before = math.floor(math.log10(largest)) + 1 if largest >= 1 else 0
    exact = decimal.Context(prec=400)  # the largest float has 309 digits before the point
    unit = decimal.Decimal(1).scaleb(-digits)
    # A database column that holds 9.99 at most cannot take 10.02.
    limit = exact.subtract(decimal.Decimal(1).scaleb(before), unit)
    numbers = (decimal.Decimal(float(number)).quantize(unit, context=exact) for number in filled)
    # Adding zero makes 0.00 of -0.00.
    return [exact.add(min(max(number, -limit), limit), 0) for number in numbers]


def _integers(filled: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Whole numbers within what the dtype can hold; its ends may lie between two floats."""
    limits = np.iinfo(dtype)
    low, high = float(limits.min), float(limits.max)
    if high > limits.max:
        high = float(np.nextafter(high, 0))
    return np.clip(np.rint(filled), low, high).astype(dtype)


#: Microseconds. What nanosecond times can hold, and the years 1 to 9999 for all the others.
_NANOSECOND_LIMIT = 9.2e15
_YEARS = (-62135596800e6, 253402300799e6)
_TIMEDELTAS = (-_NANOSECOND_LIMIT, _NANOSECOND_LIMIT)


def _within(seconds: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.rint(np.clip(seconds * 1e6, low, high)).astype(np.int64)


def _moments(filled: np.ndarray, column: Column, dtype: Any, example: Any, text: bool) -> Any:
    unit = _unit(dtype)
    limits = _TIMEDELTAS if unit == "ns" else _YEARS
    moments = pd.to_datetime(_within(filled, *limits), unit="us", utc=True)
    zone = getattr(dtype, "tz", None) or getattr(getattr(dtype, "pyarrow_dtype", None), "tz", None)
    zone = zone or getattr(example, "tzinfo", None)
    moments = moments.tz_localize(None) if zone is None else moments.tz_convert(zone)
    if isinstance(dtype, pd.PeriodDtype):
        return moments.astype(dtype)
    if text:
        pattern = "%Y-%m-%d" if column.step == 86400 else "%Y-%m-%dT%H:%M:%S"
        return [moment.strftime(pattern) for moment in moments]
    moments = moments.as_unit(unit)
    if str(dtype).startswith("date") and not str(dtype).startswith("datetime"):
        return [moment.date() for moment in moments]
    if not types.is_object_dtype(dtype):
        return moments
    if example is None or isinstance(example, pd.Timestamp):
        return list(moments)
    if isinstance(example, datetime.datetime):
        return [moment.to_pydatetime() for moment in moments]
    return [moment.date() for moment in moments]


def _unit(dtype: Any) -> Any:
    """The resolution of a dtype of times; microseconds where it has none."""
    unit = getattr(dtype, "unit", None) or getattr(
        getattr(dtype, "pyarrow_dtype", None), "unit", None
    )
    if unit is None and isinstance(dtype, np.dtype) and dtype.kind in "mM":
        unit = np.datetime_data(dtype)[0]
    return unit if unit in ("s", "ms", "us", "ns") else "us"
