"""Stacks of Transformer blocks for PyTorch: one autograd node around `remasker.kernels`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from remasker.kernels import block_backward, block_forward, pack


class Packing:
    """Where the packed tokens of a batch sit among all its tokens.

    >>> present = torch.tensor([[True, False], [True, True]])
    >>> packing = Packing(present, n_heads=1)
    >>> packing.keep.tolist(), packing.starts.tolist()
    ([0, 2, 3], [0, 1, 3])
    """

    def __init__(self, present: Tensor, n_heads: int) -> None:
        keep, spread, starts, longest = pack(present.numpy())
        #: packed token -> its place among all tokens
        self.keep = torch.from_numpy(keep)
        #: any token -> its packed place, T where there is none
        self.spread = torch.from_numpy(spread)
        #: row -> its first packed token; one entry more than rows
        self.starts = starts
        #: What the blocks ask for: heads, first tokens, rows by length (equal ones share a tile),
        #: and the longest length.
        self.rows = n_heads, starts, np.argsort(np.diff(starts), kind="stable"), longest


class Weights:
    """The parameters of a block and their gradients as arrays that share their memory.

    >>> weights = Weights([nn.Parameter(torch.ones(2))])
    >>> weights.gradients()[0][:] = 3
    >>> weights.parameters[0].grad.tolist()
    [3.0, 3.0]
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self._values: tuple[np.ndarray, ...] = ()
        self._gradients: tuple[np.ndarray, ...] = ()
        self._at: tuple[list[int], list[int]] = [], []

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, here or in another process, has parameters of its own and finds them anew."""
        return Weights, (self.parameters,)

    def values(self) -> tuple[np.ndarray, ...]:
        """The parameters; made anew only where an optimizer or a device has moved them."""
        at = [p.data_ptr() for p in self.parameters]
        if at != self._at[0]:
            self._values = tuple(p.detach().numpy() for p in self.parameters)
            self._at = at, self._at[1]
        return self._values

    def gradients(self) -> tuple[np.ndarray, ...]:
        """The gradients, zero where there is none yet."""
        at = [0 if p.grad is None else p.grad.data_ptr() for p in self.parameters]
        if at != self._at[1] or 0 in at:
            for p in self.parameters:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            found = [p.grad for p in self.parameters if p.grad is not None]
            self._gradients = tuple(gradient.numpy() for gradient in found)
            self._at = self._at[0], [gradient.data_ptr() for gradient in found]
        return self._gradients


class Stack(torch.autograd.Function):
    """A stack of blocks on packed tokens, T × w -> T × w.

    The blocks' parameters are not inputs: their gradients are added to ``p.grad`` directly.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, blocks: list[Weights], at: Packing) -> Tensor:
        """Run the blocks, keeping what the backward pass needs."""
        ctx.blocks, ctx.at, ctx.saved = blocks, at, []
        x = tokens.detach().numpy()
        for block in blocks:
            x, saved = block_forward(x, block.values(), *at.rows)
            ctx.saved.append(saved)
        return torch.from_numpy(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of the tokens; those of the parameters go where they belong."""
        gradient = gradients[0].contiguous().numpy()
        for block in reversed(ctx.blocks):
            gradient = block_backward(
                gradient, ctx.saved.pop(), block.values(), block.gradients(), *ctx.at.rows
            )
        return torch.from_numpy(gradient), None, None


def run_blocks(tokens: Tensor, blocks: list[Weights], at: Packing) -> Tensor:
    """Packed tokens through a stack of blocks, with a graph only where one is wanted."""
    if torch.is_grad_enabled():
        return Stack.apply(tokens, blocks, at)
    x = tokens.numpy()
    for block in blocks:
        x, _ = block_forward(x, block.values(), *at.rows)
    return torch.from_numpy(x)
