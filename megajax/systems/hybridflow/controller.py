"""One controller for all models of a run: an iteration is one step of the training loop.

A recipe is the dataflow of an iteration, in a few lines over worker groups (`grpo`, `ppo`, ...
below): which model is called with what. Calls give futures, so models on different pools overlap.
Everything else an iteration has (prompts, weights into the generation layout, checks, metrics) is
the same for all recipes and is here too. `Dataflow` is what training/loop.py steps: its state holds
the parameters and optimizer states of all trained models, so checkpoints, resuming, signals and
supervision are those of pretraining.

An iteration follows from (seed, number of the iteration, state) alone: a run that was killed and
started again ends with the same bits.

Source: HybridFlow (arXiv 2409.19256) sections 2.5, 4.2 and figure 6.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from megajax.core.errors import UserError
from megajax.core.mesh import find_supervisor
from megajax.data.tokenizer import Tokenizer
from megajax.models.heads import critic_params
from megajax.monitor import faults
from megajax.monitor.faults import Injector
from megajax.systems.hybridflow import advantages, kl
from megajax.systems.hybridflow.batch import DataBatch
from megajax.systems.hybridflow.config import HybridFlowConfig
from megajax.systems.hybridflow.data import Prompts
from megajax.systems.hybridflow.pool import ResourcePool, WorkerGroup
from megajax.systems.hybridflow.rewards import RewardError
from megajax.systems.hybridflow.worker import (
    Actor,
    Critic,
    Reference,
    Rewarder,
    StaleWeights,
)
from megajax.training import report
from megajax.training.step import JointStep, StorageOrder, joint
from megajax.training.task import TrainState

Metrics = dict[str, Any]
Recipe = Callable[["Models", DataBatch], tuple[DataBatch, list[Future]]]
KL = "kl"  # the member of opt that holds what is no model's
STAGES = {  # (model, method) -> verl's name of the stage
    ("actor", "generate"): "gen",
    ("actor", "sync"): "update_weights",
    ("actor", "logprobs"): "old_log_prob",
    ("actor", "update"): "update_actor",
    ("critic", "values"): "values",
    ("critic", "update"): "update_critic",
    ("reference", "logprobs"): "ref",
    ("reward", "score"): "reward",
}
TIMED_BY_TOKEN = ("gen", "ref", "values", "update_actor", "update_critic")  # as verl has them
FINISHED = ("stop", "length")  # the reasons of Output.finish_reason that a policy is judged by
MORE = 2**40  # (chosen) distance of the streams of prompts that replace others, in rows


@dataclasses.dataclass
class Models:
    """What a recipe calls: the groups, and the numbers of an iteration.

    rollouts(prompts) -> responses with scores, the prompts that failed left out. `groups` holds the
    row of a response's prompt, except where other prompts replaced some (DAPO). greedy(prompts) ->
    (prompts,) scores of greedy responses, NaN where a reward failed. critic, reference: None where
    the algorithm has none.
    """

    cfg: HybridFlowConfig
    actor: WorkerGroup
    reward: WorkerGroup
    critic: WorkerGroup | None
    reference: WorkerGroup | None
    rollouts: Callable[[DataBatch], DataBatch]
    greedy: Callable[[DataBatch], np.ndarray]
    iteration: int = 0
    kl_coefficient: float = 0.0


# ---- recipes


def grpo(models: Models, prompts: DataBatch) -> tuple[DataBatch, list[Future]]:
    """Groups of responses, compared with each other: GRPO and its kin (no critic)."""
    batch = with_references(models, models.rollouts(prompts))
    rewards, mask = token_rewards(models, batch)
    estimate = getattr(advantages, models.cfg.rule.estimator)
    batch = with_tokens(batch, "advantages", estimate(rewards, mask, batch["groups"]))
    return batch, [models.actor.update(batch, models.iteration)]


def remax(models: Models, prompts: DataBatch) -> tuple[DataBatch, list[Future]]:
    """ReMax: the baseline of a response is the score of a greedy one. A response without one, since
    the greedy response's reward failed, is left out."""
    batch = models.rollouts(prompts)
    baselines = np.asarray(models.greedy(prompts))[batch["groups"]]
    known = np.flatnonzero(~np.isnan(baselines))
    if not len(known):
        raise UserError(
            f"iteration {models.iteration}: the rewards of all greedy responses failed, so no "
            "response has a baseline (--reward)"
        )
    batch, baselines = with_references(models, batch.take(known)), baselines[known]
    rewards, mask = token_rewards(models, batch)
    batch = with_tokens(batch, "advantages", advantages.remax(rewards, mask, baselines))
    return batch, [models.actor.update(batch, models.iteration)]


