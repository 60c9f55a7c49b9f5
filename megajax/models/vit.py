"""The vision tower: a transformer over packed patches of images of any resolution and aspect.

A row of a batch has a fixed number of places for patches, which the patches of its images fill one
after the other. An image is a segment of attention, so images of a row do not see each other.
Positions are rotary in two dimensions: the first half of a head's angles follow the row of a patch
in its image, the second half the column (Qwen2-VL, arXiv 2409.12191, section 2.1). The projector of
models/vlm.py reads what the last block returns.

Legend: B rows, P patches of a row, C values of a patch, D width of the tower, K pairs of rotary
dimensions of a head.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.core.config import EPS, Checked, option
from megajax.core.errors import UserError, nearest_multiples
from megajax.core.layout import Layout
from megajax.cost.base import Stack
from megajax.layers import param
from megajax.layers.attention import Attention, AttentionConfig, Context, RopeConfig, rotary
from megajax.layers.mlp import ACTIVATIONS, Activation, Mlp, MlpConfig
from megajax.layers.norm import Norm
from megajax.layers.ops import Ops
from megajax.models import parts as parts_

# What CLIP subtracts from red, green and blue in [0, 1], and divides by (arXiv 2103.00020's
# release; Qwen2-VL's image processor).
MEAN = 0.48145466, 0.4578275, 0.40821073
STD = 0.26862954, 0.26130258, 0.27577711
ROPE = RopeConfig(theta=10000.0)  # of the tower's two axes (Qwen2-VL's release)


@dataclasses.dataclass(frozen=True)
class VitConfig(Checked, section="tower"):
    """Everything that decides the parameters and the arithmetic of the vision tower."""

    layers: int = option(2, "number of equal blocks of the vision tower", at_least=1)
    width: int = option(64, "width of the vision tower", at_least=1)
    heads: int = option(4, "number of attention heads of the vision tower", at_least=1)
    mlp: int = option(256, "feed-forward width of the vision tower", at_least=1)
    patch: int = option(14, "side of a square patch", "pixels", at_least=1)
    merge: int = option(
        2, "side of the square of patches that the projector makes one token of", at_least=1
    )
    channels: int = option(3, "colours of a pixel: red, green, blue", at_least=3, at_most=3)
    temporal: int = option(
        2,
        "frames that a kernel of the patch embedding covers; an image is repeated so often",
        at_least=1,
    )
    norm_eps: float = option(
        1e-6, "number that the norms of the vision tower add to the variance", at_least=EPS
    )
    activation: Activation = option("quick_gelu", "activation function of the vision tower")
    min_pixels: int = option(56 * 56, "images with fewer pixels are enlarged", at_least=1)
    max_pixels: int = option(28 * 28 * 1280, "images with more pixels are reduced", at_least=1)

    def __post_init__(self):
        """Refuses shapes that cannot be built."""
        super().__post_init__()
        if self.width % (4 * self.heads):
            raise UserError(
                f"tower.width={self.width} must be divisible by 4 x tower.heads = "
                f"{4 * self.heads}: each half of a head has pairs of rotary dimensions; "
                f"{nearest_multiples(self.width, 4 * self.heads)} (--tower.width, --tower.heads)"
            )
        smallest = (self.patch * self.merge) ** 2
        if self.max_pixels < max(self.min_pixels, smallest):
            raise UserError(
                f"tower.max_pixels={self.max_pixels} must be at least tower.min_pixels="
                f"{self.min_pixels} and the {smallest} pixels of one merged patch "
                "(--tower.max_pixels, --tower.min_pixels)"
            )

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def patch_values(self) -> int:
        """Values of one patch of one frame, in the order (channel, row, column)."""
        return self.channels * self.patch**2

    @property
    def merged(self) -> int:
        """Patches that become one token of the decoder."""
        return self.merge**2

    @property
    def merged_width(self) -> int:
        """Width of the patches of one token side by side: what the projector reads."""
        return self.merged * self.width

    @property
    def max_patches(self) -> int:
        """The largest number of patches of an image."""
        return self.max_pixels // self.patch**2

    @property
    def attention(self) -> AttentionConfig:
        """The shape of an attention layer. Its key-value heads are as many as its query heads and
        are cut like them, whatever a mesh does with the fewer ones of a decoder."""
        return AttentionConfig(
            self.width,
            self.heads,
            self.heads,
            self.head_width,
            qkv_bias=True,
            out_bias=True,
            qk_norm=False,
            norm_eps=self.norm_eps,
            window=None,
            out_std=self._out_std,
            kv_word="heads",
        )

    @property
    def feed_forward(self) -> MlpConfig:
        """The shape of a feed-forward layer."""
        return MlpConfig(self.width, self.mlp, self.activation, True, self._out_std)

    @property
    def _out_std(self) -> float:
        return 0.02 / (2 * self.layers) ** 0.5  # as in a decoder

    @property
    def sizes(self) -> dict[str, tuple[int, str]]:
        """{'tower.' and a logical word: (size of that dimension, the flag that sets it)}."""
        return {
            "tower.embed": (self.width, "tower.width"),
            "tower.heads": (self.heads, "tower.heads"),
            "tower.mlp": (self.mlp, "tower.mlp"),
        }

    @property
    def stack(self) -> Stack:
        """The blocks, as the cost model sees them."""
        return Stack(
            self.layers,
            self.width,
            self.heads,
            self.heads,
            self.head_width,
            self.mlp,
            gated=ACTIVATIONS[self.activation].is_gated,
            causal=False,
        )


class Block(nnx.Module):
    """One layer: x + MLP(norm(x + Attn(norm(x)))) with biases everywhere."""

    def __init__(self, cfg: VitConfig, layout: Layout | None, ops: Ops, *, rngs: nnx.Rngs):
        """Makes two norms, attention and MLP."""
        self.ops = ops
        self.attention_norm = Norm("layer", cfg.width, cfg.norm_eps, layout)
        self.attention = Attention(cfg.attention, layout, ops, rngs=rngs)
        self.mlp_norm = Norm("layer", cfg.width, cfg.norm_eps, layout)
        self.mlp = Mlp(cfg.feed_forward, layout, rngs=rngs)

    def __call__(self, x_BPD: jax.Array, context: Context) -> jax.Array:
        """Returns the residual stream after this layer."""
        ops, attention, mlp = self.ops, self.attention, self.mlp
        projected = ops.up(self.attention_norm(x_BPD), attention.inputs, ops.matmul)
        y, _ = attention(projected, context)
        x_BPD = ops.down(((y, attention.out),), x_BPD, ops.matmul, attention.out_bias[...])
        hidden = mlp(ops.up(self.mlp_norm(x_BPD), mlp.inputs, ops.matmul))
        return ops.down(((hidden, mlp.down),), x_BPD, ops.matmul, mlp.down_bias[...])


class Tower(nnx.Module):
    """The vision tower, from pixels to the last block's output."""

    def __init__(self, cfg: VitConfig, layout: Layout | None, ops: Ops, *, rngs: nnx.Rngs):
        """Makes the patch embedding and the stacked blocks."""
        self.cfg, self.ops = cfg, ops
        shape = (cfg.temporal * cfg.patch_values, cfg.width)
        self.embed = param.normal(rngs, layout, shape, (None, "embed"), 0.02)
        make_block = nnx.vmap(lambda r: Block(cfg, layout, ops, rngs=r))
        self.blocks = parts_.as_tower(make_block(rngs.split(cfg.layers)))

    def start(self, batch: parts_.Batch, dtype: jnp.dtype) -> jax.Array:
        """Returns x_BPD before the first block.

        batch: patches uint8 (B, P, C), a patch's order (channel, row, column).
        """
        pixels_BPN = self._frames(self.ops.spread(batch["patches"]), dtype)
        return self.ops.score(pixels_BPN, self.embed, dtype)

    def __call__(
        self, x_BPD: jax.Array, batch: parts_.Batch, remat: parts_.Remat = "outputs"
    ) -> jax.Array:
        """Returns x_BPD after the stacked blocks, finite where patches are padding.

        batch: patch_places int32 (B, P, 2), a patch's (row, column) in its image; images int32
        (B, P), the number of a patch's image in its row, below 0: padding. remat: what the backward
        pass keeps of a block.
        """
        images_BP = batch["images"]
        # Positions have no part in attention without causal order; any of this shape will do.
        context = Context(images_BP, images_BP, self._tables(batch["patch_places"]), causal=False)
        graph, stack = nnx.split(self.blocks)

        def step(x_BPD: jax.Array, weights: nnx.State) -> tuple[jax.Array, None]:
            return nnx.merge(graph, weights)(x_BPD, context), None

        if remat != "none":
            step = jax.checkpoint(step, policy=parts_.remat_policy(remat), prevent_cse=False)
        return jax.lax.scan(step, x_BPD, stack)[0]

    def _frames(self, patches_BPC: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Returns normalised pixels in the order (channel, frame, row, column), each frame of a
        kernel the same image."""
        cfg = self.cfg
        mean, std = (np.resize(x, cfg.channels).repeat(cfg.patch**2) for x in (MEAN, STD))
        pixels_BPC = patches_BPC.astype(jnp.float32) / 255.0
        mean_11C, std_11C = (jnp.asarray(x, jnp.float32)[None, None] for x in (mean, std))
        pixels_BPC = (pixels_BPC - mean_11C) / std_11C
        colours = jnp.split(pixels_BPC.astype(dtype), cfg.channels, -1)
        return jnp.concatenate([c for c in colours for _ in range(cfg.temporal)], -1)

    def _tables(self, places_BP2: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (cos_BPK, sin_BPK): K / 2 angles of a patch's row, then K / 2 of its column."""
        half = functools.partial(rotary, cfg=ROPE, width=self.cfg.head_width // 2)
        pairs = zip(half(places_BP2[..., 0]), half(places_BP2[..., 1]), strict=True)
        cos, sin = (jnp.concatenate(tables, -1) for tables in pairs)
        return cos, sin
