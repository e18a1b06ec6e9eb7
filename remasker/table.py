"""Tables as people have them <-> the one matrix that the model sees.

`TableEncoder` learns a schema from a DataFrame, turns a table into an `EncodedTable`, and puts
predictions back into the user's own table, touching nothing but its gaps.

What each kind of column becomes:

=========== ============================================ ======================================
kind        dtypes                                       for the model
=========== ============================================ ======================================
number      floats, decimals                             scaled number
integer     integers; floats that hold whole numbers     scaled number, rounded on the way back
datetime    dates, datetimes, periods                    scaled number of seconds
timedelta   timedeltas                                   scaled number of seconds
boolean     bool, boolean, object holding bools          category with two levels
category    category, strings, intervals of numbers      category
ignored     excluded, text, identifiers, empty columns,  not seen; comes back as it was
            any other dtype (complex, lists, …)
=========== ============================================ ======================================

The policy for odd tables, each case held by `tests/test_table_policy.py`:

=================================== ==============================================================
nothing missing                     fits; `transform` returns an equal copy
no rows, or no columns              error
one row, one column                 fits; gaps get what little is known (the mean, the usual level)
a row with nothing observed         filled as a typical row
constant column                     its gaps get the constant
column without any observed cell    left missing, one warning that names it; dropped if
                                    ``keep_empty_features=False``
column names that appear twice      error that names them
inf                                 error that names column and row
object column of mixed types        error with a value of each of two types
free text, identifiers              left as they are, one warning; an error if ``text="raise"``
dtypes of no kind                   left as they are, one warning
level not seen in fit               the cell is kept; the model takes it as unknown
level seen once                     a level like any other
more than `MAX_CATEGORIES` levels   the rarer ones are kept in the table and unknown to the model
columns missing or new at transform error that lists them; their order does not matter
numbers of very different magnitude each column has its own scale; imputed values never overflow
a column that is a copy of another  nothing special
a marker in `missing_values`        a gap like any other; 0 is not False, 1 is not True
=================================== ==============================================================
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from remasker.columns import (
    CATEGORICAL_KINDS,
    KINDS,
    Column,
    check_kind,
    codes_of,
    dense,
    digits_of,
    few_values,
    is_text,
    kind_of,
    missing_cells,
    plain,
    quoted,
    step_of,
    to_numbers,
)
from remasker.errors import InvalidConfigError, InvalidTableError, check_choice, nearest
from remasker.filling import fill
from remasker.schema import (
    column_from_json,
    column_to_json,
    jsonable,
    name_from_json,
    storable,
)

__all__ = ["MAX_CATEGORIES", "Column", "EncodedTable", "TableEncoder"]

SCALINGS = ("standard", "minmax")
#: Rarer levels of a column with more than this many are kept in the table but unknown to the model.
MAX_CATEGORIES = 256
#: How far from its center, in units of its scale, the model sees a number.
FARTHEST = 1e4


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

    def take(self, rows: np.ndarray) -> EncodedTable:
        """Some of the rows: a boolean per row, or their numbers.

        >>> table = EncodedTable(
        ...     values=np.eye(2), observed=np.ones((2, 2), dtype=bool), n_categories=(0, 0)
        ... )
        >>> table.take(np.array([False, True])).values.tolist()
        [[0.0, 1.0]]
        """
        return replace(self, values=self.values[rows], observed=self.observed[rows])

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
        kinds: Mapping[Any, str] | None = None,
        exclude: Sequence[Hashable] = (),
        bounds: str | Mapping[Any, tuple[Any, Any]] | None = None,
        missing_values: object = np.nan,
        scaling: str = "standard",
        text: str = "ignore",
        whole_numbers: bool = True,
    ) -> None:
        self.kinds = dict(kinds or {})
        self.exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
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
        columns = tuple(self._describe(name, dense(frame[name])) for name in frame.columns)
        self._speak_of_ignored(columns)
        self.columns = columns
        for column in columns:
            self._check_bounds(column)
        return self

    def _check_settings(self, frame: pd.DataFrame) -> None:
        names = list(frame.columns)
        if len(names) == 0:
            raise InvalidTableError(
                f"the table has no columns: 0 feature(s) (shape={frame.shape}) while a minimum of "
                "1 is required."
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
        check_choice("scaling", self.scaling, SCALINGS)
        check_choice("text", self.text, ("ignore", "raise"))
        if isinstance(self.bounds, str):
            check_choice("bounds", self.bounds, ("observed",))
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

    def _speak_of_ignored(self, columns: Sequence[Column]) -> None:
        """One warning for each reason to leave columns alone, naming them."""
        reasons: dict[str, list[Hashable]] = {}
        for column in columns:
            reasons.setdefault(column.reason, []).append(column.name)
        for reason, names in reasons.items():
            if reason in ("", "excluded"):
                continue
            subject = f"column {quoted(names)}"
            if reason == "empty":
                message = "nothing is observed, so there is nothing to learn from; left missing"
            elif reason == "text":
                cause = "almost every value is different, so this is free text or an identifier"
                if self.text == "raise":
                    raise InvalidTableError(
                        f"{subject}: {cause}; name it in exclude, or give its kind in kinds"
                    )
                message = (
                    f"{cause}; left as it is (to model it anyway: kinds={{{names[0]!r}: "
                    "'category'})"
                )
            else:
                message = f"cannot model {reason}; left as it is (convert it to model it)"
            warnings.warn(f"{subject}: {message}", stacklevel=4)

    def _describe(self, name: Hashable, series: pd.Series) -> Column:
        missing = self.missing(series)
        dtype = str(series.dtype)
        ignored = Column(name=name, kind="ignored", dtype=dtype, missing_rate=float(missing.mean()))
        given = self.kinds.get(name)
        if name in self.exclude or given == "ignored":
            return replace(ignored, reason="excluded")
        if missing.all():
            return replace(ignored, reason="empty")
        present = series[~missing]
        if given is not None:
            check_kind(name, given, present)
        kind = given or kind_of(name, present)
        if kind == "ignored":
            of = f" of {type(present.iloc[0]).__name__}" if dtype == "object" else ""
            return replace(ignored, reason=f"dtype {dtype}{of}")
        if kind in CATEGORICAL_KINDS:
            return self._describe_levels(kind, given, present, ignored)
        numbers = to_numbers(name, kind, present)
        if kind == "number" and given is None and self.whole_numbers and _whole(numbers):
            kind = "integer"
        low, high = float(numbers.min()), float(numbers.max())
        largest = max(abs(low), abs(high))
        with np.errstate(over="ignore", under="ignore"):
            if self.scaling == "minmax":
                center, scale = low, min(high - low, float(np.finfo(np.float64).max))
            else:
                # Through the largest magnitude, so that 1e300 does not overflow when squared.
                unit = largest or 1.0
                center = unit * float((numbers / unit).mean())
                scale = unit * float((numbers / unit).std())
        # A scale that vanishes beside the values is rounding error: the column is constant.
        if not scale > max(1e-12 * largest, np.finfo(np.float64).tiny):
            scale = 1.0
        return replace(
            ignored,
            kind=kind,
            center=center,
            scale=scale,
            low=low,
            high=high,
            step=step_of(kind, numbers),
            values=few_values(kind, numbers),
            digits=digits_of(present),
        )

    def _describe_levels(
        self, kind: str, given: str | None, present: pd.Series, ignored: Column
    ) -> Column:
        counts = present.astype(object).value_counts(sort=False)
        if given is None and is_text(present) and len(counts) > max(10, len(present) / 2):
            return replace(ignored, reason="text")
        if kind == "boolean" and len(counts) > 2:
            raise InvalidTableError(
                f"column {ignored.name!r}: kind 'boolean' has two levels, found "
                f"{quoted(counts.index[:5])}; make it a category"
            )
        if len(counts) > MAX_CATEGORIES:
            counts = counts.sort_values(ascending=False, kind="stable").iloc[:MAX_CATEGORIES]
        if isinstance(present.dtype, pd.CategoricalDtype):
            known = set(counts.index)
            levels = [level for level in present.cat.categories if level in known]
        else:
            levels = sorted(counts.index, key=lambda level: (str(type(level)), level))
        levels = [plain(level) for level in levels]
        for level in levels:
            if not storable(level):
                of = repr(level) if isinstance(level, float) else f"type {type(level).__name__}"
                return replace(ignored, reason=f"levels of {of}")
        return replace(ignored, kind=kind, categories=tuple(levels))

    @property
    def _markers(self) -> list[Any]:
        """What marks a gap besides NaN, None and NA."""
        given = self.missing_values
        markers = list(given) if isinstance(given, list | tuple | set | frozenset) else [given]
        return [plain(m) for m in markers if not (m is None or m is pd.NA or m is pd.NaT or m != m)]

    def missing(self, series: pd.Series) -> np.ndarray:
        """Which cells of a column are gaps.

        >>> TableEncoder(missing_values=-1).missing(pd.Series([1.0, -1.0, None])).tolist()
        [False, True, True]
        """
        return missing_cells(series, self._markers)

    # ------------------------------------------------------------------ table -> matrix

    @property
    def modelled(self) -> tuple[Column, ...]:
        """The columns that the model sees, in order."""
        return tuple(column for column in self.columns if column.modelled)

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

    def encode(self, frame: pd.DataFrame) -> EncodedTable:
        """The table as the model sees it; columns may come in any order."""
        columns = self.modelled
        values = np.zeros((len(frame), len(columns)), dtype=np.float32)
        observed = np.zeros(values.shape, dtype=bool)
        for j, column in enumerate(columns):
            series = dense(frame[column.name])
            present = ~self.missing(series)
            if not present.any():
                continue
            if column.categorical:
                codes = codes_of(series, column.categories)
                # A level never seen in fit is unknown to the model; the cell itself is kept.
                present &= codes >= 0
                values[present, j] = codes[present]
            else:
                numbers = to_numbers(column.name, column.kind, series[present])
                # New rows may lie far outside what fit saw; float32 and the model need a limit.
                # Halved, so that the difference of two huge numbers is a number.
                with np.errstate(over="ignore", under="ignore"):
                    scaled = 2 * ((numbers / 2 - column.center / 2) / column.scale)
                values[present, j] = np.clip(scaled, -FARTHEST, FARTHEST)
            observed[:, j] = present
        return EncodedTable(
            values=values,
            observed=observed,
            n_categories=tuple(len(column.categories) for column in columns),
        )

    # ------------------------------------------------------------------ matrix -> table

    def gaps(self, frame: pd.DataFrame) -> np.ndarray:
        """Which cells of the modelled columns are missing in the user's own table.

        A level that the model does not know is not a gap: its cell is kept.
        """
        gaps = [self.missing(dense(frame[column.name])) for column in self.modelled]
        return np.stack(gaps, axis=1) if gaps else np.zeros((len(frame), 0), dtype=bool)

    def in_units(self, encoded: np.ndarray, *, drawn: bool = False) -> np.ndarray:
        """Encoded numbers in the units of their columns, bounded and rounded; codes unchanged.

        A number that was `drawn` is a value of its column where that has but few; an estimate may
        lie between them.

        >>> encoder = TableEncoder().fit(pd.DataFrame({"a": [0.0, 0.5] * 10}))
        >>> encoder.in_units(np.array([[-0.2], [3.0]]), drawn=True).ravel().tolist()
        [0.0, 0.5]
        """
        result = np.asarray(encoded, dtype=np.float64).copy()
        for j, column in enumerate(self.modelled):
            if column.categorical:
                continue
            low, high = self._limits(column)
            with np.errstate(over="ignore", under="ignore"):
                numbers = np.clip(column.center + column.scale * result[..., j], low, high)
                if column.step:
                    # Rounding must not step over a bound.
                    numbers = np.clip(
                        column.step * np.rint(numbers / column.step),
                        column.step * np.ceil(low / column.step),
                        column.step * np.floor(high / column.step),
                    )
            allowed = np.array([v for v in column.values if drawn and low <= v <= high])
            if len(allowed):
                numbers = allowed[np.searchsorted(allowed[1:] / 2 + allowed[:-1] / 2, numbers)]
            result[..., j] = numbers
        return result

    def complete(
        self, frame: pd.DataFrame, encoded: np.ndarray, *, drawn: bool = False
    ) -> pd.DataFrame:
        """A copy of `frame` with its gaps filled from `encoded`, and nothing else changed."""
        filled = self.in_units(encoded, drawn=drawn)
        gaps = self.gaps(frame)
        names: list[Hashable] = list(frame.columns)
        result = frame.copy()
        for j, column in enumerate(self.modelled):
            missing = gaps[:, j]
            if missing.any():
                position = names.index(column.name)
                array = fill(frame[column.name], missing, filled[missing, j], column)
                # As a Series with its dtype, or pandas would guess one for objects.
                filled_in = pd.Series(array, index=frame.index, dtype=array.dtype)
                result.isetitem(position, filled_in)
        return result

    def _limits(self, column: Column) -> tuple[float, float]:
        """Between which numbers an imputed value must lie."""
        largest = float(np.finfo(np.float64).max)
        if isinstance(self.bounds, Mapping) and column.name in self.bounds:
            low, high = self.bounds[column.name]
            return _limit(column, low, -largest), _limit(column, high, largest)
        if self.bounds == "observed" or column.low == column.high:
            return column.low, column.high
        return -largest, largest

    def _check_bounds(self, column: Column) -> None:
        if not isinstance(self.bounds, Mapping) or column.name not in self.bounds:
            return
        subject = f"bounds of column {column.name!r}"
        given = self.bounds[column.name]
        if column.modelled and not column.categorical:
            try:
                low, high = self._limits(column)
            except (TypeError, ValueError):
                pass
            else:
                if low > high:
                    raise InvalidConfigError(f"{subject}: the lower one is larger in {given!r}")
                if column.step and math.ceil(low / column.step) > math.floor(high / column.step):
                    raise InvalidConfigError(f"{subject}: no whole value lies within {given!r}")
                return
            raise InvalidConfigError(f"{subject}: expected (low, high), got {given!r}")
        raise InvalidConfigError(
            f"{subject}: only numbers, dates and durations have bounds; its kind is {column.kind!r}"
        )

    # ------------------------------------------------------------------ the schema on disk

    def to_dict(self) -> dict[str, Any]:
        """The schema as plain JSON values.

        >>> encoder = TableEncoder().fit(pd.DataFrame({"a": [1.5, 2.0]}))
        >>> TableEncoder.from_dict(encoder.to_dict()).columns == encoder.columns
        True
        """
        bounds: Any = self.bounds
        if isinstance(bounds, Mapping):
            bounds = [[name, [jsonable(limit) for limit in pair]] for name, pair in bounds.items()]
        return {
            "bounds": bounds,
            "missing_values": [jsonable(marker) for marker in self._markers],
            "columns": [column_to_json(column) for column in self.columns],
        }

    @classmethod
    def from_dict(cls, schema: Mapping[str, Any]) -> TableEncoder:
        """The inverse of `to_dict`."""
        bounds = schema["bounds"]
        if isinstance(bounds, list):
            bounds = {name_from_json(name): tuple(pair) for name, pair in bounds}
        encoder = cls(bounds=bounds, missing_values=list(schema["missing_values"]))
        encoder.columns = tuple(map(column_from_json, schema["columns"]))
        return encoder


def _whole(numbers: np.ndarray) -> bool:
    """Whether floats are counts. Zeros and ones alone may as well be rates, so they are not."""
    return bool(np.all(np.rint(numbers) == numbers) and np.abs(numbers).max() > 1)


def _limit(column: Column, limit: Any, default: float) -> float:
    """A bound as a number; None and infinity are no bound."""
    if limit is None or limit in (math.inf, -math.inf):
        return default
    return float(to_numbers(column.name, column.kind, pd.Series([limit]))[0])
