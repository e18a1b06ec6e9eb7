"""Fitting the masked autoencoder: the loss, and a trainer that is a generator of reports.

The consumer of `Trainer.epochs` decides when to stop; `state_dict` lets another process go on.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from remasker.errors import (
    InvalidConfigError,
    TrainingDivergedError,
    check_choice,
    check_integer,
    check_number,
)
from remasker.masking import draw_visible, parse_masking
from remasker.memory import check_memory
from remasker.model import MaskedAutoencoder, ModelConfig, Prediction, quantile_bins
from remasker.optimizer import VectorAdamW
from remasker.table import EncodedTable

LOSSES = ("all", "remasked", "visible")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is fitted.

    >>> TrainingConfig(masking="copi")
    Traceback (most recent call last):
    remasker.errors.InvalidConfigError: masking: expected a mixture ('a+b') of 'uniform', \
'random_ratio', 'copy', 'gentle_copy', 'nested_copy', 'proportional', got 'copi'; did you mean \
'copy'?
    """

    epochs: int | None = None
    batch_size: int = 64
    learning_rate: float = 4e-3
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    masking: str = "copy+gentle_copy+random_ratio"
    masking_ratio: float = 0.5
    loss: str = "all"
    average: float = 0.98
    patience: int | None = None

    def __post_init__(self) -> None:
        if self.epochs is not None:
            check_integer("epochs", self.epochs, 1)
        check_integer("batch_size", self.batch_size, 1)
        check_number("learning_rate", self.learning_rate, 0.0, 1.0, open_low=True)
        check_number("warmup", self.warmup, 0.0, 1.0)
        check_number("weight_decay", self.weight_decay, 0.0, 10.0)
        check_number("clip", self.clip, 0.0, 1e9, open_low=True)
        check_number("masking_ratio", self.masking_ratio, 0.01, 0.99)
        check_number("average", self.average, 0.0, 0.99999)
        check_choice("loss", self.loss, LOSSES)
        parse_masking(self.masking)
        if self.patience is not None:
            check_integer("patience", self.patience, 1)

    def n_epochs(self, n_rows: int, n_columns: int = 1) -> int:
        """The number of epochs: as given, or enough for the table's size.

        >>> TrainingConfig(epochs=7).n_epochs(1000), TrainingConfig().n_epochs(10**6)
        (7, 1)
        """
        if self.epochs is not None:
            return self.epochs
        n_steps = min(max(MIN_STEPS, STEPS_PER_ROW * n_rows), MAX_STEPS)
        n_steps *= min(1.0, USUAL_COLUMNS / n_columns)
        # A table smaller than a batch still gets its steps, one per epoch.
        return math.ceil(n_steps * min(self.batch_size, n_rows) / max(1, n_rows))


#: Optimizer steps that `epochs=None` aims at (benchmarks/RESULTS.md: more do not pay).
MIN_STEPS, STEPS_PER_ROW, MAX_STEPS = 800, 1.2, 4000
#: With more columns a step learns from more cells and takes longer, and fewer do: at 300 × 150 an
#: error of 0.504 after 100 steps, 0.523 after 200, 0.533 after 340.
USUAL_COLUMNS = 64
#: How often in a training held-out cells are looked at.
N_JUDGEMENTS = 24


@dataclass(frozen=True, kw_only=True)
class EpochReport:
    """What one epoch did. `error` is the normalised error on held-out cells, if there are any."""

    epoch: int
    n_epochs: int
    loss: float
    error: float | None
    best: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Member:
    """One fitted model with what made it."""

    model_config: ModelConfig
    training_config: TrainingConfig
    weights: dict[str, Tensor]
    seed: int
    epochs: int
    #: On held-out cells, at the epoch that was kept.
    error: float | None = None

    def build(self, n_categories: tuple[int, ...]) -> MaskedAutoencoder:
        """The model with its weights, ready to predict."""
        edges = None
        if self.model_config.value_encoding == "piecewise_linear":
            edges = np.zeros((len(n_categories), self.model_config.n_bins + 1))
        with torch.random.fork_rng(devices=[]):
            model = MaskedAutoencoder(self.model_config, n_categories, edges)
        model.load_state_dict(self.weights)
        return model.eval()


