"""Which observed cells are set aside to judge a model: cells like those that are really missing."""

from __future__ import annotations

import numpy as np

#: A table with few gaps of its own still gives this many cells, if it has them to give.
ENOUGH = 200
#: Rows among which a pattern of gaps looks for one that suits it.
CANDIDATES = 32


def hold_out(
    observed: np.ndarray,
    fraction: float,
    random_state: np.random.Generator,
    *,
    like: np.ndarray | None = None,
) -> np.ndarray:
    """Draw observed cells to hide, following the table's own patterns of gaps.

    A row gives away what another, randomly drawn row is missing, so that the cells fall in the same
    columns, proportions and combinations as the real gaps; the column that gives most gives
    `fraction` of its cells. A table with too few gaps is topped up at random. Every row and every
    column keeps an observed cell.

    So a row lacks its own gaps and another's, more than real rows lack. With `like`, what is
    observed in the table as it is, it then shows what a row of that table shows, wherever two such
    rows are found.

    >>> observed = np.ones((1000, 4), dtype=bool)
    >>> observed[:400, 0] = False
    >>> hold_out(observed, 0.2, np.random.default_rng(0)).sum(axis=0).tolist()
    [107, 0, 0, 0]
    """
    n_rows = len(observed)
    if not observed.any():
        return np.zeros_like(observed)
    if like is None:
        hidden = observed & ~observed[random_state.integers(n_rows, size=n_rows)]
    else:
        hidden = _suited(observed, like, random_state)
    share = hidden.sum(axis=0) / np.maximum(1, observed.sum(axis=0))
    # Whole rows are spared, not cells, so that patterns stay whole.
    giving = random_state.random(n_rows) < fraction / max(fraction, share.max(initial=0.0))
    hidden &= giving[:, None]
    incomplete = ~observed.all(axis=0)
    wanted = fraction * observed[:, incomplete].sum()
    if wanted < ENOUGH:
        wanted = min(ENOUGH, fraction * observed.sum())
    if hidden.sum() < 0.2 * wanted:
        spare = observed & ~hidden
        rate = (wanted - hidden.sum()) / max(1, spare.sum())
        hidden |= spare & (random_state.random(observed.shape) < rate)
    # Columns first: what a row gets back cannot empty a column.
    hidden = _spare_one(hidden.T, observed.T, random_state).T
    return _spare_one(hidden, observed, random_state)


def _suited(
    observed: np.ndarray, like: np.ndarray, random_state: np.random.Generator
) -> np.ndarray:
    """What rows give away that take over a whole pattern of `like`, their own gaps included."""
    n_rows = len(observed)
    hidden = np.zeros_like(observed)
    incomplete = np.flatnonzero(~like.all(axis=1))
    if not len(incomplete):
        return hidden
    patterns = like[random_state.choice(incomplete, size=n_rows)]
    rows = np.zeros(n_rows, dtype=np.intp)
    least = np.full(n_rows, np.inf)
    for candidates in random_state.integers(n_rows, size=(CANDIDATES, n_rows)):
        shown = observed[candidates]
        excess = (patterns & ~shown).sum(axis=1).astype(float)
        excess[~(shown & ~patterns).any(axis=1)] = np.inf  # such a row would give nothing
        better = excess < least
        rows[better], least[better] = candidates[better], excess[better]
    found = np.flatnonzero(np.isfinite(least))
    # A row takes over the first pattern that chose it.
    rows, first = np.unique(rows[found], return_index=True)
    hidden[rows] = observed[rows] & ~patterns[found[first]]
    return hidden


def _spare_one(
    hidden: np.ndarray, observed: np.ndarray, random_state: np.random.Generator
) -> np.ndarray:
    """Give rows that would lose everything one observed cell back."""
    blank = observed.any(axis=1) & (hidden == observed).all(axis=1)
    noise = np.where(observed, random_state.random(observed.shape), -1.0)
    spared = hidden.copy()
    spared[blank, noise[blank].argmax(axis=1)] = False
    return spared
