"""What the search may vary: Optuna distributions, and the settings it tries first.

A *setting* is a flat dict of fields of `ModelConfig` and `TrainingConfig`. Optuna's distributions
are the only vocabulary; what a user writes (`[32, 64]`, `(50, 600)`, `0.5`) becomes one of them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from remasker.errors import InvalidConfigError, make_config, nearest
from remasker.model import ModelConfig
from remasker.training import TrainingConfig

MODEL_FIELDS = tuple(field.name for field in fields(ModelConfig))
TRAINING_FIELDS = tuple(field.name for field in fields(TrainingConfig))
NAMES = (*MODEL_FIELDS, *TRAINING_FIELDS)
DEFAULTS: dict[str, Any] = {
    field.name: field.default
    for config in (ModelConfig, TrainingConfig)
    for field in fields(config)
    if field.default is not MISSING
}
#: Ranges of these are searched on a logarithmic scale.
LOGARITHMIC = ("epochs", "learning_rate", "weight_decay", "batch_size")
PORTFOLIO = Path(__file__).with_name("portfolio.json")

#: Everything the search varies by default, but for `epochs`, which depends on the table.
DEFAULT_SPACE: dict[str, BaseDistribution] = {
    "encoder_depth": IntDistribution(1, 8),
    "decoder_depth": IntDistribution(1, 6),
    "width": IntDistribution(16, 128, step=16),
    "value_encoding": CategoricalDistribution(("piecewise_linear", "linear", "shared")),
    "masking": CategoricalDistribution(
        (
            "copy+gentle_copy+random_ratio",
            "copy+random_ratio",
            "nested_copy",
            "nested_copy+copy",
            "random_ratio",
            "uniform",
        )
    ),
    "masking_ratio": FloatDistribution(0.1, 0.8),
    "learning_rate": FloatDistribution(1e-3, 1e-2, log=True),
    "batch_size": CategoricalDistribution((32, 64, 128)),
}


def split_settings(settings: Mapping[str, Any]) -> tuple[ModelConfig, TrainingConfig]:
    """A flat setting -> the two configurations, both validated.

    >>> model, training = split_settings({"width": 32, "epochs": 7})
    >>> model.width, training.epochs
    (32, 7)
    >>> split_settings({"widht": 32})
    Traceback (most recent call last):
    remasker.errors.InvalidConfigError: unknown setting 'widht'; did you mean 'width'?
    """
    for name in settings:
        if name not in NAMES:
            raise InvalidConfigError(f"unknown setting {name!r}{nearest(name, NAMES)}")
    model, training = (
        make_config(config, {k: v for k, v in settings.items() if k in names})
        for config, names in ((ModelConfig, MODEL_FIELDS), (TrainingConfig, TRAINING_FIELDS))
    )
    return model, training


def make_space(
    user: Mapping[str, Any] | None, n_rows: int
) -> tuple[dict[str, BaseDistribution], dict[str, Any]]:
    """The distributions to search and the settings held fixed, after the user's changes.

    A single value fixes a setting, a list gives choices, a pair ``(low, high)`` a range, and an
    Optuna distribution is taken as it is. Names that the default space lacks extend it.

    >>> space, fixed = make_space({"width": [32, 64], "epochs": (50, 600), "loss": "all"}, 1000)
    >>> space["width"].choices, space["epochs"].low, space["epochs"].high, fixed
    ((32, 64), 50, 600, {'loss': 'all'})
    >>> make_space({"epoch": 3}, 1000)
    Traceback (most recent call last):
    remasker.errors.InvalidConfigError: space: unknown setting 'epoch'; did you mean 'epochs'?
    """
    space = {**DEFAULT_SPACE, "epochs": default_epochs(n_rows)}
    fixed: dict[str, Any] = {}
    for name, wanted in (user or {}).items():
        if name not in NAMES:
            raise InvalidConfigError(f"space: unknown setting {name!r}{nearest(name, NAMES)}")
        distribution = _distribution(name, wanted)
        if distribution is None:
            fixed[name] = wanted
            space.pop(name, None)
        else:
            space[name] = distribution
    _check_space(space, fixed)
    if not space:
        # Everything is fixed: Optuna still needs something to propose.
        space["epochs"] = CategoricalDistribution((fixed.pop("epochs"),))
    return space, fixed


def default_epochs(n_rows: int) -> IntDistribution:
    """From a quarter of the default's epochs to three times as many.

    >>> default_epochs(1000)
    IntDistribution(high=231, log=True, low=19, step=1)
    """
    usual = TrainingConfig().n_epochs(n_rows)
    return IntDistribution(max(2, usual // 4), max(8, 3 * usual), log=True)


def values_of(distribution: BaseDistribution) -> list[Any]:
    """The values by which a distribution is checked: every choice, or the two ends.

    >>> values_of(IntDistribution(1, 8))
    [1, 8]
    """
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return [distribution.low, distribution.high]


def nearest_value(distribution: BaseDistribution, value: Any) -> Any:
    """The value within a distribution closest to `value`; None where there is no such thing.

    >>> nearest_value(IntDistribution(16, 64, step=16), 90)
    64
    >>> nearest_value(CategoricalDistribution(("a", "b")), "c") is None
    True
    """
    if isinstance(distribution, CategoricalDistribution):
        if value in distribution.choices:
            return value
        numbers = [c for c in distribution.choices if _number(c)]
        if _number(value) and numbers:
            return min(numbers, key=lambda choice: abs(choice - value))
        return None
    if not _number(value):
        return None
    if isinstance(distribution, IntDistribution):
        steps = round((value - distribution.low) / distribution.step)
        inside = distribution.low + steps * distribution.step
        return int(min(max(inside, distribution.low), distribution.high))
    assert isinstance(distribution, FloatDistribution)
    return float(min(max(value, distribution.low), distribution.high))


def warm_starts(space: Mapping[str, BaseDistribution], n_rows: int) -> list[dict[str, Any]]:
    """The portfolio within a space: complete points, each once, the default first.

    >>> space, _ = make_space(None, 1000)
    >>> first, *others = warm_starts(space, 1000)
    >>> first["width"] == ModelConfig.width, len(others) >= 5
    (True, True)
    """
    points: list[dict[str, Any]] = []
    for entry in read_portfolio():
        changes = dict(entry["settings"])
        wanted = {**DEFAULTS, **changes}
        times = float(entry.get("epochs", 1.0))
        wanted["epochs"] = max(1, round(times * TrainingConfig().n_epochs(n_rows)))
        point: dict[str, Any] = {}
        for name, distribution in space.items():
            value = nearest_value(distribution, wanted[name])
            point[name] = values_of(distribution)[0] if value is None else value
        if point not in points:
            points.append(point)
    return points


def read_portfolio() -> list[dict[str, Any]]:
    """The entries of `portfolio.json`: a name, settings, and epochs as a multiple of the default's.

    >>> read_portfolio()[0]["name"]
    'default'
    """
    entries: list[dict[str, Any]] = json.loads(PORTFOLIO.read_text())["entries"]
    return entries


# ---------------------------------------------------------------------- the user's words


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _distribution(name: str, wanted: Any) -> BaseDistribution | None:
    """What the user wrote -> a distribution, or None for a single value."""
    if isinstance(wanted, BaseDistribution):
        return wanted
    if isinstance(wanted, tuple):
        return _range(name, wanted)
    if isinstance(wanted, list | set | frozenset):
        choices = sorted(wanted, key=str) if not isinstance(wanted, list) else wanted
        if not choices:
            raise InvalidConfigError(f"space[{name!r}]: expected at least one choice, got {wanted}")
        return CategoricalDistribution(tuple(choices))
    return None


def _range(name: str, wanted: tuple[Any, ...]) -> BaseDistribution:
    if len(wanted) != 2 or not all(_number(end) for end in wanted) or wanted[0] > wanted[1]:
        raise InvalidConfigError(
            f"space[{name!r}]: expected a range (low, high) of two numbers, got {wanted!r}; "
            "write choices as a list"
        )
    low, high = wanted
    whole = isinstance(DEFAULTS.get(name), int) or name in ("epochs", "patience")
    if isinstance(DEFAULTS.get(name), str):
        raise InvalidConfigError(f"space[{name!r}]: expected a list of choices, got {wanted!r}")
    log = name in LOGARITHMIC and low > 0
    if whole:
        if not (float(low).is_integer() and float(high).is_integer()):
            raise InvalidConfigError(f"space[{name!r}]: expected whole numbers, got {wanted!r}")
        low, high = int(low), int(high)
        if name == "width":
            usual = DEFAULT_SPACE["width"]
            assert isinstance(usual, IntDistribution)
            step = next(s for s in (usual.step, 8, 4, 2, 1) if not (high - low) % s)
            return IntDistribution(low, high, step=step)
        return IntDistribution(low, high, log=log)
    return FloatDistribution(float(low), float(high), log=log)


def _check_space(space: Mapping[str, BaseDistribution], fixed: Mapping[str, Any]) -> None:
    """Every value that could be proposed must make a valid configuration."""
    # Width and heads depend on each other, so they are checked together.
    alone = {name: values_of(d) for name, d in space.items()} | {k: [v] for k, v in fixed.items()}
    for name, values in alone.items():
        for value in values:
            settings = {name: value, "heads": 1} if name == "width" else {name: value}
            settings = {name: value, "width": value} if name == "heads" else settings
            try:
                split_settings(settings)
            except (InvalidConfigError, TypeError) as error:
                raise InvalidConfigError(f"space[{name!r}]: {error}") from None
            if name == "output" and value == "shared_tanh":
                raise InvalidConfigError(
                    "space['output']: 'shared_tanh' needs min–max scaling, which a search does not "
                    "use; fit it with ReMaskerImputer.paper()"
                )
    widths = _every_integer(space.get("width"), alone.get("width", [DEFAULTS["width"]]))
    heads = _every_integer(space.get("heads"), alone.get("heads", [DEFAULTS["heads"]]))
    for width, n_heads in itertools.product(widths, heads):
        if width % n_heads:
            raise InvalidConfigError(
                f"space['width']: expected multiples of heads ({n_heads}), got {width}"
            )


def _every_integer(distribution: BaseDistribution | None, values: list[Any]) -> list[Any]:
    if isinstance(distribution, IntDistribution):
        return list(range(distribution.low, distribution.high + 1, distribution.step))
    return values
