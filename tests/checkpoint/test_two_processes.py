"""Two processes of two devices each save and restore one state: one answer, no deadlock."""

import shutil
import socket
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.manager import CheckpointManager

pytestmark = [pytest.mark.process, pytest.mark.slow]
SHAPES = {"w": (64, 96), "deep": (8, 16, 32), "odd": (3, 5), "row": (4096,), "one": ()}
SAVED = {"w": P("a", "b"), "deep": P("b"), "odd": P(), "row": P(("a", "b")), "one": P()}
OTHER = {"w": P("b", "a"), "deep": P(None, None, ("a", "b")), "odd": P(), "row": P("b"), "one": P()}

SET_UP = """
    import os, shutil, signal, sys, threading, time
    from pathlib import Path

    import jax
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType

    from megajax.checkpoint import orbax_io, store, trust
    from megajax.checkpoint.trust import MARK, RECORD, CheckpointError, DamagedError
    from megajax.checkpoint.manager import CheckpointManager
    from megajax.checkpoint.store import SaveError
    from tests.checkpoint.test_two_processes import OTHER, SAVED, abstract, check, place

    folder, spare, rank, port = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, rank)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def flip(path, place=0.5):
        data = bytearray(path.read_bytes())
        data[int(len(data) * place)] ^= 4
        path.write_bytes(data)
"""

WORKER = """
    manager = CheckpointManager(folder)
    for specs in (SAVED, OTHER):  # OTHER: each process wants some of every chunk
        check(manager.restore(1, like=abstract(mesh, specs)), 1)
    print("one process's step came back", flush=True)
    for step in (2, 3):
        manager.save(step, place(mesh, SAVED, step)).result()
    check(manager.restore(like=abstract(mesh, OTHER)), 3)

    manager.close()
    assert (folder / "3" / MARK).exists() and manager.steps() == [1, 2, 3]
    multihost_utils.sync_global_devices("marked")
    summed = trust.sum_files

    def flipped(at, names, *rest):
        trust.sum_files = summed
        flip(max((at / n for n in names), key=lambda p: p.stat().st_size))
        return summed(at, names, *rest)

    if rank == 1:
        trust.sum_files = flipped
    manager.save(4, place(mesh, SAVED, 4))
    try:
        manager.close()
        raise SystemExit("no error")
    except SaveError as error:
        assert "step 4" in str(error) and "not what was written: leaf" in str(error), error
    assert manager.latest() == 3 and manager.steps() == [1, 2, 3, 4]
    print("one wrong bit, seen by both", flush=True)
    multihost_utils.sync_global_devices("seen")
    if rank == 0:
        shutil.rmtree(folder / "4")

    def payload(step):
        files = (folder / str(step)).rglob("ocdbt.process_1/d/*")
        return max(files, key=lambda p: p.stat().st_size)

    damages = {
        "a bit of process 1": lambda: flip(payload(3)),
        "a bit of the record": lambda: flip(folder / "3" / RECORD),
        "a bit of the index": lambda: flip(folder / "3" / "state" / "manifest.ocdbt"),
        "half a file": lambda: payload(3).write_bytes(payload(3).read_bytes()[:999]),
        "a file": lambda: payload(3).unlink(),
        "the record": lambda: (folder / "3" / RECORD).unlink(),
    }
    multihost_utils.sync_global_devices("spare")
    if rank == 0:
        shutil.copytree(folder / "3", spare)
    for name, damage in damages.items():
        multihost_utils.sync_global_devices(name)
        if rank == 0:
            damage()
        multihost_utils.sync_global_devices(f"{name} done")
        again = CheckpointManager(folder)
        try:
            again.restore(3, like=abstract(mesh, OTHER))
            raise SystemExit(f"{name}: no error")
        except DamagedError as error:
            assert "step 3" in str(error), error
        assert again.latest() == 2
        check(CheckpointManager(folder).restore(like=abstract(mesh, OTHER)), 2)
        print("fell back after", name, flush=True)
        multihost_utils.sync_global_devices(f"{name} over")
        if rank == 0:
            shutil.rmtree(folder / "3")
            shutil.copytree(spare, folder / "3")

    multihost_utils.sync_global_devices("whole again")
    open_leaf = store.open_leaf

    def broken(step_folder, *args):
        if step_folder.name == "3":
            raise OSError("a network file system that only process 1 has lost")
        return open_leaf(step_folder, *args)

    if rank == 1:
        store.open_leaf = broken
    manager = CheckpointManager(folder)
    try:
        manager.restore(like=abstract(mesh, OTHER))
        raise SystemExit("no error")
    except CheckpointError as error:  # the step is good: nobody falls back, nobody waits
        assert not isinstance(error, DamagedError) and "step 3" in str(error), error
    assert manager.latest() == 3
    print("one error for both", flush=True)
"""


