"""Reads a launched instruction as a region: the operations inside it, and the bytes that it moves.

The region of a fusion has all operations of its computation; the region of any other instruction
has one operation. Operations are visited from the result backwards, operands in their order; the
operands of a commuting operation such as add are sorted by their structure. So neither names nor
the order of independent lines changes a record.

Bytes are counted by demand, from the result backwards: an operation needs as many elements of each
operand as its own demanded elements are computed from. A slice needs its part only. An operation
that updates a parameter in place needs nothing of it and writes the updated part only.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megajax.cost import program_calls as calls
from megajax.cost import program_work as work
from megajax.cost.hlo_module import Module
from megajax.cost.hlo_text import Array, Instruction
from megajax.cost.record import TRANSCENDENTAL, digest

_STRUCTURE = re.compile(
    r"\b(dimensions|window|dim_labels|\w+_dims|slice_sizes|dynamic_slice_sizes|padding|"
    r"feature_group_count|batch_group_count|index_vector_dim|operand_precision|algorithm|"
    r"is_stable|custom_call_target)=(\{[^{}]*\}|[^\s,]+)"
)
PASS = ("bitcast", "get-tuple-element", "opt-barrier", "optimization-barrier")


@dataclasses.dataclass(frozen=True)
class Region:
    """The operations of a launched instruction, by name, parameters included.

    root: the operation whose result is that of the instruction. module: the module it is from.
    """

    instructions: Mapping[str, Instruction]
    root: Instruction
    module: Module

    def array(self, name: str) -> Array:
        """Returns the (first) array that an operation makes."""
        return self.instructions[name].array

    def operands(self, one: Instruction) -> list[Array]:
        """Returns the arrays of an operation's operands."""
        return [self.array(name) for name in one.operands if name in self.instructions]

    def source(self, name: str) -> Instruction:
        """Returns the operation that computes a value, behind bitcasts and elements of tuples."""
        one = self.instructions[name]
        while one.opcode in PASS and one.operands and one.operands[0] in self.instructions:
            one = self.instructions[one.operands[0]]
        return one

    def body(self, one: Instruction) -> Mapping[str, Instruction]:
        """Returns the computation that a reduction or a scatter calls."""
        return self.module.instructions(one.called[0]) if one.called else {}

    @functools.cached_property
    def outputs(self) -> list[Instruction]:
        """The operations that write memory, each once, in the order of the results."""
        names = self.root.operands if self.root.opcode == "tuple" else (self.root.name,)
        found = [self.source(name) for name in names if name in self.instructions]
        return list({one.name: one for one in found or [self.root]}.values())

    @functools.cached_property
    def in_place(self) -> frozenset[str]:
        """Names of updates and scatters into a parameter, which write only their part."""
        return frozenset(
            one.name
            for one in self.outputs
            if one.opcode in ("dynamic-update-slice", "scatter")
            and one.operands[0] in self.instructions
            and self.source(one.operands[0]).opcode == "parameter"
        )

    @functools.cached_property
    def launches(self) -> dict[str, calls.Call]:
        """{name of a call of a library or kernel: what is known of its work}."""
        return {
            one.name: calls.call(one, self.instructions)
            for one in self.order
            if one.opcode == "custom-call"
        }

    @functools.cached_property
    def kernel(self) -> tuple[str, calls.Call] | None:
        """(name, work) of the first call whose own text says how much it reads; None: none does."""
        told = ((n, c) for n, c in self.launches.items() if c.bytes_read is not None)
        return next(told, None)

    @functools.cached_property
    def _keys(self) -> dict[str, str]:
        keys: dict[str, str] = {}
        for one in self.instructions.values():
            below = [keys.get(name, "") for name in one.operands]
            below = sorted(below) if _is_unordered(one, self) else below
            keys[one.name] = digest((label(one, self.body(one)), *below))
        return keys

    @functools.cached_property
    def _ranks(self) -> dict[str, tuple[str, str]]:
        """The key of each operation, and after it what becomes of its result.

        The second tells apart operands of equal structure that other operations use differently.
        """
        uses: dict[str, list[str]] = {name: [] for name in self.instructions}
        ranks: dict[str, tuple[str, str]] = {}
        for one in reversed(list(self.instructions.values())):
            above = digest(sorted(uses[one.name]))
            ranks[one.name] = self._keys[one.name], above
            ordered = not _is_unordered(one, self)
            for place, name in enumerate(one.operands):
                if name in uses:
                    uses[name].append(
                        digest((label(one, self.body(one)), str(place * ordered), above))
                    )
        return ranks

    @functools.cached_property
    def order(self) -> list[Instruction]:
        """The operations, operands before what uses them."""
        found: list[Instruction] = []
        seen: set[str] = set()
        stack = [(self.root.name, False)]
        while stack:
            name, done = stack.pop()
            if done:
                found.append(self.instructions[name])
            elif name not in seen and name in self.instructions:
                seen.add(name)
                stack.append((name, True))
                one = self.instructions[name]
                names = [n for n in one.operands if n in self.instructions]
                if _is_unordered(one, self):
                    names.sort(key=self._ranks.__getitem__)
                stack += [(n, False) for n in reversed(names)]
        return found

    @functools.cached_property
    def structure(self) -> str:
        """A text of the operations and the edges between them."""
        places = {one.name: i for i, one in enumerate(self.order)}
        lines = []
        for one in self.order:
            at = [places[n] for n in one.operands if n in places]
            at = sorted(at) if _is_unordered(one, self) else at
            lines.append(f"{label(one, self.body(one))}{at}")
        return "\n".join(lines)

    @functools.cached_property
    def demand(self) -> dict[str, float]:
        """Elements of each operation's result that are computed, or read if a parameter's."""
        found = dict.fromkeys((one.name for one in self.order), 0.0)
        for one in self.outputs:
            found[one.name] = one.array.elements
        if self.root.name in found and self.root.opcode != "tuple":
            found[self.root.name] = self.root.array.elements
        for one in reversed(self.order):
            for place, name in enumerate(one.operands):
                if name in found:
                    more = found[name] + self._asks(one, place, found[one.name])
                    found[name] = min(more, self.array(name).elements)
        return found

    def _asks(self, one: Instruction, place: int, elements: float) -> float:
        """Returns the elements of an operand that so many elements of a result need."""
        operand, code = self.array(one.operands[place]), one.opcode
        size, result = operand.elements, max(one.array.elements, 1)
        if code in ("tuple", "get-tuple-element"):
            return size
        if code in ("slice", "dynamic-slice", "gather", "pad", "broadcast"):
            return min(size, elements) if place == 0 else size
        if code == "dynamic-update-slice":
            update = self.array(one.operands[1]).elements
            if place == 0:
                return 0 if one.name in self.in_place else max(elements - update, 0)
            return size
        if code == "scatter" and place == 0 and one.name in self.in_place:
            combines = any(work.class_of(i) != "other" for i in self.body(one).values()
                           if i.opcode not in work.FREE)  # fmt: skip
            return min(size, self.array(one.operands[-1]).elements) if combines else 0
        if size == result:
            return elements
        return size * min(elements / result, 1)

    def written(self, one: Instruction) -> float:
        """Returns the bytes that an output writes."""
        call = self.launches.get(one.name)
        if call is not None and call.bytes_written is not None:
            return call.bytes_written
        if one.name not in self.in_place:
            return sum(array.nbytes for array in one.arrays)
        part = one.operands[1] if one.opcode == "dynamic-update-slice" else one.operands[-1]
        return min(self.array(part).nbytes, one.array.nbytes)


