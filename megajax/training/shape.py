"""From a run's configuration to the cost model, and what the cost model decides for a run.

Floor: training. Memory and time of a `StepShape` are megajax/cost's; systems/aot.py plans with it.
"""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.checkpoint import steps, store
from megajax.core.errors import UserError
from megajax.core.files import check_writable, expand
from megajax.cost import memory
from megajax.cost.base import Phase
from megajax.cost.step import MOMENTS, Coding, Pipeline, StepShape
from megajax.parallel import sharding, wire
from megajax.parallel.exchange import refuse_kernels
from megajax.parallel.overlap import refuse_fused
from megajax.training.config import JobConfig
from pallas_kernels.dispatch import is_hopper

# Share of a GPU's memory that the terms of cost/memory.py may fill (assumed until a measured peak
# stands beside them).
ROOM = 0.85
COUNTED = 256  # rows whose documents are counted (chosen)
DEVIATIONS = 8  # of a batch's mean number of documents, for which there is room (chosen)
MOST_CHUNKS = 64  # (chosen) more pieces make the head's products too small to be worth it


def step_shape(
    cfg: Any,
    sizes: dict[str, int],
    fused_attention: bool = False,
    phase: Phase = "train",
) -> StepShape:
    """Returns what the cost model must know of a configuration. sizes: {mesh axis: size}.

    Raises: UserError if the model's configuration has no `workload`.
    """
    if not hasattr(cfg.model, "workload"):
        raise UserError(
            f"{type(cfg.model).__name__} has no workload(rows, seq_len, dtype, phase), from which "
            "memory and time are estimated; write it (megajax/cost/base.py:Workload), or leave "
            "nothing to the estimate (--train.loss_chunks=1 and not 0)"
        )
    stages, train, pipeline = sizes["pipe"], cfg.train, cfg.pipeline
    schedule = Pipeline()
    if stages > 1:
        hides = pipeline.overlap == "chunk"
        pieces, order = pipeline.pieces(stages), pipeline.schedule
        last = pipeline.stash, hides, pipeline.idle
        schedule = Pipeline(stages, pieces, pipeline.chunks, order, *last)
    return StepShape(
        load=cfg.workload(train.global_batch, phase),
        sizes=sizes,
        zero_axes=tuple(a for a in sharding.zero_axes(cfg.zero) if sizes[a] > 1),
        accumulate=train.accumulate if phase == "train" else 1,
        remat=train.keeps,
        loss_chunks=max(train.loss_chunks, 1) if phase == "train" else 1,
        optimizer=cfg.optim.name if cfg.optim.name in MOMENTS else "adamw",  # (chosen) two moments
        averages=cfg.optim.ema > 0,
        fused_attention=fused_attention,
        local_gradients=stages > 1 and pipeline.gradients == "local",
        pipeline=schedule,
        context=cfg.context.kind,
        resident=phase == "train"
        and (cfg.zero == "optimizer" or (cfg.wire != "none" and stages > 1)),
        coding=_coding(cfg) if phase == "train" and cfg.wire != "none" else None,
    )


def _coding(cfg: Any) -> Coding:
    """Returns what the cost model must know of the wire."""
    codec = wire.codec(cfg)
    return Coding(
        codec.weights,
        codec.inside,
        codec.between,
        max(codec.hadamard, 1),
        wire.sends_differences(cfg),
        codec.feedback.format.effective_bits if codec.feedback else 0.0,
    )


