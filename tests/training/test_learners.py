"""Learners that are no language model, some of docs/own_networks.md, on one device and on eight.

A policy gradient on rollouts from a file, the LSTM-VAE, a small residual network on drawn images,
and an encoder whose head alone is trained. Each is stopped, saved and resumed.
"""

import functools
import pathlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint.manager import CheckpointManager
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.data.loader import Loader, Share
from megajax.layers import losses
from megajax.models import encoder, lstm_vae
from megajax.models.encoder_config import EncoderConfig
from megajax.training.config import JobConfig, NoShape, TrainConfig
from megajax.training.optim import OptimConfig
from megajax.training.step import make_train_step
from megajax.training.task import Leaf, Task, TrainState, mean_loss, token_rows
from tests.tiny import MODEL
from tests.tolerances import LONG_LOSSES

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "own_networks.md"
ROWS, S = 16, 16


def from_page(name):
    """The module that the page on networks of one's own shows under this name."""
    (code,) = re.findall(
        rf"^<!-- {name}.py -->\n```python\n(.*?)^```", PAGE.read_text(), re.M | re.S
    )
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses look their module up
    exec(compile(code, f"{name}.py", "exec"), module.__dict__)
    return module


class Stored:
    """Rows of a file, endlessly."""

    def __init__(self, path):
        self._rows = dict(np.load(path))

    def __getitem__(self, i):
        return {k: x[i % len(x)] for k, x in self._rows.items()}


def rollouts(path):
    random = np.random.default_rng(0)
    tokens = random.integers(0, MODEL.vocab, (40, S + 1)).astype(np.int32)
    counts = random.random((40, S)) < 0.7
    np.savez(
        path,
        tokens=tokens[:, :-1],
        targets=np.where(counts, tokens[:, 1:], -1).astype(np.int32),
        segments=np.zeros((40, S), np.int32),
        positions=np.tile(np.arange(S, dtype=np.int32), (40, 1)),
        old_logprobs=np.float32(-4 - random.random((40, S))),
        advantages=random.standard_normal((40, S)).astype(np.float32),
    )


