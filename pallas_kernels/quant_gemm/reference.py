"""The product of activations and quantized weights in plain JAX: specification and test oracle.

Codes are packed along K by pallas_kernels/quantize/reference.py, so the bytes of a
megajax.quant.QTensor with axis 0 are the bytes of a packed weight. With s the scale of the group,

    w = code * s          codes -Q .. Q, two's complement, Q = 2^(bits - 1) - 1
    w = zero + code * s   codes 0 .. 2^bits - 1, where there are zero points

in float32, as in QTensor's `dequantize`. w is rounded to x's type; the product is summed in
float32.

Legend: M rows (leading dimensions of x, flattened or not: written x), K contracted, N columns, G
groups of K, C codes of a group, P bytes of a column's codes, U pieces of whole bytes of a column, S
bytes of a piece.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.activations import Activation, activate
from pallas_kernels.quantize import reference as rule

Array = jax.Array
BITS = rule.INTEGERS


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static arguments of a product.

    bits: the size of a code. group: codes of a group along K. signed: True: codes are two's
    complement; False: there are zero points. activation: applied to the result, or None.
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
    """Returns w_KN, float32.

    Rows stay rows: with each column turned into a line, as quantize/reference.py has them, XLA for
    CPUs (jaxlib 0.11.2) wrote codes and weights to memory transposed, which took four times the
    CPU time of the product itself.
    """
    N, G = packed_PN.shape[1], scales_GN.shape[0]
    if not packed_PN.size:
        return jnp.zeros((K, N), jnp.float32)
    code_KN = _unpack(packed_PN, K, spec)
    code_GCN = jnp.pad(code_KN, ((0, G * spec.group - K), (0, 0))).reshape(G, spec.group, N)
    w_GCN = rule.rounded(code_GCN.astype(jnp.float32) * scales_GN.astype(jnp.float32)[:, None])
    if zeros_GN is not None:
        w_GCN += zeros_GN.astype(jnp.float32)[:, None]
    return w_GCN.reshape(G * spec.group, N)[:K]


def _unpack(packed_PN: Array, K: int, spec: Spec) -> Array:
    """Returns code_KN, int8 or, with zero points, uint8: quantize.reference.unpack of columns."""
    bits, (count, size) = spec.bits, rule.unit(spec.bits)
    code_KN = packed_PN
    if count > 1:
        byte_USN = packed_PN.reshape(-1, size, packed_PN.shape[1])
        word = jnp.uint8 if size == 1 else jnp.uint32
        parts = (byte_USN[:, i].astype(word) << 8 * i for i in range(size))
        word_UN = functools.reduce(operator.or_, parts)
        lanes = [((word_UN >> bits * i) & (2**bits - 1)).astype(jnp.uint8) for i in range(count)]
        code_KN = jnp.stack(lanes, 1).reshape(-1, packed_PN.shape[1])[:K]
    if not spec.signed:
        return code_KN
    # The sign bit goes to the top, and comes back with copies of itself.
    return jax.lax.bitcast_convert_type(code_KN << (8 - bits), jnp.int8) >> (8 - bits)


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
