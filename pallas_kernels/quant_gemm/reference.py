"""The product of activations and quantized weights in plain JAX: specification and test oracle.

Codes are packed along K by pallas_kernels/quantize/reference.py, so the bytes of a
megajax.quant.QTensor with axis 0 are the bytes of a packed weight. With s the scale of the group,

    w = code * s          codes -Q .. Q, two's complement, Q = 2^(bits - 1) - 1
    w = zero + code * s   codes 0 .. 2^bits - 1, where there are zero points

in float32, as in QTensor's `dequantize`. w is rounded to x's type; the product is summed in
float32.

Legend: M rows (leading dimensions of x, flattened or not: written x), K contracted, N columns, G
groups of K, P bytes of a column's codes.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.activations import Activation, activate
from pallas_kernels.quantize import reference as rule

Array = jax.Array
BITS = rule.INTEGERS


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static arguments of a product.

    bits: of a code. group: codes of a group along K. signed: True: codes are two's complement;
    False: there are zero points. activation: applied to the result, or None.
    """

    bits: int
    group: int
    signed: bool = True
    activation: Activation | None = None


def pack(codes_KN: Array, bits: int) -> Array:
    """Returns packed_PN, uint8: the codes of each column, packed by quantize.reference.pack."""
    if not codes_KN.size:
        return jnp.zeros((rule.code_bytes(codes_KN.shape[0], bits), codes_KN.shape[1]), jnp.uint8)
    return jnp.moveaxis(rule.pack(jnp.moveaxis(codes_KN, 0, -1), bits), -1, 0)


def dequantize(
    packed_PN: Array, scales_GN: Array, zeros_GN: Array | None, K: int, spec: Spec
) -> Array:
    """Returns w_KN, float32."""
    if not packed_PN.size:
        return jnp.zeros((K, packed_PN.shape[1]), jnp.float32)
    code_NK = rule.unpack(jnp.moveaxis(packed_PN, 0, -1), K, spec.bits, signed=spec.signed)
    scale_NG = scales_GN.astype(jnp.float32).T
    if zeros_GN is None:
        return rule.dequantize(code_NK, scale_NG, spec.group).T
    code_NGC = rule.split(code_NK, spec.group).astype(jnp.float32)
    above_NGC = rule.rounded(code_NGC * scale_NG[..., None])
    zero_NG = zeros_GN.astype(jnp.float32).T
    return rule.join(above_NGC + zero_NG[..., None], K).T


def forward(
    x_xK: Array,
    packed_PN: Array,
    scales_GN: Array,
    zeros_GN: Array | None,
    bias_N: Array | None,
    *,
    spec: Spec,
) -> Array:
    """Returns activate(x w + bias), (..., N), in x's type."""
    w_KN = dequantize(packed_PN, scales_GN, zeros_GN, x_xK.shape[-1], spec).astype(x_xK.dtype)
    z_xN = jax.lax.dot_general(
        x_xK, w_KN, (((x_xK.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return finish(z_xN, bias_N, spec).astype(x_xK.dtype)


def finish(z_xN: Array, bias_N: Array | None, spec: Spec) -> Array:
    """Returns the sums z, float32, with bias and activation applied."""
    if bias_N is not None:
        z_xN += bias_N.astype(jnp.float32).reshape((1,) * (z_xN.ndim - 1) + bias_N.shape)
    return activate(spec.activation, z_xN)
