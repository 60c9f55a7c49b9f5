"""Losses of policies and of values over a batch of responses. JAX functions, for use in a step.

Each returns (loss, metrics): a float32 scalar and float32 scalars under verl's names. Where the
mask is False nothing counts, NaN included, in values and in gradients. Micro-batches add up: with
`total` of the whole batch the losses of its parts, of any sizes, sum to the loss of the whole.

Aggregations (verl's `loss_agg_mode`) of the losses of tokens, and what they divide by:

    token-mean               the sum over tokens; by the number of tokens
    seq-mean-token-sum       the sum over a response, summed; by the number of responses
    seq-mean-token-mean      the mean over a response, summed; by the number of responses
    seq-mean-token-sum-norm  the sum over tokens; by S (Dr. GRPO, arXiv 2503.20783)

Responses without a token are not counted. Legend: B responses, S positions.
Source: verl's core_algos for the formulas; papers beside each function.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
LOG_RATIO = 20.0  # bound of |log ratio| (verl)
LOG_RATIO_SEQUENCE = 10.0  # upper bound of a sequence's log ratio (verl, GSPO)
Metrics = Mapping[str, Array]


class Terms(NamedTuple):
    """What a policy's loss is of each token, (B, S), 0 where masked.

    loss, log_ratio: float32. clipped, lower: bool: where the clip counts, and where the dual clip.
    """

    loss: Array
    clipped: Array
    lower: Array
    log_ratio: Array


def ppo_terms(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = 3.0,
    mean: Callable[[Array, Array], Array] | None = None,
) -> Terms:
    """The tokens' losses of `ppo`. mean: not used."""
    logprobs, old_logprobs, advantages = _masked(mask, logprobs, old_logprobs, advantages)
    log_ratio_BS = jnp.clip(logprobs - old_logprobs, -LOG_RATIO, LOG_RATIO)
    ratio_BS = jnp.exp(log_ratio_BS)
    plain_BS = -advantages * ratio_BS
    clipped_BS = -advantages * jnp.clip(ratio_BS, 1 - clip_low, 1 + clip_high)
    loss_BS = jnp.maximum(plain_BS, clipped_BS)
    lower_BS = jnp.zeros(mask.shape, bool)
    if dual_clip is not None:
        bound_BS = -advantages * dual_clip
        lower_BS = (advantages < 0) & (loss_BS > bound_BS)
        loss_BS = jnp.where(advantages < 0, jnp.minimum(loss_BS, bound_BS), loss_BS)
    return Terms(loss_BS, clipped_BS > plain_BS, lower_BS, log_ratio_BS)


def cispo_terms(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    mean: Callable[[Array, Array], Array] | None = None,
) -> Terms:
    """The tokens' losses of `cispo`. dual_clip, mean: not used."""
    logprobs, old_logprobs, advantages = _masked(mask, logprobs, old_logprobs, advantages)
    log_ratio_BS = jnp.clip(logprobs - old_logprobs, -LOG_RATIO, LOG_RATIO)
    ratio_BS = jnp.exp(log_ratio_BS)
    weight_BS = jax.lax.stop_gradient(jnp.clip(ratio_BS, 1 - clip_low, 1 + clip_high))
    loss_BS = -weight_BS * advantages * logprobs
    return Terms(loss_BS, ratio_BS != weight_BS, jnp.zeros(mask.shape, bool), log_ratio_BS)


def gspo_terms(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    mean: Callable[[Array, Array], Array] | None = None,
) -> Terms:
    """The tokens' losses of `gspo`. mean(x_BS, mask) -> the mean of each token's response, (B, S);
    None: a row is one response. dual_clip: not used."""
    logprobs, old_logprobs, advantages = _masked(mask, logprobs, old_logprobs, advantages)
    log_ratio_BS = logprobs - old_logprobs
    mean_BS = jax.lax.stop_gradient((mean or _row_mean)(log_ratio_BS, mask))
    log_BS = logprobs - jax.lax.stop_gradient(logprobs) + mean_BS
    ratio_BS = jnp.exp(jnp.minimum(log_BS, LOG_RATIO_SEQUENCE))
    plain_BS = -advantages * ratio_BS
    clipped_BS = -advantages * jnp.clip(ratio_BS, 1 - clip_low, 1 + clip_high)
    loss_BS = jnp.maximum(plain_BS, clipped_BS)
    return Terms(loss_BS, clipped_BS > plain_BS, jnp.zeros(mask.shape, bool), log_ratio_BS)


def value_terms(
    values: Array, old_values: Array, returns: Array, mask: Array, clip: float
) -> tuple[Array, Array]:
    """The tokens' (losses, whether they are clipped) of `value`."""
    values, old_values, returns = _masked(mask, values, old_values, returns)
    plain_BS = jnp.square(values - returns)
    clipped_BS = jnp.square(jnp.clip(values, old_values - clip, old_values + clip) - returns)
    return 0.5 * jnp.maximum(plain_BS, clipped_BS), clipped_BS > plain_BS


