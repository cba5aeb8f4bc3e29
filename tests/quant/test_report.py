"""The report: each module once, honest bytes, readable, JSON, and kept by copies."""

from __future__ import annotations

import copy
import json
import os
import pickle
import platform
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import quant
from quant import QConfig, Recipe, Report, quantize_dynamic, summary
from quant.report import ReportEntry, own_bytes


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(
            embed=nn.Embedding(20, 16),
            rnn=nn.GRU(160, 16),
            mix=nn.MultiheadAttention(16, 2),
            head=nn.Sequential(OrderedDict(norm=nn.LayerNorm(16), act=nn.ReLU(), fc=nn.Linear(16, 4))),
            keep=nn.Linear(16, 2),
        )
    )


@pytest.fixture
def report(model: nn.Module) -> Report:
    return summary(quantize_dynamic(model, Recipe({"keep": None}), backend="reference"))


def test_each_module_with_parameters_is_there_once_with_what_became_of_it(report: Report) -> None:
    assert [(entry.name, entry.type, entry.outcome) for entry in report] == [
        ("embed", "Embedding", "int8"),
        ("rnn", "GRU", "int8"),
        ("mix", "MultiheadAttention", "int8"),
        ("head.norm", "LayerNorm", "float"),
        ("head.fc", "Linear", "int8"),
        ("keep", "Linear", "float"),
    ]
    assert len(report) == 6
    assert [entry.name for entry in report.quantized] == ["embed", "rnn", "mix", "head.fc"]


def test_how_and_why(report: Report) -> None:
    assert report["embed"].detail == "8 bits a value, a scale per row; runs on reference"
    assert report["head.fc"].detail == "weights per channel, activation ranges per row, reference (exact)"
    assert report["head.norm"].detail == "LayerNorm is not quantised dynamically"
    assert report["keep"].detail == "left float by rule 'keep' -> float"
    with pytest.raises(KeyError, match="no module 'nowhere' in the report; it has"):
        report["nowhere"]


def test_settings_stand_in_the_detail(model: nn.Module) -> None:
    quantized = quantize_dynamic(
        model, Recipe({nn.Linear: QConfig(weight_bits=4, per_row=False, per_channel=False)}), backend="reference"
    )
    entry = summary(quantized)["head.fc"]
    assert (entry.outcome, entry.detail) == (
        "int4",
        "weights per tensor, activation ranges per tensor, reference (exact); weights of 16 inputs stored as bytes, "
        "as 32 does not divide them",
    )


def test_bytes_are_those_of_the_tensors(model: nn.Module, report: Report) -> None:
    # The Linear: 4 x 16 float weights and 4 biases; 64 int8 weights, 4 scales, 4 biases.
    assert (report["head.fc"].bytes_before, report["head.fc"].bytes_after) == (64 * 4 + 16, 64 + 16 + 16)
    assert (report["embed"].bytes_before, report["embed"].bytes_after) == (20 * 16 * 4, 20 * (16 + 8))
    parameters = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert sum(entry.bytes_before for entry in report) == parameters
    assert report.bytes_before == sum(entry.bytes_before for entry in report.quantized)
    quantized = quantize_dynamic(model, Recipe({"keep": None}))
    held = sum(tensor.numel() * tensor.element_size() for tensor in quantized.state_dict().values())
    assert sum(entry.bytes_after for entry in report) == held


def test_float_entries_weigh_the_same_before_and_after(report: Report) -> None:
    for entry in report:
        if entry.outcome == "float":
            assert entry.bytes_before == entry.bytes_after > 0


def test_it_prints_as_a_table(report: Report) -> None:
    lines = str(report).splitlines()
    assert lines[0].split() == ["module", "type", "now", "KiB", "before", "KiB", "after", "how", "/", "why"]
    assert set(lines[1]) == {"-", " "}
    assert len(lines) == 2 + len(report) + 2
    columns = [lines[0].index(word) for word in ("type", "now", "how")]
    for line, entry in zip(lines[2:-2], report, strict=True):
        assert line.startswith(entry.name)
        assert [line[column - 1] for column in columns] == [" "] * 3
        assert line[columns[0] :].startswith(entry.type)
        assert line[columns[2] :] == entry.detail
        assert f"{entry.bytes_before / 1024:.1f}" in line
    before, after = report.bytes_before, report.bytes_after
    whole, left = report.model_bytes_before, report.model_bytes_after
    assert lines[-2] == (
        f"4 of 6 modules with parameters quantised; {before / 1024:.1f} KiB -> {after / 1024:.1f} KiB of them, "
        f"{whole / 1024:.1f} KiB -> {left / 1024:.1f} KiB of the whole model, {left / whole:.3f} of float"
    )
    assert all(line == line.rstrip() for line in lines)


