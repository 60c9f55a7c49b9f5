"""Strangers at the ports of driver and agents: nobody acts on their word, nothing ends for them."""

import errno
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from megajax.core.errors import UserError
from megajax.systems.elastic import driver as driver_
from megajax.systems.elastic import wire
from megajax.systems.elastic.driver import Hosts
from megajax.systems.elastic.wire import (
    AGENT,
    OPERATOR,
    Line,
    StrangerError,
    Tls,
    dial,
    self_signed,
)

SECRET = "known to this job only"


class Owner:
    """Writes down what a driver would hear."""

    def __init__(self):
        self.heard, self.refused = [], []

    def on_refused(self, address, why, count):
        self.refused.append((why, count))

    def __getattr__(self, name):
        return lambda *words: self.heard.append((name, *words))


class Driver:
    """The hosts of a driver, with a thread that pumps while agents and strangers act."""

    def __init__(self, tls=None):
        self.owner = Owner()
        listener = socket.create_server(("127.0.0.1", 0))
        self.where = listener.getsockname()
        self.address = f"127.0.0.1:{self.where[1]}"
        self.hosts = Hosts(self.owner, listener, SECRET, tls=tls)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.pump)
        self.error = None
        self.lines = []

    def dial(self, purpose, name, secret=SECRET, tls=None):
        self.lines.append(dial(self.address, secret, purpose, name, tls))
        return self.lines[-1]

    def pump(self):
        try:
            while not self.ended.is_set():
                self.hosts.pump(0.01)
        except BaseException as error:
            self.error = error

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()
        self.hosts.close()
        for line in self.lines:
            line.close()
        assert self.error is None, self.error

    def join(self, name="a", secret=SECRET, tls=None):
        line = self.dial(AGENT, name, secret, tls)
        line.send({"address": "127.0.0.1", "pid": 7})
        return line, line.receive()[0]

    def wait_for(self, condition):
        end = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < end and self.error is None, (self.owner.refused, self.error)
            time.sleep(0.005)

    def still_works(self):
        line, said = self.join("another")
        assert said == {"do": "welcome"}
        line.close()

    def reasons(self):
        return [why for why, _ in self.owner.refused]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(wire, "GREETING_S", 0.3)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"[" * 100_000 + b"\n", "without an end"),  # 100 kB of it: RecursionError without a limit
        (b"[" * 4000 + b"\n", "not a message"),
        (b"x" * 4096 + b"\n" + b"y" * 5000, "not a message|without an end"),
        (b"null\n", "not a message"),
        (b"\xff\xfe\n", "not a message"),
        (b'{"hello": "a", "token": "guess", "address": "x", "pid": 1}\n', "not a greeting"),
        (b'{"purpose": "agent", "name": "\\ud800", "nonce": "00"}\n', "not a greeting"),
        (b'{"purpose": "agent", "name": "a", "nonce": "00"}\n', "too short"),
        (b"GET / HTTP/1.1\r\n\r\n", "not a message"),
        (
            b'{"purpose": "agent", "name": "a", "nonce": "' + b"0" * 64 + b'"}\n{"proof": "0"}\n',
            "does not hold this job's secret",
        ),
    ],
)
def test_one_line_of_a_stranger_ends_that_connection_only(sent, why):
    with Driver() as driver, socket.create_connection(driver.where) as sock:
        sock.sendall(sent)
        driver.wait_for(driver.reasons)
        assert re.search(why, driver.reasons()[0])
        driver.still_works()
        assert len(driver.owner.refused) == 1  # one event
        assert [h[0] for h in driver.owner.heard].count("on_join") == 1


def test_idle_connections_and_dribbles_make_room(quick):
    with Driver() as driver:
        idle = [socket.create_connection(driver.where) for _ in range(200)]
        began = time.monotonic()
        driver.still_works()  # while all of them are there
        assert time.monotonic() - began < 1
        assert len(driver.hosts._door._waiting) <= wire.WAITING_OF_ONE
        driver.wait_for(lambda: len(driver.hosts._door._waiting) <= wire.WAITING_OF_ONE)
        dribble = socket.create_connection(driver.where)
        used = time.thread_time()
        try:
            for _ in range(400):
                dribble.sendall(b" ")
                time.sleep(0.002)
        except OSError:
            pass  # as it should be
        else:
            pytest.fail("a stranger may dribble for ever")
        assert time.thread_time() - used < 1
        driver.wait_for(lambda: not driver.hosts._door._waiting)
        assert len(driver.owner.refused) <= 6  # told once a kind, then counted
        for sock in (*idle, dribble):
            sock.close()


