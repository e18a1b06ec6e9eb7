"""The run as a page: one HTML file with its drawings inside and nothing to fetch."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from remasker.experts import MODEL
from remasker.imputer import ReMaskerImputer
from remasker.table import TableEncoder

#: Who speaks in a stack, as the page calls and paints them; what is missing to 1 is the mean's.
VOICES = {
    "ReMasker": ((MODEL,), "model"),
    "Gaussian processes": (("smooth", "warped", "rough", "rough_warped"), "smooth"),
    "trees": (("trees", "boosted"), "trees"),
    "nearest rows": (("neighbours",), "near"),
    "linear": (("ridge",), "ridge"),
}
MAX_COLUMNS = 30
MAX_DISTRIBUTIONS = 6
N_INTERVALS = 40
#: Reading more rows than this draws no better picture.
MAX_ROWS = 5000

STYLE = """
:root { --ink: #1d2433; --soft: #6b7486; --line: #e3e7ee; --paper: #ffffff; --ground: #f6f7fa;
  --model: #2f6fde; --mean: #c3892b; --gone: #b9c0cc;
  --smooth: #7a5cc7; --trees: #3c9a6b; --near: #86c3a3; --ridge: #b7a6e3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebf2; --soft: #98a2b5; --line: #2c3444;
  --paper: #171c26; --ground: #10141c; --model: #6b9dff; --mean: #e0ab52; --gone: #4c5568; } }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0 0 2px; } h2 { font-size: 17px; margin: 0 0 4px; }
p { margin: 0 0 12px; color: var(--soft); }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 20px; margin: 18px 0; }
.figures { display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0; }
.figures div { background: var(--paper); border: 1px solid var(--line); border-radius: 10px;
  padding: 10px 16px; flex: 1 1 120px; }
