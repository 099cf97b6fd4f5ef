"""Loading a checkpoint: each rank reads the slices it holds, in file order, straight into place."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ..model_config import ModelConfig
from .fp8 import BLOCK, SCALE_SUFFIX, decode_scale, dequantise_into, scale_shape
from .header import TensorInfo
from .reader import Checkpoint, Shard, slice_bytes
from .target import Target

Targets = Mapping[str, list[Target]]
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What one rank loaded."""

    files: int  # files it read from
    tensors: int  # checkpoint tensors it read, FP8 scales not counted
    bytes_read: int  # bytes of the slices it read, FP8 scales counted
    seconds: float  # wall time, headers included
    skipped_mtp: int  # tensors of multi-token-prediction layers, which are not loaded
    unexpected: tuple[str, ...]  # tensors that this model has no place for

    @property
    def gb_per_s(self) -> float:
        """10**9 bytes a second."""
        return self.bytes_read / 1e9 / max(self.seconds, 1e-9)

    def summary(self) -> str:
        """One line for the log."""
        line = f"loaded {self.tensors} tensors, {self.bytes_read / 1e9:.3f} GB from {self.files} files"
        line += f" in {self.seconds:.2f} s ({self.gb_per_s:.2f} GB/s)"
        if self.skipped_mtp:
            line += f"; skipped {self.skipped_mtp} MTP tensors"
        if self.unexpected:
            shown = ", ".join(self.unexpected[:5])
            line += f"; {len(self.unexpected)} unexpected tensors were ignored: {shown}{', ...' if len(self.unexpected) > 5 else ''}"
        return line


def load_weights(targets: Targets, folder: Path, *, model: ModelConfig, known: Callable[[str], bool], progress: bool = False) -> LoadReport:
    """Fill every target from the safetensors in ``folder``.

    FP8 tensors are kept where the destination is FP8 (its scales have targets of their own), else they are dequantised exactly
    (value x scale in float32, then cast to the destination's dtype); other dtypes are cast. All names and shapes are checked
    before the first byte is read.

    Args:
        targets: Hugging Face tensor name -> places on this rank.
        folder: a Hugging Face checkpoint.
        model: tells MTP layers from main layers, and the FP8 block size.
        known: true for tensors of the model that another rank may hold; the others are reported as unexpected.
        progress: show a bar.

    Raises:
        ValueError: files missing or damaged, tensors missing, or of another shape or dtype.
    """
    began = time.perf_counter()
    checkpoint = Checkpoint(folder)
    block = _block(model)
    _check(targets, checkpoint, block)
    plan = [info for info in checkpoint.tensors.values() if info.name in targets]
    total = sum(_cost(info, targets[info.name], checkpoint) for info in plan)
    with _bar(total, progress) as advance, _shards(checkpoint) as shard_of:
        for info in plan:
            _fill(info, targets[info.name], checkpoint, shard_of, block)
            advance(_cost(info, targets[info.name], checkpoint))
    mtp, unexpected = _others(targets, checkpoint, model, known)
    return LoadReport(
        files=len({info.file for info in plan}),
        tensors=len(plan),
        bytes_read=total,
        seconds=time.perf_counter() - began,
        skipped_mtp=mtp,
        unexpected=unexpected,
    )


def _block(model: ModelConfig) -> tuple[int, int]:
    """Edges of an FP8 block."""
    rows, columns = (model.quantization or {}).get("weight_block_size") or BLOCK
    return int(rows), int(columns)


def _scale_of(info: TensorInfo, checkpoint: Checkpoint) -> TensorInfo | None:
    """The scales of an FP8 tensor; None for other dtypes."""
    return checkpoint.tensors[info.name + SCALE_SUFFIX] if info.dtype == _FP8 else None


