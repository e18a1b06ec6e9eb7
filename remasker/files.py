"""Tables in files: CSV, TSV and Parquet, plain or gzipped, or through a pipe.

Both kinds of file have a `frame`, the `memory` that a model keeps of them, and `render`, which
gives the same file with other cells; `write_table` puts that in its place, whole or not at all.
"""

from __future__ import annotations

import gzip
import io
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet

from remasker.columns import Column
from remasker.delimited import TableFileError, TextOptions, TextTable, suffix, to_parquet

__all__ = [
    "ParquetTable",
    "TableFileError",
    "TextOptions",
    "TextTable",
    "check_target",
    "read_table",
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
            self.frame = self._table.to_pandas(types_mapper=pd.ArrowDtype)
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
        table = self._table
        for name in [name for name in self.frame.columns if name not in completed.columns]:
            table = table.drop_columns([str(name)])
        for name in completed.columns:
            if name not in self.frame.columns:
                table = table.append_column(str(name), pa.array(completed[name]))
            elif not completed[name].equals(self.frame[name]):
                place = table.schema.get_field_index(str(name))
                type_ = table.schema.field(place).type
                cells = pa.Array.from_pandas(completed[name], type=type_)
                table = table.set_column(place, pa.field(str(name), type_), cells)
        return to_parquet(table)


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
    staging = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if target.exists() and not target.is_file():  # a pipe or a device
            target.write_bytes(data)
            return
        try:
            with open(staging, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            staging.replace(target)
        finally:
            staging.unlink(missing_ok=True)
    except OSError as error:
        raise TableFileError(f"cannot write {path}: {error.strerror or error}") from None
