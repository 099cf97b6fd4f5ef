"""Shared test settings."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start: several of them share the cores
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported: kernels then run on CPU tensors


def _ensure_importable() -> None:
    """Make ``rorqual`` importable from a bare checkout: the repository root is the package."""
    if importlib.util.find_spec("rorqual") is not None:
        return
    root = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location("rorqual", root / "__init__.py", submodule_search_locations=[str(root)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rorqual"] = module
    spec.loader.exec_module(module)


_ensure_importable()


@pytest.fixture(autouse=True)
def _environment_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves debug mode switched on would change all that come after it in the same process."""
    before = os.environ.get("RORQUAL_DEBUG")
    yield
    after = os.environ.get("RORQUAL_DEBUG")
    if before is None:
        os.environ.pop("RORQUAL_DEBUG", None)
    else:
        os.environ["RORQUAL_DEBUG"] = before
    assert before == after, f"{request.node.nodeid} leaves RORQUAL_DEBUG at {after!r}, it was {before!r}"
