"""Looks at checkpoints, checks them and moves them, on any machine.

    uv run scripts/checkpoint.py ls DIR                    # steps, sizes, records that are damaged
    uv run scripts/checkpoint.py inspect DIR [--step=100]  # leaves, their files, the data position
    uv run scripts/checkpoint.py verify DIR                # reads every byte; exit code 1: damaged
    uv run scripts/checkpoint.py diff DIR OTHER            # by fingerprints: no array is read
    uv run scripts/checkpoint.py reshard DIR NEW --there=qkv,stages:4x2
    uv run scripts/checkpoint.py export DIR FOLDER         # safetensors under our own names
    uv run scripts/checkpoint.py import FOLDER NEW         # and back
    uv run scripts/checkpoint.py import FILE.pt NEW [--leave_out=optimizer]
    uv run scripts/checkpoint.py import MEGATRON NEW [--vocab=50257] [--to=safetensors]

DIR: a run, a folder of steps, or DIR/STEP; DIR and NEW may be s3://BUCKET/PREFIX or gs://... (where
credentials come from: megajax/checkpoint/store.py). A step belongs to no mesh, so restoring to
another mesh needs no tool. `reshard` writes the step with leaves of other shapes: --there names the
layouts that the new step has instead of megajax's own, and --back names the layouts of DIR that are
turned back into megajax's own first. Layouts: layers, stages:P, stages:PxCHUNKS,
stages:PxCHUNKSxLAYERS (for --back), qkv, vocab:WORDSxMULTIPLE. Hugging Face folders: scripts/hf.py.
"""

import megajax.core.interrupted  # noqa: F401

import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megajax.checkpoint import offline
from megajax.checkpoint.layouts import (
    Conversion,
    FusedQkv,
    PaddedVocab,
    Staged,
    Unstacked,
    convert,
    units,
)
from megajax.checkpoint.steps import StepFolder
from megajax.checkpoint.store import no_step
from megajax.checkpoint.trust import CheckpointError, DamagedError, Keys
from megajax.core import config
from megajax.core.config import Checked, option
from megajax.core.errors import UserError, did_you_mean
from megajax.core.files import expand
from megajax.foreign import readers


@dataclass(frozen=True)
class Config(Checked):
    """What to do it with."""

    step: int | None = option(
        None,
        "step of the checkpoint; none: the latest (verify: all)",
        verbs=("inspect", "verify", "diff", "reshard", "export", "import"),
        at_least=0,
    )
    there: str = option(
        "",
        "names of layouts that the new step has, joined by commas in the order of making them",
        verbs=("reshard",),
    )
    back: str = option(
        "",
        "names of layouts that DIR has and the new step does not, joined by commas in the order "
        "in which they were made; they are undone before --there",
        verbs=("reshard",),
    )
    shard_bytes: int = option(
        5 * 10**9,
        "size of the largest file",
        "bytes",
        verbs=("export", "import"),
        at_least=1,
    )
    compression: Literal["auto", "none", "zstd"] = option(
        "auto", "compression of the arrays that are written", verbs=("reshard", "import")
    )
    format: Literal["auto", readers.Kind] = option(
        "auto", "format of the source; auto: recognised by its files", verbs=("import",)
    )
    to: Literal["step", "safetensors"] = option("step", "format to make", verbs=("import",))
    vocab: int | None = option(
        None,
        "vocabulary of a Megatron model, without padding",
        verbs=("import",),
        at_least=1,
    )
    key_file: str | None = option(
        None,
        "file of keys; checkpoints that are read must be signed by one of them, and the first "
        "signs what is written; none: no signatures",
    )
    leave_out: str = option(
        "",
        "parameters that are not imported, or the first parts of their names, joined by commas",
        verbs=("import",),
    )
    hf_config: str | None = option(
        None,
        "config.json of the model, for a Megatron checkpoint that stores no arguments",
        verbs=("import",),
    )


