"""Contenders that compile or export a whole model, ready to be timed: torch.compile, torch.ao's FX mode, torchao's PT2E
with Inductor, ONNX Runtime and OpenVINO, float and int8.

Each has the settings that its own documentation gives for a CPU. All int8 ones are calibrated on the same batches.
`peers.py` has the contenders that swap modules, `static_peers.py` quantises for ONNX Runtime and OpenVINO.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import static_peers
import torch
from peers import Maker, Missing, Peer, ao_engine, first, module_peer
from torch import Tensor, nn

import quant

Batches = Sequence[Tensor]


def octet_static(batches: Batches, name: str = "octet", recipe: quant.Recipe | None = None) -> Maker:
    """Ours: prepare, calibrate, convert, with the defaults or a recipe."""

    def make(model: nn.Module, x: Tensor) -> Peer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what stays float, and that there are few batches, is in the report
            made = quant.quantize_static(model, batches, recipe=recipe, progress=False)
        return module_peer(name, made, x, torch.inference_mode)

    return make


def compiled(model: nn.Module, x: Tensor) -> Peer:
    """torch.compile of the float model, weights laid out beforehand (freezing)."""
    call = _inductor(copy.deepcopy(model), x)
    return Peer("compiled", lambda: call(x), lambda x: first(call(x)))


def _inductor(model: nn.Module, x: Tensor) -> Callable[[Tensor], Any]:
    from torch._inductor import config

    torch._dynamo.reset()
    with config.patch(freezing=True), static_peers.quiet():
        call = torch.compile(model, dynamic=False)
        call(x)
    return call


def ao_fx(batches: Batches) -> Maker:
    """torch.ao's FX graph mode with the qconfigs of its x86 engine, which narrow activations to 7 bits."""

    def make(model: nn.Module, x: Tensor) -> Peer:
        with warnings.catch_warnings(), ao_engine("x86"):
            warnings.simplefilter("ignore")  # it is deprecated: that is why we are here
            from torch.ao.quantization import get_default_qconfig_mapping
            from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

            prepared = prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("x86"), (x,))
            for batch in batches:
                prepared(batch)
            made = convert_fx(prepared)
        return module_peer("ao fx", made, x, lambda: ao_engine("x86"))

    return make


def pt2e(batches: Batches) -> Maker:
    """torchao's export quantisation for x86, compiled by Inductor."""

    def make(model: nn.Module, x: Tensor) -> Peer:
        try:
            with static_peers.quiet():
                from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86
                from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
                from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86
        except ImportError as error:
            raise Missing(f"{error.name} is not installed") from error
        with static_peers.quiet():
            quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
            prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
            for batch in batches:
                prepared(batch)
            made = convert_pt2e(prepared)
            call = _inductor(lower_pt2e_quantized_to_x86(made, (x,)), x)
        return Peer("pt2e", lambda: call(x), lambda x: first(call(x)))

    return make


def onnxruntime(batches: Batches, name: str, reduce_range: bool | None) -> Maker:
    """ONNX Runtime: float for None, else static QDQ."""

    def make(model: nn.Module, x: Tensor) -> Peer:
        session = static_peers.onnxruntime_session(model, batches or [x], reduce_range)
        feed = {"x": x.numpy()}

        def predict(x: Tensor) -> Tensor:
            return torch.from_numpy(session.run(["y"], {"x": x.numpy()})[0])

        return Peer(name, lambda: session.run(["y"], feed), predict)

    return make


def openvino(batches: Batches, name: str, quantized: bool) -> Maker:
    """OpenVINO by one request whose tensors are not copied: float, or quantised by NNCF."""

    def make(model: nn.Module, x: Tensor) -> Peer:
        request = static_peers.openvino_model(model, batches or [x], quantized=quantized).create_infer_request()
        given = x.numpy()

        def call(values: np.ndarray = given) -> Any:
            return request.infer([values], share_inputs=True, share_outputs=True)

        return Peer(name, call, lambda x: torch.from_numpy(np.array(call(x.numpy())[0])))

    return make


def foreign(maker: Maker) -> Maker:
    """The maker, but whatever its library raises counts as absence, with what it said: one peer must not end a run.

    A peer gets inputs of its own: what torchao lowers for x86 adds its residual sums into them.
    """

    @functools.wraps(maker)
    def make(model: nn.Module, x: Tensor) -> Peer:
        try:
            peer = maker(model, x.clone())
            peer.predict(x.clone())
            return dataclasses.replace(peer, predict=lambda x: peer.predict(x.clone()))
        except Missing:
            raise
        except Exception as error:
            said = " ".join(str(error).split())[:200]
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise Missing(f"it raises {type(error).__name__} in {place.name}: {said}".rstrip(" :")) from error

    return make
