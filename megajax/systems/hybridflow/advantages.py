"""Advantage estimators of reinforcement learning on sequences. Host functions, in float64 inside.

An estimator sees the whole batch of an iteration: it runs on the controller, between rollouts and
updates (HybridFlow section 4, `compute_advantage`). Results are float32 and 0 where the mask is
False. Rewards and values count only where the mask is True; a hole in the mask (the answer of a
tool inside a response) is skipped: it delays nothing and discounts nothing.

Legend: B responses, S positions. Formulas as in verl's core_algos, named beside each function.
"""

import numpy as np
from numpy.typing import ArrayLike

EPSILON = 1e-6  # added to a group's standard deviation (verl, GRPO)
WHITEN_EPSILON = 1e-8  # added to the batch's variance (verl, masked_whiten)
Array = np.ndarray


def gae(
    rewards: ArrayLike, mask: ArrayLike, values: ArrayLike, gamma: float, lam: float
) -> tuple[Array, Array]:
    """Generalized advantage estimation (arXiv 1506.02438): (advantages, returns), not whitened.

    delta_t = r_t + gamma V_next - V_t; A_t = delta_t + gamma lam A_next; returns = A + V, where
    `next` is the next position whose mask is True, 0 behind the last.

    Args: rewards, values: (B, S) float32. mask: (B, S) bool. gamma, lam: in [0, 1].
    Raises: ValueError for shapes, dtypes and numbers that are not so.
    """
    reward_BS, mask_BS = _checked(rewards, mask)
    value_BS = _member(values, "values", mask_BS)
    _check_unit(gamma=gamma, lam=lam)
    advantage_BS = np.zeros_like(reward_BS)
    next_value_B = np.zeros(len(reward_BS))
    next_advantage_B = np.zeros(len(reward_BS))
    for t in reversed(range(reward_BS.shape[1])):
        delta_B = reward_BS[:, t] + gamma * next_value_B - value_BS[:, t]
        counts_B = mask_BS[:, t]
        next_advantage_B = np.where(
            counts_B, delta_B + gamma * lam * next_advantage_B, next_advantage_B
        )
        next_value_B = np.where(counts_B, value_BS[:, t], next_value_B)
        advantage_BS[:, t] = np.where(counts_B, next_advantage_B, 0.0)
    returns_BS = np.where(mask_BS, advantage_BS + value_BS, 0.0)
    return advantage_BS.astype(np.float32), returns_BS.astype(np.float32)


def grpo(rewards: ArrayLike, mask: ArrayLike, groups: ArrayLike) -> Array:
    """GRPO (arXiv 2402.03300): (score - group's mean) / (group's standard deviation + 1e-6).

    The score of a response is the sum of its rewards; the deviation has n - 1 in its divisor. A
    group of one response has mean 0 and deviation 1.

    Args: rewards: (B, S) float32. mask: (B, S) bool. groups: (B,) int, equal for responses to one
        prompt. Rows without a token belong to no group.
    Raises: ValueError for shapes and dtypes that are not so.
    """
    mask_BS, score_B, mean_B, deviation_B, _ = _groups(rewards, mask, groups)
    return _spread((score_B - mean_B) / (deviation_B + EPSILON), mask_BS)


def dr_grpo(rewards: ArrayLike, mask: ArrayLike, groups: ArrayLike) -> Array:
    """Dr. GRPO (arXiv 2503.20783): score - group's mean. Arguments and errors of `grpo`."""
    mask_BS, score_B, mean_B, _, _ = _groups(rewards, mask, groups)
    return _spread(score_B - mean_B, mask_BS)


def rloo(rewards: ArrayLike, mask: ArrayLike, groups: ArrayLike) -> Array:
    """RLOO (arXiv 2402.14740): score - mean of the group's other responses.

    That is n / (n - 1) times score - mean; a group of one response keeps its score. Arguments and
    errors of `grpo`.
    """
    mask_BS, score_B, mean_B, _, size_B = _groups(rewards, mask, groups)
    factor_B = np.where(size_B > 1, size_B / np.maximum(size_B - 1, 1), 1.0)
    return _spread(factor_B * (score_B - mean_B), mask_BS)


def remax(rewards: ArrayLike, mask: ArrayLike, baselines: ArrayLike) -> Array:
    """ReMax (arXiv 2310.10505): sum of the rewards from a token on - score of a greedy response.

    Args: rewards: (B, S) float32. mask: (B, S) bool. baselines: (B,) float32.
    Raises: ValueError for shapes, dtypes and numbers that are not so.
    """
    reward_BS, mask_BS = _checked(rewards, mask)
    baseline_B = np.asarray(baselines, np.float64)
    if baseline_B.shape != reward_BS.shape[:1]:
        raise ValueError(
            f"baselines have shape {baseline_B.shape}; one for each of {len(reward_BS)} rows"
        )
    _check_finite("baselines", baseline_B[mask_BS.any(axis=1)])
    future_BS = np.cumsum(reward_BS[:, ::-1], axis=1)[:, ::-1]
    return np.where(mask_BS, future_BS - baseline_B[:, None], 0.0).astype(np.float32)


