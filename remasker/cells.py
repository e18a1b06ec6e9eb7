"""The cells of a text file: what kind of column they write, their values, and new cells like them.

=========== ==================================================================================
kind        cells
=========== ==================================================================================
number      ``1.5``, ``1e3``, ``1.10``; ``1,5`` where the decimal is a comma
integer     ``15``, ``-3``; but ``007`` is a code: a column with leading zeros is a category
datetime    ISO 8601 (``2020-01-31``, ``2020-01-31T12:30:00Z``) and other ways to write a date that
            can be read in one way only (``31.01.2020``, ``1/31/2020``)
boolean     ``true`` and ``false`` in any case
category    everything else
=========== ==================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from remasker.errors import InvalidTableError

#: An unquoted cell with one of these texts is a gap; a quoted one is text, unless it is empty.
NA_TOKENS = (
    "", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NaT", "null", "NULL", "None", "?",
)  # fmt: skip

_NUMBER = r"^[+-]?(?:\d+{0}?\d*|{0}\d+)(?:[eE][+-]?\d+)?$"
_INFINITE = r"^[+-]?(?i:inf|infinity)$"
_CODE = r"^[+-]?0\d"
_THOUSANDS = r"^[+-]?[1-9]\d{0,2},\d{3}$"
_ISO = re.compile(
    r"(\d{4}-\d{2}-\d{2})(?:([T ])\d{2}:\d{2}(:\d{2})?(\.\d{1,9})?(Z|[+-]\d{2}:?\d{2})?)?"
)
_ISO_PATTERN = (
    r"^\d{4}-\d{2}-\d{2}"
    r"(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?:Z|[+-]\d{2}:?\d{2})?)?$"
)
_ZONED = r"(?:Z|:\d{2}.*[+-]\d{2}:?\d{2})$"
_OTHER_DATES = r"^\d{1,4}[./-]\d{1,2}[./-]\d{1,4}(?: \d{1,2}:\d{2}(?::\d{2})?)?$"
_ORDERS = ("%Y{0}%m{0}%d", "%d{0}%m{0}%Y", "%m{0}%d{0}%Y")


@dataclass(frozen=True, kw_only=True)
class CellFormat:
    """How one column of a text file writes its cells; plain values, so that a model can keep it."""

    kind: str
    #: Digits after the decimal sign; None where the column uses exponents.
    decimals: int | None = 0
    decimal: str = "."
    #: For `strftime`, then digits of a second's fraction, then the zone as it is written.
    date: str = ""
    fraction: int = 0
    zone: str = ""
    truth: tuple[str, str] = ("false", "true")

    def to_dict(self) -> dict[str, Any]:
        """Only what differs from the defaults.

        >>> CellFormat(kind="number", decimals=2).to_dict()
        {'kind': 'number', 'decimals': 2}
        """
        plain = CellFormat(kind="")
        return {k: v for k, v in asdict(self).items() if v != getattr(plain, k)}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> CellFormat:
        """The inverse of `to_dict`."""
        truth = tuple(settings.get("truth", ("false", "true")))
        return cls(**{**settings, "truth": truth})

    def write(self, value: Any) -> str:
        """One imputed value as this column would have written it.

        >>> CellFormat(kind="number", decimals=2, decimal=",").write(1.1)
        '1,10'
        """
        if self.kind == "integer":
            return str(int(value))
        if self.kind == "number":
            value = float(value)
            text = f"{value:.6g}" if self.decimals is None else f"{value:.{self.decimals}f}"
            if float(text) == 0:
                text = text.removeprefix("-")
            return text.replace(".", self.decimal)
        if self.kind == "datetime":
            return self._write_date(pd.Timestamp(value))
        if self.kind == "boolean" and isinstance(value, bool | np.bool_):
            return self.truth[int(value)]
        return str(value)

    def _write_date(self, moment: pd.Timestamp) -> str:
        if self.zone:
            offset = "+00:00" if self.zone == "Z" else self.zone
            moment = moment.tz_convert(pd.Timestamp(f"2000-01-01T00:00:00{offset}").tz)
        text = moment.strftime(self.date or "%Y-%m-%d %H:%M:%S")
        if self.fraction:
            text += "." + f"{moment.microsecond:06d}{moment.nanosecond:03d}"[: self.fraction]
        return text + self.zone


# ---------------------------------------------------------------------- reading a column


def guess(texts: pa.Array, decimal: str | None, comma_possible: bool) -> CellFormat:
    """The kind and the format that all cells of a column agree on; `texts` has no gaps.

    >>> guess(pa.array(["1.10", "2.5"]), None, False).decimals
    2
    >>> guess(pa.array(["007", "12"]), None, False).kind
    'category'
    """
    if len(texts) == 0:
        return CellFormat(kind="category")
    lowered = set(pc.unique(pc.utf8_lower(texts)).to_pylist()[:3])
    if lowered <= {"true", "false"}:
        return _truth_format(texts)
    if _all(texts, _CODE, negate=True):
        for sign in (decimal,) if decimal else (".", ",") if comma_possible else (".",):
            if _are_numbers(texts, sign) and (decimal or sign == "." or _decimal_comma(texts)):
                return _number_format(texts, sign)
    return _date_format(texts) or CellFormat(kind="category")


def as_told(
    name: str, kind: str, texts: pa.Array, decimal: str | None, comma_possible: bool
) -> CellFormat:
    """The format of a column whose kind is known: from the user, or from a fitted model."""
    guessed = guess(texts, decimal, comma_possible)
    if guessed.kind == kind:
        return guessed
    if kind in ("number", "integer"):
        signs = (decimal,) if decimal else (".", ",") if comma_possible else (".",)
        sign = next((sign for sign in signs if _are_numbers(texts, sign)), decimal or ".")
        return replace(_number_format(texts, sign), kind=kind)
    if kind == "boolean":
        return _truth_format(texts) if guessed.kind == "boolean" else CellFormat(kind="category")
    if kind == "datetime" and len(texts) and _all(texts, _OTHER_DATES):
        patterns = _patterns(texts)
        if len(patterns) > 1:
            raise InvalidTableError(
                f"column {name!r}: {texts[0].as_py()!r} may mean the day or the month first; give "
                f"its format, such as {name}=datetime:{patterns[0]}"
            )
    return CellFormat(kind=kind)


def parse(name: str, texts: pa.Array, gaps: np.ndarray, like: CellFormat) -> pd.Series:
    """The typed column: `texts` read as `like.kind`, with gaps where `gaps` says so.

    A cell that cannot be read stays text: the encoder will refuse it by its name and row.
    """
    present = texts.filter(pa.array(~gaps))
    if like.kind in ("number", "integer"):
        values = _numbers(present, like)
    elif like.kind == "datetime":
        values = _dates(present, like)
    elif like.kind == "boolean":
        values = pa.array([text.lower() == "true" for text in present.to_pylist()], pa.bool_())
    elif like.kind == "timedelta":
        try:
            values = pa.array(pd.to_timedelta(present.to_pylist()).as_unit("us"))
        except ValueError:
            values = present
    else:
        values = present
    dtype: Any = {"i": "Int64", "f": "float64", "b": "boolean"}.get(_letter(values.type), "str")
    if pa.types.is_timestamp(values.type):
        dtype = "datetime64[us]" if values.type.tz is None else "datetime64[us, UTC]"
    elif pa.types.is_duration(values.type):
        dtype = "timedelta64[us]"
    column = pd.Series(pd.NA if dtype in ("Int64", "boolean") else None, range(len(gaps)), dtype)
    if len(present):
        column[~gaps] = pd.array(values.to_pandas(), dtype=dtype)
    return column.rename(name)


def _letter(type_: pa.DataType) -> str:
    if pa.types.is_integer(type_):
        return "i"
    return "f" if pa.types.is_floating(type_) else "b" if pa.types.is_boolean(type_) else "s"


def _all(texts: pa.Array, pattern: str, *, negate: bool = False) -> bool:
    matched = pc.match_substring_regex(texts, pattern)
    return not pc.any(matched).as_py() if negate else bool(pc.all(matched).as_py())


def _are_numbers(texts: pa.Array, sign: str) -> bool:
    """Whether all are numbers; inf goes with them, so that it can be refused by its row."""
    finite = pc.match_substring_regex(texts, _NUMBER.format(re.escape(sign)))
    infinite = pc.match_substring_regex(texts, _INFINITE)
    return bool(pc.any(finite).as_py() and pc.all(pc.or_(finite, infinite)).as_py())


def _decimal_comma(texts: pa.Array) -> bool:
    """Whether commas are decimal signs; ``1,234`` alone may as well be one thousand or more."""
    with_comma = texts.filter(pc.match_substring(texts, ","))
    return len(with_comma) > 0 and not _all(with_comma, _THOUSANDS)


def _number_format(texts: pa.Array, sign: str) -> CellFormat:
    if len(texts) == 0:
        return CellFormat(kind="number", decimal=sign, decimals=None)
    finite = texts.filter(pc.invert(pc.match_substring_regex(texts, _INFINITE)))
    if not _all(finite, "[eE]", negate=True):
        return CellFormat(kind="number", decimals=None, decimal=sign)
    shown = pc.replace_substring_regex(finite, rf"^[^{sign}]*[{sign}]?", "")
    decimals = pc.max(pc.utf8_length(shown)).as_py() or 0
    whole = decimals == 0 and len(finite) == len(texts)
    return CellFormat(kind="integer" if whole else "number", decimals=decimals, decimal=sign)


def _numbers(texts: pa.Array, like: CellFormat) -> pa.Array:
    plain = pc.replace_substring_regex(texts, r"^\+", "")
    plain = plain if like.decimal == "." else pc.replace_substring(plain, like.decimal, ".")
    for type_ in (pa.int64(), pa.float64()) if like.kind == "integer" else (pa.float64(),):
        try:
            return pc.cast(plain, type_)
        except pa.ArrowInvalid:
            continue
    return texts


def _truth_format(texts: pa.Array) -> CellFormat:
    """The column's own spelling of true and false."""
    spelling = {"false": "false", "true": "true"}
    found = pc.unique(texts).to_pylist()
    for text in reversed(found):
        spelling[text.lower()] = text
    for absent, other in (("false", "true"), ("true", "false")):
        if not any(text.lower() == absent for text in found):
            style = spelling[other]
            spelling[absent] = (
                absent.upper() if style.isupper() else absent.title() if style.istitle() else absent
            )
    return CellFormat(kind="boolean", truth=(spelling["false"], spelling["true"]))


