"""Contenders with embedding tables of 8 and 4 bits per value: ours, torch.ao, and fbgemm-gpu's table operators.

All take indices (bags, length) and give the sums of the rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import static_peers
import torch
from peers import Maker, Missing, Peer, module_peer
from torch import Tensor, nn

import quant


def octet(bits: int) -> Maker:
    """`quant.quantize_dynamic`."""

    def make(model: nn.Module, x: Tensor) -> Peer:
        recipe = quant.Recipe({nn.EmbeddingBag: quant.QConfig(weight_bits=bits)})
        return module_peer("octet", quant.quantize_dynamic(model, recipe), x)

    return make


def torch_ao(bits: int) -> Maker:
    """torch.ao's EmbeddingBag."""

    def make(model: nn.Module, x: Tensor) -> Peer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated: that is why we are here
            from torch.ao.quantization import (
                convert,
                float_qparams_weight_only_qconfig,
                float_qparams_weight_only_qconfig_4bit,
                prepare,
            )

            wrapped = nn.Sequential(model)
            wrapped.qconfig = float_qparams_weight_only_qconfig if bits == 8 else float_qparams_weight_only_qconfig_4bit
            made = convert(prepare(wrapped))
        offsets = torch.arange(len(x)) * x.shape[1]
        return _by_offsets("ao", lambda indices: made[0](indices, offsets), x)

    return make


def fbgemm_gpu(bits: int) -> Maker:
    """fbgemm-gpu's batched tables for inference, with its own quantisation of the rows."""

    def make(model: nn.Module, x: Tensor) -> Peer:
        try:
            from fbgemm_gpu.split_embedding_configs import SparseType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
            from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
                IntNBitTableBatchedEmbeddingBagsCodegen as Tables,
            )
            from fbgemm_gpu.tbe.utils import quantize_embs
        except ImportError as error:
            raise Missing(f"{error.name} is not installed") from error
        kind = SparseType.INT8 if bits == 8 else SparseType.INT4
        rows, width = model.weight.shape
        made = Tables([("", rows, width, kind, EmbeddingLocation.HOST)], device="cpu", output_dtype=SparseType.FP32)
        made.initialize_weights()
        with static_peers.quiet():
            made.assign_embedding_weights([quantize_embs(model.weight, kind)])
        offsets = torch.arange(len(x) + 1, dtype=torch.int32) * x.shape[1]
        return _by_offsets("fbgemm-gpu", lambda indices: made(indices.to(torch.int32), offsets), x)

    return make


def _by_offsets(name: str, call: Callable[[Tensor], Tensor], x: Tensor) -> Peer:
    flat = x.reshape(-1)
    return Peer(name, lambda: call(flat), lambda x: call(x.reshape(-1)))
