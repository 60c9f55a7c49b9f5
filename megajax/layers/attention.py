"""Multi-head attention: which tokens a token sees, rotary positions, the kernels, the parameters.

A block composes attention of three steps: project up, attend, project down. The block, not this
module, calls Ops.up and Ops.down, because a parallel block shares one gather and one scatter
between attention and MLP (MegaScale section 3.1). `Attention` has the parameters and what happens
to q, k and v between the two projections; `attend` is the default of Ops.attend, for arrays of one
device.

Legend: B rows, S query positions, M memory positions, D model width, H query heads, G key-value
heads, R = H / G query heads that share one, K head width.
"""

import dataclasses
import functools
import math
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_kernels
from megajax.core.config import Checked, above, equal, option, other_than
from megajax.core.errors import UserError
from megajax.core.layout import Layout
from megajax.layers import param
from megajax.layers.losses import NEGATIVE
from megajax.layers.norm import Norm
from pallas_kernels import arguments, dispatch
from pallas_kernels.attention import guard
from pallas_kernels.attention.names import named
from pallas_kernels.attention.ranges import FARTHEST

if TYPE_CHECKING:
    from megajax.layers.ops import Ops  # whose default is `attend`

Array = jax.Array
Implementation = Literal["xla", "cudnn", "varlen", "hopper"]


