"""Who may import whom, read from the source text: launch -> engine -> {attention, moe} -> {comm, parallel}."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: room -> rooms it may import
MAY_IMPORT = {
    "parallel": {"parallel"},
    "comm": {"comm", "parallel"},
    "attention": {"attention", "comm", "parallel"},
    "moe": {"moe", "comm", "parallel"},
    "engine": {"engine", "attention", "moe", "comm", "parallel"},
    "launch": {"launch", "engine", "attention", "moe", "comm", "parallel"},
}
FILES = sorted(path.relative_to(ROOT) for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py"))


def imports(path: Path, text: str) -> list[tuple[int, str]]:
    """(line, module from the package's root or a top-level name with a leading "!") of everything ``text`` imports."""
    package = path.parts[:-1]
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, "!" + alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append((node.lineno, "!" + (node.module or "")))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found += [(node.lineno, ".".join((*base, name))) for name in names]
    return found


def breaches(path: Path, text: str) -> list[str]:
    """What ``text`` imports that a file at ``path`` must not."""
    bad = []
    for line, name in imports(path, text):
        if name.startswith("!"):
            if name[1:].split(".")[0] == "rorqual":
                bad.append(f"{path}:{line} imports {name[1:]} by its absolute name")
            continue
        room = name.split(".")[0]
        if room in MAY_IMPORT and room not in MAY_IMPORT[path.parts[0]]:
            bad.append(f"{path}:{line} imports {name}, a floor it may not reach")
    return bad


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_file_imports_upwards(path):
    assert breaches(path, (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "text", "count"),
    [
        ("comm/a.py", "from ..engine.config import x", 1),
        ("comm/a.py", "from .. import moe", 1),
        ("comm/a.py", "def f():\n    from ..attention import kv", 1),
        ("attention/kv/a.py", "from ...moe import x", 1),
        ("moe/a.py", "import rorqual.comm", 1),
        ("engine/models/a.py", "from ...launch.cli import main", 1),
        ("engine/models/a.py", "from ...moe.layer import MoE\nfrom ..config import x\nfrom . import y\nimport torch", 0),
        ("launch/a.py", "from .. import __version__\nfrom ..engine import llm", 0),
    ],
)
def test_the_check_sees_what_it_should(path, text, count):
    assert len(breaches(Path(path), text)) == count
