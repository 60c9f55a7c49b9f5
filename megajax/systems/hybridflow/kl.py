"""Estimators of the divergence between a policy and its reference, and the coefficient's control.

k1, k2 and k3 (Schulman, "Approximating KL Divergence", 2020) estimate KL(policy || reference) from
tokens that the policy drew. They work on two arrays of one shape, element by element. The mean of
k1 and of k3 is the divergence, but only the gradient of k2 is its gradient in expectation: that is
what `straight_through` is for. Names and bounds as in verl's core_algos.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

LOG_RATIO = 20.0  # bound of |log ratio| in k3 (verl)
MOST = 10.0  # upper bound of k3 (verl)
STEP = 0.2  # bound of the relative error that the controller answers (arXiv 1909.08593)
Estimator = Callable[[ArrayLike, ArrayLike], Array]


def k1(logprobs: ArrayLike, ref_logprobs: ArrayLike) -> Array:
    """logprobs - ref_logprobs: unbiased, of either sign."""
    return _difference(logprobs, ref_logprobs)


def k2(logprobs: ArrayLike, ref_logprobs: ArrayLike) -> Array:
    """(logprobs - ref_logprobs)^2 / 2: biased; its gradient is the divergence's."""
    return 0.5 * jnp.square(_difference(logprobs, ref_logprobs))


def k3(logprobs: ArrayLike, ref_logprobs: ArrayLike) -> Array:
    """exp(d) - d - 1 with d = ref_logprobs - logprobs in [-20, 20]: from 0 to 10."""
    d = jnp.clip(-_difference(logprobs, ref_logprobs), -LOG_RATIO, LOG_RATIO)
    # In float32 exp(d) - 1 loses all digits of a small divergence: it is about d^2 / 2.
    return jnp.minimum(jnp.expm1(d) - d, MOST)


def _difference(logprobs: ArrayLike, ref_logprobs: ArrayLike) -> Array:
    """Returns logprobs - ref_logprobs. Raises: ValueError for arrays of unlike shapes."""
    policy, reference = jnp.asarray(logprobs), jnp.asarray(ref_logprobs)
    if policy.shape != reference.shape:
        raise ValueError(f"logprobs have shape {policy.shape}, ref_logprobs {reference.shape}")
    return policy - reference


def straight_through(estimator: Estimator) -> Estimator:
    """Returns an estimator with the value of this one and the gradient of k2 (verl's `+`)."""

    def estimate(logprobs: ArrayLike, ref_logprobs: ArrayLike) -> Array:
        backward = k2(logprobs, ref_logprobs)
        forward = estimator(logprobs, ref_logprobs)
        # The difference has the value 0, exactly, only if it is taken first.
        return jax.lax.stop_gradient(forward) + (backward - jax.lax.stop_gradient(backward))

    return estimate


ESTIMATORS: dict[str, Estimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k1+": straight_through(k1),
    "k3+": straight_through(k3),
}


class AdaptiveController:
    """A coefficient that follows a target divergence (arXiv 1909.08593, section 2.2; as verl).

    coefficient: the present one. target: above 0. horizon: samples after which an error of 20 %
    or more has changed the coefficient by 20 %.
    """

    def __init__(self, coefficient: float, target: float, horizon: float):
        """Raises: ValueError for a target or horizon that is not above 0, or a coefficient < 0."""
        if not (coefficient >= 0 and target > 0 and horizon > 0):
            raise ValueError(
                f"coefficient={coefficient} must be at least 0, target={target} and "
                f"horizon={horizon} above 0"
            )
        self.coefficient = float(coefficient)
        self.target, self.horizon = float(target), float(horizon)

    def update(self, kl: float, steps: int) -> None:
        """Follows the divergence that `steps` samples had in the mean.

        Raises: ValueError for a divergence that is no number, and for a number of steps that is
          negative, or so large that the coefficient would become negative.
        """
        error = min(max(kl / self.target - 1, -STEP), STEP)
        factor = 1 + error * steps / self.horizon
        if not (steps >= 0 and factor >= 0):
            raise ValueError(
                f"kl={kl} must be a number, and steps={steps} from 0 to {1 / STEP:g} times the "
                f"horizon of {self.horizon:g}"
            )
        self.coefficient *= factor
