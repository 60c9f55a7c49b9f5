"""Losses of policies and of values over a batch of responses. JAX functions, for use in a step.

Each returns (loss, metrics): a float32 scalar and float32 scalars under verl's names. Where the
mask is False nothing counts, NaN included, in values and in gradients. Micro-batches add up: with
`total` of a batch the losses of its parts, of any sizes, sum to the loss of that batch.

Aggregations (verl's `loss_agg_mode`) of the losses of tokens, and what they divide by:

    token-mean               the sum over tokens; by the number of tokens
    seq-mean-token-sum       the sum over a response, summed; by the number of responses
    seq-mean-token-mean      the mean over a response, summed; by the number of responses
    seq-mean-token-sum-norm  the sum over tokens; by S (Dr. GRPO, arXiv 2503.20783)

Responses without a token are not counted. Legend: B responses, S positions.
Source: verl's core_algos for the formulas; papers beside each function.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
POLICY_LOSSES = ("ppo", "cispo", "gspo")
LOG_RATIO = 20.0  # bound of |log ratio| (verl)
LOG_RATIO_SEQUENCE = 10.0  # upper bound of a sequence's log ratio (verl, GSPO)
Metrics = Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class Clip:
    """Bounds of a policy's ratios: [1 - low, 1 + high]. dual: of the loss where an advantage is
    negative, for ppo alone; None: no such bound. Raises: ValueError for what is out of range."""

    low: float
    high: float
    dual: float | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.low <= 1 and self.high >= 0):
            raise ValueError(
                f"clip_low={self.low} must be in [0, 1] and clip_high={self.high} at least 0"
            )
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"dual_clip={self.dual} must be above 1, or None for no such bound")


class Terms(NamedTuple):
    """What a policy's loss is of each token, (B, S), 0 where masked.

    loss, log_ratio: float32. clipped, lower: bool: where the clip counts, and where the dual clip.
    """

    loss: Array
    clipped: Array
    lower: Array
    log_ratio: Array


def policy_terms(
    name: str,
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    clip: Clip,
    mean: Callable[[Array, Array], Array] | None = None,
) -> Terms:
    """The tokens' losses of a policy loss. name: one of POLICY_LOSSES.

    mean(x_BS, mask) -> (B, S), the mean over each token's response: of gspo alone, for rows that
    hold several responses; None: a row is one response.
    """
    mask, logprobs, old_logprobs, advantages = _masked(
        mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages
    )
    log_ratio_BS = logprobs - old_logprobs
    if name == "gspo":
        mean_BS = jax.lax.stop_gradient((mean or _row_mean)(log_ratio_BS, mask))
        log_BS = logprobs - jax.lax.stop_gradient(logprobs) + mean_BS
        ratio_BS = jnp.exp(jnp.minimum(log_BS, LOG_RATIO_SEQUENCE))
    else:
        log_ratio_BS = jnp.clip(log_ratio_BS, -LOG_RATIO, LOG_RATIO)
        ratio_BS = jnp.exp(log_ratio_BS)
    bounded_BS = jnp.clip(ratio_BS, 1 - clip.low, 1 + clip.high)
    lower_BS = jnp.zeros(mask.shape, bool)
    if name == "cispo":
        loss_BS = -jax.lax.stop_gradient(bounded_BS) * advantages * logprobs
        return Terms(loss_BS, ratio_BS != bounded_BS, lower_BS, log_ratio_BS)
    plain_BS, clipped_BS = -advantages * ratio_BS, -advantages * bounded_BS
    loss_BS = jnp.maximum(plain_BS, clipped_BS)
    if name == "ppo" and clip.dual is not None:
        bound_BS = -advantages * clip.dual
        lower_BS = (advantages < 0) & (loss_BS > bound_BS)
        loss_BS = jnp.where(advantages < 0, jnp.minimum(loss_BS, bound_BS), loss_BS)
    return Terms(loss_BS, clipped_BS > plain_BS, lower_BS, log_ratio_BS)


def value_terms(
    values: ArrayLike, old_values: ArrayLike, returns: ArrayLike, mask: ArrayLike, clip: float
) -> tuple[Array, Array]:
    """The tokens' (losses, whether they are clipped) of `value`."""
    mask, values, old_values, returns = _masked(
        mask, values=values, old_values=old_values, returns=returns
    )
    plain_BS = jnp.square(values - returns)
    clipped_BS = jnp.square(jnp.clip(values, old_values - clip, old_values + clip) - returns)
    return 0.5 * jnp.maximum(plain_BS, clipped_BS), clipped_BS > plain_BS


# ---- a batch's loss


def ppo(
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = 3.0,
    aggregation: str = "token-mean",
    total: Array | float | None = None,
) -> tuple[Array, Metrics]:
    """The clipped objective of PPO (arXiv 1707.06347), with dual clip (arXiv 1912.09729).

    r = exp(logprobs - old_logprobs); max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where
    A < 0 at most -A dual_clip. DAPO's "clip-higher" is clip_high > clip_low (arXiv 2503.14476).

    Args: logprobs, old_logprobs, advantages: (B, S) float32. mask: (B, S) bool. dual_clip: above 1;
        None: no such bound. total: what the sum is divided by; None: this batch's own divisor.
    Returns: loss; actor/pg_clipfrac, actor/pg_clipfrac_lower, actor/ppo_kl: means over tokens.
    Raises: ValueError for shapes, ranges, an aggregation and a total that are not so.
    """
    clip = Clip(clip_low, clip_high, dual_clip)
    return _policy("ppo", logprobs, old_logprobs, advantages, mask, clip, aggregation, total)


