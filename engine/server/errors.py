"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}`` and a status.

400  a parameter that is wrong or that the engine does not have, a prompt that is too long, more
     than the server's limits ever take
401  no API key, or another one
404  another model, or no such path
413  a body of more than 32 MiB
503  too many requests wait (try again), or the engine is closed
500  the rest; what happened is in the log
"""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from engine.sampling.sampling_params import SamplingParams
from kvstore.errors import (
    CapacityError,
    ConfigError,
    KVStoreError,
    QueueFullError,
    StoreClosedError,
)

logger = logging.getLogger(__name__)

CLOSING = "the server is shutting down"

_RETRY_AFTER_S = 1
_FULL = "the server has as many requests as it can take: try again later"
_FULL_OF_TOKENS = (
    "the server has no room for this many tokens beside those of other requests: try again later, "
    "or ask with a shorter prompt or limit"
)
_TYPES = {401: "authentication_error", 500: "server_error", 503: "overloaded_error"}


class ApiError(Exception):
    """An answer of the server that is not what the client hoped for."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _sendable(message)
        self.param = None if param is None else _sendable(param)
        self.code = code

    @classmethod
    def of(cls, error: BaseException) -> "ApiError":
        """What a client is told of an exception."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ConfigError):
            message = str(error)
            name = message.partition(":")[0]
            is_param = name in SamplingParams.__dataclass_fields__ or name == "cache_salt"
            code = "context_length_exceeded" if message.startswith("the prompt has") else None
            return cls(400, message, param=name if is_param else None, code=code)
        if isinstance(error, CapacityError):
            # Its own message is for the operator: which setting to raise.
            is_of_tokens = isinstance(error, QueueFullError) and error.setting == "max_total_tokens"
            full = _FULL_OF_TOKENS if is_of_tokens else _FULL
            return cls(503, full, code="overloaded")
        if isinstance(error, StoreClosedError):
            return cls(503, CLOSING, code="closed")
        if isinstance(error, KVStoreError):
            logger.error("a request failed: %s", error)
            return cls(500, str(error))
        logger.error("a request failed", exc_info=error)
        return cls(500, "the request failed; the server's log has the reason")

    @classmethod
    def of_validation(cls, error: RequestValidationError) -> "ApiError":
        """The first thing that is wrong with a body, by the name of its parameter."""
        first = error.errors()[0]
        where = [str(part) for part in first["loc"] if part != "body"]
        name = where[0] if where else None
        if first["type"] == "extra_forbidden":
            return cls(400, f"{'.'.join(where)}: this server has no such parameter", param=name)
        if first["type"] == "json_invalid":
            return cls(400, "the body is not JSON")
        if name is None:
            return cls(400, "the body: expected a JSON object, as Content-Type: application/json")
        problem = "is missing" if first["type"] == "missing" else first["msg"]
        return cls(400, f"{name}: {problem}", param=name)

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        headers = {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        elif self.code == "overloaded":
            headers["Retry-After"] = str(_RETRY_AFTER_S)
        return JSONResponse(self.body(), self.status, headers)


def _sendable(text: str) -> str:
    """With half characters, which JSON may bring and UTF-8 does not carry, as escapes."""
    return text.encode(errors="backslashreplace").decode()


def handle_errors(app: FastAPI) -> None:
    """Make every error of ``app`` one in OpenAI's shape."""

    @app.exception_handler(RequestValidationError)
    async def _(_request: Request, error: RequestValidationError) -> JSONResponse:
        return ApiError.of_validation(error).response()

    @app.exception_handler(HTTPException)
    async def _(_request: Request, error: HTTPException) -> JSONResponse:
        message = "there is no such path" if error.status_code == 404 else str(error.detail)
        code = "closed" if error.status_code == 503 else None
        return ApiError(error.status_code, message, code=code).response()

    for kind in (ApiError, KVStoreError):

        @app.exception_handler(kind)
        async def _(_request: Request, error: Exception) -> JSONResponse:
            return ApiError.of(error).response()

    @app.exception_handler(Exception)
    async def _(_request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, "the request failed; the server's log has the reason").response()
