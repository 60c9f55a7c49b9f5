"""Programs that nobody has read: what they may do, and what they may not."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from megajax.systems.hybridflow import sandbox
from megajax.systems.hybridflow.sandbox import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux confines")


def test_programs_end_as_they_would_alone():
    result = run("print(input()[::-1]); import json, math, random, re", stdin="abc\n")
    assert result == ("ok", "cba\n", "")
    failed = run("def f():\n    return 1 / 0\nf()\n")
    assert failed.status == "error"
    assert failed.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert str(pathlib.Path(sandbox.__file__).parent) not in failed.stderr
    for source in ("import sys; sys.exit(3)", "raise SystemExit(77)"):
        assert run(source).status == "error"
    stopped = run("raise KeyboardInterrupt").stderr
    assert "KeyboardInterrupt" in stopped and sandbox.__file__ not in stopped
    assert run("print('before'); bytearray(10**12)") == ("memory", "before\n", "MemoryError\n")
    assert run("def f(:").stderr.splitlines()[-1].startswith("SyntaxError")
    threads = "import threading\nt = threading.Thread(target=print, args=(1,)); t.start(); t.join()"
    assert run(threads).stdout == "1\n"
    wrote = run("open('a', 'w').write('hi'); print(open('a').read())")
    assert wrote[:2] == ("ok", "hi\n")


@pytest.mark.parametrize(
    ("source", "status", "limits"),
    [
        ("while True: pass", "timeout", {"seconds": 0.3}),
        ("import os, time\nos.close(1); os.close(2); time.sleep(60)", "timeout", {"seconds": 0.3}),
        ("while True: print('x' * 1000)", "output", {}),
        ("x = bytearray(10 * 2**30)", "memory", {}),
        ("x = []\nwhile True: x.append(bytearray(2**20))", "memory", {"megabytes": 128}),
        ("import ctypes; ctypes.string_at(0)", "error", {}),
        ("import os\nfor i in range(99): open(str(i), 'wb').write(bytes(2**20))", "error", {}),
    ],
    ids=["loop", "silent", "output", "10 GB", "memory", "crash", "disk"],
)
def test_endless_programs_are_ended(source, status, limits):
    began = time.monotonic()
    assert run(source, **limits).status == status
    assert time.monotonic() - began < 20


FORBIDDEN = {
    "socket": "import socket; socket.socket()",
    "unix socket": "import socket; socket.socket(socket.AF_UNIX)",
    "a file outside": "open({secret!r}).read()",
    "passwords": "open('/etc/passwd').read()",
    "listing": "import os; os.listdir('/')",
    "the environment": "open('/proc/self/environ').read()",
    "the parent's": "open('/proc/{pid}/environ').read()",
    "writing": "open('/tmp/megajax-evil', 'w')",
    "a link": "import os; os.symlink({secret!r}, 'x'); open('x').read()",
    "mode": "import os; os.chmod({secret!r}, 0)",
    "times": "import os; os.utime({secret!r})",
    "truncation": "import os; os.truncate({secret!r}, 0)",
    "removal": "import os; os.remove({secret!r})",
    "a child": "import os\nif os.fork() == 0: import time; time.sleep(60)",
    "a program": "import subprocess; subprocess.run(['/bin/true'])",
    "an exec": "import os; os.execv('/bin/true', ['true'])",
    "a kill": "import os; os.kill({pid}, 9)",
    "namespaces": "import os; os.unshare(os.CLONE_NEWUSER)",
    "shared memory": "import ctypes; assert ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0",
    "a queue": "import ctypes; assert ctypes.CDLL(None).msgget(0, 0o1600) >= 0",
    "a file in memory": "import os; os.memfd_create('x')",
    "a priority": "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_nothing_outside_can_be_reached(name, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("token 1234")
    mode = secret.stat().st_mode, secret.stat().st_mtime
    source = FORBIDDEN[name].format(secret=str(secret), pid=os.getpid())
    result = run(source + "\nprint('reached')")
    assert result.status == "error" and "reached" not in result.stdout
    assert "1234" not in result.stdout + result.stderr
    assert secret.read_text() == "token 1234"
    assert (secret.stat().st_mode, secret.stat().st_mtime) == mode


def test_nothing_is_left_and_no_secret_is_handed_on(monkeypatch):
    monkeypatch.setenv("API_KEY", "token 1234")
    before = {p.name for p in pathlib.Path("/tmp").glob("megajax-sandbox-*")}
    shown = run(
        "import os, sys\nprint(dict(os.environ), sys.argv, os.getcwd())\n"
        "for n in range(3, 64):\n"
        "    try: os.fstat(n); print('descriptor', n)\n"
        "    except OSError: pass\n"
    )
    assert shown.status == "ok"
    assert "1234" not in shown.stdout and "descriptor" not in shown.stdout
    run(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        seconds=0.3,
    )
    listed = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True).stdout
    assert sandbox.__file__ not in listed
    assert {p.name for p in pathlib.Path("/tmp").glob("megajax-sandbox-*")} <= before


def test_arguments_out_of_range_are_named():
    for call, words in (
        (lambda: run("", seconds=0), "seconds=0"),
        (lambda: run("", megabytes=1), "megabytes=1"),
        (lambda: run("", megabytes=2**21), "to 1048576"),
        (lambda: run(b"print(1)"), "source must be a str, not bytes"),
        (lambda: run("#" * (sandbox.SOURCE + 1)), "source has"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(sandbox.SandboxError, match="cannot start"):
        sandbox._run("/nowhere", b"", b"", 1.0, 64)
