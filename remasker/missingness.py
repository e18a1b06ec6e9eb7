"""Hide cells of a table on purpose, so that an imputer can be judged on values that are known.

The mechanisms are those of HyperImpute's simulator, which the paper's protocol uses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from remasker.errors import InvalidConfigError, InvalidTableError, nearest
from remasker.metrics import Booleans, Floats, Table, protocol_scale

MECHANISMS = ("MCAR", "MAR", "MNAR")

AnyTable = TypeVar("AnyTable", pd.DataFrame, npt.NDArray[Any])


def simulate_missing(
    table: AnyTable,
    mechanism: str = "MAR",
    ratio: float = 0.3,
    columns: Sequence[Hashable] | None = None,
    random_state: int = 0,
    max_columns: int | None = 8,
) -> AnyTable:
    """A copy of the table with gaps; `missing_mask` with the same arguments says where.

    A DataFrame keeps every dtype that can hold a gap. Of the others, and only where a gap was
    made, `bool` becomes `boolean`, and integers become `float64`, as pandas itself would do on
    reading such a table; integers too large for that to be exact become nullable (`Int64`). An
    array must hold numbers and comes back as floats.

    See `missing_mask` for the mechanisms and the parameters.

    >>> table = pd.DataFrame({"age": [20, 30, 40, 50], "size": ["S", "L", "M", "S"]})
    >>> simulate_missing(table, "MCAR", ratio=0.5)
        age size
    0   NaN  NaN
    1   NaN    L
    2  40.0    M
    3  50.0    S
    """
    hidden = missing_mask(table, mechanism, ratio, columns, random_state, max_columns)
    if isinstance(table, pd.DataFrame):
        result = table.copy()
        for position in np.flatnonzero(hidden.any(axis=0)).tolist():
            column = _able_to_hold_gaps(table.iloc[:, position])
            result.isetitem(position, column.mask(hidden[:, position]).array)
        return result
    array = np.asarray(table)
    floats = array.astype(np.result_type(array.dtype, np.float32), copy=True)
    floats[hidden] = np.nan
    return floats


def missing_mask(
    table: Table,
    mechanism: str = "MAR",
    ratio: float = 0.3,
    columns: Sequence[Hashable] | None = None,
    random_state: int = 0,
    max_columns: int | None = 8,
) -> Booleans:
    """Which cells to hide: a boolean array of the table's shape, True where hidden.

    Cells are hidden in the chosen columns only: those named in `columns` (positions, for an
    array), else `max_columns` randomly drawn ones (None: all).

    - ``"MCAR"``: every cell of the chosen columns with probability `ratio`.
    - ``"MAR"``: half of the chosen columns (rounded down, at least one) are drawn as inputs and
      stay complete. Each other one is hidden by a logistic model of the inputs: random positive
      weights, scaled so that their sum has unit variance, and an intercept solved so that the
      expected rate over the column's values is `ratio`.
    - ``"MNAR"``: as MAR; then every input cell is itself hidden with probability `ratio`.

    A single chosen column leaves no input among the chosen ones. MAR then hides it by a logistic
    model of all other columns of the table (a table with one column is an error), MNAR by a
    logistic model of its own values.

    Categories and strings enter the model as ordinal codes, datetimes as numbers, all min–max
    scaled. Cells that are already missing enter it as their column's mean and are not hidden.
    Nothing guarantees that a row or a column keeps a value.

    >>> table = np.random.default_rng(0).normal(size=(1000, 4))
    >>> hidden = missing_mask(table, "MAR", ratio=0.3)
    >>> int(hidden.any(axis=0).sum())
    2
    >>> round(float(hidden[:, hidden.any(axis=0)].mean()), 1)
    0.3
    """
    _check_settings(mechanism, ratio, max_columns)
    if not isinstance(table, pd.DataFrame) and np.asarray(table).dtype.kind not in "biuf":
        raise InvalidTableError(
            f"table: expected an array of numbers, got dtype {np.asarray(table).dtype}; "
            "pass a DataFrame for other kinds of columns"
        )
    values = protocol_scale(table)
    if not values.size:
        raise InvalidTableError(f"table: expected rows and columns, got shape {values.shape}")
    observed = ~np.isnan(values)
    generator = np.random.default_rng(random_state)
    chosen = _chosen_columns(table, values.shape[1], columns, max_columns, generator)
    hidden = np.zeros(values.shape, dtype=bool)
    if mechanism == "MCAR":
        hidden[:, chosen] = generator.random((len(values), len(chosen))) < ratio
        return hidden & observed

    n_inputs = max(len(chosen) // 2, 1)
    inputs = generator.choice(chosen, n_inputs, replace=False)
    outputs = np.setdiff1d(chosen, inputs)
    if len(chosen) == 1:
        outputs = chosen
        inputs = chosen if mechanism == "MNAR" else np.setdiff1d(np.arange(values.shape[1]), chosen)
        if not inputs.size:
            raise InvalidTableError(
                "table: MAR needs a second column for the gaps to depend on, got one column; "
                "use mechanism='MCAR' or 'MNAR'"
            )
    hidden[:, outputs] = generator.random((len(values), len(outputs))) < _logistic_probabilities(
        values[:, inputs], observed[:, outputs], ratio, generator
    )
    if mechanism == "MNAR" and len(chosen) > 1:
        hidden[:, inputs] = generator.random((len(values), n_inputs)) < ratio
    return hidden & observed


def _logistic_probabilities(
    inputs: Floats, counted: Booleans, ratio: float, generator: np.random.Generator
) -> Floats:
    """One probability per row and column of `counted`, whose mean where counted is `ratio`."""
    from scipy.optimize import brentq
    from scipy.special import expit, logit

    known = ~np.isnan(inputs)
    means = np.where(known, inputs, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    centred = np.where(known, inputs - means, 0.0)
    scores = centred @ generator.random((inputs.shape[1], counted.shape[1]))
    deviation = scores.std(axis=0)
    scores /= np.where(deviation > 0, deviation, 1.0)  # constant inputs: the same for every row
    probabilities = np.empty(scores.shape)
    for position, rows in enumerate(counted.T):
        score = scores[:, position]
        # With these intercepts every probability is below, respectively above, the ratio.
        low, high = logit(ratio) - score.max() - 1.0, logit(ratio) - score.min() + 1.0
        relevant = score[rows] if rows.any() else score
        intercept = brentq(
            lambda shift, relevant=relevant: expit(relevant + shift).mean() - ratio, low, high
        )
        probabilities[:, position] = expit(score + intercept)
    return probabilities


def _chosen_columns(
    table: Table,
    n_columns: int,
    columns: Sequence[Hashable] | None,
    max_columns: int | None,
    generator: np.random.Generator,
) -> npt.NDArray[np.intp]:
    if columns is None:
        n_chosen = n_columns if max_columns is None else min(max_columns, n_columns)
        return np.sort(generator.choice(n_columns, n_chosen, replace=False))
    named = [columns] if isinstance(columns, str) else list(columns)
    known: list[Hashable] = list(range(n_columns))
    if isinstance(table, pd.DataFrame):
        known = list(table.columns)
    if not named:
        raise InvalidConfigError("columns: expected at least one column, got none")
    for position, name in enumerate(named):
        if name not in known:
            raise InvalidConfigError(
                f"columns: the table has no column {name!r}{nearest(name, known)}"
            )
        if name in named[:position]:
            raise InvalidConfigError(f"columns: {name!r} is named twice")
    # Sorted, so that the order in which the columns are named changes nothing.
    return np.sort(np.array([known.index(name) for name in named], dtype=np.intp))


def _check_settings(mechanism: str, ratio: float, max_columns: int | None) -> None:
    if mechanism not in MECHANISMS:
        raise InvalidConfigError(
            f"mechanism: expected one of {', '.join(map(repr, MECHANISMS))}, got {mechanism!r}"
            + nearest(str(mechanism).upper(), MECHANISMS)
        )
    if not 0 < ratio < 1:
        raise InvalidConfigError(f"ratio: expected a number between 0 and 1, got {ratio!r}")
    if max_columns is not None and max_columns < 1:
        raise InvalidConfigError(f"max_columns: expected at least 1 or None, got {max_columns!r}")


def _able_to_hold_gaps(column: pd.Series) -> pd.Series:
    kind = column.dtype.kind if isinstance(column.dtype, np.dtype) else None
    if kind == "b":
        return column.astype("boolean")
    if kind in ("i", "u"):
        exact = column.between(-(2**53), 2**53).all()
        if not exact:  # only 64 bits can hold such a number
            return column.astype("UInt64" if kind == "u" else "Int64")
        return column.astype("float64")
    return column
