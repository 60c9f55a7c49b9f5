"""Ops: the seams at which communication and kernels enter a model.

A block is written once. What differs between one device, tensor parallelism, a fused
GEMM-with-communication and another attention kernel is which functions stand in here; what differs
between a dense, a tile-sparse and later a quantized GEMM is the type of the weight
(core/packed.py). `matmul` is local compute; `gather`, `whole`, `up`, `down` and `lookup` put
communication around it and take it as an argument, so all three choices compose. `settle` and
`expand` are where a kernel joins a product with the element-wise work after it. For mixtures of
experts `grouped` is the local compute, `score`, `expert` and `total` what is around it. The
defaults are local; layers/fused.py has kernels for some, parallel/tensor.py and parallel/expert.py
build the sharded ones, and parallel/tensor.py those of code inside a shard_map.

Legend: B rows, S positions, D model width, F any hidden width, V table rows, E experts. Of images:
B images, H rows, W columns, C channels.
A weight argument is an nnx.Param whose metadata `axes` names its dimensions, of the dense array
where its value is packed.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import pallas_kernels
from megajax.core.packed import LowRank, PackedWeight
from megajax.layers.attention import attend
from megajax.layers.dispatch import expert
from megajax.layers.losses import VocabCut
from megajax.layers.param import Weight, name_of, of_each

Array = jax.Array
Spec = Any  # a PartitionSpec that a Layout gave, or None; models never look inside


class Codec(Protocol):
    """How a weight travels to where it is used. Its gradient travels back uncoded.

    encode(x) -> a tree of arrays with x's dimensions, each cut as x is. decode(that, gathered;
    dtype) -> the weight in use.
    """

    def encode(self, x: Array) -> Any:
        """Returns the code of a stored weight, or of this device's part of it."""

    def decode(self, coded: Any, dtype: Any) -> Array:
        """Returns the weight whose code `encode` returned."""


def matmul(
    x: Array,
    w: Weight,
    contract: int = 1,
    out_sharding: Spec = None,
    out_dtype: Any = None,
    name: str | None = None,
) -> Array:
    """Contracts the last `contract` dims of x with the first ones of w, as w's type does that.

    w: an array, or a packed weight's piece, whose arrays and x are local: no sharding to ask for.
    name: of the parameter that w comes from ('blocks.attention.query'), for replacements that treat
    parameters differently; not used here.
    Returns: x's leading dims followed by w's trailing ones, in out_dtype (None: x's dtype).
    """
    if isinstance(w, PackedWeight):
        assert out_sharding is None
        return w.matmul(x, contract).astype(out_dtype or x.dtype)
    if isinstance(w, LowRank):
        assert out_sharding is None
        return w.add(matmul(x, w.base, contract, None, out_dtype), x, contract, matmul)
    dims = (tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract)))
    dot = functools.partial(
        jax.lax.dot_general, dimension_numbers=(dims, ((), ())), out_sharding=out_sharding
    )
    if out_dtype is None or not _widens(x, w, out_dtype):
        return dot(x, w, preferred_element_type=out_dtype)
    return _widened(dot, x, w, out_dtype)


def _widens(x: Array, w: Array, out_dtype: Any) -> bool:
    narrow = x.dtype == w.dtype and x.dtype.itemsize == 2
    return narrow and jax.numpy.dtype(out_dtype) == jax.numpy.float32


def _widened(dot: Callable, x: Array, w: Array, out_dtype: Any) -> Array:
    """A 16-bit product summed and given in float32, whose backward products are 16-bit too.

    Autodiff would multiply the float32 gradient by float32 copies of x and w, which a GPU does at
    half the rate (TF32) or slower. The gradient is rounded first, as between any two layers.
    """

    @jax.custom_vjp
    def wide(x: Array, w: Array) -> Array:
        return dot(x, w, preferred_element_type=out_dtype)

    def backward(saved: tuple[Array, Array], dz: Array) -> tuple[Array, Array]:
        return jax.vjp(dot, *saved)[1](dz.astype(x.dtype))

    wide.defvjp(lambda x, w: (wide(x, w), (x, w)), backward)
    return wide(x, w)


