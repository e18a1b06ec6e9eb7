"""Tables as people have them <-> the one matrix that the model sees.

`TableEncoder` learns a schema from a DataFrame, turns a table into an `EncodedTable`, and puts
predictions back into the user's own table, touching nothing but its gaps.

What each kind of column becomes:

=========== ============================================ ======================================
kind        dtypes                                       for the model
=========== ============================================ ======================================
number      floats                                       scaled number
integer     integers; floats that hold whole numbers     scaled number, rounded on the way back
datetime    datetimes, with or without time zone         scaled number of seconds
timedelta   timedeltas                                   scaled number of seconds
boolean     bool, boolean, object holding bools          category with two levels
category    category, strings                            category
ignored     excluded, text, identifiers, empty columns   not seen; comes back as it was
=========== ============================================ ======================================
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from pandas.api import types

from remasker.errors import InvalidConfigError, InvalidTableError, check_choice, nearest

NUMERIC_KINDS = ("number", "integer", "datetime", "timedelta")
CATEGORICAL_KINDS = ("boolean", "category")
KINDS = (*NUMERIC_KINDS, *CATEGORICAL_KINDS, "ignored")
SCALINGS = ("standard", "minmax")
#: Rarer levels of a column with more than this many are kept in the table but unknown to the model.
MAX_CATEGORIES = 256


@dataclass(frozen=True, kw_only=True)
class EncodedTable:
    """The only thing that crosses from pandas to torch.

    `values` is float32, rows × modelled columns: scaled numbers, or the code of a category; 0 where
    a cell is not observed. `n_categories` has one entry per column, 0 for a number.
    """

    values: np.ndarray
    observed: np.ndarray
    n_categories: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.values)

    def hide(self, hidden: np.ndarray) -> EncodedTable:
        """The same table with more cells missing.

        >>> table = EncodedTable(
        ...     values=np.ones((2, 1)), observed=np.ones((2, 1), dtype=bool), n_categories=(0,)
        ... )
        >>> table.hide(np.array([[True], [False]])).observed.tolist()
        [[False], [True]]
        """
        observed = self.observed & ~hidden
        return replace(self, values=np.where(observed, self.values, 0), observed=observed)


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
    """Names for an error message, at most five of them.

    >>> quoted(["a", 1])
    "'a', 1"
    """
    names = [repr(name) for name in names]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class TableEncoder:
    """Learns the kinds, scales and levels of a table's columns; encodes and completes tables.

    >>> frame = pd.DataFrame({"age": [31.0, None, 47.5], "city": ["Rome", "Oslo", None]})
    >>> encoder = TableEncoder().fit(frame)
    >>> encoder.encode(frame).observed.tolist()
    [[True, True], [False, True], [True, False]]
    >>> encoder.complete(frame, np.zeros((3, 2)))
        age  city
    0  31.00  Rome
    1  39.25  Oslo
    2  47.50  Oslo
    """

    def __init__(
        self,
        *,
        kinds: Mapping[Hashable, str] | None = None,
        exclude: Sequence[Hashable] = (),
        bounds: str | Mapping[Hashable, tuple[float | None, float | None]] | None = None,
        missing_values: object = np.nan,
        scaling: str = "standard",
        text: str = "ignore",
        whole_numbers: bool = True,
    ) -> None:
        self.kinds = dict(kinds or {})
        self.exclude = tuple(exclude)
        self.bounds = bounds
        self.missing_values = missing_values
        self.scaling = scaling
        self.text = text
        self.whole_numbers = whole_numbers
        self.columns: tuple[Column, ...] = ()

    # ------------------------------------------------------------------ learning the schema

    def fit(self, frame: pd.DataFrame) -> TableEncoder:
        """Learn the schema from the observed cells of `frame`."""
        self._check_settings(frame)
        columns = [self._describe(name, frame[name]) for name in frame.columns]
        empty = [column.name for column in columns if column.reason == "empty"]
        if empty:
            warnings.warn(
                f"column {quoted(empty)}: nothing is observed, so there is nothing to learn from; "
                "left missing",
                stacklevel=4,
            )
        text = [column for column in columns if column.reason == "text"]
        if text and self.text == "raise":
            raise InvalidTableError(
                f"column {quoted(c.name for c in text)}: almost every value is different, so this "
                "is free text or an identifier; name it in exclude, or give its kind in kinds"
            )
        if text:
            warnings.warn(
                f"column {quoted(c.name for c in text)}: almost every value is different, so this "
                "is free text or an identifier; left as it is (to model it anyway: "
                f"kinds={{{text[0].name!r}: 'category'}})",
                stacklevel=4,
            )
        self.columns = tuple(columns)
        return self

    def _check_settings(self, frame: pd.DataFrame) -> None:
        names = list(frame.columns)
        if len(names) == 0:
            raise InvalidTableError(
                f"0 feature(s) (shape={frame.shape}) while a minimum of 1 is required."
            )
        if len(frame) == 0:
            raise InvalidTableError(
                "the table has no rows (0 sample(s)) while a minimum of 1 is required."
            )
        duplicates = frame.columns[frame.columns.duplicated()].unique()
        if len(duplicates):
            raise InvalidTableError(
                f"column name {quoted(duplicates)} appears more than once; rename the columns"
            )
        for role, listed in (
            ("kinds", self.kinds),
            ("exclude", self.exclude),
            ("bounds", self.bounds if isinstance(self.bounds, Mapping) else ()),
        ):
            for name in listed:
                if name not in names:
                    raise InvalidConfigError(
                        f"{role} names column {name!r}, which the table does not have"
                        f"{nearest(name, names)}"
                    )
        for name, kind in self.kinds.items():
            check_choice(f"kinds[{name!r}]", kind, KINDS)
        check_choice("scaling", self.scaling, SCALINGS)
        check_choice("text", self.text, ("ignore", "raise"))
        if isinstance(self.bounds, str):
            check_choice("bounds", self.bounds, ("observed",))

    def _describe(self, name: Hashable, series: pd.Series) -> Column:
        missing = self.missing(series)
        dtype = str(series.dtype)
        ignored = Column(name=name, kind="ignored", dtype=dtype, missing_rate=float(missing.mean()))
        if name in self.exclude or self.kinds.get(name) == "ignored":
            return replace(ignored, reason="excluded")
        if missing.all():
            return replace(ignored, reason="empty")
        present = series[~missing]
        kind = self.kinds.get(name) or kind_of(name, present)
        if kind == "ignored":
            return replace(ignored, reason=f"dtype {dtype}")
        if kind in CATEGORICAL_KINDS:
            return self._describe_categories(name, kind, present, ignored)
        numbers = to_numbers(name, kind, present)
        infinite = np.flatnonzero(np.isinf(numbers))
        if len(infinite):
            raise InvalidTableError(
                f"column {name!r}: found inf in row {present.index[infinite[0]]!r}; "
                "replace it with a number or with a missing value"
            )
        if kind == "number" and self.whole_numbers and name not in self.kinds and _whole(numbers):
            kind = "integer"
        low, high = float(numbers.min()), float(numbers.max())
        if self.scaling == "minmax":
            center, scale = low, high - low
        else:
            # Through the largest magnitude, so that 1e300 does not overflow when squared.
            unit = max(abs(low), abs(high)) or 1.0
            center, scale = (
                unit * float((numbers / unit).mean()),
                unit * float((numbers / unit).std()),
            )
        # A scale that vanishes beside the values is rounding error: the column is constant.
        if not scale > 1e-12 * max(abs(low), abs(high)):
            scale = 1.0
        return replace(ignored, kind=kind, center=center, scale=scale, low=low, high=high)

    def _describe_categories(
        self, name: Hashable, kind: str, present: pd.Series, ignored: Column
    ) -> Column:
        levels = present.astype(object).value_counts(sort=False)
        text = types.is_string_dtype(present.dtype) or types.is_object_dtype(present.dtype)
        if text and name not in self.kinds and len(levels) > max(10, len(present) / 2):
            return replace(ignored, reason="text")
        if len(levels) > MAX_CATEGORIES:
            levels = levels.sort_values(ascending=False, kind="stable").iloc[:MAX_CATEGORIES]
        if isinstance(present.dtype, pd.CategoricalDtype):
            categories = [level for level in present.cat.categories if level in levels.index]
        else:
            categories = sorted(levels.index, key=lambda level: (str(type(level)), level))
        plain = [level.item() if isinstance(level, np.generic) else level for level in categories]
        if not all(isinstance(level, str | int | float | bool) for level in plain):
            return replace(ignored, reason=f"levels of type {type(plain[0]).__name__}")
        return replace(ignored, kind=kind, categories=tuple(plain))

    def missing(self, series: pd.Series) -> np.ndarray:
        """Which cells of a column are gaps.

        >>> TableEncoder(missing_values=-1).missing(pd.Series([1.0, -1.0, None])).tolist()
        [False, True, True]
        """
        missing = series.isna().to_numpy(dtype=bool)
        markers = self.missing_values
        for marker in markers if isinstance(markers, list | tuple | set) else [markers]:
            if not (marker is None or marker is pd.NA or marker != marker):
                equal = (series == marker).fillna(False)
                missing = missing | equal.to_numpy(dtype=bool)
        return missing

    # ------------------------------------------------------------------ table -> matrix

    @property
    def modelled(self) -> tuple[Column, ...]:
        """The columns that the model sees, in order."""
        return tuple(column for column in self.columns if column.modelled)

    def encode(self, frame: pd.DataFrame) -> EncodedTable:
        """The table as the model sees it; columns may come in any order."""
        columns = self.modelled
        values = np.zeros((len(frame), len(columns)), dtype=np.float32)
        observed = np.zeros(values.shape, dtype=bool)
        for j, column in enumerate(columns):
            series = frame[column.name]
            present = ~self.missing(series)
            if not present.any():
                continue
            if column.categorical:
                codes = _codes(series, column)
                # A level never seen in fit is unknown to the model; the cell itself is kept.
                present &= codes >= 0
                values[:, j] = np.where(present, codes, 0)
            else:
                numbers = np.full(len(frame), column.center)
                numbers[present] = to_numbers(column.name, column.kind, series[present])
                infinite = np.flatnonzero(np.isinf(numbers))
                if len(infinite):
                    raise InvalidTableError(
                        f"column {column.name!r}: found inf in row {frame.index[infinite[0]]!r}; "
                        "replace it with a number or with a missing value"
                    )
                # New rows may lie far outside what fit saw; float32 and the model need a limit.
                scaled = np.clip((numbers - column.center) / column.scale, -1e4, 1e4)
                values[:, j] = np.where(present, scaled, 0)
            observed[:, j] = present
        return EncodedTable(
            values=values,
            observed=observed,
            n_categories=tuple(len(column.categories) for column in columns),
        )

    def check_columns(self, frame: pd.DataFrame) -> None:
        """Refuse a table whose columns are not those of `fit`; order does not matter."""
        expected = [column.name for column in self.columns]
        absent = [name for name in expected if name not in frame.columns]
        extra = [name for name in frame.columns if name not in set(expected)]
        if absent or extra or len(frame.columns) != len(expected):
            parts = [f"missing {quoted(absent)}"] if absent else []
            parts += [f"not seen in fit: {quoted(extra)}"] if extra else []
            parts = parts or ["a name appears more than once"]
            raise InvalidTableError("the columns differ from those of fit: " + "; ".join(parts))

    # ------------------------------------------------------------------ matrix -> table

    def gaps(self, frame: pd.DataFrame) -> np.ndarray:
        """Which cells of the modelled columns are missing in the user's own table.

        A level that the model does not know is not a gap: its cell is kept.
        """
        gaps = [self.missing(frame[column.name]) for column in self.modelled]
        return np.stack(gaps, axis=1) if gaps else np.zeros((len(frame), 0), dtype=bool)

    def in_units(self, encoded: np.ndarray) -> np.ndarray:
        """Encoded numbers in the units of their columns, bounded and rounded; codes unchanged."""
        result = np.asarray(encoded, dtype=np.float64).copy()
        for j, column in enumerate(self.modelled):
            if column.categorical:
                continue
            numbers = column.center + column.scale * result[..., j]
            low, high = self._bounds(column)
            numbers = np.clip(numbers, low, high)
            if column.kind == "integer":
                # Rounding must not step over a bound.
                numbers = np.clip(
                    np.rint(numbers),
                    math.ceil(low) if math.isfinite(low) else low,
                    math.floor(high) if math.isfinite(high) else high,
                )
            result[..., j] = numbers
        return result

    def complete(self, frame: pd.DataFrame, encoded: np.ndarray) -> pd.DataFrame:
        """A copy of `frame` with its gaps filled from `encoded`, and nothing else changed."""
        filled = self.in_units(encoded)
        gaps = self.gaps(frame)
        result = frame.copy()
        for j, column in enumerate(self.modelled):
            missing = gaps[:, j]
            if missing.any():
                position = frame.columns.get_loc(column.name)
                series = _fill(frame[column.name], missing, filled[missing, j], column)
                result.isetitem(position, series)
        return result

    def _bounds(self, column: Column) -> tuple[float, float]:
        if self.bounds == "observed":
            return column.low, column.high
        if isinstance(self.bounds, Mapping) and column.name in self.bounds:
            low, high = self.bounds[column.name]
            limits = [
                default if limit is None else _as_number(column, limit)
                for limit, default in ((low, -math.inf), (high, math.inf))
            ]
            if limits[0] > limits[1]:
                raise InvalidConfigError(
                    f"bounds of column {column.name!r}: expected (low, high), got {(low, high)!r}"
                )
            return limits[0], limits[1]
        # The whole range of float64 is too wide for a column of smaller floats or integers.
        return -math.inf, math.inf

    # ------------------------------------------------------------------ the schema on disk

    def to_dict(self) -> dict[str, Any]:
        """The schema as plain JSON values.

        >>> encoder = TableEncoder().fit(pd.DataFrame({"a": [1.5, 2.0]}))
        >>> TableEncoder.from_dict(encoder.to_dict()).columns == encoder.columns
        True
        """
        markers = self.missing_values
        bounds = self.bounds
        if isinstance(bounds, Mapping):
            bounds = [  # type: ignore[assignment]
                [name, [None if limit is None else _jsonable_limit(limit) for limit in pair]]
                for name, pair in bounds.items()
            ]
        return {
            "bounds": bounds,
            "missing_values": list(markers)
            if isinstance(markers, list | tuple | set)
            else ([] if markers is None or markers is pd.NA or markers != markers else [markers]),
            "columns": [
                {
                    key: (None if isinstance(value, float) and math.isnan(value) else value)
                    for key, value in asdict(column).items()
                }
                for column in self.columns
            ],
        }

    @classmethod
    def from_dict(cls, schema: Mapping[str, Any]) -> TableEncoder:
        """The inverse of `to_dict`."""
        bounds = schema["bounds"]
        if isinstance(bounds, list):
            bounds = {_name(name): tuple(pair) for name, pair in bounds}
        encoder = cls(bounds=bounds, missing_values=list(schema["missing_values"]))
        encoder.columns = tuple(
            Column(
                **{
                    **column,
                    "name": _name(column["name"]),
                    "categories": tuple(column["categories"]),
                    "low": math.nan if column["low"] is None else column["low"],
                    "high": math.nan if column["high"] is None else column["high"],
                }
            )
            for column in schema["columns"]
        )
        return encoder


def kind_of(name: Hashable, present: pd.Series) -> str:
    """The kind that the dtype of a column's observed cells decides.

    >>> kind_of("paid", pd.Series([True, False], dtype=object))
    'boolean'
    """
    dtype = present.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return "category"
    if types.is_bool_dtype(dtype):
        return "boolean"
    if types.is_complex_dtype(dtype):
        return "ignored"
    if types.is_integer_dtype(dtype):
        return "integer"
    if types.is_float_dtype(dtype):
        return "number"
    if types.is_datetime64_any_dtype(dtype):
        return "datetime"
    if types.is_timedelta64_dtype(dtype) or str(dtype).startswith("duration"):
        return "timedelta"
    if types.is_object_dtype(dtype):
        return _kind_of_objects(name, present)
    if types.is_string_dtype(dtype):
        return "category"
    return "ignored"


def _kind_of_objects(name: Hashable, present: pd.Series) -> str:
    inferred = types.infer_dtype(present, skipna=True)
    known = {
        "string": "category",
        "boolean": "boolean",
        "integer": "integer",
        "floating": "number",
        "mixed-integer-float": "number",
        "datetime": "datetime",
        "datetime64": "datetime",
        "timedelta": "timedelta",
        "timedelta64": "timedelta",
    }
    if inferred in known:
        return known[inferred]
    examples: dict[type, object] = {}
    for value in present:
        examples.setdefault(type(value), value)
    # Numbers that are not bools go together; everything else must be of one type.
    if len(examples) > 1 and not all(
        issubclass(t, int | float | np.number) and t is not bool for t in examples
    ):
        (first, one), (second, other) = list(examples.items())[:2]
        raise InvalidTableError(
            f"column {name!r}: mixes {first.__name__} ({one!r}) and {second.__name__} ({other!r}); "
            "convert it to one type, or name it in exclude"
        )
    return "number" if len(examples) > 1 else "ignored"


def to_numbers(name: Hashable, kind: str, present: pd.Series) -> np.ndarray:
    """Observed cells of a numeric column as float64; times as seconds.

    >>> to_numbers("t", "timedelta", pd.Series(pd.to_timedelta(["1min", "2min"]))).tolist()
    [60.0, 120.0]
    """
    try:
        if kind == "datetime":
            moments = pd.to_datetime(present, utc=True).astype("datetime64[us, UTC]")
            return moments.astype("int64").to_numpy(dtype=np.float64) / 1e6
        if kind == "timedelta":
            spans = pd.to_timedelta(present).astype("timedelta64[us]")
            return spans.astype("int64").to_numpy(dtype=np.float64) / 1e6
        return present.to_numpy(dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        pass
    wanted = {"datetime": "dates", "timedelta": "durations"}.get(kind, "numbers")
    for row, value in present.items():
        try:
            to_numbers_one = pd.Series([value])
            if kind == "datetime":
                pd.to_datetime(to_numbers_one, utc=True)
            elif kind == "timedelta":
                pd.to_timedelta(to_numbers_one)
            else:
                float(value)
        except (ValueError, TypeError, OverflowError):
            raise InvalidTableError(
                f"column {name!r}: expected {wanted}, found {value!r} in row {row!r}; "
                "list it in missing_values, or name the column in exclude"
            ) from None
    raise InvalidTableError(
        f"column {name!r}: cannot be read as {wanted} (dtype {present.dtype}); "
        "convert it, or name it in exclude"
    )


def _codes(series: pd.Series, column: Column) -> np.ndarray:
    levels = pd.Index(list(column.categories), dtype=object)
    return levels.get_indexer(pd.Index(series.astype(object), dtype=object))


def _fill(series: pd.Series, missing: np.ndarray, filled: np.ndarray, column: Column) -> pd.Series:
    """`series` with the cells in `missing` replaced, in its own dtype where that can hold them."""
    values: Any
    dtype = series.dtype
    if column.categorical:
        values = np.array(column.categories, dtype=object)[filled.astype(int)]
        if isinstance(dtype, pd.CategoricalDtype) and not set(values) <= set(dtype.categories):
            # The table at hand declares fewer levels than fit saw.
            unknown = [level for level in column.categories if level not in dtype.categories]
            series = series.cat.add_categories(unknown)
            dtype = series.dtype
    elif column.kind == "datetime":
        values = pd.to_datetime(_in_range(filled * 1e6), unit="us", utc=True)
        zone = getattr(dtype, "tz", None) or getattr(
            getattr(dtype, "pyarrow_dtype", None), "tz", None
        )
        values = values.tz_convert(zone) if zone is not None else values.tz_localize(None)
        values = values.as_unit(_unit(dtype))
    elif column.kind == "timedelta":
        values = pd.to_timedelta(_in_range(filled * 1e6), unit="us").as_unit(_unit(dtype))
    else:
        values = filled
        integer = types.is_integer_dtype(dtype)
        if integer or types.is_float_dtype(dtype):
            # Never beyond what the column's own dtype can hold.
            numpy_dtype = np.dtype(getattr(dtype, "numpy_dtype", dtype))
            limits = np.iinfo(numpy_dtype) if integer else np.finfo(numpy_dtype)
            values = np.clip(values, float(limits.min), float(limits.max))
            if integer:
                inside = np.clip(np.rint(values), -(2.0**63), np.nextafter(2.0**63, 0))
                values = inside.astype(np.int64)
                if numpy_dtype.itemsize == 8 and numpy_dtype.kind == "u":
                    values = np.clip(np.rint(filled), 0, np.nextafter(2.0**64, 0)).astype(np.uint64)
    if isinstance(dtype, np.dtype):
        array = series.to_numpy(copy=True)
        array[missing] = values
        return pd.Series(array, index=series.index, name=series.name, dtype=dtype)
    extension = series.array.copy()
    extension[missing] = pd.array(values, dtype=dtype)
    return pd.Series(extension, index=series.index, name=series.name)


def _unit(dtype: Any) -> str:
    unit = getattr(dtype, "unit", None)
    if unit is None:
        unit = getattr(getattr(dtype, "pyarrow_dtype", None), "unit", None)
    if unit is None and isinstance(dtype, np.dtype) and dtype.kind in "mM":
        unit = np.datetime_data(dtype)[0]
    return unit or "us"


def _in_range(microseconds: np.ndarray) -> np.ndarray:
    """Within what nanosecond dates can hold, so that an imputed date never overflows."""
    limit = 9.2e15
    return np.rint(np.clip(microseconds, -limit, limit)).astype(np.int64)


def _whole(numbers: np.ndarray) -> bool:
    """Whether floats are counts. Zeros and ones alone may as well be rates, so they are not."""
    return bool(np.all(np.rint(numbers) == numbers) and np.abs(numbers).max() > 1)


def _as_number(column: Column, limit: Any) -> float:
    return float(to_numbers(column.name, column.kind, pd.Series([limit]))[0])


def _jsonable_limit(limit: Any) -> Any:
    return limit if isinstance(limit, int | float | str) else str(limit)


def _name(name: Any) -> Hashable:
    return tuple(name) if isinstance(name, list) else name
