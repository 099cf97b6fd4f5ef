"""Where the installed NVSHMEM is, which version it has, and whether its parts go together. Loads nothing.

The wheels ``nvidia-nvshmem-cu12`` and ``-cu13`` unpack to ``nvidia/nvshmem`` with the host library, the device library as
LLVM bitcode, and a header that states the version. Newer wheels ship the bitcode for one architecture a file, ten times
the code per kernel, which Triton's LLVM cannot always read; so the one file for all architectures is asked for.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

BITCODE = "libnvshmem_device.bc"
PINNED = "3.4.5"  # the version whose bitcode the kernels are compiled against in the tests
_HEADER = "include/non_abi/nvshmem_version.h"

Version = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Library:
    """One installation."""

    root: Path  # its folder: lib and include lie below
    host: Path  # the host library
    bitcode: Path  # the device library
    version: Version  # of both, as the installation states it


def packages(cuda: str | None = None) -> str:
    """The pip command that installs what is needed; ``cuda`` is the CUDA version of torch, 13 when not given."""
    major = (cuda or "13").split(".")[0]
    return f"pip install nvshmem4py-cu{major} nvidia-nvshmem-cu{major}=={PINNED}"


def text_of(version: Version) -> str:
    """3.4.5"""
    return ".".join(map(str, version))


def find(roots: Sequence[Path] | None = None, *, cuda: str | None = None) -> Library:
    """The first installation that kernels can be linked with: of NVSHMEM_HOME, then of the Python path.

    Raises ValueError that says what was looked at, what was wrong with it, and how to install what is missing.
    """
    places = list(roots) if roots is not None else _places()
    troubles = []
    for root in places:
        try:
            return _library(root, cuda)
        except ValueError as error:
            troubles.append(str(error))
    if not troubles:
        troubles = ["NVSHMEM is not installed: no folder nvidia/nvshmem on the Python path, and NVSHMEM_HOME is not set"]
    raise ValueError(f"{'; '.join(troubles)}. Install it with `{packages(cuda)}`")


def _places() -> list[Path]:
    home = os.environ.get("NVSHMEM_HOME")
    found = [Path(home)] if home else []
    try:
        spec = find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:  # there is no folder nvidia at all
        spec = None
    locations = (spec.submodule_search_locations or ()) if spec is not None else ()
    found += [Path(place) for place in locations]
    found += [place for entry in sys.path if (place := Path(entry or ".", "nvidia", "nvshmem")).is_dir()]
    return list(dict.fromkeys(place.resolve() for place in found))


def _library(root: Path, cuda: str | None) -> Library:
    lib = root / "lib"
    hosts = sorted(lib.glob("libnvshmem_host.so*"))
    if not hosts:
        raise ValueError(f"{lib} has no libnvshmem_host.so")
    version = stated_version(root)
    bitcode = lib / BITCODE
    if not bitcode.is_file():
        single = sorted(path.name for path in lib.glob("libnvshmem_device_sm_*.bc"))
        only = f"only the bitcode of single architectures ({', '.join(single)})" if single else "no device bitcode"
        raise ValueError(f"NVSHMEM {text_of(version)} in {root} has {only}, but kernels are linked with {BITCODE} as in {PINNED}")
    soname = re.search(r"\.so\.(\d+)", hosts[-1].name)
    if soname is not None and int(soname[1]) != version[0]:
        raise ValueError(f"{root} is mixed: the headers say NVSHMEM {text_of(version)}, but the host library is {hosts[-1].name}")
    return Library(root=root, host=hosts[-1], bitcode=bitcode, version=version)


def stated_version(root: Path) -> Version:
    """The version that the header in ``root`` states. ValueError if there is none."""
    header = root / _HEADER
    if not header.is_file():
        raise ValueError(f"the version of NVSHMEM in {root} cannot be told: {_HEADER} is missing")
    text = header.read_text(encoding="utf-8", errors="replace")
    found = [re.search(rf"define NVSHMEM_VENDOR_{part}_VERSION\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    if None in found:
        raise ValueError(f"the version of NVSHMEM in {root} cannot be told: {_HEADER} does not state it")
    major, minor, patch = (int(match[1]) for match in found if match is not None)
    return major, minor, patch


def check_versions(device: Version, host: Version) -> None:
    """Raise ValueError unless bitcode of version ``device`` may run under a host library of version ``host``.

    The host library accepts modules of its own major version whose minor version is not above its own (its documented
    compatibility rule); anything else ends in a hang or in wrong addresses, so it is refused before anything is launched.
    """
    if device[0] != host[0] or device[1] > host[1]:
        why = "another major version" if device[0] != host[0] else "newer than the host library"
        raise ValueError(
            f"NVSHMEM is mixed: the device bitcode is {text_of(device)}, the host library that was loaded is {text_of(host)}; the "
            f"bitcode is {why}. Install one version of both: `{packages()}`, and take other copies off LD_LIBRARY_PATH"
        )


def parse_version(text: str) -> Version:
    """(3, 4, 5) of "3.4.5". ValueError for anything else."""
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\D.*)?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a version of NVSHMEM: expected three numbers, such as {PINNED}")
    return int(match[1]), int(match[2]), int(match[3])


def bindings_version() -> str:
    """Version of the nvshmem4py distribution. ValueError, with the command that installs it, if there is none."""
    for name in ("nvshmem4py-cu13", "nvshmem4py-cu12"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if find_spec("nvshmem") is not None:
        return "unknown"
    raise ValueError(f"nvshmem4py, the Python side of NVSHMEM, is not installed. Install it with `{packages()}`")
