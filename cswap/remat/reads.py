"""The reads of autograd's nodes in a search: `Reader`. See recognition.py for their use."""

from __future__ import annotations

import abc
import enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_SLOT: Final = torch._C._autograd.SavedTensor  # noqa: SLF001

CAN_READ: Final = hasattr(_SLOT, "data")
"""Whether torch gives the packed objects of a node's slots: before 2.8 it does not, and no tensor
is computed again."""

CAN_TELL: Final = hasattr(_SLOT, "unpack_hook")
"""Whether torch tells if hooks have packed the tensor in a slot: before 2.11 it does not, and
tensors that autograd holds itself are no inputs."""


class HeldLeaf(abc.ABC):
    """A parameter with the value that it had when a cast was made of it."""

    __slots__ = ()

    @abc.abstractmethod
    def unpack(self) -> torch.Tensor:
        """The value.

        Raises:
            RuntimeError: it is gone.
        """


Constant: TypeAlias = "torch.Tensor | complex | HeldLeaf"
"""A copy of a small leaf, a number, or a parameter of which there is a cast."""

HoldLeaf: TypeAlias = "Callable[[torch.Tensor, torch.dtype, int], HeldLeaf]"
"""Holds a parameter instead of its cast to a dtype, by a node of this sequence number."""

MOST_CONSTANT_SHARE: Final = 64
"""A leaf is copied if it is at most 1/MOST_CONSTANT_SHARE of the tensor that it saves."""

_NUMBERS: Final = frozenset({torch.float64, torch.int64, torch.complex128, torch.bool})
"""Dtypes in which torch wraps Python's numbers."""

PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that autograd may hold itself, without hooks."""

Keep: TypeAlias = "Callable[[torch.Tensor], Packed]"
"""Makes the packed object of a tensor that autograd holds itself, and that stays."""


class Packed:
    """A packed object of an engine; others' hooks make other ones.

    Attributes:
        depth: number of operators between it and bytes that are held; 0: it holds bytes itself.
        tolerance: for errors (cswap/codecs/tolerance.py).
        is_clone: whether its tensor is the result of a clone.
    """

    __slots__ = ()

    depth: int
    tolerance: int
    is_clone: bool = False


CLONE: Final = "CloneBackward0"
"""Name of the type of a clone's node."""


facts_of: Final[Callable[[Packed], tuple[int, int]]] = attrgetter("depth", "tolerance")
"""The facts of a packed object for a search. No Python runs for most of them."""


class NotFoundError(Exception):
    """The tensor cannot be computed again and has to be stored."""


class ReadKind(enum.Enum):
    """Kinds of reads of a node."""

    BELOW = "type of the node at an edge, and number of its output"
    SAME = "the node at an edge is one that was read before"
    ARGUMENT = "saved argument that is not a tensor"
    OUTPUT = "dtype, device and sizes of an output"
    VARIABLE = "dtype and device of a leaf"
    EMPTY = "slot without a tensor"
    LENGTH = "number of slots in a list of them"
    INPUT = "slot with a packed object"
    CONSTANT = "slot with a number that torch has wrapped"
    LEAF = "leaf that is copied"
    CAST = "parameter of which the node with that number is a cast"


class Read(NamedTuple):
    """One read.

    Attributes:
        kind: of the read.
        node: number of the node: the root is 0, then every `ReadKind.BELOW` adds one.
        name: of the attribute, or number of the edge, of the output, or of the same node.
        found: by the search. Of an input: its facts, and its index among the inputs.
    """

    kind: ReadKind
    node: int
    name: Any
    found: Any = None


