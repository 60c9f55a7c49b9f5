"""The graph of a step against operations, the terms of memory, and a compiled program's bytes."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS, ETHERNET
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves
from megajax.cost import memory
from megajax.cost.base import Op
from megajax.cost.kernels import Matmul, Rowwise
from megajax.cost.roofline import Roofline
from megajax.models import decoder, encoder
from megajax.models.decoder_config import DecoderConfig
from megajax.models.encoder_config import EncoderConfig
from megajax.models.parts import is_layered
from megajax.quant import products as quant_products
from megajax.systems.qsync import Precisions, allocate, model, replay
from megajax.training.config import Config, TrainConfig
from megajax.training.finetune import FinetuneConfig
from megajax.training.presets import PRESETS
from megajax.training.shape import step_shape

ROWS, DEVICES = 4, 8
T4, V100, L4 = (CARDS[name] for name in ("T4", "V100", "L4"))


def run(name: str, **train):
    """A run of a decoder's preset, or of an encoder."""
    train = {"global_batch": ROWS * DEVICES, "seq_len": 64} | train
    if name.startswith("encoder"):
        shape = EncoderConfig(layers=3, repeats=2 if name == "encoder_shared" else 1)
        return FinetuneConfig(model=shape, train=TrainConfig(**train))
    if name == "parallel":
        return Config(model=DecoderConfig(layers=2, block="parallel"), train=TrainConfig(**train))
    cfg = PRESETS[name]()
    return dataclasses.replace(cfg, mesh=MeshSpec(), train=TrainConfig(**train))


def graph(cfg, card=T4, rows=ROWS, **options):
    is_strong = options.pop("is_strong", False)
    job = model.UnlikeJob(cfg, DEVICES, ETHERNET, **options)
    return model.step_graph(job, card, rows, is_strong=is_strong)


def uniform(graph, precision):
    """One precision, or full precision where a product has no other."""
    names = model.products(graph)
    full = list(graph.by_name[names[0]].saved_bytes)[-1]
    return {n: precision if precision in graph.by_name[n].omega else full for n in names}


@pytest.mark.parametrize("name", ["nano", "parallel", "qwen3_0p6b", "encoder", "gpt2"])
def test_products_are_the_matrices_of_the_model(name):
    cfg = run(name)
    parts = (encoder if name == "encoder" else decoder).parts(cfg.model)
    words = dict(named_leaves(parts.axes, lambda x: isinstance(x, tuple)))
    stacked = [
        path
        for path, leaf in named_leaves(parts.abstract)
        if is_layered(words[path]) and len(leaf.shape) > 2 and "bias" not in path
    ]
    expected = {path.replace(".", f".{i}.", 1) for path in stacked for i in range(parts.layers)}
    assert set(model.products(graph(cfg))) == expected


def test_nano_costs_what_its_operations_do():
    cfg, made = run("nano", remat="dots"), Roofline()
    step = graph(cfg)
    S, D, F, T = 64, 128, 384, ROWS * 64
    cost = functools.partial(made.op_time, device=T4)

    def op(kernel, dtypes=("float32",), part="input"):
        return cost(Op(part, kernel, dtypes=dtypes))[0]

    square, wide, narrow = (op(Matmul(T, *n)) for n in ((D, D), (D, F), (F, D)))
    norm, activation = op(Rowwise("norm", T, D)), op(Rowwise("activation", T, F, 2))
    (attention,) = (o for o in cfg.model.stack.ops(ROWS, S, S, "float32") if o.part == "attention")
    attend, head = cost(attention)[0], op(Matmul(T, D, 512), part="head")
    layer = 4 * square + 2 * wide + narrow + 2 * norm + activation + attend
    forward = sum(node.forward_s["float32"] for node in step.nodes)
    assert forward == pytest.approx(4 * layer + head, rel=1e-12)
    # With 'dots', norms and activations are computed again, and half of attention.
    again = 2 * norm + activation + attend / 2
    backward = sum(node.backward_s["float32"] for node in step.nodes)
    assert backward == pytest.approx(4 * (2 * layer + again) + 2 * head, rel=1e-12)
    # int8: the operands' codes; the weight is cast too, and gradients meet bfloat16, which a T4
    # computes in float32.
    node = step.by_name["blocks.2.mlp.down"]
    cast = op(Rowwise("quantize", F, D, 2))
    int8 = op(Matmul(T, F, D), ("int8", "int8", "float32")) + cast
    assert node.forward_s["int8"] == pytest.approx(int8, rel=1e-12)
    assert node.backward_s["int8"] == pytest.approx(2 * narrow, rel=1e-12)
    half = (op(Matmul(*n), ("float16", "float16", "float32")) for n in ((T, D, F), (F, T, D)))
    paper = graph(cfg, int8_backward="float16").by_name["blocks.2.mlp.down"]
    assert paper.backward_s["int8"] == pytest.approx(sum(half), rel=1e-12)


