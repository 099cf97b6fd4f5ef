"""From a model's name to a folder on this machine."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

EMBEDDED = "tiny"
#: configurations without weights, for benchmarks with load_format dummy: DeepSeek-V3.2's widths in one dense and three MoE layers
SHAPES = ("v3.2-slice",)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHTS = ["*.safetensors"]


def embedded_model() -> Path:
    """Folder of the embedded model.

    Raises:
        ValueError: the package was installed without it.
    """
    # The folder is package data of a room above this one: found by name, so that nothing is imported from there.
    found = resources.files(__name__.partition(".")[0]) / "launch" / "tiny"
    if not isinstance(found, Path) or not (found / "config.json").is_file():
        raise ValueError(f"the embedded model '{EMBEDDED}' is not in this installation (looked in {found}); install the package again")
    return found


def shape_folder(name: str) -> Path:
    """Folder of one of the embedded configurations without weights.

    Raises:
        ValueError: the package was installed without it.
    """
    found = resources.files(__name__.partition(".")[0]) / "launch" / "shapes" / name
    if not isinstance(found, Path) or not (found / "config.json").is_file():
        raise ValueError(f"the configuration {name!r} is not in this installation (looked in {found}); install the package again")
    return found


def resolve_model(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Folder of a model: ``tiny`` (embedded), one of ``SHAPES``, a folder, or a Hugging Face hub id (downloaded, or found in the cache).

    Args:
        name: what the user gave; write ``./tiny`` for a folder of that name.
        revision: branch, tag or commit of a hub model.
        weights: whether the tensors of a hub model are wanted too.

    Raises:
        ValueError: empty, no such folder, or the hub has no such model, cannot be reached, or refuses.
    """
    if not name:
        raise ValueError(f"no model given; give a folder, a Hugging Face hub id, or '{EMBEDDED}' for the embedded model")
    if name == EMBEDDED:
        return embedded_model()
    if name in SHAPES:
        return shape_folder(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"model {name!r} is a file; give the folder of a Hugging Face checkpoint")
    if not _HUB_ID.fullmatch(name):
        choices = f"give a folder, a Hugging Face hub id, or '{EMBEDDED}' for the embedded model"
        raise ValueError(f"model folder {name!r} does not exist; {choices}")
    return _download(name, revision, _FILES + _WEIGHTS if weights else _FILES)


def _download(name: str, revision: str | None, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except Exception as error:  # the hub's many kinds of failure have one meaning here
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ValueError(
            f"model {name!r} is neither a folder nor to be had from the Hugging Face hub ({type(error).__name__}: {reason}); "
            f"check the name, download it to a folder, or use '{EMBEDDED}' for the embedded model"
        ) from error
