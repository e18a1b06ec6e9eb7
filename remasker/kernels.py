"""The Transformer blocks of `remasker.model`, written for short rows on one CPU core.

A row has as many tokens as the table has columns: tens, not thousands. At that size PyTorch spends
most of a training step between its operations rather than in them. Here a block is one compiled
function forward and one backward, in which matrix products are most of the work. Measured against
the plain blocks, which the tests keep as the truth (`python -m benchmarks.speed`), these pay:

1. one autograd node for a whole stack of blocks, its backward written out, weight gradients added
   straight to ``p.grad``;
2. only the tokens that exist, packed as T × w: a row's tokens lie together, and nothing is padded;
3. attention by tiles of eight rows of about equal length, a row in each lane; the scores of a row
   are never kept, so that hundreds of columns need no more memory than few;
4. GELU and its slope in one pass, the normal distribution from a polynomial.

Shapes: B rows, T packed tokens, H heads, D = w / H.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg  # noqa: F401  # the library of matrix products that numba calls

from remasker.lanes import (
    compiled,
    exp_falling,
    gather_tile,
    larger,
    load,
    scatter_tile,
    store,
    zeros,
)

ZERO, ONE, HALF = np.float32(0), np.float32(1), np.float32(0.5)
EPSILON = np.float32(1e-5)
#: A score that leaves nothing.
NEVER = np.float32(-1e30)
#: Abramowitz and Stegun 7.1.26: the normal distribution to 1e-7, from its density.
NORMAL_RATE = np.float32(0.3275911 / np.sqrt(2))
NORMAL = tuple(
    np.float32(a) for a in (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
)
DENSITY = np.float32(1 / np.sqrt(2 * np.pi))


# ---------------------------------------------------------------------- token by token


@compiled
def pack(present: Any) -> Any:
    """For `Packing`: the tokens to keep, the packed place of each, first tokens, longest row."""
    n_rows, n_tokens = present.shape
    keep, spread = np.empty(present.size, np.int64), np.empty(present.size, np.int64)
    starts, longest, n = np.zeros(n_rows + 1, np.int64), 0, 0
    for row in range(n_rows):
        for j in range(n_tokens):
            if present[row, j]:
                keep[n] = row * n_tokens + j
                spread[row * n_tokens + j] = n
                n += 1
            else:
                spread[row * n_tokens + j] = -1
        starts[row + 1] = n
        longest = max(longest, n - starts[row])
    for i in range(spread.size):
        if spread[i] < 0:
            spread[i] = n
    return keep[:n].copy(), spread, starts, longest


@compiled
def normalise(x: Any, g: Any, c: Any, h: Any, norm: Any) -> None:
    """h = layer norm of x; `norm` keeps each token's mean and inverse spread."""
    n, width = x.shape
    for t in range(n):
        total = ZERO
        for i in range(width):
            total += x[t, i]
        mean = total / np.float32(width)
        total = ZERO
        for i in range(width):
            total += (x[t, i] - mean) * (x[t, i] - mean)
        rate = ONE / np.sqrt(total / np.float32(width) + EPSILON)
        for i in range(width):
            h[t, i] = (x[t, i] - mean) * rate * g[i] + c[i]
        norm[0, t], norm[1, t] = mean, rate


@compiled
def add_row(x: Any, row: Any) -> None:
    """x += one row, for every token."""
    n, width = x.shape
    for t in range(n):
        for i in range(width):
            x[t, i] += row[i]


@compiled
def add_rows(x: Any, rows: Any, row: Any) -> None:
    """x += rows, and one row for every token."""
    n, width = x.shape
    for t in range(n):
        for i in range(width):
            x[t, i] += rows[t, i] + row[i]


@compiled
def normalise_backward(
    dh: Any, x: Any, norm: Any, g: Any, straight: Any, dx: Any, dg: Any, dc: Any
) -> None:
    """dx = the gradient of x by its layer norm, and `straight` past it."""
    n, width = x.shape
    for t in range(n):
        mean, rate = norm[0, t], norm[1, t]
        first, second = ZERO, ZERO
        for i in range(width):
            unit = (x[t, i] - mean) * rate
            slope = dh[t, i] * g[i]
            first += slope
            second += slope * unit
            dg[i] += dh[t, i] * unit
            dc[i] += dh[t, i]
        first /= np.float32(width)
        second /= np.float32(width)
        for i in range(width):
            unit = (x[t, i] - mean) * rate
            dx[t, i] = straight[t, i] + rate * (dh[t, i] * g[i] - first - unit * second)


