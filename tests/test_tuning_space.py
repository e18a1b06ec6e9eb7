import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from remasker.errors import InvalidConfigError
from tuning.config import SearchConfig
from tuning.space import DEFAULTS, make_space, read_portfolio, split_settings, warm_starts


def test_the_words_of_users_become_distributions() -> None:
    space, fixed = make_space(
        {"width": (16, 64), "heads": [2, 4], "learning_rate": (1e-4, 1e-2), "dropout": 0.0}, 500
    )
    assert space["width"] == IntDistribution(16, 64, step=16)
    assert space["heads"] == CategoricalDistribution((2, 4))
    assert space["learning_rate"] == FloatDistribution(1e-4, 1e-2, log=True)
    assert fixed == {"dropout": 0.0}
    assert "dropout" not in space


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"widht": 3}, "did you mean 'width'"),
        ({"width": (64, 32)}, "range"),
        ({"width": [30]}, "multiples of heads"),
        ({"width": (16, 64), "heads": [5]}, "multiples of heads"),
        ({"masking": ["copi"]}, "did you mean 'copy'"),
        ({"masking": ("copy", "uniform")}, "list"),
        ({"epochs": (0, 10)}, "epochs"),
        ({"dropout": 2.0}, "dropout"),
        ({"loss": []}, "at least one"),
        ({"output": ["shared_tanh"]}, "shared_tanh"),
        ({"epochs": "many"}, "epochs"),
    ],
)
def test_what_cannot_be_is_said(space: dict, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        make_space(space, 500)


@pytest.mark.parametrize("n_rows", [20, 300, 50_000])
def test_every_warm_start_is_valid_and_inside(n_rows: int) -> None:
    space, fixed = make_space({"width": [32, 64], "value_encoding": "linear"}, n_rows)
    points = warm_starts(space, n_rows)
    assert 1 <= len(points) <= len(read_portfolio())
    for point in points:
        split_settings({**fixed, **point})
        for name, distribution in space.items():
            assert distribution._contains(distribution.to_internal_repr(point[name]))
    assert points[0]["encoder_depth"] == DEFAULTS["encoder_depth"]


def test_a_space_without_choices_is_one_setting() -> None:
    every = {name: values for name, values in DEFAULTS.items() if name != "patience"}
    space, fixed = make_space({**every, "epochs": 3}, 100)
    assert list(space) == ["epochs"]
    assert "epochs" not in fixed


@pytest.mark.parametrize(
    "options",
    [
        {"trials": 0},
        {"trials": None, "time_budget": None},
        {"time_budget": "0s"},
        {"metric": "rsme"},
        {"concurrent": 0},
        {"space": ["width"]},
        {"random_state": -1},
    ],
)
def test_options_are_checked(options: dict) -> None:
    with pytest.raises(InvalidConfigError):
        SearchConfig(**options)
