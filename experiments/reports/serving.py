"""Serving: requests, two ways to serve them, the figure and the tables of the results."""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments.reports.reporting import panels, read, save, table
from megajax.core.errors import UserError
from megajax.data.config import DataConfig
from megajax.data.source import open_source
from megajax.data.tokenizer import ByteTokenizer
from megajax.serving import Engine, SamplingParams

# ---- requests
#
# Requests as a corpus has them, and two ways of serving them with one engine.
#
# Prompts and answers have the lengths of real text: a block of source code between blank lines is
# cut at a random place, and what follows it is as long as the answer. Half of the requests begin
# with one of a few common prefixes. An engine with random weights answers; its answers have these
# lengths.
#
# `continuous` hands each request to the engine when it arrives. `static` waits until all requests
# of the batch before have ended, and `padded` also computes the padding that a rectangular batch
# has: prompts and answers as long as the longest of the batch. All use the same compiled programs.


Mode = Literal["continuous", "continuous, no prefix reuse", "static", "static, padded"]
MODES: tuple[Mode, ...] = ("continuous", "continuous, no prefix reuse", "static", "static, padded")
MOST_PROMPT, MOST_ANSWER = 192, 128  # (chosen) tokens, so that a context of 512 holds both
PREFIX, PREFIXES = 64, 4  # (chosen) tokens of a common prefix, and how many there are
FILES = 200  # (chosen) files of the corpus that are read


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and the number of tokens of its answer."""

    prompt: list[int]
    answer: int


@dataclasses.dataclass
class Served:
    """Times of a request in seconds: its arrival, its first and its last token."""

    arrival: float
    first: float = 0.0
    last: float = 0.0


def requests(source: str, count: int, seed: int) -> list[Request]:
    """Returns requests with the lengths of a corpus's blocks. Raises: UserError if it is small."""
    random, tokenizer = np.random.default_rng(seed), ByteTokenizer()
    documents = open_source(source, DataConfig(source=source)).documents()
    texts = [document.text for document in itertools.islice(documents, FILES)]
    blocks = [b for text in texts for b in text.split("\n\n") if len(b.encode()) >= 8]
    if len(blocks) < count:
        raise UserError(
            f"data={source}: {len(blocks)} blocks of text for {count} requests; nearest: "
            f"requests={len(blocks)} (--data, --requests)"
        )
    prefixes = [tokenizer.encode([b])[0].tolist() * PREFIX for b in blocks[:PREFIXES]]
    drawn = []
    for i in random.permutation(len(blocks))[:count]:
        ids = tokenizer.encode([blocks[i]])[0].tolist()
        cut = int(random.integers(1, len(ids)))
        begin = prefixes[random.integers(PREFIXES)][:PREFIX] if random.random() < 0.5 else []
        prompt, answer = ids[:cut][:MOST_PROMPT], min(len(ids) - cut, MOST_ANSWER)
        drawn.append(Request(begin + prompt, answer))
    return drawn


def arrivals(count: int, rate: float, seed: int) -> np.ndarray:
    """Returns the times of a Poisson process, in seconds. rate: requests a second; inf: at once."""
    if np.isinf(rate):
        return np.zeros(count)
    return np.random.default_rng(seed).exponential(1 / rate, count).cumsum()


def batches(load: Sequence[Request], size: int, padded: bool) -> Iterator[list[Request]]:
    """Yields batches in the order of arrival. padded: all as long as the longest."""
    for start in range(0, len(load), size):
        batch = list(load[start : start + size])
        if padded:
            prompt = max(len(request.prompt) for request in batch)
            answer = max(request.answer for request in batch)
            batch = [Request([0] * (prompt - len(r.prompt)) + r.prompt, answer) for r in batch]
        yield batch


def serve(
    engine: Engine, load: Sequence[Request], mode: Mode, times: np.ndarray, size: int
) -> dict[str, Any]:
    """Serves a load that comes at these times. size: requests of a static batch.

    Returns: tokens (those asked for), seconds, tokens_per_s, steps (calls of the device), cpu_s (of
      this process, which other processes of the machine change less) and, in seconds, percentiles
      of the time to the first token, of the time of each later token and of the whole request.
    """
    engine.pool.prefix_cache = mode == "continuous"
    engine.scheduler.drop_prefixes()
    served = [Served(float(t)) for t in times]
    began, busy, steps = time.perf_counter(), time.process_time(), 0
    done: dict[int, int] = {}
    owners: dict[int, int] = {}
    queue = _queue(load, mode, size)
    pending: list[tuple[int, Request]] = next(queue, [])
    while pending or engine.busy:
        now = time.perf_counter() - began
        ready = [(i, r) for i, r in pending if times[i] <= now]
        # A static batch starts when the one before has ended and all of its requests are there.
        is_complete = len(ready) == len(pending) and not engine.busy
        if ready and (mode.startswith("continuous") or is_complete):
            for i, r in ready:
                asked = SamplingParams(max_tokens=r.answer, temperature=0, ignore_eos=True)
                owners[engine.submit(r.prompt, asked)] = i
            pending = pending[len(ready) :] or next(queue, [])
        if not engine.busy:
            time.sleep(max(times[pending[0][0]] - now, 0.0005))
            continue
        outputs = engine.step()
        steps, now = steps + 1, time.perf_counter() - began
        for output in outputs:
            i = owners[output.request_id]
            done[i] = done.get(i, 0) + len(output.tokens)
            served[i].first = served[i].first or now
            if done[i] >= load[i].answer and not served[i].last:
                served[i].last = now
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    return _summary(load, served, seconds, steps) | {"cpu_s": busy}


