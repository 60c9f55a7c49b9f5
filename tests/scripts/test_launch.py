"""The launchers without a cluster: what they start, what they do with signals and failures."""

import importlib.util
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest
import yaml

from megajax.core.mesh import find_cluster

pytestmark = pytest.mark.process

SCRIPTS = pathlib.Path(__file__).parent.parent.parent / "scripts"
SLURM = SCRIPTS / "launch_slurm.sh"

# Ends as $SRUN_CODE says, or, with `wait`, only when its step is told to. A SIGTERM of its own is a
# SIGKILL of its tasks, as srun has it.
SRUN = """#!/usr/bin/env bash
echo "srun $*"
[[ $SRUN_CODE == wait ]] || exit "$SRUN_CODE"
trap 'echo killed; exit 137' TERM
trap 'echo saved; exit 143' USR1
echo $$ > srun.pid && mv srun.pid ready
for _ in $(seq 600); do sleep 0.05; done
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*"
"""
SCANCEL = """#!/usr/bin/env bash
echo "scancel $*"
kill -USR1 "$(cat ready)"
"""


@pytest.fixture
def slurm(tmp_path):
    """Starts the script under a SLURM that is not there: (code, environment) -> process."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def start(code, **env):
        env = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "7",
            "PYTHON": "python3",
            "SRUN_CODE": str(code),
            **env,
        }
        command = ["bash", SLURM, "--preset=nano", "--eval.prompt=two words"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=env, **pipes)

    return start


def test_slurm_script_parses_and_asks_for_one_process_a_host():
    assert subprocess.run(["bash", "-n", SLURM]).returncode == 0
    options = [x for x in SLURM.read_text().splitlines() if x.startswith("#SBATCH")]
    assert "#SBATCH --ntasks-per-node=1" in options and "#SBATCH --signal=B:TERM@300" in options
    first_command = SLURM.read_text().index("set -uo")  # sbatch reads no option after one
    assert SLURM.read_text().rindex("\n#SBATCH") < first_command


def test_slurm_job_passes_its_flags_on(slurm):
    out, err = slurm(0).communicate(timeout=60)
    assert out == (
        "srun --ntasks-per-node=1 --kill-on-bad-exit=1 python3 experiments/pretrain.py "
        "--told_code=143 --preset=nano --eval.prompt=two words\n"
    ), err


@pytest.mark.parametrize(
    ("code", "count", "requeued"),
    [(1, 0, True), (1, 3, False), (2, 0, False), (70, 0, False), (0, 0, False)],
)
def test_slurm_job_is_requeued_after_a_failure(slurm, code, count, requeued):
    job = slurm(code, SLURM_RESTART_COUNT=str(count))
    out, _ = job.communicate(timeout=60)
    assert job.returncode == code and ("scontrol requeue 7" in out) == requeued


def test_slurm_job_hands_sigterm_on_and_waits_for_the_save(slurm, tmp_path):
    job = slurm("wait", SLURM_RESTART_COUNT="9")
    while not (tmp_path / "ready").exists():
        assert job.poll() is None
        time.sleep(0.01)
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 143
    assert out.endswith("scancel --signal=TERM 7\nsaved\nscontrol requeue 7\n"), out


# Between two commands of the script time passes.
SLOW = """[[ $0 != *launch_slurm.sh ]] || trap 'sleep 0.03' DEBUG"""


def test_slurm_job_that_is_told_at_once_saves_too(slurm, tmp_path):
    (tmp_path / "slow").write_text(SLOW)
    job = slurm("wait", SLURM_RESTART_COUNT="9", BASH_ENV=str(tmp_path / "slow"))
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 143
    assert out.endswith("scancel --signal=TERM 7\nsaved\nscontrol requeue 7\n"), out


# Stands for python: says how it was called, and fails as a driver that excluded a host.
PYTHON = """#!/usr/bin/env bash
[[ $1 == -c ]] && { echo token; exit; }
echo "python $*"
for word in "$@"; do
  out=${word#--out=}
  [[ $word == --out=* ]] && mkdir -p "$out" && printf 'bad1\\nbad2\\n' > "$out/blocklist"
done
exit 75
"""


def test_slurm_job_under_supervision_avoids_what_the_driver_excluded(slurm, tmp_path):
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    env = {"PYTHON": f"{tmp_path}/python", "SUPERVISE": "1", "SLURM_NNODES": "4"}
    job = slurm(0, **env, SUPERVISE_HOSTS="3")
    out, err = job.communicate(timeout=60)
    assert job.returncode == 75, err
    assert f"srun --ntasks-per-node=1 --kill-on-bad-exit=0 {tmp_path}/python" in out
    host = socket.gethostname()
    assert f"scripts/supervise.py --agent={host}:20007" in out
    assert (
        "python scripts/supervise.py --agents=elsewhere --listen=0.0.0.0:20007 --hosts=3 "
        f"--out=runs/supervised/slurm-7 -- {tmp_path}/python experiments/pretrain.py --preset=nano"
    ) in out
    assert out.endswith("scontrol update JobId=7 ExcNodeList=bad1,bad2\nscontrol requeue 7\n"), out


# Starts every task of every component, as srun numbers them, one after the other.
HET_SRUN = """#!/usr/bin/env python3
import os, subprocess, sys
parts, nodes = [[]], [2, 1]
for word in sys.argv[1:]:
    parts.append([]) if word == ":" else parts[-1].append(word)
rank = 0
for part, count in zip(parts, nodes, strict=True):
    first = part.index("bash")
    print("srun", *part[:first], flush=True)
    for _ in range(count):
        env = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "3", "SLURM_LOCALID": "0"}
        subprocess.run(part[first:], env=os.environ | env, check=True)
        rank += 1
