"""A vision-language model: a decoder that reads images by a vision tower and a projector.

The tower (models/vit.py) reads the patches of a row's images. The projector joins each merge x
merge square of patches to one feature of the decoder's width: LayerNorm, product, GELU, product
(Qwen2-VL, arXiv 2409.12191, section 2.1). A token that shows a merged patch enters the residual
stream with its feature in the place of its embedding. Rotary positions have three axes, time, row
and column (M-RoPE, the same section); those of text are three equal numbers, which is the ordinary
rotary embedding, to the bit.

Legend: B rows, S positions, D model width, P patches of a row, Q merged patches of a row.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.core.config import Checked, group, option
from megajax.core.errors import UserError, divisors, nearest_multiples
from megajax.core.layout import Layout
from megajax.core.tree import Tree
from megajax.cost.base import Op, Phase, Stack, Workload
from megajax.cost.kernels import Attention, Matmul, PatchEmbedding, Rowwise
from megajax.layers import param
from megajax.layers.attention import Context, RopeConfig, frequencies
from megajax.layers.losses import LossSums
from megajax.layers.mlp import activate
from megajax.layers.moe import MoeConfig
from megajax.layers.norm import Norm
from megajax.layers.ops import Ops
from megajax.models import decoder, decoder_config
from megajax.models import parts as parts_
from megajax.models.decoder_config import DecoderConfig
from megajax.models.vit import Tower, VitConfig

# ---- shape


@dataclasses.dataclass(frozen=True)
class VlmConfig(Checked, section="model"):
    """Everything that decides the parameters and the arithmetic of a vision-language model."""

    decoder: DecoderConfig = group(DecoderConfig, flag="model")
    tower: VitConfig = group(VitConfig, flag="tower")
    image_token: int = option(
        511, "id of the token that stands for one merged patch of an image", at_least=0
    )
    mrope: str | None = option(
        "4,6,6",
        "pairs of a head's rotary dimensions that follow time, row and column, for "
        "model.position=rope; none: all follow the index of the token",
    )

    def __post_init__(self):
        """Refuses a token beyond the vocabulary and sections that do not add up to a head."""
        super().__post_init__()
        rope = self.decoder.rope
        scaled = rope.is_scaled and rope.scaling not in ("llama3", "linear")
        if rope.partial != 1.0 or scaled:
            raise UserError(
                "model.rope.partial and model.rope.scaling=longrope, dynamic or yarn are for "
                "models that read text only; use 1, and llama3 or linear (--model.rope.partial, "
                "--model.rope.scaling)"
            )
        if self.decoder.pattern is not None:
            raise UserError(
                f"model.pattern={self.decoder.pattern}: the layers of a vision-language model's "
                "decoder are alike; use none (--model.pattern)"
            )
        if self.image_token >= self.decoder.vocab:
            raise UserError(
                f"model.image_token={self.image_token} must be below model.vocab="
                f"{self.decoder.vocab}; nearest: {self.decoder.vocab - 1} (--model.image_token)"
            )
        if self.decoder.latent.rank or self.decoder.moe.dense_layers:
            raise UserError(
                f"model.latent.rank={self.decoder.latent.rank} and moe.dense_layers="
                f"{self.decoder.moe.dense_layers} must be 0 in a model that reads images "
                "(--model.latent.rank, --moe.dense_layers)"
            )
        pairs = self.decoder.head_width // 2
        sections = self.sections
        if sections and (len(sections) != 3 or min(sections) < 0 or sum(sections) != pairs):
            raise UserError(
                f"model.mrope={self.mrope} must be three numbers with the sum {pairs}, half of "
                f"model.head_width={self.decoder.head_width}; nearest: "
                f"{','.join(map(str, _sections(pairs)))} (--model.mrope, --model.head_width)"
            )

    @property
    def sections(self) -> tuple[int, ...]:
        """Pairs of rotary dimensions by axis (time, row, column); empty: one axis."""
        if self.mrope is None or self.decoder.position != "rope":
            return ()
        try:
            return tuple(int(part) for part in self.mrope.split(","))
        except ValueError:
            return (-1,)

    # What a run asks of its model is the decoder's.

    @property
    def layers(self) -> int:
        """Layers of the decoder, which a pipeline cuts."""
        return self.decoder.layers

    @property
    def width(self) -> int:
        """Width of the decoder."""
        return self.decoder.width

    @property
    def vocab(self) -> int:
        """Token ids that the decoder can predict."""
        return self.decoder.vocab

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding table."""
        return self.decoder.padded_vocab

    @property
    def heads(self) -> int:
        """Query heads of the decoder."""
        return self.decoder.heads

    @property
    def kv_heads(self) -> int:
        """Key-value heads of the decoder."""
        return self.decoder.kv_heads

    @property
    def head_width(self) -> int:
        """Width of one head of the decoder."""
        return self.decoder.head_width

    @property
    def max_positions(self) -> int:
        """Longest row that the decoder is meant for."""
        return self.decoder.max_positions

    @property
    def position(self) -> str:
        """How the decoder learns a token's position."""
        return self.decoder.position

    @property
    def dropout(self) -> float:
        """Rate of dropout of the decoder; the tower has none."""
        return self.decoder.dropout

    @property
    def moe(self) -> MoeConfig:
        """The decoder's mixture of experts."""
        return self.decoder.moe

    @property
    def window(self) -> int | None:
        """The decoder's attention window."""
        return self.decoder.window

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding transposed."""
        return self.decoder.tied

    @property
    def sizes(self) -> dict[str, tuple[int, str]]:
        """{logical word: (size of that dimension, the flag that sets it)}; the tower's words begin
        with 'tower.'."""
        return self.decoder.sizes | self.tower.sizes

    @property
    def axes(self) -> Tree:
        """The logical words of each parameter, as ModelParts.axes has them."""
        return parts(self).axes

    @property
    def stack(self) -> Stack:
        """The decoder's blocks, as the cost model sees them."""
        return self.decoder.stack

    def workload(
        self,
        batch: int,
        seq_len: int,
        dtype: str = "bfloat16",
        phase: Phase = "train",
        patches: int | None = None,
        frozen: Collection[str] = (),
    ) -> Workload:
        """Returns the forward pass of this many rows as a list of operations, the tower's too.

        patches: places for patches in a row; None: half of the row's tokens show images (chosen).
        An image is taken to fill them, up to the largest one. phase: as DecoderConfig.workload;
        'decode' has no tower. frozen: what is not trained, 'tower' or 'tower' and 'projector'.
        """
        load = self.decoder.workload(batch, seq_len, dtype, phase)
        patches = self.tower.merged * (seq_len // 2) if patches is None else patches
        if phase == "decode" or not patches:
            return load
        tower, T = self.tower, batch * patches
        image = min(patches, tower.max_patches)
        embed = Op(
            "embedding",
            PatchEmbedding(T, tower.patch, tower.channels, tower.width),
            tower.temporal,
            dtypes=(dtype,),
        )
        blocks = []
        for op in tower.stack.ops(batch, patches, patches, dtype):
            if not isinstance(op.kernel, Attention):
                blocks.append(op)
                continue
            # Images of the largest size, and one of what is left: each attends to itself.
            for count, size in ((patches // image, image), (1, patches % image)):
                if size:
                    one = dataclasses.replace(
                        op.kernel, batch=batch * count, queries=size, keys=size
                    )
                    blocks.append(dataclasses.replace(op, kernel=one))
        wide, tokens = tower.merged_width, T // tower.merged
        project = (
            Op("norm", Rowwise("norm", T, tower.width), dtypes=(dtype,)),
            Op("input", Matmul(tokens, wide, wide), dtypes=(dtype,)),
            Op("activation", Rowwise("activation", tokens, wide), dtypes=(dtype,)),
            Op("output", Matmul(tokens, wide, self.width), dtypes=(dtype,)),
        )
        is_frozen = "tower" in frozen, "tower" in frozen and "projector" in frozen
        ops = tuple(
            dataclasses.replace(op, frozen=still)
            for still, part in zip(is_frozen, ((embed, *blocks), project), strict=True)
            for op in part
        )
        first = Workload(ops, batch, patches, tower.layers, tower.width, phase)
        return dataclasses.replace(load, towers=(first,))


def _sections(pairs: int) -> tuple[int, int, int]:
    """Qwen2-VL's shares of a head: a quarter for time, the others equal."""
    side = (pairs - pairs // 4) // 2
    return pairs - 2 * side, side, side


# ---- presets


def _qwen2_vl(decoder: DecoderConfig) -> VlmConfig:
    """Qwen2-VL (arXiv 2409.12191, table 1; config.json of its release)."""
    return VlmConfig(
        decoder=decoder,
        tower=VitConfig(layers=32, width=1280, heads=16, mlp=5120),
        image_token=151655,
        mrope="16,24,24",
    )


def _vit(width: int, heads: int) -> VitConfig:
    """Optimus' ViT (arXiv 2408.03505, section 5: widths; 48 layers and mlp = 4 x width as ViT-22B
    has, arXiv 2302.05442, table 1; heads of 128 but for the smallest, whose 24 are chosen so that 8
    ranks divide them)."""
    return VitConfig(layers=48, width=width, heads=heads, mlp=4 * width, activation="gelu")


def _optimus(tower: VitConfig, decoder: DecoderConfig) -> VlmConfig:
    image_token = 128002 if decoder.vocab == 128256 else decoder.vocab - 1  # a reserved one
    mrope = "16,24,24" if decoder.position == "rope" else None
    return VlmConfig(decoder, tower, image_token, mrope)


def _gpt(layers: int, width: int, heads: int) -> DecoderConfig:
    """Optimus' GPT (arXiv 2408.03505, section 5: layers and width; the others as GPT-3's; the
    vocabulary is chosen)."""
    return DecoderConfig(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp=4 * width,
        vocab=51200,
        norm="layer",
        norm_eps=1e-5,
        position="learned",
        max_positions=2048,
        activation="gelu_tanh",
        bias="all",
    )


VITS: dict[str, Callable[[], VitConfig]] = {
    "vit_3b": lambda: _vit(2304, 24),
    "vit_5b": lambda: _vit(3072, 24),
    "vit_11b": lambda: _vit(4096, 32),
    "vit_22b": lambda: _vit(6144, 48),
}
_GPT_11B, _GPT_175B = (80, 3072, 24), (96, 12288, 96)
_llama_70b = decoder_config.PRESETS["llama3_70b"]

PRESETS: dict[str, Callable[[], VlmConfig]] = {
    "nano": VlmConfig,
    "qwen2_vl_2b": lambda: _qwen2_vl(
        DecoderConfig(
            layers=28,
            width=1536,
            heads=12,
            kv_heads=2,
            head_width=128,
            mlp=8960,
            vocab=151936,
            max_positions=32768,
            bias="qkv",
            tied=True,
            rope=RopeConfig(theta=1000000.0),
        )
    ),
    "qwen2_vl_7b": lambda: _qwen2_vl(decoder_config.PRESETS["qwen2_7b"]()),
    # The pairs of Optimus' experiments (arXiv 2408.03505, section 5).
    "vit_3b_gpt_11b": lambda: _optimus(VITS["vit_3b"](), _gpt(*_GPT_11B)),
    "vit_5b_gpt_175b": lambda: _optimus(VITS["vit_5b"](), _gpt(*_GPT_175B)),
    "vit_11b_llama_70b": lambda: _optimus(VITS["vit_11b"](), _llama_70b()),
    "vit_22b_llama_70b": lambda: _optimus(VITS["vit_22b"](), _llama_70b()),
    "vit_11b_gpt_175b": lambda: _optimus(VITS["vit_11b"](), _gpt(*_GPT_175B)),
    "vit_22b_gpt_175b": lambda: _optimus(VITS["vit_22b"](), _gpt(*_GPT_175B)),
}


# ---- positions


def positions(
    tokens: Sequence[int] | np.ndarray, grids: Sequence[tuple[int, int]], image_token: int
) -> np.ndarray:
    """Returns the M-RoPE positions int32 (3, S) of one sample: time, row and column.

    Text counts on by one in all three. An image that begins at position p has the time p, and its
    merged patch (row, column) the position (p + row, p + column); what follows it goes on at
    p + max(rows, columns), one after the largest position (Qwen2-VL's get_rope_index).

    Args: tokens: ids (S,), with an image_token for each merged patch. grids: (rows, columns) of the
      merged patches of each image, in order.
    Raises: UserError where tokens and grids do not fit each other.
    """
    tokens_S = np.asarray(tokens)
    places = np.flatnonzero(tokens_S == image_token)
    for number, (rows, columns) in enumerate(grids):
        if min(rows, columns) < 1:
            raise UserError(f"image {number} has {rows} x {columns} merged patches, and no place")
    needed = sum(rows * columns for rows, columns in grids)
    if needed != len(places):
        raise UserError(
            f"{len(places)} tokens are {image_token} (model.image_token), and the "
            f"{len(grids)} images have {needed} merged patches; each merged patch needs one token"
        )
    out_3S = np.empty((3, len(tokens_S)), np.int32)
    token, position, used = 0, 0, 0
    for number, (rows, columns) in enumerate(grids):
        size = rows * columns
        first = int(places[used])
        if places[used + size - 1] != first + size - 1:
            raise UserError(
                f"image {number} has {rows} x {columns} merged patches, and other tokens lie "
                "between its placeholders; those of one image must follow each other"
            )
        position += first - token
        out_3S[:, token:first] = np.arange(position - (first - token), position)
        image = out_3S[:, first : first + size]
        image[0] = position
        image[1] = position + np.repeat(np.arange(rows), columns)
        image[2] = position + np.tile(np.arange(columns), rows)
        token, position, used = first + size, position + max(rows, columns), used + size
    out_3S[:, token:] = position + np.arange(len(tokens_S) - token)
    return out_3S


# ---- network


class Projector(nnx.Module):
    """Norm, two products and GELU: what the tower returns becomes tokens of the decoder."""

    def __init__(self, cfg: VlmConfig, layout: Layout | None, ops: Ops, *, rngs: nnx.Rngs):
        """Makes the norm of a patch and two products with their biases."""
        self.cfg, self.layout, self.ops = cfg, layout, ops
        wide, D = cfg.tower.merged_width, cfg.width
        self.norm = Norm("layer", cfg.tower.width, 1e-6, layout)  # a constant in Qwen2-VL, too
        self.up = param.normal(rngs, layout, (wide, wide), ("embed", "mlp"), 0.02)
        self.up_bias = param.constant(layout, (wide,), ("mlp",), 0.0)
        self.down = param.normal(rngs, layout, (wide, D), ("mlp", "embed"), 0.02)
        self.down_bias = param.constant(layout, (D,), (None,), 0.0)

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        """Returns features_BQD. Neighbours that are merged follow each other in P."""
        (B, P, _), tower, ops = x_BPD.shape, self.cfg.tower, self.ops
        spec = self.layout.act("batch", "seq", None, residual=True) if self.layout else None
        shape = B, P // tower.merged, tower.merged_width
        x_BQD = jnp.reshape(self.norm(x_BPD), shape, out_sharding=spec)
        (hidden,) = ops.up(x_BQD, (self.up,), ops.matmul)
        hidden = activate("gelu", (hidden + param.broadcast(self.up_bias, hidden, hidden.dtype),))
        return ops.down(((hidden, self.down),), None, ops.matmul, self.down_bias[...])


class Vlm(decoder.Decoder):
    """A decoder with a vision tower. Build it under the layout's mesh; use it through `parts`."""

    def __init__(
        self,
        vision: VlmConfig,
        remat: parts_.Remat,
        cfg: DecoderConfig,
        layout: Layout | None,
        ops: Ops,
        *,
        rngs: nnx.Rngs,
        shares: bool = False,
    ):
        """Makes the decoder, whose parameters are those of a decoder of the same key, then tower
        and projector. remat: what the backward pass keeps of a block of the tower. shares: of
        `Pieces`."""
        super().__init__(cfg, layout, ops, rngs=rngs)
        self.vision, self.remat, self.shares = vision, remat, shares
        ops = Ops(matmul=ops.matmul, attend=ops.attend) if shares else ops
        self.tower = Tower(vision.tower, layout, ops, rngs=rngs)
        self.projector = Projector(vision, layout, ops, rngs=rngs)
        for _, variable in nnx.iter_graph((self.tower, self.projector)) if shares else ():
            if isinstance(variable, nnx.Variable):
                axes = variable.get_metadata("axes")
                variable.set_metadata("axes", tuple(a if a == "embed" else None for a in axes))

    def context(self, batch: parts_.Batch, key: jax.Array | None) -> Context:
        """Returns what all blocks share, with M-RoPE's angles if the batch has positions for it."""
        context = super().context(batch, key)
        if not self.vision.sections or "rotary" not in batch:
            return context
        freq_K = frequencies(self.cfg.rope, self.cfg.head_width)
        cuts = np.cumsum(self.vision.sections)[:-1]
        angle_BSK = jnp.concatenate(
            [
                batch["rotary"][..., i : i + 1].astype(jnp.float32) * freq[None, None]
                for i, freq in enumerate(np.split(freq_K, cuts))
            ],
            -1,
        )
        return dataclasses.replace(context, rotary=(jnp.cos(angle_BSK), jnp.sin(angle_BSK)))

    def embed(
        self,
        batch: parts_.Batch,
        context: Context,
        dtype: jnp.dtype,
        features_BQD: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the start of the residual stream, x_BSD, with the images' features in it.

        features_BQD: of ModelParts.embed, where a schedule runs the tower.
        """
        if features_BQD is not None:
            return self.ops.show(self.tables(batch), features_BQD, batch["places"], dtype)
        x_BSD, features_BQD = super().embed(batch, context, dtype), batch.get("features")
        if features_BQD is None and "patches" in batch:
            features_BQD = self.features(batch, dtype)
        if features_BQD is None:
            return x_BSD
        return self.ops.place(x_BSD, features_BQD, batch["places"])

    def features(self, batch: parts_.Batch, dtype: jnp.dtype) -> jax.Array:
        """Returns features_BQD of the merged patches of each row.

        Raises: UserError for a number of patches that cannot be merged, or cut over ranks.
        """
        P, ways = batch["patches"].shape[1], 1
        if self.layout is not None:
            ways = self.layout.ways(self.layout.rules.residual["seq"])
        check_patches(self.vision, P, ways)
        features_BQD = self.finish(self.segment(self.start(batch, dtype), batch), batch)
        return self.ops.spread(features_BQD) if self.shares else features_BQD

    def start(self, batch: parts_.Batch, dtype: jnp.dtype) -> jax.Array:
        """Returns what the tower's first block reads, x_BPD."""
        with jax.named_scope("tower"):
            return self.tower.start(batch, dtype)

    def segment(self, x_BPD: jax.Array, batch: parts_.Batch) -> jax.Array:
        """Returns x_BPD after the tower's blocks."""
        with jax.named_scope("tower"):
            return self.tower(x_BPD, batch, self.remat)

    def finish(self, x_BPD: jax.Array, batch: parts_.Batch) -> jax.Array:
        """Returns features_BQD of what the tower's last block gave."""
        with jax.named_scope("projector"):
            return self.projector(x_BPD)


def check_patches(cfg: VlmConfig, patches: int, tensor: int) -> None:
    """Refuses a number of patches of a row that cannot be merged, or cut over tensor ranks.

    Raises: UserError.
    """
    factor = cfg.tower.merged * tensor
    if patches % factor:
        raise UserError(
            f"data.patches={patches} must be divisible by the {cfg.tower.merged} patches of a "
            f"merged one x mesh.tensor {tensor} = {factor}; {nearest_multiples(patches, factor)} "
            "(--data.patches, --mesh.tensor)"
        )


class Pieces(NamedTuple):
    """How a tower is taken apart (ModelParts.tower).

    segments: equal pieces of its layers, which must be divisible by them; 0: `embed` runs it.
    shares: every tensor rank has all weights of tower and projector, and works on some of the rows.
    """

    segments: int = 0
    shares: bool = False


def parts(
    cfg: VlmConfig,
    layout: Layout | None = None,
    ops: Ops | None = None,
    dtype: jnp.dtype | str = "float32",
    loss_chunks: int = 1,
    loss: Callable[..., LossSums] | None = None,
    remat: parts_.Remat = "outputs",
    pieces: Pieces = Pieces(),
) -> parts_.ModelParts:
    """Returns the network as pure functions. Call it, and them, under the layout's mesh.

    A batch has the decoder's members and, of images, `places` int32 (B, S), the number of the
    merged patch of the row that a token shows, -1 for text; `rotary` int32 (B, S, 3), the M-RoPE
    positions (absent: those of the text); `patches`, `patch_places` and `images` as Tower reads
    them, or in their place `features` (B, Q, D), what `see` returned of them. A batch without these
    is one of text. The members of the parameters are the decoder's, `tower` and `projector`.

    remat: what the backward pass keeps of a block of the tower. pieces: of the tower, for
    a pipeline that runs it in slots. Other arguments: of decoder.parts.
    Raises: UserError when the layout's mesh cannot cut the model, or cuts the sequence over
    `context`, and for segments that do not divide the layers.
    """
    layers, (segments, shares) = cfg.tower.layers, pieces
    if segments and layers % segments:
        raise UserError(
            f"encoder.segments={segments} must divide tower.layers={layers}; nearest: "
            f"{min(divisors(layers), key=lambda n: abs(n - segments))} (--encoder.segments)"
        )
    if layout is not None:
        layout.check(cfg)
        check_context(layout.ways(("context",)))
    kind = jnp.dtype(dtype)

    def tower(merge: Callable[[Tree], Any]) -> parts_.Tower:
        return parts_.Tower(
            layers,
            segments,
            members=("tower", "projector"),
            start=lambda params, batch: merge(params).start(batch, kind),
            segment=lambda params, x, batch: merge(params).segment(x, batch),
            finish=lambda params, x, batch: merge(params).finish(x, batch),
            images="images",
            shares=shares,
        )

    network = functools.partial(Vlm, cfg, remat, shares=shares)
    return decoder.parts(cfg.decoder, layout, ops, dtype, loss_chunks, loss, network, tower)


def check_context(ways: int) -> None:
    """Refuses context parallelism. ways: size of the mesh axis. Raises: UserError."""
    if ways > 1:
        raise UserError(
            f"mesh.context={ways}: the patches of an image attend to each other on one device, so "
            "a vision-language model cannot be cut along the sequence; use 1 (--mesh.context)"
        )
