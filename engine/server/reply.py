"""Answers that are sent without a framework."""

from __future__ import annotations

from typing import Any

from .errors import ApiError


async def send_error(send: Any, error: ApiError) -> None:
    """An error as a whole answer, by ASGI's ``send``."""
    body = error.encoded()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *error.headers()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
