"""Puts the page together from its markup, style and script."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@cache
def page() -> bytes:
    """The page as HTML."""
    markup = _read("page.html")
    return markup.replace("/* style */", _read("page.css")).replace("/* script */", _read("page.js")).encode()


@cache
def headers() -> dict[str, str]:
    """Headers of the page: a browser runs and fetches nothing but what is in it, and asks for nothing elsewhere."""
    script = base64.b64encode(hashlib.sha256(_read("page.js").encode()).digest()).decode()
    rules = ["default-src 'none'", f"script-src 'sha256-{script}'", "style-src 'unsafe-inline'", "connect-src 'self'", "img-src data:"]
    rules += ["base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    return {"Content-Security-Policy": "; ".join(rules), "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
