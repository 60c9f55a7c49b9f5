"""The fused norm on a GPU: correctness, and every case beside XLA's fusion of the same arithmetic.

Correct: the error against float32 is at most twice that of the plain 16-bit program, plus 1e-3.

Legend: T rows, D their width.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_attention import Side

import pallas_kernels
from pallas_kernels.norm.cases import CASES as CASES
from pallas_kernels.norm.cases import Case

SEQUENCES = 16  # of a case that unpacks
TINY_CASES = (Case("tiny", 16, 256, bias=True),)
CHECKED = (
    Case("layer 512 x 768", 512, 768, bias=True),
    Case("rms 200 x 4096", 200, 4096, centred=False),
    Case("layer 130 x 1024 alone", 130, 1024, added=False),
    Case("layer 512 x 768 unpacked", 512, 768, bias=True, padded_rows=1024),
)


def arguments(case: Case) -> list[jax.ShapeDtypeStruct]:
    """x, scale and, where the case has them, residual, offset and bias."""
    rows, vectors = 1 + case.added, 1 + case.centred + case.bias
    wide = jax.ShapeDtypeStruct((case.rows, case.width), jnp.bfloat16)
    return [wide] * rows + [jax.ShapeDtypeStruct((case.width,), jnp.float32)] * vectors


def norm(case: Case, implementation: str) -> Callable[..., Any]:
    """The fused norm of the arguments, unpacked where the case says so."""

    def run(x_TD, *rest):
        left = list(rest)
        residual = left.pop(0) if case.added else None
        options = {
            "residual": residual,
            "scale": left.pop(0),
            "offset": left.pop(0) if case.centred else None,
            "bias": left.pop(0) if case.bias else None,
            "kind": "layer" if case.centred else "rms",
            "implementation": implementation,
        }
        if not case.padded_rows:
            return pallas_kernels.fused_layer_norm(x_TD, **options)
        ends = jnp.arange(SEQUENCES + 1, dtype=jnp.int32) * (case.rows // SEQUENCES)
        info = pallas_kernels.PackInfo(ends, case.rows, case.padded_rows // SEQUENCES)
        return pallas_kernels.norm_unpack(x_TD, info, **options)

    return run


def sides(case: Case, implementation: str) -> dict[str, Callable[[], Side]]:
    """Ours, and what XLA fuses by itself."""
    return {
        "ours": lambda: (norm(case, implementation), arguments(case)),
        "xla": lambda: (norm(case, "reference"), arguments(case)),
    }


def errors(case: Case, implementation: str) -> dict[str, float]:
    """Returns error over bound of the results and of the gradients; at most 1 is right."""
    random = np.random.default_rng(0)
    inputs = [jnp.asarray(random.normal(size=x.shape), x.dtype) for x in arguments(case)]

    def all_of(implementation: str, exact: bool) -> list[np.ndarray]:
        def run(*x):
            out, pull = jax.vjp(norm(case, implementation), *x)
            ones = jax.tree.map(jnp.ones_like, out)
            return jax.tree.leaves(out), pull(jax.tree.map(lambda y: y * 0.5, ones))

        arrays = (x.astype(jnp.float32) if exact else x for x in inputs)
        return [np.asarray(x, np.float64) for x in jax.tree.leaves(jax.jit(run)(*arrays))]

    found, rough, want = (
        all_of(implementation, False), all_of("reference", False), all_of("reference", True),
    )  # fmt: skip
    return {
        f"result {i}": float(np.abs(f - w).max() / (2 * np.abs(r - w).max() + 1e-3))
        for i, (f, r, w) in enumerate(zip(found, rough, want, strict=True))
    }


def checks(rehearsal: bool) -> list[tuple[str, Callable[[], dict[str, float]]]]:
    """(name, what gives error over bound)."""
    cases = TINY_CASES if rehearsal else CHECKED
    implementation = "interpret" if rehearsal else "hopper"
    return [
        (f"norm {case.name}", functools.partial(errors, case, implementation)) for case in cases
    ]