@pytest.mark.parametrize("remat", ["none", "dots", "outputs", "full"])
@pytest.mark.parametrize("name", ["nano", "parallel", "nano_moe", "encoder", "encoder_shared"])
def test_full_precision_saves_the_stash_of_the_memory_model(name, remat):
    cfg = run(name, remat=remat)
    step = graph(cfg, V100, is_strong=True)
    shape = step_shape(
        cfg, dict.fromkeys(("pipe", "node", "expert", "context", "tensor"), 1) | {"data": DEVICES}
    )
    saved = replay({"v100": step}, {"v100": uniform(step, "float32")}).memory["v100"]
    # The memory model leaves the results of norms out, which products of one input share.
    inputs = 1 if name == "parallel" or name == "nano_moe" else 2
    layers = cfg.model.layers * getattr(cfg.model, "repeats", 1)
    norms = inputs * layers * ROWS * 64 * 128 * 4 if remat == "none" else 0
    assert saved - norms == pytest.approx(memory.terms(shape)["stash"], rel=1e-12)


def test_narrow_products_save_codes_of_their_own_and_wide_ones_share():
    step = graph(run("nano", remat="none"))
    T, D = ROWS * 64, 128
    names = model.products(step)

    def saved(**chosen):
        row = uniform(step, "float32") | {f"blocks.1.attention.{n}": p for n, p in chosen.items()}
        return replay({"t4": step}, {"t4": row}).memory["t4"]

    weight, shared = D * D * 4, T * D * 4
    codes = T * D + D * D
    assert len(names) == 28
    assert saved(query="int8") == saved() - weight + codes
    all_three = saved(query="int8", key="int8", value="int8")
    assert all_three == saved() - 3 * weight - shared + 3 * codes
    for remat in ("outputs", "full"):
        step = graph(run("nano", remat=remat))
        two = [
            replay({"t4": step}, {"t4": uniform(step, p)}).memory["t4"] for p in ("int8", "float32")
        ]
        assert two[0] == two[1]


def test_saved_values_are_those_of_a_compiled_scan():
    """XLA's own count on this CPU, for three products of one input: bytes a layer and token."""
    T, D = 512, 64

    def needed(layers, precision):
        def layer(x, w):
            y = [
                jax.numpy.tanh(quant_products.matmul(x, w[i], precision=precision))
                for i in range(3)
            ]
            return sum(y), None

        def loss(w, x):
            return (jax.lax.scan(layer, x, w)[0] ** 2).sum()

        w = (jax.ShapeDtypeStruct((layers, D, D), "float32"),) * 3
        x = jax.ShapeDtypeStruct((T, D), "float32")
        program = jax.jit(jax.grad(loss)).lower(w, x).compile()
        return program.memory_analysis().temp_size_in_bytes

    def slope(precision):
        return (needed(24, precision) - needed(8, precision)) / 16

    # One shared input of float32; three arrays of codes, and those of the weights.
    expected = 3 * (T * D + D * D) - 4 * T * D
    assert slope("int8") - slope("float32") == pytest.approx(expected, abs=0.01 * 4 * T * D)


def test_options_are_what_the_card_computes_in():
    cfg = run("nano")
    name = "blocks.0.attention.query"
    assert set(graph(cfg, T4).by_name[name].omega) == {"int8", "float16", "float32"}
    assert set(graph(cfg, V100).by_name[name].omega) == {"float16", "float32"}
    every = {"int8", "fp8", "float16", "bfloat16", "float32"}
    assert set(graph(cfg, L4).by_name[name].omega) == every
    assert set(graph(cfg, T4, is_strong=True).by_name[name].omega) == {"float32"}
    wide = run("nano", dtype="bfloat16")
    assert set(graph(wide, L4).by_name[name].omega) == {"int8", "fp8", "float16", "bfloat16"}
    with pytest.raises(UserError, match="--train.dtype"):
        graph(wide, T4)


