"""What `qsync.py profile` measures: statistics of products in a run that is some steps old."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from megajax.core.errors import UserError
from megajax.data.corpus import open_corpora
from megajax.data.labelled import MaskedRows
from megajax.data.loader import Loader, training_rows
from megajax.models.encoder_config import EncoderConfig
from megajax.monitor import results
from megajax.systems.qsync.profile import Errors, collect
from megajax.systems.qsync.rounding import Statistics
from megajax.training.config import JobConfig
from megajax.training.step import make_train_step


def measured(job: JobConfig, warm_up: int, batches: int) -> tuple[dict[str, Statistics], int]:
    """Trains for some steps. Returns the sums over the next batches, and the predictions of one.

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
    return total, predictions


def text(errors: Errors) -> str:
    """Returns a table for the console: the products by their errors in int8, the largest first."""
    rows: list[Mapping[str, Any]] = [{"product": node} | dict(row) for node, row in errors.items()]
    rows.sort(key=lambda row: row["int8"], reverse=True)
    heads = {"product": "product"} | {name: name for name in next(iter(errors.values()))}
    return results.columns(rows, heads)
