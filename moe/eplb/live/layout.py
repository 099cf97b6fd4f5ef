"""How an expert lies in a buffer: its tensors one behind the other, then a trailer that says what it is."""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 16  # bytes: tensors begin at multiples of it
TRAILER_WORDS = 8  # int64
TRAILER_BYTES = 8 * TRAILER_WORDS


def padded(n_bytes: int) -> int:
    """``n_bytes`` up to the next place where something may begin."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def buffer_bytes(expert_bytes: int) -> int:
    """Of a buffer for an expert whose padded tensors take ``expert_bytes``."""
    return padded(expert_bytes) + TRAILER_BYTES


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor of an expert."""

    name: str  # of the declared tensor
    dtype: str  # its dtype, as torch prints it
    shape: tuple[int, ...]  # of one slot
    start: int  # byte in the buffer
    n_bytes: int  # without padding


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The tensors of an expert in the order of their names. Equal layouts on all layers and ranks can exchange experts."""

    parts: tuple[Part, ...]

    @property
    def payload_bytes(self) -> int:
        """Bytes of the padded tensors, which the checksum covers."""
        return padded(self.parts[-1].start + self.parts[-1].n_bytes) if self.parts else 0

    @property
    def expert_bytes(self) -> int:
        """Bytes of the tensors without padding."""
        return sum(part.n_bytes for part in self.parts)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a buffer, which all travel."""
        return buffer_bytes(self.payload_bytes)

    def describe(self) -> str:
        """The layout in one line, for comparing and for errors."""
        return "; ".join(f"{part.name} {part.dtype}{list(part.shape)}" for part in self.parts)
