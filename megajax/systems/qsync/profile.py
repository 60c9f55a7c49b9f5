"""What rounding adds to the gradients of each product of a model, measured, and the file of it.

`collect` runs a batch through the parts of a model, layer by layer, with an Ops.matmul that keeps
the operands of each product and adds a zero to its result, whose gradient is that of the product.
`errors` weighs the variances of rounding.py by the depth of the layer, as model.py does with
assumed ones. The parameters are those of a run that is some steps old, because the gradients of new
ones are not those of training. One device, no mesh; one layer's arrays exist at a time.

Legend: M tokens, K inputs and N outputs of a product.
"""

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core import files
from megajax.core.errors import UserError, did_you_mean, unwritable
from megajax.core.tree import Tree
from megajax.layers.ops import Ops, matmul
from megajax.models.parts import Batch
from megajax.systems.qsync.graph import PRECISIONS, RANK
from megajax.systems.qsync.model import PRODUCTS, STACK, depth_weighted
from megajax.systems.qsync.rounding import Statistics, statistics
from megajax.training.task import Task

Array = jax.Array
Form = Literal["exact", "paper"]


class _Tap:
    """An Ops.matmul that notes the operands of the stack's products.

    zeros: {parameter: added to its product}; a product that it lacks is noted alone. products:
    {parameter: (x_MK, w_KN, y_MN)} since they were cleared.
    """

    names = {f"{STACK}.{room}.{leaf}" for room, leaves in PRODUCTS.items() for leaf in leaves}

    def __init__(self) -> None:
        self.zeros: Mapping[str, Array] = {}
        self.products: dict[str, tuple[Array, Array, Array]] = {}

    def __call__(
        self,
        x: Array,
        w: Any,
        contract: int = 1,
        out_sharding: Any = None,
        out_dtype: Any = None,
        name: str | None = None,
    ) -> Array:
        y = matmul(x, w, contract, out_sharding, out_dtype, name)
        if name not in self.names:
            return y
        inputs, outputs = math.prod(w.shape[:contract]), math.prod(w.shape[contract:])
        y_MN = y.reshape(-1, outputs)
        if name in self.zeros:
            y_MN = y_MN + self.zeros[name]
        self.products[name] = x.reshape(-1, inputs), w.reshape(inputs, outputs), y_MN
        return y_MN.reshape(y.shape)


def collect(task: Task, params: Tree, batches: Iterable[Batch]) -> dict[str, Statistics]:
    """Returns the statistics of every product of the stack, summed over batches:
    {blocks.3.mlp.up: ...}. Arguments and errors are those of `operands`, and inf and NaN."""
    total: dict[str, Statistics] = {}
    for batch in batches:
        for node, *arrays in operands(task, params, batch):
            one = statistics(*arrays)
            total[node] = total[node] + one if node in total else one
    return total


