"""Compares what megajax computes now with what it computed when tests/golden/frozen.json was made.

    uv run scripts/frozen.py                        # compare everything; exit code 1: it differs
    uv run scripts/frozen.py --only=help,kernels    # some parts
    uv run scripts/frozen.py --only=ring,moe        # some configurations of the part `training`
    uv run scripts/frozen.py --write --only=moe     # record a change that is meant

Run it before and after a change that must not alter results, for example a merge of files.
The parts are:

training     twelve tiny runs of three steps on 8 emulated CPU devices. Recorded are losses and
             gradient norms as hexadecimal floats, digests of the trained parameters and of the
             other parts of the state, the names, shapes, types and shardings of the state and of a
             batch, and the names of the metrics.
checkpoints  two checkpoints in tests/golden/frozen, which an earlier commit wrote, are restored;
             recorded are digests of all arrays.
aot          four of the runs are compiled for eight H100s without a GPU (uv sync --extra aot);
             recorded are the number and the bytes of each kind of collective, and memory.
help         what every command prints for --help, in tests/golden/frozen/help.
kernels      the digest of the traced program of each kernel configuration. A kernel is traced only
             if its source changed since experiments/results/kernel_report.json was written.

Bits depend on the type of the CPU and on the versions of jax and NumPy, which the golden file
names. On another machine or with other versions, digests of trained arrays are not compared, and
losses may differ by a part in a thousand; a note says so. To compare bits there, check out the
commit before the change, run --write, and compare the changed code with that file without
committing it. After an update of jax, run --write on the same commit before and after the update
and review the differences of the losses. --write never replaces an archive of a checkpoint:
its purpose is to have been written by older code. Delete the archive to have it made again.
"""

import megajax.core.interrupted  # noqa: F401

import collections
import contextlib
import dataclasses
import difflib
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

# All that this script needs of megajax. When files are merged, only these lines change.
from megajax.checkpoint import CheckpointManager
from megajax.core import config, mesh, parse_cluster
from megajax.core.errors import UserError, did_you_mean
from megajax.core.files import write_whole
from megajax.core.tree import named_leaves
from megajax.systems import Pruner, aot
from megajax.training import Config, make_train_step
from megajax.training.finetune import FinetuneConfig
from pallas_kernels import report

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "frozen.json"
FOLDER = ROOT / "tests" / "golden" / "frozen"
KERNELS = ROOT / "experiments" / "results" / "kernel_report.json"
# As the tests compile (tests/xla_options.py): the programs run a few times each.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
DEVICES, STEPS = 8, 3
TOLERANCE = 1e-3  # (chosen) relative difference of losses between machines
SHOWN = 12  # differences of one configuration or part that are printed (chosen)
BITS = ("parameters", "sha256")  # members of a record that hold digests of trained arrays
FLOATS = ("losses", "gradient_norms")

WRITE = flags.DEFINE_boolean("write", False, "record the results instead of comparing them")
ONLY = flags.DEFINE_list("only", None, "parts or configurations to run; none: all parts")

Record = dict[str, Any]


# ---- training

