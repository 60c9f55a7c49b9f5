"""Mixture of experts: the router, its auxiliary losses, and the experts' parameters.

A token goes to top_k of `experts` feed-forward networks; which ones, and with which weights, is a
Dispatch (layers/dispatch.py, with the compute). Sources: Switch (arXiv 2101.03961 section 2.2, load
balance), ST-MoE (arXiv 2202.08906 section 2.2, router z-loss), Mixtral (arXiv 2401.04088 section
2.1), DeepSeek-V3 (arXiv 2412.19437 section 2.1.2: sigmoid scores, groups, expert bias, shared
experts, which the block computes as an ordinary MLP beside this layer), GPT-OSS (model card, arXiv
2508.10925 section 2: biases of router and experts).

Legend: B rows, S positions, D model width, F width of an expert, E experts, A active experts a
token, G groups of experts, L layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.config import Checked, above, equal, option
from megajax.core.errors import UserError, nearest_divisors
from megajax.core.layout import Layout
from megajax.layers import param
from megajax.layers.dispatch import Dispatch, ExpertWeights
from megajax.layers.losses import MoeSums
from megajax.layers.mlp import ACTIVATIONS, MlpConfig, activate
from megajax.layers.ops import Ops, total


@dataclasses.dataclass(frozen=True)
class MoeConfig(Checked, section="moe"):
    """Experts in the place of the feed-forward layer."""

    experts: int = option(0, "number of experts E in a layer; 0: a dense model", at_least=0)
    top_k: int = option(2, "number of experts that a token uses", at_least=1)
    width: int = option(128, "feed-forward width of one expert", at_least=1)
    shared: int = option(
        0, "number of further experts of the same width that every token uses", at_least=0
    )
    score: Literal["softmax", "sigmoid"] = option(
        "softmax", "function that turns the router's outputs into scores"
    )
    normalise: bool = option(True, "whether a token's weights are made to add up to `scale`")
    scale: float = option(1.0, "factor of the weights", above=0)
    groups: int = option(
        1,
        "number of groups of experts, one for each node (DeepSeek-V3's node-limited routing)",
        at_least=1,
    )
    top_groups: int = option(
        1, "number of groups that a token may use", needs=above(1, "groups"), at_least=1
    )
    dense_layers: int = option(
        0,
        "number of further blocks before those with experts, which have an ordinary feed-forward "
        "layer (DeepSeek-V3's first_k_dense_replace)",
        at_least=0,
    )
    dense_width: int = option(
        128, "feed-forward width of these blocks", needs=above(0, "dense_layers"), at_least=1
    )
    mode: Literal["dropless", "capacity"] = option(
        "dropless", "how tokens reach experts; capacity: each expert has a fixed number of slots"
    )
    capacity_factor: float = option(
        1.25,
        "capacity: an expert's slots, divided by its load if all had the same",
        needs=equal("mode", "capacity"),
        above=0,
    )
    share_slots: bool = option(
        False,
        "capacity: whether documents that are packed into one row may share its slots, so that one "
        "decides which tokens of another are dropped",
        needs=equal("mode", "capacity"),
    )
    aux_loss: float = option(
        0.01, "weight of each layer's load-balance loss, 1 when balanced", at_least=0
    )
    z_loss: float = option(
        0.0, "weight of each layer's mean squared log-sum-exp of the scores", at_least=0
    )
    bias_rate: float = option(
        0.0, "how far a step changes the bias of an expert, by its load; 0: no bias", at_least=0
    )

    def __post_init__(self):
        """Refuses routers that cannot be built."""
        super().__post_init__()
        if self.experts == 0:
            return
        if self.experts % self.groups:
            raise UserError(
                f"moe.groups={self.groups} must divide moe.experts={self.experts}; "
                f"{nearest_divisors(self.experts, self.groups)} (--moe.groups)"
            )
        if self.top_groups > self.groups:
            raise UserError(
                f"moe.top_groups={self.top_groups} must be at most moe.groups={self.groups} "
                "(--moe.top_groups)"
            )
        reach = self.experts // self.groups * self.top_groups
        if self.top_k > reach:
            raise UserError(
                f"moe.top_k={self.top_k} must be at most {reach}, the experts that a token may use "
                "(--moe.top_k, --moe.experts, --moe.top_groups)"
            )

    def check_packed(self) -> None:
        """Refuses rows of several documents where these would share slots. Raises: UserError."""
        if self.experts and self.mode == "capacity" and not self.share_slots:
            raise UserError(
                "moe.mode=capacity gives an expert's slots to a row, and a row has several "
                "documents: one decides which tokens of another are dropped. Use "
                "moe.mode=dropless, or accept it with moe.share_slots=true (--moe.mode, "
                "--moe.share_slots)"
            )

    def slots(self, seq_len: int) -> int | None:
        """Slots that an expert has for one row of the batch; None: as many as it needs."""
        if self.mode == "dropless":
            return None
        fair = seq_len * self.top_k / self.experts
        return min(math.ceil(self.capacity_factor * fair), seq_len)


class Moe(nnx.Module):
    """Router and experts of one layer."""

    def __init__(
        self, cfg: MoeConfig, mlp: MlpConfig, layout: Layout | None, ops: Ops, *, rngs: nnx.Rngs
    ):
        """Makes router (D,E), up and, for SwiGLU, gate (E,D,F), down (E,F,D), and bias (E,).

        mlp: the shape of one expert. With mlp.bias, also router_bias (E,), up_bias and gate_bias
        (E,F) and down_bias (E,D).
        """
        D, F, E = mlp.width, mlp.hidden, cfg.experts
        self.cfg, self.mlp, self.ops = cfg, mlp, ops
        self.router = param.normal(rngs, layout, (D, E), ("embed", "router"), 0.02)
        into = ("expert", "embed", "mlp")
        if ACTIVATIONS[mlp.activation].is_gated:
            self.gate = param.normal(rngs, layout, (E, D, F), into, 0.02)
        self.up = param.normal(rngs, layout, (E, D, F), into, 0.02)
        self.down = param.normal(rngs, layout, (E, F, D), ("expert", "mlp", "embed"), mlp.down_std)
        if cfg.bias_rate > 0:
            self.bias = param.constant(layout, (E,), (None,), 0.0)
        if mlp.bias:
            self.router_bias = param.constant(layout, (E,), (None,), 0.0)
            self.up_bias = param.constant(layout, (E, F), ("expert", "mlp"), 0.0)
            if ACTIVATIONS[mlp.activation].is_gated:
                self.gate_bias = param.constant(layout, (E, F), ("expert", "mlp"), 0.0)
            # Words of a router: the product with it is where the tokens are, as the router's is.
            self.down_bias = param.constant(layout, (E, D), ("router", "embed"), 0.0)

    def __call__(self, x_BSD: jax.Array) -> tuple[jax.Array, MoeSums]:
        """Returns (the experts' answers to the normalised residual stream, with its sharding; the
        router's sums)."""
        kind = self.mlp.activation
        inputs = (self.gate, self.up) if ACTIVATIONS[kind].is_gated else (self.up,)
        biases = ()
        if self.mlp.bias:
            is_gated = ACTIVATIONS[kind].is_gated
            biases = (self.gate_bias, self.up_bias) if is_gated else (self.up_bias,)
        weights = ExpertWeights(inputs, self.down, functools.partial(activate, kind), biases)
        with jax.named_scope("router"):
            scores_BSE = self.ops.score(x_BSD, self.router)
            if self.mlp.bias:
                scores_BSE += param.broadcast(self.router_bias, scores_BSE, scores_BSE.dtype)
            bias_11E = None
            if self.cfg.bias_rate > 0:
                bias_11E = param.broadcast(self.bias, scores_BSE, scores_BSE.dtype)
            dispatch, sums = route(self.cfg, scores_BSE, bias_11E, self.ops.total)
        with jax.named_scope("experts"):
            y_BSD, kept_BSA = self.ops.expert(
                x_BSD, dispatch, weights, self.cfg.slots, self.ops.grouped
            )
        if self.mlp.bias:  # the answers are sums of the width's parts; the bias counts once
            weights_BSE = by_expert(dispatch, kept_BSA, self.cfg.experts)
            y_BSD += self.ops.score(weights_BSE, self.down_bias).astype(y_BSD.dtype)
        if kept_BSA is not None:
            dropped = self.ops.total((~kept_BSA).sum(dtype=jnp.int32))
            sums = dataclasses.replace(sums, dropped=dropped)
        return y_BSD, sums


def route(
    cfg: MoeConfig, logits_BSE: jax.Array, bias_11E: jax.Array | None, total: Callable = total
) -> tuple[Dispatch, MoeSums]:
    """Chooses experts and weights, and sums up over all tokens, on every device, how it went.

    The bias and the groups decide the choice only; the weights are the scores themselves. total:
    as layers.ops.total.
    """
    E = cfg.experts
    if cfg.score == "softmax":
        scores_BSE = shares_BSE = jax.nn.softmax(logits_BSE, -1)
    else:
        scores_BSE = jax.nn.sigmoid(logits_BSE)
        shares_BSE = scores_BSE / scores_BSE.sum(-1, keepdims=True)
    choice_BSE = jax.lax.stop_gradient(scores_BSE if bias_11E is None else scores_BSE + bias_11E)
    if cfg.groups > 1:
        choice_BSE = jnp.where(_open(cfg, choice_BSE), choice_BSE, -jnp.inf)
    experts_BSA = _best(choice_BSE, cfg.top_k)
    hot_BSAE = experts_BSA[..., None] == jnp.arange(E)[None, None, None]
    # A select and a sum: take_along_axis would need to know how the tokens are cut.
    weights_BSA = jnp.where(hot_BSAE, scores_BSE[:, :, None], 0.0).sum(-1)
    if cfg.normalise:
        weights_BSA = weights_BSA / (weights_BSA.sum(-1, keepdims=True) + 1e-20)
    # Sums first: only they can be added over devices, and the losses are of the whole batch.
    load_E, shares_E, squares = total(
        (
            hot_BSAE.sum((0, 1, 2), dtype=jnp.int32),
            shares_BSE.sum((0, 1)),
            (jax.nn.logsumexp(logits_BSE, -1) ** 2).sum(),
        )
    )
    pairs = load_E.sum()
    tokens = pairs / cfg.top_k
    aux = E * (load_E / pairs * shares_E / tokens).sum()
    z = squares / tokens
    sums = MoeSums(
        penalty=cfg.aux_loss * aux + cfg.z_loss * z,
        aux=aux,
        z=z,
        dropped=jnp.zeros((), jnp.int32),
        load_E=load_E,
    )
    return Dispatch(experts_BSA, cfg.scale * weights_BSA), sums


def by_expert(dispatch: Dispatch, kept_BSA: jax.Array | None, experts: int) -> jax.Array:
    """Returns the weight of each expert's answer for each token, weights_BSE. kept_BSA: as of
    layers.dispatch.expert."""
    hot_BSAE = dispatch.experts_BSA[..., None] == jnp.arange(experts)[None, None, None]
    if kept_BSA is not None:
        hot_BSAE &= kept_BSA[..., None]
    return jnp.where(hot_BSAE, dispatch.weights_BSA[..., None], 0.0).sum(2)


def _open(cfg: MoeConfig, choice_BSE: jax.Array) -> jax.Array:
    """True for the experts of each token's best groups, by the sum of a group's two best."""
    each = cfg.experts // cfg.groups
    grouped_BSGE = choice_BSE.reshape(*choice_BSE.shape[:2], cfg.groups, each)
    chosen_BSA = _best(jnp.sort(grouped_BSGE, -1)[..., -2:].sum(-1), cfg.top_groups)
    group_E = jnp.arange(cfg.experts) // each
    return (chosen_BSA[..., None] == group_E[None, None, None]).any(2)


def _best(scores_BSE: jax.Array, k: int) -> jax.Array:
    """Returns int32 places_BSA of the k highest scores, best first, the first of equals.

    Not jax.lax.top_k: XLA flattens its leading dimensions, and where these are cut it gathers the
    scores of all tokens to every device (jax 0.11.2, H100 target).
    """
    return jnp.argsort(-scores_BSE, axis=-1, stable=True)[..., :k]


def balance(bias_LE: jax.Array, load_LE: jax.Array, rate: float) -> jax.Array:
    """Returns the bias after a step: lower for experts above the mean load, higher below it."""
    load_LE = load_LE.astype(jnp.float32)
    return bias_LE + rate * jnp.sign(load_LE.mean(-1, keepdims=True) - load_LE)