def _queue(load: Sequence[Request], mode: Mode, size: int) -> Iterator[list[tuple[int, Request]]]:
    """Yields requests that may be submitted together, with their numbers."""
    number = itertools.count()
    if mode.startswith("continuous"):
        yield list(zip(number, load, strict=False))
        return
    for batch in batches(load, size, mode == "static, padded"):
        yield [(next(number), request) for request in batch]


def _summary(
    load: Sequence[Request], served: Sequence[Served], seconds: float, steps: int
) -> dict[str, Any]:
    tokens = sum(request.answer for request in load)
    figures: dict[str, Any] = {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "steps": steps,
    }
    each = [
        (s.last - s.first) / (r.answer - 1)
        for s, r in zip(served, load, strict=True)
        if r.answer > 1
    ]
    for name, values in (
        ("first_token_s", [s.first - s.arrival for s in served]),
        ("per_token_s", each or [0.0]),
        ("request_s", [s.last - s.arrival for s in served]),
    ):
        for percent in (50, 90, 99):
            figures[f"{name}_p{percent}"] = float(np.percentile(values, percent))
    return figures


# ---- figure and tables


Row = dict[str, Any]
COLOURS = {
    "continuous": "#0072B2",
    "continuous, no prefix reuse": "#56B4E9",
    "static": "#D55E00",
    "static, padded": "#E69F00",
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws tokens a second of all modes, and the latency of a request at each offered load.

    rows: those of the parts 'offline', 'online' and 'claim'. Writes SVG and PNG.
    """
    figure, (left, right) = panels(2, size=(10.5, 3.8))
    offline = [r for r in rows if r["part"] == "offline"]
    for place, row in enumerate(offline):
        error = [[row["tokens_per_s"] - row["slowest"]], [row["fastest"] - row["tokens_per_s"]]]
        left.barh(
            place,
            row["tokens_per_s"],
            xerr=error,
            color=COLOURS[row["mode"]],
            height=0.6,
            capsize=3,
        )
    left.set_yticks(range(len(offline)), [r["mode"] for r in offline], fontsize=8)
    left.invert_yaxis()
    left.set(xlabel="tokens a second, all requests at once")
    n = max((r["n"] for r in offline), default=0)
    left.set_title(f"median of {n} runs, bars: slowest and fastest", fontsize=9, loc="left")
    for mode in ("static, padded", "static", "continuous"):
        curve = [r for r in rows if r["part"] == "online" and r["mode"] == mode]
        curve.sort(key=lambda row: row["load"])
        if curve:
            right.plot(
                [r["tokens_per_s"] for r in curve],
                [r["request_s_p50"] for r in curve],
                "o-",
                color=COLOURS[mode],
                label=f"{mode}, median",
                markersize=4,
            )
            right.plot(
                [r["tokens_per_s"] for r in curve],
                [r["request_s_p90"] for r in curve],
                "v:",
                color=COLOURS[mode],
                label=f"{mode}, p90",
                markersize=4,
            )
    right.set(xlabel="tokens a second, Poisson arrivals", ylabel="seconds from arrival to end")
    right.set_yscale("log")
    right.set_title("each point: another rate of arrival", fontsize=9, loc="left")
    right.legend(fontsize=7, frameon=False)
    claim = next((r for r in rows if r["part"] == "claim"), None)
    title = (
        f"Continuous batching: {claim['value']:.2f} times padded static batching" if claim else ""
    )
    save(figure, path, title)


def offline(path: Path) -> str:
    """Returns the table of all requests at once, by mode."""
    columns = {
        "mode": "mode",
        "tokens/s": "tokens_per_s",
        "slowest run": "slowest",
        "fastest run": "fastest",
        "runs": "n",
        "steps": "steps",
        "tokens/s over those of padded static": "ratio",
        "the same by CPU time": "cpu_ratio",
    }
    result = read(path)
    text = (
        f"{result['requests']} requests of {result['prompt_tokens']:.0f} prompt tokens and "
        f"{result['answer_tokens']:.0f} answer tokens on average, up to {result['max_batch']} at a "
        f"time; {result['cores']} cores."
    )
    return f"{text}\n\n{table(path, columns, part='offline')}"


def online(path: Path) -> str:
    """Returns the table of Poisson arrivals, by rate."""
    columns = {
        "mode": "mode",
        "offered load": "load",
        "tokens/s": "tokens_per_s",
        "first token, median s": "first_token_s_p50",
        "first token, p90 s": "first_token_s_p90",
        "each token, median s": "per_token_s_p50",
        "request, median s": "request_s_p50",
        "request, p90 s": "request_s_p90",
    }
    return table(path, columns, part="online")


def numerics(path: Path) -> str:
    """Returns the table of fast beside exact numerics."""
    columns = {
        "numerics": "numerics",
        "sequences at a time": "batch",
        "tokens/s": "tokens_per_s",
        "slowest run": "slowest",
        "fastest run": "fastest",
        "runs": "n",
        "tokens/s over those of fast": "of_fast",
        "the same by CPU time": "cpu_of_fast",
    }
    return table(path, columns, part="numerics")
