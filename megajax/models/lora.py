"""LoRA: a model whose matrices rest, with low-rank sums beside them that learn.

W x becomes W x + (alpha / rank) B A x with W fixed (arXiv 2106.09685, section 4.1). `adapt` puts a
core.packed.LowRank in the place of each chosen matrix of the stack of layers; blocks, pipelines,
checkpoints and the engine take such a tree as they take a dense one, for `Ops` looks at the type of
a weight. A is drawn as PEFT draws it and B is 0, so the model computes what it did before. Bases
may rest in bfloat16 or in few bits (QLoRA, arXiv 2305.14314).

Not here: folders of PEFT (foreign/peft.py), several adapters in one engine (serving/adapters.py).

Legend: L layers, D model width, R rank, K inputs and N outputs of a matrix.
"""

import dataclasses
import math
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from megajax.core.config import Checked, above, option
from megajax.core.errors import UserError, did_you_mean
from megajax.core.layout import Layout, Words
from megajax.core.packed import RANK, LowRank, PackedWeight, cut_word
from megajax.core.tree import Tree, is_words, named_leaves
from megajax.layers.param import packed_axes
from megajax.models.parts import ModelParts, is_layered
from megajax.quant.formats import Format
from megajax.quant.kernel import QuantKernel
from megajax.quant.qtensor import quantize

Array = jax.Array

# PEFT's names of a Llama's modules -> our leaves of a layer, and the groups of them.
LEAVES = {
    "q_proj": "attention.query",
    "k_proj": "attention.key",
    "v_proj": "attention.value",
    "o_proj": "attention.out",
    "gate_proj": "mlp.gate",
    "up_proj": "mlp.up",
    "down_proj": "mlp.down",
}
GROUPS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
SHORT = {name.removesuffix("_proj"): name for name in LEAVES}
MODULES = (*GROUPS, *SHORT, *LEAVES)
BITS = {"int8": 8, "int4": 4}
GROUP = 128  # (GPTQ and AWQ, the papers' group) inputs that share a scale


@dataclass(frozen=True)
class LoraConfig(Checked, section="lora"):
    """Low-rank adapters (LoRA): what learns beside matrices that rest.

    modules: a name or several: 'attention', 'mlp', or single matrices ('q' or 'q_proj', ...).
    """

    rank: int = option(0, "rank of the adapters; 0: no adapters, all weights learn", at_least=0)
    alpha: float = option(
        16.0, "the adapters' product is scaled by alpha / rank", needs=above(0, "rank"), above=0
    )
    modules: tuple[str, ...] = option(
        ("attention", "mlp"),
        "matrices that get adapters, separated by commas: attention, mlp, or some of q, k, v, o, "
        "gate, up, down",
        needs=above(0, "rank"),
    )
    base: Literal["none", "bfloat16", "int8", "int4"] = option(
        "none",
        "form in which what does not learn rests; none: float32; int8, int4: the layers' matrices "
        "in groups of 128 inputs, everything else in bfloat16",
        needs=above(0, "rank"),
    )

    def __post_init__(self):
        """Takes one name for a tuple of it, and refuses names that are no modules."""
        named = self.modules.split(",") if isinstance(self.modules, str) else self.modules
        names = tuple(n.strip() if isinstance(n, str) else n for n in named)
        object.__setattr__(self, "modules", names)
        super().__post_init__()
        for name in names or ("",):
            if name not in MODULES:
                raise UserError(
                    f"lora.modules={','.join(map(str, names))}: {name!r} is no module; these are "
                    f"{', '.join((*GROUPS, *SHORT))}.{did_you_mean(name, MODULES)} (--lora.modules)"
                )

    @property
    def scale(self) -> float:
        """The factor of the adapters' product."""
        return self.alpha / self.rank

    @property
    def rests(self) -> str:
        """The data type of what does not learn and is in no few bits."""
        return "float32" if self.base == "none" else "bfloat16"


# ---- which leaves


def leaves_of(axes: Tree, cfg: LoraConfig) -> list[str]:
    """Returns the dotted names of the leaves that get adapters.

    axes: of a dense model (ModelParts.axes). Raises: UserError where a module of the configuration
    has no matrix in the layers of the model, or is one of experts.
    """
    layered = {n: words for n, words in named_leaves(axes, is_words) if is_layered(words)}
    chosen: list[str] = []
    for module in cfg.modules:
        names = [LEAVES[n] for n in GROUPS.get(module, (SHORT.get(module, module),))]
        matches = [n for n in layered if n.endswith(tuple(f".{name}" for name in names))]
        if not matches:
            tails = tuple(f".{name.split('.')[-1]}" for name in names)
            experts = [n for n, w in layered.items() if "expert" in w and n.endswith(tails)]
            why = f"{experts[0]} is of experts, which get no adapters" if experts else ""
            there = ", ".join(dict.fromkeys(_short(n) for n in layered if _short(n)))
            raise UserError(
                f"lora.modules={','.join(cfg.modules)}: this model has no {module}"
                f"{f': {why}' if why else ''}; it has {there or 'no module that can be adapted'} "
                "(--lora.modules)"
            )
        chosen += [n for n in matches if n not in chosen]
    return [n for n in layered if n in chosen]  # in the order of the tree