class Trainer:
    """Fits one model to the observed cells of a table.

    `held_out` marks observed cells that take no part in training: their error is reported. With
    `patience` the weights of the epoch with the smallest one are kept, otherwise the last: on a few
    hundred cells the best epoch is mostly luck (see benchmarks/RESULTS.md).

    >>> values = np.random.default_rng(0).normal(size=(50, 3)).astype("float32")
    >>> table = EncodedTable(values=values, observed=values < 1, n_categories=(0, 0, 0))
    >>> trainer = Trainer(table, ModelConfig(width=8), TrainingConfig(epochs=2))
    >>> [report.epoch for report in trainer.epochs()]
    [1, 2]
    """

    def __init__(
        self,
        table: EncodedTable,
        model_config: ModelConfig,
        config: TrainingConfig,
        *,
        held_out: np.ndarray | None = None,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        if table.values.shape[1] == 0 or len(table) == 0:
            raise InvalidConfigError("nothing to train on: the table has no modelled column or row")
        if at_hand(device) != device:
            raise InvalidConfigError(
                f"device: {device!r} was asked for, but torch finds none here; install torch with "
                "it, or train on 'cpu'"
            )
        if torch.device(device).type == "cpu":
            check_memory(model_config, config.batch_size, *table.values.shape)
        self.config = config
        self.model_config = model_config
        self.device = torch.device(device)
        self.n_epochs = config.n_epochs(*table.values.shape)
        self.seed = seed
        self.epoch = 0
        self.error: float | None = None
        self.best_error = math.inf
        self.best_epoch = 0
        self._best: Tensor | None = None

        held_out = np.zeros_like(table.observed) if held_out is None else held_out
        training = table.hide(held_out)
        edges = None
        if model_config.value_encoding == "piecewise_linear":
            edges = quantile_bins(training.values, training.observed, model_config.n_bins)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = MaskedAutoencoder(model_config, table.n_categories, edges)
        self.model = model.to(self.device)
        self.generator = torch.Generator().manual_seed(seed)
        self._values = torch.from_numpy(np.ascontiguousarray(training.values))
        self._observed = torch.from_numpy(np.ascontiguousarray(training.observed))
        self._cell_loss = CellLoss(training, self.device)
        self._judges = None
        rows = np.flatnonzero(held_out.any(axis=1))
        if len(rows):
            self._judges = (
                torch.from_numpy(table.values[rows]).to(self.device),
                torch.from_numpy(training.observed[rows]).to(self.device),
                torch.from_numpy(held_out[rows]).to(self.device),
            )
        self.optimizer = VectorAdamW(
            self.model, weight_decay=config.weight_decay, clip=config.clip, average=config.average
        )
        # Judging every epoch would cost as much as training a small table.
        self._judge_every = max(1, self.n_epochs // N_JUDGEMENTS)
        self._n_batches = math.ceil(len(table) / config.batch_size)

    # ------------------------------------------------------------------ the loop

    def epochs(self) -> Iterator[EpochReport]:
        """Train epoch by epoch; stop asking and training stops."""
        while self.epoch < self.n_epochs:
            started = time.perf_counter()
            loss = self._train_epoch()
            self.epoch += 1
            if not math.isfinite(loss):
                raise TrainingDivergedError(
                    f"the loss became {loss} in epoch {self.epoch}; lower learning_rate "
                    f"({self.config.learning_rate:g}) or clip ({self.config.clip:g})"
                )
            error = None
            if self.epoch % self._judge_every == 0 or self.epoch == self.n_epochs:
                error = self.error = self._judge()
            best = error is not None and error < self.best_error
            if best:
                assert error is not None
                self.best_error, self.best_epoch = error, self.epoch
                self._best = self.optimizer.averaged.clone()
            yield EpochReport(
                epoch=self.epoch,
                n_epochs=self.n_epochs,
                loss=loss,
                error=error,
                best=best,
                seconds=time.perf_counter() - started,
            )
            patience = self.config.patience
            if patience and error is not None and self.epoch - self.best_epoch >= patience:
                return

    def _train_epoch(self) -> float:
        self.model.train()
        order = torch.randperm(len(self._values), generator=self.generator)
        visible = draw_visible(
            self._observed,
            masking=self.config.masking,
            ratio=self.config.masking_ratio,
            generator=self.generator,
        )
        batches = zip(
            *(
                part[order].to(self.device).tensor_split(self._n_batches)
                for part in (self._values, self._observed, visible)
            ),
            strict=True,
        )
        total = torch.zeros((), device=self.device)
        with torch.random.fork_rng(devices=[], enabled=self.model_config.dropout > 0):
            if self.model_config.dropout > 0:
                torch.manual_seed(int(torch.randint(2**31, (), generator=self.generator)))
            with uncollected():
                for values, observed, shown in batches:
                    total += self._train_step(values, observed, shown)
        return float(total) / self._n_batches

    def _train_step(self, values: Tensor, observed: Tensor, visible: Tensor) -> Tensor:
        with torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"
        ):
            prediction = self.model(values, visible)
        loss, surprise = reconstruction_loss(
            self._cell_loss, prediction, values, observed, visible, self.config.loss
        )
        (loss + surprise).backward()
        self.optimizer.step(self._learning_rate())
        return loss.detach()

    def _learning_rate(self) -> float:
        """Linear warm-up, then a cosine down to a hundredth, as the paper's code does."""
        n_steps = self.n_epochs * self._n_batches
        warmup = self.config.warmup * n_steps
        peak, step = self.config.learning_rate, self.optimizer.n_steps
        if step < warmup:
            return peak * (step + 1) / (warmup + 1)
        progress = (step - warmup) / max(1.0, n_steps - warmup)
        return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))

    # ------------------------------------------------------------------ judging

    def _judge(self) -> float | None:
        if self._judges is None:
            return None
        self.model.eval()
        losses = []
        trained = self.optimizer.vector.clone()
        self.optimizer.vector.copy_(self.optimizer.averaged)
        with torch.inference_mode():
            for values, visible, hidden in zip(
                *(part.split(1024) for part in self._judges), strict=True
            ):
                losses.append(self._cell_loss(self.model(values, visible), values)[hidden])
        self.optimizer.vector.copy_(trained)
        return float(torch.cat(losses).mean())

    def member(self) -> Member:
        """What to keep: the best epoch if there is `patience`, otherwise the last."""
        vector, epochs, error = self.optimizer.averaged, self.epoch, self.error
        if self._best is not None and self.config.patience is not None:
            vector, epochs, error = self._best, self.best_epoch, self.best_error
        weights = {**self.model.state_dict(), **self.optimizer.named(vector)}
        return Member(
            model_config=self.model_config,
            training_config=self.config,
            weights={name: tensor.detach().cpu().clone() for name, tensor in weights.items()},
            seed=self.seed,
            epochs=epochs,
            error=error,
        )

    # ------------------------------------------------------------------ interruption

    def state_dict(self) -> dict[str, Any]:
        """Everything that continuing needs, as tensors and numbers."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "best": self._best,
            "epoch": self.epoch,
            "error": self.error,
            "best_error": self.best_error,
            "best_epoch": self.best_epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, as if nothing had happened."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self._best = state["best"]
        self.epoch, self.error = state["epoch"], state["error"]
        self.best_error, self.best_epoch = state["best_error"], state["best_epoch"]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No search for garbage: a step leaves none, and looking took a tenth of its time.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def at_hand(device: str) -> str:
    """The device, or the CPU where this process has none: models travel between machines.

    >>> at_hand("cpu")
    'cpu'
    """
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    return device if there[device.split(":")[0]] else "cpu"


def resolve_device(device: str) -> str:
    """ "auto" -> the fastest device at hand.

    CUDA (with bf16 autocast) and MPS follow PyTorch's documentation; the machines on which this
    library is tested have neither.

    >>> resolve_device("cpu")
    'cpu'
    """
    if device != "auto":
        return device
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


# ---------------------------------------------------------------------- the loss


class CellLoss:
    """Error of every cell: squared for scaled numbers, log-loss over entropy for categories.

    The entropy is that of a column's own frequencies, so that predicting no more than these costs
    about 1 in either kind of column.

    >>> observed = np.ones((2, 1), dtype=bool)
    >>> table = EncodedTable(
    ...     values=np.array([[0.0], [1.0]], np.float32), observed=observed, n_categories=(2,)
    ... )
    >>> prediction = Prediction(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 2))
    >>> CellLoss(table)(prediction, torch.ones(1, 1)).tolist()
    [[1.0]]
    """

    def __init__(self, table: EncodedTable, device: torch.device | str = "cpu") -> None:
        self.levels: list[tuple[int, int, int, float]] = []
        start = 0
        for j, k in enumerate(table.n_categories):
            if k:
                codes = table.values[table.observed[:, j], j].astype(int)
                share = np.bincount(codes, minlength=k) / max(1, len(codes))
                entropy = float(-(share * np.log(np.maximum(share, 1e-12))).sum())
                # A nearly constant column must not outweigh all others.
                self.levels.append((j, start, start + k, 1 / max(entropy, 0.1)))
                start += k
        self.numeric = torch.tensor([k == 0 for k in table.n_categories], device=device)
        self._columns = torch.tensor([j for j, *_ in self.levels], device=device, dtype=torch.long)

    def __call__(self, prediction: Prediction, values: Tensor) -> Tensor:
        """B × d."""
        losses = (prediction.value.float() - values).square()
        if not self.levels:
            return losses
        logits = prediction.logits.float()
        surprises = [
            F.cross_entropy(logits[:, start:stop], values[:, j].long(), reduction="none") * weight
            for j, start, stop, weight in self.levels
        ]
        return losses.index_copy(1, self._columns, torch.stack(surprises, dim=1))


def reconstruction_loss(
    cell_loss: CellLoss,
    prediction: Prediction,
    values: Tensor,
    observed: Tensor,
    visible: Tensor,
    which: str = "all",
) -> tuple[Tensor, Tensor]:
    """The paper's loss, and that of the scale head, which does not move the rest of the model.

    Error over re-masked cells plus error over visible cells, each averaged over its own cells.

    >>> observed, visible = torch.tensor([[True, True]]), torch.tensor([[True, False]])
    >>> table = EncodedTable(
    ...     values=np.zeros((1, 2)), observed=observed.numpy(), n_categories=(0, 0)
    ... )
    >>> prediction = Prediction(torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2), torch.zeros(1, 0))
    >>> target = torch.tensor([[1.5, 2.0]])
    >>> loss, _ = reconstruction_loss(CellLoss(table), prediction, target, observed, visible)
    >>> float(loss)
    4.25
    """
    cells = cell_loss(prediction, values)
    remasked = observed & ~visible
    loss = cells.new_zeros(())
    if which != "visible":
        loss = loss + _mean(cells, remasked)
    if which != "remasked":
        loss = loss + _mean(cells, visible)
    spread = prediction.log_scale.float()
    error = (prediction.value.detach().float() - values).square()
    surprise = 0.5 * error * torch.exp(-2 * spread) + spread
    return loss, _mean(surprise, remasked & cell_loss.numeric)


def _mean(cells: Tensor, chosen: Tensor) -> Tensor:
    return (cells * chosen).sum() / chosen.sum().clamp(min=1)
