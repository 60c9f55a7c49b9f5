"""QSync (arXiv 2407.02327): one training job on unlike GPUs, the weak ones with fewer bits.

    uv run experiments/qsync.py plan --cluster=v100:2,t4:2
    uv run experiments/qsync.py profile
    uv run experiments/qsync.py plan --cluster=v100:2,t4:2 --omega=runs/qsync/omega.json
    uv run experiments/qsync.py plan --preset=paper
    uv run experiments/qsync.py run
    uv run experiments/qsync.py losses --seeds=3

All devices compute the same step, each on its rows of the batch, and wait for each other. So the
weak kinds compute some matrix products in fewer bits. `plan` chooses these products: the ones that
add the least error to the gradients (the sum of omega) among the plans with the shortest step. It
prints this plan beside full precision, one precision for all products of the weak kinds, and uneven
batches (rows in proportion to speed), and writes OUT/precisions.json for experiments/pretrain.py,
OUT/qsync.json, .svg and .png. The strong kinds (--strong) always compute in full precision.

`profile` trains a few steps on one CPU device, collects the operands and gradients of every
product, and writes OUT/omega.json with the error of each product in each precision. Without
--omega, `plan` assumes equal relative errors of normal numbers, so that only precision and depth
tell products apart.

`run` starts two real processes on this machine's CPU, as one job. They play a strong and a weak
device (--strong_rates, --weak_rates) by waiting at each product, and train each of --ways with
--seeds: full precision, float16 or int8 in all products of the weak process, QSync's plan, and
uneven batches. It prints and draws each way's step, and its held-out loss after equal steps and
after equal time; and how well the step of --held_out random plans was predicted.

`losses` trains the decoder on one CPU device with every --train.precision and writes the held-out
losses to OUT/qsync_losses.json.

Step times of `plan` are ESTIMATES: a SIMULATED step of seconds from a cost model (--cost). Flags of
a run (--model.layers, --train.global_batch) are those of pretraining. Exit code 2: a flag or a file
is wrong, or no plan fits the memory.
"""

import megajax.core.interrupted  # noqa: F401

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.reports import qsync as report
from experiments.reports import qsync_run as playing
from experiments.reports.reporting import closing
from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.config import equal, group, option
from megajax.core.errors import UserError, did_you_mean
from megajax.core.files import expand
from megajax.core.hardware import Link, parse_mixed
from megajax.core.mesh import MeshSpec
from megajax.data.config import LabelledConfig
from megajax.models.decoder_config import DecoderConfig
from megajax.models.encoder_config import PRESETS as ENCODERS
from megajax.monitor import results
from megajax.systems.cdmpp import backend
from megajax.systems.qsync import profile
from megajax.training import presets
from megajax.training.config import Config, JobConfig, TrainConfig
from megajax.training.finetune import FinetuneConfig

VERBS = ("profile", "plan", "run", "losses")
PLAN = ("plan",)
PROFILE = ("profile",)
RUN = ("run",)
LOSSES = ("losses",)


