"""`calibrate.reestimate_batch_norm`: statistics of all batches together, of what layers give now, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from quant.calibrate import CalibrationError, reestimate_batch_norm
from torch import Tensor, nn

import quant
from quant.qat import freeze_norms


class Net(nn.Module):
    """A convolution whose norm is folded, one whose norm is not, and a norm that some calls leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=0.3)
        self.second, self.own = nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)
        self.spare = nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(self.drop(self.own(torch.sigmoid(self.second(x))).mean((2, 3))))


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, 7, 7, generator=generator) * (1.0 + 0.1 * size) for size in (16, 8, 40)]


def take(model: nn.Module, batches: Any, **settings: Any) -> Any:
    return reestimate_batch_norm(model, batches, progress=False, **settings)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_an_error(model: Net, batches: list[Tensor], limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit is {limit}, expected at least 1"):
        take(model, batches, limit=limit)


@pytest.mark.parametrize("limit", [2.5, True, "3"])
def test_a_limit_that_is_no_whole_number_is_an_error(model: Net, batches: list[Tensor], limit: Any) -> None:
    with pytest.raises(TypeError, match=f"limit is {limit!r}, expected a whole number of batches"):
        take(model, batches, limit=limit)


class Twice(nn.Module):
    """One norm for two values, whose means lie far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.norm(3 * x[:4] + 5).sum(0)  # type: ignore[no-any-return]


class TwiceByItself(nn.Module):
    """As `Twice`, by a norm whose parent calls the function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def normalised(self, x: Tensor) -> Tensor:
        norm = self.norm
        if norm.training:
            norm.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        share = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum  # type: ignore[arg-type]
        return nn.functional.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.training, share, norm.eps
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.normalised(x) + self.normalised(3 * x[:4] + 5).sum(0)


def test_a_norm_that_is_called_twice_has_the_statistics_of_both_calls_values(batches: list[Tensor]) -> None:
    twice = Twice()
    take(twice, batches)
    assert_statistics(twice.norm, torch.cat([*batches, *(3 * x[:4] + 5 for x in batches)]))


def test_a_norm_that_is_used_twice_without_being_called_is_named(batches: list[Tensor]) -> None:
    by_itself = TwiceByItself()
    before = {name: tensor.clone() for name, tensor in by_itself.state_dict().items()}
    with pytest.raises(ValueError, match=r"'norm' is used 2 times in a batch, .* give each place a norm of its own"):
        take(by_itself, batches)
    assert all(torch.equal(tensor, before[name]) for name, tensor in by_itself.state_dict().items())
    assert not by_itself.norm._forward_hooks
    assert by_itself.norm.momentum == 0.1


class KeptInEval(nn.BatchNorm2d):
    """A norm that is frozen by its own `train`."""

    def train(self, mode: bool = True) -> KeptInEval:
        return super().train(False)


class Frozen(nn.BatchNorm2d):
    """A norm that is frozen by its own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.batch_norm(input, self.running_mean, self.running_var)


def test_a_norm_whose_train_keeps_it_in_eval_mode_keeps_its_statistics(model: Net, batches: list[Tensor]) -> None:
    model.norm = KeptInEval(8)
    model.norm.running_mean.fill_(0.3)  # type: ignore[union-attr]
    before = {name: tensor.clone() for name, tensor in model.norm.state_dict().items()}
    found = take(model, batches)
    assert (found.norms, found.left) == (("own",), ("norm", "spare"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.norm.state_dict().items())
    model.eval()
    with torch.no_grad():
        inner = [torch.sigmoid(model.second(torch.relu(model.norm(model.conv(x))))) for x in batches]
    assert_statistics(model.own, torch.cat(inner))


def test_a_norm_that_is_called_and_takes_no_statistics_is_named(model: Net, batches: list[Tensor]) -> None:
    model.norm = Frozen(8)
    model.norm.running_mean.fill_(0.3)  # type: ignore[union-attr]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CalibrationError, match=r"batch 0, .*'norm' was called and took no statistics"):
        take(model, batches)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_norm_that_does_not_track_in_training_gets_statistics_too(model: Net, batches: list[Tensor]) -> None:
    """Its buffers are what eval mode normalises by."""
    model.norm.track_running_stats = False
    assert take(model, batches).norms == ("norm", "own")
    with torch.no_grad():
        assert_statistics(model.norm, torch.cat([model.conv(x) for x in batches]))
    assert model.norm.track_running_stats is False


@pytest.mark.parametrize("sizes", [(2,) * 20, (16, 5, 2), (7,)], ids=str)
def test_the_variance_of_small_batches_is_that_of_all_values(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    batches = [3.0 * torch.randn(size, 4) + 1.0 for size in sizes]
    norm = nn.BatchNorm1d(4)
    take(norm, batches)
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_var, torch.cat(batches).var(0), atol=0.0, rtol=1e-4)


def assert_statistics(norm: nn.BatchNorm2d, values: Tensor) -> None:
    """The norm's buffers are the mean and variance of values (N, C, H, W)."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_mean, values.mean((0, 2, 3)), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(norm.running_var, values.var((0, 2, 3)), atol=1e-5, rtol=5e-3)


def test_statistics_are_those_of_all_batches_together(model: Net, batches: list[Tensor]) -> None:
    found = take(model, batches)
    assert (found.norms, found.left, found.batches, found.samples) == (("norm", "own"), ("spare",), 3, 64)
    with torch.no_grad():
        assert_statistics(model.norm, torch.cat([model.conv(x) for x in batches]))
    limited, first = Net(), Net()
    first.load_state_dict(model.state_dict())
    limited.load_state_dict(model.state_dict())
    assert take(limited, batches, limit=1).batches == take(first, batches[:1]).batches == 1
    assert torch.equal(limited.norm.running_mean, first.norm.running_mean)  # type: ignore[arg-type]


def test_nothing_else_changes(model: Net, batches: list[Tensor]) -> None:
    model.train()
    model.own.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    take(model, batches)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"norm.running_mean", "norm.running_var", "own.running_mean", "own.running_var"}
    assert (model.norm.momentum, model.norm.training, model.own.training) == (0.3, True, False)
    again = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    take(model, batches)  # no dropout, and nothing of the statistics before
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("frozen", [False, True], ids=["moving", "frozen"])
def test_of_a_model_in_training_they_are_of_rounded_layers(model: Net, batches: list[Tensor], frozen: bool) -> None:
    coarse = quant.Recipe(default=quant.QConfig(weight_bits=3))
    p: Any = quant.prepare_qat(model, batches[0], coarse).train()
    for x in batches:
        p(x)
    freeze_norms(p, frozen)
    ranges = {name: tensor.clone() for name, tensor in p.state_dict().items() if "_quant" in name}
    take(p, batches)
    assert all(torch.equal(tensor, p.state_dict()[name]) for name, tensor in ranges.items())
    assert p.training

    runner = p._modules["_quant"]
    step = next(one for one in runner.fused.steps if one.name == "conv")
    quantizer = runner.observer(runner.fused.slot_of[step.inputs[0]]).eval()
    with torch.no_grad():
        weight = quant.kernels.scheme.quantize_weight(p.conv.weight, bits=3)
        real = weight[0] * weight[1][:, None, None, None]
        given = torch.cat([nn.functional.conv2d(quantizer(x), real, p.conv.bias) for x in batches])
    assert_statistics(p.norm, given)


