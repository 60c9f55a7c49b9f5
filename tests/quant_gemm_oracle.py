"""activation(x w + bias) of a weight in few bits, in float64 NumPy: codes by streams of bits.

Legend: M rows, K contracted, N columns, G groups of K, P bytes of a column's codes.
"""

import ml_dtypes
import numpy as np

from tests.gemm_oracle import activate

TYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def codes(seed, K, N, bits, signed):
    """int8 -Q .. Q, or uint8 0 .. 2^bits - 1; the least and the greatest are among them."""
    random = np.random.default_rng(seed)
    low, high = (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    numbers_KN = random.integers(low, high + 1, (K, N))
    numbers_KN[0, :2] = low, high
    return numbers_KN.astype(np.int8 if signed else np.uint8)


def numbers(seed, K, N, group, signed):
    """(scales_GN, zeros_GN or None) float32, such that sums of K products are of size 1."""
    random, G = np.random.default_rng(seed + 1), -(-K // group)
    scales = random.uniform(0.5, 1.5, (G, N)) / np.sqrt(K)
    zeros = None if signed else random.standard_normal((G, N)).astype(np.float32) / np.sqrt(K)
    return scales.astype(np.float32), None if signed else zeros.astype(np.float32)


def unpack(packed_PN, K, bits, signed):
    """Codes in float64."""
    stream = np.unpackbits(np.asarray(packed_PN), axis=0, bitorder="little")
    bits_KBN = stream[: K * bits].reshape(K, bits, -1).astype(np.float64)
    weights = 2.0 ** np.arange(bits)
    if signed:
        weights[-1] *= -1
    return np.einsum("kbn,b->kn", bits_KBN, weights)


def dequantize(packed_PN, scales_GN, zeros_GN, K, bits, group):
    """w_KN in float64."""
    w = unpack(packed_PN, K, bits, zeros_GN is None)
    group_K = np.arange(K) // group
    w = w * np.asarray(scales_GN, np.float64)[group_K]
    return w if zeros_GN is None else w + np.asarray(zeros_GN, np.float64)[group_K]


def rounded(x, dtype):
    """Numbers rounded to float32 and to a type, in float64."""
    return np.asarray(x, np.float32).astype(TYPES[dtype]).astype(np.float64)


def product(x_xK, w_KN, bias_N=None, activation=None, dtype="float32"):
    """(activate(x w + bias), z); w is rounded to x's type first."""
    w = rounded(w_KN, dtype)
    z = np.asarray(x_xK, np.float64) @ w + (0 if bias_N is None else np.asarray(bias_N, np.float64))
    return activate(activation, z)[0], z
