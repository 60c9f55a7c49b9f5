"""Plain Flax modules: the losses of one device on several, and every mistake by its name.

The page docs/own_networks.md is run here too, with all its recipes.
"""

import functools
import io
import pathlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from megajax.checkpoint.manager import CheckpointManager
from megajax.core import mesh as mesh_
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.parallel.sharding import ShardSpec
from megajax.training.config import JobConfig, TrainConfig
from megajax.training.optim import OptimConfig, make_optimizer
from megajax.training.step import make_train_step
from megajax.training.task import Leaf, TrainState, plain_task
from tests.systems.server import asgi
from tests.tolerances import LOSSES

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "own_networks.md"
ROWS = 8


class Pictures(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.conv = nnx.Conv(2, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.out = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)])

    def __call__(self, x):
        x = jax.nn.relu(self.norm(self.conv(x))).mean((1, 2))
        return self.out[1](jax.nn.relu(self.out[0](self.drop(x))))


class Words(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.place = nnx.Embed(16, 8, rngs=rngs), nnx.Embed(6, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(2, 8, use_bias=False, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids) + self.place(jnp.arange(6))[None]
        x = x + self.attend(self.norm(x), mask=nnx.make_causal_mask(ids))
        return self.embed.attend(x + self.down(jax.nn.gelu(self.up(x))))


def classify(model, batch):
    logits = model(batch["x"])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["y"], 0))
    counts = batch["y"] >= 0
    right = (logits.argmax(-1) == batch["y"]).sum()
    return {"loss": jnp.where(counts, each, 0).sum(), "right": right}, counts.sum()


@functools.cache
def task_of(name, rate=0.0):
    if name == "pictures":
        batch = {"x": Leaf((6, 6, 2), dtype="float32"), "y": Leaf()}
        return plain_task(lambda rngs: Pictures(rngs, rate), classify, batch, "images")
    return plain_task(Words, classify, {"x": Leaf((6,)), "y": Leaf((6,))}, "tokens")


def rows(name, number):
    """One batch; of tokens some have no target, and devices count unlike many."""
    random = np.random.default_rng(number)
    if name == "pictures":
        y = random.integers(0, 3, ROWS)
        x = random.standard_normal((ROWS, 6, 6, 2)) + y[:, None, None, None]
        return {"x": x.astype(np.float32), "y": y.astype(np.int32)}
    x = (random.integers(0, 16, (ROWS, 1)) + np.arange(7)) % 16
    y = np.where(random.random((ROWS, 6)) < 0.1 * np.arange(ROWS)[:, None], -1, x[:, 1:])
    return {"x": x[:, :-1].astype(np.int32), "y": y.astype(np.int32)}


def step_of(task, zero="auto", dtype="float32", accumulate=1, optimizer=None, **mesh):
    train = TrainConfig(steps=10, global_batch=ROWS, dtype=dtype, accumulate=accumulate)
    optim = OptimConfig(lr=1e-2, warmup=0)
    cfg = JobConfig(train=train, optim=optim, shard=ShardSpec(zero))
    devices = MeshSpec(**mesh).build(jax.devices()[: int(np.prod([*mesh.values()]))])
    return make_train_step(cfg, devices, task, optimizer)


@functools.cache
def shared(name, **mesh):
    """A step that several tests use."""
    return step_of(task_of(name), **mesh)


def batch_of(step, name, number):
    host, like = rows(name, number), step.abstract_batch
    return {k: jax.device_put(x.reshape(like[k].shape), like[k].sharding) for k, x in host.items()}


def learn(step, name, state=None, first=0, last=10):
    """Returns (the metrics of each step, the state after them)."""
    state, seen = step.init(0) if state is None else state, []
    for number in range(first, last):
        state, metrics = step.step(state, batch_of(step, name, number))
        seen.append({k: float(x) for k, x in metrics.items() if x.ndim == 0})
    return seen, state


@functools.cache
def control(name):
    return learn(shared(name, data=1), name)


