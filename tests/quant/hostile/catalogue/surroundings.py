"""What a forward does to the world around: threads, logs, prints, files, clocks, profilers, warnings."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import io
import logging
import os
import pprint
import sys
import threading
import time
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cases import WIDTH, TwoLayers, case, images, rows, steps

LOG = logging.getLogger(__name__)
LOG.addHandler(logging.NullHandler())
LOG.propagate = False


@case("layers run in threads of a pool", child=True)
class Pool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            parts = list(pool.map(lambda branch: branch(x), self.branches))
        return torch.cat(parts, 1)


@case("numbers computed in a thread", child=True)
class InThread(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(torch.tanh(x * 2)))
        thread.start()
        thread.join()
        return self.last(self.first(found[0]).relu())


@case("torch.jit.fork and wait", child=True)
class Forks(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        future = torch.jit.fork(torch.tanh, self.first(x))
        return self.last(torch.jit.wait(future))


@case("a tensor is logged")
class Logs(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        LOG.warning("hidden %s, mean %.3f, %r", y, y.mean(), y.shape)
        return self.last(y.relu())


@case("a tensor is printed, formatted and written as text")
class Prints(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with contextlib.redirect_stdout(io.StringIO()):
            print(y, f"{y.shape} {y.size(0):>4d} {y.mean():.2f} {y!s}", str(x), repr(y))
            pprint.pprint({"y": y, "shape": tuple(y.shape)})
        return self.last(y.relu())


@case("an f-string of the size names a thing", steps)
class FormatsSize(TwoLayers):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {f"{x.size(0)}x{x.size(1)}": self.last(self.first(x).relu())}


@case("the clock is read")
class Clock(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        start = time.perf_counter()
        y = self.first(x).relu()
        self.seconds = time.perf_counter() - start
        return self.last(y)


@case("an environment variable decides")
class Environment(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y.relu() if os.environ.get("NO_SUCH_VARIABLE") is None else y)


@case("the profiler's record_function around a layer")
class Profiled(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.profiler.record_function("first"):
            y = self.first(x)
        return self.last(y.relu())


@case("a warning is raised inside and caught")
class Warns(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.warn("small", stacklevel=1)
        return self.last(self.first(x).relu()) * len(caught)


@case("the garbage collector is run and objects are counted")
class Collects(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        gc.collect(0)
        assert sys.getrefcount(y) > 0
        return self.last(y.relu())


@case("the name of the caller is read from the stack")
class ReadsStack(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        name = sys._getframe().f_code.co_name
        return self.last(self.first(x).relu()) * len(name)


@case("a nullcontext or a real one, by a flag")
class MaybeContext(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad() if not self.training else contextlib.nullcontext():
            y = self.first(x)
        return self.last(y.relu())


@case("an ExitStack of contexts")
class Stack(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.profiler.record_function("all"))
            scale = x.abs().amax()
        return self.last(self.first(x / scale).relu())


@case("tensors as dict keys, and hashes of them", rows)
class Hashes(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        order = {y: 1, x: 2}
        return self.last(y.relu() * order[y]) * order[x]


@case("is, in and id of tensors")
class Identity(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = y.contiguous()
        same = z is y and any(t is y for t in [x, y]) and id(z) == id(y)
        return self.last(z.relu() * (2 if same else 1))


@case("the storage pointer tells whether two tensors share memory")
class SharesMemory(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        part = y[:, :16]
        shared = part.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        return self.last(y.relu()) * (2.0 if shared and part._base is not None else 1.0)


@case("the version counter is read")
class ReadsVersion(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y.add_(x)
        return self.last(self.first(y).relu()) * y._version


@case("a batch norm called by the functional form, with buffers", images)
class FunctionalNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm
        y = F.batch_norm(self.conv(x), n.running_mean, n.running_var, n.weight, n.bias, False, 0.1, n.eps)
        return F.silu(y)


@case("a batch norm that learns in training", images)
class LearnsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x)).relu())


@case("padding, cropping and flipping by the image's size", images)
class Crops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        x = F.pad(x, (0, (-width) % 8, 0, (-height) % 8))
        y = F.interpolate(self.conv(x).relu(), size=(height, width), mode="bilinear", align_corners=False)
        return y[..., 1:-1, 1:-1].flip(-1)


@case("channels last inside, and memory formats", images)
class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.contiguous(memory_format=torch.channels_last)).relu()
        y = y if y.is_contiguous(memory_format=torch.channels_last) else y.contiguous()
        return self.out(y.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))


@case("negative padding and padding by reflection", images)
class OddPadding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(self.conv(F.pad(x, (1, 1, 1, 1), mode="reflect")).relu(), (-1, 0, 0, -1))
