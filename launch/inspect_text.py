"""The description of a model as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def human_bytes(n: int) -> str:
    """Bytes in GB or MB (powers of ten) with three digits after the point, or plain."""
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if n >= size:
            return f"{n / size:.3f} {unit}"
    return f"{n} B"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = (cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        lines.append("  " + "  ".join((first, *others)).rstrip())
    return lines


def _facts(values: dict[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in values.items())


def render(found: dict[str, Any]) -> str:
    """``describe``'s result as text, one section after the other."""
    lines = ["Architecture"]
    for key, value in found["architecture"].items():
        if value is not None:
            lines.append(f"  {key.replace('_', ' ')}: {_facts(value) if isinstance(value, dict) else value}")
    lines += ["", "Parameters (bytes as stored)"]
    rows = [("part", "tensors", "parameters", "bytes")]
    rows += [(part, f"{row['tensors']:,}", f"{row['parameters']:,}", human_bytes(row["bytes"])) for part, row in found["parts"].items()]
    total = found["total"]
    rows.append(("total without MTP", "", f"{total['parameters']:,}", human_bytes(total["bytes"])))
    rows.append(("active per token", "", f"{total['active_parameters']:,}", ""))
    if total["parameters_with_mtp"] != total["parameters"]:
        rows.append(("total with MTP", "", f"{total['parameters_with_mtp']:,}", human_bytes(total["bytes_with_mtp"])))
    lines += columns(rows)
    return "\n".join(lines + _layout_lines(found))


def _layout_lines(found: dict[str, Any]) -> list[str]:
    layout, kv = found["layout"], found["kv"]
    lines = ["", f"Weights per rank ({_facts(layout)}; in the compute dtype, MTP not loaded)"]
    rows = [("stage", "layers", "weights", "KV per token")]
    for number, stage in enumerate(found["per_rank"]):
        first, stop = stage["layers"]
        rows.append((str(number), f"{first}-{stop - 1}", human_bytes(stage["bytes"]), human_bytes(kv["bytes_per_token_per_stage"][number])))
    lines += columns(rows)
    lines += [f"  {text}" for text in dict.fromkeys(stage["experts"] for stage in found["per_rank"]) if text]
    lines += ["", f"KV cache ({kv['dtype']}, page of {kv['page_size']} tokens)"]
    lines += columns(
        [
            ("latent, per token and layer", f"{kv['latent_bytes_per_token_layer']} B"),
            ("index key, per token and layer", f"{kv['indexer_bytes_per_token_layer']} B"),
            ("all layers, per token", f"{kv['bytes_per_token']:,} B"),
            ("all layers, per page", f"{kv['bytes_per_page']:,} B"),
        ]
    )
    return lines
