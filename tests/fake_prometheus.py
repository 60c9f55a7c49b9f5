"""A server that answers range queries as Prometheus does, or misbehaves in a chosen way."""

import contextlib
import http.server
import json
import threading
import time
from urllib.parse import parse_qs, urlsplit


class Fake:
    """`misbehave(handler, parameters)` answers the next requests; False: it has not."""

    def __init__(self, series, tls=None):
        """series(query, t) -> {labels as a tuple of pairs: text of the value}."""
        self.series, self.misbehave = series, lambda handler, parameters: False
        self.asked = []  # (path, parameters, headers)

        class Handler(_Handler):
            fake = self

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # a client may go in the middle
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"

    @property
    def pages(self):
        return [p for path, p, _ in self.asked if path == "/api/v1/query_range"]

    @contextlib.contextmanager
    def running(self):
        thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            self.server.server_close()
            thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: Fake

    def log_message(self, *_):
        pass

    def do_GET(self):
        parts = urlsplit(self.path)
        text = parts.query
        if self.command == "POST":
            text = self.rfile.read(int(self.headers["content-length"])).decode()
        parameters = {k: v[0] for k, v in parse_qs(text).items()}
        self.fake.asked.append((parts.path, parameters, dict(self.headers)))
        if self.fake.misbehave(self, parameters) is False:
            self.matrix(parameters)

    do_POST = do_GET

    def matrix(self, parameters):
        start, end, step = (float(parameters[k]) for k in ("start", "end", "step"))
        series = {}
        for k in range(int((end - start) // step) + 1):
            for labels, value in self.fake.series(parameters["query"], start + k * step).items():
                series.setdefault(labels, []).append([start + k * step, value])
        result = [{"metric": dict(labels), "values": v} for labels, v in series.items()]
        self.data({"resultType": "matrix", "result": result})

    def data(self, data, **more):
        self.say(200, json.dumps({"status": "success", "data": data, **more}))

    def error(self, status, kind, message):
        self.say(status, json.dumps({"status": "error", "errorType": kind, "error": message}))

    def say(self, status, text, length=None, **headers):
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)
            self.wfile.flush()

    def drip(self, seconds):
        """A byte every 20 ms of an answer that is far from its end."""
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            while time.monotonic() < until:
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.02)
        self.close_connection = True
