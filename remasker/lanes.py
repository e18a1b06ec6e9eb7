"""Eight numbers at once inside functions that numba compiles.

Numba finds such operations by itself in long loops over an array, not in the short ones of
`remasker.kernels`, which work on tiles of eight rows: here they are by name. `Lanes` are eight
float32 in one register; `+`, `-`, `*` and `/` work lane by lane.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, models, overload, register_model

N_LANES = 8
FLOAT, INTEGER, PLACE = ir.FloatType(), ir.IntType(32), ir.IntType(64)
#: Sums may be taken in any order, and products fused with them; what is not finite stays so.
LOOSE = ("reassoc", "contract", "nsz", "arcp")
#: Cephes' polynomial for exp(r) = 1 + r + r² · (…), |r| < ln 2 / 2.
EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
#: ln 2 in two parts, so that a multiple can be taken off without rounding.
LN2 = (0.693359375, -2.12194440e-4)

Function = TypeVar("Function", bound=Callable[..., Any])
#: What follows is called without `typing`, by compiled functions only.
instruction: Any = intrinsic


def compiled(function: Function) -> Function:
    """Compile at the first call, and keep the machine code for the next process where possible.

    >>> @compiled
    ... def twice(x):
    ...     return 2 * x
    >>> twice(21)
    42
    """
    options: dict[str, Any] = {"fastmath": set(LOOSE), "error_model": "numpy", "nogil": True}
    try:
        return cast(Function, njit(cache=True, **options)(function))
    except RuntimeError:  # neither beside this file nor at home may anything be written
        return cast(Function, njit(**options)(function))


class Lanes(types.Type):
    """Numba's type of eight float32 in one register."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES = Lanes()
VECTOR = ir.VectorType(FLOAT, N_LANES)


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    """How LLVM holds them."""

    def __init__(self, manager: Any, lanes: Any) -> None:
        super().__init__(manager, lanes, VECTOR)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), VECTOR.as_pointer())


def _constant(like: Any, value: float) -> Any:
    one = ir.Constant(FLOAT, float(np.float32(value)))
    return ir.Constant(like, [one] * N_LANES) if isinstance(like, ir.VectorType) else one


@instruction
def load(typing: Any, array: Any, at: Any) -> Any:
    """Eight numbers of a flat float32 array, from a place on."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, signature.args[0], *args), align=4)

    return LANES(array, types.intp), write


@instruction
def store(typing: Any, array: Any, at: Any, lanes: Any) -> Any:
    """Put eight numbers into a flat float32 array, from a place on."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        builder.store(args[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, LANES), write


@instruction
def zeros(typing: Any) -> Any:
    """Eight times nothing."""
    return LANES(), lambda context, builder, signature, args: _constant(VECTOR, 0.0)


@instruction
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger of two, lane by lane."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return LANES(LANES, LANES), write


@instruction
def exp_falling(typing: Any, x: Any) -> Any:
    """exp(x) for x <= 0, of one float32 or of eight; from -87 on it stays at 1e-38."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (x,) = args
        kind = x.type
        whole = ir.VectorType(INTEGER, N_LANES) if isinstance(kind, ir.VectorType) else INTEGER

        def number(value: float) -> Any:
            return _constant(kind, value)

        def bits(value: int) -> Any:
            return ir.Constant(whole, [value] * N_LANES if whole is not INTEGER else value)

        def plus_product(a: Any, b: Any, c: Any) -> Any:
            return builder.fadd(builder.fmul(a, b, flags=LOOSE), c, flags=LOOSE)

        lowest = number(-87.0)
        x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
        # exp(x) = 2^k · exp(r); below zero, cutting off rounds towards it.
        k = builder.fptosi(plus_product(x, number(np.log2(np.e)), number(-0.5)), whole)
        power = builder.bitcast(builder.shl(builder.add(k, bits(127)), bits(23)), kind)
        k = builder.sitofp(k, kind)
        r = plus_product(k, number(-LN2[1]), plus_product(k, number(-LN2[0]), x))
        y = number(EXP[0])
        for coefficient in EXP[1:]:
            y = plus_product(y, r, number(coefficient))
        y = plus_product(builder.fmul(y, r, flags=LOOSE), r, builder.fadd(r, number(1.0)))
        return builder.fmul(y, power, flags=LOOSE)

    if x is LANES:
        return LANES(LANES), write
    return types.float32(types.float32), write


def _lane_by_lane(symbol: Any, name: str) -> None:
    @instruction
    def both(typing: Any, a: Any, b: Any) -> Any:
        def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, name)(*args, flags=LOOSE)

        return LANES(LANES, LANES), write

    def apply(a: Any, b: Any) -> Any:
        return both(a, b)

    @overload(symbol)
    def choose(a: Any, b: Any) -> Any:
        return apply if isinstance(a, Lanes) and isinstance(b, Lanes) else None


for _symbol, _name in (
    (operator.add, "fadd"),
    (operator.iadd, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _lane_by_lane(_symbol, _name)


# ---------------------------------------------------------------------- tiles of 8 × 8


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """Eight registers, transposed: three rounds of shuffling two halves into each other."""
    kind = ir.VectorType(INTEGER, N_LANES)
    halves = [
        ir.Constant(kind, [place for i in range(first, first + 4) for place in (i, i + 8)])
        for first in (0, 4)
    ]
    for _ in range(3):
        rows = [
            builder.shuffle_vector(rows[i // 2], rows[i // 2 + 4], halves[i % 2]) for i in range(8)
        ]
    return rows


@instruction
def gather_tile(typing: Any, source: Any, places: Any, offset: Any, tile: Any, at: Any) -> Any:
    """Lane l of the tile is source[places[l] + offset :][:8]; the tile begins at tile[at]."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, places, offset, tile, at = args
        kinds = signature.args
        starts = context.make_array(kinds[1])(context, builder, places).data
        rows = []
        for lane in range(N_LANES):
            start = builder.load(builder.gep(starts, [ir.Constant(PLACE, lane)]))
            begin = builder.add(start, offset)
            rows.append(builder.load(_pointer(context, builder, kinds[0], source, begin), align=4))
        for d, row in enumerate(_turned(builder, rows)):
            where = builder.add(at, ir.Constant(PLACE, N_LANES * d))
            builder.store(row, _pointer(context, builder, kinds[3], tile, where), align=4)
        return context.get_dummy_value()

    return types.void(source, places, types.intp, tile, types.intp), write


@instruction
def scatter_tile(typing: Any, tile: Any, at: Any, target: Any, places: Any, offset: Any) -> Any:
    """The way back: target[places[l] + offset :][:8] becomes lane l of the tile."""

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tile, at, target, places, offset = args
        kinds = signature.args
        starts = context.make_array(kinds[3])(context, builder, places).data
        rows = []
        for d in range(N_LANES):
            where = builder.add(at, ir.Constant(PLACE, N_LANES * d))
            rows.append(builder.load(_pointer(context, builder, kinds[0], tile, where), align=4))
        for lane, row in enumerate(_turned(builder, rows)):
            start = builder.load(builder.gep(starts, [ir.Constant(PLACE, lane)]))
            begin = builder.add(start, offset)
            builder.store(row, _pointer(context, builder, kinds[2], target, begin), align=4)
        return context.get_dummy_value()

    return types.void(tile, types.intp, target, places, types.intp), write
