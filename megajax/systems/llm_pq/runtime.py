"""Serving by a placement of LLM-PQ (arXiv 2403.01136): a pipeline of unlike stages.

Scheduler, sampler and answers are those of serving.Engine. The requests are split among several
engines of a few slots each, whose steps go through one chain of stages (stages.py): prompts in
calls of `prefill_batch` requests, answers in calls of `decode_batch`. When a call has left the last
stage, its tokens are read and the next call of these requests is sent to the first stage, while
other calls are still under way.

Legend: as serving/programs.py.
"""

import collections
import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from megajax.core.errors import UserError
from megajax.core.packed import slice_layers
from megajax.core.tree import Tree
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.models.parts import check_params
from megajax.serving import Engine, Output, SamplingParams, draw
from megajax.serving.draw import Drawn, Rules
from megajax.serving.engine import Tokenizer, check_bias, check_options, check_tokens
from megajax.serving.programs import Laying, Segment, fields
from megajax.systems.llm_pq.stages import (
    Guard,
    LocalStage,
    NoAnswerError,
    Place,
    Shapes,
    Stage,
    StageError,
    Wrap,
    in_bits_of,
    mesh_of,
    one_rank,
    weights_of,
)

# ---- pipeline of shared calls
#
# A pipeline sends the steps of many engines through one chain of stages, in shared calls. Each
# engine has a few slots and pages in every stage, and one step under way at a time. Steps of
# several engines share a call, as many as fill a micro-batch of the phase. So micro-batches of
# prefill and of decoding may have different sizes.


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one call.

    prefill, decode: most segments in each phase. tokens: most tokens of all segments together.
    timeout_s: longest wait for the result in seconds; None: no limit.
    """

    prefill: int
    decode: int
    tokens: int
    timeout_s: float | None = None


@dataclasses.dataclass(eq=False)
class Call:
    """Steps that run together. result: future of the last stage. drawn: its value once read."""

    decodes: bool
    segments: list[Segment] = dataclasses.field(default_factory=list)
    result: Any = None
    drawn: Drawn | None = None


@dataclasses.dataclass(frozen=True)
class Share:
    """An engine's part of a call: its rows."""

    call: Call
    rows: slice


class Pipeline:
    """A chain of stages, its slots, and the calls that go through it."""

    def __init__(
        self, stages: Sequence[Any], places: Sequence[Place], shapes: Shapes, limits: Limits
    ):
        """stages: as LocalStage, in the order of the pipeline. They take new pages."""
        self._stages, self._places, self._limits = stages, places, limits
        slots, width = shapes.slots, shapes.pool[2]
        self._laying = Laying(slots, shapes.budget, width)
        self._tables = np.zeros((slots, width), np.int32)
        self._rules = draw.plain_rules(slots)
        self._waiting: list[Call] = []
        self.to_all("hold", shapes)

    def to_all(self, method: str, *args: Any) -> None:
        """Calls a method of all stages; each stage does it after what it was sent before."""
        for stage in self._stages:
            stage.send(method, *args)

    def to_last(self, method: str, *args: Any) -> None:
        """Calls a method of the last stage, as `to_all` does."""
        self._stages[-1].send(method, *args)

    def set_slots(self, first: int, table_SM: np.ndarray, rules: Rules) -> None:
        """Sets the page tables and sampling rules of the slots from `first` on."""
        stop = first + len(table_SM)
        self._tables[first:stop] = table_SM
        for target, source in zip(fields(self._rules), fields(rules), strict=True):
            target[first:stop] = source

    def add(self, segments: Sequence[Segment]) -> Share:
        """Adds an engine's step to the next call, or to a new call if the step does not fit there.

        Nothing is sent before `flush`.
        """
        decodes = all(len(s.ids) == 1 for s in segments)
        call = self._waiting[-1] if self._waiting else None
        if call is None or call.decodes != decodes or not self._fits(call, segments):
            call = Call(decodes)
            self._waiting.append(call)
        first = len(call.segments)
        call.segments += segments
        return Share(call, slice(first, first + len(segments)))

    def _fits(self, call: Call, segments: Sequence[Segment]) -> bool:
        most = self._limits.decode if call.decodes else self._limits.prefill
        tokens = sum(len(s.ids) for s in (*call.segments, *segments))
        rows = len(call.segments) + len(segments)
        return rows <= most and tokens <= self._limits.tokens

    def flush(self) -> None:
        """Sends all waiting calls, in their order."""
        for call in self._waiting:
            laid = self._laying.step(call.segments, self._tables, self._rules)
            for stage in self._stages:
                call.result = stage.send("step", call.result, laid)
        self._waiting = []

    def read(self, share: Share) -> Drawn:
        """Waits for an engine's part of a call; returns NumPy arrays. Raises: StageError."""
        call = share.call
        if call.result is None and call.drawn is None:
            self.flush()
        if call.drawn is None:
            try:
                drawn = self._stages[-1].wait(call.result, self._limits.timeout_s)
            except Exception as error:
                check(self._stages, self._places, self._limits.timeout_s)
                if not isinstance(error, NoAnswerError):
                    raise
                drawn = self._stages[-1].wait(call.result)  # it came meanwhile: all have answered
            call.drawn = jax.tree.map(np.asarray, drawn)
            call.result = None
        return jax.tree.map(lambda x: x[share.rows], call.drawn)