DECODER = {
    "model.layers": 2,
    "model.width": 32,
    "model.heads": 4,
    "model.kv_heads": 4,
    "model.head_width": 8,
    "model.mlp": 64,
    "model.vocab": 61,
    "model.vocab_multiple": 16,
    "eval.sample_tokens": 0,
}
ENCODER = {
    "model.layers": 2,
    "model.width": 32,
    "model.heads": 4,
    "model.mlp": 64,
    "model.vocab": 61,
    "model.vocab_multiple": 16,
    "model.max_positions": 32,
    "model.dropout": 0.1,
}
RUN = {
    "train.steps": 10,
    "train.global_batch": 16,
    "train.seq_len": 16,
    "train.seed": 3,
    "optim.lr": 3e-3,
    "optim.warmup": 2,
}
# Options of the decoder that DECODER leaves off.
RICH = {
    "model.block": "parallel",
    "model.norm": "layer",
    "model.position": "learned",
    "model.max_positions": 32,
    "model.activation": "gelu",
    "model.bias": "all",
    "model.qk_norm": True,
    "model.window": 5,
    "model.tied": False,
}
RUNS: dict[str, dict[str, Any]] = {
    # zero full, rings on data 4 x tensor 2, Muon, each option of the decoder, dropout, remat dots
    "ring": RICH | {
        "mesh.tensor": 2, "overlap": "ring", "optim.name": "muon", "train.remat": "dots",
        "model.dropout": 0.1, "train.loss_chunks": 2, "train.z_loss": 1e-3,
    },
    # zero none, accumulated micro-batches, LAMB, remat full, tile-wise masks after step 2
    "pruned": {
        "mesh.node": 2, "mesh.tensor": 2, "shard.zero": "none", "train.accumulate": 2,
        "optim.name": "lamb", "train.remat": "full", "prune.sparsity": 0.5, "prune.tile": 8,
        "prune.stages": 1, "prune.steps": 2,
    },
    # an exchange, streamed: 4-bit differences of copied weights, 8- and 4-bit gradients
    "streamed": {
        "model.layers": 3, "mesh.node": 2, "mesh.data": 2, "mesh.tensor": 2, "wire": "sdp4bit",
        "shard.zero": "optimizer",
    },
    # an exchange without a codec, accumulated; bfloat16, grouped keys
    "accumulated": {
        "mesh.node": 2, "model.kv_heads": 1, "shard.zero": "optimizer", "train.accumulate": 2,
        "train.dtype": "bfloat16",
    },
    # an exchange, gathered: errors of 4-bit gradients are kept and added to the next ones
    "gathered": {
        "mesh.node": 2, "mesh.data": 2, "mesh.tensor": 2, "wire": "loco", "train.remat": "none",
    },
    # a wire of fully sharded weights; keys of other ranks by a ring
    "sharded": {
        "mesh.node": 2, "mesh.data": 2, "mesh.context": 2, "wire": "sdp4bit", "shard.zero": "full",
        "wire.difference": False,
    },
    # the 1F1B schedule, hybrid sharding, kept residuals
    "one_f_one_b": RICH | {
        "mesh.pipe": 2, "mesh.node": 2, "mesh.tensor": 2, "shard.zero": "hybrid",
        "pipeline.stash": "residuals",
    },
    # the interleaved schedule with a wire and its errors
    "interleaved": {
        "model.layers": 4, "mesh.pipe": 2, "mesh.node": 2, "mesh.tensor": 2, "wire": "loco",
        "pipeline.schedule": "interleaved", "pipeline.chunks": 2,
    },
    # the zero-bubble schedule of a mixture of experts; heads for tokens over context
    "zero_bubble": {
        "mesh.pipe": 2, "mesh.expert": 2, "mesh.context": 2, "context.kind": "ulysses",
        "pipeline.schedule": "zero_bubble", "model.moe.experts": 4, "model.moe.width": 32,
        "model.moe.mode": "capacity", "model.moe.share_slots": True,
    },
    # experts 4 x tensor 2 as DeepSeek-V3 has them
    "moe": {
        "mesh.expert": 4, "mesh.tensor": 2, "model.moe.experts": 8, "model.moe.top_k": 3,
        "model.moe.width": 16, "model.moe.shared": 2, "model.moe.score": "sigmoid",
        "model.moe.scale": 2.5, "model.moe.groups": 4, "model.moe.top_groups": 2,
        "model.moe.bias_rate": 1e-3, "model.moe.z_loss": 1e-3,
    },
    # hidden tokens of an encoder
    "encoder_masked": ENCODER | {"mesh.tensor": 2, "model.head": "mlm"},
    # labels of an encoder, on 8 data-parallel ranks
    "encoder_classify": ENCODER | {
        "model.head": "classify", "model.labels": 8, "model.embed_width": 16, "optim.clip": 0.0,
    },
}  # fmt: skip


