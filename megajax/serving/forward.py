"""The forward pass of an engine: the trainer's blocks on neighbouring tokens of many sequences.

One shard_map over all devices, with the local Ops that pipelines train with: each device has all
tokens of its replica's step, and its shard of the heads, of the feed-forward width, of the
vocabulary and of the experts. The tokens of all its sequences stand in one row, whose attention
goes through pages. A mixture of experts drops no token, whatever its training did.

Legend: T tokens of a step, B segments, D model width, V vocabulary, L layers, P pages of a layer.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as PS

from megajax.core.axes import Axes
from megajax.core.layout import Layout
from megajax.core.packed import PackedWeight, each_alone
from megajax.core.tree import Tree
from megajax.layers.attention import Context, attend
from megajax.layers.dispatch import Dispatch, ExpertWeights, dropless
from megajax.layers.joined import join_inputs
from megajax.layers.param import packed_axes
from megajax.models.decoder_config import DecoderConfig
from megajax.models.networks import network_of
from megajax.models.parts import map_words, scan_layers
from megajax.models.vlm import VlmConfig
from megajax.parallel import exchange, sharding, tensor
from megajax.parallel.overlap import Overlap
from megajax.serving.adapters import choose
from pallas_kernels import paged_attention

# ---- paged
#
# Keys and values in pages, as a model's layers read and write them.
#
# A page holds `page` neighbouring tokens of one sequence in one layer. All layers' pages lie in one
# array, page p of layer l in row l P + p, so that the loop over layers carries it and writes in
# place. No sequence holds page 0 of a layer: tokens that pad a step write there. Source:
# PagedAttention (arXiv 2309.06180).
#
# Legend: T tokens of a step, B segments (neighbouring tokens of one sequence), M pages of the
# longest sequence, P pages of a layer, L layers, G key-value heads, K head width.


Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of one forward pass, all arrays int32.

    ids_T, positions_T: of each token; padding has any legal values. table_BM: the pages of a
    segment's sequence, in order. start_B, count_B: index of its first token and number of its
    tokens; 0: there is no segment. context_B: length of its sequence, with these tokens.
    Of a model that sees images, else None: rotary_T3: the rotary position (time, row, column) of
    each token. features_TD: in the compute type, what enters the residual stream for the tokens
    where shows_T is 1, which show images; None: no token does.
    Of an engine with adapters, else None: adapter_T: number of each token's, 0: none
    (serving/adapters.py). adapters: how many the engine has.
    """

    ids_T: Any
    positions_T: Any
    table_BM: Any
    start_B: Any
    count_B: Any
    context_B: Any
    rotary_T3: Any = None
    shows_T: Any = None
    features_TD: Any = None
    adapter_T: Any = None
    adapters: int = dataclasses.field(default=0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """The pool: k, v (L P, page, G, K); of latent attention k (L P, page, 1, R + P), the latent
    and the rotary key, and v is None."""

    k: Any
    v: Any


def empty(
    layers: int, pages: int, page: int, heads: int, widths: tuple[int, int], dtype: str
) -> Pages:
    """Returns pages of zeros. heads: of one device, or of all. widths: of a key and of a value; 0:
    there are no values."""
    k, v = (jnp.zeros((layers * pages, page, heads, w), dtype) if w else None for w in widths)
    return Pages(k, v)


def rows_of(tokens: Tokens, page: int) -> tuple[Array, Array]:
    """Returns (page of a layer, place in it) of each token, both int32 (T,); (0, 0) for padding."""
    T, M = tokens.ids_T.shape[0], tokens.table_BM.shape[1]
    index_T1 = jnp.arange(T, dtype=jnp.int32)[:, None]
    start_1B, end_1B = tokens.start_B[None], (tokens.start_B + tokens.count_B)[None]
    inside_TB = (index_T1 >= start_1B) & (index_T1 < end_1B)
    segment_T, real_T = jnp.argmax(inside_TB, 1), inside_TB.any(1)
    which_T = tokens.positions_T // page
    real_T &= which_T < M  # a position beyond the table, of a step that is in vain
    page_T = tokens.table_BM[segment_T, jnp.minimum(which_T, M - 1)]
    return jnp.where(real_T, page_T, 0), jnp.where(real_T, tokens.positions_T % page, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """The pages as one layer sees them (layers.attention.Cache).

    layer: its index. rows: as `rows_of`, the same for all layers. implementation: of
    pallas_kernels.paged_attention.
    """

    pages: Pages
    layer: Array
    tokens: Tokens
    rows: tuple[Array, Array]
    pool: int = dataclasses.field(metadata={"static": True})  # P
    implementation: Any = dataclasses.field(default=None, metadata={"static": True})

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array | None,
        context: Context,
        window: int | None,
        sinks: Array | None = None,
    ) -> "tuple[Array, PagedCache]":
        """Writes k and v of (1, T, G, K) and attends from q of (1, T, H, K)."""
        first, pages = self.layer * self.pool, self.pages
        at = first + self.rows[0], self.rows[1]
        written = Pages(
            pages.k.at[at].set(k[0].astype(pages.k.dtype)),
            None if v is None else pages.v.at[at].set(v[0].astype(pages.v.dtype)),
        )
        t = self.tokens
        y_THK = paged_attention(
            q[0],
            written.k,
            written.k if v is None else written.v,
            t.table_BM + first,
            t.start_B,
            t.count_B,
            t.context_B,
            window=None if window is None else (window - 1, 0),
            sinks_H=sinks,
            implementation=self.implementation,
        )
        return y_THK[None], dataclasses.replace(self, pages=written)


def copy(pages: Pages, pool: int, source_N: Array, target_N: Array) -> Pages:
    """Copies pages in all layers; (0, 0) copies page 0, which no sequence holds."""
    layers = pages.k.shape[0] // pool
    first_L1 = jnp.arange(layers)[:, None] * pool
    return jax.tree.map(
        lambda x: x.at[first_L1 + target_N[None]].set(x[first_L1 + source_N[None]]), pages
    )


def tokens_like(T: int, B: int, M: int, sees: bool = False, adapters: int = 0) -> Tokens:
    """Returns Tokens of zeros in NumPy: no segment, ready to be filled in.

    sees: of a model that sees images; features_TD is None even so. adapters: of the engine."""
    t, b = np.zeros(T, np.int32), np.zeros(B, np.int32)
    tokens = Tokens(t, t.copy(), np.zeros((B, M), np.int32), b, b.copy(), b.copy())
    if adapters:
        tokens = dataclasses.replace(tokens, adapter_T=t.copy(), adapters=adapters)
    if not sees:
        return tokens
    return dataclasses.replace(tokens, rotary_T3=np.zeros((T, 3), np.int32), shows_T=t.copy())


# ---- forward


TENSOR = "tensor"
REPLICA_AXES = ("node", "data", "context")


def replica_axes(mesh: Mesh, sequences: int) -> Axes:
    """Returns the mesh axes that cut an engine's sequences.

    sequences: that run at a time. If there are fewer of them than replicas, no axis cuts them:
      replicas without a sequence would make nothing faster.
    """
    axes = tuple(axis for axis in REPLICA_AXES if mesh.shape.get(axis, 1) > 1)
    return axes if math.prod(mesh.shape[axis] for axis in axes) <= sequences else ()


class Forward:
    """The pass of one model on one mesh. `run` is for code inside `everywhere`.

    replicas: how many groups of devices run different sequences. row_spec: PartitionSpec of arrays
    whose first dimension has the rows of all replicas.
    """

    def __init__(
        self,
        cfg: DecoderConfig | VlmConfig,
        mesh: Mesh,
        zero: sharding.Zero = "none",
        dtype: Any = "float32",
        overlap: Overlap = "auto",
        axes: Axes = (),
    ):
        """zero: how weights rest. overlap: how tensor ranks add up (training/config.py). axes: of
        `replica_axes`; (): all devices have the same sequences.

        Raises: UserError when the mesh cannot cut the model.
        """
        self.cfg, self.mesh, self.dtype, self.overlap = cfg, mesh, jnp.dtype(dtype), overlap
        self.layout = sharding.layout(mesh, zero, decode=True, model=cfg)
        ops = tensor.local_ops(self.layout, "xla", overlap=overlap)
        ops = dataclasses.replace(
            ops, expert=functools.partial(_experts, self.layout), total=lambda sums: sums
        )
        self.vlm = cfg if isinstance(cfg, VlmConfig) else None  # a model that reads images
        self.decoder = cfg.decoder if isinstance(cfg, VlmConfig) else cfg
        if self.vlm:  # only the tower attends without pages; the logits of an image are many
            varlen = functools.partial(attend, implementation="varlen")
            ops = dataclasses.replace(ops, attend=varlen)
        self.parts = network_of(cfg).parts(cfg, None, ops, dtype)
        self.replicas = self.layout.ways(axes)
        self.row_spec = PS(axes[0] if len(axes) == 1 else axes) if axes else PS()

    @property
    def features(self) -> jax.ShapeDtypeStruct | None:
        """Shape (D,) and type of what a token that shows an image enters with; None: none does."""
        return jax.ShapeDtypeStruct((self.cfg.width,), self.dtype) if self.vlm else None

    # ---- weights and pages at rest

    def place(self, params: Tree, cast: bool, room: float = 0) -> Tree:
        """Returns parameters, or some members of them, on this mesh.

        cast: copy matrices in the compute type; vectors and routers keep theirs. room: bytes of a
          device. If a copy of the layers fits there, each layer gets separate arrays
          (core.packed.each_alone), and packed matrices of one input are joined (layers/joined.py).
        """
        if cast:
            words = packed_axes(self.parts.axes, params)
            params = map_words(
                lambda axes, w: w.astype(self.dtype) if self._narrows(axes, w) else w, words, params
            )
        placed, stack = sharding.place(self.layout, self.parts.axes, params), self.parts.stack
        size = sum(  # bytes on one device
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(placed.get(stack, ()))
        )
        if stack in placed and size <= room:
            join = join_inputs if self.layout.copies("kv_heads") == 1 else lambda layer: layer
            placed = placed | {stack: each_alone(placed[stack], self.cfg.layers, join)}
        return placed

    def outline(self, params: Tree, cast: bool) -> Tree:
        """Returns what `place` returns without room, as ShapeDtypeStructs with their shardings.

        params: their leaves, and those of packed matrices, need a shape and a type only."""
        words = packed_axes(self.parts.axes, params)

        def of(words: tuple, x: Any) -> Any:
            named = self.layout.named(self.layout.stored(*words))
            cast_to = self.dtype if cast and self._narrows(words, x) else None
            return jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, cast_to or a.dtype, sharding=named), x
            )

        return map_words(of, words, params)

    @staticmethod
    def _narrows(words: tuple, w: Any) -> bool:
        return not isinstance(w, PackedWeight) and exchange.is_quantized(words)

    @property
    def heads(self) -> int:
        """Number of key-value heads of all devices: more than the model's if tensor ranks share
        heads. Of latent attention, whose one head every rank has, 1."""
        if self.decoder.latent.rank:
            return 1
        return self.cfg.kv_heads * self.layout.copies("kv_heads")

    @property
    def page_spec(self) -> PS:
        """PartitionSpec of a pool of pages: its heads are cut over tensor, its rows are those of
        all replicas."""
        heads = None if self.decoder.latent.rank else "kv_heads"
        return PS(*(self.row_spec or (None,)), *self.layout.act(None, heads, None))

    def pages(self, pages: int, page: int) -> Pages:
        """Returns an empty pool of so many pages a layer of each replica, of `page` tokens each."""
        shardings = self.layout.named(self.page_spec)
        cfg, pages = self.decoder, self.replicas * pages
        shape = cfg.depth, pages, page, self.heads, cfg.cached[1:], self.dtype.name
        out = Pages(shardings, shardings)
        return jax.jit(empty, static_argnums=tuple(range(6)), out_shardings=out)(*shape)

    def page_bytes(self, page: int) -> int:
        """Bytes of one page of all layers on one device."""
        ways = (
            1 if self.decoder.latent.rank else self.layout.ways(self.layout.rules.act["kv_heads"])
        )
        heads = self.heads // ways
        return (
            self.decoder.depth * page * heads * sum(self.decoder.cached[1:]) * self.dtype.itemsize
        )

    # ---- programs

    def specs(self, params: Tree) -> Tree:
        """Returns the PartitionSpecs of parameters, some of which may be packed."""
        axes = packed_axes(self.parts.axes, params)
        return map_words(lambda words: self.layout.stored(*words), axes)

    def everywhere(self, function: Any, params: Tree, in_specs: tuple, out_specs: Any) -> Any:
        """Returns function(params, *others) on all devices. in_specs: of the others."""
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(self.specs(params), *in_specs),
            out_specs=out_specs,
            check_vma=False,
        )

    def run(
        self,
        params: Tree,
        pages: Pages,
        tokens: Tokens,
        rows_B: Array,
        attention: Any = None,
    ) -> tuple[Array, Pages]:
        """Returns (float32 logits_BV after the tokens rows_B, the pages with all tokens).

        V is the padded vocabulary, whose padding has the logit NEGATIVE. All devices of a replica
        get the same logits. attention: the implementation of pallas_kernels.paged_attention.
        """
        x = self.enter(params, tokens)
        x, pages = self.through(params, pages, tokens, x, attention)
        return self.leave(params, x, rows_B), pages

    def enter(self, params: Tree, tokens: Tokens) -> Array:
        """Returns the start of the residual stream, (1, T, D)."""
        batch, context = self._batch(tokens)
        if tokens.features_TD is not None:
            places_T = jnp.where(tokens.shows_T > 0, jnp.arange(len(tokens.ids_T)), -1)
            batch |= {"features": tokens.features_TD[None], "places": places_T[None]}
        prelude = self.parts.prelude
        embed = prelude.start if prelude else self.parts.embed
        return embed(self._ends(params), batch, context)

    def see(self, params: Tree, batch: dict[str, Array]) -> Array:
        """Returns features_BQD of the merged patches of images. Inside `everywhere`.

        params: all members but the layers. batch: patches, patch_places and images
        (models/vlm.py)."""
        assert self.parts.see is not None
        return self.parts.see(self._ends(params), batch)

    def through(
        self,
        params: Tree,
        pages: Pages,
        tokens: Tokens,
        x: Array,
        attention: Any = None,
    ) -> tuple[Array, Pages]:
        """Returns (the residual stream x (1, T, D) after all layers, the pages with all tokens)."""
        parts, stack, layers = self.parts, self.parts.stack, self.cfg.layers
        context = self._batch(tokens)[1]
        pool = pages.k.shape[0] // self.decoder.depth
        rows = rows_of(tokens, pages.k.shape[1])
        in_use = functools.partial(exchange.whole_local, self.layout, dtype=self.dtype)

        def step(axes: Tree, first: int, block: Any, carry: tuple, stacked: tuple) -> tuple:
            x, pages = carry
            axes = packed_axes(axes, stacked[0])  # layers may be unlike
            weights = map_words(lambda words, w: in_use(words[1:], w), axes, stacked[0])
            weights = choose(weights, tokens.adapter_T, tokens.adapters)
            number = stacked[1] + first if first else stacked[1]
            cache = PagedCache(pages, number, tokens, rows, pool, attention)
            x, cache, _ = block(weights, x, context, cache)
            return (x, cache.pages), None

        carry, first = (x, pages), 0
        if (before := parts.prelude) is not None:
            layer = functools.partial(step, parts.axes[before.member], 0, before.block)
            carry = scan_layers(layer, carry, params[before.member], before.layers)[0]
            first = before.layers
        layer = functools.partial(step, parts.axes[stack], first)
        steps = parts.steps(lambda block: functools.partial(layer, block))
        return scan_layers(steps, carry, params[stack], layers)[0]

    def leave(self, params: Tree, x: Array, rows_B: Array) -> Array:
        """Returns logits_BV of the residual stream after the last layer, as `run` does."""
        logits_BV = self.parts.head(self._ends(params), x[:, rows_B])[0]
        cut = self.layout.live(self.layout.rules.stored["vocab"])
        return lax.all_gather(logits_BV, cut, axis=1, tiled=True) if cut else logits_BV

    def _batch(self, tokens: Tokens) -> tuple[dict[str, Array], Any]:
        batch = {"tokens": tokens.ids_T[None], "positions": tokens.positions_T[None]}
        if tokens.rotary_T3 is not None:
            batch["rotary"] = tokens.rotary_T3[None]
        return batch, self.parts.context(batch, None)

    def _ends(self, params: Tree) -> Tree:
        """Returns the parameters with all members but the layers in the compute type, gathered;
        the layers, and members that params lacks, are only shapes."""
        axes, stack = packed_axes(self.parts.axes, params), self.parts.stack
        in_use = functools.partial(exchange.whole_local, self.layout, dtype=self.dtype)
        ends = {
            name: map_words(in_use, axes[name], x) for name, x in params.items() if name != stack
        }
        return self.parts.abstract | ends


def _experts(
    layout: Layout,
    x_BSD: Array,
    dispatch: Dispatch,
    params: ExpertWeights,
    slots_of: Any,
    grouped: Any,
) -> tuple[Array, None]:
    """Returns the sum over the experts of all devices. Each device has all tokens, and computes
    what its experts add."""
    weights = params.map(lambda w: w[...].astype(x_BSD.dtype))
    experts = layout.live(layout.rules.stored["expert"])
    first = lax.axis_index(experts) * weights.down.shape[0] if experts else 0
    y_BSD = dropless(x_BSD, dispatch, weights, grouped, first)
    axes = (*experts, *layout.live((TENSOR,)))
    return (lax.psum(y_BSD, axes) if axes else y_BSD), None