def test_a_refused_accept_rests_and_goes_on(monkeypatch):
    monkeypatch.setattr(wire, "REST_S", 0.05)
    with Driver() as driver:
        real = driver.hosts._door.listener

        class Full:
            left = 3

            def __getattr__(self, name):
                return getattr(real, name)

            def accept(self):
                self.left -= 1
                if self.left >= 0:
                    raise OSError(errno.EMFILE, "Too many open files")
                return real.accept()

        full = Full()
        driver.hosts._door.accept, accept = (
            lambda: with_listener(driver.hosts._door, full, accept),
            driver.hosts._door.accept,
        )
        driver.still_works()
        assert full.left < 0 and driver.reasons() == ["cannot accept: Too many open files"]


def with_listener(where, listener, call):
    """`accept` sees a listener that fails; the selector keeps the real one."""
    real, where.listener = where.listener, listener
    unregister, where._selector.unregister = (
        where._selector.unregister,
        lambda sock: unregister(real if sock is listener else sock),
    )
    try:
        call()
    finally:
        where.listener, where._selector.unregister = real, unregister


def test_an_agent_obeys_nobody_who_does_not_hold_the_secret():
    """A stranger who listens hears no secret, and cannot answer as the driver does."""
    heard = []

    def fake(server, answer):
        sock, _ = server.accept()
        with sock:
            heard.append(sock.recv(1 << 16))
            sock.sendall(answer(heard[-1]))
            heard.append(sock.recv(1 << 16))

    def old(_):
        return b'{"do": "start", "command": ["id"], "attempt": 0, "folder": "/tmp", "ranks": {}}\n'

    def guess(line):
        other = Line(socket.socket(), "another secret, long", False)
        other.purpose, other.name = "agent", "a"
        other._agree(json.loads(line)["nonce"], "0" * 64)
        proof = wire._sign(other._secret, wire.CALLED, *other._said).decode()
        other.close()
        return json.dumps({"nonce": "0" * 64, "proof": proof}).encode() + b"\n"

    def mirror(line):  # sends the caller's own words back
        return json.dumps({"nonce": json.loads(line)["nonce"], "proof": "0" * 64}).encode() + b"\n"

    for answer in (old, guess, mirror):
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=fake, args=(server, answer))
            thread.start()
            with pytest.raises(StrangerError):
                dial(f"127.0.0.1:{server.getsockname()[1]}", SECRET, AGENT, "a")
            thread.join()
    assert all(SECRET.encode() not in raw for raw in heard)
    assert heard[1::2] == [b""] * 3  # nor does it prove itself to a stranger


def test_signed_messages_cannot_be_changed_replayed_or_moved(monkeypatch):
    sent = []
    write = Line._write
    monkeypatch.setattr(Line, "_write", lambda line, data: (sent.append(data), write(line, data)))
    with Driver() as driver:
        for change in ("replay", "alter", "move"):
            first, _ = driver.join("a")
            first.send({"asked": 15})
            driver.wait_for(lambda: ("on_asked", 15) in driver.owner.heard)
            signed, line = sent[-1], first
            if change == "alter":
                signed = signed.replace(b"15", b"16")
            if change == "move":
                line, _ = driver.join("b")
            line.sock.sendall(signed)
            driver.wait_for(lambda: line.sock.recv(1) == b"")  # noqa: B023
            assert driver.owner.heard.count(("on_asked", 15)) == 1
            driver.owner.heard.clear()
            first.close()
            driver.wait_for(lambda: not driver.hosts.good())


def test_a_proof_of_one_connection_is_none_on_another():
    """What an agent proved to the driver cannot be used to join twice, nor at an echo's port."""
    with Driver() as driver:
        recorded = []
        line = Line(socket.create_connection(driver.where), SECRET, True)
        write = line._write
        line._write = lambda data: (recorded.append(data), write(data))
        line.greet(AGENT, "a")
        with socket.create_connection(driver.where) as sock:
            sock.sendall(b"".join(recorded))
            driver.wait_for(driver.reasons)
        assert driver.reasons() == ["it does not hold this job's secret"]
        line.close()


def test_the_drivers_own_proof_sent_back_to_it_proves_nothing():
    with Driver() as driver, socket.create_connection(driver.where) as sock:
        hello = {"purpose": AGENT, "name": "a", "nonce": "0" * 64}
        sock.sendall(json.dumps(hello).encode() + b"\n")
        proof = json.loads(sock.recv(4096))["proof"]
        sock.sendall(json.dumps({"proof": proof}).encode() + b"\n")
        driver.wait_for(driver.reasons)
        assert driver.reasons() == ["it does not hold this job's secret"]


