"""Shapes of models for the parts: DeepSeek-V3.2's widths, a small one of the same kinds for CPU ranks, and experts that ranks can share."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: configuration that all shapes are made from
BASE = "v3.2-slice"
#: values of ``BASE`` that are small here: block-FP8 weights, FP8 rows of 656 bytes and sparse selection stay
SMALL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 128, "qk_nope_head_dim": 32, "v_head_dim": 32, "index_n_heads": 4, "index_topk": 64, "num_experts_per_tok": 2,
    "topk_group": 2, "vocab_size": 1024, "num_hidden_layers": 2,
}  # fmt: skip
_EXPERTS, _SMALL_EXPERTS = 256, 32


def experts_of(ranks: int, *, small: bool) -> tuple[int, int]:
    """(experts, groups of them): as near to the usual 256 in 8 groups as ``ranks`` can share, so that a rank's share has whole groups.

    Args:
        ranks: of the expert group.
        small: of the small shape, whose groups are 4.
    """
    usual, groups = (_SMALL_EXPERTS, 4) if small else (_EXPERTS, 8)
    unit = groups * ranks
    each = max(2 if small else 1, usual // unit)  # experts of a group on a rank; a group's score is that of its two best
    return each * unit, groups


@contextmanager
def changed(name: str, **values: Any) -> Iterator[str]:
    """Folder of a configuration like ``name`` with other values, None ones left alone; ``name`` itself where there are none."""
    given = {key: value for key, value in values.items() if value is not None}
    if not given:
        yield name
        return
    from ....engine.weights.hub import resolve_model

    config = json.loads((resolve_model(name, None) / "config.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="rorqual-shape-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**config, **given}), encoding="utf-8")
        yield folder
