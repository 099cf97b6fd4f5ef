"""A name for the weights of a model that changes when their files do."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path


def weights_fingerprint(folder: Path, *, made_up: bool, seed: int) -> str:
    """Of the weight files and the configuration in ``folder``, by names, sizes and times; of ``seed`` where weights are ``made_up``.

    Reading the bytes of all files would take minutes; who replaces one in place, with its size and time, must name another revision.
    """
    told = blake2b(digest_size=12)
    for path in sorted(folder.glob("*")):
        if path.name == "config.json" or (path.suffix == ".safetensors" and not made_up):
            info = path.stat()
            told.update(f"{path.name} {info.st_size} {info.st_mtime_ns}\n".encode())
    if made_up:
        told.update(f"made up from seed {seed}".encode())
    return told.hexdigest()