def configuration(name: str) -> Any:
    """Returns the configuration of a run of RUNS."""
    changes = RUNS[name]
    if "model.head" in changes:
        return config.override(FinetuneConfig(), RUN | changes)
    return config.override(Config(), DECODER | RUN | fields(changes))


def fields(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the changes by the names of members instead of flags: --wire.* is `exchange`."""
    return {re.sub(r"^wire\.", "exchange.", name): value for name, value in changes.items()}


def batch_of(number: int, cfg: Any) -> dict[str, np.ndarray]:
    """Returns a learnable batch: decoders have two documents a row and some targets that do not
    count, encoders one document, and hidden tokens or a label at its first token."""
    rows, seq, vocab = cfg.train.global_batch, cfg.train.seq_len, cfg.model.vocab
    random = np.random.default_rng(number)
    walk = random.integers(0, 5, (rows, seq + 1)).cumsum(1) % vocab
    tokens, targets = walk[:, :-1], walk[:, 1:]
    cut, draw = random.integers(1, seq, (rows, 1)), random.random((rows, seq))
    second = np.arange(seq) >= cut
    head = getattr(cfg.model, "head", None)
    if head == "classify":
        targets = np.where(np.arange(seq) == 0, tokens[:, :1] % cfg.model.labels, -1)
    elif head == "mlm":
        tokens, targets = np.where(draw < 0.3, 0, tokens), np.where(draw < 0.3, tokens, -1)
    else:
        targets = np.where(draw > 0.3, targets, -1)
    second = second & (head is None)
    positions = np.arange(seq) - np.where(second, cut, 0)
    members = {"tokens": tokens, "targets": targets, "segments": second + 1, "positions": positions}
    return {name: x.astype(np.int32) for name, x in members.items()}


def place(train_step: Any, members: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns a batch on the devices of a train step."""
    order = slice(None) if train_step.order is None else train_step.order
    return {
        name: jax.device_put(members[name][:, order].reshape(like.shape), like.sharding)
        for name, like in train_step.abstract_batch.items()
    }


def train(cfg: Any, steps: int = STEPS) -> tuple[Any, Any, list[dict]]:
    """Returns (the train step, the state after some steps, the metrics of each)."""
    train_step, metrics = make_train_step(cfg, cfg.mesh.build()), []
    state = train_step.init(cfg.train.seed)
    pruner = None
    if cfg.prune.sparsity:
        pruner = Pruner(
            cfg.prune,
            train_step.parts.axes,
            train_step.layout.mesh,
            train_step.storage.natural,
            train_step.storage.arranged,
            init_exchange=train_step.init_exchange,
        )
    for number in range(steps):
        state, values = train_step.step(state, place(train_step, batch_of(number, cfg)))
        metrics.append({name: np.asarray(x) for name, x in values.items()})
        if pruner is not None and pruner.due(number + 1):
            state = pruner(state, number + 1)
    return train_step, state, metrics


def run_record(name: str) -> Record:
    """Returns what one run leaves."""
    train_step, state, metrics = train(configuration(name))
    parts = vars(state)
    return {
        "losses": [float(m["loss"]).hex() for m in metrics],
        "gradient_norms": [float(m["grad_norm"]).hex() for m in metrics],
        "metrics": {k: f"{x.dtype}{list(x.shape)}" for k, x in sorted(metrics[-1].items())},
        "batch": {k: describe(x) for k, x in sorted(train_step.abstract_batch.items())},
        "order": None if train_step.order is None else str(train_step.order.tolist()),
        "rows": {k: str(list(rows)) for k, rows in sorted(train_step.rows.items())},
        "exchange": json.dumps(train_step.storage.exchange, sort_keys=True),
        "state": {k: describe(x) for k, x in named_leaves(parts)},
        "parameters": {k: digest_of([(k, x)])[:16] for k, x in named_leaves(state.params)},
        "sha256": {k: digest_of(named_leaves(part)) for k, part in parts.items()},
    }


def describe(x: Any) -> str:
    """Returns the type, shape and sharding of an array."""
    return f"{x.dtype}{list(x.shape)} {x.sharding.spec}"


def digest_of(leaves: list[tuple[str, Any]]) -> str:
    """Returns the sha256 of named arrays: names, types, shapes and bytes, sorted by name."""
    digest = hashlib.sha256()
    for name, leaf in sorted(leaves, key=lambda item: item[0]):
        x = np.asarray(leaf)
        digest.update(f"{name} {x.dtype} {x.shape}\n".encode())
        digest.update(np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()


# ---- checkpoints

SMALL = {
    "model.width": 8,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.head_width": 4,
    "model.mlp": 16,
    "model.vocab": 16,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "plain": {"mesh.tensor": 2},
    "interleaved": RUNS["interleaved"] | {"mesh.tensor": 1, "mesh.data": 2, "model.tied": False},
}


def checkpoint_record(name: str) -> Record:
    """Returns what is restored from the archive of a run, which is made if there is none."""
    changes = fields(CHECKPOINTS[name])
    cfg = config.override(Config(), DECODER | RUN | SMALL | changes)
    archive = FOLDER / f"checkpoint_{name}.tar.xz"
    if not archive.exists():
        write_checkpoint(cfg, archive)
    train_step = make_train_step(cfg, cfg.mesh.build())
    model = {key: value for key, value in changes.items() if key.startswith("model.")}
    other = config.override(Config(), DECODER | RUN | SMALL | model | {"mesh.context": 2})
    plain = make_train_step(other, other.mesh.build())
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        manager = CheckpointManager(folder, keep=0)
        state = manager.restore(like=vars(train_step.abstract_state), order=train_step.rows)
        params = {"params": plain.abstract_state.params}
        elsewhere = manager.restore(like=params, partial=True)
        record = {
            "steps": manager.steps(),
            "data_state": json.dumps(manager.data_state(STEPS), sort_keys=True),
            "record": sorted(manager.verify(STEPS).leaves),
            "leaves": {k: digest_of([(k, x)]) for k, x in named_leaves(state)},
            "parameters on another mesh": digest_of(named_leaves(elsewhere)),
        }
        manager.close()
    return record


def write_checkpoint(cfg: Any, archive: Path) -> None:
    """Writes an archive with the checkpoint of a run after its last step."""
    train_step, state, _ = train(cfg)
    with tempfile.TemporaryDirectory() as folder:
        manager = CheckpointManager(folder)
        position = {
            "rows": STEPS * cfg.train.global_batch,
            "exchange": dict(train_step.storage.exchange),
        }
        manager.save(STEPS, state, data_state=position, order=train_step.rows).result()
        manager.close()
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "w:xz", preset=9) as tar:
            tar.add(folder, ".", filter=anonymous)


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Returns a member of an archive without owner and times."""
    return member.replace(uid=0, gid=0, uname="", gname="", mtime=0, deep=False)


# ---- programs for GPUs

CLUSTER = "h100:2x4"
COMPILED = ("ring", "streamed", "interleaved", "moe")


def aot_record(name: str) -> Record:
    """Returns the collectives and the memory of a run's step as an H100 program."""
    compiled = aot.compile_step(configuration(name), parse_cluster(CLUSTER))
    kinds: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0])
    for collective in compiled.collectives:
        entry = kinds[f"{collective.kind} over {' '.join(collective.axes)}"]
        entry[0] += collective.executions
        entry[1] += collective.total
    return {
        "collectives": {k: f"{n:g} executions, {b} bytes" for k, (n, b) in sorted(kinds.items())},
        "memory": {k: f"{b:.0f} bytes" for k, b in compiled.xla.items()},
    }


