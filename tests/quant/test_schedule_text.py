"""Schedules and captured graphs as text: they come back as they were, and texts that do not fit are refused by line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.runtime.program import Program, alike
from quant.runtime.program_reader import parse
from quant.runtime.program_text import text_without_constants
from quant.runtime.schedule_text import parse_schedule, schedule_text
from quant.runtime.text_scanner import TextError
from quant.runtime.tree_text import Writer
from quant.static.description import captured_runners


class Weighted(nn.Module):
    """Parameters among float steps, some of them between the operations of one call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.weight, self.head = nn.Linear(8, 8), nn.Parameter(torch.linspace(0.5, 1.5, 8)), nn.Linear(8, 4)
        self.softmax, self.norm = nn.Softmax(-1), nn.InstanceNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        y = self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))
        out: Tensor = self.head(self.softmax(self.norm(y)))
        return out


class Residual(nn.Module):
    """An attention between linear layers, a norm, a table, a branch by a size, and a float call between regions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.norm, self.head = nn.Linear(8, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, 4)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y = self.norm(self.act(self.fc(x)) + x)
        y = y + self.attention(y, y, y, need_weights=False)[0]
        y = y.cumsum(1) * scale if x.shape[1] > 2 else y
        out: Tensor = self.head(F.relu(y))
        return out


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "attention": (Residual, (torch.randn(2, 5, 8), torch.tensor(0.5))),
    "parameters": (Weighted, (torch.randn(2, 5, 8),)),
    "images": (convolutional, (torch.randn(2, 8, 10, 10),)),
}


def runner_of(case: str) -> Any:
    torch.manual_seed(0)
    make, inputs = CASES[case]
    prepared = quant.prepare(make().eval(), inputs)
    with torch.no_grad():
        prepared(*inputs)
    [(_, runner)] = captured_runners(quant.convert(prepared))
    return runner


def texts(program: Program) -> tuple[str, str, list[Tensor]]:
    writer = Writer()
    assert program.schedule is not None
    return text_without_constants(program, writer), schedule_text(program.schedule, writer), writer.constants


@pytest.mark.parametrize("case", list(CASES))
def test_a_program_comes_back_with_its_schedule(case: str) -> None:
    runner = runner_of(case)
    program, schedule, constants = texts(runner.program)
    parsed = parse(program, constants)
    parsed.schedule = parse_schedule(schedule, parsed, constants)
    expected = runner.program.schedule
    assert parsed == runner.program
    assert alike(parsed.schedule.steps, expected.steps)
    assert parsed.schedule.drops == expected.drops
    assert parsed.schedule.reasons == expected.reasons
    assert alike(parsed.schedule.singles, expected.singles)
    assert texts(parsed)[:2] == (program, schedule)
    _, inputs = CASES[case]
    with torch.no_grad():
        before = runner.run(*inputs)
        runner.program = parsed
        assert torch.equal(runner.run(*inputs), before)


IMAGES = """\
octet-program 1
sizes n=2
input %0 x: float32[n, 8, 10, 10]  ; #0
%1 x: uint8[n, 8, 10, 10] scale=0.02 zero_point=128 = quantize(%0)  ; #0
%2 a: uint8[n, 8, 10, 10] scale=0.02 zero_point=0 = layer a(%1)  ; #1
%3 b: float32[n, 8, 10, 10] = layer b(%2)  ; #2
output %3"""

ONE_CALL = """\
octet-schedule 1
native([%1, %2, %3], inputs=[%0], outputs=[%3], drops=[%0], booleans=[False])
  %1 = quantize x=%0 scale=0.02 zero_point=128
  layer %2
  layer %3"""

STEPS = """\
octet-schedule 1
single(%1, drops=[%0])
single(%2, drops=[%1])
single(%3, drops=[%2])"""


@pytest.mark.parametrize(
    ("schedule", "old", "new", "said"),
    [
        (ONE_CALL, "schedule 1", "schedule 2", "written by another version"),
        (ONE_CALL, "native", "notive", "line 2: expected 'native'"),
        (ONE_CALL, "[%1, %2, %3]", "[%1, %2, %9]", "line 2: no instruction defines %9"),
        (ONE_CALL, "[%1, %2, %3]", "[%1, %3]", "line 4: is not a layer of this region"),
        (ONE_CALL, "[%1, %2, %3]", "[1, 2]", "expected a list of values"),
        (ONE_CALL, "[%1, %2, %3], ", "", "expected one positional argument"),
        (ONE_CALL, "inputs=[%0]", "inputs=[%2]", "reads %2, which does not exist at this point"),
        (ONE_CALL, "outputs=[%3]", "outputs=[%0]", "has an output that none of its instructions defines"),
        (ONE_CALL, "outputs=[%3]", "outputs=[%2]", "drops %3, which the program returns"),
        (ONE_CALL, "booleans=[False]", "booleans=[]", "a boolean for each input"),
        (ONE_CALL, "booleans=[False]", "booleans=[False], ranks=[1, 2]", "a number of dimensions"),
        (ONE_CALL, "booleans=[False]", "booleans=[False], other=1", "is not a region"),
        (ONE_CALL, "quantize", "destroy", "line 3: no such operation"),
        (ONE_CALL, "zero_point=128", "zero_point=256", "zero_point is 256, expected 0 to 255"),
        (ONE_CALL, "layer %2", "layer %1", "is not a layer of this region"),
        (ONE_CALL, "layer %2", "layer_norm(%2, [%1])", "expected 3 values"),
        (ONE_CALL, "layer %2", "system(%2, [%1], 'a')", "is not a plan's line, nor a layer or module"),
        (ONE_CALL, "layer %2", "attention(%2, [%1], 'a', 'rm')", "expected '%register = operation"),
        (ONE_CALL, "layer %2", "constants(%2, [%1], 'a', ['w'], '%2 = same x=%1')", "expected a tuple of names"),
        (ONE_CALL, "layer %2", "constants(%2, [%1], 'a', ('w', 1), '%2 = same x=%1')", "expected a tuple of names"),
        (ONE_CALL, "layer %2", "constants(%2, [%1], 'a', ('w',), '%2 = constant value={v}')", "value"),
        (ONE_CALL, "layer %2", "constants(%2, [%1], 'a', ('w',), '%2 = constant value={w.__class__}')", "value"),
        (ONE_CALL, "layer %2", "constants(%7, [%1], 'a', ('w',), '%7 = constant value={w}')", "is not a module of"),
        (STEPS, "single(%2, drops=[%1])\n", "", "%3 reads %2, which does not exist at this point"),
        (STEPS, "drops=[%0]", "drops=[%0, %1]", "%2 reads %1, which does not exist at this point"),
        (STEPS, "drops=[%2]", "drops=[%2, %3]", "drops %3, which the program returns"),
        (STEPS, "single(%3, drops=[%2])", "reason('a', 'b')", "each once"),
    ],
)  # fmt: skip
def test_a_schedule_that_does_not_fit_its_program_is_refused(schedule: str, old: str, new: str, said: str) -> None:
    program = parse(IMAGES)
    parse_schedule(schedule, program, [])
    with pytest.raises(TextError) as caught:
        parse_schedule(schedule.replace(old, new, 1), program, [])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("builtins.getattr(%0, '__class__')", "no private name"),
        ("builtins.getattr(%0, %0)", "no private name"),
        ("builtins.max((1, 2), key=&builtins:len)", "no function as a key"),
        ("torch.sum(%0, &builtins:getattr)", "getattr is no argument"),
        ("method apply_(%0, &builtins:len)", "is not a tensor method that a program may call"),
        ("method __reduce_ex__(%0, 2)", "is not a tensor method that a program may call"),
        ("method system(%0, 'ls')", "is not a tensor method that a program may call"),
        ("torch.from_file('/etc/passwd', False, 4)", "not a function that a program may name"),
        ("function torch.ops:load_library('a.so')", "not a function that a program may name"),
        ("function torch.ops.profiler:_record_function_enter('a')", "not a function that a program may name"),
        ("torch._C._from_dlpack(%0)", "not a function that a program may name"),
        ("os.system('ls')", "not a function that a program may name"),
        ("builtins.eval('1')", "not a function that a program may name"),
        ("operator.methodcaller('a')", "not a function that a program may name"),
    ],
)
def test_a_text_names_nothing_that_does_more_than_compute(call: str, said: str) -> None:
    text = f"octet-program 1\ninput %0 x: float32  ; #0\n%1 y: object = {call}  ; #1\noutput %1"
    with pytest.raises(TextError, match=said):
        parse(text)


def test_classes_of_other_packages_than_the_models_are_refused() -> None:
    text = "octet-program 1\ninput %0 x: float32  ; #0\noutput Instance(!subprocess:Popen, {'a': %0}, None)"
    import subprocess  # noqa: F401 - which is imported, so that its classes can be found

    assert parse(text)
    with pytest.raises(TextError, match="none of the model's packages"):
        parse(text, [], {"quant"})
    plain = text.replace("subprocess:Popen", "collections:OrderedDict")
    assert parse(plain, [], {"quant"})
