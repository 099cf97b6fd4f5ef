"""Whether deep_ep is there, which of its interfaces it has, and what to do where it is not."""

from __future__ import annotations

from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch

ELASTIC, LOW_LATENCY = "deep_ep", "deep_ep_ll"  # names of the backends
_CLASS = {ELASTIC: "ElasticBuffer", LOW_LATENCY: "Buffer"}
_INSTALL = "pip install sgl-deep-ep, which brings the version of torch that it was built for; or build deepseek-ai/DeepEP"


def version() -> str | None:
    """Version of the distribution that provides deep_ep; None if there is none."""
    for name in ("sgl-deep-ep", "deep_ep", "deep-ep"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def explain(backend: str) -> tuple[bool, str]:
    """(usable in this process, why or why not) of ``ELASTIC`` or ``LOW_LATENCY``. Imports the package if everything else is there."""
    if find_spec("deep_ep") is None:
        return False, f"deep_ep is not installed ({_INSTALL})"
    if not torch.cuda.is_available():
        return False, "deep_ep needs a CUDA device"
    try:
        load(backend)
    except ValueError as error:
        return False, str(error)
    return True, f"deep_ep {version() or 'of unknown version'}: only when named; its kernels were not run with this code"


def load(backend: str) -> Any:
    """The module deep_ep. ValueError, with what to do, if it is not there, does not load, or lacks the interface."""
    if find_spec("deep_ep") is None:
        raise ValueError(
            f"all-to-all backend {backend!r} needs deep_ep, which is not installed: {_INSTALL}; the torch backends need nothing"
        )
    try:
        module = import_module("deep_ep")
    except Exception as error:  # it checks versions of torch, CUDA and NCCL by assertions while it is imported
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"deep_ep {version() or ''} is installed but does not load ({why}); it fits one version of torch: {_INSTALL}"
        ) from error
    if not hasattr(module, _CLASS[backend]):
        raise ValueError(f"deep_ep {version() or ''} has no {_CLASS[backend]}, which backend {backend!r} is made of; {_INSTALL}")
    return module