@dataclass(frozen=True)
class LowPrecision:
    """A `matmul` that multiplies some parameters in few bits (quant/products.py).

    Its operands are local arrays, because a scale is that of what one device multiplies: `up` and
    `down` call it inside a shard_map. It returns x's type; no history is kept between steps.

    precisions: by the parameter's name. A tuple has a precision for each kind of device, of which
    kind() tells, on each device, the number; every device compiles the products of all kinds then.
    kind: of a job on unlike devices, which exchange operands and results in one type: XLA would
    round before a collective what one kind rounds after it.
    """

    precisions: Mapping[str, Any]
    kind: Callable[[], Array] | None = None

    def takes(self, names: Sequence[str | None]) -> bool:
        """Tells whether a product of one of these parameters has few bits."""
        return any(name in self.precisions for name in names)

    def __call__(
        self,
        x: Array,
        w: Weight,
        contract: int = 1,
        out_sharding: Spec = None,
        out_dtype: Any = None,
        name: str | None = None,
    ) -> Array:
        """Returns what `matmul` does, of rounded operands where the parameter is one of these; of a
        low-rank weight the base has few bits."""
        if isinstance(w, LowRank):
            y = self(x, w.base, contract, out_sharding, out_dtype, name)
            return w.add(y, x, contract, matmul)
        if name not in self.precisions or isinstance(w, PackedWeight):
            return matmul(x, w, contract, out_sharding, out_dtype, name)
        from megajax.quant import products  # not for runs without

        assert out_sharding is None and out_dtype in (None, x.dtype)
        chosen, outputs = self.precisions[name], w.shape[contract:]
        x_xK = x.reshape(*x.shape[: x.ndim - contract], math.prod(w.shape[:contract]))
        w_KN = w.reshape(x_xK.shape[-1], math.prod(outputs))
        of_kinds = (chosen,) if isinstance(chosen, str) else chosen
        different = sorted(set(of_kinds))
        if self.kind is not None:
            x_xK = jax.lax.optimization_barrier(x_xK)
        ways = [functools.partial(products.matmul, precision=one) for one in different]  # type: ignore
        if len(ways) == 1:
            y_xN = ways[0](x_xK, w_KN)
        else:
            assert self.kind is not None
            number = jax.numpy.array([different.index(one) for one in of_kinds])[self.kind()]
            # Cast outside the branches, which only some devices take: the transpose is a sum over
            # devices.
            y_xN = jax.lax.switch(number, ways, *products.varying(x_xK, w_KN))
        if self.kind is not None:
            y_xN = jax.lax.optimization_barrier(y_xN)
        return y_xN.reshape(*x_xK.shape[:-1], *outputs)


def gather(x_BSD: Array) -> Array:
    """Returns the residual stream as a block reads it: the same array, without a mesh."""
    return x_BSD


def whole(w: nnx.Param, dtype: Any, codec: Codec | None = None) -> Weight:
    """Returns a weight ready for use: cast, and gathered if it rests in pieces.

    codec: of what travels, which nothing does here, so that one device computes what a mesh does;
    a packed weight has none.
    """
    value = w.get_value()
    if isinstance(value, LowRank):
        return of_each(whole, w, dtype)
    if isinstance(value, PackedWeight):
        return value.piece().astype(dtype)
    return value.astype(dtype) if codec is None else coded(codec, value, dtype)


def coded(codec: Codec, x: Array, dtype: Any, gather: Callable = lambda x: x) -> Array:
    """decode(gather(encode(x))), with the gradient of gather(x.astype(dtype))."""

    @jax.custom_vjp
    def through(x: Array) -> Array:
        return codec.decode(jax.tree.map(gather, codec.encode(x)), dtype)

    def forward(x: Array) -> tuple[Array, Callable]:
        return through(x), jax.vjp(lambda x: gather(x.astype(dtype)), x)[1]

    through.defvjp(forward, lambda pull, dy: pull(dy))
    return through(x)


def up(x_BSD: Array, weights: Sequence[nnx.Param], matmul: Callable) -> tuple[Array, ...]:
    """Products of one input with several weights (D, ...), sharing one gather of the input."""
    return tuple(matmul(x_BSD, whole(w, x_BSD.dtype), name=name_of(w)) for w in weights)


