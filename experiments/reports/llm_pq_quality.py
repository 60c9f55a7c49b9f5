"""What few bits cost a trained model: indicators against measured loss, and ways of rounding.

Every matrix is rounded by itself to dense numbers that its codes stand for, so that one compiled
program measures the held-out loss of every plan.

Legend: K inputs of a product, N outputs.
"""

import dataclasses
import functools
import importlib.util
import itertools
import math
import statistics as means
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from experiments.reports.llm_pq_run import format_of
from megajax.core.errors import UserError
from megajax.core.hardware import MixedCluster
from megajax.core.mesh import MeshSpec
from megajax.core.tree import Tree
from megajax.models.decoder_config import DecoderConfig
from megajax.parallel import sharding
from megajax.quant import Statistics, awq, dequantize, gptq, quantize, sensitivity
from megajax.quant.formats import Format
from megajax.quant.indicators import INDICATORS, Indicator
from megajax.quant.quantized_model import inputs_of, matrices
from megajax.systems.llm_pq import PRESETS, Problem, solve
from megajax.systems.llm_pq.planning import CONTEXT_BYTES, USABLE, Workload, problem_of
from megajax.systems.llm_pq.problem import Placement
from megajax.systems.llm_pq.quality import (
    calibrate,
    expected_loss,
    leaf_of,
    loss_of,
    windows,
    with_leaves,
)
from megajax.systems.llm_pq.rivals import Rival, rivals
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
        """The held-out loss before rounding, nats a token."""
        return loss_of(self.params, self.cfg, self.judged)

    def matrices(self) -> Iterator[tuple[str, int, Array, Statistics, tuple[int, ...]]]:
        """Yields (leaf, layer, w_KN, statistics of its inputs, shape of the leaf's layer)."""
        for name in matrices(self.cfg.axes):
            leaf, words = leaf_of(self.params, name), leaf_of(self.cfg.axes, name)
            for layer in range(self.cfg.layers):
                w = jnp.asarray(leaf[layer])
                statistics = jax.tree.map(
                    lambda x, i=layer: jnp.asarray(x[i]), self.calibration[name]
                )
                yield name, layer, w.reshape(inputs_of(words[1:], w.shape), -1), statistics, w.shape


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


def rounded(model: Subject, rounding: Rounding, fmt: Format) -> tuple[Tree, float]:
    """Returns (the stacked layers with rounded matrices, the squared error of all products)."""
    leaves: dict[str, list[Array]] = {}
    error = 0.0
    for name, _, w_KN, statistics, shape in model.matrices():
        q_KN = rounding(w_KN, statistics, fmt)
        error += float(statistics.error(q_KN - w_KN))
        leaves.setdefault(name, []).append(q_KN.reshape(shape))
    return with_leaves(model.params, {name: jnp.stack(x) for name, x in leaves.items()}), error


def in_each_width(model: Subject, rounding: Rounding) -> dict[int, Tree]:
    """Returns {width: the parameters with all matrices rounded to it}; 16: not rounded."""
    by_width = {16: model.params}
    for width in WIDTHS[:-1]:
        fmt = format_of(width)
        assert fmt is not None
        by_width[width] = rounded(model, rounding, fmt)[0]
    return by_width


def measured_alone(model: Subject, params: Mapping[int, Tree]) -> np.ndarray:
    """Returns (layers, widths): the rise of the loss on training text if one layer alone is
    rounded.

    The change by 8 bits is too small to be measured on a few rows of text. It is computed from that
    by 4 bits, by the square of the ratio of the steps.
    """
    names, L = matrices(model.cfg.axes), model.cfg.layers
    text = model.learnt[: min(ALONE, len(model.learnt))]
    dense, rise = loss_of(model.params, model.cfg, text), np.zeros((L, len(WIDTHS)))
    for place, width in enumerate(WIDTHS[:2]):
        for layer in range(L):
            mixed = in_widths(params, names, [width if k == layer else 16 for k in range(L)])
            rise[layer, place] = max(loss_of(mixed, model.cfg, text) - dense, 0.0)
    rise[:, 2] = rise[:, 1] * (7 / 127) ** 2
    return rise


def in_widths(params: Mapping[int, Tree], names: Sequence[str], bits: Sequence[int]) -> Tree:
    """Returns the parameters whose layer l is that of params[bits[l]]."""
    first = params[bits[0]]
    leaves = {
        name: jnp.stack([leaf_of(params[b], name)[layer] for layer, b in enumerate(bits)])
        for name in names
    }
    return with_leaves(first, leaves)