def check(stages: Sequence[Any], places: Sequence[Place], timeout_s: float | None = None) -> None:
    """Waits until the stages have done everything that they were sent.

    Stages are checked in the pipeline's order, so a stage that only waits for an earlier one is not
    blamed.
    Raises: StageError for the first stage that died or does not answer within `timeout_s` seconds;
      a UserError of a stage unchanged.
    """
    results = [stage.send("check") for stage in stages]
    for stage, place, result in zip(stages, places, results, strict=True):
        try:
            stage.wait(result, timeout_s)
        except UserError:
            raise
        except Exception as error:
            stage.failed = True
            raise StageError(place, error) from error


class View:
    """One engine's view of the pipeline, with the interfaces of a backend and of its programs."""

    steps = 1  # tokens that a call decodes of each sequence
    cpu = False  # only an engine's defaults ask, and the runtime sets these
    replicas = 1

    def __init__(self, pipeline: Pipeline, slot: int, page: int):
        """slot: the first slot of the engine. page: the number before its first page."""
        self._pipeline, self._slot, self._page = pipeline, slot, page

    # ---- a backend

    def place(self, params: Any) -> tuple:
        """The stages have the weights."""
        return ()

    outline = place

    def default_pages(self, most: int, page_size: int) -> int:
        """The pipeline decides."""
        return most

    def programs(self, **shapes: Any) -> "View":
        """Returns itself."""
        return self

    # ---- programs

    def step(
        self,
        params: Any,
        segments: Sequence[Segment],
        table_SM: np.ndarray,
        rules: Rules,
        steps: int = 1,
    ) -> tuple[Share, list[int]]:
        """See Programs.step. The call waits for `Pipeline.flush`."""
        table_SM = np.where(table_SM > 0, table_SM + self._page, 0)
        self._pipeline.set_slots(self._slot, table_SM, rules)
        shifted = [dataclasses.replace(s, slot=s.slot + self._slot) for s in segments]
        return self._pipeline.add(shifted), list(range(len(shifted)))

    def read(self, drawn: Share) -> Drawn:
        """See Programs.read. Raises: StageError."""
        return self._pipeline.read(drawn)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """See Programs."""
        self._pipeline.to_all("copy_pages", [(a + self._page, b + self._page) for a, b in copies])

    def set_changes(self, slot: int, *rows: np.ndarray) -> None:
        """See Programs."""
        self._pipeline.to_last("set_changes", slot + self._slot, *rows)

    def set_masks(self, slots: Sequence[int], allowed_NW: np.ndarray) -> None:
        """See Programs."""
        self._pipeline.to_last("set_masks", [slot + self._slot for slot in slots], allowed_NW)


