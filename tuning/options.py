"""What commands share: the options that say how to read a table, and one way to speak.

Everything heavy is imported by the function that needs it, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remasker.errors import InvalidConfigError

if TYPE_CHECKING:
    from remasker import ReMaskerImputer
    from remasker.files import ParquetTable, TextOptions, TextTable

KINDS = "number, integer, category, boolean, datetime, timedelta, ignored"


def say(sentence: str) -> None:
    """One line for the person at the terminal; standard output is for tables."""
    print(f"remasker: {sentence}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- the options


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that reads a table."""
    group = parser.add_argument_group("reading text files")
    group.add_argument(
        "--sep", metavar="SIGN", help="separator, such as ';' or tab (default: look)"
    )
    group.add_argument("--decimal", metavar="SIGN", help="decimal sign: . or , (default: look)")
    group.add_argument("--encoding", metavar="NAME", help="such as latin-1 (default: utf-8)")
    group.add_argument(
        "--na",
        metavar="TEXT",
        action="append",
        default=[],
        help="a cell with this text is a gap, besides empty, NA, N/A, NaN, null, None and ?; "
        "repeat it for more",
    )
    group.add_argument(
        "--only-na",
        action="store_true",
        help="only empty cells and those named with --na are gaps",
    )


def add_column_options(parser: argparse.ArgumentParser, title: str = "columns") -> None:
    """The options of every command that learns from a table."""
    columns = parser.add_argument_group(title)
    columns.add_argument(
        "--kinds",
        metavar="COLUMN=KIND",
        action="append",
        default=[],
        help=f"what a column is, where its cells should not decide: {KINDS}; a date may come with "
        "its format, as in born=datetime:%%d/%%m/%%Y; repeat it for more columns",
    )
    columns.add_argument(
        "--exclude",
        metavar="COLUMN",
        action="append",
        default=[],
        help="leave a column alone and do not look at it, such as a target; repeat it for more",
    )
    columns.add_argument(
        "--bounds",
        metavar="observed|COLUMN=LOW:HIGH",
        action="append",
        default=[],
        help="limits of imputed values: those of the observed ones, or per column (either end may "
        "be left out)",
    )
    columns.add_argument(
        "--text",
        choices=("ignore", "raise"),
        default="ignore",
        help="leave free text and identifiers as they are (default), or refuse them",
    )


def column_options(args: argparse.Namespace) -> dict[str, Any]:
    """What the options of `add_column_options` say, as `ReMaskerImputer` and `tune` take it."""
    kinds = pairs("--kinds", args.kinds)
    return {
        "exclude": tuple(args.exclude),
        "kinds": {name: kind.partition(":")[0] for name, kind in kinds.items()} or None,
        "bounds": _bounds(args.bounds),
        "text": args.text,
    }


# ---------------------------------------------------------------------- reading


def reading_options(args: argparse.Namespace) -> TextOptions:
    """What the options of `add_reading_options` say, and the kinds of `add_column_options`."""
    from remasker.files import TextOptions

    return TextOptions(
        separator=args.sep,
        decimal=args.decimal,
        encoding=args.encoding,
        na_values=tuple(args.na),
        default_na=not args.only_na,
        kinds=pairs("--kinds", getattr(args, "kinds", ())),
    )


def open_table(path: str, options: TextOptions) -> TextTable | ParquetTable:
    """Read a table and say what is odd about it."""
    from remasker.files import read_table

    table = read_table(path, options)
    for note in getattr(table, "notes", ()):
        say(f"warning: {note}")
    return table


def remember(imputer: ReMaskerImputer, path: str, table: TextTable | ParquetTable) -> None:
    """Let a fitted model remember how its file was written; `open_table` asks for it."""
    imputer.provenance_["file"] = {"name": Path(path).name, **table.memory}


def markers(args: argparse.Namespace, table: TextTable | ParquetTable | None = None) -> list[Any]:
    """What `--na` means for a table: a text file has taken it in already."""
    from remasker.files import TextTable

    if isinstance(table, TextTable):
        return []
    found = [literal(text) for text in args.na]
    return [*args.na, *(value for value in found if not isinstance(value, str))]


def say_how_good(imputer: ReMaskerImputer) -> None:
    """Say what the experts' errors on unseen observed cells promise of the filled ones."""
    errors = {
        str(imputer.encoder_.modelled[record["column"]].name): record["error"] ** 0.5
        for record in imputer.ensemble_.weights_table()
    }
    if not errors:
        return
    mean = sum(errors.values()) / len(errors)
    best, worst = min(errors, key=errors.__getitem__), max(errors, key=errors.__getitem__)
    span = f" ({errors[best]:.2f} in {best!r} to {errors[worst]:.2f} in {worst!r})"
    say(
        f"expected error: {mean:.2f} of the column mean's{span if len(errors) > 1 else ''}, as far "
        "as observed cells can tell"
    )


# ---------------------------------------------------------------------- words


def pairs(option: str, given: Sequence[str], form: str = "NAME=VALUE") -> dict[str, str]:
    """``NAME=VALUE`` arguments; a name may hold ``=``, a value may not.

    >>> pairs("--kinds", ["a=b=number"])
    {'a=b': 'number'}
    """
    pairs = {}
    for text in given:
        name, sign, value = text.rpartition("=")
        if not sign or not name:
            raise InvalidConfigError(f"{option}: expected {form}, got {text!r}")
        pairs[name] = value
    return pairs


def _bounds(given: Sequence[str]) -> str | dict[str, tuple[Any, Any]] | None:
    if not given:
        return None
    if "observed" in given:
        if len(given) > 1:
            raise InvalidConfigError("--bounds: give either observed or COLUMN=LOW:HIGH")
        return "observed"
    bounds = {}
    for name, text in pairs("--bounds", given, "observed or COLUMN=LOW:HIGH").items():
        low, sign, high = text.partition(":")
        if not sign:
            raise InvalidConfigError(f"--bounds: expected COLUMN=LOW:HIGH, got {name}={text}")
        bounds[name] = (literal(low) if low else None, literal(high) if high else None)
    return bounds


def literal(text: str) -> Any:
    """A number, true, false or none; anything else is text.

    >>> [literal(text) for text in ("3", "0.1", "true", "none", "all")]
    [3, 0.1, True, None, 'all']
    """
    text = text.strip()
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, int | float) else text
