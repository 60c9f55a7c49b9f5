"""What a run needs of this machine, checked before it reads any text: kernels, packages, folders.

`Config.check` asks whether the parts of a configuration fit each other and the mesh; it holds on
any machine, so a plan asks it too. What is here depends on where the run starts.
"""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp

from megajax.checkpoint import object_folder, store
from megajax.core.errors import UserError
from megajax.core.paths import check_writable, expand
from megajax.parallel.exchange import refuse_kernels
from megajax.parallel.overlap import refuse_fused
from megajax.training.config import JobConfig
from pallas_kernels.dispatch import is_hopper


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
            object_folder.open_steps(address)
    except store.CheckpointError as error:
        raise UserError(f"{error} (--checkpoint.dir)") from None


def check_attention(wanted: str, dtype: str, device: jax.Device) -> None:
    """Refuses an attention kernel that the device or the type has not. Raises: UserError."""
    if wanted not in ("cudnn", "hopper"):
        return
    if device.platform == "cpu" or (wanted == "hopper" and not is_hopper(device.device_kind)):
        needed = "an NVIDIA GPU" if wanted == "cudnn" else "a Hopper GPU"
        found = "a CPU" if device.platform == "cpu" else device.device_kind
        raise UserError(
            f"train.attention={wanted} needs {needed}, found {found}; use auto, xla or varlen "
            "(--train.attention)"
        )
    if jnp.dtype(dtype).itemsize != 2:
        raise UserError(
            f"train.attention={wanted} needs a 16-bit type, found train.dtype={dtype}; use "
            "train.dtype=bfloat16, or auto or xla (--train.attention, --train.dtype)"
        )
