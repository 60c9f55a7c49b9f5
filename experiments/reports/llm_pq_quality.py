"""What few bits cost a trained model: indicators against measured loss, and ways of rounding.

Every matrix is rounded by itself to dense numbers that its codes stand for, so that one compiled
program measures the held-out loss of every plan.

Legend: K inputs of a product, N outputs.
"""

import functools
import itertools
import statistics as means
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from experiments.reports.llm_pq_run import format_of
from megajax.core.mesh import MeshSpec
from megajax.core.tree import Tree
from megajax.models.decoder_config import DecoderConfig
from megajax.parallel import sharding
from megajax.quant import Statistics, awq, dequantize, gptq, quantize, sensitivity
from megajax.quant.formats import Format
from megajax.quant.indicators import INDICATORS, Indicator
from megajax.quant.quantized_model import inputs_of, matrices
from megajax.systems.llm_pq.calibrate import calibrate, leaf_of, with_leaves
from megajax.systems.llm_pq.quality import expected_loss, loss_of, windows
from megajax.systems.open_model import OpenModel

Array = jax.Array
Rounding = Callable[[Array, Statistics, Format], Array]
WIDTHS = (3, 4, 8, 16)
SAID = (*INDICATORS, "curvature", "alone")
ALONE = 8  # (chosen) rows on which one layer at a time is rounded
DRAWS = 20  # (chosen) of the indicator that knows nothing


@dataclass(frozen=True)
class Subject:
    """A trained model, text that it learns from, its statistics on it, and held-out text."""

    name: str
    cfg: DecoderConfig
    params: Tree
    learnt: np.ndarray
    judged: np.ndarray
    calibration: Mapping[str, Statistics]

    @functools.cached_property
    def dense(self) -> float:
        """The held-out loss before, nats a token."""
        return loss_of(self.params, self.cfg, self.judged)

    def matrices(self) -> Iterator[tuple[str, int, Array, Statistics, tuple[int, ...]]]:
        """Yields (leaf, layer, w_KN, statistics of its inputs, shape of the leaf's layer)."""
        for name in matrices(self.cfg.axes):
            leaf, words = leaf_of(self.params, name), leaf_of(self.cfg.axes, name)
            for layer in range(self.cfg.layers):
                w = jnp.asarray(leaf[layer])
                own = jax.tree.map(lambda x, i=layer: jnp.asarray(x[i]), self.calibration[name])
                yield name, layer, w.reshape(inputs_of(words[1:], w.shape), -1), own, w.shape


def subject(opened: OpenModel, rows: int, length: int, seed: int) -> Subject:
    """Reads a model, calibrates it on text that is learnt, and draws text that is not."""
    cfg = opened.cfg
    mesh = MeshSpec().build(jax.devices()[:1])
    params, what = opened.load(sharding.layout(mesh, "none", decode=True, model=cfg))
    params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params)  # on no mesh
    shape = rows, min(length, cfg.max_positions)
    learnt, judged = (
        windows("stdlib", opened.tokenizer, shape, held_out=held, seed=seed)
        for held in (False, True)
    )
    statistics = calibrate(params, cfg, [*learnt[:, None, :]])
    return Subject(opened.name, cfg, params, learnt, judged, statistics)


def rounded(given: Subject, rounding: Rounding, fmt: Format) -> tuple[Tree, float]:
    """Returns (the stacked layers with rounded matrices, the squared error of all products)."""
    leaves: dict[str, list[Array]] = {}
    error = 0.0
    for name, _, w_KN, own, shape in given.matrices():
        q_KN = rounding(w_KN, own, fmt)
        error += float(own.error(q_KN - w_KN))
        leaves.setdefault(name, []).append(q_KN.reshape(shape))
    return with_leaves(given.params, {name: jnp.stack(x) for name, x in leaves.items()}), error


def in_each_width(given: Subject, rounding: Rounding) -> dict[int, Tree]:
    """Returns {width: the parameters with all matrices in it}; 16: as they are."""
    found = {16: given.params}
    for width in WIDTHS[:-1]:
        fmt = format_of(width)
        assert fmt is not None
        found[width] = rounded(given, rounding, fmt)[0]
    return found


def measured_alone(given: Subject, params: Mapping[int, Tree]) -> np.ndarray:
    """Returns (layers, widths): how much the loss of learnt text rises if one layer is rounded.

    8 bits change less than the text of a few rows can tell: they are 4 bits' by the square of the
    step.
    """
    names, L = matrices(given.cfg.axes), given.cfg.layers
    text = given.learnt[: min(ALONE, len(given.learnt))]
    dense, found = loss_of(given.params, given.cfg, text), np.zeros((L, len(WIDTHS)))
    for place, width in enumerate(WIDTHS[:2]):
        for layer in range(L):
            mixed = in_widths(params, names, [width if k == layer else 16 for k in range(L)])
            found[layer, place] = max(loss_of(mixed, given.cfg, text) - dense, 0.0)
    found[:, 2] = found[:, 1] * (7 / 127) ** 2
    return found


def in_widths(params: Mapping[int, Tree], names: Sequence[str], bits: Sequence[int]) -> Tree:
    """Returns the parameters whose layer l is that of params[bits[l]]."""
    first = params[bits[0]]
    leaves = {
        name: jnp.stack([leaf_of(params[b], name)[layer] for layer, b in enumerate(bits)])
        for name in names
    }
    return with_leaves(first, leaves)


