"""The computations of SDP4Bit's ranks between two messages, each in one pass over its arrays.

A gradient is smoothed by a Hadamard transform, sent in 8 bits inside a node, summed, sent in 4 bits
between nodes, summed and transformed back; a weight's change is sent in 4 bits (SDP4Bit, arXiv
2410.15526, sections 3 and 4; fused_reference.py has the steps). A payload is a row of bytes, packed
codes and then float32 scales (reference.py has the rule). The functions have no gradients.

Legend: N elements, R payloads (rows), P bytes of a payload.
Not here: the messages (megajax/parallel/zero.py); codes for other purposes (megajax/quant).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import arguments, dispatch, tuned
from pallas_kernels.quantize import counter, fused_reference, hopper, problems, reference
from pallas_kernels.quantize.fused_reference import BLOCK
from pallas_kernels.quantize.reference import Bits

Array = jax.Array
Implementation = dispatch.Implementation
DTYPES = ("float32", "bfloat16")


def hadamard_quantize(
    x_N: Array,
    *,
    rows: int,
    nodes: int = 1,
    bits: Bits = 8,
    group: int = 128,
    hadamard: bool = True,
    key: Array | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Returns a payload for each of `rows` ranks: x transformed, quantized, and in their order.

    Of n = rows * nodes equal chunks of x, chunk i * rows + j is the i-th part of row j, so that two
    all-to-alls, over the ranks of a node and over nodes, bring chunk r to rank r (SDP4Bit,
    section 3.2: node i, rank j inside it).

    Args: x_N: float32|bfloat16, a whole number of chunks, and of blocks of 32 in each where it is
      transformed. bits: the size of a code, 2|3|4|8|'e4m3'|'e5m2'. group: elements of a scale. key:
      a jax.random key, rounds at random by `counter.noise` of the index in all rows; None: to
      nearest. implementation: see `dispatch`. 'hopper' takes 4 and 8 bits, groups of 128 to 1024
      and chunks of whole tiles (quantize/README.md).
    Returns: payload_RP, uint8 (rows, reference.payload_bytes(N / rows, bits, group)).
    Raises: ValueError for arguments that break the above; NotImplementedError, with all reasons,
      where the implementation asked for cannot run.
    """
    op = "hadamard_quantize"
    _check_line(op, "x_N", x_N)
    _check_codes(op, bits, group)
    rows, nodes = arguments.integer(op, "rows", rows, 1), arguments.integer(op, "nodes", nodes, 1)
    _part(op, "x_N", x_N.shape[0], rows * nodes, BLOCK if hadamard else 1)
    options = {"rows": rows, "nodes": nodes, "bits": bits, "group": group, "hadamard": hadamard}
    problem = problems.hadamard_quantize(
        x_N.shape[0], **options, random=key is not None, dtype=x_N.dtype
    )
    return _run(problem, implementation, options, x_N, _words(op, key))


