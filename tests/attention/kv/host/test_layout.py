"""Where the layers are, and how many bytes that takes."""

import pytest

from rorqual.attention.kv.host.layout import HEADER_BYTES, HostLayout, host_pool_bytes
from rorqual.attention.kv.host.system import BLOCK


def layout(**changes):
    return HostLayout(**({"n_layers": 3, "n_pages": 100, "page_size": 64, "row_bytes": 656} | changes))


def test_layers_start_at_blocks_and_do_not_overlap():
    here = layout(index_page_bytes=(8448, 0, 100))
    rows = 100 * 64 * 656
    assert all(offset % BLOCK == 0 for offset in here.offsets) and here.pitch == 656 and here.n_rows == 6400
    for index in range(3):
        assert here.offsets[index] + rows <= here.index_offset(index)
        assert here.index_offset(index) + 100 * here.index_page_bytes[index] <= here.offsets[index + 1]
    assert here.index_offset(1) == here.offsets[2]
    assert here.offsets[-1] < 3 * rows + 100 * 8548 + 5 * BLOCK


def test_pitch_and_extents():
    assert layout(row_bytes=57).pitch == 64
    assert layout(pitch=768).pitch == 768
    assert layout().extent_pages == 50 and layout(page_size=1, row_bytes=1152).extent_pages == 1821
    assert layout(page_size=1 << 20).extent_pages == 1


def test_bytes_of_a_large_pool():
    n = 2_620_000 // 64
    assert host_pool_bytes(61, n, 64, 656) == 61 * -(-n * 64 * 656 // BLOCK) * BLOCK > 97 << 30
    assert host_pool_bytes(61, n, 64, 656, kind="shm") == host_pool_bytes(61, n, 64, 656) + HEADER_BYTES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layers": 0}, "n_layers of a host pool must be at least 1, got 0"),
        ({"n_pages": -1}, "n_pages"),
        ({"pitch": 640}, "at least row_bytes 656, got 640"),
        ({"pitch": 660}, "multiple of 16"),
        ({"index_page_bytes": (1, 2)}, "one number, 0 or more, for each of 3 layers"),
    ],
)
def test_wrong_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        layout(**changes)
