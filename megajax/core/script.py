"""How a script starts and ends: help, flags, and output whose reader is gone. No jax import."""

import contextlib
import dataclasses
import errno
import io
import os
import re
import select
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags

from megajax.core.errors import did_you_mean

# ---- help
#
# What --help and --helpfull print: the flags of a script by section, the most important ones first.
# --help describes every flag of a small script. Of a large one it describes the flags that matter
# most and names the others; --helpfull describes all, and absl's own flags.
#
# Legend: a row is (flag, type in words, description).


WIDTH = 100
# absl's words for types -> those of a configuration's flags.
KINDS = {
    "string": "text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "comma separated list of strings": "words, joined by commas",
}
FEW = 30  # flags that --help describes one by one (chosen: a screen)
HELP_WORDS = ("--help", "-help", "-h", "-?", "--helpshort", "--helpfull", "-helpfull")

Row = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Page:
    """The flags of a script's configuration.

    sections: {what the names of its flags begin with: its title}; '' holds the script's own flags.
    rows: in the order of the configuration. first: flags that matter most; empty: the script's own.
    verbs: {flag: the script's verbs that read it}; flags that are absent are read by all verbs.
    """

    sections: Mapping[str, str]
    rows: Sequence[Row]
    first: Sequence[str] = ()
    verbs: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def section(self, flag: str) -> str:
        """Returns the section of a flag: the longest that it begins with."""
        matches = [s for s in self.sections if flag.startswith(f"{s}.")]
        return max(matches, key=len, default="")


class Start(flags.Flag):
    """--preset; it knows the page of every preset, because that shows other values.

    verbs: all verbs of the script. The description of a flag that only some of them read may begin
    with these: "train, watch: ...". others: the flags of all presets.
    """

    others: set[str]
    pages: Mapping[str, Callable[[], Page]] = {}
    verbs: Sequence[str] = ()

    def page(self, argv: Sequence[str]) -> Page:
        """Returns the page of the preset that a command line starts from."""
        words = zip(argv, [*argv[1:], ""], strict=True)
        names = [
            after if word.lstrip("-") == "preset" else word.partition("=")[2]
            for word, after in words
            if word.startswith("-") and word.lstrip("-").partition("=")[0] == "preset"
        ]
        return self.pages[
            next((w for w in reversed(names) if w in self.pages), str(self.default))
        ]()


def asked(argv: Sequence[str]) -> bool | None:
    """Returns whether the command line asks for all flags; None if it asks for no help."""
    words = list(argv[1:])
    words = words[: words.index("--")] if "--" in words else words
    help_words = [w for w in words if w in HELP_WORDS]
    return any(w.endswith("full") for w in help_words) if help_words else None


def answer() -> None:
    """Prints the help that the command line asks for, and ends the program with exit code 0."""
    full = asked(sys.argv)
    if full is not None:
        print(show(full))
        sys.exit(0)


def show(full: bool) -> str:
    """Returns the help of the script that is running. full: of every flag, absl's too."""
    known = flags.FLAGS
    script_flags = {f.name: f for f in known.get_key_flags_for_module(sys.argv[0])}
    start = script_flags.get("preset")
    page, verbs = Page({"": ""}, []), {}
    if isinstance(start, Start):
        page = start.page(sys.argv)
        if len(start.pages) == 1:  # nothing to choose from
            del script_flags["preset"]
    theirs = [name for name in script_flags if name not in {row[0] for row in page.rows}]
    rows = []
    for name in theirs:
        flag, kind, what = _row(script_flags[name])
        head, colon, tail = what.partition(": ")
        words = tuple(head.split(", "))
        if colon and isinstance(start, Start) and set(words) <= set(start.verbs):
            verbs[name], what = words, tail
        rows.append((flag, kind, what))
    page = dataclasses.replace(
        page,
        rows=[*rows, *page.rows],
        first=page.first and (*page.first, *theirs),
        verbs={**page.verbs, **verbs},
    )
    others = [_row(known[name]) for name in sorted(known) if name not in script_flags]
    others = list(dict.fromkeys(others))  # a short name is the same flag once more
    return as_started(text(sys.modules["__main__"].__doc__ or "", page, others, full))


def spell(value: Any) -> str:
    """Returns a value as one types it behind a flag."""
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _row(flag: flags.Flag) -> Row:
    value = f"; default: {spell(flag.default) or 'empty'}" if flag.default is not None else ""
    kind, what = flag.flag_type(), flag.help or ""
    if isinstance(flag, flags.EnumFlag):  # absl writes the values before the description
        kind = "|".join(flag.parser.enum_values)
        what = what.removeprefix(f"<{kind}>: ")
    return flag.name, KINDS.get(kind, kind), f"{what}{value}"


