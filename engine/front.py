"""Rank 0's side of a call: prompts become requests of DP ranks, events become outputs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from .call import Params, Prompt, integers, spread_params, spread_priority
from .grammar.offline import Grammars
from .messages import AbortRequest, AddRequest, Command
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from .records import Event, LogprobRow
from .sampling.noise import request_seed
from .sampling_params import SamplingParams
from .serving.routing.router import Router
from .text.tokenizer import Tokenizer

__all__ = ["Front", "Prompt", "StreamChunk"]


@dataclass(kw_only=True, slots=True)  # not frozen: one is made per token, and frozen ones take four times as long to make
class StreamChunk:
    """News of one completion."""

    request_id: str  # of the prompt
    prompt_index: int  # place of the prompt in the call
    index: int  # which of the ``n`` completions
    text: str  # new text
    token_ids: list[int]  # new tokens
    finished: bool  # this completion has ended
    output: RequestOutput | None  # the whole request, once every completion of the prompt has ended


@dataclass(kw_only=True)
class _Child:
    """One completion in flight."""

    parent: RequestOutput
    completion: CompletionOutput
    prompt_index: int


class Front:
    """Requests of one engine as their callers see them."""

    def __init__(self, *, tokenizer: Tokenizer | None, dp: int, vocab_size: int, grammars: Grammars | None = None) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.grammars = grammars  # None: structured output is refused
        self.router = Router(dp)
        self._children: dict[str, _Child] = {}
        self._arrivals = 0  # requests so far, over the engine's life
        self._calls = 0

    @property
    def open(self) -> bool:
        """True while some completion has not ended."""
        return bool(self._children)

    # ---- in

    def token_ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text or None, token ids) of one prompt.

        Raises:
            ValueError: empty, of the wrong type, ids outside the vocabulary, or text without a tokenizer.
        """
        if isinstance(prompt, dict):
            keys = [k for k in ("prompt_token_ids", "prompt") if k in prompt]
            if not keys:
                raise ValueError(f"a prompt dict needs 'prompt' or 'prompt_token_ids', found {sorted(prompt)}")
            prompt = prompt[keys[0]]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("text prompts need a tokenizer; pass token ids, or leave out skip_tokenizer_init")
            if not prompt:
                raise ValueError("prompt is empty; give at least one character")
            return prompt, self._known(self.tokenizer.encode(prompt))
        if not isinstance(prompt, Sequence):
            raise ValueError(f"a prompt is a string, a list of token ids or a dict, found {type(prompt).__name__}")
        ids = integers(prompt, "the token ids of a prompt")
        if not ids:
            raise ValueError("prompt is empty; give at least one token id")
        return None, self._known(ids)

    def _known(self, ids: list[int]) -> list[int]:
        """``ids``, refused when the model has no such token: a tokenizer may know more tokens than the model."""
        bad = [t for t in ids if not 0 <= t < self.vocab_size]
        if bad:
            raise ValueError(f"prompt has token id {bad[0]}; the vocabulary has ids 0 to {self.vocab_size - 1}")
        return ids

    def submit(self, prompts: Sequence[Prompt], params: Params, priority: Sequence[int] | None) -> list[AddRequest]:
        """Register one call. Nothing is registered when a prompt is refused.

        Raises:
            ValueError: see ``token_ids``, ``spread_params`` and ``spread_priority``.
        """
        spread, priorities = spread_params(params, len(prompts)), spread_priority(priority, len(prompts))
        texts = [self.token_ids(p) for p in prompts]
        for param in spread:
            param.check_vocabulary(self.vocab_size)
        grammars = [self._grammar(param) for param in spread]
        commands: list[AddRequest] = []
        call, self._calls = self._calls, self._calls + 1
        for place, ((text, ids), param, grammar) in enumerate(zip(texts, spread, grammars, strict=True)):
            outputs = [CompletionOutput(index=i, logprobs=None if param.logprobs is None else []) for i in range(param.n)]
            metrics = RequestMetrics(arrival=time.monotonic())
            parent = RequestOutput(request_id=f"{call}-{place}", prompt=text, prompt_token_ids=ids, outputs=outputs, metrics=metrics)
            for completion in outputs:
                commands.append(self._child(parent, completion, place, param, priorities[place], grammar))
        return commands

    def _grammar(self, param: SamplingParams) -> str | None:
        """The compiled grammar that a completion has to match, None without."""
        if param.structured_outputs is None:
            return None
        if self.grammars is None:
            raise ValueError("structured_outputs needs a tokenizer; leave out skip_tokenizer_init")
        return self.grammars.compile(param.structured_outputs)

    def _child(
        self, parent: RequestOutput, completion: CompletionOutput, place: int, param: SamplingParams, priority: int, grammar: str | None
    ) -> AddRequest:
        name = f"{parent.request_id}.{completion.index}"
        dp_rank = self.router.pick(name, parent.prompt_token_ids, param.max_tokens, sure=True)
        self._children[name] = _Child(parent=parent, completion=completion, prompt_index=place)
        index, self._arrivals = self._arrivals, self._arrivals + 1
        wire = param.to_wire()
        if param.seed is not None and completion.index:
            wire["seed"] = request_seed(param.seed, 0, 0, completion.index)  # siblings draw their own noise
        wire.pop("n", None)
        wire.pop("structured_outputs", None)
        return AddRequest(
            request_id=name,
            index=index,
            dp_rank=dp_rank,
            prompt_ids=parent.prompt_token_ids,
            params=wire,
            priority=priority,
            grammar=grammar,
        )

    def withdraw(self, commands: Sequence[AddRequest]) -> None:
        """Forget requests that were registered but never sent."""
        for command in commands:
            del self._children[command.request_id]
            self.router.done(command.request_id)

    def aborts(self, request_id: str | None = None) -> list[Command]:
        """Commands that end one prompt's completions, or all of them."""
        names = [n for n, c in self._children.items() if request_id is None or c.parent.request_id == request_id or n == request_id]
        return [AbortRequest(request_id=name) for name in names]

    # ---- out

    def chunks(self, events: Sequence[Event]) -> list[StreamChunk]:
        """Fold events into the outputs and tell what is new; events of unknown requests are ignored.

        All are folded before the caller sees the first, so that none is lost when it stops there.
        """
        children = ((self._children.get(event.request_id), event) for event in events)
        return [self._fold(child, event) for child, event in children if child is not None]

    def _fold(self, child: _Child, event: Event) -> StreamChunk:
        parent, completion = child.parent, child.completion
        completion.token_ids.extend(event.token_ids)
        completion.text += event.text
        if event.logprobs is not None or event.prompt_logprobs is not None:
            self._fold_logprobs(parent, completion, event)
        metrics = parent.metrics
        if event.token_ids and metrics.first_token_time is None:
            metrics.first_token_time = time.monotonic()
        whole = None
        if event.finish_reason is not None:
            completion.finish_reason, completion.stop_reason = event.finish_reason, event.stop_reason
            metrics.cached_tokens = max(metrics.cached_tokens, event.cached_tokens)
            metrics.preemptions += event.preemptions
            del self._children[event.request_id]
            self.router.done(event.request_id)
            if all(o.finished for o in parent.outputs):
                parent.finished, metrics.finish_time, whole = True, time.monotonic(), parent
        return StreamChunk(
            request_id=parent.request_id,
            prompt_index=child.prompt_index,
            index=completion.index,
            text=event.text,
            token_ids=event.token_ids,
            finished=event.finish_reason is not None,
            output=whole,
        )

    def _fold_logprobs(self, parent: RequestOutput, completion: CompletionOutput, event: Event) -> None:
        if event.logprobs is not None and completion.logprobs is not None:
            for row in event.logprobs:
                completion.logprobs.append(self._logprobs(row))
                completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + row[0][1]
        if event.prompt_logprobs is not None and parent.prompt_logprobs is None:
            parent.prompt_logprobs = [None if row is None else self._logprobs(row) for row in event.prompt_logprobs]

    def _logprobs(self, row: LogprobRow) -> TokenLogprobs:
        found: TokenLogprobs = {}
        for token, logprob, rank in row:
            text = None if self.tokenizer is None else self.tokenizer.decode([int(token)], skip_special_tokens=False)
            found[int(token)] = Logprob(logprob=logprob, rank=int(rank), decoded_token=text)
        return found
