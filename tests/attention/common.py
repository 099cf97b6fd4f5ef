"""Small attention configurations and a driver that runs ragged requests through a paged cache with shuffled pages."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from rorqual.attention.batch import AttentionBatch
from rorqual.attention.config import IndexerConfig, MLAConfig, RopeConfig
from rorqual.attention.kv.cache import KVCache
from rorqual.attention.mla import MLA

CPU = torch.device("cpu")
DENSE = MLAConfig(hidden=48, n_heads=4, q_lora_rank=24, kv_lora_rank=32, nope_dim=12, rope_dim=8, v_dim=10, rope=RopeConfig(dim=8))
SPARSE = dataclasses.replace(DENSE, indexer=IndexerConfig(n_heads=16, head_dim=16, topk=8))


def make_mla(config: MLAConfig, seed: int = 0, layer: int = 0, dtype: torch.dtype = torch.float32) -> MLA:
    """An MLA with random weights of both signs and norms away from 1."""
    generator = torch.Generator().manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        mla = MLA(config, layer)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, parameter in mla.named_parameters():
            value = torch.randn(parameter.shape, generator=generator)
            norm = "norm" in name and name.endswith("weight")
            parameter.copy_(1 + 0.1 * value if norm else value / (parameter.shape[-1] ** 0.5))
    return mla.eval()


class Paged:
    """Requests with their own hidden states, pushed through one layer in any order of chunks."""

    def __init__(
        self,
        config: MLAConfig,
        lengths: list[int],
        page_size: int = 4,
        dtype: str = "float32",
        compute: torch.dtype = torch.float32,
        seed: int = 0,
        has_indexer: bool | None = None,
        device: torch.device = CPU,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = [torch.randn(n, config.hidden, generator=generator).to(device, compute) for n in lengths]
        each = [-(-n // page_size) for n in lengths]
        has = config.indexer is not None if has_indexer is None else has_indexer
        self.cache = KVCache(config, [has], sum(each) + 3, page_size, dtype, compute, device)
        self.cache.poison(torch.arange(self.cache.n_pages + 1))
        order = torch.randperm(sum(each) + 3, generator=generator).int().split([*each, 3])
        self.table = torch.full((len(lengths), max(each, default=0) + 2), self.cache.dummy_page, dtype=torch.int32)
        for row, pages in enumerate(order[:-1]):
            self.table[row, : len(pages)] = pages
        self.table = self.table.to(device)
        self.done = np.zeros(len(lengths), np.int64)

    def batch(self, rows: list[int], counts: list[int]) -> AttentionBatch:
        return AttentionBatch.build(self.done[rows], np.array(counts, np.int64), self.table[rows], self.cache.page_size, self.cache.device)

    @torch.inference_mode()
    def step(self, mla: MLA, rows: list[int], counts: list[int], shared=None):
        """Push the next ``counts`` tokens of ``rows``: outputs and selections per row."""
        batch = self.batch(rows, counts)
        parts = [self.x[r][self.done[r] : self.done[r] + n] for r, n in zip(rows, counts, strict=True)]
        out, topk = mla(torch.cat(parts), batch, self.cache.layers[0], shared)
        self.done[rows] += counts
        return list(out.split(counts)), None if topk is None else list(topk.split(counts))

    def run(self, mla: MLA, chunk: int) -> list[torch.Tensor]:
        """Push everything in rounds of at most ``chunk`` tokens a request: outputs per request."""
        pieces: list[list[torch.Tensor]] = [[] for _ in self.x]
        while True:
            left = [len(x) - int(d) for x, d in zip(self.x, self.done, strict=True)]
            rows = [r for r, n in enumerate(left) if n]
            if not rows:
                return [torch.cat(p) for p in pieces]
            out, _ = self.step(mla, rows, [min(chunk, left[r]) for r in rows])
            for r, part in zip(rows, out, strict=True):
                pieces[r].append(part)
