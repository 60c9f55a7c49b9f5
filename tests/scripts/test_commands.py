"""Every command of README.md and docs/ is run small, planned or parsed; none is left out.

The commands are those of shell blocks, and pieces of inline code that begin with `uv run`. RULES
says what is done with each; the first pattern that fits decides. The placeholders of the documents
(RUN, FOLDER, TEXT/) are files of these names in a temporary folder, where commands run as printed.
"""

import ast
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from experiments.reports.catalogue import ENTRIES
from megajax import commands as verbs
from megajax.core import config
from megajax.core.hardware import parse_cluster
from megajax.systems import aot
from megajax.training.presets import PRESETS
from tests import forks

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
PROGRAMS = "uv|megajax|pip|git|curl|sbatch|srun|kubectl|mpirun|python3?|cp|bash|for"
COMMAND = re.compile(rf"(\$ )?([A-Z_]+=\S+ )*({PROGRAMS}) ")
NEEDS_SERVICE = (
    "scripts/serve",
    "scripts/chat",
    "minder.py watch",
    "--prometheus",
    "agent_metrics.py",
)

# run: with further flags that make it small. plan: the planner says that it fits the cluster.
# parse: its flags are legal together. ci: .ci/run has this command. outside: another program, or
# one that would change this machine; only its syntax is checked.
RULES = [
    (
        r"^(git|pip|curl|sbatch|srun|kubectl|mpirun|cp|sed|(SUPERVISE|KINDS)=[\w,]+ sbatch) ?",
        "outside",
        "",
    ),
    (r"MEGAJAX_TOKEN=SECRET srun ", "outside", ""),
    (r"^(uv run )?megajax( (help|VERB|COMMAND|--)|$)", "outside", ""),
    (r"^uv (sync|build|run (--extra \w+ )?(pytest|scripts/check.sh|--with))", "outside", ""),
    (r"^uv run --group docs mkdocs (serve|build)", "outside", ""),
    (r"^for id in 0 1", "run", ""),
    (r"\.\.\.|COMMAND", "parse", ""),
    (r"launch_ray.py|supervise.py", "parse", ""),
    ("|".join(map(re.escape, NEEDS_SERVICE)), "parse", ""),
    (r"scripts/(gpu_check|tune|kernel_report|learn_h200|profile_programs|kill_saves)", "parse", ""),
    (r"scripts/run_experiments.py", "parse", ""),
    (r"scripts/(tables|figures|docs|notebooks|publish|house|mutants|frozen)", "parse", ""),
    (r"plan.py .*--(search|workload)", "parse", ""),
    (r"experiments/(hybridflow|optimus|butterfly).py", "parse", ""),
    (r"--extra gpu .*pretrain.py .*--preset=gpt2", "plan", "h100:1x1"),
    (r"pretrain.py --preset=llama3_1b", "plan", "h100:1x1"),
    (r"--extra gpu .*pretrain.py", "plan", "h100:8x8"),
    (r"plan.py ", "plan", ""),
    (r"--extra gpu|--preset=(paper|long|storm)|--extra aot|MEGATRON|\.gguf|--gguf", "parse", ""),
    (r"experiments/qsync.py (profile|run|losses)", "parse", ""),
    (r"experiments/qsync.py plan .*--omega", "parse", ""),
    (r"experiments/llm_pq.py .*--run|cdmpp.py|minder.py|llm_pq_quality", "parse", ""),
    (r"pretrain.py .*--prune", "run", "--train.steps=8 --prune.stages=1 --prune.steps=2"),
    (r"(pretrain|finetune).py", "run", "--train.steps=2"),
    (r"experiments/(bytetransformer|flux|comet|tilewise|sdp4bit|bytecheckpoint).py$", "ci", ""),
    (r"experiments/flux.py --part=exact", "parse", ""),  # the first part of what .ci/run has
    (r"experiments/(schedules|llm_pq|qsync).py", "run", ""),
    (r"checkpoint.py inspect", "run", "--step=2"),
    (r"generate.py .*--tiles", "parse", ""),  # of a run that was pruned
    (r"scripts/evaluate.py", "parse", ""),  # test_evaluate_script.py runs it
    (r"scripts/(checkpoint|compare|hf|generate|tokenize|quantize).py", "run", ""),
]
# What a command writes to has the name of something that others read.
RENAMED = {
    "export RUN FOLDER": "export RUN EXPORTED",
    "import HF RUN": "import HF IMPORTED",
    "--out=corpus/web": "--out=corpus/other",
}
PARSER = """
import argparse, os, runpy, sys
from absl import flags
from megajax.core import config
script, cluster, argv = sys.argv[1], sys.argv[2], sys.argv[1:2] + sys.argv[3:]
sys.path.insert(0, os.path.dirname(script))
sys.argv = argv
if "argparse.ArgumentParser" in open(script).read():
    for name in ("parse_args", "parse_known_args"):
        def parsed(*args, old=getattr(argparse.ArgumentParser, name), **kwargs):
            old(*args, **kwargs)
            os._exit(0)
        setattr(argparse.ArgumentParser, name, parsed)
    runpy.run_path(script, run_name="__main__")
    sys.exit("parsed no arguments")
module = runpy.run_path(script, run_name="parsed")
words = flags.FLAGS(argv)
if "preset" in flags.FLAGS and "--init_from" not in " ".join(argv):
    cfg, _ = config.from_flags(module["PRESETS"], module.get("take_model"))
    if cluster:
        from megajax.core.hardware import parse_cluster
        from megajax.systems import aot
        plan = aot.outline(cfg, parse_cluster(cluster), cfg.train.attention == "cudnn")
        sys.exit(plan.misfit and f"does not fit {cluster}: {plan.misfit} {plan.needed / 2**30} GiB")
"""


