"""What a setting costs before it is tried: seconds per epoch and bytes of memory.

The seconds are a formula in the size of table and model, in units that one machine's constants
made; a short measurement at the start, and then every finished trial, say how much faster or slower
the machine at hand is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remasker.memory import training_bytes
from remasker.table import EncodedTable
from remasker.training import Trainer
from tuning.space import DEFAULTS, split_settings

#: Seconds per step outside the layers, and the overhead of small operations.
PER_STEP = 2.6e-3
#: Seconds per element of a B × d × w activation and layer, forward and backward.
PER_ELEMENT = 5.6e-8
#: Seconds per multiplication.
PER_PRODUCT = 1.07e-11


def seconds_per_epoch(settings: Mapping[str, Any], n_rows: int, n_columns: int) -> float:
    """The formula, for a machine of speed 1: within 0.66 and 1.37 of 72 settings measured there.

    >>> small, large = ({"width": w, "encoder_depth": e} for w, e in ((32, 2), (128, 8)))
    >>> seconds_per_epoch(large, 1000, 10) > 3 * seconds_per_epoch(small, 1000, 10)
    True
    """
    width, batch, depth = _size(settings)
    n_steps = math.ceil(n_rows / batch)
    elements = batch * (n_columns + 1) * width
    products = elements * (3 * 12 * width + 6 * n_columns)
    layer = PER_ELEMENT * elements + PER_PRODUCT * products
    return n_steps * (PER_STEP + depth * layer)


def peak_bytes(settings: Mapping[str, Any], n_rows: int, n_columns: int) -> float:
    """Memory of one training.

    >>> peak_bytes({"batch_size": 256}, 1000, 10) > peak_bytes({"batch_size": 32}, 1000, 10)
    True
    """
    model_config, training_config = split_settings(settings)
    return training_bytes(model_config, training_config.batch_size, n_rows, n_columns)


@dataclass
class CostModel:
    """Predicted seconds of a trial, corrected by what finished trials took.

    >>> cost = CostModel(n_rows=1000, n_columns=8)
    >>> before = cost.seconds({"epochs": 10})
    >>> cost.learn({"epochs": 10}, 2 * before)
    >>> round(cost.seconds({"epochs": 10}) / before, 3)
    2.0
    """

    n_rows: int
    n_columns: int
    speed: float = 1.0
    _ratios: list[float] = field(default_factory=list)

    def seconds(self, settings: Mapping[str, Any]) -> float:
        """How long this training will take."""
        epochs = split_settings(settings)[1].n_epochs(self.n_rows, self.n_columns)
        return epochs * seconds_per_epoch(settings, self.n_rows, self.n_columns) * self.factor

    @property
    def factor(self) -> float:
        """This machine's slowness: as measured at the start, then by the latest trials."""
        return statistics.median(self._ratios[-15:]) if self._ratios else self.speed

    def learn(self, settings: Mapping[str, Any], seconds: float, epochs: int | None = None) -> None:
        """Take in a training that took so long, for all its epochs or so many of them."""
        epochs = epochs or split_settings(settings)[1].n_epochs(self.n_rows, self.n_columns)
        formula = epochs * seconds_per_epoch(settings, self.n_rows, self.n_columns)
        if seconds > 0 and math.isfinite(seconds):
            self._ratios.append(seconds / formula)

    def measure(self, table: EncodedTable, batches: int = 4) -> None:
        """Time a few steps of the default model on this machine: well under a second."""
        settings = {"epochs": 8}
        n_rows = min(len(table), batches * int(DEFAULTS["batch_size"]))
        part = EncodedTable(
            values=table.values[:n_rows],
            observed=table.observed[:n_rows],
            n_categories=table.n_categories,
        )
        model_config, training_config = split_settings(settings)
        trainer = Trainer(part, model_config, training_config)
        # The first epoch warms up memory and kernels. Of the others the median, not the fastest:
        # what else runs on this machine will go on doing so.
        seconds = statistics.median(report.seconds for report in list(trainer.epochs())[1:])
        self.speed = seconds / seconds_per_epoch(settings, n_rows, self.n_columns)


def _size(settings: Mapping[str, Any]) -> tuple[int, int, int]:
    whole = {**DEFAULTS, **settings}
    depth = whole["encoder_depth"] + whole["decoder_depth"]
    return whole["width"], whole["batch_size"], depth