def _check(targets: Targets, checkpoint: Checkpoint, block: tuple[int, int]) -> None:
    """Refuse a checkpoint that lacks tensors or has other shapes."""
    for name in targets:
        stored = checkpoint.tensors.get(name.removesuffix(SCALE_SUFFIX))
        if name.endswith(SCALE_SUFFIX) and stored is not None and stored.dtype != _FP8:
            raise ValueError(
                f"{stored.file}: tensor {stored.name} is {stored.dtype}, but this model's linear weights are kept as FP8; "
                "use --fp8-gemm-backend dequantise"
            )
    missing = [name for name in targets if name not in checkpoint.tensors]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        shown = ", ".join(missing[:5]) + more
        raise ValueError(f"{checkpoint.folder} lacks {len(missing)} of the {len(targets)} tensors needed here: {shown}")
    for name, places in targets.items():
        info = checkpoint.tensors[name]
        for place in places:
            if info.shape != place.full_shape:
                raise ValueError(f"{info.file}: tensor {name} must have shape {list(place.full_shape)}, found {list(info.shape)}")
        if name.endswith(SCALE_SUFFIX):
            continue  # read as it is, whatever its format; its shape was compared above
        if not info.dtype.is_floating_point:
            raise ValueError(f"{info.file}: tensor {name} must be floating point, found {info.dtype}")
        if info.dtype == _FP8:
            _check_scale(info, checkpoint, block)


def _check_scale(info: TensorInfo, checkpoint: Checkpoint, block: tuple[int, int]) -> None:
    name = info.name + SCALE_SUFFIX
    if len(info.shape) != 2:
        raise ValueError(f"{info.file}: FP8 tensor {info.name} must have two dimensions, found {list(info.shape)}")
    scale = checkpoint.tensors.get(name)
    if scale is None:
        raise ValueError(f"{info.file}: FP8 tensor {info.name} has no scales: {name} is in no file")
    wanted = scale_shape(info.shape, block)
    if scale.shape != wanted:
        wants = f"must have shape {list(wanted)} for blocks of {list(block)}"
        raise ValueError(f"{scale.file}: tensor {name} {wants}, found {list(scale.shape)}")


def _cost(info: TensorInfo, places: list[Target], checkpoint: Checkpoint) -> int:
    """Bytes to read for one tensor."""
    scale = None if all(place.tensor.dtype == _FP8 for place in places) else _scale_of(info, checkpoint)
    return sum(slice_bytes(info, place.bounds) for place in places) + (scale.size if scale else 0)


def _fill(
    info: TensorInfo, places: list[Target], checkpoint: Checkpoint, shard_of: Callable[[Path], Shard], block: tuple[int, int]
) -> None:
    """Read one tensor into all its places."""
    scale_info = _scale_of(info, checkpoint)
    scale = None if scale_info is None else decode_scale(shard_of(scale_info.file).read(scale_info))
    shard = shard_of(info.file)
    if info.shape:
        shard.prefetch(info, min(place.bounds[0][0] for place in places), max(place.bounds[0][1] for place in places))
    with shard.view(info) as stored:
        for place in places:
            if info.name.endswith(SCALE_SUFFIX):
                place.tensor.copy_(decode_scale(stored[place.index]))
            elif scale is None or place.tensor.dtype == _FP8:
                place.tensor.copy_(stored[place.index])
            else:
                rows, columns = place.bounds
                dequantise_into(place.tensor, stored, scale, (rows, columns), block)


@contextmanager
def _shards(checkpoint: Checkpoint) -> Iterator[Callable[[Path], Shard]]:
    """Map files on first use and until the end: that takes address space, not memory."""
    shards: dict[Path, Shard] = {}

    def shard_of(path: Path) -> Shard:
        if path not in shards:
            shards[path] = checkpoint.open(path)
        return shards[path]

    try:
        yield shard_of
    finally:
        for shard in shards.values():
            shard.close()


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[int], object]]:
    """A progress bar over bytes; its advance function."""
    if not shown:
        yield lambda n: None
        return
    from tqdm import tqdm

    with closing(tqdm(total=total, unit="B", unit_scale=True, desc="loading weights")) as bar:
        yield bar.update


def _others(targets: Targets, checkpoint: Checkpoint, model: ModelConfig, known: Callable[[str], bool]) -> tuple[int, tuple[str, ...]]:
    """Tensors that were not read: how many belong to MTP layers, and the names that nothing accounts for."""
    mtp, unexpected = 0, []
    for name in checkpoint.tensors:
        if name in targets or name.removesuffix(SCALE_SUFFIX) in targets:
            continue
        layer = _LAYER.match(name)
        if layer and int(layer.group(1)) >= model.n_layers:
            mtp += 1
        elif not known(name):
            unexpected.append(name)
    return mtp, tuple(unexpected)