@dataclass(frozen=True)
class QSyncConfig(Config):
    """A training run, and the unlike devices that it is planned for."""

    model: DecoderConfig = group(DecoderConfig, needs=equal("encoder", None))
    encoder: str | None = option(
        None, "encoder that is trained, in the place of the decoder of --model; none: that decoder"
    )
    cluster: str = option("v100:2,t4:2", "the devices, kind:GPUS,kind:GPUS", verbs=PLAN)
    memory: str = option(
        "all",
        "share of their memory that kinds may fill, kind:SHARE,...; all: the whole memory; several "
        "cases, each planned, stand between semicolons",
        verbs=PLAN,
    )
    strong: str = option(
        "fastest",
        "kinds that compute in full precision alone, joined by commas; fastest: the kind with the "
        "shortest step",
        verbs=PLAN,
    )
    network: float = option(
        100.0, "link of each device to the others, one direction", "Gbit/s", above=0, verbs=PLAN
    )
    buckets: Literal["step", "layer"] = option(
        "step",
        "when gradients are exchanged: all after the backward pass, or those of each layer",
        verbs=PLAN,
    )
    int8_backward: Literal["bfloat16", "float16"] = option(
        "bfloat16",
        "data type of the backward products of int8; where a card does not compute in it, XLA "
        "widens them to float32. float16: as the paper's kernels, not ours",
        verbs=PLAN,
    )
    omega: str | None = option(
        None, "file that `profile` wrote, with the errors of products; none: assumed", verbs=PLAN
    )
    gamma: float | None = option(
        None,
        "weight of the errors of forward passes beside those of backward passes; none: 1 where "
        "errors are assumed, 1 / N^2 in a profile of N predictions a batch",
        at_least=0,
    )
    cost: Literal["roofline", "learned", "table"] = option(
        "roofline", "source of the times of operations, as of experiments/plan.py", verbs=PLAN
    )
    cost_file: str | None = option(
        None,
        "file of the predictor, or files of tables, one for each kind, with commas",
        verbs=PLAN,
    )
    form: Literal["exact", "paper"] = option(
        "exact", "formula of the errors, of variances or as the authors' code has it", verbs=PROFILE
    )
    warm_up: int = option(
        8, "steps that are trained before the profile", at_least=0, verbs=PROFILE + RUN
    )
    batches: int = option(2, "number of batches that are profiled", at_least=1, verbs=PROFILE + RUN)
    rows: int = option(8, "rows of a batch of the profile", at_least=1, verbs=PROFILE + RUN)
    plans: int = option(
        0,
        "random plans of which the sum of omega is compared with what they do to the loss and to "
        "its gradients (OUT/qsync_ranks.json)",
        at_least=0,
        verbs=PROFILE,
    )
    strong_rates: str = option(
        "float32:50",
        "rates that the strong process plays, by precision in GFLOP/s",
        verbs=RUN,
    )
    weak_rates: str = option(
        "float32:25,float16:40,int8:65",
        "rates that the weak process plays, by precision in GFLOP/s",
        verbs=RUN,
    )
    ways: str = option(
        ",".join(playing.WAYS),
        "ways to train: full precision, float16 or int8 in all products of the weak process, "
        "QSync's plan, uneven batches",
        verbs=RUN,
    )
    seeds: int = option(1, "runs of each way, or of each precision", at_least=1, verbs=RUN + LOSSES)
    held_out: int = option(
        1, "random plans whose predicted step is compared with a job's", at_least=0, verbs=RUN
    )
    out: str = results.out_option("qsync")

    def __post_init__(self) -> None:
        """Refuses encoders, clusters and shares of memory that do not exist."""
        super().__post_init__()
        if self.encoder is not None and self.encoder not in ENCODERS:
            near = did_you_mean(self.encoder, ENCODERS)
            raise UserError(
                f"encoder={self.encoder} must be one of {', '.join(ENCODERS)}.{near} (--encoder)"
            )
        parse_mixed(self.cluster)
        if unknown := [name for name in self.ways.split(",") if name not in playing.WAYS]:
            raise UserError(
                f"ways={self.ways}: {unknown[0]!r} must be of {', '.join(playing.WAYS)}."
                f"{did_you_mean(unknown[0], playing.WAYS)} (--ways)"
            )
        self.memory_shares()

    def job(self) -> JobConfig:
        """Returns the training run."""
        if self.encoder is None:
            return self
        return FinetuneConfig(
            model=dataclasses.replace(ENCODERS[self.encoder](), head="mlm"),
            mesh=self.mesh,
            shard=self.shard,
            train=self.train,
            optim=self.optim,
            wire=self.wire,
            data=LabelledConfig(**vars(self.data)),
            cache_dir=self.cache_dir,
        )

    def memory_shares(self) -> list[dict[str, float]]:
        """Returns {kind: share of its memory} of each case. Raises: UserError."""
        kinds = {card.name.lower() for card in parse_mixed(self.cluster).cards}
        cases: list[dict[str, float]] = []
        for text in self.memory.split(";"):
            case: dict[str, float] = {}
            for part in () if text.strip() in ("", "all") else text.split(","):
                kind, _, share = part.partition(":")
                kind = kind.strip().lower()
                if kind not in kinds:
                    near = did_you_mean(kind, kinds)
                    raise UserError(
                        f"memory={self.memory}: {kind!r} must be of {', '.join(sorted(kinds))}."
                        f"{near} (--memory, --cluster)"
                    )
                try:
                    case[kind] = float(share)
                except ValueError:
                    case[kind] = 0.0
                if not 0 < case[kind] <= 1:
                    raise UserError(
                        f"memory={self.memory}: the share of {kind} is {share!r} and must be above "
                        f"0 and at most 1, e.g. {kind}:0.3 (--memory)"
                    )
            cases.append(case)
        return cases


