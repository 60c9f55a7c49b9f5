"""The list of detectors: how it is chosen, what a failing one costs, what follows from an alert."""

import pathlib
import re

import pytest

from megajax.core.errors import UserError
from megajax.monitor import alerts, detectors
from megajax.monitor.alerts import Action, Alert, respond
from megajax.monitor.detectors import DEFAULT, DETECTORS, Limits, Watchdog, choose
from megajax.monitor.records import Record

HOSTS = {"a": (0,), "b": (1,)}


class Noisy:
    """Says all that it hears; fails at the value 'fail'."""

    def __init__(self, job):
        self.job = job

    def watch(self, records):
        assert not any(r.value == "fail" for r in records)
        return [Alert("noisy", f"{r.name} {r.value}", (r.rank,), (r.host,)) for r in records]


def rows(host, *values):
    return [Record(0.0, host, HOSTS[host][0], None, 1, *v) for v in values]


def test_the_default_is_every_rule_and_a_flag_names_others():
    assert list(choose("default")) == list(DEFAULT) == list(DETECTORS)
    known = {**DETECTORS, "noisy": Noisy}
    assert list(choose("noisy, default", known)) == [*DEFAULT, "noisy"]
    assert list(choose("stall,end")) == ["end", "stall"]  # in the order in which they decide


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("end,stal", "no detector 'stal'.*Did you mean stall?"),
        ("stall", "nearest: end,stall"),
        ("", "must name 'end' too"),
        ("defualt", "Did you mean default?"),
    ],
)
def test_a_mistake_in_the_names(names, words):
    with pytest.raises(UserError, match=words) as error:
        choose(names)
    assert str(error.value).endswith("(--detectors)")


def test_only_the_chosen_ones_watch():
    said = {}
    for names in ("default", "end"):
        dog = Watchdog(HOSTS, Limits(silence=5), 0.0, 1.0, choose(names))
        dog.hear(1.0, "a", rows("a", ("state", "S"), ("log_line", "Xid 79")))
        said[names] = [a.rule for t in range(2, 20) for a in dog.judge(float(t))]
    assert said["end"] == [] and said["default"][:2] == ["log", "silence"]


def test_each_record_is_heard_once_with_its_place_and_then_time_goes_on():
    dog = Watchdog(HOSTS, Limits(), 0.0, 1.0, {"end": DETECTORS["end"], "noisy": Noisy})
    dog.hear(1.0, "a", rows("a", ("loss", 2.0)))
    dog.hear(1.0, "b", rows("b", ("gpu_duty", 0.5)))
    actions = dog.judge(1.0)
    assert [(a.kind, a.message, a.ranks, a.hosts) for a in actions] == [
        ("warn", "loss 2.0", (0,), ("a",)),
        ("warn", "gpu_duty 0.5", (1,), ("b",)),
    ]
    assert dog.judge(2.0) == []


def test_a_detector_that_fails_is_switched_off_and_said_once():
    dog = Watchdog(HOSTS, Limits(), 0.0, 1.0, {**DETECTORS, "noisy": Noisy})
    dog.hear(1.0, "a", rows("a", ("x", "fail")))
    (told,) = dog.judge(1.0)
    assert (told.kind, told.rule) == ("warn", "detector") and "'noisy' fails" in told.message
    dog.hear(2.0, "a", rows("a", ("x", 1.0), ("state", "X"), ("exit_code", -9)))
    assert [a.rule for a in (*dog.judge(2.0), *dog.judge(3.0), *dog.judge(5.0))] == ["exit"]


def test_one_alert_ends_the_attempt_and_all_others_are_told():
    several = [Alert("disk", "d"), Alert("nan", "n"), Alert("stall", "s"), Alert("new", "x")]
    assert [(a.kind, a.rule) for a in respond(several)] == [
        ("restart", "nan"),
        ("warn", "disk"),
        ("warn", "new"),
    ]
    chosen = alerts.parse("disk=evict, new=restart", ["new"])
    assert [(a.kind, a.rule) for a in respond(several, {**alerts.RESPONSES, **chosen})] == [
        ("restart", "nan"),
        ("evict", "disk"),
    ]
    complete = Alert("usage", "m", (1,), ("b",), 7, 2)
    assert respond([complete]) == [Action("stop", "usage", "m", (1,), ("b",), 7, 2)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stragler=evict", "Did you mean straggler?"),
        ("disk=evikt", "Did you mean evict?"),
        ("stall=warn", "must be a rule whose response can be chosen"),
        ("disk", "one of warn"),
    ],
)
def test_a_mistake_in_the_responses(text, words):
    with pytest.raises(UserError, match=words):
        alerts.parse(text)


def test_every_rule_of_every_detector_has_its_response():
    """The table knows each rule that a detector of the list can raise, and no other."""
    import ast
    import inspect

    calls = [
        n
        for n in ast.walk(ast.parse(inspect.getsource(detectors)))
        if isinstance(n, ast.Call) and ast.unparse(n.func).split(".")[-1] in ("alert", "Alert")
    ]
    rules = {n.args[0].value for n in calls if isinstance(n.args[0], ast.Constant)}
    # A detector that raises only warns, as every rule that the table does not list; the response of
    # "hang" is in the table of --detector=minder.
    assert rules - {"detector", "hang"} == set(alerts.RESPONSES)


def test_the_detector_of_the_documentation():
    """It is run as it stands there; `--detectors` and `--respond` take its name."""
    page = pathlib.Path(__file__).parent.parent.parent / "docs" / "supervision.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    names = {"__name__": "hot"}
    exec(code, names)
    known = {**DETECTORS, "hot": names["Hot"]}
    chosen = choose("default,hot", known)
    responses = {**alerts.RESPONSES, **alerts.parse("hot=evict", known)}
    dog = Watchdog(HOSTS, Limits(), 0.0, 1.0, chosen, responses)
    said = []
    for now, heat in enumerate([61, 90, 95], 1):
        dog.hear(float(now), "b", [Record(0.0, "b", None, 3, None, "gpu_celsius", heat)])
        said += dog.judge(float(now))
    assert [(a.kind, a.hosts, a.message) for a in said] == [
        ("evict", ("b",), "b: GPU 3 has 90 C"),
    ]
    with pytest.raises(UserError, match="no detector 'hot'"):
        choose("default,hot")
    assert names["supervise"].main(["--detectors=hto", "--", "true"], known) == 2
