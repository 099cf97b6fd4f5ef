"""The router's own page for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from ...serving.histogram import Histogram
from ..needs import need
from .fleet import Fleet


def render(fleet: Fleet, open_requests: int) -> bytes:
    """All counters as text."""
    client = need("prometheus_client")
    registry = client.CollectorRegistry()
    registry.register(_Collector(fleet, open_requests))
    text: bytes = client.generate_latest(registry)
    return text


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Counts up to each bound, as Prometheus has them."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))


class _Collector:
    def __init__(self, fleet: Fleet, open_requests: int) -> None:
        self._fleet, self._open = fleet, open_requests

    def collect(self) -> Iterator[Any]:
        """Families of numbers, made from the fleet as it is now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        fleet, view = self._fleet, self._fleet.router.snapshot()
        urls = [worker.url for worker in fleet.workers]

        def rows(kind: Any, name: str, text: str, values: Any) -> Any:
            family = kind(f"rorqual_router:{name}", text, labels=["worker"])
            for url, value in zip(urls, values, strict=True):
                family.add_metric([url], value)
            return family

        yield rows(GaugeMetricFamily, "worker_healthy", "1 while a server gets requests", (w.well for w in fleet.workers))
        yield rows(CounterMetricFamily, "picked", "Requests, retries included, sent to a server", view["picked"])
        yield rows(CounterMetricFamily, "broken", "Connections that failed before or within an answer", (w.broken for w in fleet.workers))
        yield rows(GaugeMetricFamily, "open_requests", "Requests that a server has not ended", view["open_requests"])
        yield rows(GaugeMetricFamily, "open_tokens", "Tokens of these, prompts and expected output", view["open_tokens"])
        yield rows(CounterMetricFamily, "prompt_blocks", "Blocks of all prompts", view["prompt_blocks"])
        yield rows(CounterMetricFamily, "hit_blocks", "Blocks that the server was taken to have cached", view["hit_blocks"])
        yield rows(GaugeMetricFamily, "cached_blocks", "Blocks that a server is taken to have cached", view["cached_blocks"])
        answers = CounterMetricFamily("rorqual_router:answers", "Answers by HTTP status", labels=["worker", "status"])
        seconds = HistogramMetricFamily("rorqual_router:first_byte_seconds", "From sending a request to its first bytes", labels=["worker"])
        for worker in fleet.workers:
            for status, count in sorted(worker.answers.items()):
                answers.add_metric([worker.url, str(status)], count)
            seconds.add_metric([worker.url], _buckets(worker.first_byte), worker.first_byte.sum)
        yield from (answers, seconds)
        yield GaugeMetricFamily("rorqual_router:open", "Requests that the router has open", value=self._open)
        yield CounterMetricFamily("rorqual_router:retries", "Tries at another server", value=fleet.retries)
        yield CounterMetricFamily("rorqual_router:refused", "Requests that no server answered", value=fleet.refused)