@pytest.mark.parametrize(
    "name, mesh",
    [
        ("pictures", {"data": 4}),
        pytest.param("words", {"data": 4}, marks=pytest.mark.slow),
        pytest.param("pictures", {"data": 4, "zero": "none"}, marks=pytest.mark.slow),
        pytest.param("words", {"data": 2, "node": 2, "zero": "hybrid"}, marks=pytest.mark.slow),
        pytest.param("words", {"data": 4, "zero": "optimizer"}, marks=pytest.mark.slow),
        pytest.param("words", {"data": 2, "accumulate": 2}, marks=pytest.mark.slow),
        pytest.param("words", {"expert": 2, "data": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_several_devices_have_the_losses_of_one(name, mesh):
    expected, ends = control(name)
    step = shared(name, **mesh)
    seen, state = learn(step, name)
    assert seen[-1]["loss"] < 0.95 * seen[0]["loss"]
    for ours, theirs in zip(seen, expected, strict=True):
        assert {*ours} == {*theirs} and {"loss", "right", "grad_norm"} <= {*ours}
        for key in ours:
            np.testing.assert_allclose(ours[key], theirs[key], atol=LOSSES, err_msg=key)
    for (leaf, x), (_, y) in zip(
        named_leaves(state.params), named_leaves(ends.params), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=5e-3, err_msg=leaf)
    cut = {n for n, x in named_leaves(state.params) if not x.sharding.is_fully_replicated}
    matrices = {n for n, x in named_leaves(ends.params) if x.ndim > 1}
    assert cut == (set() if mesh.get("zero") == "none" else matrices)


def test_batch_statistics_are_those_of_all_rows():
    """Against NumPy: the first step's mean and variance of what the convolution gives."""
    step = shared("pictures", data=4)
    first = step.init(0)
    kernel = np.asarray(first.params["conv"]["kernel"], np.float64)
    images = np.pad(rows("pictures", 0)["x"].astype(np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    out = sum(images[:, i : i + 6, j : j + 6] @ kernel[i, j] for i in range(3) for j in range(3))
    _, state = learn(step, "pictures", first, last=1)
    norm = state.params["norm"]
    np.testing.assert_allclose(norm["mean"], 0.01 * out.mean((0, 1, 2)), atol=1e-6)
    np.testing.assert_allclose(norm["var"], 0.99 + 0.01 * out.var((0, 1, 2)), atol=1e-6)
    # An evaluation normalises by them, and leaves them as they are.
    evaluated = step.evaluate(state.params, batch_of(step, "pictures", 1))
    module = step.parts.module(jax.device_get(state.params))
    terms, count = classify(module, {k: jnp.asarray(x) for k, x in rows("pictures", 1).items()})
    assert int(evaluated.count) == int(count) == ROWS
    np.testing.assert_allclose(evaluated.loss, terms["loss"], rtol=1e-5)
    assert {*step.metrics(evaluated, evaluated.count)} == {"loss", "right"}


def test_dropout_differs_by_rank_and_step_and_resumes(tmp_path):
    """Rows of equal content lose unlike units; a restored run goes on bit for bit."""

    class Drop(nnx.Module):
        def __init__(self, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.w = nnx.Param(jnp.ones((8, 4)))

        def __call__(self, x):
            return self.drop(x @ self.w[...])

    def loss(model, batch):  # the mask of each rank, as bits of a number
        y = model(batch["x"])
        bits = jnp.where(y > 0, 2 ** jnp.arange(4)[None], 0).sum()
        rank = jax.lax.axis_index("data") if batch["x"].shape[0] < ROWS else 0
        return {"loss": y.sum(), **{f"bits{i}": jnp.where(rank == i, bits, 0) for i in range(4)}}, 1

    task = plain_task(Drop, loss, {"x": Leaf((8,), dtype="float32")})
    step = step_of(task, data=4)
    batch = {"x": jax.device_put(np.ones((ROWS, 8), np.float32), step.abstract_batch["x"].sharding)}

    def run(state, steps):
        seen = []
        for _ in range(steps):
            state, metrics = step.step(state, batch)
            seen.append(tuple(float(metrics[f"bits{i}"]) for i in range(4)))
        return seen, state

    seen, ends = run(step.init(0), 4)
    assert all(len({*masks}) > 1 for masks in seen) and len({*seen}) == 4
    manager = CheckpointManager(tmp_path / "checkpoints")
    manager.save(2, run(step.init(0), 2)[1]).result()
    like = {k: x for k, x in vars(step.abstract_state).items() if x is not None}
    more, resumed = run(TrainState(**manager.restore(2, like=like)), 2)
    manager.close()
    assert more == seen[2:]
    for (leaf, a), (_, b) in zip(named_leaves(resumed), named_leaves(ends), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=leaf)


@pytest.mark.slow
def test_sixteen_bits_are_those_of_the_layers():
    seen = {}

    def loss(model, batch):
        seen["y"] = model.conv(batch["x"]).dtype
        seen["kernel"], seen["scale"] = model.conv.kernel.dtype, model.norm.scale.dtype
        return classify(model, batch)

    batch = {"x": Leaf((6, 6, 2), dtype="float32"), "y": Leaf()}
    with jax.numpy_dtype_promotion("standard"):  # Flax promotes float32 statistics
        step = step_of(plain_task(Pictures, loss, batch), dtype="bfloat16", accumulate=2, data=2)
        metrics, state = learn(step, "pictures", last=3)
    assert seen == {"y": jnp.bfloat16, "kernel": jnp.bfloat16, "scale": jnp.float32}
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(metrics[0]["loss"], control("pictures")[0][0]["loss"], atol=0.1)


class Holder(nnx.Module):
    def __init__(self, **members):
        for name, value in members.items():
            setattr(self, name, value)

    def __call__(self, x):
        return x


LEAF = {"x": Leaf((4,), dtype="float32")}


@pytest.mark.parametrize(
    "build, said",
    [
        (
            lambda rngs: Holder(t=nnx.Param(jnp.arange(4))),
            "t is a parameter of the type int32.*an nnx.Variable",
        ),
        (
            lambda rngs: Holder(in_=nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=rngs)),
            "in_.kernel is a parameter of the type bfloat16.*leave param_dtype out",
        ),
        (
            lambda rngs: Holder(t=jnp.ones(4)),
            r"t is an array of JAX.*nnx.Param\(\.\.\.\) to train it",
        ),
        (lambda rngs: jnp.ones(4), r"build\(rngs\) returned a .*return the module"),
    ],
    ids=["integers", "sixteen bits", "a plain array", "no module"],
)
def test_a_module_that_cannot_be_trained_is_refused(build, said):
    with pytest.raises(UserError, match=said):
        plain_task(build, classify, LEAF)


@pytest.mark.parametrize(
    "loss, said",
    [
        (lambda m, b: {"loss": b["x"].sum(1)}, "the loss returned dict; return"),
        (lambda m, b: b["x"].sum(), r"returned one array of the shape \(\)"),
        (lambda m, b: ({"loss": b["x"].sum(1)}, 2), r"'loss' of the shape \(2\), .*\.sum\(\)"),
        (lambda m, b: ({"loss": b["x"].sum()}, b["x"][:, 0]), r"the count of the shape \(2\)"),
        (lambda m, b: ({"nll": b["x"].sum()}, 2), "the sums 'nll' and no 'loss'"),
        (lambda m, b: ({"loss": b["image"].sum()}, 2), r"reads the member 'image'.*the task has x"),
    ],
    ids=["no count", "an array", "rows", "counts", "no loss", "a member"],
)
def test_a_loss_of_another_form_is_refused(loss, said):
    step = step_of(
        plain_task(lambda rngs: Holder(w=nnx.Param(jnp.ones((4, 4)))), loss, LEAF), data=4
    )
    with pytest.raises(UserError, match=said):
        step.step.lower(step.abstract_state, step.abstract_batch)


def test_meshes_and_batches_that_do_not_fit_are_refused():
    for axis in ("tensor", "pipe", "context"):
        with pytest.raises(
            UserError, match=f"mesh.{axis}=2: parameter conv.kernel has no words.*1"
        ):
            step_of(task_of("pictures"), **{axis: 2})
    step = shared("pictures", data=4)
    lacks, more = dict(step.abstract_batch), dict(step.abstract_batch)
    more["z"] = lacks.pop("y")
    with pytest.raises(UserError, match="the batch lacks y; the members of the task are x, y"):
        step.step.lower(step.abstract_state, lacks)
    with pytest.raises(UserError, match="the batch has z besides"):
        step.step.lower(step.abstract_state, more | {"y": more["z"]})


# ---- optimizers


@pytest.mark.slow
def test_any_optax_transformation_updates_cut_parameters():
    """lion against NumPy; adafactor, whose moments have other shapes, against one device."""
    step = step_of(task_of("words"), optimizer=optax.lion(1e-3, 0.9, 0.99), data=4)
    state = step.init(0)
    before = jax.device_get(state.params)
    grads = jax.device_get(step.gradients(state, batch_of(step, "words", 0)).grads)
    seen, state = learn(step, "words", state, last=1)
    assert "lr" not in seen[0]
    scale = min(1.0, 1.0 / seen[0]["grad_norm"])
    for (leaf, x), (_, w), (_, g) in zip(
        *(named_leaves(t) for t in (state.params, before, grads)), strict=True
    ):
        assert np.abs(g).max() == 0 or scale  # a sign is that of the clipped gradient too
        settled = np.abs(g) > 1e-7
        np.testing.assert_allclose(
            np.asarray(x)[settled], (w - 1e-3 * np.sign(g))[settled], atol=1e-6, err_msg=leaf
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [optax.adafactor, optax.lamb, optax.novograd], ids=lambda f: f.__name__
)
def test_norms_of_cut_parameters_are_those_of_one_device(make):
    ends = [
        learn(step_of(task_of("words"), optimizer=make(1e-2), data=n), "words", last=3)[0]
        for n in (1, 4)
    ]
    np.testing.assert_allclose(
        [m["loss"] for m in ends[1]], [m["loss"] for m in ends[0]], atol=LOSSES
    )


def test_an_optimizer_that_cannot_update_is_refused():
    def update(updates, state, params=None):
        return jax.tree.map(lambda g: g.reshape(-1), updates), state

    flat = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with pytest.raises(UserError, match=r"shard.zero=none|of the shape \(128,\)"):
        step_of(task_of("words"), optimizer=flat, data=4)


def test_an_optimizer_named_on_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "my_rules.py").write_text(
        "import optax\ndef descent(rate): return optax.sgd(rate)\n"
        "def number(rate): return 3\ndef two(rate, other): return 0\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="my_rules:descent is not on the command line"):
        make_optimizer(OptimConfig(name="my_rules:descent"), 4, {"w": ("embed",)})
    rules = [f"my_rules:{name}" for name in ("descent", "ascent", "number", "two")]
    monkeypatch.setattr(sys, "argv", ["train", "--optim.name=no_such_rules:f", *rules])
    optim = OptimConfig(name="my_rules:descent", lr=0.5, warmup=0, schedule="constant")
    rule = make_optimizer(optim, 4, {"w": ("embed",)})
    params = {"w": jnp.ones(2)}
    updates, _ = rule.update({"w": jnp.ones(2)}, rule.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.5)
    assert float(rule.rate(0)) == 0.5 and str(tmp_path) not in sys.path
    for name, said in {
        "my_rules:ascent": "my_rules has no function ascent",
        "no_such_rules:f": "no_such_rules cannot be imported.*working directory",
        "my_rules:number": r"number\(learning_rate\) returned a int",
        "my_rules:two": "the function takes the learning rate",
    }.items():
        with pytest.raises(UserError, match=said):
            make_optimizer(OptimConfig(name=name), 4, {"w": ("embed",)})
    for name in ("adam", "os.path", "a:b:c", "../x:y"):
        with pytest.raises(UserError, match="must be one of adamw, lamb, muon, sgd, or MODULE"):
            OptimConfig(name=name)


# ---- the page


def code(name):
    (text,) = re.findall(rf"^<!-- {name} -->\n```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    return text


@pytest.mark.slow
def test_the_program_of_the_page_resumes_and_each_recipe_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mesh_, "start", lambda emulate: None)  # this process has its 8 devices
    shapes = types.ModuleType("shapes")
    monkeypatch.setitem(sys.modules, "shapes", shapes)
    exec(compile(code("shapes.py"), "shapes.py", "exec"), shapes.__dict__)
    program = code("train_shapes.py").replace(":.3f}", ":.9f}")

    def run(folder, steps):
        names = {"__name__": "page"}
        text = program.replace("runs/shapes", str(tmp_path / folder)).replace(
            "lr=1e-2", 'lr=1e-2, schedule="constant"'
        )
        exec(text.replace("steps=40", f"steps={steps}"), names)
        return capsys.readouterr().out.splitlines(), names

    lines, names = run("uninterrupted", 40)
    assert float(lines[-1].split()[-1]) > 0.6 > float(lines[0].split()[-1])  # accuracy
    assert run("parts", 20)[0] + run("parts", 40)[0] == lines
    for recipe in ("optimizer", "source", "sink", "detector", "endpoint"):
        exec(compile(code(recipe), recipe, "exec"), names)
    assert capsys.readouterr().out == "step 3: the loss is 4\n"
    (row,) = (tmp_path / "metrics.tsv").read_text().splitlines()
    assert row.split("\t")[:2] == ["loss", "1"]
    held = io.BytesIO()
    np.savez(held, x=np.arange(5))
    held.seek(0)
    source = names["Arrays"](held)
    passes = [[int(source[i]["x"]) for i in range(n, n + 5)] for n in (0, 5)]
    assert passes[0] != passes[1] and sorted(passes[0]) == sorted(passes[1]) == [*range(5)]
    image = shapes.Shapes()[1000]

    async def ask():
        async with asgi.client(names["base"].app) as client:
            good = await client.post("/classify", json={"image": image["image"].tolist()})
            bad = await client.post("/classify", json={"image": [[1]]})
            return good, bad, await client.get("/health")

    good, bad, health = names["asyncio"].run(ask())
    assert good.status_code == health.status_code == 200 and good.json()["label"] in range(4)
    assert bad.status_code == 400 and "12 rows" in bad.json()["error"]["message"]


def test_the_files_of_the_page_are_short():
    assert len(code("shapes.py").splitlines()) <= 45
    assert len(code("train_shapes.py").splitlines()) <= 25
