"""A child process and its messages: in order, apart from what is printed, until its end."""

import subprocess
import sys
import time

import pytest

from megajax.core.worker import Worker

ECHO = """
import json, os, sys
out = os.fdopen(int(sys.argv[1]), "w") if len(sys.argv) > 1 else sys.stdout
print("no message", flush=True)
for line in sys.stdin:
    print(json.dumps({"got": json.loads(line)}), file=out, flush=True)
    if json.loads(line) == "end":
        break
"""


@pytest.fixture(params=[False, True], ids=["stdout", "apart"])
def child(request):
    worker = Worker([sys.executable, "-c", ECHO], apart=request.param, stdout=subprocess.DEVNULL)
    yield worker
    worker.close()


def test_messages_come_in_order_until_the_child_ends(child):
    long = "x" * 300_000  # more than a pipe holds
    for message in ([1, None], long, "end"):
        assert child.send(message)
    assert [m["got"] for m in child.messages()] == [[1, None], long, "end"]
    assert child.silent and child.process.wait(60) == 0


def test_receive_does_not_wait_and_a_child_that_ended_takes_no_message(child):
    assert child.receive() == [] and not child.silent
    child.kill()
    child.process.wait(60)
    deadline = time.monotonic() + 60
    while child.send("more"):
        assert time.monotonic() < deadline
    assert list(child.messages()) == []
