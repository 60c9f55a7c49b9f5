"""Serving by a placement of LLM-PQ (arXiv 2403.01136): a pipeline of unlike stages.

Scheduler, sampler and answers are those of serving.Engine. The requests are split among several
engines of a few slots each, whose steps go through one chain of stages (pipeline.py): prompts in
calls of `prefill_batch` requests, answers in calls of `decode_batch`. When a call has left the last
stage, its tokens are read and the next call of these requests is sent to the first stage, while
other calls are still under way.
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
from megajax.serving import Engine, Output, SamplingParams
from megajax.serving.answer import Tokenizer
from megajax.serving.requests import check_bias, check_options, check_tokens
from megajax.systems.llm_pq.pipeline import Limits, Pipeline, View, check
from megajax.systems.llm_pq.stages import (
    LocalStage,
    Place,
    Shapes,
    StageError,
    Wrap,
    mesh_of,
    weights_of,
)
from megajax.systems.llm_pq.weights import in_bits_of, one_rank


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
    """What the engines are made for. unit: slots of one. context: tokens of a sequence."""

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
          placement a jax device, a list of them (tensor ranks of one stage), or a mesh. dtype: of
          the computation and of the pages. page_size: tokens of a page. seed: of sampling.
          prefill_tokens: most tokens of a prompt in one call; None: the whole prompt. requests:
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
        """Makes engines for these requests, unless those that there are do."""
        placement = self.placement
        most = max(r.params.n for r in requests)
        unit = max(math.gcd(placement.prefill_batch, placement.decode_batch), most)
        wanted = sum(r.params.n for r in requests)
        wanted = min(wanted, self._most or wanted)
        context = max(len(r.prompt) + r.params.max_tokens for r in requests)
        room, engines = self._room, -(-wanted // unit)
        if room is not None and room.unit == unit:
            if room.engines >= engines and room.context >= context:
                return
            engines, context = max(engines, room.engines), max(context, room.context)
        self._room = room = _Room(engines, unit, context)
        width = -(-context // self._page)
        pages = unit * (width + 1) + 1  # a spare one a slot, without which none starts
        chunk = self._prefill_tokens or context
        tokens = max(placement.prefill_batch, unit) * chunk
        shapes = Shapes(engines * unit, max(tokens, placement.decode_batch),
                        (engines * pages, self._page, width))  # fmt: skip
        limits = Limits(placement.prefill_batch, placement.decode_batch, shapes.budget,
                        self._timeout_s)  # fmt: skip
        self._pipeline = Pipeline(self._stages, self.places, shapes, limits)
        self._engines = [
            Engine(
                self.cfg, (), pages=pages, page_size=self._page, max_batch=unit, seed=self._seed,
                prefill_chunk=unit * chunk, tokenizer=self._tokenizer, decode_steps=1,
                context=context, backend=View(self._pipeline, k * unit, k * pages),
            )
            for k in range(engines)
        ]  # fmt: skip

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
