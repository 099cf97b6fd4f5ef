"""Fields that /v1/completions and /v1/chat/completions share. What a request does not name keeps the default.

Fields without a meaning here are ignored, as OpenAI does; fields whose meaning is known but not provided are named in
``UNSUPPORTED`` and refused, so that no client believes in something that does not happen.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Whole = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream tells beside text."""

    include_usage: bool | None = None  # a last chunk with token counts
    continuous_usage_stats: bool | None = None  # token counts so far in every chunk (vLLM)


class SharedFields(msgspec.Struct, kw_only=True):
    """Sampling and output; names of OpenAI, then vLLM's extras."""

    model: Annotated[str | None, Meta(description="Name of the model as /v1/models lists it; the only one when left out.")] = None
    n: Annotated[int, Meta(ge=1, le=1024, description="Completions of each prompt.")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None

    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1, description="0 or -1 keeps every token.")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    min_tokens: Whole | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Whole] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=64)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, description="Lower runs first.")] | None = None
    request_id: Annotated[str, Meta(max_length=128, pattern="^[A-Za-z0-9_.:-]*$")] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, description="Keep the last tokens of a prompt; -1: as many as fit.")] | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structural_tag: str | None = None

    # known, not provided: see UNSUPPORTED
    use_beam_search: Any = None
    length_penalty: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    spaces_between_special_tokens: Any = None
    cache_salt: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    logits_processors: Any = None
    guided_whitespace_pattern: Any = None


#: field -> values that ask for nothing
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "spaces_between_special_tokens": (None, True),
    "cache_salt": (None,),
    "kv_transfer_params": (None, {}),
    "vllm_xargs": (None, {}),
    "logits_processors": (None, []),
    "guided_whitespace_pattern": (None,),
    # /v1/completions
    "suffix": (None, ""),
    "prompt_embeds": (None,),
    # /v1/chat/completions
    "functions": (None, []),
    "function_call": (None, "none"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    "documents": (None, []),
    "mm_processor_kwargs": (None, {}),
    "thinking_token_budget": (None,),
}
