"""A client of an application in this process, without a socket."""

import httpx2


def client(app):
    """Returns an asynchronous HTTP client whose requests an ASGI application answers."""
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://tiny")
