"""Streams, events and graph capture, and the only place through which the host waits for the device; queues beside: ``side``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar
from weakref import finalize

import torch

from .collector import no_collection

_T = TypeVar("_T")


class Mark:
    """A point in the work of a stream. On the CPU it is always behind us."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event  # None once it is known to be passed

    @property
    def on_device(self) -> bool:
        """Whether the device may still be before it."""
        return self._event is not None

    @property
    def done(self) -> bool:
        """Whether the device has passed it; never waits."""
        if self._event is not None and self._event.query():  # type: ignore[no-untyped-call]
            self._event = None
        return self._event is None

    def precede(self, stream: torch.cuda.Stream) -> None:
        """Let ``stream`` wait for it."""
        if self._event is not None:
            stream.wait_event(self._event)

    def synchronize(self) -> None:
        """Block the host until it is passed; for ``Streams.wait``, which counts."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None


class HostCopy:
    """A tensor on its way to the host. On the CPU it is there already."""

    def __init__(self, streams: Streams, host: torch.Tensor, mark: Mark) -> None:
        self.mark = mark  # passed when the values are there
        self._streams = streams
        self._host = host

    def wait(self) -> torch.Tensor:
        """The tensor on the host, complete."""
        self._streams.wait(self.mark)
        return self._host

    def keep(self) -> None:
        """Hold the values apart from the memory they came in, which is about to be used again."""
        self._host = self.wait().clone()


class Streams:
    """Streams of one rank: the current one computes, a second one brings results down, a third one captures graphs.

    ``waits`` counts how often the host blocked on the device since the start; nothing else in the engine may block on it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.waits = 0
        self._results: torch.cuda.Stream | None = None
        self._capture: torch.cuda.Stream | None = None
        self._beside: torch.cuda.Stream | None = None  # made when first used
        self._pool: Any = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        finalize(self, _reset, self._graphs)  # at the latest when the process ends: see release_graphs
        if self.cuda:
            self._results = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._capture = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        """The end of what the current stream has been given so far."""
        if not self.cuda:
            return Mark(None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Mark(event)

    def wait(self, mark: Mark) -> None:
        """Block the host until ``mark`` is passed."""
        self.waits += mark.on_device
        mark.synchronize()

    def settle(self) -> None:
        """Block the host until the device has done everything; for the ends of measurements, not for steps."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def download(self, x: torch.Tensor) -> HostCopy:
        """Start to bring ``x`` to the host, beside the work that the current stream is given from now on."""
        if self._results is None or x.device.type != "cuda":
            return HostCopy(self, x, Mark(None))
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._results.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._results):
            host.copy_(x, non_blocking=True)
            mark = self.mark()
        x.record_stream(self._results)  # its memory is not given to others before the copy is done
        return HostCopy(self, host, mark)

    def beside(self, body: Callable[[], None], keep: Iterable[torch.Tensor]) -> Mark:
        """Launch ``body`` beside what the current stream is given from now on, after what it has; where it ends.

        Such bodies run one after the other. ``keep``: tensors they read that nobody else may hold so long.
        """
        if not self.cuda:
            body()
            return Mark(None)
        if self._beside is None:
            self._beside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            body()
            mark = self.mark()
        for x in keep:
            x.record_stream(self._beside)
        return mark

    def follow(self, mark: Mark) -> None:
        """What the current stream is given from now on runs after ``mark``; the host does not wait."""
        if self.cuda:
            mark.precede(torch.cuda.current_stream())

    def capture(self, body: Callable[[], _T]) -> tuple[Callable[[], None], _T]:
        """Run ``body`` once, then capture it: (replay, what the captured run returned).

        All captures share one pool of memory, so the tensors of one are overwritten by the replay of another: only those that
        the caller made before the capture outlive the next replay, apart from what ``borrow`` keeps sight of. Capture the
        largest first, so that the others fit into its memory. ``body`` may not wait for the device.
        """
        assert self._capture is not None, "graphs are captured on CUDA devices"
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        body()  # compiles kernels and makes what libraries allocate on first use
        self.settle()
        graph = torch.cuda.CUDAGraph()
        # A graph or tensor that is collected meanwhile would call into the driver.
        with no_collection(), torch.cuda.stream(self._capture):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = body()
            except BaseException:
                with suppress(RuntimeError):  # the capture is broken; what broke it says more than its end
                    graph.capture_end()
                raise
            graph.capture_end()
        self._graphs.append(graph)
        return graph.replay, result

    def release_graphs(self) -> None:
        """Destroy all that was captured; replays raise from now on. One that still runs comes to its end first.

        NCCL counts the graphs that hold a communicator's collectives, and destroying the communicator waits until there are none:
        this has to come before the process groups are left.
        """
        _reset(self._graphs)


def _reset(graphs: list[torch.cuda.CUDAGraph]) -> None:
    while graphs:
        graphs.pop().reset()


class _Span:
    """Memory of a tensor as others may view it without owning it."""

    def __init__(self, address: int, n_bytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (n_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def borrow(x: torch.Tensor) -> torch.Tensor:
    """A view of the contiguous ``x`` that does not keep its memory; on the CPU ``x`` itself.

    For outputs of captured graphs: their memory goes back to the graphs' pool, where the next captures may use it too, and the
    values are good until another graph of the pool is replayed.
    """
    if x.device.type != "cuda":
        return x
    assert x.is_contiguous(), x.stride()
    flat = torch.as_tensor(_Span(x.data_ptr(), x.numel() * x.element_size()), device=x.device)
    return flat.view(x.dtype).view(x.shape)
