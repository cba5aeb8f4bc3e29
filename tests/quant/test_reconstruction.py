"""learn_rounding: what it gains on whole models, that nothing else changes, resumption, and bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quant.calibrate import CalibrationWarning, CheckpointError, DataError
from torch import Tensor, nn

import quant
from quant.reconstruction.units import blocks_of
from quant.static.runner import runners

FOUR = quant.Recipe(default=quant.QConfig(weight_bits=4))


class Residual(nn.Module):
    """A stem, a residual block with squeeze-and-excitation, a grouped and a depthwise convolution, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.Hardswish()
        )
        self.expand = nn.Conv2d(16, 32, 1)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.project = nn.Conv2d(32, 16, 1)
        self.grouped = nn.Conv2d(16, 24, 3, padding=(1, 0), dilation=(1, 2), groups=4)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = torch.relu(self.depthwise(nn.functional.hardswish(self.expand(x))))
        s = torch.sigmoid(self.excite(torch.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        x = x + self.project(y * s)
        return self.head(torch.relu(self.grouped(x)).mean((2, 3)))


def trained_like(model: nn.Module) -> nn.Module:
    """Weights whose columns and channels differ in size, as trained ones do."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(torch.exp(torch.randn(parameter.shape[:2], generator=generator) * 0.5).reshape(
                    *parameter.shape[:2], *[1] * (parameter.dim() - 2)))  # fmt: skip
    return model.eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return trained_like(Residual())


@pytest.fixture(scope="module")
def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    low = torch.randn(96, 3, 6, 6, generator=generator)
    images = nn.functional.interpolate(low, size=12, mode="bilinear") + 0.2 * torch.randn(
        96, 3, 12, 12, generator=generator
    )
    return list(images.split(16))


def prepared(model: nn.Module, data: list[Tensor], recipe: quant.Recipe = FOUR) -> nn.Module:
    p = quant.prepare(model, data[0], recipe)
    quant.calibrate.run(p, data, progress=False)
    return p


def error(q: nn.Module, model: nn.Module, data: list[Tensor]) -> float:
    with torch.no_grad():
        return sum(float((q(x) - model(x)).square().mean()) for x in data) / len(data)


def learn(p: nn.Module, data: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    return quant.learn_rounding(p, data, *args, progress=False, **kwargs)


@pytest.mark.parametrize(("method", "unit"), [("gptq", "layer"), ("adaround", "layer"), ("adaround", "block")])
def test_outputs_are_nearer_to_float(method: str, unit: str, model: nn.Module, data: list[Tensor]) -> None:
    p, used, unseen = prepared(model, data), data[:4], data[4:]
    plain = quant.convert(p)
    result = learn(p, used, method, unit=unit)
    q = quant.convert(p)
    assert [one.name for one in result.layers] == [
        "stem.0", "expand", "depthwise", "squeeze", "excite", "project", "grouped", "head"
    ]  # fmt: skip
    assert not result.left
    assert all(one.learned <= one.nearest for one in result.layers)
    assert error(q, model, used) < 0.5 * error(plain, model, used)
    assert error(q, model, unseen) < 0.7 * error(plain, model, unseen)
    assert "project" in str(result)


def test_int8_is_what_the_simulation_says(model: nn.Module, data: list[Tensor]) -> None:
    p = prepared(model, data)
    learn(p, data, "gptq", unit="layer")
    q = quant.convert(p)
    assert quant.parity(p, q, data[:2]).holds
    for name in ("expand", "head"):
        assert int(q.get_submodule(name).q_weight.abs().max()) <= 7  # type: ignore[operator, union-attr]


def test_a_saved_model_has_the_learned_integers(model: nn.Module, data: list[Tensor], tmp_path: Path) -> None:
    p = prepared(model, data)
    learn(p, data, "gptq", unit="layer")
    q = quant.convert(p)
    quant.save(q, tmp_path / "m.q8")
    loaded = quant.load(tmp_path / "m.q8", model=model)
    assert torch.equal(loaded(data[0]), q(data[0]))


def test_the_float_model_and_the_prepared_one_compute_as_before(model: nn.Module, data: list[Tensor]) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    p = prepared(model, data).train()
    p.head.eval()  # type: ignore[union-attr]
    x = data[0]
    expected, state = model(x), {name: tensor.clone() for name, tensor in p.state_dict().items()}
    learn(p, data, "gptq", unit="layer")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, state[name]) for name, tensor in p.state_dict().items())
    assert p.training
    assert not p.head.training  # type: ignore[union-attr]
    assert torch.equal(p.eval()(x), expected)


def test_blocks_end_where_one_value_goes_on(model: nn.Module, data: list[Tensor]) -> None:
    fused = runners(prepared(model, data))[""].fused
    layers = {step.output for step in fused.steps if step.integer and step.qconfig is not None}
    blocks = blocks_of(fused, layers)
    assert [step for block in blocks for step in block.steps] == fused.steps
    named = [[step.name for step in block.layers] for block in blocks if block.layers]
    assert ["expand", "depthwise", "squeeze", "excite", "project"] in named


def test_quantize_static_takes_it_as_an_option(model: nn.Module, data: list[Tensor]) -> None:
    p = prepared(model, data)
    learn(p, data, "gptq")
    by_hand, at_once = quant.convert(p), quant.quantize_static(model, iter(data), FOUR, rounding="gptq", progress=False)
    assert torch.equal(by_hand(data[0]), at_once(data[0]))


@pytest.mark.parametrize("method", ["gptq", "adaround"])
def test_a_run_that_was_killed_goes_on_to_the_same_bits(
    method: str, model: nn.Module, data: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quant.rounding import checkpoint

    whole = prepared(model, data)
    learn(whole, data, method, steps=20, checkpoint=tmp_path / "whole")
    expected = quant.convert(whole)

    write = checkpoint.Checkpoint.write
    for survived in (1, 2, 4):
        left = [survived]

        def killed(self: checkpoint.Checkpoint, left: list[int] = left) -> None:
            write(self)
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        path, p = tmp_path / f"{survived}", prepared(model, data)
        monkeypatch.setattr(checkpoint.Checkpoint, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            learn(p, data, method, steps=20, checkpoint=path)
        monkeypatch.setattr(checkpoint.Checkpoint, "write", write)
        again = prepared(model, data)
        result = learn(again, data, method, steps=20, checkpoint=path)
        assert result.resumed > 0
        q = quant.convert(again)
        for name, tensor in expected.state_dict().items():
            assert torch.equal(tensor, q.state_dict()[name]), name


def test_a_checkpoint_of_something_else_is_refused(model: nn.Module, data: list[Tensor], tmp_path: Path) -> None:
    p, path = prepared(model, data), tmp_path / "c"
    learn(p, data, "gptq", unit="layer", checkpoint=path)
    with pytest.raises(CheckpointError, match="method is 'gptq' there and 'adaround' here"):
        learn(p, data, "adaround", unit="layer", checkpoint=path)
    with pytest.raises(CheckpointError, match="another data"):
        learn(p, data[1:], "gptq", unit="layer", checkpoint=path)
    with pytest.raises(CheckpointError, match="another model"):
        learn(prepared(model, data[1:]), data, "gptq", unit="layer", checkpoint=path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        learn(p, data, "gptq", unit="layer", checkpoint=path)


def test_the_same_seed_gives_the_same_bits(model: nn.Module, data: list[Tensor]) -> None:
    results = []
    for seed in (3, 3, 4):
        p = prepared(model, data)
        learn(p, data, steps=20, seed=seed)
        results.append(quant.convert(p).get_submodule("project").q_weight)
    assert torch.equal(results[0], results[1])  # type: ignore[arg-type]
    assert not torch.equal(results[0], results[2])  # type: ignore[arg-type]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.up = nn.ConvTranspose1d(1, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.up(self.shared(torch.relu(self.shared(x)))[:, None])[:, 0, :8]))


def test_what_cannot_be_rounded_anew_is_left_with_a_reason() -> None:
    torch.manual_seed(0)
    data = list(torch.randn(64, 8).split(32))
    p = prepared(Twice().eval(), data)
    result = learn(p, data, "gptq")
    assert [one.name for one in result.layers] == ["head"]
    assert result.left["shared"] == "it is called at several places, which have inputs of their own"
    assert result.left["up"] == "a conv_transpose is no product of rows with its weight"
    quant.convert(p)


class Words(nn.Module):
    """A table, a recurrent layer and a linear one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.head = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(ids))[0])