def _short(name: str) -> str:
    leaf = ".".join(name.split(".")[-2:])
    return next((s for s, full in SHORT.items() if LEAVES[full] == leaf), "")


# ---- adapters in, out, and off


def adapt(
    params: Tree, axes: Tree, cfg: LoraConfig, key: Array, layout: Layout | None = None
) -> tuple[Tree, Tree]:
    """Returns (the parameters with adapters, their words); without a rank, what it got.

    Args: params, axes: of a dense model, as in ModelParts; the layers' matrices may be quantized
      already. key: of A, which is uniform in +-1 / sqrt(inputs), Kaiming's rule with a = sqrt(5)
      (PEFT, LoraLayer.reset_lora_parameters); B is 0. layout: where new leaves lie; None: no mesh.
    Raises: UserError for modules that the model does not have.
    """
    if not cfg.rank:
        return params, axes
    names = set(leaves_of(axes, cfg))
    base = at_rest(params, axes, cfg, layout)

    def leaf(name: str, words: Words, w: Any, dense: Any) -> Any:
        if name not in names:
            return w
        n = 1 if is_layered(words) else 0
        shape = dense_shape(dense, words)
        inputs = 1 if words[n] == "embed" else len(words) - n - 1
        outer, inner = shape[:n], shape[n:]
        like = LowRank(w, None, None, cfg.scale).words(words)
        bound = 1 / math.sqrt(math.prod(inner[:inputs]))
        a = jax.random.uniform(
            jax.random.fold_in(key, zlib.crc32(name.encode())),
            (*outer, *inner[:inputs], cfg.rank),
            minval=-bound,
            maxval=bound,
            out_sharding=layout.stored(*like.a) if layout else None,
        )
        b = jnp.zeros(
            (*outer, cfg.rank, *inner[inputs:]),
            jnp.float32,
            out_sharding=layout.stored(*like.b) if layout else None,
        )
        return LowRank(w, a, b, cfg.scale)

    words, treedef = jax.tree.flatten(axes, is_leaf=is_words)
    leaves = (treedef.flatten_up_to(tree) for tree in (base, params))
    named = [n for n, _ in named_leaves(axes, is_words)]
    adapted = treedef.unflatten(map(leaf, named, words, *leaves))
    return adapted, packed_axes(axes, adapted)


def merge(params: Tree) -> Tree:
    """Returns dense parameters that compute the same: base + a b scale, in the base's type; a
    quantized matrix becomes a float32 one."""
    return _map(_merged, params)


def unpacked(params: Tree, parts: ModelParts) -> Tree:
    """Returns the same as `merge`, with each leaf in the type and shape of the dense model's
    `parts`: what rests in fewer bits, with or without an adapter, is widened before the sum."""

    def leaf(words: Words, like: Any, w: Any) -> Any:
        if is_low_rank(w):
            base = w.base if _is_packed(w.base) else w.base.astype(like.dtype)
            return _merged(dataclasses.replace(w, base=base)).astype(like.dtype)
        if _is_packed(w):
            inputs = 1 if words[1] == "embed" else len(words) - 2
            return dense(w, like.shape, inputs).astype(like.dtype)
        return w.astype(like.dtype)

    return jax.tree.map(leaf, parts.axes, parts.abstract, params, is_leaf=is_words)


def strip(params: Tree) -> Tree:
    """Returns the parameters without adapters: the model that they were added to."""
    return _map(lambda w: w.base, params)


def mute(params: Tree) -> Tree:
    """Returns the same tree with B = 0, so that it computes what `strip`'s does where a program
    must have the structure of the adapted model (stages of a pipeline)."""
    return _map(lambda w: dataclasses.replace(w, b=jnp.zeros_like(w.b)), params)


def with_base(params: Tree, base: Tree) -> Tree:
    """Returns the adapters of one tree over the weights of another, which has none."""

    def leaf(w: Any, weight: Any) -> Any:
        return dataclasses.replace(w, base=weight) if is_low_rank(w) else weight

    return jax.tree.map(leaf, params, base, is_leaf=lambda x: is_low_rank(x) or _is_packed(x))


def adapters(tree: Tree) -> dict[str, LowRank]:
    """Returns {dotted name of the dense leaf: its LowRank}."""
    return {n: w for n, w in named_leaves(tree, is_low_rank) if is_low_rank(w)}


def is_low_rank(x: Any) -> bool:
    """Tells a weight with an adapter from other nodes of a tree."""
    return isinstance(x, LowRank)


def learns(name: str, words: Words) -> bool:
    """Tells the leaves of adapters from all others, as Task.trains does."""
    return RANK in words


def _is_packed(x: Any) -> bool:
    return isinstance(x, PackedWeight)


def _map(function: Any, tree: Tree) -> Tree:
    return jax.tree.map(lambda w: function(w) if is_low_rank(w) else w, tree, is_leaf=is_low_rank)


