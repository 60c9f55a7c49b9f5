"""Chooses the implementation of an operation, by one rule for all kernels, and logs the reason.

'hopper' is the Mosaic GPU kernel, 'interpret' the same kernel in Pallas' interpreter (tests),
'reference' plain JAX on any device. An explicit choice runs or raises an error.

None launches a kernel only where a row of a committed table (tuned.py) says that the kernel was
right and faster than its rivals on the kind of GPU that the program is for. Otherwise a GPU gets
the best library path (cuBLAS, cuDNN, XLA); where no GPU is known of, plain JAX runs. `choose`
decides this for every operation, and the log says once what was chosen and why; docs/kernels.md has
a table.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn

import jax
from absl import logging
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from pallas_kernels import tuned

Implementation = Literal["hopper", "reference", "interpret"]
CHOICES = (None, "hopper", "reference", "interpret")
HOPPER = ("H100", "H200", "H800", "H20", "GH200")  # words of their device kinds
NEEDS = "needs compute capability 9.0 (Hopper)"


def device_reasons() -> tuple[str, ...]:
    """Returns what keeps the GPUs that a program is for (`tuned.target`) from running the kernels.

    Without any GPU there is no reason: the program may still be compiled for one.
    """
    kind = tuned.target()
    if kind is None or is_hopper(kind):
        return ()
    return (f"{NEEDS}, found {kind}",)


def is_hopper(kind: str) -> bool:
    """Whether a device kind, as JAX names it, is a Hopper GPU."""
    return any(word in kind for word in HOPPER)


def choose(
    op: str,
    implementation: str | None,
    reasons: Sequence[str],
    rows: Iterable[dict | None],
) -> str:
    """Returns a word for `run`: 'hopper', 'reference', 'interpret', 'measured' or 'library'.

    'measured' is the kernel on CUDA because of a table's row, 'library' the library path on CUDA;
    both are plain JAX on other platforms.

    Args: op: public name, for messages. reasons: why the kernel cannot take these inputs; empty
      when it can. rows: the result of `tuned.find` for each kernel of this choice.
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
    if (kind := tuned.target()) is None:
        return "reference"
    reasons = reasons or tuple(dict.fromkeys(why for row in rows if (why := tuned.against(row))))
    _log_once(op, kind, reasons)
    return "library" if reasons else "measured"


def choose_fused(
    op: str, implementation: str | None, reasons: Sequence[str], row: dict | None
) -> str:
    """Returns 'xla' or 'fused', for a product with its collective; the rule is that of `choose`.

    reasons: why the kernel cannot run, or must not by default. row: the result of `tuned.find`.
    Raises: as `choose`.
    """
    if implementation not in (None, "xla", "fused"):
        raise ValueError(f"{op}: implementation={implementation!r}; there are 'xla', 'fused', None")
    if implementation == "fused" and reasons:
        raise NotImplementedError(
            f"{op}: implementation='fused' cannot run here: {'; '.join(reasons)}; use "
            "implementation='xla', or None to let it choose"
        )
    if implementation is not None:
        return implementation
    if (kind := tuned.target()) is None:
        return "xla"
    why = tuple(reasons) or tuple(filter(None, (tuned.against(row, "fused"),)))
    _log_once(op, kind, why)
    return "xla" if why else "fused"


def run(
    choice: str,
    hopper: Callable[..., Any],
    reference: Callable[..., Any],
    *args: Any,
    op: str = "this kernel",
    library: Callable[..., Any] | None = None,
) -> Any:
    """Calls the implementation that `choose` chose; hopper also takes `interpret=`.

    library: the best path on CUDA that is no kernel of ours; None: the reference is. 'measured' and
    'library' leave two paths in the program, and the platform that it is lowered for takes one;
    'hopper' leaves the kernel only.

    Raises: NotImplementedError, when 'hopper' is lowered for anything but CUDA.
    """
    kernel = functools.partial(hopper, interpret=choice == "interpret")
    match choice:
        case "measured":
            return jax.lax.platform_dependent(*args, cuda=kernel, default=reference)
        case "library" if library is not None:
            return jax.lax.platform_dependent(*args, cuda=library, default=reference)
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

    return jax.tree.map(lambda x: vary(x, axes), arrays)


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Inside a shard_map: casts x to vary over mesh axes, from whatever it is over each of them.

    One cast of JAX takes axes of one kind: copied, or copied with a gradient of partial sums.
    """
    kinds = jax.typeof(x).mat
    missing = set(axes) - set(kinds.varying)
    for kind in (missing & set(kinds.reduced), missing - set(kinds.reduced)):
        x = jax.lax.pcast(x, tuple(sorted(kind)), to="varying") if kind else x
    return x


def _refuse(op: str, implementation: str, reasons: Sequence[str]) -> None:
    if reasons:
        raise NotImplementedError(
            f"{op}: implementation={implementation!r} cannot run here: {'; '.join(reasons)}; "
            "use implementation='reference', or None to let it choose"
        )


@functools.cache
def _log_once(op: str, kind: str, against: tuple[str, ...]) -> None:
    if against:
        logging.warning("%s runs without our kernel on %s: %s", op, kind, "; ".join(against))
    else:
        logging.info("%s runs our kernel on %s: measured right and faster", op, kind)
