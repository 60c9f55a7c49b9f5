"""What a run of reinforcement learning reads, measures and shows; and `run`, for other programs.

experiments/hybridflow.py is the command. Everything that is not of reinforcement learning (folder,
lock, checkpoints, signals, records) is systems/job.py's.
"""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from megajax.core.errors import UserError, did_you_mean
from megajax.core.files import expand, write_whole
from megajax.core.tree import count
from megajax.data.tokenizer import Tokenizer, open_tokenizer, prompt_ids, write_characters
from megajax.monitor.console import Console, quantity
from megajax.monitor.records import Recorder, rows_by_step
from megajax.systems.hybridflow.batch import DataBatch
from megajax.systems.hybridflow.config import HybridFlowConfig
from megajax.systems.hybridflow.controller import RECIPES, Dataflow, Recipe
from megajax.systems.hybridflow.data import Prompts, read
from megajax.systems.hybridflow.rewards import Reward, open_rewards
from megajax.systems.hybridflow.tasks import ALPHABET, RlTask, open_task
from megajax.training.interrupts import QuietGarbage
from megajax.training.report import HELD_OUT, OURS, save_plot
from megajax.training.run_dir import RunDir
from megajax.training.task import TrainState

TASK_TOKENIZER = "task"  # the value of --data.tokenizer that stands for the tasks' alphabet
SAMPLES = 8  # (chosen) answers of an evaluation that are written down


class Problems:
    """The prompts of a run, its tokenizer and its rewards (job.Reading)."""

    labels: tuple[str, ...] = ()
    rows: Any = None

    def __init__(self, cfg: HybridFlowConfig, console: Console | None = None, run_dir: Any = None):
        """Opens them. Raises: UserError for what is not there or does not fit together."""
        self._cfg, rl = cfg, cfg.rl
        task: RlTask | None = None
        if re.search(r"\.(jsonl|json|ndjson|parquet)$", cfg.problem):
            source: RlTask | DataBatch = read(cfg.problem)
            if cfg.reward is None:
                raise UserError(f"task={cfg.problem} has no rewards of its own; give --reward")
        else:
            source = task = open_task(cfg.problem)
        self.tokenizer = self._open_tokenizer(task)
        if cfg.model.vocab < self.tokenizer.vocab:
            raise UserError(
                f"model.vocab={cfg.model.vocab} is fewer than the {self.tokenizer.vocab} ids of "
                f"data.tokenizer={cfg.data.tokenizer}; nearest: {self.tokenizer.vocab} "
                "(--model.vocab)"
            )
        chat: Any = None
        if isinstance(source, DataBatch) and any(not isinstance(p, str) for p in source["prompts"]):
            chat = self._chat()

        def encode(prompt: Any) -> list[int]:
            if isinstance(prompt, str):
                return prompt_ids(self.tokenizer, prompt)
            return chat.encode(prompt)

        self.prompts = Prompts(
            source, cfg.train.seed, rl.holdout, cfg.problem, encode, rl.max_prompt
        )
        self.rewards: list[Reward]
        self.weights: list[float] | None = None
        if cfg.reward is None:
            assert task is not None
            self.rewards = [task.reward]
        else:
            self.rewards = open_rewards(cfg.reward)
            if cfg.reward_weights is not None:
                self.weights = _numbers(cfg.reward_weights, len(self.rewards))
        self.identity = self.prompts.identity | {"tokenizer": self.tokenizer.identity}
        if console is not None:
            names = ", ".join(getattr(f, "__name__", "?") for f in self.rewards)
            console.say(
                f"{cfg.problem}: {rl.prompts} prompts x {rl.n} responses an iteration, "
                f"{rl.holdout:.0%} of the prompts held out; rewards: {names}"
            )
            for note in self.prompts.notes:
                console.say(note)

    def _open_tokenizer(self, task: RlTask | None) -> Tokenizer:
        cfg = self._cfg
        if cfg.data.tokenizer != TASK_TOKENIZER:
            return open_tokenizer(cfg.data.tokenizer)
        if task is None or task.is_text:
            raise UserError(
                f"task={cfg.problem} needs more than the characters of the other tasks; "
                "use --data.tokenizer=bytes with --model.vocab=259, or a tokenizer.json"
            )
        path = expand(cfg.cache_dir) / "rl-alphabet" / "tokenizer.json"
        if not path.is_file():
            write_characters(ALPHABET, path)
        return open_tokenizer(str(path))

    def _chat(self) -> Any:
        """Returns what makes tokens of messages: the chat template of the tokenizer's folder.

        Raises: UserError where there is none, or it does not compile.
        """
        from megajax.data.chat import Chat, chat_template

        name = self._cfg.data.tokenizer
        chat = Chat(chat_template(expand(name), self.tokenizer), self.tokenizer)
        if chat.problem:
            raise UserError(
                f"{self._cfg.problem} has prompts of messages, and data.tokenizer={name} has no "
                "chat template that can be used: give a folder with one, or prompts that are "
                "texts (--data.tokenizer)"
            )
        return chat

    def measure(
        self, train_step: Any, recorder: Recorder, console: Console, run_dir: RunDir
    ) -> "Exactness":
        """Returns the evaluations of a run."""
        return Exactness(self._cfg, train_step, self.prompts, recorder, console, run_dir)


