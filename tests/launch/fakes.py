"""An LLM that answers without a model, with the interface of the real one."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from rorqual.engine.config import EngineConfig
from rorqual.engine.front import StreamChunk
from rorqual.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput


class FakeLLM:
    """Answers every prompt with ``max_tokens`` tokens, one a chunk, prompts in turn."""

    is_rank0 = True

    def __init__(self):
        spec = SimpleNamespace(pp=1, dp=1, tp=1)
        grid = SimpleNamespace(device=torch.device("cpu"), spec=spec)
        self.engine = SimpleNamespace(
            grid=grid, runner=SimpleNamespace(graphs=None),
            model_config=SimpleNamespace(vocab_size=50), config=EngineConfig(seed=3), dtype=torch.float32, folder="f",
            tokenizer=SimpleNamespace(encode=lambda text: list(range(len(text)))),
        )  # fmt: skip
        self.calls = []

    def render_chats(self, talks):
        return [[7] * len(talk) for talk in talks]

    def reset_prefix_cache(self):
        self.resets = getattr(self, "resets", 0) + 1

    def generate(self, prompts, params, *, use_tqdm=True):
        self.calls.append((prompts, params))
        return [c.output for c in self.generate_stream(prompts, params) if c.output is not None]

    def generate_stream(self, prompts, params):
        each = params if isinstance(params, list) else [params] * len(prompts)
        outputs = []
        for place, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
            ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
            text = ids if isinstance(ids, str) else None
            ids = list(range(len(ids))) if isinstance(ids, str) else ids
            metrics = RequestMetrics(arrival=time.monotonic())
            completions = [CompletionOutput(index=i) for i in range(p.n)]
            outputs.append(RequestOutput(request_id=f"0-{place}", prompt=text, prompt_token_ids=ids, outputs=completions, metrics=metrics))
        for step in range(max(p.max_tokens for p in each)):
            for place, (out, p) in enumerate(zip(outputs, each, strict=True)):
                for c in out.outputs:
                    if step < p.max_tokens:
                        yield self._step(place, out, c, step, p.max_tokens)

    def _step(self, place, out, c, step, most):
        c.token_ids.append(step)
        c.text += f"w{step} "
        out.metrics.first_token_time = out.metrics.first_token_time or time.monotonic()
        if step == most - 1:
            c.finish_reason = "length"
        done = all(o.finished for o in out.outputs)
        if done:
            out.finished, out.metrics.finish_time = True, time.monotonic()
        return StreamChunk(
            request_id=out.request_id, prompt_index=place, index=c.index, text=f"w{step} ", token_ids=[step], finished=c.finished,
            output=out if done else None,
        )  # fmt: skip

    def stats(self):
        row = {"rank": 0, "pp": 0, "dp": 0, "tp": 0, "layers": [0, 2], "tokens": 12, "busy_seconds": 0.5, "experts": 4}
        return {"ranks": [row], "seconds": 1.0, "expert_load": [[0, 0, 0, 0], [3, 1, 0, 0]]}


def fake_open(llm):
    """A stand-in for ``open_llm`` that keeps what it was called with in ``llm.opened``."""

    @contextmanager
    def open_llm(model, settings):
        llm.opened = (model, settings)
        yield llm

    return open_llm
