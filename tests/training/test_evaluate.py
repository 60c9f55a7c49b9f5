"""Held-out figures of mixtures whose parts have unequal or no rows. Oracle: sums by hand."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.data.corpus import Corpus
from megajax.data.indexed import TokenFile, TokenWriter
from megajax.data.loader import held_out_batches, held_out_rows
from megajax.data.pack import whole_documents
from megajax.layers.losses import LossSums
from megajax.training.evaluate import bits_per_byte, evaluate, evaluated_rows
from megajax.training.step import make_train_step
from tests.tiny import run_config


def corpus(prefix, lengths, ratio):
    with TokenWriter(prefix, 300) as writer:
        for n in lengths:
            writer.add(np.arange(n))
    file = TokenFile(prefix)
    split = whole_documents(file, np.arange(len(file)))
    return Corpus(prefix.name, 1.0, split, split, ratio, "")


def test_bits_per_byte_counts_the_rows_that_are_read(tmp_path):
    corpora = [
        corpus(tmp_path / "long", [200], 4.0),
        corpus(tmp_path / "short", [17], 1.0),  # two rows of 8
        corpus(tmp_path / "tiny", [8], 100.0),  # does not fill one
        corpus(tmp_path / "apart", [1] * 50, None),  # nothing follows anything
        dataclasses.replace(corpus(tmp_path / "none", [99], None), held_out=None),
    ]
    rows = held_out_rows(corpora, 8, 50)
    assert rows == [10, 2, 0, 0, 0]
    byte_count = 8 * (10 * 4.0 + 2 * 1.0)
    bits = 12 * 8 * 2.5 / math.log(2)
    assert bits_per_byte(2.5, corpora, rows) == pytest.approx(bits / byte_count)
    assert bits_per_byte(2.5, corpora, [1, 0, 0, 1, 0]) is None  # who reads unknown text
    assert held_out_rows(corpora[:2], 8, 3) == [2, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"train__accumulate": 2},
        {"train__accumulate": 4, "mesh__data": 2},
        {"mesh__data": 2, "mesh__pipe": 2, "pipeline__microbatches": 4},
    ],
)
def test_an_evaluation_reads_the_same_rows_in_all_batches(tmp_path, changes):
    """eval.batches=3 of 16 rows are 48 rows, whatever the micro-batches and the mesh."""
    corpora = [corpus(tmp_path / "text", [50] * 40, None)]
    read = []
    for more in ({}, changes):
        cfg = run_config(eval__batches=3, **more)
        like = make_train_step(cfg, cfg.mesh.build()).abstract_eval_batch
        batches = list(held_out_batches(corpora, like, evaluated_rows(cfg)))
        targets = np.concatenate([np.asarray(b["targets"]).reshape(-1, 16) for b in batches])
        read.append(targets[(targets >= 0).any(1)])
    assert len(read[0]) == 48
    np.testing.assert_array_equal(*read)


@pytest.mark.slow
def test_an_evaluation_is_the_same_under_any_accumulation_and_mesh(tmp_path):
    corpora = [corpus(tmp_path / "text", [50] * 40, None)]
    losses = []
    for more in (
        {},
        {"train__accumulate": 2},
        {"train__accumulate": 4, "mesh__data": 2},
        {"mesh__data": 1, "mesh__tensor": 4},
        {"mesh__data": 1},
        {"mesh__data": 2, "mesh__pipe": 2, "pipeline__microbatches": 4},
    ):
        cfg = run_config(eval__batches=3, **more)
        train_step = make_train_step(cfg, cfg.mesh.build())
        like, most = train_step.abstract_eval_batch, evaluated_rows(cfg)
        batches = held_out_batches(corpora, like, most, train_step.storage.tokens)
        rows = held_out_rows(corpora, 16, most)
        figures = evaluate(train_step, train_step.init(0).params, batches, corpora, rows)
        losses.append((figures["eval_loss"], figures["eval_tokens"]))
    np.testing.assert_allclose(losses, losses[:1] * len(losses), rtol=1e-6)


def test_nothing_to_predict_is_no_loss():
    class Step:
        @staticmethod
        def evaluate(params, batch):
            return LossSums({"cross_entropy": jnp.float32(0)}, jnp.int32(0))

    assert evaluate(Step, {}, [{}, {}], [], []) == {}
    assert evaluate(Step, {}, [], [], []) == {}
