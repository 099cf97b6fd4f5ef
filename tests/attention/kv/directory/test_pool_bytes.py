"""The pages of a real host pool: all bytes of a page count, and no others."""

import pytest
import torch

from rorqual.attention.kv.directory import Directory, DirectoryLimits
from rorqual.attention.kv.directory.checksum import page_checksum
from rorqual.attention.kv.directory.pool_bytes import HostPoolBytes
from rorqual.attention.kv.host.pinned import PinnedBacking
from rorqual.attention.kv.host.pool import HostPool
from tests.attention.kv.directory.common import chain, layout

HASH = bytes(16)


@pytest.fixture(params=[0, 48], ids=["tight", "padded"])
def pool(request):
    """3 layers of 6 pages of 4 rows of 40 bytes; layers 0 and 2 have index keys."""
    with HostPool(3, 6, 4, 40, PinnedBacking(threads=1), pitch=request.param, index_page_bytes=(96, 0, 32)) as made:
        for index in range(3):
            made.layer(index).bytes.copy_(torch.randint(0, 256, made.layer(index).bytes.shape, dtype=torch.uint8))
            made.layer(index).index_pages.copy_(torch.randint(0, 256, made.layer(index).index_pages.shape, dtype=torch.uint8))
        yield made


def test_every_byte_of_the_page_counts_and_no_other(pool):
    seen = HostPoolBytes(pool)
    assert sum(view.nbytes for view in seen.page_views(2)) == 3 * 4 * 40 + 96 + 32
    right = page_checksum("crc32", HASH, seen.page_views(2))
    for index in range(3):
        layer = pool.layer(index)
        inside = [layer.bytes[8, 0:1], layer.bytes[11, 39:40]]
        outside = [layer.bytes[7, 0:1], layer.bytes[12, 0:1]]
        if layer.pitch > 40:
            outside.append(layer.bytes[9, 40:41])
        if layer.index_pages.shape[1]:
            inside += [layer.index_pages[2, 0:1], layer.index_pages[2, -1:]]
            outside.append(layer.index_pages[1, -1:])
        for byte in inside:
            byte ^= 16
            assert page_checksum("crc32", HASH, seen.page_views(2)) != right
            byte ^= 16
        for byte in outside:
            byte ^= 16
        assert page_checksum("crc32", HASH, seen.page_views(2)) == right


def test_a_directory_over_it(pool, tmp_path):
    limits = DirectoryLimits(call=5, heartbeat=False, threads=2)
    views = HostPoolBytes(pool)
    hashes = chain(1, 4)
    with (
        Directory.open(tmp_path / "store", layout(n_pages=6), views, pool_id="p", limits=limits) as a,
        Directory.open(tmp_path / "store", layout(n_pages=6), views, pool_id="p", limits=limits) as b,
    ):
        pages = a.allocate(4)
        assert a.publish(hashes, pages, a.checksums(hashes, pages)) == (True,) * 4
        pool.layer(1).bytes[pages[3] * 4, 5] ^= 1
        assert b.match(hashes) == pages[:3]
        a.check()
        b.check()
