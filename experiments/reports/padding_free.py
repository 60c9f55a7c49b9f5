"""An encoder with padding and, step by step, without: what runs, and what it costs.

The steps of ByteTransformer's figure 13 (arXiv 2210.03052), each added to the one before: LayerNorm
fused with the bias and residual before it, GELU fused with its GEMM (section 3.2), zero padding
(attention alone unpacks), fused attention of every length. And cuDNN's attention on padded rows,
which the paper did not have. All run one set of weights through the blocks of models/encoder.py;
as in the paper's benchmark, embedding and head are left out.

`kernels` counts the same steps for kernels that are written one by one: XLA fuses the element-wise
work of its own accord, so the first two steps gain less against it than against PyTorch.

Legend: B sequences, S padded length, T packed tokens, D model width, H heads, K head width.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.reports import attention_area as area
from megajax.core.hardware import CARDS
from megajax.core.packing import PackInfo, bucket, pack, unpack
from megajax.core.tree import Tree, named_leaves, nest
from megajax.layers import fused
from megajax.layers.attend import attend
from megajax.layers.mask import Context
from megajax.layers.ops import Ops
from megajax.models import encoder
from megajax.models.encoder_config import EncoderConfig
from pallas_kernels import packed_attention
from pallas_kernels.dispatch import Implementation

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Step:
    """A way to run the encoder.

    attention: 'xla' keeps the logits; on packed tokens it unpacks. implementation: of the kernels;
    None: what they ship for this device, plain JAX where a table says that it is faster.
    """

    name: str
    norm: bool = False
    gelu: bool = False
    packed: bool = False
    attention: Literal["xla", "cudnn", "varlen"] = "xla"
    implementation: Implementation | None = None


PADDED = Step("padded, XLA")
STEPS = (  # in the order of figure 13
    PADDED,
    Step("+ LayerNorm fusion", norm=True),
    Step("+ GELU fusion", norm=True, gelu=True),
    Step("+ zero padding", norm=True, gelu=True, packed=True),
    Step("+ fused attention", norm=True, gelu=True, packed=True, attention="varlen"),
)
OURS = STEPS[-1]
CUDNN = Step("padded, cuDNN", attention="cudnn")


def capacity_of(lengths: Sequence[int], longest: int) -> int:
    """Tokens that a packed batch is given: a bucket, at most what padding would take."""
    return bucket(sum(lengths), most=len(lengths) * longest)


def ops_of(step: Step, batch: int, longest: int) -> Ops:
    """The seams that a step fills. batch, longest: of the padded rows."""
    kernel: Callable[..., Array] = functools.partial(attend, implementation=step.attention)
    if step.attention == "cudnn":
        kernel = _cudnn_rows
    elif step.attention == "varlen":
        kernel = functools.partial(_varlen, longest, step.implementation)
    elif step.packed and step.attention == "xla":
        kernel = functools.partial(_unpacked, batch, longest)
    changes: dict[str, Any] = {"attend": kernel}
    if step.norm:
        changes["settle"] = functools.partial(fused.settle, implementation=step.implementation)
    if step.gelu:
        changes["expand"] = functools.partial(fused.expand, implementation=step.implementation)
    return Ops(**changes)


def stack(
    cfg: EncoderConfig, step: Step, dtype: str, batch: int, longest: int, capacity: int
) -> Callable[[Sequence[Tree], Array, Array], Array]:
    """Returns (weights of each layer, x_BSD, lengths_B) -> out_BSD, all blocks of the encoder.

    A packed step reads nothing of what pads x and gives 0 there. It packs once where the tokens
    enter and unpacks once where they leave, as in section 3.2.
    """
    block = jax.jit(encoder.parts(cfg, ops=ops_of(step, batch, longest), dtype=dtype).block)

    def run(layers: Sequence[Tree], x_BSD: Array, lengths_B: Array) -> Array:
        def blocks(x: Array, context: Context) -> Array:
            for weights in layers:
                x, _, _ = block(weights, x, context)
            return x

        if not step.packed:
            return blocks(x_BSD, _padded_context(lengths_B, longest))
        x_TD, info = pack(x_BSD, lengths_B, capacity)
        return unpack(blocks(x_TD[None], _packed_context(info))[0], info)

    return run


def attention(
    step: Step, batch: int, longest: int, capacity: int
) -> Callable[[Array, Array, Array, Array], Array]:
    """Returns (q, k, v, lengths_B) -> out, a step's attention alone.

    q, k, v: (B, S, H, K), or (1, T, H, K) for a packed step.
    """
    kernel = ops_of(step, batch, longest).attend

    def run(q: Array, k: Array, v: Array, lengths_B: Array) -> Array:
        if not step.packed:
            return kernel(q, k, v, _padded_context(lengths_B, longest))
        return kernel(q, k, v, _packed_context(_info(lengths_B, capacity, longest)))

    return run


def weights(cfg: EncoderConfig, dtype: str, seed: int = 0) -> list[Tree]:
    """Returns each layer's random weights in `dtype`; biases and shifts count too."""
    random = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        drawn = random.standard_normal(shape, np.float32)
        return 0.02 * drawn + np.float32(name.endswith("scale"))

    abstract = encoder.parts(cfg).abstract["blocks"]
    blocks = nest({name: draw(name, x.shape) for name, x in named_leaves(abstract)})
    return [jax.tree.map(lambda x: jnp.asarray(x[i], dtype), blocks) for i in range(cfg.layers)]  # noqa: B023