def text(about: str, page: Page, foreign: Iterable[Row], full: bool) -> str:
    """Returns the help of a script.

    Args: about: its docstring. foreign: absl's own flags, which only --helpfull lists.
    """
    lines = [about.strip(), ""]
    rows = {row[0]: row for row in page.rows}
    first = [f for f in dict.fromkeys(page.first) if f in rows]
    first = first or [f for f in rows if not page.section(f)]
    brief = not full and len(rows) > FEW
    lines += ["The flags that matter most:" if brief else "Flags:"] if rows else []
    lines += [_line(rows[flag]) for flag in first if flag not in page.verbs]
    for verbs in dict.fromkeys(page.verbs[flag] for flag in first if flag in page.verbs):
        lines += ["", f"Flags of {' and '.join(filter(None, (', '.join(verbs[:-1]), verbs[-1])))}:"]
        lines += [_line(rows[flag]) for flag in first if page.verbs.get(flag) == verbs]
    for section, what in page.sections.items():
        members = [f for f in rows if page.section(f) == section and f not in first]
        if members:
            title = f"{section or 'others'}: {what}" if what else section or "others"
            lines += ["", textwrap.fill(title, WIDTH)]
            lines += [_names(members)] if brief else map(_line, map(rows.get, members))
    if brief:
        lines += ["", "--helpfull describes them all."]
    if full:
        lines += ["", "absl:", *map(_line, foreign)]
    return "\n".join(lines)


def _line(row: Row | None) -> str:
    assert row is not None
    flag, kind, what = row
    return textwrap.fill(
        f"--{flag}: {what} ({kind})",
        WIDTH,
        initial_indent="  ",
        subsequent_indent="      ",
        break_on_hyphens=False,
    )


def _names(flags: Iterable[str]) -> str:
    return textwrap.fill(
        " ".join(f"--{flag}" for flag in flags),
        WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )


# ---- how the program was started


def command_words() -> str:
    """Returns the words that start this program in a shell.

    They are sys.argv[0] where the command `megajax` runs the program (megajax/commands.py), and `uv
    run FILE` otherwise.
    """
    name = sys.argv[0]
    return shlex.join(["uv", "run", name]) if name.endswith(".py") else name


def command_line() -> str:
    """Returns the command that was typed, to type again."""
    return " ".join([command_words(), *map(shlex.quote, sys.argv[1:])])


def as_started(text: str) -> str:
    """Returns a text as the command `megajax` shows it: `megajax hf` for `uv run scripts/hf.py`.

    The running program is named as it was started. In an installation, pip installs extras.
    """
    if sys.argv[0].endswith(".py"):
        return text
    from megajax.commands import VERBS  # not at the top: it starts programs, which import this

    file = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    start = f"{sys.argv[0].rpartition('megajax ')[0]}megajax"
    names = {name: f"{start} {verb}" for verb, (name, _) in VERBS.items()}
    names["/".join(file.parts[-2:])] = sys.argv[0]
    if not (Path(__file__).parents[2] / "pyproject.toml").exists():
        text = re.sub(r"uv sync --extra (\w+)", r"pip install 'megajax[\1]'", text)

    def named(match: re.Match) -> str:
        experiment = match[3].removeprefix("experiments/").removesuffix(".py")
        other = f"{start} experiments {experiment}" if experiment != match[3] else match[0]
        return names.get(match[3], other)

    return re.sub(
        r"(uv run (--(?:extra|group) \S+ )*)?((?:experiments|scripts)/\w+\.py)", named, text
    )


# ---- start and end