def reinforce_plus_plus(models: Models, prompts: DataBatch) -> tuple[DataBatch, list[Future]]:
    """REINFORCE++: returns, whitened over the batch."""
    batch = with_references(models, models.rollouts(prompts))
    rewards, mask = token_rewards(models, batch)
    gains = advantages.reinforce_plus_plus(rewards, mask, models.cfg.rl.gamma)
    batch = with_tokens(batch, "advantages", gains)
    return batch, [models.actor.update(batch, models.iteration)]


def ppo(models: Models, prompts: DataBatch) -> tuple[DataBatch, list[Future]]:
    """PPO: a critic's values, generalized advantage estimation, both models updated."""
    assert models.critic is not None
    batch = with_references(models, models.rollouts(prompts))
    batch = batch.union(models.critic.values(batch).result())
    rewards, mask = token_rewards(models, batch)
    values = padded(batch["old_values"], mask.shape[1])
    rl = models.cfg.rl
    gains, returns = advantages.gae(rewards, mask, values, rl.gamma, rl.lam)
    batch = with_tokens(batch, "advantages", advantages.whiten(gains, mask))
    batch = with_tokens(batch, "returns", returns)
    arguments = batch, models.iteration
    return batch, [models.actor.update(*arguments), models.critic.update(*arguments)]


RECIPES: Mapping[str, Recipe] = {
    "gae": ppo,
    "grpo": grpo,
    "dr_grpo": grpo,
    "rloo": grpo,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
}


# ---- what recipes are made of


