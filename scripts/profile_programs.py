"""Times each instruction of real programs on this machine: training data for a cost model.

    uv run scripts/profile_programs.py --out=runs/profile_programs --budget=600
    uv run scripts/profile_programs.py --threads=1,2      # the CPU with 1 thread, then with 2
    uv run scripts/profile_programs.py --families=decoder,mlp --programs=40

The programs are this library's networks, optimizer updates and their pieces, in many shapes
(megajax/systems/cdmpp/families.py). They are compiled and run in turn, in several passes, and
jax.profiler times each instruction. The label of an instruction is its least time over all passes.
The passes form two halves; how far their least times differ says how noisy the label is, and rows
that differ by more than 10 % are marked.

The script writes parts into --out and joins them in --out/labels.npz (features, trees, seconds,
halves, families, the device's card, noise, date and commit). When --budget or Ctrl-C stopped it,
the same command continues. The peaks of a CPU are measured first, as the card of the device. Let
nothing else run meanwhile; the noise is printed. Exit code 2: a flag is wrong.

On a GPU the card is that of megajax/core/hardware.py, and command buffers are turned off
(XLA_FLAGS), because they hide single instructions from the profiler. A batch of programs is
compiled by all processors and then timed; a program that fails is named and left out. If the GPU
hangs or crashes, what was timed before is joined, and the exit code is 1.

    python3 scripts/profile_programs.py --scale=1024 --budget=240
"""

import megajax.core.interrupted  # noqa: F401

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

from megajax.core import config
from megajax.core.config import Checked, option
from megajax.core.errors import UserError, did_you_mean
from megajax.core.hardware import CARDS, DeviceCard
from megajax.core.paths import expand
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
    passes: int = option(6, "passes over the programs of a batch; an even number", at_least=6)
    batch: int | None = option(
        None, "programs that run in turn; none: 16, on a GPU then 64", at_least=1
    )
    scale: float = option(
        1.0, "largest factor on the programs' sizes, drawn from 1 on; a GPU takes 1024", above=0
    )
    seed: int = option(0, "random seed of the shapes", at_least=0)
    worker: bool = option(False, "time one device in this process; the script itself uses it")
    out: str = results.out_option("profile_programs")


FIRST_BATCH, GPU_BATCH = 16, 64  # on a GPU the first shows soon whether all is well
HANGS = 40.0  # (chosen) seconds after its budget when the process of a GPU is ended
FINISH = 20.0  # (chosen) seconds for what a GPU's budget leaves unfinished: compiling, timing
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
    from megajax.systems.cdmpp.families import FAMILIES

    names = tuple(FAMILIES) if cfg.families == "all" else tuple(cfg.families.split(","))
    for name in names:
        if name not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise UserError(
                f"families={name} must be among {known}.{did_you_mean(name, FAMILIES)} (--families)"
            )
    return names


def time_device(cfg: Config, threads: int) -> int:
    """Times one device until the budget or the programs end; returns how many programs it has."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])  # before jax has threads
    began = time.monotonic()
    from megajax.core import mesh

    mesh.start()
    import jax

    from megajax.systems.cdmpp import families

    folder = expand(cfg.out, "out") / f"threads{threads}"
    folder.mkdir(parents=True, exist_ok=True)
    card = _card(folder, threads)
    _same_settings(folder, cfg)
    is_gpu = jax.default_backend() != "cpu"
    draw = functools.partial(
        families.program, names=family_names(cfg), seed=cfg.seed, scale=cfg.scale
    )
    done = max((int(p.stem) for p in folder.glob("[0-9]*.npz")), default=0)
    timing = failed = 0.0
    while done < cfg.programs and time.monotonic() - began + timing < cfg.budget:
        size = cfg.batch or (GPU_BATCH if is_gpu and done else FIRST_BATCH)
        numbers = range(done, min(done + size, cfg.programs))
        # On a GPU a batch is cut short, so that its timing and what compiles still end in time.
        end = began + cfg.budget - max(timing, FINISH) if is_gpu else float("inf")
        spent = _time_batch(cfg, draw, numbers, threads if is_gpu else 1, end, card, folder)
        done, rows, timing = spent["done"], spent["rows"], spent["timing"] if is_gpu else 0.0
        now = time.monotonic() - began
        print(
            f"{'GPU' if is_gpu else f'{threads} threads'}: {done} programs, {rows} more rows "
            f"({spent['untimed']} without a time), halves differ by {spent['noise']:.1f} % "
            f"(median); compiled in {spent['compiling']:.0f} s, timed in {spent['timing']:.0f} s, "
            f"{now:.0f} of {cfg.budget:.0f} s",
            flush=True,
        )
        failed = 0 if rows else failed + 1
        if failed == 2 or done < numbers.stop:  # an error may leave the GPU unusable
            break
    return done


def _time_batch(
    cfg: Config,
    draw: Callable[[int], Any],
    numbers: range,
    threads: int,
    end: float,
    card: DeviceCard,
    folder: Path,
) -> dict[str, Any]:
    """Times the programs of these numbers and writes their part; returns what to print."""
    from megajax.systems.cdmpp.labels import Labels
    from megajax.systems.cdmpp.prepare import prepared, runnable
    from megajax.systems.cdmpp.profile import measure_ready

    tell = functools.partial(print, flush=True)
    began = time.monotonic()
    found, tried = prepared(draw, numbers, threads=threads, end=end, tell=tell)
    compiled = time.monotonic()
    done = numbers.start + tried
    timed = []
    try:
        found = runnable(found, tell)
        timed = measure_ready(found, cfg.passes)
    except UserError:
        raise
    except Exception as error:  # out of memory, with other programs' arrays in it
        tell(f"the batch to program {done} failed: {type(error).__name__}: {str(error)[:300]}")
    if lost := _untimed(found, timed):
        tell(f"without a time: {lost}")
    labels = Labels.of(timed, card, results.facts(card.name, "measured"))
    if len(labels.halves):
        labels.save(folder / f"{done:06}.npz")
    return {
        "done": done,
        "rows": len(labels.halves),
        "untimed": sum(one.untimed for one in timed),
        "noise": 100 * labels.noise["noise_median"] if len(labels.halves) else float("nan"),
        "compiling": compiled - began,
        "timing": time.monotonic() - compiled,
    }


def _untimed(found: list[Any], timed: list[Any]) -> str:
    """Returns how many instructions of each kind the profiler did not time, with an example."""
    lost: dict[str, list[str]] = {}
    for (_, compiled), one in zip(found, timed, strict=False):
        names = {record.name for record in one.records}
        for record in compiled.records:
            if record.name not in names:
                lost.setdefault(record.kind, []).append(record.name)
    return ", ".join(f"{len(names)} {kind} ({names[0]})" for kind, names in lost.items())


def _card(folder: Path, threads: int) -> DeviceCard:
    """Returns the device's card, measured once a folder."""
    from megajax.systems.cdmpp import machine
    from megajax.systems.cdmpp.labels import card_json

    path = folder / "card.json"
    if not path.exists():
        path.write_text(card_json(machine.card(threads)) + "\n")
    return DeviceCard(**json.loads(path.read_text()))


