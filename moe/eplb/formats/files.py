"""Opens a file of any kind that formats use, safely, without asking what is in it."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....parallel.json_text import TOO_DEEP, parse_json


@dataclass(frozen=True, kw_only=True)
class Raw:
    """Contents of a file: tensors as numpy arrays, the rest as plain Python."""

    kind: str  # pt, safetensors, npz, npy, json, jsonl, yaml, parquet, folder
    data: Any  # a dict, a list, an array; the path of a parquet file or a folder
    name: str  # for messages


def need(module: str) -> Any:
    """An optional package, imported now.

    Raises:
        ValueError: it is not installed.
    """
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        package = {"yaml": "pyyaml"}.get(module.split(".")[0], module.split(".")[0])
        raise ValueError(f"this format needs {package}, which is not installed: pip install 'rorqual[eplb]'") from None


def read_raw(source: str | Path) -> Raw:
    """A file, a folder, or JSON given as text.

    Raises:
        ValueError: there is no such file, or it holds what no format has.
    """
    if isinstance(source, str) and source.lstrip()[:1] in ("{", "["):
        return Raw(kind="json", data=json_of(source, "inline JSON"), name="inline JSON")
    path = Path(source)
    if path.is_dir():
        return Raw(kind="folder", data=path, name=str(path))
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give a file, a folder of dumps, or JSON as text that starts with {{ or [")
    with path.open("rb") as file:
        head = file.read(16)
    if not head:
        raise ValueError(f"{path} is empty")
    if head[:4] == b"PAR1":
        return Raw(kind="parquet", data=path, name=str(path))
    if head[:6] == b"\x93NUMPY":
        return Raw(kind="npy", data=_numpy(path), name=str(path))
    if head[:2] == b"PK":
        return _archive(path)
    if head[8:9] == b"{" and path.suffix == ".safetensors":
        from safetensors.numpy import load_file

        return Raw(kind="safetensors", data=dict(load_file(path)), name=str(path))
    return _text(path)


def _archive(path: Path) -> Raw:
    """A zip file: of torch, or of numpy."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if names and all(name.endswith(".npy") for name in names):
        return Raw(kind="npz", data=_numpy(path), name=str(path))
    return Raw(kind="pt", data=read_pt(path), name=str(path))


def _numpy(path: Path) -> Any:
    try:
        loaded = np.load(path, allow_pickle=False)
        return dict(loaded) if isinstance(loaded, np.lib.npyio.NpzFile) else loaded
    except ValueError as error:
        raise ValueError(f"{path}: holds Python objects, which are not read for safety; save plain arrays ({error})") from None


def read_pt(path: Path) -> Any:
    """A torch file of tensors and plain values; tensors become numpy arrays.

    Raises:
        ValueError: it holds other objects, which reading would have to run code for.
    """
    import torch

    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises pickle's, zip's and its own errors
        text = str(error).strip() or repr(error)
        raise ValueError(
            f"{path}: holds more than tensors and plain values, or is damaged; it is not read ({text.splitlines()[0]})"
        ) from None
    return as_numpy(data)


def as_numpy(data: Any) -> Any:
    """Tensors inside dicts, lists and tuples as numpy arrays; 16-bit floats as float32."""
    import torch

    if isinstance(data, torch.Tensor):
        wide = data.float() if data.dtype in (torch.bfloat16, torch.float16) else data
        return wide.numpy()
    if isinstance(data, dict):
        return {key: as_numpy(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [as_numpy(value) for value in data]
    return data


def write_pt(data: dict[str, Any], path: Path) -> None:
    """A torch file that ``weights_only=True`` reads: arrays as tensors."""
    import torch

    def tensors(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(np.ascontiguousarray(value))
        if isinstance(value, dict):
            return {key: tensors(inner) for key, inner in value.items()}
        return [tensors(inner) for inner in value] if isinstance(value, list) else value

    torch.save(tensors(data), path)


def _text(path: Path) -> Raw:
    """JSON, lines of JSON, or YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: neither text nor a torch, numpy, safetensors or parquet file; no format has this") from None
    if text.lstrip()[:1] in ("{", "["):
        try:
            return Raw(kind="json", data=parse_json(text), name=str(path))
        except json.JSONDecodeError:
            lines = [line for line in text.split("\n") if line.strip()]
            found = [json_of(line, f"{path}, line {i + 1}") for i, line in enumerate(lines)]
            return Raw(kind="jsonl", data=found, name=str(path))
    yaml = need("yaml")
    try:
        data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: neither JSON nor YAML ({str(error).splitlines()[0]})") from None
    except RecursionError:  # of the loader that is no C
        raise ValueError(f"{path}: neither JSON nor YAML ({TOO_DEEP})") from None
    return Raw(kind="yaml", data=data, name=str(path))


def json_of(text: str, name: str) -> Any:
    """What JSON text says; ValueError with its ``name`` for any other."""
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}: not valid JSON: {error}") from None
