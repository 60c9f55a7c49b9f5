"""The client of Alertmanager against a server on loopback that checks the API's schema.

tests/systems/minder/test_watch_server.py sends to the real program.
"""

import contextlib
import datetime
import http.server
import json
import threading
import time

import pytest

from megajax.core.errors import UserError
from megajax.systems.minder.reporter import Alertmanager, Firing

FIRING = Firing({"alertname": "A", "machine": "m1"}, {"summary": "s"}, 1_700_000_000.5)


def problem(body):
    """Returns why a body is no postableAlerts (api/v2/openapi.yaml), or ''."""
    alerts = json.loads(body)
    if not isinstance(alerts, list):
        return "an array is needed"
    for alert in alerts:
        if not alert.get("labels"):
            return "labels are required"
        for texts in (alert["labels"], alert.get("annotations", {})):
            if not all(isinstance(t, str) for t in texts.values()):
                return "values must be texts"
        for name in ("startsAt", "endsAt"):
            if name in alert and not datetime.datetime.fromisoformat(alert[name]).tzinfo:
                return f"{name} has no zone"
    return ""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        status, why = self.server.answers.pop(0) if self.server.answers else (200, "")
        if self.path != "/alerts/api/v2/alerts" or self.headers["Content-Type"][:16] != (
            "application/json"
        ):
            status, why = 404, "no such place"
        elif status == 200 and (why := problem(body)):
            status = 400
        self.server.got.append((status, json.loads(body), self.headers.get("Authorization")))
        self.send_response(status)
        self.send_header("Content-Length", str(len(why)))
        self.end_headers()
        self.wfile.write(why.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads, httpd.got, httpd.answers = True, [], []
    httpd.url = f"http://127.0.0.1:{httpd.server_address[1]}/alerts"
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield httpd
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def wait(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_alert_is_sent_again_while_it_lasts_and_once_when_it_ended(server):
    with contextlib.closing(Alertmanager(server.url, resend_s=0.05)) as client:
        client.put(FIRING)
        wait(lambda: len(server.got) >= 3)
        client.put(Firing(FIRING.labels, FIRING.annotations, FIRING.since, FIRING.since + 60))
        wait(lambda: any(alert[1][0]["endsAt"] < "2024" for alert in server.got))
        sent = len(server.got)
        time.sleep(0.2)
        assert len(server.got) <= sent + 1 and client.failures == 0
    assert {status for status, *_ in server.got} == {200}
    first = server.got[0][1][0]
    assert first["startsAt"] == "2023-11-14T22:13:20.500Z" and first["labels"] == FIRING.labels
    assert datetime.datetime.fromisoformat(first["endsAt"]) > datetime.datetime.now(datetime.UTC)
    assert server.got[-1][1][0]["endsAt"] == "2023-11-14T22:14:20.500Z"


def test_what_fails_is_said_once_and_tried_again(server, monkeypatch):
    monkeypatch.setattr("megajax.systems.minder.reporter.LONGEST_PAUSE_S", 0.05)
    server.answers, said = [(500, "full"), (503, ""), (502, "")], []
    client = Alertmanager(server.url, tell=said.append)
    client.put(FIRING)
    wait(lambda: len(said) == 2)
    client.close()
    assert "500: full; tries again" in said[0] and "again, after 3 failed tries" in said[1]
    assert client.failures == 3 and [s for s, *_ in server.got][:4] == [500, 503, 502, 200]


def test_a_server_that_is_away_delays_nobody(server):
    said, began = [], time.monotonic()
    client = Alertmanager("http://me:s3cret@127.0.0.1:9", tell=said.append)
    client.put(FIRING)
    wait(lambda: said)
    client.close(1.0)
    assert time.monotonic() - began < 10 and "refused" in said[0] and "s3cret" not in said[0]


def test_the_password_is_sent_and_an_address_that_cannot_be_is_named(server):
    url = server.url.replace("http://", "http://me:pass@")
    with contextlib.closing(Alertmanager(url)) as client:
        client.put(FIRING)
        wait(lambda: server.got)
    assert server.got[0][2] == "Basic bWU6cGFzcw=="
    with pytest.raises(UserError, match=r"alertmanager=x must be an address .*\(--alertmanager\)"):
        Alertmanager("x")
