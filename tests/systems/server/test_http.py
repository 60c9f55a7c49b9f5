"""The server on a socket of this process: silent and greedy clients, signals, a dead engine."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time

import pytest

from megajax.systems.server import http
from megajax.systems.server.launch import build_server
from megajax.systems.server.options import HttpOptions
from tests.systems.server import asgi
from tests.systems.server.test_app import TEMPLATE, engine

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class Slow:
    """The engine with steps that take at least so long. broken: from which step on it raises."""

    def __init__(self, step_s=0.0, broken=None):
        self.steps, self._step_s, self._broken = 0, step_s, broken

    def __getattr__(self, name):
        return getattr(engine(), name)

    def step(self):
        self.steps += 1
        if self._broken is not None and self.steps >= self._broken:
            raise RuntimeError("out of memory")
        time.sleep(self._step_s)
        return engine().step()


class Client:
    """A socket that reads nothing until `read`, and gives little place to what is not read."""

    def __init__(self):
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.setblocking(False)

    async def send(self, data):
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def read(self, most=2**30):
        """Returns what comes until the end, or so many bytes; a reset is an end."""
        data, loop = b"", asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while len(data) < most:
                new = await asyncio.wait_for(loop.sock_recv(self.socket, 2**16), 60)
                if not new:
                    break
                data += new
        return data


class Served:
    """A server in this event loop."""

    def __init__(self, worker, made, task):
        self.worker, self.task, self.port = worker, task, made.getsockname()[1]
        self.clients = []

    async def connect(self, data=b""):
        """Returns a client that has sent data."""
        made = Client()
        self.clients.append(made)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(made.socket, ("127.0.0.1", self.port))
        await made.send(data)
        return made

    async def health(self):
        client = await self.connect(HEALTH)
        status = await client.read(12)
        client.socket.close()
        return int(status.split()[1])

    async def end(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(self.task, 60)


def serve(test, to=None, stop_timeout_s=60, most=None, **options):
    """Runs a coroutine function with a Served."""

    async def scenario():
        limits = HttpOptions(**options)
        worker, server = build_server(to or engine(), "tiny", TEMPLATE, limits, max_batch=4)
        with http.listen("127.0.0.1", 0) as made:
            # So that little fits between the server and a client that does not read.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            task = asyncio.create_task(http.serve(server, worker, made, stop_timeout_s, most))
            served = Served(worker, made, task)
            assert await served.health() == 200
            try:
                await test(served)
            finally:
                for client in served.clients:
                    client.socket.close()
            if not task.done():
                assert await served.end() == 0

    asyncio.run(scenario())
    for sequence in [*engine().scheduler.running, *engine().scheduler.waiting]:
        engine().cancel(sequence.request)
    list(engine().run())


def asking(**body):
    """Returns the bytes of a request for an answer of some hundred kB."""
    body = {
        "prompt": "x",
        "n": 4,
        "max_tokens": 120,
        "ignore_eos": True,
        "logprobs": 20,
        "stream": True,
    } | body
    raw = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


async def until(holds):
    for _ in range(6000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not come to hold")


def test_connections_that_say_nothing_or_half_are_closed(monkeypatch):
    monkeypatch.setattr(http, "HEAD_S", 0.1)
    monkeypatch.setattr(http, "CHECK_S", 0.02)

    async def check(served):
        upload = await served.connect(asking(stream=False, max_tokens=1)[:-5])
        for first, half in ((b"", b""), (b"", HEALTH[:20]), (HEALTH, HEALTH[:20])):
            client = await served.connect(first)
            if first:
                assert b" 200 " in await client.read(12)
            await client.send(half)
            assert b"HTTP" not in await client.read()
        await upload.send(asking(stream=False, max_tokens=1)[-5:])  # has a limit of its own
        assert b"200 OK" in await upload.read(200)

    serve(check)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_given_up(stream, monkeypatch):
    monkeypatch.setattr(http, "STALLED_S", 0.1)
    monkeypatch.setattr(http, "CHECK_S", 0.02)

    async def check(served):
        client = await served.connect(asking(stream=stream))
        await until(lambda: served.worker.live == 1)
        await until(lambda: served.worker.live == 0)
        await asyncio.sleep(0.5)  # nothing but the server's limit ends the connection meanwhile
        received = await client.read()
        assert received and b"[DONE]" not in received and b"completion_tokens" not in received

    serve(check)


@pytest.mark.parametrize("reads", [True, False])
def test_the_time_of_a_request_holds_whether_or_not_its_client_reads(reads):
    async def check(served):
        client = await served.connect(asking())
        reading = asyncio.create_task(client.read(2**30 if reads else 1))
        await until(lambda: served.worker.live == 1)
        await until(lambda: served.worker.live == 0)
        page = served.worker.metrics.text()[0].decode()
        assert 'finished_reason="cancelled",model_name="tiny"} 4.0' in page
        if reads:
            client.socket.shutdown(socket.SHUT_WR)
        assert (b'"code": "timeout"' in await reading) == reads

    serve(check, to=Slow(0.02), request_timeout_s=0.5)


def test_many_silent_connections_leave_room_for_others():
    async def check(served):
        half = [await served.connect(asking()[:-9]) for _ in range(3)]
        silent = [await served.connect() for _ in range(40)]
        running = await served.connect(asking(stream=False, n=1))
        await until(lambda: served.worker.live == 1)
        assert await served.health() == 200
        for client in silent[:30]:
            assert await client.read() == b""
        assert b" 200 " in await running.read(12), "it has a request, and is not given up"
        await half[0].send(b"x" * 9)
        assert b" 400 " in await half[0].read(12), "silent ones go before half requests"

    serve(check, most=8)


def test_where_all_connections_have_requests_a_new_one_is_told_so():
    async def check(served):
        for _ in range(3):
            await served.connect(asking(n=1))
        await until(lambda: served.worker.live == 3)
        assert await served.health() == 503
        for client in served.clients:
            client.socket.close()
        await until(lambda: served.worker.live == 0)
        assert await served.health() == 200

    serve(check, to=Slow(0.01), most=3)


def test_an_engine_that_dies_ends_the_process_with_a_code_and_a_line(capfd):
    async def check(served):
        client = await served.connect(asking())
        reading = asyncio.create_task(client.read())
        assert await asyncio.wait_for(asyncio.shield(served.task), 60) == 75
        assert b"out of memory" in await reading

    serve(check, to=Slow(broken=4))
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and "(exit code 75)" in lines[0], lines
    assert lines[0].startswith("error: the engine failed: RuntimeError: out of memory (test_http")


@pytest.mark.parametrize("reads", [True, False])
def test_sigterm_ends_in_its_time_whatever_clients_do(reads, capfd, monkeypatch):
    monkeypatch.setattr(http, "LATE_S", 60)  # or a busy machine ends this process

    async def check(served):
        await served.connect(asking()[:-5])
        client = await served.connect(asking())
        reading = asyncio.create_task(client.read(2**30 if reads else 1))
        await until(lambda: served.worker.live == 1)
        if reads:  # the second signal does not wait
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
        assert await served.end() == 1
        assert (b"the server is stopping" in await reading) == reads

    serve(check, to=Slow(0.02), stop_timeout_s=50 if reads else 0.4)
    assert "stopping: 1 requests are cut off" in capfd.readouterr().err


def test_accepted_sockets_send_at_once():
    """Nagle's algorithm is off, so no part of an answer waits for an acknowledgement."""

    async def check():
        with http.listen("127.0.0.1", 0) as made, socket.socket() as client:
            loop = asyncio.get_running_loop()
            made.setblocking(False)
            client.connect(made.getsockname())
            accepted, _ = await loop.sock_accept(made)
            transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, accepted)
            option = socket.IPPROTO_TCP, socket.TCP_NODELAY
            assert transport.get_extra_info("socket").getsockopt(*option)
            transport.close()
            await asyncio.sleep(0)

    asyncio.run(check())


def test_whoever_connects_while_the_server_starts_is_told_so():
    made = http.listen("127.0.0.1", 0)
    with made:
        with http.starting(made), socket.create_connection(made.getsockname()[:2]) as client:
            client.sendall(HEALTH)
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and json.loads(body)["status"] == "starting"
        assert f"Content-Length: {len(body)}".encode() in head


def test_a_line_of_the_log_has_no_text(capsys):
    async def scenario():
        limits = HttpOptions(request_log=True)
        worker, server = build_server(engine(), "tiny", TEMPLATE, limits, max_batch=4)
        worker.start()
        async with asgi.client(server.app) as client:
            body = {"prompt": "secret", "max_tokens": 3, "ignore_eos": True}
            await client.post("/v1/completions", json=body)
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as s:
                await s.aread()
            await client.get("/health")
            await client.get("/x%0a12:00 POST")
        worker.stop()
        await worker.join()

    asyncio.run(scenario())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "secret" not in "".join(lines)
    for line in lines[:2]:
        assert " POST /v1/completions 200 7 tokens in, 3 out, " in line
    assert " GET /x\\n12:00 POST 404 " in lines[2]