class Reader:
    """Reads nodes, and takes the reads down."""

    def __init__(self, root: Any) -> None:
        """Args: root: the node that made the tensor."""
        self.reads: list[Read] = []
        self._nodes = [root]  # alive, so that no other node gets the address of one
        self._numbers = {id(root): 0}

    def _note(self, kind: ReadKind, node: Any, name: Any, found: object = None) -> None:
        self.reads.append(Read(kind, self._numbers[id(node)], name, found))

    def _look(self, kind: ReadKind, node: Any, name: Any) -> Any:
        found = LOOKS[kind](node, name)
        self._note(kind, node, name, found)
        return found

    def below(self, node: Any, edge: int) -> tuple[Any, int]:
        """See `below`."""
        found, number = below(node, edge)
        self._note(ReadKind.BELOW, node, edge, (type(found), number))
        self._numbers[id(found)] = len(self._nodes)
        self._nodes.append(found)
        return found, number

    @property
    def last(self) -> int:
        """Number of the node that was read last."""
        return len(self._nodes) - 1

    def same(self, node: Any, edge: int, number: int) -> None:
        """Note that an edge leads to the node with this number. It is another read of that one."""
        self.below(node, edge)
        self.reads.append(Read(ReadKind.SAME, self.last, number))

    def argument(self, node: Any, name: str) -> object:
        """A saved argument that is not a tensor."""
        self._look(ReadKind.ARGUMENT, node, f"_saved_{name}")
        found = getattr(node, f"_saved_{name}")
        if type(found) is tuple:
            return tuple([_signed(n) for n in found])
        return _signed(found)

    def output(self, node: Any, number: int) -> tuple[torch.dtype, torch.device, tuple[int, ...]]:
        """Dtype, device and sizes of a node's output."""
        found: tuple[torch.dtype, torch.device, tuple[int, ...]]
        found = self._look(ReadKind.OUTPUT, node, number)
        return found

    def variable(self, node: Any) -> tuple[torch.dtype, torch.device] | None:
        """Dtype and device of the leaf whose gradient a node adds up; None: it is another node."""
        found: tuple[torch.dtype, torch.device] | None = self._look(
            ReadKind.VARIABLE, node, "variable"
        )
        return found

    def slot(self, node: Any, name: str) -> object:
        """The packed object of a saved tensor; None: the slot is empty or was freed."""
        packed = slot(node, f"_raw_saved_{name}")
        if packed is None:
            self._look(ReadKind.EMPTY, node, f"_raw_saved_{name}")
        return packed

    def length(self, node: Any, name: str) -> None:
        """Note how many slots a list of them has."""
        self._look(ReadKind.LENGTH, node, f"_raw_saved_{name}")

    def take_input(self, node: Any, name: str, facts: tuple[int, int], index: int) -> None:
        """Note that the object in a slot is an input. Args: facts: see `facts_of`."""
        self._note(ReadKind.INPUT, node, f"_raw_saved_{name}", (facts, index))

    def plain(self, node: Any, name: str, keep: Keep) -> Packed:
        """The packed object of the tensor in a slot that no hook has packed; see `plain`."""
        return plain(node, f"_raw_saved_{name}", keep)

    def constant(self, node: Any, name: str) -> complex:
        """The number in a slot."""
        self._note(ReadKind.CONSTANT, node, f"_raw_saved_{name}")
        return constant(slot(node, f"_raw_saved_{name}"))

    def leaf(self, node: Any, nbytes: int) -> torch.Tensor:
        """A copy of a leaf. Args: nbytes: of the tensor that is to be computed."""
        self._note(ReadKind.LEAF, node, "variable")
        return leaf(node.variable, nbytes)

    def cast(self, node: Any, cast: Any, dtype: torch.dtype, hold: HoldLeaf) -> HeldLeaf:
        """The parameter of a cast. Args: node: of the parameter; others: see `held_leaf`."""
        self._note(ReadKind.CAST, node, self._numbers[id(cast)], dtype)
        return held_leaf(node.variable, cast, dtype, hold)


def _signed(found: object) -> object:
    # Negative symbolic integers are stored as their two's complement.
    return found - (1 << 64) if type(found) is int and found >= 1 << 63 else found


def is_number(packed: object) -> bool:
    """Whether it is a number that torch has wrapped: autograd saves those without the pack hook."""
    if type(packed) is not torch.Tensor or packed.dim() or packed.dtype not in _NUMBERS:
        return False
    return not (packed._version or packed.requires_grad)  # noqa: SLF001