def down(
    products: Sequence[tuple[Array, nnx.Param]],
    residual_BSD: Array | None,
    matmul: Callable,
    bias: Array | None = None,
    drop: Callable | None = None,
) -> Array:
    """residual + drop(sum of x . w + bias) for (x, w (..., D)) pairs, sharing one scatter; without
    a residual (None) `settle` adds it."""
    used = ((x, whole(w, x.dtype), name_of(w)) for x, w in products)
    terms = (matmul(x, w, contract=w.ndim - 1, name=name) for x, w, name in used)
    return join(functools.reduce(operator.add, terms), residual_BSD, bias, drop)


def join(
    y_BSD: Array,
    residual_BSD: Array | None,
    bias: Array | None = None,
    drop: Callable | None = None,
) -> Array:
    """The end of every `down`: bias, dropout, residual. Named for the remat policies."""
    return add(checkpoint_name(y_BSD, "block_out"), residual_BSD, bias, drop)


def add(
    y_BSD: Array, residual_BSD: Array | None, bias: Array | None, drop: Callable | None
) -> Array:
    """residual + drop(y + bias), of which only y must be there."""
    if bias is not None:
        y_BSD = y_BSD + bias.astype(y_BSD.dtype)[None, None]
    y_BSD = drop(y_BSD) if drop is not None else y_BSD
    return y_BSD if residual_BSD is None else residual_BSD + y_BSD


def settle(
    norm: Callable, y_BSD: Array, residual_BSD: Array, bias: Array, drop: Callable | None
) -> Array:
    """norm(residual + drop(y + bias)): the end of a sublayer that is normalised after it."""
    return norm(add(y_BSD, residual_BSD, bias, drop))


def expand(mlp: Any, x_BSD: Array, up: Callable, matmul: Callable) -> Array:
    """The first half of a feed-forward layer, to hidden_BSF: product, bias, activation."""
    return mlp(up(x_BSD, mlp.inputs, matmul))


def lookup(pairs: Sequence[tuple[nnx.Param, Array]], dtype: Any) -> Array:
    """Sum over (table (V, D), ids (B, S)) of the tables' rows: the start of the residual stream."""
    rows = (table[...].astype(dtype)[ids_BS] for table, ids_BS in pairs)
    return functools.reduce(operator.add, rows)


def spread(x: Array) -> Array:
    """Values of the places of rows (B, S, ...), which every rank of `tensor` has, as the residual
    stream lies: the same array, without a mesh."""
    return x


def place(x_BSD: Array, features_BQD: Array, places_BS: Array) -> Array:
    """The residual stream with features in the place of tokens. places_BS: the number of the
    feature of the row that a token shows; below 0: the token keeps what it has."""
    # Beyond the last feature, what a text token asks for is 0, and its gradient is dropped.
    index_BS1 = jax.numpy.where(places_BS < 0, features_BQD.shape[1], places_BS)[..., None]
    shown_BSD = jax.numpy.take_along_axis(features_BQD, index_BS1, 1, mode="fill", fill_value=0)
    return jax.numpy.where(places_BS[..., None] < 0, x_BSD, shown_BSD.astype(x_BSD.dtype))


def show(
    pairs: Sequence[tuple[nnx.Param, Array]], features_BQD: Array, places_BS: Array, dtype: Any
) -> Array:
    """`lookup`, and `place` of features. In local code both are one sum over devices."""
    return place(lookup(pairs, dtype), features_BQD, places_BS)


def vector(w: nnx.Param) -> Array:
    """Returns a bias of heads as the heads of this rank need it."""
    return w[...]


def score(x_BSD: Array, w_DE: nnx.Param, dtype: Any = "float32") -> Array:
    """A small product with the residual stream, which stays as it lies: a router's, in float32, or
    those around an encoder's blocks."""
    return matmul(x_BSD.astype(dtype), whole(w_DE, dtype), name=name_of(w_DE))


def convolve(
    x_BHWC: Array, w: nnx.Param, strides: Sequence[int] = (1, 1), padding: Any = "SAME"
) -> Array:
    """Convolution of images with a stored kernel (height, width, in, out), in x's type. padding:
    'SAME', 'VALID' or ((top, bottom), (left, right))."""
    return convolution(x_BHWC, whole(w, x_BHWC.dtype), strides, padding)