# What absl says of a flag that cannot be parsed, and our words for it.
WORDS = {
    r"invalid literal for int\(\).*": "must be an integer",
    r"could not convert string to float.*": "must be a number",
    r"\('Non-boolean argument to boolean flag'.*": "must be true or false",
    r"^ERROR:+ ": "",
}

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # a disk takes no more
SETTLE_S = 10.0  # (chosen) longest wait for what jax still computes when a script ends
# Names that tools give to one flag; some of each row are flags here.
OTHER_NAMES = (
    ("out", "run_dir", "output", "output_dir", "outdir", "logdir", "workdir", "save_dir"),
    ("lr", "learning_rate"),
    ("steps", "max_steps", "num_steps", "train_steps", "num_train_steps", "iterations"),
    ("global_batch", "batch", "batch_size", "global_batch_size", "train_batch_size"),
    ("seq_len", "sequence_length", "max_seq_len", "seq_length", "context_length", "block_size"),
    ("tensor", "tp", "tensor_parallel_size", "tensor_model_parallel_size"),
    ("pipe", "pp", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    ("expert", "ep", "expert_parallel_size", "expert_model_parallel_size"),
    ("layers", "num_layers", "n_layer", "n_layers"),
    ("preset", "model_name", "size"),
    ("init_from", "hf", "model_name_or_path", "model_path", "pretrained_model", "pretrained"),
    ("context", "cp", "context_parallel_size"),
    ("tokenizer", "tokenizer_name", "tokenizer_path", "tokenizer_name_or_path"),
    ("source", "dataset", "dataset_path", "data_path", "train_file", "train_data", "dataset_dir"),
    ("text_key", "text_column", "text_column_name", "dataset_text_field"),
    ("label_key", "label_column", "label_column_name"),
    ("labels", "num_labels", "num_classes"),
    ("holdout", "val_split", "validation_split_percentage", "validation_size"),
    ("warmup", "warmup_steps", "num_warmup_steps", "lr_warmup_iters"),
    ("schedule", "lr_scheduler_type", "lr_scheduler", "lr_decay_style"),
    ("weight_decay", "wd"),
    ("clip", "max_grad_norm", "clip_grad", "grad_clip", "gradient_clip_val"),
    ("beta1", "adam_beta1"),
    ("beta2", "adam_beta2"),
    ("eps", "adam_epsilon", "adam_eps"),
    ("accumulate", "gradient_accumulation_steps", "grad_accum", "accumulate_grad_batches"),
    ("remat", "gradient_checkpointing", "activation_checkpointing", "recompute_granularity"),
    ("attention", "attn_implementation", "flash_attn", "use_flash_attn", "flash_attention"),
    ("keep", "save_total_limit"),
    ("prefetch", "num_workers", "dataloader_num_workers", "dataloader_prefetch_factor"),
    ("wandb", "wandb_project"),
    ("temperature", "temp"),
    ("max_tokens", "max_new_tokens", "max_length"),
)
_DTYPE = "the type of computation is --train.dtype, float32 or bfloat16"
_LORA = "there is no LoRA: all parameters are trained"
_SHARDS = "--shard.zero says what is cut over the devices, and the --mesh flags how they stand"
_ROWS = "--train.global_batch is the rows of a step on all devices together"
# Names of other tools for what is said in another way here. An answer counts in a script that has
# all flags which it names.
ANSWERS = {
    ("bf16", "use_bf16", "bf16_full_eval"): "say --train.dtype=bfloat16",
    ("fp16", "half_precision_backend"): f"nothing is trained in float16; {_DTYPE}",
    ("mixed_precision", "precision", "torch_dtype", "dtype"): _DTYPE,
    ("num_train_epochs", "num_epochs", "epochs", "n_epochs", "max_epochs"):
        "a run has steps and no epochs: an epoch is the number of rows, divided by "
        "--train.global_batch, and its steps are --train.steps",
    ("per_device_train_batch_size", "per_device_batch_size", "micro_batch_size",
     "train_micro_batch_size_per_gpu"): f"{_ROWS}; --train.accumulate cuts them into micro-batches",
    ("per_device_eval_batch_size", "eval_batch_size"):
        f"{_ROWS}, and --eval.batches says how many such batches an evaluation reads",
    ("lora_r", "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target",
     "use_lora", "use_peft", "peft_type", "use_dora", "finetuning_type"): _LORA,
    ("qlora", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "quantization_bit"):
        f"no quantized weights are trained, and {_LORA}",
    ("warmup_ratio", "warmup_proportion"): "--optim.warmup is a number of steps, no ratio",
    ("logging_steps", "log_interval", "logging_strategy", "log_steps"): "say --log.every, in steps",
    ("save_steps", "save_interval", "save_strategy", "checkpoint_interval"):
        "say --checkpoint.every, in steps",
    ("eval_steps", "eval_interval", "eval_strategy", "evaluation_strategy", "val_check_interval"):
        "say --eval.every, in steps",
    ("dataset_name", "dataset_config_name", "streaming", "use_auth_token", "hub_model_id",
     "push_to_hub"): "nothing is downloaded or sent: --data.source names files of this machine",
    ("max_seq_length", "max_source_length", "cutoff_len", "model_max_length"):
        "say --train.seq_len, in tokens",
    ("deepspeed", "deepspeed_config", "zero_stage", "use_distributed_optimizer", "fsdp",
     "fsdp_config", "fsdp_transformer_layer_cls_to_wrap", "sharding_strategy"): _SHARDS,
    ("resume_from_checkpoint", "resume", "overwrite_output_dir"):
        "a run goes on by itself where its --run_dir holds checkpoints; another folder begins anew",
    ("optim", "optimizer", "optimizer_name", "optimizer_type"): "say --optim.name",
    ("report_to", "logger"): "--log.tensorboard and --log.wandb say where metrics go",
    ("do_train", "do_eval", "do_predict"):
        "the command trains; --eval.every and --eval.batches say when it evaluates",
    ("max_train_samples", "max_samples", "max_eval_samples"):
        "--train.steps and --train.global_batch say how many rows are read",
    ("packing", "group_by_length", "pad_to_max_length"):
        "rows of --train.seq_len tokens are packed without a flag where the task allows it",
    ("processes", "num_processes", "nproc_per_node", "nproc"):
        "the command megajax starts several processes of one job, behind train, finetune or "
        "generate; other launchers are in docs/training.md",
    ("torch_compile", "compile", "tf32", "local_rank", "ddp_backend"):
        "jax compiles and finds the devices; there is nothing to say (--emulate emulates some)",
}  # fmt: skip


def start(main: Callable[..., Any]) -> None:
    """Runs main(argv) under absl, after the question for help was answered."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a sample may hold any character
    with output_may_close():
        answer()
        app.run(main, flags_parser=parse)


def parse(argv: list[str]) -> list[str]:
    """Returns the words of a command line that are no flags.

    What absl would report with exit code 1 is one sentence and exit code 2 here, as wrong values
    are that a script finds itself.
    """
    try:
        return flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        sentence = f"there is no flag --{error.flagname}{suggest(error.flagname)}"
    except flags.Error as error:
        sentence = " ".join(str(error).split()).replace("flag --", "--", 1)
        for python, words in WORDS.items():
            sentence = re.sub(python, words, sentence)
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


def suggest(name: str) -> str:
    """Returns '. Did you mean --x?' of the flags of the script, or where they are listed.

    A name that is the last part of some flags means these: steps is train.steps or prune.steps. So
    does what other tools call the same (OTHER_NAMES): output_dir is run_dir or out. What they say
    in another way has its answer (ANSWERS).
    """
    name = name.replace("-", "_")
    for names, answer in ANSWERS.items():
        needed = re.findall(r"--([a-z_]+(?:\.[a-z_]+)*)", answer)
        if name in names and all(f in flags.FLAGS for f in needed if f != "mesh"):
            return f". {answer[0].upper()}{answer[1:]}" if answer[0] != "-" else f". {answer}"
    alike = next((names for names in OTHER_NAMES if name in names), (name,))
    last = sorted(f for f in flags.FLAGS if f.endswith(f".{name}") or f.split(".")[-1] in alike)
    if last:
        return f". Did you mean {' or '.join(f'--{flag}' for flag in last)}?"
    known = flags.FLAGS
    script_flags = [
        f for f in known if not str(known.find_module_defining_flag(f)).startswith("absl")
    ]
    near = did_you_mean(name, [*script_flags, "help"]).strip().replace("mean ", "mean --")
    return f". {near}" if near else "; --help lists them"


def settle(code: int) -> None:
    """Waits for the computations that jax has begun, before a script ends by an exception.

    A thread of XLA that finishes one while Python shuts down would abort the process (Python ends
    a thread that wants its lock then, and C++ does not allow that). Call it where the exception is
    handled: its traceback holds the arrays that are still computed. If they are not done in
    SETTLE_S seconds (a collective may wait for a process that is gone), or after another Ctrl-C,
    the process ends at once with this exit code.
    """
    bridge = sys.modules.get("jax._src.xla_bridge")
    # Nothing public says whether a backend was started, and live_arrays would start one.
    is_started = getattr(bridge, "backends_are_initialized", lambda: False)()
    arrays = sys.modules["jax"].live_arrays() if is_started else []
    end = time.monotonic() + SETTLE_S
    with contextlib.suppress(KeyboardInterrupt):
        while arrays and time.monotonic() < end:
            arrays = [array for array in arrays if not (array.is_deleted() or array.is_ready())]
            time.sleep(0.01 if arrays else 0)
    if arrays:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def flush_output() -> None:
    """Flushes what was printed: at the exit Python would report an error in its own words.

    Raises: BrokenPipeError when nobody reads; SystemExit when the disk is full.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _end_of_output(error)


def _end_of_output(error: OSError) -> NoReturn:
    with contextlib.suppress(OSError):
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


@contextlib.contextmanager
def output_may_close() -> Iterator[None]:
    """Ends the script without a traceback when what reads its output (head, less) is gone.

    The exit code is then 141, which is what a shell reports for a program that SIGPIPE ends. A disk
    that does not take the output is one line and exit code 1.
    """
    try:
        try:
            yield
        finally:
            flush_output()
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if not any(event & select.POLLERR for _, event in poll.poll(0)):
            raise  # it was another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno in FULL and error.filename is None:  # a print without a buffer, perhaps
            try:
                os.write(sys.stdout.fileno(), b"\n")
            except OSError:
                _end_of_output(error)
        raise
