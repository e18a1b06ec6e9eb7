"""What `TableEncoder` has learned as plain JSON values, and back."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import asdict
from typing import Any

import pandas as pd

from remasker.columns import Column, plain


def column_to_json(column: Column) -> dict[str, Any]:
    """A column as JSON can hold it.

    >>> column_from_json(column_to_json(Column(name="a", kind="number", dtype="float64"))).name
    'a'
    """
    settings = {
        key: (None if isinstance(value, float) and math.isnan(value) else value)
        for key, value in asdict(column).items()
    }
    return {**settings, "categories": [_level_to_json(level) for level in column.categories]}


def column_from_json(stored: Mapping[str, Any]) -> Column:
    """The inverse of `column_to_json`."""
    settings = {
        **stored,
        "name": name_from_json(stored["name"]),
        "categories": tuple(map(_level_from_json, stored["categories"])),
        "values": tuple(stored.get("values", ())),
        "low": math.nan if stored["low"] is None else stored["low"],
        "high": math.nan if stored["high"] is None else stored["high"],
    }
    return Column(**settings)


def jsonable(value: Any) -> Any:
    """A bound or a marker for JSON, which knows no infinity and no dates."""
    value = plain(value)
    if value is None or (isinstance(value, float) and math.isinf(value)):
        return None
    return value if isinstance(value, int | float | str) else str(value)


def storable(level: Any) -> bool:
    """Whether JSON can hold a level: a text, a number, or an interval of numbers as `pd.cut` makes.

    >>> storable(pd.Interval(18, 25)), storable(math.inf), storable(pd.Timestamp(0))
    (True, False, False)
    """
    if isinstance(level, pd.Interval):
        ends = plain(level.left), plain(level.right)
        return all(isinstance(end, int | float) for end in ends)
    return isinstance(level, str | int | float) and level not in (math.inf, -math.inf)


def _level_to_json(level: Any) -> Any:
    if not isinstance(level, pd.Interval):
        return level
    # As texts, which know the open ends of `pd.cut(ages, [-inf, 18, inf])` too.
    return {
        "left": repr(plain(level.left)),
        "right": repr(plain(level.right)),
        "closed": level.closed,
    }


def _level_from_json(level: Any) -> Any:
    if not isinstance(level, Mapping):
        return level
    return pd.Interval(_end(level["left"]), _end(level["right"]), closed=level["closed"])


def _end(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def name_from_json(name: Any) -> Hashable:
    """A column's name, which may be a tuple; JSON has lists only."""
    return tuple(name) if isinstance(name, list) else name
