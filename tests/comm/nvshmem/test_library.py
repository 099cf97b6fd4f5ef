"""The finder on made-up installations, the version rule, and what is said when something is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rorqual.comm.nvshmem import library

HEADER = "#define NVSHMEM_VENDOR_MAJOR_VERSION {}\n#define NVSHMEM_VENDOR_MINOR_VERSION {}\n#define NVSHMEM_VENDOR_PATCH_VERSION {}\n"


def install(
    root: Path, version: str = "3.4.5", bitcode: tuple[str, ...] = (library.BITCODE,), host: str | None = "libnvshmem_host.so.3"
) -> Path:
    """A folder as the wheel leaves it, with empty libraries."""
    (root / "lib").mkdir(parents=True)
    for name in (*bitcode, *([host] if host else [])):
        (root / "lib" / name).write_bytes(b"")
    header = root / "include/non_abi/nvshmem_version.h"
    header.parent.mkdir(parents=True)
    header.write_text(HEADER.format(*version.split(".")))
    return root


def test_finds_a_whole_installation(tmp_path: Path) -> None:
    root = install(tmp_path / "a")
    found = library.find([root])
    assert (
        found.version == (3, 4, 5)
        and found.bitcode == root / "lib/libnvshmem_device.bc"
        and found.host == root / "lib/libnvshmem_host.so.3"
    )


def test_takes_the_first_that_is_whole(tmp_path: Path) -> None:
    broken = install(tmp_path / "broken", version="3.8.0", bitcode=("libnvshmem_device_sm_90.bc",))
    assert library.find([broken, install(tmp_path / "whole")]).root == tmp_path / "whole"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bitcode": ("libnvshmem_device_sm_90.bc", "libnvshmem_device_sm_80.bc"), "version": "3.7.2"},
         r"NVSHMEM 3\.7\.2 in .* only the bitcode of single architectures \(libnvshmem_device_sm_80\.bc, libnvshmem_device_sm_90\.bc\)"),
        ({"bitcode": ()}, "has no device bitcode"),
        ({"host": None}, r"lib has no libnvshmem_host\.so"),
        ({"host": "libnvshmem_host.so.2"}, r"is mixed: the headers say NVSHMEM 3\.4\.5, but the host library is libnvshmem_host\.so\.2"),
    ],
)  # fmt: skip
def test_says_what_is_wrong_and_what_to_install(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    root = install(tmp_path / "a", **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said + r".*pip install nvshmem4py-cu12 nvidia-nvshmem-cu12==3\.4\.5"):
        library.find([root], cuda="12.8")


def test_no_header_and_no_version(tmp_path: Path) -> None:
    root = install(tmp_path / "a")
    header = root / "include/non_abi/nvshmem_version.h"
    header.write_text("nothing")
    with pytest.raises(ValueError, match="does not state it"):
        library.find([root])
    header.unlink()
    with pytest.raises(ValueError, match="nvshmem_version.h is missing"):
        library.find([root])


def test_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"NVSHMEM is not installed: no folder nvidia/nvshmem .*`pip install nvshmem4py-cu13"):
        library.find([])
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    monkeypatch.delenv("NVSHMEM_HOME", raising=False)
    with pytest.raises(ValueError, match="NVSHMEM is not installed"):
        library.find()


def test_finds_it_by_home_and_on_the_python_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = install(tmp_path / "site/nvidia/nvshmem")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    monkeypatch.delenv("NVSHMEM_HOME", raising=False)
    assert library.find().root == on_path
    home = install(tmp_path / "home", version="3.5.1")
    monkeypatch.setenv("NVSHMEM_HOME", str(home))
    assert library.find().root == home and library.find().version == (3, 5, 1)


@pytest.mark.parametrize(("device", "host"), [((3, 4, 5), (3, 4, 5)), ((3, 4, 5), (3, 8, 0)), ((3, 4, 5), (3, 4, 1))])
def test_versions_that_go_together(device: library.Version, host: library.Version) -> None:
    library.check_versions(device, host)


@pytest.mark.parametrize(
    ("device", "host", "why"),
    [
        ((3, 5, 0), (3, 4, 5), "newer than the host library"),
        ((2, 11, 0), (3, 4, 5), "another major version"),
        ((4, 0, 0), (3, 9, 9), "another major"),
    ],
)
def test_versions_that_do_not(device: library.Version, host: library.Version, why: str) -> None:
    mixed = rf"bitcode is {library.text_of(device)}, the host library that was loaded is {library.text_of(host)}; .*{why}"
    with pytest.raises(ValueError, match=mixed):
        library.check_versions(device, host)


def test_versions_as_text() -> None:
    assert library.parse_version("3.4.5") == library.parse_version(" 3.4.5-0\n") == (3, 4, 5)
    with pytest.raises(ValueError, match="'3.4' is not a version of NVSHMEM"):
        library.parse_version("3.4")


def test_bindings_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise library.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(library.metadata, "version", absent)
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="nvshmem4py, the Python side of NVSHMEM, is not installed. Install it with `pip install nvshmem4py-cu13"
    ):
        library.bindings_version()
