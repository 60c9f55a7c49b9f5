"""INT: one LSTM-VAE for all metrics at once (Minder section 6), in plain JAX.

The same shape as models/lstm_vae.py but for its inputs and outputs, which are all metrics, and its
units and latent, which are larger (chosen: 16 and 8, a network has seven times as much to say).

Legend: B windows, W seconds, C metrics, H units.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

Learnt = dict[str, np.ndarray]
UNITS, LATENT, BATCH, RATE = 16, 8, 512, 1e-2
KL = 8e-4  # as of models/lstm_vae.py


def begin(key: jax.Array, metrics: int) -> dict[str, jax.Array]:
    """Returns random weights."""
    shapes = {
        "encode": (metrics + UNITS, 4 * UNITS), "latent": (UNITS, 2 * LATENT),
        "decode": (LATENT + UNITS, 4 * UNITS), "out": (UNITS + LATENT, metrics),
    }  # fmt: skip
    keys = jax.random.split(key, len(shapes))
    made = {
        name: jax.random.normal(k, shape) * shape[0] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return made | {f"{name}_bias": jnp.zeros(shape[1]) for name, shape in shapes.items()}


def _lstm(w: dict, name: str, state: tuple, x: jax.Array) -> tuple:
    gates = jnp.concatenate([x, state[0]], -1) @ w[name] + w[f"{name}_bias"][None]
    i, f, g, o = jnp.split(gates, 4, -1)
    cell = jax.nn.sigmoid(f + 1.0) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell


def both(w: dict, x_BWC: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns (what comes back, KL_B). key: of the latent's noise; None: its mean is decoded."""
    zeros = jnp.zeros((len(x_BWC), UNITS))
    state = (zeros, zeros)
    state, _ = jax.lax.scan(
        lambda s, x: (_lstm(w, "encode", s, x), None), state, x_BWC.swapaxes(0, 1)
    )
    mean, log_var = jnp.split(state[0] @ w["latent"] + w["latent_bias"][None], 2, -1)
    log_var = jnp.clip(log_var, -12.0, 4.0)
    z = mean
    if key is not None:
        z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(key, mean.shape)

    def second(s: tuple, _: None) -> tuple:
        s = _lstm(w, "decode", s, z)
        return s, jnp.concatenate([s[0], z], -1) @ w["out"] + w["out_bias"][None]

    _, back = jax.lax.scan(second, (zeros, zeros), None, x_BWC.shape[1])
    return back.swapaxes(0, 1), 0.5 * (jnp.exp(log_var) + mean**2 - 1 - log_var).sum(-1)


@jax.jit
def denoise(w: dict, x_BWC: jax.Array) -> jax.Array:
    """Returns the windows as the network gives them back."""
    return both(w, x_BWC, None)[0]


def train(x_BWC: np.ndarray, seed: int, steps: int) -> Learnt:
    """Returns the trained weights. x: windows in [0, 1] without holes."""
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, steps, 0.02))
    weights = begin(jax.random.key(seed), x_BWC.shape[2])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(w: dict, state: optax.OptState, x: jax.Array, key: jax.Array) -> tuple:
        def loss(w: dict) -> jax.Array:
            back, kl_B = both(w, x, key)
            return ((back - x) ** 2).mean() + KL * kl_B.mean() / x.shape[2]

        updates, state = optimizer.update(jax.grad(loss)(w), state)
        return optax.apply_updates(w, updates), state

    state, rng = optimizer.init(weights), np.random.default_rng(seed)
    for number in range(steps):
        x = jnp.asarray(x_BWC[rng.integers(0, len(x_BWC), BATCH)])
        weights, state = step(weights, state, x, jax.random.fold_in(jax.random.key(seed), number))
    return jax.tree.map(np.asarray, weights)
