"""The encoder: BERT, RoBERTa, DistilBERT and ALBERT, one definition, without padding.

Post-norm blocks, norm(x + sublayer(x)), over tables of tokens, positions and token types; a head
that predicts masked tokens with the token table transposed, one that classifies a sequence by its
first token, or none. `embed` makes vectors of sentences (Sentence-BERT, arXiv 1908.10084). BERT:
arXiv 1810.04805; ALBERT (narrow tables, shared blocks): arXiv 1909.11942.

`pack_batch` turns padded rows into ONE row of packed tokens where they enter the network; all of
it, attention too, then works on T tokens, and the results are unpacked where they leave
(ByteTransformer, arXiv 2210.03052, section 3.2). The same functions run padded rows (`pad_batch`),
so one set of weights serves both. Under a mesh a batch has a packed row for each device that cuts
its rows, packed by whoever reads it.
Absent: DeBERTa, whose attention adds terms of relative positions; dropout on attention weights.

Legend: B rows, S positions, T packed tokens, D model width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.errors import UserError
from megajax.core.layout import Layout
from megajax.core.tree import Tree
from megajax.layers import fused, param
from megajax.layers.attention import Attention, Context, attend
from megajax.layers.losses import LossSums, cross_entropy, mask_padding
from megajax.layers.mlp import Mlp, activate, drop, dropper
from megajax.layers.norm import Norm
from megajax.layers.ops import Ops
from megajax.layers.param import name_of
from megajax.models import parts as parts_
from megajax.models.encoder_config import EncoderConfig
from pallas_kernels import PackInfo, pack, unpack

PACKED = Ops(
    attend=functools.partial(attend, implementation="varlen"),
    settle=fused.settle,
    expand=fused.expand,
)

# The members of the parameters that only the head has, whichever it is.
HEAD = ("dense", "dense_bias", "head_norm", "head_bias", "classes", "classes_bias")


class Block(nnx.Module):
    """One layer: attention, norm, feed-forward, norm."""

    def __init__(self, cfg: EncoderConfig, layout: Layout | None, ops: Ops, *, rngs: nnx.Rngs):
        """Makes attention, MLP and the two norms that follow them."""
        self.cfg, self.ops = cfg, ops
        self.attention = Attention(cfg.attention, layout, ops, rngs=rngs)
        self.attention_norm = Norm("layer", cfg.width, cfg.norm_eps, layout)
        self.mlp = Mlp(cfg.feed_forward, layout, rngs=rngs)
        self.mlp_norm = Norm("layer", cfg.width, cfg.norm_eps, layout)

    def __call__(self, x_BSD: jax.Array, context: Context) -> jax.Array:
        """Returns the residual stream after this layer."""
        ops, attention, mlp = self.ops, self.attention, self.mlp
        add = functools.partial(dropper, context.dropout, self.cfg.dropout)
        y, _ = attention(ops.up(x_BSD, attention.inputs, ops.matmul), context)
        y_BSD = ops.down(((y, attention.out),), None, ops.matmul)
        bias = attention.out_bias[...]
        x_BSD = ops.settle(self.attention_norm, y_BSD, x_BSD, bias, add(0))
        hidden = ops.expand(mlp, x_BSD, ops.up, ops.matmul)
        y_BSD = ops.down(((hidden, mlp.down),), None, ops.matmul)
        return ops.settle(self.mlp_norm, y_BSD, x_BSD, mlp.down_bias[...], add(1))


class Encoder(nnx.Module):
    """The whole network. Build it under the layout's mesh; use it through `parts`."""

    def __init__(self, cfg: EncoderConfig, layout: Layout | None, ops: Ops, *, rngs: nnx.Rngs):
        """Makes the tables, the stacked blocks and the head."""
        self.cfg, self.layout, self.ops = cfg, layout, ops
        D, W = cfg.width, cfg.table_width
        normal = functools.partial(param.normal, rngs, layout, std=0.02)
        self.tokens = normal((cfg.padded(cfg.vocab), W), ("vocab", "embed"))
        self.positions = normal((cfg.padded(cfg.max_positions), W), ("positions", "embed"))
        if cfg.types:
            self.types = normal((cfg.padded(cfg.types), W), ("positions", "embed"))
        self.embed_norm = Norm("layer", W, cfg.norm_eps, layout)
        if cfg.embed_width:
            self.widen = normal((W, D), ("embed", None))
            self.widen_bias = param.constant(layout, (D,), (None,), 0.0)
        make_block = nnx.vmap(lambda r: Block(cfg, layout, ops, rngs=r))
        self.blocks = make_block(rngs.split(cfg.layers))
        if cfg.head == "none":
            return
        out = W if cfg.head == "mlm" else D
        self.dense = normal((D, out), ("embed", None))
        self.dense_bias = param.constant(layout, (out,), (None,), 0.0)
        if cfg.head == "mlm":
            self.head_norm = Norm("layer", W, cfg.norm_eps, layout)
            self.head_bias = param.constant(layout, (cfg.padded(cfg.vocab),), ("vocab",), 0.0)
        else:
            self.classes = normal((D, cfg.labels), ("embed", None))
            self.classes_bias = param.constant(layout, (cfg.labels,), (None,), 0.0)

    def context(self, batch: parts_.Batch, key: jax.Array | None) -> Context:
        """Returns what all blocks share. key: for dropout, None when it is off."""
        key = key if self.cfg.dropout > 0 else None
        return Context(batch["positions"], batch.get("segments"), None, key, causal=False)

    def embed(self, batch: parts_.Batch, context: Context, dtype: jnp.dtype) -> jax.Array:
        """Returns the start of the residual stream, x_BSD; dead tokens start from 0."""
        tokens_BS = batch["tokens"]
        places_BS = batch["positions"] + self.cfg.position_offset
        pairs = [(self.tokens, tokens_BS), (self.positions, places_BS)]
        if self.cfg.types:
            types_BS = batch.get("types")
            pairs.append((self.types, jnp.zeros_like(tokens_BS) if types_BS is None else types_BS))
        x_BSD = self.ops.lookup(pairs, dtype)
        if context.segments_BS is not None:
            # A table's row may be NaN, and NaN x 0 would spoil the gradients of all weights.
            live_BS = context.segments_BS >= 0
            if self.layout is not None:
                spec = self.layout.act("batch", "seq", residual=True)
                live_BS = jax.sharding.reshard(live_BS, spec)
            x_BSD = jnp.where(live_BS[..., None], x_BSD, jnp.zeros((), dtype))
        x_BSD = self.embed_norm(x_BSD)
        if context.dropout is not None:
            key = jax.random.fold_in(context.dropout, self.cfg.layers)
            x_BSD = drop(x_BSD, self.cfg.dropout, key)
        return self._dense(x_BSD, self.widen, self.widen_bias) if self.cfg.embed_width else x_BSD

    def _dense(self, x_BSD: jax.Array, w: nnx.Param, bias: nnx.Param) -> jax.Array:
        y_BSD = self.ops.score(x_BSD, w, x_BSD.dtype)
        return y_BSD + param.broadcast(bias, y_BSD, y_BSD.dtype)

    def _head(self, x_BSD: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        """Returns (what is scored, the function from it to float32 logits_BSV or classes)."""
        cfg, ops, layout = self.cfg, self.ops, self.layout
        x_BSD = self._dense(x_BSD, self.dense, self.dense_bias)
        if cfg.head == "classify":
            x_BSD = jnp.tanh(x_BSD) if cfg.pooler == "tanh" else jax.nn.relu(x_BSD)
            w, bias = self.classes, self.classes_bias
            return x_BSD, lambda x: self._dense(x.astype(jnp.float32), w, bias)
        x_BSD = self.head_norm(activate(cfg.activation, (x_BSD,)))
        w_DV = ops.whole(self.tokens, x_BSD.dtype).T
        spec = layout.act("batch", "seq", "vocab") if layout else None

        def project(hidden_BSD: jax.Array) -> jax.Array:
            logits = ops.matmul(
                hidden_BSD,
                w_DV,
                out_sharding=spec,
                out_dtype=jnp.float32,
                name=name_of(self.tokens),
            )
            logits = logits + param.broadcast(self.head_bias, logits, logits.dtype)
            return mask_padding(logits, cfg.vocab, ops.vocab)

        return ops.gather(x_BSD), project

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        """Returns float32 logits_BSV (classes, for a classifier) of the last block's output, or
        that output where there is no head."""
        if self.cfg.head == "none":
            return x_BSD.astype(jnp.float32)
        hidden_BSD, project = self._head(x_BSD)
        return project(hidden_BSD)

    def loss(self, x_BSD: jax.Array, targets_BS: jax.Array, chunks: int) -> LossSums:
        """Returns the cross-entropy sums of the last block's output. Raises: UserError without a
        head."""
        if self.cfg.head == "none":
            raise UserError(
                "model.head=none has no loss; train with mlm or classify (--model.head)"
            )
        hidden_BSD, project = self._head(x_BSD)
        classes = self.cfg.labels if self.cfg.head == "classify" else 0
        return cross_entropy(
            hidden_BSD, targets_BS, project, chunks, self.ops.vocab, accuracy=True, classes=classes
        )


def parts(
    cfg: EncoderConfig,
    layout: Layout | None = None,
    ops: Ops | None = None,
    dtype: jnp.dtype | str = "float32",
    loss_chunks: int = 1,
) -> parts_.ModelParts:
    """Returns the encoder as pure functions. Call it, and them, under the layout's mesh.

    A batch has tokens, positions and, where wanted, segments (below 0: dead), types and targets.
    A classifier's targets are at the first tokens, -1 elsewhere.

    Args: ops: None: local, kernels over packed tokens. dtype: of the residual stream and all
      matmuls. loss_chunks: pieces of the sequence whose logits exist at one time; must divide it.
    Raises: UserError when the layout's mesh cannot cut the model.
    """
    ops = PACKED if ops is None else ops
    dtype = jnp.dtype(dtype)
    if layout is not None:
        layout.check(cfg)

    def build(key: jax.Array) -> Encoder:
        return Encoder(cfg, layout, ops, rngs=nnx.Rngs(params=key))

    graph, abstract, axes = parts_.split(nnx.eval_shape(lambda: build(jax.random.key(0))))
    block_graph = nnx.split(nnx.merge(graph, abstract).blocks)[0]

    def block(
        weights: Tree, x: jax.Array, context: Context, cache: None = None
    ) -> tuple[jax.Array, None, None]:
        def once(x: jax.Array, repeat: jax.Array) -> tuple[jax.Array, None]:
            key = context.dropout
            key = None if key is None else jax.random.fold_in(key, repeat)
            layer_context = dataclasses.replace(context, dropout=key)
            return nnx.merge(block_graph, weights)(x, layer_context), None

        if cfg.repeats == 1:
            return once(x, jnp.int32(0))[0], None, None
        return jax.lax.scan(once, x, jnp.arange(cfg.repeats))[0], None, None

    merge = functools.partial(nnx.merge, graph)
    return parts_.ModelParts(
        layers=cfg.layers,
        abstract=abstract,
        axes=axes,
        init=lambda key: nnx.to_pure_dict(nnx.state(build(key))),
        context=merge(abstract).context,
        embed=lambda params, batch, context: merge(params).embed(batch, context, dtype),
        block=block,
        head=lambda params, x: merge(params).logits(x),
        head_loss=lambda params, x, batch: merge(params).loss(x, batch["targets"], loss_chunks),
        settle=lambda params, sums: params,
    )


def pack_batch(
    batch: parts_.Batch, lengths_B: jax.Array, capacity: int
) -> tuple[dict[str, jax.Array], PackInfo]:
    """Padded members (B, S) -> one row (1, T) of packed ones, with positions and segments.

    Args: batch: tokens and, where wanted, types and targets; what pads them is never read. Targets
      (B,) are classes. lengths_B: tokens of each row. capacity: T; see `packing.bucket`.
    Returns: (the batch of `parts`, how to unpack what comes out). Raises: as `packing.pack`.
    """
    tokens_T, info = pack(batch["tokens"], lengths_B, capacity)
    segments_T = info.segment_ids
    packed = {"tokens": tokens_T, "positions": info.positions, "segments": segments_T}
    if "types" in batch:
        packed["types"] = pack(batch["types"], lengths_B, capacity)[0]
    if "targets" in batch:
        targets_BS = _at_tokens(batch["targets"], batch["tokens"])
        packed["targets"] = jnp.where(
            segments_T >= 0, pack(targets_BS, lengths_B, capacity)[0], jnp.int32(-1)
        )
    return {name: x_T[None] for name, x_T in packed.items()}, info


def pad_batch(batch: parts_.Batch, lengths_B: jax.Array) -> dict[str, jax.Array]:
    """The same batch as `pack_batch`'s, left as padded rows (B, S)."""
    B, S = batch["tokens"].shape
    positions_BS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    live_BS = positions_BS < lengths_B[:, None]
    padded = dict(batch) | {
        "positions": positions_BS,
        "segments": jnp.where(live_BS, jnp.int32(0), jnp.int32(-1)),
    }
    if "targets" in batch:
        targets_BS = _at_tokens(batch["targets"], batch["tokens"])
        padded["targets"] = jnp.where(live_BS, targets_BS, jnp.int32(-1))
    return padded


def _at_tokens(targets: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """Targets (B, S) as they are; classes (B,) at the first token of each row."""
    if targets.ndim == 2:
        return targets
    first_1S = (jnp.arange(tokens_BS.shape[1]) == 0)[None]
    return jnp.where(first_1S, targets[:, None], jnp.int32(-1))


def logits(
    parts: parts_.ModelParts,
    params: Tree,
    batch: parts_.Batch,
    lengths_B: jax.Array,
    capacity: int | None = None,
) -> jax.Array:
    """Returns float32 logits_BSV of the masked-token head, 0 where rows are padded.

    capacity: the number of packed tokens; None: compute on the padded rows.
    """
    if capacity is None:
        found_BSV = parts.logits(params, pad_batch(batch, lengths_B))
        S = batch["tokens"].shape[1]
        live_BS = jnp.arange(S)[None] < lengths_B[:, None]
        return jnp.where(live_BS[..., None], found_BSV, 0.0)
    packed, info = pack_batch(batch, lengths_B, capacity)
    return unpack(parts.logits(params, packed)[0], info)


def classify(
    parts: parts_.ModelParts,
    params: Tree,
    batch: parts_.Batch,
    lengths_B: jax.Array,
    capacity: int | None = None,
) -> jax.Array:
    """Returns float32 logits (B, labels) of the classification head; its dense layers see the first
    tokens only. capacity: as in `logits`. A row without tokens has no class: ignore it."""
    if capacity is None:
        x_BSD, _ = parts.hidden(params, pad_batch(batch, lengths_B), None, "none")
        return parts.head(params, x_BSD[:, :1])[:, 0]
    packed, info = pack_batch(batch, lengths_B, capacity)
    return classify_packed(parts, params, packed, info.cu_seqlens[:-1])


def classify_packed(
    parts: parts_.ModelParts, params: Tree, packed: parts_.Batch, starts_B: jax.Array
) -> jax.Array:
    """Returns what `classify` does, of one row of packed tokens. starts_B: where texts begin."""
    x_1TD, _ = parts.hidden(params, packed, None, "none")
    return parts.head(params, x_1TD[:, starts_B])[0]


def embed(
    parts: parts_.ModelParts,
    params: Tree,
    batch: parts_.Batch,
    lengths_B: jax.Array,
    capacity: int | None = None,
) -> jax.Array:
    """Returns a float32 vector of length 1 for each row, (B, D): the mean of what the last block
    gives for its tokens (Sentence-BERT, arXiv 1908.10084, section 3), whatever the head.

    capacity: as in `logits`. A row without tokens has no meaning: ignore it.
    """
    B, S = batch["tokens"].shape
    if capacity is None:
        x_BSD = parts.hidden(params, pad_batch(batch, lengths_B), None, "none")[0]
    else:
        packed, info = pack_batch(batch, lengths_B, capacity)
        x_BSD = unpack(parts.hidden(params, packed, None, "none")[0][0], info)
    live_BS = jnp.arange(S)[None] < lengths_B[:, None]
    mean_BD = jnp.mean(x_BSD.astype(jnp.float32), axis=1, where=live_BS[..., None])
    return mean_BD / jnp.linalg.norm(mean_BD, axis=-1, keepdims=True)


def embed_packed(
    parts: parts_.ModelParts, params: Tree, packed: parts_.Batch, starts_B: jax.Array, pooling: str
) -> jax.Array:
    """Returns a float32 vector of each text of one row of packed tokens, (B, D).

    Args: packed: with the numbers of the texts as segments. starts_B: the first token of each.
      pooling: 'mean' of what the last block gives for the text's tokens, or 'cls', that of the
      first one. A text without tokens has no meaning: ignore it.
    """
    x_TD = parts.hidden(params, packed, None, "none")[0][0].astype(jnp.float32)
    if pooling == "cls":
        return x_TD[starts_B]
    numbers_B = jnp.arange(starts_B.shape[0])
    live_BT = (packed["segments"] == numbers_B[:, None]).astype(jnp.float32)
    sums_BD = jnp.matmul(live_BT, x_TD, precision=jax.lax.Precision.HIGHEST)
    return sums_BD / jnp.maximum(live_BT.sum(axis=1, keepdims=True), 1)