def region(module: Module, one: Instruction, around: Mapping[str, Instruction]) -> Region:
    """Returns the region of an instruction of a computation."""
    if one.opcode in ("fusion", "fusion-start") and one.called:
        inside = {n: calls.as_dot(i) for n, i in module.instructions(one.called[0]).items()}
        root = next((i for i in inside.values() if i.is_root), None)
        if root is not None:
            return Region(inside, root, module)
    given = {
        name: dataclasses.replace(around[name], opcode="parameter", arguments="")
        for name in one.operands
        if name in around
    }
    one = calls.as_dot(one)
    return Region({**given, one.name: one}, one, module)


def label(one: Instruction, body: Mapping[str, Instruction]) -> str:
    """Returns a text of an operation's opcode, shapes and attributes, without any names."""
    shape = "".join(map(str, one.arrays))
    if one.opcode in ("parameter", "constant"):
        return f"{one.opcode} {shape}"
    attributes = one.attributes.split(", metadata=")[0]
    words = [f"{name}={value}" for name, value in _STRUCTURE.findall(attributes)]
    inner = sorted(i.opcode for i in body.values() if i.opcode not in work.FREE)
    return " ".join((one.opcode, shape, *words, *inner))


def leaves(found: Region) -> list[Any]:
    """Returns the children of the root of a region's tree: a mapping an operation."""
    reads = {one.name: read for one in found.order if (read := bytes_read(found, one))}
    writes = {one.name: found.written(one) for one in found.outputs}
    nodes: list[Any] = []
    for one in found.order:
        if one.opcode in work.FREE:
            continue
        here = {found.source(n).name for n in one.operands if n in found.instructions}
        leaf = _leaf(found, one)
        leaf["bytes_read"] = sum(reads.pop(name, 0.0) for name in sorted(here))
        leaf["bytes_written"] = writes.get(one.name, 0.0)
        if found.kernel is not None:
            told, count = found.kernel
            mine = one.name == told
            leaf["bytes_read"] = count.bytes_read if mine else 0.0
            leaf["bytes_written"] = count.bytes_written if mine else 0.0
        nodes.append(leaf)
        inner = [i for i in found.body(one).values() if i.opcode not in work.FREE]
        if len(inner) > 1 or one.opcode == "sort":
            nodes.append([{"opcode": work.class_of(i), "itemsize": i.array.itemsize}
                          for i in sorted(inner, key=lambda i: label(i, {}))])  # fmt: skip
    return nodes