def operands(
    task: Task, params: Tree, batch: Batch
) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """Yields (product, x_MK, w_KN, the gradient of x w) of the stack, the last layer first.

    Args: task: of a decoder or an encoder, each of whose blocks runs once. params: all parameters,
      on one device. batch: one micro-batch.
    """
    tap = _Tap()
    parts = task.parts(None, Ops(matmul=tap))
    total = jnp.maximum(task.count(batch), 1).astype(jnp.float32)
    context = parts.context(batch, None)

    if parts.kinds:
        raise UserError("layers of several kinds (model.pattern) are not profiled; use one kind")

    def run(weights: Tree, x: Array, zeros: Mapping[str, Array]) -> tuple[Any, Any]:
        """Returns ((x after the layer, penalties of its router), the products)."""
        tap.zeros, tap.products = zeros, {}
        y, _, moe = parts.block(weights, x, context)
        return (y, 0.0 if moe is None else moe.penalty.sum()), dict(tap.products)

    @jax.jit
    def backward(weights: Tree, x: Array, dy: Array) -> tuple[Array, Any, Any]:
        products = jax.eval_shape(functools.partial(run, zeros={}), weights, x)[1]
        zeros = {name: jnp.zeros(y.shape, y.dtype) for name, (_, _, y) in products.items()}
        (_, penalty), pull, products = jax.vjp(
            functools.partial(run, weights), x, zeros, has_aux=True
        )
        dx, gradients = pull((dy, jnp.ones_like(penalty)))
        return dx, products, gradients

    forward = jax.jit(lambda weights, x: run(weights, x, {})[0][0])
    layers = [jax.tree.map(operator.itemgetter(i), params[STACK]) for i in range(parts.layers)]
    inputs = [parts.embed(params, batch, context)]
    for weights in layers[:-1]:
        inputs.append(forward(weights, inputs[-1]))

    @jax.jit
    def of_loss(x: Array) -> Array:
        return task.objective(parts.head_loss(params, x, batch), total)

    dx = jax.grad(of_loss)(forward(layers[-1], inputs[-1]))
    for i in reversed(range(parts.layers)):
        dx, products, gradients = backward(layers[i], inputs.pop(), dx)
        for name, (x_MK, w_KN, _) in products.items():
            node = name.replace(STACK, f"{STACK}.{i}", 1)
            yield node, *jax.device_get((x_MK, w_KN, gradients[name]))


def errors(
    stats: Mapping[str, Statistics], layers: int, dtype: str, gamma: float, form: Form = "exact"
) -> dict[str, dict[str, float]]:
    """Returns {product: {precision: omega}} of the precisions that are narrower than dtype.

    Args: layers: of the stack. gamma: weight of the errors of forward passes beside those of
      backward passes. form: of the variances (rounding.py).
    """
    made: dict[str, dict[str, float]] = {}
    for node in sorted(stats):
        table = getattr(stats[node], form)
        layer = int(node.split(".")[1])
        made[node] = {
            precision: depth_weighted(
                layer, layers, table[precision].forward, table[precision].backward, gamma
            )
            for precision in PRECISIONS[: RANK[dtype]]
        }
    return made


# ---- the file


FORMAT = "megajax omega 1"
MOST = 16 * 2**20  # (chosen) bytes of a file: 50,000 products and more
Errors = Mapping[str, Mapping[str, float]]  # {product: {precision: omega}}


def save(path: str | PathLike[str], errors: Errors, facts: Mapping[str, str]) -> None:
    """Replaces a JSON file. facts: how the errors were measured; nothing reads them.

    Raises: UserError when it cannot be written.
    """
    text = files.json_text({"format": FORMAT, "facts": facts, "omega": errors})
    try:
        files.write_whole(Path(path), text)
    except OSError as error:
        raise unwritable(f"cannot write {path}: {error.strerror}", error) from None


def load(path: str | PathLike[str]) -> dict[str, dict[str, float]]:
    """Returns the errors that `save` wrote. Raises: UserError naming a file that is none, or
    damaged."""
    value = files.read_object(Path(path), MOST)
    if value.get("format") != FORMAT:
        raise UserError(
            f"{path} is no profile of products: its format is {value.get('format')!r:.60}, not "
            f"{FORMAT!r}"
        )
    rows = value.get("omega")
    if not isinstance(rows, dict) or not rows:
        raise UserError(f"{path} is damaged: it must hold 'omega' of at least one product")
    for name, row in rows.items():
        if not isinstance(row, dict):
            raise UserError(f"{path} is damaged: {name!r:.60} has {row!r:.60}")
        for precision, omega in row.items():
            if precision not in PRECISIONS:
                raise UserError(
                    f"{path} is damaged: {name!r:.60} has {precision!r:.60}, which is none of "
                    f"{', '.join(PRECISIONS)}.{did_you_mean(precision, PRECISIONS)}"
                )
            is_number = type(omega) in (int, float) and math.isfinite(omega) and omega >= 0
            if not is_number:
                raise UserError(
                    f"{path} is damaged: {name!r:.60} in {precision} has {omega!r:.60}; it must be "
                    "a finite number of at least 0"
                )
    return rows
