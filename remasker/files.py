"""Tables in files: CSV, TSV and Parquet, plain or gzipped, or through a pipe.

Both kinds of file have a `frame`, the `memory` that a model keeps of them, and `render`, which
gives the same file with other cells; `write_table` puts that in its place, whole or not at all.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import secrets
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from remasker.columns import Column
from remasker.delimited import TableFileError, TextOptions, TextTable, suffix, to_parquet
from remasker.errors import InvalidTableError

__all__ = [
    "ParquetTable",
    "TableFileError",
    "TextOptions",
    "TextTable",
    "check_target",
    "from_arrow",
    "read_table",
    "staged",
    "with_cells",
    "write_bytes",
    "write_table",
]


# ---------------------------------------------------------------------- reading


def read_table(
    path: str,
    options: TextOptions | None = None,
    *,
    columns: Sequence[Column] = (),
    remembered: Mapping[str, Any] | None = None,
) -> TextTable | ParquetTable:
    """Read a table; `-` is standard input.

    `columns` and `remembered` (the `memory` of the file that a model was fitted on) say how the
    cells are to be read, so that a column is of the same kind in every file.
    """
    data = _read_bytes(path)
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise TableFileError(f"{path} is damaged: {error}") from None
    if data[:4] == b"PAR1":
        return ParquetTable(path, data)
    if suffix(path) == ".parquet":
        raise TableFileError(f"{path} is not a Parquet file")
    return TextTable(path, data, options or TextOptions(), columns, remembered or {})


def _read_bytes(path: str) -> bytes:
    try:
        if path == "-":
            return sys.stdin.buffer.read()
        return Path(path).read_bytes()
    except OSError as error:
        raise TableFileError(f"cannot read {path}: {error.strerror or error}") from None


class ParquetTable:
    """A Parquet file: its frame keeps Arrow's dtypes, so that every cell survives."""

    def __init__(self, path: str, data: bytes) -> None:
        try:
            self._table = pa.parquet.read_table(io.BytesIO(data))
            self.frame = from_arrow(self._table)
        except (pa.ArrowException, OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise TableFileError(f"{path} is not a readable Parquet file: {reason}") from None
        self.memory: dict[str, Any] = {}

    def example(self, name: str) -> str:
        """A cell of a column that has one."""
        return str(self.frame[name].dropna().iloc[0])

    def render(self, completed: pd.DataFrame, path: str) -> bytes:
        """The table with the cells of `completed`, in the format that `path` asks for."""
        if suffix(path) in (".csv", ".tsv", ".txt"):
            text = completed.to_csv(index=False, sep="\t" if suffix(path) == ".tsv" else ",")
            return bytes(text.encode())
        return to_parquet(with_cells(self._table, self.frame, completed))


def from_arrow(table: pa.Table) -> pd.DataFrame:
    """The frame of an Arrow table, with Arrow's own dtypes: no batch of it is read differently.

    >>> from_arrow(pa.table({"a": pa.array([None, 1], pa.int8())})).dtypes.map(str).to_dict()
    {'a': 'int8[pyarrow]'}
    """
    return table.to_pandas(types_mapper=pd.ArrowDtype)


def with_cells(table: pa.Table, frame: pd.DataFrame, completed: pd.DataFrame) -> pa.Table:
    """The Arrow table of `frame` with the cells of `completed`, and everything else as it was.

    >>> table = pa.table({"a": pa.array([None, 1], pa.int8())}).replace_schema_metadata({"k": "v"})
    >>> frame = from_arrow(table)
    >>> with_cells(table, frame, frame.fillna(7)).to_pydict()
    {'a': [7, 1]}
    """
    columns, fields = [], []
    named = {str(name): name for name in frame.columns}
    for place, field in enumerate(table.schema):
        name = named.get(field.name)
        if name is not None and name not in completed.columns:
            continue
        cells = table.column(place)
        if name is not None and not completed[name].equals(frame[name]):
            # A column without any cell has no type of its own.
            type_ = None if pa.types.is_null(field.type) else field.type
            try:
                new = pa.Array.from_pandas(completed[name], type=type_)
                cells = _recoded(new, cells) if pa.types.is_dictionary(field.type) else new
            except pa.ArrowException:
                raise InvalidTableError(
                    f"column {field.name!r}: its type {field.type} cannot hold what the model "
                    "fills in; convert the column to what `fit` saw"
                ) from None
            field = field.with_type(cells.type)
        columns.append(cells)
        fields.append(field)
    for name in [name for name in completed.columns if name not in frame.columns]:
        columns.append(pa.array(completed[name]))
        fields.append(pa.field(str(name), columns[-1].type))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=table.schema.metadata))


def _recoded(cells: pa.Array | pa.ChunkedArray, like: pa.ChunkedArray) -> pa.Array:
    """Categories with the levels of `like` in their order, which may mean something.

    >>> like = pa.chunked_array([pa.array(["low", "high"]).dictionary_encode()])
    >>> _recoded(pa.array(["high", "low"]).dictionary_encode(), like).dictionary.to_pylist()
    ['low', 'high']
    """
    type_ = like.type
    levels = like.unify_dictionaries().chunk(0).dictionary if like.num_chunks else []
    levels = pa.array(levels, type_.value_type)
    words = cells.cast(type_.value_type)
    if isinstance(words, pa.ChunkedArray):
        words = words.combine_chunks()
    more = pc.unique(words.drop_null())
    more = more.filter(pc.invert(pc.is_in(more, value_set=levels)))
    levels = pa.concat_arrays([levels, more])
    codes = pc.index_in(words, value_set=levels).cast(type_.index_type)
    return pa.DictionaryArray.from_arrays(codes, levels, ordered=type_.ordered)


# ---------------------------------------------------------------------- writing


def check_target(path: str, *, force: bool) -> None:
    """Refuse, before any work is done, to write where something already is or nothing can be."""
    target = Path(path)
    if path == "-":
        return
    if target.is_dir():
        raise TableFileError(f"cannot write {path}: it is a directory")
    if not target.parent.is_dir():
        raise TableFileError(f"cannot write {path}: there is no directory {target.parent}")
    if target.is_file() and not force:
        raise TableFileError(f"{path} exists; add --force to replace it")


def write_table(table: TextTable | ParquetTable, completed: pd.DataFrame, path: str) -> None:
    """Write the file that was read with the cells of `completed`; `-` is standard output."""
    write_bytes(table.render(completed, path), path)


def write_bytes(data: bytes, path: str) -> None:
    """Write a file whole or not at all: beside its place, then renamed; gzipped by its name."""
    if path.lower().endswith(".gz"):
        data = gzip.compress(data, mtime=0)
    if path == "-":
        # Unbuffered (python -u), a write may take only a part, such as what fits into a pipe.
        rest = memoryview(data)
        while rest:
            rest = rest[sys.stdout.buffer.write(rest) :]
        sys.stdout.buffer.flush()
        return
    target = Path(path).resolve()
    try:
        if target.exists() and not target.is_file():  # a pipe or a device
            target.write_bytes(data)
            return
        with staged(target) as staging:
            staging.write_bytes(data)
    except OSError as error:
        raise TableFileError(f"cannot write {path}: {error.strerror or error}") from None


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A place beside `target` to write to, which takes its place at the end, or goes.

    A process that is killed leaves `.NAME.*.part` behind, and the target as it was.
    """
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        yield staging
        with open(staging, "rb") as file:
            os.fsync(file.fileno())
        staging.replace(target)
    finally:
        staging.unlink(missing_ok=True)