def _run(name: str) -> Callable[[], QSyncConfig]:
    """Returns a preset of pretraining, whose mesh cuts the batch alone."""

    def preset() -> QSyncConfig:
        base = presets.PRESETS[name]()
        members = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
        return QSyncConfig(**(members | {"mesh": MeshSpec(), "emulate_without_gpu": 1}))

    preset.__doc__ = f"The run {name} of pretraining on two V100 and two T4."
    return preset


def paper() -> QSyncConfig:
    """QSync's clusters A and B: BERT base on 16 V100 and 16 T4, which may fill 30 % in B.

    24 rows a GPU and 384 tokens: (the authors' BERT on SQuAD; 384: assumed, its usual length).
    """
    return dataclasses.replace(
        _run("gpt2")(),
        encoder="bert_base",
        cluster="v100:16,t4:16",
        memory="all;t4:0.7",
        int8_backward="float16",
        train=TrainConfig(global_batch=24 * 32, seq_len=384, remat="none"),
    )


def played() -> QSyncConfig:
    """Five ways to train nano with three seeds by two processes, and twelve plans held out: an hour
    of two CPU cores, which wait most of it."""
    base = _run("nano")()
    return dataclasses.replace(
        base,
        train=dataclasses.replace(base.train, steps=120, global_batch=16),
        optim=dataclasses.replace(base.optim, schedule="constant"),
        eval=dataclasses.replace(base.eval, every=10, batches=8),
        strong_rates="float32:12.5",
        weak_rates="float32:6.25,float16:10,int8:16",
        seeds=3,
        held_out=12,
    )


def take(base: Any, typed: Mapping[str, Any], read: Mapping[str, Any]) -> Any:
    """Returns `base` as pretraining does, with the model that --init_from names."""
    taken = presets.take_model(base, typed, read)
    if isinstance(taken, QSyncConfig):
        return taken
    members = {field.name: getattr(taken, field.name) for field in dataclasses.fields(taken)}
    return QSyncConfig(**members)


def plan(cfg: QSyncConfig) -> int:
    """Writes OUT/precisions.json and the comparison."""
    folder = results.writable_folder(cfg.out)
    job, cluster = cfg.job(), parse_mixed(cfg.cluster, Link(cfg.network * 1e9 / 8, 14e-6))
    try:
        omega = None if cfg.omega is None else profile.load(expand(cfg.omega, "omega"))
    except UserError as error:
        raise UserError(f"{error} (--omega)") from None
    about = results.facts(cluster.name, "simulated estimate") | {
        "preset": config.start_name(),
        "model": cfg.encoder or "decoder",
        "times": cfg.cost if cfg.cost_file is None else f"{cfg.cost} {cfg.cost_file}",
        "omega": "assumed" if omega is None else "profiled",
        "int8_backward": cfg.int8_backward,
        "paper": report.PAPER,
    }
    rows: list[dict[str, Any]] = []
    for number, shares in enumerate(cfg.memory_shares()):
        case = report.Case(job, cluster, shares, omega, cfg)
        for kind, card in case.cards.items() if number == 0 else ():
            if said := backend.unknown(case.costs[kind], card):
                print(said)
        made, chosen = case.rows()
        rows += made
        name = "precisions.json" if number == 0 else f"precisions_{number + 1}.json"
        chosen.save(folder / name)
        results.write(folder / "qsync.json", about, rows)
        print(report.text(made, about), flush=True)
        print(folder / name)
    report.draw(rows, folder / "qsync")
    if about["preset"] == "paper":
        print(report.PAPER)
    print(folder / "qsync.json")
    return 0


def measure(cfg: QSyncConfig) -> int:
    """Writes OUT/omega.json."""
    from experiments.reports import qsync_profile

    folder = results.writable_folder(cfg.out)
    made = profiled(cfg, folder)
    print(qsync_profile.text(made))
    print(folder / "omega.json")
    return 0