# ---- help


def commands() -> dict[str, Path]:
    """Returns {name of its text: path} of all commands; workers, which only commands start, have
    no help."""
    paths = [p for f in ("experiments", "scripts") for p in sorted((ROOT / f).glob("*.*"))]
    chosen = {}
    for path in (p for p in paths if p.suffix in (".py", ".sh")):
        text = path.read_text()
        if path.suffix == ".sh":
            answers = re.search(r"--help\b.*-h\b", text)
        else:
            answers = '__name__ == "__main__"' in text and re.search(
                r"(config\.run|script\.start)\(main|ArgumentParser", text
            )
        if answers:
            chosen[f"{path.parent.name}_{path.stem}"] = path
    return chosen


def help_of(path: Path) -> str:
    """Returns the text of --help, or that of --helpfull without absl's flags where --help does not
    describe all flags."""
    text = answer(path, "--help")
    if "--helpfull describes them all" in text:
        text = answer(path, "--helpfull").partition("\nabsl:\n")[0]
    return text.rstrip() + "\n"


def answer(path: Path, flag: str) -> str:
    """Returns what a command prints for a flag, in lines of 100 columns."""
    command = [sys.executable, str(path)] if path.suffix == ".py" else ["bash", str(path)]
    env = os.environ | {"COLUMNS": "100", "HOME": "/home/user"}
    done = subprocess.run([*command, flag], capture_output=True, text=True, env=env, cwd=ROOT)
    if done.returncode:
        return f"exit code {done.returncode}\n{done.stderr}"
    return done.stdout


