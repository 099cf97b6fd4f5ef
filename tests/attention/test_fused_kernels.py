"""The fused path run by the Triton kernels themselves, in the interpreter, against the torch path."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.attention.common import DENSE, SPARSE, Paged, make_mla

pytest.importorskip("triton")
from rorqual.attention.kv.tier import TierCounter  # noqa: E402
from rorqual.attention.ops import AttentionOps  # noqa: E402
from tests.attention.test_hot_start import Scripted  # noqa: E402
from tests.attention.tiered import Resident, Setting  # noqa: E402
from tests.kernels.interpreter import repair  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here: tests/gpu"),
    pytest.mark.filterwarnings("ignore:divide by zero"),
]
NO_LORA = dataclasses.replace(DENSE, q_lora_rank=None)


@pytest.fixture(autouse=True)
def interpreter():
    repair()


@pytest.mark.parametrize(
    ("config", "lengths", "chunk"),
    [(DENSE, [3, 9, 20], 1), (DENSE, [3, 20, 70], 100), (NO_LORA, [3, 20, 70], 100), (SPARSE, [3, 9, 20], 1), (SPARSE, [3, 20], 100)],
)
def test_fp32_equals_the_torch_path(config, lengths, chunk):
    """Pages at random places, unused ones full of NaN; widths that are no powers of two."""
    expected = Paged(config, lengths).run(make_mla(config), chunk)
    mla = make_mla(config)
    mla.fuse(AttentionOps.load("triton"))
    for a, b in zip(Paged(config, lengths).run(mla, chunk), expected, strict=True):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)


def test_rows_that_come_from_the_host_change_no_bit():
    """A prompt, its pages dropped, a second chunk over them, and a token: gathered, seeded, resolved and fetched."""
    setting = Setting(config=SPARSE, n_layers=1, lengths=(12,), fused=True, static=True, ops="triton", scored=True, page_size=2)
    one, many = Resident(setting), Scripted(setting)
    for count in (9, 2, 1):
        many.seeding = count == 2
        assert torch.equal(many.step([0], [count]), one.step([0], [count]))
        for page in many.full_pages(0):
            if many.where(page) >= 0:
                many.mirror(page)
                many.drop(page)
    assert many.counted(TierCounter.HITS) and many.counted(TierCounter.MISSES) and not many.counted(TierCounter.UNWRITTEN)
