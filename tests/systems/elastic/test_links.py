"""Links between hosts: who meets whom, what an echo says, whom the bad ones name."""

import itertools
import socket

import pytest

from megajax.systems.elastic import checks
from megajax.systems.elastic.wire import Line


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
def test_rounds_are_disjoint_and_no_pair_comes_twice(count):
    hosts = [f"h{i}" for i in range(count)]
    schedule = checks.rounds(hosts)
    assert len(schedule) == min(count + count % 2 - 1, checks.ROUNDS)
    for pairs in schedule:
        names = [h for p in pairs for h in p]
        assert len(set(names)) == len(names) >= count - count % 2
    pairs = [frozenset(p) for one_round in schedule for p in one_round]
    assert len(set(pairs)) == len(pairs)
    if count <= 4:  # all of them
        assert set(pairs) == {frozenset(p) for p in itertools.combinations(hosts, 2)}


def test_an_echo_and_what_goes_wrong(monkeypatch):
    secret = "of this job only"

    def at():
        return f"127.0.0.1:{checks.answer('127.0.0.1', secret)}"

    assert checks.reach(at(), secret) > 0
    place = at()
    with pytest.raises(OSError):
        checks.reach(place, "guessed by someone")
    assert checks.reach(place, secret) > 0  # a stranger who came first is no bad link
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(ConnectionRefusedError):
        checks.reach(nobody, secret)
    send = Line.send

    def damage(line, message):
        if "echo" in message:
            message = {"echo": message["echo"].replace("7", "8", 1)}
        send(line, message)

    monkeypatch.setattr(Line, "send", damage)
    with pytest.raises(ValueError, match="other bytes"):
        checks.reach(at(), secret)


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_one_bad_host_is_named_and_a_bad_link_alone_names_nobody(count):
    hosts = [f"h{i}" for i in range(count)]
    pairs = [p for one_round in checks.rounds(hosts) for p in one_round]
    good = dict.fromkeys(pairs, 100.0)
    assert checks.failing_links(good, hosts) == {}
    for host in hosts:
        others = [h for h in hosts if h != host]
        for figure, named in (("no answer", others), (10.0, [host])):
            blamed = checks.failing_links(good | {p: figure for p in pairs if host in p}, named)
            assert list(blamed) == [host], (blamed, figure)
        slow = good | {p: 10.0 for p in pairs if host in p}
        assert checks.failing_links(slow, others) == {}  # slow, and the fault names another one
        fast = {p: f * 60 for p, f in slow.items()}
        assert checks.failing_links(fast, hosts) == {}  # slower than the others, and fast enough
    if count > 3:  # of three hosts each has two links, and one bad link leaves both ends a good one
        assert all(checks.failing_links(good | {p: "no answer"}, hosts) == {} for p in pairs)


def test_links_of_a_weak_kind_are_slow_rightly():
    """A cluster of four fast hosts has a network of 1,000 MB/s, one of four weak hosts 10."""
    hosts = [f"h{i}" for i in range(8)]
    kinds = {host: "L4" if i >= 4 else "H100" for i, host in enumerate(hosts)}
    pairs = [(a, b) for i, a in enumerate(hosts) for b in hosts[i + 1 :]]
    figures = {p: 1000.0 if max(p) < "h4" else 10.0 for p in pairs}
    assert checks.failing_links(figures, hosts, kinds) == {}
    weak = figures | {p: 1.0 for p in pairs if "h6" in p}
    assert list(checks.failing_links(weak, hosts, kinds)) == ["h6"]
    strong = figures | {p: 10.0 for p in pairs if "h1" in p and max(p) < "h4"}
    assert checks.failing_links(strong, hosts, kinds) == {}  # as fast as what weak hosts reach
    broken = figures | {p: "no answer" for p in pairs if "h1" in p}
    assert list(checks.failing_links(broken, (), kinds)) == ["h1"]


def test_two_hosts_cannot_tell_whose_link_it_is():
    assert (
        checks.failing_links({("a", "b"): "no answer"}, "ab") == {} == checks.failing_links({}, ())
    )
