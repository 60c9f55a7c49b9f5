"""CDMPP (arXiv 2311.09690): a network, fitted on measured times, predicts how long a program takes.

    uv run experiments/cdmpp.py train --data=FOLDER --out=runs/cdmpp     # NeuSight's CSV files
    uv run experiments/cdmpp.py train --data=runs/profile_programs/labels.npz
    uv run experiments/cdmpp.py evaluate --data=experiments/results/cdmpp_cpu_labels.npz
    uv run --extra aot experiments/cdmpp.py predict --preset=llama3_8b --cluster=h100:2x8 \\
        --mesh.tensor=8
    uv run experiments/cdmpp.py calibrate --budget=60 --predictor=runs/cdmpp/predictor.npz
    uv run experiments/cdmpp.py replay --data=runs/profile_programs/labels.npz

A row is one measurement: an instruction or kernel, the device that it ran on, and its seconds.
scripts/profile_programs.py measures rows; rows of a CPU and of an H200 lie in experiments/results.
A predictor is a set of networks fitted on rows. `train` fits one and writes OUT/predictor.npz.
`evaluate` fits the predictor, and simpler models as rivals, without some rows and measures the
errors on these: random programs, families of programs, and devices (without rows of the device, and
with those of --shots programs). It writes the errors, the share of times in the 90 % band, and the
noise of the measured times.
`predict` compiles the train step of a preset for a cluster, on a machine without GPUs, predicts the
time of each operation and simulates the step with one stream for computation and one for
collectives. It prints the step time with a 90 % band, MFU, the communication that no computation
hides, and the longest operations. Times come from the shipped predictor, from that of
--predictor=FILE, or with --predictor=assumed from the roofline with assumed efficiencies. These
are also used, which the first line then says, for a GPU whose compiled programs, or those of its
chip, the predictor has no rows of.
`calibrate` times programs on this machine for --budget seconds and adapts a predictor to it.
`replay` measures train steps of ten configurations on this machine's CPU and predicts them from the
times of their instructions: those that another process measured and, with --data, those of a
predictor that has not seen them.
Flags of a run (--model.layers, --mesh.tensor) are those of pretraining; only `predict` reads them.
Exit code 2: a flag or a file is wrong.
"""

import megajax.core.interrupted  # noqa: F401

import dataclasses
import functools
import importlib.util
import itertools
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
from absl import flags

from experiments.reports import cdmpp as report
from experiments.reports import cdmpp_replay
from experiments.reports.cdmpp import Split, SplitChoice, unique_rows
from experiments.reports.reporting import closing
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.errors import UserError, did_you_mean
from megajax.core.files import expand
from megajax.core.hardware import parse_cluster
from megajax.cost.replay import contention
from megajax.monitor import results
from megajax.systems import aot
from megajax.systems.cdmpp import families, neusight, profile, rivals, step
from megajax.systems.cdmpp.backend import no_rows
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.labels import Labels
from megajax.systems.cdmpp.predictor import FOLD_STEPS, ROWS_PER_GROUP, Predictor, sample
from megajax.training.presets import PRESETS, take_model

VERBS = ("train", "evaluate", "predict", "calibrate", "replay")  # by which --help orders flags

