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
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.cost.record import KINDS
from megajax.systems.cdmpp.physics import TILES, TIMES, Times

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
        """columns: features of a leaf. width: of the embedding."""
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
        """inputs: features of a program. columns: of a leaf. width: of the hidden layers."""
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
