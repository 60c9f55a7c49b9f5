"""A vision-language model trains alike on every mesh, and what is frozen stays as it is."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from megajax.core import config
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.cost import memory
from megajax.cost.hlo import Module
from megajax.models import vlm
from megajax.models.decoder_config import DecoderConfig
from megajax.models.vit import VitConfig
from megajax.models.vlm import VlmConfig
from megajax.systems.aot import QUICK
from megajax.training.config import JobConfig, TrainConfig
from megajax.training.optim import OptimConfig
from megajax.training.shape import step_shape
from megajax.training.step import make_train_step
from megajax.training.task import Leaf, Task, mean_loss, token_rows
from megajax.training.vision import VisionConfig
from pallas_kernels import aot
from tests.tiny import on
from tests.tolerances import GRADIENTS, LONG_LOSSES, LOSSES, NORMS
from tests.vision_rows import MODEL, batch_of

S, P = 32, 64
TOWER = "tower.", "projector."


@dataclasses.dataclass(frozen=True)
class Run(JobConfig):
    model: VlmConfig = config.group(VlmConfig)

    def task(self):
        places = {
            "places": Leaf((S,), ("seq",)),
            "rotary": Leaf((S, 3), ("seq", None)),
            "patches": Leaf((P, self.model.tower.patch_values), ("seq", None), "uint8"),
            "patch_places": Leaf((P, 2), ("seq", None)),
            "images": Leaf((P,), ("seq",)),
        }
        parts = functools.partial(
            vlm.parts, self.model, dtype=self.train.dtype, remat=self.train.keeps
        )
        return Task(parts, token_rows(S) | places, mean_loss())


def run_config(model=MODEL, **changes):
    base = Run(
        model=model,
        train=TrainConfig(steps=20, global_batch=16, seq_len=S),
        optim=OptimConfig(lr=2e-3, warmup=2),
    )
    return config.override(base, {k.replace("__", "."): v for k, v in changes.items()})


@functools.cache
def step_of(**changes):
    cfg = run_config(**changes)
    return make_train_step(cfg, cfg.mesh.build())


def run(step, steps):
    """Losses, norms of all leaves' gradients, and the last parameters, in the model's order."""
    state, losses, norms = step.init(0), [], []
    for i in range(steps):
        state, metrics = step.step(state, on(step, batch_of(i % 2)))
        losses.append(float(metrics["loss"]))
        norms.append(dict(zip(step.leaf_names, map(float, metrics["leaf_norms"]), strict=True)))
    params = jax.device_get(step.storage.natural(state.params))
    return losses, norms, dict(named_leaves(params))


def gradients(step):
    grads = step.gradients(step.init(0), on(step, batch_of(0))).grads
    return dict(named_leaves(jax.device_get(step.storage.natural(grads))))


@functools.cache
def control():
    step = step_of(mesh__data=1)
    return gradients(step), run(step, 20)


def assert_near(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        distance = np.linalg.norm(x - theirs[name]) / np.linalg.norm(theirs[name])
        assert distance < GRADIENTS, (name, distance)


MESHES = {
    "data 4": dict(mesh__data=4),
    "tensor 2": dict(mesh__data=1, mesh__tensor=2),
    "tensor 4, which share key-value heads": dict(mesh__data=1, mesh__tensor=4),
    "data 2 x tensor 2": dict(mesh__data=2, mesh__tensor=2),
    "two micro-batches": dict(mesh__data=2, train__accumulate=2),
    "streamed": dict(mesh__data=4, shard__zero="optimizer"),
    "pipe 2 x data 2": dict(mesh__pipe=2, mesh__data=2),
    "pipe 2 x tensor 2": dict(mesh__pipe=2, mesh__data=1, mesh__tensor=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_trains_as_one_device_does(mesh):
    """Rows with no image, one and three; every leaf, 20 steps."""
    step = step_of(**MESHES[mesh])
    first, (losses, norms, params) = control()
    assert_near(gradients(step), first)
    ours = run(step, 20)
    np.testing.assert_allclose(ours[0], losses, atol=LONG_LOSSES)
    assert losses[-1] < losses[0] - 0.1
    for own_norms, theirs in zip(ours[1], norms, strict=True):
        for name, norm in own_norms.items():
            assert abs(norm - theirs[name]) < NORMS * theirs[name] + 1e-9, name
    for name, x in ours[2].items():
        np.testing.assert_allclose(x, params[name], atol=1e-3, err_msg=name)


# Adam divides by small second moments, so that gradients are 7e-6 apart after some steps
# (measured); by this rule they are 2.4e-6 apart at most, on all of these meshes.
RULE = dict(optim__name="sgd", optim__lr=0.1)
SHORT = dataclasses.replace(
    MODEL,
    decoder=dataclasses.replace(MODEL.decoder, layers=1),
    tower=dataclasses.replace(MODEL.tower, layers=1),
)


def descent(model, mesh):
    """Losses of 20 optimizer steps, and the gradient of every leaf in each of them."""
    cfg = run_config(model, **mesh, **RULE)
    step = make_train_step(cfg, cfg.mesh.build())
    state, losses, grads = step.init(0), [], []
    for i in range(20):
        made = step.gradients(state, on(step, batch_of(i % 2)))
        grads.append(dict(named_leaves(jax.device_get(step.storage.natural(made.grads)))))
        state, metrics = step.apply(state, made)
        losses.append(float(metrics["loss"]))
    return losses, grads


one_device = functools.cache(lambda model: descent(model, dict(mesh__data=1)))
SLOW = "data 4", "tensor 2", "pipe 2 x data 2", "streamed"


@pytest.mark.parametrize(
    "mesh", ["data 2 x tensor 2", *(pytest.param(m, marks=pytest.mark.slow) for m in SLOW)]
)
def test_loss_and_every_gradient_are_those_of_one_device_for_20_steps(mesh):
    """Rows with no image, one and three."""
    model = MODEL if "pipe" in mesh else SHORT
    (losses, grads), (theirs, expected) = descent(model, MESHES[mesh]), one_device(model)
    np.testing.assert_allclose(losses, theirs, rtol=1e-4)
    assert losses[-1] < losses[0] - 0.1
    for ours, those in zip(grads, expected, strict=True):
        assert_near(ours, those)


FROZEN = {
    "tower": ("tower.",),
    "projector": ("projector.",),
    "tower,projector": ("tower.", "projector."),
    "tokens,blocks,norm": ("tokens", "blocks.", "norm."),
    "tower,tokens,blocks,norm": ("tower.", "tokens", "blocks.", "norm."),
}


@pytest.mark.parametrize("freeze", FROZEN)
def test_what_is_frozen_has_no_optimizer_state(freeze):
    step = step_of(train__freeze=freeze)
    names = [n for n, _ in named_leaves(step.abstract_state.params)]
    trained = [n for n in names if not n.startswith(FROZEN[freeze])]
    assert step.leaf_names == tuple(trained) and 0 < len(trained) < len(names)
    held = sum(x.size for _, x in named_leaves(step.abstract_state.opt) if x.ndim)
    sizes = {n: x.size for n, x in named_leaves(step.abstract_state.params)}
    assert held == 2 * sum(sizes[n] for n in trained)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data 2 x tensor 2", "pipe 2 x data 2", "streamed"])
@pytest.mark.parametrize("freeze", FROZEN)
def test_what_is_frozen_keeps_its_bits(freeze, mesh):
    lean = dict(optim__clip=0.0, train__freeze=freeze)
    step = step_of(**MESHES[mesh], **lean)
    first = dict(named_leaves(jax.device_get(step.storage.natural(step.init(0).params))))
    assert_near(gradients(step), {n: control()[0][n] for n in step.leaf_names})
    losses, _, last = run(step, 3)
    single, _, params = run(step_of(mesh__data=1, **lean), 3)
    np.testing.assert_allclose(losses, single, atol=LOSSES)
    for name, x in last.items():
        if name.startswith(FROZEN[freeze]):
            np.testing.assert_array_equal(x, first[name], err_msg=name)
        else:
            assert (x != first[name]).any(), name
            np.testing.assert_allclose(x, params[name], atol=1e-3, err_msg=name)


def test_context_parallelism_is_refused():
    with pytest.raises(UserError, match="mesh.context=2: the patches .*--mesh.context"):
        step_of(mesh__context=2, mesh__data=1)


@pytest.mark.aot
def test_the_compiled_h100_program_has_no_optimizer_state_of_what_is_frozen():
    """Its arguments are the parameters, moments of the trained ones, the step and the batch; and
    it computes the tower's forward pass alone."""
    used = {}
    for freeze in (None, "tower,projector"):
        cfg = run_config(
            mesh__data=2,
            train__dtype="bfloat16",
            train__attention="xla",
            train__remat="none",
            train__freeze=freeze,
        )
        step = make_train_step(cfg, cfg.mesh.build(aot.devices(1, 2)))
        program = aot.compile(step.step.lower(step.abstract_state, step.abstract_batch), QUICK)
        text, held = program.as_text(), step.abstract_state
        module = Module(text)
        used[freeze] = (
            program.memory_analysis().argument_size_in_bytes,
            module.flops_of(module.entry),
        )
        frozen = sum(x.size for n, x in named_leaves(held.params) if n.startswith(TOWER))
        arguments = [held.params, held.opt, held.step, step.abstract_batch]
        expected = sum(_bytes(x) for x in jax.tree.leaves(arguments))
        assert used[freeze][0] == pytest.approx(expected, rel=0.02)
    saved = used[None][0] - used["tower,projector"][0]
    assert saved == pytest.approx(2 * 4 * frozen / 2, rel=0.05)  # two moments, cut over two devices
    tower = MODEL.workload(16, S, "bfloat16", "train", P).towers[0].flops / 2
    assert used[None][1] - used["tower,projector"][1] == pytest.approx(2 * tower, rel=0.1)


