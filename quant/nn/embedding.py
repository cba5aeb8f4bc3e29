"""Embedding tables of 8, 4, 3 and 2 bits, each row or group of a row by its own range (`quant.kernels.tables`)."""

from typing import Any

import torch
from torch import Tensor, nn

from quant.kernels import dispatch, narrow
from quant.kernels.backends.compiled import direct
from quant.kernels.tables import TABLE_BITS, pack_table, unpack_rows
from quant.nn.base import QuantizedWeight, as_float32, check_groups, scripted_as, takes_half
from quant.recipe import QConfig, RecipeError
from quant.runtime.layers.quant_module import REFUSALS, QuantModule, dequantize_weight

_embedding = direct("embedding")


class _Table(QuantModule):
    """The packed table. Buffer: rows uint8 (num_embeddings, row_bytes)."""

    __jit_unused_properties__: list[str] = ["weight"]  # noqa: RUF012

    rows: Tensor

    def __init__(
        self, module: nn.Embedding | nn.EmbeddingBag, qconfig: QConfig, *, tied_to: "_Table | None" = None
    ) -> None:
        super().__init__()
        if qconfig.weight_bits not in TABLE_BITS:
            raise RecipeError(f"embedding tables have 8, 4, 3 or 2 bits, the recipe asks for {qconfig.weight_bits}")
        check_groups(module.embedding_dim, qconfig)
        self.num_embeddings = module.num_embeddings
        self.embedding_dim = module.embedding_dim
        self.padding_idx = module.padding_idx
        self.bits = qconfig.weight_bits
        self.register_buffer(
            "rows",
            pack_table(module.weight, self.bits, qconfig.group_size) if tied_to is None else tied_to.rows,
        )

    @property
    def weight(self) -> Tensor:
        """`dtype` (num_embeddings, embedding_dim): the packed rows dequantised, computed at each read."""
        return unpack_rows(self.rows, self.bits, self.embedding_dim).to(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, bits={self.bits}"


class Embedding(_Table):
    """torch.nn.Embedding over a packed table."""

    @torch.jit.unused
    def planned(self) -> tuple[str, dict[str, Any]]:
        """Its operation in a plan."""
        return "embedding_table", {"rows": self.rows, "bits": self.bits, "dim": self.embedding_dim}

    def _scripted(self, input: Tensor) -> Tensor:
        rows: Tensor = torch.ops.octet.embedding(self.rows, input, self.bits, self.embedding_dim, self.backend)
        return rows.to(self.dtype)

    @scripted_as(_scripted)
    def forward(self, input: Tensor) -> Tensor:
        """int32 or int64 of any shape -> `dtype` (*shape, embedding_dim)."""
        rows: Any = self._buffers["rows"]  # by attribute it costs half a microsecond of three
        try:
            if dispatch.is_direct(self.backend) and self.dtype is torch.float32:
                return _embedding(rows, input, self.bits, self.embedding_dim, "")  # type: ignore[no-any-return]
            return dispatch.current(self.backend).embedding(rows, input, self.bits, self.embedding_dim).to(self.dtype)
        except (*REFUSALS, IndexError) as error:
            raise self._named(error) from error


class EmbeddingBag(_Table):
    """torch.nn.EmbeddingBag over a packed table: modes sum, mean and max, offsets, per-sample weights, padding_idx."""

    def __init__(self, module: nn.EmbeddingBag, qconfig: QConfig, *, tied_to: "_Table | None" = None) -> None:
        super().__init__(module, qconfig, tied_to=tied_to)
        self.mode = module.mode
        self.include_last_offset = module.include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """int32 or int64 (n,) with offsets (bags,), or (bags, length) without -> `dtype` (bags, embedding_dim)."""
        include_last_offset = self.include_last_offset
        if input.dim() not in (1, 2):
            raise ValueError(
                f"layer '{self._where()}': input has shape {list(input.shape)}, expected (n,) or (bags, length)"
            )
        # While tracing, a shape check is a warning and a constant in the graph.
        if per_sample_weights is not None and not torch.jit.is_tracing() and per_sample_weights.shape != input.shape:
            raise ValueError(
                f"layer '{self._where()}': per_sample_weights have shape {list(per_sample_weights.shape)}, expected "
                f"that of the input, {list(input.shape)}"
            )
        if per_sample_weights is not None and self.dtype != torch.float32:
            per_sample_weights = as_float32(per_sample_weights)
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError(f"layer '{self._where()}': offsets go with a 1-D input, got {list(input.shape)}")
            # One bag per row: the offsets are those of its flattened self.
            offsets = torch.arange(input.size(0) + 1, device=input.device) * input.size(1)
            include_last_offset = True
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights.reshape(-1)
            input = input.reshape(-1)
        if offsets is None:
            raise ValueError(f"layer '{self._where()}': a 1-D input needs offsets")
        padding_idx = -1 if self.padding_idx is None else self.padding_idx
        if torch.jit.is_scripting():
            return torch.ops.octet.embedding_bag(  # type: ignore[no-any-return]
                self.rows,
                input,
                offsets,
                per_sample_weights,
                self.bits,
                self.embedding_dim,
                self.mode,
                include_last_offset,
                padding_idx,
                self.backend,
            ).to(self.dtype)
        return self._dispatch(input, offsets, per_sample_weights, include_last_offset, padding_idx).to(self.dtype)

    @torch.jit.unused
    def _dispatch(
        self, input: Tensor, offsets: Tensor, weights: Tensor | None, include_last_offset: bool, padding_idx: int
    ) -> Tensor:
        if takes_half(weights):
            weights = as_float32(weights)  # type: ignore[arg-type]
        try:
            return dispatch.current(self.backend).embedding_bag(
                self.rows,
                input,
                offsets,
                weights,
                self.bits,
                self.embedding_dim,
                self.mode,
                include_last_offset,
                padding_idx,
            )
        except (*REFUSALS, IndexError) as error:
            raise self._named(error) from error


class TiedEmbedding(QuantModule):
    """torch.nn.Embedding that reads the int8 weight of the Linear it is tied to, so that one tensor serves both.

    Buffers: q_weight int8 (num_embeddings, embedding_dim) and scale float32 (num_embeddings,), or those of a narrow
    weight, the Linear's own.
    """

    q_weight: Tensor
    scale: Tensor
    columns: Tensor | None

    def __init__(self, module: nn.Embedding, weight: QuantizedWeight) -> None:
        super().__init__()
        self.num_embeddings = module.num_embeddings
        self.embedding_dim = module.embedding_dim
        self.padding_idx = module.padding_idx
        self.register_buffer("q_weight", weight.q_weight)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("columns", weight.columns)

    @property
    def weight(self) -> Tensor:
        """`dtype` (num_embeddings, embedding_dim): the int8 weight dequantised, computed at each read."""
        return dequantize_weight(self.q_weight, self.scale, self.columns).to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """int32 or int64 of any shape -> `dtype` (*shape, embedding_dim)."""
        if input.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"layer '{self._where()}': indices are {input.dtype}, expected int32 or int64")
        if torch.jit.is_scripting():
            return self._look_up(input)
        return self._dispatch(input)

    @torch.jit.unused
    def _dispatch(self, input: Tensor) -> Tensor:
        try:
            return self._look_up(input)
        except IndexError as error:
            raise self._named(error) from error

    def _look_up(self, input: Tensor) -> Tensor:
        if self.q_weight.dtype == torch.uint8:
            return self._narrow_rows(input)
        q = nn.functional.embedding(input, self.q_weight)
        values = q.to(torch.float32) * nn.functional.embedding(input, self.scale.unsqueeze(1))
        columns = self.columns
        return (values if columns is None else values * columns).to(self.dtype)

    def _narrow_rows(self, input: Tensor) -> Tensor:
        indices = input.reshape(-1).to(torch.int64)
        if indices.numel() and not torch.compiler.is_compiling():
            low, high = int(indices.min()), int(indices.max())
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(f"index {low if low < 0 else high} is outside the table of {self.num_embeddings} rows")
        values = narrow.dequantize_rows(self.q_weight, self.scale, indices)
        columns = self.columns
        values = values if columns is None else values * columns
        return values.unflatten(0, input.shape).to(self.dtype) if input.dim() else values[0].to(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, tied"
