"""Checksums of pages."""

import numpy as np
import pytest
import torch

from rorqual.attention.kv.directory import checksum
from rorqual.attention.kv.directory.checksum import PageChecker, best_checksum, check_name, page_checksum

NAMES = ["crc32", pytest.param("xxh3", marks=pytest.mark.skipif(checksum.xxhash is None, reason="no xxhash"))]
HASH = bytes(range(16))


def planes() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (5, 4, 96), dtype=np.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_a_signed_64_bit_column_and_does_not_depend_on_the_kind_of_view(name):
    made = planes()
    one = page_checksum(name, HASH, [plane.data for plane in made])
    assert -(1 << 63) <= one < 1 << 63
    assert one == page_checksum(name, HASH, list(torch.from_numpy(made)))
    padded = torch.zeros(5, 4, 128, dtype=torch.uint8)
    padded[:, :, :96] = torch.from_numpy(made)
    assert one == page_checksum(name, HASH, list(padded[:, :, :96]))  # rows with a pitch


@pytest.mark.parametrize("name", NAMES)
def test_every_bit_the_order_of_planes_and_the_hash_count(name):
    made = planes()
    seen = {page_checksum(name, HASH, [plane.data for plane in made])}
    rng = np.random.default_rng(4)
    for _ in range(200):
        other = made.copy()
        other.reshape(-1)[rng.integers(other.size)] ^= 1 << rng.integers(8)
        seen.add(page_checksum(name, HASH, [plane.data for plane in other]))
    assert len(seen) > 190  # 200 draws of 15,360 bits, hardly two alike; none equal to the right one:
    assert page_checksum(name, HASH, [plane.data for plane in made]) not in seen - {page_checksum(name, HASH, [p.data for p in made])}
    for order in ([1, 0, 2, 3, 4], [2, 1, 0, 3, 4], [0, 1, 2, 3]):
        assert page_checksum(name, HASH, [made[place].data for place in order]) not in seen
    assert page_checksum(name, HASH[::-1], [plane.data for plane in made]) not in seen


def test_names():
    check_name("crc32")
    check_name(best_checksum())
    with pytest.raises(ValueError, match="'md5'; use xxh3 or crc32"):
        check_name("md5")


def test_without_xxhash(monkeypatch):
    monkeypatch.setattr(checksum, "xxhash", None)
    assert best_checksum() == "crc32"
    with pytest.raises(ValueError, match="pip install xxhash"):
        check_name("xxh3")


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 7])
def test_several_threads_give_the_same_sums_in_order(threads, count):
    class Pool:
        def page_views(self, page):
            return [memoryview(bytes([page] * 64))]

    checker = PageChecker(Pool(), "crc32", threads)
    hashes = [bytes([page] * 16) for page in range(count)]
    expected = [page_checksum("crc32", one, Pool().page_views(page)) for page, one in enumerate(hashes)]
    assert checker.sums(hashes, range(count)) == expected
    checker.close()
