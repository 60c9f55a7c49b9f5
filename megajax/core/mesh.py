"""From flags to devices: emulation, multi-host start, and the one mesh of a run.

`start` must come before anything touches a device. It decides between GPUs, emulated CPU devices
and a multi-host job, then `MeshSpec.build` arranges the devices. The mesh always has all axes of
`core.axes.MESH_AXES`, all Explicit, slow links first. This is the only library module that reads
environment variables: they are how SLURM, Kubernetes and Open MPI tell a process who it is.
"""

import contextlib
import ctypes
import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jax._src import distributed  # jax has no public way to the store of jax.distributed
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from megajax.core.axes import MESH_AXES
from megajax.core.config import Checked, option
from megajax.core.errors import TemporaryError, UserError, nearest_divisors
from megajax.core.hardware import find_card


@dataclasses.dataclass(frozen=True)
class MeshSpec(Checked, section="mesh"):
    """Sizes of the mesh axes. `data` None: all devices that the other axes leave."""

    pipe: int = option(1, "pipeline stages", at_least=1)
    node: int = option(1, "outer data parallelism (slow links); see --shard.zero", at_least=1)
    data: int | None = option(None, "data parallelism; none: the devices that remain", at_least=1)
    expert: int = option(1, "expert parallelism", at_least=1)
    context: int = option(1, "context (sequence) parallelism", at_least=1)
    tensor: int = option(1, "tensor and sequence parallelism, the NVLink domain", at_least=1)

    def sizes(self, devices: int) -> dict[str, int]:
        """Returns {axis: size} in mesh order for this number of devices.

        Raises: UserError when the axes do not divide the devices.
        """
        fixed = {a: getattr(self, a) for a in MESH_AXES if getattr(self, a) is not None}
        used = math.prod(fixed.values())
        if devices % used:
            axes = [a for a, n in fixed.items() if n > 1]
            product = " x ".join(f"{a} {fixed[a]}" for a in axes)
            widest = max(axes, key=lambda a: fixed[a])
            dividend = devices // math.gcd(devices, used // fixed[widest])
            raise UserError(
                f"mesh: {product} = {used} does not divide the {devices} devices; "
                f"mesh.{widest}={fixed[widest]}: {nearest_divisors(dividend, fixed[widest])} "
                f"(--mesh.{widest}, --emulate)"
            )
        sizes = {a: fixed.get(a, devices // used) for a in MESH_AXES}
        return sizes

    def build(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """Returns the Explicit mesh over these devices (default: all of the job).

        When every axis is given and they need fewer devices than there are, one process may use
        the first ones; several processes may not, because a host would be left without work.
        """
        devices = jax.devices() if devices is None else devices
        sizes = self.sizes(len(devices))
        used = math.prod(sizes.values())
        if used < len(devices):
            if jax.process_count() > 1:
                raise UserError(
                    f"mesh uses {used} of {len(devices)} devices, but a multi-host job must use "
                    f"all; leave out --mesh.data, it takes the devices that remain"
                )
            logging.warning("The mesh uses %d of the %d devices.", used, len(devices))
        return make_mesh(devices[:used], sizes)


def make_mesh(devices: Sequence[jax.Device], sizes: Mapping[str, int]) -> Mesh:
    """Returns the mesh of exactly these devices; axes that `sizes` leaves out have size 1."""
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    return Mesh(
        np.array(devices).reshape(shape), MESH_AXES, axis_types=(AxisType.Explicit,) * len(shape)
    )


def fit(spec: MeshSpec, preset: MeshSpec, devices: int) -> MeshSpec:
    """Returns the spec, or data parallelism only if a preset's mesh does not fit the devices."""
    if spec == preset:
        try:
            spec.sizes(devices)
        except UserError as error:
            logging.warning("Using data parallelism only: %s", error)
            return MeshSpec()
    return spec


def cache_programs(folder: str | Path) -> None:
    """Keeps compiled programs on disk, so that the next start of the same run is quick.

    A folder that cannot be written is told and done without.
    """
    try:
        path = Path(folder).expanduser() / "programs"
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home is known
        logging.warning("Compiled programs are not kept: %s (--cache_dir).", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def describe(mesh: Mesh) -> str:
    """Returns e.g. 'data 4 x tensor 2 on 8 cpu'."""
    device = mesh.devices.flat[0]
    kind = "emulated cpu" if device.platform == "cpu" else device.device_kind
    axes = " x ".join(f"{a} {n}" for a, n in mesh.shape.items() if n > 1) or "one device"
    return f"{axes} on {mesh.size} {kind}"


# ---- start of a process


# Share of a GPU's memory that jax's allocator may take (chosen: 80 GB less 2.5 GB for NCCL's
# buffers and the CUDA context is 0.97, less what kernels load later; jax's own default is 0.75).
MEMORY_SHARE = 0.92
MEET_S = 3600.0  # (chosen) for processes that compile; who supervises them looks earlier


def set_memory_share(env: MutableMapping[str, str] | None = None) -> None:
    """Lets jax use MEMORY_SHARE of a GPU unless the user says otherwise, by either of jax's names.

    It must come before jax touches a device.
    """
    env = os.environ if env is None else env
    if not {"XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"} & set(env):
        env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(MEMORY_SHARE)


def memory_bytes(mesh: Mesh) -> int | None:
    """Returns what the smallest GPU of a mesh holds, the same in each process; None if unknown.

    That is its card's capacity, or less where jax's allocator may take less than MEMORY_SHARE of
    it: a smaller GPU of the same name, or a share that the user chose. Without a card, what the
    allocator says. Every process of a mesh of several processes must call it.
    """
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return None
    card = find_card(device.device_kind)
    local = [
        d for d in jax.local_devices() if d in mesh.devices.flat
    ]  # none: a mesh to compile for
    stats = [d.memory_stats() or {} for d in local]
    held = [s["bytes_limit"] / MEMORY_SHARE for s in stats if "bytes_limit" in s]
    least = min([*held, card.memory_bytes if card else math.inf])
    if local and len(local) < mesh.size:
        least = multihost_utils.process_allgather(np.float32(least)).min()
    return int(least) if math.isfinite(least) else None


def free_bytes(mesh: Mesh) -> float:
    """Returns the free memory of the fullest device of a mesh, the same in each process; inf if
    it is unknown. The devices of a CPU share the memory of the host.

    Every process of a mesh of several processes must call it.
    """
    if mesh.devices.flat[0].platform == "cpu":
        free = host_free_bytes()
    else:
        stats = [s for d in mesh.local_devices if (s := d.memory_stats())]
        free = min((s["bytes_limit"] - s["bytes_in_use"] for s in stats), default=math.inf)
    if mesh.is_multi_process:  # which must take the same decisions
        free = float(multihost_utils.process_allgather(np.float32(free)).min())
    return free


def host_free_bytes(root: Path = Path("/")) -> float:
    """Returns the memory that this host, or the container of this process, has left; inf where
    neither tells. root: of the file system."""
    free, group = [math.inf], root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        match = re.search(r"MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text())
        free.append(1024 * int(match[1]))  # type: ignore[index]
    # (Linux, admin-guide/cgroup-v2) the cached pages of files count as used, and are given up
    for limit, used, stat, cached in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        with contextlib.suppress(OSError, ValueError):
            most = int((group / limit).read_text())  # 'max': none
            held = int((group / used).read_text())
            match = re.search(rf"^{cached} (\d+)$", (group / stat).read_text(), re.MULTILINE)
            free.append(max(0, most - held + (int(match[1]) if match else 0)))
    return min(free)


def count_gpus() -> int:
    """Returns the GPUs that the NVIDIA driver shows this process, without starting jax."""
    if os.environ.get("JAX_PLATFORMS", "cuda") not in ("", "cuda", "gpu", "cuda,cpu"):
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def start(
    emulate: int | None = None, emulate_default: int | None = None, unlike: bool = False
) -> None:
    """Prepares jax: emulation, then the multi-host runtime if a cluster started this process.

    Args:
      emulate: number of CPU devices of this process; None: real devices.
      emulate_default: what `emulate` becomes when this machine has no GPU.
      unlike: the job's processes compile unlike programs. Each tunes all of its kernels then: XLA
        would share the tuning out, and a process would wait for ever for another program's.
    Raises: UserError when the devices cannot be set up as asked.
    """
    job = find_cluster()
    if emulate is None and count_gpus() == 0:
        emulate = emulate_default or 1
        if job is not None and job.shares_devices:
            emulate = max(emulate // (job.processes or 1), 1)
    if unlike:
        flags = os.environ.get("XLA_FLAGS", ""), "--xla_gpu_shard_autotuning=false"
        os.environ["XLA_FLAGS"] = " ".join(flags).strip()
    if emulate is None:
        set_memory_share()
    else:
        if emulate < 1:
            raise UserError(f"emulate={emulate} must be at least 1 (--emulate)")
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", emulate)
        except RuntimeError as error:
            raise UserError(
                f"emulate={emulate} must be set before jax touches a device (--emulate)"
            ) from error
    if job is not None:
        _join(job)


@dataclasses.dataclass(frozen=True)
class Supervision:
    """What the agent that started this process wants of it.

    progress: where to leave its progress record. memory: where to keep the newest state for the
    next attempt; it outlives this process. attempt: how often the job was started before. run: the
    driver's name of the job (MEGAJAX_RUN), the same for all its attempts; empty: it gave none.
    """

    progress: Path | None = None
    memory: Path | None = None
    attempt: int = 0
    run: str = ""


def find_supervisor(env: Mapping[str, str] | None = None) -> Supervision:
    """Returns the settings that scripts/supervise.py gave this process; defaults without it."""
    env = os.environ if env is None else env
    if "MEGAJAX_PROGRESS" not in env:
        return Supervision()
    memory = Path(env["MEGAJAX_MEMORY"]) if "MEGAJAX_MEMORY" in env else None
    attempt = int(env.get("MEGAJAX_ATTEMPT", 0))
    return Supervision(Path(env["MEGAJAX_PROGRESS"]), memory, attempt, env.get("MEGAJAX_RUN", ""))


@dataclasses.dataclass(frozen=True)
class Job:
    """How the launcher describes this process. None: jax's own detection asks the cluster.

    shares_devices: all processes are of this machine and divide its devices
    (systems/elastic/local.py).
    """

    launcher: str
    processes: int | None
    process: int | None = None
    coordinator: str | None = None
    one_process_a_host: bool = False
    shares_devices: bool = False


def find_cluster(env: Mapping[str, str] | None = None) -> Job | None:
    """Returns the multi-process job that this process belongs to, or None when it is alone.

    An interactive SLURM shell or a lone pod is not a job. JAX_COORDINATOR_ADDRESS with
    JAX_NUM_PROCESSES and JAX_PROCESS_ID is the way for any other launcher.
    """
    env = os.environ if env is None else env
    if "JAX_COORDINATOR_ADDRESS" in env:
        missing = [n for n in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID") if n not in env]
        if missing:
            raise UserError(f"JAX_COORDINATOR_ADDRESS is set but {' and '.join(missing)} is not")
        return Job(
            "JAX_COORDINATOR_ADDRESS",
            int(env["JAX_NUM_PROCESSES"]),
            int(env["JAX_PROCESS_ID"]),
            env["JAX_COORDINATOR_ADDRESS"],
            shares_devices="MEGAJAX_ONE_HOST" in env,
        )
    if "SLURM_STEP_NODELIST" in env and int(env.get("SLURM_NTASKS", 1)) > 1:
        tasks = env.get("SLURM_STEP_TASKS_PER_NODE", "")
        alone = tasks.split("(")[0].split(",")[0] == "1"
        return Job("SLURM", int(env["SLURM_NTASKS"]), one_process_a_host=alone)
    if int(env.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        alone = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
        return Job("Open MPI", int(env["OMPI_COMM_WORLD_SIZE"]), one_process_a_host=alone)
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        return Job("Kubernetes", None, one_process_a_host=True)
    return None


def share_of(gpus: int, process: int, processes: int) -> list[int]:
    """Returns the GPUs of one of the processes that divide those of this machine.

    Raises: UserError when they cannot be divided.
    """
    if gpus % processes:
        raise UserError(
            f"processes={processes} must divide the {gpus} GPUs of this machine; "
            f"{nearest_divisors(gpus, processes)} (--processes)"
        )
    each = gpus // processes
    return list(range(process * each, (process + 1) * each))


def _join(job: Job) -> None:
    """Starts jax.distributed; who we are comes from the launcher through jax's own detection."""
    local = None
    if job.one_process_a_host and (gpus := count_gpus()):
        local = list(range(gpus))  # else jax assumes one process a GPU and hides all but one
    if job.shares_devices and (gpus := count_gpus()):
        local = share_of(gpus, job.process or 0, job.processes or 1)
    logging.info("Joining the %s job.", job.launcher)
    try:
        jax.distributed.initialize(
            coordinator_address=job.coordinator,
            num_processes=job.processes,
            process_id=job.process,
            local_device_ids=local,
        )
    except (ValueError, RuntimeError) as error:
        kind = UserError if isinstance(error, ValueError) else TemporaryError  # others did not come
        hint = " (uv sync --extra k8s)" if job.launcher == "Kubernetes" else ""
        raise kind(f"cannot join the {job.launcher} job: {error}{hint}") from error


def meet(place: str) -> None:
    """Waits until every process of the job has come to a place.

    For processes that took unequally long to compile a program: in its first collective one that
    came early would wait 30 s for the others (Gloo) and then give them up.
    place: its name, the same in every process. A name may be used again, because jax.distributed's
    client counts the visits to each name (jax 0.11.2); after a process has missed a visit, the next
    one raises in all processes.
    Raises: jax.errors.JaxRuntimeError when a process is gone, or has not come in MEET_S.
    """
    if (store := job_store()) is not None:
        store.wait_at_barrier(place, int(1000 * MEET_S))


def tell_all(place: str, text: str) -> list[str]:
    """Returns the texts that the processes of this job gave for a place, in their order.

    Every process of the job must call it. Raises: as `meet`.
    """
    if (store := job_store()) is None:
        return [text]
    store.key_value_set(f"{place}/{jax.process_index()}", text, allow_overwrite=True)
    meet(place)
    texts = {int(key.rsplit("/", 1)[1]): value for key, value in store.key_value_dir_get(place)}
    return [texts[rank] for rank in range(jax.process_count())]


@contextlib.contextmanager
def together(place: str) -> Iterator[None]:
    """Lets all processes of the job come through what is inside, or none: a UserError of one of
    them ends the job, where the others would wait for that process in their next collective.

    Inside must be no collective. Every process of the job must call it. place: as of `meet`.
    Raises: the UserError of this process, or else one with the text of another process's.
    """
    problem: UserError | None = None
    try:
        yield
    except UserError as error:
        problem = error
    texts = tell_all(place, "" if problem is None else str(problem))
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text:
            raise UserError(f"process {rank}: {text}")


def job_store() -> Any:
    """Returns the key-value store that the processes of this job share; None if there is only one.

    It lies in the first process. Its methods are those of jax.distributed's client, among them
    key_value_set, key_value_delete, key_value_dir_get and blocking_key_value_get.
    """
    return distributed.global_state.client if jax.process_count() > 1 else None