def as_file(command: str) -> str:
    """Returns a command with the program's file in place of `megajax VERB`."""

    def file(match: re.Match) -> str:
        known = verbs.VERBS.get(match[1])
        return match[0] if known is None else f"uv run {known[0]}"

    return re.sub(r"(?:uv run )?\bmegajax ([a-z]+)( --processes=\d+)?", file, command)


def commands_of(text: str) -> list[str]:
    """Returns the commands of a page: of its shell blocks, and of its inline code."""
    lines = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language in ("", "bash", "sh"):
            if block.startswith("for "):
                lines.append(block.strip())
                continue
            for line in block.replace("\\\n", " ").split("\n"):
                for part in line.split(" #")[0].strip().removeprefix("$ ").split(" && "):
                    if COMMAND.match(f"{part} "):
                        lines.append(" ".join(part.split()))
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`((?:uv run|megajax) [^`]+)`", plain)
    return [as_file(line) for line in (*lines, *(" ".join(c.split()) for c in inline))]


def commands() -> dict[str, str]:
    """Returns {command: the page that has it first}, of all pages but the list of changes."""
    pages: dict[str, str] = {}
    for path in PAGES:
        if path.name != "CHANGELOG.md":
            for command in commands_of(path.read_text()):
                pages.setdefault(command, path.relative_to(ROOT).as_posix())
    return pages


def rule(command: str) -> tuple[str, str] | None:
    """Returns what is done with a command, and the flags or the cluster of that."""
    return next(((what, more) for at, what, more in RULES if re.search(at, command)), None)


def split(command: str) -> tuple[str, list[str]]:
    """Returns the script of a command and its arguments, without uv's and what stands behind --."""
    words = shlex.split(command.split(" -- ")[0])
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return words[at], words[at + 1 :]


def test_every_command_has_a_rule():
    assert len(commands()) > 90
    assert [f"{page}: {c}" for c, page in commands().items() if rule(c) is None] == []


def test_commands_are_read_from_blocks_and_from_inline_code():
    text = "`uv run a.py\n--b=1` `x`\n```\n$ uv run c.py \\\n  --d  # why\nstep 1 | loss\n```\n"
    assert commands_of(text) == ["uv run c.py --d", "uv run a.py --b=1"]
    loop = "for i in 0 1; do\n    A=$i \\\n        uv run b.py &\ndone\nwait"
    assert commands_of(f"```\n{loop}\n```\n") == [loop]