def test_dynamic_and_recurrent_layers_are_left_with_a_reason() -> None:
    torch.manual_seed(0)
    data = list(torch.randint(20, (64, 5)).split(32))
    result = learn(prepared(Words().eval(), data, quant.Recipe()), data, "gptq")
    assert [one.name for one in result.layers] == ["head"]
    assert result.left["table"] == "a table has no inputs to be multiplied with"
    assert result.left["lstm"].startswith("it is recurrent")
    assert "lstm" in str(result)

    per_call = quant.Recipe(default=quant.QConfig(activation_observer="dynamic"))
    rows = list(torch.randn(64, 8).split(32))
    two = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    with pytest.raises(ValueError, match=r"no layer can be rounded anew; 0: it is dynamic; quant\.quantize_dynamic"):
        quant.quantize_static(two, rows, per_call, rounding="gptq", progress=False)
    nothing = quant.prepare(Words().eval(), data[0], quant.Recipe({"table": quant.QConfig()}, default=None))
    with pytest.raises(ValueError, match="no layer can be rounded anew; table: a table"):
        learn(nothing, data, "gptq")


def test_a_layer_without_a_bias_gets_none() -> None:
    torch.manual_seed(0)
    data = [torch.rand(64, 8) + 1.0]
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8)).eval()
    p = prepared(model, data)
    learn(p, data, "gptq")
    q = quant.convert(p)
    assert q[0].bias is None  # type: ignore[index, union-attr]
    off = quant.Recipe(default=quant.QConfig(weight_bits=4, bias_correction=False))
    p = prepared(model, data, off)
    learn(p, data, "gptq")
    assert torch.equal(quant.convert(p)[2].bias, model[2].bias.detach())  # type: ignore[index, union-attr, arg-type]


