"""The models of a dataflow as workers: actor, critic, reference and rewards.

Each is the library's train step or engine behind methods that take and give DataBatches, for
WorkerGroup. The actor trains on `hybrid.train` and generates on `hybrid.generate`; the controller
sets `state` before an iteration and reads it after.

Columns of a batch of responses, one row each: prompt_ids, response_ids (lists of ints), logprobs
(of the draw, float32 arrays), versions (of the weights, a token each), finish (why the engine ended
it: 'stop', 'length', or 'error' and others of serving/engine.py, which no reward judges).
Source: HybridFlow section 4.1 (the worker classes and their methods).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import Tree
from megajax.data.loader import host_rows, place
from megajax.data.tokenizer import Tokenizer
from megajax.layers.losses import LossSums
from megajax.models import decoder, heads
from megajax.monitor.faults import Injector
from megajax.parallel.reshard import HybridMesh
from megajax.serving.engine import Engine
from megajax.serving.params import SamplingParams
from megajax.systems.hybridflow import kl, losses, packing
from megajax.systems.hybridflow.batch import DataBatch
from megajax.systems.hybridflow.config import HybridFlowConfig
from megajax.systems.hybridflow.pool import register
from megajax.systems.hybridflow.rewards import Reward, Scorer
from megajax.training import scores
from megajax.training.config import Config
from megajax.training.step import TrainStep, make_train_step
from megajax.training.task import Leaf, Task, TrainState, token_rows

PAGE = 16  # (vLLM's default) tokens of a page
Metrics = dict[str, Any]


class StaleWeights(UserError):
    """Responses were drawn with other weights than those of the iteration."""


def mesh_sizes(cfg: HybridFlowConfig, devices: int) -> dict[str, int]:
    """Returns {axis: size} of the mesh of one model's pool: --mesh.*, whose data axis is what a
    pool that is a part of the devices leaves it."""
    spec = cfg.mesh if cfg.placement == "colocate" else dataclasses.replace(cfg.mesh, data=None)
    return spec.sizes(devices)


def job_config(cfg: HybridFlowConfig, devices: int, lr: float | None = None) -> Config:
    """Returns how one model of the run is trained on so many devices.

    A step of the optimizer is an update, of which an iteration has several.
    """
    shared = {
        name: getattr(cfg, name)
        for name in ("model", "shard", "pipeline", "context", "overlap", "wire", "emulate")
    }
    train = dataclasses.replace(cfg.train, steps=cfg.train.steps * cfg.updates)
    optim = cfg.optim if lr is None else dataclasses.replace(cfg.optim, lr=lr)
    sizes = mesh_sizes(cfg, devices)
    return Config(mesh=MeshSpec(**sizes), train=train, optim=optim, **shared)


def response_mean(segments_BS: jax.Array, most: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns mean(x_BS, mask_BS) -> the mean of each place's segment. most: segments of a row."""
    hit_BSK = segments_BS[..., None] == jnp.arange(most + 1)[None, None]

    def mean(x_BS: jax.Array, mask_BS: jax.Array) -> jax.Array:
        counts_BSK = hit_BSK & mask_BS[..., None]
        sums_BK = jnp.where(counts_BSK, x_BS[..., None], 0.0).sum(1)
        mean_BK = sums_BK / jnp.maximum(counts_BSK.sum(1, dtype=jnp.float32), 1.0)
        return jnp.where(hit_BSK, mean_BK[:, None], 0.0).sum(-1)

    return mean