def _date_format(texts: pa.Array) -> CellFormat | None:
    if _all(texts, _ISO_PATTERN):
        zoned = pc.match_substring_regex(texts, _ZONED)
        if pc.any(zoned).as_py() and not pc.all(zoned).as_py():
            return None
        longest = texts[int(pc.index(pc.utf8_length(texts), pc.max(pc.utf8_length(texts))).as_py())]
        like = _iso_format(longest.as_py())
        return None if _dates(texts, like) is texts else like
    if _all(texts, _OTHER_DATES):
        patterns = _patterns(texts)
        if len(patterns) == 1:
            return CellFormat(kind="datetime", date=patterns[0])
    return None


def _iso_format(example: str) -> CellFormat:
    found = _ISO.fullmatch(example)
    assert found is not None
    _, between, seconds, fraction, zone = found.groups()
    time = f"{between}%H:%M{':%S' if seconds else ''}" if between else ""
    return CellFormat(
        kind="datetime",
        date=f"%Y-%m-%d{time}",
        fraction=len(fraction) - 1 if fraction else 0,
        zone=zone or "",
    )


def _patterns(texts: pa.Array) -> list[str]:
    """The ways to write a date that read every cell."""
    example = texts[0].as_py()
    sign = re.sub(r"\d", "", example)[0]
    time = {0: "", 1: " %H:%M", 2: " %H:%M:%S"}[example.count(":")]
    padded = _all(texts, r"^(?:\d{4}.)?\d{2}.\d{2}\b")
    found = []
    for order in _ORDERS:
        pattern = order.format(sign) + time
        if not padded:
            pattern = pattern.replace("%d", "%-d").replace("%m", "%-m")
        if _dates(texts, CellFormat(kind="datetime", date=pattern)) is not texts:
            found.append(pattern)
    return found


def _dates(texts: pa.Array, like: CellFormat) -> pa.Array:
    """The moments, or the texts themselves if one of them is none."""
    iso = like.date.startswith("%Y-%m-%d") or not like.date
    try:
        moments = pd.to_datetime(
            texts.to_pandas(),
            format="ISO8601" if iso else like.date.replace("%-", "%"),
            utc=bool(like.zone),
        )
        if moments.dtype == object:
            return texts
        return pa.Array.from_pandas(moments.dt.as_unit("us"))
    except (ValueError, OverflowError, AttributeError):
        return texts