def to_nearest(w_KN: Array, statistics: Statistics, fmt: Format) -> Array:
    """Rounds each number by itself."""
    return dequantize(quantize(w_KN, fmt))


def by_gptq(w_KN: Array, statistics: Statistics, fmt: Format, **options: Any) -> Array:
    """Rounds row by row; see quant.gptq."""
    return dequantize(gptq(w_KN, statistics, fmt, **options))


def by_awq(w_KN: Array, statistics: Statistics, fmt: Format) -> Array:
    """Rounds the weights after scaling by the inputs' magnitudes; see quant.awq."""
    q, scale_K = awq(w_KN, statistics, fmt)
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


def indicator_rows(model: Subject, count: int, seed: int) -> list[dict[str, Any]]:
    """Returns a row for each kind of plans: the indicators, and the measured changes of the
    loss."""
    params = in_each_width(model, to_nearest)
    omega = {name: omega_of(model, name) for name in SAID if name != "alone"}
    omega["alone"] = measured_alone(model, params)
    others = [omega_of(model, "random", draw) for draw in range(DRAWS)]
    rows = []
    for kind, drawn in plans(model.cfg.layers, count, seed).items():
        changes = []
        for bits in drawn:
            mixed = in_widths(params, matrices(model.cfg.axes), bits)
            changes.append(loss_of(mixed, model.cfg, model.judged) - model.dense)
        said = {name: [_sum(table, bits) for bits in drawn] for name, table in omega.items()}
        ranks = {n: _spearman(said[n], changes) for n in SAID if n != "random"}
        ranks["random"] = means.mean(
            _spearman([_sum(table, bits) for bits in drawn], changes) for table in others
        )
        rows.append(
            {
                "model": model.name,
                "plans": kind,
                "count": len(drawn),
                "loss_dense": model.dense,
                "largest_change": max(changes),
                **{f"spearman_{n}": r for n, r in ranks.items()},
                "bits": [list(bits) for bits in drawn],
                "loss_change": changes,
                "said": said,
            }
        )
    return rows


def rounding_rows(
    model: Subject, widths: Sequence[int], group: int, roundings: Mapping[str, Rounding]
) -> Iterator[dict[str, Any]]:
    """Yields a row for each width and way of rounding: held-out loss, and the products' error."""
    for width, (name, rounding) in itertools.product(widths, roundings.items()):
        fmt = Format(width, group, 0, scale_dtype="float16")
        row: dict[str, Any] = {
            "model": model.name,
            "bits": width,
            "group": group,
            "method": name,
            "loss_dense": model.dense,
        }
        try:
            params, error = rounded(model, rounding, fmt)
        except NotImplementedError as reason:
            yield row | {"loss_change": None, "product_error": None, "why": str(reason)}
            continue
        change = loss_of(params, model.cfg, model.judged) - model.dense
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


def omega_of(model: Subject, indicator: str, seed: int = 0) -> np.ndarray:
    """Returns (layers, widths) of an indicator, summed over a layer's matrices."""
    formats = [format_of(width) for width in WIDTHS]
    if indicator == "curvature":
        return expected_loss(model.params, model.cfg, model.learnt, formats)
    omega, kind = np.zeros((model.cfg.layers, len(WIDTHS))), cast(Indicator, indicator)
    for name, layer, w_KN, statistics, _ in model.matrices():
        for place, fmt in enumerate(formats):
            omega[layer, place] += sensitivity(
                w_KN, statistics, fmt, kind, name=f"{name} {layer}", seed=seed
            )
    return omega


def _sum(omega: np.ndarray, bits: Sequence[int]) -> float:
    return float(sum(omega[layer, WIDTHS.index(b)] for layer, b in enumerate(bits)))


def _spearman(said: Sequence[float], measured: Sequence[float]) -> float:
    return float(stats.spearmanr(said, measured).statistic)


# ---- plans of equal loss
#
# Plans of equal MEASURED held-out loss: ours beside PipeEdge's partition, for a trained model.
#
# The cluster of a preset is scaled down to the trained model: all devices keep their speeds and
# their shares of the memory, whose sum has room for the same share of the weights beside caches,
# embedding and head. Omega is what rounding one layer alone costs on text that is learnt. A rival
# has one width. Several budgets of the sum of omega are tried, the loss of each plan is measured,
# and the fastest plan whose measured loss is at most the rival's is compared. Tokens a second are
# SIMULATED with the cost model's assumed efficiencies; the losses are measured.