@compiled
def gelu(u: Any, row: Any, f: Any) -> None:
    """f = gelu(u + row), and u becomes its derivative there."""
    n, width = u.shape
    for t in range(n):
        for i in range(width):
            x = u[t, i] + row[i]
            bell = exp_falling(-HALF * x * x)
            r = ONE / (ONE + NORMAL_RATE * abs(x))
            series = NORMAL[2] + r * (NORMAL[3] + r * NORMAL[4])
            tail = HALF * bell * r * (NORMAL[0] + r * (NORMAL[1] + r * series))
            below = tail if x < ZERO else ONE - tail
            f[t, i] = x * below
            u[t, i] = below + x * bell * DENSITY


@compiled
def multiply(x: Any, by: Any) -> None:
    """x *= by."""
    n, width = x.shape
    for t in range(n):
        for i in range(width):
            x[t, i] *= by[t, i]


@compiled
def sum_rows(x: Any, total: Any) -> None:
    """`total` += the sum of x over tokens."""
    n, width = x.shape
    for t in range(n):
        for i in range(width):
            total[i] += x[t, i]


@compiled
def add_product(a: Any, b: Any, total: Any) -> None:
    """`total` += aᵀ b."""
    product = np.dot(a.T, b)
    n, width = total.shape
    for t in range(n):
        for i in range(width):
            total[t, i] += product[t, i]


# ---------------------------------------------------------------------- attention
#
# A tile holds one head of eight rows: number d of token j of lane l is at (j · D + d) · 8 + l.


@compiled
def _rows(tile: Any, starts: Any, order: Any, first: Any, count: Any, bias: Any) -> Any:
    """The rows of a tile: first tokens, counts, which tokens are none; the longest count."""
    length = 0
    for lane in range(8):
        first[lane], count[lane] = 0, 0
        if tile + lane < order.size:
            row = order[tile + lane]
            first[lane], count[lane] = starts[row], starts[row + 1] - starts[row]
            length = max(length, count[lane])
    for j in range(length):
        for lane in range(8):
            bias[8 * j + lane] = ZERO if j < count[lane] else NEVER
    return length


@compiled
def _places(j: Any, first: Any, count: Any, width: Any, column: Any, end: Any, at: Any) -> None:
    for lane in range(8):
        at[lane] = (first[lane] + j) * width + column if j < count[lane] else end


@compiled
def _gather(
    source: Any, width: Any, column: Any, first: Any, count: Any, length: Any, depth: Any, tile: Any
) -> None:
    """`depth` columns of the rows' tokens into a tile; what is no token reads the last row."""
    places = np.empty(8, np.int64)
    for j in range(length):
        _places(j, first, count, width, column, source.size - width, places)
        whole = depth - depth % 8
        for d in range(0, whole, 8):
            gather_tile(source, places, d, tile, (j * depth + d) * 8)
        for d in range(whole, depth):
            for lane in range(8):
                tile[(j * depth + d) * 8 + lane] = source[places[lane] + d]


@compiled
def _scatter(
    tile: Any, depth: Any, first: Any, count: Any, length: Any, target: Any, width: Any, column: Any
) -> None:
    """The way back; what is no token goes to the last row."""
    places = np.empty(8, np.int64)
    for j in range(length):
        _places(j, first, count, width, column, target.size - width, places)
        whole = depth - depth % 8
        for d in range(0, whole, 8):
            scatter_tile(tile, (j * depth + d) * 8, target, places, d)
        for d in range(whole, depth):
            for lane in range(8):
                target[places[lane] + d] = tile[(j * depth + d) * 8 + lane]


