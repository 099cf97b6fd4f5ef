"""Optional packages of the serving part, imported where they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: module -> name of its package
_PACKAGES = {"zmq": "pyzmq"}


def need(module: str) -> Any:
    """An optional module.

    Raises:
        ValueError: it is not installed; names what to run.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = _PACKAGES.get(module.split(".")[0], module.split(".")[0])
        raise ValueError(f"serving needs {package} ({error}); run: pip install 'rorqual[serve]'") from None
