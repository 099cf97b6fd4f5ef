"""Chained page hashes."""

import hashlib
import json
import time

import numpy as np
import pytest

from rorqual.attention.kv.directory.hashing import PageHasher, split_hashes

BASE = {"model": "m", "revision": "r", "rows": "fp8 656", "page_size": 4}
TOKENS = np.arange(19, dtype=np.int32) * 7919


def test_a_hash_is_blake2b_of_parent_and_tokens():
    root = hashlib.blake2b(json.dumps(["m", "r", "fp8 656", 4, ""]).encode(), digest_size=16, person=b"prefix pages").digest()
    expected = []
    for page in range(4):
        root = hashlib.blake2b(root + TOKENS[4 * page : 4 * page + 4].tobytes(), digest_size=16).digest()
        expected.append(root)
    assert PageHasher(**BASE).hashes(TOKENS) == expected  # 19 tokens: the last three fill no page


def test_a_chain_can_be_continued():
    hasher = PageHasher(**BASE)
    whole = hasher.hashes(TOKENS)
    assert hasher.hashes(TOKENS[8:], after=whole[1]) == whole[2:]
    assert hasher.hashes(TOKENS[:3]) == [] == hasher.hashes([])


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint32, np.int32])
def test_the_dtype_of_tokens_does_not_matter(dtype):
    tokens = np.arange(16)
    assert PageHasher(**BASE).hashes(tokens.astype(dtype)) == PageHasher(**BASE).hashes(list(range(16)))


@pytest.mark.parametrize(
    "change", [{"model": "M"}, {"revision": "r2"}, {"rows": "bf16"}, {"page_size": 2}, {"extra": "tenant"}, {"model": "mr", "revision": ""}]
)
def test_everything_a_page_was_made_with_changes_every_hash(change):
    assert not set(PageHasher(**BASE).hashes(TOKENS)) & set(PageHasher(**(BASE | change)).hashes(TOKENS))


def test_a_changed_token_changes_its_page_and_all_after_it():
    other = TOKENS.copy()
    other[5] += 1
    a, b = PageHasher(**BASE).hashes(TOKENS), PageHasher(**BASE).hashes(other)
    assert a[0] == b[0] and not set(a[1:]) & set(b[1:])


@pytest.mark.parametrize("tokens", [np.zeros((2, 2), dtype=np.int32), np.zeros(4), [1 << 31], np.array([-(1 << 31) - 1])])
def test_what_is_no_vector_of_int32_is_refused(tokens):
    with pytest.raises(ValueError, match="tokens must"):
        PageHasher(**BASE).hashes(tokens)


def test_refusals():
    with pytest.raises(ValueError, match="page_size 0"):
        PageHasher(**(BASE | {"page_size": 0}))
    with pytest.raises(ValueError, match="16 bytes, got 3"):
        PageHasher(**BASE).hashes(TOKENS, after=b"abc")
    with pytest.raises(ValueError, match="16 bytes"):
        split_hashes([b"1" * 16, b"2" * 15])


def test_halves():
    hashes = PageHasher(**BASE).hashes(TOKENS)
    halves = split_hashes(hashes)
    assert halves.dtype == np.int64 and halves.shape == (4, 2) and halves.tobytes() == b"".join(hashes)
    assert split_hashes([]).shape == (0, 2)


def test_a_long_prompt_is_hashed_in_milliseconds():
    hasher = PageHasher(**(BASE | {"page_size": 64}))
    tokens = np.random.default_rng(0).integers(0, 1 << 17, 128_000).astype(np.int32)
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        assert len(hasher.hashes(tokens)) == 2000
        best = min(best, time.perf_counter() - start)
    assert best < 20e-3  # 2 ms on an idle core; the bound is for a busy machine