def images(path):
    """Squares and bars of four colours: the label is shape and colour."""
    random = np.random.default_rng(1)
    x, labels = np.zeros((64, 12, 12, 3), np.uint8), random.integers(0, 4, 64)
    for i, label in enumerate(labels):
        row, column = random.integers(0, 6, 2)
        high, wide = ((5, 5), (2, 6))[label % 2]
        x[i, row : row + high, column : column + wide, label // 2] = 255
    np.savez(path, image=x, label=labels.astype(np.int32))


def windows(path):
    level = np.random.default_rng(2).random((64, 1, 3))
    x = np.clip(level + 0.02 * np.random.default_rng(3).standard_normal((64, 8, 3)), 0, 1)
    np.savez(path, targets=np.where(x < 0.05, lstm_vae.HOLE, x).astype(np.float32))


def sentences(path):
    random = np.random.default_rng(4)
    labels = random.integers(0, 2, 64)
    tokens = random.integers(10, 50, (64, S)) + 50 * labels[:, None]
    targets = np.full((64, S), -1)
    targets[:, 0] = labels
    np.savez(
        path,
        tokens=tokens.astype(np.int32),
        targets=targets.astype(np.int32),
        segments=np.zeros((64, S), np.int32),
        positions=np.tile(np.arange(S, dtype=np.int32), (64, 1)),
    )


@functools.cache
def learner(name):
    """Returns (what writes its data, configuration of the model, task, --train.freeze)."""
    if name == "policy":
        return rollouts, MODEL, from_page("ppo").task(MODEL, S), None
    if name == "images":
        return images, NoShape(), from_page("shapes").task, None
    if name == "vae":
        model = lstm_vae.LstmVaeConfig(metrics=3)
        batch = {"targets": Leaf((8, 3), (None, None), "float32")}
        parts = functools.partial(lstm_vae.parts, model)
        return windows, model, Task(parts, batch, lstm_vae.objective, unit="windows"), None
    model = EncoderConfig(
        layers=2, width=32, heads=4, mlp=64, vocab=128, max_positions=S, head="classify", labels=2
    )
    task = Task(functools.partial(encoder.parts, model), token_rows(S), mean_loss())
    return sentences, model, task, "tokens,positions,types,blocks"


def make(name, accumulate=1, **mesh):
    _, model, task, freeze = learner(name)
    cfg = JobConfig(
        model=model,
        train=TrainConfig(
            steps=8,
            global_batch=ROWS,
            seq_len=min(S, model.max_positions or S),
            accumulate=accumulate,
            freeze=freeze,
        ),
        optim=OptimConfig(lr=1e-2, warmup=0),
    )
    devices = int(np.prod([*mesh.values()])) if mesh else 1
    mesh = MeshSpec(**(mesh or {"data": 1})).build(jax.devices()[:devices])
    return make_train_step(cfg, mesh, task)


def run(step, path, state=None, first=0, last=8):
    """Returns (losses, state) of steps first + 1 to last."""
    state = step.init(0) if state is None else state
    batches, metrics = Loader(Stored(path), step.abstract_batch, first * ROWS), []
    for _ in range(first, last):
        state, step_metrics = step.step(state, next(batches))
        metrics.append({k: np.asarray(v) for k, v in step_metrics.items()})
    return metrics, state


def check(name, path, **mesh):
    """One device and this mesh learn the same, and a resumed run ends with the same bits."""
    data, *_ = learner(name)
    data(path / "rows.npz")
    # The noise of the VAE's latent is of a micro-batch, so micro-batches are compared with such.
    pieces = mesh.get("accumulate", 1) if name == "vae" else 1
    control, _ = run(make(name, accumulate=pieces), path / "rows.npz")
    step = make(name, **mesh)
    metrics, ends = run(step, path / "rows.npz")
    for ours, theirs in zip(metrics, control, strict=True):
        assert {*ours} == {*theirs}
        for key in ours:
            if key != "leaf_norms":
                np.testing.assert_allclose(ours[key], theirs[key], atol=LONG_LOSSES, err_msg=key)
    _, half = run(step, path / "rows.npz", last=5)
    manager = CheckpointManager(path / "checkpoints")
    manager.save(5, half, order=step.rows).result()
    manager.close()
    step = make(name, **mesh)  # another process
    like = {k: x for k, x in vars(step.abstract_state).items() if x is not None}
    restored = TrainState(
        **CheckpointManager(path / "checkpoints").restore(5, like=like, order=step.rows)
    )
    more, resumed = run(step, path / "rows.npz", restored, first=5)
    assert [m["loss"] for m in more] == [m["loss"] for m in metrics[5:]]
    for (leaf, a), (_, b) in zip(named_leaves(resumed), named_leaves(ends), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=leaf)
    return control


ALL = ("policy", "vae", "images", "frozen")


@pytest.mark.parametrize("name", ALL)
def test_one_device_and_eight_learn_the_same_and_a_resumed_run_goes_on(name, tmp_path):
    cut = {"node": 2} if name == "images" else {"tensor": 2}  # a plain module has no words
    control = check(name, tmp_path, accumulate=2, data=4, **cut)
    losses = [m["loss"] for m in control]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    reported = {
        "policy": {"policy", "entropy", "clipped"},
        "vae": {"squared_error", "divergence"},
        "images": {"loss", "accuracy"},
        "frozen": {"accuracy", "z_squared"},
    }
    assert reported[name] <= {*control[0]}
    assert not any(key.startswith("wire_") for key in control[0])  # nothing travels in a codec


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 4}, {"tensor": 2}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_each_way_to_cut_a_step_learns_the_same(name, mesh, tmp_path):
    if name == "images" and "tensor" in mesh:
        mesh = {"node": 2}
    check(name, tmp_path, **mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"pipe": 2, "data": 2, "tensor": 2}, {"context": 2, "data": 2}])
def test_a_policy_learns_the_same_in_pipelines_and_with_cut_rows(mesh, tmp_path):
    rollouts(tmp_path / "rows.npz")
    control, _ = run(make("policy"), tmp_path / "rows.npz")
    step = make("policy", **mesh)
    state, batches = (
        step.init(0),
        Loader(Stored(tmp_path / "rows.npz"), step.abstract_batch, order=step.order),
    )
    for want in control:
        state, metrics = step.step(state, next(batches))
        for key in ("loss", "policy", "entropy", "clipped", "grad_norm"):
            np.testing.assert_allclose(metrics[key], want[key], atol=LONG_LOSSES, err_msg=key)


def test_a_network_that_computes_its_loss_refuses_what_would_cut_it():
    for mesh, flag in (({"pipe": 2}, "mesh.pipe=2"), ({"context": 2}, "mesh.context=2")):
        with pytest.raises(UserError, match=f"{flag}.*use 1"):
            make("images", **mesh)


def test_gradients_and_update_apart_are_the_step(tmp_path):
    images(tmp_path / "rows.npz")
    step = make("images")
    batch = next(Loader(Stored(tmp_path / "rows.npz"), step.abstract_batch))
    together, metrics = step.step(step.init(0), batch)
    state = step.init(0)
    apart, apart_metrics = step.apply(state, step.gradients(state, batch))
    np.testing.assert_allclose(apart_metrics["loss"], metrics["loss"], rtol=1e-6)
    for (leaf, a), (_, b) in zip(
        named_leaves(apart.params), named_leaves(together.params), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=leaf)


