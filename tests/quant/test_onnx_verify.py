"""An exported file beside the model as it is now: the same, or an error that names what no longer fits."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.onnx import verify_onnx
from quant.onnx.export_report import Verification

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")


class Reader(nn.Module):
    """A recurrent layer and a head, so that a file has nodes with bodies."""

    def __init__(self, outputs: int = 5, head: str = "head") -> None:
        super().__init__()
        self.layer, self.named = nn.GRU(8, 16, batch_first=True), head
        self.add_module(head, nn.Linear(16, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.named)(self.layer(x)[0])  # type: ignore[no-any-return]


def converted(model: nn.Module) -> nn.Module:
    data = torch.randn(3, 2, 7, 8, generator=torch.Generator().manual_seed(1))
    return quant.quantize_static(model.eval(), list(data), progress=False)


def written(q: nn.Module, folder: Path) -> Path:
    pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    quant.export_onnx(q, folder / "model.onnx", target="avx2")
    return folder / "model.onnx"


def test_the_model_that_was_exported(tmp_path: Path) -> None:
    q = converted(Reader())
    path = written(q, tmp_path)
    found = verify_onnx(q, path, torch.randn(3, 5, 8))
    assert max(found.outputs.values()) < 1e-4
    assert found.steps


def test_inputs_that_the_model_does_not_take(tmp_path: Path) -> None:
    q = converted(Reader())
    path = written(q, tmp_path)
    with pytest.raises(ValueError, match=r"^the inputs to verify with are no call that was captured"):
        verify_onnx(q, path, torch.zeros(3, 5, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"model\.onnx is there, and ONNX Runtime does not run it so"):
        verify_onnx(q, path, torch.randn(3, 5, 8, 2))


@pytest.mark.parametrize(
    ("error", "reason"), [(math.nan, "the file gives NaN"), (math.inf, "another shape or dtype than the model's")]
)
def test_an_error_that_is_no_number_is_null_in_json(error: float, reason: str) -> None:
    found = Verification("ONNX Runtime 1", {"y": error, "z": 0.25}, (), {})
    said = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert said["outputs"] == {"y": None, "z": 0.25}
    assert list(said["not_comparable"]) == ["y"]
    assert reason in said["not_comparable"]["y"]
    assert said["same_bits"] is False


def test_sums_by_float_nodes_are_counted_apart(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.first(x))
            return self.second(y + torch.relu(self.first(y)))

    q = quant.quantize_static(Residual().eval(), [torch.randn(4, 8)], progress=False)
    report = quant.export_onnx(q, tmp_path / "model.onnx", target="avx2")
    assert [one.kind for one in report.steps if one.exact] == ["add"]
    assert report.floats == ()
    assert report.share == "3 of 4 computing steps are integers, 1 more by exact float nodes"
    assert report.share in str(report)
    fast = quant.export_onnx(q, tmp_path / "fast.onnx", target="avx2", sums="fast")
    assert fast.share == "4 of 4 computing steps are integers"


def test_two_roundings_in_a_row_stay_two(tmp_path: Path) -> None:
    """SiLU is the identity on such a coarse range, so only the range changes: ONNX Runtime joins such roundings."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
    with torch.no_grad():
        first.weight.mul_(400)
    model = nn.Sequential(first, nn.SiLU(), second, nn.Flatten(), nn.Linear(512, 4)).eval()
    images = [torch.rand(4, 3, 8, 8) for _ in range(4)]
    q = quant.quantize_static(model, images, progress=False)
    report = quant.export_onnx(q, tmp_path / "model.onnx", target="avx2", verify=images[0])
    assert report["1"].why == "a change of range"
    assert report.verification is not None
    assert report.verification.same_bits
    with torch.no_grad():
        assert torch.equal(quant.load_onnx(tmp_path / "model.onnx")(images[1]), q(images[1]))


def test_a_dynamic_model_that_was_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    q, x = quant.quantize_dynamic(Reader().eval()), torch.randn(2, 7, 8)
    quant.export_onnx(q, tmp_path / "model.onnx", target="avx2", example_inputs=x)
    assert max(verify_onnx(q, tmp_path / "model.onnx", x, example_inputs=x).outputs.values()) < 1e-3


def test_a_dynamic_layer_of_a_single_row_without_a_batch(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    q, x = quant.quantize_dynamic(nn.Sequential(nn.Linear(8, 4)).eval()), torch.randn(8)
    report = quant.export_onnx(q, tmp_path / "model.onnx", target="avx2", example_inputs=x, verify=x)
    assert report.verification is not None
    assert [one.differing for one in report.verification.steps] == [0.0]


def with_other_weights(q: nn.Module) -> nn.Module:
    changed = copy.deepcopy(q)
    weights = {name: one for name, one in changed.named_buffers() if "head" in name and one.dtype == torch.int8}
    [weight] = weights.values()
    weight[0, 0] = 5 if int(weight[0, 0]) != 5 else 6
    return changed


CHANGED: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "weights": (with_other_weights, r"'head\.weight' hold other numbers than the model's"),
    "sizes": (lambda q: converted(Reader(outputs=6)), r"'head\.weight'.* have other sizes or dtypes than the model's"),
    "names": (lambda q: converted(Reader(head="tags")), r"it has no .*'tags\.weight', .*, which the model has"),
    "a layer of the body": (lambda q: converted(other_states()), r"'layer\.weight_hh'.* hold other numbers"),
    "inputs": (lambda q: converted(Renamed()), r"its inputs are 'x', the model's are 'letters'"),
}


def other_states() -> nn.Module:
    torch.manual_seed(0)
    model = Reader()
    with torch.no_grad():
        model.layer.weight_hh_l0[0, 0] += 0.05
    return model


class Renamed(Reader):
    def forward(self, letters: Tensor) -> Tensor:
        return super().forward(letters)


@pytest.mark.parametrize("case", CHANGED)
def test_a_model_that_changed_is_refused_with_what_no_longer_fits(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    q = converted(Reader())
    path = written(q, tmp_path)
    change, said = CHANGED[case]
    with pytest.raises(ValueError, match=rf"model\.onnx does not fit .*{said}.* export it again"):
        verify_onnx(change(q), path)


def test_a_file_whose_nodes_were_changed(tmp_path: Path) -> None:
    q = converted(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    path = written(q, tmp_path)
    model = onnx.load(str(path))
    node = next(one for one in model.graph.node if one.op_type == "QuantizeLinear")
    node.input[1] = model.graph.node[-3].input[1]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match=r"its node '.*QuantizeLinear' \(QuantizeLinear\) has other settings"):
        verify_onnx(q, path)


def test_a_file_of_somebody_else(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    q = converted(nn.Sequential(nn.Linear(8, 8)))
    path = written(q, tmp_path)
    model = onnx.load(str(path))
    del model.metadata_props[:]
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match=r"has no 'octet\.runtime': it is no file of quant\.export_onnx"):
        verify_onnx(q, path)
    with pytest.raises(FileNotFoundError, match="there is no ONNX file"):
        verify_onnx(q, tmp_path / "none.onnx")
