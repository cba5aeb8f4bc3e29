"""The int16 saturation guard, on any CPU: processes whose libraries are held to instructions that need it.

AVX2's vpmaddubsw adds two u8 * s8 products in int16. A CPU with VNNI never uses it by itself, so QUANT_ISA (our kernels
and FBGEMM) and ONEDNN_MAX_CPU_ISA (oneDNN) lower what a fresh process may use.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quant.kernels import build, dispatch

ROUTES = {
    "portable": {"portable"},
    "amx-emulated": {"emulated tiles"},
    "avx2": {"pairwise", "signed", "wide"},
    "avxvnni": {"vnni"},
    "avx512vnni": {"vnni"},
    "amx": {"tiles"},
    "neon": {"wide"},
    "neondot": {"dot"},
    "neoni8mm": {"mixed dot"},
}
"""How the native kernels form products, by instruction set."""
X86 = build.host_arch() == "x86_64"
ARM = build.host_arch() == "aarch64"
NAMES = [one.name for one in build.instruction_sets(build.host_arch())]
"""What QUANT_ISA may be here."""

x86 = pytest.mark.skipif(not X86, reason="int16 pairs are an x86 instruction")

# Prints, per backend, its route for weights that cannot overflow a pair, for weights that can, and for those with a
# -128, and the largest error of the sums of all, for the worst activations.
MEASURE = """
import itertools, json, sys, torch
from quant.kernels import build, dispatch

SIZES = {"proven": 64, "unproven": 127, "lowest": 128}
isa = "" if dispatch.ops.extension_problem() else torch.ops.octet_native.isa()