def reduce_requantize(
    payload_RP: Array,
    n: int,
    *,
    rows: int,
    bits: Bits = 8,
    new_bits: Bits = 4,
    group: int = 128,
    key: Array | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Returns the float32 sum of the numbers in R payloads, as a payload for each of `rows` ranks.

    Args: payload_RP: uint8, each of n elements in `bits` and groups of `group`. rows: equal pieces
      of the sum, in new_bits and groups as long. key: rounds at random by `counter.noise` of the
      index in the sum; None: to nearest. implementation: 'hopper' takes 8 bits in, 4 out, groups of
      128 to 2048 and up to 16 payloads.
    Returns: uint8 (rows, reference.payload_bytes(n / rows, new_bits, group)).
    Raises: as hadamard_quantize.
    """
    op = "reduce_requantize"
    _check_codes(op, bits, group)
    _check_codes(op, new_bits, group, "new_")
    rows, n = arguments.integer(op, "rows", rows, 1), arguments.integer(op, "n", n, 1)
    _check_payload(op, payload_RP, n, bits, group)
    _part(op, "n", n, rows, 1)
    options = {
        "n": n,
        "rows": rows,
        "bits": bits,
        "new_bits": new_bits,
        "group": group,
    }
    problem = problems.reduce_requantize(
        **options, senders=payload_RP.shape[0], random=key is not None
    )
    return _run(problem, implementation, options, payload_RP, _words(op, key))


def reduce_hadamard(
    payload_RP: Array,
    n: int,
    *,
    bits: Bits = 4,
    group: int = 128,
    hadamard: bool = True,
    implementation: Implementation | None = None,
) -> Array:
    """Returns the sum of the numbers in R payloads, transformed back.

    Args: payload_RP: uint8, each of n elements in `bits` and groups of `group`; n is a multiple of
      32 where it is transformed. implementation: 'hopper' takes 4 and 8 bits, groups of 128 to 1024
      and up to 16 payloads.
    Returns: float32 (n,).
    Raises: as hadamard_quantize.
    """
    op = "reduce_hadamard"
    _check_codes(op, bits, group)
    n = arguments.integer(op, "n", n, 1)
    _check_payload(op, payload_RP, n, bits, group)
    _part(op, "n", n, 1, BLOCK if hadamard else 1)
    options = {"n": n, "bits": bits, "group": group, "hadamard": hadamard}
    problem = problems.reduce_hadamard(**options, senders=payload_RP.shape[0])
    return _run(problem, implementation, options, payload_RP)


def subtract_quantize(
    main_N: Array,
    copy_N: Array,
    *,
    bits: Bits = 4,
    group: int = 2048,
    key: Array | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Returns the payload of main - copy, subtracted in float32.

    Args: main_N: float32. copy_N: float32|bfloat16, as long. bits, group: those of the payload.
      key: rounds at random by `counter.noise` of the index; None: to nearest.
      implementation: 'hopper' takes 4 and 8 bits and groups of 128 to 2048.
    Returns: payload_P, uint8 (reference.payload_bytes(N, bits, group),).
    Raises: as hadamard_quantize.
    """
    op = "subtract_quantize"
    _check_line(op, "main_N", main_N, ("float32",))
    _check_line(op, "copy_N", copy_N)
    _check_codes(op, bits, group)
    if main_N.shape != copy_N.shape:
        raise ValueError(f"{op}: copy_N {copy_N.shape} must be as long as main_N {main_N.shape}")
    options = {"bits": bits, "group": group}
    problem = problems.subtract_quantize(
        main_N.shape[0], **options, random=key is not None, dtype=copy_N.dtype
    )
    return _run(problem, implementation, options, main_N, copy_N, _words(op, key))


def dequantize_add(
    payload_RP: Array,
    copy_N: Array,
    *,
    bits: Bits = 4,
    group: int = 2048,
    implementation: Implementation | None = None,
) -> Array:
    """Returns copy plus the numbers in R payloads, one after the other, in float32, rounded once.

    Args: payload_RP: uint8, each of N / R elements in `bits` and groups of `group`. copy_N:
      float32|bfloat16. implementation: 'hopper' takes 4 and 8 bits and groups of 128 to 2048.
    Returns: (N,), in copy's type.
    Raises: as hadamard_quantize.
    """
    op = "dequantize_add"
    _check_line(op, "copy_N", copy_N)
    _check_codes(op, bits, group)
    parts = _check_rows(op, payload_RP)
    n = _part(op, "copy_N", copy_N.shape[0], parts, 1)
    _check_payload(op, payload_RP, n, bits, group)
    options = {"bits": bits, "group": group}
    problem = problems.dequantize_add(copy_N.shape[0], **options, senders=parts, dtype=copy_N.dtype)
    return _run(problem, implementation, options, payload_RP, copy_N)


def key_of(problem: hopper.Problem) -> dict[str, str | bool | int]:
    """Returns the key of a problem in the tuning tables."""
    return {
        "dtype": jnp.dtype(problem.dtype).name,
        "bits": str(problem.bits),
        "new_bits": str(problem.new_bits),
        "group": str(problem.group),
        "random": problem.noise,
        "hadamard": problem.hadamard,
        "payloads": problem.payloads,
        "elements": problem.elements,
    }


def why_not(problem: hopper.Problem) -> list[str]:
    """Returns the reasons why 'hopper' cannot take a call on any GPU; empty: it can."""
    return hopper.unknown(problem) or hopper.misfits(problem, hopper.heuristic(problem))


def why_plain(problem: hopper.Problem, implementation: Implementation | None = None) -> list[str]:
    """Returns why a call runs in plain JAX; empty: the kernel runs it, or it raises an error."""
    if implementation == "reference":
        return ["it was asked for"]
    if (why := why_not(problem)) or implementation is not None:
        return why
    if tuned.target() is None:
        return ["the program is for no GPU"]
    against = tuned.against(tuned.find(problem.op, key_of(problem)))
    return [*dispatch.device_reasons()] or [why for why in (against,) if why]


def runs_kernel(problem: hopper.Problem, implementation: Implementation | None = None) -> bool:
    """Tells whether a call would run the kernel on the GPUs that the program is for.

    Raises: as the call.
    """
    row = tuned.find(problem.op, key_of(problem))
    choice = dispatch.choose(problem.op, implementation, why_not(problem), [row])
    return choice in ("hopper", "interpret", "measured")


def _run(
    problem: hopper.Problem,
    implementation: Implementation | None,
    options: dict[str, Any],
    *args: Array | None,
) -> Array:
    """Runs the implementation that the dispatch rule picks."""
    row = tuned.find(problem.op, key_of(problem))
    measured = tuned.tile(row)
    reasons, tile = why_not(problem), hopper.Tile(1, 2, 1)
    if not reasons:
        tile = hopper.fit(problem, hopper.Tile(**measured) if measured else None)
    choice = dispatch.choose(problem.op, implementation, reasons, [row])
    return dispatch.run(
        choice,
        functools.partial(getattr(hopper, problem.op), problem=problem, tile=tile),
        functools.partial(getattr(fused_reference, problem.op), **options),
        *dispatch.alike(args),
        op=problem.op,
    )


def _words(op: str, key: Array | None) -> Array | None:
    if key is None:
        return None
    if not (hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)) or key.ndim:
        raise ValueError(f"{op}: key must be one jax.random.key, or None to round to nearest")
    return counter.key_words(key)