def test_the_root_has_a_name_in_print() -> None:
    assert "(root)" in str(summary(quantize_dynamic(nn.Linear(2, 2))))


def test_it_is_json(report: Report) -> None:
    data = json.loads(json.dumps(report.to_dict()))
    assert [ReportEntry(**entry) for entry in data["modules"]] == list(report)
    for name in ("bytes_before", "bytes_after", "model_bytes_before", "model_bytes_after"):
        assert data[name] == getattr(report, name) > 0


def test_copies_keep_it(model: nn.Module) -> None:
    quantized = quantize_dynamic(model)
    for again in (copy.deepcopy(quantized), pickle.loads(pickle.dumps(quantized)), quantized.eval()):
        assert summary(again) == summary(quantized)
    assert not any("report" in name for name in quantized.state_dict())


def test_of_a_float_model_everything_is_float(model: nn.Module) -> None:
    report = summary(model)
    assert {entry.outcome for entry in report} == {"float"}
    assert {entry.detail for entry in report} == {"never quantised"}
    assert report.bytes_before == 0
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert report.model_bytes_before == report.model_bytes_after == size
    assert str(report).endswith(
        f"0.0 KiB -> 0.0 KiB of them, {2 * f'{size / 1024:.1f} KiB -> '}"[:-4] + " of the whole model, 1.000 of float"
    )


def test_of_a_part_of_a_quantised_model_it_does_not_say_float(model: nn.Module) -> None:
    quantized = quantize_dynamic(model)
    assert [(entry.name, entry.outcome) for entry in summary(quantized.rnn)] == [("", "int8")]
    assert [(entry.name, entry.outcome) for entry in summary(quantized.head)] == [("norm", "float"), ("fc", "int8")]


def test_of_a_model_put_together_from_quantised_parts(model: nn.Module) -> None:
    whole = nn.ModuleDict(
        {"a": quantize_dynamic(model, Recipe({nn.Embedding: QConfig(weight_bits=4)})), "b": nn.Linear(2, 2)}
    )
    report = summary(whole)
    assert report["a.embed"] == ReportEntry(**{**vars(summary(whole["a"])["embed"]), "name": "a.embed"})
    assert (report["a.embed"].outcome, report["b"].outcome) == ("int4", "float")


def test_a_shared_module_is_counted_once() -> None:
    shared = nn.Linear(4, 4)
    assert len(summary(nn.ModuleDict({"a": shared, "b": shared}))) == 1


def test_bytes_of_shared_and_lazy_tensors() -> None:
    layer = nn.Linear(4, 4)
    counted: set[int] = set()
    assert [own_bytes(layer, counted), own_bytes(layer, counted), own_bytes(layer)] == [80, 0, 80]
    assert own_bytes(nn.LazyLinear(4)) == 0
    assert own_bytes(nn.Sequential(layer)) == 0


class Odd(nn.Module):
    """Parameters and buffers of its own, a table that is tied to a layer, and a layer with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))
        self.register_buffer("offset", torch.zeros(16, dtype=torch.float64), persistent=False)
        self.embed, self.norm = nn.Embedding(40, 16), nn.LayerNorm(16)
        self.first = self.again = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(24, 16))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.again(self.norm(self.first(self.embed(tokens))).relu())
        y = nn.functional.linear(x, self.weight)[..., :16]
        return self.head(torch.sin(y * self.gain + self.offset.float()))


def held(model: nn.Module) -> int:
    every = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in every.values())


@pytest.mark.parametrize("left", ["nothing", "head", "first"])
def test_the_bytes_of_the_whole_model_are_those_of_all_its_tensors(left: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = Odd().eval(), torch.randint(40, (4, 6))
    recipe = Recipe() if left == "nothing" else Recipe({left: None})
    for q in (
        quantize_dynamic(model, recipe),
        quant.quantize_static(model, [tokens], recipe, progress=False),
    ):
        report = summary(q)
        assert (report.model_bytes_before, report.model_bytes_after) == (held(model), held(q))
        assert report.bytes_after <= report.model_bytes_after
        line = str(report).splitlines()[-2]
        assert line.endswith(f"of the whole model, {held(q) / held(model):.3f} of float")
        assert summary(nn.Sequential(q, nn.Linear(2, 2))).model_bytes_before == held(model) + 24


def test_static_layers_name_their_route() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1, groups=2), nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Flatten(), nn.Linear(4 * 8 * 8, 6), nn.Unflatten(1, (2, 3)),
        nn.GRU(3, 4),
    ).eval()  # fmt: skip
    images = [torch.randn(2, 3, 8, 8)]
    used = quant.kernels.dispatch.current()
    layer = quantize_dynamic(nn.Linear(8, 8))
    route = used.route(layer.q_weight)  # where it does not depend on the values
    report = summary(quant.quantize_static(model, images, progress=False))
    for name in ("0", "2", "4", "6", "8"):
        assert f", {used.name} (" in report[name].detail
        if route in ("vnni", "exact"):
            assert f", {used.name} ({route})" in report[name].detail
    with quant.kernels.use("reference"):
        report = summary(quant.quantize_static(model, images, progress=False))
    assert all("reference (exact)" in report[name].detail for name in ("0", "1", "2", "4", "6", "8"))


ROUTES = """
import torch, quant
from torch import nn
model = nn.Sequential(nn.Conv2d(4, 8, (1, 3), bias=False), nn.Conv2d(8, 8, 3, groups=8)).eval()
with torch.no_grad():
    model[0].weight.zero_()
    for channel, tap in {large}: model[0].weight[:, channel, 0, tap] = 1.0
