"""One column of a table: its kind and its way to numbers; `remasker.filling` has the way back."""

from __future__ import annotations

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
#: Seconds that a nanosecond time can hold.
_SPEAKABLE = (-9.2e9, 9.2e9)
REFUSALS = (TypeError, ValueError, OverflowError, NotImplementedError, ArithmeticError)


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

    def in_words(self, number: float) -> str:
        """One of its numbers as a person would write it.

        >>> Column(name="born", kind="datetime", dtype="datetime64[us]").in_words(86400.0)
        '1970-01-02'
        """
        if self.kind == "datetime":
            moment = pd.Timestamp(np.clip(number, *_SPEAKABLE), unit="s").round("s")
            return str(moment).removesuffix(" 00:00:00")
        if self.kind == "timedelta":
            return str(pd.Timedelta(np.clip(number, *_SPEAKABLE), "s").round("s"))
        return f"{number:.6g}"


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
    if isinstance(dtype, pd.CategoricalDtype | pd.IntervalDtype) or is_dictionary(dtype):
        return "category"
    if types.is_complex_dtype(dtype):
        return "ignored"
    if types.is_bool_dtype(dtype):
        return "boolean"
    if types.is_integer_dtype(dtype):
        return "integer"
    if types.is_float_dtype(dtype) or is_decimal(dtype):
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
    return types.is_string_dtype(series.dtype) and not is_dictionary(series.dtype)


def is_dictionary(dtype: Any) -> bool:
    """Whether Arrow keeps the levels apart from the cells."""
    return str(dtype).startswith("dictionary<")


def is_decimal(dtype: Any) -> bool:
    """Whether Arrow holds decimal numbers, exactly."""
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
    except REFUSALS:
        return np.zeros(len(series), dtype=bool)


def _same(cell: Any, marker: Any, truth: bool) -> bool:
    try:
        return isinstance(cell, bool | np.bool_) == truth and bool(cell == marker)
    except REFUSALS:
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
    if isinstance(present.dtype, pd.CategoricalDtype) or is_dictionary(present.dtype):
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
    except REFUSALS:
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

    >>> from decimal import Decimal
    >>> digits_of(pd.Series([Decimal("1.50"), Decimal("2")]))
    2
    """
    dtype: Any = present.dtype
    if is_decimal(dtype):
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
    except REFUSALS:
        # Lists and the like cannot be looked up: no level, so unknown.
        place = {level: code for code, level in enumerate(levels)}
        return np.array(
            [place.get(cell, -1) if isinstance(cell, Hashable) else -1 for cell in cells]
        )
