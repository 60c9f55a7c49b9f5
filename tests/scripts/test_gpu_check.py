"""The parts of a GPU session: which there are; and some on a CPU, with planted faults."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pallas_kernels import bench, report

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import gpu_check

from scripts.gpu_session import training as gpu_train

SCRIPTS = sys.path.pop(0)


def test_every_part_has_a_name_of_its_own_and_every_folder_is_checked():
    parts = gpu_check.parts()
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)
    checked = [p.args["folder"] for p in parts if p.args["do"] in ("checks", "exact")]
    assert set(checked) == set(report.FOLDERS)
    variants = {part.args["variant"] for part in parts if part.args["do"] == "step"}
    assert variants == set(gpu_train.VARIANTS)
    # At most eight files come back: one for each kind, the verdicts and the log.
    assert len({part.file for part in [gpu_check.SMOKE, *parts]} | {"verdicts", "log"}) <= 8


def test_results_are_right_before_they_are_timed():
    first = [part.args["do"] for part in gpu_check.parts()][:11]
    assert first == ["checks"] * 8 + ["exact"] * 2 + ["losses"]


def test_words_choose_parts():
    parts = gpu_check.parts()
    assert gpu_check.chosen(parts, []) == parts
    assert {p.file for p in gpu_check.chosen(parts, ["train"])} == {"train", "checks"}
    assert [p.name for p in gpu_check.chosen(parts, ["gemm checks"])] == ["gemm checks"]
    assert {p.file for p in gpu_check.chosen(parts, ["expert"])} == {"checks", "overlap"}
    with pytest.raises(SystemExit, match="Did you mean attention"):
        gpu_check.chosen(parts, ["atention"])


def test_names_of_variants_say_what_runs():
    for name in gpu_train.VARIANTS:
        train = gpu_train.configuration(name, rehearsal=False).train
        assert name.split(",")[0] == train.attention
        assert name.partition("remat ")[2] in ("", train.remat)
        assert name.partition("batch ")[2] in ("", str(train.global_batch))


def test_pytorch_is_timed_right_behind_our_kernel_in_another_process():
    """As far as there is anything of PyTorch to time."""
    parts = gpu_check.parts()
    times = [p for p in parts if p.args["do"] in ("times", "torch")]
    for part, behind in zip(times, [*times[1:], None], strict=True):
        if part.args["do"] == "times":
            folder = part.args["folder"]
            has = hasattr(bench.module_of(folder, "bench"), "torch_sides")
            assert has == (folder in gpu_check.TORCH)
            assert has == (behind is not None and behind.name == f"{part.name} torch")
    chosen = gpu_check.chosen(parts, ["torch"])
    assert {p.args["folder"] for p in chosen} == set(gpu_check.TORCH) and len(chosen) == 9
    assert gpu_check.environment(False)["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_the_mfu_counts_attention_inside_segments():
    """Of four segments a row, a quarter of the attention is needed."""
    cfg = gpu_train.configuration("cudnn, remat outputs", rehearsal=False)
    one, four = (gpu_train.mfu_of(cfg, 1.0, pieces) for pieces in (1, 4))
    model, S = cfg.model, cfg.train.seq_len
    fewer = 12 * model.layers * model.heads * model.head_width * (S - S // 4)
    difference = one["flops_per_token_megatron"] - four["flops_per_token_megatron"]
    assert difference == pytest.approx(fewer)


@pytest.mark.slow
@pytest.mark.process
def test_a_rehearsal_with_planted_faults(tmp_path):
    """Each fault has its verdict, and everything beside it is measured; a second call goes on."""
    hangs, leaves = "step cudnn, remat outputs", "step cudnn, remat full"
    faults = f"gemm checks:wrong;losses:cuda;{hangs}:hang;{leaves}:exit;bert:missing"
    command = [sys.executable, f"{SCRIPTS}/gpu_check.py", "--rehearse", f"--out={tmp_path}"]

    def call(minutes: float, *words: str, faults: str = "") -> tuple[int, dict]:
        began = time.monotonic()
        env = os.environ | {"GPU_CHECK_FAULTS": faults, "PYTHONPATH": str(Path(SCRIPTS).parent)}
        code = subprocess.run([*command, f"--minutes={minutes}", *words], env=env).returncode
        assert time.monotonic() - began < 60 * minutes + 20
        rows = json.loads((tmp_path / "rehearsal_verdicts.json").read_text())["rows"]
        return code, {row["part"]: row for row in rows}

    code, verdicts = call(30, "gemm checks", "losses", hangs, leaves, "bert", faults=faults)
    assert code == 1 and verdicts["smoke"]["verdict"] == "3 items"
    words = {name: verdict["verdict"] for name, verdict in verdicts.items()}
    assert "gemm tiny is wrong" in words["gemm checks"]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in words["losses"]
    assert "step: killed after" in words[hangs] and "ended with exit code 3" in words[leaves]
    assert "No module named" in words["bert"]
    rows = json.loads((tmp_path / "rehearsal_train.json").read_text())["rows"]
    assert {(r["part"], r["item"]) for r in rows} == {(hangs, "estimate"), (leaves, "estimate")}
    rows = json.loads((tmp_path / "rehearsal_checks.json").read_text())["rows"]
    assert {(r["part"], r["passed"]) for r in rows} == {("gemm checks", False), ("losses", True)}
    code, verdicts = call(30, "bert", "gemm checks")
    assert code == 1 and not verdicts["bert"]["failed"] and verdicts["gemm checks"]["failed"]
