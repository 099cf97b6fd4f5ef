"""User-facing engine settings. The command line is generated from these fields, so flags and settings cannot drift."""

from __future__ import annotations

from dataclasses import dataclass

from .config_check import check_config
from .option import option

__all__ = ["EngineConfig", "check_config", "option"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Names follow vLLM; SGLang's spellings are aliases on the command line."""

    model: str = option("", "Folder of a Hugging Face checkpoint, a hub id, or 'tiny' (the embedded model).", "--model-path", group="model")
    tokenizer: str | None = option(
        None, "Folder or hub id of the tokenizer; the model's own by default.", "--tokenizer-path", group="model"
    )
    skip_tokenizer_init: bool = option(False, "Work on token ids only; prompts must be ids and no text comes back.", group="model")
    load_format: str = option(
        "auto", "'dummy' makes random weights, the same on every layout.", choices=("auto", "safetensors", "dummy"), group="model"
    )
    dtype: str = option(
        "auto", "Compute dtype; 'auto' is the checkpoint's.", choices=("auto", "bfloat16", "float16", "float32"), group="model"
    )
    max_model_len: int | None = option(
        None, "Longest prompt plus output, tokens; the model's limit by default.", "--context-length", group="model"
    )
    revision: str | None = option(None, "Hub revision of the model.", group="model")

    device: str = option("auto", "'cuda' when a GPU is there, else 'cpu'.", choices=("auto", "cpu", "cuda"), group="device")
    kv_cache_dtype: str = option(
        "auto",
        "Format of cached rows: 'auto' is the compute dtype, 'fp8' the 656-byte row.",
        choices=("auto", "bfloat16", "float32", "fp8"),
        group="device",
    )
    index_cache_dtype: str = option(
        "auto",
        "Format of cached index keys: 'auto' is that of the rows; 'fp4' takes half the memory of 'fp8' and finds fewer of the best keys.",
        choices=("auto", "bfloat16", "float32", "fp8", "fp4"),
        group="device",
    )
    fp8_gemm_backend: str = option(
        "auto",
        "Products with block-FP8 weights: kept FP8 on CUDA (auto), widened at load (dequantise), or by the backend named.",
        choices=("auto", "dequantise", "torch", "triton", "deep_gemm"),
        group="device",
    )
    attention_backend: str = option(
        "auto",
        "Attention, indexer and top-k: Triton kernels on CUDA (auto), these with FlashMLA's sparse attention, or plain torch.",
        choices=("auto", "torch", "triton", "flash_mla"),
        group="device",
    )
    moe_runner_backend: str = option(
        "auto", "Routing and experts: Triton kernels on CUDA (auto), or plain torch.", choices=("auto", "torch", "triton"), group="device"
    )
    page_size: int = option(64, "Tokens per KV page, a power of two from 1 to 256.", "--block-size", group="device")
    max_total_tokens: int | None = option(None, "Tokens the KV pool of one DP rank holds; sized from memory by default.", group="device")
    gpu_memory_utilization: float = option(0.9, "Share of device memory the engine may use.", "--mem-fraction-static", group="device")
    enforce_eager: bool = option(False, "Run every step eagerly, without CUDA graphs.", "--disable-cuda-graph", group="device")
    cuda_graph_max_bs: int | None = option(
        None,
        "Most decode rows that run from a CUDA graph; max_num_seqs, at most 256, by default.",
        "--max-cudagraph-capture-size",
        group="device",
    )
    cuda_graph_bs: tuple[int, ...] | None = option(
        None, "Batch sizes to capture; 1, 2, 4, 8, 16, 24, 32, 48, ... by default.", "--cudagraph-capture-sizes", group="device"
    )
    cuda_graph_capture: str = option(
        "start", "Capture all graphs at the start, or each one when it is first needed.", choices=("start", "lazy"), group="device"
    )

    kv_offload: str = option(
        "off",
        "Latent rows in host memory: pages leave the device at once (host), or under pressure only (hybrid).",
        choices=("off", "host", "hybrid"),
        group="offload",
    )
    kv_host_memory: float | None = option(
        None, "GiB of one host that its ranks use for the host pool; by default at most 80% of what is available.", group="offload"
    )
    kv_host_backing: str = option(
        "pinned",
        "Memory of the host pool: each rank's own (pinned), shared by the ranks of a host (shm, or a file), or CXL memory.",
        choices=("pinned", "shm", "cxl", "file"),
        group="offload",
    )
    kv_host_path: str | None = option(
        None, "File of the host pool, folder of the shared one, or CXL nodes or devices, as the backing needs.", group="offload"
    )
    kv_hot_slots: int | None = option(
        None, "Rows of an offloaded request that each layer keeps on the device; twice index_topk by default.", group="offload"
    )
    kv_hot_slots_max: int | None = option(
        None,
        "Rows that it keeps while device memory is of no other use; four times index_topk by default, kv_hot_slots for always the same.",
        group="offload",
    )
    kv_hot_policy: str = option(
        "score",
        "Hot rows that give way first: those of the lowest index scores, or the least recently used.", choices=("lru", "score"),
        group="offload",
    )  # fmt: skip
    kv_device_tokens: int | None = option(
        None, "Latent rows (tokens) on the device, hot rows included; sized from memory by default.", group="offload"
    )

    kv_prefix_directory: bool = option(
        False,
        "Share finished pages of the host pool by what is in them, with the other replicas of the host and all engines on the same file.",
        group="offload",
    )
    kv_overlap_fetch: bool = option(
        False,
        "Fetch missing rows beside the queries' products: pays with many misses and 16 requests or more, costs a little otherwise.",
        group="offload",
    )

    tensor_parallel_size: int = option(1, "Ranks that share the attention of one request.", "-tp", "--tp-size", "--tp", group="parallel")
    pipeline_parallel_size: int = option(1, "Pipeline stages.", "-pp", "--pp-size", "--pp", group="parallel")
    data_parallel_size: int = option(1, "Ranks (of tp each) that own different requests.", "-dp", "--dp-size", "--dp", group="parallel")
    expert_parallel_size: int | None = option(
        None,
        "Ranks the experts are spread over: dp x tp (default), or 1 for experts split like other tensors.",
        "-ep",
        "--ep",
        "--ep-size",
        group="parallel",
    )
    moe_a2a_backend: str = option(
        "auto",
        "All-to-all of expert parallelism. torch: NCCL or gloo, only rows that are wanted; torch_node: the same, each to a node once; "
        "torch_static: every row to every rank, in CUDA graphs; symm: stores into the other GPUs' memory over NVLink; nvshmem: the same, "
        "and over a network; deep_ep: the package of that name; shm: ranks on the CPUs of one host.",
        "--all2all-backend",
        choices=("auto", "torch", "torch_node", "torch_static", "symm", "nvshmem", "deep_ep", "shm"),
        group="parallel",
    )
    moe_payload: str = option(
        "auto",
        "What dispatch sends: activations as they are (auto), rounded to bf16, or FP8 with a scale per 128 values (ue8m0: a power of two).",
        choices=("auto", "bf16", "fp8", "fp8_ue8m0"),
        group="parallel",
    )
    enable_two_batch_overlap: bool = option(
        False, "Compute one half of a step while the other travels to its experts or back; prefill and decode.", group="parallel"
    )
    two_batch_overlap_min_tokens: int = option(
        64, "Tokens of the busiest replica from which a step is cut in halves; below, experts' weights are read twice for little.",
        group="parallel",
    )  # fmt: skip
    ep_fault_tolerant: bool = option(
        False,
        "Exchanges go on without expert ranks that do not answer within dist_timeout, whose experts add nothing; other waits for such a "
        "rank still end the job. Backends symm, nvshmem and shm.",
        group="parallel",
    )
    ranks_per_node: int | None = option(
        None, "Ranks of one node, for node-limited dispatch; torchrun's LOCAL_WORLD_SIZE by default.", group="parallel"
    )
    dist_timeout: float = option(
        300.0, "Seconds a collective may wait before the run ends with the missing ranks' names.", group="parallel"
    )
    max_clock_skew: float = option(10.0, "Seconds that the clocks of hosts may be apart at the start.", group="parallel")

    enable_eplb: bool = option(
        False, "Move experts between ranks while tokens are generated, so that all ranks get the same load.", group="expert balance"
    )
    num_redundant_experts: int | None = option(
        None,
        "Slots of each layer beyond one for every expert, for copies of experts; rounded up so that all ranks have as many slots. 0 by "
        "default.",
        "--ep-num-redundant-experts",
        group="expert balance",
    )
    eplb_step_interval: int | None = option(
        None, "Steps from one look at the load to the next; 3000 by default.", "--eplb-rebalance-num-iterations", group="expert balance"
    )
    eplb_window_size: int | None = option(None, "Most recent steps whose load counts; 1000 by default.", group="expert balance")
    eplb_bytes_per_step: int | None = option(
        None, "Most bytes of experts that a rank receives, and sends, from one step to the next; 256 MiB by default.",
        group="expert balance",
    )  # fmt: skip
    eplb_config: str | None = option(
        None, "Settings of balancing as JSON, with vLLM's names: window_size, step_interval, num_redundant_experts, log_balancedness, ...",
        group="expert balance",
    )  # fmt: skip
    init_expert_location: str = option(
        "trivial",
        "Where experts begin: in order (trivial), or a map or a recorded load from a file, or inline JSON.",
        group="expert balance",
    )
    ep_dispatch_algorithm: str = option(
        "static",
        "Which copy of an expert a token goes to: one near to it while all get even shares (static), any in turn (dynamic), or as recent "
        "load asks for (lp: water filling, within 1% of the linear program).",
        choices=("static", "dynamic", "lp"),
        group="expert balance",
    )
    expert_distribution_recorder_mode: str | None = option(
        None, "Record the load of experts: sums of steps (stat), every step (per_pass), or the choices of every token (per_token).",
        choices=("stat", "stat_approx", "per_pass", "per_token"), group="expert balance",
    )  # fmt: skip
    expert_distribution_recorder_buffer_size: int = option(
        1000, "Steps that the recorder keeps; the oldest give way.", group="expert balance"
    )
    expert_distribution_dump: str | None = option(
        None, "File for what was recorded, written when the engine closes.", group="expert balance"
    )

    max_num_seqs: int = option(256, "Requests running at once on one DP rank.", "--max-running-requests", group="scheduler")
    max_num_batched_tokens: int = option(
        4096,
        "Tokens of one step; longer prompts are prefilled in chunks of it.",
        "--chunked-prefill-size",
        "--max-prefill-tokens",
        group="scheduler",
    )
    enable_prefix_caching: bool = option(
        True, "Reuse cached pages of equal prompt prefixes (off: --disable-radix-cache).", group="scheduler"
    )
    disable_overlap_schedule: bool = option(False, "Wait for each step's tokens before preparing the next step.", group="scheduler")
    enable_deterministic_inference: bool = option(
        False, "Combine expert outputs in an order that no layout and no place of an expert changes.", group="scheduler"
    )
    enable_expert_load: bool = option(True, "Count the tokens routed to each expert, per layer.", group="scheduler")

    seed: int = option(0, "Seed of requests that bring none, and of dummy weights.", "--random-seed", group="scheduler")
    enable_layerwise_nvtx_tracing: bool = option(
        False, "NVTX ranges around steps and the parts of the model, for Nsight Systems; graphs show the step alone.",
        "--enable-layerwise-nvtx-marker", group="scheduler",
    )  # fmt: skip
    disable_log_stats: bool = option(False, "Do not log the layout, what was loaded, and the size of the KV pool.", group="scheduler")
