"""Times each instruction of real programs on this machine: training data for a cost model.

    uv run scripts/profile_programs.py --out=runs/profile_programs --budget=600
    uv run scripts/profile_programs.py --threads=1,2      # the CPU with 1 thread, then with 2
    uv run scripts/profile_programs.py --families=decoder,mlp --programs=40
    uv run scripts/profile_programs.py --families=mixture --out=runs/mixtures

The programs are this library's networks, optimizer updates and their pieces, in many shapes, or
random mixtures to fit on as well (megajax/systems/cdmpp/families.py). They run in turn, in several
passes, and jax.profiler times each instruction. Its label is its least time over all passes. The
least times of both halves of the passes show its noise: rows over 10 % apart are marked.

The script writes parts into --out and joins them in --out/labels.npz (features, trees, seconds,
halves, families, the device's card, noise, date and commit). When --budget or Ctrl-C stopped it,
the same command continues. The peaks of a CPU are measured first, as the card of the device. Let
nothing else run meanwhile; the noise is printed. Exit code 2: a flag is wrong.

On a GPU the card is that of megajax/core/hardware.py, and command buffers are turned off
(XLA_FLAGS), because they hide single instructions from the profiler. Several processes
(--processes) draw and compile programs; only one at a time runs any of them, so the others do not
disturb its timing. XLA may then not time variants of products while it compiles, so it is told not
to: products are cuBLAS's own choice, and the labels' facts say so. Convolutions are left out of
labels.npz, since cuDNN's own choice took up to thousands of times their roofline on an H200. With
--processes=1 XLA times variants, cuBLAS's and Triton's, and compiling takes far longer. A program
that fails is named and left out; a process that crashes, or holds the GPU for over 40 s, loses its
batch, and the exit code is 1. What was timed before is joined.

    python3 scripts/profile_programs.py --scale=1024 --budget=180
"""

import megajax.core.interrupted  # noqa: F401

import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core import config
from megajax.core.config import Checked, option
from megajax.core.errors import UserError, did_you_mean
from megajax.core.files import expand
from megajax.core.hardware import CARDS, DeviceCard
from megajax.monitor import results


@dataclass(frozen=True)
class Config(Checked):
    """What to time, and for how long."""

    budget: float = option(
        600.0, "time for all thread counts together, with the card", "s", above=0
    )
    threads: str = option(
        "all", "CPU threads, joined by commas: a device each; all: one device with all"
    )
    families: str = option("all", "families of programs, joined by commas")
    programs: int = option(100_000, "most programs for each device", at_least=1)
    passes: int | None = option(
        None, "passes over a batch; an even number; none: 48, on a GPU 6", at_least=6
    )
    batch: int | None = option(
        None,
        "programs that run in turn; none: 48, on a GPU 4, with one process 16, then 64",
        at_least=1,
    )
    processes: int | None = option(
        None,
        "processes that compile for a GPU; none: one for each two processors, at most 8",
        at_least=1,
    )
    scale: float = option(
        1.0, "largest factor on the programs' sizes, drawn from 1 on; a GPU takes 1024", above=0
    )
    seed: int = option(0, "random seed of the shapes", at_least=0)
    worker: int | None = option(
        None, "time a device as the process of this number; the script itself uses it", at_least=0
    )
    out: str = results.out_option("profile_programs")


CPU_BATCH, FIRST_BATCH, GPU_BATCH = 48, 16, 64  # the first on a GPU shows soon if all is well
SHARED_BATCH, MOST_PROCESSES = 4, 8  # (chosen) with more processes: short turns, their memory
HANGS = 40.0  # (chosen) seconds after its budget, or of one turn, when a GPU's process is ended
FINISH = 20.0  # (chosen) seconds for what a GPU's budget leaves unfinished: compiling, timing
# XLA times no variants of products and convolutions while it compiles, and makes no Triton kernels
# of products.
UNTUNED = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
CHOICE = (  # of the kernels of products, with one process and with more
    "the fastest variant, cuBLAS's or Triton's, that XLA timed while it compiled",
    "cuBLAS's own choice: XLA timed no variants and made no Triton kernels of them",
)
_NO_SETTING = ("budget", "programs", "threads", "worker", "out", "batch")  # same rows with any
PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


