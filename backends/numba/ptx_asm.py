"""Turns a line of PTX into a typed Numba function; the base of the PTX layer.

    fence = instruction("fence.proxy.async.shared::cta;")
    add3 = instruction("add.s32 $0, $1, $2;", types.int32, types.int32, types.int32, effects=False)

Operands are numbered in LLVM's order: results first, then arguments. A `UniTuple` stands for as many
operands as it has elements, so a fragment of a matrix is one value in Python and a list of registers
in PTX. `inout` ties the first argument to the result, register by register, which is what an
accumulator is. An instruction with `effects` is never moved across another one, nor removed.

Nothing here knows about matrices or about this package: the file can be taken as it is.
"""

# mypy: ignore-errors
from __future__ import annotations

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

I32, I64, F32, F64 = types.int32, types.int64, types.float32, types.float64
CONSTRAINT = {types.int32: "r", types.uint32: "r", types.int64: "l", types.uint64: "l", types.int16: "h",
              types.uint16: "h", types.float32: "f", types.float64: "d"}  # fmt: skip
MEMORY = "~{memory}"


def floats(count):
    """The type of a fragment of `count` float32 registers."""
    return types.UniTuple(types.float32, count)


def words(count):
    """The type of a fragment of `count` 32-bit registers."""
    return types.UniTuple(types.int32, count)


def _scalars(kind):
    return [kind.dtype] * kind.count if isinstance(kind, types.UniTuple) else [kind]


def _flatten(builder, kind, value):
    if isinstance(kind, types.UniTuple):
        return [builder.extract_value(value, i) for i in range(kind.count)]
    return [value]


def _call(context, builder, text, result, outputs, constraints, values, effects):
    """Calls the assembly; returns one LLVM value per output register."""
    kinds = [context.get_value_type(kind) for kind in outputs]
    if not kinds:
        returned = ir.VoidType()
    else:
        returned = kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
    function = ir.FunctionType(returned, [value.type for value in values])
    out = builder.call(ir.InlineAsm(function, text, constraints, side_effect=effects), values)
    if len(kinds) < 2:
        return [out][: len(kinds)]
    return [builder.extract_value(out, i) for i in range(len(kinds))]


def _pack(context, builder, kind, registers, whole=None):
    """The registers as one value of this kind; as the beginning of `whole`, where that is given."""
    if not isinstance(kind, types.UniTuple):
        return registers[0]
    packed = ir.Constant(context.get_value_type(kind), ir.Undefined) if whole is None else whole
    for i, register in enumerate(registers):
        packed = builder.insert_value(packed, register, i)
    return packed


def instruction(text, returns=None, *takes, effects=True, memory=None, inout=False, within=None):
    """A device function that is this PTX. `memory`: it may touch memory (default: as `effects`).

    `within` (with `inout`): the accumulator is the beginning of a fragment of that many registers,
    which the function takes and returns whole.
    """
    result = types.void if returns is None else returns
    outputs = [] if returns is None else _scalars(returns)
    inputs = [scalar for kind in takes for scalar in _scalars(kind)]
    parts = ["=" + CONSTRAINT[kind] for kind in outputs]
    tied = len(_scalars(takes[0])) if inout else 0
    parts += [str(i) if i < tied else CONSTRAINT[kind] for i, kind in enumerate(inputs)]
    parts += [MEMORY] if (effects if memory is None else memory) else []
    constraints = ",".join(parts)
    seen = (types.UniTuple(takes[0].dtype, within), *takes[1:]) if within else takes

    def generate(context, builder, signature, arguments):
        values = []
        for kind, argument in zip(takes, arguments, strict=True):
            values += _flatten(builder, kind, argument)
        registers = _call(context, builder, text, result, outputs, constraints, values, effects)
        if not outputs:
            return context.get_dummy_value()
        return _pack(context, builder, returns, registers, arguments[0] if within else None)

    return with_arity(len(takes), lambda _types: ((seen[0] if within else result)(*seen), generate))


def with_arity(count, build):
    """An intrinsic of `count` arguments out of `build(types) -> (signature, codegen)`.

    Numba reads the number of arguments off the Python signature, hence one lambda per arity.
    """
    shapes = {
        0: lambda typingctx: build(()),
        1: lambda typingctx, a: build((a,)),
        2: lambda typingctx, a, b: build((a, b)),
        3: lambda typingctx, a, b, c: build((a, b, c)),
        4: lambda typingctx, a, b, c, d: build((a, b, c, d)),
        5: lambda typingctx, a, b, c, d, e: build((a, b, c, d, e)),
        6: lambda typingctx, a, b, c, d, e, f: build((a, b, c, d, e, f)),
        7: lambda typingctx, a, b, c, d, e, f, g: build((a, b, c, d, e, f, g)),
    }
    return intrinsic(shapes[count])


def registers(first, count):
    """ "$first, $(first+1), ..." as an operand list of PTX."""
    return ", ".join(f"${i}" for i in range(first, first + count))


def make_zeros(count, kind=types.float32, within=None):
    """zeros() -> a tuple of `count` zeros, followed by undefined registers up to `within`.

    A literal of that length trips an assertion in Numba's peephole pass; an intrinsic does not.
    """
    fragment = types.UniTuple(kind, within or count)

    def generate(context, builder, signature, arguments):
        zero = ir.Constant(context.get_value_type(kind), None)
        return _pack(context, builder, fragment, [zero] * count)

    return with_arity(0, lambda _types: (fragment(), generate))


@intrinsic
def shared_address(typingctx, array):
    """The 32-bit shared-memory address of a `cuda.shared.array`."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        generic = builder.ptrtoint(data, ir.IntType(64))
        text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
        function = ir.FunctionType(ir.IntType(32), [ir.IntType(64)])
        return builder.call(ir.InlineAsm(function, text, "=r,l", side_effect=False), [generic])

    return types.int32(array), generate
