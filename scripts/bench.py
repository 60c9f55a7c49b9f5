"""Benchmarks of the trainer and of the server, each beside its best rival.

    uv run scripts/bench.py train [--preset=nano] [--mesh.data=4 --mesh.tensor=2]
    uv run --extra serve scripts/bench.py serve --gguf=FILE --rival=PYTHON [--before=CHECKOUT]

train: the trainer's step (data, step, record) over a minimal hand-written JAX loop of the same
model, mesh, stored shardings and remat (scripts/plain_train.py), A/B/A/B, median of --rounds pairs.
Writes bench_train.json into --out. On a CPU the ratio counts, not the times.
serve: from the start of scripts/serve.py to the first token of a chat, and CPU seconds a token of
one stream and of eight at once (with their prompts), beside llama.cpp without an HTTP server
(scripts/plain_llama.py; PYTHON has llama-cpp-python). Starts have no compiled programs, but for the
rows that say so. Writes bench_serve.json. CPU seconds are user and system time of the process,
which a busy machine changes less than the clock's.
Kernels are timed by scripts/gpu_check.py.
"""

import megajax.core.interrupted  # noqa: F401

import concurrent.futures
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import plain_train
from jax.sharding import NamedSharding

from megajax.core import config
from megajax.core import mesh as mesh_
from megajax.core.config import Checked, group, option
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.core.worker import Worker
from megajax.data.corpus import open_corpora
from megajax.data.loader import Loader, training_rows
from megajax.models.decoder_config import PRESETS as MODELS
from megajax.monitor import results
from megajax.monitor.meter import Meter
from megajax.monitor.records import Jsonl, Recorder
from megajax.training import report
from megajax.training.config import Config as RunConfig
from megajax.training.config import TrainConfig
from megajax.training.step import make_train_step


@dataclass(frozen=True)
class Config(Checked):
    """What to compare."""

    rounds: int = option(30, "timed pairs, after 5 of warm-up", at_least=1)
    gguf: str | None = option(None, "GGUF file that serve measures")
    rival: str | None = option(
        None, "Python interpreter with llama-cpp-python, for serve; none: no rival"
    )
    before: str | None = option(None, "another checkout, whose server serve measures too")
    tokens: int = option(48, "length of an answer, for serve", "tokens", at_least=2)
    out: str = results.out_option("bench")
    run: RunConfig = group(RunConfig)
    emulate: int | None = option(None, "CPU devices to emulate; none: 8 without a GPU", at_least=1)
    mesh: mesh_.MeshSpec = group(mesh_.MeshSpec, resets=True)


def nano() -> Config:
    """The default run with AdamW, which both sides have."""
    run = RunConfig(
        model=MODELS["nano"](), train=TrainConfig(steps=1000, global_batch=32, seq_len=128)
    )
    return Config(run=run, mesh=mesh_.MeshSpec(tensor=2))


QUESTION = "Name three planets."
STREAMS = 8

PRESETS = {"nano": nano}
config.define_flags(PRESETS, "nano")


