"""The report: each module once, honest bytes, readable, JSON, and kept by copies."""

from __future__ import annotations

import copy
import json
import pickle
from collections import OrderedDict

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
        "weights per tensor, activation ranges per tensor, reference (exact)",
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
    assert len(lines) == 2 + len(report) + 1
    columns = [lines[0].index(word) for word in ("type", "now", "how")]
    for line, entry in zip(lines[2:-1], report, strict=True):
        assert line.startswith(entry.name)
        assert [line[column - 1] for column in columns] == [" "] * 3
        assert line[columns[0] :].startswith(entry.type)
        assert line[columns[2] :] == entry.detail
        assert f"{entry.bytes_before / 1024:.1f}" in line
    before, after = report.bytes_before, report.bytes_after
    assert lines[-1] == (
        f"4 of 6 modules with parameters quantised; {before / 1024:.1f} KiB -> {after / 1024:.1f} KiB, "
        f"{after / before:.3f} of float"
    )
    assert all(line == line.rstrip() for line in lines)


def test_the_root_has_a_name_in_print() -> None:
    assert "(root)" in str(summary(quantize_dynamic(nn.Linear(2, 2))))


def test_it_is_json(report: Report) -> None:
    data = json.loads(json.dumps(report.to_dict()))
    assert [ReportEntry(**entry) for entry in data["modules"]] == list(report)
    assert (data["bytes_before"], data["bytes_after"]) == (report.bytes_before, report.bytes_after)


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
    assert str(report).endswith("0 of 7 modules with parameters quantised; 0.0 KiB -> 0.0 KiB")


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


def test_summary_of_something_else() -> None:
    with pytest.raises(TypeError, match=r"quant\.summary: expected an nn\.Module, got str"):
        quant.summary("model")  # type: ignore[arg-type]
