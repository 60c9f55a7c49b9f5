"""Measures train steps on this machine and judges replays of them.

A step's prediction is a replay of its schedule with the times of its launched instructions and the
overheads of a call. Instructions have times from a profile of another process ("table"), from a
predictor that has not seen them, or from the roofline's assumed efficiencies. Overheads and the
width of the 90 % band are those of the other programs; nothing is fitted on the steps.
"""

import dataclasses
import gzip
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.stats import kendalltau, spearmanr

from experiments.reports.cdmpp import errors
from experiments.reports.reporting import (
    Columns,
    Row,
    markdown_table,
    panels,
    read,
    rows_of,
    rows_table,
    save,
    source,
)
from megajax.core import config
from megajax.core.errors import UserError, did_you_mean
from megajax.core.hardware import Cluster, DeviceCard
from megajax.core.mesh import MeshSpec, cache_programs
from megajax.cost.program import records
from megajax.cost.record import OpRecord
from megajax.models.encoder_config import EncoderConfig
from megajax.monitor import results
from megajax.systems.cdmpp import families, profile, step
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.labels import Labels
from megajax.systems.cdmpp.profile import Ready, Timed
from megajax.systems.cdmpp.step import Overheads, counts
from megajax.training.config import JobConfig, TrainConfig
from megajax.training.finetune import FinetuneConfig
from megajax.training.optim import OptimConfig
from megajax.training.presets import nano, nano_moe
from megajax.training.step import make_train_step

# ---- measurement
#
# Measures train steps twice: as whole calls, and instruction by instruction.
#
# Ten configurations of the trainer, small enough for one processor, go through `make_train_step`.
# Other programs (megajax/systems/cdmpp/families.py) are measured beside them; predictors and
# overheads are fitted on these only. `walls` times calls without a profiler; `parts` times every
# launched instruction with it. Each runs in a process of its own, so that the measured total of a
# step cannot enter its prediction.


SEED = 2311  # of the other programs; scripts/profile_programs.py takes another
_ADAMW = {"optim.name": "adamw"}


def bert() -> JobConfig:
    """Returns the configuration of an encoder of nano's size that learns hidden tokens."""
    train = TrainConfig(steps=160, global_batch=8, seq_len=64)
    return FinetuneConfig(EncoderConfig(), train=train, optim=OptimConfig(name="lamb"))


# Name -> (preset, what differs from it): ways in which steps differ, at 5 to 300 ms each.
CONFIGURATIONS: dict[str, tuple[Callable[[], JobConfig], dict[str, Any]]] = {
    "nano": (nano, {"train.global_batch": 8}),
    "short": (nano, {"train.global_batch": 2, "train.seq_len": 64, **_ADAMW}),
    "wide": (
        nano,
        {"model.width": 256, "model.heads": 8, "model.kv_heads": 2, "model.mlp": 768,
         "model.layers": 2, "train.global_batch": 4, **_ADAMW},
    ),
    "deep": (
        nano,
        {"model.width": 64, "model.heads": 2, "model.kv_heads": 2, "model.mlp": 192,
         "model.layers": 10, "train.global_batch": 4},
    ),
    "long": (nano, {"train.global_batch": 2, "train.seq_len": 512, **_ADAMW}),
    "accumulate": (nano, {"train.global_batch": 16, "train.seq_len": 64, "train.accumulate": 4}),
    "remat": (nano, {"train.global_batch": 8, "train.seq_len": 192, "train.remat": "full"}),
    "experts": (nano_moe, {"train.global_batch": 4, **_ADAMW}),
    "vocabulary": (
        nano,
        {"model.vocab": 4096, "model.tied": False, "model.layers": 2, "train.global_batch": 4,
         "train.loss_chunks": 4, "optim.name": "lamb"},
    ),
    "encoder": (bert, {}),
}  # fmt: skip


def configuration(name: str) -> JobConfig:
    """Returns one of CONFIGURATIONS on one device."""
    preset, changes = CONFIGURATIONS[name]
    return config.override(dataclasses.replace(preset(), mesh=MeshSpec()), changes)


