"""Names of the pages of a token sequence: each hash depends on the page and on all pages before it."""

from __future__ import annotations

from xxhash import xxh64_intdigest

TOKEN_BYTES = 4


def page_hashes(tokens: bytes, page_size: int, parent: int = 0) -> list[int]:
    """A 64-bit hash of every whole page of ``tokens`` (int32, little-endian), chained: equal hashes mean equal prefixes.

    ``parent`` is the hash of the page before the first, 0 at the start of a sequence. They steer routing only;
    what a replica reuses is decided by its tree, which compares tokens.
    """
    step = page_size * TOKEN_BYTES
    found: list[int] = []
    view = memoryview(tokens)
    for start in range(0, len(tokens) - step + 1, step):
        parent = xxh64_intdigest(view[start : start + step], parent)
        found.append(parent)
    return found