PRESETS = {"default": Config}
config.define_flags(PRESETS, "default")


def keys(cfg: Config) -> Keys | None:
    """Returns the keys of --key_file, if it was set. Raises: UserError for an unusable file."""
    return None if cfg.key_file is None else Keys(cfg.key_file)


def opened(cfg: Config, path: str) -> tuple[StepFolder, int | None]:
    """Returns (the checkpoints, the step that the path or --step names). Raises: UserError."""
    steps, step = offline.open_folder(path, keys(cfg))
    if None not in (step, cfg.step) and step != cfg.step:
        raise UserError(f"{path} is step {step}, and --step={cfg.step} names another")
    return steps, cfg.step if step is None else step


def chosen(cfg: Config, path: str) -> tuple[StepFolder, int]:
    """Returns (the checkpoints, the step that the path or --step names; by default the latest).

    Raises: UserError when there is none.
    """
    steps, step = opened(cfg, path)
    step = steps.steps()[-1] if step is None else step
    if step not in steps.steps():
        raise no_step(steps.path, step, steps.steps())
    return steps, step


def list_steps(cfg: Config, path: str) -> int:
    """Prints a line a step."""
    steps, _ = offline.open_folder(path, keys(cfg))
    for step in steps.steps():
        try:
            record = steps.record(step)
        except DamagedError as error:
            print(f"{step:>10}  {error}")
            continue
        if record is None:
            print(f"{step:>10}  of plain Orbax: no integrity record")
            continue
        metric = "" if record.metric is None else f", metric {record.metric:g}"
        megabytes = offline.size(record) / 1e6
        print(f"{step:>10}  {megabytes:,.1f} MB, {len(record.leaves)} leaves{metric}")
    return 0


def inspect(cfg: Config, path: str) -> int:
    """Prints what a step holds."""
    steps, step = chosen(cfg, path)
    record = steps.record(step)
    print(f"step {step} of {steps.path}, {offline.data_state_text(steps, step)}")
    homes = offline.files_by_leaf(steps.home(step))
    if record is None:
        print("no integrity record: plain Orbax wrote it")
    for name, leaf in (record.leaves if record else {}).items():
        one, two = leaf.fingerprint
        pieces = homes.get(name, [])
        where = (
            f"{len(pieces)} pieces in {len({p[0] for p in pieces})} files" if pieces else "index"
        )
        print(f"  {name}: {leaf.dtype}{tuple(leaf.shape)} {one:08x}{two:08x}, {where}")
    return 0


def verify(cfg: Config, path: str) -> int:
    """Reads every byte, and compares the leaves of steps that were not read back. Returns 1 for
    damage."""
    import jax  # sums leaves

    from megajax.checkpoint import sealing

    jax.config.update("jax_platforms", "cpu")
    steps, step = opened(cfg, path)
    bad = 0
    for number in steps.steps() if step is None else [step]:
        try:
            record = sealing.verify(steps, number)
            when = "when it was saved" if steps.is_read_back(number, record) else "now, for once"
            signed = "; signed" * (cfg.key_file is not None)
            print(
                f"step {number}: {len(record.files)} files, {offline.size(record):,} bytes: good; "
                f"its leaves were read back {when}{signed}"
            )
        except DamagedError as error:
            bad += 1
            print(error)
    return min(bad, 1)


def diff(cfg: Config, path: str, other: str) -> int:
    """Prints the leaves that differ. Returns 1 when there are any."""
    pairs = [chosen(cfg, p) for p in (path, other)]
    records = [steps.record(step) for steps, step in pairs]
    if records[0] is None or records[1] is None:
        raise CheckpointError("plain Orbax wrote one of the two: there are no fingerprints")
    differences = offline.differences(records[0], records[1])
    print("\n".join(differences) or f"{len(records[0].leaves)} leaves, all equal")
    return min(len(differences), 1)


