"""One clock for many hosts, and arrows between the ends of a transfer."""

import json

import numpy as np
import pytest

from megajax.monitor import timeline
from megajax.monitor.timeline import Measured


def test_clocks_that_are_off_are_put_right(tmp_path, seed):
    """Three hosts, seconds apart and 1 ms of jitter, one wake-up half a second late."""
    random = np.random.default_rng(seed)
    off = {0: 0.0, 1: 2.0, 2: -3.5}
    true = np.sort(random.uniform(0, 100, 21))
    barriers = {h: list(true + o + random.uniform(0, 1e-3, 21)) for h, o in off.items()}
    barriers[1][7] += 0.5
    found = timeline.offsets(barriers)
    assert all(abs(found[h] + o) < 1e-3 for h, o in off.items())

    spans = [
        Measured(1, 1, "send", "send 0", 50.2 + off[1], 50.4 + off[1], 3, flow="act 0"),
        Measured(2, 2, "recv", "recv 0", 50.1 + off[2], 50.5 + off[2], 3, flow="act 0"),
        Measured(0, 0, "compute", "F 1", 50.0, 51.0, 3, flow="lonely"),
    ]
    timeline.write(tmp_path / "t.json", spans, barriers)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    slices = {e["name"]: e for e in events if e["ph"] == "X"}
    assert [slices[n]["ts"] for n in ("F 1", "recv 0", "send 0")] == pytest.approx(
        [0, 1e5, 2e5], abs=2e3
    )
    assert slices["send 0"]["dur"] == pytest.approx(2e5)
    arrows = [e for e in events if e["ph"] in "sf"]
    assert [(e["ph"], e["pid"]) for e in arrows] == [("s", 2), ("f", 1)]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "rank 0 (host 0)", "rank 1 (host 1)", "rank 2 (host 2)",
    }  # fmt: skip


def test_hosts_must_have_passed_the_same_barriers():
    with pytest.raises(ValueError, match="same barriers"):
        timeline.offsets({0: [1.0, 2.0], 1: [1.0]})
    with pytest.raises(ValueError, match="one at least"):
        timeline.offsets({0: []})
    assert timeline.perfetto([])["traceEvents"] == []