# ---- which tokens a token sees: causal order or none, packed segments, sliding window
#
# Positions restart at every segment, so inside one segment their order is the order of the tokens,
# whatever the layout of the row. That one rule serves packed training rows, cached decoding (the
# memory's positions are 0..M-1 and what is not yet written lies in the future) and reordered
# context parallelism. Sliding window: MegaScale section 3.1.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """The facts about the tokens that blocks use, the same for all layers.

    positions_BS: int32, from 0 in each segment. segments_BS: int32 or None (one segment a row); a
    negative number marks padding. rotary: (cos_BSK, sin_BSK) float32 or None. dropout: PRNG key or
    None (off). causal: static; False: tokens also see what follows them, as in an encoder.
    local: the tables of layers of the kind 'local' (`Kind`). kind: int32, the number of the layer's
    kind, where one block runs layers of several; None elsewhere.
    """

    positions_BS: jax.Array
    segments_BS: jax.Array | None = None
    rotary: tuple[jax.Array, jax.Array] | None = None
    dropout: jax.Array | None = None
    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    local: tuple[jax.Array, jax.Array] | None = None
    kind: jax.Array | None = None


def visible(query: Context, memory: Context, window: int | None) -> jax.Array:
    """Returns mask_B1SM, True where the query may see the key.

    window: a query sees `window` keys at most on each side where it sees any, itself included;
    None: all.

    Raises: UserError for a window that is not a positive integer.
    """
    window = reach(window)
    q_BS1, k_B1M = query.positions_BS[:, :, None], memory.positions_BS[:, None, :]
    if query.causal:
        mask_BSM = k_B1M <= q_BS1
    elif window is not None:
        mask_BSM = k_B1M < q_BS1 + window
    else:
        mask_BSM = jnp.ones_like(k_B1M, bool) & jnp.ones_like(q_BS1, bool)
    if window is not None:
        mask_BSM &= k_B1M > q_BS1 - window
    if query.segments_BS is not None and memory.segments_BS is not None:
        mask_BSM &= query.segments_BS[:, :, None] == memory.segments_BS[:, None, :]
    return mask_BSM[:, None]


def reach(window: int | None) -> int | None:
    """Returns the window, or None where it is so large that it hides nothing.

    Raises: UserError for a window that is not a positive integer.
    """
    if window is None:
        return None
    if not isinstance(window, Integral) or isinstance(window, bool) or int(window) < 1:
        raise UserError(
            f"window={window!r} must be one integer of at least 1, the keys that a query sees on "
            "each side with itself, or None for all; pallas_kernels takes pairs "
            "(window - 1, window - 1)"
        )
    # int32 positions plus a larger one would overflow, and no sequence is so long.
    return int(window) if window < FARTHEST else None


# ---- rotary position embedding, with the scalings of checkpoints for long contexts
#
# Sources: RoFormer (arXiv 2104.09864) section 3. llama3: Llama 3.1's release: frequencies with
# wavelengths beyond the original context are divided by `factor`, short ones kept, those between
# interpolated. linear: arXiv 2306.15595. yarn: arXiv 2309.00071. longrope: arXiv 2402.13753.
# dynamic, and what each paper leaves open: transformers 5, whose values these are. The rotation
# pairs dimension i with i + K/2 of the part of a head that is rotated, as Hugging Face checkpoints
# expect.
#
# dynamic and longrope depend on the length of the sequence. transformers takes the last position of
# a batch, and turns cached keys never again. Here it is the length of the rows that a program is
# built for: a training row, or the longest sequence that an engine takes (`RopeConfig.at`).


SCALED = other_than("factor", 1.0)
YARN, LONGROPE = (equal("scaling", name) for name in ("yarn", "longrope"))
MOST_FACTORS = 2**12  # (chosen) of longrope, one for each pair of numbers of a head


@dataclasses.dataclass(frozen=True)
class RopeConfig(Checked, section="model.rope"):
    """Frequencies of rotary embeddings, and their scaling."""

    theta: float = option(10000.0, "base of the frequencies of rotary embeddings", at_least=1)
    local_theta: float | None = option(
        None,
        "base of the frequencies in layers with a window of a model.pattern, which have no scaling "
        "then; none: as in the others",
        at_least=1,
    )
    factor: float = option(
        1.0,
        "how many times longer than the original context a context may be; 1: no scaling",
        at_least=1,
    )
    scaling: Literal["llama3", "linear", "dynamic", "yarn", "longrope"] = option(
        "llama3",
        "how frequencies are scaled, as transformers' rope_type says; longrope with factor 1 too",
    )
    partial: float = option(
        1.0, "share of a head's numbers that are rotated, the first ones", at_least=0.001, at_most=1
    )
    low_freq_factor: float = option(
        1.0,
        "Llama 3 scaling: wavelengths above original_positions divided by this are scaled",
        needs=above(1, "factor"),
        above=0,
    )
    high_freq_factor: float = option(
        4.0,
        "Llama 3 scaling: wavelengths below original_positions divided by this are not scaled",
        needs=above(1, "factor"),
        above=0,
    )
    original_positions: int = option(
        8192, "context before scaling", "tokens", needs=other_than("scaling", "linear"), at_least=1
    )
    attention_factor: float | None = option(
        None,
        "factor of cosines and sines; none: from `factor`",
        needs=equal("scaling", "yarn", "longrope"),
        above=0,
    )
    beta_fast: float = option(
        32.0,
        "yarn: rotations in the original context above which nothing is scaled",
        needs=YARN,
        above=0,
    )
    beta_slow: float = option(
        1.0,
        "yarn: rotations in the original context below which all is scaled",
        needs=YARN,
        above=0,
    )
    mscale: float | None = option(
        None,
        "yarn: with mscale_all_dim, their quotient is the attention factor",
        needs=YARN,
        at_least=0,
    )
    mscale_all_dim: float | None = option(None, "yarn: see mscale", needs=YARN, at_least=0)
    truncate: bool = option(True, "yarn: round the bounds of the interpolation", needs=YARN)
    short_factors: str | None = option(
        None,
        "longrope: divisors of the frequencies, with commas between, up to original_positions",
        needs=LONGROPE,
    )
    long_factors: str | None = option(
        None, "longrope: the same of longer rows; none: as the short ones", needs=LONGROPE
    )

    def __post_init__(self):
        """Refuses an interpolation between two equal or exchanged wavelengths, and factors that are
        no positive numbers."""
        super().__post_init__()
        for name in ("short_factors", "long_factors"):
            factors_of(name, getattr(self, name))
        if self.scaling == "longrope" and self.short_factors is None:
            raise UserError(
                "model.rope.scaling=longrope needs model.rope.short_factors, numbers with commas "
                "between, one for each pair of a head's numbers (--model.rope.short_factors)"
            )
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.factor != 1.0 and self.scaling == "llama3" and high <= low:
            raise UserError(
                f"model.rope.high_freq_factor={high} must be above model.rope.low_freq_factor="
                f"{low}; the default is 4.0 (--model.rope.high_freq_factor)"
            )

    @property
    def is_scaled(self) -> bool:
        """Tells whether frequencies differ from RoFormer's."""
        says_factor = self.scaling == "yarn" and self.attention_factor is not None
        return self.factor != 1.0 or self.scaling == "longrope" or says_factor

    @property
    def depends_on_length(self) -> bool:
        """Tells whether frequencies depend on the length of a row."""
        return self.is_scaled and self.scaling in ("dynamic", "longrope")

    def at(self, length: int, width: int) -> "RopeConfig":
        """Returns the embedding of rows of this many tokens, which depends on no length.

        width: the numbers of a head that are rotated.
        """
        if not self.depends_on_length:
            return self
        is_longer = length > self.original_positions
        if self.scaling == "longrope":
            chosen = self.long_factors if is_longer else None
            short = chosen or self.short_factors
            return dataclasses.replace(self, short_factors=short, long_factors=None)
        longer = self.factor * length / self.original_positions - (self.factor - 1)
        grown = longer ** (width / (width - 2)) if is_longer and width > 2 else 1.0
        return RopeConfig(self.theta * grown, self.local_theta, partial=self.partial)


