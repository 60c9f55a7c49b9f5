"""What few bits on the wire cost a small GPT: runs, gaps to the float32 exchange, verdicts.

One model is trained by the steps of every training run (training/step.py) on emulated devices,
mesh node x data, on the bytes of Python's standard library, once for each variant of the exchange
and each seed. Variants are flags of any training command (VARIANTS). A seed gives parameters and
order of the data; all variants see the same tokens in the same order, so gaps are taken seed by
seed. Source: SDP4Bit (arXiv 2410.15526), section 4 and its table 1.

Legend: N seeds.
"""

import dataclasses
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.core.config import override
from megajax.core.errors import UserError
from megajax.core.files import or_nan
from megajax.core.mesh import MeshSpec
from megajax.core.tree import Tree
from megajax.data.corpus import open_corpora
from megajax.data.loader import held_out_batches, host_rows, place, training_rows
from megajax.monitor import results
from megajax.training.config import Config, TrainConfig
from megajax.training.evaluate import evaluate
from megajax.training.gradients import WIRE, exchange_of
from megajax.training.optim import OptimConfig
from megajax.training.step import make_train_step
from megajax.training.task import TrainState

Row = dict[str, Any]

FLOAT32 = "float32"
# Variant -> the fields that make it; exchange.x is the flag --wire.x. All have whole weights on
# every rank, as the paper does (--shard.zero=optimizer).
VARIANTS: dict[str, dict[str, Any]] = {
    FLOAT32: {"wire": "none"},
    "qW": {"wire": "sdp4bit", "exchange.gradients": "float32", "exchange.difference": False},
    "qWD": {"wire": "sdp4bit", "exchange.gradients": "float32"},
    "TLq": {"wire": "sdp4bit", "exchange.weights": "float32", "exchange.hadamard": False},
    "TLq-HS": {"wire": "sdp4bit", "exchange.weights": "float32"},
    "SDP4Bit": {"wire": "sdp4bit"},
    "ZeRO++": {"wire": "zeropp"},
    "LoCo": {"wire": "loco"},
    "fp8": {"wire": "fp8"},
}
WHAT = {
    FLOAT32: "nothing quantized",
    "qW": "weights in 4 bits, as they are",
    "qWD": "differences of weights in 4 bits",
    "TLq": "gradients in 8 and 4 bits",
    "TLq-HS": "the same, transformed (Hadamard)",
    "SDP4Bit": "qWD and TLq-HS",
    "ZeRO++": "weights in 8 bits, gradients in 4",
    "LoCo": "gradients in 4 bits, with error feedback",
    "fp8": "weights and gradients in e4m3",
}
# Validation losses of the paper's table 1: Pile, 80,000 iterations.
PAPER = {
    "125M": {
        FLOAT32: 2.29392, "qW": 2.57312, "qWD": 2.29274, "TLq": 2.30479, "TLq-HS": 2.29528,
        "SDP4Bit": 2.29590,
    },
    "350M": {
        FLOAT32: 2.08719, "qW": 2.27405, "qWD": 2.08730, "TLq": 2.09551, "TLq-HS": 2.08912,
        "SDP4Bit": 2.08964,
    },
    "1.3B": {
        FLOAT32: 1.92774, "qW": 2.04608, "qWD": 1.92881, "TLq": 1.95075, "TLq-HS": 1.93134,
        "SDP4Bit": 1.93238,
    },
}  # fmt: skip
WITHIN = 0.5  # percent: SDP4Bit's gap is to stay below (the paper's largest is 0.24)
AIM = 0.24
FAR = 4.0  # times: what counts as `much worse` (chosen; the paper's least, at 1.3B, is 5.1)
KEYS = 100_000  # steps between the random numbers of two seeds; no run is as long


# ---- runs


@dataclasses.dataclass(frozen=True)
class Study:
    """One model and its data. held_out: batches; evals: how often they are read."""

    layers: int
    width: int
    steps: int
    batch: int
    seq_len: int
    nodes: int
    ranks: int
    held_out: int
    evals: int

    @property
    def tokens(self) -> int:
        """Tokens of one run."""
        return self.steps * self.batch * self.seq_len


