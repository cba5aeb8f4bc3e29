"""Values that leave torch by doors that few models use: files, pipes, databases, memory, Python's arithmetic."""

from __future__ import annotations

import array
import bisect
import csv
import ctypes
import fractions
import hashlib
import heapq
import io
import mmap
import os
import sqlite3
import statistics
import struct
import tempfile
import zlib
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..cases import WIDTH, TwoLayers, case, signed_rows, uniform


def through_bytes(y: Tensor, data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(y.shape)


@case("a memoryview of an activation, cast and copied")
class MemoryView(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).detach()
        view = memoryview(y.numpy()).cast("B")
        return self.last(through_bytes(y, bytes(view)).relu())


@case("ctypes writes into an activation's memory")
class CtypesWrites(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).detach().contiguous()
        ctypes.memset(y.data_ptr(), 0, y.element_size() * (y.numel() // 4))
        return self.last(y.relu())


@case("an array of Python's holds the values of an activation")
class PythonArray(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).detach()
        held = array.array("f", y.flatten().tolist())
        return self.last(torch.tensor(held).reshape(y.shape).relu())


@case("values packed by struct and compressed by zlib")
class Compressed(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).detach()
        data = zlib.compress(struct.pack(f"{y.numel()}f", *y.flatten().tolist()))
        return self.last(through_bytes(y, zlib.decompress(data)).relu())


@case("a pipe of the system takes the bytes of the mean")
class Pipe(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        read, write = os.pipe()
        os.write(write, struct.pack("f", float(x.mean())))
        (mean,) = struct.unpack("f", os.read(read, 4))
        os.close(read)
        os.close(write)
        return self.last((y * (1 + mean)).relu())


@case("an activation goes through a file of numpy's")
class NumpyFile(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        buffer = io.BytesIO()
        np.save(buffer, self.first(x).detach().numpy())
        buffer.seek(0)
        return self.last(torch.from_numpy(np.load(buffer)).relu())


@case("an activation is written to a memory map and read back")
class MemoryMap(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).detach()
        with tempfile.TemporaryFile() as file, mmap.mmap(-1, y.numel() * 4) as held:
            file.write(y.numpy().tobytes())
            file.seek(0)
            held.write(file.read())
            return self.last(through_bytes(y, held[:]).relu())


@case("the largest values are chosen by a query of a database")
class Database(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        base = sqlite3.connect(":memory:")
        base.execute("create table t (place integer, value real)")
        base.executemany("insert into t values (?, ?)", enumerate(x.mean(0).tolist()))
        places = [place for (place,) in base.execute("select place from t order by value desc")]
        base.close()
        return self.last(self.first(x[:, places]).relu())


@case("rows are written as CSV and read back")
class Csv(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        text = io.StringIO()
        csv.writer(text).writerows(x.tolist())
        text.seek(0)
        return self.last(self.first(torch.tensor([[*map(float, row)] for row in csv.reader(text)])).relu())


@case("a digest of the input's bytes chooses the gain")
class Digest(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        digest = hashlib.sha256(x.detach().numpy().tobytes()).digest()
        return self.last(self.first(x).relu()) * (1 + digest[0] % 5)


@case("fractions and statistics of a row scale the output")
class Fractions(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        row = x.detach()[0].tolist()
        share = fractions.Fraction(statistics.median(row)).limit_denominator(50)
        return self.last(self.first(x).relu()) * (1 + float(share) + statistics.pstdev(row))


@case("heapq and bisect choose columns by values")
class Heap(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        means = x.detach().mean(0).tolist()
        large = heapq.nlargest(8, range(WIDTH), key=means.__getitem__)
        place = bisect.bisect(sorted(means), 0.0)
        y = x.clone()
        y[:, large] *= 2
        return self.last(self.first(y).relu()) * (1 + place / 16)


@case("an integer tensor is an index, a repetition and a range of Python's")
class AsIndex(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        place = x.mean(0).argmax()
        count = sum(1 for _ in range(int(place) % 3 + 1))
        picked = [x[:, i] for i in range(WIDTH)][place]
        return self.last((self.first(x) + picked[:, None] * count).relu())


@case("apply_ and map_ with functions of Python's")
class Applied(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).detach().clone().apply_(lambda value: max(value, 0.0))
        z = y.clone().map_(y, lambda a, b: a * 0.5 + b)
        return self.last(z)


@case("the bits of an activation are read as integers")
class Bits(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu() + 0.5
        guess = (0x5F3759DF - (y.detach().contiguous().view(torch.int32) >> 1)).view(torch.float32)
        return self.last(y * guess)


@case("mantissa and exponent of an activation")
class Mantissa(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(self.first(x))
        return self.last(torch.ldexp(mantissa, exponent).relu())


@case("an activation in the layout of oneDNN")
class OneDnn(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.first(x).to_mkldnn().relu().to_dense()
        return self.last(y)


@case("two activations swapped by torch.utils.swap_tensors")
class Swapped(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y, z = self.first(x).detach().clone(), self.first(-x).detach().clone()
            torch.utils.swap_tensors(y, z)
        return self.last(y.relu() + z.relu() * 0.25)


@case("an activation in shared memory")
class SharedMemory(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).detach().share_memory_().relu())


@case("returns a read-only mapping and bytes", signed_rows, integers="mostly")
class ReadOnly(TwoLayers):
    def forward(self, x: Tensor) -> Any:
        y = self.last(self.first(x).relu())
        return MappingProxyType({"y": y, "sign": bytes([int(x.mean() > 0)])})


@case("returns a future that is done", read=lambda output: output.result())
class DoneFuture(TwoLayers):
    def forward(self, x: Tensor) -> Any:
        done: Future[Tensor] = Future()
        done.set_result(self.last(self.first(x).relu()))
        return done


@case("the output has an attribute that the caller reads", read=lambda output: (output, getattr(output, "scale", None)))
class MarkedOutput(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).relu())
        y.scale = x.abs().amax()  # type: ignore[attr-defined]
        return y


@case("an array of numpy's as the input", lambda b, n, i: (uniform(b, WIDTH).numpy(),))
class NumpyInput(TwoLayers):
    def forward(self, x: Any) -> Tensor:
        return self.last(self.first(torch.from_numpy(x)).relu())


@case("lists of numbers as the input", lambda b, n, i: (uniform(b, WIDTH).tolist(),))
class ListInput(TwoLayers):
    def forward(self, x: Any) -> Tensor:
        return self.last(self.first(torch.tensor(x)).relu())


@case("a text as the input", lambda b, n, i: ("".join(chr(97 + (i * 7 + j * 3) % 26) for j in range(b)),))
class TextInput(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(26, WIDTH)

    def forward(self, text: str) -> Tensor:
        return self.last(self.first(self.table(torch.tensor([ord(one) - 97 for one in text])).tanh()).relu())
