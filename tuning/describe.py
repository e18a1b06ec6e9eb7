"""`remasker describe`: a table or a model, as lines of text."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from remasker.columns import Column
from remasker.errors import RemaskerError
from remasker.files import ParquetTable, TextTable
from remasker.table import TableEncoder

if TYPE_CHECKING:
    from remasker.inference import Ensemble

_DONE = {
    "number": "filled with numbers",
    "integer": "filled with whole numbers",
    "datetime": "filled with dates",
    "timedelta": "filled with durations",
    "boolean": "filled with true or false",
    "category": "filled with one of {levels} levels",
}
_LEFT = {
    "text": "left as it is: free text or an identifier",
    "empty": "left missing: nothing is observed",
    "excluded": "left as it is: excluded",
}


def describe_table(
    path: str, table: TextTable | ParquetTable, kinds: Mapping[str, str], markers: Sequence[Any]
) -> list[str]:
    """One line for each column: its kind, its gaps, an example, and what would be done."""
    frame = table.frame
    rows = [("column", "kind", "gaps", "example", "what would be done")]
    gaps = 0
    for name in frame.columns:
        own = {name: kinds[name]} if name in kinds else {}
        encoder = TableEncoder(kinds=own, missing_values=list(markers))
        missing = encoder.missing(frame[name])
        gaps += int(missing.sum())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                column = encoder.fit(frame[[name]]).columns[0]
            kind, done = column.kind, _what(column, bool(missing.any()))
        except RemaskerError as error:
            kind, done = "?", f"refused: {error}"
        example = table.example(name) if not missing.all() else ""
        rows.append((str(name), kind, _share(missing.mean()), example, done))
    for name in kinds:
        if name not in frame.columns:
            TableEncoder(kinds=kinds).fit(frame)  # which says so
    return [
        f"{path}: {len(frame)} rows, {frame.shape[1]} columns, {gaps} gaps "
        f"({_share(gaps / max(1, frame.size)).strip() or '0%'} of the cells)",
        "",
        *_aligned(rows),
        "",
        f"next: remasker impute {path} -o OUT, or remasker tune {path}",
    ]


def describe_model(path: str) -> list[str]:
    """The schema, the members and the provenance of a saved model."""
    from remasker.artifact import load_artifact

    encoder, ensemble, manifest = load_artifact(path)
    provenance = manifest["provenance"]
    source = provenance.get("file", {}).get("name")
    rows = [("column", "kind", "gaps in fit", "range or levels")]
    rows += [(str(c.name), c.kind, _share(c.missing_rate), _extent(c)) for c in encoder.columns]
    members = [
        f"  {member.model_config.backbone}, width {member.model_config.width}, depth "
        f"{member.model_config.encoder_depth}+{member.model_config.decoder_depth}, "
        f"{member.epochs} epochs, seed {member.seed}"
        + ("" if member.error is None else f", held-out error {member.error:.4f}")
        for member in ensemble.members
    ]
    return [
        f"{path}: a model of {len(encoder.modelled)} of {len(encoder.columns)} columns, fitted on "
        f"{provenance.get('rows', '?')} rows{f' of {source}' if source else ''} at "
        f"{manifest['created']} by remasker {manifest['library']}",
        "",
        *_aligned(rows),
        "",
        f"{len(members)} member{'' if len(members) == 1 else 's'}:",
        *members,
        *_experts(encoder, ensemble),
        "",
        f"next: remasker impute DATA -m {path} -o OUT",
    ]


def _experts(encoder: TableEncoder, ensemble: Ensemble) -> list[str]:
    """Who has which say in each column, averaged over the stacks."""
    if not ensemble.experts:
        return []
    rows = [("column", "error ÷ mean's", "who is trusted, on cells that they had not seen")]
    for record in ensemble.weights_table():
        said = sorted(record["weights"].items(), key=lambda x: -x[1])
        trusted = ", ".join(f"{name} {weight:.0%}" for name, weight in said)
        name = str(encoder.modelled[record["column"]].name)
        rows.append((name, f"{record['error']:.2f}", trusted or "nobody: the mean"))
    return ["", "second stage:", *_aligned(rows)]


def _what(column: Column, any_missing: bool) -> str:
    if not column.modelled:
        return _LEFT.get(column.reason, f"left as it is: {column.reason}")
    done = _DONE[column.kind].format(levels=len(column.categories))
    return done if any_missing else "nothing missing; helps to fill the others"


def _extent(column: Column) -> str:
    if not column.modelled:
        return _LEFT.get(column.reason, f"left as it is: {column.reason}")
    if column.categorical:
        shown = ", ".join(map(str, column.categories[:6]))
        more = len(column.categories) - 6
        return shown + (f" and {more} more" if more > 0 else "")
    return f"{column.in_words(column.low)} to {column.in_words(column.high)}"


def _share(share: float) -> str:
    return "" if share == 0 else "<1%" if share < 0.005 else f"{share:.0%}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of text; the last one may be cut at the edge of a terminal, none in a pipe."""
    cells = [[cell.replace("\n", " ") for cell in row] for row in rows]
    cells = [[c if len(c) <= 28 else c[:27] + "…" for c in row[:-1]] + [row[-1]] for row in cells]
    widths = [max(len(row[j]) for row in cells) for j in range(len(cells[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    limit = max(60, shutil.get_terminal_size((10_000, 24)).columns)
    return [line if len(line) <= limit else line[: limit - 1] + "…" for line in lines]