WIPED = """
    manager = CheckpointManager(folder)
    manager.save(1, place(mesh, SAVED, 1)).result()
    write, over = orbax_io.write, time.monotonic() + 3

    def remove():
        while time.monotonic() < over:
            shutil.rmtree(folder, ignore_errors=True)

    def wiped(*args):
        response = write(*args)
        if rank == 0:
            threading.Thread(target=remove).start()
        return response

    orbax_io.write = wiped
    began = time.monotonic()
    over = began + 3
    try:
        manager.save(2, place(mesh, SAVED, 2)).result()
        raise SystemExit("no error")
    except SaveError as error:
        assert time.monotonic() - began < 20, error
        print("refused:", error, flush=True)
    time.sleep(max(over - time.monotonic(), 0) + 1)
    orbax_io.write = write
    manager.save(3, place(mesh, SAVED, 3)).result()
    assert manager.steps() == [3]
    print("saved again", flush=True)
"""

# Process 0 fails and never gives the signals that Orbax's threads of process 1 await.
LOST = "    from orbax.checkpoint._src.futures import future\n\n" + WIPED.replace(
    """        response = write(*args)
        if rank == 0:
            threading.Thread(target=remove).start()
        return response
""",
    """        if rank == 1:
            return write(*args)
        kept, future.set_signals = future.set_signals, silent
        response = write(*args)
        def result(timeout=None):
            time.sleep(1)
            future.set_signals = kept
            raise OSError("process 0 has lost its disk")
        response.result = result
        return response

    def silent(*_, **__):
        raise OSError("no signal")
""",
).replace("manager.steps() == [3]", "manager.steps() == [1, 3]")

KEYED = """
    import dataclasses

    key, other = spare / "key", spare / "other"
    manager = CheckpointManager(folder, key_file=key)
    for step in (1, 2):
        manager.save(step, place(mesh, SAVED, step)).result()
    check(manager.restore(like=abstract(mesh, OTHER)), 2)
    manager.close()
    multihost_utils.sync_global_devices("saved")
    if rank == 1:  # as one who can write there and has no key would
        record = dataclasses.replace(trust.read_record(folder / "2"), signature="")
        (folder / "2" / RECORD).write_text(trust.seal_text(record.text()))
    multihost_utils.sync_global_devices("stripped")
    again = CheckpointManager(folder, key_file=key)
    try:
        again.restore(2, like=abstract(mesh, OTHER))
        raise SystemExit("no error")
    except DamagedError as error:
        assert "it is not signed" in str(error), error
    assert again.latest() == 1
    check(again.restore(like=abstract(mesh, OTHER)), 1)
    try:  # a process with another key than its neighbour's
        wrong = CheckpointManager(folder, key_file=key if rank else other)
        wrong.restore(1, like=abstract(mesh, OTHER))
        raise SystemExit("no error")
    except CheckpointError as error:
        print("refused:", error, flush=True)
"""

UNSEEN = """
    manager = CheckpointManager(folder)
    for step in (1, 2, 3):
        manager.save(step, place(mesh, SAVED, step)).result()
    manager.close()
    multihost_utils.sync_global_devices("saved")
    manager = CheckpointManager(folder)
    listed = manager._steps.steps
    if rank == 0:
        manager._steps.steps = lambda: listed()[:-1]
    check(manager.restore(like=abstract(mesh, OTHER)), 2)
    assert manager.latest() == 2, manager.latest()
    print("process 0 decided", flush=True)
    manager = CheckpointManager(folder)
    if rank == 1:
        manager._steps.steps = lambda: listed()[:-1]
    try:
        manager.restore(like=abstract(mesh, OTHER))
        raise SystemExit("no error")
    except CheckpointError as error:  # the step is good: nobody falls back, nobody waits
        assert not isinstance(error, DamagedError) and "step 3" in str(error), error
    print("one error for both", flush=True)

    def lost():
        raise OSError("its disk is lost")

    manager = CheckpointManager(folder)
    if rank == 1:
        manager._steps.steps = lost
    try:
        manager.restore(like=abstract(mesh, OTHER))
        raise SystemExit("no error")
    except CheckpointError as error:
        print("a listing that fails:", error, flush=True)
"""

