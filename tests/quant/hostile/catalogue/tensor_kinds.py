"""Tensors of other kinds inside: nested, sparse, complex, subclasses, meta, half, double, integers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cases import WIDTH, TwoLayers, case, rows, steps, uniform


class Tagged(Tensor):
    """A subclass with an attribute; operations keep the class, as torch's do."""

    tag: str = "none"


class Scaled(Tensor):
    """A subclass whose __torch_function__ doubles what is added to it."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(function, kinds, args, kwargs or {})
        return out * 2 if getattr(function, "__name__", "") == "add" else out


class Wrapper(Tensor):
    """A wrapper subclass: holds another tensor, and unwraps it in __torch_dispatch__."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = torch.utils._pytree.tree_map_only(cls, lambda w: w.inner, (args, kwargs or {}))
        return function(*unwrapped[0], **unwrapped[1])


@case("a nested tensor made in the forward", child=True)
class Nested(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        nested = torch.nested.nested_tensor([row[: 8 + i % 3] for i, row in enumerate(y)])
        return self.last(torch.nested.to_padded_tensor(nested, 0.0, (len(x), 32)))


@case("a jagged nested tensor through a layer", child=True)
class Jagged(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)
        return self.last(self.first(nested).values().relu())


def nested_rows(batch: int, length: int, index: int) -> Any:
    parts = [uniform(2 + index % 2, WIDTH), uniform(3, WIDTH)]
    return (torch.nested.nested_tensor(parts, layout=torch.jagged),)


@case("a nested tensor as the input", nested_rows, child=True, refusal="nested inputs have no range", other=None)
class NestedInput(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.values()).relu())


@case("a sparse matrix of edges times activations")
class Sparse(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        edges = torch.stack([torch.arange(n), torch.arange(n).roll(1)])
        graph = torch.sparse_coo_tensor(edges, torch.full((n,), 0.5), (n, n))
        return self.last(torch.sparse.mm(graph, self.first(x)).relu())


@case("to_sparse and to_dense of an activation")
class ToSparse(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu().to_sparse().to_dense())


@case("a CSR matrix from the input's signs")
class Csr(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        matrix = (x.detach() > 0).float().to_sparse_csr()
        return self.last(self.first(matrix @ torch.eye(WIDTH)).relu())


@case("a sparse tensor as an output")
class SparseOutput(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.first(x).relu())
        return (y.detach() * (x > 0)).to_sparse()


@case("complex numbers between two layers")
class Complex(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.view_as_complex(self.first(x).view(-1, 16, 2).contiguous())
        return self.last(torch.view_as_real(y * (0.6 + 0.8j)).flatten(1))


@case("rotary embedding by complex numbers", steps)
class Rotary(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(x.size(1)), 1.0 / torch.arange(1, 17))
        turn = torch.polar(torch.ones_like(angle), angle)
        y = torch.view_as_complex(self.first(x).unflatten(-1, (16, 2)).contiguous())
        return self.last(torch.view_as_real(y * turn).flatten(-2))


@case("a complex output, its magnitude and its angle")
class ComplexOutput(TwoLayers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.last(self.first(x).relu())
        z = torch.complex(y, x + 3)
        return z, z.abs(), z.angle()


@case("a tensor subclass made in the forward")
class SubclassInside(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).as_subclass(Tagged)
        return self.last(y.relu().as_subclass(Tensor))


@case("a tensor subclass whose addition doubles")
class SubclassAdds(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).as_subclass(Scaled)
        return self.last((y + 1.0).as_subclass(Tensor).relu())


@case("a tensor subclass as the input", lambda b, n, i: (uniform(b, WIDTH).as_subclass(Tagged),))
class SubclassInput(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


@case("a wrapper subclass with __torch_dispatch__", child=True)
class WrapperInside(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = Wrapper(self.first(x).detach())
        return self.last((y * 2).relu())


@case("a meta tensor tells an output's shape")
class Meta(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        shape = torch.empty(1, 1, 8, 8, device="meta").unfold(2, 4, 2).shape
        return self.last(self.first(x).relu()) * float(shape[2])


@case("a layer in bfloat16 between float layers", floor=15.0)
class Bfloat16Layer(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(32, 32).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).bfloat16()).float().relu())


@case("a layer in double between float layers")
class DoubleLayer(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(32, 32).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).double()).float().relu())


@case("a softmax in double and back")
class DoubleSoftmax(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).double().softmax(-1).type_as(x) * 8)


@case("an output in half precision")
class HalfOutput(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).half()


@case("the whole model and its inputs in bfloat16", lambda b, n, i: (uniform(b, WIDTH).bfloat16(),), floor=15.0)
def bfloat16_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)).bfloat16()


@case(
    "the whole model and its inputs in double",
    lambda b, n, i: (uniform(b, WIDTH).double(),),
    refusal="weights in float64 are refused by name",
)
def double_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)).double()


@case("images as uint8, turned to float inside", lambda b, n, i: (torch.randint(256, (b, WIDTH), dtype=torch.uint8),))
class BytesInput(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.float() / 127.5 - 1).relu())


@case("booleans as the input", lambda b, n, i: (torch.rand(b, WIDTH) > 0.5,))
class BoolInput(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.to(self.first.weight.dtype)).relu())


@case("integers divided and taken modulo inside", lambda b, n, i: (torch.randint(64, (b, WIDTH)),))
class IntegerArithmetic(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first((x // 8 - x % 8).float() / 8).relu())


@case("bits packed and unpacked", lambda b, n, i: (torch.randint(65536, (b,)),))
class Bits(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        bits = (x[:, None] >> torch.arange(WIDTH)) & 1
        return self.last(self.first(bits.float() * 2 - 1).relu())


@case("fake quantisation written by hand")
class HandQuantised(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        q = (x * 64).round().clamp(-128, 127).to(torch.int8)
        return self.last(self.first(q.float() / 64).relu())


@case("a table of embeddings by integers", lambda b, n, i: (torch.randint(50, (b, n)),))
class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(F.embedding(ids, self.table.weight).sum(1).tanh() + self.table(ids).mean(1))


@case("finfo, promote_types and result_type decide", rows)
class AsksTypes(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        low = torch.finfo(y.dtype).min
        y = y.masked_fill(y < -9.0, low) if torch.result_type(y, 1.0) == torch.float32 else y.double()
        return self.last(y.relu().to(torch.promote_types(torch.float32, torch.float16)))


@case("strings and numbers beside tensors in the input", lambda b, n, i: (uniform(b, WIDTH), ["up", "down"][i % 2]))
class Direction(TwoLayers):
    def forward(self, x: Tensor, direction: str) -> Tensor:
        y = self.first(x)
        return self.last(y.relu() if direction == "up" else -y.relu())
