"""Codecs for collectives: an array of N numbers becomes one row of bytes and returns as float32.

A codec of one level is a Format, or a plain floating type. Codecs of several levels name one for
the gather of weights (`weights`), one for the exchange of gradients inside a node (`inside`) and
one between nodes (`between`):

    sdp4bit   SDP4Bit (arXiv 2410.15526): differences of weights in 4 bits, gradients in 8 and 4,
              which the exchange transforms (Hadamard, 32) before the first and after the last level
    zeropp    ZeRO++ (arXiv 2306.10209): weights in 8 bits by blocks (qwZ), gradients in 4 (qgZ)
    loco      LoCo (arXiv 2407.04480): gradients in 4 bits, with what was dropped kept in 8

A payload is the packed codes followed by the scales (pallas_kernels/quantize/reference.py), so one
collective moves both. `encode` and `decode` do not apply the Hadamard transform: it is linear, and
is applied once around all levels (`Codec.transform`, `Codec.restore`).

Legend: N elements of a line, P bytes of a payload, x any leading dims: rows, each encoded alone.
"""

import dataclasses
import operator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from megajax.core.errors import UserError, did_you_mean
from megajax.quant.formats import Format, Rounding, check_rounding
from megajax.quant.qtensor import QTensor, dequantize, floating, hadamard, need_key, quantize
from pallas_kernels.quantize import counter, reference

# ---- feedback
#
# Error feedback: the quantization error of a gradient is added to the gradients of later steps.
#
# After LoCo (arXiv 2407.04480), which keeps a moving average of errors in 8 bits and resets it:
# with e the error that is kept, Q the 4-bit quantizer of the wire and Q8 one of 8 bits,
#
#     h = g + e                          is sent as Q(h)
#     e' = Q8((1 - beta) e + beta (h - Q(h)))      0 after every `reset` steps
#
# This is what the authors' code in DeepSpeed computes inside a node (pull request 6730,
# csrc/quantization/swizzled_quantize.cu, loco_swizzled_quant_kernel): the average is of the errors
# of compensated gradients, and DeepSpeed's err_beta = 1 - beta weighs the old average. Its exchange
# keeps one error for each of the two levels (all_to_all_loco_quant_reduce), as ours does. DeepSpeed
# stores e in float16; here e has 8 bits, as in the paper.
#
# Summed over steps, what is received differs from the gradients by e / beta and by the roundings of
# Q8 only, so that what Q drops in one step is not lost. Each sender has an error of its own, of the
# shape of what it sends, and it takes a byte an element.


Array = jax.Array


@dataclass(frozen=True)
class Feedback:
    """The settings of error feedback.

    beta: weight of the newest error, above 0 and at most 1. reset: steps between two resets, at
    least 1. Both defaults are those of DeepSpeed's zeropp_loco_param: err_beta 0.8, the weight of
    the old average, and reset_T 1024 (deepspeed/runtime/zero/config.py). format: that of the error.
    Raises: UserError.
    """

    beta: float = 0.2
    reset: int = 1024
    format: Format = Format(8, group=128, axis=-1)

    def __post_init__(self) -> None:
        if not 0 < self.beta <= 1:
            raise UserError(f"beta={self.beta} must be above 0 and at most 1")
        if self.reset < 1:
            raise UserError(f"reset={self.reset} must be at least 1 step")

    def start(self, shape: int | tuple[int, ...]) -> QTensor:
        """Returns an error of 0 for numbers of this shape: (N,) or rows (R, N)."""
        return quantize(jnp.zeros(shape, jnp.float32), self.format)

    def compensate(self, x_xN: Array, error: QTensor) -> Array:
        """Returns h_xN, float32: the numbers to send instead of x."""
        return x_xN.astype(jnp.float32) + dequantize(error)

    def update(self, sent_xN: Array, received_xN: Array, error: QTensor, step: Array) -> QTensor:
        """Returns the error after a step, in the same shape.

        After steps reset - 1, 2 reset - 1, ... the error is 0. A group that is not finite also
        restarts from 0, because its error would stay NaN.
        Args: sent_xN: h. received_xN: Q(h), as the receiver decodes it. error: before the step.
          step: int32, from 0 on.
        """
        average = dequantize(error)
        newest = (sent_xN.astype(jnp.float32) - received_xN) - average
        mean = average + reference.rounded(self.beta * newest)
        keep = ((step + 1) % self.reset != 0) & jnp.isfinite(mean)
        return quantize(jnp.where(keep, mean, 0.0), self.format)


