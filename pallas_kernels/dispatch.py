"""Which implementation of a kernel runs, and why not another.

'hopper' is the Mosaic GPU kernel, 'interpret' the same kernel in Pallas' interpreter (tests),
'reference' plain JAX on any device. An explicit choice runs or raises. None takes the kernel where
it can run and says once, in the log, what kept it from running elsewhere.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import jax
from absl import logging
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

Implementation = Literal["hopper", "reference", "interpret"]
CHOICES = (None, "hopper", "reference", "interpret")
HOPPER = ("H100", "H200", "H800", "H20", "GH200")  # words of their device kinds
NEEDS = "needs compute capability 9.0 (Hopper)"


def device_reasons() -> tuple[str, ...]:
    """Returns what keeps the program's GPUs from running a Hopper kernel.

    The mesh that it is traced under says which they are, be they here or not (`aot.devices`);
    without one they are this process's. Without any GPU there is no reason: the program may still
    be compiled for one.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform in ("gpu", "cuda"):
        return () if is_hopper(device.device_kind) else (f"{NEEDS}, found {device.device_kind}",)
    if jax.default_backend() != "gpu":
        return ()
    found = {str(getattr(d, "compute_capability", "unknown")) for d in jax.local_devices()}
    wrong = sorted(found - {"9.0"})
    return tuple(f"{NEEDS}, found {c}" for c in wrong)


def is_hopper(kind: str) -> bool:
    """Whether a device kind, as JAX names it, is a Hopper GPU."""
    return any(word in kind for word in HOPPER)


def choose(op: str, implementation: str | None, reasons: Sequence[str]) -> str:
    """Returns 'hopper', 'reference', 'interpret', or 'auto': by the platform compiled for.

    Args: op: public name, for messages. reasons: why the kernel cannot take these inputs; empty
      when it can.
    Raises: ValueError for an unknown word; NotImplementedError, with every reason, for an explicit
      choice that cannot run.
    """
    if implementation not in CHOICES:
        raise ValueError(f"{op}: implementation={implementation!r}; there are {CHOICES}")
    if implementation == "reference":
        return "reference"
    if implementation == "interpret":
        _refuse(op, "interpret", reasons)
        return "interpret"
    reasons = (*reasons, *device_reasons())
    if implementation == "hopper":
        _refuse(op, "hopper", reasons)
        return "hopper"
    for reason in reasons:
        _log_once(op, reason)
    return "reference" if reasons else "auto"


def choose_fused(
    op: str, implementation: str | None, reasons: Sequence[str], find: Callable[[], Any]
) -> str:
    """Returns 'xla' or 'fused', for a product with its collective.

    reasons: why the kernel cannot run; empty when it can. find(): the row of a table, or None; None
    takes the kernel only where one says that it is faster.
    Raises: as `choose`.
    """
    if implementation not in (None, "xla", "fused"):
        raise ValueError(f"{op}: implementation={implementation!r}; there are 'xla', 'fused', None")
    if implementation == "fused" and reasons:
        raise NotImplementedError(
            f"{op}: implementation='fused' cannot run here: {'; '.join(reasons)}; use "
            "implementation='xla', or None to let it choose"
        )
    if implementation is None and not reasons:
        row = find()
        return "fused" if row and row["fastest"] == "fused" else "xla"
    return implementation or "xla"


def run(
    choice: str,
    hopper: Callable[..., Any],
    reference: Callable[..., Any],
    *args: Any,
    op: str = "this kernel",
) -> Any:
    """Calls what `choose` chose; hopper also takes `interpret=`.

    'auto' leaves both in the program, and the platform that it is lowered for takes one; 'hopper'
    leaves the kernel only.

    Raises: NotImplementedError, when 'hopper' is lowered for anything but CUDA.
    """
    kernel = functools.partial(hopper, interpret=choice == "interpret")
    match choice:
        case "auto":
            return jax.lax.platform_dependent(*args, cuda=kernel, default=reference)
        case "hopper":

            def refused(*args: Any) -> Any:
                return jax.tree.map(functools.partial(_hopper_only.bind, op=op), reference(*args))

            return jax.lax.platform_dependent(*args, cuda=kernel, default=refused)
        case "interpret":
            return kernel(*args)
    return reference(*args)


def _refuse_platform(op: str, platform: str) -> NoReturn:
    raise NotImplementedError(
        f"{op}: implementation='hopper' is for CUDA, and this program is for {platform}; use "
        "implementation='reference', 'interpret' (tests, slow), or None to let it choose"
    )


# What results pass through where no kernel can run: the platform is known only when a program is
# lowered, and nothing in Python could raise before.
_hopper_only = Primitive("hopper_only")
_hopper_only.def_abstract_eval(lambda x, *, op: x)
_hopper_only.def_impl(lambda x, *, op: _refuse_platform(op, jax.default_backend()))
mlir.register_lowering(
    _hopper_only,
    lambda context, x, *, op: _refuse_platform(op, ", ".join(context.module_context.platforms)),
)
batching.defvectorized(_hopper_only)


def alike(arrays: Any) -> Any:
    """Inside a shard_map: casts all to vary over the mesh axes over which any of them does.

    What is copied over an axis then gets its gradient summed over it.
    """
    axes = {axis for x in jax.tree.leaves(arrays) for axis in jax.typeof(x).mat.varying}

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axes - set(jax.typeof(x).mat.varying))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, arrays)


def _refuse(op: str, implementation: str, reasons: Sequence[str]) -> None:
    if reasons:
        raise NotImplementedError(
            f"{op}: implementation={implementation!r} cannot run here: {'; '.join(reasons)}; "
            "use implementation='reference', or None to let it choose"
        )


@functools.cache
def _log_once(op: str, reason: str) -> None:
    logging.warning("%s runs its reference implementation: %s", op, reason)
