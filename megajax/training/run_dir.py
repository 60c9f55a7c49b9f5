"""The folder of a run: where it is, whether it may go on, what is in it.

config.json, metrics.jsonl, events.* (TensorBoard), checkpoints/, samples/, curve.png, summary.md,
unless the run is on bytes, tokenizer.json and, of a classifier, labels.json: the names of its
classes in the order of their numbers.
The same command finds the same folder, because its name holds a fingerprint of the configuration.
Before the fingerprint stand the preset and what differs from it: nano-layers_2-lr_0.01-0a1b2c3d.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import logging

from megajax.core import config, files
from megajax.core.errors import UserError, unwritable
from megajax.core.files import expand
from megajax.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, open_tokenizer
from megajax.training.config import JobConfig

MAX_CONFIG = 2**24  # (chosen) bytes of a config.json

# What may change between the starts of one run: where and how fast it goes, not what is computed.
# (mesh and micro-batches change the order of sums, nothing else.)
FREE = (
    "mesh", "shard", "pipeline", "context", "eval", "checkpoint", "log", "profile", "emulate",
    "emulate_without_gpu", "run_dir", "init_from", "cache_dir", "optim", "train.steps",
    "train.accumulate", "train.remat", "train.loss_chunks", "train.attention", "train.dtype",
    "train.segments", "train.global_batch", "new_head", "data.prefetch", "data.cache_gib",
    "data.test", "fault", "told_code",
    "precisions", "kind", "shares", "play", "train.precision",
    "overlap", "wire", "exchange", "generate", "placement", "rl.on_error", "rl.reward_seconds",
    "rl.eval_prompts", "rl.check_every",
)  # fmt: skip
FIXED = ("optim.name", "optim.ema")  # among those: another optimizer has another state
NOT_IN_NAME = (
    "run_dir", "log", "profile", "cache_dir", "data.prefetch", "data.cache_gib", "data.hash_gib",
    "fault", "kind", "shares", "play",
    "told_code", "checkpoint.memory_every_steps", "checkpoint.dir", "checkpoint.verify_saves",
    "checkpoint.key_file", "train.segments", "rl.on_error", "rl.reward_seconds",
)  # fmt: skip
LABELS = "labels.json"
MAX_LABELS = 2**24  # (chosen) bytes of that file


# A run's name says nothing of where it runs and who watches it.
MACHINE = ("mesh", "emulate", "emulate_without_gpu", "detector", "minder", "prometheus")
MAX_WORDS = 4  # (chosen) differences from the preset that a run's name says
MAX_WORD = 24  # (chosen) characters of one


@dataclasses.dataclass(frozen=True)
class RunDir:
    """Paths of a run. elsewhere: where its checkpoints are when not in its folder. former: the
    configuration that the folder held when this process began; None: it held none."""

    path: Path
    elsewhere: str | None = None
    former: Any = None

    def begin(
        self, cfg: JobConfig, tokenizer: Tokenizer | None, labels: Sequence[str] = ()
    ) -> None:
        """Makes the folder and writes what it takes to use the run elsewhere: the configuration,
        the tokenizer and the names of a classifier's classes. Called once everything else is known
        to work.

        A run that continues has a configuration already: if the disk takes no new one, the former
        one stays, and a warning says so.
        Raises: UserError when the folder of a new run cannot be written.
        """
        saved, text = self.path / "config.json", config.to_json(cfg)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if isinstance(tokenizer, JsonTokenizer):
                tokenizer.copy_to(self.path)
            if labels and not self._has_labels(labels):
                files.write_whole(self.path / LABELS, json.dumps(list(labels), indent=2) + "\n")
            if not saved.is_file() or saved.read_text() != text:
                files.write_whole(saved, text)
        except OSError as error:
            if saved.is_file():
                logging.warning("cannot write %s: %s; the former one stays", saved, error.strerror)
                return
            why = f"cannot write to {self.path}: {error.strerror} (--run_dir)"
            raise unwritable(why, error) from None

    def _has_labels(self, labels: Sequence[str]) -> bool:
        try:
            return saved_labels(self.path) == tuple(labels)
        except UserError:  # torn: it is written anew
            return False

    @property
    def metrics(self) -> Path:
        """One row for each step and evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> str | Path:
        """One folder a step; a path or an address."""
        return self.elsewhere or self.path / "checkpoints"

    @property
    def profile(self) -> Path:
        """What the profiler recorded."""
        return self.path / "profile"

    @property
    def samples(self) -> Path:
        """Generated text, one file an evaluation."""
        return self.path / "samples"


def saved_labels(folder: str | Path) -> tuple[str, ...] | None:
    """Returns the names of the classes of a run's classifier; None where it has none.

    Raises: UserError when the file holds something else.
    """
    file = expand(folder, "run_dir") / LABELS
    if not file.is_file():
        return None
    try:
        labels = files.parse_json(files.read_bytes(file, MAX_LABELS))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {file}: {error}; a list of the names of the classes, in the order of "
            "their numbers, mends it (--run_dir)"
        ) from None
    if not (isinstance(labels, list) and all(isinstance(name, str) for name in labels)):
        raise UserError(f"{file} must hold a list of strings, the names of classes (--run_dir)")
    return tuple(labels)


