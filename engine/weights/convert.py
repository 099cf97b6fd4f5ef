"""Making a block-FP8 copy of a checkpoint, in the format that DeepSeek publishes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from ..hf_config.model_parser import parse_model_config, read_json
from .fp8 import BLOCK, SCALE_SUFFIX, ScaleFormat, quantise_block_fp8
from .reader import INDEX_NAME, Checkpoint

_LINEAR = re.compile(
    r"model\.layers\.\d+\."
    r"(self_attn\.(q_a_proj|q_b_proj|q_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|indexer\.wq_b|indexer\.wk)"
    r"|mlp\.((experts\.\d+|shared_experts)\.)?(gate|up|down)_proj)\.weight"
)


def is_quantised(name: str) -> bool:
    """True for the weights that are FP8 in published checkpoints: linear layers of attention, indexer, MLP and experts.

    Norms, embedding, head, router, ``indexer.weights_proj`` and an MTP layer's ``eh_proj`` stay as they are.
    """
    return _LINEAR.fullmatch(name) is not None


def convert_fp8(src_folder: Path, dst_folder: Path, *, scale_format: ScaleFormat = "float32", shards: int | None = None) -> None:
    """Write a block-FP8 copy of the checkpoint in ``src_folder`` to ``dst_folder`` (made if need be).

    Args:
        src_folder: an unquantised Hugging Face checkpoint.
        dst_folder: gets safetensors with an index, config.json with quantization_config, and the other JSON files.
        scale_format: "float32", or "ue8m0" for powers of two stored in a byte.
        shards: file count; the source's by default.

    Raises:
        ValueError: the source is damaged, or quantised already.
    """
    from safetensors.torch import save_file

    if parse_model_config(src_folder).quantization is not None:
        raise ValueError(f"{src_folder} is quantised already (config.json has quantization_config)")
    checkpoint = Checkpoint(src_folder)
    dst_folder.mkdir(parents=True, exist_ok=True)
    files = _split(checkpoint, len(checkpoint.files) if shards is None else shards)
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = _convert(checkpoint, names, scale_format)
        save_file(tensors, str(dst_folder / file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (dst_folder / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")
    _write_config(src_folder, dst_folder, scale_format)


def _split(checkpoint: Checkpoint, count: int) -> list[list[str]]:
    """Tensor names of each file, in order, files of about equal size."""
    total = sum(info.size for info in checkpoint.tensors.values())
    files: list[list[str]] = [[] for _ in range(count)]
    done = 0
    for name, info in checkpoint.tensors.items():
        files[min(done * count // max(total, 1), count - 1)].append(name)
        done += info.size
    return [names for names in files if names]


def _convert(checkpoint: Checkpoint, names: list[str], scale_format: ScaleFormat) -> dict[str, torch.Tensor]:
    """The tensors of one file, linear weights as FP8 with their scales."""
    found: dict[str, torch.Tensor] = {}
    for name in names:
        info = checkpoint.tensors[name]
        shard = checkpoint.open(info.file)
        tensor = shard.read(info)
        shard.close()
        if is_quantised(name):
            found[name], found[name + SCALE_SUFFIX] = quantise_block_fp8(tensor, BLOCK, scale_format)
        else:
            found[name] = tensor
    return found


def _write_config(src_folder: Path, dst_folder: Path, scale_format: ScaleFormat) -> None:
    """config.json with the quantisation, and the other JSON files (tokenizer, generation) as they are."""
    config: dict[str, Any] = read_json(src_folder / "config.json")
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
        **({"scale_fmt": "ue8m0"} if scale_format == "ue8m0" else {}),
    }
    (dst_folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for path in src_folder.glob("*.json"):
        if path.name not in ("config.json", INDEX_NAME):
            shutil.copyfile(path, dst_folder / path.name)
