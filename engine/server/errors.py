"""Errors as OpenAI's API tells them: a status, and a body ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from typing import Any

import msgspec

#: status -> (type, code) of errors that say nothing more special
_KINDS: dict[int, tuple[str, str | None]] = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("invalid_request_error", "forbidden"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    409: ("invalid_request_error", "conflict"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    431: ("invalid_request_error", "head_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    499: ("invalid_request_error", "client_closed_request"),
    500: ("server_error", "internal_error"),
    501: ("server_error", "not_implemented"),
    503: ("server_error", "service_unavailable"),
    504: ("server_error", "timeout"),
}


class ApiError(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        kind, usual = _KINDS.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
        self.kind = kind
        self.code = code or usual
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        """The JSON object as bytes. Text that is no UTF-8 (half a surrogate pair of a bad request) is shown as "?"."""
        try:
            return msgspec.json.encode(self.body())
        except UnicodeEncodeError:
            self.message = self.message.encode("utf-8", "replace").decode()
            self.param = None
            return msgspec.json.encode(self.body())

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers beside type and length of the body."""
        found = []
        if self.retry_after_s is not None:
            found.append((b"retry-after", str(max(1, round(self.retry_after_s))).encode()))
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        if self.status in (408, 413):
            found.append((b"connection", b"close"))  # the rest of the body would come otherwise
        return found


def shorten(text: str, limit: int = 600) -> str:
    """``text``, cut in the middle when it is long: errors that quote a request must not be as large as it."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"


def bad(error: Exception, param: str | None = None) -> ApiError:
    """A 400 with the message of a ValueError."""
    return ApiError(400, shorten(str(error)), param=param)
