"""Which numbers of a snapshot become which metrics of one DP rank. Names are vLLM's where vLLM has the metric."""

from __future__ import annotations

from typing import Any, NamedTuple


class Row(NamedTuple):
    """One metric made of numbers of a replica."""

    name: str  # without the prefix, and without the _total of counters
    kind: str  # "gauge", "counter" or "histogram"
    help: str
    path: tuple[str, ...]  # where it is in the dict of a replica
    label: str = ""  # the number is a dict: one sample for each key, under this label


REQUESTS, LEADER, TIERS = ("requests",), ("leader",), ("leader", "tiers")
_HISTOGRAMS = ("requests", "histograms")

#: of every DP rank, labels model_name and engine
REPLICA_ROWS = (
    Row("num_requests_running", "gauge", "Requests that hold a slot.", (*LEADER, "running")),
    Row("num_requests_waiting", "gauge", "Requests that wait for a slot or for pages, preempted ones included.", (*LEADER, "waiting")),
    Row("num_requests_open", "gauge", "Completions given to this DP rank that have not ended.", (*REQUESTS, "open")),
    Row("kv_cache_usage_perc", "gauge", "KV pages that running requests read, 1 = all; cached prefixes are not counted.",
        (*LEADER, "kv_usage")),
    Row("kv_cache_pages", "gauge", "KV pages of the pool.", (*LEADER, "pages")),
    Row("prefix_cache_queries", "counter", "Tokens of admitted requests that were looked up in the prefix cache.",
        (*LEADER, "prefix_queries")),
    Row("prefix_cache_hits", "counter", "Of these, tokens that were found.", (*LEADER, "prefix_hits")),
    Row("prefix_cache_evictions", "counter", "Pages of cached prefixes dropped to make room.", (*LEADER, "evictions")),
    Row("num_preemptions", "counter", "Times that a running request lost its pages and was recomputed.", (*LEADER, "preemptions")),
    Row("prompt_tokens", "counter", "Prompt tokens of requests that got their first token.", (*REQUESTS, "prompt_tokens")),
    Row("prompt_tokens_cached", "counter", "Prompt tokens of ended requests that came from a prefix cache.",
        (*REQUESTS, "cached_prompt_tokens")),
    Row("generation_tokens", "counter", "Tokens generated.", (*REQUESTS, "generation_tokens")),
    Row("requests_routed", "counter", "Completions given to this DP rank.", (*REQUESTS, "routed")),
    Row("request_success", "counter", "Completions that have ended, by reason.", (*REQUESTS, "ended"), "finished_reason"),
    Row("time_to_first_token_seconds", "histogram", "From the arrival of a request to its first token.",
        (*_HISTOGRAMS, "time_to_first_token_seconds")),
    Row("inter_token_latency_seconds", "histogram", "From one token of a request to the next.",
        (*_HISTOGRAMS, "inter_token_latency_seconds")),
    Row("request_time_per_output_token_seconds", "histogram", "Mean time of a request's tokens after the first.",
        (*_HISTOGRAMS, "request_time_per_output_token_seconds")),
    Row("e2e_request_latency_seconds", "histogram", "From the arrival of a request to its end.",
        (*_HISTOGRAMS, "e2e_request_latency_seconds")),
    Row("request_queue_time_seconds", "histogram", "From the arrival of a request to its first step.",
        (*_HISTOGRAMS, "request_queue_time_seconds")),
    Row("request_prefill_time_seconds", "histogram", "From the first step of a request to its first token.",
        (*_HISTOGRAMS, "request_prefill_time_seconds")),
    Row("request_decode_time_seconds", "histogram", "From the first token of a request to its last one.",
        (*_HISTOGRAMS, "request_decode_time_seconds")),
    Row("request_inference_time_seconds", "histogram", "From the first step of a request to its last token.",
        (*_HISTOGRAMS, "request_inference_time_seconds")),
    Row("request_prompt_tokens", "histogram", "Prompt tokens of a request.", (*_HISTOGRAMS, "request_prompt_tokens")),
    Row("request_generation_tokens", "histogram", "Tokens generated for a request.", (*_HISTOGRAMS, "request_generation_tokens")),
    Row("iteration_tokens_total", "histogram", "Tokens computed in a step, idle steps included.", (*LEADER, "step_tokens")),
    Row("step_time_seconds", "histogram", "From the launch of one step to that of the next, while there is work.",
        (*LEADER, "step_seconds")),
    Row("steps", "counter", "Steps that ran on the device.", (*LEADER, "steps")),
    Row("idle_rank_steps", "counter", "Steps that ran without tokens of this DP rank, because another one had some.",
        (*LEADER, "idle_steps")),
    Row("graph_steps", "counter", "Steps replayed from a CUDA graph; all others ran eagerly.", (*LEADER, "graph_steps")),
    Row("prefill_tokens_computed", "counter", "Prompt tokens computed, cached ones not counted, recomputed ones each time.",
        (*LEADER, "prefill_tokens")),
    Row("decode_tokens_computed", "counter", "Rows of one token that were decoded.", (*LEADER, "decode_tokens")),
    Row("padding_tokens", "counter", "Rows that CUDA graphs computed beyond those of requests.", (*LEADER, "padding_tokens")),
    Row("busiest_rank_tokens", "counter", "Tokens of the busiest DP rank of each step, which all others wait for.",
        (*LEADER, "busiest_tokens")),
    Row("host_waits", "counter", "Times that the host of this DP rank's leader waited for its device.", (*LEADER, "host_waits")),
    Row("dispatch_bytes", "counter", "Bytes that the first rank of this DP rank sent to other expert ranks.",
        (*LEADER, "dispatch_bytes")),
    Row("kv_tier_resident_rows", "counter", "With KV offloading: rows chosen by the indexer that were in a page on the device.",
        (*TIERS, "resident")),
    Row("kv_tier_hits", "counter", "Chosen rows found in a request's hot rows on the device.", (*TIERS, "hits")),
    Row("kv_tier_misses", "counter", "Chosen rows fetched from host memory.", (*TIERS, "misses")),
    Row("kv_tier_evictions", "counter", "Hot rows that gave way to others.", (*TIERS, "evictions")),
    Row("kv_tier_fetched_bytes", "counter", "Bytes of chosen rows fetched from host memory.", (*TIERS, "bytes")),
    Row("kv_tier_device_pages", "gauge", "Latent pages on the device.", (*TIERS, "device_pages")),
    Row("kv_tier_device_pages_free", "gauge", "Of these, pages that are free.", (*TIERS, "device_pages_free")),
    Row("kv_tier_host_pages", "gauge", "Pages of the host pool.", (*TIERS, "host_pages")),
    Row("kv_tier_offloaded_requests", "gauge", "Requests that hold hot rows.", (*TIERS, "offloaded_requests")),
    Row("kv_tier_mirrored_pages", "counter", "Pages copied to the host pool.", (*TIERS, "mirrored")),
    Row("kv_tier_restored_pages", "counter", "Pages brought back to the device.", (*TIERS, "restored")),
    Row("kv_directory", "counter", "With a prefix directory: pages asked for, matched, published, ... by name.",
        (*LEADER, "directory"), "event"),
    Row("eplb_cycles", "counter", "With expert balancing: cycles of moves, by how they ended.", (*LEADER, "eplb", "cycles"), "result"),
    Row("eplb_experts_received", "counter", "Experts that the first rank of this DP rank received.",
        (*LEADER, "eplb", "experts_received")),
    Row("eplb_bytes_received", "counter", "Bytes of these.", (*LEADER, "eplb", "bytes_received")),
    Row("eplb_placement_age_steps", "gauge", "Steps since an expert changed its place.", (*LEADER, "eplb", "age_steps")),
    Row("report_age_seconds", "gauge", "Age of the numbers that come from this DP rank's leader.", ("age",)),
)  # fmt: skip

