"""Slots: how many trials find a place, and how several searches on one Ray share them.

The names of the searches stand in Ray's own memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from tuning.config import SearchConfig


def fits(config: SearchConfig, resources: Mapping[str, float]) -> int:
    """How many trials these resources hold at once.

    >>> fits(SearchConfig(), {"CPU": 4.0}), fits(SearchConfig(gpus_per_trial=1), {"CPU": 4.0})
    (4, 0)
    """
    asked = (("CPU", config.cpus_per_trial), ("GPU", config.gpus_per_trial))
    return min(
        (int(resources.get(name, 0) / wanted) for name, wanted in asked if wanted), default=1
    )


def write_names(key: str, names: Sequence[str]) -> None:
    """Say who is searching."""
    _internal_kv_put(key, json.dumps(list(names)))


def read_names(key: str | None) -> list[str]:
    """Who is searching; nobody else without a key."""
    names: list[str] = json.loads(_internal_kv_get(key) or b"[]") if key else []
    return names


def forget_names(key: str) -> None:
    """Nobody is searching any more."""
    _internal_kv_del(key)


def fair_share(slots: int, names: Sequence[str], name: str) -> int:
    """How many of the slots one of several searches may use.

    >>> [fair_share(5, ["a", "b"], name) for name in "ab"], fair_share(5, [], "a")
    ([3, 2], 5)
    """
    if name not in names:
        return slots
    each, left = divmod(slots, len(names))
    return each + (names.index(name) < left)
