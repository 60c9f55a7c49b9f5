"""kill -9 during saves, the first one too: what was finished comes back, and nothing is left over.

A preloaded interpreter forks the victims: an import costs seconds, a fork nothing.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from megajax.checkpoint.directory import StepFolder

VICTIM = """
    import os, sys
    import jax, numpy as np
    import orbax.checkpoint.experimental.v1
    from megajax.checkpoint.manager import CheckpointManager

    def state(step):
        random = np.random.default_rng(step)
        return {f"x{i}": random.standard_normal((64, 1024), np.float32) for i in range(8)}

    def victim():
        jax.config.update("jax_platforms", "cpu")
        manager = CheckpointManager(sys.argv[1], keep=2)
        step = manager.latest() or 0
        if step:
            found = manager.restore(like=state(0))
            assert manager.latest() == step
            for name, x in state(step).items():
                assert np.asarray(found[name]).tobytes() == x.tobytes(), name
        print("restored", step, flush=True)
        while True:
            step += 1
            handle = manager.save(step, state(step), data_state={"rows": step})
            print("saving", step, flush=True)
            handle.result()
            print("saved", step, flush=True)

    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                victim()
            except BaseException as error:
                print("failed", repr(error), flush=True)
            os._exit(1)
        print("pid", child, flush=True)
        os.waitpid(child, 0)
        print("died", flush=True)
"""


def say(process, line=b"go\n"):
    process.stdin.write(line)
    process.stdin.flush()


@pytest.mark.process
@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_kill_9_during_saves(tmp_path, seed, kills):
    random = np.random.default_rng(seed)
    folder = tmp_path / "c"
    nursery = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(VICTIM), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    finished, sizes = 0, []
    try:
        for kill in range(kills):
            say(nursery)
            begun = 0
            pid = None
            enough = 1 if kill == 0 else int(random.integers(1, 3))  # saves begun before the kill
            while True:
                word, value, *rest = (*nursery.stdout.readline().decode().split(), "")
                assert word not in ("failed", ""), (value, rest)
                if word == "pid":
                    pid = int(value)
                elif word == "restored":
                    assert int(value) >= finished, "older than the last finished save"
                elif word == "saved":
                    finished = int(value)
                elif word == "saving":
                    begun += 1
                    if begun >= enough and pid:
                        break
            time.sleep(random.uniform(0, 0.15))
            os.kill(pid, signal.SIGKILL)
            while (words := nursery.stdout.readline().decode().split())[0] != "died":
                if words[0] == "saved":
                    finished = int(words[1])
            sizes.append(sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()))
    finally:
        nursery.kill()
        nursery.wait()
        nursery.stdin.close()
        nursery.stdout.close()
    steps = StepFolder(folder)
    steps.collect()
    assert finished >= 2
    assert {p.name for p in folder.iterdir()} == {str(s) for s in steps.steps()}
    assert len(steps.steps()) <= 3 and max(sizes) < 5 * 8 * 64 * 1024 * 4
