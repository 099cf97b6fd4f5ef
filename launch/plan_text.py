"""The memory plan of a model as text."""

from __future__ import annotations

from typing import Any

from .inspect_text import columns, human_bytes

_MODES = ("off", "host", "hybrid")


def render(found: dict[str, Any]) -> str:
    """``plan``'s result as text: a table per pipeline stage, what a replica can hold, and what the link takes."""
    layout, machine = found["layout"], found["machine"]
    degrees = ", ".join(f"{name} {degree}" for name, degree in layout.items())
    lines = [f"{found['model']}: contexts of {found['context']:,} tokens on {degrees}"]
    lines.append(
        f"  {human_bytes(machine['gpu_memory'])} a GPU, of which {machine['gpu_memory_utilization']:.0%} are used; "
        f"{human_bytes(machine['host_memory'])} of host memory for {machine['ranks_per_host']} rank(s)"
    )
    kv = found["kv"]
    lines.append(
        f"  KV rows {kv['dtype']}: {kv['latent_row_bytes']} B latent and {kv['index_row_bytes']} B of {kv['index_dtype']} index key a "
        f"token and layer; pages of {kv['page_size']} tokens; hot buffers of {kv['hot_rows']} to {kv['most_hot_rows']} rows"
    )
    lines += [f"  {line}" for line in dict.fromkeys(room["text"] for room in found["experts"]) if line != "EPLB off"]
    pool = "host pool, of all ranks of a host" if machine["host_backing"] in ("shm", "file") else "host pool, of the rank alone"
    for stage in found["stages"]:
        lines += ["", *_stage(stage, pool)]
    lines += ["", *_capacity(found)]
    return "\n".join(lines + _link(found))


def _stage(stage: dict[str, Any], pool: str) -> list[str]:
    first, stop = stage["layers"]
    modes = stage["modes"]
    rows = [("part", *(f"offload {mode}" for mode in _MODES))]
    rows += [(f"weights: {part}", *[human_bytes(size)] * 3) for part, size in stage["weights"].items()]
    names = {name: None for mode in _MODES for name in (modes[mode] or {"device": {}})["device"]}
    for name in names:
        rows.append((name, *(_cell(modes[mode], "device", name) for mode in _MODES)))
    rows.append(("sum on the device", *("-" if modes[mode] is None else human_bytes(modes[mode]["device_total"]) for mode in _MODES)))
    rows.append((pool, *("-" if modes[mode] is None else human_bytes(modes[mode]["host_pool"]) for mode in _MODES)))
    return [f"Memory of a rank of stage {stage['stage']}, layers {first}-{stop - 1}", *columns(rows)]


def _cell(mode: dict[str, Any] | None, group: str, name: str) -> str:
    return "-" if mode is None else human_bytes(mode[group][name])


def _capacity(found: dict[str, Any]) -> list[str]:
    rows = [("", *(f"offload {mode}" for mode in _MODES))]
    modes = found["modes"]
    for name, label in (
        ("pool_tokens", "tokens of the pool"),
        ("device_tokens", "of them on the device at once"),
        ("largest_batch", f"largest batch at {found['context']:,}"),
        ("largest_batch_all", "the same over all replicas"),
        ("max_num_seqs", "request slots (--max-num-seqs)"),
    ):
        rows.append((label, *("-" if modes[mode] is None else f"{modes[mode][name]:,}" for mode in _MODES)))
    rows.append(("limited by", *("-" if modes[mode] is None else modes[mode]["limited_by"] for mode in _MODES)))
    lines = ["What a replica holds", *columns(rows), *_hot_rows(modes)]
    return lines + [f"  offload {mode}: {why}" for mode, why in found["refused"].items()]


def _hot_rows(modes: dict[str, Any]) -> list[str]:
    """How many hot rows a request has at which batch."""
    texts: dict[str, list[str]] = {}
    for mode in _MODES:
        if modes[mode] is not None and modes[mode]["hot_rows"]:
            steps = ", ".join(f"{step['rows']:,} up to {step['requests']:,} requests" for step in modes[mode]["hot_rows"])
            texts.setdefault(steps, []).append(mode)
    return [f"  hot rows of each request, offload {' and '.join(names)}: {steps}" for steps, names in texts.items()]


def _link(found: dict[str, Any]) -> list[str]:
    loads = found["link"]
    if not loads and found["modes"]["host"] is None and found["modes"]["hybrid"] is None:
        return []
    if not loads:
        return ["", f"The link carries no rows: contexts of {found['context']:,} tokens are read whole and stay on the device."]
    rows = [
        ("share of chosen rows missing", "rows a layer", "bytes a token", "tokens/s a GPU", "tokens/s in all", "link time of the batch")
    ]
    for load in loads:
        rows.append(
            (
                f"{load['miss_rate']:.1%}",
                f"{load['rows']:.0f}",
                human_bytes(round(load["bytes_per_token"])),
                f"{load['tokens_per_s']:,.0f}",
                f"{load['tokens_per_s_all']:,.0f}",
                f"{load['batch_ms']:.2f} ms",
            )
        )
    head = f"Load of the link at {found['machine']['link'] / 1e9:g} GB/s a GPU, every request offloaded, most loaded stage"
    return ["", head, *columns(rows)]