config.define_flags(
    PRESETS, "nano", ("preset", "config", "train.global_batch", "train.seq_len"), VERBS
)
DATA = flags.DEFINE_string("data", None, "labels.npz files with commas, or a folder of NeuSight's")
OPS = flags.DEFINE_string("ops", None, "NeuSight's operations to use, joined by commas; none: all")
DEVICES = flags.DEFINE_string("devices", None, "NeuSight's devices to use, joined by commas")
HELD_OUT = flags.DEFINE_string(
    "held_out", None, "evaluate: devices to hold out, joined by commas; none: each in turn"
)
SPLITS = flags.DEFINE_string("splits", "random,families,devices", "evaluate: what to hold out")
PREDICTOR = flags.DEFINE_string(
    "predictor",
    None,
    "file of a predictor; none: the shipped one; for predict, 'assumed' stands for the roofline",
)
CLUSTER = flags.DEFINE_string("cluster", "h100:1x8", "predict: the cluster, kind:HOSTSxGPUS")
CONTENTION = flags.DEFINE_float(
    "contention",
    1.0,
    "predict: factor by which computation and communication slow each other while both run",
    lower_bound=1.0,
)
SEGMENTS = flags.DEFINE_integer(
    "segments", 1, "predict: number of documents of equal length in a row", lower_bound=1
)
BUDGET = flags.DEFINE_float("budget", 60.0, "calibrate: seconds of profiling", lower_bound=1.0)
SHOTS = flags.DEFINE_integer(
    "shots",
    32,
    "evaluate: number of programs of a held-out device that the predictor is adapted to",
    lower_bound=1,
)
METHODS = flags.DEFINE_string("methods", "all", "evaluate: 'ours' and rivals, joined by commas")
SEEDS = flags.DEFINE_integer(
    "seeds", 1, "evaluate: number of seeds that are averaged, from --fit_seed on", lower_bound=1
)
CALLS = flags.DEFINE_integer(
    "calls", 0, "evaluate: number of programs of which whole calls are predicted too", lower_bound=0
)
JSON = flags.DEFINE_string(
    "json", None, "evaluate: file for the result; its rows of other methods and splits are kept"
)
STEPS = flags.DEFINE_integer("fit_steps", 2000, "training steps of the networks", lower_bound=1)
MEMBERS = flags.DEFINE_integer("fit_members", 3, "networks that are averaged", lower_bound=1)
SEED = flags.DEFINE_integer("fit_seed", 0, "random seed of the networks and splits", lower_bound=0)
CONFIGURATIONS = flags.DEFINE_string("configurations", "all", "replay: steps, joined by commas")
OTHERS = flags.DEFINE_integer(
    "others",
    48,
    "replay: number of other programs, from which overheads and error bands are taken",
    lower_bound=8,
)
PASSES = flags.DEFINE_integer(
    "passes",
    10,
    "replay: number of rounds in which all programs are timed, an even number",
    lower_bound=6,
)
THREADS = flags.DEFINE_integer("threads", 1, "replay: processors to use", lower_bound=1)
MEASURED = flags.DEFINE_string(
    "measured", None, "replay: folder of an earlier run, whose measurements are used again"
)
ONLY = flags.DEFINE_enum(
    "only",
    None,
    ["walls", "parts"],
    "replay: time only whole calls (walls) or only instructions (parts)",
)
OUT = flags.DEFINE_string("out", "runs/cdmpp", "folder for the results")


def data() -> tuple[Dataset, Labels | None]:
    """Returns what --data names. Raises: UserError when nothing can be read there."""
    if DATA.value is None:
        raise UserError("give measured rows: labels.npz or a folder of NeuSight's files (--data)")
    paths, labels = [expand(word, "data") for word in DATA.value.split(",")], None
    if any(path.is_dir() for path in paths):
        if len(paths) > 1:
            raise UserError(f"data={DATA.value}: a folder must stand alone, without files (--data)")
        dataset = neusight.load(paths[0], _words(OPS.value), _words(DEVICES.value))
    else:
        labels = Labels.together(paths)
        dataset = labels.dataset
        for flag in (DEVICES, OPS):
            if flag.value is not None:
                raise UserError(
                    f"--{flag.name} chooses among NeuSight's rows; labels are taken whole"
                )
    devices = ", ".join(sorted(set(dataset.devices)))
    print(f"{DATA.value}: {len(dataset)} rows of {devices}", flush=True)
    return dataset, labels


def _words(text: str | None) -> list[str] | None:
    return None if text is None else text.split(",")