def bench_train(cfg: Config) -> None:
    """Times both loops on the same data."""
    mesh_.start(cfg.emulate, 8)
    mesh = mesh_.fit(cfg.mesh, nano().mesh, jax.device_count()).build()
    run = replace(cfg.run, mesh=cfg.mesh)
    train_step = make_train_step(run, mesh)
    corpora, _ = open_corpora(run.data, run.cache_dir, vocab=run.model.vocab)
    rows = training_rows(corpora, run.train.seq_len, run.train.seed)
    ours = Loader(rows, train_step.abstract_batch, order=train_step.storage.tokens)
    auto = plain_train.automatic(mesh)
    theirs = Loader(
        rows,
        {
            k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(auto, x.sharding.spec))
            for k, x in train_step.abstract_batch.items()
        },
    )
    state = train_step.init(0)
    place, plain_step = plain_train.make(run, mesh, train_step.abstract_state.params)
    plain_state = place(train_step.init(0).params)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder([Jsonl(Path(folder) / "metrics.jsonl")])
        meter = Meter(report.work(run, mesh), run.train.steps)
        times: tuple[list[float], list[float]] = ([], [])
        losses: tuple[list[float], list[float]] = ([], [])
        for i in range(cfg.rounds + 5):
            began = time.perf_counter()
            state, metrics = train_step.step(state, next(ours))
            loss = float(metrics["loss"])
            recorder.emit(i + 1, {"loss": loss} | meter.finish(i + 1, loss))
            middle = time.perf_counter()
            batch = next(theirs)
            plain_state, value = plain_step(plain_state, batch)
            plain_loss = float(value)
            ended = time.perf_counter()
            losses[0].append(loss)
            losses[1].append(plain_loss)
            if i >= 5:
                times[0].append(middle - began)
                times[1].append(ended - middle)
    # Only the first steps: rounding grows as any training does.
    difference = float(np.abs(np.subtract(*losses))[:8].max())
    if difference > 1e-3:
        raise UserError(f"the two loops do not compute the same: losses differ by {difference:.3g}")
    ratio = float(np.median(np.array(times[0]) / np.array(times[1])))
    loops = []
    for name, taken in zip(("megajax trainer", "hand-written JAX"), times, strict=True):
        p10, median, p90 = (float(np.percentile(taken, p)) for p in (10, 50, 90))
        row = {"loop": name, "median_s": median, "p10_s": p10, "p90_s": p90, "n": len(taken)}
        loops.append(row)
    loops[0]["ratio"] = loops[0]["median_s"] / loops[1]["median_s"]
    about = report.facts(run, mesh, train_step, config.start_name())
    about |= {"median_of_pairwise_ratios": ratio, "largest_loss_difference": difference}
    for row in loops:
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
    print(f"ratio of medians {loops[0]['ratio']:.3f}, median of ratios {ratio:.3f}")
    results.write(expand(cfg.out, "out") / "bench_train.json", about, loops)


class Served:
    """A server of a checkout in a process, with figures of its life."""

    def __init__(self, root: Path, gguf: Path, home: str, *flags: str):
        """Starts the server. home: its home folder, which holds its compiled programs."""
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "scripts/serve.py", f"--gguf={gguf}", "--port=0", *flags],
            cwd=root,
            env=os.environ | {"HOME": home, "PYTHONPATH": str(root)},
            text=True,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        matches = (re.search(r"http://\S+/v1", line) for line in lines)
        address = next((m[0] for m in matches if m), None)
        if address is None:
            raise UserError(f"the server of {root} did not start; its messages are above")
        self.address: str = address

    @property
    def cpu_s(self) -> float:
        """Seconds of user and system time so far."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def peak_mib(self) -> float:
        """The most resident memory so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    def answer(self, tokens: int) -> tuple[float, float, float]:
        """Returns (seconds since the start, CPU seconds) at the first token of an answer, and CPU
        seconds at its end."""
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        body |= {"max_tokens": tokens, "stream": True, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.address}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        first = None
        with urllib.request.urlopen(request, timeout=600) as lines:
            for line in lines:
                if first is None and b'"content":"' in line.replace(b'": "', b'":"'):
                    if b'"content":""' not in line.replace(b'": "', b'":"'):
                        first = time.monotonic() - self.began, self.cpu_s
        assert first is not None
        return *first, self.cpu_s

    def settle(self) -> None:
        """Waits until the server is idle: after its start it compiles programs of other sizes."""
        before, now = -1.0, self.cpu_s
        while now - before > 0.05:
            time.sleep(2)
            before, now = now, self.cpu_s

    def stop(self) -> None:
        """Ends the server."""
        self.process.terminate()
        self.process.wait(120)


