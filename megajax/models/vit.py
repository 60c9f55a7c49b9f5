"""The vision tower: a transformer over packed patches of images of any resolution and aspect.

A row of a batch has a fixed number of places for patches, which the patches of its images fill one
after the other. An image is a segment of attention, so images of a row do not see each other.
Positions are rotary in two dimensions: the first half of a head's angles follow the row of a patch
in its image, the second half the column (Qwen2-VL, arXiv 2409.12191, section 2.1). The projector of
models/vlm.py reads what the last block returns.

Legend: P patches of a row.
"""

import dataclasses

from megajax.core.config import EPS, Checked, option
from megajax.core.errors import UserError, nearest_multiples
from megajax.cost.base import Stack
from megajax.layers.attention import AttentionConfig
from megajax.layers.mlp import ACTIVATIONS, Activation, MlpConfig


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
    channels: int = option(3, "colours of a pixel", at_least=1, at_most=4)
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