def job(study: Study, variant: str, cache_dir: str = "~/.cache/megajax") -> Config:
    """Returns the training configuration of a variant.

    Optimizer and clipping are the paper's: Adam (0.9, 0.95), decay 0.1, norm 1, a cosine after
    warm-up. The rate is the library's own for a model of this size.
    """
    cfg = Config(
        mesh=MeshSpec(node=study.nodes, data=study.ranks),
        train=TrainConfig(study.steps, study.batch, study.seq_len),
        optim=OptimConfig(warmup=max(study.steps // 20, 1)),
        cache_dir=cache_dir,
    )
    heads = max(study.width // 32, 1)
    size = {
        "model.layers": study.layers, "model.width": study.width, "model.mlp": 3 * study.width,
        "model.heads": heads, "model.kv_heads": heads, "shard.zero": "optimizer",
    }  # fmt: skip
    return override(cfg, size | VARIANTS[variant])


class Runner:
    """The compiled functions of one variant, for all its seeds."""

    def __init__(self, study: Study, variant: str, cache_dir: str):
        """Opens the text and builds the step."""
        self.study, self.variant = study, variant
        self.cfg = job(study, variant, cache_dir)
        self.step = make_train_step(self.cfg, self.cfg.mesh.build())
        self._corpora, _ = open_corpora(self.cfg.data, cache_dir, vocab=self.cfg.model.vocab)
        like = self.step.abstract_eval_batch
        most = study.held_out * self.cfg.train.global_batch
        self._held_out = list(held_out_batches(self._corpora, like, most))
        with jax.set_mesh(self.step.layout.mesh):
            self._exchange = exchange_of(self.cfg, self.step.parts, self.step.layout)
        self._send = jax.jit(self._weights)

    def used(self, state: TrainState) -> Tree:
        """Returns the weights that the next step would use, cut as the masters are.

        They are what the ranks have of the masters once these went over the wire.
        """
        with jax.set_mesh(self.step.layout.mesh):
            return jax.block_until_ready(self._send(state))

    def _weights(self, state: TrainState) -> Tree:
        assert self._exchange is not None
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), state.step), WIRE)
        weights = self._exchange.gather(state.params, state.copies, key)[0]
        return jax.tree.map(
            lambda w, like: jax.sharding.reshard(w, like.sharding.spec).astype(like.dtype),
            weights,
            self.step.abstract_state.params,
        )

    def loss(self, params: Tree) -> float:
        """Returns the held-out loss, nats a token.

        One program at a time: emulated devices share few threads, and of many programs in flight
        one may wait for a device whose threads all wait in another.
        """
        found = [evaluate(self.step, params, [batch], None) for batch in self._held_out]
        count = sum(int(one["eval_tokens"] or 0) for one in found)
        return (
            sum(float(one["eval_loss"] or 0) * (one["eval_tokens"] or 0) for one in found) / count
        )

    def batches(self, seed: int) -> Iterator[tuple[Mapping[str, np.ndarray], dict]]:
        """Yields the batches of a run: on the host, and placed."""
        study, like = self.study, self.step.abstract_batch
        rows, mine = training_rows(self._corpora, study.seq_len, seed), host_rows(like["tokens"])
        for number in range(study.steps):
            found = [rows[number * study.batch + int(i)] for i in mine]
            host = {name: np.stack([row[name] for row in found]) for name in like}
            yield host, place(host, like, mine)

    def run(self, seed: int) -> Row:
        """Trains one model. Returns its row.

        loss: of the weights in use, which the paper's own validation reads; loss_masters: of the
        float32 masters, which a checkpoint gives away. data: a checksum of all tokens, in order.
        """
        study, checksum = self.study, 0
        state = self.step.init(seed)
        # The step's key is that of its number, so each seed rounds by random numbers of its own;
        # rates count in the optimizer's state.
        state = dataclasses.replace(state, step=state.step + seed * KEYS)
        due = {round(study.steps * (i + 1) / study.evals) for i in range(study.evals)}
        steps, losses, drift = [], [], 0.0
        for number, (host, batch) in enumerate(self.batches(seed), 1):
            checksum = zlib.crc32(host["tokens"].tobytes(), checksum)
            state, metrics = jax.block_until_ready(self.step.step(state, batch))  # as in `loss`
            if number in due:
                drift = max(drift, float(metrics["wire_drift_relative"]))
                steps.append(number)
                losses.append(self.loss(self.used(state)))
        return {
            "part": "run", "variant": self.variant, "seed": seed, "loss": losses[-1],
            "loss_masters": self.loss(state.params), "drift": drift, "tokens": study.tokens,
            "data": f"{checksum:08x}", "steps": steps, "losses": losses,
            "commit": results.commit(),
        }  # fmt: skip


def saved(folder: Path, variant: str, seed: int) -> Path:
    """Returns the file of one run, which is there once the run is done."""
    return folder / f"{variant}-{seed}.json"


def read(path: Path) -> Row | None:
    """Returns the run of a file; None: it was not done yet. Raises: UserError."""
    try:
        (row,) = json.loads(path.read_text())["rows"]
        for name in ("loss", "loss_masters", "drift"):
            row[name] = or_nan(row[name])  # null: of a run that diverged
        row["losses"] = [or_nan(loss) for loss in row["losses"]]
        _check_run(row)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} holds no run: {error!r}; remove it (--state)") from None
    return row


# ---- gaps


def _check_run(row: Row) -> None:
    """Raises: ValueError, KeyError."""
    if row["part"] != "run" or row["variant"] not in VARIANTS:
        raise ValueError(f"part {row['part']!r}, variant {row['variant']!r}")
    if not isinstance(row["seed"], int) or not isinstance(row["data"], str):
        raise ValueError(f"seed {row['seed']!r}, data {row['data']!r}")
    if not all(isinstance(row[name], float) for name in ("loss", "loss_masters", "drift")):
        raise ValueError("a loss is no number")


