"""A pool in a file, members over it, and pages whose right bytes follow from their hash. No torch: workers start fast."""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path

import numpy as np

from rorqual.attention.kv.directory import Directory, DirectoryLayout, DirectoryLimits

N_LAYERS, PLANE = 3, 512  # bytes of a page in a layer
QUIET = DirectoryLimits(lease=0.3, call=5.0, verify=30.0, heartbeat=False)


class FilePool:
    """``N_LAYERS`` planes of ``n_pages`` pages in a file that every process maps."""

    def __init__(self, path: Path, n_pages: int) -> None:
        size = N_LAYERS * n_pages * PLANE
        with open(path, "a+b") as file:
            if os.fstat(file.fileno()).st_size < size:
                os.ftruncate(file.fileno(), size)
            self.bytes = np.frombuffer(mmap.mmap(file.fileno(), size), dtype=np.uint8).reshape(N_LAYERS, n_pages, PLANE)

    def page_views(self, page: int) -> list[memoryview]:
        return [self.bytes[layer, page].data for layer in range(N_LAYERS)]

    def write(self, page: int, content: np.ndarray) -> None:
        self.bytes[:, page] = content

    def read(self, page: int) -> np.ndarray:
        return self.bytes[:, page].copy()


def content_of(page_hash: bytes) -> np.ndarray:
    """uint8 [N_LAYERS, PLANE]: what a page of this hash holds."""
    return np.frombuffer(hashlib.shake_128(page_hash).digest(N_LAYERS * PLANE), dtype=np.uint8).reshape(N_LAYERS, PLANE)


def layout(n_pages: int = 32, extent_pages: int = 4, **changes: object) -> DirectoryLayout:
    fields = {"model": "m", "revision": "r1", "rows": "bf16 576", "page_size": 4, "checksum": "crc32"}
    return DirectoryLayout(**(fields | {"n_pages": n_pages, "extent_pages": extent_pages} | changes))


#: the pool that workers share: smaller than all their prompts together, so that pages are evicted
SHARED = layout(n_pages=160, extent_pages=8)


def member(folder: Path, made: DirectoryLayout | None = None, limits: DirectoryLimits = QUIET, pool_id: str = "pool 1") -> Directory:
    made = made or layout()
    return Directory.open(folder / "store", made, FilePool(folder / "pool", made.n_pages), pool_id=pool_id, limits=limits)


def chain(seed: int, n_pages: int) -> list[bytes]:
    """Hashes of a prompt of whole pages; prompts of equal ``seed`` begin alike."""
    return layout().hasher().hashes(np.random.default_rng(seed).integers(0, 1 << 17, 4 * n_pages).astype(np.int32))


def publish(directory: Directory, hashes: list[bytes], first: int = 0) -> list[int]:
    """Allocate, write and publish; the pages, which the member holds."""
    pages = directory.allocate(len(hashes))
    for page, one in zip(pages, hashes, strict=True):
        directory.pool.write(page, content_of(one))
    directory.publish(hashes, pages, directory.checksums(hashes, pages), first=first)
    return list(pages)


def right(directory: Directory, hashes: list[bytes], pages: tuple[int, ...]) -> bool:
    """Whether matched pages hold what they must."""
    return all((directory.pool.read(page) == content_of(one)).all() for one, page in zip(hashes, pages, strict=False))