def factors_of(name: str, text: str | None) -> list[float] | None:
    """Returns the numbers of longrope's factors. Raises: UserError for what is no positive one."""
    if text is None:
        return None
    words = text.split(",")
    try:
        if len(words) > MOST_FACTORS:
            raise ValueError
        values = [float(word) for word in words]
    except ValueError:
        values = []
    if not values or not all(math.isfinite(x) and x > 0 for x in values):
        raise UserError(
            f"model.rope.{name}={text:.40} must be at most {MOST_FACTORS} finite numbers above 0 "
            f"with commas between, like 1.0,1.1 (--model.rope.{name})"
        )
    return values


def frequencies(cfg: RopeConfig, width: int, length: int | None = None) -> np.ndarray:
    """Returns the width / 2 angular frequencies, float32, radians a position.

    length: tokens of a row; None: at most the original context.
    Raises: UserError for longrope's factors of another head.
    """
    cfg = cfg.at(cfg.original_positions if length is None else length, width)
    freq = cfg.theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if not cfg.is_scaled:
        return freq.astype(np.float32)
    if cfg.scaling == "longrope":
        factors = np.asarray(factors_of("short_factors", cfg.short_factors))
        if factors.size != freq.size:
            raise UserError(
                f"model.rope.short_factors or long_factors has {factors.size} numbers; a head of "
                f"which {width} numbers are rotated needs {freq.size} (--model.rope.short_factors)"
            )
        return (freq / factors).astype(np.float32)
    unscaled = np.zeros_like(freq)  # the share that is not scaled
    if cfg.scaling == "llama3":
        rotations = cfg.original_positions * freq / (2 * math.pi)  # in the old context
        low, high = cfg.low_freq_factor, cfg.high_freq_factor
        unscaled = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    elif cfg.scaling == "yarn":
        unscaled = 1 - _ramp(cfg, width)
    return (unscaled * freq + (1 - unscaled) * freq / cfg.factor).astype(np.float32)


