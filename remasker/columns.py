"""One column of a table: its kind, its way to numbers, and the way back into its own dtype."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from pandas.api import types

from remasker.errors import InvalidConfigError, InvalidTableError

NUMERIC_KINDS = ("number", "integer", "datetime", "timedelta")
CATEGORICAL_KINDS = ("boolean", "category")
NUMBERS = ("number", "integer")
KINDS = (*NUMERIC_KINDS, *CATEGORICAL_KINDS, "ignored")

#: What `kinds` may make of a column that would be of another kind by itself. Text can be anything;
#: the rest only what its own dtype can hold again.
_ALTERNATIVES = {
    "number": ("number", "integer", "category", "boolean"),
    "integer": ("number", "integer", "category", "boolean"),
    "datetime": ("datetime",),
    "timedelta": ("timedelta",),
    "boolean": ("boolean", "category"),
    "category": ("category", "boolean"),
    "text": ("category", "boolean", *NUMERIC_KINDS),
    "ignored": (),
}
_INFERRED = {
    "string": "category",
    "boolean": "boolean",
    "integer": "integer",
    "floating": "number",
    "mixed-integer-float": "number",
    "decimal": "number",
    "datetime": "datetime",
    "datetime64": "datetime",
    "date": "datetime",
    "timedelta": "timedelta",
    "timedelta64": "timedelta",
    "interval": "category",
}
#: A number of so many values, each seen so often on average, has no others.
MAX_VALUES, MIN_REPEATS = 20, 10
#: Of an imputed decimal number, after the point; floats know fewer.
MAX_DIGITS = 30
_REFUSALS = (TypeError, ValueError, OverflowError, NotImplementedError, ArithmeticError)


@dataclass(frozen=True, kw_only=True)
class Column:
    """What is remembered of one column: its kind, its scale or its levels."""

    name: Hashable
    kind: str
    dtype: str
    #: value = center + scale × encoded
    center: float = 0.0
    scale: float = 1.0
    low: float = math.nan
    high: float = math.nan
    #: Imputed values are multiples of this: 1 for whole numbers, 86400 for days; 0 for any value.
    step: float = 0.0
    #: All the values of a number that has but few; a draw is one of them.
    values: tuple[float, ...] = ()
    #: Digits after the point of decimal numbers; None for other numbers.
    digits: int | None = None
    categories: tuple[Any, ...] = ()
    missing_rate: float = 0.0
    #: Why an ignored column is ignored; empty for the others.
    reason: str = ""

    @property
    def modelled(self) -> bool:
        """Whether the model sees this column.

        >>> Column(name="a", kind="number", dtype="float64").modelled
        True
        """
        return self.kind != "ignored"

    @property
    def categorical(self) -> bool:
        """Whether the model sees levels rather than a number.

        >>> Column(name="a", kind="boolean", dtype="bool").categorical
        True
        """
        return self.kind in CATEGORICAL_KINDS


def quoted(names: Iterable[object]) -> str:
    """Names for a message, all of them: whoever must act on it needs them.

    >>> quoted(["a", 1])
    "'a', 1"
    """
    return ", ".join(repr(plain(name)) for name in names)


def plain(value: Any) -> Any:
    """A numpy scalar as the Python value that it stands for; anything else unchanged.

    >>> plain(np.int64(3))
    3
    """
    return value.item() if isinstance(value, np.generic) else value


def dense(series: pd.Series) -> pd.Series:
    """A sparse column as the column that it stands for; any other as it is.

    >>> dense(pd.Series([0, 3], dtype="Sparse[int64]")).dtype
    dtype('int64')
    """
    if not isinstance(series.dtype, pd.SparseDtype):
        return series
    held: Any = series.array
    return pd.Series(held.to_dense(), index=series.index, name=series.name)


# ---------------------------------------------------------------------- kinds


def kind_of(name: Hashable, present: pd.Series) -> str:
    """The kind that the dtype of a column's observed cells decides.

    >>> kind_of("paid", pd.Series([True, False], dtype=object))
    'boolean'
    """
    dtype = present.dtype
    if isinstance(dtype, pd.CategoricalDtype | pd.IntervalDtype) or _is_dictionary(dtype):
        return "category"
    if types.is_complex_dtype(dtype):
        return "ignored"
    if types.is_bool_dtype(dtype):
        return "boolean"
    if types.is_integer_dtype(dtype):
        return "integer"
    if types.is_float_dtype(dtype) or _is_decimal(dtype):
        return "number"
    if types.is_datetime64_any_dtype(dtype) or isinstance(dtype, pd.PeriodDtype):
        return "datetime"
    if types.is_timedelta64_dtype(dtype) or getattr(dtype, "kind", "") == "m":
        return "timedelta"
    if types.is_object_dtype(dtype):
        return _kind_of_objects(name, present)
    return "category" if types.is_string_dtype(dtype) else "ignored"


def _kind_of_objects(name: Hashable, present: pd.Series) -> str:
    inferred = types.infer_dtype(present, skipna=True)
    if inferred in _INFERRED:
        return _INFERRED[inferred]
    examples: dict[type, object] = {}
    for value in present:
        examples.setdefault(type(value), value)
    if len(examples) == 1:
        return "ignored"
    # Numbers that are not truth values go together; anything else must be of one type.
    if all(issubclass(t, int | float | np.number) and t is not bool for t in examples):
        return "ignored" if any(issubclass(t, np.complexfloating) for t in examples) else "number"
    (first, one), (second, other) = list(examples.items())[:2]
    raise InvalidTableError(
        f"column {name!r}: mixes {first.__name__} ({plain(one)!r}) and {second.__name__} "
        f"({plain(other)!r}); convert it to one type, or name it in exclude"
    )


def check_kind(name: Hashable, kind: str, present: pd.Series) -> None:
    """Refuse a kind from `kinds` that the column's own dtype could not hold again.

    >>> check_kind("paid", "number", pd.Series([True, False]))
    Traceback (most recent call last):
    remasker.errors.InvalidConfigError: kinds['paid']: a column of dtype bool cannot be of ...
    """
    own = kind_of(name, present)
    possible = _ALTERNATIVES["text" if own == "category" and is_text(present) else own]
    if kind not in possible:
        raise InvalidConfigError(
            f"kinds[{name!r}]: a column of dtype {present.dtype} cannot be of kind {kind!r}; "
            f"expected {', '.join(map(repr, (*possible, 'ignored')))}, or convert the column"
        )


def is_text(series: pd.Series) -> bool:
    """Whether the dtype is that of strings; an object column is asked for its cells.

    >>> is_text(pd.Series(["a", None], dtype=object)), is_text(pd.Series([1.0]))
    (True, False)
    """
    if types.is_object_dtype(series.dtype):
        return types.infer_dtype(series, skipna=True) == "string"
    return types.is_string_dtype(series.dtype) and not _is_dictionary(series.dtype)


def _is_dictionary(dtype: Any) -> bool:
    return str(dtype).startswith("dictionary<")


def _is_decimal(dtype: Any) -> bool:
    return str(dtype).startswith("decimal")


# ---------------------------------------------------------------------- gaps


def missing_cells(series: pd.Series, markers: Sequence[Any] = ()) -> np.ndarray:
    """Which cells are gaps: NaN, None, NA, NaT, or equal to one of the markers.

    >>> missing_cells(pd.Series([1.0, -1.0, None]), [-1]).tolist()
    [False, True, True]
    """
    missing = np.array(series.isna(), dtype=bool)
    if types.is_float_dtype(series.dtype) and not isinstance(series.dtype, np.dtype):
        # Arrow and nullable floats tell NaN from NA; neither is a number.
        missing |= np.isnan(series.to_numpy(dtype=np.float64, na_value=np.nan))
    for marker in markers:
        missing |= _equal(series, marker)
    return missing


def _equal(series: pd.Series, marker: Any) -> np.ndarray:
    """Where the cells are `marker`; 0 is not False and 1 is not True."""
    truth = isinstance(marker, bool | np.bool_)
    if types.is_object_dtype(series.dtype):
        return np.array([_same(cell, marker, truth) for cell in series], dtype=bool)
    if types.is_bool_dtype(series.dtype) != truth:
        return np.zeros(len(series), dtype=bool)
    try:
        return (series == marker).fillna(False).to_numpy(dtype=bool)
    except _REFUSALS:
        return np.zeros(len(series), dtype=bool)


def _same(cell: Any, marker: Any, truth: bool) -> bool:
    try:
        return isinstance(cell, bool | np.bool_) == truth and bool(cell == marker)
    except _REFUSALS:
        return False


# ---------------------------------------------------------------------- cells -> numbers


def to_numbers(name: Hashable, kind: str, present: pd.Series) -> np.ndarray:
    """Observed cells of a numeric column as float64; times as seconds.

    >>> to_numbers("t", "timedelta", pd.Series(pd.to_timedelta(["1min", "2min"]))).tolist()
    [60.0, 120.0]
    """
    numbers = _numbers(kind, present)
    if numbers is not None:
        infinite = np.flatnonzero(np.isinf(numbers))
        if len(infinite):
            raise InvalidTableError(
                f"column {name!r}: found inf in row {plain(present.index[infinite[0]])!r}; "
                "replace it with a number or with a missing value"
            )
        return numbers
    wanted = {"datetime": "dates", "timedelta": "durations"}.get(kind, "numbers")
    for row in range(len(present)):
        if _numbers(kind, present.iloc[row : row + 1]) is None:
            raise InvalidTableError(
                f"column {name!r}: expected {wanted}, found {plain(present.iloc[row])!r} in row "
                f"{plain(present.index[row])!r}; list it in missing_values, or name the column in "
                "exclude"
            )
    raise InvalidTableError(
        f"column {name!r}: cannot be read as {wanted} (dtype {present.dtype}); "
        "convert it, or name it in exclude"
    )


def _numbers(kind: str, present: pd.Series) -> np.ndarray | None:
    if isinstance(present.dtype, pd.CategoricalDtype) or _is_dictionary(present.dtype):
        present = present.astype(object)
    if kind in ("datetime", "timedelta") and types.is_numeric_dtype(present.dtype):
        return None  # Seconds or nanoseconds, since when? Nobody knows.
    try:
        if kind == "datetime":
            if isinstance(present.dtype, pd.PeriodDtype):
                present = present.dt.to_timestamp()
            moments = pd.to_datetime(
                present if _dated(present.dtype) else present.astype(object),
                utc=True,
                format="ISO8601" if is_text(present) else None,
            )
            return _microseconds(moments.astype("datetime64[us, UTC]")) / 1e6
        if kind == "timedelta":
            spans = pd.to_timedelta(present.astype(object))
            return _microseconds(spans.astype("timedelta64[us]")) / 1e6
        if getattr(present.dtype, "kind", "") in ("m", "M"):
            return None
        numbers = present.astype(object).to_numpy() if is_text(present) else present
        return np.asarray(numbers, dtype=np.float64)
    except _REFUSALS:
        return None


def _dated(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype | pd.DatetimeTZDtype) and dtype.kind == "M"


def _microseconds(times: pd.Series) -> np.ndarray:
    return times.astype("int64").to_numpy(dtype=np.float64)


def step_of(kind: str, numbers: np.ndarray) -> float:
    """The largest of day, hour, minute and second that all times are multiples of.

    >>> step_of("datetime", np.array([86400.0, 3600.0]))
    3600.0
    """
    if kind == "integer":
        return 1.0
    if kind in ("datetime", "timedelta"):
        for step in (86400.0, 3600.0, 60.0, 1.0):
            if np.all(np.fmod(numbers, step) == 0):
                return step
    return 0.0


def few_values(kind: str, numbers: np.ndarray) -> tuple[float, ...]:
    """The values of a number that has few, each of them often: grades, doses, counts.

    >>> few_values("number", np.repeat([0.5, 1.5], 10)), few_values("number", np.arange(20.0))
    ((0.5, 1.5), ())
    """
    if kind not in ("number", "integer"):
        return ()
    values = np.unique(numbers)
    often = len(values) <= MAX_VALUES and len(numbers) >= MIN_REPEATS * len(values)
    return tuple(values.tolist()) if often else ()


def digits_of(present: pd.Series) -> int | None:
    """The most digits after the point of a column of decimal numbers; None for other columns.

    >>> digits_of(pd.Series([decimal.Decimal("1.50"), decimal.Decimal("2")]))
    2
    """
    dtype: Any = present.dtype
    if _is_decimal(dtype):
        return int(dtype.pyarrow_dtype.scale)
    if not types.is_object_dtype(dtype) or types.infer_dtype(present) != "decimal":
        return None
    most = max(-int(number.as_tuple().exponent) for number in present)
    return min(max(most, 0), MAX_DIGITS)


def codes_of(series: pd.Series, levels: Sequence[Any]) -> np.ndarray:
    """The position of each cell's level, -1 for a cell that is none of them.

    >>> codes_of(pd.Series(["b", "?"]), ["a", "b"]).tolist()
    [1, -1]
    """
    index = pd.Index(list(levels), dtype=object)
    cells = series.astype(object)
    try:
        return index.get_indexer(pd.Index(cells, dtype=object))
    except _REFUSALS:
        # Lists and the like cannot be looked up: no level, so unknown.
        place = {level: code for code, level in enumerate(levels)}
        return np.array(
            [place.get(cell, -1) if isinstance(cell, Hashable) else -1 for cell in cells]
        )


# ---------------------------------------------------------------------- numbers -> cells


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
        except _REFUSALS:
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
    if _is_dictionary(dtype):
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
    if _is_decimal(dtype) or (objects and _holds_decimals(column, present)):
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
    if _is_decimal(dtype):
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