# ---- kernels


def kernel_records() -> Record:
    """Returns {configuration: digest of its traced program}."""
    known: dict[str, set] = collections.defaultdict(set)
    for row in json.loads(KERNELS.read_text())["rows"]:
        known[row["config"]].add((row["source"], row["program"]))
    programs = {}
    for name in report.names():
        reported = {
            program for source, program in known[name] if source == report.source_hash(name)
        }
        programs[name] = reported.pop() if len(reported) == 1 else report.program_hash(name)
    stale = [n for n, p in programs.items() if {p} != {program for _, program in known[n]}]
    for name in stale:
        print(f"kernels: {name} is not the program of {KERNELS.name}; run kernel_report.py")
    return programs


# ---- comparison


def flat(record: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of a nested record."""
    if isinstance(record, Mapping):
        items: Any = record.items()
    elif isinstance(record, list):
        items = enumerate(record)
    else:
        yield name, record
        return
    for key, value in items:
        yield from flat(value, f"{name}.{key}" if name else str(key))


def differences(before: Record, now: Record, exact: bool) -> list[str]:
    """Returns a line for each value that differs. exact: bits are compared."""
    old, new = dict(flat(before)), dict(flat(now))
    lines = []
    for key in sorted(old.keys() | new.keys()):
        a, b, first = old.get(key), new.get(key), key.partition(".")[0]
        if a == b or (first in BITS and not exact and a is not None and b is not None):
            continue
        if a is None or b is None:
            lines.append(f"{key}: {'is new' if a is None else 'is gone'}: {b if a is None else a}")
        elif first in FLOATS:
            x, y = float.fromhex(a), float.fromhex(b)
            apart = abs(x - y) / max(abs(x), 1e-30)
            if exact or not apart <= TOLERANCE:
                lines.append(f"{key}: {a} ({x:.6f}) -> {b} ({y:.6f}), {apart:.1e} apart")
        else:
            lines.append(f"{key}: {a} -> {b}")
    return lines


def text_differences(before: str, now: str) -> list[str]:
    """Returns the lines by which two texts differ, as a unified diff without its head."""
    return list(difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=0))[2:]


def machine() -> dict[str, str]:
    """Returns what bits depend on."""
    cpu = Path("/proc/cpuinfo").read_text()
    lines = dict(re.findall(r"^(model name|flags|Features)\s*: (.*)$", cpu, re.MULTILINE))
    features = " ".join(sorted(lines.get("flags", lines.get("Features", "")).split()))
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    return {
        "cpu": lines.get("model name", "unknown"),
        "instructions": hashlib.sha256(features.encode()).hexdigest()[:8],
    } | versions


# ---- parts


@contextlib.contextmanager
def timed(name: str) -> Iterator[None]:
    """Prints the CPU seconds of a record."""
    began = cpu_seconds()
    yield
    print(f"{name}: {cpu_seconds() - began:.1f} CPU-s", flush=True)


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of the processes that it waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@dataclasses.dataclass(frozen=True)
class Part:
    """One part. names() -> its records. make(name) -> a record, or all of them for None."""

    names: Callable[[], list[str]]
    make: Callable[[str], Record]


PARTS = {
    "training": Part(lambda: list(RUNS), run_record),
    "checkpoints": Part(lambda: list(CHECKPOINTS), checkpoint_record),
    "aot": Part(lambda: list(COMPILED), aot_record),
    "help": Part(lambda: list(commands()), lambda name: {"text": help_of(commands()[name])}),
    "kernels": Part(lambda: ["programs"], lambda name: kernel_records()),
}


def chosen(only: list[str] | None) -> list[tuple[str, str]]:
    """Returns [(part, record)] of --only. Raises: UserError for another word."""
    records = [(part, name) for part, what in PARTS.items() for name in what.names()]
    words = set(only or PARTS)
    known = [*PARTS, *RUNS]
    for word in sorted(words - set(known)):
        raise UserError(
            f"only={word} is no part and no configuration{did_you_mean(word, known)}; there are "
            f"{', '.join(known)} (--only)"
        )
    return [
        (part, name)
        for part, name in records
        if part in words or (part == "training" and name in words)
    ]


def load() -> Record:
    """Returns the golden records by part, with the texts of help."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    texts = {p.stem: {"text": p.read_text()} for p in sorted((FOLDER / "help").glob("*.txt"))}
    return golden | {"help": texts}


def save(golden: Record) -> None:
    """Writes the golden file, and the texts of help beside it."""
    folder = FOLDER / "help"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in set(folder.glob("*.txt")) - {folder / f"{name}.txt" for name in golden["help"]}:
        stale.unlink()
    for name, record in golden["help"].items():
        (folder / f"{name}.txt").write_text(record["text"])
    data = {part: records for part, records in golden.items() if part != "help"}
    write_whole(GOLDEN, json.dumps(data, indent=1) + "\n")


def main() -> int:
    """Returns 1 when something differs."""
    records = chosen(ONLY.value)
    os.environ["XLA_FLAGS"] = XLA_FLAGS  # before jax starts its first device
    mesh.start(emulate=DEVICES)
    golden, this = load(), machine()
    exact = golden.get("machine") == this
    if not exact and "machine" in golden:
        print(f"note: bits were recorded on {golden['machine']}; this is {this}")
        if WRITE.value and ONLY.value:
            raise UserError("write=true: the machine is another one, so everything must be written")
    differ: list[str] = []
    for part, name in records:
        try:
            with timed(f"{part} {name}"):
                record = PARTS[part].make(name)
        except UserError as error:
            if part != "aot":
                raise
            print(f"skipped: aot {name}: {error}")
            continue
        jax.clear_caches()
        if WRITE.value:
            golden.setdefault(part, {})[name] = record
            continue
        before = golden.get(part, {}).get(name)
        if before is None:
            lines = ["it is not in the golden file (--write)"]
        elif part == "help":
            lines = text_differences(before["text"], record["text"])
        else:
            lines = differences(before, json.loads(json.dumps(record)), exact)
        if lines:
            differ.append(f"{part} {name}")
            more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
            print(*(f"  {part} {name}: {line}" for line in [*lines[:SHOWN], *more]), sep="\n")
    names = {(p, n) for p, what in PARTS.items() for n in what.names()}
    gone = {(p, n) for p in PARTS for n in golden.get(p, {})} - names
    if WRITE.value:
        for part, name in gone:
            del golden[part][name]
        save({"machine": this} | {part: golden.get(part, {}) for part in PARTS})
        print(f"{len(records)} records written")
        return 0
    asked = {part for part, _ in records} if ONLY.value else set(PARTS)
    differ += [f"{part} {name} (is gone)" for part, name in sorted(gone) if part in asked]
    print(f"{len(records)} records compared, {len(differ)} differ", *differ, sep="\n  ")
    return int(bool(differ))


if __name__ == "__main__":
    config.run(main)