"""
TRAINER = """#!/usr/bin/env bash
echo "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS ${SLURM_LOCALID-no}: $*"
"""
HET = {"SLURM_HET_SIZE": "2", "SLURM_NNODES_HET_GROUP_0": "2", "SLURM_NNODES_HET_GROUP_1": "1"}


def test_slurm_job_with_two_components_is_one_job_of_two_kinds(slurm, tmp_path):
    for name, text in (("srun", HET_SRUN), ("python", TRAINER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = slurm(0, PYTHON=f"{tmp_path}/python", KINDS="H100,L4", **HET)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    each = f"of 3 at {socket.gethostname()}:20007 no: experiments/pretrain.py --told_code=143"
    flags = "--preset=nano --eval.prompt=two words"
    assert out.splitlines() == [
        "srun --het-group=0 --ntasks-per-node=1 --kill-on-bad-exit=1",
        f"0 {each} {flags} --kind=H100",
        f"1 {each} {flags} --kind=H100",
        "srun --het-group=1 --ntasks-per-node=1 --kill-on-bad-exit=1",
        f"2 {each} {flags} --kind=L4",
    ]
    out, _ = slurm(0, PYTHON=f"{tmp_path}/python", **HET).communicate(timeout=60)
    assert "--kind" not in out and out.count("experiments/pretrain.py") == 3


def test_slurm_job_with_two_components_under_supervision(slurm, tmp_path):
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    job = slurm(0, PYTHON=f"{tmp_path}/python", SUPERVISE="1", **HET)
    out, err = job.communicate(timeout=60)
    assert "srun --het-group=0-1 --ntasks-per-node=1" in out and "--hosts=3" in out, err


@pytest.mark.parametrize(
    "env",
    [{"KINDS": "H100,L4"}, {"KINDS": "H100", **HET}, {"KINDS": "A,B", "SUPERVISE": "1", **HET}],
)
def test_slurm_job_with_kinds_that_are_not_its_components(slurm, env):
    job = slurm(0, **env)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 2 and f"error: KINDS={env['KINDS']} must" in err and not out


def test_slurm_job_with_one_kind(slurm):
    out, _ = slurm(0, KINDS="H100").communicate(timeout=60)
    assert out.endswith("--eval.prompt=two words --kind=H100\n")


def test_jobset_gives_every_pod_what_the_mesh_reads():
    jobset = yaml.safe_load((SCRIPTS / "launch_k8s.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    env = {e["name"]: e.get("value", "3") for e in container["env"]}
    cluster = find_cluster(env | {"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "3"})
    assert cluster.processes == spec["parallelism"] == spec["completions"] == 4
    assert cluster.process == 3
    # Pod 0 of job 0, as JobSet names it.
    assert cluster.coordinator == f"{jobset['metadata']['name']}-{job['name']}-0-0.megajax:8476"
    (index,) = (e for e in container["env"] if "valueFrom" in e)
    assert "job-completion-index" in index["valueFrom"]["fieldRef"]["fieldPath"]
    assert spec["completionMode"] == "Indexed"
    (policy,) = spec["podFailurePolicy"]["rules"]
    assert policy["onExitCodes"]["containerName"] == container["name"]
    assert policy["onExitCodes"]["values"] == [2, 70, 76]
    assert container["command"] == ["python", "experiments/pretrain.py"]
    assert "--told_code=143" in container["args"]  # 0 would count as done
    assert (SCRIPTS.parent / container["command"][1]).is_file()


def test_jobset_with_two_groups_is_one_job_of_two_kinds(tmp_path):
    """As its header says: every process has a number of its own, and all have one coordinator."""
    text = (SCRIPTS / "launch_k8s.yaml").read_text()
    (command,) = re.findall(r"^#   (sed .*) \| kubectl", text, re.MULTILINE)
    rendered = subprocess.run(shlex.split(command), cwd=SCRIPTS.parent, capture_output=True)
    jobset, plain = yaml.safe_load(rendered.stdout), yaml.safe_load(text)
    assert len(plain["spec"]["replicatedJobs"]) == 1 and "--kind" not in str(plain)
    processes, cards = {}, set()
    for job in jobset["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"]
        assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 70, 76]
        cards.add(pod["nodeSelector"]["nvidia.com/gpu.product"])
        for index in range(spec["completions"]):
            env = {e["name"]: e.get("value", str(index)) for e in container["env"]}
            (tmp_path / "python").write_text('#!/bin/sh\necho "$JAX_PROCESS_ID $*"\n')
            (tmp_path / "python").chmod(0o755)
            env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": str(index)}
            done = subprocess.run(
                [*container["command"], *container["args"]], env=env, capture_output=True, text=True
            )
            number, script, *flags = done.stdout.split()
            assert script == "experiments/pretrain.py" and "--told_code=143" in flags
            cluster = find_cluster(env | {"JAX_PROCESS_ID": number})
            (kind,) = (f for f in flags if f.startswith("--kind="))
            processes[cluster.process] = kind
            assert cluster.processes == 6 and "--precisions=/runs/precisions.json" in flags
            assert cluster.coordinator == "megajax-hosts-0-0.megajax:8476"
    assert processes == {i: "--kind=h100" if i < 4 else "--kind=l4" for i in range(6)}
    assert len(cards) == 2


# ---- Ray


@pytest.fixture(scope="module")
def ray_script():
    spec = importlib.util.spec_from_file_location("launch_ray", SCRIPTS / "launch_ray.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ray_script_explains_itself_and_its_package():
    def call(*args):
        command = [sys.executable, SCRIPTS / "launch_ray.py", *args]
        return subprocess.run(command, capture_output=True, text=True)

    done = call("--help")
    assert done.returncode == 0 and "--hosts" in done.stdout and "--restarts" in done.stdout
    if importlib.util.find_spec("ray") is None:
        done = call("--hosts=2", "--preset=nano")
        assert done.returncode == 2 and "uv sync --extra ray" in done.stderr


def test_ray_flags_of_the_trainer_pass_through(ray_script):
    settings, flags = ray_script.parse(["--hosts=2", "--mesh.tensor=8", "--gpus", "4", "--res=1"])
    assert (settings.hosts, settings.gpus, settings.restarts) == (2, 4, 3)
    assert ray_script.kinds_of(ray_script.parse([])[0]) == [(None, 1, 8)]
    assert flags == ["--mesh.tensor=8", "--res=1"]
    with pytest.raises(SystemExit):
        ray_script.parse(["--hosts=0"])
    cluster = find_cluster(ray_script.environment("a:1", 2, 1))
    assert (cluster.coordinator, cluster.processes, cluster.process) == ("a:1", 2, 1)


def test_ray_job_of_two_kinds(ray_script):
    """Two hosts of 8 H100s and one of 4 L4s: a bundle, a number and a kind for each."""
    settings, flags = ray_script.parse(["--kinds=h100:2x8,l4:1x4", "--precisions=p.json"])
    kinds = ray_script.kinds_of(settings)
    assert [(kind.name, kind.hosts) for kind in kinds] == [("h100", 2), ("l4", 1)]
    h100 = {"CPU": 1, "GPU": 8, "accelerator_type:H100": 0.001}
    assert [k.bundle for k in kinds] == [h100, {"CPU": 1, "GPU": 4, "accelerator_type:L4": 0.001}]
    started = ray_script.jobs("a:1", [kinds[0], kinds[0], kinds[1]], flags)
    for i, (command, env) in enumerate(started):
        assert command[2:] == [
            "--told_code=143",
            "--precisions=p.json",
            f"--kind={kinds[i // 2].name}",
        ]
        assert env["JAX_PROCESS_ID"] == str(i) and env["JAX_NUM_PROCESSES"] == "3"
    alone, flags = ray_script.parse(["--hosts=2", "--gpus=4", "--x=1"])
    (kind,) = ray_script.kinds_of(alone)
    assert (kind.hosts, kind.bundle) == (2, {"CPU": 1, "GPU": 4})
    assert ray_script.jobs("a:1", [kind], flags)[0][0][2:] == ["--told_code=143", "--x=1"]


@pytest.mark.parametrize(
    "flags", ["--kinds=H100", "--kinds=A:0x8", "--kinds=A:1x8,A:2x8", "--kinds=A:1x8 --hosts=2"]
)
def test_ray_kinds_of_another_form(ray_script, flags, capsys):
    with pytest.raises(SystemExit):
        ray_script.parse(flags.split())
    assert "kinds=" in capsys.readouterr().err


def job_of(ray_script, programs):
    """(each, start) over plain Hosts that run these Python programs."""
    hosts = [ray_script.Host() for _ in programs]

    def start():
        for host, program in zip(hosts, programs, strict=True):
            host.start([sys.executable, "-c", program], {"PYTHONUNBUFFERED": "1"})

    return (lambda method, *args: [getattr(h, method)(*args) for h in hosts]), start


@pytest.mark.parametrize(("code", "starts"), [(0, 1), (2, 1), (7, 3)])
def test_ray_job_restarts_after_a_failure(ray_script, code, starts, monkeypatch):
    """One process fails; the other would wait for it for ever."""
    monkeypatch.setattr(ray_script, "LOST_S", 0)
    other = "import time; time.sleep(60)" if code else ""
    each, start = job_of(ray_script, [other, f"raise SystemExit({code})"])
    count = []
    got = ray_script.supervise(
        each, lambda: (count.append(1), start()), lambda: False, restarts=2, pause_s=0.01
    )
    assert got == code and len(count) == starts


def test_ray_job_told_to_stop_saves_and_is_not_restarted(ray_script, tmp_path):
    program = (
        "import signal, sys, time, pathlib\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"pathlib.Path({str(tmp_path)!r}, 'ready').touch()\n"
        "time.sleep(60)"
    )
    each, start = job_of(ray_script, [program])
    asked = (tmp_path / "ready").exists
    assert ray_script.supervise(each, start, asked, restarts=2, pause_s=0.01) == 143


def test_ray_job_under_supervision(ray_script, tmp_path):
    """Two agents as Ray's actors would hold them; the second attempt ends well."""
    hosts = [ray_script.Host() for _ in range(2)]
    mark = tmp_path / "mark"
    program = (
        "import os, pathlib, sys; first = os.environ['MEGAJAX_ATTEMPT'] == '0'\n"
        f"pathlib.Path({str(mark)!r} + os.environ['JAX_PROCESS_ID']).touch()\n"
        "sys.exit(7 if first else 0)"
    )

    def each(method, *args):
        if method == "start":  # one machine stands for two
            command, env = args
            for i, h in enumerate(hosts):
                h.start([*command, f"--name=h{i}", "--period_s=0.2"], env)
            return []
        return [getattr(h, method)(*args) for h in hosts]

    options = [f"--out={tmp_path}/out", "--period_s=0.2", "--backoff_s=0.1"]
    command = [sys.executable, "-c", program]
    assert ray_script.supervise_progress(each, command, 2, lambda: False, options, 0.05) == 0
    assert sorted(p.name for p in tmp_path.glob("mark*")) == ["mark0", "mark1"]
    assert "attempt 1, 2 processes on h0, h1" in (tmp_path / "out" / "events.jsonl").read_text()
    for h in hosts:
        while h.code() is None:
            time.sleep(0.01)
        assert h.code() == 0


def test_ray_process_is_not_taken_for_one_of_slurms(ray_script, monkeypatch):
    """Ray on SLURM: jax would take SLURM_LOCALID for the one GPU that the process may see."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    host = ray_script.Host()
    program = "import os; raise SystemExit(any(n.startswith('SLURM') for n in os.environ))"
    host.start([sys.executable, "-c", program], {})
    while host.code() is None:
        time.sleep(0.01)
    assert host.code() == 0


def test_ray_host_names_an_address_that_others_can_reach(ray_script):
    address, port = ray_script.Host().address().split(":")
    assert address.count(".") == 3 and 1024 <= int(port) < 65536
