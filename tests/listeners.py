"""Where the processes of a job listen, as the kernel tells."""

import os
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

_LISTEN = "0A"


def tree(pid: int) -> list[int]:
    """A process and all that it started, directly or not."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def listeners(pid: int) -> set[str]:
    """Addresses ("127.0.0.1:80") on which a process, or one that it started, takes TCP connections."""
    inodes = set()
    for each in tree(pid):
        with suppress(OSError):  # it has ended
            for entry in Path(f"/proc/{each}/fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for name in ("tcp", "tcp6"):
        for fields in map(str.split, Path(f"/proc/net/{name}").read_text().splitlines()[1:]):
            if fields[3] == _LISTEN and fields[9] in inodes:
                found.add(_address(fields[1]))
    return found


def beyond_loopback(addresses: set[str]) -> list[str]:
    """Those of ``addresses`` that other machines may reach."""
    return sorted(a for a in addresses if not _host(a).is_loopback)


def _host(address: str):
    host = ip_address(address.rpartition(":")[0].strip("[]"))
    return getattr(host, "ipv4_mapped", None) or host


def _address(text: str) -> str:
    """The kernel's spelling: words of the host's byte order in hexadecimal, then the port."""
    digits, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8))
    host = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
    return f"[{host}]:{int(port, 16)}" if len(raw) == 16 else f"{host}:{int(port, 16)}"