TERMS: Mapping[str, Callable[..., Terms]] = {
    "ppo": ppo_terms,
    "cispo": cispo_terms,
    "gspo": gspo_terms,
}


# ---- a batch's loss


def ppo(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
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
    Raises: ValueError for shapes, ranges and an aggregation that are not so.
    """
    _check_clip(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip={dual_clip} must be above 1, or None for no such bound")
    terms = ppo_terms(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip)
    return aggregate(terms.loss, mask, aggregation, total), _metrics(terms, mask)


def cispo(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    clip_low: float,
    clip_high: float,
    aggregation: str = "token-mean",
    total: Array | float | None = None,
) -> tuple[Array, Metrics]:
    """CISPO (arXiv 2506.13585): REINFORCE with a clipped importance weight that has no gradient.

    -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs. Arguments, results and errors
    of `ppo`.
    """
    _check_clip(clip_low, clip_high)
    terms = cispo_terms(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    return aggregate(terms.loss, mask, aggregation, total), _metrics(terms, mask)


def gspo(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    clip_low: float,
    clip_high: float,
    aggregation: str = "seq-mean-token-mean",
    total: Array | float | None = None,
) -> tuple[Array, Metrics]:
    """GSPO (arXiv 2507.18071): PPO with the geometric mean of a response's ratios.

    A token's ratio is exp(stop_gradient(mean log ratio - logprobs) + logprobs), so that its value
    is the response's and its gradient the token's. Arguments, results and errors of `ppo`.
    """
    _check_clip(clip_low, clip_high)
    terms = gspo_terms(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    return aggregate(terms.loss, mask, aggregation, total), _metrics(terms, mask)


def value(
    values: Array,
    old_values: Array,
    returns: Array,
    mask: Array,
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
    metrics = {"critic/vf_clipfrac": _mean(clipped_BS, mask)}
    return aggregate(loss_BS, mask, aggregation, total), metrics


def aggregate(
    loss_BS: Array, mask: Array, aggregation: str, total: Array | float | None = None
) -> Array:
    """Returns the losses of tokens as one number, float32: see the module's table.

    Raises: ValueError for an aggregation that is not one of AGGREGATIONS.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation {aggregation!r} must be one of {', '.join(AGGREGATIONS)}")
    (loss_BS,) = _masked(mask, loss_BS)
    if aggregation == "seq-mean-token-mean":
        loss_BS = loss_BS / jnp.maximum(_count(mask, -1)[:, None], 1.0)
    if total is None:  # a batch without a token has loss 0, whatever it is divided by
        total = jnp.maximum(divisor(mask, aggregation), 1.0)
    return loss_BS.sum() / jnp.asarray(total, jnp.float32)


def divisor(mask: Array, aggregation: str) -> Array:
    """Returns what the aggregation of a whole batch divides by, float32: tokens, responses or S."""
    if aggregation == "token-mean":
        return _count(jnp.asarray(mask))
    if aggregation == "seq-mean-token-sum-norm":
        return jnp.asarray(mask.shape[-1], jnp.float32)
    return _count(jnp.asarray(mask).any(axis=-1))


def _count(mask: Array, axis: int | None = None) -> Array:
    return jnp.asarray(mask).sum(axis=axis, dtype=jnp.float32)


def _masked(mask: Array, *arrays: Array) -> tuple[Array, ...]:
    """Returns arrays in float32 with 0 where the mask is False. Raises: ValueError."""
    mask = jnp.asarray(mask)
    if mask.ndim != 2 or mask.dtype != jnp.bool_:
        raise ValueError(f"mask is {mask.dtype} of shape {mask.shape}; bool (B, S) is needed")
    for array in arrays:
        if jnp.shape(array) != mask.shape:
            raise ValueError(f"an array has shape {jnp.shape(array)}; the mask has {mask.shape}")
    return tuple(jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0) for x in arrays)


def _row_mean(x_BS: Array, mask: Array) -> Array:
    mean_B = x_BS.sum(axis=-1) / jnp.maximum(_count(mask, -1), 1.0)
    return jnp.broadcast_to(mean_B[:, None], x_BS.shape)


def _metrics(terms: Terms, mask: Array) -> Metrics:
    return {
        "actor/pg_clipfrac": _mean(terms.clipped, mask),
        "actor/pg_clipfrac_lower": _mean(terms.lower, mask),
        "actor/ppo_kl": _mean(-terms.log_ratio, mask),
    }


def _mean(x_BS: Array, mask: Array) -> Array:
    """Returns the mean over the mask, without a gradient; 0 for a mask without a token."""
    total = jnp.where(mask, x_BS.astype(jnp.float32), 0.0).sum()
    return jax.lax.stop_gradient(total / jnp.maximum(_count(mask), 1.0))


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(
            f"clip_low={clip_low} must be in [0, 1] and clip_high={clip_high} at least 0"
        )
