import numpy as np
import pytest
import torch

from remasker.errors import InvalidConfigError
from remasker.holdout import hold_out
from remasker.masking import STRATEGIES, draw_visible

MIXTURES = [*STRATEGIES, "copy+random_ratio", "uniform+copy+proportional"]


def gaps(n_rows=400, n_columns=8, rate=0.4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n_rows, n_columns, generator=generator) > rate


def draw(observed, masking, ratio=0.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return draw_visible(observed, masking=masking, ratio=ratio, generator=generator)


@pytest.mark.parametrize("masking", MIXTURES)
@pytest.mark.parametrize("rate", [0.0, 0.4, 0.9])
def test_visible_is_observed_and_no_row_goes_blank(masking, rate):
    observed = gaps(rate=rate)
    visible = draw(observed, masking)
    assert not (visible & ~observed).any()
    assert visible.any(dim=1).equal(observed.any(dim=1))


@pytest.mark.parametrize("masking", MIXTURES)
def test_something_is_hidden_and_the_seed_decides_what(masking):
    observed = gaps()
    visible = draw(observed, masking)
    assert (observed & ~visible).any()
    assert visible.equal(draw(observed, masking))
    assert not visible.equal(draw(observed, masking, seed=1))


def test_uniform_keeps_what_the_paper_keeps():
    observed = gaps(rate=0.5)
    visible = draw(observed, "uniform", ratio=0.5)
    expected = torch.minimum(observed.sum(1), torch.tensor(4))
    assert visible.sum(1).equal(expected)


def test_random_ratio_varies_by_row_around_the_ratio():
    visible = draw(torch.ones(4000, 20, dtype=torch.bool), "random_ratio", ratio=0.5)
    hidden = 1 - visible.float().mean(dim=1)
    assert abs(hidden.mean() - 0.5) < 0.02
    assert hidden.std() > 0.2


def test_copy_hides_only_what_some_row_is_missing():
    observed = torch.ones(300, 6, dtype=torch.bool)
    observed[:250, 2] = False
    hidden = observed & ~draw(observed, "copy")
    # Donors without gaps teach nothing; their takers fall back to a ratio, so look at the shares.
    assert hidden[250:, 2].float().mean() > 0.8
    assert hidden[250:, 0].float().mean() < 0.2


def test_nested_copy_leaves_patterns_that_occur():
    observed = torch.ones(400, 6, dtype=torch.bool)
    observed[100:300, 1] = False
    observed[200:300, [2, 4]] = False
    observed[300:, 3] = False
    visible = draw(observed, "nested_copy")
    occurring = {tuple(row) for row in observed.unique(dim=0).tolist()}
    assert {tuple(row) for row in visible[:200].tolist()} <= occurring
    # A complete row loses something, a row with gaps gets those of rows that lack more.
    assert (visible[:100].sum(dim=1) < 6).all()
    assert not visible[100:200][:, [2, 4]].any()


def test_proportional_follows_the_missing_rate():
    observed = torch.ones(5000, 4, dtype=torch.bool)
    observed[:2500, 0] = False
    observed[:500, 1] = False
    hidden = (observed & ~draw(observed, "proportional", ratio=0.3)).float()
    rates = hidden[2500:].mean(dim=0)
    assert rates[0] > 3 * rates[1] > 3 * rates[2]


def test_unknown_strategy_is_answered_with_the_nearest():
    with pytest.raises(InvalidConfigError, match="did you mean 'uniform'"):
        draw(gaps(), "uniforn")


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5, 0.9])
def test_held_out_cells_are_observed_and_leave_every_row_and_column_something(rate):
    observed = gaps(n_rows=3000, rate=rate).numpy()
    hidden = hold_out(observed, 0.1, np.random.default_rng(0))
    left = observed & ~hidden
    assert not (hidden & ~observed).any()
    assert hidden.sum() > 20
    assert (left.any(axis=1) == observed.any(axis=1)).all()
    assert (hidden.sum(axis=0) < 0.2 * observed.sum(axis=0)).all()


def test_held_out_cells_fall_where_the_gaps_are_and_as_often():
    observed = np.ones((3000, 5), dtype=bool)
    observed[:1200, 1] = False
    observed[600:1200, 3] = False
    hidden = hold_out(observed, 0.2, np.random.default_rng(0))
    assert not hidden[:, [0, 2, 4]].any()
    assert hidden[:, 1].sum() / observed[:, 1].sum() == pytest.approx(0.2, abs=0.04)
    # Column 3 is missing half as often, and never without column 1.
    assert hidden[:, 3].sum() / observed[:, 3].sum() == pytest.approx(0.1, abs=0.03)
    both_known = observed[:, 1] & observed[:, 3]
    assert not (hidden[both_known, 3] & ~hidden[both_known, 1]).any()


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (3, 2)])
def test_holding_out_of_tiny_tables_never_takes_everything(shape):
    observed = np.ones(shape, dtype=bool)
    for seed in range(20):
        left = observed & ~hold_out(observed, 0.3, np.random.default_rng(seed))
        assert left.any(axis=1).all()
        assert left.any(axis=0).all()