def names(text: str) -> list[str]:
    """Returns the CONFIGURATIONS that a flag names. Raises: UserError on an unknown name or one
    that comes twice."""
    chosen = list(CONFIGURATIONS) if text == "all" else text.split(",")
    for name in chosen:
        if name not in CONFIGURATIONS:
            raise UserError(
                f"configurations={name} must be among {', '.join(CONFIGURATIONS)}."
                f"{did_you_mean(name, CONFIGURATIONS)} (--configurations)"
            )
    if len(set(chosen)) < len(chosen):
        raise UserError(f"configurations={text} has a name twice (--configurations)")
    return chosen


def step_program(name: str) -> Ready:
    """Compiles the train step of a configuration; each call executes the next step of its run."""
    cfg = configuration(name)
    mesh = cfg.mesh.build(jax.devices()[:1])
    train_step = make_train_step(cfg, mesh)

    inner: Any = train_step.step.__wrapped__  # type: ignore[attr-defined]  # without set_mesh

    def step(state: Any, batch: Any) -> Any:
        return inner(state, batch)

    step.__name__ = module = f"step_{name}"  # a trace tells programs apart by their names
    with jax.set_mesh(mesh):
        lowered = jax.jit(step, donate_argnums=0).lower(
            train_step.abstract_state, train_step.abstract_batch
        )
    compiled = lowered.compile()
    state, batch = train_step.init(0), _batch(cfg, train_step.abstract_batch)
    held = [state]

    def call() -> Any:
        held[0], metrics = compiled(held[0], batch)
        return jax.block_until_ready((held[0], metrics))

    return Ready(compiled, f"jit_{module}", call)


