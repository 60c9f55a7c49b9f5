"""What `qsync.py profile` measures: statistics of products in a run that is some steps old."""

import dataclasses
import functools
import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import spearmanr

from megajax.core.errors import UserError
from megajax.data.corpus import open_corpora
from megajax.data.labelled import MaskedRows
from megajax.data.loader import Loader, training_rows
from megajax.layers import ops
from megajax.models.encoder_config import EncoderConfig
from megajax.monitor import results
from megajax.systems.qsync.model import STACK
from megajax.systems.qsync.profile import Errors, collect
from megajax.systems.qsync.rounding import Statistics
from megajax.training.config import JobConfig
from megajax.training.precision import node_name
from megajax.training.step import make_train_step
from megajax.training.task import Task

CHOICES = ("float32", "float16", "int8")  # of a product in a random plan


class Measured(NamedTuple):
    """A profile. stats: of every product. predictions: of a batch, on average. task, params,
    batches: what was profiled."""

    stats: dict[str, Statistics]
    predictions: int
    task: Task
    params: Any
    batches: list[Any]


def measured(job: JobConfig, warm_up: int, batches: int) -> Measured:
    """Trains for some steps. Returns the sums over the next batches.

    Raises: UserError for an encoder that repeats its blocks, and text that cannot be read.
    """
    model: Any = job.model
    if getattr(model, "repeats", 1) > 1:
        raise UserError(
            f"model.repeats={model.repeats} must be 1 to be profiled: blocks that share their "
            "weights have several inputs each (--encoder)"
        )
    is_masked = isinstance(model, EncoderConfig)
    corpora, tokenizer = open_corpora(job.data, job.cache_dir, print, model.vocab - is_masked)
    rows: Any = training_rows(corpora, job.train.seq_len, job.train.seed)
    if is_masked:  # the next id is the mask
        rows = MaskedRows(rows, tokenizer.vocab, tokenizer.vocab, job.train.seed)
    mesh = job.mesh.build(jax.devices()[:1])
    step = make_train_step(job, mesh)
    state = step.init(job.train.seed)
    if job.init_from is not None:
        params = job.given_params(step.layout, state.params)
        state = dataclasses.replace(state, params=params)
    loader = Loader(rows, step.abstract_batch, 0, job.data.prefetch, step.order)
    began = time.monotonic()
    for number in range(warm_up):
        state, metrics = step.step(state, next(loader))
        if number in (0, warm_up - 1):
            print(f"step {number + 1}: loss {float(metrics['loss']):.4f}", flush=True)
    params = jax.tree.map(jnp.asarray, jax.device_get(state.params))
    taken = [jax.tree.map(jnp.asarray, jax.device_get(next(loader))) for _ in range(batches)]
    total = collect(step.task, params, taken)
    predictions = max(int(sum(step.task.count(batch) for batch in taken)) // batches, 1)
    print(f"{batches} batches of {job.train.global_batch} rows, {time.monotonic() - began:.0f} s")
    return Measured(total, predictions, step.task, params, taken)


def text(errors: Errors) -> str:
    """Returns a table for the console: the products by their errors in int8, the largest first."""
    rows: list[Mapping[str, Any]] = [{"product": node} | dict(row) for node, row in errors.items()]
    rows.sort(key=lambda row: row["int8"], reverse=True)
    heads = {"product": "product"} | {name: name for name in next(iter(errors.values()))}
    return results.columns(rows, heads)


# ---- whether omega ranks plans as their errors do


class Chosen:
    """An Ops.matmul whose precisions are an argument of the compiled program.

    numbers: of the precision of each product of the layer that is traced next, in CHOICES.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """names: of the products of a layer."""
        self.names, self.numbers = names, jnp.zeros(len(names), jnp.int32)

    def __call__(
        self,
        x: jax.Array,
        w: Any,
        contract: int = 1,
        out_sharding: Any = None,
        out_dtype: Any = None,
        name: str | None = None,
    ) -> jax.Array:
        """Returns the product in the precision of its number."""
        if name is None or name not in self.names:
            return ops.matmul(x, w, contract, out_sharding, out_dtype, name)
        ways = [ops.LowPrecision({name: precision}) for precision in CHOICES]
        calls = [functools.partial(one, contract=contract, name=name) for one in ways]
        return jax.lax.switch(self.numbers[self.names.index(name)], calls, x, w)


def ranks(
    task: Task, params: Any, batches: Sequence[Any], omegas: Mapping[str, Errors], count: int
) -> list[dict[str, Any]]:
    """Returns rows with the rank correlation (Spearman) of each form's sum of omega with what
    random plans do to the loss of batches, and to its gradients.

    omegas: {form: the errors of all products}.
    """
    names = sorted({f"{STACK}.{node.split('.', 2)[2]}" for node in omegas["exact"]})
    chosen = Chosen(names)
    parts = task.parts(None, ops.Ops(matmul=chosen))
    drawn = np.random.default_rng(0)
    # Each plan has its own mixture, so that plans differ in more than chance.
    mixtures = drawn.dirichlet(np.ones(len(CHOICES)), count)
    tables = [
        drawn.choice(len(CHOICES), (parts.layers, len(names)), p=mixture) for mixture in mixtures
    ]

    def loss(params: Any, batch: Any, table: jax.Array) -> jax.Array:
        total = jnp.maximum(task.count(batch), 1).astype(jnp.float32)
        context = parts.context(batch, None)
        x = parts.embed(params, batch, context)
        for i in range(parts.layers):
            chosen.numbers = table[i]
            weights = jax.tree.map(operator.itemgetter(i), params[parts.stack])
            x, _, _ = parts.block(weights, x, context)
        return task.objective(parts.head_loss(params, x, batch), total)

    step = jax.jit(jax.value_and_grad(loss))
    full = [step(params, batch, jnp.zeros(tables[0].shape, jnp.int32)) for batch in batches]
    changes, errors = [], []
    for table in tables:
        made = [step(params, batch, jnp.asarray(table, jnp.int32)) for batch in batches]
        pairs = list(zip(made, full, strict=True))
        changes.append(np.mean([abs(float(a[0] - b[0])) for a, b in pairs]))
        errors.append(np.mean([_square(a[1], b[1]) for a, b in pairs]))
    made = []
    for form, omega in omegas.items():

        def of(i: int, name: str, number: int, omega: Errors = omega) -> float:
            return omega[node_name(name, i)].get(CHOICES[number], 0.0)

        sums = [
            sum(of(i, names[j], int(number)) for (i, j), number in np.ndenumerate(table))
            for table in tables
        ]
        made.append(
            {
                "form": form,
                "loss": float(spearmanr(sums, changes).statistic),
                "gradients": float(spearmanr(sums, errors).statistic),
            }
        )
    return made


def _square(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum(float(jnp.sum((x - y) ** 2)) for x, y in pairs)
