"""Programs as text: every kind of call and of argument comes back, and what is no program is refused by its line."""

from __future__ import annotations

import collections
import enum
import math
import re
import subprocess
import sys
import types
import unittest.mock
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import quant
from quant.runtime.expected_call import ExpectedCall, ExpectedInput
from quant.runtime.objects import Given, Instance, Result, Write
from quant.runtime.program import Program, alike
from quant.runtime.program_reader import parse
from quant.runtime.shown_programs import ProgramsByModule, programs_of
from quant.runtime.text_scanner import TextError
from quant.runtime.tree_reader import Reader
from quant.runtime.tree_text import Writer
from quant.runtime.trees import Attr, PackedParts, Ref, Sizes

EVERY_KIND = """\
octet-program 1
sizes n=4 s1=16 s2=112
input %0 x: float32[n, 3, s1]  ; #0
input %1 k: object  ; #1
%2 x: uint8[n, 3, s1] scale=0.02 zero_point=128 = quantize(%0)  ; #0
%3 conv: uint8[n, 8, s1-2] scale=0.1 zero_point=3 = layer conv(%2, site=1)  ; #2 from block, block.norm, conv
%4 add_5: uint8[n, 8, s1-2] scale=0.2 zero_point=0 = octet.add(q_a: %3, a_zero_point: 3, a_multiplier: 0.5, q_b: %3, \
b_zero_point: 3, b_multiplier: 0.5, output_zero_point: 0, quant_min: 0, quant_max: 255)  ; #5
%5 table: uint8[n, 8, s1-2] scale=0.2 zero_point=0 = octet.lookup(q: %4, table: $0)  ; #6
%6 cat_7: uint8[2*n, 8, s1-2] scale=0.2 zero_point=0 = move torch.cat((%5, %3), dim=0) rescaled {%3: (3, 0.5, 0)}  ; #7
%7 drop: uint8[2*n, 8, s1-2] scale=0.2 zero_point=0 = move same(%6)  ; #8
%8 view_9: uint8[2*n, s2] scale=0.2 zero_point=0 = move method reshape(%7, %1, -1)  ; #9
%9 view_9: float32[2*n, s2] = dequantize(%8)  ; #9 step drop
%10 size_10: object = method size(%9, 0)  ; #10
%11 guard_11: object = guard(%10, 8)  ; #11 of block
%12 rnn: object = recurrent block.rnn(%8, (%0, None), hx=%9) -> uint8  ; #12 from block.rnn
%13 rnn: uint8[2*n, s2] scale=inf zero_point=0 = first(%12)  ; #13
%14 norm: float32[2*n, s2] = module block.norm(%9)  ; #14 of block from block.norm
%15 dropout_15: float32[2*n, s2] = torch.nn.functional.dropout(%14, p=0.5, training=False)  ; #15 of block frozen
%16 add__16: float32[2*n, s2] = method add_(@block.count, 1)  ; #16 writes
output Result({'y': %13, 'z': (%15,)}, (Write('block.count', %16),))
$0 = uint8[4]
  00017fff"""


def test_every_kind_of_call_comes_back() -> None:
    program = parse(EVERY_KIND)
    assert str(program) == EVERY_KIND
    assert parse(str(program)) == program
    assert program.shape(9) == (8, 112)
    assert {type(one).__name__ for one in program.instructions} == {
        "Quantize", "Dequantize", "LayerCall", "KernelCall", "IntegerMove", "FloatCall", "Guard", "RecurrentCall",
        "TakeSequence",
    }  # fmt: skip


WHOLE_CALL = """\
octet-program 1
sizes n=4
call block.0(x=%0, cache=[(%1, %2), None], scale=0.5, 'odd name'=&torch:relu, count=%3)  ; writes @block.0.steps, %0
input %0 x_0: float32[n, 3]  ; #0 argument x float32 rank 2 contiguous
input %1 cache_1: float64[n]  ; #1 argument 'cache[0][0]'
input %2 cache_2: object  ; #2 argument 'cache[0][1]' int
input %3 count_3: object  ; #3 argument count object
output %0"""


def test_the_calls_that_a_program_stands_for_come_back() -> None:
    program = parse(WHOLE_CALL)
    assert str(program) == WHOLE_CALL
    assert program.call == ExpectedCall(
        "block.0",
        {"x": Ref(0), "cache": [(Ref(1), Ref(2)), None], "scale": 0.5, "odd name": torch.relu, "count": Ref(3)},
        {
            0: ExpectedInput("x", Tensor, torch.float32, 2, contiguous=True),
            1: ExpectedInput("cache[0][0]"),
            2: ExpectedInput("cache[0][1]", int),
            3: ExpectedInput("count", object),
        },
        writes=True,
        written=(Attr("block.0.steps"), Ref(0)),
    )