@pytest.mark.parametrize("chunks", [1, 4])
def test_log_probabilities_and_entropies_of_tokens(chunks):
    """Against float64 NumPy, their gradients against finite differences of it."""
    random = np.random.default_rng(5)
    hidden, table = random.standard_normal((2, 8, 6)), random.standard_normal((6, 11))
    targets = np.where(random.random((2, 8)) < 0.3, -1, random.integers(0, 9, (2, 8)))

    def numpy(hidden):
        z = (hidden @ table)[..., :9]  # the last two pad the vocabulary
        log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
        at = np.take_along_axis(log_p, np.maximum(targets, 0)[..., None], -1)[..., 0]
        entropy = -(np.exp(log_p) * log_p).sum(-1)
        return np.where(targets >= 0, at, 0), np.where(targets >= 0, entropy, 0)

    def ours(hidden):
        def project(h):
            return losses.mask_padding(h @ jnp.float32(table), 9)

        return losses.token_logprobs(hidden, jnp.int32(targets), project, chunks)

    for a, b in zip(ours(jnp.float32(hidden)), numpy(hidden), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    for which in (0, 1):
        gradient = jax.grad(lambda h, i=which: (ours(h)[i] ** 2).sum())(jnp.float32(hidden))
        move = random.standard_normal(hidden.shape)
        near = [(numpy(hidden + e * move)[which] ** 2).sum() for e in (1e-5, -1e-5)]
        assert (gradient * move).sum() == pytest.approx((near[0] - near[1]) / 2e-5, rel=1e-4)


def test_batches_of_several_shapes_and_shares():
    """Each batch has the shape that its number says, at every start; shares make up the batch."""

    class Canvases:
        def row(self, i, shape):
            return {"images": np.full(((4, 6)[shape], 2), i, np.int32)}

    def abstract(size, rows):
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return {"images": jax.ShapeDtypeStruct((rows, size, 2), np.int32, sharding=where)}

    def shape_of(number):
        return (number * 7 + 1) % 3 % 2

    for first in (0, 3):
        loader = Loader(Canvases(), [abstract(4, 6), abstract(6, 6)], 6 * first, shape_of=shape_of)
        for number in range(first, first + 4):
            x = np.asarray(next(loader)["images"])
            assert x.shape == (6, (4, 6)[shape_of(number)], 2)
            np.testing.assert_array_equal(x[:, 0, 0], 6 * number + np.arange(6))
    parts = [
        Loader(Canvases(), [abstract(4, rows.size)], 12, share=Share(rows, 6), shape_of=lambda n: 0)
        for rows in (np.arange(2), np.arange(2, 6))
    ]
    rows = np.concatenate([np.asarray(next(p)["images"])[:, 0, 0] for p in parts])
    np.testing.assert_array_equal(rows, 12 + np.arange(6))
    assert [p.position for p in parts] == [18, 18]
    with pytest.raises(ValueError, match="must number 4"):
        Loader(Canvases(), [abstract(4, 4)], share=Share(np.arange(2), 6), shape_of=lambda n: 0)


def test_sgd_and_the_mean_of_the_weights(tmp_path):
    """sgd as torch.optim.SGD computes it; the mean of the weights as NumPy does."""
    images(tmp_path / "rows.npz")
    _, model, task, _ = learner("images")
    train = TrainConfig(steps=8, global_batch=ROWS, seq_len=S)
    optim = OptimConfig(
        name="sgd",
        lr=0.1,
        beta1=0.9,
        weight_decay=0.01,
        warmup=0,
        schedule="constant",
        clip=0.0,
        ema=0.5,
    )
    cfg = JobConfig(model=model, train=train, optim=optim)
    step = make_train_step(cfg, MeshSpec(data=1).build(jax.devices()[:1]), task)
    state, batches = step.init(0), Loader(Stored(tmp_path / "rows.npz"), step.abstract_batch)
    w = {n: np.asarray(x, np.float64) for n, x in named_leaves(state.params)}
    mean, velocity = dict(w), dict.fromkeys(w, 0.0)
    for number in range(1, 4):
        batch = next(batches)
        grads = dict(named_leaves(step.gradients(state, batch).grads))
        state, _ = step.step(state, batch)
        decay = min(0.5, (1 + number) / (10 + number))
        for n in w:
            g = np.asarray(grads[n], np.float64) + 0.01 * w[n] * (w[n].ndim > 1)
            velocity[n] = 0.9 * velocity[n] + g
            w[n] = w[n] - 0.1 * velocity[n]
            mean[n] = decay * mean[n] + (1 - decay) * w[n]
    for n, x in named_leaves(state.params):
        np.testing.assert_allclose(x, w[n], atol=1e-5, err_msg=n)
    for n, x in named_leaves(step.weights(state)):
        np.testing.assert_allclose(x, mean[n], atol=1e-5, err_msg=n)