def profiled(cfg: QSyncConfig, folder: Path) -> profile.Errors:
    """Returns the errors of all products, which FOLDER/omega.json has then."""
    from experiments.reports import qsync_profile

    mesh_.start(1)  # no GPU is used
    job = cfg.job()
    train = dataclasses.replace(
        job.train, global_batch=cfg.rows, accumulate=1, remat="none", loss_chunks=1
    )
    job = dataclasses.replace(job, train=train, mesh=MeshSpec())
    one = qsync_profile.measured(job, cfg.warm_up, cfg.batches)
    gamma = cfg.gamma if cfg.gamma is not None else 1 / one.predictions**2
    made = profile.errors(one.stats, job.model.layers, train.dtype, gamma, cfg.form)
    facts = results.facts("one CPU device", "measured") | {"form": cfg.form, "gamma": f"{gamma:g}"}
    profile.save(folder / "omega.json", made, facts | {"preset": config.start_name()})
    if cfg.plans:
        omegas = {
            "exact": profile.errors(one.stats, job.model.layers, train.dtype, gamma, "exact"),
            "paper": profile.errors(one.stats, job.model.layers, train.dtype, 1.0, "paper"),
        }
        rows = qsync_profile.ranks(one.task, one.params, one.batches, omegas, cfg.plans)
        about = facts | {"plans": cfg.plans, "preset": config.start_name()}
        results.write(folder / "qsync_ranks.json", about, rows)
        for row in rows:
            print(
                f"{row['form']}: over {cfg.plans} random plans the sum of omega has the rank "
                f"correlation {row['loss']:.2f} with the change of the loss, and "
                f"{row['gradients']:.2f} with the squared error of the gradients"
            )
    return made


def play(cfg: QSyncConfig) -> int:
    """Trains each way by two processes. Writes OUT/qsync_run.json, .svg and .png."""
    folder = results.writable_folder(cfg.out)
    players = playing.Players(cfg, folder / "jobs")
    omega = profiled(cfg, folder) if cfg.omega is None else profile.load(expand(cfg.omega, "omega"))
    players.calibrate()
    replays = players.held_out(cfg.held_out)
    rows = playing.judged(players.ways(cfg.ways.split(","), cfg.seeds, omega))
    about = results.facts("2 processes of a CPU", "emulated: rates are played by waiting") | {
        "preset": config.start_name(),
        "rates": f"strong {cfg.strong_rates}; weak {cfg.weak_rates} (GFLOP/s)",
        "steps": cfg.train.steps,
        "seeds": cfg.seeds,
        "replays": replays,
    }
    results.write(folder / "qsync_run.json", about, rows)
    print(playing.text(rows, replays))
    playing.draw(rows, folder / "qsync_run")
    print(folder / "qsync_run.json")
    return 0


def train(cfg: QSyncConfig) -> int:
    """Writes OUT/qsync_losses.json."""
    folder = results.writable_folder(cfg.out)
    members = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(Config)}
    rows = playing.by_precision(Config(**members), folder / "jobs", cfg.seeds)
    about = results.facts("1 CPU device", "emulated") | {"preset": config.start_name()}
    results.write(folder / "qsync_losses.json", about | {"steps": cfg.train.steps}, rows)
    print(folder / "qsync_losses.json")
    return 0


def main(verb: str = "") -> int:
    """Does what the word says."""
    call = config.choose(verb, {"profile": measure, "plan": plan, "run": play, "losses": train})
    cfg, base = config.from_flags(PRESETS, take, verb)
    for name, old, new in config.diff(cfg, base):
        print(f"{name}: {old} -> {new}")
    code = call(cfg)
    if not code and verb != "profile":
        print(closing(config.start_name()))
    return code


PRESETS = {"tiny": _run("nano"), "paper": paper, "played": played}
PRESETS |= {name: _run(name) for name in presets.PRESETS if name != "nano"}

if __name__ == "__main__":  # others import the configuration
    config.define_flags(
        PRESETS,
        "tiny",
        ("preset", "config", "cluster", "memory", "omega", "train.global_batch"),
        VERBS,
    )
    sys.exit(config.run(main, optional=1))
