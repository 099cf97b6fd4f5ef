"""What the residency of one DP rank has to work with."""

from __future__ import annotations

from dataclasses import dataclass

#: device pages of a running request that cannot be dropped: one being written, and those whose copies are under way
UNDER_WAY = 3
#: a page whose copy a plan has started may be dropped by the plan this many steps later
RIPE_AFTER = 2


@dataclass(frozen=True, kw_only=True)
class TierLimits:
    """Pools and policy. ValueError: sizes with which not even one request could run."""

    policy: str  # "host": pages leave the device as soon as they may; "hybrid": under pressure only
    page_size: int  # tokens of a page
    n_pages: int  # logical pages
    n_device_pages: int  # of the latent pools
    n_host_pages: int  # of the host pool, one for each logical page at least
    topk: int  # keys that a token attends to; a request of so few is never offloaded
    hot_pages: int  # device pages of one hot lease
    step_tokens: int  # most tokens of one step
    most_hot_pages: int = 0  # device pages that a lease may grow to while they are of no other use; 0: it does not grow

    def __post_init__(self) -> None:
        """Check that one request alone can always go on."""
        if self.policy not in ("host", "hybrid"):
            raise ValueError(f"the policy of offloading must be host or hybrid, found {self.policy!r}")
        if self.hot_pages * self.page_size < self.topk:
            raise ValueError(
                f"kv_hot_slots: {self.hot_pages} pages of {self.page_size} rows hold less than the {self.topk} keys of one token; "
                f"use at least {self.topk}"
            )
        if 0 < self.most_hot_pages < self.hot_pages:
            raise ValueError(f"leases of {self.hot_pages} pages cannot grow to {self.most_hot_pages}; use 0, or at least {self.hot_pages}")
        if self.n_device_pages < self.least:
            raise ValueError(
                f"the device holds {self.n_device_pages} pages of latent rows, one request needs {self.least}: {self.hot_pages} for its "
                f"hot rows and {self.least - self.hot_pages} that are written or copied; use at least {self.least * self.page_size} "
                "tokens (kv_device_tokens, or more memory), or a smaller kv_hot_slots"
            )
        if self.n_host_pages < self.n_pages:
            raise ValueError(f"{self.n_pages} pages need as many in the host pool, which has {self.n_host_pages}; raise kv_host_memory")

    @property
    def largest_lease(self) -> int:
        """Most device pages of a lease."""
        return max(self.hot_pages, self.most_hot_pages)

    @property
    def least(self) -> int:
        """Device pages with which one request alone can always go on."""
        return least_device_pages(self.hot_pages)

    @property
    def step_pages(self) -> int:
        """Device pages kept for the rows of a step when a newcomer is judged."""
        wanted = -(-self.step_tokens // self.page_size)
        return min(wanted, max(UNDER_WAY, (self.n_device_pages - self.least) // 4))


def least_device_pages(hot_pages: int) -> int:
    """Device pages with which one request alone can always go on."""
    return hot_pages + UNDER_WAY + 1
