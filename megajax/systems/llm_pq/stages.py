"""One stage of a pipeline: some layers with their weights and pages, on the mesh of one device.

A stage has one program for each number of tokens that a call may have. The first stage begins with
the embedding; the last one ends with the head and samples. Stages pass on the residual stream.

Legend: as serving/programs.py.
"""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as PS

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.packed import LayerRuns, PackedWeight, runs_of
from megajax.core.tree import Tree
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.quant import Format, quantize_model
from megajax.serving import forward as forward_
from megajax.serving.draw import Rules
from megajax.serving.forward import Forward
from megajax.serving.programs import DRAWN, Laid, Programs, State

Array = jax.Array
Wrap = Callable[[int, Callable], Callable]  # (stage, what it computes) -> what it computes instead
POLL_S = 2e-4  # between two looks at whether an array is ready, where a wait has an end
GRACE_S = 5.0  # for the thread of a failed stage to end


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a stage. stage: its number. device: its number in the placement. start, stop:
    first layer and one past the last. last: whether it is the last stage."""

    stage: int
    device: int
    start: int
    stop: int
    last: bool

    def __str__(self) -> str:
        """Returns its name for messages."""
        count = self.stop - self.start
        layers = f"layer {self.start}" if count == 1 else f"layers {self.start} to {self.stop - 1}"
        return f"stage {self.stage} (device {self.device}, {layers})"


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Shapes of the arrays that a stage holds. slots: their number S. budget: most tokens of a
    call. pool: pages of a layer, tokens of a page, and M."""

    slots: int
    budget: int
    pool: tuple[int, int, int]


class NoAnswerError(TimeoutError):
    """A result was not ready in time, unlike a TimeoutError that a stage's program raises."""


class StageError(RuntimeError):
    """A stage died (its program, its device or its process) or did not answer in time.

    Attributes: stage: its number in the pipeline. device: as in the placement. layers: (first,
    behind the last). The cause is chained.
    """

    def __init__(self, place: Place, cause: BaseException):
        """cause: what it died of."""
        self.place, self.stage, self.device = place, place.stage, place.device
        self.layers = place.start, place.stop
        lines = str(cause).strip().splitlines() or ["no reason given"]
        what = lines[-1 if "Traceback" in lines[0] else 0]  # of a callback's error the end
        what = f"died: {type(cause).__name__}: {what}"
        if isinstance(cause, NoAnswerError):
            what = "does not answer (timeout_s)"
        super().__init__(f"{place} {what}; call restart() and give the requests again")


def weights_of(cfg: DecoderConfig, params: Tree, place: Place, stack: str, layers: Tree) -> Tree:
    """Returns the parameters of a stage. stack: name of the layers' member. layers: its part."""
    first, last = decoder.ends(cfg)
    names = (first if place.start == 0 else set()) | (last if place.last else set())
    return {name: params[name] for name in sorted(names)} | {stack: layers}


def mesh_of(devices: Any) -> Mesh:
    """Returns the mesh of a stage from a device, or from several, which are tensor ranks."""
    if isinstance(devices, Mesh):
        return devices
    if not isinstance(devices, Sequence):
        return MeshSpec(data=1).build([devices])
    return MeshSpec(tensor=len(devices)).build(list(devices))


