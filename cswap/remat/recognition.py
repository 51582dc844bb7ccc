"""Whether another tensor is computed again by a known formula: `Recognition`.

Note [a formula is recognised]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A search is a function of its reads: the types of nodes, their numbers, which slots are empty,
and how deep the packed objects in the others are (reads.py). In the next step the same call site
saves another tensor, made by other nodes. If every read finds the same there as before, the search
would find the same steps, and only the packed objects and the copies of leaves are new.

This is done in every step for every tensor that is computed again, with cold caches. So one
function written in C reads all attributes of a node, and all that was found is compared at once.
"""

from __future__ import annotations

from itertools import repeat
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch

from cswap.remat.reads import (
    LOOKS,
    PLAIN,
    Packed,
    What,
    constant,
    facts_of,
    getter,
    held_leaf,
    leaf,
    saved_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cswap.remat.reads import Constant, HoldLeaf, Keep, Read

    _Get: TypeAlias = Callable[[Any], tuple[Any, ...]]

_BELOW: Final = "next_functions"

_IN_SLOTS: Final = frozenset({What.INPUT, What.CONSTANT, What.EMPTY})

_ARGUMENTS: Final = frozenset({What.ARGUMENT, What.EMPTY})


class _Edge(NamedTuple):
    """An edge that was followed.

    Attributes:
        number: among the node's edges.
        below: number of the node there.
        found: type of that node, and number of its output.
    """

    number: int
    below: int
    found: tuple[type, int]


class _Node(NamedTuple):
    """The reads of one node.

    Attributes:
        number: of the node.
        get: returns its attributes; if there are edges, `_BELOW` comes first.
        edges: that were followed.
        hook: returns the unpack hook of a slot with an input; None: there is no input.
        get_own: as ``get``, with the tensors of inputs that autograd holds itself.
        inputs: their numbers.
    """

    number: int
    get: _Get
    edges: tuple[_Edge, ...]
    hook: Callable[[Any], object] | None
    get_own: _Get
    inputs: tuple[int, ...]


class Recognition:
    """The reads of a search, in an order in which they take few calls."""

    def __init__(self, reads: Sequence[Read]) -> None:
        """Args: reads: of the search, in their order."""
        self._n_nodes = 1 + sum(read.what is What.BELOW for read in reads)
        self._nodes, places = _by_node(reads, self._n_nodes)
        inputs = [(i, *_pair(r)) for i, r in enumerate(reads) if r.what is What.INPUT]
        firsts = {index: (places[i], facts) for i, facts, index in reversed(inputs)}
        self._inputs = _items([firsts[index][0] for index in range(len(firsts))])
        self._facts = tuple(firsts[index][1] for index in range(len(firsts)))
        self._repeated = [(places[i], n) for i, _, n in inputs if places[i] != firsts[n][0]]
        arguments = [i for i, read in enumerate(reads) if read.what in _ARGUMENTS]
        self._arguments = _items([places[i] for i in arguments])
        self._found = tuple(reads[i].found for i in arguments)
        self._types = tuple(map(type, self._found))
        # Zeros have signs, which comparisons do not tell.
        self._text = repr(self._found) if any(map(_may_be_zero, self._found)) else None
        self._constants = [
            (read, places.get(i))
            for i, read in enumerate(reads)
            if read.what in (What.CONSTANT, What.LEAF, What.CAST)
        ]
        self._same = [(read.node, read.name) for read in reads if read.what is What.SAME]
        self._looks = [(LOOKS[read.what], read) for read in reads if read.what in LOOKS]

    def again(
        self,
        root: Any,
        nbytes: int,
        keep: Keep | None,
        hold: HoldLeaf | None,
    ) -> tuple[tuple[object, ...], tuple[Constant, ...]] | None:
        """The inputs and constants of another tensor of the same call site; None: a read differs.

        Args:
            root: the node that made this one.
            nbytes: of the tensor.
            keep: see `Finder`.
            hold: see `Finder`.

        Raises:
            NotFoundError: a number or a leaf is not of the kind that can be copied or held.
            AttributeError: a node was freed.
        """
        nodes = [root] * self._n_nodes
        found: tuple[Any, ...] = ()
        own: tuple[int, ...] = ()
        for at, get, edges, hook, get_own, numbers in self._nodes:
            node = nodes[at]
            # A node's tensors are all saved under the same hooks.
            if hook is None or keep is None or hook(node) is not None:
                values = get(node)
            else:
                try:
                    values = get_own(node)
                except RuntimeError:  # one was modified in place, or all were freed
                    return None
                own += numbers
            found += values
            for number, below, expected in edges:
                node, output = values[0][number]
                if (type(node), output) != expected:
                    return None
                nodes[below] = node
        for one, other in self._same:
            if nodes[one] is not nodes[other]:
                return None
        inputs, arguments = self._inputs(found), self._arguments(found)
        if (
            tuple(map(type, arguments)) != self._types
            or arguments != self._found
            or (self._text is not None and repr(arguments) != self._text)
        ):
            return None
        read = inputs
        if own and keep is not None:
            kept: list[Any] = list(inputs)
            for index in own:
                if type(kept[index]) not in PLAIN:
                    return None
                kept[index] = keep(kept[index])
            inputs = tuple(kept)
        if len(set(map(id, inputs))) != len(inputs):
            return None
        if not all(map(isinstance, inputs, repeat(Packed))):
            return None
        if tuple(map(facts_of, inputs)) != self._facts:
            return None
        if not (self._repeated or self._looks or self._constants):  # as most
            return inputs, ()
        for place, index in self._repeated:
            if found[place] is not read[index]:
                return None
        constants = self._read_constants(nodes, found, nbytes, hold)
        return None if constants is None else (inputs, constants)

    def _read_constants(
        self,
        nodes: Sequence[Any],
        found: tuple[Any, ...],
        nbytes: int,
        hold: HoldLeaf | None,
    ) -> tuple[Constant, ...] | None:
        # None: a look differs, or an object is no constant.
        for look, read in self._looks:
            if look(nodes[read.node], read.name) != read.found:
                return None
        constants: list[Constant] = []
        for read, slot in self._constants:
            if read.what is What.CAST:
                if hold is None:
                    return None
                cast, dtype = nodes[read.name], read.found
                assert isinstance(dtype, torch.dtype)  # see `Read`
                constants.append(held_leaf(nodes[read.node].variable, cast, dtype, hold))
            elif slot is None:
                constants.append(leaf(nodes[read.node].variable, nbytes))
            elif isinstance(found[slot], Packed):
                return None
            else:
                constants.append(constant(found[slot]))
        return tuple(constants)


def _by_node(reads: Sequence[Read], n_nodes: int) -> tuple[list[_Node], dict[int, int]]:
    # The nodes in the order of their numbers, and by read its place among all attributes.
    edges: list[list[_Edge]] = [[] for _ in range(n_nodes)]
    attributes: list[list[tuple[int, str]]] = [[] for _ in range(n_nodes)]
    below = 0
    for i, (what, node, name, found) in enumerate(reads):
        if what is What.BELOW:
            below += 1
            edges[node].append(_Edge(name, below, found))  # type: ignore[arg-type] # see `Read`
        elif what in _IN_SLOTS:
            attributes[node].append((i, f"{name}.data"))
        elif what is What.ARGUMENT:
            attributes[node].append((i, name))
    nodes: list[_Node] = []
    places: dict[int, int] = {}
    n_places = 0
    for number in range(n_nodes):
        names = [_BELOW] if edges[number] else []
        for i, name in attributes[number]:
            places[i] = n_places + len(names)
            names.append(name)
        if names:
            slots = [reads[i] for i, _ in attributes[number] if reads[i].what is What.INPUT]
            nodes.append(_node(number, names, edges[number], slots))
        n_places += len(names)
        n_places += len(names) == 1  # see `_getter`
    return nodes, places


def _node(number: int, names: list[str], edges: list[_Edge], slots: list[Read]) -> _Node:
    # Args: names: of all attributes; slots: reads of inputs.
    own = {f"{slot.name}.data": saved_name(slot.name) for slot in slots}
    hook = getter(f"{slots[0].name}.unpack_hook") if slots else None
    get_own = _getter([own.get(name, name) for name in names])
    inputs = tuple(dict.fromkeys(_pair(slot)[1] for slot in slots))
    return _Node(number, _getter(names), tuple(edges), hook, get_own, inputs)


def _getter(names: list[str]) -> _Get:
    # Of a single name, the getter would return no tuple.
    names = names if len(names) > 1 else 2 * names
    if not any("[" in name for name in names):
        return attrgetter(*names)
    getters = [getter(name) for name in names]
    return lambda node: tuple([get(node) for get in getters])


def _pair(read: Read) -> tuple[tuple[int, int], int]:
    # Of an input: its facts and its index.
    facts, index = read.found  # type: ignore[misc] # see `Read`
    return facts, index  # type: ignore[has-type]


def _items(places: list[int]) -> _Get:
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def _may_be_zero(value: object) -> bool:
    return isinstance(value, complex) or (isinstance(value, float) and not value)