def to_nearest(w_KN: Array, own: Statistics, fmt: Format) -> Array:
    """Rounds each number by itself."""
    return dequantize(quantize(w_KN, fmt))


def by_gptq(w_KN: Array, own: Statistics, fmt: Format, **options: Any) -> Array:
    """Rounds row by row; see quant.gptq."""
    return dequantize(gptq(w_KN, own, fmt, **options))


def by_awq(w_KN: Array, own: Statistics, fmt: Format) -> Array:
    """Rounds what the inputs' magnitudes have scaled; see quant.awq."""
    q, scale_K = awq(w_KN, own, fmt)
    return dequantize(q) / scale_K[:, None]


OURS: dict[str, Rounding] = {
    "rtn": to_nearest,
    "gptq": by_gptq,
    "gptq_order": functools.partial(by_gptq, order="activations"),
    "gptq_clip": functools.partial(by_gptq, order="activations", clip=True),
    "awq": by_awq,
}


def plans(layers: int, count: int, seed: int) -> dict[str, list[tuple[int, ...]]]:
    """Returns random plans, and plans of equal bytes: the same widths in other orders."""
    rng = np.random.default_rng(seed)
    drawn: list[tuple[int, ...]] = []
    while len(drawn) < count:
        plan = tuple(int(b) for b in rng.choice(WIDTHS, layers))
        if plan not in drawn:
            drawn.append(plan)
    multiset = [WIDTHS[i % len(WIDTHS)] for i in range(layers)]
    if layers <= 5:
        alike = sorted(set(itertools.permutations(multiset)))
    else:
        alike = [tuple(rng.permutation(multiset).tolist()) for _ in range(count)]
    return {"random": drawn, "equal bytes": alike}


def indicator_rows(given: Subject, count: int, seed: int) -> list[dict[str, Any]]:
    """Returns a row for each kind of plans: what each indicator says, and what was measured."""
    params = in_each_width(given, to_nearest)
    omega = {name: omega_of(given, name) for name in SAID if name != "alone"}
    omega["alone"] = measured_alone(given, params)
    others = [omega_of(given, "random", draw) for draw in range(DRAWS)]
    rows = []
    for kind, drawn in plans(given.cfg.layers, count, seed).items():
        changes = []
        for bits in drawn:
            mixed = in_widths(params, matrices(given.cfg.axes), bits)
            changes.append(loss_of(mixed, given.cfg, given.judged) - given.dense)
        said = {name: [_sum(table, bits) for bits in drawn] for name, table in omega.items()}
        found = {n: _spearman(said[n], changes) for n in SAID if n != "random"}
        found["random"] = means.mean(
            _spearman([_sum(table, bits) for bits in drawn], changes) for table in others
        )
        rows.append({
            "model": given.name, "plans": kind, "count": len(drawn), "loss_dense": given.dense,
            "largest_change": max(changes), **{f"spearman_{n}": r for n, r in found.items()},
            "bits": [list(bits) for bits in drawn], "loss_change": changes, "said": said,
        })  # fmt: skip
    return rows


def rounding_rows(
    given: Subject, widths: Sequence[int], group: int, roundings: Mapping[str, Rounding]
) -> Iterator[dict[str, Any]]:
    """Yields a row for each width and way of rounding: held-out loss, and the products' error."""
    for width, (name, rounding) in itertools.product(widths, roundings.items()):
        fmt = Format(width, group, 0, scale_dtype="float16")
        row: dict[str, Any] = {"model": given.name, "bits": width, "group": group, "method": name,
                               "loss_dense": given.dense}  # fmt: skip
        try:
            params, error = rounded(given, rounding, fmt)
        except NotImplementedError as reason:
            yield row | {"loss_change": None, "product_error": None, "why": str(reason)}
            continue
        change = loss_of(params, given.cfg, given.judged) - given.dense
        yield row | {"loss_change": change, "product_error": error}


def told(row: Mapping[str, Any]) -> str:
    """Returns a row for the console."""
    if "plans" in row:
        ranks = ", ".join(f"{n} {row[f'spearman_{n}']:.3f}" for n in SAID)
        return f"  {row['count']} plans, {row['plans']}: {ranks}"
    what = f"  {row['bits']} bits, group {row['group']}, {row['method']}: "
    if row["loss_change"] is None:
        return what + row["why"]
    return what + f"{row['loss_change']:+.4f} nats, error {row['product_error']:.4g}"


def omega_of(given: Subject, indicator: str, seed: int = 0) -> np.ndarray:
    """Returns (layers, widths) of an indicator, summed over a layer's matrices."""
    formats = [format_of(width) for width in WIDTHS]
    if indicator == "curvature":
        return expected_loss(given.params, given.cfg, given.learnt, formats)
    found, kind = np.zeros((given.cfg.layers, len(WIDTHS))), cast(Indicator, indicator)
    for name, layer, w_KN, own, _ in given.matrices():
        for place, fmt in enumerate(formats):
            found[layer, place] += sensitivity(
                w_KN, own, fmt, kind, name=f"{name} {layer}", seed=seed
            )
    return found


def _sum(omega: np.ndarray, bits: Sequence[int]) -> float:
    return float(sum(omega[layer, WIDTHS.index(b)] for layer, b in enumerate(bits)))


def _spearman(said: Sequence[float], measured: Sequence[float]) -> float:
    return float(stats.spearmanr(said, measured).statistic)
