"""The decoder: GPT-2, Llama, Qwen, Mixtral and MegaScale's parallel block, one definition.

A token enters `embed`, passes `layers` equal blocks and leaves through `head_loss`. A serial block
is x + MLP(norm(x + Attn(norm(x)))); the parallel one x + MLP(norm(x)) + Attn(norm(x)), which shares
one norm, one gather and one scatter (MegaScale section 3.1). With experts, MLP(x) is Moe(x) plus,
where some are shared, their MLP(x). The module names dimensions by logical words: a Layout decides
where arrays live, and Ops how they travel.

Legend: B rows, S positions, D model width, V vocabulary.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.errors import UserError
from megajax.core.layout import Layout
from megajax.core.tree import Tree
from megajax.layers import param
from megajax.layers.attention import Attention, Cache, Context, RopeConfig, rotary
from megajax.layers.latent import LatentAttention
from megajax.layers.losses import (
    LossSums,
    MoeSums,
    cross_entropy,
    mask_padding,
    token_logprobs,
)
from megajax.layers.mlp import Mlp, drop, dropper
from megajax.layers.moe import Moe, balance
from megajax.layers.norm import Norm
from megajax.layers.ops import Ops, add, join
from megajax.layers.param import name_of
from megajax.models import parts as parts_
from megajax.models.decoder_config import DecoderConfig


class Block(nnx.Module):
    """One layer, serial or parallel."""

    def __init__(self, cfg: DecoderConfig, layout: Layout | None, ops: Ops, *, rngs: nnx.Rngs):
        """Makes one norm (parallel) or two (serial), attention and MLP."""
        self.cfg, self.ops = cfg, ops
        norm = functools.partial(Norm, cfg.norm, cfg.width, cfg.norm_eps, layout)
        if cfg.norms != "after":
            self.attention_norm = norm()
            if cfg.block == "serial":
                self.mlp_norm = norm()
        if cfg.norms != "before":
            self.attention_after, self.mlp_after = norm(), norm()
        if cfg.latent.rank:
            attention: Any = LatentAttention(cfg.latent_attention, layout, ops, rngs=rngs)
        else:
            attention = Attention(cfg.attention, layout, ops, rngs=rngs)
        self.attention = attention
        self.moe = Moe(cfg.moe, cfg.expert, layout, ops, rngs=rngs) if cfg.moe.experts else None
        shape = cfg.feed_forward
        self.mlp = Mlp(shape, layout, rngs=rngs) if shape.hidden else None

    def __call__(
        self, x_BSD: jax.Array, context: Context, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None, MoeSums | None]:
        """Returns (the residual stream after this layer, its cache with these tokens, the router's
        sums of a mixture of experts)."""
        ops, attention, mlp, sums = self.ops, self.attention, self.mlp, None
        drop_at = functools.partial(dropper, context.dropout, self.cfg.dropout)  # of a place
        out_bias = attention.out_bias[...] if attention.cfg.out_bias else None
        down_bias = mlp.down_bias[...] if mlp and mlp.cfg.bias else None
        if self.cfg.norms != "before":
            return self._sandwiched(x_BSD, context, cache)
        normed = self.attention_norm(x_BSD)
        if self.cfg.block == "parallel":
            weights = attention.inputs + (mlp.inputs if mlp else ())
            projected = ops.up(normed, weights, ops.matmul)
            y, cache = attention(projected[:3], context, cache)
            products = [(y, attention.out)]
            if mlp:
                products.append((mlp(projected[3:]), mlp.down))
            both = [b for b in (out_bias, down_bias) if b is not None]
            bias = functools.reduce(operator.add, both) if both else None
            if self.moe is not None:
                answers, sums = self.moe(normed)
                x_BSD = join(answers, x_BSD, drop=drop_at(2))
            return ops.down(products, x_BSD, ops.matmul, bias, drop_at(0)), cache, sums
        y, cache = attention(attention.project(normed), context, cache)
        x_BSD = ops.down(((y, attention.out),), x_BSD, ops.matmul, out_bias, drop_at(0))
        normed = self.mlp_norm(x_BSD)
        if self.moe is not None:
            answers, sums = self.moe(normed)
            x_BSD = join(answers, x_BSD, drop=drop_at(2))
        if mlp:
            hidden = mlp(ops.up(normed, mlp.inputs, ops.matmul))
            x_BSD = ops.down(((hidden, mlp.down),), x_BSD, ops.matmul, down_bias, drop_at(1))
        return x_BSD, cache, sums

    def _sandwiched(
        self, x_BSD: jax.Array, context: Context, cache: Cache | None
    ) -> tuple[jax.Array, Cache | None, None]:
        """The layer whose sublayers' outputs are normalised: x + norm(Attn(norm(x))), where the
        inner norm may be missing, and the same with the MLP."""
        ops, attention, mlp = self.ops, self.attention, self.mlp
        has_before = self.cfg.norms == "both"
        assert mlp is not None

        def end(product: tuple, bias: Any, norm: Norm, x_BSD: jax.Array, place: int) -> jax.Array:
            y_BSD = ops.down((product,), None, ops.matmul, bias, None)
            drop_at = dropper(context.dropout, self.cfg.dropout, place)
            return add(norm(y_BSD), x_BSD, None, drop_at)

        out_bias = attention.out_bias[...] if attention.cfg.out_bias else None
        down_bias = mlp.down_bias[...] if mlp.cfg.bias else None
        normed = self.attention_norm(x_BSD) if has_before else x_BSD
        y, cache = attention(attention.project(normed), context, cache)
        x_BSD = end((y, attention.out), out_bias, self.attention_after, x_BSD, 0)
        normed = self.mlp_norm(x_BSD) if has_before else x_BSD
        hidden = mlp(ops.up(normed, mlp.inputs, ops.matmul))
        return end((hidden, mlp.down), down_bias, self.mlp_after, x_BSD, 1), cache, None


class Decoder(nnx.Module):
    """The whole network. Build it under the layout's mesh; use it through `parts`."""

    def __init__(self, cfg: DecoderConfig, layout: Layout | None, ops: Ops, *, rngs: nnx.Rngs):
        """Makes embeddings, the stacked blocks, the last norm and, unless tied, the head."""
        self.cfg, self.layout, self.ops = cfg, layout, ops
        D, V = cfg.width, cfg.padded_vocab
        self.tokens = param.normal(rngs, layout, (V, D), ("vocab", "embed"), 0.02)
        if cfg.position == "learned":
            shape = (cfg.max_positions, D)
            self.positions = param.normal(rngs, layout, shape, ("positions", "embed"), 0.01)
        make_block = nnx.vmap(lambda r: Block(cfg, layout, ops, rngs=r))
        self.blocks = make_block(rngs.split(cfg.layers))
        if cfg.moe.dense_layers:
            make_dense = nnx.vmap(lambda r: Block(cfg.dense, layout, ops, rngs=r))
            self.dense = parts_.as_tower(make_dense(rngs.split(cfg.moe.dense_layers)))
        self.norm = Norm(cfg.norm, D, cfg.norm_eps, layout)
        if not cfg.tied:
            self.head = param.normal(rngs, layout, (D, V), ("embed", "vocab"), 0.02)

    def context(self, batch: parts_.Batch, key: jax.Array | None) -> Context:
        """Returns what all blocks share. key: for dropout, None when it is off.

        Raises: UserError for packed rows whose documents would share slots of experts.
        """
        if self.cfg.moe.experts and batch.get("segments") is not None:
            self.cfg.moe.check_packed()
        positions_BS = batch["positions"]
        tables = None
        if self.cfg.position == "rope":
            tables = rotary(positions_BS, self.cfg.rope, self.cfg.rotary_width)
        local = None
        if tables is not None and self.cfg.rope.local_theta and "w" in self.cfg.letters:
            plain = RopeConfig(theta=self.cfg.rope.local_theta)
            local = rotary(positions_BS, plain, self.cfg.rotary_width)
        key = key if self.cfg.dropout > 0 else None
        return Context(positions_BS, batch.get("segments"), tables, key, local=local)

    def tables(self, batch: parts_.Batch) -> list[tuple[nnx.Param, jax.Array]]:
        """Returns the tables of the embedding, each with the rows of it that a batch reads."""
        pairs = [(self.tokens, batch["tokens"])]
        if self.cfg.position == "learned":
            pairs.append((self.positions, batch["positions"]))
        return pairs

    def embed(self, batch: parts_.Batch, context: Context, dtype: jnp.dtype) -> jax.Array:
        """Returns the start of the residual stream, x_BSD."""
        x_BSD = self.ops.lookup(self.tables(batch), dtype)
        if self.cfg.embed_scaled:
            x_BSD = x_BSD * jnp.asarray(self.cfg.width**0.5, dtype)
        if context.dropout is not None:
            key = jax.random.fold_in(context.dropout, self.cfg.layers)
            x_BSD = drop(x_BSD, self.cfg.dropout, key)
        return x_BSD

    def features(self, batch: parts_.Batch, dtype: jnp.dtype) -> jax.Array:
        """Returns features_BQD of the images of a batch (models/vlm.py). Raises: UserError."""
        raise UserError("a decoder without a vision tower reads no images")

    def _project(self, dtype: jnp.dtype) -> Callable[[jax.Array], jax.Array]:
        """Returns hidden_BSD -> float32 logits_BSV, the vocabulary cut and its padding masked."""
        ops, layout = self.ops, self.layout
        table = self.tokens if self.cfg.tied else self.head
        w_DV = ops.whole(table, dtype).T if self.cfg.tied else ops.whole(table, dtype)
        spec = layout.act("batch", "seq", "vocab") if layout else None

        def project(hidden_BSD: jax.Array) -> jax.Array:
            logits = ops.matmul(
                hidden_BSD,
                w_DV,
                out_sharding=spec,
                out_dtype=jnp.float32,
                name=name_of(table),
            )
            return mask_padding(logits, self.cfg.vocab, ops.vocab)

        return project

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        """Returns float32 logits_BSV of the residual stream after the last block."""
        return self._project(x_BSD.dtype)(self.ops.gather(self.norm(x_BSD)))

    def loss(
        self, x_BSD: jax.Array, batch: parts_.Batch, chunks: int, loss: Callable | None
    ) -> LossSums:
        """Returns the sums of the residual stream after the last block: the cross-entropy's, or
        those of `loss` (see `parts`)."""
        hidden_BSD, targets_BS = self.ops.gather(self.norm(x_BSD)), batch["targets"]
        project = self._project(x_BSD.dtype)
        if loss is None:
            return cross_entropy(hidden_BSD, targets_BS, project, chunks, self.ops.vocab)
        tokens_BS = token_logprobs(hidden_BSD, targets_BS, project, chunks, self.ops.vocab)
        return loss(*tokens_BS, batch)


