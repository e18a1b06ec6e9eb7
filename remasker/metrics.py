"""How far an imputed table is from the truth, under each published convention by its name.

`truth` and `imputed` are DataFrames or two-dimensional arrays with the same rows and columns;
`hidden` is the boolean matrix of the cells that the imputer could not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from remasker.errors import InvalidConfigError, InvalidTableError, nearest

Table: TypeAlias = pd.DataFrame | npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float64]
Booleans: TypeAlias = npt.NDArray[np.bool_]


def protocol_scale(table: Table, like: Table | None = None) -> Floats:
    """Every column as numbers between 0 and 1: the scale on which the protocol works.

    Categories and strings become ordinal codes (in the order of the `category` dtype, else
    sorted), datetimes become seconds; then each column is min–max scaled over `like`, by default
    over the table itself. A constant column becomes 0. Missing cells are NaN.

    >>> table = pd.DataFrame({"age": [20, 30, 40], "size": ["S", "L", "M"]})
    >>> protocol_scale(table)
    array([[0. , 1. ],
           [0.5, 0. ],
           [1. , 0.5]])
    >>> protocol_scale(pd.DataFrame({"age": [50], "size": ["M"]}), like=table)
    array([[1.5, 0.5]])
    """
    frame = _as_frame(table, "table")
    reference = frame if like is None else _as_frame(like, "like")
    scaled = np.empty(frame.shape)
    for position in range(frame.shape[1]):
        known = _numbers(reference.iloc[:, position], reference.iloc[:, position])
        values = (
            known
            if like is None
            else _numbers(frame.iloc[:, position], reference.iloc[:, position])
        )
        present = known[~np.isnan(known)]
        low, high = (present.min(), present.max()) if present.size else (0.0, 1.0)
        scaled[:, position] = (values - low) / ((high - low) or 1.0)
    return scaled


def rmse(truth: Table, imputed: Table, hidden: Table, convention: str = "protocol") -> float:
    """Root mean squared error over the hidden cells.

    - ``"protocol"`` (HyperImpute, ReMasker): every column on `protocol_scale` of the truth,
      categories as ordinal codes, all hidden cells pooled. Binary columns dominate it.
    - ``"numeric"``: the same, categorical and boolean columns left out.
    - ``"standardised"`` (CACTI): every column divided by its standard deviation, an RMSE per
      column, and the mean of those over the columns that have hidden cells.

    >>> truth = np.array([[0.0, 10.0], [1.0, 20.0], [2.0, 30.0]])
    >>> imputed = np.array([[0.0, 10.0], [1.0, 30.0], [1.0, 30.0]])
    >>> hidden = truth != imputed
    >>> round(rmse(truth, imputed, hidden), 4)
    0.5
    >>> round(rmse(truth, imputed, hidden, convention="standardised"), 4)
    1.2247
    """
    _check_convention(convention, ("protocol", "numeric", "standardised"))
    compared = _compare(truth, imputed, hidden)
    error = compared.imputed - compared.truth
    if convention == "standardised":
        error = error / _deviation(compared.truth)
        return float(
            np.mean(
                [
                    np.sqrt(np.mean(error[rows, position] ** 2))
                    for position, rows in compared.hidden_columns()
                ]
            )
        )
    cells = compared.hidden
    if convention == "numeric":
        cells = cells & ~compared.categorical
        if not cells.any():
            raise InvalidTableError(
                "hidden: no cell of a numeric column is hidden; use convention='protocol'"
            )
    return float(np.sqrt(np.mean(error[cells] ** 2)))


def wasserstein(
    truth: Table, imputed: Table, hidden: Table | None = None, convention: str = "protocol"
) -> float:
    """Wasserstein distance between the true and the imputed distribution of each column.

    - ``"protocol"`` (HyperImpute, ReMasker): all rows, on `protocol_scale` of the truth, summed
      over the columns. It grows with the number of columns; `hidden` is not needed. Rows without
      a true value are left out of their column.
    - ``"hidden"`` (CACTI): hidden cells only, every column divided by its standard deviation,
      the mean over the columns that have hidden cells.

    >>> truth = np.array([[0.0], [1.0], [2.0], [4.0]])
    >>> imputed = np.array([[0.0], [1.0], [2.0], [2.0]])
    >>> wasserstein(truth, imputed)
    0.125
    """
    from scipy.stats import wasserstein_distance

    _check_convention(convention, ("protocol", "hidden"))
    if convention == "hidden":
        if hidden is None:
            raise InvalidConfigError("hidden: convention 'hidden' needs the matrix of hidden cells")
        compared = _compare(truth, imputed, hidden)
        deviation = _deviation(compared.truth)
        return float(
            np.mean(
                [
                    wasserstein_distance(
                        compared.truth[rows, position] / deviation[position],
                        compared.imputed[rows, position] / deviation[position],
                    )
                    for position, rows in compared.hidden_columns()
                ]
            )
        )
    compared = _compare(truth, imputed, None)
    known = ~np.isnan(compared.truth)
    return float(
        sum(
            wasserstein_distance(compared.truth[rows, position], compared.imputed[rows, position])
            for position, rows in enumerate(known.T)
            if rows.any()
        )
    )


def r2(truth: Table, imputed: Table, hidden: Table) -> float:
    """Squared Pearson correlation on the hidden cells of a column, averaged over the columns.

    Categories count as ordinal codes. A column imputed with one constant explains nothing and
    scores 0; a column whose hidden truth is constant has no correlation and is left out.

    >>> truth = np.array([[1.0], [2.0], [3.0], [4.0]])
    >>> imputed = np.array([[1.0], [3.0], [2.0], [4.0]])
    >>> round(r2(truth, imputed, np.full((4, 1), True)), 4)
    0.64
    """
    compared = _compare(truth, imputed, hidden)
    scores = []
    for position, rows in compared.hidden_columns():
        answer = compared.truth[rows, position] - compared.truth[rows, position].mean()
        guess = compared.imputed[rows, position] - compared.imputed[rows, position].mean()
        # A constant does not centre to exact zeros, so ask for its range, not its variance.
        if np.ptp(compared.truth[rows, position]) == 0:
            continue
        if np.ptp(compared.imputed[rows, position]) == 0:
            scores.append(0.0)
        else:
            scores.append((answer @ guess) ** 2 / ((answer @ answer) * (guess @ guess)))
    if not scores:
        raise InvalidTableError(
            "hidden: no column has two hidden cells with different true values, "
            "so there is no correlation to measure; hide more cells"
        )
    return float(np.mean(scores))


def accuracy(truth: Table, imputed: Table, hidden: Table) -> float:
    """Share of the hidden cells of categorical columns that were imputed with the right category.

    Categorical are the columns of `truth` that hold categories, strings or booleans.

    >>> truth = pd.DataFrame({"size": ["S", "L", "M"], "age": [20, 30, 40]})
    >>> imputed = pd.DataFrame({"size": ["S", "M", "M"], "age": [20, 35, 40]})
    >>> accuracy(truth, imputed, np.array([[False, False], [True, True], [True, False]]))
    0.5
    """
    compared = _compare(truth, imputed, hidden)
    cells = compared.hidden & compared.categorical
    if not cells.any():
        raise InvalidTableError(
            "hidden: no cell of a categorical column is hidden; "
            "give categories the dtype 'category' or use rmse"
        )
    return float(np.mean(compared.truth[cells] == compared.imputed[cells]))


def auroc(
    imputed: Table, target: pd.Series | Sequence[Any] | npt.NDArray[Any], random_state: int = 0
) -> float:
    """How well the imputed table predicts `target`: area under the ROC curve, one-vs-rest.

    Logistic regression on standardised numbers and one-hot categories; each row is scored by a
    model that has not seen it (stratified, at most five folds); classes count alike.

    >>> table = pd.DataFrame({"x": [0.0, 1, 2, 3, 10, 11, 12, 13], "size": list("SMSMSMSM")})
    >>> auroc(table, [0, 0, 0, 0, 1, 1, 1, 1])
    1.0
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    frame = _as_frame(imputed, "imputed")
    _check_complete(frame)
    labels = pd.Series(np.asarray(target, dtype=object))
    if len(labels) != len(frame):
        raise InvalidTableError(f"target: expected {len(frame)} values, got {len(labels)}")
    if labels.isna().any():
        raise InvalidTableError("target: some labels are missing; drop those rows first")
    classes, sizes = np.unique(labels.astype(str), return_counts=True)
    if len(classes) < 2:
        raise InvalidTableError("target: expected at least two classes, got one")
    if sizes.min() < 2:
        raise InvalidTableError(
            f"target: class {str(classes[sizes.argmin()])!r} has a single row, so no fold can both "
            "learn and predict it; drop that row, or use a regression score for numbers"
        )
    categorical = _categorical(frame)
    numbers = protocol_scale(frame.loc[:, ~categorical])
    indicators = [
        pd.get_dummies(column).to_numpy(float) for _, column in frame.loc[:, categorical].items()
    ]
    scores = cross_val_predict(
        make_pipeline(StandardScaler(), OneVsRestClassifier(LogisticRegression(max_iter=1000))),
        np.hstack([numbers, *indicators]),
        labels.astype(str).to_numpy(),
        cv=StratifiedKFold(min(5, sizes.min()), shuffle=True, random_state=random_state),
        method="predict_proba",
    )
    if len(classes) == 2:
        return float(roc_auc_score(labels.astype(str) == classes[1], scores[:, 1]))
    return float(roc_auc_score(labels.astype(str), scores, multi_class="ovr", labels=classes))


