"""Rivals from PyTorch, which are timed on the inputs of a JAX program.

A folder's bench.py lists them (`torch_sides`). PyTorch is imported when one of them runs and may be
missing: then, or where a kernel of PyTorch cannot take a case, an exception says why. JAX draws the
inputs as for our kernels and hands them over without a copy (dlpack); results go back the same way
and are compared with plain JAX before anything is timed. Both libraries must take GPU memory only
as they need it: XLA_PYTHON_CLIENT_PREALLOCATE=false.

A launch calls the function on several inputs, as in bench.py, from one CUDA graph where PyTorch can
capture one, so that no kernel waits for Python. The clock is CUPTI, as for a JAX program, with CUDA
events beside it; where CUPTI does not work, the events.

Legend: B sequences, S their length, H query heads, G groups, K head width or contracted, T tokens,
M rows, N columns.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench

EVENTS = "events"
CLOSE = 0.02  # relative to a result's size (chosen: 16-bit results differ by less than 0.01)
AHEAD_CYCLES = 4_000_000  # that the GPU waits while Python queues launches (chosen: about 2 ms)
Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Rival:
    """A function of tensors, the same in plain JAX, and the abstract arguments of both."""

    function: Function
    twin: Function
    like: Sequence[jax.ShapeDtypeStruct]


# ---- what rivals compute


def sdpa(backend: str, causal: bool) -> Function:
    """scaled_dot_product_attention of (B, S, H, K); backend: a name of SDPBackend."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        from torch.nn import attention, functional

        rows = (x.transpose(1, 2) for x in (q, k, v))
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            out = functional.scaled_dot_product_attention(
                *rows, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
            )
        return out.transpose(1, 2)

    return attend


def varlen(lengths: Sequence[int], causal: bool) -> Function:
    """PyTorch's FlashAttention of packed (T, H, K); 0 in the rows past the sum of the lengths."""
    starts = constant(np.cumsum([0, *lengths], dtype=np.int32))
    live, longest = sum(lengths), max(lengths)

    @functools.cache
    def asked(grouped: bool) -> dict[str, Any]:
        import inspect

        from torch.nn.attention.varlen import varlen_attn

        options: dict[str, Any] = {"window_size": (-1, 0 if causal else -1)}
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # PyTorch 2.12
            options["enable_gqa"] = grouped
        return options

    def attend(q: Any, k: Any, v: Any) -> Any:
        import torch
        from torch.nn.attention.varlen import varlen_attn

        at, rows = starts(q.device), (x[:live] for x in (q, k, v))
        out = varlen_attn(*rows, at, at, longest, longest, **asked(q.shape[1] != k.shape[1]))
        dead = q.shape[0] - live
        return torch.cat([out, out.new_zeros(dead, *out.shape[1:])]) if dead else out

    return attend


def norm(
    centred: bool, added: bool, biased: bool, eps: float, places: np.ndarray | None, rows: int
) -> Function:
    """(y, h) with h = x + bias + residual and y its norm, by torch.compile; float32 inside.

    Takes x, scale and, where they are wanted, residual, offset and bias. places: of `rows` rows,
    those of the live tokens, others being 0; then y is the only result. None: tokens stay.
    """
    spots = None if places is None else constant(np.asarray(places, np.int64))

    @compiled
    def run(x: Any, scale: Any, residual: Any, offset: Any, bias: Any, at: Any) -> Any:
        from torch.nn import functional

        h, size = x.float(), (x.shape[-1],)
        h = h if bias is None else h + bias
        h = h if residual is None else h + residual.float()
        if centred:
            y = functional.layer_norm(h, size, scale, offset, eps)
        else:
            y = functional.rms_norm(h, size, scale, eps)
        if at is None:
            return y.to(x.dtype), x if residual is None and bias is None else h.to(x.dtype)
        padded = x.new_zeros(rows, x.shape[-1])
        return padded.index_copy(0, at, y[: at.shape[0]].to(x.dtype))

    def call(x: Any, scale: Any, *operands: Any) -> Any:
        left = list(operands)
        more = [left.pop(0) if present else None for present in (added, centred, biased)]
        return run(x, scale, *more, spots and spots(x.device))

    return call


def gemm(activation: str | None, biased: bool, added: bool) -> Function:
    """activation(x w + bias) + residual: cuBLAS, and what torch.compile makes of the rest."""

    @compiled
    def run(x: Any, w: Any, bias: Any, residual: Any) -> Any:
        import torch
        from torch.nn import functional

        y = torch.matmul(x, w).float()
        y = y if bias is None else y + bias
        if activation == "silu":
            y = functional.silu(y)
        elif activation is not None:
            y = functional.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
        y = y if residual is None else y + residual.float()
        return y.to(x.dtype)

    def call(x: Any, w: Any, *operands: Any) -> Any:
        left = list(operands)
        return run(x, w, *(left.pop(0) if present else None for present in (biased, added)))

    return call


def matmul(x: Any, w: Any) -> Any:
    """cuBLAS."""
    import torch

    return torch.matmul(x, w)