def bytes_read(found: Region, one: Instruction) -> float:
    """Returns the bytes of a parameter that are read, 0 of other operations."""
    if one.opcode != "parameter":
        return 0.0
    if len(one.arrays) != 1:
        return sum(array.nbytes for array in one.arrays)
    return found.demand[one.name] * one.array.itemsize


def product_of(one: Instruction, operands: Sequence[Array]) -> work.Product | None:
    """Returns the product of a dot or a convolution."""
    if len(operands) > 1 and one.opcode in ("dot", "ragged-dot"):
        return work.dot(one, operands)
    if len(operands) > 1 and one.opcode == "convolution":
        return work.convolution(one, operands[0], operands[1], one.array)[0]
    return None


def _leaf(found: Region, one: Instruction) -> dict[str, Any]:
    operands, kind = found.operands(one), work.class_of(one)
    call = found.launches.get(one.name)
    elements = found.demand[one.name]
    share = elements / max(one.array.elements, 1)
    product = product_of(one, operands)
    if kind == "copy" and operands and operands[0].layout != one.array.layout:
        kind = "transpose"
    width = float(one.array.minor)
    if product is not None:
        width = product.k
    elif kind == "reduce" and operands:
        width = max(operands[0].elements / max(one.array.elements, 1), 1)
    flops = work.flops_of(one, operands, found.body(one), share) if operands else 0.0
    special = elements * (kind in TRANSCENDENTAL)
    if call is not None:
        kind, flops, special, product = call.opcode, call.flops, call.transcendentals, call.product
    shape = {} if product is None else dataclasses.asdict(product)
    return {
        "opcode": kind,
        "flops": flops,
        "transcendentals": special,
        "elements": elements,
        "width": width,
        **shape,
        "indices": work.gathered(one, operands),
        "operands": len(one.operands),
        "itemsize": one.array.itemsize,
    }


def _is_unordered(one: Instruction, within: Region) -> bool:
    """Whether the order of the operands is irrelevant: commuting operations, tuples of results."""
    return one.opcode in work.COMMUTES or (one.opcode == "tuple" and one is within.root)