def conversions(words: str, names: dict[str, tuple[int, ...]], flag: str) -> list[Conversion]:
    """Reads --there or --back. names: {leaf: shape}, which says how many layers there are."""
    result: list[Conversion] = []
    for word in filter(None, words.split(",")):
        kind, _, argument = word.partition(":")
        try:
            numbers = [int(n) for n in argument.split("x")] if argument else []
            if min(numbers, default=1) < 1:
                raise ValueError
            if kind == "layers" and not numbers:
                result.append(Unstacked())
            elif kind == "qkv" and not numbers:
                result.append(FusedQkv())
            elif kind == "vocab" and len(numbers) == 2:
                result.append(PaddedVocab(*numbers))
            elif kind == "stages" and 1 <= len(numbers) <= 3:
                stacked = [s[0] for n, s in names.items() if "blocks." in n and s]
                if not stacked and len(numbers) < 3:
                    raise UserError(f"{word!r} needs layers, and no leaf has any ({flag})")
                stages, chunks, layers = (*numbers, *(1, *stacked[:1])[len(numbers) - 1 :])
                result.append(Staged(layers, stages, chunks))
            else:
                raise ValueError
        except UserError:
            raise
        except ValueError:
            known = ("layers", "qkv", "stages:4", "stages:4x2", "vocab:50257x128")
            raise UserError(
                f"{word!r} is no layout: {', '.join(known)}, with numbers from 1 on."
                f"{did_you_mean(word, known)} ({flag})"
            ) from None
    return result


def reshard(cfg: Config, path: str, target: str) -> int:
    """Writes a step in another layout, one unit of leaves after the other.

    In memory at once: twice the largest unit (of query, key and value: all three). On the disk of
    `target`, until the step is there: the step twice.
    """
    steps, step = chosen(cfg, path)
    offline.keep_apart(steps, target)
    record = offline.verify(steps, step)
    shapes = {n: tuple(x.shape) for n, x in record.leaves.items()}
    there = conversions(cfg.there, shapes, "--there")
    back = conversions(cfg.back, shapes, "--back")
    if any(isinstance(c, FusedQkv) for c in back) and not any(
        name.rpartition(".")[2] == FusedQkv().fused for name in shapes
    ):
        raise UserError(f"no leaf is named {FusedQkv().fused}: there is nothing to undo (--back)")
    leaves = offline.StoredLeaves(steps.step(step), record)
    with offline.spool_for(target) as spool:
        for unit in units(shapes):
            for name, x in convert({n: leaves[n] for n in unit}, there, back).items():
                spool.add(name, x)
        return store(cfg, spool.arrays(), target, step, steps.data_state(step))


def store(cfg: Config, leaves: dict, target: str, step: int, data_state: dict) -> int:
    """Saves leaves as a step of a new folder."""
    import jax  # only what saves needs it

    from megajax.checkpoint.manager import CheckpointManager
    from megajax.core.tree import nest

    jax.config.update("jax_platforms", "cpu")
    manager = CheckpointManager(target, keep=0, compression=cfg.compression, key_file=cfg.key_file)
    if step in manager.steps():
        raise UserError(f"{target} has a step {step} already; name a new folder")
    # As an array of jax mapped memory is written as it is, of NumPy it would be copied first.
    mapped = {n: jax.device_put(x) if x.dtype.itemsize <= 4 else x for n, x in leaves.items()}
    manager.save(step, nest(mapped), data_state=data_state)
    manager.close()  # it is read back by then
    print(f"{len(leaves)} leaves are step {step} of {target}")
    return 0