def fit(dataset: Dataset, seed: int) -> Predictor:
    """Fits a predictor, telling how far it is."""
    began = time.monotonic()
    told = [0.0]

    def tell(part: str, done: int, loss: float) -> None:
        if time.monotonic() - told[0] > 10:
            told[0] = time.monotonic()
            print(f"  {part}: step {done}, loss {loss:.4f}, {told[0] - began:.0f} s", flush=True)

    steps, fold = STEPS.value, min(STEPS.value, max(FOLD_STEPS, STEPS.value // 4))
    sizes = {"members": MEMBERS.value, "steps": steps, "fold_steps": fold}
    return Predictor.fit(dataset, seed=seed, progress=tell, **sizes)


def train() -> int:
    """Writes OUT/predictor.npz."""
    folder = results.writable_folder(OUT.value)
    predictor = fit(data()[0], SEED.value)
    made = results.facts(", ".join(predictor.cards), "measured")
    predictor = dataclasses.replace(predictor, facts=dict(predictor.facts) | {"fitted": made})
    predictor.save(folder / "predictor.npz")
    print(f"{folder / 'predictor.npz'}: knows {', '.join(predictor.cards)}")
    return 0


def evaluate() -> int:
    """Writes --json, or OUT/evaluation.json, and OUT/evaluation.md."""
    folder = results.writable_folder(OUT.value)
    path = folder / "evaluation.json" if JSON.value is None else expand(JSON.value, "json")
    methods = _methods()
    names, held_out = tuple(SPLITS.value.split(",")), _words(HELD_OUT.value)
    split_choice = SplitChoice(names, held_out, SHOTS.value, SEED.value)
    before = report.rows_before(path)
    dataset, labels = data()
    if "devices" in names and held_out is None and len(set(dataset.devices)) < 2:
        if names == ("devices",):
            raise UserError("splits=devices needs rows of two devices (--splits, --data)")
        print("not run: devices, because the rows are of one device")
    if CALLS.value and labels is None:
        raise UserError("calls: NeuSight's rows have no programs; give labels.npz (--data)")
    same = report.repeats(dataset)
    dataset, rows = dataset.typical(), unique_rows(dataset)
    print(f"{len(rows)} rows remain of {len(dataset)} without duplicates and unlabelled ones")
    groups = None
    if labels is None:
        groups = np.array([neusight.group(record.name) for record in dataset.records])
    halves, names = (None, None) if labels is None else (labels.halves, labels.families)
    runs = []
    summed: dict[str, list[np.ndarray]] = {}

    def keep(name: str, split: Split, model: Any) -> None:
        if CALLS.value and split.name == "families":
            everything = report.predicted(dataset, np.arange(len(dataset)), model)
            summed.setdefault(name, []).append(everything[0])

    about = results.facts(", ".join(sorted(set(dataset.devices))), "measured")
    about |= {"rows_unique": len(rows), "shots": SHOTS.value, "data": dict(dataset.facts)} | same
    for seed in range(SEED.value, SEED.value + SEEDS.value):
        fits = {name: functools.partial(method, seed=seed) for name, method in methods.items()}
        splits = split_choice.of(dataset, rows, labels, seed)
        runs.append(report.evaluate(dataset, splits, fits, halves, _say, groups, keep, names))
        evaluated = report.averaged(runs)
        results.write(path, about, report.not_rerun(before, about, evaluated) + evaluated)
    if summed and labels is not None:
        is_real = ~np.isin(labels.families, list(families.SYNTHETIC))
        numbers = np.unique(labels.programs[is_real])[: CALLS.value]
        print(f"compiling {len(numbers)} programs again for XLA's counts")
        calls = report.Calls(labels, report.xla_counts(labels, numbers.tolist()))
        folds = [split for split in splits if split.name == "families"]
        evaluated += calls.judge(
            folds, {name: parts[: len(folds)] for name, parts in summed.items()}
        )
        results.write(path, about, report.not_rerun(before, about, evaluated) + evaluated)
    (folder / "evaluation.md").write_text(report.summary(evaluated) + "\n")
    print(report.summary(evaluated))
    print(f"{path}, {folder / 'evaluation.md'}")
    return 0


def _methods() -> dict[str, Any]:
    """Returns functions (rows, seed) -> a fitted model, by the names of --methods."""

    def fitted(rival: rivals.Rival, dataset: Dataset, seed: int) -> rivals.Fitted:
        data = sample(dataset.labelled.without_duplicates(), ROWS_PER_GROUP, seed)
        return rivals.Fitted.of(rival, data)

    known: dict[str, Any] = {"ours": fit}
    known |= {name: functools.partial(fitted, rival) for name, rival in rivals.RIVALS.items()}
    if METHODS.value == "all":
        if importlib.util.find_spec("sklearn") is None:
            print("not run: trees; they need scikit-learn (uv sync --group rivals)")
            known.pop("trees")
        return known
    for name in METHODS.value.split(","):
        if name not in known:
            near = did_you_mean(name, known)
            raise UserError(f"methods={name} must be among {', '.join(known)}.{near} (--methods)")
    return {name: known[name] for name in METHODS.value.split(",")}


def predict() -> int:
    """Prints what a step takes on a cluster."""
    cfg, _ = config.from_flags(PRESETS, take_model)
    cluster = parse_cluster(CLUSTER.value)
    times, source, said = step.assumed, "assumed efficiencies (megajax/cost/roofline.py)", ""
    if PREDICTOR.value != "assumed":
        path = None if PREDICTOR.value is None else expand(PREDICTOR.value, "predictor")
        loaded, name = Predictor.load(path), path.name if path else "the shipped predictor"
        if loaded.learnt_from(cluster.card):
            times = loaded.predict
            source = f"{name}, fitted on {', '.join(loaded.cards)}. {loaded.basis(cluster.card)}"
        else:
            said = no_rows(cluster.card)
            print(said)
    sizes = aot.sizes(cfg, cluster)
    place = aot.compiled_in_place(cfg, cluster)
    compiled = aot.compile_step(cfg, place, fused=True)
    segments = 1 if compiled.attention == "xla" else SEGMENTS.value
    if segments != SEGMENTS.value:
        print("attention is XLA's, which does the work of a whole row: --segments has no effect")
    began = time.monotonic()
    slowdown = None if CONTENTION.value == 1 else contention(CONTENTION.value, CONTENTION.value)
    live = {"live_rows": 1 / sizes["expert"], "live_pairs": 1 / segments}
    step_time = step.predict(compiled.text, cluster, times, **live, slowdown=slowdown)
    about = {"times": source, "attention": compiled.attention, "segments": segments}
    about |= {"compiled_for": place.card.name, "said": said}
    band = step.ASSUMED_BAND if times is step.assumed else None
    facts = report.step_facts(step_time, cfg, cluster, segments, band)
    facts |= {"memory_bytes": compiled.xla["peak"]} | about
    print(report.step_markdown(facts, cluster))
    folder = results.writable_folder(OUT.value)
    report.write(folder, step_time, facts, cluster)
    spent = time.monotonic() - began
    print(
        f"{folder}/step.json, step_trace.json (opens in ui.perfetto.dev); {spent:.1f} s to predict"
    )
    print(closing(config.start_name()))
    return 0


def calibrate() -> int:
    """Adapts a predictor to this machine, and says what that changes."""
    folder = results.writable_folder(OUT.value)
    path = None if PREDICTOR.value is None else expand(PREDICTOR.value, "predictor")
    before = Predictor.load(path)
    began, timed = time.monotonic(), []
    card = profile.card(len(os.sched_getaffinity(0)))
    if card.name in before.cards:
        # A card measured anew differs by chance, and the networks go with the one of their rows.
        card = before.cards[card.name]
        print(f"the predictor has rows of {card.name}: adapting adds what has changed since")
    drawn = families.programs(seed=SEED.value)
    while not timed or time.monotonic() - began < BUDGET.value:
        timed += profile.measure(list(itertools.islice(drawn, 4)), profile.usual_passes())
    facts = results.facts(card.name, "measured")
    labels = Labels.of(timed, card, facts).with_raised_cards()
    dataset, halves = labels.dataset, labels.halves
    rows = unique_rows(dataset)
    print(
        f"{card.name}: {len(timed)} programs, {len(rows)} different rows in "
        f"{time.monotonic() - began:.0f} s; halves of the labels differ by "
        f"{100 * labels.noise['noise_mean']:.1f} % (mean)"
    )
    # What adapting brings is judged on programs that it has not seen.
    is_seen = labels.programs[rows] % 2 == 0
    seen = {dataset.records[i].hash for i in rows[is_seen]}
    other = [i for i in rows[~is_seen] if dataset.records[i].hash not in seen]
    split = Split("this machine", card.name, rows[:0], rows[~is_seen])
    if other and is_seen.any():
        half = before.adapt(dataset[rows[is_seen]])
        for name, model in {"as it was": before, "adapted": half}.items():
            judged = report.judge(dataset, split, model, halves)[0]
            print(
                report.text(
                    {
                        "method": name,
                        "split": "every second program",
                        "held_out": card.name,
                        **judged,
                    }
                )
            )
    before.adapt(dataset[rows]).save(folder / "predictor.npz")
    print(f"{folder / 'predictor.npz'}: adapted to {card.name}")
    return 0


def replay() -> int:
    """Writes OUT/cdmpp_replay.json and its figure."""
    folder = results.writable_folder(OUT.value)
    names = cdmpp_replay.names(CONFIGURATIONS.value)
    profile.check_passes(PASSES.value)
    if ONLY.value is not None:
        cdmpp_replay.half(folder, ONLY.value, names, OTHERS.value, PASSES.value, THREADS.value)
        return 0
    dataset = None if DATA.value is None else data()[0]  # a wrong path ends it here
    path = None if PREDICTOR.value is None else expand(PREDICTOR.value, "predictor")
    fitted: dict[str, Any] = {} if path is None else {path.stem: Predictor.load(path)}
    for part in ("parts", "walls") if MEASURED.value is None else ():
        print(f"{part}:", flush=True)  # the second finds what the first has compiled
        command = [sys.executable, __file__, *sys.argv[1:], f"--only={part}"]
        if code := subprocess.run(command).returncode:
            return code
    source = folder if MEASURED.value is None else expand(MEASURED.value, "measured")
    measured = cdmpp_replay.Measured.load_from(source)
    if dataset is not None:
        free = cdmpp_replay.without(dataset, measured)
        print(f"{len(dataset) - len(free)} rows of the same instructions are left out", flush=True)
        fitted["learned"] = fit(free, SEED.value)
        fitted["learned"].save(folder / "learned.npz")
    cdmpp_replay.write(folder, measured, fitted)
    print(closing(CONFIGURATIONS.value))
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def main(verb: str = "") -> int:
    """Does what the word says."""
    verbs = {
        "train": train,
        "evaluate": evaluate,
        "predict": predict,
        "calibrate": calibrate,
        "replay": replay,
    }
    call = config.choose(verb, verbs)
    if verb == "replay":
        usable = sorted(os.sched_getaffinity(0))
        if THREADS.value > len(usable):
            raise UserError(
                f"threads={THREADS.value} must be at most {len(usable)} here (--threads)"
            )
        if ONLY.value is not None:
            os.sched_setaffinity(0, usable[: THREADS.value])  # before jax has threads
    mesh_.start(1 if verb in ("predict", "replay") else None)  # no GPU is used
    return call()


if __name__ == "__main__":
    sys.exit(config.run(main, optional=1))
