"""Processes that play machines, with the exporters and the Prometheus server that watch them.

Each machine is a process group that works a little every second, and is put under stress on demand:
processors, memory, disk, network. Its agent (scripts/agent_metrics.py) shows the counters of that
group only, since exporters on one kernel would all show the same host. The server and the node
exporter are those of Debian: installed, or unpacked into a temporary folder.
"""

import atexit
import contextlib
import functools
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {"prometheus": "prometheus", "prometheus-node-exporter": "prometheus-node-exporter"}
NEEDED = f"needs Debian's {' and '.join(PACKAGES)}"
PASSWORD = "s3cret"
# bcrypt of PASSWORD, of the least cost, so that checking it takes no time
HASHED = "$2b$04$abcdefghijklmnopqrstuuLZYjhNQAOdpbzt4WxWlUHjv1wsyH5DG"

# One machine. Reads lines "kind amount" from standard input; amount 0 ends the stress.
MACHINE = r"""
import os, socket, sys, tempfile, threading, time
amount = dict.fromkeys(("cpu", "memory", "disk", "network"), 0.0)
has_network = sys.argv[1] == "1"
try:  # else what runs here besides makes busy machines look idle
    os.nice(-10)
    with open("/proc/self/autogroup", "w") as f: f.write("-10")  # Linux shares among sessions first
except OSError: pass
if has_network:
    os.unshare(os.CLONE_NEWNET)
    for words in ("link add eth0 type veth peer name eth1", "addr add 10.9.0.1/24 dev eth0",
                  "link set eth0 up", "link set eth1 up",
                  "neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev eth0"):
        if os.spawnvp(os.P_WAIT, "ip", ["ip", *words.split()]): sys.exit("no network namespace")

def burn(share):
    begin = time.perf_counter()
    while time.perf_counter() - begin < share * 0.1: pass
    time.sleep(max(0.0, 0.1 - (time.perf_counter() - begin)))

def work():
    held = b""
    file = tempfile.TemporaryFile(dir=sys.argv[2])
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    step = 0
    while True:
        step += 1
        burn(amount["cpu"] or (0.3 if step % 10 == 0 else 0.02))  # a step of training a second
        if len(held) != (size := int(amount["memory"] * 2**20)): held = bytearray(size)
        megabytes = amount["disk"] or (0.05 if step % 10 == 0 else 0)
        if megabytes:
            os.pwrite(file.fileno(), os.urandom(4096) * int(megabytes * 256 / 10 + 1), 0)
            os.fdatasync(file.fileno())
        for _ in range(int((amount["network"] or 0.05) * 100) if has_network else 0):
            sock.sendto(b"x" * 1000, ("10.9.0.2", 9))

threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    kind, size = line.split()
    amount[kind] = float(size)
"""


@functools.cache
def program(name: str) -> str | None:
    """Returns a program of Debian's package of that name, None where there is none to be had."""
    if installed := shutil.which(name):
        return installed
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return None
    folder = Path(tempfile.mkdtemp(prefix="megajax-debian-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = ["apt-get", "download", "-q", name, "-o", "APT::Sandbox::User=root"]
    with contextlib.suppress(subprocess.SubprocessError):
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, folder], check=True, timeout=60)
    file = folder / "usr/bin" / name
    return str(file) if file.exists() else None


def is_missing() -> str:
    """Returns why there can be no real server here, or ''.

    A download may be needed to tell, so marks hold the call as text: pytest evaluates that before
    the test, not while it collects all of them.
    """
    missing = [name for name in PACKAGES if program(name) is None]
    return f"needs Debian's {' and '.join(missing)}" if missing else ""


