from unittest import mock

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import AxisType

from megajax.core.axes import MESH_AXES
from megajax.core.errors import UserError
from megajax.core.mesh import (
    MeshSpec,
    describe,
    find_cluster,
    fit,
    host_free_bytes,
    memory_bytes,
    set_memory_share,
)


def test_data_takes_the_devices_that_remain():
    assert MeshSpec(tensor=2).sizes(8) == {
        "pipe": 1,
        "node": 1,
        "data": 4,
        "expert": 1,
        "context": 1,
        "tensor": 2,
    }


def test_all_axes_are_present_and_explicit():
    mesh = MeshSpec(node=2, tensor=2).build()
    assert mesh.axis_names == MESH_AXES
    assert set(mesh.axis_types) == {AxisType.Explicit}
    assert mesh.devices.shape == (1, 2, 2, 1, 1, 2)
    # tensor is innermost: neighbours in device order
    assert [d.id for d in mesh.devices[0, 0, 0, 0, 0]] == [0, 1]
    assert describe(mesh) == "node 2 x data 2 x tensor 2 on 8 emulated cpu"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (MeshSpec(tensor=3), "tensor 3 = 3 does not divide the 8 devices"),
        (MeshSpec(tensor=3), "nearest: 2, 4"),
        (MeshSpec(data=4, tensor=4), "data 4 x tensor 4 = 16"),
        (MeshSpec(tensor=16), "nearest: 8"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused(spec, words):
    with pytest.raises(UserError) as error:
        spec.build()
    assert words in str(error.value) and "--mesh." in str(error.value)


def test_sizes_below_one_are_refused():
    with pytest.raises(UserError, match="--mesh.tensor"):
        MeshSpec(tensor=0)


def test_one_process_may_use_fewer_devices():
    assert MeshSpec(data=2, tensor=2).build().size == 4
    assert MeshSpec(data=1).build(jax.devices()[3:]).devices.flat[0].id == 3


def test_a_presets_mesh_gives_way_but_a_users_does_not():
    preset = MeshSpec(tensor=2)
    assert fit(preset, preset, 8) == preset
    assert fit(preset, preset, 1) == MeshSpec()
    spec = MeshSpec(tensor=4)
    assert fit(spec, preset, 1) == spec


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("env", "launcher", "one_a_host"),
    [
        ({}, None, None),
        ({"SLURM_JOB_ID": "7"}, None, None),  # an interactive shell
        (SLURM | {"SLURM_NTASKS": "1"}, None, None),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, "SLURM", True),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, "SLURM", False),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "Open MPI", True),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "Open MPI", False),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None, None),  # a lone pod
        ({"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "0"}, "Kubernetes", True),
    ],
)
def test_clusters_are_recognised(env, launcher, one_a_host):
    job = find_cluster(env)
    assert (job.launcher if job else None) == launcher
    assert (job.one_process_a_host if job else None) == one_a_host


def test_an_explicit_coordinator_needs_its_companions():
    env = {"JAX_COORDINATOR_ADDRESS": "localhost:1234", "JAX_NUM_PROCESSES": "2"}
    with pytest.raises(UserError, match="JAX_PROCESS_ID is not"):
        find_cluster(env)
    job = find_cluster(env | {"JAX_PROCESS_ID": "1"})
    assert job is not None and (job.processes, job.process) == (2, 1)


def test_a_gpus_memory_is_used_unless_the_user_says_otherwise():
    for environment in (
        {},
        {"XLA_CLIENT_MEM_FRACTION": "0.5"},
        {"XLA_PYTHON_CLIENT_MEM_FRACTION": "1"},
    ):
        env = dict(environment)
        set_memory_share(env)
        assert env == (environment or {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"})


@pytest.mark.parametrize(
    ("kind", "stats", "held"),
    [
        ("NVIDIA A100-SXM4-40GB", {"bytes_limit": 0.92 * 40e9}, 40e9),
        ("NVIDIA A100-SXM4-80GB", {"bytes_limit": 0.92 * 85e9}, 80e9),
        ("NVIDIA H200", {"bytes_limit": 0.46 * 141e9}, 70.5e9),
        ("NVIDIA GH200 480GB", {"bytes_limit": 0.92 * 96e9}, 96e9),
        ("NVIDIA H200", None, 141e9),
        ("NVIDIA GH200 480GB", None, None),
    ],
)
def test_memory_is_what_the_gpu_has(monkeypatch, kind, stats, held):
    gpu = mock.Mock(platform="gpu", device_kind=kind)
    gpu.memory_stats.return_value = stats
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    of = mock.Mock(devices=np.array([gpu]), size=1)
    assert memory_bytes(of) == (held if held is None else pytest.approx(held))


def test_processes_agree_on_the_smallest_memory(monkeypatch):
    local, remote = (mock.Mock(platform="gpu", device_kind="NVIDIA H200") for _ in range(2))
    local.memory_stats.return_value = {"bytes_limit": 0.92 * 141e9}
    remote.memory_stats.side_effect = RuntimeError("of another process")
    gather = mock.Mock(side_effect=lambda value: np.array([value, 7e10], np.float32))
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(jax, "local_devices", lambda: [local])
    assert memory_bytes(mock.Mock(devices=np.array([remote, local]), size=2)) == pytest.approx(7e10)
    other = mock.Mock(devices=np.array([remote, remote]), size=2)  # to compile for, no process
    assert memory_bytes(other) == 141e9 and gather.call_count == 1


def test_a_cpu_has_no_card_to_fill():
    assert memory_bytes(MeshSpec(data=1).build(jax.devices()[:1])) is None


def test_the_free_memory_is_what_host_and_container_leave(tmp_path):
    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return host_free_bytes(tmp_path)

    assert host_free_bytes(tmp_path) == float("inf")
    assert write({"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    1000 kB\n"}) == 1_024_000
    group = "sys/fs/cgroup/memory"
    second = {f"{group}.max": "max\n", f"{group}.current": "900000\n"}
    assert write(second | {f"{group}.stat": "file 5\ninactive_file 300\n"}) == 1_024_000
    assert write({f"{group}.max": "1000000\n"}) == 100_300
    first = {"limit_in_bytes": "800000", "usage_in_bytes": "799000", "stat": "cache 4\n"}
    assert write({f"{group}/memory.{name}": text for name, text in first.items()}) == 1_000
    assert write({f"{group}.current": "2000000"}) == 0
    assert 2**20 < host_free_bytes() < 2**50  # of this machine