STEP = 4.0  # (chosen) from one budget of omega to the next, until one loses more or less
CLOSE = 1.1  # (chosen) of budgets between which no other is tried
TRIES = 8  # (chosen) budgets for a rival's loss
NOISE = 1e-3  # (chosen) nats that losses may differ by and count as equal: 8 bits change as much
COMPARED = ("uniform", "pipeedge", "pipeedge_tuned")


def scaled_down(cluster: MixedCluster, large: Workload, small: Workload) -> MixedCluster:
    """Returns the cluster whose memory is as tight, in sum, for the small model."""
    theirs, ours = problem_of(large, cluster), problem_of(small, cluster)
    taken = theirs.layers * theirs.cache_bytes + theirs.first_bytes + theirs.last_bytes
    room = (theirs.memory.sum() - taken) / theirs.layers
    share = min(max(room, theirs.layer_bytes.min()) / theirs.layer_bytes.max(), 1.0)
    layer = ours.cache_bytes + share * ours.layer_bytes.max()
    total = ours.layers * layer + ours.first_bytes + ours.last_bytes
    cards = tuple(
        dataclasses.replace(card, memory_bytes=int((m + CONTEXT_BYTES) / USABLE) + 1)
        for card, m in zip(cluster.cards, total * theirs.memory / theirs.memory.sum(), strict=True)
    )
    return dataclasses.replace(cluster, cards=cards)


def rows(
    model: Subject, cases: Sequence[str], methods: Sequence[str], time_limit_s: float
) -> Iterator[dict[str, Any]]:
    """Yields a row for each case, way of rounding and rival."""
    for method in methods:
        params = in_each_width(model, OURS[method])
        omega = measured_alone(model, params)
        measure = measurer(model, params)
        for case in cases:
            workload, cluster = PRESETS[case]
            small = dataclasses.replace(
                workload,
                name=model.name,
                stack=model.cfg.stack,
                vocab=model.cfg.padded_vocab,
                positions=0,
                omega=omega,
            )
            problem = problem_of(small, scaled_down(cluster, workload, small))
            about = {"model": model.name, "case": case, "cluster": cluster.name, "method": method}
            known: dict[tuple[int, ...], list[dict[str, Any]]] = {}
            for rival in rivals(problem):
                if rival.name not in COMPARED or rival.omega == 0:
                    continue
                if rival.bits not in known:
                    known[rival.bits] = tried(problem, rival, measure, time_limit_s)
                yield about | compared(rival, measure(rival.bits), known[rival.bits])


def measurer(model: Subject, params: Mapping[int, Tree]) -> Callable[[Sequence[int]], float]:
    """Returns a function that measures the change of the held-out loss for given widths, each
    once."""
    names = matrices(model.cfg.axes)
    known: dict[tuple[int, ...], float] = {}

    def measure(bits: Sequence[int]) -> float:
        if (key := tuple(bits)) not in known:
            mixed = in_widths(params, names, key)
            known[key] = loss_of(mixed, model.cfg, model.judged) - model.dense
        return known[key]

    return measure


def tried(
    problem: Problem, rival: Rival, measure: Callable[[Sequence[int]], float], time_limit_s: float
) -> list[dict[str, Any]]:
    """Returns our plans with their measured losses.

    Budgets of the sum of omega begin at the rival's and grow while the loss is no larger than the
    rival's, or shrink until it is; then they halve the range in between.
    """
    candidates, limit, budget = [], measure(rival.bits) + NOISE, rival.omega
    low, high, none = 0.0, math.inf, 0.0  # budgets that lose no more, lose more, have no plan
    for _ in range(TRIES):
        try:
            placement = solve(problem, quality=budget, time_limit_s=time_limit_s)
        except UserError:
            none = budget
        else:
            change = measure(placement.bits)
            candidates.append(_plan(placement, change) | {"budget": budget})
            print(
                f"    sum of omega {budget:.4g}: {change:+.4f} nats, "
                f"{placement.tokens_per_s:.0f} tokens/s",
                flush=True,
            )
            low, high = (budget, high) if change <= limit else (low, budget)
        bottom = max(low, none)
        if bottom > 0 and high < math.inf:
            if high < CLOSE * bottom:
                break
            budget = (bottom * high) ** 0.5
        else:
            budget = bottom * STEP if bottom > 0 else high / STEP
    return candidates


def _plan(placement: Placement, change: float) -> dict[str, Any]:
    return {
        "stages": [list(s) for s in placement.stages],
        "bits": list(placement.bits),
        "prefill_batch": placement.prefill_batch,
        "decode_batch": placement.decode_batch,
        "omega": placement.omega,
        "gap": placement.gap,
        "loss_change": change,
        "tokens_per_s": placement.tokens_per_s,
    }