def worst(k):
    column = torch.arange(k)
    signs = torch.randint(0, 2, (40, k), generator=torch.Generator().manual_seed(0)) * 2 - 1
    fixed = torch.stack([torch.ones(k), 1 - 2 * (column % 2), 1 - 2 * (column // 2 % 2), 1 - 2 * (column // 4 % 2)])
    return torch.cat([fixed, -fixed, signs])

def error(backend, x, weight):
    expected = (x.double() @ weight.double().t()).int()
    return int((backend.linear_u8s8_s32(x, 0, weight, None) - expected).abs().max())

result = {"isa": isa}
for name, reason in dispatch.available().items():
    if reason:
        result[name] = reason
        continue
    backend, errors, routes = dispatch.find(name), [], {}
    for k, rows, size in itertools.product((2, 3, 64, 65, 514, 1030), (1, 2, 5, 7, 64), SIZES):
        weight = (worst(k) * SIZES[size]).clamp(max=127).char()
        x = torch.full((rows, k), 255, dtype=torch.uint8)
        x[2::3] = 0
        x[1::2] = (torch.rand(k, generator=torch.Generator().manual_seed(1)) < 0.5) * 255
        errors.append(error(backend, x, weight))
        routes[size] = backend.route(weight)
    result[name] = {"error": max(errors), **routes}
print(json.dumps(result))
"""


def measured(run_python: Callable[..., str], **environment: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run_python(MEASURE, **environment))
    for name, found in result.items():
        if isinstance(found, dict):
            assert found["error"] == 0, f"{name} lost products: {found}"
    return result


@x86
def test_avx2_is_exact_by_the_route_that_each_weight_allows(run_python: Callable[..., str], extension: None) -> None:
    result = measured(run_python, QUANT_ISA="avx2")
    if result["isa"] != "avx2":
        pytest.skip(f"this CPU has no AVX2: QUANT_ISA=avx2 gives {result['isa']}")
    assert result["native"] == {"error": 0, "proven": "pairwise", "unproven": "signed", "lowest": "wide"}
    assert result["fbgemm"] == {"error": 0, "proven": "pairwise", "unproven": "split", "lowest": "split"}


@x86
def test_avxvnni_is_exact_or_gives_way_to_avx2(run_python: Callable[..., str], extension: None) -> None:
    result = measured(run_python, QUANT_ISA="avxvnni")
    if result["isa"] == "avxvnni":
        assert result["native"] == {"error": 0, "proven": "vnni", "unproven": "vnni", "lowest": "vnni"}
    else:
        assert result["isa"] in ("avx2", "portable")


@x86
def test_avx512vnni_is_exact_where_the_cpu_has_it(run_python: Callable[..., str], extension: None) -> None:
    result = measured(run_python, QUANT_ISA="avx512vnni")
    if result["isa"] == "avx512vnni":
        assert result["native"] == {"error": 0, "proven": "vnni", "unproven": "vnni", "lowest": "vnni"}


@pytest.mark.skipif(not ARM, reason="NEON is ARM's")
@pytest.mark.parametrize("asked", ["neon", "neondot", "neoni8mm"])
def test_neon_is_exact_or_gives_way_to_a_lesser_one(
    run_python: Callable[..., str], extension: None, asked: str
) -> None:
    result = measured(run_python, QUANT_ISA=asked)
    assert NAMES.index("neon") <= NAMES.index(result["isa"]) <= NAMES.index(asked)


def test_the_route_is_that_of_the_instruction_set(extension: None) -> None:
    used, asked = torch.ops.octet_native.isa(), os.environ.get("QUANT_ISA") or NAMES[-1]
    assert NAMES.index(used) <= NAMES.index(asked)
    # qemu's "max" has everything, so there the detection itself is tested.
    assert used == asked or os.environ.get("QEMU_CPU") != "max"
    for value in (1, 127):
        weight = torch.full((3, 8), value, dtype=torch.int8)
        assert dispatch.find("native").route(weight) in ROUTES[used]


def test_portable_is_exact_and_leaves_fbgemm_out(run_python: Callable[..., str], extension: None) -> None:
    result = measured(run_python, QUANT_ISA="portable")
    assert result["native"] == {"error": 0, "proven": "portable", "unproven": "portable", "lowest": "portable"}
    assert "AVX2" in result["fbgemm"] or "x86-64 only" in result["fbgemm"]


@x86
@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_onednn_is_exact_without_vnni(run_python: Callable[..., str], isa: str) -> None:
    result = measured(run_python, ONEDNN_MAX_CPU_ISA=isa)
    if isinstance(result["onednn"], str):
        pytest.skip(result["onednn"])
    assert result["onednn"] == {"error": 0, "proven": "pairwise", "unproven": "split", "lowest": "split"}


@x86
def test_onednn_does_saturate_without_the_guard(run_python: Callable[..., str]) -> None:
    # What the guard is for. Were this to fail, oneDNN has changed and the split costs time for nothing.
    code = """
from quant.kernels.backends import onednn
assert not onednn._probe()
print(onednn.saturates(), onednn._worst_case(), 255 * 127 * 64)
"""
    saturates, sums, exact = run_python(code, ONEDNN_MAX_CPU_ISA="AVX2").split()
    assert saturates == "True"
    assert float(sums) < float(exact)


def test_an_unknown_isa_is_refused(run_python: Callable[..., str], extension: None) -> None:
    code = """
import torch, quant
try:
    quant.quantize_dynamic(torch.nn.Linear(4, 4))
except ValueError as error:
    print(error)
"""
    printed = run_python(code, QUANT_ISA="sse9")
    expected = " or ".join(filter(None, [", ".join(NAMES[:-1]), NAMES[-1]]))
    assert printed.strip() == f"QUANT_ISA is 'sse9', expected {expected}"


# Everything that must agree whatever the instructions: the bits of rows, gates and tables.
BITS = """
import hashlib, torch
from quant.kernels import dispatch, quantize, quantize_weight, dequantize, requantize, tables

generator = torch.Generator().manual_seed(0)
randn = lambda *shape: torch.randn(*shape, generator=generator)
digest = hashlib.sha256()
def add(*tensors):
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())

native = dispatch.find("native")
x, (weight, scale), bias = randn(9, 77), quantize_weight(randn(37, 77)), randn(37)
columns = torch.logspace(-2, 2, 77)
for bits in (8, 16):
    for per_row in (True, False):
        add(native.linear_dynamic(x, weight, scale, bias, None, bits, per_row, True))
        add(native.linear_dynamic(x, weight, scale, None, columns, bits, per_row, False))
for mode, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
    (ih, s_ih), (hh, s_hh) = quantize_weight(randn(gates * 33, 77)), quantize_weight(randn(gates * 33, 33) / 6)
    c = randn(3, 33) if mode == "lstm" else None
    add(*native.rnn_layer(randn(9, 3, 77), None, randn(3, 33), c, ih, s_ih, None, 8, True, hh, s_hh,
                          randn(gates * 33), randn(gates * 33), None, None, mode, False))
q = quantize(randn(1000) * 50, 0.4, 100)
add(q, dequantize(q, 0.4, 100), requantize((randn(1000) * 1e5).int(), torch.tensor(1e-3), 3))
for bits in (8, 4):
    add(native.embedding(tables.pack_table(randn(30, 33), bits), torch.arange(30), bits, 33))
print(digest.hexdigest())
"""


def test_every_instruction_set_gives_the_same_bits(run_python: Callable[..., str], extension: None) -> None:
    found = {isa: run_python(BITS, QUANT_ISA=isa) for isa in NAMES}
    assert len(set(found.values())) == 1, found
