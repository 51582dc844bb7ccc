"""The effect of each opcode of PTX, as an expression of numpy: the table `EMITTERS`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from bench.ptx.builder import NUMPY
from bench.ptx.faults import UnsupportedError
from bench.ptx.parse import DTYPE, split_operands

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.ptx.builder import Builder
    from bench.ptx.parse import Instruction

    Emitter = Callable[[Builder, Instruction, list[str]], None]

_COMPARE: Final = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
_ROUND: Final = {"rni": "np.rint", "rmi": "np.floor", "rzi": "np.trunc", "rpi": "np.ceil"}


def emit(b: Builder, i: Instruction) -> None:
    """Append an instruction to a function.

    Raises:
        UnsupportedError: the instruction is unknown.
    """
    op, *mods = i.op.split(".")
    if op not in EMITTERS or i.guard:
        raise UnsupportedError(f"{i.line}: {i.text}")
    try:
        EMITTERS[op](b, i, mods)
    except (KeyError, ValueError, IndexError) as error:
        raise UnsupportedError(f"{i.line}: {i.text} ({error!r})") from error


def _only(i: Instruction, found: list[str], *allowed: list[str]) -> None:
    if found not in allowed:
        raise UnsupportedError(f"{i.line}: {i.text}")


def _two(sign: str) -> Emitter:
    # A bitwise operation.
    def emitter(b: Builder, i: Instruction, mods: list[str]) -> None:
        kind = mods[-1]
        b.write(i.args[0], f"({b.read(i.args[1], kind)} {sign} {b.read(i.args[2], kind)})", kind)

    return emitter


def _sum(sign: str) -> Emitter:
    # An addition, a subtraction or, of floats, a multiplication.
    def emitter(b: Builder, i: Instruction, mods: list[str]) -> None:
        *how, kind = mods
        expression = f"({b.read(i.args[1], kind)} {sign} {b.read(i.args[2], kind)})"
        if DTYPE[kind].kind == "f":
            _only(i, how, [], ["rn"])
            expression = f"quiet{expression}"
        else:
            _only(i, how, [])
        b.write(i.args[0], expression, kind)

    return emitter


def _one(template: str, result: str | None = None) -> Emitter:
    # A function of one operand.
    def emitter(b: Builder, i: Instruction, mods: list[str]) -> None:
        kind = mods[-1]
        b.write(i.args[0], template.format(b.read(i.args[1], kind)), result or kind)

    return emitter


def _shift(name: str) -> Emitter:
    def emitter(b: Builder, i: Instruction, mods: list[str]) -> None:
        kind = mods[-1]
        b.write(i.args[0], f"{name}({b.read(i.args[1], kind)}, {b.read(i.args[2], 'u32')})", kind)

    return emitter


def _mov(b: Builder, i: Instruction, mods: list[str]) -> None:
    kind, (target, source) = mods[-1], i.args
    if target.startswith("{"):  # a word cut into parts
        parts = split_operands(target[1:-1])
        size = DTYPE[kind].itemsize // len(parts)
        whole = b.read(source, kind)
        for k, part in enumerate(parts):
            piece = f"({whole} >> {NUMPY[kind]}({8 * size * k})).astype(np.uint{8 * size})"
            b.write(part, piece, f"u{8 * size}")
    elif source.startswith("{"):  # parts joined
        parts = split_operands(source[1:-1])
        size = DTYPE[kind].itemsize // len(parts)
        wide = NUMPY[kind]
        pieces = (
            f"({b.read(part, f'u{8 * size}')}.astype({wide}) << {wide}({8 * size * k}))"
            for k, part in enumerate(parts)
        )
        b.write(target, f"({' | '.join(pieces)})", kind)
    else:
        copied = f"{b.read(source, kind)}.copy()"  # and not +x, which might quiet a NaN
        b.write(target, copied, kind)


def _multiply(b: Builder, i: Instruction, mods: list[str]) -> None:
    *how, kind = mods
    if DTYPE[kind].kind == "f":
        _sum("*")(b, i, mods)
        return
    first, second = b.read(i.args[1], kind), b.read(i.args[2], kind)
    result = kind
    if how == ["wide"]:
        result = f"{kind[0]}{2 * int(kind[1:])}"
        value = f"({first}.astype({NUMPY[result]}) * {second}.astype({NUMPY[result]}))"
    elif how == ["lo"]:
        value = f"({first} * {second})"
    else:
        _only(i, how, ["hi"])
        value = f"multiply_high({first}, {second})"
    if i.op.startswith("mad"):
        _only(i, how, ["lo"], ["wide"])
        value = f"({value} + {b.read(i.args[3], result)})"
    b.write(i.args[0], value, result)


def _divide(b: Builder, i: Instruction, mods: list[str]) -> None:
    *how, kind = mods
    name = i.op.split(".", maxsplit=1)[0]
    if DTYPE[kind].kind == "f":
        _only(i, how, ["rn"])
        first = b.read(i.args[1], kind)
        value = {
            "div": lambda: f"{first} / {b.read(i.args[2], kind)}",
            "rcp": lambda: f"{NUMPY[kind]}(1) / {first}",
            "sqrt": lambda: f"np.sqrt({first})",
        }[name]()
        b.write(i.args[0], f"quiet({value})", kind)
        return
    _only(i, how, [])
    function = {"div": "divide", "rem": "remainder"}[name]
    operands = f"{b.read(i.args[1], kind)}, {b.read(i.args[2], kind)}"
    b.write(i.args[0], f"{function}({operands}, {i.line})", kind)


def _fused(b: Builder, i: Instruction, mods: list[str]) -> None:
    _only(i, mods, ["rn", "f32"])
    operands = ", ".join(b.read(a, "f32") for a in i.args[1:])
    b.write(i.args[0], f"fused({operands})", "f32")


def _extreme(b: Builder, i: Instruction, mods: list[str]) -> None:
    _only(i, mods[:-1], [])
    kind, name = mods[-1], i.op.split(".", maxsplit=1)[0]
    first, second = b.read(i.args[1], kind), b.read(i.args[2], kind)
    if DTYPE[kind].kind == "f":
        value = f"least_or_greatest({first}, {second}, greatest={name == 'max'})"
    else:
        value = f"np.{name}imum({first}, {second})"
    b.write(i.args[0], value, kind)


def _set_predicate(b: Builder, i: Instruction, mods: list[str]) -> None:
    compare, *rest, kind = mods
    _only(i, rest, [])
    first, second = b.read(i.args[1], kind), b.read(i.args[2], kind)
    if DTYPE[kind].kind != "f":
        if kind[0] == "b" and compare not in ("eq", "ne"):
            raise UnsupportedError(i.text)
        b.write(i.args[0], f"({first} {_COMPARE[compare]} {second})", "pred")
        return
    either_nan = f"(np.isnan({first}) | np.isnan({second}))"
    if compare in ("nan", "num"):
        value = either_nan if compare == "nan" else f"(~{either_nan})"
    else:
        value = f"({first} {_COMPARE[compare[:2]]} {second})"
        if len(compare) == 3:  # true for NaN, too
            value = f"({value} | {either_nan})"
        elif compare == "ne":
            value = f"({value} & ~{either_nan})"
    b.write(i.args[0], value, "pred")


def _select(b: Builder, i: Instruction, mods: list[str]) -> None:
    kind = mods[-1]
    values = f"{b.read(i.args[1], kind)}, {b.read(i.args[2], kind)}"
    b.write(i.args[0], f"np.where({b.read(i.args[3], 'pred')}, {values})", kind)


def _funnel(b: Builder, i: Instruction, mods: list[str]) -> None:
    side, mode, kind = mods
    operands = f"{b.read(i.args[1], kind)}, {b.read(i.args[2], kind)}, {b.read(i.args[3], 'u32')}"
    b.write(i.args[0], f"funnel({operands}, left={side == 'l'}, clamp={mode == 'clamp'})", kind)


def _permute(b: Builder, i: Instruction, mods: list[str]) -> None:
    _only(i, mods, ["b32"])
    operands = ", ".join(b.read(a, "u32") for a in i.args[1:])
    b.write(i.args[0], f"permute({operands})", "u32")


def _dot(b: Builder, i: Instruction, mods: list[str]) -> None:
    _only(i, mods, ["u32", "u32"])
    operands = ", ".join(b.read(a, "u32") for a in i.args[1:])
    b.write(i.args[0], f"dot_of_bytes({operands})", "u32")


def _insert(b: Builder, i: Instruction, mods: list[str]) -> None:
    kind = mods[-1]
    operands = f"{b.read(i.args[1], kind)}, {b.read(i.args[2], kind)}"
    b.write(i.args[0], f"insert_field({operands}, {int(i.args[3])}, {int(i.args[4])})", kind)


def _extract(b: Builder, i: Instruction, mods: list[str]) -> None:
    kind = mods[-1]
    place = f"{b.read(i.args[2], 'u32')}, {b.read(i.args[3], 'u32')}"
    b.write(i.args[0], f"extract_field({b.read(i.args[1], kind)}, {place})", kind)


_PAIRS: Final = {
    "rn.bf16x2.f32": ("to_bfloat16_pair", "u32"),
    "rn.f16x2.f32": ("to_half_pair", "u32"),
    "rn.satfinite.e4m3x2.f32": ("to_e4m3_pair", "u16"),
}
"""Conversions of two float32, the first to the high half."""


def _convert(b: Builder, i: Instruction, mods: list[str]) -> None:
    name = ".".join(mods)
    if name in _PAIRS:
        function, kind = _PAIRS[name]
        b.write(
            i.args[0], f"{function}({b.read(i.args[1], 'f32')}, {b.read(i.args[2], 'f32')})", kind
        )
    elif name == "rn.f16x2.e4m3x2":
        b.write(i.args[0], f"from_e4m3_pair({b.read(i.args[1], 'u16')})", "u32")
    elif name == "f32.f16":
        b.write(i.args[0], f"from_half({b.read(i.args[1], 'u16')})", "f32")
    elif name == "pack.sat.u8.s32.b32":
        values = f"{b.read(i.args[1], 's32')}, {b.read(i.args[2], 's32')}"
        b.write(i.args[0], f"pack_saturated({values}, {b.read(i.args[3], 'u32')})", "u32")
    else:
        _convert_one(b, i, mods)


def _convert_one(b: Builder, i: Instruction, mods: list[str]) -> None:
    *how, to, source = mods
    operand = i.args[1]
    from_float, to_float = DTYPE[source].kind == "f", DTYPE[to].kind == "f"
    held = b.held(operand, source)
    if from_float or DTYPE[held].itemsize == DTYPE[source].itemsize:
        value = b.read(operand, source)
    else:  # the low bits of a wider register
        bits = f"np.uint{8 * DTYPE[source].itemsize}"
        value = f"{b.read(operand, held)}.astype({bits}).view({NUMPY[source]})"
    if from_float and not to_float:
        value = f"to_integer({value}, np.dtype({NUMPY[to]}), {how[0]!r})"
    elif from_float and to == source:
        value = f"quiet({_ROUND[how[0]]}({value}))"
    elif from_float:
        _only(i, how, ["rn"] if to == "f32" else [])
        value = f"quiet({value}.astype({NUMPY[to]}))"
    else:
        _only(i, how, ["rn"] if to_float else [])
        value = f"{value}.astype({NUMPY[to]})"
    b.write(i.args[0], value, to)


def _to_space(b: Builder, i: Instruction, mods: list[str]) -> None:
    if mods[:1] != ["to"] or mods[1] not in ("global", "shared"):
        raise UnsupportedError(i.text)
    b.write(i.args[0], f"{b.read(i.args[1], mods[-1])}.copy()", mods[-1])


def _vector(i: Instruction, mods: list[str], known: set[str]) -> tuple[str, str, int]:
    # Space, type and number of words of a load or a store.
    where, kind = mods[0], mods[-1]
    count = next((int(m[1:]) for m in mods if re.fullmatch(r"v\d", m)), 1)
    if where not in ("global", "shared") or set(mods) - known - {where, kind, f"v{count}"}:
        raise UnsupportedError(f"{i.line}: {i.text}")
    return where, kind, count


def _load(b: Builder, i: Instruction, mods: list[str]) -> None:
    if mods[0] == "param":
        kind, value = b.parameter(i.args[1])
        if DTYPE[kind].itemsize != DTYPE[mods[-1]].itemsize:
            raise UnsupportedError(i.text)
        b.write(i.args[0], f"{value}.view({NUMPY[mods[-1]]})", mods[-1])
        return
    where, kind, count = _vector(i, mods, {"nc", "volatile", "L1::no_allocate"})
    targets = split_operands(i.args[0][1:-1]) if count > 1 else (i.args[0],)
    size = DTYPE[kind].itemsize
    address = b.address(i.args[1])
    words = b.assign(
        f"S.load_{where}({address}, {size}, {count}, i, {i.line}, read_only={'nc' in mods})"
    )
    for k, target in enumerate(targets):
        value = f"{words}[{k}]"
        if i.used != -1:  # bytes that the pragma calls unused are junk
            kept = sum(255 << 8 * at for at in range(size) if i.used >> (k * size + at) & 1)
            junk = 0xA5A5A5A5A5A5A5A5 & ~kept & (1 << 8 * size) - 1
            value = f"({value} & np.uint{8 * size}({kept}) | np.uint{8 * size}({junk}))"
        value = value if DTYPE[kind].kind == "u" else f"{value}.view({NUMPY[kind]})"
        b.write(target, value, kind)


def _store(b: Builder, i: Instruction, mods: list[str]) -> None:
    where, kind, count = _vector(i, mods, {"cs", "volatile"})
    sources = split_operands(i.args[1][1:-1]) if count > 1 else (i.args[1],)
    size = DTYPE[kind].itemsize
    values = []
    for source in sources:
        held = b.held(source, kind)
        if DTYPE[held].itemsize > size:
            values.append(f"{b.read(source, held)}.astype(np.uint{8 * size})")
        else:
            value = b.read(source, kind)
            values.append(value if DTYPE[kind].kind == "u" else f"{value}.view(np.uint{8 * size})")
    address = b.address(i.args[0])
    b.lines.append(f"S.store_{where}({address}, [{', '.join(values)}], {size}, i, {i.line})")


def _atomic(b: Builder, i: Instruction, mods: list[str]) -> None:
    where, what, kind = (m for m in mods if m not in ("relaxed", "gpu", "cta", "sys"))
    returns = i.op.startswith("atom")
    address, value = b.address(i.args[-2]), b.read(i.args[-1], kind)
    call = f"S.atomic({where!r}, {what!r}, {address}, np.broadcast_to({value}, (n,)), i, {i.line})"
    if returns:
        b.write(i.args[0], call, kind)
    else:
        b.lines.append(call)


def _nothing(_b: Builder, _i: Instruction, _mods: list[str]) -> None:
    """A fence: stores are seen at once here."""


EMITTERS: Final[dict[str, Emitter]] = {
    "and": _two("&"),
    "or": _two("|"),
    "xor": _two("^"),
    "add": _sum("+"),
    "sub": _sum("-"),
    "mul": _multiply,
    "mad": _multiply,
    "div": _divide,
    "rem": _divide,
    "rcp": _divide,
    "sqrt": _divide,
    "fma": _fused,
    "not": _one("(~{})"),
    "neg": _one("(-{})"),
    "abs": _one("np.abs({})"),
    "clz": _one("clz({})", "u32"),
    "brev": _one("reverse_bits({})"),
    "popc": _one("np.bitwise_count({}).astype(np.uint32)", "u32"),
    "shl": _shift("shift_left"),
    "shr": _shift("shift_right"),
    "shf": _funnel,
    "prmt": _permute,
    "dp4a": _dot,
    "bfi": _insert,
    "bfe": _extract,
    "min": _extreme,
    "max": _extreme,
    "selp": _select,
    "setp": _set_predicate,
    "mov": _mov,
    "cvt": _convert,
    "cvta": _to_space,
    "ld": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "membar": _nothing,
    "fence": _nothing,
}
"""By the opcode without its modifiers."""

NAMES: Final = (
    *("shift_left", "shift_right", "clz", "reverse_bits", "insert_field", "extract_field"),
    *("funnel", "permute", "divide", "remainder", "multiply_high", "pack_saturated"),
    "dot_of_bytes",
    *("quiet", "fused", "least_or_greatest", "to_integer", "to_bfloat16_pair", "to_half_pair"),
    *("from_half", "to_e4m3_pair", "from_e4m3_pair"),
)
"""Functions of integers.py and floats.py that the expressions call."""
