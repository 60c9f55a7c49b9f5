"""Errors as OpenAI's clients know them."""

from typing import Any


class ApiError(Exception):
    """What a request is answered with in place of a completion.

    status: of HTTP. kind, param, code: members of the body, as OpenAI names them. headers: more.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        """kind follows from the status."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that a client reads."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "overloaded_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self.message,
            "type": kinds.get(self.status, kind),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


class EngineFailed(Exception):
    """The engine raised, and answers nothing any more."""
