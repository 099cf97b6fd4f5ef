"""What has to be the same on all ranks of a job: compared before they connect (``parallel.muster``)."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path
from typing import Any

from .. import __version__
from .config import EngineConfig

#: settings that may differ between hosts: paths, whose files are compared instead or are a host's own, and what is only logged
OF_THE_HOST = ("model", "tokenizer", "revision", "kv_host_path", "kv_host_memory", "expert_distribution_dump", "disable_log_stats")


def startup_facts(config: EngineConfig, folder: Path, device: str) -> dict[str, Any]:
    """Version, settings, device type, and a digest of the model's files."""
    settings = {entry.name: getattr(config, entry.name) for entry in fields(config) if entry.name not in OF_THE_HOST}
    settings["device"] = device
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    return {"rorqual": __version__, **plain, "digest of the model's files": files_digest(folder, weights=config.load_format != "dummy")}


def files_digest(folder: Path, *, weights: bool) -> str:
    """What tells one checkpoint from another without reading its tensors: config.json, the index, names and sizes of the parts."""
    digest = hashlib.sha256()
    names = ["config.json", "model.safetensors.index.json"] if weights else ["config.json"]
    for name in names:
        path = folder / name
        digest.update(path.read_bytes() if path.is_file() else b"none")
    if weights:
        for path in sorted(folder.glob("*.safetensors")):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]
