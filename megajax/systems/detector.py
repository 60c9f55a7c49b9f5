"""A trained detector: opened from a run's folder, judged on data, used on image files.

experiments/butterfly.py evaluates and predicts by this module.

Legend: N detections of an image, 4 numbers of a box: x0, y0, x1, y1 in pixels, exclusive.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from megajax.checkpoint.manager import CheckpointManager
from megajax.checkpoint.trust import DamagedError
from megajax.core import config
from megajax.core.errors import UserError
from megajax.core.files import expand, open_regular, write_whole
from megajax.data.detection import Example, FileExample
from megajax.data.images import read_header
from megajax.training.detection import (
    Boxes,
    DetectConfig,
    Predictor,
    detection_rows,
    drawn,
    judge,
    open_sides,
    open_source,
    readable,
    renumbered,
    truths_of,
)
from megajax.training.run_dir import saved_labels
from megajax.training.step import make_train_step
from megajax.training.task import TrainState


class SavedDetector:
    """The detector of a run's newest checkpoint.

    cfg: of the run, changed by the caller. classes: the names of its classes. step: of the
    checkpoint. examples: the fingerprint of the data that the run learns from.
    """

    def __init__(self, cfg: DetectConfig, mesh: Mesh):
        """cfg: with `run_dir`. Raises: UserError for a folder without a checkpoint or classes."""
        assert cfg.run_dir is not None
        self.cfg, self.folder = cfg, expand(cfg.run_dir, "run_dir")
        classes = saved_labels(self.folder)
        if classes is None:
            raise UserError(f"{self.folder} has no labels.json with the names of its classes")
        self.classes = classes
        batch = -(-cfg.train.global_batch // mesh.size) * mesh.size  # of any number of devices
        changes = {"train.accumulate": 1, "train.global_batch": batch}
        self._step = make_train_step(config.override(cfg, changes), mesh)
        spec = cfg.checkpoint
        manager = CheckpointManager(
            spec.dir or self.folder / "checkpoints", keep=0, key_file=spec.key_file
        )
        self.step, state = self._newest(manager)
        self._weights = self._step.weights(state)
        self.examples = manager.data_state(self.step).get("examples")

    def _newest(self, manager: CheckpointManager) -> tuple[int, TrainState]:
        """Returns the newest step and what it has of the state that weights are read from."""
        abstract = self._step.abstract_state
        members = ("params", "opt") if self.cfg.optim.ema else ("params",)
        like = {name: getattr(abstract, name) for name in members}
        while (latest := manager.latest()) is not None:
            try:
                restored = manager.restore(latest, like=like, partial=True)
                return latest, dataclasses.replace(abstract, **restored)
            except DamagedError:
                if latest in manager.steps():
                    raise  # else a run that goes on removed it, and has a newer one
        raise UserError(f"{self.folder} has no checkpoint yet (--run_dir)")

    def __call__(self, examples: Sequence[Example]) -> list[Boxes | None]:
        """Returns the detections of each example, as Predictor does."""
        if not examples:
            return []
        most = min(self.cfg.train.global_batch, len(examples))
        predictor = Predictor(self.cfg, self._step.layout, most)
        return predictor(self._weights, examples, detection_rows(self.cfg, examples))

    def evaluate(self, say: Callable[[str], None] = print) -> dict[str, Any]:
        """Returns what evaluation.json holds.

        Of the data that the run learns from, the side that it does not learn from is judged, and
        the species with a single image in the habitat do not count; of other data, all images.
        Raises: UserError for data with boxes of other classes.
        """
        cfg, single, part = self.cfg, (), "images"
        dataset = open_source(cfg.data.source, cfg.data.max_megapixels, cfg.data.follow_links)
        for line in dataset.report():
            say(f"{cfg.data.source}: {line}")
        what, whose = f"data.source={cfg.data.source}", f"the run in {self.folder}"
        sides = None
        if dataset.fingerprint() == self.examples:
            sides = open_sides(cfg.data, cfg.protocol, cfg.train.seed)
            part = "images, which the run learned from: none were held out"
        if sides is not None and sides.test:
            examples, single = [*sides.test], sides.single
            part = "images that the run did not learn from"
        else:
            examples = renumbered(dataset, self.classes, what, whose)
        say(f"{cfg.data.source}: {len(examples):,} {part}")
        examples, detections = readable(examples, self(examples))
        judged = judge(self.classes, truths_of(examples), detections, single)
        return {"run": str(self.folder), "step": self.step, "source": cfg.data.source} | judged


def photograph(path: str, max_megapixels: float) -> FileExample:
    """Returns an image file as an example without boxes. Raises: UserError naming the file."""
    file = expand(path)
    try:
        with open_regular(file) as opened:
            header = read_header(opened, path, max_megapixels)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    return FileExample(
        path=path,
        boxes=np.zeros((0, 4), np.float32),
        labels=np.zeros(0, np.int32),
        difficult=np.zeros(0, bool),
        size=header.size,
        folder=file.parent,
        name=file.name,
        header=header,
        max_megapixels=max_megapixels,
        follow_links=True,
    )


def predict(
    detector: SavedDetector, paths: Sequence[str], out: Path, say: Callable[[str], None] = print
) -> int:
    """Writes OUT/predictions.json and the images with their detections; an image that cannot be
    read is named and left out. Returns how many could be read."""
    examples: list[Example] = []
    for path in paths:
        try:
            examples.append(photograph(path, detector.cfg.data.max_megapixels))
        except UserError as error:
            say(f"left out: {error}")
    examples, detections = readable(examples, detector(examples))
    rows: list[dict[str, Any]] = []
    names: list[str] = []
    for example, detected in zip(examples, detections, strict=True):
        listed = [
            {"box": box_4.tolist(), "score": float(score), "label": detector.classes[int(label)]}
            for box_4, label, score in zip(
                *(detected[n] for n in ("boxes", "labels", "scores")), strict=True
            )
        ]
        rows.append({"image": example.path, "detections": listed})
        stem = Path(example.path).stem
        candidates = (stem, *(f"{stem}-{n}" for n in range(2, len(examples) + 2)))
        names.append(next(name for name in candidates if name not in names))
        min_score = detector.cfg.eval.min_score
        picture = drawn(example.image(), detected, detector.classes, min_score, side=None)
        picture.save(out / f"{names[-1]}.jpg", quality=90)
        best = [f"{d['label']} {d['score']:.2f}" for d in listed if d["score"] >= min_score]
        say(f"{example.path}: {', '.join(best) or 'nothing'}")
    write_whole(out / "predictions.json", json.dumps(rows, indent=1) + "\n")
    return len(rows)
