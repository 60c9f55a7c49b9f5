"""Quantization of groups in NumPy, written from the rule; packing by streams of bits.

Legend: N elements of a line, G groups, C elements of a group.
"""

import ml_dtypes
import numpy as np

FLOATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
TINY = np.finfo(np.float32).tiny


def largest(bits):
    return float(ml_dtypes.finfo(FLOATS[bits]).max) if bits in FLOATS else 2.0 ** (bits - 1) - 1


def split(x_N, group):
    return np.pad(x_N, (0, -len(x_N) % group)).reshape(-1, group)


def flushed(x):
    """XLA on CPUs computes with 0 in the place of numbers that are not normal."""
    x = np.asarray(x).astype(np.float32)
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def quantize(x_N, bits, group):
    """Returns (code_N, int8 or float8; scale_G float32)."""
    q, x_GC = np.float32(largest(bits)), split(flushed(x_N), group)
    amax_G = np.abs(x_GC).max(1)
    with np.errstate(all="ignore"):
        scale_G = flushed(amax_G * np.float32(1 / float(q)))
        scale_G = np.where(scale_G == 0, np.float32(1), scale_G)
        inverse_G = (1 / scale_G.astype(np.float64)).astype(np.float32)
        y_GC = np.clip(x_GC * inverse_G[:, None], -q, q)
        bad_G = ~np.isfinite(amax_G)
        y_GC[bad_G], scale_G[bad_G] = 0, np.nan
    code_GC = y_GC.astype(FLOATS[bits]) if bits in FLOATS else np.rint(y_GC).astype(np.int8)
    return code_GC.reshape(-1)[: len(x_N)], scale_G


def dequantize(code_N, scale_G, group):
    y_GC = split(code_N.astype(np.float32), group) * scale_G[:, None]
    return y_GC.reshape(-1)[: len(code_N)]


def pack(code_N, bits):
    """Returns uint8: the codes' bits in one stream, low bits first, up to whole pieces."""
    width = 8 if bits in FLOATS else bits
    stream = np.unpackbits(code_N.view(np.uint8)[:, None], axis=1, bitorder="little")[:, :width]
    stream = stream.reshape(-1)
    piece = {2: 8, 3: 24, 4: 8, 8: 8}[width]
    return np.packbits(np.pad(stream, (0, -len(stream) % piece)), bitorder="little")


def payload(x_N, bits, group):
    code_N, scale_G = quantize(x_N, bits, group)
    return np.concatenate([pack(code_N, bits), scale_G.view(np.uint8)])


def hadamard(x_N, size):
    """x H / sqrt(size), float64: entry (i, j) of H is -1 to the power of the bits of i and j."""
    entries = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return (x_N.astype(np.float64).reshape(-1, size) @ np.array(entries)).reshape(-1) / size**0.5


def hard_lines(n, seed):
    """Returns float32 (lines, N): plain, heavy-tailed, with one huge number, zero, tiny, mixed,
    near the largest number."""
    random = np.random.default_rng(seed)
    plain = random.standard_normal(n)
    outlier = plain.copy()
    outlier[random.integers(n)] = 1e30
    mixed = plain * 10.0 ** random.integers(-40, 38, n)
    some = [plain, random.standard_t(2, n), outlier, np.zeros(n), plain * 1e-42, plain * 1e-38]
    return np.stack([*some, mixed, np.clip(plain, -1, 1) * 3.4e38]).astype(np.float32)