# ---- codecs


Name = Literal["none", "bf16", "fp8", "int8", "int4", "zeropp", "sdp4bit", "loco"]
NAMES: tuple[Name, ...] = ("none", "bf16", "fp8", "int8", "int4", "zeropp", "sdp4bit", "loco")
FLOAT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Codec:
    """A codec, made by the function `codec`.

    format: a symmetric Format with float32 scales and no axis; None: numbers are sent as `dtype`,
    without scales. rounding: that of a cast to bfloat16. levels: codecs (weights, inside, between);
    None: this codec has one level. hadamard: block size of the transform of gradients; 0: none.
    feedback: how a sender keeps the errors of gradients; None: it does not.
    """

    name: str
    format: Format | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    rounding: Rounding = "nearest"
    levels: "tuple[Codec, Codec, Codec] | None" = None
    hadamard: int = 0
    feedback: Feedback | None = None

    @property
    def weights(self) -> "Codec":
        """The codec for the gather of weights; itself if it has one level."""
        return self.levels[0] if self.levels else self

    @property
    def inside(self) -> "Codec":
        """The codec for gradients between ranks of a node; itself if it has one level."""
        return self.levels[1] if self.levels else self

    @property
    def between(self) -> "Codec":
        """The codec for gradients between nodes; itself if it has one level."""
        return self.levels[2] if self.levels else self

    @property
    def stochastic(self) -> bool:
        """Whether `encode` needs a random key."""
        self._one_level("stochastic")
        if self.format is not None:
            return self.format.stochastic
        return self.rounding == "stochastic" and self.dtype != "float32"

    @property
    def effective_bits(self) -> float:
        """Bits of a payload per element, if no group is short."""
        self._one_level("effective_bits")
        return FLOAT_BYTES[self.dtype] * 8.0 if self.format is None else self.format.effective_bits

    def wire_bytes(self, n: int) -> int:
        """Returns P, the exact number of bytes of a payload of n numbers.

        Raises: UserError for a codec of several levels, or an n that is no count.
        """
        self._one_level("wire_bytes")
        n = _count(n)
        if self.format is None:
            return n * FLOAT_BYTES[self.dtype]
        return reference.payload_bytes(n, self.format.bits, self.format.group_of(n))

    def encode(self, x_xN: Array, key: Array | None = None) -> Array:
        """Returns payload_xP, uint8.

        Each row is encoded by itself: no group spans two rows. With one key, row r of (R, N) gets
        the random numbers r N to (r + 1) N.
        Args: x_xN: (N,) or with more leading dimensions, of a floating type. key: needed if
            `stochastic`, else ignored.
        Raises: UserError for a codec of several levels, another type, or a missing key.
        """
        self._one_level("encode")
        x_xN = floating(f"codec {self.name}", x_xN)
        if x_xN.ndim == 0:
            raise UserError(f"codec {self.name}: x must have a dimension; write x.reshape(1)")
        key = need_key(f"codec {self.name}", key) if self.stochastic else None
        if self.format is None:
            x_xN = x_xN.astype(jnp.float32)
            if self.dtype == "bfloat16":
                x_xN = x_xN.astype(jnp.bfloat16) if key is None else _stochastic_bfloat16(x_xN, key)
            byte_xNS = jax.lax.bitcast_convert_type(x_xN, jnp.uint8)
            return byte_xNS.reshape(*x_xN.shape[:-1], self.wire_bytes(x_xN.shape[-1]))
        noise_xN = None if key is None else counter.noise(key, x_xN.shape)
        group = self.format.group_of(x_xN.shape[-1])
        return reference.encode(x_xN, self.format.bits, group, noise_xN)

    def decode(self, payload_xP: Array, n: int) -> Array:
        """Returns x_xN, float32, of payloads of n numbers.

        Raises: UserError for a codec of several levels, or a payload of another type or length.
        """
        self._one_level("decode")
        if payload_xP.dtype != jnp.uint8 or payload_xP.shape[-1:] != (self.wire_bytes(n),):
            raise UserError(
                f"codec {self.name}: a payload of {n} numbers is uint8 with a last dimension of "
                f"{self.wire_bytes(n)}, got {payload_xP.dtype}{payload_xP.shape}"
            )
        if self.format is None:
            size, dtype = FLOAT_BYTES[self.dtype], jnp.dtype(self.dtype)
            byte_xNS = payload_xP.reshape(*payload_xP.shape[:-1], n, size)
            return jax.lax.bitcast_convert_type(byte_xNS, dtype).astype(jnp.float32)
        return reference.decode(payload_xP, n, self.format.bits, self.format.group_of(n))

    def is_finite(self, payload_xP: Array, n: int) -> Array:
        """Returns one flag, bool (): whether all encoded numbers were finite.

        If the codec has groups, only scales are read: that of a group with inf or NaN is NaN.
        """
        self._one_level("is_finite")
        if self.format is None:
            return jnp.isfinite(self.decode(payload_xP, n)).all()
        _, scale_xG = reference.split_payload(payload_xP, n, self.format.bits)
        return jnp.isfinite(scale_xG).all()

    def transform(self, x_xN: Array) -> Array:
        """Returns gradients padded with zeros to full blocks and transformed, (..., M).

        It is called once, before the first level. Without a transform it returns x.
        """
        if not self.hadamard:
            return x_xN
        zeros = [(0, 0)] * (x_xN.ndim - 1) + [(0, -x_xN.shape[-1] % self.hadamard)]
        return hadamard(jnp.pad(x_xN, zeros), self.hadamard)

    def restore(self, x_xM: Array, n: int) -> Array:
        """Returns the n gradients from their transform; called once, after the last sum."""
        return hadamard(x_xM, self.hadamard)[..., :n] if self.hadamard else x_xM[..., :n]

    def _one_level(self, member: str) -> None:
        if self.levels:
            raise UserError(
                f"codec {self.name} has several levels: use its .weights.{member}, "
                f".inside.{member} or .between.{member}"
            )