def export(cfg: Config, path: str, target: str) -> int:
    """Writes a step as safetensors, leaf by leaf."""
    from megajax.foreign.safetensors import write_folder

    steps, step = chosen(cfg, path)
    record = offline.verify(steps, step)
    unknown = {x.dtype for x in record.leaves.values()} - set(offline.CODES)
    if unknown:
        raise UserError(f"safetensors has no type for {', '.join(sorted(unknown))}")
    tensors = {n: (tuple(x.shape), offline.CODES[x.dtype]) for n, x in record.leaves.items()}
    leaves = offline.StoredLeaves(steps.step(step), record)
    with offline.new_folder(target) as folder:
        write_folder(folder, tensors, leaves.__getitem__, cfg.shard_bytes)
        (folder / readers.DATA_STATE).write_text(offline.data_state_text(steps, step) + "\n")
        written = [f for f in folder.iterdir() if f.suffix == ".safetensors"]
        megabytes = sum(f.stat().st_size for f in written) / 1e6
    parts = Counter(name.partition(".")[0] for name in tensors)
    print(
        f"step {step} of {steps.path} is in {target}: {len(tensors)} tensors "
        f"({', '.join(f'{n} of {part}' for part, n in parts.items())}), {megabytes:,.1f} MB in "
        f"{len(written)} file{'s' * (len(written) > 1)} of safetensors, and {readers.DATA_STATE}. "
        "Their names and layouts are those of megajax: other programs know them only by these "
        "names. There is no config.json and no tokenizer; scripts/hf.py export writes a model as "
        "Hugging Face has it."
    )
    return 0


def import_folder(cfg: Config, path: str, target: str) -> int:
    """Makes a step, or a folder of safetensors, from the checkpoint of another system."""
    kind = readers.detect(path) if cfg.format == "auto" else cfg.format
    leave_out = [word for word in cfg.leave_out.split(",") if word]
    source = readers.open_foreign(path, kind, cfg.step, cfg.vocab, cfg.hf_config, leave_out)
    if source.left_out:
        print(f"left out: {readers.some(source.left_out)}")
    notes = source.notes.get("objects")
    if isinstance(notes, dict) and notes:
        print(f"no tensors, so kept beside the data position: {readers.some(list(notes))}")
    if cfg.to == "safetensors":
        with offline.new_folder(target) as folder:
            readers.write(source, folder, cfg.shard_bytes)
        print(f"{len(source.shapes)} tensors are in {target}")
        return 0
    if source.config is not None:
        leaves = model_leaves(source, target)
    else:
        leaves = {name: source.view(name) for name in source.shapes}
        parts = [name.split(".") for name in leaves]
        homes = {".".join(p[:k]) for p in parts for k in range(1, len(p))}
        if both := sorted(homes & leaves.keys()):
            raise UserError(f"{both[0]} is an array and holds others: no tree has both (--to)")
    return store(cfg, leaves, target, source.step, source.notes)


def model_leaves(source: readers.Foreign, target: str) -> dict:
    """Returns a model's parameters under our names, float32."""
    import jax

    from megajax.core.tree import named_leaves
    from megajax.foreign import hf

    jax.config.update("jax_platforms", "cpu")
    home = expand(target).absolute().parent
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".import.", dir=home) as folder:
        readers.write(source, Path(folder))
        _, params = hf.load(folder)
    return {f"params.{name}": x for name, x in named_leaves(params)}


VERBS = {"ls": list_steps, "inspect": inspect, "verify": verify}
VERBS_OF_TWO = {"diff": diff, "reshard": reshard, "export": export, "import": import_folder}


def main(verb: str, path: str, *other: str) -> int:
    """Does what the first word says."""
    cfg, _ = config.from_flags(PRESETS, verb=verb)
    verbs = VERBS_OF_TWO if other else VERBS
    if verb not in verbs:
        both = [*VERBS, *VERBS_OF_TWO]
        words = "two folders" if verb in VERBS_OF_TWO else "one folder"
        if verb in both:
            raise UserError(f"{verb} needs {words}; see --help")
        raise UserError(f"{verb!r} must be one of {', '.join(both)}.{did_you_mean(verb, both)}")
    return verbs[verb](cfg, path, *other)


if __name__ == "__main__":
    sys.exit(config.run(main, positional=2, optional=1))
