"""The first 2 MiB of a pool file: whose rows it holds, in which layout, and who has it open."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

from .layout import HEADER_BYTES, HostLayout, pool_bytes

_MAGIC = b"RORQPOOL"
VERSION = 1
_HEAD = struct.Struct("<8sII32s")  # magic, version, bytes of JSON, their SHA-256
_MOST_JSON = 64 << 10
_MARKS = 1 << 20  # offset of one byte for every member of a job
#: members that a pool file can count
MOST_MEMBERS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class PoolHeader:
    """What a pool file says of itself."""

    model: str  # fingerprint of the weights and of everything else that decides what a row holds
    layout: HostLayout
    job: str  # of the ranks that have it open; empty: anyone with the same model and layout may
    kept: bool  # outlives its users
    identity: str = ""  # made with the file, and kept as long as its contents are; empty: not known

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return pool_bytes(self.layout, "file")

    def encode(self) -> bytes:
        """Magic, version, length, checksum, JSON."""
        fields = {"model": self.model, "layout": self.layout.as_json(), "job": self.job, "kept": self.kept, "bytes": self.file_bytes}
        text = json.dumps(fields | {"identity": self.identity}, sort_keys=True).encode()
        return _HEAD.pack(_MAGIC, VERSION, len(text), hashlib.sha256(text).digest()) + text


def write(fd: int, header: PoolHeader) -> None:
    """Put ``header`` into an open pool file of full size, the magic last: a torn header has none."""
    data = header.encode()
    with mmap.mmap(fd, HEADER_BYTES) as memory:  # a file of huge pages cannot be written to otherwise
        memory[0 : len(_MAGIC)] = bytes(len(_MAGIC))
        memory[len(_MAGIC) : len(data)] = data[len(_MAGIC) :]
        memory[0 : len(_MAGIC)] = _MAGIC


def read(fd: int, path: str) -> dict[str, Any]:
    """Fields of the header of an open pool file.

    Raises:
        ValueError: no pool file, one of another version, or its header or length is damaged.
    """
    data = os.pread(fd, _HEAD.size + _MOST_JSON, 0)
    fix = "remove it, or name another path"
    head = data[: len(_MAGIC)]
    if any(head) and not _MAGIC.startswith(head):  # somebody else's file
        raise ValueError(f"{path}: this is no host pool file; name another path")
    if len(data) < _HEAD.size or not any(head):
        raise ValueError(f"{path}: the header of this host pool file was never finished; {fix}")
    _, version, length, checksum = _HEAD.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"{path}: host pool file of version {version}, this program writes version {VERSION}; {fix}")
    text = data[_HEAD.size : _HEAD.size + length]
    if len(text) != length or hashlib.sha256(text).digest() != checksum:
        raise ValueError(f"{path}: the header of this host pool file is damaged (its checksum does not match); {fix}")
    fields: dict[str, Any] = json.loads(text)
    if os.fstat(fd).st_size != fields["bytes"]:
        raise ValueError(f"{path}: the host pool file has {os.fstat(fd).st_size} bytes, its header says {fields['bytes']}; {fix}")
    return fields


def compare(found: dict[str, Any], wanted: PoolHeader, path: str) -> None:
    """Refuse a pool file of something else.

    Raises:
        ValueError: the first difference of model, layout or use.
    """
    fix = "if nobody uses it, remove it; or name another path"
    if found["model"] != wanted.model:
        raise ValueError(f"{path}: host pool file of another model ({found['model']!r}, this one is {wanted.model!r}); {fix}")
    for name, value in wanted.layout.as_json().items():
        if found["layout"].get(name) != value:
            fix = "give the kv_host_memory of the engine that made it, " + fix if name == "n_pages" else fix
            raise ValueError(f"{path}: host pool file of another layout ({name} is {found['layout'].get(name)}, not {value}); {fix}")
    if found["kept"] != wanted.kept:
        raise ValueError(f"{path}: this host pool file {'stays' if found['kept'] else 'goes away'} with its users, unlike this one; {fix}")


def mark(fd: int, member: int, members: int) -> bool:
    """Note that ``member`` of ``members`` has the file open; True once all have."""
    with mmap.mmap(fd, HEADER_BYTES) as memory:
        memory[_MARKS + member] = 1
        return memory[_MARKS : _MARKS + members] == b"\1" * members
