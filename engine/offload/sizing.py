"""How many pages each pool of one rank has with offloading: one closed form, for the engine and for plans made without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...attention.config import MLAConfig
from ...attention.kernels.tier_most import MOST_HOT_ROWS
from ...attention.kv.host.layout import HostLayout
from ...attention.kv.hot import HotShape
from ...attention.kv.layout import index_row_bytes, latent_row_bytes
from ...attention.kv.sizes import KVBytes, TierShape, kv_bytes
from .tier_limits import UNDER_WAY, TierLimits, least_device_pages

#: hot rows of a request by default, times the keys of one token
_HOT = 2
#: the same for a lease that has grown
_MOST_HOT = 4
#: of the device memory, this much may be set aside for leases before logical pages get theirs
_LEASE_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class OffloadShape:
    """One rank's part of a model and the settings that pool sizes follow from."""

    mla: MLAConfig
    has_indexer: tuple[bool, ...]  # of this rank's layers
    dtype: str  # format of cached rows
    index_dtype: str | None = None  # format of cached index keys, None: that of the rows
    page_size: int
    policy: str  # host or hybrid
    max_num_seqs: int
    max_model_len: int
    step_tokens: int  # most tokens of one step
    hot_slots: int | None = None  # hot rows that an offloaded request is promised, None: twice the keys of a token
    hot_slots_max: int | None = None  # hot rows that it gets while device pages are of no other use, None: four times the keys of a token
    tokens: int | None = None  # logical tokens asked for, None: as many as fit and can be used
    scored: bool = True  # hot rows give way by their index scores, not by age
    device_tokens: int | None = None  # latent tokens on the device asked for, None: what is left
    directory: bool = False  # host pages are shared by what is in them: with their index keys, and all of the pool by everybody

    @property
    def topk(self) -> int:
        """Keys of one token.

        Raises:
            ValueError: a dense model.
        """
        if self.mla.indexer is None:
            raise ValueError(
                "kv_offload needs a model that selects its keys (an indexer): a dense one reads every row in every step, which no link "
                "to host memory keeps up with; use --kv-offload off"
            )
        return self.mla.indexer.topk

    @property
    def hot_pages(self) -> int:
        """Device pages that a lease is promised.

        Raises:
            ValueError: too few rows for the keys of one token, more than the kernels count, or a dense model.
        """
        most = self._most_rows
        if self.hot_slots is not None and self.hot_slots < self.topk:
            raise ValueError(f"kv_hot_slots {self.hot_slots} is less than the {self.topk} keys of one token; use at least {self.topk}")
        rows = min(_HOT * self.topk, most) if self.hot_slots is None else self.hot_slots
        if rows > most:
            raise ValueError(f"kv_hot_slots {rows} is more than the {most} rows (whole pages) of a hot buffer; use at most {most}")
        return -(-rows // self.page_size)

    @property
    def most_hot_pages(self) -> int:
        """Device pages of the largest lease.

        Raises:
            ValueError: fewer rows than are promised, or more than the kernels count; as ``hot_pages``.
        """
        promised, most, asked = self.hot_pages, self._most_rows, self.hot_slots_max
        if asked is None:
            return max(promised, min(_MOST_HOT * self.topk, most) // self.page_size)
        if asked < promised * self.page_size:
            raise ValueError(
                f"kv_hot_slots_max {asked} is less than the {promised * self.page_size} hot rows that every offloaded request is promised "
                f"(kv_hot_slots, whole pages); use at least {promised * self.page_size}"
            )
        if asked > most:
            raise ValueError(f"kv_hot_slots_max {asked} is more than the {most} rows (whole pages) of a hot buffer; use at most {most}")
        return asked // self.page_size

    @property
    def _most_rows(self) -> int:
        """Hot rows that kernels count, in whole pages."""
        return MOST_HOT_ROWS // self.page_size * self.page_size

    @property
    def latent_page(self) -> int:
        """Device bytes of one page of latent rows, all layers."""
        return len(self.has_indexer) * self.page_size * latent_row_bytes(self.mla, self.dtype)

    @property
    def index_page(self) -> int:
        """Device bytes of one logical page: index keys of all layers, and where it is."""
        return sum(self.index_page_bytes) + 8

    def host_layout(self, n_pages: int, n_layers: int | None = None) -> HostLayout:
        """The host pool of ``n_pages`` pages; ``n_layers`` where it holds those of other ranks too."""
        layers = len(self.has_indexer) if n_layers is None else n_layers
        assert not self.directory or layers == len(self.has_indexer), "a pool with a directory holds the layers of one stage"
        return HostLayout(
            n_layers=layers,
            n_pages=n_pages,
            page_size=self.page_size,
            row_bytes=latent_row_bytes(self.mla, self.dtype),
            index_page_bytes=self.index_page_bytes if self.directory else (),
        )

    @property
    def index_page_bytes(self) -> tuple[int, ...]:
        """Bytes of one page of index keys in each layer, 0 for one without."""
        size = self.page_size * index_row_bytes(self.mla, self.index_dtype or self.dtype)
        return tuple(size if has else 0 for has in self.has_indexer)

    def tiers(self, n_pages: int, n_device_pages: int) -> TierShape:
        """What the cache allocates."""
        hot = HotShape(
            n_slots=self.max_num_seqs,
            n_layers=len(self.has_indexer),
            lease_pages=self.most_hot_pages,
            usual_pages=self.hot_pages,
            page_size=self.page_size,
            n_logical_pages=n_pages,
            max_requests=self.max_num_seqs,
            max_context=self.max_model_len,
            chosen_rows=self.topk,
        )
        return TierShape(n_device_pages=n_device_pages, hot=hot, scored=self.scored)

    def device_bytes(self, n_pages: int, n_device_pages: int) -> KVBytes:
        """Device memory of the cache, by part."""
        return kv_bytes(
            self.mla,
            self.has_indexer,
            self.dtype,
            n_pages=n_pages,
            page_size=self.page_size,
            tiers=self.tiers(n_pages, n_device_pages),
            index_dtype=self.index_dtype,
        )

    def limits(self, n_pages: int, n_device_pages: int, n_host_pages: int | None = None) -> TierLimits:
        """What the residency decides by; one host page for each logical one unless said otherwise.

        Raises:
            ValueError: too few device pages for even one request.
        """
        return TierLimits(
            policy=self.policy,
            page_size=self.page_size,
            n_pages=n_pages,
            n_device_pages=n_device_pages,
            n_host_pages=n_pages if n_host_pages is None else n_host_pages,
            topk=self.topk,
            hot_pages=self.hot_pages,
            most_hot_pages=self.most_hot_pages,
            step_tokens=self.step_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class OffloadSizes:
    """Pages of one rank's pools; every rank of the world uses the smallest numbers of all."""

    n_pages: int  # logical pages, each with index keys on the device and a page of the host pool
    n_device_pages: int  # latent pages on the device, leased ones included


def offload_sizes(shape: OffloadShape, *, device_bytes: int, host_pages: int) -> OffloadSizes:
    """Pages that ``device_bytes`` of this rank and ``host_pages`` of its host pool allow.

    First come the device pages that leases of all running requests need, up to half of the memory; then logical pages, as many
    as the host pool and the index keys allow and the requests can use; what is left becomes device pages, as far as they are of use.

    Raises:
        ValueError: a dense model; too little memory on the device or the host; a number asked for that is too small.
    """
    most = _most_pages(shape, host_pages)
    # One logical page and one device page stand for the dummies; what they cost besides is the same for all sizes.
    free = device_bytes - shape.device_bytes(1, 1).total + shape.index_page + shape.latent_page
    if shape.device_tokens is None:
        wanted = shape.max_num_seqs * (shape.hot_pages + UNDER_WAY)
        aside = min(wanted, int(_LEASE_SHARE * max(free, 0)) // shape.latent_page)
        aside = max(aside, least_device_pages(shape.hot_pages))
    else:
        aside = shape.device_tokens // shape.page_size
    pages = min(most, (free - aside * shape.latent_page) // max(shape.index_page, 1))
    if pages < 1:
        need = aside * shape.latent_page + shape.index_page + device_bytes - free
        raise ValueError(
            f"the KV cache does not fit: {aside} device pages of {shape.page_size} tokens, what {shape.max_num_seqs} requests need and one "
            f"page of index keys take {need} bytes, {device_bytes} are free; lower max_num_seqs, max_model_len, kv_hot_slots or "
            "kv_device_tokens, use more ranks, or raise gpu_memory_utilization"
        )
    if shape.device_tokens is None:
        useful = pages + shape.max_num_seqs * shape.most_hot_pages
        aside = max(aside, min(useful, (free - pages * shape.index_page) // shape.latent_page))
    shape.limits(pages, aside)
    return OffloadSizes(n_pages=pages, n_device_pages=aside)


def _most_pages(shape: OffloadShape, host_pages: int) -> int:
    """Logical pages that the host pool and the requests allow."""
    if shape.tokens is not None:
        asked = shape.tokens // shape.page_size
        if asked < 1:
            raise ValueError(
                f"max_total_tokens {shape.tokens} is less than one page of {shape.page_size} tokens; raise it to at least {shape.page_size}"
            )
        if asked > host_pages:
            raise ValueError(
                f"max_total_tokens {shape.tokens} needs {asked} pages of the host pool, which can have {host_pages}; raise kv_host_memory, "
                "or lower max_total_tokens"
            )
        return asked
    if host_pages < 1:
        raise ValueError("the host pool has no room for one page; raise kv_host_memory, or free host memory")
    return min(host_pages, shape.max_num_seqs * -(-shape.max_model_len // shape.page_size))


def host_pages_of(shape: OffloadShape, host_bytes: int, *, n_layers: int | None = None) -> int:
    """Pages of a host pool of at most ``host_bytes``; each layer begins at a multiple of 2 MiB."""
    layers = len(shape.has_indexer) if n_layers is None else n_layers
    one = shape.host_layout(1, layers)
    if not shape.directory:
        per_layer = (host_bytes // layers) // (2 << 20) * (2 << 20)
        return per_layer // one.page_bytes
    fits, beyond = 0, host_bytes // one.page_bytes + 1  # rows and index keys end at multiples of their own
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if shape.host_layout(middle, layers).offsets[-1] <= host_bytes:
            fits = middle
        else:
            beyond = middle
    return fits


def device_pages_of(sizes: Sequence[OffloadSizes]) -> OffloadSizes:
    """What all ranks use: the smallest numbers."""
    return OffloadSizes(n_pages=min(s.n_pages for s in sizes), n_device_pages=min(s.n_device_pages for s in sizes))