def cispo(
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    clip_low: float,
    clip_high: float,
    aggregation: str = "token-mean",
    total: Array | float | None = None,
) -> tuple[Array, Metrics]:
    """CISPO (arXiv 2506.13585): REINFORCE with a clipped importance weight that has no gradient.

    -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs. Arguments, results and errors
    of `ppo`.
    """
    clip = Clip(clip_low, clip_high)
    return _policy("cispo", logprobs, old_logprobs, advantages, mask, clip, aggregation, total)


def gspo(
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    clip_low: float,
    clip_high: float,
    aggregation: str = "seq-mean-token-mean",
    total: Array | float | None = None,
) -> tuple[Array, Metrics]:
    """GSPO (arXiv 2507.18071): PPO with the geometric mean of a response's ratios.

    A token's ratio is exp(stop_gradient(mean log ratio - logprobs) + logprobs), so that its value
    is the response's and its gradient the token's. Arguments, results and errors of `ppo`.
    """
    clip = Clip(clip_low, clip_high)
    return _policy("gspo", logprobs, old_logprobs, advantages, mask, clip, aggregation, total)


def value(
    values: ArrayLike,
    old_values: ArrayLike,
    returns: ArrayLike,
    mask: ArrayLike,
    clip: float,
    aggregation: str = "token-mean",
    total: Array | float | None = None,
) -> tuple[Array, Metrics]:
    """Half the squared error of values, clipped around the old ones (PPO's critic).

    0.5 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2).

    Args: values, old_values, returns: (B, S) float32. mask: (B, S) bool. clip: above 0.
    Returns: loss; critic/vf_clipfrac: mean over tokens.
    Raises: ValueError for shapes, ranges and an aggregation that are not so.
    """
    if not clip > 0:
        raise ValueError(f"clip={clip} must be above 0; math.inf clips nothing")
    loss_BS, clipped_BS = value_terms(values, old_values, returns, mask, clip)
    metrics = {"critic/vf_clipfrac": _mean(clipped_BS, jnp.asarray(mask))}
    return aggregate(loss_BS, mask, aggregation, total), metrics


def aggregate(
    loss: ArrayLike, mask: ArrayLike, aggregation: str, total: Array | float | None = None
) -> Array:
    """Returns the losses of tokens as one number, float32: see the module's table.

    Raises: ValueError for an aggregation that is not one of AGGREGATIONS, or a total that is not
      above 0. An array may be 0: a batch without a token has loss 0, whatever it is divided by.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation {aggregation!r} must be one of {', '.join(AGGREGATIONS)}")
    mask, loss_BS = _masked(mask, loss=loss)
    if aggregation == "seq-mean-token-mean":
        loss_BS = loss_BS / jnp.maximum(_count(mask, -1)[:, None], 1.0)
    if total is None:
        total = divisor(mask, aggregation)
    elif not isinstance(total, Array) and not total > 0:
        raise ValueError(f"total={total} must be above 0; None: this batch's own divisor")
    divided_by = jnp.asarray(total, jnp.float32)
    return loss_BS.sum() / jnp.where(divided_by == 0, 1.0, divided_by)


def divisor(mask: ArrayLike, aggregation: str) -> Array:
    """Returns what the aggregation of a batch divides by, float32: tokens, responses or S."""
    mask = jnp.asarray(mask)
    if aggregation == "token-mean":
        return _count(mask)
    if aggregation == "seq-mean-token-sum-norm":
        return jnp.asarray(mask.shape[-1], jnp.float32)
    return _count(mask.any(axis=-1))


def _policy(
    name: str,
    logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    clip: Clip,
    aggregation: str,
    total: Array | float | None,
) -> tuple[Array, Metrics]:
    """Returns the loss of this name and its metrics. Raises: as of `ppo`."""
    terms = policy_terms(name, logprobs, old_logprobs, advantages, mask, clip)
    mask = jnp.asarray(mask)
    metrics = {
        "actor/pg_clipfrac": _mean(terms.clipped, mask),
        "actor/pg_clipfrac_lower": _mean(terms.lower, mask),
        "actor/ppo_kl": _mean(-terms.log_ratio, mask),
    }
    return aggregate(terms.loss, mask, aggregation, total), metrics


def _count(mask: Array, axis: int | None = None) -> Array:
    return mask.sum(axis=axis, dtype=jnp.float32)


def _masked(mask: ArrayLike, **members: ArrayLike) -> list[Array]:
    """Returns the mask, and the members in float32 with 0 where it is False. Raises: ValueError."""
    arrays = {}
    for name, member in {"mask": mask, **members}.items():
        try:
            arrays[name] = jnp.asarray(member)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: an array is needed: {error}") from None
    shape, dtype = arrays["mask"].shape, arrays["mask"].dtype
    if len(shape) != 2 or dtype != jnp.bool_:
        raise ValueError(f"mask is {dtype} of shape {shape}; bool (B, S) is needed")
    for name in members:
        x = arrays[name]
        if x.shape != shape or jnp.iscomplexobj(x):
            raise ValueError(f"{name}: {x.dtype} of shape {x.shape}; the mask has {shape}")
        arrays[name] = jnp.where(arrays["mask"], x.astype(jnp.float32), 0.0)
    return list(arrays.values())


def _row_mean(x_BS: Array, mask: Array) -> Array:
    mean_B = x_BS.sum(axis=-1) / jnp.maximum(_count(mask, -1), 1.0)
    return jnp.broadcast_to(mean_B[:, None], x_BS.shape)


def _mean(x_BS: Array, mask: Array) -> Array:
    """Returns the mean over the mask, without a gradient; 0 for a mask without a token."""
    total = jnp.where(mask, x_BS.astype(jnp.float32), 0.0).sum()
    return jax.lax.stop_gradient(total / jnp.maximum(_count(mask), 1.0))