def cka(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Linear centred kernel alignment of two representations of the same rows, from 0 to 1.

    It ignores rotation and scale; the representations may differ in width.

    >>> a = np.array([[0.0, 1.0], [1.0, 0.0], [2.0, 5.0]])
    >>> round(cka(a, 3 * a[:, ::-1]), 6)
    1.0
    """
    first, second = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if first.ndim != 2 or second.ndim != 2 or len(first) != len(second):
        raise InvalidTableError(
            "cka: expected two matrices with the same number of rows, "
            f"got shapes {first.shape} and {second.shape}"
        )
    first, second = first - first.mean(axis=0), second - second.mean(axis=0)
    scale = np.linalg.norm(first.T @ first) * np.linalg.norm(second.T @ second)
    if not scale > 0:
        raise InvalidTableError("cka: all rows of a representation are equal or undefined")
    return float(np.linalg.norm(first.T @ second) ** 2 / scale)


def pairwise_mutual_information(table: Table, random_state: int = 0) -> float:
    """Mean mutual information (in nats) over all pairs of columns: the paper's PMI.

    The paper relates it to the best masking ratio: the more the columns tell about each other,
    the more can be masked. It does not name its estimator. This is scikit-learn's, by nearest
    neighbours, with its defaults; it gives the paper's 0.11 on diabetes and nearly its 0.82 on
    yacht (0.78), but 1.8 instead of 0.78 on compressive, where the number of neighbours matters
    much. A pair is judged on the rows that have both values; `random_state` breaks ties.

    >>> rng = np.random.default_rng(0)
    >>> x, noise = rng.normal(size=(2, 2000))
    >>> round(pairwise_mutual_information(np.column_stack([x, 2 * x + noise])), 1)
    0.8
    """
    from sklearn.feature_selection import mutual_info_classif, mutual_info_regression
    from sklearn.metrics import mutual_info_score

    frame = _as_frame(table, "table")
    values = protocol_scale(frame)
    categorical = _categorical(frame)
    n_neighbors = 3  # scikit-learn's default
    found = []
    for i in range(values.shape[1]):
        for j in range(i):
            both = ~np.isnan(values[:, i]) & ~np.isnan(values[:, j])
            if both.sum() <= n_neighbors:
                continue
            # A categorical column goes last, as the target.
            first, last = (j, i) if categorical[i] else (i, j)
            x, y = values[both, first], values[both, last]
            if categorical[last]:
                y = np.unique(y, return_inverse=True)[1]
            if categorical[first]:
                found.append(mutual_info_score(np.unique(x, return_inverse=True)[1], y))
                continue
            estimate = mutual_info_classif if categorical[last] else mutual_info_regression
            found.append(
                estimate(
                    x[:, None],
                    y,
                    discrete_features=False,
                    n_neighbors=n_neighbors,
                    random_state=random_state,
                )[0]
            )
    if not found:
        raise InvalidTableError(
            "table: expected two columns that share at least "
            f"{n_neighbors + 1} rows without gaps, got a table of shape {frame.shape}"
        )
    return float(np.mean(found))


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """Truth and imputation on the protocol's scale; `categorical` has one flag per column."""

    truth: Floats
    imputed: Floats
    hidden: Booleans
    categorical: Booleans

    def hidden_columns(self) -> list[tuple[int, Booleans]]:
        """Position and hidden rows of every column that has any."""
        return [(position, rows) for position, rows in enumerate(self.hidden.T) if rows.any()]


def _compare(truth: Table, imputed: Table, hidden: Table | None) -> _Comparison:
    answer = _as_frame(truth, "truth")
    guess = _as_frame(imputed, "imputed")
    if guess.shape != answer.shape:
        raise InvalidTableError(
            f"imputed: expected the truth's shape {answer.shape}, got {guess.shape}"
        )
    if not isinstance(truth, pd.DataFrame) or not isinstance(imputed, pd.DataFrame):
        guess = guess.set_axis(answer.columns, axis=1)
    for expected, got in zip(answer.columns, guess.columns, strict=True):
        if expected != got:
            raise InvalidTableError(
                f"imputed: expected column {expected!r}, got {got!r}; "
                "bring the columns into the truth's order"
            )
    _check_complete(guess)
    cells = np.zeros(answer.shape, bool) if hidden is None else np.asarray(hidden).astype(bool)
    if cells.shape != answer.shape:
        raise InvalidTableError(
            f"hidden: expected the truth's shape {answer.shape}, got {cells.shape}"
        )
    if hidden is not None and not cells.any():
        raise InvalidTableError("hidden: no cell is hidden, so there is nothing to score")
    values = protocol_scale(answer)
    unknown = np.isnan(values) & cells
    if unknown.any():
        row, position = np.argwhere(unknown)[0]
        raise InvalidTableError(
            f"truth: column {answer.columns[position]!r} has no value in row {row}, which is "
            "hidden; hide only cells whose true value is known"
        )
    return _Comparison(
        truth=values,
        imputed=protocol_scale(guess, like=answer),
        hidden=cells,
        categorical=_categorical(answer),
    )


def _as_frame(table: Table, subject: str) -> pd.DataFrame:
    if isinstance(table, pd.DataFrame):
        if not table.columns.is_unique:
            twice = table.columns[table.columns.duplicated()][0]
            raise InvalidTableError(f"{subject}: column {twice!r} occurs twice; rename one")
        return table
    array = np.asarray(table)
    if array.ndim != 2:
        raise InvalidTableError(
            f"{subject}: expected rows and columns, got an array of shape {array.shape}"
        )
    return pd.DataFrame(array).infer_objects()


def _check_complete(imputed: pd.DataFrame) -> None:
    gaps = imputed.isna().to_numpy()
    if gaps.any():
        position = int(gaps.any(axis=0).argmax())
        raise InvalidTableError(
            f"imputed: column {imputed.columns[position]!r} still has {gaps[:, position].sum()} "
            f"missing values, the first in row {gaps[:, position].argmax()}; fill them first"
        )


def _check_convention(convention: str, options: Sequence[str]) -> None:
    if convention not in options:
        raise InvalidConfigError(
            f"convention: expected one of {', '.join(map(repr, options))}, got {convention!r}"
            + nearest(convention, options)
        )


def _kind(dtype: Any) -> str:
    types = pd.api.types
    if isinstance(dtype, pd.CategoricalDtype):  # first: of booleans, it also counts as boolean
        return "category"
    if types.is_bool_dtype(dtype):
        return "boolean"
    if types.is_numeric_dtype(dtype):
        return "number"
    if types.is_datetime64_any_dtype(dtype):
        return "datetime"
    return "timedelta" if types.is_timedelta64_dtype(dtype) else "category"


def _categorical(frame: pd.DataFrame) -> Booleans:
    return np.array([_kind(dtype) in ("category", "boolean") for dtype in frame.dtypes], dtype=bool)


def _numbers(column: pd.Series, reference: pd.Series) -> Floats:
    """The column as floats; its categories and its origin of time are those of `reference`."""
    kind = _kind(reference.dtype)
    if kind == "category":
        return _codes(column, reference)
    try:
        if kind == "datetime":
            column = column - reference.min()
        if kind in ("datetime", "timedelta"):
            column = column.dt.total_seconds()
        values = column.to_numpy(np.float64, na_value=np.nan)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidTableError(
            f"column {column.name!r}: expected values of the truth's dtype {reference.dtype}, "
            f"got {column.dtype}"
        ) from error
    if np.isinf(values).any():
        raise InvalidTableError(
            f"column {column.name!r}: infinite value in row {np.isinf(values).argmax()}; "
            "replace it with a number or a gap"
        )
    return values


def _codes(column: pd.Series, reference: pd.Series) -> Floats:
    if isinstance(reference.dtype, pd.CategoricalDtype):
        categories = pd.Index(reference.dtype.categories)
    else:
        found = reference.dropna().unique().tolist()
        try:
            categories = pd.Index(sorted(found), dtype=object)
        except TypeError:  # values of several types, such as 1 and "one"
            categories = pd.Index(sorted(found, key=str), dtype=object)
    codes = categories.get_indexer(pd.Index(column, dtype=object))
    missing = column.isna().to_numpy()
    unknown = (codes < 0) & ~missing
    if unknown.any():
        row = int(unknown.argmax())
        raise InvalidTableError(
            f"column {column.name!r}: {column.iloc[row]!r} in row {row} is not one of the "
            f"truth's {len(categories)} categories"
        )
    numbers = codes.astype(np.float64)
    numbers[missing] = np.nan
    return numbers


def _deviation(values: Floats) -> Floats:
    """Standard deviation of each column, 1 where it is constant."""
    known = ~np.isnan(values)
    deviation = np.array(
        [
            values[rows, position].std() if rows.any() else 0.0
            for position, rows in enumerate(known.T)
        ]
    )
    return np.where(deviation > 0, deviation, 1.0)
