"""Shape of a decoder, its presets, and what follows from the shape: sizes, parameters, FLOPs.

Presets name the source of their numbers. Vocabularies are rounded up to a multiple that every
tensor-parallel size divides; logits of the added rows are masked.
"""

import dataclasses
import reprlib
from collections.abc import Callable
from typing import Any, Literal, Self

from megajax.core.config import EPS, Checked, above, equal, group, option
from megajax.core.errors import UserError, nearest_divisors
from megajax.core.tree import Tree
from megajax.cost.base import Latent, Op, Phase, Routed, Stack, Workload, lookup
from megajax.cost.kernels import Matmul
from megajax.layers.attention import AttentionConfig, Kind, RopeConfig, logit_factor
from megajax.layers.latent import LatentConfig, LatentShape
from megajax.layers.mlp import ACTIVATIONS, Activation, MlpConfig
from megajax.layers.moe import MoeConfig
from megajax.layers.norm import NormKind

LETTERS = "w", "f", "n"  # of DecoderConfig.pattern
MOST_LETTERS = 2**14  # (chosen) as many as the layers of a config.json that is read


@dataclasses.dataclass(frozen=True)
class DecoderConfig(Checked, section="model"):
    """Everything that decides the parameters and the arithmetic of a decoder."""

    layers: int = option(
        4, "number of equal blocks; moe.dense_layers adds others before them", at_least=1
    )
    width: int = option(128, "model width D", at_least=1)
    heads: int = option(4, "number of query heads H", at_least=1)
    kv_heads: int = option(
        4, "number of key-value heads G; must divide the query heads", at_least=1
    )
    head_width: int = option(32, "width of one head K", at_least=1)
    mlp: int = option(
        384,
        "feed-forward width F of a model without experts",
        needs=equal("moe.experts", 0),
        at_least=1,
    )
    vocab: int = option(512, "number of token ids that the model can predict", at_least=1)
    vocab_multiple: int = option(128, "the vocabulary is padded to a multiple of this", at_least=1)
    block: Literal["serial", "parallel"] = option(
        "serial",
        "attention, then the feed-forward layer, or both at a time (MegaScale section 3.1)",
    )
    norm: NormKind = option(
        "rms", "kind of normalisation; rms_plus_one: RMSNorm, its scale stored less 1 (Gemma)"
    )
    norms: Literal["before", "after", "both"] = option(
        "before",
        "what is normalised of attention and of the feed-forward layer: before: inputs, after: "
        "outputs",
    )
    norm_eps: float = option(1e-6, "number that the norm adds to the variance", at_least=EPS)
    position: Literal["rope", "learned", "none"] = option(
        "rope", "how the model learns a token's position"
    )
    max_positions: int = option(
        131072, "longest row that the model is meant for", "tokens", at_least=1
    )
    activation: Activation = option("swiglu", "activation function of the feed-forward layer")
    bias: Literal["none", "qkv", "all"] = option("none", "projections that have a bias")
    qk_norm: bool = option(False, "RMSNorm on each query and key head")
    qk_norm_over: Literal["head", "width"] = option(
        "head",
        "what this norm is taken over: each head, or all heads of a token together (OLMo 2)",
        needs=equal("qk_norm", True),
    )
    query_scale: float | None = option(
        None,
        "logits of attention are divided by the square root of this; none: the head width",
        above=0,
    )
    embed_scaled: bool = option(
        False, "the embedding is multiplied by the square root of the width"
    )
    sinks: bool = option(
        False,
        "a learned logit for each head in the sum of the attention's softmax, which has no value",
    )
    window: int | None = option(
        None,
        "length of a sliding attention window, the token itself included; none: full attention",
        "tokens",
        at_least=1,
    )
    pattern: str | None = option(
        None,
        "kinds of the layers, a letter for each, repeated over all: w with the sliding window, f "
        "with full attention, n with full attention and without rotary positions; none: all alike",
    )
    tied: bool = option(True, "the head is the embedding transposed")
    dropout: float = option(
        0.0, "dropout rate on the embedding and on each sublayer's output", at_least=0, below=1
    )
    rope: RopeConfig = group(RopeConfig, needs=equal("position", "rope"))
    latent: LatentConfig = group(LatentConfig)
    moe: MoeConfig = group(MoeConfig, flag="moe", needs=above(0, "moe.experts"))

    def __post_init__(self):
        """Refuses shapes that cannot be built."""
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise UserError(
                f"model.kv_heads={self.kv_heads} must divide model.heads={self.heads}; "
                f"{nearest_divisors(self.heads, self.kv_heads)} (--model.kv_heads)"
            )
        if self.position == "rope" and self.head_width % 2:
            raise UserError(
                f"model.head_width={self.head_width} must be even for rotary positions; "
                f"nearest: {self.head_width - 1}, {self.head_width + 1} (--model.head_width)"
            )
        self._check_pattern()
        self._check_norms()
        if self.moe.experts and self.moe.shared and self.bias == "all":
            raise UserError(
                f"model.bias=all: shared experts have no biases, and moe.shared={self.moe.shared}; "
                "use none or qkv, or moe.shared=0 (--model.bias, --moe.shared)"
            )
        if self.latent.rank:
            self._check_latent()

    def _check_latent(self) -> None:
        """Refuses latent attention of other forms than DeepSeek-V3's."""
        rotary, value, width = self.latent.rotary, self.latent.value, self.head_width
        for wrong, problem in (
            (self.block != "serial", "model.block=parallel: use serial (--model.block)"),
            (
                self.position != "rope",
                f"model.position={self.position}: use rope (--model.position)",
            ),
            (self.bias != "none", f"model.bias={self.bias}: use none (--model.bias)"),
            (self.qk_norm, "model.qk_norm=true: use false (--model.qk_norm)"),
            (self.sinks, "model.sinks=true: use false (--model.sinks)"),
            (
                self.kv_heads != self.heads,
                f"model.kv_heads={self.kv_heads}: every head has its own keys; use "
                f"{self.heads} (--model.kv_heads)",
            ),
            (
                rotary % 2 or rotary >= width,
                f"model.latent.rotary={rotary} must be even and below model.head_width={width}, of "
                f"which it is a part; nearest: {max(2, min(rotary, width - 1) // 2 * 2)} "
                "(--model.latent.rotary)",
            ),
            (
                value > width,
                f"model.latent.value={value} must be at most model.head_width={width}; nearest: "
                f"{width} (--model.latent.value)",
            ),
        ):
            if wrong:
                raise UserError(
                    f"latent attention (model.latent.rank={self.latent.rank}): {problem}"
                )

    def _check_norms(self) -> None:
        """Refuses norms that a block cannot have, and a rotated part of a head that is odd."""
        if self.norms != "before" and (
            self.block == "parallel" or self.moe.experts or self.latent.rank
        ):
            raise UserError(
                f"model.norms={self.norms}: a parallel block, one with experts and one with latent "
                "attention have their norms before; use before (--model.norms)"
            )
        if (self.qk_norm_over == "width" or self.query_scale is not None) and self.latent.rank:
            raise UserError(
                "model.qk_norm_over=width and model.query_scale: latent attention has neither; use "
                "head and none (--model.qk_norm_over, --model.query_scale)"
            )
        if self.position == "rope" and self.rotary_width % 2:
            raise UserError(
                f"model.rope.partial={self.rope.partial} of model.head_width={self.head_width} is "
                f"{self.rotary_width} numbers, which must be even (--model.rope.partial)"
            )

    def _check_pattern(self) -> None:
        """Refuses letters that mean nothing, and a window that no layer has, or that none sets."""
        if self.pattern is None:
            return
        shown = f"model.pattern={reprlib.repr(self.pattern)}"
        if not self.pattern or set(self.pattern) - set(LETTERS) or len(self.pattern) > MOST_LETTERS:
            raise UserError(
                f"{shown} must be one to {MOST_LETTERS} of the letters {', '.join(LETTERS)}; for "
                "example wwwwwf, or none (--model.pattern)"
            )
        if self.latent.rank or self.moe.dense_layers:
            raise UserError(
                f"{shown}: with model.latent.rank={self.latent.rank} and moe.dense_layers="
                f"{self.moe.dense_layers} layers are of one kind; use none (--model.pattern)"
            )
        if "n" in self.pattern and self.position != "rope":
            raise UserError(
                f"{shown}: the letter n takes rotary positions away, and model.position="
                f"{self.position}; use f and w, or --model.position=rope (--model.pattern)"
            )
        if ("w" in self.pattern) != (self.window is not None):
            raise UserError(
                f"{shown} and model.window={self.window}: layers of the letter w have the window; "
                "set both, or none of the two (--model.pattern, --model.window)"
            )

    @property
    def letters(self) -> str:
        """The letter of each layer's kind, as `pattern` has them; '' where it is None."""
        pattern = self.pattern or ""
        return (pattern * -(-self.layers // max(1, len(pattern))))[: self.layers]

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """The number of each layer's kind in `attention.kinds`; empty where all are alike."""
        present = sorted(set(self.letters))
        return tuple(map(present.index, self.letters)) if len(present) > 1 else ()

    @property
    def windows(self) -> tuple[tuple[int | None, float], ...]:
        """(window, share of the layers) of a pattern; empty: all layers have `window`."""
        if self.pattern is None:
            return ()
        narrow = self.letters.count("w") / self.layers
        return tuple((w, part) for w, part in ((self.window, narrow), (None, 1 - narrow)) if part)

    def at(self, length: int) -> Self:
        """Returns the configuration for rows of this many tokens: scalings of rotary embeddings
        that depend on the length are settled."""
        rope = self.rope.at(length, self.rotary_width)
        return self if rope == self.rope else dataclasses.replace(self, rope=rope)

    def part(self, start: int, stop: int) -> Self:
        """Returns the configuration of a model of the layers from `start` on and before `stop`."""
        pattern = self.letters[start:stop] or None
        window = self.window if pattern is None or "w" in pattern else None
        return dataclasses.replace(self, layers=stop - start, pattern=pattern, window=window)

    @property
    def axes(self) -> Tree:
        """The logical words of each parameter, as ModelParts.axes has them."""
        from megajax.models import decoder  # which reads this configuration

        return decoder.parts(self).axes

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding table."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def depth(self) -> int:
        """Number of all blocks."""
        return self.layers + self.moe.dense_layers

    @property
    def dense(self) -> "DecoderConfig":
        """The blocks before those with experts, as a decoder of their own."""
        plain = MoeConfig()
        return dataclasses.replace(self, layers=self.depth, mlp=self.moe.dense_width, moe=plain)

    @property
    def rotary_width(self) -> int:
        """Numbers of a head that are rotated."""
        return self.latent.rotary if self.latent.rank else int(self.head_width * self.rope.partial)

    @property
    def cached(self) -> tuple[int, int, int]:
        """What a cache holds of a token: (key heads, numbers of one, numbers of one's values). With
        latent attention all heads share one key, whose first numbers are the value."""
        if self.latent.rank:
            return 1, self.latent.rank + self.latent.rotary, 0
        return self.kv_heads, self.head_width, self.head_width

    @property
    def latent_attention(self) -> LatentShape:
        """The shape of a layer of latent attention."""
        return LatentShape(
            self.width,
            self.heads,
            self.head_width,
            self.latent,
            self.window,
            self._out_std,
            logit_factor(self.rope),
        )

    @property
    def attention(self) -> AttentionConfig:
        """The attention layer's own shape."""
        return AttentionConfig(
            self.width,
            self.heads,
            self.kv_heads,
            self.head_width,
            qkv_bias=self.bias != "none",
            out_bias=self.bias == "all",
            qk_norm=self.qk_norm,
            norm_eps=self.norm_eps,
            window=self.window,
            out_std=self._out_std,
            sinks=self.sinks,
            kinds=self._kinds,
            norm="rms_plus_one" if self.norm == "rms_plus_one" else "rms",
            norm_over=self.qk_norm_over,
            query_scale=self.query_scale,
        )

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        local = "rotary" if self.rope.local_theta is None else "local"
        kinds = {"f": Kind(), "n": Kind(tables="none"), "w": Kind(self.window, local)}
        return tuple(kinds[letter] for letter in sorted(set(self.letters)))

    @property
    def feed_forward(self) -> MlpConfig:
        """The feed-forward layer's own shape, or the shared experts' together (hidden 0: none)."""
        hidden = self.moe.shared * self.moe.width if self.moe.experts else self.mlp
        bias = self.bias == "all"
        return MlpConfig(self.width, hidden, self.activation, bias, self._out_std)

    @property
    def expert(self) -> MlpConfig:
        """The shape of one routed expert."""
        bias = self.bias == "all"
        return MlpConfig(self.width, self.moe.width, self.activation, bias, self._out_std)

    @property
    def _out_std(self) -> float:
        return 0.02 / (2 * self.depth) ** 0.5  # GPT-2: the residual stream grows with depth

    @property
    def sizes(self) -> dict[str, tuple[int, str]]:
        """{logical word: (size of that dimension, the flag that sets it)}."""
        sizes = {
            "embed": (self.width, "model.width"),
            "heads": (self.heads, "model.heads"),
            "kv_heads": (self.kv_heads, "model.kv_heads"),
            "mlp": (self.mlp, "model.mlp"),
            "vocab": (self.padded_vocab, "model.vocab_multiple"),
            "layers": (self.layers, "model.layers"),
        }
        if self.position == "learned":
            sizes["positions"] = (self.max_positions, "model.max_positions")
        if self.moe.experts:
            sizes["mlp"] = (self.moe.width, "moe.width")
            sizes["expert"] = (self.moe.experts, "moe.experts")
        if self.moe.experts and self.moe.dense_layers:
            sizes["dense.mlp"] = (self.moe.dense_width, "moe.dense_width")
        if self.latent.rank:  # which ZeRO cuts as it cuts the width
            sizes["latent.embed"] = (self.latent.rank, "model.latent.rank")
            if self.latent.query_rank is not None:
                sizes["query_latent.embed"] = (self.latent.query_rank, "model.latent.query_rank")
        return sizes

    @property
    def stack(self) -> Stack:
        """The blocks, as the cost model sees them; biases and norms have no parameters there, as
        every convention of counting FLOPs has it."""
        moe, routed = self.moe, None
        if moe.experts:
            capacity = moe.capacity_factor if moe.mode == "capacity" else None
            routed = Routed(moe.experts, moe.top_k, moe.width, capacity)
        return Stack(
            self.layers,
            self.width,
            self.heads,
            self.kv_heads,
            self.head_width,
            self.feed_forward.hidden,
            gated=ACTIVATIONS[self.activation].is_gated,
            parallel=self.block == "parallel",
            window=self.window,
            windows=self.windows,
            routed=routed,
            latent=Latent(**dataclasses.asdict(self.latent)) if self.latent.rank else None,
        )

    def workload(
        self, batch: int, seq_len: int, dtype: str = "bfloat16", phase: Phase = "train"
    ) -> Workload:
        """Returns the forward pass of this many rows as a list of operations.

        phase: 'train': logits of all tokens. 'prefill': logits of each row's last token. 'decode':
        one token a row, which attends to seq_len tokens in the cache, itself included.
        """
        queries = 1 if phase == "decode" else seq_len
        tokens = batch * queries
        scored = tokens if phase == "train" else batch
        tables = [lookup(tokens, self.vocab, self.width, dtype)]
        if self.position == "learned":
            tables.append(lookup(tokens, self.max_positions, self.width, dtype))
        sets = 0 if self.tied else 1
        head = Op("head", Matmul(scored, self.width, self.vocab), 1, sets, (dtype,))
        blocks = self.stack.ops(batch, queries, seq_len, dtype)
        if self.moe.experts and self.moe.dense_layers:
            before = dataclasses.replace(self.dense.stack, layers=self.moe.dense_layers)
            blocks = *before.ops(batch, queries, seq_len, dtype), *blocks
        return Workload((*tables, *blocks, head), batch, queries, self.layers, self.width, phase)


def _gpt2(layers: int, width: int, heads: int) -> DecoderConfig:
    """GPT-2 (Radford et al. 2019, table 2)."""
    return DecoderConfig(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_width=64,
        mlp=4 * width,
        vocab=50257,
        norm="layer",
        norm_eps=1e-5,
        position="learned",
        max_positions=1024,
        activation="gelu_tanh",
        bias="all",
        tied=True,
    )


def _llama3(layers: int, width: int, heads: int, mlp: int, **changes) -> DecoderConfig:
    """Llama 3.1 and 3.2 (arXiv 2407.21783, table 3; the 1B's model card)."""
    values: dict[str, Any] = dict(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=8,
        head_width=width // heads,
        mlp=mlp,
        vocab=128256,
        norm_eps=1e-5,
        tied=False,
        rope=RopeConfig(theta=500000.0, factor=8.0),
    )
    return DecoderConfig(**(values | changes))


def _qwen(layers: int, width: int, heads: int, kv_heads: int, mlp: int, **changes) -> DecoderConfig:
    """Qwen2 and Qwen3 dense (arXiv 2407.10671 table 1, 2505.09388 table 1)."""
    values: dict[str, Any] = dict(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_width=128,
        mlp=mlp,
        vocab=151936,
        max_positions=32768,
        tied=False,
        rope=RopeConfig(theta=1000000.0),
    )
    return DecoderConfig(**(values | changes))


def _mixtral_8x7b() -> DecoderConfig:
    """Mixtral 8x7B (arXiv 2401.04088, table 1; rotary base and epsilon of its config.json)."""
    return DecoderConfig(
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        head_width=128,
        mlp=14336,
        vocab=32000,
        norm_eps=1e-5,
        max_positions=32768,
        tied=False,
        rope=RopeConfig(theta=1000000.0),
        moe=MoeConfig(experts=8, top_k=2, width=14336),
    )


def _deepseek(**changes) -> DecoderConfig:
    """DeepSeek-V3 (arXiv 2412.19437 section 4.2), without the layer that predicts a second token.
    The rate of the experts' bias is that of the paper, its config.json has none."""
    values: dict[str, Any] = dict(
        layers=58,
        width=7168,
        heads=128,
        kv_heads=128,
        head_width=192,
        vocab=129280,
        max_positions=163840,
        tied=False,
        latent=LatentConfig(rank=512, query_rank=1536, rotary=64, value=128),
        moe=MoeConfig(
            experts=256,
            top_k=8,
            width=2048,
            shared=1,
            score="sigmoid",
            scale=2.5,
            groups=8,
            top_groups=4,
            aux_loss=1e-4,
            bias_rate=1e-3,
            dense_layers=3,
            dense_width=18432,
        ),
    )
    values["rope"] = RopeConfig(
        factor=40.0, scaling="yarn", original_positions=4096, mscale=1.0, mscale_all_dim=1.0
    )
    return DecoderConfig(**(values | changes))


def _gpt_oss(layers: int, experts: int) -> DecoderConfig:
    """GPT-OSS (model card, arXiv 2508.10925 section 2; sizes of its config.json)."""
    return DecoderConfig(
        layers=layers,
        width=2880,
        heads=64,
        kv_heads=8,
        head_width=64,
        vocab=201088,
        norm_eps=1e-5,
        activation="swiglu_clamped",
        bias="all",
        sinks=True,
        window=128,
        pattern="wf",
        tied=False,
        rope=RopeConfig(
            theta=150000.0, factor=32.0, scaling="yarn", original_positions=4096, truncate=False
        ),
        mlp=2880,
        moe=MoeConfig(experts=experts, top_k=4, width=2880),
    )


def _moonlight() -> DecoderConfig:
    """Moonlight 16B-A3B (arXiv 2502.16982; sizes of its config.json): DeepSeek-V3's layers."""
    return _deepseek(
        layers=26,
        width=2048,
        heads=16,
        kv_heads=16,
        vocab=163840,
        norm_eps=1e-5,
        max_positions=8192,
        rope=RopeConfig(theta=50000.0),
        latent=LatentConfig(rank=512, rotary=64, value=128),
        moe=MoeConfig(
            experts=64,
            top_k=6,
            width=1408,
            shared=2,
            score="sigmoid",
            scale=2.446,
            aux_loss=1e-3,
            bias_rate=1e-3,
            dense_layers=1,
            dense_width=11264,
        ),
    )


def _megascale(layers: int, width: int, heads: int) -> DecoderConfig:
    """MegaScale section 6.1. The paper gives no window: 1024 is (chosen, half its sequence)."""
    return DecoderConfig(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp=4 * width,
        vocab=64000,
        block="parallel",
        norm="layer",
        norm_eps=1e-5,
        position="learned",
        max_positions=2048,
        activation="gelu_tanh",
        window=1024,
        tied=True,
    )


def _gemma3(layers: int, width: int, heads: int, kv_heads: int, mlp: int, **changes):
    """Gemma 3's text models (arXiv 2503.19786, section 2 and table 1; config.json of the releases,
    of which the 270M's came later): five layers with a window for one without."""
    values: dict[str, Any] = dict(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_width=256,
        mlp=mlp,
        vocab=262144,
        norm="rms_plus_one",
        norms="both",
        max_positions=32768,
        activation="geglu_tanh",
        qk_norm=True,
        embed_scaled=True,
        window=512,
        pattern="wwwwwf",
        rope=RopeConfig(theta=1000000.0, local_theta=10000.0),
    )
    return DecoderConfig(**(values | changes))


def _olmo2(layers: int, width: int, heads: int, mlp: int) -> DecoderConfig:
    """OLMo 2 (arXiv 2501.00656, table 1 and section 2; config.json of the releases)."""
    return DecoderConfig(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_width=128,
        mlp=mlp,
        vocab=100352,
        norms="after",
        max_positions=4096,
        qk_norm=True,
        qk_norm_over="width",
        tied=False,
        rope=RopeConfig(theta=500000.0),
    )


def _smollm3_3b() -> DecoderConfig:
    """SmolLM3 3B (model card and config.json): every fourth layer has no rotary positions."""
    return DecoderConfig(
        layers=36,
        width=2048,
        heads=16,
        kv_heads=4,
        head_width=128,
        mlp=11008,
        vocab=128256,
        max_positions=65536,
        pattern="fffn",
        rope=RopeConfig(theta=5000000.0),
    )


def _phi4(layers: int, width: int, heads: int, kv_heads: int, mlp: int, **changes) -> DecoderConfig:
    """Phi-4 (arXiv 2412.08905, section 3), Phi-4-mini (arXiv 2503.01743, section 2.1), and
    config.json of the releases."""
    values: dict[str, Any] = dict(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_width=128,
        mlp=mlp,
        norm_eps=1e-5,
    )
    return DecoderConfig(**(values | changes))


# Phi-4-mini's config.json: divisors of the 48 frequencies in rows of more than 4,096 tokens.
PHI4_MINI_LONG = (
    "1.0,1.118320672,1.250641126,1.398617824,1.564103225,1.74916897,1.956131817,2.187582649,"
    "2.446418898,2.735880826,3.059592084,3.421605075,3.826451687,4.279200023,4.785517845,"
    "5.351743533,5.984965424,6.693110555,7.485043894,8.370679318,9.36110372,10.4687158,11.70738129,"
    "13.09260651,14.64173252,16.37415215,18.31155283,20.47818807,22.90118105,25.61086418,"
    "28.64115884,32.03,32.1,32.13,32.23,32.6,32.61,32.64,32.66,32.7,32.71,32.93,32.97,33.28,33.49,"
    "33.5,44.16,47.77"
)


PRESETS: dict[str, Callable[[], DecoderConfig]] = {
    "nano": DecoderConfig,
    "gpt2": lambda: _gpt2(12, 768, 12),
    "gpt2_medium": lambda: _gpt2(24, 1024, 16),
    "gpt2_large": lambda: _gpt2(36, 1280, 20),
    "gpt2_xl": lambda: _gpt2(48, 1600, 25),
    "llama3_1b": lambda: _llama3(
        16, 2048, 32, 8192, tied=True, rope=RopeConfig(theta=500000.0, factor=32.0)
    ),
    "llama3_8b": lambda: _llama3(32, 4096, 32, 14336),
    "llama3_70b": lambda: _llama3(80, 8192, 64, 28672),
    "qwen2_0p5b": lambda: _qwen(24, 896, 14, 2, 4864, head_width=64, bias="qkv", tied=True),
    "qwen2_7b": lambda: _qwen(28, 3584, 28, 4, 18944, bias="qkv", vocab=152064),
    "qwen3_0p6b": lambda: _qwen(28, 1024, 16, 8, 3072, qk_norm=True, tied=True),
    "qwen3_8b": lambda: _qwen(36, 4096, 32, 8, 12288, qk_norm=True),
    "nano_moe": lambda: DecoderConfig(mlp=192, moe=MoeConfig(experts=8, top_k=2, width=192)),
    "mixtral_8x7b": _mixtral_8x7b,
    # arXiv 2505.09388 table 2; widths of its config.json.
    "qwen3_30b_a3b": lambda: _qwen(
        48, 2048, 32, 4, 6144, qk_norm=True, moe=MoeConfig(experts=128, top_k=8, width=768)
    ),
    "moonlight_16b_a3b": _moonlight,
    "deepseek_v3": _deepseek,
    "gpt_oss_20b": lambda: _gpt_oss(24, 32),
    "gpt_oss_120b": lambda: _gpt_oss(36, 128),
    "gemma3_270m": lambda: _gemma3(18, 640, 4, 1, 2048),
    "gemma3_1b": lambda: _gemma3(26, 1152, 4, 1, 6912),
    "gemma3_4b": lambda: _gemma3(
        34,
        2560,
        8,
        4,
        10240,
        vocab=262208,
        max_positions=131072,
        window=1024,
        rope=RopeConfig(theta=1000000.0, local_theta=10000.0, factor=8.0, scaling="linear"),
    ),
    "olmo2_1b": lambda: _olmo2(16, 2048, 16, 8192),
    "olmo2_7b": lambda: _olmo2(32, 4096, 32, 11008),
    "smollm3_3b": _smollm3_3b,
    "phi4_14b": lambda: _phi4(
        40,
        5120,
        40,
        10,
        17920,
        vocab=100352,
        max_positions=16384,
        tied=False,
        rope=RopeConfig(theta=250000.0),
    ),
    "phi4_mini": lambda: _phi4(
        32,
        3072,
        24,
        8,
        8192,
        vocab=200064,
        rope=RopeConfig(
            factor=32.0,
            scaling="longrope",
            partial=0.75,
            original_positions=4096,
            short_factors=",".join(["1.0"] * 48),
            long_factors=PHI4_MINI_LONG,
        ),
    ),
    "megascale_175b": lambda: _megascale(96, 12288, 128),
    "megascale_530b": lambda: _megascale(105, 20480, 160),
}
