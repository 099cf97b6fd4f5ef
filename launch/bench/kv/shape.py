"""Sizes of the attention rig."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....attention.kv import fp4
from ....attention.kv.layout import fp8_latent_bytes
from .traces import HARD, PUBLISHED

TRACES = {"published": PUBLISHED, "hard": HARD}
TRACE_HELP = "Locality of the choices: published (default), hard, or a file of `bench kv policy --save-recorded`, scaled up."


@dataclass(frozen=True, kw_only=True)
class RigShape:
    """DeepSeek-V3.2's attention, with FP8 rows; smaller in tests.

    Raises:
        ValueError: a hot buffer smaller than a selection, or sizes that are no whole pages.
    """

    requests: int
    context: int = 65_536
    layers: int = 61
    heads: int = 128  # of this rank
    latent: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128
    query_latent: int = 1536
    hidden: int = 7168
    k: int = 2048
    page_size: int = 64
    hot_rows: int = 4096
    trace: str = "published"  # one of TRACES, or a file of recorded ones (.npz)
    steps: int = 64  # of a trace; longer runs go back and forth over it
    trace_kinds: int = 4  # traces that the layers take in turn
    policy: str = "score"
    host_bytes: int = 48 << 30  # requests share pages of the host pool when it cannot hold all their rows
    device_bytes: int = 48 << 30  # of latent pages; resident contexts share pages likewise
    index_heads: int = 64
    index_dim: int = 128
    index_format: str = "fp8"  # of index keys, fp8 or fp4
    with_products: bool = True  # the products before and after attention take part
    with_choice: bool = True  # the indexer takes part

    def __post_init__(self) -> None:
        if self.hot_rows < self.k:
            raise ValueError(f"a hot buffer of {self.hot_rows} rows cannot hold the {self.k} rows of a step; give it at least {self.k}")
        for name in ("context", "hot_rows"):
            if getattr(self, name) % self.page_size:
                raise ValueError(f"{name} must be whole pages of {self.page_size} rows, found {getattr(self, name)}")
        if self.index_format not in ("fp8", "fp4"):
            raise ValueError(f"the rig's index keys are fp8 or fp4, found {self.index_format!r}")
        if self.index_format == "fp4" and (self.index_dim < 32 or self.index_dim & (self.index_dim - 1)):
            raise ValueError(f"fp4 index keys have 32, 64, 128, ... values, found {self.index_dim}; use fp8")
        if self.trace not in TRACES and not self.trace.endswith(".npz"):
            raise ValueError(f"unknown trace {self.trace!r}; use one of {', '.join(TRACES)}, or a recorded .npz file")
        if self.context <= self.k:
            raise ValueError(f"a context of {self.context} leaves nothing to choose for k = {self.k}; give it more")

    @property
    def row_bytes(self) -> int:
        """Bytes of a latent row."""
        return fp8_latent_bytes(self.latent, self.rope)

    @property
    def index_key_bytes(self) -> int:
        """Bytes of a token's index key in a layer."""
        return self.index_dim + 4 if self.index_format == "fp8" else fp4.key_bytes(self.index_dim)

    @property
    def usual_rows(self) -> int:
        """Hot rows that the engine promises by default; a larger buffer is a lease that has grown."""
        return min(self.hot_rows, 2 * self.k)

    @property
    def warm_up(self) -> int:
        """Steps until a hot buffer is full, roughly: empty rows are filled at the rate of the misses."""
        return 12 if self.hot_rows <= 2 * self.k else 12 + 12 * (self.hot_rows // self.k - 1)

    @property
    def trace_name(self) -> str:
        """The trace, without the folders of a file."""
        return Path(self.trace).name

    @property
    def pages(self) -> int:
        """Pages of one request."""
        return self.context // self.page_size

    @property
    def hot_pages(self) -> int:
        """Device pages of one hot buffer."""
        return self.hot_rows // self.page_size

    @property
    def distinct_pages(self) -> int:
        """Pages after which the content of rows repeats: a page holds what its number, modulo this, says."""
        return min(256, self.pages & -self.pages)

    @property
    def host_pages(self) -> int:
        """Pages of the host pool, of each layer."""
        return self._fit(self.host_bytes)

    @property
    def resident_pages(self) -> int:
        """Device pages for whole contexts, of each layer."""
        hot = self.requests * self.hot_pages * self.page_size * self.row_bytes * self.layers
        return min(self._fit(self.device_bytes - hot), self.requests * self.pages)

    def _fit(self, n_bytes: int) -> int:
        """As many pages a layer as ``n_bytes`` hold; a multiple of the pages with a content of their own."""
        unit = self.distinct_pages
        return max(1, n_bytes // (self.layers * self.page_size * self.row_bytes) // unit) * unit
