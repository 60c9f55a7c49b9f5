"""A browser without a window, driven through chromedriver's HTTP interface (W3C WebDriver)."""

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

ARGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
    --disable-background-networking --disable-component-update --disable-sync""".split()
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # (W3C WebDriver, section 12) key of an element
INSTALLED = all(shutil.which(name) for name in ("chromium", "chromedriver"))


class Browser:
    """One window."""

    def __init__(self, driver, profile, *args):
        self._session = ""
        self._driver = driver
        options = {"args": [*ARGS, f"--user-data-dir={profile}", *args]}
        made = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        self._session = f"/session/{self._ask('POST', '/session', made)['sessionId']}"

    def _ask(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._driver + self._session + path,
            data,
            {"Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()[:2000]) from None

    def open(self, url):
        self._ask("POST", "/url", {"url": url})

    def run(self, script, *args):
        """Returns what a script returns, which runs as the body of a function."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    def press(self, selector, text):
        """Types into an element."""
        node = self._ask("POST", "/element", {"using": "css selector", "value": selector})
        self._ask("POST", f"/element/{node[ELEMENT]}/value", {"text": text})

    def click(self, selector):
        node = self._ask("POST", "/element", {"using": "css selector", "value": selector})
        self._ask("POST", f"/element/{node[ELEMENT]}/click", {})

    def until(self, expression, seconds=20):
        """Waits until an expression of JavaScript is true; returns it."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {expression}")):
            assert time.monotonic() < end, (
                f"{expression}: {self.run('return document.body.innerText')}"
            )
            time.sleep(0.05)
        return value

    def resize(self, width, height):
        self._ask("POST", "/window/rect", {"width": width, "height": height})

    def cast(self, scheme):
        """Sets the colour scheme that the page sees."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        body = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self._ask("POST", "/goog/cdp/execute", body)

    def picture(self, path):
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def close(self):
        self._ask("DELETE", "")


@contextlib.contextmanager
def browser(folder, *args):
    """Yields a Browser whose profile is in a folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(200):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/status", timeout=5).close()
                break
            time.sleep(0.1)
        made = Browser(address, folder / "profile", *args)
        try:
            yield made
        finally:
            made.close()
    finally:
        driver.terminate()
        driver.wait(20)