def policy_task(cfg: HybridFlowConfig) -> Task:
    """Returns what the actor learns: the algorithm's loss over packed rows.

    `weight` of a token is what the aggregation divides its loss by, over the whole update, so the
    objective is a plain sum and micro-batches of any sizes add up.
    """
    rl, rule, S = cfg.rl, cfg.rule, cfg.train.seq_len
    has_kl = rl.kl == "loss"
    clip = losses.Clip(rl.clip_low, rule.clip_high, rl.dual_clip)

    def loss(logprobs_BS: jax.Array, entropy_BS: jax.Array, batch: Mapping) -> LossSums:
        mask_BS, weight_BS = batch["targets"] >= 0, batch["weight"]
        mean = response_mean(batch["segments"], S // 2) if rule.loss == "gspo" else None
        members = logprobs_BS, batch["old_logprobs"], batch["advantages"], mask_BS
        terms = losses.policy_terms(rule.loss, *members, clip, mean)
        sums = {
            "policy": terms.loss * weight_BS,
            "bonus": entropy_BS * weight_BS,
            "entropy": entropy_BS,
            "clipped": terms.clipped,
            "lower": terms.lower,
            "kl_old": -terms.log_ratio,
            "difference": jnp.abs(logprobs_BS - batch["old_logprobs"]),
        }
        if has_kl:
            estimate_BS = kl.ESTIMATORS[rl.kl_estimator](logprobs_BS, batch["ref_logprobs"])
            sums |= {"divergence": estimate_BS, "penalty": estimate_BS * batch["kl_weight"]}
        totals = {
            name: jnp.where(mask_BS, x.astype(jnp.float32), 0.0).sum() for name, x in sums.items()
        }
        return LossSums(totals, mask_BS.sum())

    def objective(sums: LossSums, total: jax.Array) -> jax.Array:
        value = sums.policy - rl.entropy * sums.bonus
        return value + sums.penalty if has_kl else value

    def metrics(sums: LossSums, total: jax.Array) -> dict[str, jax.Array]:
        reported = {
            "loss": objective(sums, total),
            "actor/pg_loss": sums.policy,
            "actor/entropy": sums.entropy / total,
            "actor/pg_clipfrac": sums.clipped / total,
            "actor/pg_clipfrac_lower": sums.lower / total,
            "actor/ppo_kl": sums.kl_old / total,
            "actor/logprob_difference": sums.difference / total,
        }
        if has_kl:
            reported["actor/kl_loss"] = sums.divergence / total
        return reported

    names = ["old_logprobs", "advantages", "weight"]
    names += ["ref_logprobs", "kl_weight"] if has_kl else []
    parts = functools.partial(
        decoder.parts,
        cfg.model,
        dtype=cfg.train.dtype,
        loss_chunks=max(cfg.train.loss_chunks, 1),
        loss=loss,
    )
    floats = {name: Leaf((S,), ("seq",), "float32") for name in names}
    return Task(parts, token_rows(S) | floats, objective, metrics)


def value_task(cfg: HybridFlowConfig) -> Task:
    """Returns what the critic learns: clipped squared errors of the values of packed rows."""
    S = cfg.train.seq_len

    def loss(values_BS: jax.Array, batch: Mapping) -> LossSums:
        mask_BS, returns_BS = batch["targets"] >= 0, batch["returns"]
        loss_BS, clipped_BS = losses.value_terms(
            values_BS, batch["old_values"], returns_BS, mask_BS, cfg.rl.value_clip
        )
        sums = {
            "value": loss_BS * batch["weight"],
            "clipped": clipped_BS,
            "values": values_BS,
            "error": jnp.square(values_BS - returns_BS),
        }
        totals = {
            name: jnp.where(mask_BS, x.astype(jnp.float32), 0.0).sum() for name, x in sums.items()
        }
        return LossSums(totals, mask_BS.sum())

    def metrics(sums: LossSums, total: jax.Array) -> dict[str, jax.Array]:
        return {
            "loss": sums.value,
            "critic/vf_loss": sums.value,
            "critic/vf_clipfrac": sums.clipped / total,
            "critic/vpred_mean": sums.values / total,
            "critic/vf_error": sums.error / total,
        }

    parts = functools.partial(heads.critic_parts, cfg.model, dtype=cfg.train.dtype, loss=loss)
    names = ("old_values", "returns", "weight")
    floats = {name: Leaf((S,), ("seq",), "float32") for name in names}
    return Task(parts, token_rows(S) | floats, lambda sums, total: sums.value, metrics)


class _Trained:
    """A model that is trained: its step, and updates of it on packed responses."""

    def __init__(
        self,
        cfg: HybridFlowConfig,
        hybrid: HybridMesh,
        task: Task,
        lr: float | None,
        faults: Injector,
    ):
        self.cfg, self.hybrid, self.mesh, self._faults = cfg, hybrid, hybrid.train, faults
        self.step: TrainStep = make_train_step(
            job_config(cfg, hybrid.train.size, lr), hybrid.train, task
        )
        self.state: TrainState | None = None

    @property
    def rows(self) -> Mapping[str, Sequence[int]] | None:
        """The storage order of stacked layers, where stages are interleaved."""
        return self.step.rows if self.cfg.pipeline.chunks > 1 else None

    def _generation_weights(self) -> Tree:
        assert self.state is not None
        weights, axes = self.step.weights(self.state), self.step.parts.axes
        return self.hybrid.to_generation(weights, "share", axes, self.rows, self.cfg.train.dtype)

    def _update(self, batch: DataBatch, columns: Sequence[str], iteration: int) -> Metrics:
        """Trains on the responses, all epochs and mini-batches. Returns the mean of the metrics."""
        cfg, rl, S = self.cfg, self.cfg.rl, self.cfg.train.seq_len
        steps: list[dict[str, Any]] = []
        state = self.state
        assert state is not None
        aggregation = cfg.rule.aggregation
        for epoch in range(rl.epochs):
            random = np.random.default_rng([cfg.train.seed, iteration, epoch])
            order = random.permutation(len(batch)) if rl.minibatches > 1 else np.arange(len(batch))
            for rows in np.array_split(order, min(rl.minibatches, len(batch))):
                part = batch.take(rows)
                lengths = [len(r) for r in part["response_ids"]]
                weights = token_weights(lengths, aggregation, rl.max_tokens)
                named = {name: part[name] for name in columns} | {"weight": weights}
                if "kl_weight" in named:
                    named["kl_weight"] = [
                        c * w for c, w in zip(part["kl_weight"], weights, strict=True)
                    ]
                host = packing.pack(
                    part["prompt_ids"], part["response_ids"], named, cfg.train.global_batch, S
                )
                state, metrics = self.step.step(state, self._placed(host))
                steps.append(metrics)
                if len(steps) == 1:
                    self._faults.delay(f"update_{type(self).__name__.lower()}", iteration)
        self.state = state
        values = [{k: np.asarray(v, np.float64) for k, v in m.items()} for m in steps]
        for each in values:
            if not np.isfinite(each["loss"] + each["grad_norm"]):
                return each  # the loop names step and leaf
        means = {k: np.mean([v[k] for v in values], axis=0) for k in values[0]}
        if "actor/logprob_difference" in means:  # of the weights that drew, before any update
            means["actor/logprob_difference"] = values[0]["actor/logprob_difference"]
        return means

    def _placed(self, host: packing.Batch) -> Mapping[str, jax.Array]:
        step, like = self.step, self.step.abstract_batch
        rows = host_rows(like["tokens"])
        local = {name: x[rows] for name, x in host.items()}
        return place(local, like, rows, step.storage.tokens)


def token_weights(lengths: Sequence[int], aggregation: str, most: int) -> list[np.ndarray]:
    """Returns for each response what its tokens' losses are multiplied by, float32: the factors of
    losses.aggregate, divisor included. most: positions S of a row of responses."""
    counted = [n for n in lengths if n]
    if aggregation == "token-mean":
        factors = [1 / max(sum(counted), 1)] * len(lengths)
    elif aggregation == "seq-mean-token-sum-norm":
        factors = [1 / most] * len(lengths)
    elif aggregation == "seq-mean-token-sum":
        factors = [1 / max(len(counted), 1)] * len(lengths)
    else:
        factors = [1 / (max(len(counted), 1) * max(n, 1)) for n in lengths]
    return [np.full(n, f, np.float32) for n, f in zip(lengths, factors, strict=True)]


class Actor(_Trained):
    """The policy: trained, and generating. One program of each on all of the pool's devices."""

    def __init__(
        self,
        cfg: HybridFlowConfig,
        devices: Sequence[jax.Device],
        tokenizer: Tokenizer,
        faults: Injector = Injector(),
    ):
        """Builds the train step and an engine that sleeps."""
        sizes = mesh_sizes(cfg, len(devices))
        hybrid = HybridMesh(devices, sizes, cfg.generate.sizes)
        super().__init__(cfg, hybrid, policy_task(cfg), None, faults)
        self.tokenizer = tokenizer
        self._engine: Engine | None = None
        self._weights: Tree = None
        # Weights stay for a fault on purpose alone, which generates with them once more.
        self.stale: tuple[int, Tree] | None = None
        self.version = -1

    @register("one")
    def sync(self, version: int) -> None:
        """Brings the weights of `state` into the generation layout. version: of the draws."""
        self._weights = self._generation_weights()
        self.version = version
        # Of version k - 1 iteration k draws. Shared leaves are used up by its update.
        if self._faults.expects("unsynced", version + 2):
            self.stale = version, jax.tree.map(jnp.copy, self._weights)
        if self._engine is None:
            self._engine = self._make_engine()
        else:
            self._engine.load(self._weights, version)
        self._engine.version = version
        jax.block_until_ready(self._weights)  # so that the transition's time is not generation's

    def _make_engine(self) -> Engine:
        """Returns the engine. Sequences for which it has no pages wait until others have ended.

        Raises: UserError if its pages hold less than one sequence.
        """
        cfg, rl = self.cfg, self.cfg.rl
        context = rl.max_prompt + rl.max_tokens
        engine = Engine(
            cfg.model,
            self._weights,
            mesh=self.hybrid.generate,
            page_size=PAGE,
            max_batch=min(cfg.responses, 512),
            dtype=cfg.train.dtype,
            numerics=cfg.generate.numerics,
            context=context,
            prefill_chunk=max(256, context),
        )
        if engine.context < context:
            raise UserError(
                f"rl.max_prompt + rl.max_tokens = {context}: the devices have memory for the keys "
                f"and values of {engine.context} tokens; nearest: rl.max_tokens="
                f"{max(1, engine.context - rl.max_prompt)} (--rl.max_tokens, --generate.tensor)"
            )
        return engine

    @register("one")
    def wake(self) -> None:
        """Wakes generation up with the weights that it had: what a lost transition looks like."""
        assert self._engine is not None and self.stale is not None
        self.version, weights = self.stale
        self._engine.load(weights, self.version)

    @register("one")
    def compare(self, batch: DataBatch) -> Metrics:
        """Returns how far the rollouts' log-probabilities are from the trainer's exact pass."""
        exact = token_logprobs(self.cfg, self._weights, batch, self.hybrid.generate, "exact")
        far = [np.abs(x - y) for x, y in zip(exact, batch["logprobs"], strict=True)]
        differences = np.concatenate(far)
        return {
            "rollout/logprob_max_difference": float(differences.max(initial=0.0)),
            "rollout/logprob_unlike_tokens": int((differences != 0).sum()),
        }

    @register("one")
    def free(self) -> None:
        """Frees the memory that generation takes, for training."""
        self._weights = None
        if self._engine is not None:
            self._engine.sleep()

    @register("data")
    def generate(self, batch: DataBatch, seeds: Sequence[int], n: int, greedy: bool) -> DataBatch:
        """Returns n responses to each prompt, in order, with the batch's columns repeated.

        Args: seeds: one of each row of the batch. greedy: the likeliest tokens.
        """
        assert self._engine is not None
        rl, ends = self.cfg.rl, self.tokenizer.ends
        answers: dict[tuple[int, int], dict[str, list]] = {}
        for i, prompt in enumerate(batch["prompt_ids"]):
            self._engine.submit(
                prompt,
                SamplingParams(
                    max_tokens=rl.max_tokens,
                    temperature=0.0 if greedy else rl.temperature,
                    n=n,
                    seed=int(seeds[i % len(seeds)]),
                    stop_token_ids=ends,
                ),
                id=i,
            )
        for number, output in enumerate(self._engine.run()):
            if number == 0 and not greedy:
                self._faults.delay("generate", self.version + 1)
            answer = answers.setdefault(
                (output.request_id, output.index),
                {"tokens": [], "logprobs": [], "versions": [], "finish": [""]},
            )
            for name in ("tokens", "logprobs", "versions"):
                answer[name] += getattr(output, name)
            answer["finish"][0] = output.finish_reason or ""
        ordered = [answers[key] for key in sorted(answers)]
        new = {
            "response_ids": [a["tokens"] for a in ordered],
            "logprobs": [np.asarray(a["logprobs"], np.float32) for a in ordered],
            "versions": [a["versions"] for a in ordered],
            "finish": [a["finish"][0] for a in ordered],
            "completions": [response_text(a["tokens"], self.tokenizer) for a in ordered],
            "groups": np.repeat(np.arange(len(batch)), n),
        }
        return batch.repeat(n).union(DataBatch(new))

    @register("data")
    def logprobs(self, batch: DataBatch) -> DataBatch:
        """Returns `trainer_logprobs` of the responses, by the trainer's pass in the generation
        layout; with exact numerics these are the bits of the rollouts."""
        logprobs = token_logprobs(
            self.cfg, self._weights, batch, self.hybrid.generate, self.cfg.generate.numerics
        )
        return DataBatch({"trainer_logprobs": logprobs})

    @register("one")
    def update(self, batch: DataBatch, iteration: int) -> Metrics:
        """Trains on responses with columns old_logprobs and advantages. Raises: UserError for a
        batch of a recipe that lacks one."""
        for column, by in (("old_logprobs", "with_references"), ("advantages", "with_tokens")):
            if column not in batch:
                raise UserError(
                    f"the actor's update needs a column {column!r}, which {by} of "
                    f"megajax.systems.hybridflow adds; the batch has {', '.join(batch)}"
                )
        names = [n for n in self.step.task.batch if n in batch or n == "weight"]
        return self._update(batch, [n for n in names if n != "weight"], iteration)


def token_ids(batch: DataBatch) -> list[list[int]]:
    """Returns each prompt with its response behind it."""
    return [[*p, *r] for p, r in zip(batch["prompt_ids"], batch["response_ids"], strict=True)]


def response_text(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Returns a response as rewards read it, without the token that ended it.

    Other special tokens, which verl leaves out, are written out, and ids that the tokenizer does
    not know stand behind the text. A token without text would change no score, so a bonus on
    entropy would fill right answers with such tokens.
    """
    ids = ids[:-1] if ids and ids[-1] in tokenizer.ends else ids
    unknown = "".join(f"<|{i}|>" for i in ids if i >= tokenizer.vocab)
    return tokenizer.decode(ids, special=True) + unknown


def token_logprobs(
    cfg: HybridFlowConfig, params: Tree, batch: DataBatch, mesh: Any, numerics: Any
) -> list[np.ndarray]:
    """Returns the log-probabilities of the responses' tokens, float32."""
    logprobs = scores.logprobs(
        cfg.model, params, token_ids(batch), mesh=mesh, dtype=cfg.train.dtype, numerics=numerics
    )
    return [x[len(p) :] for x, p in zip(logprobs, batch["prompt_ids"], strict=True)]


class Critic(_Trained):
    """The values of what has been written so far."""

    def __init__(
        self,
        cfg: HybridFlowConfig,
        devices: Sequence[jax.Device],
        faults: Injector = Injector(),
    ):
        """Builds the train step."""
        hybrid = HybridMesh(devices, mesh_sizes(cfg, len(devices)), cfg.generate.sizes)
        super().__init__(cfg, hybrid, value_task(cfg), cfg.critic_lr, faults)

    @register("data")
    def values(self, batch: DataBatch) -> DataBatch:
        """Returns `old_values` of the responses' tokens, each before it was written."""
        values = scores.values(
            self.cfg.model,
            self._generation_weights(),
            token_ids(batch),
            mesh=self.hybrid.generate,
            dtype=self.cfg.train.dtype,
        )
        of_responses = [
            x[len(p) - 1 : -1] for x, p in zip(values, batch["prompt_ids"], strict=True)
        ]
        return DataBatch({"old_values": of_responses})

    @register("one")
    def update(self, batch: DataBatch, iteration: int) -> Metrics:
        """Trains on responses with columns old_values and returns."""
        return self._update(batch, ["old_values", "returns"], iteration)


class Reference:
    """The policy as it was before the run: log-probabilities only, in the type of compute."""

    def __init__(self, cfg: HybridFlowConfig, devices: Sequence[jax.Device]):
        """Makes the layout; the controller gives it `params`."""
        self.cfg = cfg
        hybrid = HybridMesh(devices, mesh_sizes(cfg, len(devices)), cfg.generate.sizes)
        self.mesh = hybrid.generate
        self.params: Tree = None

    @register("data")
    def logprobs(self, batch: DataBatch) -> DataBatch:
        """Returns `ref_logprobs` of the responses' tokens."""
        logprobs = token_logprobs(self.cfg, self.params, batch, self.mesh, "fast")
        return DataBatch({"ref_logprobs": logprobs})


class Rewarder:
    """Rewards of functions, in their own processes."""

    def __init__(
        self,
        functions: Sequence[Reward],
        weights: Sequence[float] | None,
        seconds: float,
        stops: bool,
    ):
        """seconds: limit of a call. stops: nothing is called after the first error."""
        self._scorer, self._stops = Scorer(functions, weights, seconds), stops
        self.metrics: Metrics = {}
        self.errors: dict[int, Exception] = {}

    @register("one")
    def score(self, batch: DataBatch) -> DataBatch:
        """Returns `scores` (B,), NaN where a function failed; `errors` and `metrics` say more."""
        values, self.metrics, errors = self._scorer.score(batch, self._stops)
        self.errors = dict(errors)
        return DataBatch({"scores": values})

    def close(self) -> None:
        """Ends the processes."""
        self._scorer.close()