def _check_line(op: str, name: str, x: Any, dtypes: tuple[str, ...] = DTYPES) -> None:
    arguments.check_arrays(op, **{name: x})
    if x is None or x.ndim != 1 or jnp.dtype(x.dtype).name not in dtypes:
        actual = "None" if x is None else f"{x.dtype}{x.shape}"
        raise ValueError(f"{op}: {name} {actual} must be one line of {' or '.join(dtypes)}")


def _check_rows(op: str, payload_RP: Any) -> int:
    """Returns R."""
    arguments.check_arrays(op, payload_RP=payload_RP)
    if payload_RP is None or payload_RP.dtype != jnp.uint8 or payload_RP.ndim != 2:
        actual = "None" if payload_RP is None else f"{payload_RP.dtype}{payload_RP.shape}"
        raise ValueError(f"{op}: payload_RP {actual} must be uint8 (R, P), a payload a row")
    if not payload_RP.shape[0]:
        raise ValueError(f"{op}: payload_RP {payload_RP.shape} has no payload; give at least 1")
    return payload_RP.shape[0]


def _check_payload(op: str, payload_RP: Any, n: int, bits: Bits, group: int) -> None:
    rows, size = _check_rows(op, payload_RP), reference.payload_bytes(n, bits, group)
    if payload_RP.shape[1] != size:
        raise ValueError(
            f"{op}: payload_RP uint8{payload_RP.shape} must be uint8 ({rows}, {size}): {n} codes "
            f"of bits={bits} and scales of groups of {group}"
        )


def _check_codes(op: str, bits: Bits, group: int, prefix: str = "") -> None:
    known = (*reference.INTEGERS, *reference.DTYPES)
    if isinstance(bits, bool) or bits not in known:
        raise ValueError(f"{op}: {prefix}bits={bits!r} must be one of {known}")
    arguments.integer(op, "group", group, 1)


def _part(op: str, name: str, n: int, parts: int, multiple: int) -> int:
    """Returns n / parts."""
    if not n or n % (parts * multiple):
        step = parts * multiple
        below = max(n // step, 1) * step
        raise ValueError(
            f"{op}: {name} has {n} elements and must be a multiple of {step} ({parts} equal parts, "
            f"each of whole {multiple}); nearest: {below}, {below + step}"
        )
    return n // parts
