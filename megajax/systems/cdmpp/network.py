"""The network that predicts the seconds of a program (a launched operation) on a device.

    seconds = (floor^8 + exp(8 g))^(1/8),  g = smooth maximum of (log time + offset)

floor is the roofline of the device's card. The times are those of simple models of the program on
the card, for example its FLOPs at peak or its bytes at full bandwidth (physics.py). The network
computes the offsets, which correct these times, from the program's features and from an encoding of
its tree of operations (CDMPP, section 4: leaves with pre-order positions).

The prediction is monotone in the card by construction: it never grows if the card has more FLOP/s,
bandwidth, SMs or L2. The card enters only through the times, none of which grows then, and g is
made of functions that never decrease in them: the smooth maximum of a tile's compute and traffic,
the smooth minimum over tiles, and the smooth maximum of all times.

Each device also has a small fitted vector, its traits. The traits stand for what a card does not
say (generation, kernel library, power limit). They belong to the device's name and are not computed
from its card.

Legend: R rows, X inputs, N leaves, C columns of a leaf, D width, G general times, T tiles, O
offsets, Z traits.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from megajax.cost.record import KINDS, LEAF
from megajax.systems.cdmpp.physics import LOGS, PLACES, TILES, TIMES, Programs, Times

Array = jax.Array
Leaf = Any  # of a pytree: an array of jax or of NumPy
OFFSETS = 3 * len(TILES) + TIMES
TRAITS = 4
TREE = 16  # width of a tree's embedding
POSITIONS = 16  # sines and cosines of a leaf's position
# Exponent of the smooth maximum with the floor. It exceeds the larger of its two arguments by at
# most 9 %.
_FLOOR = 8.0
# Initial offsets, in the order of `combine`: the tiles' weights, compute and traffic, then the
# general times. Times at the peak or the bandwidth count nearly in full, fixed costs and traffic
# less.
_START = (
    *(0.0,) * len(TILES) * 2,
    *(-2.0,) * len(TILES),
    *(-0.1, 0.0, -0.7, -1.0, 0.0, 0.0, -1.0, -1.0, -1.0, -1.0, -1.0),
)
# Offsets that a device's shift of a kind is added to: all that correct times, none that are the
# weights of tiles.
_SHIFTED = (0.0,) * len(TILES) + (1.0,) * (OFFSETS - len(TILES))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of the network: standardised numbers, trees, and the index of each row's kind."""

    inputs_RX: Leaf
    leaves_RNC: Leaf
    positions_RN: Leaf
    kinds_R: Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Device:
    """The fitted values of a device.

    traits: (Z,), an input of the network. shift: (KINDS,), added to all offsets of times for rows
    of a kind. offsets: (O,), added to the offsets of every row.
    """

    traits: Leaf
    shift: Leaf
    offsets: Leaf


def plain_device(traits: Array) -> Device:
    """Returns a device with these traits, and shifts and offsets of 0."""
    lead = traits.shape[:-1]
    return Device(traits, jnp.zeros((*lead, len(KINDS))), jnp.zeros((*lead, OFFSETS)))


