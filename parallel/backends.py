"""Backends that need packages which may be missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def kernels_or_twin(module: str, package: str | None, *, cuda: bool) -> Any:
    """The ``module`` of Triton kernels in ``package`` on CUDA where Triton is installed, else its plain twin, ``<module>_torch``."""
    return import_module(module + ("" if cuda and find_spec("triton") is not None else "_torch"), package)


@contextmanager
def needing(what: str, packages: tuple[str, ...], instead: str) -> Iterator[None]:
    """Turn a failed import of one of ``packages`` inside into a ValueError that says what to use instead; others pass."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").split(".")[0] not in packages:
            raise
        needs = f"{what} needs the package {error.name}, which is not installed or does not load ({error})"
        raise ValueError(f"{needs}; use {instead}") from None
