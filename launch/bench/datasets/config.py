"""Flags of the datasets, shared by all benchmarks that run requests."""

from __future__ import annotations

from dataclasses import dataclass

from ....engine.option import option

NAMES = (
    "random", "random-ids", "file", "sharegpt", "generated-shared-prefix", "prefix_repetition", "multi-turn", "timed_trace", "mooncake",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Which requests, and how many."""

    dataset_name: str | None = option(
        None,
        "Random tokens (as text where the target takes text, or as ids), prompts of a file, ShareGPT, prompts with shared beginnings, "
        "conversations, or a recorded trace with its arrivals; random, or file when a path is given, by default.",
        "--dataset",
        choices=NAMES,
        group="dataset",
    )
    dataset_path: str | None = option(None, "File of the dataset: prompts as `generate --prompts-file`, ShareGPT, trace.", group="dataset")
    num_prompts: int | None = option(None, "Requests; 1000 by default, all of a trace.", "--num-requests", group="dataset")
    input_len: int | None = option(None, "Prompt tokens of a random request.", "--random-input-len", group="dataset")
    output_len: int | None = option(
        None, "Tokens to generate; 128 by default, with ShareGPT those of the answer.", "--random-output-len", "--sharegpt-output-len",
        group="dataset",
    )  # fmt: skip
    random_range_ratio: float = option(0.0, "Lengths of random requests and of conversations vary by this share.", group="dataset")
    random_prefix_len: int = option(0, "Tokens in front that all random requests share.", group="dataset")
    disable_shuffle: bool = option(False, "Keep the order of the dataset.", "--gsp-ordered", group="dataset")
    no_oversample: bool = option(False, "Run fewer requests rather than ShareGPT's twice.", group="dataset")
    gsp_num_groups: int = option(64, "Shared beginnings.", group="dataset")
    gsp_prompts_per_group: int = option(16, "Requests of each; their product is the number of requests.", group="dataset")
    gsp_system_prompt_len: int = option(2048, "Tokens of a shared beginning.", group="dataset")
    gsp_question_len: int = option(128, "Tokens that are a request's own.", group="dataset")
    gsp_output_len: int = option(256, "Tokens to generate.", group="dataset")
    prefix_repetition_num_prefixes: int = option(10, "Shared beginnings, over which --num-prompts are dealt.", group="dataset")
    prefix_repetition_prefix_len: int = option(256, "Tokens of a shared beginning.", group="dataset")
    prefix_repetition_suffix_len: int = option(256, "Tokens that are a request's own.", group="dataset")
    prefix_repetition_output_len: int = option(128, "Tokens to generate.", group="dataset")
    multi_turn_num_conversations: int = option(32, "Conversations.", group="dataset")
    multi_turn_num_turns: int = option(5, "Requests of a conversation; the next is sent when the answer is there.", group="dataset")
    multi_turn_context_len: int = option(4096, "Tokens of the first prompt.", group="dataset")
    multi_turn_turn_len: int = option(128, "Tokens of a later question.", group="dataset")
    multi_turn_output_len: int = option(128, "Tokens of an answer.", group="dataset")
    timed_trace_chunk_hash_size: int = option(512, "Tokens of the block that a hash id of the trace stands for.", group="dataset")
    timed_trace_sec_multiplier: float = option(0.001, "Seconds of a unit of the trace's timestamps.", group="dataset")
    timed_trace_start: int = option(0, "Requests of the trace to leave out in front.", group="dataset")
    mooncake_slowdown_factor: float = option(1.0, "Times slower than recorded.", group="dataset")
