"""AdamW on one vector.

A small model has a hundred tensors of a few hundred numbers each. Kept as views of a single vector,
clipping, the update and the weight average are two passes over memory, or a dozen operations where
it lies on another device; and `torch.optim`, which takes seconds to import, is not needed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from remasker.lanes import compiled

BETAS = (0.9, 0.95)
EPSILON = 1e-8
ZERO, ONE, TINY, LEAST = np.float32(0), np.float32(1), np.float32(1e-6), np.float32(EPSILON)
BETA1, BETA2 = map(np.float32, BETAS)


class VectorAdamW:
    """AdamW with gradient clipping and an average of the weights.

    Takes over the storage of `model`'s trainable parameters and their gradients.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = VectorAdamW(model)
    >>> before = model.weight.detach().clone()
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step(learning_rate=0.1)
    >>> bool((model.weight != before).all()), float(optimizer.gradient.abs().sum())
    (True, 0.0)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weight_decay: float = 0.0,
        clip: float = math.inf,
        average: float = 0.0,
    ) -> None:
        self.weight_decay, self.clip, self.decay = weight_decay, clip, average
        self._named = {k: p for k, p in model.named_parameters() if p.requires_grad}
        self.vector = torch.cat([p.detach().reshape(-1) for p in self._named.values()])
        self.gradient = torch.zeros_like(self.vector)
        for p, data, gradient in zip(
            self._named.values(), self._views(self.vector), self._views(self.gradient), strict=True
        ):
            p.data, p.grad = data, gradient
        self.first = torch.zeros_like(self.vector)
        self.second = torch.zeros_like(self.vector)
        self.averaged = self.vector.clone()
        self.n_steps = 0

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Clip, update, average, and clear the gradient."""
        self.n_steps += 1
        unbias = [1 - beta**self.n_steps for beta in BETAS]
        shrink = 1 - learning_rate * self.weight_decay
        # Early values must not linger: a young average forgets faster.
        decay = min(self.decay, self.n_steps / (self.n_steps + 10))
        vectors = self.vector, self.gradient, self.first, self.second, self.averaged
        if self.vector.device.type == "cpu" and self.vector.dtype == torch.float32:
            numbers = self.clip, learning_rate / unbias[0], unbias[1] ** -0.5, shrink, 1 - decay
            adamw(*(v.numpy() for v in vectors), *map(np.float32, numbers))
            return
        vector, gradient, first, second, averaged = vectors
        if math.isfinite(self.clip):
            gradient.mul_((self.clip / (gradient.norm() + 1e-6)).clamp_(max=1))
        first.lerp_(gradient, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        spread = second.sqrt().div_(math.sqrt(unbias[1])).add_(EPSILON)
        vector.mul_(shrink).addcdiv_(first, spread, value=-learning_rate / unbias[0])
        gradient.zero_()
        averaged.lerp_(vector, 1 - decay)

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector as tensors under the parameters' names.

        >>> optimizer = VectorAdamW(nn.Linear(2, 1))
        >>> sorted(optimizer.named(optimizer.averaged))
        ['bias', 'weight']
        """
        return dict(zip(self._named, self._views(vector), strict=True))

    def _views(self, vector: Tensor) -> list[Tensor]:
        views, start = [], 0
        for p in self._named.values():
            views.append(vector[start : start + p.numel()].view(p.shape))
            start += p.numel()
        return views

    def state_dict(self) -> dict[str, Tensor | int]:
        """A copy of everything that continuing needs."""
        return {
            "vector": self.vector.clone(),
            "first": self.first.clone(),
            "second": self.second.clone(),
            "averaged": self.averaged.clone(),
            "n_steps": self.n_steps,
        }

    def load_state_dict(self, state: dict[str, Tensor | int]) -> None:
        """Continue from `state_dict`."""
        for name in ("vector", "first", "second", "averaged"):
            getattr(self, name).copy_(state[name])
        self.n_steps = int(state["n_steps"])


@compiled
def adamw(
    vector: Any,
    gradient: Any,
    first: Any,
    second: Any,
    averaged: Any,
    clip: Any,
    rate: Any,
    unbias: Any,
    shrink: Any,
    young: Any,
) -> None:
    """`VectorAdamW.step` in two passes over memory instead of a dozen."""
    total = ZERO
    for i in range(vector.size):
        total += gradient[i] * gradient[i]
    factor = min(ONE, clip / (np.sqrt(total) + TINY))
    for i in range(vector.size):
        g = gradient[i] * factor
        first[i] += (ONE - BETA1) * (g - first[i])
        second[i] = BETA2 * second[i] + (ONE - BETA2) * g * g
        vector[i] = vector[i] * shrink - rate * first[i] / (np.sqrt(second[i]) * unbias + LEAST)
        averaged[i] += young * (vector[i] - averaged[i])
        gradient[i] = ZERO