def _numbers(text: str, count_: int) -> list[float]:
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count_ or not np.isfinite(numbers).all():
        raise UserError(
            f"reward_weights={text} must be finite numbers with commas, one for each of the "
            f"{count_} functions of --reward (--reward_weights)"
        )
    return numbers


class PromptBatches:
    """Endless prompts, `rows_per_batch` an iteration (loop.Batches)."""

    def __init__(self, cfg: HybridFlowConfig, prompts: Prompts, position: int = 0):
        """position: of the first row."""
        self.position, self.rows_per_batch, self._prompts = position, cfg.rl.prompts, prompts

    def __next__(self) -> DataBatch:
        """Returns the next prompts."""
        batch = self._prompts.rows(self.position, self.rows_per_batch)
        self.position += self.rows_per_batch
        return batch


class Exactness:
    """A hook of the loop: greedy answers to held-out prompts, their scores, some of their texts."""

    def __init__(
        self,
        cfg: HybridFlowConfig,
        flow: Dataflow,
        prompts: Prompts,
        recorder: Recorder,
        console: Console,
        run_dir: RunDir,
    ):
        """Takes the held-out prompts, the same ones in each evaluation."""
        self._cfg, self._flow, self._recorder = cfg, flow, recorder
        self._console, self._run_dir = console, run_dir
        self._held = held_out_prompts(cfg, prompts)
        self.last_sample: str | None = None
        self.scores: dict[str, float] = {}

    def due(self, finished: int, last: bool) -> bool:
        """Every so many iterations, and after the last one."""
        return self._held is not None and is_evaluated(self._cfg, finished, last)

    def start(self, state: TrainState, finished: int) -> TrainState:
        """Makes up for an evaluation that the run was stopped or killed before the end of."""
        last = finished == self._cfg.train.steps
        if not finished or not self.due(finished, last):
            return state
        is_done = finished in rows_by_step(self._run_dir.metrics, "eval_failed_prompts")
        return state if is_done else self(state, finished)

    def __call__(self, state: TrainState, finished: int) -> TrainState:
        """Evaluates, records, and writes some answers to the run's samples."""
        assert self._held is not None
        row, responses = evaluate(self._flow, state, self._held)
        self._recorder.emit(finished, row)
        self.scores = row
        lines = [
            f"{responses['prompts'][i]!s} -> {responses['completions'][i]}   "
            f"({responses['scores'][i]:.2f})"
            for i in range(min(SAMPLES, len(responses)))
        ]
        self.last_sample = "\n".join(lines)
        file = Path(self._run_dir.samples) / f"{finished:08d}.txt"
        if jax.process_index() == 0:
            try:
                file.parent.mkdir(exist_ok=True)
                write_whole(file, self.last_sample + "\n")
            except OSError as error:
                self._console.say(f"cannot write {file}: {error.strerror}")
        return state


def held_out_prompts(cfg: HybridFlowConfig, prompts: Prompts) -> DataBatch | None:
    """Returns the prompts of evaluations; None: rl.eval_prompts is 0."""
    size = prompts.held_out(cfg.rl.eval_prompts)
    return prompts.rows(0, size, held_out=True) if size else None


def is_evaluated(cfg: HybridFlowConfig, finished: int, last: bool) -> bool:
    """Tells whether an evaluation follows so many iterations."""
    return last or (cfg.eval.every > 0 and finished % cfg.eval.every == 0)


def evaluate(
    flow: Dataflow, state: TrainState, prompts: DataBatch
) -> tuple[dict[str, float], DataBatch]:
    """Returns (the mean score and the fraction of exact answers by source, the greedy answers)."""
    responses = flow.evaluate(state, prompts)
    scores = np.asarray(responses["scores"])
    # Equal to a truth that is a text: exactly 1, not 0; no number where there is none to be.
    exact = np.array(
        [
            float(c.strip() == t.strip()) if isinstance(t, str) else np.nan
            for c, t in zip(responses["completions"], responses["ground_truth"], strict=True)
        ]
    )
    has_score, sources = ~np.isnan(scores), np.array(responses["data_source"])
    row: dict[str, float] = {}
    if has_score.any():
        row["eval_reward"] = float(scores[has_score].mean())
    for source in dict.fromkeys(responses["data_source"]):
        at = has_score & (sources == source)
        for name, values in (("reward", scores[at]), ("exact", exact[at])):
            if len(values) and not np.isnan(values).any():
                row[f"val-core/{source}/{name}"] = float(values.mean())
    return row | {"eval_failed_prompts": int((~has_score).sum())}, responses