def test_statistics_that_training_left_behind_are_put_right(model: Net, batches: list[Tensor]) -> None:
    del model.spare
    take(model, batches)
    p: Any = quant.prepare_qat(model, batches[0]).train()
    freeze_norms(p)
    for x in batches:
        p(x)
    with torch.no_grad():
        expected = torch.cat([model.eval()(x) for x in batches])

    def error(int8: nn.Module) -> float:
        with torch.no_grad():
            return float((torch.cat([int8(x) for x in batches]) - expected).norm() / expected.norm())

    right = error(p.eval())
    with torch.no_grad():
        p.norm.running_mean.add_(0.3)
        p.norm.running_var.mul_(1.7)
    behind = error(p)
    take(p, batches)
    assert behind > 2 * right
    assert error(p) < 1.2 * right
    assert error(quant.convert(p)) < 1.2 * right  # and nothing is said of norms that training reached too seldom


def _failing(model: Net, batches: list[Tensor]) -> tuple[nn.Module, Any, str]:
    return model, [batches[0], batches[1][:, :2]], r"batch 1, float32 \[8, 2, 7, 7\]: RuntimeError"


def _not_finite(model: Net, batches: list[Tensor]) -> tuple[nn.Module, Any, str]:
    return model, [batches[0], torch.full_like(batches[0], torch.nan)], "'norm' was given NaN"


def _one_value(model: Net, batches: list[Tensor]) -> tuple[nn.Module, Any, str]:
    return model, [batches[0][:1, :, :3, :3]], "more than 1 value per channel"


def _empty(model: Net, batches: list[Tensor]) -> tuple[nn.Module, Any, str]:
    return model, [], "batches is empty"


@pytest.mark.parametrize("case", [_failing, _not_finite, _one_value, _empty])
def test_bad_data_is_named_and_changes_nothing(case: Callable[..., Any], model: Net, batches: list[Tensor]) -> None:
    wrong, data, message = case(model, batches)
    before = {name: tensor.clone() for name, tensor in wrong.state_dict().items()}
    with pytest.raises((ValueError, CalibrationError), match=message):
        take(wrong, data)
    assert all(torch.equal(tensor, before[name]) for name, tensor in wrong.state_dict().items())
    assert model.norm.momentum == 0.3


def test_models_without_statistics_to_take_are_named(model: Net, batches: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="Linear has no batch norm with running statistics"):
        take(nn.Linear(3, 3), batches)
    with pytest.raises(ValueError, match="reach no batch norm that takes statistics"):
        take(model, batches, forward=lambda model, batch: None)
    with pytest.raises(TypeError, match="batches is a Tensor"):
        take(model, batches[0])
    take(model, batches)
    prepared = quant.prepare(model.eval(), batches[0])
    with pytest.raises(ValueError, match=r"is from quant\.prepare.*quant\.learn_rounding"):
        take(prepared, batches)
    quant.calibrate.run(prepared, batches, progress=False)
    whole = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    q = quant.quantize_static(whole, batches, progress=False)
    with pytest.raises(ValueError, match=r"folded.*before quant\.convert"):
        take(q, batches)
