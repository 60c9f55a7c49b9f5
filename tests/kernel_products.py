"""The products that a traced kernel has in flight: what may be read, written and released when.

Pallas' interpreter runs another program than the GPU does: it knows no operands in registers, and
multiplies at once. Here the very program that is compiled (a jaxpr) is stepped through, one
warpgroup of one thread block at a time. Scalars have their values, so that loops, conditions and
places in shared memory are those of the run; arrays are left out. Products are over in the order in
which they were started, and `wgmma_wait(n)` leaves the last n. `check` raises Early where

    an accumulator is read or stored, and a product into it is in flight;
    shared memory is stored or loaded, and a product in flight reads it;
    a buffer of a ring is released, and a product in flight reads it;
    a product reads shared memory that this warpgroup stored and has not committed;
    a kernel ends, and a product is in flight.

Which buffers a barrier releases is read off the producer: those that it loads after it has waited
there. Barriers are not waited for: tests of the interpreter show that those waits suffice.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.core import UnswizzleRef, UntilingTransform
from jax._src.state.indexing import NDIndexer, Slice
from jax._src.state.types import AbstractRef, TransposeTransform

UNKNOWN = object()  # an array, or a number that depends on one
Box = tuple[tuple[int, int], ...]  # first and past the last, of each dimension
STEPS = 1_000_000  # of a loop: more is a loop that does not end
SCALARS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": lambda a, b: np.int32(math.trunc(int(a) / int(b))),
    "rem": lambda a, b: np.int32(math.fmod(int(a), int(b))),
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "not": lambda a: ~a,
    "sign": np.sign,
    "select_n": lambda which, *cases: cases[int(which)],
    "multiple_of": lambda a: a,
    "squeeze": lambda a: np.reshape(a, ()),
    "copy": lambda a: a,
}


class Early(AssertionError):
    """What is done before a product is over."""


@dataclasses.dataclass(frozen=True)
class Ref:
    """Memory of a kernel. number: of its allocation. data: in global memory, if known."""

    number: int
    shape: tuple[int, ...]
    data: Any = dataclasses.field(default=None, compare=False, hash=False)


@dataclasses.dataclass(frozen=True)
class Place:
    """A part of a memory."""

    ref: Ref
    box: Box

    def overlaps(self, other: "Place") -> bool:
        """Whether they share an element."""
        return self.ref == other.ref and all(
            a < d and c < b for (a, b), (c, d) in zip(self.box, other.box, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class Product:
    """A wgmma: its accumulator, and what it reads of shared memory."""

    accumulator: Ref
    reads: tuple[Place, ...]


class Warpgroup:
    """Steps through a kernel's body for one warpgroup of one thread block."""

    def __init__(self, axes: dict[str, int], guarded: dict[Place, set[Place]] | None):
        """guarded: of each barrier, the buffers that it releases; None: this one finds them out."""
        self.axes, self.guarded = axes, guarded
        self.numbers = itertools.count()
        self.flying: collections.deque[Product] = collections.deque()
        self.stored: list[Place] = []  # and not committed
        self.started = 0
        self.loads: dict[Place, set[Place]] = {}
        self.waited: Place | None = None

    def run(self, jaxpr: Any, inputs: Sequence[Any]) -> None:
        """inputs: of the kernel, arrays or UNKNOWN. Raises: Early."""
        refs = [
            Ref(next(self.numbers), tuple(v.aval.shape), value)
            for v, value in itertools.zip_longest(jaxpr.invars, inputs)
        ]
        self._eval(jaxpr, (), refs)
        self._still(lambda product: True, "the kernel ends")

    def _still(self, wrong: Callable[[Product], bool], what: str) -> None:
        for age, product in enumerate(reversed(self.flying)):
            if wrong(product):
                raise Early(f"{what}, and a product is in flight, {age} after it; {self.axes}")

    def _wait(self, n: int | None) -> None:
        while n is not None and len(self.flying) > n:
            self.flying.popleft()

    def _eval(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if hasattr(atom, "val") else env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            name = eqn.primitive.name.removesuffix("_p")
            do = getattr(self, f"_{name}", None)
            if do is not None:
                results = do(eqn, *operands)
            else:
                results = self._scalar(eqn, operands)
            for variable, value in zip(eqn.outvars, results, strict=True):
                env[variable] = value
        return [read(atom) for atom in jaxpr.outvars]

    def _scalar(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name, outs = eqn.primitive.name, [v.aval for v in eqn.outvars]
        if any(isinstance(x, Ref) for x in operands) and outs and name not in ("load",):
            raise NotImplementedError(f"{name} of memory")
        unknown = any(x is UNKNOWN or isinstance(x, Ref) or np.ndim(x) for x in operands)
        if unknown or any(getattr(aval, "shape", ()) for aval in outs):
            return [UNKNOWN] * len(outs)
        if name == "convert_element_type":
            return [np.asarray(operands[0]).astype(outs[0].dtype)]
        if name == "optimization_barrier":
            return operands
        if name in SCALARS:
            return [SCALARS[name](*operands)]
        if not outs:
            return []
        return [UNKNOWN] * len(outs)

    # ---- control

    def _jit(self, eqn: Any, *operands: Any) -> list[Any]:
        return self._eval(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, operands)

    def _cond(self, eqn: Any, index: Any, *operands: Any) -> list[Any]:
        branch = eqn.params["branches"][int(index)]
        return self._eval(branch.jaxpr, branch.consts, operands)

    def _while(self, eqn: Any, *operands: Any) -> list[Any]:
        p = eqn.params
        split = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        test, body, carry = (
            operands[: split[0]],
            operands[split[0] : split[1]],
            operands[split[1] :],
        )
        for _ in range(STEPS):
            condition, todo = p["cond_jaxpr"], p["body_jaxpr"]
            if not self._eval(condition.jaxpr, condition.consts, [*test, *carry])[0]:
                return list(carry)
            carry = self._eval(todo.jaxpr, todo.consts, [*body, *carry])
        raise Early(f"a loop of more than {STEPS} steps; {self.axes}")

    def _scan(self, eqn: Any, *operands: Any) -> list[Any]:
        p = eqn.params
        consts, carry, over = (len(group) for group in p["ft_in"].unpack())
        if over or len(eqn.outvars) > carry:
            raise NotImplementedError("a scan over arrays")
        values = list(operands[consts:])
        for _ in range(p["length"]):
            values = self._eval(p["jaxpr"].jaxpr, p["jaxpr"].consts, [*operands[:consts], *values])
        return values

    def _run_scoped(self, eqn: Any, *consts: Any) -> list[Any]:
        jaxpr = eqn.params["jaxpr"]
        made = [Ref(next(self.numbers), tuple(v.aval.shape)) for v in jaxpr.invars]
        return self._eval(jaxpr, consts, made)

    def _run_state(self, eqn: Any, *operands: Any) -> list[Any]:
        jaxpr = eqn.params["jaxpr"]
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        refs = [
            x if isinstance(x, Ref) else Ref(next(self.numbers), tuple(v.aval.shape), x)
            for v, x in zip(jaxpr.invars, operands, strict=True)
        ]
        self._eval(jaxpr, (), refs)
        self._wait(0)  # implied
        # Scalars are those that the body closes over.
        return [x if isinstance(x, Ref) or np.shape(x) == () else UNKNOWN for x in operands]

    def _axis_index(self, eqn: Any) -> list[Any]:
        return [np.int32(self.axes[eqn.params["axis_name"]])]

    # ---- memory

    def _place(self, ref: Ref, transforms: Any) -> Place:
        box, dimensions = [(0, n) for n in ref.shape], list(range(len(ref.shape)))
        for transform in transforms or ():
            if isinstance(transform, NDIndexer):
                left = []
                for dimension, index in zip(dimensions, transform.indices, strict=True):
                    first = box[dimension][0]
                    if isinstance(index, Slice):
                        first += int(index.start)
                        box[dimension] = (first, first + index.size)
                        left.append(dimension)
                    else:
                        box[dimension] = (first + int(index), first + int(index) + 1)
                dimensions = left
            elif isinstance(transform, UntilingTransform):  # of all of it
                rank = len(transform.tiling)
                tiles, tile = box[-2 * rank : -rank], box[-rank:]
                box[-2 * rank :] = [(0, n * m) for (_, n), (_, m) in zip(tiles, tile, strict=True)]
                dimensions = list(range(len(box)))
            elif isinstance(transform, TransposeTransform):
                dimensions = [dimensions[i] for i in transform.permutation]
            elif not isinstance(transform, UnswizzleRef):
                raise NotImplementedError(f"{transform} of memory")
        return Place(ref, tuple(box))

    def _parts(self, refs: Sequence[Any], trees: Sequence[Any], leaves: Sequence[Any]) -> Iterator:
        """The parts of several references, their transforms one after the other."""
        at = 0
        for ref, tree in zip(refs, trees, strict=True):
            count = 0 if tree is None else tree.num_leaves
            transforms = None if tree is None else tree.unflatten(leaves[at : at + count])
            at += count
            yield self._place(ref, transforms) if isinstance(ref, Ref) else None

    def _get(self, eqn: Any, ref: Ref, *leaves: Any) -> list[Any]:
        aval = eqn.outvars[0].aval
        if ref.data is None or ref.data is UNKNOWN or aval.shape:
            return [UNKNOWN]
        (part,) = self._parts([ref], [eqn.params["tree"]], leaves)
        return [np.asarray(ref.data)[tuple(first for first, _ in part.box)]]

    def _swap(self, eqn: Any, ref: Ref, _: Any, *leaves: Any) -> list[Any]:
        (part,) = self._parts([ref], [eqn.params["tree"]], leaves)
        self._write(part)
        self.stored.append(part)
        return [UNKNOWN]

    def _commit_smem(self, eqn: Any) -> list[Any]:
        self.stored.clear()
        return []

    def _write(self, part: Place) -> None:
        self._still(lambda product: any(part.overlaps(x) for x in product.reads), "a store")

    def _copy_gmem_to_smem(self, eqn: Any, source: Ref, target: Ref, *operands: Any) -> list[Any]:
        p = eqn.params
        count = int(p["has_barrier"])
        trees = [p[f"{x}_transforms_treedef"] for x in ("src", "dst")]
        _, part = self._parts([source, target], trees, operands[count:])
        self._write(part)
        if self.waited is not None:
            self.loads.setdefault(self.waited, set()).add(part)
        return []

    def _barrier(self, eqn: Any, ref: Ref, leaves: Any) -> Place:
        (part,) = self._parts([ref], [eqn.params["transforms_treedef"]], leaves)
        return part

    def _barrier_wait(self, eqn: Any, ref: Ref, *leaves: Any) -> list[Any]:
        self.waited = self._barrier(eqn, ref, leaves)
        return []

    def _barrier_arrive(self, eqn: Any, ref: Ref, *leaves: Any) -> list[Any]:
        barrier = self._barrier(eqn, ref, leaves)
        free = (self.guarded or {}).get(barrier, ())
        self._still(
            lambda product: any(part.overlaps(x) for part in free for x in product.reads),
            "a buffer is released",
        )
        return []

    # ---- products

    def _wgmma_ref(self, eqn: Any, acc: Ref, a: Any, b: Any, *leaves: Any) -> list[Any]:
        trees = [eqn.params[f"{x}_transforms_tree"] for x in ("acc", "a", "b")]
        _, *reads = self._parts([acc, a, b], trees, leaves)
        if any(x.overlaps(y) for x in reads if x is not None for y in self.stored):
            raise Early(f"a product reads what is stored and not committed; {self.axes}")
        self.flying.append(Product(acc, tuple(x for x in reads if x is not None)))
        self.started += 1
        return []

    def _wgmma_wait(self, eqn: Any) -> list[Any]:
        self._wait(eqn.params["n"])
        return []

    def _wgmma_accumulator_deref(self, eqn: Any, acc: Ref) -> list[Any]:
        self._wait(eqn.params["wait_n"])
        self._still(lambda product: product.accumulator == acc, "an accumulator is read")
        return [UNKNOWN]

    def _wgmma_accumulator_store(self, eqn: Any, acc: Ref, _: Any) -> list[Any]:
        self._still(lambda product: product.accumulator == acc, "an accumulator is stored")
        return [UNKNOWN] * len(eqn.outvars)


def _calls(inner: Any) -> bool:
    """Whether a parameter of an equation is a program that calls a kernel."""
    eqns = getattr(getattr(inner, "jaxpr", None), "eqns", ())
    return any(e.primitive.name == "mpmd_map" or any(map(_calls, e.params.values())) for e in eqns)


def _array(x: Any) -> bool:
    """Not so: what a kernel makes, and references."""
    return x is not UNKNOWN and not isinstance(jax.typeof(x), AbstractRef)


def kernels(function: Callable[..., Any], *args: Any) -> list[tuple[Any, list[Any]]]:
    """Returns each kernel that a function calls: (its equation, the arrays that it is given).

    UNKNOWN stands for the others.
    """
    closed, calls = jax.make_jaxpr(function)(*args), []

    def inputs(*flat: Any) -> list[list[Any]]:
        call_inputs: list[list[Any]] = []

        def evaluate(jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
            env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
            for eqn in jaxpr.eqns:
                values = [x.val if hasattr(x, "val") else env[x] for x in eqn.invars]
                outputs: Any = [UNKNOWN] * len(eqn.outvars)
                if eqn.primitive.name == "mpmd_map":
                    calls.append(eqn)
                    call_inputs.append([x if _array(x) else None for x in values])
                elif inner := [x for x in eqn.params.values() if _calls(x)]:
                    outputs = evaluate(inner[0].jaxpr, inner[0].consts, values)
                elif not any(x is UNKNOWN for x in values):
                    outputs = eqn.primitive.bind(*values, **eqn.params)
                    outputs = outputs if eqn.primitive.multiple_results else [outputs]
                env |= zip(eqn.outvars, outputs, strict=True)
            return [x.val if hasattr(x, "val") else env[x] for x in jaxpr.outvars]

        evaluate(closed.jaxpr, closed.consts, flat)
        return call_inputs

    arrays = jax.device_get(jax.jit(inputs)(*jax.tree.leaves(args)))
    known = [[UNKNOWN if x is None else x for x in row] for row in arrays]
    return list(zip(calls, known, strict=True))


def check(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """Steps through all that a function's kernels do.

    Returns: the number of products of each kernel. Raises: Early.
    """
    counts: dict[str, int] = {}
    for eqn, inputs in kernels(function, *args):
        (jaxpr,), (mesh,) = eqn.params["jaxprs"], eqn.params["meshes"]
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        total = 0
        names = (*mesh.grid_names, *mesh.cluster_names)
        for index in itertools.product(*map(range, (*mesh.grid, *mesh.cluster))):
            axes = dict(zip(names, index, strict=True))
            *compute, produce = (axes | {mesh.thread_name: t} for t in range(mesh.num_threads))
            producer = Warpgroup(produce, None)
            producer.run(jaxpr, inputs)
            for one in compute:
                warpgroup = Warpgroup(one, producer.loads)
                warpgroup.run(jaxpr, inputs)
                total += warpgroup.started
        counts[eqn.params["name"]] = total
    return counts