def show(console: Console, cfg: HybridFlowConfig, flow: Dataflow, mesh: Mesh) -> None:
    """Says which models there are, where, and what the actor's transition costs."""
    for name, pool in flow.pools.items():
        if name == "reward":
            continue
        size = len(pool.devices)
        if name in flow.abstract_state.params:
            parameters = quantity(count(flow.abstract_state.params[name]))
            console.say(f"{name}: {parameters} parameters on {size} devices, trained")
        else:
            console.say(f"{name}: on {size} devices")
    report = flow.transition()
    mebibytes = {k: report[k] / 2**20 for k in ("bytes", "naive", "peak")}
    console.say(
        f"to generation: {mebibytes['bytes']:.2f} MiB received a device (naive: "
        f"{mebibytes['naive']:.2f}), {len(report['nodes'])} groups cross nodes, peak "
        f"{mebibytes['peak']:.2f} MiB"
    )


def draw_rewards(run_dir: RunDir, console: Console) -> None:
    """Draws the rewards of a run's metrics.jsonl: of rollouts, and of held-out greedy answers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rollouts = rows_by_step(run_dir.metrics, "critic/score/mean")
    held_out = rows_by_step(run_dir.metrics, "eval_reward")
    if not rollouts:
        return
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    steps = sorted(rollouts)
    scores = [rollouts[s]["critic/score/mean"] for s in steps]
    axes.plot(steps, scores, color=OURS, lw=1.4, label="rollouts, mean score")
    title = f"mean score {np.mean(scores[-10:]):.2f} (last {len(scores[-10:])} iterations)"
    if held_out:
        at = sorted(held_out)
        exact = [k for k in held_out[at[-1]] if k.endswith("/exact")]
        axes.plot(
            at,
            [held_out[s]["eval_reward"] for s in at],
            "o-",
            color=HELD_OUT,
            lw=1.4,
            ms=4,
            label="held out, greedy, mean score",
        )
        for key in exact:
            source = key.split("/")[1]
            axes.plot(
                at,
                [held_out[s][key] for s in at],
                "s--",
                color=HELD_OUT,
                lw=1,
                ms=4,
                label=f"held out, greedy, {source} exact",
            )
            title += f",\n{source}: {held_out[at[-1]][key]:.0%} of held-out answers exact"
    axes.set(xlabel="iteration", ylabel="mean score")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_plot(figure, run_dir.path / "rewards.png", console)


def run(recipe: Recipe | str, config: HybridFlowConfig) -> list[dict[str, Any]]:
    """Runs the iterations of a configuration in this process, without a folder.

    Args: recipe: a function as those of controller.py, or the name of one of RECIPES. config: with
      train.steps iterations; jax's devices make its mesh.
    Returns: the metrics of each iteration; those of evaluations, of every eval.every-th iteration
      and of the last one, are among them.
    Raises: UserError for a configuration that cannot run.
    """
    if isinstance(recipe, str) and recipe not in RECIPES:
        raise UserError(
            f"recipe {recipe!r} must be one of {', '.join(RECIPES)}, or a function."
            f"{did_you_mean(recipe, RECIPES)}"
        )
    chosen = RECIPES[recipe] if isinstance(recipe, str) else recipe
    mesh = config.mesh.build()
    config.check(dict(mesh.shape))
    problems = Problems(config)
    flow = built(config, mesh, problems, chosen)
    try:
        state, history = flow.init(config.train.seed), []
        batches = PromptBatches(config, problems.prompts)
        held, last = held_out_prompts(config, problems.prompts), config.train.steps
        # The engine makes many small objects: with collections at any time an iteration of nano
        # took 0.80 CPU seconds instead of 0.30 (measured, 2026-11-29).
        with QuietGarbage(config.log.gc_every) as garbage:
            for finished in range(1, last + 1):
                state, metrics = flow.step(state, next(batches))
                if held is not None and is_evaluated(config, finished, finished == last):
                    metrics |= evaluate(flow, state, held)[0]
                history.append(metrics)
                garbage.after(finished)
        return history
    finally:
        flow.close()


def built(
    cfg: HybridFlowConfig, mesh: Mesh, problems: Problems, recipe: Recipe | None = None
) -> Dataflow:
    """Returns the dataflow of a command, with what it reads. recipe: None: the algorithm's."""
    flow = Dataflow(cfg, mesh, recipe)
    flow.attach(problems.prompts, problems.tokenizer, problems.rewards, problems.weights)
    flow.begin()
    return flow