def serve_row(name: str, root: Path, gguf: Path, home: str, tokens: int, *flags: str) -> dict:
    """Returns the figures of one server."""
    server = Served(root, gguf, home, *flags)
    try:
        first_s, first_cpu, end_cpu = server.answer(tokens)
        row = {"who": name, "first_token_s": first_s, "first_token_cpu_s": first_cpu}
        row |= {"answer_cpu_s": end_cpu}
        for streams in (1, STREAMS):
            with concurrent.futures.ThreadPoolExecutor(streams) as pool:
                taken = 0.0
                for _ in range(2):  # what the first turn compiles does not count
                    server.settle()
                    began = server.cpu_s
                    answers = list(pool.map(server.answer, [tokens] * streams))
                    taken = server.cpu_s - (answers[0][1] if streams == 1 else began)
            row[f"cpu_s_a_token_{streams}"] = taken / tokens / streams
        return row | {"peak_mib": server.peak_mib}
    finally:
        server.stop()


def rival_row(python: str, gguf: Path, tokens: int) -> dict:
    """Returns the figures of llama.cpp."""
    began = time.monotonic()
    script = Path(__file__).with_name("plain_llama.py")
    threads = "1"  # which costs it the fewest CPU seconds: several wait for each other in loops
    command = [python, "-P", str(script), str(gguf), str(tokens), threads]
    row: dict[str, Any] = {"who": "llama.cpp"}
    with contextlib.closing(Worker(command, stderr=subprocess.DEVNULL)) as rival:
        for message in rival.messages():
            if "streams" not in message:
                row |= {"first_token_s": time.monotonic() - began} | message
                continue
            row[f"cpu_s_a_token_{message['streams']}"] = message["cpu_s_a_token"]
            row["peak_mib"] = message["peak_mib"]
        code = rival.process.wait()
    if code or "peak_mib" not in row:
        raise UserError(f"{python} {script} failed with code {code} (--rival)")
    return row | {"first_token_cpu_s": row.pop("first_cpu_s")}


def bench_serve(cfg: Config) -> None:
    """Measures the server of this checkout, of another one, and the rival."""
    if cfg.gguf is None:
        raise UserError("serve needs a model (--gguf)")
    gguf, checkout = expand(cfg.gguf, "gguf").resolve(), Path(__file__).resolve().parent.parent
    rows = []
    path = expand(cfg.out, "out") / "bench_serve.json"
    about: dict[str, Any] = results.facts("cpu", "measured on a CPU")
    about |= {"model": gguf.name, "tokens": cfg.tokens, "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as other:
        turns: list[Any] = []
        if cfg.rival is not None:
            turns.append(lambda: rival_row(str(cfg.rival), gguf, cfg.tokens))
        if cfg.before is not None:
            root = expand(cfg.before, "before")
            turns.append(lambda: serve_row("before", root, gguf, other, cfg.tokens))
        for name, flags in (
            ("megajax", ()),
            ("megajax, programs kept", ()),
            ("megajax, packed weights", ("--weights=packed",)),
        ):
            turns.append(
                lambda name=name, flags=flags: serve_row(
                    name, checkout, gguf, home, cfg.tokens, *flags
                )
            )
        for measure in turns:
            rows.append(measure())
            for member in [n for n in rows[-1] if n != "who" and n in rows[0] and cfg.rival]:
                rows[-1] |= {f"{member}_over_rival": rows[-1][member] / rows[0][member]}
            results.write(path, about, rows)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()})


def main(what: str) -> int:
    """Runs one benchmark."""
    cfg, _ = config.from_flags(PRESETS)
    if what not in ("train", "serve"):
        raise UserError(f"{what!r} must be train or serve; scripts/gpu_check.py times kernels")
    results.writable_folder(cfg.out)
    (bench_train if what == "train" else bench_serve)(cfg)
    return 0


if __name__ == "__main__":
    sys.exit(config.run(main, positional=1))
