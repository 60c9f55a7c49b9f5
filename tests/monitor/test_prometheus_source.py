"""The Prometheus source against a server that pages, refuses, breaks off, is slow, and comes back.

The real server and exporters are in test_prometheus_server.py.
"""

import base64
import json
import math
import shutil
import ssl
import subprocess
import time

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.monitor import sources
from megajax.monitor.samples import Quality, to_grid
from megajax.monitor.sources import convert, http_query, server
from tests.fake_prometheus import Fake

T0 = 1_700_000_000


def value(query, machine, t):
    return round(math.sin(t / 7.0) + 10 * int(machine[1:]) + len(query), 6)


def series(query, t):
    """Three machines of every query but `nothing`; h2 is silent from T0 + 100 on."""
    if query == "nothing":
        return {}
    return {
        (("__name__", "q"), ("instance", f"h{n}"), ("job", "node")): str(value(query, f"h{n}", t))
        for n in range(3)
        if n < 2 or t < T0 + 100
    }


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(http_query, "FIRST_PAUSE_S", 0.01)
    with Fake(series).running() as server_:
        yield server_


def source(fake, **options):
    return sources.prometheus(fake.url, **{"queries": {"cpu": "a"}, **options})


def times(n, start=T0, count=1):
    """Misbehaves n times by answering 503."""
    left = [n]

    def misbehave(handler, parameters):
        left[0] -= 1
        return handler.say(503, "starting") if left[0] >= 0 else False

    return misbehave


def test_pages_of_11000_points_give_every_second_once(fake, monkeypatch):
    queries = {"cpu": "a", "memory": "bcd"}
    one = source(fake, queries=queries)
    samples = one.read(T0 + 0.5, T0 + 25_000.5)
    assert sorted(int(p["start"]) for p in fake.pages) == sorted(
        2 * [T0 + 1, T0 + 11_001, T0 + 22_001]
    )
    for p in fake.pages:
        assert (int(p["end"]) - int(p["start"])) // int(p["step"]) + 1 <= 11_000
    assert (samples.start, samples.end, samples.notes) == (T0 + 0.5, T0 + 25_000.5, ())
    assert samples.machines == ("h0", "h1", "h2") and samples.metrics == ("cpu", "memory")
    expected = {
        (float(t), m, c, value(queries[c], m, t))
        for c in queries
        for m in ("h0", "h1", "h2")
        for t in range(T0 + 1, T0 + 25_001)
        if m != "h2" or t < T0 + 100
    }
    assert set(samples.rows()) == expected and len(samples) == len(expected)
    monkeypatch.setattr(server, "POINTS", 30_000)  # of three machines, once they are known
    fake.asked.clear()
    assert set(one.read(T0 + 0.5, T0 + 25_000.5).rows()) == expected
    assert sorted({int(p["start"]) for p in fake.pages}) == [T0 + 1, T0 + 10_001, T0 + 20_001]
    late = source(fake, step_s=15).read(T0 + 1, T0 + 61)
    assert {t % 15 for t, *_ in late.rows()} == {0.0} and len(late) == 4 * 3


def test_a_machine_that_stops_is_a_hole_and_is_named(fake):
    one = source(fake)
    grid = to_grid(one.read(T0 + 90, T0 + 110))
    assert np.isnan(grid.values_CNT[0, 2]).tolist() == [False] * 10 + [True] * 10
    later = one.read(T0 + 110, T0 + 120)
    assert later.machines == ("h0", "h1")
    assert f"machine h2 gave nothing; its last sample is of {T0 + 99}" in later.notes[0]


def test_devices_of_a_machine_are_their_mean_and_extremes_under_the_querys_name(fake):
    fake.series = lambda query, t: {
        (("instance", "h0"), ("gpu", str(g))): ("NaN" if g == 7 else str(g)) for g in range(8)
    }
    queries = {"DCGM_FI_DEV_GPU_UTIL": "x"}  # not scaled: the expression may have done so
    samples = source(fake, queries=queries).read(T0, T0 + 1)
    assert {c: v for _, _, c, v in samples.rows()} == {
        "DCGM_FI_DEV_GPU_UTIL": 3.0,
        "DCGM_FI_DEV_GPU_UTIL_min": 0.0,
        "DCGM_FI_DEV_GPU_UTIL_max": 6.0,
    }
    fake.series = lambda query, t: {(): "1", (("instance", "h1"),): "2"}
    samples = source(fake).read(T0, T0 + 1)
    assert samples.machines == ("h1",) and "without the label 'instance'" in samples.notes[0]


