"""The search: Ray Tune trials around the ReMasker trainer, Optuna's proposals, one model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuning.api import TuneResult, tune
    from tuning.config import SearchConfig
    from tuning.many import tune_many

__all__ = ["SearchConfig", "TuneResult", "tune", "tune_many"]

# Ray and torch take seconds to load: they wait until something needs them.
_LAZY = {
    "SearchConfig": "tuning.config",
    "TuneResult": "tuning.api",
    "tune": "tuning.api",
    "tune_many": "tuning.many",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
