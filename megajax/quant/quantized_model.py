"""Quantizes the weights of a model's blocks (weights only; LLM-PQ, arXiv 2403.01136).

Each matrix of the stacked layers is quantized by itself, with groups along its inputs. Embeddings,
the head, norms, biases and routers are not quantized; models with experts are refused. Consecutive
layers of equal formats form one stack (core.packed.LayerRuns); if all formats are equal, there is
one stack, as in the dense model.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.errors import UserError, did_you_mean
from megajax.core.layout import Words
from megajax.core.packed import LayerRuns, PackedWeight
from megajax.core.tree import Tree, is_words, name, named_leaves
from megajax.quant.activation_aware import GRID, awq
from megajax.quant.compensated import gptq, row_format
from megajax.quant.formats import Format
from megajax.quant.kernel import QuantKernel
from megajax.quant.qtensor import QTensor, quantize
from megajax.quant.statistics import Statistics

Method = Literal["rtn", "gptq", "awq"]
METHODS = ("rtn", "gptq", "awq")
Formats = Format | Sequence[Format | None]
LAYERS = "layers"


class Model(Protocol):
    """The interface of a configuration. axes: logical axes of each leaf (ModelParts.axes)."""

    @property
    def layers(self) -> int: ...  # noqa: D102

    @property
    def axes(self) -> Tree: ...  # noqa: D102


def quantize_model(
    params: Tree,
    cfg: Model,
    formats: Formats,
    *,
    calibration: Mapping[str, Statistics] | None = None,
    method: Method = "rtn",
    sources: Mapping[str, str | None] | None = None,
) -> Tree:
    """Returns the parameters with QuantKernel leaves, whose `weight` is a QTensor.

    Args: params: dense, as in ModelParts. cfg: the model's configuration. formats: one for all
    layers, or a list with one for each; None keeps a layer dense. Groups lie along the inputs of a
    product, so axis=0 (None is read as 0). calibration: {name of a leaf: Statistics of the inputs
    of its products, stacked over the layers} (systems/llm_pq/quality.py); needed for 'gptq' and
    'awq'. method: 'rtn' (rounding to nearest), 'gptq' (with order='activations' and clip=True) or
    'awq'. sources: for 'awq', {matrix: the name of what gives its inputs} (models/folding.py):
    matrices of one source share their scales of inputs, and a matrix whose source is None has none;
    None: no two matrices share scales.
    Returns: a tree like `params`. If layers have different formats, its member of stacked layers is
        a core.packed.LayerRuns: one stack for each run of equal formats, with the number of its
        first layer.
    Raises: UserError for formats and methods that do not exist, a wrong number of formats,
        parameters that are quantized already, a matrix without calibration, a name in `sources`
        that is no matrix, and models with experts, whose products are grouped.
    """
    if not (hasattr(cfg, "layers") and hasattr(type(cfg), "axes")):  # an encoder has no axes
        raise UserError(
            f"quantize_model: cfg must be a decoder's configuration, got a {type(cfg).__name__}"
        )
    # One spelling of the axis, so that equal formats are equal.
    each = [
        dataclasses.replace(fmt, axis=0) if fmt is not None and fmt.axis in (None, -2) else fmt
        for fmt in layer_formats(formats, cfg.layers)
    ]
    if method not in METHODS:
        raise UserError(
            f"method={method!r} must be among {', '.join(METHODS)}."
            f"{did_you_mean(str(method), METHODS)}"
        )
    words = dict(named_leaves(cfg.axes, is_words))
    names = matrices(cfg.axes)
    _check_dense(params, names, cfg.layers)
    if unknown := [n for n in sources or () if n not in names]:
        raise UserError(
            f"sources: {unknown[0]!r} is no matrix that is quantized."
            f"{did_you_mean(str(unknown[0]), names)}"
        )
    if method != "rtn":
        _check_calibration(calibration or {}, names, cfg.layers, method)
    joint = _joint(params, words, each, calibration, sources if method == "awq" else None)
    stack = next(iter(names)).split(".")[0]
    starts = [i for i, fmt in enumerate(each) if i == 0 or fmt != each[i - 1]]
    runs = []
    for start, stop in zip(starts, [*starts[1:], cfg.layers], strict=True):

        def leaf(path: tuple, w: Any, start: int = start, stop: int = stop) -> Any:
            n, fmt = f"{stack}.{name(path)}", each[start]
            if fmt is None or n not in names:
                return w[start:stop]
            layers = [
                joint[n][i]
                if n in joint
                else _quantized(n, w[i], words[n][1:], fmt, _of_layer(calibration, n, i), method)
                for i in range(start, stop)
            ]
            return jax.tree.map(lambda *x: jnp.stack(x)[:, None], *layers)  # one piece

        runs.append(jax.tree_util.tree_map_with_path(leaf, params[stack]))
    quantized = runs[0] if len(runs) == 1 else LayerRuns(tuple(runs), tuple(starts), cfg.layers)
    return params | {stack: quantized}


def _joint(
    params: Tree,
    words: Mapping[str, Words],
    each: Sequence[Format | None],
    calibration: Mapping[str, Statistics] | None,
    sources: Mapping[str, str | None] | None,
) -> dict[str, list[Any]]:
    """Returns {matrix: a QuantKernel by AWQ for each layer, None where it stays dense}, where
    matrices of one source share their scales: AWQ of their columns beside each other."""
    leaves, kernels = dict(named_leaves(params)), {n: [] for n in sources or ()}
    groups: dict[str, list[str]] = {}
    for n, source in (sources or {}).items():
        groups.setdefault(n if source is None else source, []).append(n)
    for names in groups.values():
        grid = GRID if (sources or {})[names[0]] is not None else 1
        for layer, fmt in enumerate(each):
            if fmt is None:
                for n in names:
                    kernels[n].append(None)
                continue
            shapes = [leaves[n].shape[1:] for n in names]
            parts = [
                jnp.asarray(np.asarray(leaves[n][layer]).reshape(inputs_of(words[n][1:], s), -1))
                for n, s in zip(names, shapes, strict=True)
            ]
            inputs: Any = _of_layer(calibration, names[0], layer)
            try:
                q, scale_K = awq(jnp.concatenate(parts, 1), inputs, fmt, grid=grid)
            except UserError as error:
                raise UserError(f"{names[0]}: {error}") from None
            start = 0
            for n, shape, part in zip(names, shapes, parts, strict=True):
                stop = start + part.shape[1]
                piece = jax.tree.map(lambda x, a=start, b=stop: x[:, a:b], q)
                piece = dataclasses.replace(piece, shape=part.shape)
                kernels[n].append(QuantKernel(shape, piece, scale_K if grid > 1 else None))
                start = stop
    return kernels


def _check_dense(params: Tree, names: Sequence[str], layers: int) -> None:
    """Refuses what is no tree of dense parameters with these leaves. Raises: UserError."""

    def is_packed(x: Any) -> bool:
        return isinstance(x, PackedWeight)

    leaves = dict(named_leaves(params, is_packed))
    for n, w in leaves.items():
        if is_packed(w):
            raise UserError(
                f"quantize_model: {n} is a {type(w).__name__} already; give the dense parameters"
            )
    if missing := [n for n in names if n not in leaves]:
        raise UserError(
            f"quantize_model: params must be the parameters of the configuration's model; they have"
            f" no {missing[0]}"
        )
    for n in names:
        if len(leaves[n]) != layers:
            raise UserError(
                f"quantize_model: {n} has {len(leaves[n])} layers, the configuration {layers}"
            )


def _check_calibration(
    calibration: Mapping[str, Statistics], names: Sequence[str], layers: int, method: Method
) -> None:
    """Refuses a calibration without one of the matrices, or of another number of layers.

    JAX's arrays would give their last layer for every layer behind it. Raises: UserError.
    """
    for n in names:
        if n not in calibration:
            raise UserError(
                f"method={method!r} needs the inputs of {n} in calibration "
                "(systems.llm_pq.calibrate), got none; method='rtn' needs none"
            )
        statistics = calibration[n]
        if not isinstance(statistics, Statistics):
            raise UserError(
                f"calibration: {n} must be a megajax.quant.Statistics, stacked over the layers, "
                f"got a {type(statistics).__name__}"
            )
        if jnp.ndim(statistics.total_K) != 2 or len(statistics.total_K) != layers:
            raise UserError(
                f"calibration: the Statistics of {n} must be stacked over the model's {layers} "
                f"layers; its sums of inputs have the shape {jnp.shape(statistics.total_K)}"
            )


def layer_formats(formats: Formats, layers: int) -> list[Format | None]:
    """Returns the format of each layer. Raises: UserError for a wrong number or type."""
    if isinstance(formats, str) or not isinstance(formats, Format | Iterable):
        raise UserError(
            f"formats={formats!r} must be a megajax.quant.Format, or a list with one for each layer"
        )
    each: list[Format | None] = [formats] * layers if isinstance(formats, Format) else list(formats)
    if len(each) != layers:
        raise UserError(f"formats has {len(each)} entries for {layers} layers; give one a layer")
    for i, fmt in enumerate(each):
        if fmt is not None and not isinstance(fmt, Format):
            raise UserError(f"formats[{i}]={fmt!r} must be a megajax.quant.Format or None")
    return each


def matrices(axes: Tree) -> list[str]:
    """Returns the names of the leaves that are quantized: matrices of stacked layers.

    Raises: UserError for experts, whose products are grouped, and for latent attention.
    """
    quantized = [
        (n, w)
        for n, w in named_leaves(axes, is_words)
        if w[:1] == (LAYERS,) and len(w) > 2 and "embed" in w and "router" not in w
    ]
    for n, w in quantized:
        if n.endswith(".attention.latent"):
            raise UserError(f"{n}: latent attention splits its matrices, which no QTensor can be")
        if "expert" in w:
            raise UserError(
                f"{n}: experts are multiplied by grouped products, which take no QTensor"
            )
    return [n for n, _ in quantized]


def inputs_of(words: Words, shape: tuple[int, ...]) -> int:
    """Returns K, the number of inputs, of one layer's matrix with these words."""
    rows = 1 if words[0] == "embed" else len(shape) - 1
    return int(np.prod(shape[:rows]))


def _of_layer(
    calibration: Mapping[str, Statistics] | None, n: str, layer: int
) -> Statistics | None:
    if calibration is None or n not in calibration:
        return None
    return jax.tree.map(lambda x: jnp.asarray(x[layer]), calibration[n])


def _quantized(
    n: str, w: Any, words: Words, fmt: Format, statistics: Statistics | None, method: Method
) -> QuantKernel:
    # The weight goes through the host, because JAX's types would carry a mesh along.
    w_KN = jnp.asarray(np.asarray(w).reshape(inputs_of(words, w.shape), -1))
    try:
        if method == "rtn" or statistics is None:
            return QuantKernel(w.shape, _nearest(w_KN, row_format("rtn", w_KN, fmt)))
        if method == "gptq":
            q = gptq(w_KN, statistics, fmt, order="activations", clip=True)
            return QuantKernel(w.shape, q)
        return QuantKernel(w.shape, *awq(w_KN, statistics, fmt))
    except UserError as error:
        raise UserError(f"{n}: {error}") from None


@functools.partial(jax.jit, static_argnums=1)
def _nearest(w_KN: Any, fmt: Format) -> QTensor:
    return quantize(w_KN, fmt)