def test_devices_that_come_in_a_later_page_make_extremes_in_all(fake, monkeypatch):
    monkeypatch.setattr(server, "PAGE", 60)
    fake.series = lambda query, t: {
        (("instance", "h0"), ("gpu", str(g))): str(g + 1) for g in range(1 if t < T0 + 60 else 2)
    }
    values = {(t - T0, c): v for t, _, c, v in source(fake).read(T0, T0 + 120).rows()}
    assert len(fake.pages) == 2
    for name, early, late in (("cpu", 1.0, 1.5), ("cpu_min", 1.0, 1.0), ("cpu_max", 1.0, 2.0)):
        assert [values.pop((t, name)) for t in range(120)] == [early] * 60 + [late] * 60
    assert not values


def test_two_exporters_of_a_host_are_a_machine_until_they_give_the_same_metric(fake):
    port = {"a": "9100", "b": "9400"}
    fake.series = lambda query, t: {
        (("instance", f"{host}:{port.get(query[:1], query)}"),): "1" for host in ("x", "y")
    }
    one = source(fake, queries={"cpu": "a", "gpu": "b"})
    assert one.read(T0, T0 + 2).machines == ("x:9100", "y:9100")
    port["a"] = "9400"
    samples = one.read(T0, T0 + 2)  # now the ports differ in nothing
    assert samples.machines == ("x:9400", "y:9400")
    assert "x:9400 are machines of their own" in samples.notes[0]
    fake.series = lambda query, t: {(("instance", f"127.0.0.1:{9100 + n}"),): "1" for n in range(8)}
    agents = source(fake, queries={"cpu": "a", "gpu": "b"}).read(T0, T0 + 2)
    assert agents.machines == tuple(f"127.0.0.1:{9100 + n}" for n in range(8))


def test_passwords_and_tokens(fake):
    accepted = [""]

    def guarded(handler, parameters):
        if handler.headers.get("Authorization") != accepted[0]:
            return handler.say(401, "Unauthorized")
        return False

    fake.misbehave = guarded
    accepted[0] = "Basic " + base64.b64encode(b"me:s3:cret").decode()
    good = {"user": "me", "password": "s3:cret"}
    assert len(source(fake, **good).read(T0, T0 + 2)) == 6
    in_url = fake.url.replace("//", "//me:s3%3Acret@")
    assert len(sources.prometheus(in_url, queries={"cpu": "a"}).read(T0, T0 + 2)) == 6
    for bad in ({"user": "me", "password": "wrong"}, {"token": "wrong"}, {}):
        asked = len(fake.asked)
        with pytest.raises(sources.Refused, match="401 Unauthorized") as caught:
            source(fake, **bad).read(T0, T0 + 2)
        assert "wrong" not in str(caught.value) and len(fake.asked) - asked == 1
    accepted[0] = "Bearer t0ken"
    assert len(source(fake, token="t0ken").read(T0, T0 + 2)) == 6
    fake.misbehave = lambda handler, parameters: handler.say(403, "not you")
    with pytest.raises(sources.Refused, match="403 Forbidden.*not you"):
        source(fake, token="t0ken").read(T0, T0 + 2)


def test_a_restart_in_the_middle_costs_retries_only(fake):
    fake.misbehave = times(2)
    assert len(source(fake).read(T0, T0 + 2)) == 6 and len(fake.asked) == 3
    fake.misbehave = times(9)
    one = source(fake, retries=1)
    with pytest.raises(sources.Unavailable, match=r"503 starting \(2 tries\)") as caught:
        one.read(T0, T0 + 2)
    assert caught.value.exit_code == 75
    fake.misbehave = lambda handler, parameters: False
    assert len(one.read(T0, T0 + 2)) == 6  # the same source goes on


def half_body(handler, _):
    text = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": []}})
    handler.say(200, text[:30], length=len(text))
    handler.close_connection = True


def half_chunk(handler, _):
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b'ff\r\n{"status":')
    handler.close_connection = True


def hang_up(handler, _):
    handler.close_connection = True


