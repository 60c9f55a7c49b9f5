"""The pictures of a plan: which GPU is where in the mesh, and the order of a pipeline's passes."""

import re

import numpy as np
import pytest

from experiments.reports import plan as plan_report
from megajax.core import config
from megajax.core.axes import MESH_AXES
from megajax.core.hardware import parse_cluster
from megajax.systems import aot
from megajax.training.presets import PRESETS


def planned(cluster, **mesh):
    changes = {f"mesh.{axis}": n for axis, n in mesh.items()}
    cfg = config.override(
        PRESETS["nano"](), {"mesh.tensor": 1, "train.global_batch": 128, **changes}
    )
    return aot.outline(cfg, parse_cluster(cluster))


@pytest.mark.parametrize("mesh", [{"pipe": 2, "tensor": 2}, {"tensor": 4}, {}])
def test_each_gpu_stands_where_the_mesh_has_it(mesh):
    plan = planned("h100:2x8", **mesh)
    *lines, legend = plan_report.mesh_picture(plan).splitlines()
    shape = [plan.step.sizes[axis] for axis in MESH_AXES]
    places = np.stack(np.unravel_index(np.arange(16), shape), 1)  # devices in row-major order
    assert len(lines) == 2
    for host, line in enumerate(lines):
        cells = line[line.index("[") + 1 : line.index("]")].split("|")
        shared = {
            word.split()[0]: int(word.split()[1])
            for word in line.partition("]")[2].split(",")
            if word.strip()
        }
        for gpu, cell in enumerate(cells):
            at = {m[0]: int(m[1]) for m in re.findall(r"([a-z])(\d+)", cell)}
            for axis, place in zip(MESH_AXES, places[8 * host + gpu], strict=True):
                if plan.step.sizes[axis] > 1:
                    assert at.get(axis[0], shared.get(axis)) == place
    assert all(f"{axis[0]}: {axis} of {n}" in legend for axis, n in mesh.items())


def test_of_many_hosts_some_are_shown_and_the_others_counted():
    lines = plan_report.mesh_picture(planned("h100:4x8", tensor=4)).splitlines()
    assert [line[:6] for line in lines[:-1]] == [f"host {k}" for k in range(4)]
    plan = planned("h100:16x8", tensor=2)
    starts = [line[:7] for line in plan_report.mesh_picture(plan).splitlines()[:-1]]
    assert starts == ["host 0 ", "host 1 ", "host 2 ", "... 12 ", "host 15"]


def test_a_pipeline_is_drawn_and_one_stage_is_not(tmp_path):
    file = tmp_path / "pipeline.svg"
    assert not plan_report.pipeline_picture(planned("h100:1x8"), file) and not file.exists()
    assert plan_report.pipeline_picture(planned("h100:1x8", pipe=4), file)
    assert "<svg" in file.read_text()