TOLD = """
    from megajax.training.interrupts import Interrupts

    manager = CheckpointManager(folder)
    write, told = orbax_io.write, []

    def remove():
        while time.monotonic() < told[0] + 1:
            shutil.rmtree(folder, ignore_errors=True)

    def wiped(*args):
        response = write(*args)
        if not told:
            told.append(time.monotonic())
            if rank == 0:
                threading.Thread(target=remove).start()
            else:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return response

    with Interrupts() as interrupts:
        for step in range(1, 10_000):
            if step == 5:
                orbax_io.write = wiped
            manager.save(step, place(mesh, SAVED, step))
            if interrupts.asked(step):
                break
    try:
        manager.close()
    except SaveError as error:
        print(error, flush=True)
    print(f"ends after step {step}, told {time.monotonic() - told[0]:.1f} s ago", flush=True)
    assert time.monotonic() - told[0] < 30
"""


def values(step):
    random = np.random.default_rng(step)
    return {n: np.asarray(random.standard_normal(s), np.float32) for n, s in SHAPES.items()}


def abstract(mesh, specs):
    return {
        n: jax.ShapeDtypeStruct(s, np.float32, sharding=NamedSharding(mesh, specs[n]))
        for n, s in SHAPES.items()
    }


def place(mesh, specs, step):
    full = values(step)
    return {
        n: jax.make_array_from_callback(x.shape, x.sharding, lambda index, n=n: full[n][index])
        for n, x in abstract(mesh, specs).items()
    }


def check(state, step):
    for name, x in values(step).items():
        for shard in state[name].addressable_shards:
            assert np.asarray(shard.data).tobytes() == x[shard.index].tobytes(), (step, name)


def run_job(worker, folder, spare):
    """Returns (exit codes, outputs) of two processes."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    job = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SET_UP + worker)]
            + [str(a) for a in (folder, spare, rank, port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [p.communicate(timeout=150)[0] for p in job]
    finally:
        for p in job:
            p.kill()
    return [p.returncode for p in job], outputs


@pytest.mark.parametrize("worker", [WIPED, LOST], ids=["wiped", "lost"])
def test_a_save_that_fails_in_one_process_is_an_error_for_both_and_no_hang(tmp_path, worker):
    """Not at the exit either."""
    began = time.monotonic()
    codes, outputs = run_job(worker, tmp_path / "c", tmp_path)
    assert codes == [0, 0], "\n".join(outputs)
    assert time.monotonic() - began < 140
    assert all("refused: step 2 was not saved" in text for text in outputs), outputs
    assert all("saved again" in text for text in outputs), outputs


def test_sigterm_while_a_folder_goes_ends_both_within_seconds(tmp_path):
    codes, outputs = run_job(TOLD, tmp_path / "c", tmp_path)
    assert codes == [0, 0], "\n".join(outputs)
    ends = [text[text.index("ends after step") :].split(",")[0] for text in outputs]
    assert len(set(ends)) == 1, outputs


def test_a_step_that_one_process_does_not_see(tmp_path):
    codes, outputs = run_job(UNSEEN, tmp_path / "c", tmp_path)
    assert codes == [0, 0], "\n".join(outputs)
    assert all("process 0 decided" in text for text in outputs), outputs
    assert all("a listing that fails:" in text for text in outputs), outputs
    assert all("one error for both" in text for text in outputs), outputs


def test_keyed_steps_of_two_processes_count_by_their_signature_only(tmp_path):
    for name, digit in (("key", "1"), ("other", "2")):
        (tmp_path / name).write_text(digit * 64)
        (tmp_path / name).chmod(0o600)
    codes, outputs = run_job(KEYED, tmp_path / "c", tmp_path)
    assert codes == [0, 0], "\n".join(outputs)
    assert all("refused: step 1" in text for text in outputs), outputs


def test_one_step_one_answer(tmp_path):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    folder = tmp_path / "c"
    CheckpointManager(folder).save(1, place(mesh, SAVED, 1)).result()
    codes, outputs = run_job(WORKER, folder, tmp_path / "spare")
    assert codes == [0, 0], "\n".join(outputs)
    assert all(text.count("fell back after") == 6 for text in outputs), outputs
    assert all("one error for both" in text for text in outputs), outputs
    assert all("one wrong bit, seen by both" in text for text in outputs), outputs
    manager = CheckpointManager(folder)  # one process, another mesh
    assert manager.latest() == 3
    for step in (3, 2):
        check(manager.restore(step, like=abstract(jax.make_mesh((2, 4), ("a", "b")), OTHER)), step)
    shutil.rmtree(folder)
