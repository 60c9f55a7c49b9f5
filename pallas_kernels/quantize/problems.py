"""The problems that calls of api.py pose to the kernels, from their sizes alone.

api.py runs them. Other callers ask `api.why_not` why no kernel takes a problem, and
`api.runs_kernel` whether a kernel would run it. Names and arguments are those of api.py.
"""

from typing import Any

from pallas_kernels.quantize.hopper import Problem, cut
from pallas_kernels.quantize.reference import Bits


def hadamard_quantize(
    n: int,
    *,
    rows: int,
    nodes: int = 1,
    bits: Bits = 8,
    group: int = 128,
    hadamard: bool = True,
    random: bool = False,
    dtype: Any = "float32",
) -> Problem:
    """Returns the problem of a call. n: elements of x. random: stochastic rounding. dtype: x's."""
    return cut(
        "hadamard_quantize",
        n,
        rows * nodes,
        group,
        payloads=rows,
        places=nodes,
        dtype=dtype,
        bits=8,
        new_bits=bits,
        noise=random,
        hadamard=hadamard,
    )


def reduce_requantize(
    n: int,
    *,
    senders: int,
    rows: int,
    bits: Bits = 8,
    new_bits: Bits = 4,
    group: int = 128,
    random: bool = False,
) -> Problem:
    """Returns the problem of a call. n: elements of the sum. senders: payloads that are added."""
    return cut(
        "reduce_requantize",
        n,
        rows,
        group,
        payloads=senders,
        bits=bits,
        new_bits=new_bits,
        noise=random,
    )


def reduce_hadamard(
    n: int, *, senders: int, bits: Bits = 4, group: int = 128, hadamard: bool = True
) -> Problem:
    """n: elements of the sum."""
    return cut("reduce_hadamard", n, 1, group, payloads=senders, bits=bits, hadamard=hadamard)


def subtract_quantize(
    n: int, *, bits: Bits = 4, group: int = 2048, random: bool = False, dtype: Any = "float32"
) -> Problem:
    """Returns the problem of a call. n: elements of the difference. dtype: the copy's."""
    return cut("subtract_quantize", n, 1, group, dtype=dtype, new_bits=bits, noise=random)


def dequantize_add(
    n: int, *, senders: int, bits: Bits = 4, group: int = 2048, dtype: Any = "float32"
) -> Problem:
    """n: elements of the copy. dtype: its type."""
    return cut("dequantize_add", n, senders, group, dtype=dtype, bits=bits, new_bits=bits)
