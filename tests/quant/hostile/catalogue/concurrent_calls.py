"""Forwards that call their layers from elsewhere: event loops, pools of threads, wrappers that scatter a batch."""

from __future__ import annotations

import asyncio
import multiprocessing.dummy
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..cases import WIDTH, TwoLayers, case, steps


@case("layers awaited in an event loop", child=True)
class Awaited(TwoLayers):
    async def half(self, layer: nn.Module, x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        found: Tensor = layer(x)
        return found

    async def whole(self, x: Tensor) -> Tensor:
        return await self.half(self.last, (await self.half(self.first, x)).relu())

    def forward(self, x: Tensor) -> Tensor:
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(self.whole(x))
        finally:
            loop.close()


@case("an asynchronous generator over the steps", steps, child=True)
class Streamed(TwoLayers):
    async def pieces(self, x: Tensor) -> AsyncIterator[Tensor]:
        for step in x.unbind(1):
            yield self.first(step).relu()

    async def whole(self, x: Tensor) -> Tensor:
        return torch.stack([self.last(piece) async for piece in self.pieces(x)], 1)

    def forward(self, x: Tensor) -> Tensor:
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(self.whole(x))
        finally:
            loop.close()


@case("branches mapped over multiprocessing.dummy", child=True)
class DummyPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU()) for _ in range(3))
        self.last = nn.Linear(72, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with multiprocessing.dummy.Pool(2) as pool:
            return self.last(torch.cat(pool.map(lambda branch: branch(x), self.branches), 1))


@case("a worker thread that takes activations from a queue", child=True)
class Worker(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        given: queue.Queue[Tensor | None] = queue.Queue()
        done: queue.Queue[Tensor] = queue.Queue()

        def work() -> None:
            while (one := given.get()) is not None:
                done.put(self.first(one).relu())

        thread = threading.Thread(target=work)
        thread.start()
        halves = []
        for half in (x * 0.5, x):
            given.put(half)
            halves.append(self.last(done.get()))
        given.put(None)
        thread.join()
        return torch.cat(halves)


class Scattered(nn.Module):
    """Cuts the batch, calls replicas in threads, and gathers, as data parallel wrappers do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        pieces = [piece.chunk(2) for piece in args]
        found: list[Any] = [None, None]

        def work(place: int) -> None:
            found[place] = self.module(*(piece[place] for piece in pieces), **kwargs)

        threads = [threading.Thread(target=work, args=(place,)) for place in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat(found)


class Block(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


@case("a wrapper that scatters the batch over threads", child=True)
def scattered() -> nn.Module:
    return Scattered(Block())


@case("torch's DataParallel as a child, without devices")
def data_parallel() -> nn.Module:
    return nn.Sequential(nn.DataParallel(Block()), nn.Tanh())


@contextmanager
def scaled(gains: list[float], gain: float) -> Any:
    gains.append(gain)
    try:
        yield
    finally:
        gains.pop()


@case("callbacks and contexts on an ExitStack run when it closes")
class Closing(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        gains: list[float] = [1.0]
        kept: list[Tensor] = []
        with ExitStack() as stack:
            stack.callback(lambda: kept.append(self.last(kept[0].relu()) * gains[-1]))
            stack.enter_context(scaled(gains, 0.5))
            kept.append(self.first(x) * gains[-1])
        return kept[-1]


@case("layers called by torch.jit.fork inside a child", child=True)
class Forked(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        futures = [torch.jit.fork(self.first, piece) for piece in (x, x * 0.5)]
        return self.last(sum(torch.jit.wait(one) for one in futures).relu())  # type: ignore[attr-defined]


@case("futures with callbacks", child=True)
class Futures(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        then: Callable[..., Any] = future.then
        chained = then(lambda one: self.last(one.value().relu()))
        future.set_result(self.first(x))
        found: Tensor = chained.wait()
        return found