def run_path(cfg: JobConfig, experiment: str, preset: str, base: JobConfig | None = None) -> Path:
    """Returns the folder of a run: the same command finds it again.

    preset: the name of what the configuration starts from. base: that itself, so that the folder's
    name says what differs; a folder that an earlier version made without these words is found too.
    """
    if cfg.run_dir:
        return expand(cfg.run_dir, "run_dir")
    home, mark = f"runs/{experiment}", config.fingerprint(cfg, NOT_IN_NAME)
    former = expand(f"{home}/{preset}-{mark}", "run_dir")
    words = [] if base is None else differences(cfg, base)
    return expand("-".join([f"{home}/{preset}", *words, mark])) if not former.exists() else former


def differences(cfg: JobConfig, base: JobConfig) -> list[str]:
    """Returns short words for what differs from a preset and is a part of a run's name.

    Letters, digits and dots only; at most MAX_WORDS words and one for the number of the others.
    """
    words = []
    for name, _, new in config.diff(cfg, base):
        if not any(name == i or name.startswith(f"{i}.") for i in (*NOT_IN_NAME, *MACHINE)):
            shown = str(new).lower() if new is None or isinstance(new, bool) else str(new)
            shown = re.sub(r"[^A-Za-z0-9.]+", "_", Path(shown).name or shown).strip("_.")
            words.append(f"{name.rpartition('.')[2]}_{shown}"[:MAX_WORD].rstrip("_."))
    more = len(words) - MAX_WORDS
    return [*words[:MAX_WORDS], *([f"and_{more}_more"] if more > 0 else [])]


def open_run(cfg: JobConfig, experiment: str, preset: str, base: JobConfig | None = None) -> RunDir:
    """Finds the folder of a run and checks that this configuration may continue what is there.

    preset, base: as run_path takes them.
    Raises: UserError when the folder holds a run that this one cannot continue.
    """
    path = run_path(cfg, experiment, preset, base)
    saved = path / "config.json"
    elsewhere = cfg.checkpoint.dir
    if elsewhere and is_imported(path):
        raise UserError(
            f"{path} holds imported weights, which checkpoints at {elsewhere} would pass over: "
            "leave --checkpoint.dir out, or begin a new --run_dir with --init_from"
        )
    former = _saved_config(cfg, saved) if saved.is_file() else None
    if former is not None and not is_imported(path):
        fixed = [
            f"{n} was {old}, now {new}"
            for n, old, new in config.diff(cfg, former)
            if n in FIXED or not any(n == f or n.startswith(f"{f}.") for f in FREE)
        ]
        if fixed:
            raise UserError(
                f"{path} holds another run: {'; '.join(fixed)}. Give the former values to continue "
                "it, or another --run_dir"
            )
    return RunDir(path, elsewhere, former)


def _saved_config(cfg: JobConfig, saved: Path) -> JobConfig | None:
    """Returns the configuration in a run's folder; None where the file is torn and this command's
    own takes its place, because it named the folder: by its fingerprint, not by --run_dir.

    Raises: UserError.
    """
    try:
        return config.load_json(type(cfg), saved, "run_dir")
    except UserError as error:
        try:
            text = files.read_bytes(saved, MAX_CONFIG)
            files.parse_json(text)
        except (OSError, UserError):
            raise error from None
        except ValueError:
            if not cfg.run_dir:
                logging.warning("%s is torn, and is written anew from this command", saved)
                return None
            raise UserError(
                f"{saved} is torn: delete it and give the command that began this run, with all of "
                "its flags; it writes the file anew and goes on (--run_dir)"
            ) from None
        raise


def saved_tokenizer(folder: str | Path) -> Tokenizer:
    """Returns the tokenizer that the run in a folder was trained with.

    Raises: UserError when its file is gone: only a run that says so was trained on bytes.
    """
    path = expand(folder, "run_dir")
    if (path / "tokenizer.json").is_file():
        return open_tokenizer(str(path / "tokenizer.json"))
    data = files.read_object(path / "config.json", MAX_CONFIG, "run_dir").get("data")
    named = data.get("tokenizer", "bytes") if isinstance(data, dict) else "bytes"
    if named != "bytes":
        raise UserError(
            f"{path} has no tokenizer.json, and its run was trained with data.tokenizer={named}: "
            "name the file (--tokenizer=FILE)"
        )
    return ByteTokenizer()


def is_imported(path: Path) -> bool:
    """Tells a folder that holds imported weights only, step 0, from a run that has trained."""
    return [p.name for p in (path / "checkpoints").glob("[0-9]*")] == ["0"]