def constant(packed: object) -> complex:
    """The number that torch has wrapped in a slot.

    Raises:
        NotFoundError: it is another tensor.
    """
    if not is_number(packed):
        raise NotFoundError
    return packed.item()  # type: ignore[no-any-return,attr-defined] # see `is_number`


def below(node: Any, edge: int) -> tuple[Any, int]:
    """The node at an edge, None if there is none, and the number of its output."""
    found, number = node.next_functions[edge]
    return found, number


def slot(node: Any, name: str) -> Any:
    """The packed object of a saved tensor; None: the slot is empty or was freed.

    Args:
        node: that saved it.
        name: of the attribute, ``"_raw_saved_self"``, or of an item of a list of slots,
            ``"_raw_saved_indices[1]"``.

    Raises:
        AttributeError: there is no such slot.
    """
    return (_item(node, name) if "[" in name else getattr(node, name)).data


def _item(node: Any, name: str) -> Any:
    name, is_item, number = name.partition("[")
    if not is_item:
        return getattr(node, name)
    try:
        return _list(node, name)[int(number[:-1])]
    except IndexError:
        raise AttributeError(name) from None


def _list(node: Any, name: str) -> Any:
    try:
        return getattr(node, name)
    except RuntimeError:  # it was freed
        raise AttributeError(name) from None


def plain(node: Any, name: str, keep: Keep) -> Packed:
    """The packed object of a tensor that autograd holds itself.

    Args:
        node: that saved it.
        name: see `slot`.
        keep: makes the object.

    Raises:
        NotFoundError: hooks have packed it, or it was modified in place since.
    """
    if _item(node, name).unpack_hook is not None:
        raise NotFoundError
    try:
        tensor = _item(node, name.removeprefix("_raw"))  # compares versions
    except RuntimeError:
        raise NotFoundError from None
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        raise NotFoundError
    return keep(tensor)


def leaf(variable: torch.Tensor, nbytes: int) -> torch.Tensor:
    """A copy of a small leaf: the optimizer may change it before backward needs it.

    Args:
        variable: the leaf.
        nbytes: of the tensor that is to be computed.

    Raises:
        NotFoundError: it is not small, or it is no plain tensor.
    """
    if not _is_there(variable) or variable.nbytes * MOST_CONSTANT_SHARE > nbytes:
        raise NotFoundError
    return variable.detach().clone()


def held_leaf(variable: torch.Tensor, cast: Any, dtype: torch.dtype, hold: HoldLeaf) -> HeldLeaf:
    """A parameter that is held instead of its cast.

    Args:
        variable: the leaf.
        cast: node of the cast.
        dtype: of the cast.
        hold: holds it.

    Raises:
        NotFoundError: it is no plain parameter, or its value may be another one.
    """
    if not _is_there(variable) or type(variable) is torch.Tensor:  # which may live for us alone
        raise NotFoundError
    return hold(variable, dtype, cast._sequence_nr())  # noqa: SLF001


def _is_there(variable: torch.Tensor) -> bool:
    # FSDP frees a parameter between its uses.
    return (
        type(variable) in PLAIN
        and variable.layout is torch.strided
        and variable.untyped_storage().nbytes() >= variable.nbytes
    )


def _output(node: Any, number: int) -> tuple[torch.dtype, torch.device, tuple[int, ...]]:
    found = node._input_metadata[number]  # noqa: SLF001
    return found.dtype, found.device, tuple(found.shape)


def _variable(node: Any, _: str) -> tuple[torch.dtype, torch.device] | None:
    found = getattr(node, "variable", None)
    return None if found is None else (found.dtype, found.device)


LOOKS: Final[dict[ReadKind, Callable[[Any, Any], object]]] = {
    ReadKind.ARGUMENT: lambda node, name: repr(getattr(node, name)),  # 1 is not 1.0, nor 0.0 -0.0
    ReadKind.OUTPUT: _output,
    ReadKind.VARIABLE: _variable,
    ReadKind.EMPTY: lambda node, name: slot(node, name) is None,
    ReadKind.LENGTH: lambda node, name: len(_list(node, name)),
}
"""Reads of which nothing is kept: another tensor is to have the same there."""
