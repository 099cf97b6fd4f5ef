"""How long a member may take and be silent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DirectoryLimits:
    """Seconds, and threads.

    Raises:
        ValueError: one is not positive.
    """

    lease: float = 10.0  # how long after its last sign of life a dead member's pages stay out of use
    call: float = 0.25  # longest wait of a call for the store's write lock, and for another thread's call
    verify: float = 2.0  # longest time a ``match`` spends on checksums; what is not checked by then counts as missing
    opening: float = 30.0  # longest wait for another process that is making the store
    threads: int = 4  # that compute checksums
    heartbeat: bool = True  # a thread calls ``renew`` four times a lease; without it the caller must

    def __post_init__(self) -> None:
        for name in ("lease", "call", "verify", "opening"):
            if getattr(self, name) <= 0:
                raise ValueError(f"the directory's {name} limit is {getattr(self, name)} s; it must be positive")
        if self.threads < 1:
            raise ValueError(f"checksums need at least one thread, got {self.threads}")
