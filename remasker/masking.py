"""Re-masking: which observed cells the encoder may see while it learns to predict the others.

Departs from the paper: the default mixes strategies, of which the paper has `uniform`.
All rows of an epoch are drawn at once. A mixture such as ``"copy+random_ratio"`` draws one of its
strategies for every row.

============= ======================================================================================
uniform       the paper's: every row keeps ``int(d · (1 - ratio))`` of its observed cells
random_ratio  every row hides a share of its own, drawn uniformly around `ratio`
copy          a row also hides what another, randomly drawn row is missing (CACTI)
gentle_copy   as copy, from the one of three rows that leaves most to see
nested_copy   as copy, from a row that lacks all this one lacks: what is left really occurs
proportional  a column is hidden in proportion to how often it is missing (PMAE)
============= ======================================================================================
"""

from __future__ import annotations

import torch
from torch import Tensor

from remasker.errors import InvalidConfigError, nearest

STRATEGIES = ("uniform", "random_ratio", "copy", "gentle_copy", "nested_copy", "proportional")


def parse_masking(masking: str) -> tuple[str, ...]:
    """The strategies that a mixture names.

    >>> parse_masking("copy+random_ratio")
    ('copy', 'random_ratio')
    """
    strategies = tuple(part.strip() for part in str(masking).split("+"))
    for strategy in strategies:
        if strategy not in STRATEGIES:
            raise InvalidConfigError(
                f"masking: expected a mixture ('a+b') of {', '.join(map(repr, STRATEGIES))}, "
                f"got {masking!r}{nearest(strategy, STRATEGIES)}"
            )
    return strategies


def draw_visible(
    observed: Tensor, *, masking: str, ratio: float, generator: torch.Generator
) -> Tensor:
    """Draw, for every row, the observed cells that stay visible.

    The result is a subset of `observed` in which no row is blank that had something to show.

    >>> observed = torch.tensor([[True, True, True, False]])
    >>> generator = torch.Generator().manual_seed(0)
    >>> visible = draw_visible(observed, masking="uniform", ratio=0.5, generator=generator)
    >>> int(visible.sum()), bool((visible & ~observed).any())
    (2, False)
    """
    strategies = parse_masking(masking)
    noise = torch.rand(observed.shape, generator=generator, device=observed.device)
    drawn = [_DRAW[name](observed, ratio, noise, generator) for name in strategies]
    visible = drawn[0]
    if len(drawn) > 1:
        choice = torch.randint(
            len(drawn), (len(observed), 1), generator=generator, device=observed.device
        )
        for k, other in enumerate(drawn[1:], start=1):
            visible = torch.where(choice == k, other, visible)
    # A row left blank keeps one cell: the one that the noise ranks first among its observed.
    blank = ~visible.any(dim=1, keepdim=True)
    first = noise.masked_fill(~observed, 2.0).argmin(dim=1, keepdim=True)
    kept = torch.zeros_like(observed).scatter_(1, first, True)
    return (visible | (blank & kept)) & observed


def _uniform(observed: Tensor, ratio: float, noise: Tensor, generator: torch.Generator) -> Tensor:
    n_kept = max(1, int(observed.shape[1] * (1 - ratio)))
    rank = noise.masked_fill(~observed, 2.0).argsort(dim=1).argsort(dim=1)
    return observed & (rank < n_kept)


def _random_ratio(
    observed: Tensor, ratio: float, noise: Tensor, generator: torch.Generator
) -> Tensor:
    share = torch.rand(len(observed), 1, generator=generator, device=observed.device)
    # From 0.2 to 1.8 times the ratio: 0.1 to 0.9 for one half.
    return observed & (noise >= (ratio * (0.2 + 1.6 * share)).clamp(max=0.95))


def _copy(
    observed: Tensor,
    ratio: float,
    noise: Tensor,
    generator: torch.Generator,
    n_donors: int = 1,
) -> Tensor:
    donors = torch.randint(
        len(observed), (n_donors, len(observed)), generator=generator, device=observed.device
    )
    drawn = observed & observed[donors]
    n_visible = drawn.sum(dim=2)
    # A donor that hides nothing teaches nothing: it comes last.
    n_visible = n_visible.masked_fill(n_visible == observed.sum(dim=1), -1)
    best = n_visible.max(dim=0)
    visible = drawn[best.indices, torch.arange(len(observed), device=observed.device)]
    # A row that found no other draws a ratio instead.
    idle = (best.values < 0).unsqueeze(1)
    return torch.where(idle, _random_ratio(observed, ratio, noise, generator), visible)


def _gentle_copy(
    observed: Tensor, ratio: float, noise: Tensor, generator: torch.Generator
) -> Tensor:
    return _copy(observed, ratio, noise, generator, n_donors=3)


def _nested_copy(
    observed: Tensor, ratio: float, noise: Tensor, generator: torch.Generator, n_donors: int = 24
) -> Tensor:
    """The first of some donors that lacks all that the row lacks; else the gentlest of them.

    With `copy` a row loses its own gaps and the donor's, more than any real row lacks. Here it is
    asked for what will be asked of it, no more.
    """
    n_rows, n_columns = observed.shape
    visible, cost = observed, torch.full((n_rows,), n_columns, device=observed.device)
    # One donor at a time: all of them at once would take `n_donors` times the table.
    for _ in range(n_donors):
        donor = observed[torch.randint(n_rows, (n_rows,), generator=generator, device=cost.device)]
        n_hidden = (observed & ~donor).sum(dim=1)
        real = ~(donor & ~observed).any(dim=1)
        # A donor that hides nothing teaches nothing.
        price = n_hidden.masked_fill(real, 0).masked_fill(n_hidden == 0, n_columns)
        better = price < cost
        visible = torch.where(better.unsqueeze(1), observed & donor, visible)
        cost = torch.where(better, price, cost)
    idle = (cost == n_columns).unsqueeze(1)
    return torch.where(idle, _random_ratio(observed, ratio, noise, generator), visible)


def _proportional(
    observed: Tensor, ratio: float, noise: Tensor, generator: torch.Generator
) -> Tensor:
    missing_rate = 1 - observed.float().mean(dim=0)
    if not missing_rate.any():
        return observed & (noise >= ratio)
    return observed & (noise >= (ratio * missing_rate / missing_rate.mean()).clamp(0.05, 0.95))


_DRAW = {
    "uniform": _uniform,
    "random_ratio": _random_ratio,
    "copy": _copy,
    "gentle_copy": _gentle_copy,
    "nested_copy": _nested_copy,
    "proportional": _proportional,
}
