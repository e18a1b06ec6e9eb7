"""Rubin's rules: one answer from the answers that several completed tables give.

Imputed values are guesses. An analysis of a single completed table takes them for facts, and its
standard errors are too small. The same analysis of several tables that `ReMaskerImputer.draw` gave
shows by how much the guesses move its answer; Rubin's rules add that to the standard error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import t as student

from remasker.errors import InvalidConfigError, check_number


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """An estimate from several completed tables; arrays where several quantities were given."""

    estimate: np.ndarray
    standard_error: np.ndarray
    #: Of Student's t; infinite where no table said anything else than the others.
    degrees_of_freedom: np.ndarray
    #: The share of what the whole table would have told that is missing, 0 to 1.
    missing_information: np.ndarray
    n_tables: int

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """The ends of the confidence interval.

        >>> low, high = pool([1.0, 2.0, 3.0], [0.1, 0.1, 0.1]).interval()
        >>> round(float(low), 2), round(float(high), 2)
        (-2.54, 6.54)
        """
        check_number("level", level, 0.0, 1.0, open_low=True)
        half = student.ppf((1 + level) / 2, self.degrees_of_freedom) * self.standard_error
        return self.estimate - half, self.estimate + half


def pool(
    estimates: ArrayLike, variances: ArrayLike, *, complete_degrees_of_freedom: float = np.inf
) -> Pooled:
    """Combine the answers of one analysis of several completed tables (Rubin 1987).

    `estimates` has an entry per table: a number, or an array of numbers such as the coefficients
    of a regression; `variances` are their squared standard errors. On small tables give the degrees
    of freedom that the analysis of a complete table would have (rows less coefficients); the
    pooled ones then follow Barnard and Rubin (1999).

    >>> import pandas as pd
    >>> from remasker import ReMaskerImputer
    >>> table = pd.DataFrame({"age": [31, None, 47, 52, 28, 39], "pay": [2, 3, None, 5, 2, 3]})
    >>> imputer = ReMaskerImputer(epochs=5, width=8, random_state=0).fit(table)
    >>> draws = imputer.draw(table, n_draws=20, random_state=0)
    >>> age = pool([d["age"].mean() for d in draws], [d["age"].sem() ** 2 for d in draws])
    >>> low, high = age.interval(0.95)
    >>> bool(low < age.estimate < high), age.n_tables
    (True, 20)
    """
    found, within = (np.asarray(given, dtype=np.float64) for given in (estimates, variances))
    if found.ndim == 0 or len(found) < 2:
        raise InvalidConfigError(
            "estimates: expected those of at least 2 completed tables, got "
            f"{found.size}; draw more with n_draws"
        )
    if found.shape != within.shape:
        raise InvalidConfigError(
            f"variances: expected the shape of estimates {found.shape}, got {within.shape}"
        )
    if not (np.isfinite(found).all() and np.isfinite(within).all() and (within >= 0).all()):
        raise InvalidConfigError(
            "estimates and variances: expected finite numbers and no negative variance; leave out "
            "what the analysis could not estimate"
        )
    check_number("complete_degrees_of_freedom", complete_degrees_of_freedom, 0.0, np.inf)
    m = len(found)
    usual, between = within.mean(axis=0), (1 + 1 / m) * found.var(axis=0, ddof=1)
    total = usual + between
    share = np.divide(between, total, out=np.zeros_like(total), where=total > 0)
    with np.errstate(divide="ignore"):
        freedom = (m - 1) / share**2
        if np.isfinite(complete_degrees_of_freedom):
            whole = complete_degrees_of_freedom
            freedom = 1 / (1 / freedom + 1 / ((whole + 1) / (whole + 3) * whole * (1 - share)))
    # The share with the price of not knowing the variance between tables exactly.
    return Pooled(
        estimate=found.mean(axis=0),
        standard_error=np.sqrt(total),
        degrees_of_freedom=freedom,
        missing_information=np.minimum(share + (1 - share) * 2 / (freedom + 3), 1.0) * (share > 0),
        n_tables=m,
    )
