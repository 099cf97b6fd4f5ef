"""One rule for the environment variable that turns on checks and tracebacks."""

from __future__ import annotations

import os


def debugging() -> bool:
    """True when RORQUAL_DEBUG is set to anything but nothing or 0."""
    return os.environ.get("RORQUAL_DEBUG", "0") not in ("", "0")