def _same_settings(folder: Path, cfg: Config) -> None:
    """Refuses to add rows of other programs to a folder's."""
    path, mine = (
        folder / "settings.json",
        config.fingerprint(cfg, ignore=("budget", "programs", "threads", "worker", "out", "batch")),
    )
    if not path.exists():
        path.write_text(json.dumps(mine) + "\n")
    elif json.loads(path.read_text()) != mine:
        raise UserError(
            f"{folder} holds rows of other --families, --passes, --scale or --seed; give another "
            "folder (--out)"
        )


def join(cfg: Config) -> None:
    """Writes labels.npz of all devices' parts, and prints the noise."""
    from megajax.systems.cdmpp.labels import Labels

    folder = expand(cfg.out, "out")
    whole = Labels.joined([Labels.load(path) for path in _parts(cfg)])
    if not set(whole.dataset.cards) & {card.name for card in CARDS.values()}:  # measured ones
        whole = whole.with_raised_cards()
    devices = ", ".join(whole.dataset.cards)
    more = {"load": os.getloadavg()[0], "below_floor": whole.below_floor}
    facts = results.facts(devices, "measured") | whole.noise | more
    whole.with_facts(facts).save(folder / "labels.npz")
    for name in whole.dataset.cards:
        is_here = [device == name for device in whole.dataset.devices]
        apart, marked = whole.disagreement[is_here], whole.is_marked[is_here]
        unique = len({r.hash for r in whole.dataset.of(name).records})
        print(
            f"{name}: {len(apart)} rows, {unique} of them different; halves differ by "
            f"{100 * apart.mean():.1f} % (mean), {sorted(apart)[len(apart) // 2] * 100:.1f} % "
            f"(median); {100 * marked.mean():.0f} % of the rows are marked"
        )
    print(f"{100 * whole.below_floor:.1f} % of the rows are faster than the roofline by over 5 %")
    print(f"{folder / 'labels.npz'}")


def _parts(cfg: Config) -> list[Path]:
    return sorted(expand(cfg.out, "out").glob("threads*/[0-9]*.npz"))


def _environment(cfg: Config) -> dict[str, str] | None:
    """Returns the environment of the process that uses the GPU; None without a GPU.

    Raises: UserError when --threads asks for CPU devices there.
    """
    from megajax.core import mesh

    if mesh.count_gpus() == 0:
        return None
    if cfg.threads != "all":
        raise UserError(
            f"threads={cfg.threads} must be all on a GPU; JAX_PLATFORMS=cpu times the CPU instead "
            "(--threads)"
        )
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    return {**os.environ, "XLA_FLAGS": flags.strip()}


def main() -> int:
    """Times every device in a process of its own, then joins what there is."""
    cfg, _ = config.from_flags(PRESETS)
    counts = thread_counts(cfg)
    if cfg.worker:
        time_device(cfg, counts[0])
        return 0
    if cfg.passes % 2:
        raise UserError(f"passes={cfg.passes} must be even (--passes)")
    family_names(cfg)
    results.writable_folder(cfg.out)
    env, limit = _environment(cfg), None
    if env is not None:
        limit = cfg.budget + HANGS
    interrupted = False
    for threads in counts:
        own = [f"--threads={threads}", f"--budget={cfg.budget / len(counts)}", "--worker"]
        child = subprocess.Popen([sys.executable, *sys.argv, *own], env=env)
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
            print(f"the GPU did not finish within {limit:.0f} s: its process was ended", flush=True)
        except KeyboardInterrupt:
            code, interrupted = child.wait(), True  # Ctrl-C went to the child too
        if code and not interrupted and not (env and _parts(cfg)):
            return code
        if interrupted:
            break
    join(cfg)
    if interrupted:
        raise KeyboardInterrupt
    return 1 if env and code else 0


if __name__ == "__main__":
    sys.exit(config.run(main))
