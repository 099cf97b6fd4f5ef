"""Groups of prompts, each with a long beginning that its members share: system prompts, few-shot examples, documents."""

from __future__ import annotations

import numpy as np

from .random_ids import draw_ids
from .request import Request, check_least


def shared_prefix_requests(
    *, groups: int, per_group: int, system_len: int, question_len: int, output_len: int, vocab_size: int, seed: int, shuffle: bool = True
) -> list[Request]:
    """``groups * per_group`` requests of ``system_len + question_len`` tokens; groups are mixed unless ``shuffle`` is off.

    Raises:
        ValueError: a count or a length out of range.
    """
    for name, value in (
        ("num-groups", groups),
        ("prompts-per-group", per_group),
        ("question-len", question_len),
        ("output-len", output_len),
    ):
        check_least(f"gsp-{name}", value, 1)
    check_least("gsp-system-prompt-len", system_len, 0)
    rng = np.random.default_rng(seed)
    systems = [draw_ids(rng, system_len, vocab_size) for _ in range(groups)]
    found = [
        Request(token_ids=system + draw_ids(rng, question_len, vocab_size), output_len=output_len)
        for system in systems
        for _ in range(per_group)
    ]
    if shuffle:
        found = [found[i] for i in rng.permutation(len(found))]
    return found
