"""A delimited text file, cut into cells that are kept as they were written.

What is written back is the text that was read, with new cells where the table at hand differs from
the one that was read.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from remasker.cells import NA_TOKENS, CellFormat, as_told, guess, parse
from remasker.columns import Column, quoted
from remasker.errors import InvalidConfigError, InvalidTableError, RemaskerError

SEPARATORS = (",", ";", "\t", "|")
_BYTE_ORDER_MARKS = (
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)


class TableFileError(RemaskerError, OSError):
    """A file of a table cannot be read or written."""


@dataclass(kw_only=True)
class TextOptions:
    """How to read a text file; None leaves it to the file."""

    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    na_values: Sequence[str] = ()
    default_na: bool = True
    #: {column: kind}, where a kind may carry a format: ``datetime:%d/%m/%Y``.
    kinds: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.separator is not None:
            self.separator = {"\\t": "\t", "tab": "\t"}.get(self.separator, self.separator)
            if (
                len(self.separator) != 1
                or not self.separator.isascii()
                or self.separator in '"\n\r'
            ):
                raise InvalidConfigError(
                    f"separator: expected one character such as ',', ';' or 'tab', got "
                    f"{self.separator!r}"
                )
        if self.decimal not in (None, ".", ","):
            raise InvalidConfigError(f"decimal: expected '.' or ',', got {self.decimal!r}")


def suffix(path: str) -> str:
    """The extension that decides, without ``.gz``.

    >>> suffix("table.CSV.gz")
    '.csv'
    """
    return Path(path.lower().removesuffix(".gz")).suffix


class TextTable:
    """A delimited text file, cut into cells; `frame` has their values."""

    def __init__(
        self,
        path: str,
        data: bytes,
        options: TextOptions,
        columns: Sequence[Column],
        remembered: Mapping[str, Any],
    ) -> None:
        self._path = path
        #: How it was read; reading it so again gives the same cells.
        self.options = options
        self._encoding, text = _decode(path, data, options.encoding)
        if not text.strip():
            raise InvalidTableError(f"{path} is empty: expected a line of column names")
        default = "\t" if suffix(path) in (".tsv", ".tab") else None
        self._separator = options.separator or default or _sniff(text)
        self._newline = "\r\n" if "\r\n" in text else "\n" if "\n" in text else "\r"
        self._ends_with_newline = text.endswith(("\n", "\r"))
        self._protected = _Protection(text, self._separator)
        self._header, self._raw = self._cut(self._protected.text)
        names = [self._unquote(pa.array([cell]))[0][0].as_py() for cell in self._header]
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        if twice:
            raise InvalidTableError(
                f"column name {quoted(twice)} appears more than once; rename the columns"
            )
        self._names = names
        self._na = set(NA_TOKENS if options.default_na else ("",))
        self._told_na = {*options.na_values, *remembered.get("na_values", ())}
        self._read_columns(options, columns, remembered)

    @property
    def memory(self) -> dict[str, Any]:
        """What a model fitted on this file must remember to read and write others like it."""
        return {
            "na_values": sorted(self._told_na),
            "columns": {name: like.to_dict() for name, like in self._formats.items()},
        }

    def example(self, name: str) -> str:
        """A cell of a column that has one, as it is written."""
        row = int(np.flatnonzero(~self._gaps[name])[0])
        raw = self._raw[self._names.index(name)][row].as_py()
        return self._protected.restore(raw).strip()

    # ------------------------------------------------------------------ cutting

    def _cut(self, text: str) -> tuple[list[str], list[pa.Array]]:
        """The cells of the header and the columns of raw cells below it."""
        start = re.search(r"[^\r\n]", text)
        assert start is not None
        found = re.compile(r"\r\n|\r|\n").search(text, start.start())
        head, body = (text[: found.start()], text[found.end() :]) if found else (text, "")
        header = head.strip("\r\n").split(self._separator)
        if not body.strip("\r\n"):
            raise InvalidTableError(f"{self._path}: the table has no rows below its column names")
        places = [str(place) for place in range(len(header))]
        try:
            table = pa.csv.read_csv(
                pa.BufferReader(body.encode("utf-8", "surrogatepass")),
                read_options=pa.csv.ReadOptions(column_names=places, block_size=1 << 26),
                parse_options=pa.csv.ParseOptions(
                    delimiter=self._separator,
                    quote_char=False,
                    double_quote=False,
                    # An empty line is a gap in a table of one column, and nothing in any other.
                    ignore_empty_lines=len(header) > 1,
                ),
                convert_options=pa.csv.ConvertOptions(
                    column_types=dict.fromkeys(places, pa.large_string()), strings_can_be_null=False
                ),
            )
        except pa.ArrowInvalid as error:
            self._refuse_ragged(text, len(header))
            raise InvalidTableError(f"{self._path}: {str(error).splitlines()[0]}") from None
        return header, [table[place].combine_chunks() for place in places]

    def _refuse_ragged(self, text: str, expected: int) -> None:
        number = 0
        for line in re.split(r"\r\n|\r|\n", text):
            restored = self._protected.restore(line)
            number += 1
            cells = line.split(self._separator)
            if line and len(cells) != expected:
                raise InvalidTableError(
                    f"{self._path}: line {number} has {len(cells)} cells, the first line has "
                    f"{expected} (separator {self._separator!r}): {restored[:60]!r}"
                )
            number += len(re.findall(r"\r\n|\r|\n", restored))

    def _unquote(self, raw: pa.Array) -> tuple[pa.Array, pa.Array]:
        """The text of raw cells, and which of them were quoted."""
        trimmed = pc.utf8_trim_whitespace(raw)
        marked = pc.match_substring_regex(trimmed, r'(?s)^".*"$')
        if not pc.any(marked).as_py():
            return trimmed, marked
        inner = pc.replace_substring(pc.utf8_slice_codeunits(trimmed, 1, -1), '""', '"')
        return self._protected.restore_all(pc.if_else(marked, inner, trimmed)), marked

    # ------------------------------------------------------------------ typing

    def _read_columns(
        self, options: TextOptions, columns: Sequence[Column], remembered: Mapping[str, Any]
    ) -> None:
        told = {str(column.name): column for column in columns}
        old = {
            name: CellFormat.from_dict(settings)
            for name, settings in remembered.get("columns", {}).items()
        }
        comma_possible = self._separator != ","
        self._formats: dict[str, CellFormat] = {}
        self._gaps: dict[str, np.ndarray] = {}
        self._all_quoted: dict[str, bool] = {}
        self._na_cell = ""
        self.notes: list[str] = []
        typed = {}
        for name, raw in zip(self._names, self._raw, strict=True):
            texts, marked = self._unquote(raw)
            empty = pc.equal(texts, "")
            self._all_quoted[name] = bool(pc.all(pc.or_(marked, empty)).as_py()) and bool(
                pc.any(marked).as_py()
            )
            words = pc.is_in(texts, value_set=pa.array(sorted(self._na), texts.type))
            told_gap = pc.is_in(texts, value_set=pa.array(sorted(self._told_na), texts.type))
            gap = pc.or_(pc.and_(words, pc.or_(pc.invert(marked), empty)), told_gap)
            present = texts.filter(pc.invert(gap))
            like = self._format(name, present, options, told.get(name), old.get(name))
            if self._all_quoted[name] and like.kind == "category" and name not in told:
                # Where every cell is quoted, quotes tell nothing about a word among numbers.
                wider = pc.or_(words, gap)
                other = guess(texts.filter(pc.invert(wider)), options.decimal, comma_possible)
                if other.kind not in ("category",) and name not in options.kinds:
                    gap, like = wider, other
            gaps = np.array(gap.to_pylist(), dtype=bool)
            column = parse(name, texts, gaps, like)
            if like.kind in ("number", "integer"):
                numeric = [value for word in self._told_na if (value := _number(word)) is not None]
                more = column.isin(numeric).fillna(False).to_numpy(dtype=bool)
                if more.any():
                    gaps |= more
                    column[more] = None
            if like.kind == "category" and name in told:
                column = _as_levels(column, told[name])
            self._note_odd_word(name, texts, gaps, like, told)
            column.index = pd.RangeIndex(2, len(column) + 2)
            self._formats[name], self._gaps[name], typed[name] = like, gaps, column
        # Rows are numbered as a spreadsheet shows them, below the line of names.
        self.frame = pd.DataFrame(typed, index=pd.RangeIndex(2, len(self._raw[0]) + 2))
        self._na_cell = self._usual_gap()

    def _format(
        self,
        name: str,
        present: pa.Array,
        options: TextOptions,
        column: Column | None,
        old: CellFormat | None,
    ) -> CellFormat:
        comma_possible = self._separator != ","
        kind, _, pattern = options.kinds.get(name, "").partition(":")
        if pattern:
            return CellFormat(kind=kind, date=pattern)
        if kind == "ignored" or (column is not None and not column.modelled):
            return CellFormat(kind="category")
        if column is not None:
            kind = old.kind if old is not None else column.kind
        if not kind:
            return guess(present, options.decimal, comma_possible)
        decimal = options.decimal or (old.decimal if old is not None else None)
        if old is not None and (len(present) == 0 or (kind == "datetime" and old.date)):
            return old
        return as_told(name, kind, present, decimal, comma_possible)

    def _note_odd_word(
        self,
        name: str,
        texts: pa.Array,
        gaps: np.ndarray,
        like: CellFormat,
        told: Mapping[str, Column],
    ) -> None:
        """Say which word made text of a column that is otherwise numbers."""
        if like.kind != "category" or name in told or not len(texts):
            return
        number = pc.match_substring_regex(texts, r"^[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?$")
        numbers = np.array(number.to_pylist(), dtype=bool)
        odd = np.flatnonzero(~numbers & ~gaps)
        if len(odd) and numbers.sum() > 0.5 * (~gaps).sum():
            row = int(odd[0])
            self.notes.append(
                f"column {name!r}: read as text because of {texts[row].as_py()!r} in row "
                f"{row + 2}; if that marks a gap, name it with --na"
            )

    def _usual_gap(self) -> str:
        """How this file writes a gap: its most frequent way, or an empty cell."""
        counts: dict[str, int] = {}
        for name, raw in zip(self._names, self._raw, strict=True):
            gaps = self._gaps[name]
            if gaps.any():
                for entry in pc.value_counts(raw.filter(pa.array(gaps))).to_pylist():
                    counts[entry["values"]] = counts.get(entry["values"], 0) + entry["counts"]
        usual = max(counts, key=lambda cell: counts[cell], default="")
        return usual or ("NA" if len(self._names) == 1 else "")

    # ------------------------------------------------------------------ writing

    def render(self, completed: pd.DataFrame, path: str) -> bytes:
        """The file with the cells that `completed` changes; all others as they were written."""
        if suffix(path) == ".parquet":
            return to_parquet(pa.Table.from_pandas(completed, preserve_index=False))
        separator = self._separator
        if suffix(path) == ".tsv":
            separator = "\t"
        elif suffix(path) == ".csv" and separator == "\t":
            separator = ","
        header, columns = [], []
        raw_of = dict(zip(self._names, zip(self._header, self._raw, strict=True), strict=True))
        for name in completed.columns:
            if name in raw_of:
                head, raw = raw_of[name]
                if separator != self._separator:
                    head, raw = self._recut(head, raw, separator)
                columns.append(self._changed(name, raw, completed[name], separator))
                header.append(head)
            else:
                cells = [self._cell(str(value), separator) for value in completed[name]]
                columns.append(pa.array(cells, pa.large_string()))
                header.append(self._cell(str(name), separator))
        lines = pc.binary_join_element_wise(*columns, pa.scalar(separator, pa.large_string()))
        text = self._newline.join([separator.join(header), *lines.to_pylist()])
        text = self._protected.restore(text) + (self._newline if self._ends_with_newline else "")
        try:
            return text.encode(self._encoding)
        except UnicodeEncodeError as error:
            raise TableFileError(
                f"cannot write {error.object[error.start]!r} in the encoding "
                f"{self._encoding!r} of {self._path}; convert the file to utf-8"
            ) from None

    def _recut(self, head: str, raw: pa.Array, separator: str) -> tuple[str, pa.Array]:
        """A column for a file with another separator."""
        texts, marked = self._unquote(raw)
        cells = [
            self._cell(text, separator, quote=quote)
            for text, quote in zip(texts.to_pylist(), marked.to_pylist(), strict=True)
        ]
        name = self._unquote(pa.array([head]))[0][0].as_py()
        return self._cell(name, separator), pa.array(cells, pa.large_string())

    def _changed(self, name: str, raw: pa.Array, column: pd.Series, separator: str) -> pa.Array:
        gaps = self._gaps[name]
        missing = column.isna().to_numpy(dtype=bool)
        like = self._formats[name]
        changed = np.flatnonzero(gaps != missing)
        if not len(changed):
            return raw
        cells = np.array(raw.to_pylist(), dtype=object)
        values = column.array
        written: dict[Any, str] = {}
        for row in changed:
            if missing[row]:
                cells[row] = self._na_cell
                continue
            value = values[row]
            if value not in written:
                written[value] = self._cell(
                    like.write(value), separator, quote=self._all_quoted[name]
                )
            cells[row] = written[value]
        return pa.array(cells, pa.large_string())

    def _cell(self, text: str, separator: str, *, quote: bool = False) -> str:
        """A text as a raw cell; quoted where it would otherwise be read as something else."""
        special = any(sign in text for sign in (separator, '"', "\n", "\r"))
        gap = text in self._na and text != ""
        if quote or special or gap or text != text.strip():
            return '"' + text.replace('"', '""') + '"'
        return text


class _Protection:
    """Hides separators and line ends inside quoted cells behind characters the text has not."""

    def __init__(self, text: str, separator: str) -> None:
        self._signs: dict[str, str] = {}
        self.text = text
        if '"' not in text:
            return
        unused = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)
        self._signs = {sign: next(unused) for sign in (separator, "\n", "\r")}
        inside = re.escape(separator) + r"\r\n"
        blank = "" if separator == " " else " *+"
        pattern = rf'(?<![^{inside}]){blank}"[^"]*+(?:""[^"]*+)*+"{blank}(?![^{inside}])'
        hide = str.maketrans(self._signs)
        needs = re.compile(f"[{inside}]")
        self.text = re.sub(
            pattern,
            lambda found: found[0].translate(hide) if needs.search(found[0]) else found[0],
            text,
        )
        if self.text == text:
            self._signs = {}

    def restore(self, text: str) -> str:
        """The text with what was hidden."""
        for sign, hidden in self._signs.items():
            text = text.replace(hidden, sign)
        return text

    def restore_all(self, texts: pa.Array) -> pa.Array:
        """Likewise, for an array of texts."""
        for sign, hidden in self._signs.items():
            texts = pc.replace_substring(texts, hidden, sign)
        return texts


def _decode(path: str, data: bytes, encoding: str | None) -> tuple[str, str]:
    if encoding is None:
        marks = (name for mark, name in _BYTE_ORDER_MARKS if data.startswith(mark))
        encoding = next(marks, "utf-8")
    try:
        text = data.decode(encoding)
    except LookupError:
        raise InvalidConfigError(f"encoding: Python knows no encoding {encoding!r}") from None
    except UnicodeDecodeError as error:
        raise TableFileError(
            f"{path} is not {encoding} text (byte {data[error.start]:#04x} at {error.start}); give "
            "its encoding, such as --encoding latin-1"
        ) from None
    if "\0" in text:
        raise TableFileError(f"{path} is not a text table; expected CSV, TSV or Parquet")
    return encoding, text


def _sniff(text: str) -> str:
    """The separator that cuts the first lines into the same number of cells, more than one.

    >>> _sniff("a;b\\n1,5;2,5\\n")
    ';'
    """
    start = text.lstrip("\r\n")[:20000]
    best, most = ",", 0
    for separator in SEPARATORS:
        lines = re.split(r"[\r\n]+", _Protection(start, separator).text)[:20]
        lines = [line for line in (lines[:-1] if len(start) == 20000 else lines) if line]
        counts = {line.count(separator) for line in lines}
        if len(counts) == 1 and (count := counts.pop()) > most:
            best, most = separator, count
    if not most:
        head = re.split(r"[\r\n]", _Protection(start, ",").text)[0]
        best = max(SEPARATORS, key=lambda sign: (head.count(sign), sign == ","))
    return best


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _as_levels(column: pd.Series, fitted: Column) -> pd.Series:
    """Texts as the levels of a model that was fitted on a table with other levels than text."""
    if all(isinstance(level, str) for level in fitted.categories):
        return column
    levels: dict[Any, Any] = {
        float(level): level for level in fitted.categories if isinstance(level, int | float)
    }
    levels |= {str(level).lower(): level for level in fitted.categories if isinstance(level, bool)}
    levels |= {str(level): level for level in fitted.categories}
    return pd.Series(
        [
            None if pd.isna(text) else levels.get(text, levels.get(_number(text), text))
            for text in column
        ],
        dtype=object,
        name=column.name,
    )


def to_parquet(table: pa.Table) -> bytes:
    """A table as the bytes of a Parquet file."""
    buffer = io.BytesIO()
    pa.parquet.write_table(table, buffer)
    return buffer.getvalue()
