"""Part of ``bench multi-gpu``: greedy tokens of the embedded model in fp32 on every layout of the ranks, against those of one rank.

Without torchrun it writes the tokens of one rank; under torchrun it compares with them.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from ...errors import rank
from ..results import Row
from .layouts import layouts, title
from .parts import write_rows

_PROMPTS, _LONGEST, _TOKENS = 12, 300, 48


def prompts(vocab: int) -> list[list[int]]:
    """Prompts of many lengths, the longest beyond what the indexer selects of."""
    draw = random.Random(5)
    return [[draw.randrange(3, vocab) for _ in range(1 + i * (_LONGEST - 1) // (_PROMPTS - 1))] for i in range(_PROMPTS)]


def tokens(device: str, layout: dict[str, int], **more: Any) -> tuple[list[list[int]], int]:
    """(greedy tokens of every prompt, steps that ran from a graph); ([], steps) off rank 0."""
    from ....engine.llm import LLM
    from ....engine.sampling_params import SamplingParams

    settings: dict[str, Any] = {
        "device": device, "dtype": "float32", "skip_tokenizer_init": True, "disable_log_stats": True, "max_num_seqs": 16,
        "max_model_len": 512, "max_total_tokens": 16384, **layout, **more,
    }  # fmt: skip
    if device == "cuda":
        settings["cuda_graph_bs"] = (4, 16)
    with LLM("tiny", **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
        outputs = llm.generate([list(p) for p in prompts(llm.engine.model_config.vocab_size)], params, use_tqdm=False)
        return [o.outputs[0].token_ids for o in outputs], llm.engine.runner.stats.graph_steps


def compare(device: str, ranks: int, right: list[list[int]], out: str) -> None:
    """A row for every layout: requests whose tokens differ from one rank's. Collective over ``ranks``."""
    rows: list[Row] = []
    for layout in _fitting(ranks):
        found, graph_steps = tokens(device, layout)
        if rank() == 0:
            wrong = sum(a != b for a, b in zip(found, right, strict=True))
            params = {"layout": title(layout), "dtype": "float32", "requests": len(right), "graph_steps": graph_steps}
            rows.append(Row(name="requests with other tokens than on one GPU", params=params, value=wrong, unit="requests", better="lower",
                            target=0.0))  # fmt: skip
            write_rows(out, rows)
            print(f"{title(layout)}: {wrong} of {len(right)} requests differ, {graph_steps} steps from graphs", flush=True)


def _fitting(ranks: int) -> list[dict[str, int]]:
    from ....engine.hf_config.model_parser import parse_model_config
    from ....engine.weights.hub import resolve_model

    model = parse_model_config(resolve_model("tiny", None))
    assert model.moe is not None
    return layouts(ranks, heads=model.attention.n_heads, layers=model.n_layers, experts=model.moe.n_experts)


def main() -> None:
    """Flags, then one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--right", type=Path, required=True, help="File with the tokens of one rank.")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    if args.ranks == 1:
        args.right.write_text(json.dumps(tokens(args.device, {})[0]), encoding="utf-8")
    else:
        compare(args.device, args.ranks, json.loads(args.right.read_text(encoding="utf-8")), args.out)


if __name__ == "__main__":
    main()