def padded(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Returns float32 (B, width) of rows of any length, 0 behind their ends."""
    out = np.zeros((len(rows), width), np.float32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def with_tokens(batch: DataBatch, name: str, values_BS: np.ndarray) -> DataBatch:
    """Returns the batch with a further column: a number of each token of each response."""
    rows = [x[: len(r)] for x, r in zip(values_BS, batch["response_ids"], strict=True)]
    return batch.union(DataBatch({name: rows}))


def with_references(models: Models, batch: DataBatch) -> DataBatch:
    """Returns the batch with old_logprobs, and ref_logprobs where there is a reference."""
    rl = models.cfg.rl
    asked = {}
    if rl.old_logprobs == "trainer":
        asked["trainer_logprobs"] = models.actor.logprobs(batch)
    if models.reference is not None:
        asked["ref_logprobs"] = models.reference.logprobs(batch)
    for future in asked.values():
        batch = batch.union(future.result())
    name = "trainer_logprobs" if rl.old_logprobs == "trainer" else "logprobs"
    batch = batch.union(DataBatch({"old_logprobs": batch[name]}))
    if rl.kl == "loss":
        ones = [np.full(len(r), models.kl_coefficient, np.float32) for r in batch["response_ids"]]
        batch = batch.union(DataBatch({"kl_weight": ones}))
    return batch


def token_rewards(models: Models, batch: DataBatch) -> tuple[np.ndarray, np.ndarray]:
    """Returns (rewards_BS float32, mask_BS bool): the score at the last token, less the divergence
    of each token where the configuration puts it into the reward."""
    rl, lengths = models.cfg.rl, [len(r) for r in batch["response_ids"]]
    mask_BS = np.arange(rl.max_tokens)[None] < np.array(lengths)[:, None]
    rewards_BS = np.zeros(mask_BS.shape, np.float32)
    rewards_BS[np.arange(len(batch)), np.maximum(np.array(lengths) - 1, 0)] = batch["scores"]
    if rl.kl == "reward":
        estimate = kl.ESTIMATORS[rl.kl_estimator]
        old, ref = (padded(batch[name], rl.max_tokens) for name in ("old_logprobs", "ref_logprobs"))
        divergence_BS = np.asarray(estimate(jnp.asarray(old), jnp.asarray(ref)))
        rewards_BS -= models.kl_coefficient * divergence_BS
    return np.where(mask_BS, rewards_BS, 0.0), mask_BS


def overlong_penalty(lengths: np.ndarray, most: int, buffer: int) -> np.ndarray:
    """Returns what long responses lose (DAPO, equation 13): 0 up to most - buffer tokens, then
    linearly to 1 at `most`."""
    over = np.clip((np.asarray(lengths) - (most - buffer)) / buffer, 0.0, 1.0)
    return over.astype(np.float32)


# ---- the dataflow


class Lost(NamedTuple):
    """Numbers of prompts that are left out because a reward failed, or because the engine did not
    end a response; the first cause, or nothing."""

    failed: int
    unfinished: int
    cause: str


class Dataflow:
    """All models of a run as one step (loop.Step): its state is a TrainState of dicts by model.

    `attach` gives it what it reads, before the first step.
    """

    exchange = None
    is_synchronous = True

    def __init__(self, cfg: HybridFlowConfig, mesh: Mesh, recipe: Recipe | None = None):
        """Args: mesh: of all devices; `placement` says which model has which of them."""
        self.cfg, self.mesh = cfg, mesh
        self._recipe = recipe or RECIPES[cfg.rule.estimator]
        self.pools = placed_pools(cfg, list(mesh.devices.flat))
        self._groups: dict[str, WorkerGroup] = {}
        self._faults = Injector(faults.parse(cfg.fault), attempt=find_supervisor().attempt)
        self.last: DataBatch | None = None
        shared = {"cfg": cfg, "faults": self._faults}
        actor = self._group("actor", Actor, tokenizer=_NoTokenizer(), **shared)
        if cfg.rule.has_critic:
            self._group("critic", Critic, **shared)
        if cfg.rl.kl != "none":
            self._group("reference", Reference, cfg=cfg)
        steps = {
            name: self._groups[name].workers[0].step
            for name in ("actor", "critic")
            if name in self._groups
        }
        self._joint: JointStep = joint(steps, self.step)
        self.actor: Actor = actor.workers[0]
        self._prompts: Prompts | None = None

    def _group(self, name: str, worker: type, **config: Any) -> WorkerGroup:
        self._groups[name] = WorkerGroup(self.pools[name], worker, **config)
        return self._groups[name]

    # ---- what the loop and a checkpoint ask

    @property
    def storage(self) -> StorageOrder:
        """Returns the order in which the state is kept."""
        return self._joint.storage

    @property
    def leaf_names(self) -> tuple[str, ...]:
        """Returns the names of metrics['leaf_norms']."""
        return self._joint.leaf_names

    @property
    def rows(self) -> Mapping[str, Sequence[int]]:
        """Returns storage.layers."""
        return self._joint.rows

    @property
    def task(self) -> Any:
        """Returns the actor's task."""
        return self._joint.task

    @property
    def layout(self) -> Any:
        """Returns the actor's layout."""
        return self.actor.step.layout

    @property
    def abstract_state(self) -> TrainState:
        """Returns the state's ShapeDtypeStructs."""
        where = self._joint.abstract_state.step.sharding
        scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=where)
        return self._with_coefficient(self._joint.abstract_state, scalar)

    def _with_coefficient(self, state: TrainState, value: Any) -> TrainState:
        """Returns the state with the divergence's coefficient, where it changes during a run."""
        if self.cfg.rl.kl == "none" or self.cfg.rl.kl_target is None:
            return state
        if not isinstance(value, jax.ShapeDtypeStruct):
            value = jax.device_put(np.float32(value), state.step.sharding)
        return dataclasses.replace(state, opt=state.opt | {KL: {"coefficient": value}})

    def agree(self, state: TrainState) -> TrainState:
        """Returns for each leaf whether the devices that share it hold the same bits."""
        return self._with_coefficient(self._joint.agree(state), True)

    def init(self, seed: int) -> TrainState:
        """Returns the first state. A critic begins with the policy's trunk."""
        state = self._joint.init(seed)
        if "critic" in state.params:
            trunk = self._copied(state.params["actor"], state.params["critic"])
            state = dataclasses.replace(state, params=state.params | {"critic": trunk})
        step = jax.device_put(state.step, self.abstract_state.step.sharding)
        state = dataclasses.replace(state, step=step)
        return self._with_coefficient(state, self.cfg.rl.kl_coefficient)

    def _copied(self, policy: Any, fresh: Any) -> Any:
        """Returns the critic's parameters with copies of the policy's trunk, where they belong."""
        trunk = critic_params(policy, fresh)
        return jax.tree.map(
            lambda x, like: x if x is like else jax.device_put(jnp.array(x), like.sharding),
            trunk,
            fresh,
        )

    # ---- what it reads

    def attach(
        self, prompts: Prompts, tokenizer: Tokenizer, rewards: Sequence, weights: Any
    ) -> None:
        """Gives the dataflow its prompts, its tokenizer and its rewards."""
        self._prompts, self.actor.tokenizer = prompts, tokenizer
        if "reward" not in self._groups:
            self._group(
                "reward",
                Rewarder,
                functions=rewards,
                weights=weights,
                seconds=self.cfg.rl.reward_seconds,
                stops=self.cfg.rl.on_error == "stop",
            )

    def begin(self) -> None:
        """Gives the reference its weights: those of the policy before its first iteration, which
        the configuration decides, so that no checkpoint needs to hold them."""
        if "reference" not in self._groups:
            return
        step, storage = self.actor.step, self.actor.step.storage
        params = storage.natural(step.init(self.cfg.train.seed).params)
        if self.cfg.init_from is not None:
            params = self.cfg.given_params(step.layout, {"actor": params})["actor"]
        worker: Reference = self._groups["reference"].workers[0]
        worker.params = jax.tree.map(np.asarray, params)

    def transition(self) -> dict[str, Any]:
        """Returns the report of the policy's way to generation (reshard.HybridMesh.report)."""
        actor, step = self.actor, self.actor.step
        return actor.hybrid.report(
            step.abstract_state.params, "share", step.parts.axes, actor.rows, self.cfg.train.dtype
        )

    def evaluate(self, state: TrainState, prompts: DataBatch) -> DataBatch:
        """Returns scored greedy responses of a state's policy to prompts."""
        worker = self._groups["actor"].workers[0]
        worker.state = self._joint.part(state, "actor")
        self._groups["actor"].sync(int(state.step)).result()
        responses = self._greedy(prompts, f"evaluation after iteration {int(state.step)}")
        self._groups["actor"].free().result()
        return responses

    def close(self) -> None:
        """Ends threads and processes."""
        if "reward" in self._groups:
            self._groups["reward"].workers[0].close()
        for pool in set(self.pools.values()):
            pool.close()

    # ---- an iteration

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Does an iteration: rollouts, rewards, advantages, updates.

        batch: rows of `Prompts.rows`.
        Raises: StaleWeights if responses were drawn with other weights than the state's.
        """
        began = time.perf_counter()
        iteration = int(state.step) + 1
        for name in state.params:
            worker = self._groups[name].workers[0]
            part = self._joint.part(state, name)
            # The optimizers count updates; the run counts iterations.
            updates = np.int32((iteration - 1) * self.cfg.updates)
            where = worker.step.abstract_state.step.sharding
            worker.state = dataclasses.replace(part, step=jax.device_put(updates, where))
        for group in self._groups.values():  # what an evaluation took is not this iteration's
            group.take_timings()
        self._sync(iteration)
        reference = self._groups.get("reference")
        metrics: Metrics = {}
        models = Models(
            self.cfg,
            self._groups["actor"],
            self._groups["reward"],
            self._groups.get("critic"),
            reference,
            lambda prompts: self._rollouts(prompts, iteration, metrics),
            lambda prompts: self._greedy(prompts, f"iteration {iteration}, greedy")["scores"],
            iteration,
            self._coefficient(state),
        )
        made = self._recipe(models, batch)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], DataBatch)):
            raise UserError(
                "a recipe returns (the batch of responses, a list of the futures of updates); this "
                f"one returned {type(made).__name__}"
            )
        responses, updates = made
        results = [future.result() for future in updates]
        self._groups["actor"].free().result()
        self.last = responses
        metrics |= self._measured(responses, models)
        norms, others = [], {}
        for name, result in zip(("actor", "critic"), results, strict=False):
            norms.append(np.atleast_1d(result.pop("leaf_norms")))
            others |= {k: v for k, v in result.items() if "/" in k and np.ndim(v) == 0}
            others[f"{name}/grad_norm"] = result["grad_norm"]
        metrics |= others
        metrics["loss"] = sum(r["loss"] for r in results)
        metrics["grad_norm"] = float(np.sqrt(sum(float(r["grad_norm"]) ** 2 for r in results)))
        metrics["leaf_norms"] = np.concatenate(norms)
        metrics |= self._timed(metrics, time.perf_counter() - began)
        states = {name: self._groups[name].workers[0].state for name in state.params}
        finished = jax.device_put(np.int32(iteration), self.abstract_state.step.sharding)
        new = self._joint.join(states, finished)
        return self._with_coefficient(new, self._answered(models, responses, metrics)), metrics

    def _timed(self, measured: Metrics, seconds: float) -> Metrics:
        """Returns verl's metrics of time. measured: those of the batch. seconds: of the iteration.

        timing_s/waiting/STAGE: from a stage's call to its start, while other models had its pool's
        devices or its arguments were being made. perf/mfu/actor: of the updates alone, in
        Megatron's convention, over the tokens of responses and prompts, without those of padding.
        """
        metrics: Metrics = {"timing_s/step": seconds, "perf/time_per_step": seconds}
        tokens, responses = measured["perf/total_num_tokens"], measured["response_length/sum"]
        for model, group in self._groups.items():
            for method, timing in group.take_timings().items():
                stage = STAGES.get((model, method), f"{model}.{method}")
                metrics[f"timing_s/{stage}"] = timing.seconds
                metrics[f"timing_s/waiting/{stage}"] = timing.waiting
                if stage in TIMED_BY_TOKEN:
                    of = responses if stage == "gen" else tokens
                    metrics[f"timing_per_token_ms/{stage}"] = 1e3 * timing.seconds / max(of, 1)
        metrics["perf/throughput"] = tokens / seconds / self.mesh.size
        work = report.work(self.cfg, self.task, self.actor.mesh)
        if work.peak_flops and work.flops_megatron is not None:
            flops = tokens * self.cfg.rl.epochs * work.flops_megatron
            metrics["perf/mfu/actor"] = flops / metrics["timing_s/update_actor"] / work.peak_flops
        return metrics

    def _answered(self, models: Models, batch: DataBatch, metrics: Metrics) -> float:
        """Returns the coefficient after an iteration, and records the divergence that it answers:
        the mean of k1 over the responses' tokens."""
        if models.reference is None:
            return models.kl_coefficient
        old, ref = (np.concatenate(batch[name]) for name in ("old_logprobs", "ref_logprobs"))
        divergence = float(np.mean(old - ref)) if len(old) else 0.0
        metrics |= {"actor/reward_kl": divergence, "actor/kl_coefficient": models.kl_coefficient}
        rl = self.cfg.rl
        if rl.kl_target is None:
            return models.kl_coefficient
        controller = kl.AdaptiveController(models.kl_coefficient, rl.kl_target, rl.kl_horizon)
        controller.update(divergence, len(batch))
        return controller.coefficient

    def _sync(self, iteration: int) -> None:
        """Brings the newest weights into the generation layout, unless a fault leaves it out."""
        if self._faults.expects("unsynced", iteration) and self.actor.stale is not None:
            self._groups["actor"].wake().result()
        else:
            self._groups["actor"].sync(iteration - 1).result()

    def _coefficient(self, state: TrainState) -> float:
        if KL in state.opt:
            return float(state.opt[KL]["coefficient"])
        return self.cfg.rl.kl_coefficient

    def _seeds(self, iteration: int, first: int, count: int) -> list[int]:
        """Returns the seeds of the draws of some prompts of an iteration."""
        sequence = np.random.SeedSequence([self.cfg.train.seed, iteration, first])
        return [int(x) for x in sequence.generate_state(count, np.uint64) >> np.uint64(1)]

    def _generate(self, prompts: DataBatch, seeds: list[int], n: int, greedy: bool) -> DataBatch:
        return self._groups["actor"].generate(prompts, seeds, n, greedy).result()

    def _rollouts(self, prompts: DataBatch, iteration: int, metrics: Metrics) -> DataBatch:
        """Returns scored responses: of DAPO, of prompts whose responses have unlike scores."""
        cfg, rl = self.cfg, self.cfg.rl
        rounds_of_responses: list[DataBatch] = []
        rounds, groups, equal, failed, unfinished, cause = 0, 0, 0, 0, 0, ""
        rewards: list[tuple[int, Metrics]] = []
        asked = prompts
        while True:
            seeds = self._seeds(iteration, rounds, len(asked))
            batch = self._generate(asked, seeds, rl.n, False)
            self._check_versions(batch, iteration)
            batch, lost = self._scored(batch, f"iteration {iteration}")
            rewards.append((len(batch), self._groups["reward"].workers[0].metrics))
            failed, unfinished = failed + lost.failed, unfinished + lost.unfinished
            cause = cause or lost.cause
            if cfg.rule.dynamic:
                batch, same = unlike_scores(batch)
                equal += same
            if len(batch):
                # Only where rounds are joined: ReMax finds a prompt's baseline by its number.
                batch = renumbered(batch, groups) if cfg.rule.dynamic else batch
                rounds_of_responses.append(batch)
                groups += len(np.unique(batch["groups"]))
            rounds += 1
            missing = rl.prompts - groups
            if not cfg.rule.dynamic or missing <= 0 or rounds == rl.dynamic_rounds:
                break
            assert self._prompts is not None
            first = MORE * rounds + (iteration - 1) * rl.prompts
            asked = self._prompts.rows(first, rl.prompts)
        if not rounds_of_responses:
            numbers = {
                "whose reward failed": failed,
                "of which the engine did not end a response": unfinished,
                "with responses of one score": equal,
            }
            listed = ", ".join(f"{n} {what}" for what, n in numbers.items() if n)
            raise UserError(
                f"iteration {iteration}: no prompt has responses to learn from: {listed}, in "
                f"{rounds} rounds. {cause and f'First: {cause} '}(--reward, --rl.dynamic_rounds)"
            )
        responses = DataBatch.concatenate(rounds_of_responses)
        responses = responses.take(np.flatnonzero(np.asarray(responses["groups"]) < rl.prompts))
        metrics["reward/failed_prompts"] = failed
        metrics["rollout/unfinished_prompts"] = unfinished
        if cfg.rule.dynamic:
            metrics |= {"train/rounds": rounds, "train/equal_scores": equal}
        metrics |= mean_metrics(rewards)
        if rl.check_every and iteration % rl.check_every == 0:
            metrics |= self._groups["actor"].compare(responses).result()
        return responses

    def _scored(self, batch: DataBatch, where: str) -> tuple[DataBatch, Lost]:
        """Returns (the batch with scores, without the prompts of which a response has none; what
        was left out). where: the iteration, for messages."""
        rl = self.cfg.rl
        scores, lost = self._scores(batch, where)
        if rl.overlong:
            lengths = np.array([len(r) for r in batch["response_ids"]])
            scores = scores - overlong_penalty(lengths, rl.max_tokens, rl.overlong)
        batch, groups = batch.union(DataBatch({"scores": scores})), np.asarray(batch["groups"])
        bad = np.unique(groups[np.isnan(scores)])
        return batch.take(np.flatnonzero(~np.isin(groups, bad))), lost

    def _scores(self, batch: DataBatch, where: str) -> tuple[np.ndarray, Lost]:
        """Returns (the scores of responses, what has none). A score is NaN where the reward failed,
        or where the engine ended the response for a reason that is none of the policy's.

        Raises: RewardError for a reward that fails, unless --rl.on_error=skip.
        """
        group, groups = self._groups["reward"], np.asarray(batch["groups"])
        scores = np.full(len(batch), np.nan, np.float32)
        has_ended = np.array([finish in FINISHED for finish in batch["finish"]])
        rows, cause = np.flatnonzero(has_ended), ""
        if len(rows):
            scores[rows] = group.score(batch.take(rows)).result()["scores"]
            if errors := group.workers[0].errors:
                cause = str(next(iter(errors.values())))
                if self.cfg.rl.on_error == "stop":
                    raise RewardError(
                        f"{where}: {cause}. With --rl.on_error=skip such prompts are left out "
                        "(--reward, --rl.on_error, --rl.reward_seconds)"
                    )
        if len(rows) < len(batch):
            reason = next(finish for finish in batch["finish"] if finish not in FINISHED)
            about = "; the policy's logits are no numbers" if reason == "error" else ""
            cause = f"the engine ended a response with {reason!r}{about}"
        failed, unfinished = (
            len(np.unique(groups[np.isnan(scores) & which])) for which in (has_ended, ~has_ended)
        )
        if cause:
            logging.warning(
                "%s: prompts are left out, %d since a reward failed, %d since the engine did not "
                "end a response; the first: %s",
                where,
                failed,
                unfinished,
                cause,
            )
        return scores, Lost(failed, unfinished, cause)

    def _greedy(self, prompts: DataBatch, where: str) -> DataBatch:
        """Returns one greedy response to each prompt with its score, NaN where it has none."""
        batch = self._generate(prompts, [0] * len(prompts), 1, True)
        return batch.union(DataBatch({"scores": self._scores(batch, where)[0]}))

    def _check_versions(self, batch: DataBatch, iteration: int) -> None:
        versions = {v for row in batch["versions"] for v in row}
        if versions - {iteration - 1}:
            stale = min(versions - {iteration - 1})
            raise StaleWeights(
                f"iteration {iteration}: responses were drawn with the weights of version {stale}, "
                f"and the policy has version {iteration - 1}: the transition to the generation "
                "layout did not take place. Nothing was trained on them"
            )

    def _measured(self, batch: DataBatch, models: Models) -> Metrics:
        """Returns verl's metrics of a batch."""
        lengths = np.array([len(r) for r in batch["response_ids"]])
        prompts = np.array([len(p) for p in batch["prompt_ids"]])
        metrics: Metrics = {
            "response_length/clip_ratio": float(np.mean([f == "length" for f in batch["finish"]])),
            "response_length/sum": int(lengths.sum()),
            "perf/total_num_tokens": int(lengths.sum() + prompts.sum()),
            "units": int(lengths.sum() + prompts.sum()),
            "rollout/version": models.iteration - 1,
        }
        columns = {
            "critic/score": np.asarray(batch["scores"]),
            "critic/advantages": np.concatenate(batch["advantages"]),
            "response_length": lengths,
            "prompt_length": prompts,
        }
        if "returns" in batch:
            columns["critic/returns"] = np.concatenate(batch["returns"])
            columns["critic/values"] = np.concatenate(batch["old_values"])
            spread = columns["critic/returns"].var()
            error = (columns["critic/returns"] - columns["critic/values"]).var()
            metrics["critic/vf_explained_var"] = float(1 - error / spread) if spread > 0 else 0.0
        for name, values in columns.items():
            metrics |= {
                f"{name}/mean": float(values.mean()),
                f"{name}/max": float(values.max()),
                f"{name}/min": float(values.min()),
            }
        return metrics


