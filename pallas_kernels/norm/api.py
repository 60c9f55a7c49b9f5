"""LayerNorm and RMSNorm of x + bias + residual in one pass.

ByteTransformer (arXiv 2210.03052) section 3.2 fuses the three for BERT; RMSNorm: arXiv 1910.07467.
One implementation so far, plain JAX, which XLA fuses itself.

Legend: x stands for any leading dimensions, D model width.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.norm import reference

KINDS = ("layer", "rms")


def fused_layer_norm(
    x_xD: jax.Array,
    *,
    residual: jax.Array | None = None,
    bias: jax.Array | None = None,
    scale: jax.Array,
    offset: jax.Array | None = None,
    kind: str = "layer",
    eps: float = 1e-5,
    implementation: dispatch.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """norm(h) * scale + offset with h = x + bias + residual; statistics in float32.

    'layer': (h - mean) / sqrt(variance + eps). 'rms': h / sqrt(mean(h ** 2) + eps).

    Args: x_xD, residual: one floating type and shape. bias, scale, offset: (D,), any floating type.
      eps: above 0.
    Returns: (y_xD, h_xD), both in x's type; h is rounded to it after the statistics were taken of
      the float32 sum. Both differentiable.
    Raises: ValueError for shapes, types, kind and eps that break the above; NotImplementedError for
      an implementation other than 'reference'.
    """
    reasons = ["there is no Hopper kernel of it yet"]
    dispatch.choose("fused_layer_norm", implementation, reasons if implementation else ())
    D = x_xD.shape[-1] if x_xD.ndim else 0
    if not jnp.issubdtype(x_xD.dtype, jnp.floating) or not D:
        raise ValueError(f"x {x_xD.dtype}{x_xD.shape} must be floating, with a last dimension")
    if residual is not None and (residual.shape, residual.dtype) != (x_xD.shape, x_xD.dtype):
        raise ValueError(
            f"residual {residual.dtype}{residual.shape} must be like x, {x_xD.dtype}{x_xD.shape}"
        )
    for name, value in (("bias", bias), ("scale", scale), ("offset", offset)):
        if value is not None and value.shape != (D,):
            raise ValueError(f"{name} {value.shape} must be ({D},), x's last dimension")
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}; there are {KINDS}")
    if not eps > 0:
        raise ValueError(f"eps={eps} must be above 0: equal inputs have no variance")
    return reference.forward(x_xD, residual, bias, scale, offset, kind=kind, eps=eps)