class _StagePrograms(Programs):
    """The programs of a stage. Its `Forward` is of a model with the stage's layers only."""

    def __init__(self, forward: Forward, place: Place, shapes: Shapes, wrap: Wrap | None):
        self._first, self.draws = place.start == 0, place.last
        super().__init__(forward, **dataclasses.asdict(shapes), exact=False, steps=1)
        local = wrap(place.stage, self._local_stage) if wrap else self._local_stage
        self._stage = self._program(local, DRAWN if self.draws else PS())

    @property
    def compiled(self) -> int:
        """Programs compiled so far."""
        return self._stage._cache_size() + super().compiled

    def run(self, params: Tree, x: Any, laid: Laid) -> Any:
        """Returns the residual stream (1, T, D) after the stage's layers, or what was drawn.

        x: the residual stream of the stage before; None at the first.
        """
        with jax.set_mesh(self._forward.mesh):
            if not self._first:
                x = self._everyone(x)  # from mesh to mesh
            out, self.state = self._stage(params, self.state, None if self._first else x, *laid)
            return out

    def _local_stage(
        self,
        params: Tree,
        state: State,
        x: Any,
        tokens: forward_.Tokens,
        rows_B: Array,
        slot_B: Array,
        rules: Rules,
    ) -> tuple[Any, State]:
        forward = self._forward
        x = forward.enter(params, tokens) if self._first else x
        x, pages = forward.through(params, state.pages, tokens, x)
        state = dataclasses.replace(state, pages=pages)
        if not self.draws:
            return x, state
        return self._local_drawn(state, forward.leave(params, x, rows_B), slot_B, rules)


class Stage:
    """A stage on its mesh. Not thread-safe: one thread, or one process, has it."""

    def __init__(
        self,
        cfg: DecoderConfig,
        place: Place,
        weights: Tree,
        devices: Any,
        dtype: str,
        wrap: Wrap | None = None,
    ):
        """Places its weights. cfg: that of the complete model. devices: as `mesh_of` takes them."""
        part = cfg.part(place.start, place.stop)
        self._forward = Forward(part, mesh_of(devices), dtype=dtype)
        self._weights = self._forward.place(weights, cast=True)
        self._place, self._wrap = place, wrap
        self._programs: Any = None  # _StagePrograms, from `hold` on
        self._shapes: Shapes | None = None

    def hold(self, shapes: Shapes) -> None:
        """Allocates new, empty pages of these shapes."""
        if self._shapes == shapes:
            self._programs.free()
            self._programs.hold()
            return
        self._programs = None  # its memory first
        self._programs = _StagePrograms(self._forward, self._place, shapes, self._wrap)
        self._shapes = shapes

    def step(self, x: Any, laid: Laid) -> Any:
        """Starts the stage's part of a call; returns as `_StagePrograms.run`."""
        return self._programs.run(self._weights, x, laid)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """See Programs."""
        self._programs.copy_pages(copies)

    def set_changes(self, *args: Any) -> None:
        """See Programs; of the last stage."""
        self._programs.set_changes(*args)

    def set_masks(self, *args: Any) -> None:
        """See Programs; of the last stage."""
        self._programs.set_masks(*args)

    def compiled(self) -> int:
        """Programs compiled so far."""
        return self._programs.compiled if self._programs else 0

    def check(self) -> None:
        """Waits for all that was started. Raises: what a program did."""
        jax.block_until_ready((self._weights, self._programs and self._programs.state))


