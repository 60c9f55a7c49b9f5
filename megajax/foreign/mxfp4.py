"""Experts in MXFP4, as GPT-OSS's files have them, dequantized where they are read. NumPy alone.

Of a tensor (E, K, N) that multiplies rows of K numbers there are two:

    *_blocks   uint8 (E, N, K / 32, 16)   two codes a byte, the low four bits first
    *_scales   uint8 (E, N, K / 32)       x = 2^(scale - 127) value(code), of 32 neighbours along K

A code is E2M1: a sign, two bits of exponent, one of mantissa. Every product is a float32 number.
Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 6.3.

Legend: E experts, K inputs, N outputs.
"""

import dataclasses

import numpy as np

from megajax.core.errors import UserError

GROUP, BYTES, BIAS = 32, 16, 127  # codes that share a scale, their bytes, the scale of 1
METHOD = "mxfp4"  # quantization_config.quant_method
BLOCKS, SCALES = "_blocks", "_scales"  # ends of names
NOT_A_NUMBER = 255  # of a scale (the specification, section 5.4.1)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array(_MAGNITUDES + tuple(-x for x in _MAGNITUDES), np.float32)
# Both values of each byte, so that one look-up makes two numbers.
_PAIRS = np.stack([VALUES[np.arange(256) & 15], VALUES[np.arange(256) >> 4]], -1)


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns float32 (..., 32 groups) of blocks (..., groups, 16) and scales (..., groups).

    Raises: UserError for other types or shapes, and for a scale that is no number.
    """
    if blocks.dtype != np.uint8 or scales.dtype != np.uint8:
        raise UserError(f"MXFP4: blocks {blocks.dtype} and scales {scales.dtype} must be uint8")
    if blocks.ndim < 2 or blocks.shape != (*scales.shape, BYTES):
        raise UserError(
            f"MXFP4: blocks {blocks.shape} must have {BYTES} bytes for each of the scales "
            f"{scales.shape}"
        )
    if (scales == NOT_A_NUMBER).any():
        raise UserError(f"MXFP4: a scale is {NOT_A_NUMBER}, which stands for no number")
    values = _PAIRS[blocks].reshape(*scales.shape, GROUP)
    exact = np.ldexp(values, scales.astype(np.int32)[..., None] - BIAS)
    return exact.reshape(*scales.shape[:-1], scales.shape[-1] * GROUP)


@dataclasses.dataclass(frozen=True)
class Packed:
    """A tensor (E, K, N) in a file, of which parts are dequantized. name: of the tensor."""

    name: str
    blocks: np.ndarray
    scales: np.ndarray

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuses blocks that are not of this shape. Raises: UserError."""
        if len(shape) != 3 or shape[1] % GROUP:
            raise UserError(
                f"{self.name}: MXFP4 has blocks of {GROUP} inputs of an expert's matrix, and "
                f"config.json says {shape}"
            )
        experts, inputs, outputs = shape
        stored = (experts, outputs, inputs // GROUP)
        for end, array, expected in (
            (BLOCKS, self.blocks, (*stored, BYTES)),
            (SCALES, self.scales, stored),
        ):
            if array.shape != expected or array.dtype != np.uint8:
                raise UserError(
                    f"{self.name}{end} is {array.dtype} {array.shape}; config.json says uint8 "
                    f"{expected}"
                )

    def part(self, inner: tuple[slice, ...], step: tuple[int, int] = (0, 1)) -> np.ndarray:
        """Returns float32 x[inner], of x with the outputs a, a + b, a + 2 b, ... alone.

        inner: slices with a start and a stop, along E, K and N. step: (a, b). An expert at a time
        is in memory."""
        experts, inputs, outputs = inner
        first, last = inputs.start // GROUP, -(-inputs.stop // GROUP)
        shift = first * GROUP
        rows = slice(step[0] + step[1] * outputs.start, step[0] + step[1] * outputs.stop, step[1])
        shape = [s.stop - s.start for s in inner]
        part = np.empty(shape, np.float32)
        for place, expert in enumerate(range(experts.start, experts.stop)):
            try:
                values = dequantize(
                    self.blocks[expert, rows, first:last], self.scales[expert, rows, first:last]
                )
            except UserError as error:
                raise UserError(f"{self.name}: {error}") from None
            part[place] = values[:, inputs.start - shift : inputs.stop - shift].T
        return part
