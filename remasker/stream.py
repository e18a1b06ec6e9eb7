"""From file to file: a Parquet file of any length, a batch of rows at a time.

A row's imputation does not depend on the rows beside it, so the batches of a file give what the
whole file would. A text file, a pipe or a gzipped file is read whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet

from remasker.delimited import TableFileError, TextOptions, suffix
from remasker.errors import InvalidTableError
from remasker.files import from_arrow, read_table, staged, with_cells, write_table
from remasker.imputer import ReMaskerImputer

#: Cells of a batch, between which limits of rows; multiples of the models' own batches, so that
#: they, and every sum in them, are those of the whole table.
CELLS_AT_ONCE = 2**20
MIN_ROWS, MAX_ROWS = 2**12, 2**16
#: What a writer of ours can compress as the file it read was.
CODECS = ("SNAPPY", "GZIP", "BROTLI", "LZ4", "ZSTD", "UNCOMPRESSED")


@dataclass(frozen=True, kw_only=True)
class Filled:
    """What was done to a file."""

    rows: int = 0
    gaps: int = 0
    left: int = 0

    def __add__(self, other: Filled) -> Filled:
        return Filled(
            rows=self.rows + other.rows,
            gaps=self.gaps + other.gaps,
            left=self.left + other.left,
        )

    def __str__(self) -> str:
        left = f"; {self.left} stay in columns that the model leaves alone" if self.left else ""
        return f"filled {self.gaps - self.left} of {self.gaps} gaps in {self.rows} rows{left}"


def impute_file(
    imputer: ReMaskerImputer,
    source: str,
    target: str,
    *,
    options: TextOptions | None = None,
    tell: Callable[[int], None] = lambda rows: None,
) -> Filled:
    """Fill the gaps of a file; the target appears whole or not at all.

    `tell` hears after every batch how many rows are done.
    """
    if streams(source) and suffix(target) not in (".csv", ".tsv", ".txt") and _plain(target):
        return _stream(imputer, source, target, tell)
    remembered = imputer.provenance_.get("file")
    columns = imputer.encoder_.columns
    table = read_table(source, options, columns=columns, remembered=remembered)
    completed, filled = fill(imputer, table.frame)
    write_table(table, completed, target)
    tell(filled.rows)
    return filled


def streams(source: str) -> bool:
    """Whether a file can be read a batch at a time."""
    try:
        with open(source, "rb") as file:
            return Path(source).is_file() and file.read(4) == b"PAR1"
    except OSError:
        return False


def count_rows(imputer: ReMaskerImputer, source: str) -> int | None:
    """Refuse a Parquet file that lacks a column, by its footer alone; its rows, if that tells.

    The answer for a text file is None: it would have to be read.
    """
    if not streams(source):
        return None
    with _opened(source) as file:
        if not imputer.provenance_["array_input"]:
            try:
                imputer.encoder_.check_columns(from_arrow(file.schema_arrow.empty_table()))
            except InvalidTableError as error:
                raise InvalidTableError(f"{source}: {error}") from None
        return int(file.metadata.num_rows)


def _plain(target: str) -> bool:
    """Whether a target is a file, not a pipe, and not to be compressed as a whole."""
    path = Path(target)
    pipe = target == "-" or (path.exists() and not path.is_file())
    return not pipe and not target.lower().endswith(".gz")


def _opened(source: str) -> pa.parquet.ParquetFile:
    try:
        # Neither a whole column nor a whole row group in memory.
        return pa.parquet.ParquetFile(source, buffer_size=2**20, pre_buffer=False)
    except OSError as error:
        raise TableFileError(f"cannot read {source}: {error.strerror or error}") from None
    except pa.ArrowException as error:
        raise _damaged(source, error) from None


def _damaged(source: str, error: Exception) -> TableFileError:
    reason = str(error).splitlines()[0]
    return TableFileError(f"{source} is not a readable Parquet file: {reason}")


def _stream(
    imputer: ReMaskerImputer, source: str, target: str, tell: Callable[[int], None]
) -> Filled:
    total = Filled()
    try:
        with _opened(source) as file, staged(Path(target).resolve()) as staging:
            writer = None
            try:
                for table in _batches(file):
                    frame = from_arrow(table)
                    if isinstance(frame.index, pd.RangeIndex):
                        # An error names the row of the file.
                        frame.index = pd.RangeIndex(total.rows, total.rows + len(frame))
                    completed, filled = fill(imputer, frame)
                    table = with_cells(table, frame, completed)
                    if writer is None:
                        codec = _codec(file)
                        writer = pa.parquet.ParquetWriter(staging, table.schema, compression=codec)
                    writer.write_table(table)
                    total += filled
                    tell(total.rows)
            finally:
                if writer is not None:
                    writer.close()
    except pa.ArrowException as error:
        raise _damaged(source, error) from None
    except TableFileError:
        raise
    except OSError as error:
        # Arrow says with the same class that a page is damaged and that the disk is full.
        if error.errno is None:
            raise _damaged(source, error) from None
        raise TableFileError(f"cannot write {target}: {error.strerror or error}") from None
    return total


def fill(imputer: ReMaskerImputer, frame: pd.DataFrame) -> tuple[pd.DataFrame, Filled]:
    """Complete a table, and count what was done."""
    missing = imputer.encoder_.missing
    completed = imputer.transform(frame)
    return completed, Filled(
        rows=len(frame),
        gaps=sum(int(missing(frame[name]).sum()) for name in frame.columns),
        left=sum(int(missing(completed[name]).sum()) for name in completed.columns),
    )


def _batches(file: pa.parquet.ParquetFile) -> Iterator[pa.Table]:
    """Tables of equal length, whatever the row groups; one without rows for a file without any."""
    schema = file.schema_arrow
    rows = max(MIN_ROWS, min(MAX_ROWS, CELLS_AT_ONCE // max(1, len(schema))))
    rows -= rows % MIN_ROWS
    waiting: list[pa.RecordBatch] = []
    n_waiting = 0
    for batch in file.iter_batches(batch_size=rows):
        waiting.append(batch)
        n_waiting += len(batch)
        while n_waiting >= rows:
            table = pa.Table.from_batches(waiting, schema)
            yield table.slice(0, rows)
            waiting = table.slice(rows).to_batches()
            n_waiting -= rows
    if n_waiting or not file.metadata.num_rows:
        yield pa.Table.from_batches(waiting, schema)


def _codec(file: pa.parquet.ParquetFile) -> str:
    """How the file is compressed: in the way of its first column."""
    if file.metadata.num_row_groups and file.metadata.num_columns:
        found = file.metadata.row_group(0).column(0).compression
        if found in CODECS:
            return "none" if found == "UNCOMPRESSED" else str(found).lower()
    return "snappy"