for entry in quant.summary(quant.quantize_static(model, [torch.rand(2, 4, 8, 8)], progress=False)):
    if "static conv" in entry.detail: print(entry.detail.partition("native ")[2])
"""


@pytest.mark.skipif(bool(quant.kernels.available()["native"]), reason="the kernels are not compiled")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="only AVX2 has several routes")
@pytest.mark.parametrize(
    ("large", "route"),
    [("(0, 0), (0, 1)", "(pairwise)"), ("(0, 0), (1, 0)", "(signed)")],
    ids=["neighbours in torch's order", "neighbours in the kernel's order"],
)
def test_the_route_of_a_convolution_is_by_what_its_kernel_multiplies_together(large: str, route: str) -> None:
    environment = {**os.environ, "QUANT_ISA": "avx2", "QUANT_BACKEND": "native"}
    command = [sys.executable, "-c", ROUTES.format(large=large)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[:2] == [route, "(depthwise)"]


def test_summary_of_something_else() -> None:
    with pytest.raises(TypeError, match=r"quant\.summary: expected an nn\.Module, got str"):
        quant.summary("model")  # type: ignore[arg-type]


def test_the_types_of_results_and_errors_have_public_names() -> None:
    q = quant.quantize_static(nn.Sequential(nn.Linear(4, 4)), [torch.randn(8, 4)], progress=False)
    assert type(summary(q)["0"]) is quant.types.ReportEntry
    assert len(quant.__all__) <= 37  # a name for each way in and out; the rest lives in packages
    for name in quant.types.__all__:
        assert getattr(quant.types, name).__module__.startswith("quant.")


class Reads(nn.Module):
    """Computes with a layer's weight without calling the layer, as shifted-window attention does."""

    def __init__(self, *, island: bool) -> None:
        super().__init__()
        self.island, self.qkv, self.out, self.dead = island, nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x[:, None] * self.qkv.weight).sum(-1).chunk(3, 1)
        y = self.out(q * k + v)
        return y * 2 if self.island and float(y.detach().sum()) > 1e9 else y


@quant.register_leaf
class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("island", [False, True], ids=["captured", "island"])
def test_a_layer_that_is_read_and_not_called_is_said_to_be(island: bool) -> None:
    torch.manual_seed(0)
    report = summary(quant.quantize_static(Reads(island=island).eval(), [torch.randn(4, 8)], progress=False))
    assert report["out"].outcome == "int8"
    if island:
        assert report[""].detail.startswith("an island: ")
        for name in ("qkv", "dead"):
            told = (
                "called by no example and no batch of data; (root), an island, calls it for other values, or computes "
                "with it in float"
            )
            assert report[name].detail == told
    else:
        assert report["qkv"].detail == "its parameters are read by (root), which computes with them in float"
        assert report["dead"].detail == "not called on the example inputs"


def test_a_registered_leaf_is_said_to_be_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Whole(), nn.Linear(8, 8)).eval()
    report = summary(quant.quantize_static(model, [torch.randn(4, 8)], progress=False))
    assert report["1"] == ReportEntry("1", "Whole", "float", "registered as a layer of its own; it runs as it is", 0, 0)
    assert report["1.inner"].detail == "a part of 1, which is called as it is, in float"


def test_observers_are_no_bytes_of_the_float_model() -> None:
    lstm, x = nn.LSTM(8, 8), torch.randn(3, 2, 8)
    report = quant.summary(quant.quantize_static(lstm, [x], progress=False))
    assert report[""].bytes_before == sum(one.numel() * 4 for one in lstm.parameters())
