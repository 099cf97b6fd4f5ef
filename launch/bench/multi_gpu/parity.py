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
from .layouts import PP, layouts, title
from .parts import write_rows


def prompts(vocab: int, *, small: bool) -> list[list[int]]:
    """Prompts of many lengths, the longest beyond what the indexer selects of."""
    draw, (count, longest) = random.Random(5), (4, 200) if small else (12, 300)
    return [[draw.randrange(3, vocab) for _ in range(1 + i * (longest - 1) // (count - 1))] for i in range(count)]


def tokens(device: str, layout: dict[str, int], **more: Any) -> tuple[list[list[int]], int]:
    """(greedy tokens of every prompt, steps that ran from a graph); ([], steps) off rank 0."""
    from ....engine.llm import LLM
    from ....engine.sampling_params import SamplingParams

    settings: dict[str, Any] = {
        "device": device, "dtype": "float32", "skip_tokenizer_init": True, "disable_log_stats": True, "max_num_seqs": 16,
        "max_model_len": 512, "max_total_tokens": 16384, "dist_timeout": 60.0, **layout, **more,
    }  # fmt: skip
    if device == "cuda":
        settings["cuda_graph_bs"] = (4, 16)
    small = device == "cpu"
    with LLM("tiny", **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12 if small else 48, ignore_eos=True)
        outputs = llm.generate(prompts(llm.engine.model_config.vocab_size, small=small), params, use_tqdm=False)
        return [o.outputs[0].token_ids for o in outputs], llm.engine.runner.stats.graph_steps


def compare(device: str, ranks: int, stages: int, right: list[list[int]], out: str) -> bool:
    """A row for every layout of so many stages: requests whose tokens differ from one rank's. Whether none did. Collective."""
    rows: list[Row] = []
    for layout in (layout for layout in fitting(ranks) if layout[PP] == stages):
        if rank() == 0:
            print(f"{title(layout)} ..", flush=True)
        found, graph_steps = tokens(device, layout)
        if rank() == 0:
            wrong = sum(a != b for a, b in zip(found, right, strict=True))
            params = {"layout": title(layout), "dtype": "float32", "requests": len(right), "graph_steps": graph_steps}
            rows.append(Row(name="requests with other tokens than on one GPU", params=params, value=wrong, unit="requests", better="lower",
                            target=0.0))  # fmt: skip
            write_rows(out, rows)
            print(f"{title(layout)}: {wrong} of {len(right)} requests differ, {graph_steps} steps from graphs", flush=True)
    return all(row.met for row in rows)


def fitting(ranks: int) -> list[dict[str, int]]:
    """Layouts of the embedded model over ``ranks``."""
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
    parser.add_argument("--stages", type=int, default=1, help="Layouts of so many pipeline stages.")
    parser.add_argument("--right", type=Path, required=True, help="File with the tokens of one rank.")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    if args.ranks == 1:
        args.right.write_text(json.dumps(tokens(args.device, {})[0]), encoding="utf-8")
    elif not compare(args.device, args.ranks, args.stages, json.loads(args.right.read_text(encoding="utf-8")), args.out):
        raise AssertionError("tokens differ from those of one rank: the rows say on which layouts")


if __name__ == "__main__":
    main()
