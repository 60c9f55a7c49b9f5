"""Error feedback: the quantization error of a gradient is added to the gradients of later steps.

After LoCo (arXiv 2407.04480), which keeps a moving average of errors in 8 bits and resets it: with
e the error that is kept, Q the 4-bit quantizer of the wire and Q8 one of 8 bits,

    h = g + e                          is sent as Q(h)
    e' = Q8((1 - beta) e + beta (h - Q(h)))      0 after every `reset` steps

This is what the authors' code in DeepSpeed computes inside a node (pull request 6730,
csrc/quantization/swizzled_quantize.cu, loco_swizzled_quant_kernel): the average is of the errors of
compensated gradients, and DeepSpeed's err_beta = 1 - beta weighs the old average. Its exchange
keeps one error for each of the two levels (all_to_all_loco_quant_reduce), as ours does. DeepSpeed
stores e in float16; here e has 8 bits, as in the paper.

Summed over steps, what is received differs from the gradients by e / beta and by the roundings of
Q8 only, so that what Q drops in one step is not lost. Each sender has an error of its own, of the
shape of what it sends, and it takes a byte an element.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from megajax.core.errors import UserError
from megajax.quant.formats import Format
from megajax.quant.qtensor import QTensor, dequantize, quantize
from pallas_kernels.quantize import reference

Array = jax.Array


@dataclass(frozen=True)
class Feedback:
    """The settings of error feedback.

    beta: weight of the newest error, above 0 and at most 1. reset: steps between two resets, at
    least 1. Both defaults are those of DeepSpeed's zeropp_loco_param: err_beta 0.8, the weight of
    the old average, and reset_T 1024 (deepspeed/runtime/zero/config.py). format: of the error.
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
        kept = dequantize(error)
        newest = (sent_xN.astype(jnp.float32) - received_xN) - kept
        mean = kept + reference.rounded(self.beta * newest)
        keep = ((step + 1) % self.reset != 0) & jnp.isfinite(mean)
        return quantize(jnp.where(keep, mean, 0.0), self.format)