def test_an_input_that_is_always_zero_is_no_fault() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    x[:, 3] = 0.0
    p = prepared(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), [x])
    for method in ("gptq", "adaround"):
        learn(p, [x], method)
        assert quant.convert(p)(x).isfinite().all()
    zeros = torch.zeros(64, 8)
    with pytest.warns(CalibrationWarning, match="every input always has one value"):
        p = prepared(nn.Sequential(nn.Linear(8, 8)).eval(), [zeros])
    learn(p, [zeros], "gptq")


def test_bad_input_is_named(model: nn.Module, data: list[Tensor]) -> None:
    p = prepared(model, data)
    with pytest.raises(ValueError, match="method is 'best', expected one of gptq, adaround"):
        learn(p, data, "best")
    with pytest.raises(ValueError, match="unit is 'net', expected one of layer, block"):
        learn(p, data, unit="net")
    with pytest.raises(ValueError, match="samples is 0"):
        learn(p, data, samples=0)
    with pytest.raises(DataError, match="there are no batches"):
        learn(p, [])
    with pytest.raises(TypeError, match="batches is a Tensor"):
        learn(p, data[0])
    with pytest.raises(ValueError, match=r"is not from quant\.prepare"):
        learn(model, data)
    with pytest.raises(ValueError, match="the observers saw no data"):
        learn(quant.prepare(model, data[0], FOUR), data)
    with pytest.raises(ValueError, match="prepared for training"):
        learn(quant.prepare_qat(p), data)
    learned = prepared(model, data)
    learn(learned, data, "gptq", unit="layer")
    assert "rounded by its outputs" in str(quant.summary(quant.convert(learned)))
    with pytest.warns(quant.calibrate.CalibrationWarning, match="8 samples are few"):
        learn(p, [data[0][:8]], "gptq")
    with pytest.raises(DataError, match="never call the model"):
        learn(p, data, forward=lambda model, batch: None)
    with pytest.raises(ValueError, match="rounding is 'best'"):
        quant.quantize_static(model, data, rounding="best")
    with pytest.raises(ValueError, match="checkpoint keeps what"):
        quant.quantize_static(model, data, checkpoint="c")


def test_training_starts_from_the_learned_integers(data: list[Tensor]) -> None:
    torch.manual_seed(3)
    model = trained_like(Residual())
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
            nn.init.uniform_(norm.weight, 0.5, 2.0)
            norm.weight.data[3] = 0.0
    p = prepared(model, data)
    learn(p, data, "gptq", unit="layer")
    q, training = quant.convert(p), quant.prepare_qat(p)
    started = quant.convert(training.eval()).state_dict()
    for name, tensor in q.state_dict().items():
        if name.endswith("q_weight"):
            rows, others = tensor.flatten(1), started[name].flatten(1)
            sets_scale = rows.abs().amax(1) == 7
            assert sets_scale.float().mean() > 0.85
            assert torch.equal(rows[sets_scale], others[sets_scale]), name
        elif name.endswith(".bias"):
            assert torch.allclose(tensor, started[name], atol=1e-5), name
    assert not torch.equal(started["head.q_weight"], quant.convert(prepared(model, data)).state_dict()["head.q_weight"])


