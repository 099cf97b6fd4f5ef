"""The offline API: ``LLM(model).generate(prompts, params)``, the same call on every rank under torchrun."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from .call import Params, Prompt, list_prompts
from .config import EngineConfig
from .engine import Engine
from .front import StreamChunk
from .outputs import RequestOutput


class LLM:
    """A model on one or many ranks.

    Under torchrun every rank makes the same LLM and the same calls. Rank 0's prompts count; rank 0 gets the results, in
    order, and the other ranks get empty lists.

    Args:
        model: folder of a Hugging Face checkpoint, a hub id, or "tiny".
        engine_args: fields of ``EngineConfig``.

    Raises:
        ValueError: a setting, the checkpoint or the layout is wrong; the message says what and how to mend it.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        self.engine = Engine(EngineConfig(model=model, **engine_args))

    @property
    def is_rank0(self) -> bool:
        """True on the rank that gets the results."""
        return self.engine.grid.rank == 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: one prompt or several: text, token ids, or dicts with "prompt" or "prompt_token_ids".
            sampling_params: for all prompts, or one for each; defaults where None.
            use_tqdm: show progress on rank 0.
            priority: one number per prompt, lower runs first.

        Returns:
            On rank 0 one output per prompt, in order; elsewhere [].

        Raises:
            ValueError: on every rank, when a prompt or a parameter is refused; nothing has run then. Or an earlier call of this LLM
                ended in its middle, as by Ctrl-C.
        """
        done: dict[int, RequestOutput] = {}
        prompts = list_prompts(prompts)
        with tqdm(total=len(prompts), desc="requests", unit="req", disable=not (use_tqdm and self.is_rank0), dynamic_ncols=True) as bar:
            for chunk in self.generate_stream(prompts, sampling_params, priority=priority):
                if chunk.output is not None:
                    done[chunk.prompt_index] = chunk.output
                    bar.update()
        return [done[i] for i in sorted(done)]

    def generate_stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> Iterator[StreamChunk]:
        """Like ``generate``, yielding news of every completion as it comes (on rank 0; the others yield nothing).

        Closing the iterator early aborts what is still running.
        """
        yield from self.engine.run(list_prompts(prompts), sampling_params, priority)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        **template_args: Any,
    ) -> list[RequestOutput]:
        """Complete one conversation or several, rendered by the model's chat template.

        Args:
            messages: dicts with "role" and "content", or a list of such lists.
            sampling_params: for all conversations, or one for each; defaults where None.
            use_tqdm: show progress on rank 0.
            template_args: ``tools``, ``thinking``, ``add_generation_prompt``.

        Returns:
            On rank 0 one output per conversation, in order; elsewhere [].

        Raises:
            ValueError: on every rank, when there is no tokenizer or chat format, or a conversation or a parameter is refused;
                nothing has run then.
        """
        if isinstance(messages, (str, dict)) or not isinstance(messages, Sequence):
            found = type(messages).__name__
            raise ValueError(f'messages must be a list of dicts with "role" and "content", or a list of such lists, found {found}')
        talks = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        return self.generate(self.render_chats(talks, **template_args), sampling_params, use_tqdm=use_tqdm)

    def render_chats(self, conversations: Sequence[Any], **template_args: Any) -> list[Prompt]:
        """Conversations as token ids.

        Raises:
            ValueError: there is no tokenizer or chat format, or a conversation is refused.
        """
        return [self.engine.chat_prompt(talk, **template_args) for talk in conversations]

    def abort(self, request_id: str | None = None) -> None:
        """End one request of a running stream, or all; call it on rank 0 between chunks. Unknown ids are ignored."""
        self.engine.driver.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes of this engine; call it on every rank, between calls. A shared directory keeps what it has."""
        if self.engine.leader is not None:
            with self.engine.leader.at_work:
                self.engine.leader.scheduler.flush_prefix_cache()

    def stats(self) -> dict[str, Any]:
        """Counters of every rank; a collective call, rank 0 gets them, the others {}.

        Raises:
            ValueError: the LLM is closed.
        """
        return self.engine.stats()

    def dump_expert_distribution(self, path: str) -> None:
        """Write the load of experts that was recorded so far; call it on every rank, between calls. Its ending names the format.

        Raises:
            ValueError: on every rank, when nothing is recorded (``expert_distribution_recorder_mode``), or nothing has run.
        """
        self.engine.dump_experts(path)

    def close(self) -> None:
        """Write what was recorded and release the process groups and the host pool; the LLM is of no use afterwards. Collective.

        Raises:
            RuntimeError: with offloading, a step read a row that was never written, or the device has failed.
        """
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