def compared(rival: Rival, change: float, plans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a rival beside the fastest plan that loses no more."""
    good = [plan for plan in plans if plan["loss_change"] <= change + NOISE]
    ours = max(good, key=lambda plan: plan["tokens_per_s"], default=None)
    theirs = rival.times.tokens_per_s
    return {
        "rival": rival.name,
        "rival_bits": sorted(set(rival.bits)),
        "rival_loss_change": change,
        "rival_tokens_per_s": theirs,
        "tried": list(plans),
        "ours": ours,
        "mean_bits": None if ours is None else float(np.mean(ours["bits"])),
        "loss_change": None if ours is None else ours["loss_change"],
        "tokens_per_s": None if ours is None else ours["tokens_per_s"],
        "speedup": None if ours is None else ours["tokens_per_s"] / theirs,
    }


def told_equal(row: Mapping[str, Any]) -> str:
    """Returns a row for the console."""
    theirs = (
        f"  {row['case']}, {row['method']}, {row['rival']} at {row['rival_bits'][0]} bits: "
        f"{row['rival_loss_change']:+.4f} nats, {row['rival_tokens_per_s']:.0f} tokens/s; "
    )
    if row["ours"] is None:
        return theirs + "no plan of ours loses as little"
    return theirs + (
        f"ours {row['loss_change']:+.4f} nats, {row['tokens_per_s']:.0f} tokens/s: "
        f"{row['speedup']:.2f}x (simulated)"
    )


# ---- roundings of qwix
#
# qwix's GPTQ and AWQ (contrib) on the same matrices and the same calibration as ours.
#
# qwix takes the transposed weight. Its symmetric codes reach from -8 to 7 in 4 bits, with a step of
# amax / 7.5, ours from -7 to 7; its scales are float32, ours float16.


_TYPES: dict[int, Any] = {3: "int3", 4: jnp.int4, 8: jnp.int8}


def roundings() -> dict[str, Any]:
    """Returns {name: rounding}. Raises: UserError where qwix is not installed."""
    if importlib.util.find_spec("qwix") is None:
        raise UserError("the rival qwix is not installed: uv sync --group rivals (--rivals)")
    return {"qwix rtn": qwix_to_nearest, "qwix gptq": qwix_by_gptq, "qwix awq": qwix_by_awq}


def _how(fmt: Format, inputs: int) -> Any:
    from qwix._src.core import qarray  # pyrefly: ignore[missing-import]

    return qarray.HowToQuantize(
        qtype=_TYPES[fmt.width], channelwise_axes=[0], tiled_axes={1: fmt.group_of(inputs)}
    )


def qwix_to_nearest(w_KN: Array, statistics: Statistics, fmt: Format) -> Array:
    """Rounds each number by itself."""
    from qwix._src.core import qarray  # pyrefly: ignore[missing-import]

    return qarray.dequantize(qarray.quantize(w_KN.T, _how(fmt, len(w_KN)))).T


def qwix_by_gptq(w_KN: Array, statistics: Statistics, fmt: Format) -> Array:
    """Rounds column by column of the transposed weight.

    Raises: NotImplementedError for 3 bits, which its GPTQ does not take.
    """
    if isinstance(_TYPES[fmt.width], str):
        raise NotImplementedError(f"qwix's GPTQ has no {fmt.width} bits")
    return _gptq(w_KN, statistics.h_KK, fmt)


@functools.partial(jax.jit, static_argnums=2)  # a program of its own for every column, if not
def _gptq(w_KN: Array, h_KK: Array, fmt: Format) -> Array:
    from qwix._src.core import qarray  # pyrefly: ignore[missing-import]
    from qwix.contrib import gptq_core  # pyrefly: ignore[missing-import]

    q, _ = gptq_core.quantize_weight(w_KN.T, h_KK, _how(fmt, len(w_KN)))
    return qarray.dequantize(q).T


def qwix_by_awq(w_KN: Array, statistics: Statistics, fmt: Format) -> Array:
    """Rounds the weights after scaling by the inputs' magnitudes."""
    from qwix._src.core import qarray  # pyrefly: ignore[missing-import]
    from qwix.contrib import awq_core  # pyrefly: ignore[missing-import]

    magnitude_K = statistics.absolute_K / statistics.count
    q, scale_1K = awq_core.quantize_weight(w_KN.T, magnitude_K, _how(fmt, len(w_KN)))
    return (qarray.dequantize(q) / scale_1K).T