.figures b { display: block; font-size: 22px; font-weight: 600; }
.figures span { color: var(--soft); font-size: 13px; }
.row { display: flex; flex-wrap: wrap; gap: 18px; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
svg .name { fill: var(--ink); font-size: 12px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; }
.scroll { overflow-x: auto; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin: 0 4px 0 12px; }
"""


def render(
    record: Mapping[str, Any],
    leaderboard: pd.DataFrame,
    frame: pd.DataFrame,
    completed: pd.DataFrame,
    imputer: ReMaskerImputer,
) -> str:
    """The page of a finished run: of the table with gaps and of the completed one."""
    rows = np.linspace(0, len(frame) - 1, min(len(frame), MAX_ROWS)).astype(int)
    sample = frame.iloc[rows]
    distributions = draw_distributions(sample, completed.iloc[rows], imputer.encoder_)
    error = record["error"]
    parts = [
        f"<h1>{_text(record['name'])}</h1><p>{_subtitle(record)}</p>",
        _figures(record, leaderboard),
        _section(
            "The search",
            "Error of every trial on the judge cells, in the order they were begun; the line is "
            "the best so far. Trials that were stopped early are pale, at the error they had then.",
            draw_history(leaderboard, record["selection"]["chosen"]),
        ),
        _section(
            "Error per column",
            "On cells that took part in nothing else, beside the error of the column's mean "
            f"({_text(error['metric'])} error; left is better). As far as observed cells can tell.",
            _legend({"model": "model", "column mean": "mean"}) + draw_columns(error["columns"]),
        ),
        _section("Whose word counts", *_voices(imputer)),
        _section(
            "Observed and imputed",
            "What the gaps were filled with (line) and what is there (bars), as shares. They need "
            "not agree: values are often missing for a reason, and a best guess varies less than "
            "the truth.",
            '<div class="row">' + "".join(distributions) + "</div>",
        ),
        _section(
            "How sure",
            "Imputed numbers of the column with most gaps, sorted, each with the interval that "
            "holds the truth nine times out of ten.",
            draw_intervals(sample, imputer),
        ),
        _section("The best trials", "", _table(leaderboard.head(10))),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(record['name'])} · ReMasker</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


# ---------------------------------------------------------------------- words and figures


def _text(value: object) -> str:
    return html.escape(str(value))


def _subtitle(record: Mapping[str, Any]) -> str:
    data = record["data"]
    return (
        f"{data['rows']:,} rows, {len(data['columns'])} columns, {data['missing_cells']:,} gaps · "
        f"{_text(record['created'])} · seed {record['search']['random_state']}"
    )


def _figures(record: Mapping[str, Any], leaderboard: pd.DataFrame) -> str:
    error = record["error"]
    counts = leaderboard["state"].value_counts()
    members = len(record["members"])
    again = f" of {error['n_holdouts']} hold-outs" if error["n_holdouts"] > 1 else ""
    figures = [
        (
            _number(error["error"]),
            f"error, ± {_number(error['standard_error'])}, of {_text(error['of'])}; on "
            f"{error['n_cells']:,} cells{again}",
        ),
        (_number(error["mean_error"]), "error of the column mean"),
        (str(len(leaderboard)), f"trials, {counts.get('pruned', 0)} stopped early"),
        (f"{record['seconds']:.0f} s", "all in all"),
        (str(members), "model" if members == 1 else "models, averaged"),
    ]
    return (
        '<div class="figures">'
        + "".join(f"<div><b>{a}</b><span>{b}</span></div>" for a, b in figures)
        + "</div>"
    )


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.3g}"


def _section(title: str, words: str, body: str) -> str:
    return f"<section><h2>{title}</h2><p>{words}</p>{body}</section>" if body else ""


def _legend(colors: Mapping[str, str]) -> str:
    keys = (
        f'<span class="key" style="background:var(--{color})"></span>{name}'
        for name, color in colors.items()
    )
    return f"<p>{''.join(keys)}</p>"


def _voices(imputer: ReMaskerImputer) -> tuple[str, str]:
    """What the experts and ReMasker weigh, and in how many columns ReMasker lowers the error."""
    records = imputer.ensemble_.weights_table()
    if not records:
        return "", ""
    helped = sum(r.get("gain", 0.0) > r.get("gain_standard_error", 0.0) for r in records)
    words = (
        "The last word in every column, weighed by observed cells that nobody had seen. ReMasker's "
        "own prediction lowers the error there by more than its standard error in "
        f"{helped} of {len(records)} columns."
    )
    colors = {name: color for name, (_, color) in VOICES.items()} | {"column mean": "mean"}
    columns = imputer.encoder_.modelled
    weights = [(str(columns[record["column"]].name), record["weights"]) for record in records]
    return words, _legend(colors) + draw_voices(weights)


def _table(rows: pd.DataFrame) -> str:
    names = [name for name in rows.columns if rows[name].notna().any() and name != "failure"]
    head = "".join(f"<th>{_text(name)}</th>" for name in names)
    lines = []
    for _, row in rows.iterrows():
        cells = (_number(v) if isinstance(v, float) else _text(v) for v in row[names])
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    body = "".join(lines)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


# ---------------------------------------------------------------------- drawings


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{_text(label)}">{"".join(parts)}</svg>'
    )


def _line(points: Sequence[tuple[float, float]], color: str, width: float = 2) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="var(--{color})" '
        f'stroke-width="{width}" stroke-linejoin="round"/>'
    )


def _dot(x: float, y: float, color: str, radius: float = 3.5, title: str = "") -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="var(--{color})">'
        f"<title>{_text(title)}</title></circle>"
    )


def _label(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{_text(text)}</text>'
    )


def _scale(low: float, high: float, start: float, stop: float) -> Any:
    """Numbers -> positions.

    >>> _scale(0, 10, 0, 100)(5)
    50.0
    """
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (stop - start)


def draw_history(leaderboard: pd.DataFrame, chosen: Sequence[int]) -> str:
    """Error against trial number, with the best so far and the chosen trials marked.

    >>> board = pd.DataFrame({"number": [0, 1], "error": [0.5, 0.4], "state": ["complete"] * 2})
    >>> draw_history(board, [1]).count("<circle")
    2
    """
    board = leaderboard[pd.to_numeric(leaderboard["error"]).notna()].sort_values("number")
    if board.empty:
        return ""
    errors = board["error"].to_numpy(dtype=float)
    # One diverged trial must not flatten all the others.
    top = float(
        min(errors.max(), np.median(errors) + 3 * (np.median(errors) - errors.min()) + 1e-9)
    )
    low = float(errors.min())
    x = _scale(0, max(1, int(board["number"].max())), 50, 890)
    y = _scale(low - 0.05 * (top - low), top, 200, 14)
    parts = []
    for value in np.linspace(low, top, 4):
        height = y(value)
        parts.append(
            f'<line x1="50" x2="890" y1="{height:.1f}" y2="{height:.1f}" stroke="var(--line)"/>'
        )
        parts.append(_label(44, height + 4, _number(float(value)), "end"))
    best = math.inf
    steps: list[tuple[float, float]] = []
    for number, error, state in zip(board["number"], errors, board["state"], strict=True):
        if state == "complete" and error < best:
            if steps:
                steps.append((x(number), y(best)))
            best = error
            steps.append((x(number), y(best)))
    if steps:
        steps.append((x(int(board["number"].max())), y(best)))
        parts.append(_line(steps, "model", 1.5))
    for number, error, state in zip(board["number"], errors, board["state"], strict=True):
        color = "model" if state == "complete" else "gone"
        size = 6.0 if number in chosen else 3.5
        title = f"trial {number}: {error:.4f}, {state}"
        parts.append(_dot(x(number), y(min(error, top)), color, size, title))
    parts.append(_label(470, 224, "trial (large: chosen)", "middle"))
    return _svg(900, 230, parts, "search history")


def draw_columns(columns: Sequence[Mapping[str, Any]]) -> str:
    """A line per column from the model's error to the mean's.

    >>> column = {"column": "age", "error": 0.4, "mean_error": 1.0, "cells": 9}
    >>> draw_columns([column]).count("circle")
    4
    """
    known = [c for c in columns if c["error"] is not None and c["cells"]]
    known = sorted(known, key=lambda c: -c["cells"])[:MAX_COLUMNS]
    if not known:
        return ""
    most = max(max(c["error"], c["mean_error"]) for c in known)
    x = _scale(0, most, 210, 820)
    parts = [_label(210, 12, "0"), _label(820, 12, _number(most), "end")]
    for place, column in enumerate(known):
        y = 30 + 22 * place
        a, b = x(column["error"]), x(column["mean_error"])
        parts.append(_label(200, y + 4, str(column["column"])[:28], "end", "name"))
        parts.append(
            f'<line x1="{a:.1f}" x2="{b:.1f}" y1="{y}" y2="{y}" stroke="var(--line)" '
            'stroke-width="3"/>'
        )
        parts.append(_dot(b, y, "mean", 5, f"column mean {column['mean_error']:.4f}"))
        parts.append(_dot(a, y, "model", 5, f"model {column['error']:.4f}"))
        parts.append(_label(832, y + 4, f"{column['cells']} cells"))
    return _svg(900, 30 + 22 * len(known), parts, "error per column")


def draw_voices(columns: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """A bar per column, cut into what each voice weighs; the rest is the column's mean.

    >>> draw_voices([("age", {"remasker": 0.3, "trees": 0.5})]).count("<rect")
    3
    """
    parts = []
    shown = columns[:MAX_COLUMNS]
    for place, (name, weights) in enumerate(shown):
        y = 6 + 22 * place
        parts.append(_label(200, y + 11, name[:28], "end", "name"))
        voices = {
            voice: (sum(weights.get(expert, 0.0) for expert in experts), color)
            for voice, (experts, color) in VOICES.items()
        }
        voices["column mean"] = (max(0.0, 1 - sum(w for w, _ in voices.values())), "mean")
        left = 210.0
        for voice, (weight, color) in voices.items():
            if weight > 0.005:
                parts.append(
                    f'<rect x="{left:.1f}" y="{y}" width="{610 * weight:.1f}" height="14" '
                    f'fill="var(--{color})"><title>{voice} {weight:.2f}</title></rect>'
                )
            left += 610 * weight
    return _svg(900, 12 + 22 * len(shown), parts, "weights of the experts per column")


def draw_distributions(
    frame: pd.DataFrame, completed: pd.DataFrame, encoder: TableEncoder
) -> list[str]:
    """Small pictures of the columns with most gaps: shares of observed and of imputed values."""
    names = [column.name for column in encoder.columns]
    named, full = (table.set_axis(names, axis=1) for table in (frame, completed))
    encoded = encoder.encode(named)
    gaps = encoder.gaps(named)
    truth, units = (
        encoder.in_units(values) for values in (encoded.values, encoder.encode(full).values)
    )
    pictures = []
    for j in np.argsort(-gaps.sum(axis=0))[:MAX_DISTRIBUTIONS]:
        column = encoder.modelled[j]
        imputed, seen = units[gaps[:, j], j], truth[encoded.observed[:, j], j]
        if not len(imputed) or not len(seen):
            continue
        if column.categorical:
            bins = np.arange(min(len(column.categories), 12) + 1) - 0.5
            ends = str(column.categories[0]), str(column.categories[len(bins) - 2])
        else:
            low, high = np.quantile(np.concatenate([seen, imputed]), [0.005, 0.995])
            bins = np.linspace(low, high if high > low else low + 1, 21)
            ends = column.in_words(low), column.in_words(high)
        shares = [
            np.histogram(np.clip(v, bins[0], bins[-1]), bins)[0] / len(v) for v in (seen, imputed)
        ]
        pictures.append(_shares(str(column.name), bins, shares, ends, len(imputed)))
    return pictures


def _shares(
    name: str, bins: np.ndarray, shares: Sequence[np.ndarray], ends: tuple[str, str], n: int
) -> str:
    x = _scale(float(bins[0]), float(bins[-1]), 6, 274)
    y = _scale(0, max(float(s.max()) for s in shares), 120, 26)
    parts = [_label(6, 14, f"{name[:24]} · {n} imputed", kind="name")]
    for left, right, share in zip(bins[:-1], bins[1:], shares[0], strict=True):
        parts.append(
            f'<rect x="{x(left) + 0.5:.1f}" width="{max(1, x(right) - x(left) - 1):.1f}" '
            f'y="{y(share):.1f}" height="{120 - y(share):.1f}" fill="var(--gone)"/>'
        )
    steps = []
    for left, right, share in zip(bins[:-1], bins[1:], shares[1], strict=True):
        steps += [(x(left), y(share)), (x(right), y(share))]
    parts.append(_line(steps, "model"))
    parts += [_label(6, 136, ends[0][:18]), _label(274, 136, ends[1][:18], "end")]
    return _svg(280, 142, parts, f"{name}: observed (bars) and imputed (line)")


def draw_intervals(frame: pd.DataFrame, imputer: ReMaskerImputer) -> str:
    """Some imputed numbers of the gappiest numeric column, sorted, with 90 % intervals."""
    encoder = imputer.encoder_
    names = [column.name for column in encoder.columns]
    named = frame.set_axis(names, axis=1)
    gaps = encoder.gaps(named)
    numeric = [j for j, c in enumerate(encoder.modelled) if c.kind in ("number", "integer")]
    numeric = [j for j in numeric if gaps[:, j].any()]
    if not numeric:
        return ""
    j = max(numeric, key=lambda k: gaps[:, k].sum())
    rows = np.flatnonzero(gaps[:, j])
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), N_INTERVALS)).astype(int)]
    encoded = encoder.encode(named.iloc[np.unique(rows)])
    value = encoder.in_units(imputer.ensemble_.impute(encoded))[:, j]
    low, high = (encoder.in_units(end)[:, j] for end in imputer.ensemble_.intervals(encoded, 0.9))
    order = np.argsort(value, kind="stable")
    y = _scale(float(low.min()), float(high.max()), 180, 20)
    x = _scale(0, max(1, len(order) - 1), 70, 880)
    parts = [
        _label(60, 24, f"{high.max():.4g}", "end"),
        _label(60, 184, f"{low.min():.4g}", "end"),
        _label(70, 12, str(encoder.modelled[j].name)[:40], kind="name"),
    ]
    for place, k in enumerate(order):
        parts.append(
            f'<line x1="{x(place):.1f}" x2="{x(place):.1f}" y1="{y(low[k]):.1f}" '
            f'y2="{y(high[k]):.1f}" stroke="var(--gone)" stroke-width="4" stroke-linecap="round"/>'
        )
        parts.append(_dot(x(place), y(value[k]), "model", 3.5, f"{value[k]:.4g}"))
    return _svg(900, 195, parts, "imputed values with 90 % intervals")