def codec(name: str, *, rounding: Rounding | None = None) -> Codec:
    """Returns the codec of this name (NAMES).

    Args: rounding: that of gradients, 'nearest' or 'stochastic'; None: the codec's default, which
      is stochastic for sdp4bit and nearest for all others. Weights of codecs with several levels
      are always rounded to nearest, because the next gather sends what this one lost. `none` is
      exact.
    Raises: UserError for an unknown name or rounding.
    """
    if name not in NAMES:
        raise UserError(
            f"codec {name!r} must be one of {', '.join(NAMES)}.{did_you_mean(str(name), NAMES)}"
        )
    if rounding is not None:
        check_rounding(rounding)
    default: Rounding = "stochastic" if name == "sdp4bit" else "nearest"
    asked = default if rounding is None else rounding

    def level(bits: reference.Bits, group: int, rounding: Rounding) -> Codec:
        return Codec(name, Format(bits, group, rounding=rounding), rounding=rounding)

    # Groups: those of SDP4Bit's experiments (2048 of weights, 128 of gradients) for all, so that
    # codecs differ in bits only.
    if name == "none":
        return Codec(name)
    if name == "bf16":
        return Codec(name, dtype="bfloat16", rounding=asked)
    if name == "fp8":
        return level("e4m3", 128, asked)
    four, eight = level(4, 128, asked), level(8, 128, asked)
    if name in ("int4", "int8"):
        return four if name == "int4" else eight
    if name == "sdp4bit":
        return _levels(name, level(4, 2048, "nearest"), eight, four, hadamard=32)
    if name == "zeropp":
        return _levels(name, level(8, 2048, "nearest"), four, four)
    # LoCo is about gradients: weights are sent as they are used.
    return _levels(name, Codec(name, dtype="bfloat16"), four, four, feedback=Feedback())


def _levels(name: str, weights: Codec, inside: Codec, between: Codec, **options: Any) -> Codec:
    levels = (
        dataclasses.replace(weights, name=f"{name}.weights"),
        dataclasses.replace(inside, name=f"{name}.inside"),
        dataclasses.replace(between, name=f"{name}.between"),
    )
    return Codec(name, levels=levels, **options)


def _stochastic_bfloat16(x: Array, key: Array) -> Array:
    """Returns bfloat16: random bits below the last one that stays carry into it, unbiased."""
    word = jax.lax.bitcast_convert_type(x, jnp.uint32)
    carried = word + (jax.random.bits(key, x.shape, jnp.uint32) >> 16)
    rounded = jax.lax.bitcast_convert_type((carried >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _count(n: Any) -> int:
    try:
        count = -1 if isinstance(n, bool) else operator.index(n)
    except TypeError:
        count = -1
    if count < 0:
        raise UserError(f"n={n!r} must be a whole number of elements from 0 on")
    return count