class _NoTokenizer:
    """The tokenizer of an actor before `attach` gives it one."""

    ends = ()


def unlike_scores(batch: DataBatch) -> tuple[DataBatch, int]:
    """Returns (the groups whose responses have unlike scores, how many groups have equal ones)."""
    groups, scores = np.asarray(batch["groups"]), np.asarray(batch["scores"])
    equal = [g for g in np.unique(groups) if np.ptp(scores[groups == g]) == 0]
    return batch.take(np.flatnonzero(~np.isin(groups, equal))), len(equal)


def mean_metrics(parts: Sequence[tuple[int, Metrics]]) -> Metrics:
    """Returns the metrics of several parts of a batch as one: means by rows, under reward/. parts:
    (rows, {name: mean}); a part without a name does not count for it."""
    metrics: Metrics = {}
    for name in dict.fromkeys(name for _, part in parts for name in part):
        weighed = [(rows, part[name]) for rows, part in parts if name in part]
        total = sum(rows for rows, _ in weighed)
        value = sum(rows * x for rows, x in weighed) / total if total else weighed[0][1]
        metrics[name if name.startswith("reward/") else f"reward/{name}"] = value
    return metrics


def renumbered(batch: DataBatch, first: int) -> DataBatch:
    """Returns the batch with its groups numbered from `first` on."""
    _, numbers = np.unique(np.asarray(batch["groups"]), return_inverse=True)
    names = [name for name in batch if name != "groups"]
    return batch.select(names).union(DataBatch({"groups": numbers + first}))


def placed_pools(cfg: HybridFlowConfig, devices: Sequence[jax.Device]) -> dict[str, ResourcePool]:
    """Returns {model: pool} for the placement of a configuration (HybridFlow section 6).

    Raises: UserError for devices that cannot be shared out so.
    """
    names = ["actor", "reward"]
    names += ["critic"] if cfg.rule.has_critic else []
    names += ["reference"] if cfg.rl.kl != "none" else []
    if cfg.placement == "colocate":
        sets = [names]
    elif cfg.placement == "split":
        first = [n for n in names if n != "critic"]
        sets = [first, ["critic"]] if "critic" in names else [["actor", "reward"], ["reference"]]
    else:
        sets = [["actor", "reward"], *([n] for n in names if n not in ("actor", "reward"))]
    if len(devices) % len(sets):
        raise UserError(
            f"placement={cfg.placement} needs {len(sets)} parts of equal size; there are "
            f"{len(devices)} devices (--placement)"
        )
    size = len(devices) // len(sets)
    pools: dict[str, ResourcePool] = {}
    for i, members in enumerate(sets):
        pool = ResourcePool(devices[i * size : (i + 1) * size])
        pools |= dict.fromkeys(members, pool)
    return pools
