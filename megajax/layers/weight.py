"""A weight in use that is no array: what `Ops` asks of it, in one class to derive from.

A leaf of the parameters is an array, or a `PackedWeight` that stands for one: packed tiles
(layers/sparse.py), later a quantized matrix. The seams of layers/ops.py and parallel/ look at the
leaf's type; a new type implements `astype` and `matmul`, and inherits how it rests on a mesh:

    dense (D, F), cut over tensor     packed: every array of it is (pieces, ...), a piece a rank

So a piece is packed by itself, from the slice that a tensor rank multiplies, and no collective has
to cut through a format. Axes that share a gradient (ZeRO) hold copies: a packed weight is small.

Legend: D model width, F any hidden width.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

import jax
from flax import nnx

from megajax.core.errors import UserError
from megajax.core.layout import Words
from megajax.core.tree import Tree, is_words

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class PackedWeight(abc.ABC):
    """What derives from it is a frozen dataclass, registered as a pytree.

    Its arrays begin with a dimension of pieces, after that of the layers where they are stacked; a
    piece (`piece`) lacks it. shape: static, of the dense array that a piece stands for: (D, ...) of
    an input's weight, (..., D) of an output's.
    """

    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @abc.abstractmethod
    def astype(self, dtype: Any) -> Self:
        """Returns it as products of inputs of this type take it."""

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


Weight = Array | PackedWeight


def cut_word(axes: Words) -> str:
    """Returns the word of a matrix's dimension that tensor parallelism cuts: the one beside the
    model's width."""
    return next(w for w in axes if w not in (None, "embed", "layers"))


def any_packed(weights: Sequence[Weight]) -> bool:
    """Tells whether a product of these has to take more than arrays."""
    return any(isinstance(w, PackedWeight) for w in weights)


def words_of(w: nnx.Param) -> Words:
    """Returns the words of a parameter's array, or of the first dimensions of a packed one's."""
    axes, value = w.get_metadata("axes"), w.get_value()
    return value.words(axes) if isinstance(value, PackedWeight) else axes


def packed_axes(axes: Tree, params: Tree) -> Tree:
    """Returns the words of a tree of parameters of which some may be packed.

    A PartitionSpec made of a packed leaf's words says how all its arrays lie.
    axes: of the dense model (ModelParts.axes).
    """
    return jax.tree.map(
        lambda words, w: w.words(words) if isinstance(w, PackedWeight) else words,
        axes, params, is_leaf=is_words,
    )  # fmt: skip
