"""How many requests fit into the device memory that is left for their keys."""

from __future__ import annotations

from dataclasses import dataclass

from ....attention.kv.hot import HotShape, hot_state_bytes, table_bytes
from .shape import RigShape


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Device bytes of requests, and the largest batch in a budget."""

    shape: RigShape  # sizes of a row and of a hot buffer; its requests do not matter
    tokens: int  # of a request in the end
    budget: int  # bytes

    @property
    def index_bytes(self) -> int:
        """Index keys of a request; on the device whatever happens to its rows."""
        return self.tokens * self.shape.index_key_bytes * self.shape.layers

    @property
    def latent_bytes(self) -> int:
        """Latent rows of a request."""
        return self.tokens * self.shape.row_bytes * self.shape.layers

    def resident(self) -> int:
        """Largest batch with every row on the device."""
        return self.budget // (self.index_bytes + self.latent_bytes)

    def offloaded_bytes(self, batch: int) -> int:
        """Bytes of ``batch`` requests whose rows are in host memory: index keys, hot buffers, the newest page, and the tables."""
        shape = self.shape
        pages = -(-self.tokens // shape.page_size)
        hot = HotShape(
            n_slots=batch, n_layers=shape.layers, lease_pages=shape.hot_pages, page_size=shape.page_size, n_logical_pages=batch * pages,
            max_requests=batch, max_context=self.tokens, chosen_rows=shape.k,
        )  # fmt: skip
        rows = (shape.hot_pages + 1) * shape.page_size
        return batch * (self.index_bytes + rows * shape.row_bytes * shape.layers) + hot_state_bytes(hot) + table_bytes(hot)

    def offloaded(self) -> int:
        """Largest batch with the rows in host memory."""
        low, high = 0, 1
        while self.offloaded_bytes(high) <= self.budget:
            high *= 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.offloaded_bytes(middle) <= self.budget else (low, middle)
        return low
