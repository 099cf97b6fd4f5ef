"""Reading a safetensors folder in file order, without a copy and without keeping pages in memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ..hf_config.model_parser import read_json
from .header import TensorInfo, read_header

INDEX_NAME = "model.safetensors.index.json"


def _shard_names(folder: Path) -> tuple[list[str], dict[str, str]]:
    """File names of the checkpoint, and the index's map from tensor to file (empty without an index)."""
    index = folder / INDEX_NAME
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
            raise ValueError(f"{index}: 'weight_map' must map tensor names to file names")
        return sorted(set(weight_map.values())), weight_map
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        hint = "; it has PyTorch pickles, which are not read: convert them to safetensors" if pickled else ""
        raise ValueError(f"{folder} has no {INDEX_NAME} and no *.safetensors file{hint}")
    return names, {}


class Checkpoint:
    """The tensors of a safetensors folder: an index and its shards, or the files that are there.

    All headers are read and checked at once; tensor bytes only when asked for.

    Raises:
        ValueError: a shard is missing, cut off or damaged, a tensor is in two shards, or the index and the shards
            disagree; the message names the file and the reason.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names, weight_map = _shard_names(folder)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            how_many = f"{len(missing)} of the {len(names)} files named in {INDEX_NAME}"
            raise ValueError(f"{folder / missing[0]} is missing ({how_many}); download it again")
        self.tensors: dict[str, TensorInfo] = {}  # in file order, then by offset
        self.files = [folder / name for name in names]
        for path in self.files:
            for info in read_header(path):
                if info.name in self.tensors:
                    other = self.tensors[info.name].file.name
                    raise ValueError(f"{path}: tensor {info.name!r} is also in {other}; one of the files is stale")
                self.tensors[info.name] = info
        for name, file in weight_map.items():
            if name not in self.tensors or self.tensors[name].file.name != file:
                raise ValueError(f"{folder / file}: tensor {name!r} is not in it, although {INDEX_NAME} says so")

    def open(self, path: Path) -> Shard:
        """Map one of ``files``; close it after use."""
        return Shard(path)


class Shard:
    """One mapped file. Tensors are views of the mapping, valid inside ``view`` only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            # A private writable mapping: torch wants writable memory, nothing ever writes, and so nothing is copied.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    @contextmanager
    def view(self, info: TensorInfo) -> Iterator[torch.Tensor]:
        """The stored tensor, without a copy. On leaving, its pages are given back, so that memory stays near one tensor."""
        if info.size == 0:
            yield torch.empty(info.shape, dtype=info.dtype)
            return
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=info.size, offset=info.start)
        try:
            yield flat.view(info.dtype).view(info.shape)
        finally:
            del flat
            first = info.start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, info.start + info.size - first)

    def prefetch(self, info: TensorInfo, first: int, last: int) -> None:
        """Ask the system to read rows ``first`` to ``last`` of a tensor ahead: on a network disk page faults are slow."""
        row = info.size // max(info.shape[0], 1) if info.shape else info.size
        begin = (info.start + first * row) // mmap.PAGESIZE * mmap.PAGESIZE
        end = info.start + (last * row if info.shape else info.size)
        if end > begin:
            self._map.madvise(mmap.MADV_WILLNEED, begin, end - begin)

    def read(self, info: TensorInfo) -> torch.Tensor:
        """A copy of the stored tensor."""
        with self.view(info) as tensor:
            return tensor.clone()

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()


def slice_bytes(info: TensorInfo, bounds: Sequence[tuple[int, int]]) -> int:
    """Bytes of the part of a tensor within ``bounds``."""
    count = info.dtype.itemsize
    for start, stop in bounds:
        count *= stop - start
    return count