class TreeEncoder(nnx.Module):
    """Encodes the tree of a record as one vector.

    Each leaf is embedded together with its pre-order position, one layer of attention mixes the
    leaves, and their mean and maximum give the result.
    """

    def __init__(self, columns: int, width: int, *, rngs: nnx.Rngs):
        """columns: features of a leaf. width: the width of the embedding."""
        self.leaf = nnx.Linear(columns + POSITIONS, width, rngs=rngs)
        self.mix = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, leaves_RNC: Array, positions_RN: Array) -> Array:
        """Returns the embedding of each row's tree, (R, D). A position of -1 is padding."""
        real_RN = positions_RN >= 0
        rates = 10000.0 ** -(jnp.arange(POSITIONS // 2) / (POSITIONS // 2))
        angles = positions_RN[..., None].astype(jnp.float32) * rates[None, None]
        places = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        x_RND = jnp.tanh(self.leaf(jnp.concatenate([leaves_RNC, places], -1)))
        query, key, value = jnp.split(self.mix(x_RND), 3, -1)
        scores = jnp.einsum("rnd,rmd->rnm", query, key) / jnp.sqrt(jnp.float32(key.shape[-1]))
        scores = jnp.where(real_RN[:, None], scores, -1e9)
        x_RND = x_RND + jnp.einsum("rnm,rmd->rnd", jax.nn.softmax(scores, -1), value)
        mask = real_RN[..., None]
        count = jnp.maximum(mask.sum(1), 1).astype(jnp.float32)
        mean = jnp.where(mask, x_RND, 0).sum(1) / count
        largest = jnp.where(mask, x_RND, -1e9).max(1)
        largest = jnp.where(mask.any(1), largest, 0)
        return self.out(jnp.concatenate([mean, largest], -1))


class Network(nnx.Module):
    """Predicts the offsets that correct the times of a program, in log seconds, on its device."""

    def __init__(self, inputs: int, columns: int, width: int = 128, *, rngs: nnx.Rngs):
        """inputs: features of a program. columns: features of a leaf. width: the width of the
        hidden layers."""
        small = nnx.initializers.variance_scaling(0.01, "fan_in", "normal")
        free = nnx.initializers.variance_scaling(0.04, "fan_in", "normal")
        self.tree = TreeEncoder(columns, TREE, rngs=rngs)
        self.first = nnx.Linear(inputs + TREE, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.last = nnx.Linear(
            width, OFFSETS, rngs=rngs, kernel_init=small, bias_init=lambda *_: jnp.array(_START)
        )
        plain = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.traits_in = plain(TRAITS, width)
        self.traits_out = plain(TRAITS, OFFSETS, kernel_init=free)
        # Exponents of the smooth minimum over tiles and of the smooth maxima of a tile and of all
        # times, minus 1, in logarithms.
        self.sharpness = nnx.Param(jnp.log(jnp.array([3.0, 2.0, 2.0])))

    def embed(self, rows: Inputs, traits: Array) -> Array:
        """Returns the last hidden layer (R, D), from -1 to 1. traits: (R, Z) or (1, Z)."""
        tree_RD = self.tree(rows.leaves_RNC, rows.positions_RN)
        x = jnp.concatenate([rows.inputs_RX, tree_RD], -1)
        x = jnp.tanh(self.first(x) + self.traits_in(traits))
        return jnp.tanh(self.second(x))

    def __call__(self, rows: Inputs, device: Device) -> Array:
        """Returns offsets (R, O). device: one for all rows, or with a leading dimension R."""
        return self.offsets(self.embed(rows, jnp.atleast_2d(device.traits)), rows, device)

    def offsets(self, hidden_RD: Array, rows: Inputs, device: Device) -> Array:
        """Returns offsets (R, O) of embedded programs."""
        if device.traits.ndim == 1:
            device = jax.tree.map(lambda leaf: leaf[None], device)
        kind = jax.nn.one_hot(rows.kinds_R, len(KINDS))
        shift_R1 = jnp.sum(device.shift * kind, -1, keepdims=True)
        offsets_RO = self.last(hidden_RD) + self.traits_out(device.traits) + device.offsets
        return offsets_RO + shift_R1 * jnp.array(_SHIFTED)[None]


def combine(times: Times, product_R: Any, offsets_RO: Any, sharpness: Any, xp: Any) -> Any:
    """Returns g (R,), log seconds before the floor is applied.

    g never decreases if one of the times grows.
    Args: product_R: above 0 for products. sharpness: (3,), see Network. xp: jax.numpy, or numpy for
      float64, whose rounding is far below the effect of a change of the card.
    """
    tiles = len(TILES)
    weight, compute = offsets_RO[:, :tiles], offsets_RO[:, tiles : 2 * tiles]
    traffic, general = offsets_RO[:, 2 * tiles : 3 * tiles], offsets_RO[:, 3 * tiles :]
    least, both, over = (1 + xp.exp(sharpness[i]) for i in range(3))
    parts = xp.stack([times.waves_RT + compute, times.traffic_RT + traffic])
    tile_RT = _log_sum_exp(both * parts, 0, xp) / both
    share_RT = weight - _log_sum_exp(weight, -1, xp)[:, None]
    product = -_log_sum_exp(2 * share_RT - least * tile_RT, -1, xp) / least
    product = xp.where(product_R > 0, product, -60.0)  # other kinds have no time of tiles
    every = xp.concatenate([times.general_RG + general, product[:, None]], -1)
    return _log_sum_exp(over * every, -1, xp) / over


def above(floor_R: Any, g_R: Any, xp: Any) -> Any:
    """Returns log seconds (R,): a smooth maximum of the floor's logarithm and `combine`'s g."""
    return xp.logaddexp(_FLOOR * floor_R, _FLOOR * g_R) / _FLOOR


def _log_sum_exp(x: Any, axis: int, xp: Any) -> Any:
    largest = xp.max(x, axis, keepdims=True)
    return xp.squeeze(largest, axis) + xp.log(xp.sum(xp.exp(x - largest), axis))


# ---- training
#
# Fits of the networks of a predictor, and of the traits of each device.
#
# A predictor is an ensemble. Its members, networks with different random initial weights, are
# trained at once, as one program with a leading dimension of members. A member can be trained
# without a device; its errors on that device show how wrong predictions for unseen devices are.
#
# The loss is quadratic for errors within 5 %. For larger errors, 70 % (RELATIVE) of it is the
# absolute relative error, which is the figure that we report. The other 30 % are the absolute error
# of log seconds, because the relative error hardly changes for predictions far below a measured
# time and would not correct them. A relative error punishes predictions that are too long more than
# those that are too short, so predictions are below the median of the possible times. The weight of
# a row is the inverse square root of the number of rows of its device and kind. In some steps the
# traits of a row are set to zero, so that the network learns to explain by the card what the card
# can explain.
#
# Legend: E members, R rows, Y devices, Z traits.


BATCH = 512
# Share of the relative error in the loss (chosen on programs that were timed on a CPU, with each
# family of programs left out in turn).
RELATIVE = 0.7
_QUADRATIC = 0.05  # absolute error of log seconds below which the loss is quadratic
# Probability that a row has its device's traits in a training step; otherwise they are zero (chosen
# as _PRIOR is; 0.5 was worse).
_KNOWN = 0.85
# When a predictor is adapted to a new device: weights of the penalties that keep its traits, shifts
# and offsets near their start, relative to the sum of the rows' losses. Chosen with 32 rows of each
# of P4, P100, V100, T4 and A100-40, left out of the training in turn.
_PRIOR = Device(traits=0.2, shift=0.2, offsets=0.3)


def is_placed(inputs_RX: np.ndarray) -> np.ndarray:
    """Returns which rows have a known place in a program; of the others these features are 0."""
    return inputs_RX[:, PLACES].any(-1)


@dataclasses.dataclass(frozen=True)
class Scale:
    """Mean, standard deviation and range of the logarithmic inputs over the training rows.

    Some inputs describe where in a program a row stands. Their statistics are over the rows for
    which this is known; in all other rows they are set to the mean.
    """

    mean: np.ndarray
    deviation: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, inputs_RX: np.ndarray) -> "Scale":
        """Returns the scale of these rows."""
        logs = inputs_RX[:, :LOGS].astype(np.float64)
        known = is_placed(logs)
        scale = cls(logs.mean(0), logs.std(0) + 1e-3, logs.min(0), logs.max(0))
        if known.any():
            placed = cls.of(inputs_RX[known]) if not known.all() else scale
            for values, their in zip(vars(scale).values(), vars(placed).values(), strict=True):
                values[PLACES] = their[PLACES]
        return scale

    def __call__(self, rows: Programs) -> Inputs:
        """Returns the network's inputs; values are clipped to the range of the training."""
        logs = np.clip(rows.inputs_RX[:, :LOGS], self.low, self.high)
        logs = (logs - self.mean) / self.deviation
        logs[~is_placed(rows.inputs_RX), PLACES] = 0
        inputs = np.concatenate([logs, rows.inputs_RX[:, LOGS:]], -1).astype(np.float32)
        return Inputs(inputs, rows.leaves_RNC, rows.positions_RN, rows.kinds_R.astype(np.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Labelled rows: inputs, times on the row's card, log seconds, index of the device, weight."""

    inputs: Inputs
    product_R: Leaf
    floor_R: Leaf
    general_RG: Leaf
    waves_RT: Leaf
    traffic_RT: Leaf
    target_R: Leaf
    device_R: Leaf
    weight_R: Leaf

    @classmethod
    def of(
        cls, inputs: Inputs, product_R: Any, times: Times, target_R: Any, device_R: Any
    ) -> "Rows":
        """Returns rows in float32, weighted by the size of their device and kind."""
        group = np.asarray(device_R) * len(KINDS) + np.asarray(inputs.kinds_R)
        _, inverse, counts = np.unique(group, return_inverse=True, return_counts=True)
        weight = 1 / np.sqrt(counts[inverse])
        small = functools.partial(np.asarray, dtype=np.float32)
        return cls(
            inputs=inputs,
            product_R=small(product_R),
            floor_R=small(times.floor_R),
            general_RG=small(times.general_RG),
            waves_RT=small(times.waves_RT),
            traffic_RT=small(times.traffic_RT),
            target_R=small(target_R),
            device_R=np.asarray(device_R, np.int32),
            weight_R=small(weight / weight.mean()),
        )

    @property
    def times(self) -> Times:
        """The times alone."""
        return Times(self.floor_R, self.general_RG, self.waves_RT, self.traffic_RT)


def error_of(rows: Rows, offsets_RO: Array, sharpness: Array) -> Array:
    """Returns log of predicted over measured seconds."""
    g = combine(rows.times, rows.product_R, offsets_RO, sharpness, jnp)
    return above(rows.floor_R, g, jnp) - rows.target_R


@jax.jit
def errors_of(rows: Rows, offsets_ERO: Array, sharpness: Array) -> Array:
    """Returns `error_of` for each member, (E, R)."""
    return jax.vmap(error_of, in_axes=(None, 0, 0))(rows, offsets_ERO, sharpness)


def _robust(error: Array) -> Array:
    size = jnp.abs(error)
    near = jnp.minimum(error, 1.0)
    both = (1 - RELATIVE) * size + RELATIVE * (jnp.abs(jnp.expm1(near)) + jnp.e * (error - near))
    return jnp.where(size < _QUADRATIC, size**2 / (2 * _QUADRATIC), both - _QUADRATIC / 2)


def discrepancy(one_RD: Array, other_RD: Array, moments: int = 5) -> Array:
    """Returns the central moment discrepancy of two samples of values from -1 to 1.

    Source: CDMPP section 5; Zellinger et al., ICLR 2017, definition 2.
    """
    means = one_RD.mean(0), other_RD.mean(0)
    total = jnp.linalg.norm(means[0] - means[1] + 1e-12) / 2
    for k in range(2, moments + 1):
        apart = ((one_RD - means[0]) ** k).mean(0) - ((other_RD - means[1]) ** k).mean(0)
        total += jnp.linalg.norm(apart + 1e-12) / 2**k
    return total


def fit(
    rows: Rows,
    use_EY: np.ndarray,
    use_ER: np.ndarray,
    *,
    seed: int,
    steps: int,
    target: Inputs | None = None,
    alignment: float = 0.0,
    progress: Callable[[int, float], None] | None = None,
) -> tuple[Any, Any, np.ndarray]:
    """Trains one member (a network) for each row of `use_EY`.

    Args: use_EY, use_ER: 1 if a member learns from a device, and from a row. target: programs
        without times, to which the network is to be applied. A term of the loss with the weight
        `alignment` draws the distribution of their embeddings to that of the rows (CDMPP section
        5). progress: called ten times with the step and the mean loss.
    Returns: (graph of the network, the members' states, stacked, traits (E, Y, Z)).
    """
    members, devices = use_EY.shape
    inputs = rows.inputs.inputs_RX.shape[-1]

    def create(key: Array) -> Any:
        return nnx.split(Network(inputs, LEAF, rngs=nnx.Rngs(key)))[1]

    graph = nnx.graphdef(nnx.eval_shape(lambda: Network(inputs, LEAF, rngs=nnx.Rngs(0))))
    keys = jax.random.split(jax.random.key(seed), members)
    states = jax.vmap(create)(keys)
    noise = jax.vmap(lambda key: jax.random.normal(key, (devices, TRAITS)))(keys)
    values = (states, 0.01 * noise)
    optimizer = optax.adam(optax.cosine_decay_schedule(5e-3, steps))
    moments = optimizer.init(values)
    rows = jax.tree.map(jnp.asarray, rows)
    uses = jnp.asarray(use_EY, jnp.float32), jnp.asarray(use_ER, jnp.float32)
    batch = min(BATCH, len(rows.target_R))
    aligned = None if target is None or not alignment else jax.tree.map(jnp.asarray, target)
    run = _chunk(graph, optimizer, batch, max(1, steps // 10), aligned, alignment)
    key = jax.random.key(seed + 1)
    for chunk in range(10):
        values, moments, loss = run(values, moments, jax.random.fold_in(key, chunk), rows, *uses)
        if progress is not None:
            progress((chunk + 1) * max(1, steps // 10), float(loss))
    return graph, values[0], np.array(values[1])


def _chunk(
    graph: Any, optimizer: Any, batch: int, steps: int, target: Inputs | None, alignment: float
) -> Callable[..., Any]:
    def apart(network: Network, rows: Rows, key: Array) -> Array:
        if target is None:
            return jnp.zeros(())
        chosen = jax.random.randint(key, (batch,), 0, len(target.kinds_R))
        some = jax.tree.map(lambda leaf: leaf[chosen], target)
        plain = jnp.zeros((1, TRAITS))
        return alignment * discrepancy(
            network.embed(rows.inputs, plain), network.embed(some, plain)
        )

    def loss_of(values: Any, rows: Rows, use_EY: Array, use_ER: Array, key: Array) -> Array:
        def member(state: Any, traits_YZ: Array, use_Y: Array, use_R: Array, key: Array) -> Array:
            network = nnx.merge(graph, state)
            known = jax.random.bernoulli(key, _KNOWN, (batch, 1))
            device = plain_device(jnp.where(known, traits_YZ[rows.device_R], 0.0))
            error = error_of(rows, network(rows.inputs, device), network.sharpness[...])
            weight = rows.weight_R * use_Y[rows.device_R] * use_R
            norms = [network.first, network.second, network.last]
            decay = sum(jnp.sum(layer.kernel[...] ** 2) for layer in norms)
            fitted = jnp.sum(_robust(error) * weight) / jnp.maximum(jnp.sum(weight), 1e-6)
            fitted += apart(network, rows, jax.random.fold_in(key, 1))
            return fitted + 1e-3 * jnp.mean(traits_YZ**2) + 1e-5 * decay

        states, traits_EYZ = values
        keys = jax.random.split(key, use_EY.shape[0])
        return jnp.sum(jax.vmap(member)(states, traits_EYZ, use_EY, use_ER, keys))

    def step(carry: Any, key: Array, rows: Rows, use_EY: Array, use_ER: Array) -> Any:
        values, moments = carry
        pick, drop = jax.random.split(key)
        chosen = jax.random.randint(pick, (batch,), 0, len(rows.target_R))
        some = jax.tree.map(lambda leaf: leaf[chosen], rows)
        loss, grads = jax.value_and_grad(loss_of)(values, some, use_EY, use_ER[:, chosen], drop)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes int32 and floats
            updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(values, updates), moments), loss / use_EY.shape[0]

    @jax.jit
    def run(values: Any, moments: Any, key: Array, rows: Rows, use_EY: Array, use_ER: Array) -> Any:
        body = functools.partial(step, rows=rows, use_EY=use_EY, use_ER=use_ER)
        (values, moments), losses = jax.lax.scan(
            body, (values, moments), jax.random.split(key, steps)
        )
        return values, moments, losses.mean()

    return run


@functools.partial(jax.jit, static_argnums=0)
def offsets_of(graph: Any, states: Any, inputs: Inputs, devices: Device) -> tuple[Array, Array]:
    """Returns the members' offsets (E, R, O) and sharpness. devices: (E, ...) or (E, R, ...)."""

    def member(state: Any, device: Device) -> tuple[Array, Array]:
        network = nnx.merge(graph, state)
        return network(inputs, device), network.sharpness[...]

    return jax.vmap(member)(states, devices)


def adapt(
    graph: Any, states: Any, rows: Rows, prior_EZ: Leaf, use_KR: np.ndarray, steps: int = 250
) -> Device:
    """Fits traits, shifts and offsets of one device; the networks do not change.

    Args: prior_EZ: traits to start from and to stay near. use_KR: 1 if fit K uses a row; several
        fits run at once, some of which leave rows out.
    Returns: a Device whose leaves have dimensions (fits, E, ...).
    """
    fits = len(use_KR)
    prior = jnp.asarray(prior_EZ)
    start = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf[None], (fits, *leaf.shape)), plain_device(prior)
    )
    # Rows are padded to a power of two, so that one compiled program serves many numbers of rows.
    total = 1 << (len(rows.target_R) - 1).bit_length()
    more = total - len(rows.target_R)
    rows = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf[:1].repeat(more, 0)]), rows)
    use = np.concatenate([use_KR, np.zeros((fits, more))], -1).astype(np.float32)
    return _adapt(graph, steps, states, jax.tree.map(jnp.asarray, rows), prior, start, use)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _adapt(
    graph: Any, steps: int, states: Any, rows: Rows, prior_EZ: Array, start: Device, use: Array
) -> Device:
    def cost(device: Device, state: Any, prior_Z: Array, use_R: Array) -> Array:
        network = nnx.merge(graph, state)
        error = error_of(rows, network(rows.inputs, device), network.sharpness[...])
        away = dataclasses.replace(device, traits=device.traits - prior_Z)
        penalty = jax.tree.map(lambda weight, leaf: weight * jnp.sum(leaf**2), _PRIOR, away)
        return jnp.sum(_robust(error) * use_R) + sum(jax.tree.leaves(penalty))

    def total(devices: Any) -> Array:
        members = jax.vmap(cost, in_axes=(0, 0, 0, None))
        return jnp.sum(
            jax.vmap(members, in_axes=(0, None, None, 0))(devices, states, prior_EZ, use)
        )

    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, steps))

    def step(carry: Any, _: None) -> Any:
        devices, moments = carry
        grads = jax.grad(total)(devices)
        with jax.numpy_dtype_promotion("standard"):  # as above
            updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(devices, updates), moments), None

    first: Any = start
    (fitted, _), _ = jax.lax.scan(step, (first, optimizer.init(first)), None, length=steps)
    return fitted


def no_offsets(members: int) -> Device:
    """Returns a Device, leaves (E, ...), whose traits, shifts and offsets are 0."""
    shape = (members, TRAITS)
    return Device(np.zeros(shape), np.zeros((members, len(KINDS))), np.zeros((members, OFFSETS)))
