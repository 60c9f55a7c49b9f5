"""A worker without jax for tests of the parent: each item does what the specification says."""

import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # python -S knows no installed package
from scripts.gpu_session.channel import Channel, Item, work


def sleep_for_ever():
    """With a process of its own, as a compiler would be."""
    child = subprocess.Popen(["sleep", "1000"])
    print("hanging with", child.pid, flush=True)
    time.sleep(1000)


def die():
    os.kill(os.getpid(), signal.SIGSEGV)


def leave():
    print("said before it left", flush=True)
    os._exit(3)


def cuda_error():
    raise RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access")


def behave(what, channel, name):
    what = what.removeprefix("rival ")
    if what == "hang in tile 1":
        for tile in ("tile 0", "tile 1"):
            if tile not in channel.spec["skip"]:
                channel.stage(tile, 0.3, name, skip=tile)
                if tile == "tile 1":
                    time.sleep(1000)
        return {"value": 1, "left_out": channel.spec["skip"]}
    if what == "stay":
        time.sleep(1000)
    if what == "slow":
        time.sleep(0.3)
    if what == "error":
        raise ValueError("no such shape")
    deeds = {"hang": sleep_for_ever, "die": die, "leave": leave, "cuda": cuda_error}
    deeds.get(what, lambda: None)()
    return {"value": 1, "pid": os.getpid()} | ({"passed": False} if what == "wrong" else {})


channel = Channel()
if channel.spec.get("refuse"):
    channel.end("refused", "there is no device here")
    sys.exit(1)
if "missing" in channel.spec:
    channel.end("missing", f"ModuleNotFoundError: No module named {channel.spec['missing']!r}")
    sys.exit(1)
channel.hello(device="Fake GPU 1", slug="fake_gpu_1")
if channel.spec.get("stuck"):
    channel.stage("build", 0.3)
    time.sleep(1000)
if "slow to exit" in channel.spec["items"]:
    atexit.register(time.sleep, 1000)
work(
    channel,
    [
        Item(
            name,
            lambda what=what, name=name: behave(what, channel, name),
            limit_s=0.5 if what.endswith("hang") else 100,
            about={"side": 1} if "rival" in what else None,
            optional=what == "error" or "rival" in what,
        )
        for name, what in channel.spec.get("items", {}).items()
    ],
)
