"""Kernels with a parameter EARLY, which start while the one before still runs, do nothing before they wait for it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path for room in ("attention", "comm", "engine", "moe", "parallel") for path in sorted((ROOT / room).rglob("kernels/*.py"))]


def _kernels(tree: ast.Module) -> list[ast.FunctionDef]:
    """Functions with a parameter EARLY."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.decorator_list]
    return [node for node in found if any(arg.arg == "EARLY" for arg in node.args.args)]


def _waits_first(kernel: ast.FunctionDef) -> bool:
    """Whether its first statement is ``enter(EARLY)``."""
    body = kernel.body[1:] if ast.get_docstring(kernel) is not None else kernel.body
    return bool(body) and ast.unparse(body[0]) == "enter(EARLY)"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_wait_first(path):
    for kernel in _kernels(ast.parse(path.read_text())):
        assert kernel.name == "enter" or _waits_first(kernel), kernel.name


def test_there_are_such_kernels():
    assert sum(len(_kernels(ast.parse(path.read_text()))) for path in FILES) > 20


@pytest.mark.parametrize("body", ["x = helper(p)\n    enter(EARLY)", "x = 1", "if EARLY:\n        enter(EARLY)", "enter(True)"])
def test_faults_are_found(body):
    (kernel,) = _kernels(ast.parse(f'@jit\ndef kernel(p, EARLY):\n    """Text."""\n    {body}\n'))
    assert not _waits_first(kernel)
