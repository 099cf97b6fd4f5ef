"""Settings of moving experts between steps."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import buffer_bytes


@dataclass(frozen=True, kw_only=True)
class LiveConfig:
    """The same on all ranks. A boundary is the moment before a step that runs."""

    interval: int = 3000  # boundaries from one cycle's beginning to the next one's; 0: cycles begin only on request
    first: int | None = None  # boundaries until the first cycle begins; None: a quarter of ``interval``
    staging: int = 4  # experts that a rank can receive in one batch; it has buffers for one more
    bytes_per_step: int = 256 << 20  # most bytes that a rank receives, and most that it sends, between two boundaries
    max_sends: int = 8  # experts that a rank sends in one batch
    patience: int = 500  # boundaries after which a batch, or planning, that some rank has not finished is given up; pacing comes on top
    max_steps: int = 20_000  # boundaries after which a cycle is given up
    compute_digests: bool = True  # compare a checksum of every expert that arrives with its sender's

    def __post_init__(self) -> None:
        """ValueError naming the setting that cannot be."""
        least = {"interval": 0, "staging": 1, "bytes_per_step": 1, "max_sends": 1, "patience": 2, "max_steps": 4}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, found {getattr(self, name)}")
        if self.first is not None and self.first < 1:
            raise ValueError(f"first must be at least 1 boundary, found {self.first}; leave it out for a quarter of the interval")

    @property
    def begins(self) -> int:
        """Boundaries until the first cycle."""
        return self.first if self.first is not None else max(1, self.interval // 4)

    def memory_bytes(self, expert_bytes: int) -> int:
        """Memory that moving takes on a rank for as long as it runs, for experts of ``expert_bytes`` with all their state."""
        return (self.staging + 1) * buffer_bytes(expert_bytes)