def _batch(cfg: JobConfig, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Returns a batch of random tokens with one segment a row."""
    rng = np.random.default_rng(0)
    vocab: int = cfg.model.vocab  # type: ignore[attr-defined]  # both models have one
    out = {}
    for name, leaf in like.items():
        values = {
            "segments": np.ones(leaf.shape),
            "positions": np.broadcast_to(np.arange(leaf.shape[-1]), leaf.shape),
        }.get(name, rng.integers(0, vocab, leaf.shape))
        out[name] = jax.device_put(values.astype(leaf.dtype), leaf.sharding)
    return out


def others(count: int) -> list[families.Program]:
    """Returns programs that are not train steps, of all families in turn."""
    return list(itertools.islice(families.programs(seed=SEED), count))


def _all(
    folder: Path, names: Sequence[str], count: int
) -> tuple[list[Ready], list[families.Program]]:
    cache_programs(folder)
    programs = others(count)
    steps = []
    for name in names:
        steps.append(step_program(name))
        print(f"  compiled {name}", flush=True)
    return [*steps, *(profile.ready(program) for program in programs)], programs


def half(
    folder: Path, which: str, names: Sequence[str], count: int, passes: int, threads: int
) -> None:
    """Runs 'walls' or 'parts' of the measurement in this process.

    count: number of other programs. threads: number of threads that this process may use, which is
    part of the card's name.
    """
    if which == "walls":
        walls(folder, names, count, passes)
    else:
        parts(folder, names, count, passes, threads)


def walls(folder: Path, names: Sequence[str], count: int, passes: int) -> None:
    """Writes walls.json: seconds of calls and of processors in them, (passes, programs), the
    configurations first."""
    programs, _ = _all(folder, names, count)
    profile.calls(programs, 2)  # memory is allocated, caches are warm
    seconds, busy = profile.calls(programs, passes)
    about = {
        "load": os.getloadavg()[0],
        "seconds": seconds.tolist(),
        "busy": busy.tolist(),
    }
    (folder / "walls.json").write_text(json.dumps(about) + "\n")


def parts(folder: Path, names: Sequence[str], count: int, passes: int, threads: int) -> None:
    """Writes parts.npz (Labels) and the text of each program.

    A program's number is its place: the configurations come first.
    """
    card = profile.card(threads)
    programs, more = _all(folder, names, count)
    steps = [families.Program(0, f"step {name}", lambda: None, ()) for name in names]
    numbered = [dataclasses.replace(one, number=place) for place, one in enumerate([*steps, *more])]
    timed = [
        Timed(program, *timing)
        for program, timing in zip(numbered, profile.instructions(programs, passes), strict=True)
    ]
    untimed = [one.untimed for one in timed]
    about = results.facts(card.name, "measured") | {"load": os.getloadavg()[0]}
    about |= {"untimed": untimed, "configurations": list(names), "others": count}
    Labels.of(timed, card, about).with_raised_cards().save(folder / "parts.npz")
    for place, one in enumerate(programs):
        with gzip.open(folder / f"program{place:03}.hlo.gz", "wt") as file:
            file.write(one.text)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What both halves of the measurement wrote.

    names: the configurations, whose steps are the first programs. walls, busy: (passes, programs);
    seconds of each call on the clock and on the processors. labels: times of the instructions,
    whose program numbers are places in `texts`. texts: the programs' HLO.
    """

    names: list[str]
    walls: np.ndarray
    busy: np.ndarray
    labels: Labels
    texts: list[str]
    load: float

    @property
    def card(self) -> DeviceCard:
        """The card of the measured device."""
        (card,) = self.labels.dataset.cards.values()
        return card

    @classmethod
    def load_from(cls, folder: Path) -> "Measured":
        """Returns what a folder holds. Raises: UserError if a file is missing or damaged."""
        for name in ("parts.npz", "walls.json"):
            if not (folder / name).exists():
                raise UserError(
                    f"{folder} has no {name}: no replay was measured there (--measured)"
                )
        labels = Labels.load(folder / "parts.npz")
        try:
            timed = json.loads((folder / "walls.json").read_text())
            texts = []
            for path in sorted(folder.glob("program[0-9]*.hlo.gz")):
                with gzip.open(path, "rt") as file:
                    texts.append(file.read())
            seconds, busy = np.array(timed["seconds"]), np.array(timed["busy"])
            names = list(labels.dataset.facts["configurations"])
            if seconds.shape[1] != len(texts):
                raise ValueError(f"{seconds.shape[1]} programs and {len(texts)} texts")
            return cls(names, seconds, busy, labels, texts, float(timed["load"]))
        except (OSError, EOFError, KeyError, ValueError, IndexError) as error:
            raise UserError(f"{folder} holds no whole measurement: {error} (--measured)") from error


# ---- judgement


NAME = "cdmpp_replay"  # of the files written
COVERED = 0.9
MOST_BAND = 4.0  # times the prediction that the figure shows of a band (chosen: legible)
BUSY = 0.05  # of the time, from which a measurement is told to be disturbed (chosen)
COLOURS = {
    "table": "#0072B2",
    "learned": "#E69F00",
    "learned, adapted": "#D55E00",
    "roofline": "#999999",
}


def known(program: Sequence[OpRecord], seconds: np.ndarray, sigma: np.ndarray) -> step.Times:
    """Returns what gives the times of a program's instructions by their names.

    seconds, sigma: arrays with a number for one execution of each record of the program.
    """
    pairs = zip(seconds.tolist(), sigma.tolist(), strict=True)
    by_name = dict(zip((record.name for record in program), pairs, strict=True))

    def times(launched: Sequence[OpRecord], card: DeviceCard) -> tuple[np.ndarray, np.ndarray]:
        both = np.array([by_name[record.name] for record in launched]).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    return times


def table(measured: Measured, place: int, program: Sequence[OpRecord]) -> step.Times:
    """Returns the times of a profile of the same program in another process.

    An instruction that the profiler did not time takes no time. The executions are those of the
    profile, also of loops whose number of turns depends on values. The deviation is the difference
    between the two halves of the profile.
    """
    labels, timed = measured.labels, {}
    for row in np.flatnonzero(labels.programs == place).tolist():
        one, apart = labels.dataset.records[row], float(np.ptp(labels.halves[row]))
        timed[one.name] = one.executions * np.array([labels.dataset.seconds[row], apart])
    zero = np.zeros(2)
    once = np.array([timed.get(r.name, zero) / r.executions for r in program]).reshape(-1, 2)
    return known(program, once[:, 0], once[:, 1])


@dataclasses.dataclass(frozen=True)
class Method:
    """A source of the times of instructions.

    times: a table for each program. free: places of the other programs that the method was not
    fitted on. predictor: gave the times of records on a card; None: the times are measured.
    """

    name: str
    times: Sequence[step.Times]
    free: Sequence[int]
    card: DeviceCard
    predictor: step.Times | None = None


def methods(measured: Measured, fitted: Mapping[str, Any]) -> list[Method]:
    """Returns the table, the roofline, and each fitted predictor before and after adapting it to
    rows of every second other program; the remaining ones give its band."""
    programs = [records(text) for text in measured.texts]
    free, labels = range(len(measured.names), len(programs)), measured.labels

    def asked(name: str, predictor: step.Times, card: DeviceCard, free: Sequence[int]) -> Method:
        # Once for all programs: each number of rows may be another compilation.
        seconds, sigma = predictor([r for program in programs for r in program], card)
        ends = np.cumsum([len(program) for program in programs])[:-1]
        parts = zip(programs, np.split(seconds, ends), np.split(sigma, ends), strict=True)
        return Method(name, [known(*part) for part in parts], free, card, predictor)

    profiled = [table(measured, place, program) for place, program in enumerate(programs)]
    out = [
        Method("table", profiled, free, measured.card),
        asked("roofline", step.assumed, measured.card, free),
    ]
    for name, predictor in fitted.items():
        card = predictor.cards.get(measured.card.name, measured.card)  # the one it was fitted with
        out.append(asked(name, predictor.predict, card, free))
        rows = np.isin(labels.programs, list(free)[::2])
        near = predictor.adapt(dataclasses.replace(labels.dataset[rows], cards={card.name: card}))
        out.append(asked(f"{name}, adapted", near.predict, card, list(free)[1::2]))
    return out


def without(dataset: Dataset, measured: Measured) -> Dataset:
    """Returns the rows whose instruction is in none of the measured programs."""
    known = {record.hash for record in measured.labels.dataset.records}
    return dataset[np.array([record.hash not in known for record in dataset.records], bool)]


def overheads(measured: Measured) -> Overheads:
    """Returns the overheads of a call, fitted on the calls of the other programs."""
    labels = measured.labels
    of_rows = labels.dataset.seconds * [r.executions for r in labels.dataset.records]
    places = range(len(measured.names), len(measured.texts))
    computed = [float(of_rows[labels.programs == place].sum()) for place in places]
    least = measured.walls.min(0)
    counted = [counts(measured.texts[place]) for place in places]
    return Overheads.fit(counted, computed, [least[place] for place in places])


def judge(measured: Measured, compared: Sequence[Method], costs: Overheads) -> list[Row]:
    """Returns a row for each method and configuration."""
    least = measured.walls.min(0)
    halves = np.stack([measured.walls[half::2].min(0) for half in (0, 1)])
    rows: list[Row] = []
    for method in compared:
        places = [*range(len(measured.names)), *method.free]
        predicted = {
            place: step.predict(
                measured.texts[place],
                Cluster(method.card, 1, 1),
                method.times[place],
                platform="cpu",
                overheads=costs,
            )
            for place in places
        }
        wrong = [abs(least[p] / predicted[p].seconds - 1) for p in method.free]
        width = _quantile(wrong)
        for place, name in enumerate(measured.names):
            one = predicted[place]
            seconds = float(least[place])
            rows.append(
                {
                    "method": method.name,
                    "configuration": name,
                    "measured_s": seconds,
                    "median_s": float(np.median(measured.walls[:, place])),
                    "noise_percent": float(100 * np.ptp(halves[:, place]) / seconds),
                    "predicted_s": one.seconds,
                    "overhead_s": one.overhead_s,
                    "launches": counts(measured.texts[place]).launches,
                    "error_percent": 100 * (one.seconds / seconds - 1),
                    "low_s": one.seconds * max(1 - width, 0),
                    "high_s": one.seconds * (1 + width),
                    "sigma_s": one.sigma,
                }
            )
    return rows


def of_rows(measured: Measured, compared: Sequence[Method]) -> list[Row]:
    """Returns the errors of each method but the table on the steps' different instructions, and the
    share of them in the methods' 90 % bands."""
    labels = measured.labels
    first: dict[str, int] = {}
    for row in np.flatnonzero(labels.programs < len(measured.names)).tolist():
        first.setdefault(labels.dataset.records[row].hash, row)
    rows = np.array(list(first.values()), int)
    found_records = [labels.dataset.records[i] for i in rows]
    seconds = labels.dataset.seconds[rows]
    out = []
    for method in compared:
        if method.predictor is not None:
            predicted, sigma = method.predictor(found_records, method.card)
            every = np.ones(len(rows), bool)
            apart = errors(predicted, sigma, seconds, labels.halves[rows], every)
            out.append({"method": method.name, **apart})
    return out


def _quantile(wrong: Sequence[float]) -> float:
    """Returns the relative error that nine in ten similar programs stay below (conformal)."""
    if not wrong:
        return np.inf
    rank = min(int(np.ceil(COVERED * (len(wrong) + 1))), len(wrong))
    return float(np.sort(wrong)[rank - 1])


def write(folder: Path, measured: Measured, fitted: Mapping[str, Any]) -> None:
    """Judges what was measured; writes cdmpp_replay.json, .svg and .png, and prints them.

    fitted: predictors by the names that the tables give them.
    """
    costs, compared = overheads(measured), methods(measured, fitted)
    rows = judge(measured, compared, costs)
    total = summary(rows)
    walls, busy = (
        float(x[:, : len(measured.names)].sum()) for x in (measured.walls, measured.busy)
    )
    about = dict(measured.labels.dataset.facts) | {
        "load": measured.load,
        "overheads": dataclasses.asdict(costs),
        "summary": total,
        "noise_of_parts": measured.labels.noise,
        "instructions": of_rows(measured, compared),
        "taken_by_others": 1 - busy / walls,
    }
    results.write(folder / f"{NAME}.json", about, rows)
    draw(rows, folder / NAME)
    print(steps_table(folder / f"{NAME}.json"))
    for row in total:
        print(text(row))
    if about["taken_by_others"] > BUSY:
        print(
            f"other processes had {100 * about['taken_by_others']:.0f} % of the processor's time: "
            "measured steps are too long, so measure again when nothing else runs"
        )
    print(f"{folder}/{NAME}.json, .svg, .png")


def summary(rows: Sequence[Row]) -> list[Row]:
    """Returns a row for each method: errors, rank correlations, and steps inside the band."""
    out = []
    for name in dict.fromkeys(row["method"] for row in rows):
        of_method = [row for row in rows if row["method"] == name]
        wrong = np.abs([row["error_percent"] for row in of_method])
        both = [[row[key] for row in of_method] for key in ("measured_s", "predicted_s")]
        inside = [row["low_s"] <= row["measured_s"] <= row["high_s"] for row in of_method]
        many = len(of_method) > 1
        out.append(
            {
                "method": name,
                "steps": len(of_method),
                "median_percent": float(np.median(wrong)),
                "mean_percent": float(wrong.mean()),
                "max_percent": float(wrong.max()),
                "spearman": float(spearmanr(*both).statistic) if many else None,
                "kendall": float(kendalltau(*both).statistic) if many else None,
                "in_band": float(np.mean(inside)),
            }
        )
    return out


def text(row: Row) -> str:
    """Returns a method's summary as a line."""
    ranks = (
        ""
        if row["spearman"] is None
        else (
            f"; rank correlation {row['spearman']:.3f} (Spearman), {row['kendall']:.3f} (Kendall)"
        )
    )
    return (
        f"{row['method']:18} {row['steps']} steps: error {row['median_percent']:.1f} % (median), "
        f"{row['max_percent']:.1f} % (largest){ranks}; {100 * row['in_band']:.0f} % of the steps "
        "in the 90 % band"
    )


def steps_table(path: Path) -> str:
    """Returns the tables of a result file: methods, then configurations."""
    if not path.exists():
        return "Not measured on an idle machine yet."
    result = read(path)

    def rank(name: str) -> Callable[[Row], str | None]:
        return lambda row: None if row[name] is None else f"{row[name]:.3f}"

    columns: Columns = {
        "source of the times": "method",
        "median error": lambda r: f"{r['median_percent']:.1f} %",
        "largest error": lambda r: f"{r['max_percent']:.1f} %",
        "Spearman": rank("spearman"),
        "Kendall": rank("kendall"),
        "steps in the 90 % band": lambda r: f"{round(r['in_band'] * r['steps'])} of {r['steps']}",
    }
    names, lines = [row["method"] for row in result["summary"]], []
    for name in dict.fromkeys(row["configuration"] for row in result["rows"]):
        by_method = {row["method"]: row for row in rows_of(result, configuration=name)}
        cells = (
            f"{1e3 * by_method[n]['predicted_s']:.1f} ms ({by_method[n]['error_percent']:+.1f} %)"
            for n in names
        )
        lines.append((name, f"{1e3 * by_method[names[0]]['measured_s']:.1f} ms", *cells))
    heads = ("step", "measured", *(f"{n}: predicted" for n in names))
    origin = source(result).strip("*")
    return "\n\n".join(
        [
            rows_table(result["summary"], columns),
            markdown_table(heads, lines),
            f"*{origin}; load average {result['load']:.1f}*",
        ]
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws predicted over measured step times, with bands, as SVG and PNG."""
    figure, (left, right) = panels(2, size=(10.5, 4.2))
    names = list(dict.fromkeys(row["configuration"] for row in rows))
    kinds = list(dict.fromkeys(row["method"] for row in rows))
    low = 1e3 * min(min(r["measured_s"], r["predicted_s"]) for r in rows) / 1.3
    high = 1e3 * max(max(r["measured_s"], r["predicted_s"]) for r in rows) * 1.3
    left.plot([low, high], [low, high], color="#cccccc", linewidth=1)
    for place, kind in enumerate(kinds):
        of_method = [row for row in rows if row["method"] == kind]
        x, y = (
            1e3 * np.array([row[k] for row in of_method]) for k in ("measured_s", "predicted_s")
        )
        bands = [(row["low_s"], row["high_s"] or np.inf) for row in of_method]  # null: no limit
        ends = np.clip(1e3 * np.array(bands).T, y / MOST_BAND, y * MOST_BAND)
        colour = COLOURS.get(kind, "#009E73")
        left.errorbar(
            x,
            y,
            yerr=np.abs(ends - y),
            fmt="o",
            color=colour,
            label=kind,
            markersize=4,
            elinewidth=0.7,
        )
        shift = (place - (len(kinds) - 1) / 2) * 0.8 / len(kinds)
        right.barh(
            np.arange(len(of_method)) + shift,
            [row["error_percent"] for row in of_method],
            height=0.8 / len(kinds),
            color=colour,
        )
    left.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(low / MOST_BAND, high * MOST_BAND),
        xlabel="measured step, ms",
        ylabel="predicted step, ms",
    )
    left.tick_params(which="minor", labelbottom=False)  # they would overlap
    left.legend(fontsize=8, frameon=False)
    left.set_title(f"bars: 90 % band, cut at {MOST_BAND:g} times", fontsize=9, loc="left")
    right.set_yticks(range(len(names)), names, fontsize=8)
    right.invert_yaxis()
    right.axvline(0, color="black", linewidth=0.7)
    for limit in (-20, 20):
        right.axvline(limit, color="#cccccc", linewidth=0.7, linestyle=":")
    right.set(xlabel="error of the predicted step, %")
    errors = {
        kind: np.median([abs(r["error_percent"]) for r in rows if r["method"] == kind])
        for kind in kinds
    }
    told = ", ".join(f"{kind} {error:.0f} %" for kind, error in errors.items())
    save(
        figure,
        path,
        f"Train steps on a CPU, predicted from their instructions; median error: {told}",
    )