@compiled
def attend(
    qkv: Any,
    mixed: Any,
    width: Any,
    n_heads: Any,
    starts: Any,
    order: Any,
    longest: Any,
    peak: Any,
    total: Any,
) -> None:
    """Softmax attention within each row; `peak` and `total` are what its softmax can be told by."""
    depth = width // n_heads
    scale = np.float32(1 / np.sqrt(depth))
    q, k, v, o = np.empty((4, longest * depth * 8), np.float32)
    scores, bias = np.empty((2, longest * 8), np.float32)
    first, count = np.empty((2, 8), np.int64)
    for tile in range(0, order.size, 8):
        length = _rows(tile, starts, order, first, count, bias)
        for head in range(n_heads):
            column = head * depth
            _gather(qkv, 3 * width, column, first, count, length, depth, q)
            _gather(qkv, 3 * width, width + column, first, count, length, depth, k)
            _gather(qkv, 3 * width, 2 * width + column, first, count, length, depth, v)
            for i in range(length * depth * 8):
                q[i] *= scale
            for i in range(length):
                top = load(bias, 0)
                for j in range(length):
                    score = load(bias, 8 * j)
                    for d in range(depth):
                        score += load(q, (i * depth + d) * 8) * load(k, (j * depth + d) * 8)
                    store(scores, 8 * j, score)
                    top = score if j == 0 else larger(top, score)
                weight = zeros()
                for j in range(length):
                    e = exp_falling(load(scores, 8 * j) - top)
                    store(scores, 8 * j, e)
                    weight += e
                for d in range(depth):
                    mean = zeros()
                    for j in range(length):
                        mean += load(scores, 8 * j) * load(v, (j * depth + d) * 8)
                    store(o, (i * depth + d) * 8, mean / weight)
                at = ((tile * n_heads + head * 8) * longest) + i * 8
                store(peak, at, top)
                store(total, at, weight)
            _scatter(o, depth, first, count, length, mixed, width, column)


@compiled
def attend_backward(
    qkv: Any,
    mixed: Any,
    width: Any,
    n_heads: Any,
    starts: Any,
    order: Any,
    longest: Any,
    peak: Any,
    total: Any,
    dmixed: Any,
    dqkv: Any,
) -> None:
    """dqkv from dmixed; the softmax is made once more, from its peak and total."""
    depth = width // n_heads
    scale = np.float32(1 / np.sqrt(depth))
    q, k, v, o, do, dq, dk, dv = np.empty((8, longest * depth * 8), np.float32)
    shares, slopes, bias = np.empty((3, longest * 8), np.float32)
    first, count = np.empty((2, 8), np.int64)
    for tile in range(0, order.size, 8):
        length = _rows(tile, starts, order, first, count, bias)
        for head in range(n_heads):
            column = head * depth
            _gather(qkv, 3 * width, column, first, count, length, depth, q)
            _gather(qkv, 3 * width, width + column, first, count, length, depth, k)
            _gather(qkv, 3 * width, 2 * width + column, first, count, length, depth, v)
            _gather(mixed, width, column, first, count, length, depth, o)
            _gather(dmixed, width, column, first, count, length, depth, do)
            for i in range(length * depth * 8):
                q[i] *= scale
                dk[i], dv[i] = ZERO, ZERO
            for i in range(length):
                # The softmax's own part of the gradient, for the whole row of scores.
                common = zeros()
                for d in range(depth):
                    at = (i * depth + d) * 8
                    common += load(do, at) * load(o, at)
                at = ((tile * n_heads + head * 8) * longest) + i * 8
                top, weight = load(peak, at), load(total, at)
                for j in range(length):
                    score, slope = load(bias, 8 * j) - top, zeros() - common
                    for d in range(depth):
                        here, there = (i * depth + d) * 8, (j * depth + d) * 8
                        score += load(q, here) * load(k, there)
                        slope += load(do, here) * load(v, there)
                    share = exp_falling(score) / weight
                    store(shares, 8 * j, share)
                    store(slopes, 8 * j, share * slope)
                for d in range(depth):
                    here, mine = (i * depth + d) * 8, zeros()
                    query, change = load(q, here), load(do, here)
                    for j in range(length):
                        there = (j * depth + d) * 8
                        share, slope = load(shares, 8 * j), load(slopes, 8 * j)
                        mine += slope * load(k, there)
                        store(dk, there, load(dk, there) + slope * query)
                        store(dv, there, load(dv, there) + share * change)
                    store(dq, here, mine)
            for i in range(length * depth * 8):
                dq[i] *= scale
            _scatter(dq, depth, first, count, length, dqkv, 3 * width, column)
            _scatter(dk, depth, first, count, length, dqkv, 3 * width, width + column)
            _scatter(dv, depth, first, count, length, dqkv, 3 * width, 2 * width + column)