def ends(cfg: DecoderConfig) -> tuple[set[str], set[str]]:
    """Returns the members of the parameters beside the layers: those that `embed` reads, and those
    that `head` and `head_loss` read. A tied table is in both."""
    first = {"tokens", "positions"} if cfg.position == "learned" else {"tokens"}
    first |= {"dense"} if cfg.moe.dense_layers else set()
    return first, {"norm", "tokens" if cfg.tied else "head"}


def parts(
    cfg: DecoderConfig,
    layout: Layout | None = None,
    ops: Ops | None = None,
    dtype: jnp.dtype | str = "float32",
    loss_chunks: int = 1,
    loss: Callable[..., LossSums] | None = None,
    network: Callable[..., Decoder] = Decoder,
    tower: Callable[[Callable[[Tree], Any]], parts_.Tower] | None = None,
) -> parts_.ModelParts:
    """Returns the decoder as pure functions. Call it, and them, under the layout's mesh.

    dtype: of the residual stream and all matmuls. loss_chunks: pieces of the sequence whose logits
    exist at one time; must divide it. loss(logprobs_BS, entropy_BS, batch) -> LossSums: of each
    target's log-probability and each prediction's entropy; None: the cross-entropy. network: a
    subclass of Decoder with another head (models/heads.py). tower(merge): its tower, if it has one;
    merge(params) is the network with these parameters.
    Raises: UserError when the layout's mesh cannot cut the model.
    """
    ops = Ops() if ops is None else ops
    dtype = jnp.dtype(dtype)
    if layout is not None:
        layout.check(cfg)

    def build(key: jax.Array) -> Decoder:
        return network(cfg, layout, ops, rngs=nnx.Rngs(params=key))

    graph, abstract, axes = parts_.split(nnx.eval_shape(lambda: build(jax.random.key(0))))
    block_graph = nnx.split(nnx.merge(graph, abstract).blocks)[0]

    def block_of(letter: str) -> Callable:
        """Returns the block of the layers of one kind, which alone is static in it."""
        like = dataclasses.replace(
            cfg, pattern=letter, window=cfg.window if letter == "w" else None
        )
        of_kind = parts(like, layout, ops, dtype, network=network)
        return of_kind.block

    def init(key: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.state(build(key)))

    def block(
        weights: Tree, x: jax.Array, context: Context, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None, MoeSums | None]:
        return nnx.merge(block_graph, weights)(x, context, cache)

    def move_bias(params: Tree, sums: LossSums) -> Tree:
        assert sums.moe is not None
        moe = params["blocks"]["moe"]
        bias_LE = balance(moe["bias"], sums.moe.load_E, cfg.moe.bias_rate)
        return params | {"blocks": params["blocks"] | {"moe": moe | {"bias": bias_LE}}}

    def merge(params: Tree) -> Decoder:
        # What calls this runs no block, so it takes none, whatever layers the parameters have.
        return nnx.merge(graph, params | {"blocks": abstract["blocks"]})

    def head_loss(params: Tree, x: jax.Array, batch: parts_.Batch) -> LossSums:
        return merge(params).loss(x, batch, loss_chunks, loss)

    def embed(params: Tree, batch: parts_.Batch, context: Context, *features: jax.Array) -> Any:
        return merge(params).embed(batch, context, dtype, *features)

    prelude = None
    if cfg.moe.dense_layers:
        dense_graph = nnx.split(nnx.merge(graph, abstract).dense)[0]

        def dense_block(weights: Tree, x: jax.Array, *others: Any) -> tuple:
            return nnx.merge(dense_graph, weights)(x, *others)

        prelude = parts_.Prelude("dense", cfg.moe.dense_layers, dense_block, embed)
    context_of = merge(abstract).context  # reads the configuration only, no parameter
    parts_of = parts_.ModelParts(
        layers=cfg.layers,
        abstract=abstract,
        axes=axes,
        init=init,
        context=context_of,
        embed=prelude.embed if prelude else embed,
        block=block,
        head=lambda params, x: merge(params).logits(x),
        head_loss=head_loss,
        see=lambda params, batch: merge(params).features(batch, dtype),
        tower=tower(merge) if tower else None,
        prelude=prelude,
    )
    if cfg.layer_kinds:
        blocks = tuple(block_of(letter) for letter in sorted(set(cfg.letters)))
        parts_of = dataclasses.replace(parts_of, kinds=cfg.layer_kinds, blocks=blocks)
    has_bias = cfg.moe.experts and cfg.moe.bias_rate > 0
    return dataclasses.replace(parts_of, settle=move_bias) if has_bias else parts_of
