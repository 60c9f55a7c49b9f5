"""The loop's hooks, on a step that only counts: when they are called, and with which state."""

import dataclasses
import gc
import signal
import types

import numpy as np
import pytest

from megajax.core import config
from megajax.monitor.meter import Meter, Work
from megajax.training.interrupts import QuietGarbage
from megajax.training.loop import NotFinite, ReplicasDiffer, Run, train
from megajax.training.task import TrainState
from tests.tiny import run_config


class Step:
    """Adds 1 to the only parameter."""

    leaf_names = ("w",)
    storage = types.SimpleNamespace(exchange={}, layers={})

    def step(self, state, batch):
        new = TrainState({"w": state.params["w"] + 1}, {}, state.step + 1)
        metrics = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "targets": 4, "leaf_norms": [1.0]}
        return new, {k: np.asarray(v) for k, v in metrics.items()}


class Loader:
    position, rows_per_batch = 0, 1

    def __next__(self):
        return {}


@dataclasses.dataclass
class Hook:
    """Adds `adds` to the parameter when it is due, and writes down what it saw."""

    name: str
    every: int
    adds: float
    seen: list

    def due(self, finished, last):
        return last or finished % self.every == 0

    def start(self, state, finished):
        self.seen.append(("start", self.name, finished, float(state.params["w"])))
        return state

    def __call__(self, state, finished):
        self.seen.append((self.name, finished, float(state.params["w"])))
        return dataclasses.replace(state, params={"w": state.params["w"] + self.adds})


@dataclasses.dataclass
class Sink:
    """A recorder and the checkpoints in one."""

    seen: list

    def emit(self, step, row):
        self.seen.append(("row", step))

    def save(self, step, state, *, data_state, order):
        self.seen.append(("save", step, float(state.params["w"])))

    def refuted(self):
        return []

    def wait(self):
        pass

    def latest(self):
        return 7

    folder = "somewhere"


def run_of(seen, first=0, **changes):
    cfg = config.override(run_config(), {"train.steps": 5, "checkpoint.every": 4} | changes)
    hooks = [Hook("a", 2, 10, seen), Hook("b", 4, 100, seen)]
    state = TrainState({"w": np.float32(first)}, {}, np.int32(first))
    sink, meter = Sink(seen), Meter(Work(1, 1.0, 1.0, None), 5)
    return Run(cfg, Step(), state, Loader(), sink, None, sink, None, meter, {}, hooks)


@pytest.mark.parametrize("first", [0, 3])
def test_hooks_are_called_in_turn_after_what_is_saved(first):
    seen = []
    run = run_of(seen, first)
    assert train(run) == "done"
    calls = [x for x in seen if x[0] != "row"]
    began = [("start", "a", first, float(first)), ("start", "b", first, float(first))]
    w = 12.0 if first == 0 else 3.0  # after step 2
    two = [("a", 2, 2.0)] if first == 0 else []
    four = w + 2 if first == 0 else w + 1
    assert calls == [
        *began,
        *two,
        ("save", 4, four),
        ("a", 4, four),
        ("b", 4, four + 10),
        ("save", 5, four + 111),
        ("a", 5, four + 111),
        ("b", 5, four + 121),
    ]
    assert float(run.state.params["w"]) == four + 221
    for step in (4, 5):  # a step is recorded, so known to be finite, before it is saved or seen
        assert seen.index(("row", step)) < next(
            i for i, x in enumerate(seen) if x[:2] == ("save", step)
        )


def test_a_signal_saves_and_calls_no_hook():
    seen = []
    run = run_of(seen)

    class Told(Loader):
        def __next__(self):
            signal.raise_signal(signal.SIGINT)
            return {}

    run.loader, run.hooks = Told(), [Hook("a", 1, 10, seen)]
    assert train(run) == "signal"
    assert [x for x in seen if x[0] not in ("row", "start")] == [("save", 1, 1.0)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"loss": np.nan}, "loss is nan; the gradient of each leaf is finite, .* norm .* is 1.0;"),
        ({"grad_norm": np.inf}, "loss is 1.0; the gradient of each leaf is finite, .* is inf;"),
        ({"loss": np.inf, "leaf_norms": [np.nan]}, "loss is inf; first non-finite gradient: w "),
    ],
)
def test_what_is_not_finite_is_named(wrong, words):
    class Bad(Step):
        def step(self, state, batch):
            new, metrics = Step.step(self, state, batch)
            new.params["w"] = np.int32(0)  # only floats are looked at
            return new, metrics | {k: np.asarray(v) for k, v in wrong.items()}

    run = run_of([])
    run.train_step, run.hooks = Bad(), ()
    with pytest.raises(NotFinite, match=f"step 1: {words}.* step 7"):
        train(run)


@pytest.mark.parametrize(("every", "until"), [(2, 4), (0, 5), (3, 3)])
def test_replicas_are_compared_and_nothing_is_saved_of_what_differs(every, until):
    """They differ after step 3; a save at step 4 looks too."""
    seen = []
    run = run_of(seen, **{"wire": "sdp4bit", "exchange.check_every": every})
    run.train_step.agree = lambda state: {"copies": {"w": np.asarray(state.step < 3)}}
    if until == 5:
        assert train(run) == "done"
        return
    run.hooks = ()
    with pytest.raises(
        ReplicasDiffer, match=rf"after step {until} .* of copies.w do not .* step 7"
    ):
        train(run)
    assert not [x for x in seen if x[0] == "save"]
    assert ("row", until) in seen and ("row", until + 1) not in seen


@pytest.mark.parametrize("is_enabled", [True, False])
def test_automatic_collection_is_as_before_after_training(is_enabled):
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with QuietGarbage(every=0):
            assert not gc.isenabled()
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