def grouped(sizes: np.ndarray) -> Function:
    """torch._grouped_mm of lhs (M, K) and rhs (G, K, N); sizes: rows of each group."""
    rows_of_groups = constant(np.asarray(sizes, np.int32))

    def product(lhs: Any, rhs: Any) -> Any:
        import torch

        offsets = rows_of_groups(lhs.device).cumsum(0, dtype=torch.int32)
        return torch._grouped_mm(lhs, rhs, offs=offsets)

    return product


def constant(values: np.ndarray) -> Callable[[Any], Any]:
    """Returns a function of a device that copies an array there once, as a CUDA graph cannot."""

    @functools.cache
    def on(device: Any) -> Any:
        import torch

        return torch.from_numpy(values).to(device)

    return on


def compiled(function: Function) -> Function:
    """torch.compile's program of a function, made by the first call."""

    @functools.cache
    def made() -> Function:
        import torch
        import torch._inductor.config

        torch._inductor.config.compile_threads = 1  # a pool would outlive a process that is killed
        return torch.compile(function, dynamic=False, fullgraph=True)

    return lambda *args: made()(*args)


# ---- between JAX and PyTorch


def version() -> str:
    """PyTorch's, which is imported here if it was not before.

    Raises: ImportError without PyTorch; NotImplementedError where it does not see JAX's GPU.
    """
    import torch

    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        raise NotImplementedError(f"PyTorch {torch.__version__} finds no GPU")
    return torch.__version__


def tensors(arrays: Any) -> Any:
    """Returns a tree of arrays as tensors that share their memory."""
    import torch

    return jax.tree.map(torch.from_dlpack, jax.block_until_ready(arrays))


def arrays(results: Any) -> list[jax.Array]:
    """Returns the tensors of a result, or of several, as arrays."""
    several = results if isinstance(results, tuple | list) else (results,)
    return [jnp.from_dlpack(x.detach().contiguous()) for x in several]


def with_gradients(function: Function) -> Function:
    """Returns (cotangents, arguments) -> results, then gradients, as from jax.vjp."""

    def both(cotangents: Any, *args: Any) -> Any:
        import torch

        leaves = [x.detach().requires_grad_() for x in args]
        out = function(*leaves)
        results = out if isinstance(out, tuple) else (out,)
        cotangent_list = cotangents if isinstance(cotangents, tuple | list) else (cotangents,)
        return *results, *torch.autograd.grad(results, leaves, cotangent_list)

    return both


def compare(results: Sequence[jax.Array], want: Any) -> float:
    """Returns the largest distance of a result from plain JAX's, relative to that one's size.

    Raises: ValueError when it is no 16-bit rounding, for then the two do not compute the same.
    """
    worst = 0.0
    for number, (one, other) in enumerate(zip(results, jax.tree.leaves(want), strict=True)):
        if one.shape != other.shape:
            raise ValueError(f"result {number} has the shape {one.shape}, not {other.shape}")
        one, other = (x.astype(jnp.float32) for x in (one, other))
        apart = float(jnp.linalg.norm(one - other) / jnp.linalg.norm(other))
        if not apart <= CLOSE:
            raise ValueError(f"result {number} differs from plain JAX by {apart:.3f} of its size")
        worst = max(worst, apart)
    return worst


# ---- time


class Program:
    """A function on several inputs: `launch` queues all calls, a call waits for them as well."""

    def __init__(self, launch: Callable[[], Any], wait: Callable[[], Any], how: str):
        """how: 'graph', or 'calls' from Python."""
        self.launch, self.how, self._wait = launch, how, wait

    def __call__(self, *_: Any) -> None:
        """Arguments are those that it was made for."""
        self.launch()
        self._wait()


def program(function: Function, inputs: Sequence[tuple[Any, ...]]) -> Program:
    """Returns the program of these inputs, a CUDA graph where one can be captured."""
    import torch

    def calls() -> list[Any]:
        return [function(*args) for args in inputs]  # all are kept: results do not share memory

    if not inputs[0][-1].is_cuda:
        return Program(calls, lambda: None, "calls")
    wait, side = torch.cuda.synchronize, torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries make their workspaces, which a graph cannot
        calls()
    wait()
    graph = torch.cuda.CUDAGraph()
    try:
        # JAX's threads use CUDA meanwhile, which would end a capture in the default mode.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = calls()
    except Exception:
        wait()  # raises where the GPU cannot be used any more
        return Program(calls, wait, "calls")

    def replay() -> Any:
        graph.replay()
        return results

    return Program(replay, wait, "graph")


def events(program: Any, args: Sequence[Any], launches: int) -> bench.Samples:
    """Returns the seconds of each launch of a Program by CUDA events, the next queued behind it."""
    import torch

    program(*args)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(launches + 1)]
    torch.cuda._sleep(AHEAD_CYCLES)
    marks[0].record()
    for mark in marks[1:]:
        program.launch()
        mark.record()
    torch.cuda.synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    return EVENTS, [one.elapsed_time(other) / 1e3 for one, other in pairs]


def clock(program: Program, args: Sequence[Any], launches: int) -> bench.Samples:
    """CUPTI's, as for a JAX program; where it does not work, that of the events."""
    return bench.device_clock(program, args, launches, fallback=events)


def release() -> None:
    """Gives the memory of freed tensors back to the GPU, for JAX."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