@pytest.mark.parametrize(
    ("misbehave", "words"),
    [
        (half_body, r"breaks off: .*30 bytes, expected 69"),
        (half_chunk, "breaks off"),
        (hang_up, "without sending a response|Connection reset"),
        (lambda h, p: h.say(200, '{"status":"success","data":{"resultType":"ma'), "breaks off"),
        (lambda h, p: h.say(200, "<html>please log in</html>"), "please log in"),
        (lambda h, p: h.say(200, "[" * 100_000), "none of Prometheus' API"),
        (lambda h, p: h.say(200, ""), "none of Prometheus' API"),
        (lambda h, p: h.data({"resultType": "vector", "result": []}), "another form"),
        (lambda h, p: h.data([1]), "another form"),
        (
            lambda h, p: h.data(
                {
                    "resultType": "matrix",
                    "result": [{"metric": {"instance": "a"}, "values": [[1, 2, 3]]}],
                }
            ),
            "another form",
        ),
        (lambda h, p: h.error(200, "internal", "broken"), "broken"),
        (lambda h, p: h.error(429, "", "too many requests"), "429 too many requests"),
        (lambda h, p: h.drip(2.0), r"no whole answer within 0\.\d+ s"),
    ],
)
def test_an_answer_that_is_none_is_named_and_reading_goes_on(fake, misbehave, words):
    queries = {"cpu": "a", "memory": "bcd"}
    one = source(fake, queries=queries, retries=1, timeout_s=0.2)
    fake.misbehave = misbehave
    with pytest.raises(sources.Unavailable, match=words):
        one.read(T0, T0 + 2)
    # One metric only: it is a hole and a note, the others are read.
    fake.misbehave = lambda h, p: misbehave(h, p) if p["query"] == "bcd" else False
    samples = one.read(T0, T0 + 2)
    assert samples.metrics == ("cpu",) and len(samples) == 6
    (note,) = samples.notes
    assert "These pages are holes: memory" in note
    fake.misbehave = lambda h, p: False
    assert len(one.read(T0, T0 + 2)) == 12


def test_a_server_that_is_away_is_not_asked_for_every_page(fake):
    queries = {f"m{k}": "a" * (k + 1) for k in range(60)}
    one = source(fake, queries=queries, retries=2, timeout_s=0.2)
    fake.misbehave = lambda h, p: h.drip(1.0)
    begin = time.monotonic()
    with pytest.raises(sources.Unavailable, match="no whole answer"):
        one.read(T0, T0 + 2)
    # Four at a time with two more tries each, and four or a few more with one try.
    assert time.monotonic() - begin < 3.0 and len(fake.asked) < 4 * 3 + 8


def test_a_connection_that_the_server_has_closed_is_opened_again(fake):
    def close(handler, parameters):
        handler.close_connection = True  # without a word in the answer
        return False

    fake.misbehave = close
    queries = {f"m{k}": "a" * (k + 1) for k in range(20)}
    samples = source(fake, queries=queries, retries=0).read(T0, T0 + 2)
    assert samples.notes == () and len(samples) == 20 * 6


@pytest.mark.parametrize("how", ["samples", "timeout", "bytes", "points"])
def test_what_is_too_much_is_asked_in_smaller_pages(fake, how, monkeypatch):
    def misbehave(handler, p):
        if how in ("bytes", "points") or int(p["end"]) - int(p["start"]) < 200:
            return False
        if how == "samples":
            message = "query processing would load too many samples into memory in query execution"
            return handler.error(422, "execution", message)
        return handler.error(503, "timeout", "query timed out in expression evaluation")

    fake.misbehave = misbehave
    in_one = source(fake).read(T0, T0 + 90)
    fake.asked.clear()
    if how == "bytes":
        monkeypatch.setattr(http_query, "MOST", 20_000)
    if how == "points":
        monkeypatch.setattr(server, "ANSWER", 800)
    samples = source(fake).read(T0, T0 + 1000)
    assert len(fake.pages) > 5 and len(samples) == 2 * 1000 + 100 and samples.notes == ()
    assert set(in_one.rows()) <= set(samples.rows())
    monkeypatch.setattr(http_query, "MOST", 500)
    with pytest.raises(sources.Unavailable, match="more than 0 MiB"):
        source(fake).read(T0, T0 + 200)


def test_expressions_that_cannot_be_are_told_with_their_metric(fake):
    fake.misbehave = lambda h, p: (
        h.error(400, "bad_data", "1:3: parse error") if p["query"] == "bcd" else False
    )
    with pytest.raises(sources.Refused, match="parse error. The query of 'memory' is bcd"):
        source(fake, queries={"cpu": "a", "memory": "bcd"}).read(T0, T0 + 2)
    fake.misbehave = lambda h, p: h.say(404, "no such page")
    with pytest.raises(sources.Refused, match="is this a Prometheus server"):
        source(fake).read(T0, T0 + 2)


def test_redirects_are_followed_on_the_same_host_only(fake):
    def moved(handler, parameters):
        if not handler.path.startswith("/prom/"):
            return handler.say(302, "", Location="/prom" + handler.path)
        return False

    fake.misbehave = moved
    assert len(source(fake, user="me", password="x").read(T0, T0 + 2)) == 6
    with Fake(series).running() as other:
        fake.misbehave = lambda h, p: h.say(302, "", Location=other.url + h.path)
        with pytest.raises(sources.Refused, match=f"redirects to {other.url}"):
            source(fake, user="me", password="x").read(T0, T0 + 2)
        assert other.asked == []
    fake.misbehave = lambda h, p: h.say(301, "", Location=h.path)
    with pytest.raises(sources.Refused, match="more than 3 times"):
        source(fake).read(T0, T0 + 2)