def can_have_networks() -> bool:
    """Tells whether machines can have network namespaces of their own."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    test = ["unshare", "-n", "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth1"]
    return subprocess.run(test, capture_output=True).returncode == 0


def free_port() -> int:
    """Returns a port that nobody has at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Machine:
    """One of them, with its agent. instance: what Prometheus calls it."""

    def __init__(self, folder: Path, network: bool):
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", MACHINE, str(int(network)), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout and self._process.stdout.readline() == "ready\n"
        self._agent = subprocess.Popen(
            [sys.executable, "scripts/agent_metrics.py", "--port=0", f"--pid={self._process.pid}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    @functools.cached_property
    def instance(self) -> str:
        """Its address. Waits until the agent serves."""
        assert self._agent.stdout is not None
        return self._agent.stdout.readline().split("/")[2]

    def stress(self, kind: str, amount: float) -> None:
        """kind: "cpu" (share of a processor), "memory" (MiB), "disk" or "network" (MB/s)."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {amount}\n")
        self._process.stdin.flush()

    def freeze(self, frozen: bool) -> None:
        """Stops all of its processes, or lets them go on."""
        os.killpg(self._process.pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def kill(self) -> None:
        """Ends the machine; its agent has nothing to show from then on."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Ends both."""
        self.kill()
        self._agent.terminate()
        self._agent.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._agent.stdout):
            with contextlib.suppress(OSError):  # a line that the machine did not read
                pipe.close()  # type: ignore[missing-attribute]


@contextlib.contextmanager
def machines(count: int, folder: Path, network: bool = False) -> Iterator[list[Machine]]:
    """Yields so many machines. folder: where they write."""
    with contextlib.ExitStack() as stack:
        running = []
        for _ in range(count):
            running.append(Machine(folder, network))
            stack.callback(running[-1].close)
        yield running


class Server:
    """A Prometheus server that scrapes some instances every second."""

    def __init__(self, folder: Path, instances: list[str] | dict[str, str], guarded: bool = False):
        """instances: their addresses; a dict also says which `instance` each is shown as. guarded:
        with basic authentication (user `me`) and TLS, by `certificate`."""
        self.folder, self.port, self._process = folder, free_port(), None
        names = instances if isinstance(instances, dict) else {i: i for i in instances}
        static = [{"targets": [at], "labels": {"instance": name}} for at, name in names.items()]
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
            f"scrape_configs: [{{job_name: machines, static_configs: {json.dumps(static)}}}]\n"
        )
        self.certificate, self._more = folder / "certificate.pem", list[str]()
        if guarded:
            subprocess.run(
                [
                    "openssl",
                    "req",
                    "-x509",
                    "-newkey",
                    "rsa:2048",
                    "-nodes",
                    "-days",
                    "2",
                    "-keyout",
                    folder / "key.pem",
                    "-out",
                    self.certificate,
                    "-subj",
                    "/CN=x",
                    "-addext",
                    "subjectAltName=IP:127.0.0.1",
                ],
                check=True,
                capture_output=True,
            )
            files = "cert_file: certificate.pem, key_file: key.pem"
            (folder / "web.yml").write_text(
                f"tls_server_config: {{{files}}}\nbasic_auth_users: {{me: '{HASHED}'}}\n"
            )
            self._more = [f"--web.config.file={folder}/web.yml"]
        self.url = f"http{'s' * guarded}://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Starts it on what it has stored."""
        with (self.folder / "prometheus.log").open("a") as log:
            self._process = subprocess.Popen(
                [
                    str(program("prometheus")),
                    f"--config.file={self.folder}/prometheus.yml",
                    f"--storage.tsdb.path={self.folder}/data",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                    *self._more,
                ],
                stderr=log,
            )

    def send(self, number: int) -> None:
        """Sends it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """Ends it as an operator would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        self._process.wait()


@contextlib.contextmanager
def server(
    folder: Path, instances: list[str] | dict[str, str], guarded: bool = False
) -> Iterator[Server]:
    """Yields a server."""
    folder.mkdir()
    running = Server(folder, instances, guarded)
    try:
        yield running
    finally:
        running.stop()


@contextlib.contextmanager
def node_exporter() -> Iterator[str]:
    """Yields the instance of a node exporter of this host."""
    instance = f"127.0.0.1:{free_port()}"
    command = [
        str(program("prometheus-node-exporter")),
        f"--web.listen-address={instance}",
        "--collector.ethtool",
        "--log.level=error",
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://{instance}/metrics").close()
                break
            time.sleep(0.1)
        yield instance
    finally:
        process.terminate()
        process.wait()


class Proxy(http.server.ThreadingHTTPServer):
    """Stands before a server of HTTP. mode: "pass", "half" (of each answer), "slow", "refuse"
    (401), or "nonsense". count: requests so far, by mode."""

    daemon_threads = True

    def __init__(self, target: str):
        """target: its address."""
        super().__init__(("127.0.0.1", 0), _Passing)
        self.target, self.mode, self.count = target, "pass", dict[str, int]()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address) -> None:
        """Clients may go in the middle."""


class _Passing(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Passes a request on, and its answer back."""
        proxy = self.server
        assert isinstance(proxy, Proxy)
        mode = proxy.mode
        proxy.count[mode] = proxy.count.get(mode, 0) + 1
        size = self.headers.get("Content-Length")
        body = self.rfile.read(int(size)) if size else None
        if mode == "slow":
            time.sleep(30)
        if mode in ("refuse", "nonsense"):
            status, answer = (401, b"Unauthorized") if mode == "refuse" else (200, b"<html>")
        else:
            status, answer = self._ask(proxy.target, body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer[: len(answer) // 2] if mode == "half" else answer)
        self.close_connection |= mode == "half"

    do_POST = do_GET

    def _ask(self, target: str, body: bytes | None) -> tuple[int, bytes]:
        kind = {"Content-Type": self.headers["Content-Type"]} if body is not None else {}
        request = urllib.request.Request(target + self.path, body, kind)
        try:
            with urllib.request.urlopen(request) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 502, b"bad gateway"

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@contextlib.contextmanager
def proxy(target: str) -> Iterator[Proxy]:
    """Yields a proxy before an address."""
    running = Proxy(target)
    thread = threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield running
    finally:
        running.shutdown()
        running.server_close()
        thread.join()


@contextlib.contextmanager
def alertmanager(folder: Path) -> Iterator[str | None]:
    """Yields the address of a real Alertmanager, None where there is none to be had.

    Debian's program reads its default template from /usr/share. Where it was only unpacked, it runs
    in a mount namespace that shows the unpacked folder there.
    """
    binary = program("prometheus-alertmanager")
    unpacked = binary is not None and not binary.startswith("/usr")
    if binary is None or (unpacked and (os.geteuid() != 0 or not shutil.which("unshare"))):
        yield None
        return
    folder.mkdir()
    (folder / "config.yml").write_text("route: {receiver: none}\nreceivers: [{name: none}]\n")
    port = free_port()
    command = [
        binary,
        f"--config.file={folder}/config.yml",
        f"--storage.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    if unpacked:
        share = Path(binary).parent.parent / "share"
        script = f'mount --bind {share} /usr/share && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", script, "sh", *command]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready").close()
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
