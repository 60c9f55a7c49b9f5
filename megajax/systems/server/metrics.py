"""What a server measures, for Prometheus. Names are vLLM's, with the prefix megajax.

Source: vLLM, docs/design/metrics.md. A server has a registry of its own, so that several can run in
one process.
"""

import functools
from typing import Any

import prometheus_client as prometheus

PREFIX = "megajax:"
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 60)
LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


def _named[T](
    kind: type[T], name: str, about: str, more: tuple[str, ...] = (), **options: Any
) -> T:
    """Returns a metric that every use labels with the model."""
    return kind(PREFIX + name, about, ("model_name", *more), **options)  # type: ignore[call-arg]


class Metrics:
    """Counters, gauges and histograms of one model."""

    def __init__(self, model: str):
        """model: the label model_name of every metric."""
        self.registry = prometheus.CollectorRegistry()
        self._model, self._seen = model, {"preemptions": 0, "prefix_hits": 0}
        of = functools.partial(_named, registry=self.registry)
        one = {"model_name": model}
        gauge, counter = prometheus.Gauge, prometheus.Counter
        self._running = of(gauge, "num_requests_running", "Answers with a slot.").labels(**one)
        self._waiting = of(gauge, "num_requests_waiting", "Answers without one.").labels(**one)
        self._usage = of(gauge, "kv_cache_usage_perc", "Used pages, 0 to 1.").labels(**one)
        self._preemptions = of(counter, "num_preemptions", "Preempted answers.").labels(**one)
        self._hits = of(counter, "prefix_cache_hits", "Prompt tokens found.").labels(**one)
        self._prompt = of(counter, "prompt_tokens", "Tokens of prompts.").labels(**one)
        self._drawn = of(counter, "generation_tokens", "Drawn tokens.").labels(**one)
        self._ended = of(counter, "request_success", "Ended answers.", ("finished_reason",))
        self._http = of(counter, "http_requests", "Requests by status.", ("path", "status"))
        timer = functools.partial(of, prometheus.Histogram)
        self._first = timer(
            "time_to_first_token_seconds", "Arrival to first token.", buckets=SECONDS
        ).labels(**one)
        self._between = timer(
            "inter_token_latency_seconds", "Between tokens of an answer.", buckets=SECONDS
        ).labels(**one)
        self._whole = timer(
            "e2e_request_latency_seconds", "Arrival to end of an answer.", buckets=LONG
        ).labels(**one)

    def observe(self, stream: Any, output: Any, now: float) -> None:
        """Records an output of a worker.Stream, at a time of time.monotonic."""
        count, before = len(output.tokens), stream.last.get(output.index)
        if not stream.last:
            self._prompt.inc(len(stream.prompt))
        if count:
            self._drawn.inc(count)
            if before is None:
                self._first.observe(now - stream.began)
            for _ in range(count - (before is None)):
                self._between.observe((now - (before or now)) / count)
        stream.last[output.index] = now
        if output.finish_reason is not None:
            self._ended.labels(self._model, output.finish_reason).inc()
            self._whole.observe(now - stream.began)

    def count(self, path: str, status: int) -> None:
        """Records an answered HTTP request."""
        self._http.labels(self._model, path, str(status)).inc()

    def set_load(self, engine: Any, load: Any) -> None:
        """Records the engine's state. load: a worker.Load."""
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._usage.set(engine.pool.in_use / engine.pool.capacity)
        for name, counter in (("preemptions", self._preemptions), ("prefix_hits", self._hits)):
            value = getattr(engine.scheduler, name)
            counter.inc(value - self._seen[name])
            self._seen[name] = value

    def text(self) -> tuple[bytes, str]:
        """Returns (the page, its content type)."""
        return prometheus.generate_latest(self.registry), prometheus.CONTENT_TYPE_LATEST