def with_segments(cfg: Any, rows: Any, sizes: dict[str, int], batch: int | None = None) -> Any:
    """Returns the configuration with a number of documents a row where it leaves that open (0).

    Of rows with images it is that of their documents or that of their images, which are the
    segments of the tower's attention, whichever is larger. It is the mean over the first rows that
    training reads, and so many of their deviations more that hardly any batch of a device has more.
    Rows are the same in all processes, so the number is, too.

    Args: rows: a data.loader.Rows. sizes: {mesh axis: size}. batch: the rows of a step, if all
      devices took as few as the one that takes fewest; None: train.global_batch.
    """
    train = cfg.train
    if train.segments:
        return cfg
    counts = np.array([_segments(rows[i]) for i in range(COUNTED)])
    pieces = cfg.pipeline.pieces(sizes["pipe"]) if sizes["pipe"] > 1 else train.accumulate
    ways = sizes["node"] * sizes["data"] * sizes["expert"]
    each = max((batch or train.global_batch) // (ways * pieces), 1)
    room = int(np.ceil((counts.mean(0) + DEVIATIONS * counts.std(0) / np.sqrt(each)).max()))
    return dataclasses.replace(cfg, train=dataclasses.replace(train, segments=max(room, 2)))


def _segments(row: Any) -> list[int]:
    """Returns the number of documents of a row, and of its images if it may have some."""
    ids = [row[name] for name in ("segments", "images") if name in row]
    return [int(np.count_nonzero(np.diff(one, prepend=-2) * (one >= 0))) for one in ids]


def is_open(cfg: Any) -> bool:
    """Tells whether `resolved` has something to choose."""
    return not cfg.train.loss_chunks or cfg.train.remat == "auto"


def resolved(
    cfg: Any, sizes: dict[str, int], memory_bytes: int | None, batch: int | None = None
) -> Any:
    """Returns the configuration with what it leaves open chosen for a GPU's memory.

    First rematerialisation, then the loss chunks: keeping every product spares more time than
    logits in one piece do. memory_bytes: as in `with_chunks`. batch: the rows of a step, if all
    devices took as many as the one that takes most; None: train.global_batch.
    """
    train = cfg.train
    if batch not in (None, train.global_batch):
        fullest = dataclasses.replace(cfg, train=dataclasses.replace(train, global_batch=batch))
        chosen = resolved(fullest, sizes, memory_bytes).train
        chosen = dataclasses.replace(chosen, global_batch=train.global_batch)
        return dataclasses.replace(cfg, train=chosen)
    if train.remat == "auto":
        dots = dataclasses.replace(cfg, train=dataclasses.replace(train, remat="dots"))
        fits = False
        if memory_bytes is not None:
            step = step_shape(with_chunks(dots, sizes, memory_bytes), sizes, _is_fused(train))
            fits = memory.bound(memory.terms(step)) <= ROOM * memory_bytes
        outputs = dataclasses.replace(cfg, train=dataclasses.replace(train, remat="outputs"))
        cfg = dots if fits else outputs
    return with_chunks(cfg, sizes, memory_bytes)


def _is_fused(train: Any) -> bool:
    # What parallel/context.py takes in 16 bit on any GPU keeps no logits.
    return train.attention != "xla" and train.dtype == "bfloat16"


def with_chunks(cfg: Any, sizes: dict[str, int], memory_bytes: int | None) -> Any:
    """Returns the configuration with a number of loss chunks where it leaves that open (0).

    The fewest pieces of the sequence with which the terms of memory fill at most ROOM of the GPU,
    because one piece needs no second product for the logits and several do, and each piece adds
    once more to the table's gradient. memory_bytes: of a GPU (`mesh.memory_bytes`); None: unknown,
    as on a CPU, and one piece.
    """
    train = cfg.train
    if train.loss_chunks:
        return cfg
    chosen = 1
    if memory_bytes is not None:
        step = step_shape(cfg, sizes, _is_fused(train))
        tokens = train.seq_len // sizes["context"]
        pieces = [n for n in range(1, MOST_CHUNKS + 1) if tokens % n == 0]
        needed = (
            memory.bound(memory.terms(dataclasses.replace(step, loss_chunks=n))) for n in pieces
        )
        fits = [n for n, b in zip(pieces, needed, strict=True) if b <= ROOM * memory_bytes]
        chosen = min(fits, default=pieces[-1])
    return dataclasses.replace(cfg, train=dataclasses.replace(train, loss_chunks=chosen))


# ---- preflight
#
# What a run needs of this machine, checked before it reads any text: kernels, packages, folders.
#
# `Config.check` asks whether the parts of a configuration fit each other and the mesh; it holds on
# any machine, so a plan asks it too. What is here depends on where the run starts.


def check(cfg: JobConfig, device: jax.Device, folder: Path) -> None:
    """Refuses what this process cannot do. folder: of the run; only the first process writes there.

    Raises: UserError with the flag.
    """
    check_attention(cfg.train.attention, cfg.train.dtype, device)
    refuse_fused(cfg.overlap, device)
    refuse_kernels(cfg, device)
    if jax.process_index() != 0:
        return
    if cfg.log.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"log.wandb={cfg.log.wandb} needs a package that is not installed: uv sync --extra "
            "wandb, or none (--log.wandb)"
        )
    check_writable(folder, "run_dir")
    if cfg.checkpoint.dir is not None and "://" in cfg.checkpoint.dir:
        check_address(cfg.checkpoint.dir)
    elif cfg.checkpoint.dir is not None:
        check_writable(expand(cfg.checkpoint.dir, "checkpoint.dir"), "checkpoint.dir")


def check_address(address: str) -> None:
    """Refuses an address that is no object store's, or names no bucket; asks no store.

    Raises: UserError.
    """
    try:
        if store.is_address(address):
            store.ObjectPath(address).spec()
        else:
            steps.open_steps(address)
    except store.CheckpointError as error:
        raise UserError(f"{error} (--checkpoint.dir)") from None


def check_attention(attention: str, dtype: str, device: jax.Device) -> None:
    """Refuses an attention kernel that the device or the type has not. Raises: UserError."""
    if attention not in ("cudnn", "hopper"):
        return
    if device.platform == "cpu" or (attention == "hopper" and not is_hopper(device.device_kind)):
        needed = "an NVIDIA GPU" if attention == "cudnn" else "a Hopper GPU"
        machine = "a CPU" if device.platform == "cpu" else device.device_kind
        raise UserError(
            f"train.attention={attention} needs {needed}, found {machine}; use auto, xla or varlen "
            "(--train.attention)"
        )
    if jnp.dtype(dtype).itemsize != 2:
        raise UserError(
            f"train.attention={attention} needs a 16-bit type, found train.dtype={dtype}; use "
            "train.dtype=bfloat16, or auto or xla (--train.attention, --train.dtype)"
        )