def by_seed(runs: Sequence[Row]) -> dict[str, dict[int, Row]]:
    """Returns {variant: {seed: run}}.

    Raises: UserError where two runs have the same place, or runs of one seed did not read the same
    tokens in the same order: their gap would not be that of the wire.
    """
    found: dict[str, dict[int, Row]] = {}
    data: dict[int, tuple] = {}
    for row in runs:
        _check_run(row)
        variant, seed = row["variant"], row["seed"]
        if seed in found.setdefault(variant, {}):
            raise UserError(f"two runs of {variant}, seed {seed}")
        mine = row["tokens"], row["data"]
        if data.setdefault(seed, mine) != mine:
            raise UserError(
                f"{variant}, seed {seed} read other data than runs before it: {mine}, not "
                f"{data[seed]}"
            )
        found[variant][seed] = row
    return found


def paired(
    found: Mapping[str, Mapping[int, Row]], variant: str, base: str, name: str = "loss"
) -> list[float]:
    """Returns the differences of two variants in percent of the float32 exchange's loss, a seed
    each, of the seeds that all three have."""
    seeds = found[variant].keys() & found[base].keys() & found[FLOAT32].keys()
    return [
        100 * (found[variant][s][name] - found[base][s][name]) / found[FLOAT32][s][name]
        for s in sorted(seeds)
    ]


def mean_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns (the mean, its standard error; None of a single value). NaN: one is not finite."""
    if not np.isfinite(values).all():
        return math.nan, math.nan
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None
    return mean, float(np.std(values, ddof=1)) / math.sqrt(len(values))


def paper_gaps(variant: str) -> dict[str, float]:
    """Returns {model: percent above the baseline} of the paper's table 1; {}: it has none."""
    return {
        model: 100 * (losses[variant] / losses[FLOAT32] - 1)
        for model, losses in PAPER.items()
        if variant in losses
    }


def gaps(runs: Sequence[Row]) -> Iterator[Row]:
    """Yields a row for each variant: losses, gaps to the float32 exchange, the paper's beside."""
    found = by_seed(runs)
    if FLOAT32 not in found:
        return
    for variant in (v for v in VARIANTS if v in found):
        percent = paired(found, variant, FLOAT32)
        if not percent:
            continue
        masters = paired(found, variant, FLOAT32, "loss_masters")
        seeds = found[variant].keys() & found[FLOAT32].keys()
        loss, loss_error = mean_error([found[variant][s]["loss"] for s in sorted(seeds)])
        gap, gap_error = mean_error(percent)
        masters_gap, masters_error = mean_error(masters)
        yield {
            "part": "gap", "variant": variant, "n": len(percent), "loss": loss,
            "loss_error": loss_error, "gap_percent": gap, "gap_error": gap_error,
            "masters_gap_percent": masters_gap, "masters_gap_error": masters_error,
            "drift": max(found[variant][s]["drift"] for s in seeds),
            "paper_percent": paper_gaps(variant),
        }  # fmt: skip


# ---- verdicts


def claims(runs: Sequence[Row]) -> Iterator[Row]:
    """Yields what the paper claims, as found here: met or not, and how sure.

    met: the mean over the seeds has the claimed sign or size. sure: it is more than two standard
    errors from the other side; None: one seed. Only of variants that there are runs of; a loss that
    is not finite meets nothing.
    """
    found = by_seed(runs)

    def verdict(what: str, values: Sequence[float], limit: float, above: bool) -> Row:
        mean, error = mean_error(values)
        distance = mean - limit if above else limit - mean
        return {
            "part": "claim", "what": what, "value": mean, "error": error, "limit": limit,
            "n": len(values), "met": bool(distance > 0),
            "sure": None if error is None else bool(distance > 2 * error),
        }  # fmt: skip

    def has(*variants: str) -> bool:
        common = set.intersection(*(set(found.get(v, ())) for v in (*variants, FLOAT32)))
        return bool(common)

    if has("SDP4Bit"):
        ours = paired(found, "SDP4Bit", FLOAT32)
        for limit in (WITHIN, AIM):
            yield verdict(f"SDP4Bit at most {limit:g} % above float32", ours, limit, False)
    for less, more in (("qWD", "TLq-HS"), ("TLq-HS", "TLq"), ("TLq", "qW"), ("SDP4Bit", "ZeRO++")):
        if has(less, more):
            yield verdict(f"{less} below {more}", paired(found, more, less), 0.0, True)
    if has("TLq", "qW"):
        # qW - FAR * TLq above 0, seed by seed: a quotient of gaps near 0 says nothing.
        both = zip(paired(found, "qW", FLOAT32), paired(found, "TLq", FLOAT32), strict=True)
        values = [qw - FAR * max(tlq, 0.0) for qw, tlq in both]
        yield verdict(f"qW's gap over {FAR:g} times TLq's", values, 0.0, True)
