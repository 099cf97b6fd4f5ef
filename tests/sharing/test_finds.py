"""A prefix that one engine has computed is a hit for all, and tokens stay the same."""

from __future__ import annotations

import logging

import pytest

from tests.offload.engines import make, params
from tests.sharing.engines import LONG, SOME, cached, expect_whole, expected, share_of, shared, tokens


@pytest.mark.parametrize("policy", ["host", "hybrid"])
def test_an_engine_finds_what_another_has_computed(policy, tmp_path):
    with shared(tmp_path, policy) as first, shared(tmp_path, policy) as second:
        assert tokens(first) == expected()
        assert share_of(first).flush()
        outputs = second.generate(SOME, params(), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == expected()
        whole = [(len(prompt) - 1) // 4 * 4 for prompt in SOME]
        assert [o.metrics.cached_tokens for o in outputs] == whole
        found = second.stats()["ranks"][0]["scheduler"]["directory"]
        assert found["imported_pages"] == sum(whole) // 4 and found["hits"] == sum(map(bool, whole)) and found["withdrawn"] == 0
        expect_whole(first, second)


FORMATS = [{"kv_cache_dtype": "fp8", "page_size": 16, "kv_device_tokens": 256, "max_total_tokens": 480}, {"index_cache_dtype": "fp4"}]


@pytest.mark.parametrize("settings", FORMATS, ids=str)
def test_formats(settings, tmp_path):
    plain = {name: value for name, value in settings.items() if name.endswith(("dtype", "page_size"))}
    with make("off", **{**plain, "max_total_tokens": 800}) as llm:
        right = tokens(llm, [LONG])
    with shared(tmp_path, "host", **settings) as first, shared(tmp_path, "host", **settings) as second:
        assert tokens(first, [LONG]) == right
        assert share_of(first).flush()
        assert tokens(second, [LONG]) == right
        assert share_of(second).imported == (len(LONG) - 1) // settings.get("page_size", 4)
        expect_whole(first, second)


def test_pages_outlive_the_engine_that_wrote_them(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="rorqual")
    with shared(tmp_path, disable_log_stats=False) as first:
        assert tokens(first) == expected()
    assert "prefix directory: 0 hits" in caplog.text
    with shared(tmp_path) as second:
        assert cached(second, LONG) == (len(LONG) - 1) // 4 * 4
        assert tokens(second) == expected()
        expect_whole(second)
    (tmp_path / "pool").unlink()
    with shared(tmp_path) as third:  # another pool: the store starts empty
        assert cached(third, LONG) == 0


def test_other_weights_share_nothing(tmp_path):
    with shared(tmp_path), pytest.raises(ValueError, match="prefix directory of another layout: revision is"):
        shared(tmp_path, load_format="dummy")


def test_a_damaged_page_is_computed_again(tmp_path):
    with shared(tmp_path) as first, shared(tmp_path) as second:
        assert tokens(first) == expected()
        assert share_of(first).flush()
        directory = share_of(first).directory
        page = directory.match(directory.layout.hasher().hashes(LONG[:12]))[2]  # the third of the chain
        second.engine._host_pool.layer(1).index_pages[page, 5] ^= 1
        assert cached(second, LONG) == 8
        assert share_of(second).stats()["withdrawn"] == 1
        assert tokens(second) == expected()
        expect_whole(second)
