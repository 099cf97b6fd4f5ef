"""News of what a replica's prefix cache holds, as they travel from its leader to the router."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec


class KvBatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changes of one prefix cache since the batch before; hashes of ``page_hashes``, 8 bytes each."""

    seq: int  # 0, 1, 2, ...; a gap means that something was lost
    whole: bool = False  # ``stored`` is all there is; forget what was known
    stored: bytes = b""  # pages that came
    removed: bytes = b""  # pages that went; none of them is in ``stored``


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KvBatch)


def pack(hashes: Iterable[int]) -> bytes:
    """Hashes as bytes of this machine's order."""
    return array("Q", hashes).tobytes()


def unpack(data: bytes) -> array[int]:
    """The inverse of ``pack``.

    Raises:
        ValueError: not a whole number of hashes.
    """
    found = array("Q")
    found.frombytes(data)
    return found


def encode_batch(batch: KvBatch) -> bytes:
    """A batch as bytes."""
    return _encoder.encode(batch)


def decode_batch(data: bytes) -> KvBatch:
    """A batch from bytes.

    Raises:
        ValueError: bytes that are none.
    """
    return _decoder.decode(data)
