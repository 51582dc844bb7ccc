"""The reads of autograd's nodes in a search, and the same reads again: `Reader`, `read_again`.

Note [a formula is recognised]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A search is a function of its reads: the types of nodes, their numbers, which slots are empty,
and how deep the packed objects in the others are. So a `Reader` takes down each read with what it
found. In the next step the same call site saves another tensor, made by other nodes. If every read
finds the same there as before, the search would find the same steps, and only the packed objects
and the copies of leaves are new. Reading again takes less than half the time of a search.
"""

from __future__ import annotations

import enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CAN_READ: Final = hasattr(torch._C._autograd.SavedTensor, "data")  # noqa: SLF001
"""Whether torch gives the packed objects of a node's slots: before 2.8 it does not, and no tensor
is computed again."""

Constant: TypeAlias = torch.Tensor | complex
"""A copy of a small leaf, or a number."""

MOST_CONSTANT_SHARE: Final = 64
"""A leaf is copied if it is at most 1/MOST_CONSTANT_SHARE of the tensor that it saves."""

_NUMBERS: Final = frozenset({torch.float64, torch.int64, torch.complex128, torch.bool})
"""Dtypes in which torch wraps Python's numbers."""

_SIGNED_ZEROS: Final = (float, complex)

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


class NotFoundError(Exception):
    """The tensor cannot be computed again and has to be stored."""


class What(enum.Enum):
    """Kinds of reads of a node."""

    __hash__ = object.__hash__  # Enum's own is Python code, and these are keys

    BELOW = "type of the node at an edge, and number of its output"
    ARGUMENT = "saved argument that is not a tensor"
    OUTPUT = "dtype, device and sizes of an output"
    VARIABLE = "dtype and device of a leaf"
    EMPTY = "slot without a tensor"
    INPUT = "slot with a packed object"
    CONSTANT = "slot with a number that torch has wrapped"
    LEAF = "leaf that is copied"


# An attribute of an Enum takes longer to read.
_INPUT, _BELOW, _LEAF, _CONSTANT = What.INPUT, What.BELOW, What.LEAF, What.CONSTANT


class Read(NamedTuple):
    """One read.

    Attributes:
        what: its kind.
        node: number of the node: the root is 0, then every `What.BELOW` adds one.
        name: of the attribute, or number of the edge or the output.
        found: by the search. Of an input: its depth, and its index among the inputs.
    """

    what: What
    node: int
    name: Any
    found: object = None


class Reader:
    """Reads nodes, and takes the reads down."""

    def __init__(self, root: Any) -> None:
        """Args: root: the node that made the tensor."""
        self.reads: list[Read] = []
        self._nodes = [root]  # alive, so that no other node gets the address of one
        self._numbers = {id(root): 0}

    def _note(self, what: What, node: Any, name: Any, found: object = None) -> None:
        self.reads.append(Read(what, self._numbers[id(node)], name, found))

    def below(self, node: Any, edge: int) -> tuple[Any, int]:
        """The node at an edge, None if there is none, and the number of its output."""
        below, number = node.next_functions[edge]
        self._note(What.BELOW, node, edge, (type(below), number))
        self._numbers[id(below)] = len(self._nodes)
        self._nodes.append(below)
        return below, number

    def argument(self, node: Any, name: str) -> object:
        """A saved argument that is not a tensor."""
        found = _argument(node, f"_saved_{name}")
        self._note(What.ARGUMENT, node, f"_saved_{name}", found)
        return found

    def output(self, node: Any, number: int) -> tuple[torch.dtype, torch.device, tuple[int, ...]]:
        """Dtype, device and sizes of a node's output."""
        found = _output(node, number)
        self._note(What.OUTPUT, node, number, found)
        return found

    def variable(self, node: Any) -> tuple[torch.dtype, torch.device] | None:
        """Dtype and device of the leaf whose gradient a node adds up; None: it is another node."""
        found = _variable(node)
        self._note(What.VARIABLE, node, "variable", found)
        return found

    def slot(self, node: Any, name: str) -> object:
        """The packed object of a saved tensor; None: the slot is empty or was freed."""
        packed = getattr(node, f"_raw_saved_{name}").data
        if packed is None:
            self._note(What.EMPTY, node, f"_raw_saved_{name}")
        return packed

    def take_input(self, node: Any, name: str, depth: int, index: int) -> None:
        """Note that the object in a slot is an input, at this depth."""
        self._note(What.INPUT, node, f"_raw_saved_{name}", (depth, index))

    def constant(self, node: Any, name: str) -> complex:
        """The number in a slot."""
        self._note(What.CONSTANT, node, f"_raw_saved_{name}")
        return _constant(getattr(node, f"_raw_saved_{name}").data)

    def leaf(self, node: Any, nbytes: int) -> torch.Tensor:
        """A copy of a leaf. Args: nbytes: of the tensor that is to be computed."""
        self._note(What.LEAF, node, "variable")
        return _leaf(node.variable, nbytes)