def test_long_expressions_go_into_a_post_and_warnings_into_the_notes(fake):
    fake.misbehave = lambda h, p: (
        h.data({"resultType": "matrix", "result": []}, warnings=["a store did not answer"])
        if len(p["query"]) > 9000
        else h.say(500, "")
    )
    samples = source(fake, queries={"cpu": "a" * 9001}).read(T0, T0 + 2)
    assert "cpu: a store did not answer" in samples.notes[0]
    assert "no machine has cpu" in samples.notes[1]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_trusts_the_authority_that_is_given_and_no_other(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key,
         "-out", certificate, "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with Fake(series, context).running() as fake:
        assert len(source(fake, ca_file=certificate).read(T0, T0 + 2)) == 6
        with pytest.raises(sources.Unavailable, match=r"certificate is not trusted.*ca_file"):
            source(fake, retries=0).read(T0, T0 + 2)
        with pytest.raises(sources.Unavailable):
            plain = fake.url.replace("https", "http")
            sources.prometheus(plain, queries={"cpu": "a"}, retries=0).read(T0, T0 + 2)
    with pytest.raises(UserError, match="cannot be used"):
        sources.prometheus("https://x", queries={"cpu": "a"}, ca_file=key)
    with pytest.raises(UserError, match="No such file"):
        sources.prometheus("https://x", queries={"cpu": "a"}, ca_file=tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "localhost:9090"}, "such as http://host:9090"),
        ({"url": "http://me:secret@host:x"}, r"http://\*\*\*@host:x must be an address"),
        ({"user": "me"}, "user with a password"),
        ({"user": "me", "password": "x", "token": "y"}, "or a token"),
        ({"token": "a\nb"}, "line end"),
        ({"step_s": 0}, "step_s=0"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"queries": {}}, "give queries"),
        ({"metrics": ["gpu_dutycycle"]}, "Did you mean gpu_duty_cycle"),
    ],
)
def test_what_cannot_be_is_refused_at_once(options, words):
    with pytest.raises(UserError, match=words) as caught:
        sources.prometheus(**{"url": "http://host", **options})
    assert "secret" not in str(caught.value)


def test_an_interval_that_is_none_is_refused(fake):
    for start, end in ((T0, T0), (T0, math.nan)):
        with pytest.raises(UserError, match="must be before"):
            source(fake).read(start, end)


def test_every_metric_of_the_table_has_an_expression_with_a_bound_on_its_age():
    every = dict.fromkeys((n for m in convert.METRICS for n in server.exporter_names(m)), 1.0)
    for metric in server.all_metrics():
        text = server.expression(metric, every)
        assert text is not None and text.count("timestamp(") >= 1, metric
        assert server.expression(metric, {}) is None
    assert set(convert.MINDER) <= set(server.all_metrics())
    assert server.expression("gpu_duty_cycle_min", {"DCGM_FI_DEV_GPU_UTIL": 15.0}) == (
        "min by (instance) (0.01 * ((DCGM_FI_DEV_GPU_UTIL and timestamp(DCGM_FI_DEV_GPU_UTIL) "
        "> time() - 37.500)))"
    )
    assert server.PAGE == 11_000


def test_what_exporters_do_to_their_metrics_between_two_reads_is_noted(fake, seed):
    """A change from watts to kilowatts, an exporter that freezes, NaN from all machines."""
    rng, held = np.random.default_rng(seed), {}

    def value_at(query, n, t):
        if query == "power":
            watts = (300 + 20 * n) * (1 + 0.05 * rng.normal())
            return "NaN" if t >= T0 + 700 else f"{watts / (1000 if t >= T0 + 200 else 1):.5g}"
        return f"{rng.uniform(0.3, 0.7):.4f}" if query == "load" else "8"

    def series_of(query, t):
        texts = {}
        for n in range(6):
            text = value_at(query, n, t)
            if n == 4 and 400 <= t - T0 < 620:
                text = held.setdefault((query, n), text)  # the last thing that it said
            texts[(("instance", f"h{n}"),)] = text
        return texts

    fake.series = series_of
    one = source(fake, queries={"power": "power", "load": "load", "gpus": "gpus"})
    quality = Quality(["power", "load", "gpus"])
    notes = []
    for start in range(T0, T0 + 800, 20):
        notes += quality.check(to_grid(one.read(start, start + 20), 1)).notes
    assert len(notes) == 3, notes
    assert notes[0].startswith("power is 1000 times smaller on h0, h1, h2 and 3 more since about")
    assert notes[1].startswith("all metrics of h4 have had the same values since")
    assert notes[2].startswith("no machine has the metric power from")
