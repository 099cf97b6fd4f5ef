"""What a wheel holds, and that the metadata needs no import."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = (
    "rorqual/launch/tiny/",
    "rorqual/launch/shapes/",
    "rorqual/launch/bench/results/",
    "rorqual/launch/bench/eplb/",
    "rorqual/parallel/kernels/tuned/",
    "rorqual/engine/server/dashboard/",
    "rorqual/launch/deploy/",
)
ROOMS = ("parallel", "comm", "attention", "moe", "engine", "launch")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """A wheel built without network and without writing into the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    words = ["build", "--build-base", str(folder / "build"), "egg_info", "--egg-base", str(folder)]
    words += ["bdist_wheel", "--bdist-dir", str(folder / "bdist"), "--dist-dir", str(folder)]
    run = subprocess.run([sys.executable, "setup.py", "-q", *words], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_module_and_nothing_else_of_the_checkout(wheel):
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {f"rorqual/{p.relative_to(ROOT)}" for room in ROOMS for p in (ROOT / room).rglob("*.py")} | {"rorqual/__init__.py"}
    assert {name for name in held if name.endswith(".py")} == modules
    rest = {name for name in held if not name.endswith(".py")}
    assert all(name.startswith(DATA) for name in rest)


def test_the_embedded_model_is_complete(wheel):
    tiny = {f"rorqual/{p.relative_to(ROOT)}" for p in (ROOT / "launch/tiny").rglob("*") if p.is_file()}
    assert tiny <= set(wheel.namelist())
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors.index.json",
        "README.md",
        "eval/reference.json",
    ):
        assert f"rorqual/launch/tiny/{name}" in tiny


def test_metadata(wheel):
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    meta = wheel.read(f"{info}/METADATA").decode()
    assert "\nName: rorqual\n" in meta and "\nRequires-Python: >=3.11\n" in meta and "\nLicense-Expression: Apache-2.0\n" in meta
    for need in ("torch>=2.9", "numpy", "safetensors", "tokenizers", "jinja2", "tqdm", "huggingface_hub"):
        assert f"\nRequires-Dist: {need}\n" in meta
    for extra in ("gpu", "eplb", "nvshmem", "serve", "dev"):
        assert f"\nProvides-Extra: {extra}\n" in meta
    assert "rorqual = rorqual.launch.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert any(name.endswith("LICENSE") for name in wheel.namelist())


def test_every_folder_with_modules_is_a_package():
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} has modules but no __init__.py"


def test_importing_the_package_and_the_command_line_costs_nothing():
    code = "import sys, rorqual, rorqual.launch.cli; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'tokenizers')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