def reinforce_plus_plus(rewards: ArrayLike, mask: ArrayLike, gamma: float) -> Array:
    """REINFORCE++ (arXiv 2501.03262): the discounted return, whitened over the batch's tokens.

    Whitened: minus the mean, times 1 / sqrt(variance + 1e-8), with n - 1 in the variance's divisor.

    Args: rewards: (B, S) float32. mask: (B, S) bool. gamma: in [0, 1].
    Raises: ValueError for shapes, dtypes and numbers that are not so.
    """
    _check_unit(gamma=gamma)
    reward_BS, mask_BS = _checked(rewards, mask)
    return_BS = np.zeros_like(reward_BS)
    next_B = np.zeros(len(reward_BS))
    for t in reversed(range(reward_BS.shape[1])):
        next_B = np.where(mask_BS[:, t], reward_BS[:, t] + gamma * next_B, next_B)
        return_BS[:, t] = next_B
    return whiten(return_BS, mask_BS)


def whiten(values: ArrayLike, mask: ArrayLike) -> Array:
    """Returns values with mean 0 and variance 1 over the mask, float32; 0 where the mask is False.

    PPO applies it to the advantages of `gae`. One token has no variance: its value becomes 0.

    Args: values: (B, S) float32. mask: (B, S) bool.
    Raises: ValueError for shapes, dtypes and numbers that are not so.
    """
    value_BS, mask_BS = _checked(values, mask, "values")
    picked_N = value_BS[mask_BS]
    if picked_N.size < 2:
        return np.zeros(value_BS.shape, np.float32)
    scale = 1 / np.sqrt(picked_N.var(ddof=1) + WHITEN_EPSILON)
    return np.where(mask_BS, (value_BS - picked_N.mean()) * scale, 0.0).astype(np.float32)


# ---- arguments


def _checked(array: ArrayLike, mask: ArrayLike, name: str = "rewards") -> tuple[Array, Array]:
    """Returns an array in float64, 0 where masked, and the mask. Raises: ValueError."""
    mask_BS = np.asarray(mask)
    if mask_BS.ndim != 2 or mask_BS.dtype != bool:
        raise ValueError(f"mask is {mask_BS.dtype} of shape {mask_BS.shape}; bool (B, S) is needed")
    return _member(array, name, mask_BS), mask_BS


def _member(array: ArrayLike, name: str, mask_BS: Array) -> Array:
    """Returns an array of the mask's shape in float64, 0 where masked. Raises: ValueError."""
    member = np.asarray(array)
    if member.shape != mask_BS.shape:
        raise ValueError(f"{name} have shape {member.shape}; the mask has {mask_BS.shape}")
    if member.dtype.kind not in "fiubV":  # V: bfloat16
        raise ValueError(f"{name} are {member.dtype}; real numbers are needed")
    member_BS = np.where(mask_BS, member.astype(np.float64), 0.0)
    _check_finite(name, member_BS)
    return member_BS


def _check_finite(name: str, array: Array) -> None:
    if not np.isfinite(array).all():
        row = np.argwhere(~np.isfinite(array))[0]
        raise ValueError(f"{name} hold a value that is not finite, at {tuple(map(int, row))}")


def _check_unit(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 <= number <= 1:
            raise ValueError(f"{name}={number} must be in [0, 1]; nearest: {int(number > 1)}")


def _groups(
    rewards: ArrayLike, mask: ArrayLike, groups: ArrayLike
) -> tuple[Array, Array, Array, Array, Array]:
    """Returns mask (B, S) and, by row: score, its group's mean, deviation and size."""
    reward_BS, mask_BS = _checked(rewards, mask)
    group_B = np.asarray(groups)
    if group_B.shape != reward_BS.shape[:1] or (group_B.size and group_B.dtype.kind not in "iu"):
        raise ValueError(
            f"groups are {group_B.dtype} of shape {group_B.shape}; an int for each of "
            f"{len(reward_BS)} rows is needed"
        )
    score_B = reward_BS.sum(axis=1)
    counts_B = mask_BS.any(axis=1)
    mean_B, deviation_B = np.zeros_like(score_B), np.ones_like(score_B)
    size_B = np.ones_like(score_B)
    for group in np.unique(group_B[counts_B]):
        rows = np.flatnonzero((group_B == group) & counts_B)
        if len(rows) > 1:
            mean_B[rows], deviation_B[rows] = score_B[rows].mean(), score_B[rows].std(ddof=1)
            size_B[rows] = len(rows)
    return mask_BS, score_B, mean_B, deviation_B, size_B


def _spread(advantage_B: Array, mask_BS: Array) -> Array:
    return np.where(mask_BS, advantage_B[:, None], 0.0).astype(np.float32)