def _ramp(cfg: RopeConfig, width: int) -> np.ndarray:
    """Returns yarn's share of interpolation of each frequency."""

    def place(rotations: float) -> float:
        """The number of the frequency that makes so many rotations in the original context."""
        wavelength = cfg.original_positions / (rotations * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(cfg.theta))

    low, high = place(cfg.beta_fast), place(cfg.beta_slow)
    if cfg.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0.0  # as transformers, against a division by 0
    return np.clip((np.arange(width // 2) - low) / (high - low), 0.0, 1.0)


def table_factor(cfg: RopeConfig) -> float:
    """Returns the factor of cosines and sines."""
    if not cfg.is_scaled or cfg.scaling not in ("yarn", "longrope"):
        return 1.0
    if cfg.attention_factor is not None:
        return cfg.attention_factor
    if cfg.factor == 1.0:
        return 1.0
    grown = math.log(cfg.factor)
    if cfg.scaling == "longrope":
        return math.sqrt(1 + grown / math.log(cfg.original_positions))
    if cfg.mscale and cfg.mscale_all_dim:
        return (0.1 * cfg.mscale * grown + 1) / (0.1 * cfg.mscale_all_dim * grown + 1)
    return 0.1 * grown + 1


def logit_factor(cfg: RopeConfig) -> float:
    """Returns the factor of latent attention's logits (DeepSeek-V3's modeling code): yarn's
    mscale_all_dim makes them larger, as its attention factor makes queries and keys elsewhere."""
    if not (cfg.is_scaled and cfg.scaling == "yarn" and cfg.mscale_all_dim):
        return 1.0
    return (0.1 * cfg.mscale_all_dim * math.log(cfg.factor) + 1) ** 2


def rotary(
    positions_BS: jax.Array, cfg: RopeConfig, width: int, length: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns (cos_BSK, sin_BSK) in float32, K = width / 2, made once for all layers.

    length: tokens of a row, for the scalings that depend on it; None: S.
    """
    freq_11K = frequencies(cfg, width, length or positions_BS.shape[1])[None, None]
    angle_BSK = positions_BS[..., None].astype(jnp.float32) * freq_11K
    factor = table_factor(cfg)
    if factor == 1.0:
        return jnp.cos(angle_BSK), jnp.sin(angle_BSK)
    return jnp.cos(angle_BSK) * factor, jnp.sin(angle_BSK) * factor


def rotate(x_BSHK: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns x rotated by its positions' angles, in x's dtype. Tables for a part of a head rotate
    its first numbers."""
    cos, sin = (t[:, :, None].astype(x_BSHK.dtype) for t in tables)
    width = 2 * cos.shape[-1]
    a, b = jnp.split(x_BSHK[..., :width], 2, -1)
    after = [x_BSHK[..., width:]] if width < x_BSHK.shape[-1] else []
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, *after], -1)


# ---- parameters


INPUTS = "query", "key", "value"  # the weights that read the block's input


class Cache(Protocol):
    """Keys and values of tokens that one layer has seen before (serving/forward.py)."""

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        context: Context,
        window: int | None,
        sinks: jax.Array | None = None,
    ) -> "tuple[jax.Array, Cache]":
        """Keeps k_BSGK and v_BSGK of new tokens, and attends from q_BSHK to them and those before.

        v: None: the keys are the values. sinks: (H,) float32, a logit of each head in the
        softmax's sum that has no value.
        Returns: (y_BSHK, the cache with these tokens).
        """
        ...


@dataclasses.dataclass(frozen=True)
class Kind:
    """What layers of one stack may differ in. window: keys a query may see, itself included; None:
    all. tables: the member of Context that turns queries and keys; 'none': they are not turned."""

    window: int | None = None
    tables: Literal["rotary", "local", "none"] = "rotary"


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Shape of one attention layer. window: keys a query may see, itself included; None: all.
    kv_word: the logical word of the key-value heads; 'heads' where they are as many as the query
    heads and no rule about fewer ones (Rules.copies) may touch them. sinks: whether each head has a
    learned logit in the softmax's sum that has no value (GPT-OSS). kinds: of the layers of a stack,
    in the place of `window`; with several, Context.kind says which one a layer has. (): there is
    one. norm, norm_over: of queries and keys, each head by itself or all together. query_scale:
    what logits are divided by the square root of; None: the head width."""

    width: int
    heads: int
    kv_heads: int
    head_width: int
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    norm_eps: float
    window: int | None
    out_std: float
    kv_word: str = "kv_heads"
    norm: Literal["rms", "rms_plus_one"] = "rms"
    norm_over: Literal["head", "width"] = "head"
    query_scale: float | None = None
    sinks: bool = False
    kinds: tuple[Kind, ...] = ()


class HeadsNorm(nnx.Module):
    """RMSNorm of all heads of a token together (OLMo 2), which tensor ranks may cut."""

    def __init__(self, heads: int, width: int, word: str, eps: float, layout: Layout | None):
        """Makes the scale (heads, width), 1. word: the logical word of the heads."""
        self.eps = eps
        self.scale = param.constant(layout, (heads, width), (word, None), 1.0)

    def __call__(self, x_BSHK: jax.Array, ops: "Ops") -> jax.Array:
        """Returns x normalised, in x's dtype."""
        y = x_BSHK.astype(jnp.float32)
        count = jnp.float32(math.prod(y.shape[2:]))
        # Ranks that share a key-value head count it each, among the squares and the elements.
        squares, count = ops.over_heads(((y * y).sum((-2, -1), keepdims=True), count))
        y = y * jax.lax.rsqrt(squares / count + self.eps)
        return (y * param.broadcast(ops.vector(self.scale), y, y.dtype)).astype(x_BSHK.dtype)


class Attention(nnx.Module):
    """Parameters and inner part of attention."""

    def __init__(self, cfg: AttentionConfig, layout: Layout | None, ops: "Ops", *, rngs: nnx.Rngs):
        """Makes query (D,H,K), key and value (D,G,K), out (H,K,D) and what the config adds."""
        D, H, G, K = cfg.width, cfg.heads, cfg.kv_heads, cfg.head_width
        self.cfg, self.ops, kv = cfg, ops, cfg.kv_word
        self.query = param.normal(rngs, layout, (D, H, K), ("embed", "heads", None), 0.02)
        self.key = param.normal(rngs, layout, (D, G, K), ("embed", kv, None), 0.02)
        self.value = param.normal(rngs, layout, (D, G, K), ("embed", kv, None), 0.02)
        self.out = param.normal(rngs, layout, (H, K, D), ("heads", None, "embed"), cfg.out_std)
        if cfg.qkv_bias:
            self.query_bias = param.constant(layout, (H, K), ("heads", None), 0.0)
            self.key_bias = param.constant(layout, (G, K), (kv, None), 0.0)
            self.value_bias = param.constant(layout, (G, K), (kv, None), 0.0)
        if cfg.out_bias:
            self.out_bias = param.constant(layout, (D,), (None,), 0.0)
        if cfg.qk_norm:
            over_all = cfg.norm_over == "width"
            self.query_norm, self.key_norm = (
                HeadsNorm(count, K, word, cfg.norm_eps, layout)
                if over_all
                else Norm(cfg.norm, K, cfg.norm_eps, layout)
                for count, word in ((H, "heads"), (G, kv))
            )
        if cfg.sinks:
            self.sinks = param.constant(layout, (H,), ("heads",), 0.0)

    @property
    def inputs(self) -> tuple[nnx.Param, ...]:
        """The weights that read the block's input."""
        return tuple(getattr(self, name) for name in INPUTS)

    def project(self, x_BSD: jax.Array) -> tuple[jax.Array, ...]:
        """Returns q_BSHK, k_BSGK, v_BSGK of the block's input, without biases."""
        return self.ops.up(x_BSD, self.inputs, self.ops.matmul)

    def __call__(
        self,
        qkv: tuple[jax.Array, ...],
        context: Context,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Turns projected q_BSHK, k_BSGK, v_BSGK into the attended values, ready for `out`.

        cache: keys and values before these; None: attend among these tokens only.
        Returns: (y_BSHK, the cache with these tokens added).
        """
        q, k, v = qkv
        if self.cfg.qkv_bias:
            q, k, v = (
                x + param.broadcast(self.ops.vector(b), x, x.dtype)
                for x, b in ((q, self.query_bias), (k, self.key_bias), (v, self.value_bias))
            )
        if self.cfg.qk_norm:
            more = (self.ops,) if self.cfg.norm_over == "width" else ()
            q, k = self.query_norm(q, *more), self.key_norm(k, *more)
        if self.cfg.query_scale is not None:
            q = q * (self.cfg.head_width / self.cfg.query_scale) ** 0.5
        sinks = self.ops.vector(self.sinks) if self.cfg.sinks else None
        kinds = self.cfg.kinds or (Kind(self.cfg.window),)
        ways = [functools.partial(self._attend, kind) for kind in kinds]
        if len(ways) == 1:
            return ways[0](q, k, v, context, cache, sinks)
        assert context.kind is not None, "a block of several kinds needs Context.kind"
        return jax.lax.switch(context.kind, ways, q, k, v, context, cache, sinks)

    def _attend(
        self,
        kind: Kind,
        q: Array,
        k: Array,
        v: Array,
        context: Context,
        cache: Cache | None,
        sinks: Array | None,
    ) -> tuple[jax.Array, Cache | None]:
        """Turns q and k by their positions and attends, as layers of this kind do."""
        tables = None if kind.tables == "none" else getattr(context, kind.tables)
        if tables is not None:
            q, k = rotate(q, tables), rotate(k, tables)
        context = dataclasses.replace(context, local=None, kind=None)  # no facts about tokens
        if cache is not None:
            more = () if sinks is None else (sinks,)
            return cache.attend(q, k, v, context, kind.window, *more)
        if sinks is None:
            return self.ops.attend(q, k, v, context, None, kind.window), None
        y, lse = self.ops.attend(q, k, v, context, None, kind.window, return_lse=True)
        # A sink s joins the denominator: e^lse becomes e^lse + e^s.
        share_BSH = jax.nn.sigmoid(lse - param.broadcast(sinks, lse, lse.dtype))
        return y * share_BSH[..., None].astype(y.dtype), None


# ---- the default of Ops.attend: XLA's, cuDNN's fused kernel, or ours over packed tokens


def attend(
    q_BSHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    query: Context,
    memory: Context | None = None,
    window: int | None = None,
    implementation: Implementation = "xla",
    segments: int | None = None,
    return_lse: bool = False,
) -> Any:
    """softmax(q k^T / sqrt(K)) v over the visible keys, softmax in float32.

    Args: memory: the keys' positions and segments; None: the query's own. implementation: 'xla'
      keeps the (S, M) logits in memory; 'cudnn' is fused, for 16-bit types on NVIDIA GPUs;
      'varlen' does the work of each segment's own tokens only, and dead tokens get 0; it runs what
      was measured best on this kind of GPU. 'hopper' is 'varlen' by our Hopper kernel in any case.
      segments: for 'cudnn', of a row, on average over the batch; None: one for 64 tokens
      (library.room). More are as right, and slower. return_lse: also return the log of the
      softmax's denominators; 'cudnn' gives none.
    Returns: out_BSHK in q's dtype, or (out_BSHK, lse_BSH float32); both differentiable. What the
      backward pass needs of them is named 'attended' for the remat policies. Every query must see
      a key; itself, where M holds it. Inf or NaN in a key or value makes NaN the queries that see
      it, and no others; so it is with gradients, except that 'cudnn' with a memory of its own
      leaves those rows out of them.
    Raises: NotImplementedError for 'varlen' and 'hopper' with a memory of their own, for 'hopper'
      where its kernel cannot run, and for 'cudnn' with return_lse; UserError for a window that
      is not a positive integer; TypeError for forward mode (jax.jvp). Second derivatives of 'xla'
      go through jax.grad, and jax.jvp of jax.grad.
    """
    window = reach(window)
    memory = query if memory is None else memory
    ours = functools.partial(_varlen, kernel="hopper")
    cudnn = functools.partial(_cudnn, segments=segments)
    kernels = {"xla": _xla, "cudnn": cudnn, "varlen": _varlen, "hopper": ours}
    if implementation not in kernels:
        raise UserError(f"attention implementation={implementation!r}; there are {[*kernels]}")
    if return_lse:
        if implementation == "cudnn":
            raise NotImplementedError(
                "attention 'cudnn' gives no log-sum-exp, which attention sinks need; use 'varlen', "
                "'xla' or 'auto' (--train.attention)"
            )
        kernels = {n: functools.partial(k, return_lse=True) for n, k in kernels.items()}
    with arguments.reverse_only(f"attention {implementation!r}"):
        return kernels[implementation](q_BSHK, k_BMGK, v_BMGK, query, memory, window)


def _xla(
    q_BSHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    query: Context,
    memory: Context,
    window: int | None,
    return_lse: bool = False,
) -> Any:
    B, S, H, K = q_BSHK.shape
    G = k_BMGK.shape[2]
    q_BSGRK = q_BSHK.reshape(B, S, G, H // G, K)
    arrays = dispatch.alike((q_BSGRK, k_BMGK, v_BMGK, visible(query, memory, window)))
    out = _masked(*arrays, return_lse)
    if not return_lse:
        (out_BSHK,) = named(jnp.moveaxis(out, 1, 2).reshape(B, S, H, K))
        return out_BSHK
    out_BSHK, lse_BSH = (jnp.moveaxis(x, 1, 2) for x in out)
    return named(out_BSHK.reshape(B, S, H, K), lse_BSH.reshape(B, S, H))


# A rule of its own, for autodiff's would multiply the zeros of hidden pairs by what other segments
# hold (pallas_kernels/attention/guard.py says how that stays out).
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _masked(
    q_BSGRK: Array, k_BMGK: Array, v_BMGK: Array, mask_B1SM: Array, return_lse: bool
) -> Any:
    """Returns out_BGSRK, or (out_BGSRK, lse_BGSR); Inf and NaN of a key reach the queries that see
    it, and no others."""
    return _masked_forward(q_BSGRK, k_BMGK, v_BMGK, mask_B1SM, return_lse)[0]


def _masked_forward(
    q_BSGRK: Array, k_BMGK: Array, v_BMGK: Array, mask_B1SM: Array, return_lse: bool
) -> tuple:
    q_BSGRK, (k_BMGK, v_BMGK) = guard.mark(q_BSGRK), guard.keys(k_BMGK, v_BMGK)
    logits_BGSRM = _logits(q_BSGRK, k_BMGK)
    logits_BGSRM = jnp.where(mask_B1SM[:, :, :, None], logits_BGSRM, NEGATIVE)
    weights_BGSRM = jax.nn.softmax(logits_BGSRM, -1)
    out_BGSRK = _mix(weights_BGSRM.astype(v_BMGK.dtype), v_BMGK)
    # A key that is not finite makes all weights of a row NaN. Asked of the weights, not of the
    # output: remat would multiply by the values a second time for it.
    fine_BGSR1 = jnp.isfinite(weights_BGSRM[..., :1])
    saved = q_BSGRK, k_BMGK, v_BMGK, mask_B1SM, weights_BGSRM, fine_BGSR1
    if return_lse:
        return (out_BGSRK, jax.nn.logsumexp(logits_BGSRM, -1)), saved
    return out_BGSRK, saved


def _masked_backward(return_lse: bool, saved: tuple, cotangents: Any) -> tuple:
    q_BSGRK, k_BMGK, v_BMGK, mask_B1SM, weights_BGSRM, fine_BGSR1 = saved
    dout_BGSRK, dlse_BGSR = cotangents if return_lse else (cotangents, None)
    seen_B1S1M = mask_B1SM[:, :, :, None]
    fine_BGSR1 = fine_BGSR1 & jnp.isfinite(dout_BGSRK).all(-1, keepdims=True)
    dout_BGSRK = jnp.where(fine_BGSR1, dout_BGSRK, jnp.zeros((), dout_BGSRK.dtype))
    weights_BGSRM = jnp.where(fine_BGSR1, weights_BGSRM, jnp.nan)  # of bad rows, where they see
    weights_BGSRM = jnp.where(seen_B1S1M, weights_BGSRM, 0.0)
    mix = jax.vjp(_mix, weights_BGSRM.astype(v_BMGK.dtype), v_BMGK)[1]
    dweights_BGSRM, dv_BMGK = mix(dout_BGSRK)
    dweights_BGSRM = jnp.where(seen_B1S1M, dweights_BGSRM.astype(jnp.float32), 0.0)
    mean_BGSR1 = (weights_BGSRM * dweights_BGSRM).sum(-1, keepdims=True)
    if dlse_BGSR is not None:  # the derivative of the log-sum-exp by a logit is its weight
        mean_BGSR1 -= dlse_BGSR[..., None]
    dlogits_BGSRM = jnp.where(seen_B1S1M, weights_BGSRM * (dweights_BGSRM - mean_BGSR1), 0.0)
    logits = jax.vjp(_logits, guard.finite(q_BSGRK), guard.finite(k_BMGK))[1]
    return *logits(dlogits_BGSRM), dv_BMGK, None


_masked.defvjp(_masked_forward, _masked_backward)


# dot_general, not einsum: that one drops the sharding of a batch of one row.
def _logits(q_BSGRK: Array, k_BMGK: Array) -> Array:
    dims = (((4,), (3,)), ((0, 2), (0, 2)))
    logits = jax.lax.dot_general(q_BSGRK, k_BMGK, dims, preferred_element_type=jnp.float32)
    return logits * q_BSGRK.shape[-1] ** -0.5


def _mix(weights_BGSRM: Array, v_BMGK: Array) -> Array:
    return jax.lax.dot_general(weights_BGSRM, v_BMGK, (((4,), (1,)), ((0, 1), (0, 2))))


def _cudnn(
    q_BSHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    query: Context,
    memory: Context,
    window: int | None,
    segments: int | None = None,
) -> jax.Array:
    """cuDNN's fused kernel: packed rows by the offsets of their segments (runs of equal ids).

    What cuDNN does not take so (packed rows on GPUs other than Hopper) gets a mask. A batch with
    more segments than slots (`library.room`) takes the plain path in every layer, which is slower.
    """
    from pallas_kernels.attention import library

    sides = None if window is None else (window - 1, 0 if query.causal else window - 1)
    packed = query.segments_BS is not None
    reasons = library.reasons(q_BSHK, k_BMGK, query.causal, sides, packed=packed)
    if memory is not query or reasons:
        return _cudnn_masked(q_BSHK, k_BMGK, v_BMGK, query, memory, window)
    return library.packed_attention(
        q_BSHK,
        k_BMGK,
        v_BMGK,
        segment_ids=query.segments_BS,
        segments=library.room(q_BSHK, segments),
        causal=query.causal,
        window=sides,
    )


def _cudnn_masked(
    q_BSHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    query: Context,
    memory: Context,
    window: int | None,
) -> jax.Array:
    """cuDNN's kernel with a bias of ours, for keys that are no row's own tokens.

    A bias does not stop NaN: finite values go in, and the rows that see another are marked after.
    Those rows then have no part in the gradients, where the other implementations give NaN.
    """
    mask_B1SM = visible(query, memory, window)
    k_BMGK, v_BMGK = guard.keys(k_BMGK, v_BMGK)
    fused = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    out_BSHK = fused(*map(guard.finite, (q_BSHK, k_BMGK, v_BMGK)), mask=mask_B1SM)
    bad_BG1M = jnp.isnan(k_BMGK[..., 0]).transpose(0, 2, 1)[:, :, None]
    bad_BSG = (bad_BG1M & mask_B1SM).any(-1).transpose(0, 2, 1)
    bad_BSH = jnp.repeat(bad_BSG, q_BSHK.shape[2] // k_BMGK.shape[2], axis=2)
    bad_BSH |= ~jnp.isfinite(q_BSHK).all(-1)
    out_BSHK = _with_finite_gradient(out_BSHK)
    nan = jnp.full((), jnp.nan, out_BSHK.dtype)
    (out_BSHK,) = named(jnp.where(bad_BSH[..., None], nan, out_BSHK))
    return out_BSHK


@jax.custom_vjp
def _with_finite_gradient(x: Array) -> Array:
    """The array itself; backward, what is not finite counts 0."""
    return x


_with_finite_gradient.defvjp(lambda x: (x, None), lambda _, dx: (guard.finite(dx),))


def _varlen(
    q_BSHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    query: Context,
    memory: Context,
    window: int | None,
    kernel: dispatch.Implementation | None = None,
    return_lse: bool = False,
) -> Any:
    """kernel: None is what pallas_kernels.dispatch chooses for this device; segments are runs of
    equal ids."""
    if memory is not query:
        raise NotImplementedError(
            f"attention '{kernel or 'varlen'}' is among a row's own tokens; use 'xla' "
            "with a cache or cut rows"
        )
    ids_BS = query.segments_BS
    out = pallas_kernels.packed_attention(
        q_BSHK,
        k_BMGK,
        v_BMGK,
        segment_ids=jnp.zeros_like(query.positions_BS) if ids_BS is None else ids_BS,
        causal=query.causal,
        window=None if window is None else (window - 1, window - 1),
        implementation=kernel,
        return_lse=return_lse,
    )
    return (out[0], out[1].transpose(0, 2, 1)) if isinstance(out, tuple) else out
