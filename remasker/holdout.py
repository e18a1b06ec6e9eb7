"""Which observed cells are set aside to judge a model: cells like those that are really missing."""

from __future__ import annotations

import numpy as np

#: No column gives away more than this share of its observed cells.
MAX_COLUMN_SHARE = 0.3


def hold_out(
    observed: np.ndarray, fraction: float, random_state: np.random.Generator
) -> np.ndarray:
    """Draw about `fraction` of the observed cells, following the table's own patterns of gaps.

    A row gives away what another, randomly drawn row is missing, so the cells fall in the same
    columns and combinations as the real gaps. A table with too few gaps is topped up at random. A
    row always keeps an observed cell, and a column most of its own.

    >>> observed = np.ones((100, 4), dtype=bool)
    >>> observed[:40, 0] = False
    >>> hidden = hold_out(observed, 0.05, np.random.default_rng(0))
    >>> bool((hidden & ~observed).any()), bool(hidden[:, 0].sum() > hidden[:, 1:].sum())
    (False, True)
    """
    n_rows = len(observed)
    target = fraction * observed.sum()
    donors = observed[random_state.integers(n_rows, size=n_rows)]
    hidden = _spare_columns(observed & ~donors, observed, random_state)
    order = random_state.permutation(n_rows)
    # Whole rows in random order, so that patterns stay whole, until there are enough cells.
    gathered = np.cumsum(hidden[order].sum(axis=1))
    hidden[order[np.searchsorted(gathered, target) + 1 :]] = False
    lacking = target - hidden.sum()
    if lacking >= 1:
        spare = observed & ~hidden
        extra = spare & (random_state.random(observed.shape) < lacking / max(1, spare.sum()))
        hidden = _spare_columns(hidden | extra, observed, random_state)
    return _spare_rows(hidden, observed, random_state)


def _spare_columns(
    hidden: np.ndarray, observed: np.ndarray, random_state: np.random.Generator
) -> np.ndarray:
    share = hidden.sum(axis=0) / np.maximum(1, observed.sum(axis=0))
    keep = np.minimum(1.0, MAX_COLUMN_SHARE / np.maximum(share, 1e-9))
    thinned = hidden & (random_state.random(hidden.shape) < keep)
    # Thinning is random: a column of a few cells could still lose its last one.
    return thinned & (thinned.sum(axis=0) < observed.sum(axis=0))


def _spare_rows(
    hidden: np.ndarray, observed: np.ndarray, random_state: np.random.Generator
) -> np.ndarray:
    blank = observed.any(axis=1) & (hidden == observed).all(axis=1)
    noise = np.where(observed, random_state.random(observed.shape), -1.0)
    spared = hidden.copy()
    spared[blank, noise[blank].argmax(axis=1)] = False
    return spared