def read_again(
    reads: Sequence[Read], root: Any, nbytes: int, depth_of: Callable[[object], int | None]
) -> tuple[list[object], list[Constant]] | None:
    """The inputs and constants of another tensor of the same call site; None: a read differs.

    Args:
        reads: of the search for the first one.
        root: the node that made this one.
        nbytes: of the tensor.
        depth_of: see `Finder`.

    Raises:
        NotFoundError: a number or a leaf is not of the kind that can be copied.
        AttributeError: a node was freed.
    """
    nodes = [root]
    inputs: list[object] = []
    constants: list[Constant] = []
    for what, at, name, found in reads:
        node = nodes[at]
        if what is _INPUT:  # most reads
            packed = getattr(node, name).data
            depth, index = found  # type: ignore[misc] # a pair, see `Read`
            if packed is None or depth_of(packed) != depth:  # type: ignore[has-type]
                return None
            if index < len(inputs):  # type: ignore[has-type]
                if inputs[index] is not packed:  # type: ignore[has-type]
                    return None
                continue
            for known in inputs:
                if known is packed:
                    return None
            inputs.append(packed)
        elif what is _BELOW:
            below, number = node.next_functions[name]
            if (type(below), number) != found:
                return None
            nodes.append(below)
        elif what is _LEAF:
            constants.append(_leaf(node.variable, nbytes))
        elif what is _CONSTANT:
            packed = getattr(node, name).data
            if depth_of(packed) is not None:
                return None
            constants.append(_constant(packed))
        elif not _same(_LOOKS[what](node, name), found):
            return None
    return inputs, constants


class FlatReads:
    """The reads of a search that saw one node, its held tensors and its arguments: most searches.

    They are read again by one function written in C.
    """

    __slots__ = ("_arguments", "_count", "_get", "_text", "_types")

    def __init__(self, names: list[str], arguments: list[object]) -> None:
        """Args: names: of the slots, then of the arguments; arguments: that were found."""
        # The getter returns a tuple if it gets several names, so the last one comes twice.
        self._get = attrgetter(*names, names[-1])
        self._count = len(names) - len(arguments)
        self._arguments = (*arguments,)
        self._types = tuple(map(type, arguments))
        # Zeros have signs, which comparisons do not tell.
        has_signs = any(kind in _SIGNED_ZEROS for kind in self._types)
        self._text = repr(self._arguments) if has_signs else None

    @staticmethod
    def of(reads: Sequence[Read]) -> FlatReads | None:
        """For these reads; None: they are of another kind."""
        slots: list[str] = []
        names: list[str] = []
        arguments: list[object] = []
        for what, node, name, found in reads:
            if what is _INPUT and not node and found == (0, len(slots)):
                slots.append(f"{name}.data")
            elif what is What.ARGUMENT and not node:
                names.append(name)
                arguments.append(found)
            else:
                return None
        return FlatReads(slots + names, arguments) if slots else None

    def again(self, node: Any, held: frozenset[type]) -> tuple[object, ...] | None:
        """The inputs of a tensor that another node made; None: `read_again` is to find out.

        Args:
            node: that made it.
            held: see `Finder`.

        Raises:
            AttributeError: the node was freed.
        """
        found = self._get(node)
        n = self._count
        inputs, arguments = found[:n], found[n:-1]
        if (
            held.issuperset(map(type, inputs))
            and len(set(inputs)) == n
            and arguments == self._arguments
            and tuple(map(type, arguments)) == self._types
            and (self._text is None or repr(arguments) == self._text)
        ):
            return inputs
        return None


def _same(a: Any, b: Any) -> bool:
    # 1, 1.0 and True give results of different dtypes, and 0.0 and -0.0 different bits.
    if type(a) is not type(b) or a != b:
        return False
    return type(a) not in _SIGNED_ZEROS or repr(a) == repr(b)


def _argument(node: Any, name: str) -> object:
    # Negative symbolic integers are stored as their two's complement.
    value = getattr(node, name)
    if type(value) is int and value >= 1 << 63:
        return value - (1 << 64)
    return value


def _output(node: Any, number: int) -> tuple[torch.dtype, torch.device, tuple[int, ...]]:
    found = node._input_metadata[number]  # noqa: SLF001
    return found.dtype, found.device, tuple(found.shape)


def _variable(node: Any, _: str = "") -> tuple[torch.dtype, torch.device] | None:
    found = getattr(node, "variable", None)
    return None if found is None else (found.dtype, found.device)


def _slot(node: Any, name: str) -> object:
    return getattr(node, name).data


def _constant(packed: object) -> complex:
    # Autograd saves numbers as tensors without calling the pack hook.
    if type(packed) is not torch.Tensor or packed.dim() or packed.dtype not in _NUMBERS:
        raise NotFoundError
    if packed._version or packed.requires_grad:  # noqa: SLF001
        raise NotFoundError
    return packed.item()


def _leaf(variable: torch.Tensor, nbytes: int) -> torch.Tensor:
    # Copied, because the optimizer may change the leaf before backward needs it.
    if type(variable) not in _PLAIN or variable.layout is not torch.strided:
        raise NotFoundError
    if variable.nbytes * MOST_CONSTANT_SHARE > nbytes:
        raise NotFoundError
    if variable.untyped_storage().nbytes() < variable.nbytes:  # FSDP frees it between its uses
        raise NotFoundError
    return variable.detach().clone()


_LOOKS: Final[dict[What, Callable[[Any, Any], object]]] = {
    What.ARGUMENT: _argument,
    What.OUTPUT: _output,
    What.VARIABLE: _variable,
    What.EMPTY: _slot,
}
