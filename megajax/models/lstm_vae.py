"""LSTM-VAEs that denoise short windows of metrics: one network a metric, one program for all.

Minder (arXiv 2411.01791, section 4.2): a window of 8 s of one metric goes through an LSTM encoder
to a small latent and back; what comes back is the window without its noise. All metrics share the
architecture and nothing else, so their weights are stacked in a leading dimension of metrics and
every product is batched over it. A second is either measured, in [0, 1] for what the training data
had, or a hole: the encoder reads a hole as the value 0 beside a mask bit, and no loss asks for it.

Absent: attention, deeper LSTMs, a learnt variance of the decoder.

Legend: B windows, W seconds of a window, C metrics, H units of an LSTM, Z latent, I inputs, O
outputs.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.layout import Layout
from megajax.core.tree import Tree
from megajax.layers import param
from megajax.layers.attention import Context
from megajax.layers.losses import LossSums
from megajax.layers.ops import Ops
from megajax.models import parts as parts_

Array = jax.Array
HOLE = -1.0  # of a second without a sample, among targets


@dataclasses.dataclass(frozen=True)
class LstmVaeConfig:
    """Shape of the networks. Defaults: Minder section 4.2, but for `kl`.

    kl: weight of the KL term beside the squared error of a second (chosen: a Gaussian decoder with
    a standard deviation of 0.02, 2 % of a metric's range, has 2 * 0.02 ** 2).
    """

    metrics: int
    window: int = 8
    hidden: int = 4
    latent: int = 8
    kl: float = 8e-4

    @property
    def sizes(self) -> Mapping[str, tuple[int, str]]:
        """Dimensions that a mesh can cut: none, the networks are tiny."""
        return {}

    @property
    def layers(self) -> int:
        """Blocks of the stack: the networks of all metrics are one block."""
        return 1

    @property
    def max_positions(self) -> int:
        """Seconds of a window."""
        return self.window

    @property
    def dropout(self) -> float:
        """Dropout rate; the noise of the latent is not dropout."""
        return 0.0


class LstmVae(nnx.Module):
    """The networks of all metrics as one residual-free block."""

    def __init__(self, cfg: LstmVaeConfig, layout: Layout | None, rngs: nnx.Rngs):
        """Draws the weights: uniform fan-in scaling of both LSTMs, forget gates open."""
        self.cfg = cfg
        C, H, Z = cfg.metrics, cfg.hidden, cfg.latent
        normal = functools.partial(param.normal, rngs, layout)

        def weight(rows: int, columns: int) -> nnx.Param:
            return normal((C, rows, columns), (None, None, None), std=rows**-0.5)

        def bias(columns: int) -> nnx.Param:
            return param.constant(layout, (C, columns), (None, None), 0.0)

        self.encode_in, self.encode_hidden = weight(2, 4 * H), weight(H, 4 * H)
        self.encode_bias = bias(4 * H)
        self.latent, self.latent_bias = weight(H, 2 * Z), bias(2 * Z)
        self.decode_in, self.decode_hidden = weight(Z, 4 * H), weight(H, 4 * H)
        self.decode_bias = bias(4 * H)
        self.out, self.out_bias = weight(H + Z, 1), bias(1)

    def __call__(self, x_BSC: Array, context: Context) -> Array:
        """Returns (B, W + 1, C): the denoised seconds, then the KL divergence of the latent.

        x: (B, W + 1, C), whose last second is ignored. context.dropout: key of the latent's noise;
        None: the mean is decoded.
        """
        mean_BCZ, log_var_BCZ = self.encode(x_BSC[:, :-1])
        z_BCZ = mean_BCZ
        if context.dropout is not None:
            noise_BCZ = jax.random.normal(context.dropout, mean_BCZ.shape)
            z_BCZ = mean_BCZ + jnp.exp(0.5 * log_var_BCZ) * noise_BCZ
        kl_BC = 0.5 * (jnp.exp(log_var_BCZ) + mean_BCZ**2 - 1.0 - log_var_BCZ).sum(-1)
        return jnp.concatenate([self.decode(z_BCZ), kl_BC[:, None]], 1)

    def encode(self, x_BWC: Array) -> tuple[Array, Array]:
        """Returns (mean_BCZ, log variance_BCZ). x: seconds; below 0 or NaN: a hole."""
        x_WCB = x_BWC.transpose(1, 2, 0)
        measured_WCB = x_WCB >= 0
        inputs_WCIB = jnp.stack(
            [jnp.where(measured_WCB, x_WCB, 0.0), measured_WCB.astype(jnp.float32)], 2
        )
        bias_CO1 = self.encode_bias[...][..., None]

        def second(state: tuple, x_CIB: Array) -> tuple[tuple, None]:
            gates_COB = _product(self.encode_in[...], x_CIB) + bias_CO1
            return _lstm(state, gates_COB + _product(self.encode_hidden[...], state[0])), None

        state, _ = jax.lax.scan(second, self._zeros(x_WCB[0]), inputs_WCIB)
        both_COB = _product(self.latent[...], state[0]) + self.latent_bias[...][..., None]
        mean_BCZ, log_var_BCZ = jnp.split(both_COB.transpose(2, 0, 1), 2, -1)
        return mean_BCZ, jnp.clip(log_var_BCZ, -12.0, 4.0)

    def decode(self, z_BCZ: Array) -> Array:
        """Returns the seconds, (B, W, C)."""
        z_CZB = z_BCZ.transpose(1, 2, 0)
        from_z_COB = _product(self.decode_in[...], z_CZB) + self.decode_bias[...][..., None]
        out = self.out[...]
        hidden = self.cfg.hidden
        level_CB = (_product(out[:, hidden:], z_CZB) + self.out_bias[...][..., None])[:, 0]

        def second(state: tuple, _: None) -> tuple[tuple, Array]:
            state = _lstm(state, from_z_COB + _product(self.decode_hidden[...], state[0]))
            return state, level_CB + _product(out[:, :hidden], state[0])[:, 0]

        y_WCB = jax.lax.scan(second, self._zeros(z_CZB[:, 0]), None, self.cfg.window)[1]
        return y_WCB.transpose(2, 0, 1)

    def _zeros(self, like_CB: Array) -> tuple[Array, Array]:
        """Returns the state before the first second. like: whose varying mesh axes and placement it
        takes over."""
        zeros_CHB = jnp.zeros_like(like_CB)[:, None] + jnp.zeros((1, self.cfg.hidden, 1))
        return zeros_CHB, zeros_CHB


def _product(weight_CIO: Array, x_CIB: Array) -> Array:
    """Returns (C, O, B). Sums of vectors over the windows, unrolled: on a CPU about twice as fast
    as products of matrices whose sides are 1 to 16."""
    columns = (weight_CIO[:, i, :, None] * x_CIB[:, i, None] for i in range(weight_CIO.shape[1]))
    return functools.reduce(jnp.add, columns)


def _lstm(state: tuple[Array, Array], gates_COB: Array) -> tuple[Array, Array]:
    """Returns (hidden, cell) after one second; gates: input, forget, candidate, output."""
    i, f, g, o = jnp.split(gates_COB, 4, 1)
    cell = jax.nn.sigmoid(f + 1.0) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell


class Network(nnx.Module):
    """The block with what training puts around it."""

    def __init__(self, cfg: LstmVaeConfig, layout: Layout | None, rngs: nnx.Rngs):
        """Makes the stack of one block."""
        self.cfg = cfg
        self.vae = nnx.vmap(lambda r: LstmVae(cfg, layout, r))(rngs.split(1))

    def context(self, batch: parts_.Batch, key: Array | None) -> Context:
        """Returns the key of the latent's noise."""
        return Context(jnp.zeros((1, 1), jnp.int32), dropout=key)

    def embed(self, batch: parts_.Batch, context: Context) -> Array:
        """Returns (B, W + 1, C), the last second for the block to write into."""
        x_BWC = batch["targets"]
        return jnp.concatenate([x_BWC, jnp.zeros_like(x_BWC[:, :1])], 1)

    def loss(self, x_BSC: Array, targets_BWC: Array) -> LossSums:
        """Returns the sums over measured seconds of the squared error and its share of the KL."""
        measured_BWC = targets_BWC >= 0
        error_BWC = jnp.where(measured_BWC, x_BSC[:, :-1] - targets_BWC, 0.0)
        squares = jnp.sum(error_BWC**2)
        seconds_BC = measured_BWC.sum(1).astype(jnp.float32)
        divergence = jnp.sum(x_BSC[:, -1] * jnp.minimum(seconds_BC, 1.0))
        terms = {"squared_error": squares, "divergence": self.cfg.kl * divergence}
        return LossSums(terms, jnp.sum(measured_BWC))


def parts(cfg: LstmVaeConfig, layout: Layout | None = None, ops: Ops | None = None):
    """Returns the networks as ModelParts. A batch is {'targets': (B, W, C) float32}, HOLE where a
    second has no sample. The loss has the terms `squared_error` and `divergence`, which is weighted
    by cfg.kl; their sum is what is minimised."""
    return parts_.of_module(lambda key: Network(cfg, layout, nnx.Rngs(params=key)), cfg.layers)


def objective(sums: LossSums, total: Array) -> Array:
    """Returns what is minimised: the mean over measured seconds of both terms."""
    return (sums.squared_error + sums.divergence) / total


def denoise(cfg: LstmVaeConfig, params: Tree, x_BWC: Array) -> Array:
    """Returns the seconds (B, W, C) as the mean of the latent decodes them. x: below 0 or NaN: a
    hole. Call it under the mesh of the parameters, or under none."""
    graph = nnx.split(nnx.eval_shape(lambda: LstmVae(cfg, None, nnx.Rngs(0))))[0]
    vae = nnx.merge(graph, jax.tree.map(lambda w: w[0], params["vae"]))
    return vae.decode(vae.encode(x_BWC)[0])