def _merged(w: LowRank) -> Array:
    both = w.a.ndim + w.b.ndim - 2  # dimensions of the dense leaf, those of its stack twice
    packed = isinstance(w.base, PackedWeight)
    n = (both - w.base.ndim) // 2 if packed else both - w.base.ndim
    stack = tuple(range(n))
    product = jax.lax.dot_general(
        w.a.astype(jnp.float32),
        w.b.astype(jnp.float32),
        (((w.a.ndim - 1,), (n,)), (stack, stack)),
        precision=jax.lax.Precision.HIGHEST,
    )
    base = dense(w.base, product.shape, w.a.ndim - n - 1) if packed else w.base
    return (base.astype(jnp.float32) + product * w.scale).astype(base.dtype)


# ---- bases at rest


def at_rest(params: Tree, axes: Tree, cfg: LoraConfig, layout: Layout | None = None) -> Tree:
    """Returns dense parameters as an adapter's bases rest: `cfg.base`. Call it under the layout's
    mesh, or without one.

    A matrix in few bits is a QuantKernel, packed in a piece for each tensor rank. Leaves that are
    quantized already stay as they are.
    """

    def leaf(words: Words, w: Any) -> Any:
        if isinstance(w, PackedWeight):
            return w
        if cfg.base in BITS and is_layered(words) and len(words) > 2 and "embed" in words:
            if not {"expert", "router"} & set(words):
                return _in_few_bits(w, words, BITS[cfg.base], layout)
        return w.astype(cfg.rests) if w.dtype == jnp.float32 else w

    return jax.tree.map(leaf, axes, params, is_leaf=is_words)


def _in_few_bits(w: Array, words: Words, bits: int, layout: Layout | None) -> QuantKernel:
    """Returns stacked matrices with each column in groups of inputs, rounded to nearest."""
    if layout is not None:  # its bits depend on no mesh but by the number of pieces
        w = jax.sharding.reshard(w, layout.stored(*[None] * w.ndim))
    inner, is_input = list(w.shape[1:]), words[1] == "embed"
    cut, ways = 1 if is_input else 0, 1
    if layout is not None:
        word = cut_word(words)
        ways = layout.ways(layout.rules.act[word]) // layout.copies(word)
    inner[cut] //= ways
    pieces = w.reshape(*w.shape[: cut + 1], ways, *inner[cut:])
    pieces = jnp.moveaxis(pieces, cut + 1, 1)
    inputs = 1 if is_input else len(inner) - 1
    matrices = pieces.reshape(*pieces.shape[:2], math.prod(inner[:inputs]), -1)
    fmt = Format(bits, GROUP, 0, scale_dtype="float16")
    kernel = QuantKernel(tuple(inner), jax.vmap(jax.vmap(lambda x: quantize(x, fmt)))(matrices))
    if layout is None:
        return kernel
    spec = layout.stored(*kernel.words(words))
    return jax.tree.map(lambda x: jax.sharding.reshard(x, spec), kernel)


def dense(w: PackedWeight, shape: tuple[int, ...], inputs: int) -> Array:
    """Returns the float32 array that stacked pieces stand for: their products with the unit matrix.

    shape: of the array, its stack of layers included. inputs: dimensions of its inputs.
    """
    K = math.prod(w.shape[:inputs])
    units = jnp.eye(K).reshape(K, *w.shape[:inputs])

    def one(piece: PackedWeight) -> Array:
        return piece.matmul(units, inputs).reshape(w.shape)

    pieces = jax.vmap(jax.vmap(one))(w)  # (L, pieces, ...)
    inner = zip(w.shape, shape[1:], strict=True)
    cut = next((i for i, (piece, full) in enumerate(inner) if piece != full), 0)
    return jnp.moveaxis(pieces, 1, cut + 1).reshape(shape)


# ---- a model's parts


def adapt_parts(parts: ModelParts, cfg: LoraConfig, layout: Layout | None = None) -> ModelParts:
    """Returns the parts of the adapted model, whose `init` draws the base as before. Call it, and
    them, under the layout's mesh. Raises: UserError, as `leaves_of`."""

    def init(key: Array) -> Tree:
        return adapt(parts.init(key), parts.axes, cfg, jax.random.fold_in(key, cfg.rank), layout)[0]

    abstract, axes = (
        jax.eval_shape(
            lambda params: adapt(params, parts.axes, cfg, jax.random.key(0), layout)[0],
            parts.abstract,
        ),
        parts.axes,
    )
    return dataclasses.replace(
        parts, abstract=abstract, axes=packed_axes(axes, abstract), init=init
    )


def dense_shape(w: Any, words: Words) -> tuple[int, ...]:
    """Returns the shape of a stacked leaf, or of what its packed pieces stand for."""
    if not isinstance(w, PackedWeight):
        return w.shape
    leading = jax.tree.leaves(w)[0].shape
    shape = list(w.shape)
    shape[0 if words[-1] == "embed" else 1] *= leading[1]
    return leading[0], *shape