# ---------------------------------------------------------------------- a block


@compiled
def block_forward(
    x: Any, parameters: Any, n_heads: Any, starts: Any, order: Any, longest: Any
) -> Any:
    """One pre-norm block: its output, then what `block_backward` needs."""
    g1, c1, w_qkv, b_qkv, w_mix, b_mix, g2, c2, w_up, b_up, w_down, b_down = parameters
    n, width = x.shape
    h, norm1 = np.empty_like(x), np.empty((2, n), np.float32)
    normalise(x, g1, c1, h, norm1)
    # Where a tile has no token, attention reads and writes the last row of these.
    qkv = np.empty((n + 1, 3 * width), np.float32)
    mixed = np.empty((n + 1, width), np.float32)
    qkv[n] = ZERO
    mixed[n] = ZERO
    np.dot(h, w_qkv.T, qkv[:n])
    add_row(qkv[:n], b_qkv)
    # Whole tiles, also where the last has fewer than eight rows.
    soft = np.empty((2, (order.size + 7) // 8 * 8 * n_heads * longest), np.float32)
    attend(qkv.ravel(), mixed.ravel(), width, n_heads, starts, order, longest, soft[0], soft[1])
    y = np.empty_like(x)
    np.dot(mixed[:n], w_mix.T, y)
    add_rows(y, x, b_mix)
    h2, norm2 = np.empty_like(x), np.empty((2, n), np.float32)
    normalise(y, g2, c2, h2, norm2)
    slope = np.empty((n, b_up.size), np.float32)
    np.dot(h2, w_up.T, slope)
    f = np.empty_like(slope)
    gelu(slope, b_up, f)
    z = np.empty_like(x)
    np.dot(f, w_down.T, z)
    add_rows(z, y, b_down)
    return z, (x, h, norm1, qkv, mixed, soft, y, h2, norm2, slope, f)


@compiled
def block_backward(
    dz: Any,
    saved: Any,
    parameters: Any,
    gradients: Any,
    n_heads: Any,
    starts: Any,
    order: Any,
    longest: Any,
) -> Any:
    """Gradient of the block's input; adds those of its parameters to `gradients`."""
    g1, _, w_qkv, _, w_mix, _, g2, _, w_up, _, w_down, _ = parameters
    dg1, dc1, dw_qkv, db_qkv, dw_mix, db_mix, dg2, dc2, dw_up, db_up, dw_down, db_down = gradients
    x, h, norm1, qkv, mixed, soft, y, h2, norm2, slope, f = saved
    n, width = x.shape
    sum_rows(dz, db_down)
    add_product(dz, f, dw_down)
    du = np.empty_like(f)
    np.dot(dz, w_down, du)
    multiply(du, slope)
    sum_rows(du, db_up)
    add_product(du, h2, dw_up)
    dh, dy = np.empty_like(x), np.empty_like(x)
    np.dot(du, w_up, dh)
    normalise_backward(dh, y, norm2, g2, dz, dy, dg2, dc2)

    sum_rows(dy, db_mix)
    add_product(dy, mixed[:n], dw_mix)
    dmixed = np.empty((n + 1, width), np.float32)
    dqkv = np.empty((n + 1, 3 * width), np.float32)
    dmixed[n] = ZERO
    np.dot(dy, w_mix, dmixed[:n])
    attend_backward(
        qkv.ravel(),
        mixed.ravel(),
        width,
        n_heads,
        starts,
        order,
        longest,
        soft[0],
        soft[1],
        dmixed.ravel(),
        dqkv.ravel(),
    )
    sum_rows(dqkv[:n], db_qkv)
    add_product(dqkv[:n], h, dw_qkv)
    dx = np.empty_like(x)
    np.dot(dqkv[:n], w_qkv, dh)
    normalise_backward(dh, x, norm1, g1, dy, dx, dg1, dc1)
    return dx