def convolution(x_BHWC: Array, w: Any, strides: Sequence[int], padding: Any) -> Array:
    """The convolution of `convolve`, with a kernel in use."""
    return jax.lax.conv_general_dilated(
        x_BHWC, w, tuple(strides), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def grouped(lhs_MK: Array, rhs_GKN: Array, group_sizes: Array) -> Array:
    """Products of rows that are sorted by group, each group with a matrix of its own."""
    return pallas_kernels.grouped_matmul(lhs_MK, rhs_GKN, group_sizes)


def total(sums: Any) -> Any:
    """Adds a tree of sums over tokens up over all devices that hold tokens of this batch.

    Global arrays have them all.
    """
    return sums


def over_heads(sums: Any) -> Any:
    """Adds a tree of sums over heads up over the devices that have other heads of these tokens.

    Global arrays have them all.
    """
    return sums


@dataclass(frozen=True)
class Ops:
    """The functions that a model calls in the place of kernels and collectives.

    The default of each member is the function of that name in this module, which computes on one
    device, and each member can be replaced. A network of one's own needs `matmul`, `up`, `down` and
    `lookup`, and for its loss `gather` and `whole`. Arguments and results are those of the
    defaults.

    matmul(x, w, contract, out_sharding, out_dtype, name): product of x with a weight in use,
      without any communication. name: of the parameter.
    convolve(x_BHWC, w, strides, padding): convolution of images with a parameter (height, width,
      in, out).
    gather(x_BSD): the residual stream as a block reads it. Where the sequence is cut over
      `tensor`, this brings its pieces together.
    whole(w, dtype, codec): a stored parameter as a weight in use: cast, and gathered if ZeRO cuts
      it.
    up(x_BSD, weights, matmul): products of the residual stream with several parameters (D, ...),
      one result for each: how a sublayer begins. The weights' last dimensions are cut over
      `tensor`, and so are the results.
    down(((x, w), ...), residual_BSD, matmul, bias, drop): residual + drop(sum of x . w + bias) for
      parameters w (..., D): how a sublayer ends. It adds the ranks' partial sums up.
    settle(norm, y_BSD, residual_BSD, bias, drop): norm(residual + drop(y + bias)), the end of a
      sublayer that is normalised after it, where `down` got no residual.
    expand(mlp, x_BSD, up, matmul): the first half of a feed-forward layer: products, bias and
      activation.
    lookup(((table, ids), ...), dtype): the sum of the tables' rows (B, S, D), with which the
      residual stream starts.
    spread(x): values of the places of rows (B, S, ...), as the residual stream lies.
    place(x_BSD, features_BQD, places_BS): the residual stream with the features of images in the
      place of tokens.
    show(((table, ids), ...), features_BQD, places_BS, dtype): `lookup`, then `place`, of features
      that lie on some devices of local code: each adds what it has, and zeros count as nothing.
    vector(w): a stored bias of heads as the heads of this rank need it.
    attend(q_BSHK, k_BMGK, v_BMGK, query, memory, window): attention of queries to keys and values
      (layers/attention.py). query, memory: their positions and segments.
    vocab: a VocabCut and no function: which part of the vocabulary's logits this rank has, inside a
      shard_map; pass it to `cross_entropy`.
    grouped(lhs_MK, rhs_GKN, group_sizes): products of rows that are sorted by group, each group
      with its own matrix (pallas_kernels.grouped_matmul): the experts' products.
    score(x_BSD, w, dtype): a small product with the residual stream, which stays as it lies: a
      router's.
    expert(x_BSD, dispatch, params, slots_of, grouped): every token's weighted sum of its experts'
      answers (layers/dispatch.py).
    total(sums): a tree of sums over this rank's tokens, added up over all ranks.
    over_heads(sums): a tree of sums over this rank's heads, added up over all ranks' heads.
    """

    matmul: Callable = matmul
    gather: Callable = gather
    whole: Callable = whole
    up: Callable = up
    down: Callable = down
    settle: Callable = settle
    expand: Callable = expand
    lookup: Callable = lookup
    spread: Callable = spread
    place: Callable = place
    show: Callable = show
    vector: Callable = vector
    attend: Callable = attend
    vocab: VocabCut = VocabCut()
    grouped: Callable = grouped
    score: Callable = score
    convolve: Callable = convolve
    expert: Callable = expert
    total: Callable = total
    over_heads: Callable = over_heads