def test_a_strong_kind_stays_full_and_more_memory_never_makes_a_plan_worse():
    cfg = run("parallel", remat="none", seq_len=512)
    graphs = {"v100": graph(cfg, V100, is_strong=True), "t4": graph(cfg, T4)}
    narrow = replay(graphs, {k: uniform(g, "int8") for k, g in graphs.items()}).memory["t4"]
    full = replay(graphs, {k: uniform(g, "float32") for k, g in graphs.items()}).memory["t4"]
    assert narrow < full
    plans = []
    for share in (0.05, 0.6, 1.0):
        limit = {"t4": narrow + share * (full - narrow)}
        plan = allocate(graphs, {"v100": 2, "t4": 2}, memory=limit, method="exact")
        assert {plan["v100"][n] for n in model.products(graphs["v100"])} == {"float32"}
        errors = sum(graphs["t4"].by_name[n].omega[p] for n, p in plan["t4"].items())
        plans.append((replay(graphs, plan).step_s, errors))
    # A shorter step comes first: with more memory it may have more errors.
    for (step_s, errors), (next_s, next_errors) in itertools.pairwise(plans):
        assert next_s <= step_s * (1 + 1e-9)
        assert next_s < step_s * (1 - 1e-9) or next_errors <= errors
    assert plans[0][1] > plans[-1][1]


def test_omega_weighs_depth_and_falls_with_bits():
    made = graph(run("nano"), L4).by_name
    first, last = (made[f"blocks.{i}.attention.query"].omega for i in (0, 3))
    assert (
        first["fp8"] > first["int8"] > first["bfloat16"] > first["float16"] > first["float32"] == 0
    )
    forward, backward = model.assumed_errors("int8", ROWS * 64 * 128)
    assert first["int8"] == pytest.approx(4 * forward + 1 * backward)
    assert last["int8"] == pytest.approx(1 * forward + 4 * backward)
    # Rounding float16 to nearest, by brute force: the mean square of the relative error.
    x = np.random.default_rng(0).standard_normal(200_000)
    error = ((x.astype(np.float16) - x) ** 2).mean() / (x**2).mean()
    assert model.assumed_errors("float16", 1)[0] / 2 == pytest.approx(error, rel=0.1)


def test_buckets_hold_all_gradients_once():
    cfg = run("nano")
    one, many = graph(cfg), graph(cfg, buckets="layer")
    (names, seconds), *more = one.buckets
    assert names == ("embed",) and not more and len(many.buckets) == 5
    # A ring of 8 hosts, both ways, at 12.5 GB/s: 3 messages of 14 us each way, and the call.
    params = cfg.workload(1).params
    assert seconds == pytest.approx(8.4e-6 + 2 * (3 * 14e-6 + 7 / 8 * 4 * params / 12.5e9))
    sent = sum(s for _, s in many.buckets) - 4 * (8.4e-6 + 6 * 14e-6)
    assert sent == pytest.approx(seconds, rel=1e-9)
    names = {n for bucket, _ in many.buckets for n in bucket}
    assert set(model.products(many)) < names


def test_what_cannot_be_planned_is_refused():
    cfg = run("nano")
    with pytest.raises(UserError, match="--mesh.tensor"):
        graph(dataclasses.replace(cfg, mesh=MeshSpec(tensor=2)))
    with pytest.raises(UserError, match=r"profile.*blocks\.0\.attention\.query"):
        graph(cfg, omega={})


def test_the_plan_loads(tmp_path):
    step = graph(run("nano"))
    plan = allocate({"t4": step}, {"t4": 2}, memory={})
    chosen = Precisions({"t4": {n: plan["t4"][n] for n in model.products(step)}})
    chosen.save(tmp_path / "precisions.json")
    loaded = Precisions.load(tmp_path / "precisions.json")
    assert loaded == chosen and replay({"t4": step}, loaded) == replay({"t4": step}, plan)
