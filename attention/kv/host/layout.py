"""What lies where in a host pool: layer by layer, rows first, then index-key pages. Pure arithmetic, for planners too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from .system import BLOCK, blocks

_ROW_ALIGN = 16  # bytes: the widest load of a thread
#: bytes in front of the rows in a pool that is a file: its header
HEADER_BYTES = BLOCK
#: kinds of backing with a header
WITH_HEADER = frozenset({"shm", "file"})


@dataclass(frozen=True, kw_only=True)
class HostLayout:
    """[layer][page][row of ``pitch`` bytes], each layer from a 2 MiB boundary; index-key pages behind the rows of their layer.

    Raises:
        ValueError: a size that is not positive, or a pitch that is too small or no multiple of 16.
    """

    n_layers: int
    n_pages: int
    page_size: int  # rows of a page
    row_bytes: int
    pitch: int = 0  # bytes from row to row; 0: row_bytes rounded up to 16
    index_page_bytes: tuple[int, ...] = ()  # of each layer, 0 for one without; empty: no layer has any

    def __post_init__(self) -> None:
        for name in ("n_layers", "n_pages", "page_size", "row_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of a host pool must be at least 1, got {getattr(self, name)}")
        if not self.pitch:
            object.__setattr__(self, "pitch", -(-self.row_bytes // _ROW_ALIGN) * _ROW_ALIGN)
        if self.pitch < self.row_bytes or self.pitch % _ROW_ALIGN:
            raise ValueError(f"pitch of a host pool must be a multiple of 16 and at least row_bytes {self.row_bytes}, got {self.pitch}")
        if self.index_page_bytes and (len(self.index_page_bytes) != self.n_layers or min(self.index_page_bytes) < 0):
            raise ValueError(
                f"index_page_bytes needs one number, 0 or more, for each of {self.n_layers} layers, got {list(self.index_page_bytes)}"
            )

    @property
    def n_rows(self) -> int:
        """Rows of one layer."""
        return self.n_pages * self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer's rows."""
        return self.page_size * self.pitch

    @property
    def extent_pages(self) -> int:
        """Pages that fill 2 MiB of a layer: an allocator's unit."""
        return max(1, -(-BLOCK // self.page_bytes))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First byte of every layer, and the end of the last: n_layers + 1 numbers."""
        found = [0]
        for layer in range(self.n_layers):
            found.append(found[-1] + blocks(self.n_rows * self.pitch) + blocks(self.n_pages * self._index_bytes(layer)))
        return tuple(found)

    def index_offset(self, layer: int) -> int:
        """First byte of the index-key pages of ``layer``."""
        return self.offsets[layer] + blocks(self.n_rows * self.pitch)

    def _index_bytes(self, layer: int) -> int:
        return self.index_page_bytes[layer] if self.index_page_bytes else 0

    def as_json(self) -> dict[str, int | list[int]]:
        """For the header of a pool file."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def host_pool_bytes(
    n_layers: int,
    n_pages: int,
    page_size: int,
    row_bytes: int,
    *,
    pitch: int = 0,
    index_page_bytes: Sequence[int] = (),
    kind: str = "pinned",
) -> int:
    """Bytes that a ``HostPool`` of these sizes takes, exactly; ``kind`` is the backing's, since files have a header."""
    layout = HostLayout(
        n_layers=n_layers,
        n_pages=n_pages,
        page_size=page_size,
        row_bytes=row_bytes,
        pitch=pitch,
        index_page_bytes=tuple(index_page_bytes),
    )
    return pool_bytes(layout, kind)


def pool_bytes(layout: HostLayout, kind: str) -> int:
    """Bytes of a pool of ``layout`` in a backing of ``kind``."""
    return layout.offsets[-1] + (HEADER_BYTES if kind in WITH_HEADER else 0)
