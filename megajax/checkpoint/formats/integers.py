"""Matrices in few bits as GPTQ and AWQ files have them, in NumPy.

Of a Linear with K inputs and N outputs (AutoGPTQ and GPTQModel, quant_method 'gptq'):

    qweight  int32 (K b / 32, N)     codes 0..2^b - 1, a stream of bits down each column, low first
    qzeros   int32 (G, N b / 32)     z - 1 the same way along each row; format 'gptq_v2': z itself
    scales   float16 (G, N)          w = scale (code - z)
    g_idx    int32 (K,)              the group of each row; k // group unless desc_act

and AutoAWQ's 'gemm' (quant_method 'awq', 4 bits): qweight int32 (K, N / 8) and qzeros (G, N / 8),
whose nibble i is of column 8 j + _AWQ[i]; z itself. Source: the packing code of both libraries.

Legend: K inputs, N outputs, G groups, b bits.
"""

import numpy as np

from megajax.core.errors import UserError

BITS = (2, 3, 4, 8)
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
_WORD = np.dtype("<i4")


def bytes_of_rows(qweight: np.ndarray) -> np.ndarray:
    """Returns uint8 (K b / 8, N): the bytes of each column's stream of bits, first ones first."""
    rows, columns = qweight.shape
    words = np.ascontiguousarray(qweight.astype(_WORD)).view(np.uint8).reshape(rows, columns, 4)
    return words.transpose(0, 2, 1).reshape(4 * rows, columns)


def rows_of_bytes(values: np.ndarray) -> np.ndarray:
    """Returns qweight of such bytes. Raises: UserError where they fill no whole words."""
    rows, columns = values.shape
    if rows % 4:
        raise UserError(f"a column of {rows} bytes fills no whole words of 32 bits")
    words = np.ascontiguousarray(values.reshape(rows // 4, 4, columns).transpose(0, 2, 1))
    return words.view(_WORD).reshape(rows // 4, columns).astype(np.int32)


def with_rows(qweight: np.ndarray, bits: int, order_K: np.ndarray) -> np.ndarray:
    """Returns the qweight whose row k of codes is row order_K[k] of this one."""
    if np.array_equal(order_K, np.arange(len(order_K))):
        return np.ascontiguousarray(qweight)
    codes = unpack(np.ascontiguousarray(qweight.T), bits, len(order_K))
    return np.ascontiguousarray(pack(codes[:, order_K], bits).T)


def unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Returns uint8 (rows, count): the codes of each row's stream of bits, int32 words."""
    words = np.ascontiguousarray(packed.astype(_WORD)).view(np.uint8)
    flat = np.unpackbits(words, axis=1, bitorder="little")[:, : count * bits]
    weights = 1 << np.arange(bits, dtype=np.uint16)
    return (flat.reshape(len(packed), count, bits) * weights).sum(-1).astype(np.uint8)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Returns int32 (rows, ceil(count b / 32)) of codes (rows, count)."""
    flat = (codes[:, :, None].astype(np.uint16) >> np.arange(bits)) & 1
    flat = flat.reshape(len(codes), -1).astype(np.uint8)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return np.packbits(flat, axis=1, bitorder="little").view(_WORD).astype(np.int32)


def unpack_awq(packed: np.ndarray) -> np.ndarray:
    """Returns uint8 (rows, N) of AWQ's int32 (rows, N / 8)."""
    nibbles = unpack(packed, 4, 8 * packed.shape[1]).reshape(len(packed), -1, 8)
    codes = np.empty_like(nibbles)
    codes[..., _AWQ] = nibbles
    return codes.reshape(len(packed), -1)


def pack_awq(codes: np.ndarray) -> np.ndarray:
    """Returns AWQ's int32 (rows, N / 8). N must be a multiple of 8."""
    nibbles = codes.reshape(len(codes), -1, 8)[..., _AWQ]
    return pack(nibbles.reshape(len(codes), -1), 4)
