"""Project metadata. The import package ``rorqual`` is the folder of this file; its rooms are the folders below."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
ROOMS = ("parallel", "comm", "attention", "moe", "engine", "launch")


def version() -> str:
    """``__version__`` of ``__init__.py``, read as text: importing it would need the dependencies."""
    found = re.search(r'^__version__ = "([^"]+)"$', (ROOT / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise RuntimeError('__init__.py has no line of the form __version__ = "1.2.3"')
    return found[1]


class BuildWithoutSetup(build_py):
    """The package's folder is also the project's: keep this file out of the wheel."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of ``package`` as (package, module, file), without this one."""
        return [
            entry for entry in super().find_package_modules(package, package_dir) if Path(entry[2]).resolve() != Path(__file__).resolve()
        ]


rooms = [name for room in ROOMS for name in (room, *(f"{room}.{sub}" for sub in find_packages(str(ROOT / room))))]

setup(
    name="rorqual",
    version=version(),
    description="An inference stack for DeepSeek-style models: MLA, sparse attention and expert parallelism under torchrun",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    package_dir={"rorqual": "."},
    packages=["rorqual", *(f"rorqual.{name}" for name in rooms)],
    package_data={
        "rorqual.launch": ["tiny/*", "tiny/eval/*", "shapes/*/*.json", "deploy/*"],
        "rorqual.launch.bench": ["results/*.json"],
        "rorqual.launch.bench.eplb": ["*.json"],
        "rorqual.parallel.kernels": ["tuned/*.json"],
        "rorqual.engine.server.dashboard": ["page.*"],
    },
    install_requires=["torch>=2.9", "numpy", "safetensors", "tokenizers", "jinja2", "msgspec", "tqdm", "huggingface_hub", "xxhash"],
    extras_require={
        "gpu": ["triton>=3.5"],
        "eplb": ["pyarrow", "pyyaml", "plotly"],
        "nvshmem": ["nvshmem4py-cu13", "nvidia-nvshmem-cu13==3.4.5"],
        "serve": ["fastapi", "httptools", "httpx", "prometheus_client", "pyzmq", "uvicorn", "uvloop; sys_platform != 'win32'", "xgrammar"],
        "docs": ["mkdocs-material", "mkdocstrings-python"],
        "dev": [
            "accelerate",
            "fastapi",
            "httptools",
            "httpx",
            "hypothesis",
            "jsonschema",
            "mkdocs-material",
            "mkdocstrings-python",
            "mypy",
            "openai",
            "plotly",
            "pre-commit",
            "prometheus_client",
            "pyarrow",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "pyyaml",
            "pyzmq",
            "ruff",
            "schemathesis",
            "scipy",
            "setuptools>=77",
            "transformers==5.24.0",
            "triton==3.6.0; platform_system == 'Linux' and platform_machine == 'x86_64'",
            "uvicorn",
            "uvloop",
            "wheel",
            "xgrammar",
        ],
    },
    entry_points={"console_scripts": ["rorqual = rorqual.launch.cli:main"]},
    classifiers=["Programming Language :: Python :: 3", "Operating System :: POSIX :: Linux"],
    cmdclass={"build_py": BuildWithoutSetup},
    zip_safe=False,
)
