"""The kinds of table that come in, as one: pandas, polars, arrays; and each back as it came."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

import numpy as np
import pandas as pd

from remasker.errors import InvalidTableError


def as_frame(X: Any) -> tuple[pd.DataFrame, str]:
    """Any table as a DataFrame, and what it was: "pandas", "polars" or "numpy".

    >>> as_frame([[1.0, 2.0]])[0].columns.tolist()
    ['x0', 'x1']
    """
    if isinstance(X, pd.DataFrame):
        return X, "pandas"
    if type(X).__module__.startswith("polars"):
        if not hasattr(X, "to_pandas") or not hasattr(X, "columns"):
            raise InvalidTableError(
                f"expected a polars DataFrame, got {type(X).__name__}; collect it"
            )
        return X.to_pandas(use_pyarrow_extension_array=True), "polars"
    if hasattr(X, "toarray") and hasattr(X, "nnz"):
        raise TypeError(
            "sparse data was passed, but dense data is required; use X.toarray() to convert it"
        )
    array = np.asarray(X)
    if array.ndim != 2:
        raise InvalidTableError(
            f"Expected 2D array, got {array.ndim}D array instead. Reshape your data either using "
            "array.reshape(-1, 1) if it has a single feature or array.reshape(1, -1) if it has a "
            "single row."
        )
    if array.dtype.kind == "c":
        raise InvalidTableError("Complex data not supported: pass real numbers")
    frame = pd.DataFrame(array, columns=[f"x{j}" for j in range(array.shape[1])])
    return (frame.infer_objects() if array.dtype.kind == "O" else frame), "numpy"


def to_container(
    completed: pd.DataFrame, container: str, like: Any, ignored: Collection[Hashable] = ()
) -> Any:
    """The inverse of `as_frame`; `ignored` columns have no gaps filled.

    >>> to_container(pd.DataFrame({"x0": [1.0]}), "numpy", [[1.0]])
    array([[1.]])
    """
    if container == "pandas":
        return completed
    if container == "polars":
        import polars

        # What polars and Arrow hold but we do not model (structs, objects) never leaves polars.
        filled = [name for name in completed.columns if name not in ignored]
        result = polars.from_pandas(completed[filled])
        schema = {name: dtype for name, dtype in like.schema.items() if name in result.columns}
        result = result.cast(schema)
        return polars.DataFrame(
            [result[name] if name in result.columns else like[name] for name in completed.columns]
        )
    dtype = np.asarray(like).dtype
    return completed.to_numpy(dtype=dtype if dtype.kind in "fiuO" else None)
