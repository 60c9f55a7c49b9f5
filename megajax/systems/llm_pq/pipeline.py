"""Sends the steps of many engines through one chain of stages, in shared calls.

Each engine has a few slots and pages in every stage, and one step under way at a time. Steps of
several engines share a call, as many as fill a micro-batch of the phase. So micro-batches of
prefill and of decoding may have different sizes.

Legend: as serving/programs.py.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from megajax.core.errors import UserError
from megajax.serving import draw
from megajax.serving.draw import Drawn, Rules
from megajax.serving.programs import Laying, Segment, fields
from megajax.systems.llm_pq.stages import NoAnswerError, Place, Shapes, StageError


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

    def __init__(self, stages: Sequence[Any], places: Sequence[Place], shapes: Shapes,
                 limits: Limits):  # fmt: skip
        """stages: as LocalStage, in the order of the pipeline. They take new pages."""
        self._stages, self._places, self._limits = stages, places, limits
        slots, width = shapes.slots, shapes.pool[2]
        self._laying = Laying(slots, shapes.budget, width)
        self._tables = np.zeros((slots, width), np.int32)
        self._rules = draw.plain_rules(slots)
        self._waiting: list[Call] = []
        self.to_all("hold", shapes)

    def to_all(self, method: str, *given: Any) -> None:
        """Calls a method of all stages, each after what it was sent before."""
        for stage in self._stages:
            stage.send(method, *given)

    def to_last(self, method: str, *given: Any) -> None:
        """The same of the last stage."""
        self._stages[-1].send(method, *given)

    def set_slots(self, first: int, table_SM: np.ndarray, rules: Rules) -> None:
        """Sets the page tables and sampling rules of the slots from `first` on."""
        stop = first + len(table_SM)
        self._tables[first:stop] = table_SM
        for target, source in zip(fields(self._rules), fields(rules), strict=True):
            target[first:stop] = source

    def add(self, segments: Sequence[Segment]) -> Share:
        """Adds an engine's step to the next call, or to a new one if it does not fit there.

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

    def __init__(self, pipeline: Pipeline, slot: int, page: int):
        """slot, page: the first ones that are the engine's; the page is nobody's."""
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
        self, params: Any, segments: Sequence[Segment], table_SM: np.ndarray, rules: Rules,
        steps: int = 1,
    ) -> tuple[Share, list[int]]:  # fmt: skip
        """See Programs.step. The call waits for `Pipeline.flush`."""
        table_SM = np.where(table_SM > 0, table_SM + self._page, 0)
        self._pipeline.set_slots(self._slot, table_SM, rules)
        own = [dataclasses.replace(s, slot=s.slot + self._slot) for s in segments]
        return self._pipeline.add(own), list(range(len(own)))

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
