"""Launch settings of the Hopper kernel of ``indexer_logits``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

Config = dict[str, Any]

_REGISTER_FILE = 65536  # registers of an SM


def _config(tokens: int, query_ways: int, key_ways: int, stages: int, slots: int, per_sm: int) -> Config:
    names = ("tokens", "query_ways", "key_ways", "stages", "slots", "per_sm")
    return dict(zip(names, (tokens, query_ways, key_ways, stages, slots, per_sm), strict=True))


def kind(heads: int, max_query: int) -> str:
    """Name of the problems that may share measured settings: equal heads, equal needs of tokens a request."""
    return f"{heads} heads, {next((str(bound) for bound in (1, 2, 4, 6) if max_query <= bound), 'many')} tokens"


def default_config(heads: int, max_query: int, *, fp4: bool = False) -> Config:
    """Settings for a head count, the most tokens a request has, and the format of the keys.

    ``tokens``: tokens of one product. ``query_ways``, ``key_ways``: warpgroups that take other tokens, other pages. ``stages``:
    page buffers. ``slots``: query buffers. ``per_sm``: programs of an SM.
    """
    wide = 64 // heads
    if fp4:
        return _fp4_config(max_query, wide)
    if max_query <= wide:
        return _config(max_query, 1, 1, 3, 2, 3)
    if max_query <= 2 * wide:
        return _config(2 * wide, 1, 1, 5, 2, 2)
    if max_query <= 4 * wide:
        return _config(4, 1, 2, 8, 1, 1) if heads == 64 else _config(4, 2, 1, 8, 2, 1)
    if max_query <= 6 * wide or heads == 32:  # eight tokens in one product need more registers than there are
        return _config(2 * wide, 3, 1, 12, 1, 1)
    return _config(4, 2, 1, 8, 1, 1)


def _fp4_config(max_query: int, wide: int) -> Config:
    """Unpacking waits for what it looks up, so that more programs share an SM than with FP8 keys."""
    if max_query <= wide:
        return _config(max_query, 1, 1, 4, 2, 4)
    if max_query <= 2 * wide:
        return _config(2 * wide, 1, 1, 5, 2, 2)
    return _config(4, 2, 1, 8, 1, 1) if wide == 1 else _config(4, 3, 1, 12, 1, 1)


def registers(warpgroups: int, per_sm: int) -> tuple[int, int, int]:
    """Registers of a thread at launch; then of one that multiplies, and of one of the warpgroup that fetches."""
    each = min(_REGISTER_FILE // (128 * (warpgroups + 1) * per_sm) // 8 * 8, 240)
    fetching = 40 if warpgroups <= 2 else 32
    return each, min((each * (warpgroups + 1) - fetching) // warpgroups // 8 * 8, 240), fetching


@lru_cache(maxsize=1024)
def constants(
    heads: int,
    max_query: int,
    n_tokens: int,
    has_start: bool,
    tokens: int,
    query_ways: int,
    key_ways: int,
    stages: int,
    slots: int,
    per_sm: int,
) -> dict[str, Any]:
    """Compile-time arguments and options of the kernel; the result is shared, do not change it.

    Raises:
        ValueError: a page buffer would pass from one warpgroup to another, which its barrier cannot tell apart; or too many
            warpgroups.
    """
    if stages % key_ways:
        raise ValueError(f"stages must be a multiple of key_ways, got {stages} and {key_ways}")
    if query_ways * key_ways > 3:
        raise ValueError(f"a program has at most 3 warpgroups that multiply, got {query_ways} x {key_ways}")
    step = min(max_query, tokens * query_ways)
    at_launch, working, fetching = registers(query_ways * key_ways, per_sm)
    return {
        "H": heads,
        "QB": tokens,
        "KEY_WAYS": key_ways,
        "QUERY_WAYS": query_ways,
        "STEP": step,
        "STEP_WIDE": 1 << (step - 1).bit_length(),
        "HAS_START": has_start,
        "VECTOR": 32 if n_tokens <= 32 else 128 if n_tokens <= 128 else 1024,
        "SINGLE": n_tokens <= 128,
        "STAGES": stages,
        "SLOTS": slots,
        "REGISTERS": working,
        "FETCHING": fetching,
        "num_warps": 4,
        "maxnreg": at_launch,
        "launch_pdl": True,
    }


# candidates for ``rorqual bench tune`` at 64 heads, for one token a request, for a few, for a prompt
VARIANTS: dict[str, list[Config]] = {
    "one": [_config(1, 1, 1, 3, 2, 3), _config(1, 1, 2, 8, 2, 1)],
    "few": [_config(2, 1, 1, 5, 2, 2), _config(2, 1, 2, 8, 2, 1)],
    "many": [_config(4, 2, 1, 8, 1, 1), _config(2, 3, 1, 8, 1, 1)],
    "one, fp4": [_config(1, 1, 1, 4, 2, 3), _config(1, 1, 1, 4, 2, 4), _config(1, 1, 3, 15, 2, 1)],
    "few, fp4": [_config(2, 1, 1, 5, 2, 2), _config(2, 1, 3, 15, 2, 1)],
    "many, fp4": [_config(4, 2, 1, 8, 1, 1), _config(4, 1, 2, 8, 1, 1)],
}