@pytest.mark.parametrize("per_channel", [True, False])
def test_learned_scales_of_training_start_from_learned_rounding(per_channel: bool, data: list[Tensor]) -> None:
    torch.manual_seed(3)
    model = trained_like(Residual())
    for one in (model.stem[1].weight, model.stem[1].running_var):  # type: ignore[index, union-attr]
        nn.init.uniform_(one, 0.5, 2.0)  # type: ignore[arg-type]
    known = quant.QConfig(weight_bits=4, per_channel=per_channel)
    p = prepared(model, data, quant.Recipe(default=known))
    learn(p, data, "gptq", unit="layer")
    q = quant.convert(p)
    trained = quant.QConfig(weight_bits=4, per_channel=per_channel, weight_observer="lsq", activation_observer="lsq")
    training = quant.prepare_qat(p, recipe=quant.Recipe(default=trained)).eval()
    started = quant.convert(training)
    for name, tensor in q.state_dict().items():
        own = started.state_dict()[name]
        if name.endswith("q_weight"):
            assert (tensor == own).float().mean() > 0.999, name
        elif name.endswith("scale"):
            assert torch.allclose(tensor, own, rtol=1e-5), name
    # The scales are parameters, and the first step of training moves them from there.
    scales = {name: one for name, one in training.named_parameters() if "_quant" in name}
    before = {name: one.detach().clone() for name, one in scales.items()}
    training.train()(data[0]).square().mean().backward()
    torch.optim.SGD(scales.values(), lr=1e-3).step()
    assert all(one.grad is not None for one in scales.values())
    assert any(not torch.equal(one, before[name]) for name, one in scales.items())
    plain = quant.prepare(model, data[0], quant.Recipe(default=known))
    quant.calibrate.run(plain, data, progress=False)
    begun = quant.prepare_qat(plain, recipe=quant.Recipe(default=trained))
    begun.train()(data[0])  # without learned integers LSQ sets them by the weight at the first batch
    assert all(float(one.detach().min()) > 0 for name, one in begun.named_parameters() if "_quant" in name)


def test_the_recipe_of_training_changes_observers_alone(model: nn.Module, data: list[Tensor]) -> None:
    p = prepared(model, data)
    for wrong in (quant.QConfig(weight_bits=5), quant.QConfig(weight_bits=4, activation_bits=16)):
        with pytest.raises(quant.RecipeError, match=r"may change the observers of a calibrated model.*'stem\.0' has"):
            quant.prepare_qat(p, recipe=quant.Recipe(default=wrong))
    with pytest.raises(quant.RecipeError, match="may change the observers"):
        quant.prepare_qat(p, recipe=quant.Recipe({"head": None}, default=quant.QConfig(weight_bits=4)))
    with pytest.raises(quant.RecipeError, match="searches all that it ever saw"):
        quant.prepare_qat(p, recipe=quant.Recipe(default=quant.QConfig(weight_bits=4, activation_observer="mse")))


def test_weights_that_are_computed_start_from_themselves(data: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.Flatten()).eval()
    p = prepared(model, data)
    learn(p, data, "gptq", unit="layer")
    with pytest.warns(quant.calibrate.CalibrationWarning, match=r"is not taken over for .*: its weight is computed"):
        quant.prepare_qat(p)


class Tied(nn.Module):
    """One weight in two layers, with inputs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.third(self.second(self.first(x).relu()).relu())
        return found


def test_weights_of_several_layers_start_from_themselves() -> None:
    """Integers that were chosen by the inputs of one layer are no good for those of another."""
    torch.manual_seed(0)
    model = Tied().eval()
    rows = [torch.randn(64, 3) @ torch.randn(3, 16) for _ in range(4)]
    p = prepared(model, rows)
    learn(p, rows, "gptq", unit="layer")
    with pytest.warns(quant.calibrate.CalibrationWarning, match=r"first, second: its weight is another layer's too"):
        training = quant.prepare_qat(p)
    assert torch.equal(training.first.weight, model.first.weight)  # type: ignore[union-attr]
    assert not torch.equal(training.third.weight, model.third.weight)  # type: ignore[union-attr]


def test_labels_alone_are_named(model: nn.Module, data: list[Tensor]) -> None:
    p = prepared(model, data)
    with pytest.raises(quant.calibrate.CalibrationError, match=r"learn_rounding: batch 0, int64 \[32\]"):
        learn(p, [torch.zeros(32, dtype=torch.int64)], "gptq")


def test_rows_that_are_not_finite_do_not_count() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    p = prepared(model, [x])
    broken = torch.cat([x, torch.full((4, 8), torch.nan)])
    learn(p, [broken], "gptq")
    own = quant.convert(p)
    learn(p, [x], "gptq")
    assert torch.equal(own[0].q_weight, quant.convert(p)[0].q_weight)  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match=r"layer '0': .*finite"):
        learn(p, [torch.full((64, 8), torch.nan)], "gptq")
