"""Advantages, losses and divergences against float64 NumPy written from the papers' formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.systems.hybridflow import advantages, kl, losses

B, S = 7, 6
GROUPS = np.array([0, 0, 0, 1, 1, 2, 1])  # group 2 has one response


@pytest.fixture
def batch():
    """Random members with holes in the mask, an empty row, and NaN under the mask."""
    random = np.random.default_rng(3)
    mask = random.random((B, S)) < 0.7
    mask[4] = False
    mask[5, :] = [True, False, False, True, True, False]
    arrays = {
        name: np.where(mask, random.standard_normal((B, S)), np.nan).astype(np.float32)
        for name in ("rewards", "values", "logprobs", "old", "advantages", "returns")
    }
    # ratios on all sides of the clips, some far out
    arrays["old"] = arrays["logprobs"] + np.float32(random.choice([-3, -0.3, 0.05, 0.3, 3], (B, S)))
    return {"mask": mask} | arrays


def places(mask, row):
    return [t for t in range(S) if mask[row, t]]


def gae(rewards, mask, values, gamma, lam):
    advantage, returns = np.zeros((B, S)), np.zeros((B, S))
    for b in range(B):
        at = places(mask, b)
        for i, t in enumerate(at):  # the sum over what follows, written out
            for k, u in enumerate(at[i:]):
                after = values[b, at[i + k + 1]] if i + k + 1 < len(at) else 0.0
                delta = rewards[b, u] + gamma * after - values[b, u]
                advantage[b, t] += (gamma * lam) ** k * delta
            returns[b, t] = advantage[b, t] + values[b, t]
    return advantage, returns


def spread(scores, mask):
    return np.where(mask, np.asarray(scores)[:, None], 0.0)


def whitened(x, mask):
    picked = x[mask]
    return np.where(mask, (x - picked.mean()) / np.sqrt(picked.var(ddof=1) + 1e-8), 0.0)


def test_generalized_advantages(batch):
    r, m, v = (np.float64(batch["rewards"]), batch["mask"], np.float64(batch["values"]))
    for gamma, lam in ((1.0, 1.0), (0.9, 0.8), (0.5, 0.0)):
        ours = advantages.gae(batch["rewards"], m, batch["values"], gamma, lam)
        for a, b in zip(ours, gae(r, m, v, gamma, lam), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
            assert a.dtype == np.float32


def test_groups(batch):
    r, m = np.float64(batch["rewards"]), batch["mask"]
    scores = np.where(m, r, 0).sum(1)
    wants = {"grpo": np.zeros(B), "dr_grpo": np.zeros(B), "rloo": np.zeros(B)}
    for b in range(B):
        if not m[b].any():
            continue
        others = [c for c in range(B) if GROUPS[c] == GROUPS[b] and m[c].any()]
        alone = len(others) == 1
        mean = 0.0 if alone else scores[others].mean()
        deviation = 1.0 if alone else scores[others].std(ddof=1)
        wants["grpo"][b] = (scores[b] - mean) / (deviation + 1e-6)
        wants["dr_grpo"][b] = scores[b] - mean
        others_of_group = [c for c in others if c != b]
        wants["rloo"][b] = scores[b] - (scores[others_of_group].mean() if others_of_group else 0.0)
    for name, want in wants.items():
        ours = getattr(advantages, name)(batch["rewards"], m, GROUPS)
        np.testing.assert_allclose(ours, spread(want, m), atol=1e-5, err_msg=name)


def test_returns_and_baselines(batch):
    r, m = np.where(batch["mask"], np.float64(batch["rewards"]), 0), batch["mask"]
    baselines = np.arange(B, dtype=np.float32)
    want = np.zeros((B, S))
    for b in range(B):
        for t in places(m, b):
            want[b, t] = r[b, t:].sum() - baselines[b]
    np.testing.assert_allclose(advantages.remax(batch["rewards"], m, baselines), want, atol=1e-6)
    returns = gae(r, m, np.zeros((B, S)), 0.9, 1.0)[0]  # no values: discounted sums
    ours = advantages.reinforce_plus_plus(batch["rewards"], m, 0.9)
    np.testing.assert_allclose(ours, whitened(returns, m), atol=1e-5)


def test_bad_batches_are_named(batch):
    r, m, v = batch["rewards"], batch["mask"], batch["values"]
    for call, words in (
        (lambda: advantages.gae(r, m.astype(np.float32), v, 1.0, 1.0), "bool"),
        (lambda: advantages.gae(r[:, :3], m, v, 1.0, 1.0), "rewards"),
        (lambda: advantages.gae(r, m, v, 1.5, 1.0), r"gamma=1.5.*nearest: 1"),
        (lambda: advantages.gae(np.full((B, S), np.nan), m, v, 1.0, 1.0), "not finite"),
        (lambda: advantages.grpo(r, m, GROUPS[:3]), "groups"),
        (lambda: advantages.grpo(r, m, GROUPS.astype(float)), "groups"),
        (lambda: advantages.remax(r, m, np.zeros(2)), "baselines"),
        (lambda: losses.ppo(r, r, r, m, 0.2, 0.2, aggregation="mean"), "aggregation 'mean'"),
        (lambda: losses.ppo(r, r, r, m, 0.2, 0.2, dual_clip=1.0), "dual_clip=1.0"),
        (lambda: losses.ppo(r, r[:2], r, m, 0.2, 0.2), "shape"),
        (lambda: losses.gspo(r, r, r, m, -0.1, 0.2), "clip_low=-0.1"),
        (lambda: losses.value(r, r, r, m, 0.0), "clip=0.0"),
        (lambda: losses.ppo(r, r, None, m, 0.2, 0.2), "^advantages: an array is needed"),
        (lambda: losses.ppo(r, r * 1j, r, m, 0.2, 0.2), "^old_logprobs: complex64"),
        (lambda: losses.ppo(r, r, r, m.astype(int), 0.2, 0.2), "bool"),
        (lambda: losses.cispo(r, r, r, m, 0.2, 0.2, total=0), "total=0"),
        (lambda: losses.value(r, r, r, m, 0.2, total=np.nan), "total=nan"),
        (lambda: kl.k1(r, r[:, 0]), r"shape \(7, 6\), ref_logprobs \(7,\)"),
        (lambda: kl.k3(r, r[:, :1]), "ref_logprobs"),
        (lambda: kl.AdaptiveController(0.1, 0.0, 10), "target=0.0"),
        (lambda: kl.AdaptiveController(0.1, 6.0, 10).update(np.nan, 5), "kl=nan"),
        (lambda: kl.AdaptiveController(0.1, 6.0, 10).update(0.0, 51), "steps=51 from 0 to 5 times"),
        (lambda: kl.AdaptiveController(0.1, 6.0, 10).update(0.0, -1), "steps=-1"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


# ---- losses


def aggregated(loss, mask, how, total=None):
    rows = [np.array([loss[b, t] for t in places(mask, b)]) for b in range(B) if mask[b].any()]
    if how == "token-mean":
        value, divisor = sum(x.sum() for x in rows), mask.sum()
    elif how == "seq-mean-token-sum":
        value, divisor = sum(x.sum() for x in rows), len(rows)
    elif how == "seq-mean-token-mean":
        value, divisor = sum(x.mean() for x in rows), len(rows)
    else:
        value, divisor = sum(x.sum() for x in rows), S
    return value / (divisor if total is None else total)


def token_losses(name, lp, old, adv, mask, low, high, dual):
    out = np.zeros((B, S))
    for b in range(B):
        at = places(mask, b)
        mean = np.mean([lp[b, t] - old[b, t] for t in at]) if at else 0.0
        for t in at:
            ratio, a = np.exp(np.clip(lp[b, t] - old[b, t], -20, 20)), adv[b, t]
            if name == "gspo":
                ratio = np.exp(min(mean, 10.0))
            clipped = min(max(ratio, 1 - low), 1 + high)
            if name == "cispo":
                out[b, t] = -clipped * a * lp[b, t]
                continue
            out[b, t] = max(-a * ratio, -a * clipped)
            if name == "ppo" and a < 0:
                out[b, t] = min(out[b, t], -a * dual)
    return out


@pytest.mark.parametrize("how", losses.AGGREGATIONS)
@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_policy_losses_and_their_gradients(name, how, batch):
    m = jnp.asarray(batch["mask"])
    lp, old, adv = (np.float64(batch[k]) for k in ("logprobs", "old", "advantages"))
    extra = {"dual_clip": 1.5} if name == "ppo" else {}

    def ours(x, total=None):
        return getattr(losses, name)(
            x,
            batch["old"],
            batch["advantages"],
            m,
            0.2,
            0.28,
            aggregation=how,
            total=total,
            **extra,
        )

    loss, metrics = ours(batch["logprobs"])
    table = token_losses(name, lp, old, adv, batch["mask"], 0.2, 0.28, 1.5)
    assert loss == pytest.approx(aggregated(table, batch["mask"], how), abs=1e-5)
    assert ours(batch["logprobs"], 5.0)[0] == pytest.approx(
        aggregated(table, batch["mask"], how, 5.0), abs=1e-5
    )
    distance = np.mean((old - lp)[batch["mask"]])
    assert metrics["actor/ppo_kl"] == pytest.approx(distance, abs=1e-5)
    gradient = jax.grad(lambda x: ours(x)[0])(jnp.asarray(batch["logprobs"]))
    assert not np.isnan(gradient).any()
    assert (np.asarray(gradient)[~batch["mask"]] == 0).all()
    if name == "ppo":  # the others have a stopped gradient, which differences do not see
        move = np.random.default_rng(0).standard_normal((B, S)) * batch["mask"]
        near = [
            aggregated(
                token_losses(name, lp + e * move, old, adv, batch["mask"], 0.2, 0.28, 1.5),
                batch["mask"],
                how,
            )
            for e in (1e-5, -1e-5)
        ]
        slope = np.where(batch["mask"], gradient * move, 0).sum()
        assert slope == pytest.approx((near[0] - near[1]) / 2e-5, rel=1e-3, abs=1e-6)


def test_stopped_gradients(batch):
    """cispo: the weight times -A; gspo, inside the clip: the response's ratio times -A."""
    m, lp = batch["mask"], np.float64(batch["logprobs"])
    close = lp + np.where(m, 0.01, 0.0)
    adv = np.float64(batch["advantages"])
    for name in ("cispo", "gspo"):
        gradient = jax.grad(
            lambda x, f=getattr(losses, name): f(
                x,
                np.float32(close),
                batch["advantages"],
                jnp.asarray(m),
                0.2,
                0.28,
                aggregation="seq-mean-token-sum-norm",
            )[0]
        )(jnp.asarray(batch["logprobs"]))
        want = np.where(m, -np.exp(-0.01) * adv / S, 0.0)
        np.testing.assert_allclose(gradient, want, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("how", losses.AGGREGATIONS)
def test_micro_batches_of_any_sizes_add_up(how, batch):
    m = jnp.asarray(batch["mask"])
    members = [jnp.asarray(batch[k]) for k in ("logprobs", "old", "advantages")]
    expected = losses.ppo(*members, m, 0.2, 0.28, aggregation=how)[0]
    total = losses.divisor(m, how)
    parts = sum(
        float(
            losses.ppo(*(x[a:b] for x in members), m[a:b], 0.2, 0.28, aggregation=how, total=total)[
                0
            ]
        )
        for a, b in ((0, 1), (1, 5), (5, 7))
    )
    assert parts == pytest.approx(float(expected), abs=1e-6)


def test_values(batch):
    m = batch["mask"]
    v, r = np.float64(batch["values"]), np.float64(batch["returns"])
    old = v + np.where(m, np.random.default_rng(1).choice([-1, -0.1, 0.1, 1], (B, S)), 0)
    near = np.clip(v, old - 0.2, old + 0.2)
    table = 0.5 * np.maximum((v - r) ** 2, (near - r) ** 2)
    loss, metrics = losses.value(
        batch["values"], np.float32(old), batch["returns"], jnp.asarray(m), 0.2
    )
    assert loss == pytest.approx(aggregated(table, m, "token-mean"), rel=1e-5)
    clipped = ((near - r) ** 2 > (v - r) ** 2)[m].mean()
    assert metrics["critic/vf_clipfrac"] == pytest.approx(clipped, abs=1e-6)


def test_lists_and_bfloat16_are_taken(batch):
    m = batch["mask"]
    names = ("logprobs", "old", "advantages")
    expected, metrics = losses.ppo(*(batch[k] for k in names), m, 0.2, 0.28)
    loss, same = losses.ppo(*(batch[k].tolist() for k in names), m.tolist(), 0.2, 0.28)
    assert loss == expected and same == metrics
    np.testing.assert_array_equal(kl.k2([1.0, 3.0], [2.0, 1.0]), [0.5, 2.0])
    coarse = [jnp.asarray(batch[k], jnp.bfloat16) for k in ("rewards", "values")]
    exact = [np.asarray(x, np.float32) for x in coarse]
    np.testing.assert_array_equal(
        advantages.gae(coarse[0], m, coarse[1], 0.9, 0.8),
        advantages.gae(exact[0], m, exact[1], 0.9, 0.8),
    )
    none = np.zeros((0, 3))
    assert advantages.grpo(none, none.astype(bool), []).shape == (0, 3)


def test_a_step_without_a_token_has_loss_0():
    m, x = jnp.zeros((2, 3), bool), jnp.zeros((2, 3))
    for how in losses.AGGREGATIONS[:3]:
        total = losses.divisor(m, how)
        assert jax.jit(lambda t, how=how: losses.gspo(x, x, x, m, 0.2, 0.2, how, t)[0])(total) == 0


def test_an_empty_batch_loses_nothing():
    m, x = jnp.zeros((2, 3), bool), jnp.full((2, 3), jnp.nan)
    for how in losses.AGGREGATIONS:
        loss, gradient = jax.value_and_grad(
            lambda y, how=how: losses.ppo(y, x, x, m, 0.2, 0.2, aggregation=how)[0]
        )(x)
        assert loss == 0 and (np.asarray(gradient) == 0).all()


# ---- divergences


def test_divergences_and_their_gradients():
    random = np.random.default_rng(2)
    p, q = np.float64(random.normal(-2, 1, 200)), np.float64(random.normal(-2, 1, 200))
    d = q - p
    wants = {"k1": -d, "k2": d**2 / 2, "k3": np.minimum(np.exp(d) - d - 1, 10)}
    for name, want in wants.items():
        estimator = getattr(kl, name)
        np.testing.assert_allclose(
            estimator(np.float32(p), np.float32(q)), want, rtol=1e-4, atol=1e-5, err_msg=name
        )
        through = kl.straight_through(estimator)
        np.testing.assert_array_equal(
            through(np.float32(p), np.float32(q)), estimator(np.float32(p), np.float32(q))
        )
        gradient = jax.grad(lambda x, f=through: f(x, jnp.float32(q)).sum())(jnp.float32(p))
        np.testing.assert_allclose(gradient, p - q, atol=1e-5)
    assert kl.k3(jnp.float32(-60.0), jnp.float32(0.0)) == 10
    near = np.float32([1e-2, 1e-3, -1e-3, 1e-4])  # as in a run's first iterations
    d = np.float64(near)
    np.testing.assert_allclose(kl.k3(0 * near, near), np.expm1(d) - d, rtol=2e-3)


def test_the_coefficient_follows_its_target():
    controller, coefficient = kl.AdaptiveController(0.1, 6.0, 10_000), 0.1
    for divergence, steps in ((60.0, 256), (6.6, 256), (0.0, 512)):
        controller.update(divergence, steps)
        coefficient *= 1 + np.clip(divergence / 6.0 - 1, -0.2, 0.2) * steps / 10_000
        assert controller.coefficient == pytest.approx(coefficient, rel=1e-12)