def test_ci_has_what_the_documents_leave_to_it():
    assert "run_experiments.py --run" in (ROOT / ".ci" / "run").read_text()
    script = "".join(f"uv run {c} " for entry in ENTRIES.values() for c in entry.commands)
    left = [c for c in commands() if (rule(c) or "")[0] == "ci"]
    assert left and [c for c in left if c + " " not in script] == []


def test_the_70b_command_fits_the_cluster_that_the_page_names():
    (line,) = [c for c in commands() if "--preset=llama3_70b" in c and "pretrain.py" in c]
    values = {}
    for word in split(line)[1]:
        name, value = word.removeprefix("--").split("=")
        values[name] = ast.literal_eval(value) if value.isdigit() else value
    cfg = config.override(PRESETS[values.pop("preset")](), values)
    cluster = parse_cluster("h100:8x8")
    plan = aot.outline(cfg, cluster)
    assert plan.misfit is None and plan.needed < 0.85 * cluster.card.memory_bytes
    # By hand: 70.6e9 parameters, two moments and the gradients' sums of 4 bytes, over 64 GPUs.
    assert plan.needed > 70.5e9 * 16 / 64


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the project's programs and what the placeholders of the documents mean."""
    folder = tmp_path_factory.mktemp("commands")
    for name in ("experiments", "scripts", "megajax", "pallas_kernels", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    words = "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(3000))
    for name in ("TEXT", "NOTES"):
        (folder / name).mkdir()
        for i in range(8):
            (folder / name / f"{i}.txt").write_text(words[i:])
    rows = [f'{{"text": "{w} {i}", "label": "{w}"}}' for i in range(400) for w in ("ab", "cd")]
    (folder / "SET.jsonl").write_text("\n".join(rows))
    small = "--train.steps=4 --checkpoint.every=2"
    make(folder, f"uv run experiments/pretrain.py {small} --run_dir=RUN")
    make(folder, f"uv run experiments/pretrain.py {small} --run_dir=OTHER --train.seed=1")
    make(folder, "uv run scripts/hf.py export RUN FOLDER")
    for name in ("HF", "HF_FOLDER"):
        (folder / name).symlink_to("FOLDER")
    for name in ("tokenizer.json", "FILE"):
        (folder / name).symlink_to("FOLDER/tokenizer.json")
    make(folder, "uv run scripts/tokenize.py --data.source=TEXT/ --out=corpus/web")
    return folder


def make(folder: pathlib.Path, command: str) -> subprocess.CompletedProcess:
    """Runs a command in a folder; `uv run` is this interpreter. Raises when it fails."""
    line = re.sub(r"uv run (--(extra|group) \S+ )*", f"{sys.executable} ", command)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=900
    )
    differs = "checkpoint.py diff" in command  # as diff(1), it says by 1 that they do
    assert done.returncode == differs, (
        f"{command}: {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}"
    )
    return done


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("command", [c for c in commands() if (rule(c) or ("",))[0] == "run"])
def test_command_runs_here(place, command):
    for name, other in RENAMED.items():
        command = command.replace(name, other)
    make(place, f"{command} {(rule(command) or ('', ''))[1]}".strip())


@pytest.mark.slow
@pytest.mark.process
def test_flags_of_the_other_commands_are_legal(tmp_path):
    (tmp_path / "parser.py").write_text(PARSER)
    failed = []
    for command in commands():
        what, more = rule(command) or ("", "")
        if what in ("parse", "plan", "ci"):
            script, arguments = split(command)
            arguments = [a for a in arguments if a not in ("FLAGS", "...")]
            cluster = more
            if script.endswith("plan.py"):
                cluster = dict(a.split("=", 1) for a in arguments if "=" in a)["--cluster"]
            if what != "plan":
                cluster = ""
            parser = str(tmp_path / "parser.py")
            done = forks.run(parser, str(ROOT / script), cluster, *arguments)
            if done.returncode:
                failed.append(f"{command}\n{(done.stdout + done.stderr)[-800:]}")
        elif what == "outside":
            done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
            failed += [f"{command}\n{done.stderr}"] if done.returncode else []
    assert not failed, "\n\n".join(failed)
