"""Which compiles an engine's kernels would ask for, found without a GPU: Triton's own rule, applied to operands on the CPU.

The plain twins compute; beside each the kernel's host side runs with launches that only note what they would be compiled for.
On the CPU it takes the portable kernels. Run in a process of its own, because tests import Triton in interpreter mode.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F

_LENGTHS = (1, 3, 7, 16, 17, 40, 64, 100, 129, 200, 333, 512, 777, 1023)


class Kinds:
    """Compiles asked for so far: kernel, types and alignments of its operands, constants, options."""

    def __init__(self) -> None:
        self.met: set[tuple[str, str, str]] = set()
        self._binders: dict[Any, Callable[..., Any]] = {}

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
        """In the place of ``JITFunction.run``."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        if kernel not in self._binders:
            backend = make_backend(GPUTarget("cuda", 90, 32))
            self._binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = self._binders[kernel](*args, **more, debug=False, instrumentation_mode="")
        self.met.add((kernel.__name__, str(specialization), str(options)))


def _beside(plain: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``plain``, after the launches of ``kernel``."""

    def run(*args: Any, **more: Any) -> Any:
        kernel(*args, **more)
        return plain(*args, **more)

    return run


def _both(cls: Any) -> Any:
    plain, kernels = cls.load("torch"), cls.load("triton")
    names = [f.name for f in fields(plain) if callable(getattr(plain, f.name)) and callable(getattr(kernels, f.name))]
    return replace(plain, **{name: _beside(getattr(plain, name), getattr(kernels, name)) for name in names})


def _padded(scores: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Rows as far apart as those of the kernel, whose ends are not looked at."""

    def run(*args: Any, **more: Any) -> torch.Tensor:
        found = scores(*args, **more)
        return F.pad(found, (0, -found.shape[1] % 64))

    return run


def main(rows: str) -> None:
    """Print a JSON object: kinds after the warm-up, and kernels that prompts alone and side by side still ask to be compiled."""
    from triton.runtime.jit import JITFunction

    import tests.conftest  # noqa: F401  makes rorqual importable from a bare checkout
    from rorqual import LLM, SamplingParams
    from rorqual.attention.ops import AttentionOps
    from rorqual.engine.models import build
    from rorqual.moe.ops import MoEOps

    kinds = Kinds()
    JITFunction.run = lambda self, *args, **more: kinds.launch(self, *args, **more)
    attention = _both(AttentionOps)
    ops = (replace(attention, indexer_logits=_padded(attention.indexer_logits)), _both(MoEOps))
    build.pick_ops = lambda *_: ops
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "disable_log_stats": True, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    with LLM("tiny", kv_cache_dtype=rows, dtype="bfloat16", max_model_len=2048, max_total_tokens=8192, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        llm.engine.warm_up()
        warm, draw = set(kinds.met), random.Random(3)
        new: dict[str, list[str]] = {}
        batches = [[length] for length in _LENGTHS] + [[draw.randrange(1, 400) for _ in range(n)] for n in (2, 3, 4)]
        for lengths in batches:
            prompts = [[draw.randrange(5, 4000) for _ in range(length)] for length in lengths]
            for _ in range(2):  # the second time most of it is cached
                llm.generate(prompts, params, use_tqdm=False)
            if found := {name for name, *_ in kinds.met - warm}:
                new[str(lengths)] = sorted(found)
                warm |= kinds.met
    print(json.dumps({"warm": len(warm), "kernels": len({name for name, *_ in warm}), "new": new}))


if __name__ == "__main__":
    main(sys.argv[1])
