"""What the log says of an engine that has been made."""

from __future__ import annotations

import logging

from ..parallel.grid import Grid
from .assembly import why_eager
from .config import EngineConfig
from .eplb.room import balance_line
from .eplb_settings import uses_placement
from .expert_settings import describe_exchange
from .models.build import Stage
from .offload.pools import OffloadPools
from .runner import Runner
from .weights.loader import LoadReport

log = logging.getLogger("rorqual")


def announce(config: EngineConfig, grid: Grid, stage: Stage, runner: Runner, pools: OffloadPools | None, report: LoadReport | None) -> None:
    """Log the layout, the weights read, the exchange and placement of experts, the pools of KV, and the graphs of decode steps."""
    if grid.spec.world > 1:
        log.info("%s", grid.summary())
    if report is not None:
        log.info("%s", report.summary())
    dispatcher, cache = stage.dispatcher, runner.cache
    if dispatcher is not None and dispatcher.spec.n_ranks > 1:
        log.info("%s", describe_exchange(config, dispatcher, grid))
    if uses_placement(config):
        log.info("%s", balance_line(config, stage))
    log.info("KV pool: %d pages of %d tokens, %d bytes a token and stage", cache.n_pages, cache.page_size, cache.bytes_per_token)
    if pools is not None:
        about, held = pools.host.about, pools.host.n_bytes / 2**30
        log.info("KV offload %s: %d latent pages on the device; host pool of %.2f GiB in %s", config.kv_offload,
                 cache.n_device_pages, held, about)  # fmt: skip
    if runner.graphs is not None:
        log.info("%s", runner.graphs.summary())
    elif grid.device.type == "cuda":
        log.info("Decode steps run eagerly: %s", why_eager(config, grid, stage))
