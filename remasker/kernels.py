"""The Transformer blocks of `remasker.model`, written for short rows on one CPU core.

A row has as many tokens as the table has columns: tens, not thousands. At that size PyTorch spends
most of a training step between its operations rather than in them. Measured against the plain
blocks, which the tests keep as the truth (`python -m benchmarks.speed`), four things pay:

1. one autograd node for a whole stack of blocks, its backward written out, weight gradients added
   straight to ``p.grad``;
2. attention as explicit batched products with the scores laid out key × query: the softmax then
   runs over the middle dimension, which costs half of one over a short last dimension;
3. token-wise layers that see only the tokens that exist, packed as T × w; attention alone pads;
4. no module or parameter look-ups inside the step.

With hundreds of columns the scores of point 2, a square of tokens for every row and head, would
fill the memory: long rows take PyTorch's own attention, which never holds them all. Measured at 500
columns, 64 rows and the default model: 350 MB instead of 1,590, 2.5 s instead of 4.0.

Shapes: B rows, C tokens per row, T packed tokens, L padded tokens per row, H heads, D = w / H.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_layer_norm = torch.native_layer_norm
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward
_softmax_backward = torch.ops.aten._softmax_backward_data
_gelu_backward = torch.ops.aten.gelu_backward
_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
EPSILON = 1e-5
#: Batched products of smaller matrices than this take a path that is three times slower.
MIN_LENGTH = 8
#: From here on the scores of a row are more than its tokens, and not worth keeping.
LONG_LENGTH = 128


class Packing:
    """Where the packed tokens of a batch sit among all tokens and in the padded attention.

    >>> present = torch.tensor([[True, False], [True, True]])
    >>> Packing(present, n_heads=1).keep.tolist()
    [0, 2, 3]
    """

    def __init__(self, present: Tensor, n_heads: int, dtype: torch.dtype = torch.float32) -> None:
        n_rows, n_tokens = present.shape
        self.n_rows, self.n_heads = n_rows, n_heads
        #: packed token -> its place among all B × C
        self.keep = present.reshape(-1).nonzero().squeeze(1)
        n_packed = self.keep.numel()
        place = present.cumsum(1) - 1
        length = max(int(place[:, -1].max()) + 1, MIN_LENGTH)
        self.length = length
        self.long = length >= LONG_LENGTH
        row = torch.div(self.keep, n_tokens, rounding_mode="floor")
        place = place.reshape(-1)[self.keep]
        #: any token -> its packed place, T where there is none
        self.spread = torch.full((n_rows * n_tokens,), n_packed)
        self.spread[self.keep] = torch.arange(n_packed)
        padded = torch.full((n_rows * length,), n_packed)
        padded[row * length + place] = torch.arange(n_packed)
        head, part = torch.arange(n_heads), torch.arange(3)
        by_head = head.view(1, n_heads, 1)
        #: padded place of each head -> packed; padding reads row T, which the caller keeps at zero
        self.gradient_in = (padded.view(n_rows, 1, length) * n_heads + by_head).reshape(-1)
        self.mask: Tensor | None = None
        if n_packed < n_rows * length:
            empty = padded == n_packed
            # Padding reads token 0: it is masked as a key and never read back as a query.
            padded = padded.masked_fill(empty, 0)
            bias = torch.zeros(n_rows * length, dtype=dtype).masked_fill_(empty, float("-inf"))
            if self.long:
                self.mask = bias.view(n_rows, 1, 1, length)
            else:
                bias = bias.view(n_rows, 1, length, 1).expand(n_rows, n_heads, length, length)
                self.mask = bias.reshape(n_rows * n_heads, length, length)
        #: padded place of each of q, k, v and head -> packed
        self.split = (
            (padded.view(1, n_rows, 1, length) * 3 + part.view(3, 1, 1, 1)) * n_heads + by_head
        ).reshape(-1)
        back = (row[:, None] * n_heads + head) * length + place[:, None]
        #: packed token and head -> padded place, for one and for all three of q, k, v
        self.merge = back.reshape(-1)
        size = n_rows * n_heads * length
        self.merge_all = (part.view(1, 3, 1) * size + back[:, None, :]).reshape(-1)


class Stack(torch.autograd.Function):
    """A stack of blocks on packed tokens, T × w -> T × w.

    The blocks' parameters are not inputs: their gradients are added to ``p.grad`` directly.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, blocks: list[list[nn.Parameter]], at: Packing) -> Tensor:
        """Run the blocks, keeping what the backward pass needs."""
        ctx.blocks, ctx.at, ctx.saved = blocks, at, []
        for parameters in blocks:
            tokens, saved = block_forward(tokens, parameters, at)
            ctx.saved.append(saved)
        return tokens

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of the tokens; those of the parameters go where they belong."""
        gradient = gradients[0].contiguous()
        for parameters in reversed(ctx.blocks):
            for p in parameters:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            gradient = block_backward(gradient, ctx.saved.pop(), parameters, ctx.at)
        return gradient, None, None


def run_blocks(tokens: Tensor, blocks: list[list[nn.Parameter]], at: Packing) -> Tensor:
    """Packed tokens through a stack of blocks, with a graph only where one is wanted."""
    if torch.is_grad_enabled():
        return Stack.apply(tokens, blocks, at)
    for parameters in blocks:
        tokens, _ = block_forward(tokens, parameters, at)
    return tokens


def block_forward(
    x: Tensor, parameters: list[nn.Parameter], at: Packing
) -> tuple[Tensor, tuple[Any, ...]]:
    """One pre-norm block; the second part of the answer is for `block_backward`."""
    g1, c1, w_qkv, b_qkv, w_mix, b_mix, g2, c2, w_up, b_up, w_down, b_down = parameters
    width = x.shape[1]
    n, length, d = at.n_rows * at.n_heads, at.length, x.shape[1] // at.n_heads
    h, mean1, rstd1 = _layer_norm(x, [width], g1, c1, EPSILON)
    qkv = torch.addmm(b_qkv, h, w_qkv.t()).view(-1, d).index_select(0, at.split)
    qkv = qkv.view(3, n, length, d)
    q, k, v = qkv[0].mul_(d**-0.5), qkv[1], qkv[2]
    a: Any
    if at.long:
        q, k, v = (part.view(at.n_rows, at.n_heads, length, d) for part in (q, k, v))
        a = _attend(q, k, v, attn_mask=at.mask, scale=1.0)
        o = a[0].reshape(-1, d)
    else:
        scores = k.bmm(q.mT) if at.mask is None else torch.baddbmm(at.mask, k, q.mT)
        a = torch.softmax(scores, 1)
        o = _bmm(a.mT, v).view(-1, d)
    o = o.index_select(0, at.merge).view(-1, width)
    y = torch.addmm(b_mix, o, w_mix.t()).add_(x)
    h2, mean2, rstd2 = _layer_norm(y, [width], g2, c2, EPSILON)
    u = torch.addmm(b_up, h2, w_up.t())
    f = torch.nn.functional.gelu(u)
    z = torch.addmm(b_down, f, w_down.t()).add_(y)
    return z, (x, h, mean1, rstd1, qkv, a, o, y, h2, mean2, rstd2, u, f)


def block_backward(
    dz: Tensor, saved: tuple[Any, ...], parameters: list[nn.Parameter], at: Packing
) -> Tensor:
    """Gradient of the block's input; adds those of its parameters to ``p.grad``."""
    g1, c1, w_qkv, _, w_mix, _, g2, c2, w_up, _, w_down, _ = parameters
    gradients: list[Any] = [p.grad for p in parameters]
    dg1, dc1, dw_qkv, db_qkv, dw_mix, db_mix, dg2, dc2, dw_up, db_up, dw_down, db_down = gradients
    x, h, mean1, rstd1, (q, k, v), a, o, y, h2, mean2, rstd2, u, f = saved
    n_packed, width = x.shape
    n, length, d = q.shape
    all_three = [True, True, True]

    db_down.add_(dz.sum(0))
    dw_down.addmm_(dz.t(), f)
    du = _gelu_backward(torch.mm(dz, w_down), u)
    db_up.add_(du.sum(0))
    dw_up.addmm_(du.t(), h2)
    dy, dg, dc = _layer_norm_backward(
        torch.mm(du, w_up), y, [width], mean2, rstd2, g2, c2, all_three
    )
    dg2.add_(dg)
    dc2.add_(dc)
    dy.add_(dz)

    db_mix.add_(dy.sum(0))
    dw_mix.addmm_(dy.t(), o)
    do = x.new_empty(n_packed + 1, width)
    do[n_packed].zero_()
    torch.mm(dy, w_mix, out=do[:n_packed])
    do = do.view(-1, d).index_select(0, at.gradient_in).view(n, length, d)
    dqkv = x.new_empty(3, n, length, d)
    if at.long:
        q, k, v, do, *parts = (
            part.view(at.n_rows, at.n_heads, length, d) for part in (q, k, v, do, *dqkv)
        )
        found = _attend_backward(do, q, k, v, *a, 0.0, False, attn_mask=at.mask, scale=1.0)
        for part, gradient in zip(parts, found, strict=True):
            part.copy_(gradient)
        parts[0].mul_(d**-0.5)
    else:
        _bmm(a, do, out=dqkv[2])
        ds = _softmax_backward(torch.bmm(v, do.mT), a, 1, a.dtype)
        _bmm(ds, q, out=dqkv[1])
        _bmm(ds.mT, k, out=dqkv[0]).mul_(d**-0.5)
    dqkv = dqkv.view(-1, d).index_select(0, at.merge_all).view(n_packed, 3 * width)
    db_qkv.add_(dqkv.sum(0))
    dw_qkv.addmm_(dqkv.t(), h)
    dx, dg, dc = _layer_norm_backward(
        torch.mm(dqkv, w_qkv), x, [width], mean1, rstd1, g1, c1, all_three
    )
    dg1.add_(dg)
    dc1.add_(dc)
    return dx.add_(dy)


def _bmm(a: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """a (n × L × L) @ x (n × L × D); narrow x and long rows are three times faster transposed."""
    if x.shape[2] < 16 and x.shape[1] > 32:
        product = torch.bmm(x.mT, a.mT).mT
        return product.contiguous() if out is None else out.copy_(product)
    return torch.bmm(a, x) if out is None else torch.bmm(a, x, out=out)