def _bytes(x):
    return x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape)))


@pytest.mark.aot
@pytest.mark.slow
def test_the_plan_knows_the_memory_of_a_tower_by_its_patches():
    """The terms beside the compiled program's peak, of a model that is mostly tower.

    Measured: peaks of 1535 and 2163 MiB; the terms say 1583 and 2200.
    """
    model = VlmConfig(
        decoder=DecoderConfig(
            layers=4, width=512, heads=8, kv_heads=8, head_width=64, mlp=1024, vocab=512
        ),
        tower=VitConfig(layers=8, width=768, heads=12, mlp=3072),
        mrope="8,12,12",
    )
    base = VisionConfig(
        model=model,
        train=TrainConfig(global_batch=8, seq_len=512, dtype="bfloat16", attention="hopper"),
        mesh=MeshSpec(data=1),
    )
    peaks, bounds = [], []
    for patches in (512, 1536):
        data = dataclasses.replace(base.data, patches=patches)
        cfg = dataclasses.replace(base, data=data)
        mesh = cfg.mesh.build(aot.devices(1, 1))
        step = make_train_step(cfg, mesh)
        program = aot.compile(step.step.lower(step.abstract_state, step.abstract_batch), QUICK)
        peaks.append(program.memory_analysis().peak_memory_in_bytes)
        shape = step_shape(cfg, dict(mesh.shape), fused_attention=True)
        bounds.append(memory.bound(memory.terms(shape)))
        assert bounds[-1] == pytest.approx(peaks[-1], rel=0.1)
    assert bounds[1] - bounds[0] == pytest.approx(peaks[1] - peaks[0], rel=0.1)
