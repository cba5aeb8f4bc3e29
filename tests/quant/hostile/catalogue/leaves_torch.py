"""Forwards in which values leave torch and come back: numpy, scipy, Python numbers, storage, DLPack, copies."""

from __future__ import annotations

import copy
import ctypes
import io
import json
import math
import pickle
import struct

import numpy as np
import torch
from scipy import special
from torch import Tensor

from ..cases import TwoLayers, case


@case("numpy's tanh between two layers")
class NumpyTanh(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.from_numpy(np.tanh(self.first(x).detach().numpy())))


@case("a numpy ufunc called on a tensor")
class NumpyUfunc(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.as_tensor(np.tanh(self.first(x).detach())))


@case("np.asarray of a layer's output")
class NumpyAsarray(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tensor(np.asarray(self.first(x).detach()) * 2))


@case("np.array with a dtype, and back through float64")
class NumpyFloat64(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = np.array(self.first(x).detach(), dtype=np.float64)
        return self.last(torch.from_numpy(y / (1 + np.abs(y))).float())


@case("a scipy function on a layer's output")
class ScipyErf(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.from_numpy(special.erf(self.first(x).detach().numpy())))


@case("numpy writes into a layer's output in place")
class NumpyWrites(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).detach()
        np.maximum(y.numpy(), 0.0, out=y.numpy())
        return self.last(y)


@case("numpy sorts each row of the input in place")
class NumpySortsInput(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        x.numpy().sort(axis=1)
        return self.last(self.first(x).relu())


@case("numpy indices choose columns")
class NumpyIndices(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        order = np.argsort(x.detach().numpy().sum(0))
        return self.last(self.first(x[:, torch.from_numpy(order.copy())]))


@case("tolist and back")
class Tolist(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tensor([[max(v, 0.0) for v in row] for row in self.first(x).tolist()]))


@case("item of the mean scales the output")
class Item(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) * (1.0 + x.abs().mean().item())


@case("float() of a maximum, with math.log of it")
class MathOfMaximum(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y) * math.exp(-float(x.max()))


@case("int() of a sum picks a shift of the columns")
class IntPicksShift(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.roll(int(x.sum().abs() * 100) % 16, 1)))


@case("formatting a value and reading it back")
class FormatsValue(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) + float(f"{x.mean():.4f}")


@case("json of a row and back")
class Json(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(torch.tensor(json.loads(json.dumps(x.tolist())))))


@case("the bytes of an untyped storage")
class StorageBytes(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).detach().contiguous()
        raw = bytes(y.untyped_storage())[: y.numel() * 4]
        return self.last(torch.tensor(struct.unpack(f"{y.numel()}f", raw)).view_as(y).relu())


@case("a tensor set onto another's storage")
class SetStorage(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).detach().contiguous()
        other = torch.empty(0).set_(y.untyped_storage(), 0, y.shape, y.stride())
        return self.last(other.relu())


@case("memory read at data_ptr")
class DataPointer(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).detach().contiguous()
        flat = (ctypes.c_float * y.numel()).from_address(y.data_ptr())
        return self.last(torch.tensor(list(flat)).view_as(y).tanh())


@case("torch.frombuffer over numpy's memory")
class Frombuffer(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).detach().contiguous()
        return self.last(torch.frombuffer(bytearray(y.numpy().tobytes()), dtype=torch.float32).view_as(y))


@case("DLPack out to torch and back")
class Dlpack(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.from_dlpack(self.first(x).detach()).relu())


@case("DLPack out to numpy and back")
class DlpackNumpy(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.from_numpy(np.from_dlpack(self.first(x).detach()) * 1.5))


@case("the capsule of torch.utils.dlpack", child=True)
class DlpackCapsule(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        from torch.utils import dlpack

        return self.last(dlpack.from_dlpack(dlpack.to_dlpack(self.first(x).detach())).relu())


@case("deepcopy of an activation")
class Deepcopy(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(copy.deepcopy(self.first(x).detach()).relu())


@case("copy.copy of an activation, written in place")
class ShallowCopy(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = copy.copy(self.first(x))
        return self.last(y.mul(2.0).tanh())


@case("pickle and back")
class Pickled(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(pickle.loads(pickle.dumps(self.first(x).detach())).relu())


@case("torch.save into memory and torch.load")
class SavedAndLoaded(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        file = io.BytesIO()
        torch.save(self.first(x).detach(), file)
        file.seek(0)
        return self.last(torch.load(file).relu())


@case("one value at a time through Python's float")
class ValueByValue(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        gains = [1.0 / (1.0 + abs(float(v))) for v in x[:, 0]]
        return self.last(self.first(x)) * torch.tensor(gains)[:, None]


@case("iterating over the rows of a tensor")
class Rows(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.last(self.first(row).relu()) for row in x])


@case("torch.tensor of a list of tensors")
class TensorOfTensors(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        tops = [row.max() for row in x.detach()]
        return self.last(self.first(x)) - torch.tensor(tops)[:, None]
