"""A weight that is no array, and a stack of layers that are not alike.

A leaf of the parameters is an array, or a `PackedWeight` that stands for one: packed tiles
(layers/sparse.py), a matrix in few bits (quant/kernel.py). The seams of layers/ops.py and parallel/
look at the leaf's type; a new type implements `astype` and `matmul`, and inherits how it rests on a
mesh:

    dense (D, F), cut over tensor     packed: every array of it is (pieces, ...), a piece a rank

So a piece is packed by itself, from the slice that a tensor rank multiplies, and no collective has
to cut through a format. Axes that share a gradient (ZeRO) hold copies: a packed weight is small.

A `LowRank` is a weight with a low-rank sum beside it. Its arrays are ordinary leaves with words of
their own, so storage, exchanges and checkpoints treat them as any parameter.

Layers whose leaves differ in type or shape cannot be one stack: `LayerRuns` has a stack for each
run of layers that are alike.

Legend: D model width, F any hidden width, R rank.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from megajax.core.errors import UserError
from megajax.core.layout import Words
from megajax.core.tree import Tree

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class PackedWeight(abc.ABC):
    """Base of weights that are no array. A subclass is a frozen dataclass, registered as a pytree.

    Its arrays begin with a dimension of pieces, after that of the layers where they are stacked; a
    piece (`piece`) lacks it. shape: static, of the dense array that a piece stands for: (D, ...) of
    an input's weight, (..., D) of an output's.
    """

    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @abc.abstractmethod
    def astype(self, dtype: Any) -> Self:
        """Returns the weight in the form that products with inputs of this type use."""

    @abc.abstractmethod
    def matmul(
        self,
        x: Array,
        contract: int = 1,
        *,
        bias: Array | None = None,
        activation: str | None = None,
    ) -> Array:
        """activation(x w + bias) of a piece, on local arrays: layers.ops.matmul's contract.

        bias: of shape[contract:], one dimension. Returns: x's type; differentiable in x and in the
        floating arrays of the weight.
        """

    def join(self, others: "Sequence[PackedWeight]") -> "PackedWeight | None":
        """Returns one weight (D, all columns): this weight's columns, then those of other weights
        of the same input. None: their formats cannot be joined."""
        del others
        return None

    @property
    def ndim(self) -> int:
        """Dimensions of the dense array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements of a piece's dense array."""
        return math.prod(self.shape)

    @staticmethod
    def words(axes: Words) -> Words:
        """Returns the logical words of the first dimensions of all its arrays, that of the pieces
        last. axes: of the dense leaf, its stack of layers included."""
        stack = axes[: axes.count("layers")]
        return (*stack, cut_word(axes))

    def piece(self) -> Self:
        """Returns the only piece that is here. Raises: UserError where there are several."""
        pieces = jax.tree.leaves(self)[0].shape[0]
        if pieces != 1:
            raise UserError(
                f"a weight was packed in {pieces} pieces, and one rank has all of them: pack it "
                "for this mesh, as systems.prune_export.to_tiles(..., layout=) does"
            )
        return jax.tree.map(lambda x: x[0], self)


def cut_word(axes: Words) -> str:
    """Returns the word of a matrix's dimension that tensor parallelism cuts: the one beside the
    model's width."""
    return next(w for w in axes if w not in (None, "embed", "layers"))


