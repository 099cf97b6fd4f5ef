"""Bodies of the two generating routes. msgspec decodes and checks them; the OpenAPI document is made of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from .fields import SharedFields, Whole

#: a prompt is text or token ids; several prompts are a list of either
Prompts = str | list[str | int | list[int]]


class CompletionRequest(SharedFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Annotated[Prompts, Meta(description="Text, a list of texts, token ids, or a list of lists of them.")]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1, description="Most tokens generated; 0 only with echo.")] | None = None
    echo: Annotated[bool | None, Meta(description="Let the answer begin with the prompt.")] = None
    logprobs: Annotated[int, Meta(ge=0, le=64)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=1024)] | None = None
    add_special_tokens: bool | None = None

    suffix: Any = None
    prompt_embeds: Any = None


class ChatRequest(SharedFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=64)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str | None, Meta(description="'none' asks for no reasoning, anything else for some.")] = None
    thinking: Annotated[dict[str, Any] | None, Meta(description="DeepSeek's switch: {'type': 'enabled'} or {'type': 'disabled'}.")] = None
    include_reasoning: Annotated[bool | None, Meta(description="False leaves the reasoning out of the answer.")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None

    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    web_search_options: Any = None
    documents: Any = None
    mm_processor_kwargs: Any = None
    thinking_token_budget: Any = None


class TokenizeRequest(SharedFields, kw_only=True):
    """Body of POST /tokenize: a prompt or a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(SharedFields, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[Whole]


Kind = Literal["completion", "chat"]
