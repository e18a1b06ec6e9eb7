"""Rubin's rules: by hand, at their limits, and as intervals that hold the truth often enough."""

import numpy as np
import pytest
from scipy.stats import t as student

from remasker import InvalidConfigError, pool


def test_by_hand():
    pooled = pool([1.0, 2.0, 3.0], [0.5, 0.25, 0.75])
    total = 0.5 + (1 + 1 / 3) * 1.0  # within and between
    share = (1 + 1 / 3) / total
    freedom = 2 / share**2
    assert pooled.estimate == 2.0
    assert pooled.standard_error == pytest.approx(total**0.5)
    assert pooled.degrees_of_freedom == pytest.approx(freedom)
    # Rubin's own form of the missing information, by the ratio of the two variances.
    ratio = (1 + 1 / 3) / 0.5
    wanted = (ratio + 2 / (freedom + 3)) / (ratio + 1)
    assert pooled.missing_information == pytest.approx(wanted)
    low, high = pooled.interval(0.9)
    half = student.ppf(0.95, freedom) * total**0.5
    assert (low, high) == pytest.approx((2 - half, 2 + half))


def test_tables_that_agree_add_nothing():
    pooled = pool([[1.0, 5.0]] * 4, [[0.25, 4.0]] * 4)
    assert pooled.standard_error.tolist() == [0.5, 2.0]
    assert np.isinf(pooled.degrees_of_freedom).all()
    assert pooled.missing_information.tolist() == [0.0, 0.0]
    assert pooled.interval()[0][0] == pytest.approx(1 - 1.959964 * 0.5)


def test_a_small_table_has_fewer_degrees_of_freedom():
    estimates, variances = [1.0, 1.1, 0.9, 1.0], [0.04] * 4
    many = pool(estimates, variances)
    few = pool(estimates, variances, complete_degrees_of_freedom=20)
    assert few.degrees_of_freedom < 20 < many.degrees_of_freedom
    agreeing = pool([1.0, 1.0], [0.04, 0.04], complete_degrees_of_freedom=20)
    assert agreeing.degrees_of_freedom == pytest.approx(21 / 23 * 20)


def test_units_and_order_of_tables_do_not_matter():
    random = np.random.default_rng(0)
    estimates, variances = random.normal(size=(6, 3)), random.random((6, 3))
    pooled = pool(estimates, variances)
    scaled = pool(10 * estimates[::-1], 100 * variances[::-1])
    np.testing.assert_allclose(scaled.standard_error, 10 * pooled.standard_error)
    np.testing.assert_allclose(scaled.missing_information, pooled.missing_information)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """The mean of 60 numbers of which 30 are missing, imputed by draws from the posterior."""
    random = np.random.default_rng(0)
    n, n_draws, held = 60, 10, []
    for _ in range(2000):
        seen = random.normal(size=n // 2)
        spread = seen.std(ddof=1) * np.sqrt((len(seen) - 1) / random.chisquare(len(seen) - 1, 10))
        middle = random.normal(seen.mean(), spread / np.sqrt(len(seen)))
        drawn = random.normal(middle[:, None], spread[:, None], size=(n_draws, n // 2))
        tables = np.hstack([np.tile(seen, (n_draws, 1)), drawn])
        pooled = pool(
            tables.mean(axis=1), tables.var(axis=1, ddof=1) / n, complete_degrees_of_freedom=n - 1
        )
        low, high = pooled.interval(0.9)
        held.append(low < 0 < high)
    assert 0.88 < np.mean(held) < 0.92  # three standard errors of 2,000 trials


@pytest.mark.parametrize(
    ("estimates", "variances", "said"),
    [
        ([1.0], [1.0], "at least 2 completed tables"),
        (1.0, 1.0, "at least 2 completed tables"),
        ([1.0, 2.0], [1.0], "expected the shape of estimates"),
        ([1.0, np.nan], [1.0, 1.0], "finite"),
        ([1.0, 2.0], [1.0, -1.0], "no negative variance"),
    ],
)
def test_refusals(estimates, variances, said):
    with pytest.raises(InvalidConfigError, match=said):
        pool(estimates, variances)
    with pytest.raises(InvalidConfigError, match="complete_degrees_of_freedom"):
        pool([1.0, 2.0], [1.0, 1.0], complete_degrees_of_freedom=-1)
