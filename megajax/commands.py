"""The command `megajax VERB`, which runs the programs of experiments/ and scripts/.

A program is a file with flags and a help page of its own; nothing of it is written here. In a
checkout the files are those of the repository. A wheel has them in megajax/programs. The program
runs in this process as `__main__`, and sys.argv[0] holds the words that start it, e.g. `megajax
train`, so that its messages name the command as it was typed (core/script.py). With --processes=N,
N processes of this machine run one program as one job (systems/elastic/local.py). No jax import.
"""

import os
import shlex
import shutil
import signal
import sys
import textwrap
import types
from collections.abc import Sequence
from pathlib import Path

import megajax
from megajax.core.errors import UserError, did_you_mean

_PROGRAMS = Path(__file__).with_name("programs")
# The folder of experiments/ and scripts/.
ROOT = _PROGRAMS if _PROGRAMS.is_dir() else Path(__file__).parent.parent
# Verb -> (its file, what it does).
VERBS = {
    "train": ("experiments/pretrain.py", "train a decoder on text, from random or loaded weights"),
    "finetune": ("experiments/finetune.py", "fine-tune: chats, labels, or hidden tokens"),
    "generate": ("scripts/generate.py", "write text with a run, a folder or a GGUF file"),
    "chat": ("scripts/chat.py", "talk with a model, or with a server, in the terminal"),
    "evaluate": ("scripts/evaluate.py", "measure perplexity, multiple choice and exact match"),
    "serve": ("scripts/serve.py", "serve a model over HTTP, with OpenAI's interface"),
    "plan": ("experiments/plan.py", "plan a training run for a cluster that is not here"),
    "compare": ("scripts/compare.py", "one table and one plot of several runs"),
    "checkpoint": ("scripts/checkpoint.py", "list, check, compare, reshard, convert checkpoints"),
    "hf": ("scripts/hf.py", "import and export Hugging Face folders and GGUF files"),
    "tokenize": ("scripts/tokenize.py", "write the tokens of a text to a file, once for many runs"),
    "quantize": ("scripts/quantize.py", "quantize a model's weights by GPTQ or AWQ"),
    "experiments": ("scripts/run_experiments.py", "list the experiments, one a paper; run them"),
    "supervise": ("scripts/supervise.py", "restart a run on one or more hosts after failures"),
}
# What trains or computes in one job of several processes.
IN_PROCESSES = ("train", "finetune", "generate")
# What imports for seconds before it prints; on a terminal, a line says meanwhile what has begun.
SLOW = ("train", "finetune", "generate", "chat", "evaluate", "serve", "plan", "hf", "quantize")
HELP = ("help", "--help", "-h", "-help", "--helpfull", "-?")


def main() -> int:
    """Runs the program of the verb that was typed. Returns the exit code."""
    words = sys.argv[1:]
    if not words or words[0] in HELP:
        print(overview())
        return 0
    if words[0] in ("--version", "-V", "version"):
        print(f"megajax {megajax.__version__}")
        return 0
    verb, *flags = words
    try:
        if verb not in VERBS:
            near = did_you_mean(verb, VERBS)
            raise UserError(f"there is no command {verb!r}.{near or ' megajax help lists them'}")
        return _run(verb, flags)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def overview() -> str:
    """Returns the page of `megajax help`."""
    width = max(map(len, VERBS))
    several = f"{', '.join(IN_PROCESSES[:-1])} or {IN_PROCESSES[-1]}"
    about = (megajax.__doc__ or "").splitlines()[0]
    return "\n".join(
        [
            *textwrap.wrap(f"megajax {megajax.__version__}. {about}", 80),
            "",
            "usage: megajax COMMAND [--FLAG=VALUE ...]",
            "",
            *(f"  {verb:{width}}  {what}" for verb, (_, what) in VERBS.items()),
            "",
            "megajax COMMAND --help describes the flags of a command; megajax --version",
            *textwrap.wrap(
                f"--processes=N behind {several} divides this machine's devices among N processes "
                "of one job.",
                80,
            ),
        ]
    )


def typed() -> list[str]:
    """Returns the words that start this command in a shell: of a checkout's environment by uv."""
    script = Path(sys.argv[0])
    if script.name != "megajax":  # python -m megajax
        script = Path(sys.executable).with_name("megajax")
    if Path(sys.prefix) == ROOT / ".venv" and Path.cwd().is_relative_to(ROOT):
        return ["uv", "run", "megajax"]
    at = shutil.which("megajax")
    if at is not None and script.exists() and os.path.samefile(at, script):
        return ["megajax"]
    return [str(script)] if script.exists() else [sys.executable, "-m", "megajax"]


def _run(verb: str, words: Sequence[str]) -> int:
    """Runs the program of a verb with these flags."""
    name, flags = [*typed(), verb], list(words)
    if verb in IN_PROCESSES:
        count, flags = _processes(flags)
        if count is not None and not any(flag in HELP for flag in flags):
            from megajax.systems.elastic import local

            if not local.is_started(count, os.environ):
                command = [sys.executable, "-P", "-m", "megajax", verb, *words]
                return local.run(count, command, os.environ)
            name.append(f"--processes={count}")
    file = ROOT / VERBS[verb][0]
    if verb == "experiments" and flags and not flags[0].startswith("-"):
        file = _experiment(flags.pop(0))
        name.append(file.stem)
    if not file.is_file():
        raise UserError(f"this installation lacks the program of {verb}, {file}")
    if not any(flag in HELP for flag in flags) and sys.stderr.isatty() and verb in SLOW:
        print(f"megajax {megajax.__version__}: {verb}", file=sys.stderr)
    execute(file, shlex.join(name), flags)
    return 0


def _experiment(name: str) -> Path:
    """Returns the program of an experiment. Raises: UserError."""
    files = {file.stem: file for file in sorted((ROOT / "experiments").glob("*.py"))}
    if name not in files:
        near = did_you_mean(name, files) or " megajax experiments lists them"
        raise UserError(f"there is no experiment {name!r}.{near}")
    return files[name]


def _processes(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """Returns (the value of --processes or None, the other words). Raises: UserError."""
    others, said = [], None
    rest_of = iter(words)
    for word in rest_of:
        flag, equals, value = word.partition("=")
        if flag == "--":
            others += [word, *rest_of]
        elif flag not in ("--processes", "-processes"):
            others.append(word)
        else:
            said = value if equals else next(rest_of, "")
    if said is None:
        return None, others
    if not (said.isdecimal() and int(said) > 0):
        raise UserError(f"processes={said} must be an integer, at least 1 (--processes)")
    return int(said), others


def execute(file: Path, name: str, flags: Sequence[str]) -> None:
    """Runs a program as `__main__`.

    name: the words that start it, as a shell reads them. Programs that it starts find the packages
    of an installation's programs too.
    """
    sys.argv = [name, *flags]
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    if ROOT == _PROGRAMS:
        known = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([known] if known else [])])
    program = types.ModuleType("__main__")
    program.__file__ = str(file)
    sys.modules["__main__"] = program
    exec(compile(file.read_bytes(), str(file), "exec"), program.__dict__)


def start() -> None:
    """Is the console script. Ctrl-C before the program begins is one line."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