RANK = "rank"  # the word of a low-rank sum's inner dimension, which no mesh axis cuts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank:
    """base + a b scale: a weight, and what is added to it (LoRA, arXiv 2106.09685, section 4.1).

    Not a PackedWeight, whose arrays are all cut into the pieces of tensor ranks: of an input's
    weight b is cut and a is not, of an output's weight a is cut and b is not. Each of the three has
    words of its own instead (`words`), and a tree of words has a LowRank of words in its place.

    base: an array or a PackedWeight, with dimensions of the inputs, then of the outputs. a: (...
    inputs, R). b: (R, ... outputs). Stacked layers are the first dimension of all. scale: static.
    rows: which of the R each row of x multiplies, bool (... rows of x, R), where one weight serves
    several adapters (serving/adapters.py); None: all.
    """

    base: Any
    a: Any
    b: Any
    scale: float = dataclasses.field(metadata={"static": True})
    rows: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense array, of one layer."""
        return (*self.a.shape[:-1], *self.b.shape[1:])

    @property
    def ndim(self) -> int:
        """Dimensions of the dense array, of one layer."""
        return self.a.ndim + self.b.ndim - 2

    @property
    def size(self) -> int:
        """Elements of the dense array, of one layer."""
        return math.prod(self.shape)

    def astype(self, dtype: Any) -> Self:
        """Returns the weight in the form that products with inputs of this type use."""
        base, a, b = (x.astype(dtype) for x in (self.base, self.a, self.b))
        return dataclasses.replace(self, base=base, a=a, b=b)

    def words(self, axes: Words) -> Self:
        """Returns the words of each array. axes: of the dense leaf, its layers included."""
        n = axes.count("layers")
        stack, inner = axes[:n], axes[n:]
        inputs = 1 if inner[0] == "embed" else len(inner) - 1
        return dataclasses.replace(
            self,
            base=self.base.words(axes) if isinstance(self.base, PackedWeight) else axes,
            a=(*stack, *inner[:inputs], RANK),
            b=(*stack, RANK, *inner[inputs:]),
        )

    def add(self, y: Array, x: Array, contract: int, product: Callable[..., Array]) -> Array:
        """Returns y + (x a) b scale of local arrays, in y's type. y: x base. product: as
        `Ops.matmul` multiplies arrays."""
        inner = product(x, self.a.astype(x.dtype), contract)
        if self.rows is not None:
            inner = jnp.where(self.rows, inner, 0)
        return y + (product(inner, self.b.astype(x.dtype)) * self.scale).astype(y.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerRuns:
    """The layers of a model in runs: a stack each, in the place of the one stack of all.

    stacks: trees whose leaves have the layers of the run first. starts: the number of each run's
    first layer, from 0 up; static. layers: of all runs.
    """

    stacks: tuple[Tree, ...]
    starts: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    layers: int = dataclasses.field(metadata={"static": True})

    @property
    def stops(self) -> tuple[int, ...]:
        """The number behind each run's last layer."""
        return (*self.starts[1:], self.layers)

    def of(self, layer: int) -> Tree:
        """Returns the leaves of one layer."""
        run = max(i for i, start in enumerate(self.starts) if start <= layer)
        return jax.tree.map(lambda x: x[layer - self.starts[run]], self.stacks[run])


def runs_of(stack: Tree, layers: int) -> LayerRuns:
    """Returns a stack of layers as runs: as it is, or as the only one."""
    return stack if isinstance(stack, LayerRuns) else LayerRuns((stack,), (0,), layers)


def split_runs(stack: Tree, layers: int, starts: Sequence[int]) -> LayerRuns:
    """Returns a stack of layers, or runs of them, as runs that begin at these layers too."""
    runs = runs_of(stack, layers)
    firsts = tuple(sorted({*runs.starts, *starts}))
    if firsts == runs.starts:
        return runs
    bounds = zip(firsts, (*firsts[1:], layers), strict=True)
    return LayerRuns(tuple(slice_layers(stack, a, b) for a, b in bounds), firsts, layers)


def map_runs(function: Callable[..., Any], stack: Tree) -> Tree:
    """Returns function(stack), or the runs of function(stack of each run)."""
    if not isinstance(stack, LayerRuns):
        return function(stack)
    return dataclasses.replace(stack, stacks=tuple(function(run) for run in stack.stacks))


def each_alone(
    stack: Tree, layers: int, finish: Callable[[Tree], Tree] = lambda layer: layer
) -> LayerRuns:
    """Returns finish(the same layers), each a run of its own with arrays of its own.

    A loop over a stack copies each layer's weights before it multiplies by them, on a GPU at least
    (XLA of jaxlib 0.11.2: 1.1 of the 4.2 ms that an H200 computed for a token of a 1.2B decoder).
    A program over single layers reads them where they are, and has each layer in it.
    """
    runs = runs_of(stack, layers)

    @jax.jit
    def one(x: Array, layer: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, layer, 1)

    each = []
    for run, start, stop in zip(runs.stacks, runs.starts, runs.stops, strict=True):
        for i in range(stop - start):  # one after the other, for `finish` may need memory
            each.append(finish(jax.tree.map(functools.partial(one, layer=i), run)))
    return LayerRuns(tuple(each), tuple(range(layers)), layers)


def slice_layers(stack: Tree, start: int, stop: int) -> Tree:
    """Returns the layers from `start` on and before `stop`: a stack where they are alike, or runs
    numbered from 0. stack: of all layers, or LayerRuns."""
    if not isinstance(stack, LayerRuns):
        return jax.tree.map(lambda x: x[start:stop], stack)
    cut = []
    for run, first, last in zip(stack.stacks, stack.starts, stack.stops, strict=True):
        a, b = max(start, first), min(stop, last)
        if a < b:
            cut.append((a - start, slice_layers(run, a - first, b - first)))
    if len(cut) == 1:
        return cut[0][1]
    starts, stacks = zip(*cut, strict=True)
    return LayerRuns(stacks, starts, stop - start)
