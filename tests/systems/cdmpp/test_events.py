"""Seconds of each instruction from a profile: of GPU kernels, and of work in the background."""

import jax
import jax.numpy as jnp
import pytest

from megajax.core.errors import UserError
from megajax.systems.cdmpp.families import Program
from megajax.systems.cdmpp.profile import measure, read

# What the profiler of a GPU writes: a kernel in a stream, in a line derived from the streams, and
# its launch on the host. Times are in picoseconds.
STATS = "stats { metadata_id: 1 ref_value: 3 } stats { metadata_id: 2 ref_value: 4 }"
NAMES = """
event_metadata { key: 1 value { id: 1 name: "loop_add_fusion_3" } }
event_metadata { key: 2 value { id: 2 name: "MemcpyD2D" } }
stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
stat_metadata { key: 3 value { id: 3 name: "loop_add_fusion.3" } }
stat_metadata { key: 4 value { id: 4 name: "jit_program0" } }
"""
TRACE = f"""
planes {{ name: "/host:CPU" lines {{ name: "Host Threads/7" timestamp_ns: 500
  events {{ metadata_id: 1 offset_ps: 0 duration_ps: 9000000 {STATS} }} }} {NAMES} }}
planes {{ name: "/device:GPU:0"
  lines {{ name: "Stream #13(Compute,MemcpyD2D)" timestamp_ns: 1000
    events {{ metadata_id: 1 offset_ps: 8000000 duration_ps: 3000000 {STATS} }}
    events {{ metadata_id: 1 offset_ps: 2000000 duration_ps: 2000000 {STATS} }}
    events {{ metadata_id: 2 offset_ps: 6000000 duration_ps: 1000000 }} }}
  lines {{ name: "XLA Ops" timestamp_ns: 1000
    events {{ metadata_id: 1 offset_ps: 2000000 duration_ps: 2000000 {STATS} }} }} {NAMES} }}
"""

# A CPU's events, in microseconds: the product starts at 10 and is handed out by 12. It is done at
# 40, when %add begins; that thread reports the product's end after it, at 52. %add ran at once.
CPU_TRACE = """
planes {{ name: "/host:CPU"
  lines {{ name: "tf_XLAPjRtCpuClient/1" timestamp_ns: 0
    events {{ metadata_id: 1 offset_ps: 10000000 duration_ps: 2000000 {dot} }} }}
  lines {{ name: "tf_XLAEigen/2" timestamp_ns: 0
    events {{ metadata_id: 2 offset_ps: 40000000 duration_ps: 10000000 {add} }}
    events {{ metadata_id: 4 offset_ps: 49000000 duration_ps: 0 {add_end} }}
    events {{ metadata_id: 3 offset_ps: 52000000 duration_ps: 0 {dot_end} }} }}
  event_metadata {{ key: 1 value {{ id: 1 name: "dot" }} }}
  event_metadata {{ key: 2 value {{ id: 2 name: "add" }} }}
  event_metadata {{ key: 3 value {{ id: 3 name: "end: dot" }} }}
  event_metadata {{ key: 4 value {{ id: 4 name: "end: add" }} }}
  stat_metadata {{ key: 1 value {{ id: 1 name: "hlo_op" }} }}
  stat_metadata {{ key: 2 value {{ id: 2 name: "hlo_module" }} }}
  stat_metadata {{ key: 3 value {{ id: 3 name: "_p" }} }}
  stat_metadata {{ key: 4 value {{ id: 4 name: "_c" }} }}
  stat_metadata {{ key: 5 value {{ id: 5 name: "dot" }} }}
  stat_metadata {{ key: 6 value {{ id: 6 name: "add" }} }}
  stat_metadata {{ key: 7 value {{ id: 7 name: "jit_f" }} }} }}
"""
TEXT = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %dot = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %bitcast = f32[8,8]{1,0} bitcast(%dot)
  ROOT %add = f32[8,8]{1,0} add(%bitcast, %x)
}
"""


def test_each_kernel_of_a_gpu_counts_once(tmp_path):
    events = read(written(tmp_path, TRACE))
    assert set(events) == {"jit_program0"} and set(events["jit_program0"]) == {"loop_add_fusion.3"}
    assert events["jit_program0"]["loop_add_fusion.3"] == pytest.approx([2e-6, 3e-6])


def traced(number, *, is_end=False, name=""):
    stat = f"stats {{ metadata_id: {3 + is_end} uint64_value: {number} }}"
    ops = {"dot": 5, "add": 6}
    names = f"stats {{ metadata_id: 1 ref_value: {ops[name]} }}" if name else ""
    return stat if is_end else f"{names} stats {{ metadata_id: 2 ref_value: 7 }} {stat}"


@pytest.fixture
def cpu_events():
    return {
        "dot": traced(91, name="dot"),
        "add": traced(92, name="add"),
        "dot_end": traced(91, is_end=True),
        "add_end": traced(92, is_end=True),
    }


def test_work_in_the_background_is_done_when_its_result_is_read(tmp_path, cpu_events):
    folder = written(tmp_path, CPU_TRACE.format(**cpu_events))
    events = read(folder, {"jit_f": TEXT})["jit_f"]
    assert events == {"dot": pytest.approx([30e-6]), "add": pytest.approx([10e-6])}


def test_work_that_the_trace_does_not_see_end_has_no_time(tmp_path, cpu_events):
    cpu_events["dot_end"] = traced(93, is_end=True)
    folder = written(tmp_path, CPU_TRACE.format(**cpu_events))
    assert read(folder)["jit_f"]["dot"] == [float("inf")]
    assert read(folder, {"jit_f": TEXT})["jit_f"]["dot"] == pytest.approx([30e-6])


def test_work_that_shared_the_processors_has_no_time(tmp_path, cpu_events):
    other = TEXT.replace("add(%bitcast, %x)", "add(%x, %x)")  # 10 of the product's 42 us
    folder = written(tmp_path, CPU_TRACE.format(**cpu_events))
    events = read(folder, {"jit_f": other})["jit_f"]
    assert events == {"dot": [float("inf")], "add": pytest.approx([10e-6])}


def test_a_loop_does_not_share_the_processors_with_what_is_in_it(tmp_path, cpu_events):
    loop = TEXT.replace("add(%bitcast, %x)", "while(%x), condition=%less, body=%turn")
    folder = written(tmp_path, CPU_TRACE.format(**cpu_events))
    assert read(folder, {"jit_f": loop})["jit_f"]["dot"] == pytest.approx([42e-6])


def test_a_sort_has_the_time_of_all_its_work():
    """With any number of processors, XLA sorts rows in the background, after it copied them."""
    x = jnp.sin(jnp.arange(2.0**18)).reshape(256, 1024)
    for _ in range(3):  # on a busy machine a measurement may have no time that can be believed
        (timed,) = measure([Program(0, "sort", lambda x: jnp.sort(x, -1), (x,))])
        if timed.records:
            break
    (record,) = timed.records
    assert record.kind == "sort"
    # Its own events, with the copy, say 20 % of the call on one processor and 40 to 50 % on two.
    assert 0.8 * timed.wall.min() < timed.halves.min() < 1.5 * timed.wall.max()


def test_a_file_that_is_no_profile_is_refused_by_name(tmp_path):
    (tmp_path / "host.xplane.pb").write_bytes(b"\x0a\xff\xff")
    with pytest.raises(UserError, match=r"host\.xplane\.pb is no profile of XLA"):
        read(str(tmp_path))


def written(folder, trace):
    data = jax.profiler.ProfileData.text_proto_to_serialized_xspace(trace)
    (folder / "host.xplane.pb").write_bytes(data)
    return str(folder)
