"""Kernels that start while the one before still runs touch no memory before they wait for it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path for room in ("attention", "comm", "engine", "moe", "parallel") for path in sorted((ROOT / room).rglob("kernels/*.py"))]
_MEMORY = {"load", "store", "atomic_add", "atomic_xchg", "atomic_cas", "atomic_max", "atomic_min", "async_copy_global_to_shared", "gather"}


def _kernels(tree: ast.Module) -> list[ast.FunctionDef]:
    """Functions with a parameter EARLY."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.decorator_list]
    return [node for node in found if any(arg.arg == "EARLY" for arg in node.args.args)]


def _calls(statement: ast.stmt) -> list[str]:
    names = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return [name.attr if isinstance(name, ast.Attribute) else name.id for name in names if isinstance(name, (ast.Attribute, ast.Name))]


def _before_the_wait(kernel: ast.FunctionDef) -> list[str]:
    """What is called before ``enter`` or ``gdc_wait``. AssertionError: neither is."""
    seen: list[str] = []
    for statement in kernel.body:
        calls = _calls(statement)
        if "enter" in calls or "gdc_wait" in calls:
            return seen
        seen += calls
    raise AssertionError(f"{kernel.name} has EARLY and does not wait")


def test_there_are_such_kernels():
    assert sum(len(_kernels(ast.parse(path.read_text()))) for path in FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_of_memory_comes_before_the_wait(path):
    for kernel in _kernels(ast.parse(path.read_text())):
        assert not _MEMORY & set(_before_the_wait(kernel)), kernel.name


@pytest.mark.parametrize("body", ["x = tl.load(p)\n    enter(EARLY)", "x = 1", "if EARLY:\n        tl.store(p, 1)\n    enter(EARLY)"])
def test_faults_are_found(body):
    (kernel,) = _kernels(ast.parse(f"@jit\ndef kernel(p, EARLY):\n    {body}\n"))
    with pytest.raises(AssertionError):
        assert not _MEMORY & set(_before_the_wait(kernel))
