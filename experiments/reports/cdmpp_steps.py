"""Measures what a replay is judged by: train steps as a whole, and apart from that their parts.

Ten configurations of the trainer, small enough for one processor, go through `make_train_step`.
Beside them run other programs (megajax/systems/cdmpp/families.py), on which what is fitted is
fitted. `walls` times calls without a profiler; `parts` times every launched instruction with it.
Each is to run in a process of its own, so that no total of a step is behind a prediction of it.
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

from megajax.core import config
from megajax.core.errors import UserError, did_you_mean
from megajax.core.hardware import DeviceCard
from megajax.core.mesh import MeshSpec, cache_programs
from megajax.models.encoder_config import EncoderConfig
from megajax.monitor import results
from megajax.systems.cdmpp import families, machine, profile
from megajax.systems.cdmpp.labels import Labels
from megajax.systems.cdmpp.profile import Ready, Timed
from megajax.training.config import JobConfig, TrainConfig
from megajax.training.finetune import FinetuneConfig
from megajax.training.optim import OptimConfig
from megajax.training.presets import nano, nano_moe
from megajax.training.step import make_train_step

SEED = 2311  # of the other programs; scripts/profile_programs.py takes another
_ADAMW = {"optim.name": "adamw"}


def bert() -> JobConfig:
    """An encoder of nano's size that learns hidden tokens."""
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
    """Returns the CONFIGURATIONS that a flag names. Raises: UserError on a wrong or doubled one."""
    found = list(CONFIGURATIONS) if text == "all" else text.split(",")
    for name in found:
        if name not in CONFIGURATIONS:
            raise UserError(
                f"configurations={name} must be among {', '.join(CONFIGURATIONS)}."
                f"{did_you_mean(name, CONFIGURATIONS)} (--configurations)"
            )
    if len(set(found)) < len(found):
        raise UserError(f"configurations={text} has a name twice (--configurations)")
    return found


def step_program(name: str) -> Ready:
    """Compiles the train step of a configuration; each call is the next step of its run."""
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
    """Random tokens, one segment a row."""
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
    """Returns programs that are no train step, of all families in turn."""
    return list(itertools.islice(families.programs(seed=SEED), count))


def _all(
    folder: Path, names: Sequence[str], count: int
) -> tuple[list[Ready], list[families.Program]]:
    cache_programs(folder)
    found = others(count)
    steps = []
    for name in names:
        steps.append(step_program(name))
        print(f"  compiled {name}", flush=True)
    return [*steps, *(profile.ready(program) for program in found)], found


def half(
    folder: Path, which: str, names: Sequence[str], count: int, passes: int, threads: int
) -> None:
    """Runs 'walls' or 'parts' of the measurement in this process.

    count: of other programs. threads: that this process may use; for the card's name.
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
        "load": os.getloadavg()[0], "seconds": seconds.tolist(), "busy": busy.tolist(),
    }  # fmt: skip
    (folder / "walls.json").write_text(json.dumps(about) + "\n")


def parts(folder: Path, names: Sequence[str], count: int, passes: int, threads: int) -> None:
    """Writes parts.npz (Labels) and the text of each program.

    A program's number is its place: the configurations come first.
    """
    card = machine.card(threads)
    programs, found = _all(folder, names, count)
    steps = [families.Program(0, f"step {name}", lambda: None, ()) for name in names]
    numbered = [
        dataclasses.replace(one, number=place) for place, one in enumerate([*steps, *found])
    ]
    timed = [
        Timed(program, *rest)
        for program, rest in zip(numbered, profile.instructions(programs, passes), strict=True)
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

    names: of the configurations, the first programs. walls, busy: (passes, programs) seconds of a
    call, and of processors in it. labels: of the instructions; a row's program is its place. texts:
    of the programs.
    """

    names: list[str]
    walls: np.ndarray
    busy: np.ndarray
    labels: Labels
    texts: list[str]
    load: float

    @property
    def card(self) -> DeviceCard:
        """The card of the machine."""
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
