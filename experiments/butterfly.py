"""Butterflies: a Faster R-CNN that finds insects in photographs and names their species.

With no flags, or with the word `train`, a small detector learns ten drawn species in minutes of two
CPU cores. A folder of photographs with boxes takes one more flag (docs/detection.md):

    uv run experiments/butterfly.py
    uv run experiments/butterfly.py train --data.source=coco:FOLDER --run_dir=RUN
    uv run experiments/butterfly.py evaluate --run_dir=RUN
    uv run experiments/butterfly.py predict IMAGE... --run_dir=RUN --out=OUT
    uv run experiments/butterfly.py table --out=OUT

`train` can be stopped and continued as pretraining can; every flag of experiments/pretrain.py that
is not about text or sequences means the same here. `evaluate` writes RUN/evaluation.json: average
precision by VOC 2007 and 2010 and by COCO, and of each species. It judges the images that the run
held out; with the flag --data.source of other data, all images of that. `predict` writes
OUT/predictions.json and the images with their detections. Both take the settings of the run.

--protocol=A and B are the training sets of "The automatic identification of butterfly species"
(Xie et al., arXiv 1803.06626): half of the images in the habitat, with all images of specimens, or
with those of the same species. `table` trains three backbones by both, with three seeds (preset
`paper`, hours), and prints the means with their intervals. After Ctrl-C the same command goes on;
processes that share the work get different --backbones and the same --out, and one of all at last.
Exit code 2: a flag or a file is wrong, or no image could be read.
"""

import megajax.core.interrupted  # noqa: F401

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments.reports import butterfly as report
from experiments.reports.reporting import closing, read, written
from megajax.core import config, script
from megajax.core import mesh as mesh_
from megajax.core.errors import UserError, did_you_mean, unwritable
from megajax.core.files import expand, json_text, write_whole
from megajax.monitor import results
from megajax.systems import detector, job
from megajax.training import detection
from megajax.training.detection import FIRST, PRESETS, DetectConfig
from megajax.training.interrupts import ends_when_superseded

VERBS = ("train", "evaluate", "predict", "table")  # by which --help orders flags

config.define_flags(PRESETS, "easy", FIRST, VERBS)
OUT = flags.DEFINE_string("out", "runs/butterfly", "predict, table: folder for the results")
SEEDS = flags.DEFINE_integer("seeds", 3, "table: random seeds, from 0 on", lower_bound=1)
BACKBONES = flags.DEFINE_string(
    "backbones", ",".join(report.BACKBONES), "table: backbones, joined by commas"
)
PROTOCOLS = flags.DEFINE_string(
    "protocols", ",".join(report.PROTOCOLS), "table: protocols, joined by commas"
)
flags.DEFINE_alias("backbone", "model.backbone")
KIND = job.Kind(
    "butterfly",
    PRESETS,
    detection.take_model,
    detection.Images,
    batches=detection.canvas_batches,
    show=detection.show,
)


@ends_when_superseded()
def train() -> int:
    """Runs the training job. Returns the exit code."""
    code = job.run(KIND)
    if code == 0:
        print(closing(config.start_name()))
    return code


def saved(cfg: DetectConfig, typed: Mapping[str, Any], read: Mapping[str, Any]) -> DetectConfig:
    """Returns the configuration of the run that --run_dir names."""
    if "run_dir" not in typed:
        raise UserError("name the folder of a trained detector (--run_dir)")
    return config.load_json(DetectConfig, expand(typed["run_dir"]) / "config.json", "run_dir")


def open_saved() -> detector.SavedDetector:
    """Opens the detector of --run_dir on this machine's devices. Raises: UserError."""
    cfg, _ = config.from_flags(PRESETS, saved)
    mesh_.start(cfg.emulate, cfg.emulate_without_gpu)
    mesh = mesh_.fit(cfg.mesh, cfg.mesh, jax.device_count()).build()  # that of the run, if it fits
    mesh_.cache_programs(cfg.cache_dir)
    return detector.SavedDetector(cfg, mesh)


def evaluate() -> int:
    """Writes RUN/evaluation.json."""
    trained = open_saved()
    judged = trained.evaluate()
    print(detection.told(judged))
    for name, figures in judged["per_class"].items():
        print(f"  {name}: {figures['voc10']:.3f} ({figures['boxes']} boxes)")
    file = trained.folder / "evaluation.json"
    try:
        write_whole(file, json_text(judged))
    except OSError as error:
        raise unwritable(f"cannot write {file}: {error.strerror} (--run_dir)", error) from None
    print(f"see {file}")
    return 0


def predict(*images: str) -> int:
    """Writes OUT/predictions.json and the pictures."""
    if not images:
        raise UserError("name the images: predict IMAGE... --run_dir=RUN --out=OUT")
    out = results.writable_folder(OUT.value)
    count = detector.predict(open_saved(), images, out)
    print(f"see {out}/predictions.json")
    return 0 if count else 2


def table() -> int:
    """Writes OUT/butterfly_table.json after each run, and prints the table."""
    folder = results.writable_folder(OUT.value)
    names = config.flag_names(DetectConfig).values()
    passed = [
        f"--{n}={script.spell(flags.FLAGS[n].value)}" for n in names if flags.FLAGS[n].present
    ]
    start = config.start_flags() if config.start_given() else ["--preset=paper"]
    chosen = [
        _listed(flag, known)
        for flag, known in ((PROTOCOLS, report.PROTOCOLS), (BACKBONES, report.BACKBONES))
    ]
    about, rows = results.facts(f"{os.cpu_count()} x cpu", "measured"), []
    runs = report.runs(Path(__file__), [*start, *passed], folder, SEEDS.value, *chosen)
    file = folder / "butterfly_table.json"
    for row in written(runs, file, about, rows):
        print(f"{row['protocol']} {row['backbone']} {row['seed']}: mAP {row['voc10']:.3f}")
    print(report.markdown(read(file)))
    print(f"see {file}")
    return 0


def _listed(flag: flags.FlagHolder, known: tuple[str, ...]) -> list[str]:
    """Returns the words of a flag. Raises: UserError for one that is not known."""
    words = flag.value.split(",")
    for word in words:
        if word not in known:
            raise UserError(
                f"{flag.name}={flag.value}: {word!r} must be one of {', '.join(known)}."
                f"{did_you_mean(word, known)} (--{flag.name})"
            )
    return words


def main(verb: str = "train", *images: str) -> int:
    """Does what the word says."""
    verbs = {"train": train, "evaluate": evaluate, "predict": predict, "table": table}
    call = config.choose(verb, verbs)
    if images and verb != "predict":
        raise UserError(f"unexpected argument {images[0]!r}: settings are --FLAG=VALUE")
    return call(*images)


if __name__ == "__main__":
    sys.exit(config.run(main, optional=2**20))