# ---- engines


class Placed(Protocol):
    """The interface of a placement (systems.llm_pq.Placement)."""

    @property
    def stages(self) -> Sequence[tuple[int, int, int]]: ...  # noqa: D102
    @property
    def bits(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def prefill_batch(self) -> int: ...  # noqa: D102
    @property
    def decode_batch(self) -> int: ...  # noqa: D102


@dataclasses.dataclass(frozen=True)
class _Room:
    """The sizes that the engines are made for. unit: slots of an engine. context: tokens of a
    sequence."""

    engines: int
    unit: int
    context: int


@dataclasses.dataclass(eq=False)
class _Request:
    """A prompt, and its answers so far."""

    number: int
    prompt: list[int]
    params: SamplingParams
    answers: list[list[int]]
    running: int  # answers that have not ended


class Runtime:
    """Serves sets of prompts on the stages of a placement. Not thread-safe."""

    def __init__(
        self,
        params: Tree,
        cfg: DecoderConfig,
        placement: Placed,
        devices: Sequence[Any],
        *,
        dtype: str = "bfloat16",
        page_size: int = 16,
        seed: int = 0,
        prefill_tokens: int | None = None,
        requests: int | None = None,
        tokenizer: Tokenizer | None = None,
        timeout_s: float | None = None,
        wrap: Wrap | None = None,
    ):
        """Splits the weights among the stages, quantizes them if they are dense, and places them.

        Args: params: dense, or of megajax.quant.quantize_model with the placement's bits. Dense
          weights are rounded to nearest in groups of 128; layers of 16 bits stay dense. The weights
          also stay in the memory of this process, for `restart`. devices: for each device of the
          placement a jax device, a list of them (tensor ranks of one stage), or a mesh. dtype: that
          of the computation and of the pages. page_size: tokens of a page. seed: the seed of
          sampling. prefill_tokens: most tokens of a prompt in one call; None: all of them.
          requests:
          most answers that run at the same time, except that all answers of one prompt start
          together; None: all of a call of `generate`, as the plan assumes. tokenizer: as in
          Engine. timeout_s: longest wait for the result of a call in seconds, after which the stage
          that does not answer counts as dead. Compilation is included, so give minutes; None: no
          limit. wrap: called with each stage's number and function while it is compiled, returns
          the function to run; for measurements and tests.
        Raises: UserError for a placement that does not match the model or the devices.
        """
        check_options("fast", page_size, prefill_tokens=prefill_tokens, requests=requests)
        _check(cfg, placement, len(devices))
        if timeout_s is not None and not timeout_s > 0:
            raise UserError(f"timeout_s={timeout_s} must be above 0, or None to wait for ever")
        self.cfg, self.placement = cfg, placement
        self._devices, self._dtype, self._wrap = list(devices), dtype, wrap
        self._page, self._seed, self._tokenizer = page_size, seed, tokenizer
        self._prefill_tokens, self._most, self._timeout_s = prefill_tokens, requests, timeout_s
        check_params(params, decoder.parts(cfg), "params")
        params = in_bits_of(params, cfg, placement.bits)
        one_rank(params, [self._ranks(self._devices[d]) for d, _, _ in placement.stages])
        last = len(placement.stages) - 1
        self.places = [Place(k, *s, last=k == last) for k, s in enumerate(placement.stages)]
        stack = decoder.parts(cfg).stack
        self._weights = [
            jax.device_get(
                weights_of(cfg, params, p, stack, slice_layers(params[stack], p.start, p.stop))
            )
            for p in self.places
        ]
        self._stages = self._start_all()
        self._closed = False
        self._numbers = 0  # requests so far
        self._room: _Room | None = None
        self._pipeline: Any = None  # Pipeline
        self._engines: list[Engine] = []

    def _start_all(self) -> list[Any]:
        """Returns new stages. If one fails, none is left running."""
        stages: list[Any] = []
        try:
            for place in self.places:
                stages.append(self._start(place))
            check(stages, self.places)
        except BaseException:
            for stage in stages:
                stage.close()
            raise
        return stages

    def _start(self, place: Place) -> Any:
        """Returns a new stage."""
        weights, devices = self._weights[place.stage], self._devices[place.device]
        return LocalStage(self.cfg, place, weights, devices, self._dtype, self._wrap)

    @staticmethod
    def _ranks(device: Any) -> int:
        """Returns the tensor ranks of a stage on this device."""
        return mesh_of(device).shape["tensor"]

    @property
    def compiled(self) -> int:
        """Programs compiled so far, in all stages."""
        self._check_open()
        return sum(s.wait(s.send("compiled")) for s in self._stages)

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("the runtime was closed; make a new one")

    def __enter__(self) -> "Runtime":
        """Returns itself; `close` at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """See `close`."""
        self.close()

    def close(self) -> None:
        """Ends the threads of the stages, for good."""
        self._closed = True
        for stage in self._stages:
            stage.close()

    def restart(self, devices: Sequence[Any] | None = None) -> None:
        """Replaces the stages that failed; all others keep their weights and programs.

        Args: devices: as in the constructor, to use other devices; stages whose devices change are
          replaced too. None: the same devices.
        Raises: UserError for devices that cannot be used, which changes nothing; StageError.
        """
        self._check_open()
        before = self._devices
        after = before if devices is None else list(devices)
        if len(before) != len(after):
            raise UserError(f"restart: {len(before)} devices are needed, got {len(after)}")
        one_rank(self._weights, [self._ranks(after[place.device]) for place in self.places])
        self._devices = after
        for k, place in enumerate(self.places):
            moved = self._devices[place.device] is not before[place.device]
            if self._stages[k].failed or moved:
                self._stages[k].close()
                self._stages[k] = self._start(place)
        self._drop()
        check(self._stages, self.places, self._timeout_s)

    def _drop(self) -> None:
        self._room, self._pipeline, self._engines = None, None, []

    # ---- requests

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        retries: int = 0,
    ) -> list[list[int]]:
        """Returns the tokens of the answers: one list for each prompt, in their order.

        With n > 1 answers, a prompt has n lists, one after the other. The tokens equal those that
        `Engine` gives for these requests, in this order, with the same model.
        Args: prompts: token ids. sampling: for all prompts, or one for each. retries: how often
          stages that died are replaced; requests that have not ended then start again.
        Raises: UserError for requests that can never run, and after `close`; StageError, after
          which `restart` and the same call give the same tokens.
        """
        self._check_open()
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise UserError(f"generate: {len(each)} SamplingParams for {len(prompts)} prompts")
        requests = [
            self._request(k, *pair) for k, pair in enumerate(zip(prompts, each, strict=True))
        ]
        while requests:
            todo = [r for r in requests if r.running]
            try:
                self._make_room(todo)
                self._run(todo)
                break
            except StageError as error:
                self._drop()
                if not retries:
                    raise
                retries -= 1
                logging.warning("%s; it is replaced, and its requests begin again", error)
                self.restart()
            except BaseException:
                self._drop()  # engines have requests that nobody waits for
                raise
        self._numbers += len(requests)
        return [answer for request in requests for answer in request.answers]

    def _request(self, k: int, prompt: Sequence[int], params: SamplingParams) -> _Request:
        tokens = check_tokens(prompt, self.cfg.vocab, f"prompts[{k}]")
        check_bias(params, self.cfg.vocab)
        most = self.cfg.max_positions
        if len(tokens) + params.max_tokens > most:
            raise UserError(
                f"prompts[{k}] of {len(tokens)} tokens and max_tokens={params.max_tokens} are more "
                f"than the model's {most} positions"
            )
        answers: list[list[int]] = [[] for _ in range(params.n)]
        return _Request(self._numbers + k, tokens, params, answers, params.n)

    def _make_room(self, requests: Sequence[_Request]) -> None:
        """Makes engines for these requests, unless the present ones are large enough."""
        placement = self.placement
        most = max(r.params.n for r in requests)
        unit = max(math.gcd(placement.prefill_batch, placement.decode_batch), most)
        slots = sum(r.params.n for r in requests)
        slots = min(slots, self._most or slots)
        context = max(len(r.prompt) + r.params.max_tokens for r in requests)
        room, engines = self._room, -(-slots // unit)
        if room is not None and room.unit == unit:
            if room.engines >= engines and room.context >= context:
                return
            engines, context = max(engines, room.engines), max(context, room.context)
        self._room = room = _Room(engines, unit, context)
        width = -(-context // self._page)
        pages = unit * (width + 1) + 1  # a spare one a slot, without which none starts
        chunk = self._prefill_tokens or context
        tokens = max(placement.prefill_batch, unit) * chunk
        shapes = Shapes(
            engines * unit,
            max(tokens, placement.decode_batch),
            (engines * pages, self._page, width),
        )
        limits = Limits(
            placement.prefill_batch, placement.decode_batch, shapes.budget, self._timeout_s
        )
        self._pipeline = Pipeline(self._stages, self.places, shapes, limits)
        self._engines = [
            Engine(
                self.cfg,
                (),
                pages=pages,
                page_size=self._page,
                max_batch=unit,
                seed=self._seed,
                prefill_chunk=unit * chunk,
                tokenizer=self._tokenizer,
                decode_steps=1,
                context=context,
                backend=View(self._pipeline, k * unit, k * pages),
            )
            for k in range(engines)
        ]

    def _run(self, requests: Sequence[_Request]) -> None:
        """Runs requests to their end."""
        assert self._room is not None
        unit = self._room.unit
        for request in requests:
            request.answers, request.running = [[] for _ in request.answers], request.params.n
        pending = collections.deque(requests)
        running: dict[int, tuple[_Request, int]] = {}  # by number: the request, its engine
        held = [0] * len(self._engines)  # answers that have not ended

        def fits(k: int, n: int) -> bool:
            most = self._most or sum(held) + n  # the engines may have a few slots more
            return held[k] + n <= unit and (sum(held) + n <= most or not sum(held))

        def feed(k: int) -> None:
            while pending and fits(k, pending[0].params.n):
                request = pending.popleft()
                self._engines[k].submit(request.prompt, request.params, id=request.number)
                running[request.number] = request, k
                held[k] += request.params.n

        def take(output: Output) -> None:
            request, k = running[output.request_id]
            request.answers[output.index] += output.tokens
            if output.finish_reason is not None:
                request.running -= 1
                held[k] -= 1

        together = max(1, self.placement.decode_batch // unit)
        groups = [range(k, min(k + together, len(held))) for k in range(0, len(held), together)]
        for k, engine in enumerate(self._engines):
            feed(k)
            engine.launch()
        while any(engine.busy for engine in self._engines):
            for group in groups:
                for k in group:
                    if self._engines[k].busy:
                        for output in self._engines[k].step():
                            take(output)
                        feed(k)
                        self._engines[k].launch()
                self._pipeline.flush()


def _check(cfg: DecoderConfig, placement: Placed, devices: int) -> None:
    """Refuses a placement that is not of this model and these devices. Raises: UserError."""
    edges = [0, *(stop for _, _, stop in placement.stages)]
    starts = [start for _, start, _ in placement.stages]
    cut = starts == edges[:-1] and all(a < b for a, b in zip(edges, edges[1:], strict=False))
    if not cut or edges[-1] != cfg.layers:
        raise UserError(
            f"stages={list(placement.stages)} must cut the model's {cfg.layers} layers without a "
            "hole, at least one layer each"
        )
    named = [device for device, _, _ in placement.stages]
    if len(set(named)) < len(named) or not set(named) <= set(range(devices)):
        raise UserError(f"the stages' devices {named} must be different ones of 0 to {devices - 1}")
    if len(placement.bits) != cfg.layers:
        raise UserError(f"bits has {len(placement.bits)} entries for {cfg.layers} layers")
    for name in ("prefill_batch", "decode_batch"):
        value = getattr(placement, name)
        if not (isinstance(value, int | np.integer) and value >= 1):
            raise UserError(f"{name}={value} must be a whole number from 1 on")


# ---- stages on the hosts of a Ray cluster
#
# The stages of a placement in separate processes, on the hosts of a Ray cluster. A stage is an
# actor. A call names the result of the previous stage, and Ray delivers it when it is ready, so
# calls follow each other through the stages as in one process. The residual stream is copied to the
# memory of its host, and Ray's object store carries it to the next stage.


class _Host:
    """A stage in the process of an actor."""

    def __init__(self, ranks: int, cfg: Any, place: Place, weights: Any, dtype: str):
        """ranks: devices of the process that the stage has."""
        import jax

        devices = jax.devices()[:ranks]
        if len(devices) < ranks:
            raise UserError(f"{place} has {len(devices)} devices in its process, not {ranks}")
        args = cfg, place, weights, devices if ranks > 1 else devices[0], dtype
        self._guard = Guard(lambda: Stage(*args))

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the stage; arrays come as NumPy's."""
        import jax

        return jax.device_get(self._guard.call(method, *args))


class RayStage:
    """A stage that is an actor: what LocalStage is for a thread."""

    def __init__(self, options: dict[str, Any], *args: Any):
        """options: the options of the actor. args: the arguments of _Host."""
        self._ray = _ray()
        self._actor = self._ray.remote(_Host).options(**options).remote(*args)
        self.failed = False  # then it is to be replaced

    def send(self, method: str, *args: Any) -> Any:
        """Calls a method of the stage after what was sent before; returns a future of its
        result."""
        return self._actor.call.remote(method, *args)

    def wait(self, result: Any, timeout_s: float | None = None) -> Any:
        """Returns the result of a future of `send`. Raises: the error of the stage; NoAnswerError
        if the result is not ready within `timeout_s` (None: waits for ever)."""
        if timeout_s is not None:  # `get` raises what the stage did, which may be a TimeoutError
            ready, _ = self._ray.wait([result], timeout=timeout_s)
            if not ready:
                raise NoAnswerError
        try:
            return self._ray.get(result)
        except self._ray.exceptions.RayTaskError as error:  # its text is a traceback
            raise (error.cause if isinstance(error.cause, Exception) else error) from error

    def close(self) -> None:
        """Ends the actor's process."""
        self._ray.kill(self._actor)


class RayRuntime(Runtime):
    """A Runtime whose stages are actors. `ray.init` comes first; extra `ray`.

    devices: for each device of the placement the options of its actor, as Ray has them:
    {"num_gpus": 1, "resources": {"t4": 1}} takes a GPU of a host that was started with this
    resource. The GPUs of an actor are tensor ranks; without any it runs on its host's CPU. The
    processes import megajax, so it is installed on every host. `wrap` is not for them.
    """

    def _start(self, place: Place) -> RayStage:
        options = self._devices[place.device]
        weights = self._weights[place.stage]
        ranks = self._ranks(options)
        return RayStage(dict(options), ranks, self.cfg, place, weights, self._dtype)

    @staticmethod
    def _ranks(device: Any) -> int:
        return max(1, int(device.get("num_gpus", 0)))


def cluster_devices() -> Sequence[dict[str, Any]]:
    """Returns the options of an actor for each GPU of a Ray cluster, in the order of its nodes."""
    options = []
    for node in _ray().nodes():
        if node["Alive"]:
            resources = {f"node:{node['NodeManagerAddress']}": 0.001}
            gpus = int(node["Resources"].get("GPU", 0))
            options += [{"num_gpus": 1, "resources": dict(resources)} for _ in range(gpus)]
    return options


def _ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found]
    except ImportError:
        raise UserError("stages on several hosts need Ray: uv sync --extra ray") from None
    return ray