def thread_counts(cfg: Config) -> list[int]:
    """Returns --threads as numbers. Raises: UserError where this machine has fewer."""
    usable = len(os.sched_getaffinity(0))
    if cfg.threads == "all":
        return [usable]
    words = cfg.threads.split(",")
    if not all(w.isdigit() and 1 <= int(w) <= usable for w in words):
        raise UserError(
            f"threads={cfg.threads} must be numbers from 1 to {usable}, the processors that this "
            "process may use, with commas (--threads)"
        )
    return sorted({int(w) for w in words})


def family_names(cfg: Config) -> tuple[str, ...]:
    """Returns --families. Raises: UserError on an unknown one."""
    from megajax.systems.cdmpp.families import FAMILIES, SYNTHETIC

    names = tuple(FAMILIES) if cfg.families == "all" else tuple(cfg.families.split(","))
    known = [*FAMILIES, *SYNTHETIC]
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            raise UserError(f"families={name} must be among {', '.join(known)}.{near} (--families)")
    return names


def time_device(cfg: Config, threads: int) -> int:
    """Times one CPU until the budget or the programs end; returns how many programs it has."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])  # before jax has threads
    began = time.monotonic()
    from megajax.core import mesh

    mesh.start()
    from megajax.systems.cdmpp.labels import Batch
    from megajax.systems.cdmpp.profile import usual_passes

    folder = _folder(cfg, f"threads{threads}")
    card = _card(folder, threads)
    _same_settings(folder, cfg)
    done, failed = _done(folder), 0
    while done < cfg.programs and time.monotonic() - began < cfg.budget:
        numbers = range(done, min(done + (cfg.batch or CPU_BATCH), cfg.programs))
        passes, end = cfg.passes or usual_passes(), began + cfg.budget
        spent = Batch(numbers, folder, card, passes, numbers.stop, end=end).time(_draw(cfg))
        done += spent["tried"]
        _tell(cfg, f"{threads} threads: {done} programs", spent, time.monotonic() - began)
        failed = 0 if spent["rows"] else failed + 1
        if failed == 2:
            break
    return done


def time_gpu(cfg: Config) -> int:
    """Times a process's programs on the GPU; returns how many of its programs were tried."""
    began = time.monotonic()
    from megajax.core import mesh

    mesh.start()
    import jax

    from megajax.systems.cdmpp.labels import Batch, Turns, share
    from megajax.systems.cdmpp.profile import usual_passes

    process, many = cfg.worker or 0, cfg.processes or 1
    folder = _folder(cfg, f"gpu{process}")
    card = _card(folder, len(os.sched_getaffinity(0)))
    _same_settings(folder, cfg)
    numbers = share(process, many, cfg.programs, len(family_names(cfg)))
    place = {
        "turns": Turns(_lock(cfg)),
        "threads": max(len(os.sched_getaffinity(0)) // many, 1),
        "host": jax.devices("cpu")[0],
        "facts": {"products": CHOICE[many > 1]},
    }
    done, timing, failed = _done(folder), 0.0, 0
    while done < len(numbers) and time.monotonic() - began + timing < cfg.budget:
        size = cfg.batch or (SHARED_BATCH if many > 1 else GPU_BATCH if done else FIRST_BATCH)
        batch = numbers[done : done + size]
        # A batch is cut short, so that its timing and what compiles still end in time.
        end = began + cfg.budget - max(timing, FINISH)
        next_done = done + len(batch)
        work = Batch(batch, folder, card, cfg.passes or usual_passes(), next_done, end=end, **place)
        spent = work.time(_draw(cfg))
        done += spent["tried"]
        timing = spent["waiting"] + spent["timing"]
        _tell(cfg, f"GPU, process {process}: {done} programs", spent, time.monotonic() - began)
        failed = 0 if spent["rows"] else failed + 1
        if failed == 2 or done < next_done:  # an error may leave the GPU unusable
            break
    return done


def _folder(cfg: Config, name: str) -> Path:
    folder = expand(cfg.out, "out") / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _lock(cfg: Config) -> Path:
    return expand(cfg.out, "out") / "turns.lock"


def _done(folder: Path) -> int:
    """Returns how many programs the parts in a folder come from, with those that failed."""
    return max((int(p.stem) for p in folder.glob("[0-9]*.npz")), default=0)


def _draw(cfg: Config) -> Callable[[int], Any]:
    from megajax.systems.cdmpp import families

    names = family_names(cfg)
    more = {} if cfg.threads == "all" else {"bfloat16": 0.0}  # a CPU computes it in float32
    return functools.partial(families.program, names=names, seed=cfg.seed, scale=cfg.scale, **more)


def _tell(cfg: Config, who: str, spent: dict[str, Any], now: float) -> None:
    print(
        f"{who}, {spent['rows']} more rows ({spent['untimed']} without a time), "
        f"halves differ by {spent['noise']:.1f} % (median); compiled in "
        f"{spent['compiling']:.1f} s, waited {spent['waiting']:.1f} s, timed in "
        f"{spent['timing']:.1f} s, {now:.0f} of {cfg.budget:.0f} s",
        flush=True,
    )


def _card(folder: Path, threads: int) -> DeviceCard:
    """Returns the device's card, measured once a folder."""
    from megajax.systems.cdmpp import profile
    from megajax.systems.cdmpp.labels import card_json

    path = folder / "card.json"
    if not path.exists():
        path.write_text(card_json(profile.card(threads)) + "\n")
    return DeviceCard(**json.loads(path.read_text()))


def _same_settings(folder: Path, cfg: Config) -> None:
    """Refuses to add rows of other programs to a folder's."""
    path = folder / "settings.json"
    is_cpu = cfg.threads != "all"
    fingerprint = config.fingerprint(cfg, ignore=(*_NO_SETTING, *(["processes"] if is_cpu else [])))
    if not path.exists():
        path.write_text(json.dumps(fingerprint) + "\n")
    elif json.loads(path.read_text()) != fingerprint:
        raise UserError(
            f"{folder} holds rows of other --families, --passes, --scale, --seed or --processes; "
            "give another folder (--out)"
        )


def join(cfg: Config) -> None:
    """Writes labels.npz of all devices' parts, and prints the noise."""
    from megajax.systems.cdmpp.labels import Labels

    folder = expand(cfg.out, "out")
    labels = Labels.joined([Labels.load(path) for path in _parts(cfg)])
    if labels.dataset.facts.get("products") == CHOICE[1]:
        tuned = [i for i, r in enumerate(labels.dataset.records) if r.kind != "convolution"]
        if lost := len(labels.halves) - len(tuned):
            print(f"{lost} convolutions are left out: XLA chose no algorithms for them")
        labels = labels.of_rows(np.array(tuned))
    if not set(labels.dataset.cards) & {card.name for card in CARDS.values()}:  # measured ones
        labels = labels.with_raised_cards()
    devices = ", ".join(labels.dataset.cards)
    more = {"load": os.getloadavg()[0], "below_floor": labels.below_floor, "seed": cfg.seed}
    more |= {n: v for n, v in labels.dataset.facts.items() if n in ("products", "passes")}
    labels = labels.with_facts(results.facts(devices, "measured") | labels.noise | more)
    labels.save(folder / "labels.npz")
    for name in labels.dataset.cards:
        is_here = [device == name for device in labels.dataset.devices]
        apart, marked = labels.disagreement[is_here], labels.is_marked[is_here]
        unique = len({r.hash for r in labels.dataset.of(name).records})
        print(
            f"{name}: {len(apart)} rows, {unique} of them different; halves differ by "
            f"{100 * apart.mean():.1f} % (mean), {sorted(apart)[len(apart) // 2] * 100:.1f} % "
            f"(median); {100 * marked.mean():.0f} % of the rows are marked"
        )
    print(f"{100 * labels.below_floor:.1f} % of the rows are faster than the roofline by over 5 %")
    print(f"{folder / 'labels.npz'}")


def _parts(cfg: Config) -> list[Path]:
    out = expand(cfg.out, "out")
    return sorted([*out.glob("threads*/[0-9]*.npz"), *out.glob("gpu*/[0-9]*.npz")])


def _processes(cfg: Config) -> int | None:
    """Returns how many processes use the GPU; None without a GPU.

    Raises: UserError where --threads or --processes asks for what the device does not have.
    """
    from megajax.core import mesh

    if mesh.count_gpus() == 0:
        if cfg.processes not in (None, 1):
            raise UserError(f"processes={cfg.processes} must be 1 without a GPU (--processes)")
        return None
    if cfg.threads != "all":
        raise UserError(
            f"threads={cfg.threads} must be all on a GPU; JAX_PLATFORMS=cpu times the CPU instead "
            "(--threads)"
        )
    usable = len(os.sched_getaffinity(0))
    return cfg.processes or min(max(usable // 2, 1), MOST_PROCESSES)


def _environment(processes: int) -> dict[str, str]:
    """Returns the environment of one of the processes that use the GPU."""
    from megajax.core import mesh

    flags = [os.environ.get("XLA_FLAGS", ""), UNTUNED if processes > 1 else ""]
    flags = " ".join([*filter(None, flags), "--xla_gpu_enable_command_buffer="])
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cuda,cpu"}  # arrays: on the host
    env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if processes > 1 and "XLA_CLIENT_MEM_FRACTION" not in env:
        share = str(round(mesh.MEMORY_SHARE / processes, 3))
        env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
    return env


def _start(worker: int, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, *sys.argv, *words, f"--worker={worker}"], env=env)


def _run_gpu(cfg: Config, processes: int) -> int:
    """Lets all processes time programs; ends those that hang. Returns an exit code that is not 0,
    if there is one."""
    from megajax.systems.cdmpp.labels import Turns

    _same_settings(_folder(cfg, "gpu0"), dataclasses.replace(cfg, processes=processes))
    turns, limit = Turns(_lock(cfg)), time.monotonic() + cfg.budget + HANGS
    env, flag = _environment(processes), f"--processes={processes}"
    children = [_start(number, flag, env=env) for number in range(processes)]
    try:
        while any(child.poll() is None for child in children):
            time.sleep(0.2)
            is_late = time.monotonic() > limit
            for number, child in enumerate(children):
                is_hung = turns.seconds_of(child.pid) > HANGS
                if child.poll() is None and (is_late or is_hung):
                    why = "did not finish in time" if is_late else f"held the GPU for {HANGS:.0f} s"
                    print(f"GPU, process {number} {why}: it was ended", flush=True)
                    child.kill()
    finally:  # after Ctrl-C too: a part is saved at once or not at all
        for child in children:
            child.kill()
            child.wait()
    return next((child.returncode for child in children if child.returncode), 0)


def _run_cpu(cfg: Config, counts: list[int]) -> int:
    """Times one CPU device after the other; returns the exit code of the last one."""
    for threads in counts:
        child = _start(0, f"--threads={threads}", f"--budget={cfg.budget / len(counts)}")
        try:
            code = child.wait()
        except KeyboardInterrupt:  # it went to the child too
            child.wait()
            raise
        if code:
            return code
    return 0


def main() -> int:
    """Times every device in processes of its own, then joins what there is."""
    cfg, _ = config.from_flags(PRESETS)
    counts = thread_counts(cfg)
    if cfg.worker is not None:
        if cfg.threads == "all":
            time_gpu(cfg)
        else:
            time_device(cfg, counts[0])
        return 0
    if cfg.passes is not None and cfg.passes % 2:
        raise UserError(f"passes={cfg.passes} must be even (--passes)")
    family_names(cfg)
    results.writable_folder(cfg.out)
    processes = _processes(cfg)
    try:
        code = _run_gpu(cfg, processes) if processes else _run_cpu(cfg, counts)
    except KeyboardInterrupt:
        join(cfg)
        raise
    if code and not (processes and _parts(cfg)):
        return code
    join(cfg)
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(config.run(main))
