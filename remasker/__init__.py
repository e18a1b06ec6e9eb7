"""ReMasker: fill the gaps in any table."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from remasker.errors import (
    ArtifactError,
    InvalidConfigError,
    InvalidTableError,
    ProcessLostError,
    RemaskerError,
    TrainingDivergedError,
)

if TYPE_CHECKING:
    from remasker.imputer import ReMaskerImputer
    from remasker.missingness import simulate_missing
    from remasker.pooling import Pooled, pool

__version__ = "0.1.0"
__all__ = [
    "ArtifactError",
    "InvalidConfigError",
    "InvalidTableError",
    "Pooled",
    "ProcessLostError",
    "ReMaskerImputer",
    "RemaskerError",
    "TrainingDivergedError",
    "pool",
    "simulate_missing",
]

# Torch and scikit-learn take seconds to load: they wait until something needs them.
_LAZY = {
    "ReMaskerImputer": "remasker.imputer",
    "Pooled": "remasker.pooling",
    "pool": "remasker.pooling",
    "simulate_missing": "remasker.missingness",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
