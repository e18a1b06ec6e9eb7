"""What can go wrong, said in one sentence that names the subject and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np


class RemaskerError(Exception):
    """The root of every error that this library raises on purpose."""


class InvalidTableError(RemaskerError, ValueError):
    """The table cannot be imputed as it is."""


class InvalidConfigError(RemaskerError, ValueError):
    """A setting has a name or a value that cannot be."""


class ArtifactError(RemaskerError):
    """A saved model cannot be read or written."""


class TrainingDivergedError(RemaskerError):
    """The loss became infinite or undefined."""


class ProcessLostError(RemaskerError):
    """A process that trained was ended from outside."""


def nearest(name: object, options: Iterable[object]) -> str:
    """The end of an error message that offers the option most like `name`, if any is.

    >>> nearest("widht", ["width", "heads"])
    "; did you mean 'width'?"
    >>> nearest("zzz", ["width", "heads"])
    ''
    """
    found = difflib.get_close_matches(str(name), [str(option) for option in options], n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def make_config(cls: type, settings: dict[str, Any]) -> Any:
    """A configuration from a dict; an unknown key is answered with the nearest name.

    >>> from remasker.model import ModelConfig
    >>> make_config(ModelConfig, {"widht": 8})
    Traceback (most recent call last):
    remasker.errors.InvalidConfigError: unknown setting 'widht'; did you mean 'width'?
    """
    known = [field.name for field in fields(cls)]
    for key in settings:
        if key not in known:
            raise InvalidConfigError(f"unknown setting {key!r}{nearest(key, known)}")
    return cls(**settings)


def check_integer(name: str, value: object, low: int) -> None:
    """Refuse anything but an integer of at least `low`.

    >>> check_integer("epochs", 0, 1)
    Traceback (most recent call last):
    remasker.errors.InvalidConfigError: epochs: expected an integer of at least 1, got 0
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise InvalidConfigError(f"{name}: expected an integer of at least {low}, got {value!r}")


def check_number(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    """Refuse anything but a number within the bounds.

    >>> check_number("dropout", 2, 0, 0.9)
    Traceback (most recent call last):
    remasker.errors.InvalidConfigError: dropout: expected a number from 0 to 0.9, got 2
    """
    fits = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not fits or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        above = f"above {low} and up to" if open_low else f"from {low} to"
        raise InvalidConfigError(f"{name}: expected a number {above} {high}, got {value!r}")


def check_choice(name: str, value: object, options: Sequence[str]) -> None:
    """Refuse anything but one of the options.

    >>> check_choice("loss", "a", ("b", "c"))
    Traceback (most recent call last):
    remasker.errors.InvalidConfigError: loss: expected one of 'b', 'c', got 'a'
    """
    if value not in options:
        raise InvalidConfigError(
            f"{name}: expected one of {', '.join(map(repr, options))}, got {value!r}"
            f"{nearest(value, options)}"
        )