@pytest.mark.parametrize("newcomer_first", [True, False])
def test_an_agent_ends_in_the_same_turn_in_which_another_takes_its_place(
    monkeypatch, newcomer_first
):
    monkeypatch.setattr(driver_, "QUIET_S", 0.0)
    with Driver() as driver:
        late = driver.dial(AGENT, "a") if newcomer_first else None
        first, _ = driver.join("a")
        late = late or driver.dial(AGENT, "a")
        driver.ended.set()
        driver.thread.join()
        first.close()
        late.send({"address": "127.0.0.1", "pid": 8})
        time.sleep(0.01)  # both events are there
        driver.hosts.pump(0.1)
        driver.hosts.pump(0.0)
        assert [h.pid for h in driver.hosts.good()] == [8]


def test_nonsense_of_an_agent_ends_its_connection_only():
    with Driver() as driver:
        for message in ({}, {"address": "x"}, {"address": "x", "pid": "none"}):
            line = driver.dial(AGENT, "b")
            line.send(message)
            assert line.sock.recv(1) == b""
        operator = driver.dial(OPERATOR, "b")
        operator.send({"hello": "no host"})
        assert operator.sock.recv(1) == b""
        with pytest.raises(OSError):
            driver.dial("echo", "b").receive()
        driver.still_works()


def test_an_agent_that_comes_again_takes_its_place_when_the_other_is_silent(monkeypatch):
    with Driver() as driver:
        first, said = driver.join("a")
        again, said = driver.join("a")
        assert said["do"] == "wait" and "another agent is called a (--name)" in said["why"]
        monkeypatch.setattr(driver_, "QUIET_S", 0.0)
        for _ in range(4):
            line, said = driver.join("a")
            first.close()  # both ends in one turn of the loop
            assert said == {"do": "welcome"}
            first = line
        assert [h.name for h in driver.hosts.good()] == ["a"]
        line.close()


def test_tls_hides_messages_and_finds_a_stranger_in_the_middle(tmp_path):
    tls, other = self_signed(tmp_path), self_signed(tmp_path)
    with Driver(tls) as driver:
        line, said = driver.join("a", tls=Tls())
        assert said == {"do": "welcome"} and line._tls.open
        line.close()
        line, _ = driver.join("b", tls=Tls(authority=tls.certificate))
        line.close()
        with pytest.raises(ConnectionError):
            driver.join("c", tls=Tls(authority=other.certificate))
        with pytest.raises(OSError):
            driver.join("d")  # without TLS
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=relay, args=(server, driver.where, other))
            thread.start()
            with pytest.raises(OSError):
                where = f"127.0.0.1:{server.getsockname()[1]}"
                dial(where, SECRET, AGENT, "e", Tls())
            thread.join()
        driver.wait_for(lambda: not driver.hosts.good())
    with pytest.raises(UserError, match="TLS cannot use"):
        Tls(str(tmp_path / "none.pem")).channel(False)


def relay(server, there, tls):
    """Opens both ends' TLS with a certificate of its own and hands everything on."""
    sock, _ = server.accept()
    behind = socket.create_connection(there)
    front, back = tls.channel(False), Tls().channel(True)
    behind.sendall(back.begin())
    ends = ((sock, front, behind, back), (behind, back, sock, front))
    for end in (sock, behind):
        end.settimeout(0.05)
    held = {sock: b"", behind: b""}
    stop = time.monotonic() + 1.5
    try:
        while time.monotonic() < stop:
            for from_, channel, to, its in ends:
                try:
                    data = from_.recv(1 << 16)
                except TimeoutError:
                    data = b""
                if data:
                    text, answer = channel.take(data)
                    from_.sendall(answer)
                    held[to] += text
                if held[to] and its.open:
                    to.sendall(its.seal(held[to]))
                    held[to] = b""
    except OSError:
        pass
    sock.close()
    behind.close()


def test_the_secret_is_in_no_command_line_and_not_with_the_trainers(tmp_path):
    """`find_secret` takes it out of the environment before anything is started."""
    code = (
        "import sys, os; sys.path.insert(0, 'scripts'); import supervise;"
        "s, _ = supervise.parse(['--agent=h:1']);"
        "print(len(supervise.find_secret(s)), 'MEGAJAX_TOKEN' in os.environ)"
    )
    root = pathlib.Path(__file__).parent.parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        env=os.environ | {"MEGAJAX_TOKEN": SECRET, "PYTHONPATH": str(root)},
    )
    assert done.stdout == f"{len(SECRET)} False\n", done.stderr