def test_a_call_that_names_what_is_no_input_or_checks_what_is_not_known_is_refused() -> None:
    with pytest.raises(TextError, match="the call names %9, which is not an input"):
        parse(WHOLE_CALL.replace("x=%0", "x=%9"))
    with pytest.raises(TextError, match="%0 is an input that the call does not name"):
        parse(re.sub("(?m)^call .*$", "call ()", WHOLE_CALL))
    with pytest.raises(TextError, match="'flat' is not a requirement of an input"):
        parse(WHOLE_CALL.replace("contiguous", "flat"))
    with pytest.raises(TextError, match="line 5: expected 'argument'"):
        parse(WHOLE_CALL.replace(" argument 'cache[0][0]'", ""))


def test_two_programs_that_differ_in_one_place_are_not_equal() -> None:
    program = parse(EVERY_KIND)
    for one, other in (
        ("site=1", "site=2"),
        ("00017fff", "00017ffe"),
        ("torch.cat", "torch.stack"),
        ("%6 cat_7", "%6 x"),
    ):
        assert parse(EVERY_KIND.replace(one, other)) != program


class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclass(frozen=True)
class Cache:
    keys: Any
    size: int = 0


class Opaque:
    pass


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=8), st.complex_numbers(),
    st.builds(Ref, st.integers(0, 99)), st.builds(Attr, st.sampled_from(["weight", "0.a-b", "odd name", "ü.1"])),
    st.sampled_from([..., torch.float32, torch.bfloat16, torch.strided, torch.channels_last, torch.device("cpu"),
                     torch.device("cuda:1"), Color.RED, Cache, int, torch.relu, math.sqrt, range(1, 9, 2), {1, 2},
                     frozenset("ab"), torch.Size([2, 3]), numpy.float32(0.1), numpy.int64(3),
                     numpy.arange(6.0).reshape(2, 3), torch.tensor(3), torch.randn(2, 0), torch.ones(2, 3).bool(),
                     torch.full((3,), math.nan)]),
    st.builds(Given, st.text(max_size=3), st.just(((True, "a"), (False, 0)))),
)  # fmt: skip
KEYS = st.one_of(st.text(max_size=4), st.integers(), st.tuples(st.integers(), st.text(max_size=2)))


def containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Everything that holds values."""
    return st.one_of(
        st.lists(inside, max_size=3),
        st.lists(inside, max_size=3).map(tuple),
        st.lists(inside, max_size=3).map(Sizes),
        st.dictionaries(KEYS, inside, max_size=3),
        st.dictionaries(KEYS, inside, max_size=3).map(collections.OrderedDict),
        st.builds(slice, inside, inside, inside),
        st.builds(Pair, inside, inside),
        st.builds(Cache, inside, st.integers()),
        st.builds(PackedParts, inside, inside, inside, inside),
        st.builds(Instance, st.just(Opaque), st.dictionaries(st.text(max_size=4), inside, max_size=2), inside),
        st.builds(lambda value, other: Result(value, (Write("a.b", other),)), inside, inside),
    )


@given(st.recursive(LEAVES, containers, max_leaves=12))
def test_any_tree_comes_back(tree: Any) -> None:
    writer = Writer()
    text = writer.value(tree)
    reader = Reader(text, 1, writer.constants)
    found = reader.value()
    reader.end()
    assert alike(found, tree)


@given(st.lists(LEAVES, max_size=3), st.dictionaries(st.text(min_size=1, max_size=4), LEAVES, max_size=3))
def test_any_arguments_come_back(args: list[Any], kwargs: dict[str, Any]) -> None:
    writer = Writer()
    reader = Reader(writer.arguments(tuple(args), kwargs, names=("one", "two")), 1, writer.constants)
    assert alike(reader.arguments(), (tuple(args), kwargs))


def test_a_packed_sequence_comes_back() -> None:
    packed = pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([3, 1]))
    writer = Writer()
    found = Reader(writer.value(packed), 1, writer.constants)
    found.constants = writer.constants
    value = found.value()
    assert isinstance(value, PackedSequence)
    assert alike(tuple(value), tuple(packed))


SHORT = """\
octet-program 1
input %0 x: float32[2]  ; #0
%1 y: float32[2] = torch.relu(%0)  ; #1
output %1"""

REFUSED: dict[str, tuple[str, str, str]] = {
    "no program": ("octet-program 1", "octet-plan 1", "line 1: expected 'octet-program 1'"),
    "unknown value": ("torch.relu(%0)", "torch.relu(%7)", r"line 3: %7 is used before it is defined"),
    "defined twice": ("%1 y", "%0 y", "line 3: %0 is defined twice"),
    "not dense": ("%1", "%5", "no line defines %1"),
    "no output": ("\noutput %1", "", "no line with the output"),
    "a dtype": ("%1 y: float32", "%1 y: float33", "line 3: 'float33' is not a dtype"),
    "a symbol": ("%1 y: float32[2]", "%1 y: float32[m]", "line 3: size 'm' is not among the sizes"),
    "a file": ("torch.relu", "torch.load", "line 3: torch.load is not a function that a program may name"),
    "a builtin": ("torch.relu", "builtins.eval", "line 3: builtins.eval is not a function"),
    "a module": ("torch.relu", "os.system", "line 3: os.system is not a function"),
    "a lambda": ("torch.relu", "function tests:<lambda>", "line 3: tests.<lambda> is not a function"),
    "a method": ("torch.relu", "method __subclasses__", "line 3: '__subclasses__' is not a tensor method"),
    "a class": ("torch.relu(%0)", "torch.relu(!no.such:Thing(1))", "line 3: class Thing is not known; import no.such"),
    "no tuple": ("torch.relu(%0)", "torch.relu(!builtins:str('a'))", "line 3: str is neither a dataclass nor a tuple"),
    "an object": ("torch.relu(%0)", "torch.relu(?mine:Thing)", "line 3: holds an object of class Thing"),
    "a constant": ("torch.relu(%0)", "torch.relu($0)", r"line 3: there is no constant \$0"),
    "a bracket": ("torch.relu(%0)", "torch.relu(%0", r"line 3: expected '\)' at column"),
    "more": ("torch.relu(%0)  ; #1", "torch.relu(%0)  ; #1 because", "line 3: expected nothing more"),
    "a list's key": ("torch.relu(%0)", "method sort(['a file'], key=%0)", "line 3: takes no function as a key"),
    "a keyed maximum": ("torch.relu(%0)", "builtins.max(%0, key=%0)", "line 3: takes no function as a key"),
    "no scale": ("torch.relu(%0)", "quantize(%0)", "line 3: expected a scale and a zero point"),
}


@pytest.mark.parametrize(("old", "new", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_program_is_refused_by_its_line(old: str, new: str, said: str) -> None:
    assert str(parse(SHORT)) == SHORT
    with pytest.raises(TextError, match=said):
        parse(SHORT.replace(old, new))


def test_what_a_models_package_imports_is_no_class_of_it() -> None:
    """Each module of a package leads to the modules that it imports, and these to any class."""
    module = types.ModuleType("mymodel")
    module.subprocess, module.Own = subprocess, type("Own", (), {"__module__": "mymodel"})  # type: ignore[attr-defined]
    with unittest.mock.patch.dict(sys.modules, mymodel=module):
        own = SHORT.replace("torch.relu(%0)", "builtins.isinstance(%0, !mymodel:Own)")
        assert str(parse(own, packages={"mymodel"})) == own
        with pytest.raises(TextError, match=r"class subprocess\.Popen of mymodel is none of the model's packages"):
            parse(own.replace("mymodel:Own", "mymodel:subprocess.Popen"), packages={"mymodel"})


def test_an_object_of_a_users_class_is_printed_and_not_read() -> None:
    program = parse(SHORT)
    program.output = Opaque()
    with pytest.raises(TextError, match="line 4: holds an object of class Opaque, which no text stands for"):
        parse(str(program))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = torch.relu(self.norm(self.conv(x)))
        return {"scores": self.fc(y.mean((2, 3)))}


def converted(model: nn.Module, x: Tensor) -> nn.Module:
    torch.manual_seed(0)
    return quant.quantize_static(model.eval(), [x], progress=False)


def test_a_converted_model_shows_its_program() -> None:
    q = converted(Net(), torch.randn(4, 3, 8, 8))
    program = q.program
    assert isinstance(program, Program)
    calls = [line.partition(" = ")[2].partition("  ;")[0] for line in str(program).splitlines() if line[0] == "%"]
    assert [call.partition("(")[0] for call in calls] == ["quantize", "layer conv", "octet.mean", "layer fc"]
    assert "%2 conv: uint8[n, 4, s1-2, s1-2] scale=" in str(program)
    assert parse(str(program)) == program
    assert programs_of(q) == {"": program}


class Island(nn.Module):
    """A forward that leaves torch between two parts, which have a program each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        return self.two(y / float(y.detach().abs().max().item()))


def test_a_model_with_an_island_shows_the_programs_of_its_parts() -> None:
    q = converted(Island(), torch.randn(4, 8))
    assert isinstance(q.program, ProgramsByModule)
    assert list(q.program) == ["one", "two"]
    assert str(q.program).startswith("# one\noctet-program 1\nsizes n=4\n")


def test_a_model_keeps_an_attribute_of_its_own() -> None:
    model = Net()
    model.program = "mine"  # type: ignore[assignment]
    q = converted(model, torch.randn(4, 3, 8, 8))
    assert q.program == "mine"
    assert list(programs_of(q)) == [""]