class Guard:
    """Calls a stage, and refuses all calls after a failure, because the state is lost then."""

    def __init__(self, build: Callable[[], Stage]):
        """build: makes the stage."""
        self._build = build
        self._stage: Stage | None = None
        self.failure: BaseException | None = None

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the stage. Raises: what it does, or did before."""
        if self.failure is not None:
            raise self.failure
        try:
            self._stage = self._stage or self._build()
            return getattr(self._stage, method)(*args)
        except BaseException as error:
            self.failure = error
            raise


class LocalStage:
    """A stage of this process in a thread of its own, which starts what it is sent, in this order.

    Each stage has a thread, because on CPUs a program runs in the thread that starts it. The thread
    is a daemon: a program that never ends must not keep the process alive.
    """

    def __init__(self, *args: Any):
        """args: the arguments of Stage, which the thread makes."""
        self._guard = Guard(lambda: Stage(*args))
        self._sent: queue.SimpleQueue[tuple[Future, str, tuple] | None] = queue.SimpleQueue()
        self._open: set[Future] = set()  # results to come
        self.failed = False  # then it is to be replaced
        name = f"stage-{args[1].stage}"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        self.send("check")  # makes it

    def send(self, method: str, *args: Any) -> Future:
        """Calls a method of the stage after what was sent before; returns a future of its result.

        args: futures among them are waited for; if one of them failed, the stage does nothing.
        """
        result: Future = Future()
        self._open.add(result)
        result.add_done_callback(self._open.discard)
        self._sent.put((result, method, args))
        return result

    def _serve(self) -> None:
        while (sent := self._sent.get()) is not None:
            self._answer(*sent)
            del sent  # its arrays, before the next call comes

    def _answer(self, result: Future, method: str, args: tuple) -> None:
        try:
            try:
                args = tuple(x.result() if isinstance(x, Future) else x for x in args)
                result.set_result(self._guard.call(method, *args))
            except InvalidStateError:
                raise
            except BaseException as error:
                result.set_exception(error)
        except InvalidStateError:
            pass  # `close` has given it up

    @staticmethod
    def wait(result: Future, timeout_s: float | None = None) -> Any:
        """Returns the result of a future of `send`, when it is ready. Raises: the error of the
        stage; NoAnswerError if the result is not ready within `timeout_s` (None: waits for
        ever)."""
        if timeout_s is None:
            return jax.block_until_ready(result.result())
        end = time.monotonic() + timeout_s
        if not futures.wait([result], timeout_s).done:
            raise NoAnswerError
        value = result.result()
        arrays: list[Any] = [x for x in jax.tree.leaves(value) if hasattr(x, "is_ready")]
        while not all(x.is_ready() for x in arrays):
            if time.monotonic() > end:
                raise NoAnswerError
            time.sleep(POLL_S)
        return jax.block_until_ready(value)  # raises what its program did

    def close(self) -> None:
        """Ends the thread after what was sent. If the stage failed, this waits a few seconds at
        most, and then sets an error as the result of every open future, so that no other stage
        waits for one."""
        self._sent.put(None)
        self._thread.join(GRACE_S if self.failed else None)
        for result in list(self._open):
            try:
                result.set_exception(RuntimeError("the stage was closed"))
            except InvalidStateError:
                pass  # it came just now


# ---- weights in few bits
#
# The weights of a runtime, in the bits that a placement gives their layers.


GROUP, DENSE = 128, 16  # (LLM-PQ's kernels) inputs that share a scale; bits of what stays as it is


def _is_packed(x: Any) -> bool:
    return isinstance(x, PackedWeight)


def _packed(tree: Tree) -> list[Any]:
    return [w for w in jax.tree.leaves(tree, is_leaf=_is_packed) if _is_packed(w)]


def in_bits_of(params: Tree, cfg: DecoderConfig, bits_I: Sequence[int]) -> Tree:
    """Returns the parameters in the placement's bits. Raises: UserError where they have others."""
    if not _packed(params):
        if all(bits >= DENSE for bits in bits_I):
            return params
        formats = [
            None if bits >= DENSE else Format(bits, GROUP, 0, scale_dtype="float16")
            for bits in bits_I
        ]
        return quantize_model(params, cfg, formats)
    runs: LayerRuns = runs_of(params[decoder.parts(cfg).stack], cfg.layers)
    for stack, start, stop in zip(runs.stacks, runs.starts, runs.stops, strict=True):
        widths = {w.weight.format.bits for w in _packed(stack) if hasattr(w, "weight")} or {DENSE}
        for layer in range(start, stop):
            planned = min(bits_I[layer], DENSE)
            if widths != {planned}:
                raise UserError(
                    f"layer {layer} of the parameters has {sorted(widths)} bits, and {planned} in "
                    "the placement; quantize the dense parameters by it"
                )
    return params


def one_rank(params: Tree, ranks: Sequence[int]) -> None:
    """Refuses quantized weights on tensor ranks. Raises: UserError."""
    if _packed(params) and max(ranks) > 1:
        raise UserError(
            "quantized matrices are not cut over tensor ranks yet; give each stage one device"
        )