#: of ``engine["routing"]``: lists with a number for each DP rank
ROUTING_ROWS = (
    Row("routing_picked", "counter", "Completions that routing gave to this DP rank.", ("picked",)),
    Row("routing_pinned", "counter", "Completions that asked for this DP rank.", ("pinned",)),
    Row("routing_open_requests", "gauge", "Open completions as routing counts them.", ("open_requests",)),
    Row("routing_open_tokens", "gauge", "Tokens of open completions as routing counts them.", ("open_tokens",)),
    Row("routing_prefill_blocks", "gauge", "Blocks that this DP rank has to prefill, as routing expects.", ("prefill_blocks",)),
    Row("routing_decode_blocks", "gauge", "Blocks of requests that are decoded, as routing expects.", ("decode_blocks",)),
    Row("routing_prompt_blocks", "counter", "Blocks of the prompts given to this DP rank.", ("prompt_blocks",)),
    Row("routing_hit_blocks", "counter", "Of these, blocks that routing knew to be cached there.", ("hit_blocks",)),
    Row("routing_cached_blocks", "gauge", "Blocks that routing knows to be cached on this DP rank.", ("cached_blocks",)),
)


def find(numbers: dict[str, Any], path: tuple[str, ...]) -> Any:
    """What is at ``path``; None where it ends early."""
    found: Any = numbers
    for name in path:
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return found