def _info(lengths_B: Array, capacity: int, longest: int) -> PackInfo:
    ends_B = jnp.cumsum(lengths_B, dtype=jnp.int32)
    return PackInfo(jnp.concatenate([jnp.zeros(1, jnp.int32), ends_B]), capacity, longest)


def _packed_context(info: PackInfo) -> Context:
    return Context(info.positions[None], info.segment_ids[None], causal=False)


def _padded_context(lengths_B: Array, longest: int) -> Context:
    positions_BS = jnp.broadcast_to(
        jnp.arange(longest, dtype=jnp.int32), (lengths_B.shape[0], longest)
    )
    segments_BS = jnp.where(positions_BS < lengths_B[:, None], jnp.int32(0), jnp.int32(-1))
    return Context(positions_BS, segments_BS, causal=False)


def _unpacked(batch: int, longest: int, q: Array, k: Array, v: Array, query: Context, *_) -> Array:
    """Attention on padded rows between packed products: the paper's before its fused kernel."""
    assert query.segments_BS is not None
    ids_T = query.segments_BS[0]
    lengths_B = (ids_T[:, None] == jnp.arange(batch)[None]).sum(0, dtype=jnp.int32)
    info = _info(lengths_B, ids_T.shape[0], longest)
    q, k, v = (unpack(x[0], info) for x in (q, k, v))
    out_BSHK = attend(q, k, v, _padded_context(lengths_B, longest))
    return pack(out_BSHK, lengths_B, info.capacity)[0][None]


def _varlen(
    longest: int, choice: Implementation | None, q: Array, k: Array, v: Array, query: Context, *_
) -> Array:
    """Attends on packed tokens, told how long a sequence can be."""
    assert query.segments_BS is not None
    out = packed_attention(
        q, k, v, segment_ids=query.segments_BS, max_seqlen=longest, implementation=choice
    )
    assert not isinstance(out, tuple)
    return out


def _cudnn_rows(q: Array, k: Array, v: Array, query: Context, *_) -> Array:
    """cuDNN's kernel with the rows' lengths, which is faster than with a mask."""
    assert query.segments_BS is not None
    lengths_B = (query.segments_BS >= 0).sum(1, dtype=jnp.int32)
    return jax.nn.dot_product_attention(
        q, k, v, query_seq_lengths=lengths_B, key_value_seq_lengths=lengths_B,
        implementation="cudnn",
    )  # fmt: skip


# ---- what it costs


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a layer. bytes: of 16-bit operands and results, each once."""

    name: str
    flops: float
    bytes: float

    @property
    def floor_s(self) -> float:
        """No kernel is faster on an H200."""
        return CARDS["H200"].floor_s(self.flops, self.bytes)


def visited_pairs(lengths: Sequence[int], width: int) -> int:
    """Pairs of rows, of one head, that the fused attention computes on: its tiles are whole."""
    capacity = max(1 << (sum(lengths) - 1).bit_length(), 16384)  # one compile for most
    useful = sum(n * n for n in lengths)
    return round(area.of_lengths(lengths, width, capacity=capacity)["forward"].computed * useful)


def kernels(cfg: EncoderConfig, step: Step, lengths: Sequence[int], longest: int) -> list[Kernel]:
    """Returns the kernels of ONE layer of a step, written one by one."""
    D, F, H = cfg.width, cfg.mlp, cfg.heads
    rows = len(lengths) * longest
    T = capacity_of(lengths, longest) if step.packed else rows

    def product(name: str, inner: int, outer: int) -> Kernel:
        moved = T * (inner + outer) + inner * outer
        return Kernel(name, 2.0 * T * inner * outer, 2.0 * moved)

    def pass_over(name: str, columns: int, tokens: int = T) -> Kernel:
        return Kernel(name, 0.0, 2.0 * tokens * columns)

    def settle(name: str) -> list[Kernel]:
        if step.norm:  # y, residual -> x
            return [pass_over(f"{name} norm", 3 * D)]
        return [pass_over(f"{name} bias, residual", 3 * D), pass_over(f"{name} norm", 2 * D)]

    pairs = visited_pairs(lengths, cfg.head_width) if step.attention == "varlen" else rows * longest
    tokens = T if step.attention == "varlen" else rows
    moved = 4.0 * tokens * D
    if step.attention == "xla":  # the logits are written and read, and so are the weights
        moved += 4.0 * H * rows * longest
    attention = [Kernel("attention", 4.0 * pairs * D, 2 * moved)]
    if step.packed and step.attention == "xla":
        attention.insert(0, Kernel("unpack q, k, v", 0.0, 2.0 * 3 * D * (T + rows)))
        attention.append(Kernel("pack", 0.0, 2.0 * D * (T + rows)))
    return [
        product("query, key, value", D, 3 * D),
        *attention,
        product("attention out", D, D),
        *settle("attention"),
        product("up", D, F),
        *([] if step.gelu else [pass_over("bias, GELU", 2 * F)]),
        product("down", F, D),
        *settle("feed-forward"),
    ]


def useful_flops(cfg: EncoderConfig, lengths: Sequence[int]) -> float:
    """Returns the FLOPs of all layers' products and attention, for the tokens that are there."""
    D, F, T = cfg.width, cfg.mlp, sum(lengths)
    pairs = sum(n * n for n in lengths)
    return cfg.layers * (2.0 * T * (4 * D * D + 2 * D * F) + 4.0 * pairs * D)


def missing(step: Step) -> str | None:
    """Returns why a step cannot run here, None if it can."""
    if step.attention == "cudnn" and jax.default_backend() != "gpu":
        return "cuDNN needs a GPU"
    return None
