"""How a budget of bytes between two boundaries becomes pieces of experts."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import ALIGNMENT, padded

MOST_PIECES = 256  # of an expert


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Pieces of a buffer, and how many of them may pass at each boundary."""

    buffer_bytes: int
    pieces: int  # of a buffer
    per_step: int  # pieces that a rank may receive, and send, between two boundaries

    @classmethod
    def of(cls, buffer_bytes: int, bytes_per_step: int) -> Pace:
        """ValueError if an expert would take more than ``MOST_PIECES`` boundaries."""
        step = min(bytes_per_step // ALIGNMENT * ALIGNMENT, buffer_bytes)
        if step * MOST_PIECES < buffer_bytes:
            least = padded(-(-buffer_bytes // MOST_PIECES))
            raise ValueError(
                f"bytes_per_step {bytes_per_step} is too little for experts of {buffer_bytes} bytes, "
                f"which would be under way for more than {MOST_PIECES} steps each; give at least {least}"
            )
        pieces = -(-buffer_bytes // step)
        return cls(buffer_bytes=buffer_bytes, pieces=pieces, per_step=max(1, bytes_per_step // step))

    def piece(self, index: int) -> slice:
        """Bytes of piece ``index`` of a buffer."""
        size = padded(-(-self.buffer_bytes // self.pieces))
        return slice(min(index * size, self.buffer_bytes), min((index + 1) * size, self.buffer_bytes))

    def steps(self, n_rounds: int) -> int:
        """Boundaries that release all pieces of so many rounds."""
        return -(-n_rounds * self.pieces // self.per_step)
