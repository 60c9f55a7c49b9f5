"""The base of a server, under endpoints that are no language model's."""

import asyncio
import types

import pytest
from starlette.responses import JSONResponse

from megajax.core.errors import UserError
from megajax.systems.server.base import ApiError, Base, Metrics
from tests.systems.server import asgi


def ask(requests, *, keys=(), failure=None):
    """Returns the responses to (method, path, options) of a detector's server."""

    def check():
        if failure:
            raise ApiError(503, failure, code="failed")

    async def detect(request):
        body = await base.body(request)
        if body == b"{}":
            raise UserError("an image is missing (--image)")
        if body == b"[]":
            raise ZeroDivisionError("one over zero")
        return JSONResponse({"bytes": len(body)})

    work = types.SimpleNamespace(check=check)
    endpoints = {"/detect": ("POST", detect)}
    base = Base(endpoints, work, Metrics("boxes"), keys=keys, max_body=64, help="see the page")  # type: ignore

    async def all_of_them():
        async with asgi.client(base.app) as client:
            return [await client.request(m, path, **more) for m, path, more in requests]

    return asyncio.run(all_of_them())


JSON = {"Content-Type": "application/json"}


def post(content, **headers):
    return "POST", "/detect", {"content": content, "headers": JSON | headers}


def test_each_outcome_has_its_status_and_form():
    cases = [
        (post(b'{"image": 1}'), 200),
        (post(b"{}"), 400),
        (post(b"[]"), 500),
        (post(b"x" * 65), 413),
        (post(b"{}", **{"Content-Type": "text/plain"}), 415),
        (("GET", "/detect", {}), 405),
        (("GET", "/elsewhere", {}), 404),
    ]
    answers = ask([request for request, _ in cases] + [("GET", "/metrics", {})])
    assert [a.status_code for a in answers[:-1]] == [status for _, status in cases]
    assert answers[0].json() == {"bytes": 12}
    for answer in answers[1:-1]:
        error = answer.json()["error"]
        assert {"message", "type", "param", "code"} == {*error} and error["message"]
    assert "--image" in answers[1].json()["error"]["message"]
    assert "see the page" in answers[6].json()["error"]["message"]
    counted = 'http_requests_total{model_name="boxes",path="/detect",status="413"} 1.0'
    assert f"megajax:{counted}" in answers[-1].text


@pytest.mark.parametrize(
    ("header", "status"),
    [({}, 401), ({"Authorization": "Bearer no"}, 401), ({"Authorization": "Bearer yes"}, 200)],
)
def test_keys(header, status):
    (answer,) = ask([post(b'{"image": 1}', **header)], keys=["yes", "too"])
    assert answer.status_code == status


def test_health_says_what_the_work_says():
    (well,) = ask([("GET", "/health", {})], keys=["secret"])
    assert (well.status_code, well.json()["status"]) == (200, "ok")
    (ill,) = ask([("GET", "/health", {})], failure="the detector is gone")
    assert ill.status_code == 503 and "gone" in ill.json()["error"]["message"]
