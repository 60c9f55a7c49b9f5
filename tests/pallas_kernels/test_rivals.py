"""Rivals from PyTorch: their bookkeeping with a stand-in, their results where PyTorch is there."""

import contextlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import gpu_check

from scripts.gpu_session import kernels as gpu_kernels

sys.path.pop(0)

from pallas_kernels import bench, rivals
from pallas_kernels.attention import bench as attention
from pallas_kernels.attention.cases import Case as Attention
from pallas_kernels.gemm import bench as gemm
from pallas_kernels.gemm.cases import Case as Gemm
from pallas_kernels.grouped import bench as grouped
from pallas_kernels.norm import bench as norm
from pallas_kernels.norm.cases import Case as Norm

SQUARE = Gemm("square", 64, 64, 64)


class Tensor:
    """A stand-in for torch.Tensor."""

    is_cuda = False

    def __init__(self, array):
        self.array = array

    def detach(self):
        return self

    contiguous = detach

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.fixture
def torch(monkeypatch):
    """A stand-in for PyTorch on a CPU; `off`: by how much its products are wrong."""
    module = ModuleType("torch")
    module.__version__, module.off = "0.0", 1.0
    module.from_dlpack = Tensor
    module.matmul = lambda x, w: Tensor((x.array @ w.array * module.off).astype(x.array.dtype))
    module.cuda = SimpleNamespace(is_available=lambda: False, empty_cache=lambda: None)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def timed(module, case, direction=gpu_kernels.FORWARD, name=None):
    sides = module.torch_sides(case)
    side = gpu_kernels.TorchTimed(case, direction, sides[name or next(iter(sides))], True)
    side.prepare()
    return side.run()


def test_a_row_says_what_was_compared_and_how_it_was_timed(torch):
    row = timed(gemm, SQUARE)
    assert row["torch"] == "0.0" and row["clock"] == "wall" and row["launch"] == "calls"
    assert 0 <= row["relative_error"] <= rivals.CLOSE
    assert row["of_floor"] == pytest.approx(row["floor_s"] / row["median_s"])


def test_what_computes_something_else_is_not_timed(torch):
    torch.off = 1.05
    with pytest.raises(ValueError, match=r"result 0 differs from plain JAX by 0\.0[45]"):
        timed(gemm, SQUARE)


def test_why_there_is_no_rival(torch, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(NotImplementedError, match=r"PyTorch 0\.0 finds no GPU"):
        timed(gemm, SQUARE)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match="torch"):
        timed(gemm, SQUARE)


@pytest.mark.parametrize("folder", gpu_check.TORCH)
def test_every_case_has_a_side_of_pytorch_that_is_optional(folder):
    module = gpu_kernels.bench_of(folder)
    for direction in (gpu_kernels.FORWARD, gpu_kernels.BOTH):
        items = gpu_kernels.torch_times(folder, direction, rehearsal=False)
        names = [item.name for item in items]
        assert len(set(names)) == len(names) and all(item.optional for item in items)
        sides = [i.about["implementation"] for i in items]
        assert sides.count(gpu_kernels.CONTROL) == 1
        assert {i.about["case"] for i in items} == {case.name for case in module.CASES}


class Cuda(SimpleNamespace):
    """A stand-in for torch.cuda: a graph's replay takes 2 ms of the GPU's time, a call 3."""

    def __init__(self, captures):
        self.now, self.log = 0.0, []

        class Graph:
            def replay(graph):
                self.log.append("replay")
                self.now += 2.0

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self_):
                self_.at = self.now

            def elapsed_time(self_, other):
                return other.at - self_.at

        def graph(made, capture_error_mode):
            assert capture_error_mode == "thread_local"
            if not captures:
                raise RuntimeError("operation not permitted when stream is capturing")
            return contextlib.nullcontext()

        super().__init__(
            CUDAGraph=Graph,
            Event=Event,
            graph=graph,
            _sleep=lambda cycles: None,
            synchronize=lambda: self.log.append("wait"),
            current_stream=lambda: None,
            Stream=lambda: SimpleNamespace(wait_stream=lambda _: None),
            stream=contextlib.nullcontext,
        )


