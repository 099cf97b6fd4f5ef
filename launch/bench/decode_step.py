"""The time of a decode step by part, for the benchmarks that report it; on CUDA only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...engine.profile import StepTrace
from ...engine.sampling_params import SamplingParams
from ...engine.trace import StepProfile

if TYPE_CHECKING:
    from ...engine.llm import LLM

#: pure decode steps before the trace, and in it
_SKIP, _STEPS = 8, 16


def profile_decode(llm: LLM, prompts: Sequence[Sequence[int]], *, cached: bool = False) -> StepProfile | None:
    """Run ``prompts`` once more and trace decode steps in which all of them take part. Collective; rank 0 gets the profile.

    ``cached``: the prompts are in the prefix cache already, and shall be found there. None on the CPU, elsewhere than on rank 0, and
    where the profiler sees nothing of the device.
    """
    engine = llm.engine
    if engine.grid.device.type != "cuda":
        return None
    runner = engine.runner
    prompts = prompts[: engine.config.max_num_seqs * engine.grid.spec.dp]
    # The first prompts decode while the last ones are still being prefilled, and must not end before those have begun.
    prefills = (0 if cached else sum(map(len, prompts)) // engine.config.max_num_batched_tokens) + 2
    room = engine.max_model_len - max(map(len, prompts))
    params = SamplingParams(temperature=0.0, max_tokens=max(1, min(room, prefills + _SKIP + _STEPS + 8)), ignore_eos=True)
    graphs = runner.graphs
    runner.trace = StepTrace(
        engine.stage.model, runner.streams, None if graphs is None else graphs.rehearse, skip=_SKIP, steps=_STEPS, wait=len(prompts)
    )
    try:
        if not cached:
            llm.reset_prefix_cache()
        llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        found = runner.trace.result()
    finally:
        runner.trace = None
    if found is None and llm.is_rank0:
        print("no decode step was traced: the profiler shows no work of the device here", file=sys.stderr)
    return found if llm.is_rank0 else None