@pytest.mark.parametrize("captures", [True, False])
def test_a_graph_where_it_can_be_captured_and_events_between_launches(torch, captures):
    torch.cuda = cuda = Cuda(captures)
    calls = []

    def function(x):
        calls.append(x)
        cuda.now += 3.0
        return x

    inputs = [(SimpleNamespace(is_cuda=True),) for _ in range(3)]
    program = rivals.program(function, inputs)
    assert program.how == ("graph" if captures else "calls")
    before = len(calls)
    name, seconds = rivals.events(program, (), 4)
    assert name == "events"
    # One launch is a replay, or a call for each input.
    assert seconds == pytest.approx([0.002 if captures else 0.009] * 4)
    assert len(calls) - before == (0 if captures else 15)
    assert cuda.log.count("replay") == (5 if captures else 0)


def test_the_events_stand_in_for_cupti(torch, monkeypatch):
    torch.cuda = Cuda(True)
    program = rivals.program(lambda x: x, [(SimpleNamespace(is_cuda=True),)])
    monkeypatch.setattr(bench.profiler, "mosaic_gpu_lib", None)
    assert rivals.clock(program, (), 3) == ("events", pytest.approx([0.002] * 3))


def test_a_graph_that_breaks_the_gpu_is_no_reason_to_go_on(torch):
    torch.cuda = Cuda(False)

    def wait():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    torch.cuda.synchronize = wait
    with pytest.raises(RuntimeError, match="illegal memory access"):
        rivals.program(lambda x: x, [(SimpleNamespace(is_cuda=True),)])


# ---- with PyTorch

SIDES = [
    (attention, Attention("rows", (64, 64), (4, 2), 32, True), "torch flash padded"),
    (attention, Attention("one", (96,), (2, 2), 64), "torch flash padded"),
    (attention, attention.TINY_CASE, "torch flash packed"),
    (gemm, SQUARE, "torch"),
    (gemm, Gemm("gelu", 64, 128, 64, "gelu", bias=True, residual=True), "torch"),
    (gemm, Gemm("silu", 64, 128, 64, "silu"), "torch"),
    (gemm, Gemm("tanh", 64, 128, 64, "gelu_tanh", residual=True), "torch"),
    (grouped, grouped.TINY_CASES[0], "torch grouped"),
    (norm, Norm("layer", 64, 128, bias=True), "torch compiled"),
    (norm, Norm("rms", 64, 128, centred=False), "torch compiled"),
    (norm, Norm("alone", 64, 128, added=False), "torch compiled"),
    (
        norm,
        Norm("unpacked", norm.CASES[-1].rows, 32, bias=True, padded_rows=16384),
        "torch compiled",
    ),
]


@pytest.fixture
def pytorch(monkeypatch):
    """PyTorch on a CPU, which has no packed attention: there, a loop over the segments."""
    pytest.importorskip("torch")
    from torch.nn.attention import varlen
    from torch.nn.functional import scaled_dot_product_attention

    def loop(q, k, v, starts, *others, window_size):
        import torch

        ends, longest, widest = others
        assert starts is ends and longest == widest == int(starts.diff().max())
        assert window_size[0] == -1
        segments = []
        for i, j in zip(starts.tolist(), starts.tolist()[1:], strict=False):
            rows = (x[i:j].transpose(0, 1)[None] for x in (q, k, v))
            causal = window_size[1] == 0
            out = scaled_dot_product_attention(*rows, is_causal=causal, enable_gqa=True)
            segments.append(out[0].transpose(0, 1))
        return torch.cat(segments)

    monkeypatch.setattr(varlen, "varlen_attn", loop)


@pytest.mark.filterwarnings("default")  # PyTorch's own
@pytest.mark.parametrize("direction", [gpu_kernels.FORWARD, gpu_kernels.BOTH])
@pytest.mark.parametrize(("module", "case", "name"), SIDES)
def test_pytorch_computes_the_same(pytorch, module, case, name, direction):
    row = timed(module, case, direction, name)
    assert row["relative_error"] <= rivals.CLOSE and row["clock"] == "wall"


def test_results_are_compared_one_by_one():
    one = jnp.asarray(np.arange(1.0, 5.0), jnp.float32)
    assert rivals.compare([one, one], (one, one)) == 0
    with pytest.raises(ValueError, match="result 1 differs"):
        rivals.compare([one, one * 1.1], (one, one))
    with pytest.raises(ValueError, match="result 0 differs from plain JAX by nan"):
        rivals.compare([one * np.nan], (one,))
    with pytest.raises(ValueError, match=r"result 0 has the shape \(2,\), not \(4,\)"):
        rivals.compare([one[:2]], (one,))
