"""A plan's text as data: the kernels and the reference refuse the same texts, and run the same ones alike."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from quant.kernels import ops, plan_check, reference_plan
from quant.kernels.reference_indices import INDICES
from quant.kernels.reference_layers import LAYERS, RECURRENT
from quant.kernels.reference_ops import OPS
from quant.kernels.reference_reals import REALS
from torch import Tensor

from .test_plan import CONV, MEAN, PRODUCT, SUM, integers, network, text, weights

ROOT = Path(__file__).resolve().parents[2]
FAST = os.environ.get("OCTET_FAST_TESTS") == "1"
CLAMPED = "output_zero_point=120 quant_min=30 quant_max=240"
CONV_LINE = f"%9 = conv_u8s8_u8 {CONV} stride=1,1 padding=1,1 dilation=1,1 groups=1 {CLAMPED}"
LINEAR_LINE = f"%9 = linear_u8s8_u8 {CONV} {CLAMPED}"
POOL_LINE = "%9 = max_pool q=%0 kernel=3,3 stride=2 padding=1 dilation=1 ceil_mode=False"
AVG_LINE = f"%9 = avg_pool q=%0 kernel=3,3 {MEAN} stride=2 padding=1 ceil_mode=True"
ADD_LINE, MUL_LINE, MEAN_LINE = f"%9 = add q_a=%0 {SUM}", f"%9 = mul q_a=%0 {PRODUCT}", f"%9 = mean q=%0 dim=2,3 {MEAN}"
CAT_LINE = "%9 = cat tensors=%0,%1 dim=1 zero_points=3,200 multipliers=0.5,2.5 output_zero_point=7"
SIZED = f"%9 = interpolate q=%0 {MEAN} mode=nearest"


def line(row: str, old: str = "", new: str = "", inputs: int = 1) -> str:
    """A text of one line, with something in it replaced."""
    assert old in row
    return text(row.replace(old, new) if old else row, inputs=inputs)


PAD = "%9 = pad q=%0 widths=1,0,2,3 mode=constant fill=77"
BAD = {
    "another version": ("octet-plan 9\ninputs %0\noutputs %0", "another version"),
    "nothing": ("", "another version|expected 'octet-plan 1'"),
    "only a header": ("octet-plan 1", "inputs, operations and outputs"),
    "no inputs": ("octet-plan 1\n%1 = same x=%0\noutputs %1", "expected 'inputs ...'"),
    "no outputs": ("octet-plan 1\ninputs %0\n%1 = same x=%0", "expected 'outputs ...'"),
    "a line that ends": (text("%9 = same x=%0") + "\n", "expected"),
    "two spaces": (text("%9 = same  x=%0"), "one space"),
    "no equals": (text("%9 is same x=%0"), "expected '%register = operation"),
    "no operation": (text("%9 = sing x=%0"), "no such operation"),
    "no setting of this": (text("%9 = same x=%0 loud=True"), "same has no setting loud"),
    "a setting that is missing": (text("%9 = transpose x=%0 dim0=1"), "has no dim1"),
    "a setting twice": (text("%9 = same x=%0 x=%0"), "has x twice"),
    "a setting without a value": (text("%9 = same x="), "expected name=value"),
    "a register that is not there": (text("%9 = same x=%5"), "%5 is not there yet"),
    "a register that comes later": (text("%9 = same x=%8", "%8 = same x=%0"), "%8 is not there yet"),
    "a register twice": (text("%9 = same x=%0", "%9 = same x=%0"), "%9 is there already"),
    "an input that is written": (text("%0 = same x=%0", outputs="%0"), "%0 is there already"),
    "a negative register": (text("%-9 = same x=%0"), "is negative"),
    "a size of no register": (text("%9 = reshape x=%0 shape=%5.0,-1"), "%5 is not there yet"),
    "an input twice": ("octet-plan 1\ninputs %0 %0\noutputs %0", "twice"),
    "an output that is not made": (text(outputs="%4"), "%4, which it does not make"),
    "a constant that is not there": (line(CONV_LINE, "$2", "$3"), "there are 3 constants"),
    "a constant beyond int32": (line(CONV_LINE, "$2", f"${2**32 + 2}"), "no constant|there are 3 constants"),
    "a bias beyond int64's half": (line(CONV_LINE, "$1", f"${2**63 - 1}"), "no constant|there are 3 constants"),
    "a constant of minus zero": (line(CONV_LINE, "$0", "$-0"), "'\\$-0' is negative"),
    "a register of minus zero": (text("%9 = same x=%-0"), "'%-0' is negative"),
    "a constant of another dtype": (line(CONV_LINE, "$0", "$1"), "q_weight is"),
    "a register for a constant": (line(CONV_LINE, "$0", "%0"), "expected \\$number"),
    "a kernel that does not fit": (line(POOL_LINE, "kernel=3,3", "kernel=99,99"), "does not fit|too small"),
    "no integer": (line(MEAN_LINE + " keepdim=False", "dim=2,3", "dim=x,"), "'x' is no integer"),
    "an integer beyond int64": (line(MEAN_LINE + " keepdim=False", "dim=2,3", f"dim={2**63},"), "is no integer"),
    "a decimal comma": (line(MUL_LINE, "0.004", "0,004", inputs=2), "is no number"),
    "a divisor in one dimension": (
        text(
            "%8 = reshape x=%0 shape=2,6,35",
            f"{AVG_LINE.replace('%0', '%8').replace('3,3', '3,')} count_include_pad=True divisor_override=4",
        ),
        "a window of one dimension has no divisor_override",
    ),
    "a multiplier that is NaN": (line(MUL_LINE, "0.004", "nan", inputs=2), "is no number"),
    "an infinite multiplier": (line(MUL_LINE, "0.004", "inf", inputs=2), "expected a finite number"),
    "a multiplier beyond float32": (line(ADD_LINE, "0.7", "1e39", inputs=2), "expected a finite number"),
    "a multiplier beyond float64": (line(ADD_LINE, "0.7", "1e999", inputs=2), "is no number"),
    "a scale of zero": (text("%9 = quantize x=%0 scale=0.0 zero_point=0"), "expected a positive number"),
    "a negative scale": (text("%9 = quantize x=%0 scale=-1.0 zero_point=0"), "expected a positive number"),
    "a zero point of 256": (line(ADD_LINE, "b_zero_point=200", "b_zero_point=256", inputs=2), "expected 0 to 255"),
    "a negative zero point": (line(ADD_LINE, "a_zero_point=3", "a_zero_point=-1", inputs=2), "expected 0 to 255"),
    "an empty range": (line(ADD_LINE, "quant_min=90", "quant_min=251", inputs=2), "quant_min is above quant_max"),
    "a joined zero point of 256": (line(CAT_LINE, "3,200", "3,256", inputs=2), "zero_points is 256, expected 0 to 255"),
    "a joined multiplier of zero": (line(CAT_LINE, "0.5", "0.0", inputs=2), "expected a positive number"),
    "a joined multiplier beyond float32": (line(CAT_LINE, "0.5", "1e39", inputs=2), "expected a positive number"),
    "a zero point too few": (
        line(CAT_LINE, "3,200", "3,", inputs=2),
        "zero_points has 1 values, expected one for each",
    ),
    "a multiplier too many": (line(CAT_LINE, "0.5", "0.5,0.5", inputs=2), "multipliers has 3 values"),
    "multipliers without zero points": (
        line(CAT_LINE, "zero_points=3,200 ", inputs=2),
        "multipliers and output_zero_point, or none of them",
    ),
    "an output zero point alone": (
        line(CAT_LINE, "zero_points=3,200 multipliers=0.5,2.5 ", inputs=2),
        "multipliers and output_zero_point, or none of them",
    ),
    "a flag that is none": (text("%9 = attention q=%0 k=%0 v=%0 scale=- causal=1"), "expected True or False"),
    "a mask of what is causal": (text("%9 = attention q=%0 k=%0 v=%0 scale=- causal=True mask=%0"), "has a mask"),
    "a mode that is none": (line(PAD, "constant", "mirror"), "expected one of"),
    "a stride of zero": (line(CONV_LINE, "stride=1,1", "stride=0,1"), "stride is 0, expected 1 to"),
    "a dilation of zero": (line(CONV_LINE, "dilation=1,1", "dilation=1,0"), "dilation is 0, expected 1 to"),
    "negative padding": (line(CONV_LINE, "padding=1,1", "padding=-1,1"), "padding is -1, expected 0 to"),
    "padding without end": (line(CONV_LINE, "padding=1,1", f"padding=1,{2**62}"), "expected 0 to"),
    "padding for another rank": (line(CONV_LINE, "padding=1,1", "padding=1,1,1"), "padding has 3 values, expected 2"),
    "no groups": (line(CONV_LINE, "groups=1", "groups=0"), "groups is 0, expected 1 to"),
    "groups that do not divide": (line(CONV_LINE, "groups=1", "groups=4"), "channels|groups"),
    "a pool's negative padding": (line(POOL_LINE, "padding=1", "padding=-1"), "padding is -1"),
    "a pool's stride of zero": (line(POOL_LINE, "stride=2", "stride=0"), "stride is 0"),
    "a pool's padding": (line(POOL_LINE, "padding=1", "padding=2"), "more than half its window"),
    "a pool of four dimensions": (line(POOL_LINE, "3,3", "3,3,3,3"), "4 dimensions, expected 1 to 3"),
    "a window without end": (line(AVG_LINE, "3,3", "16777216,16777216"), "more than"),
    "a divisor of zero": (line(f"{AVG_LINE} divisor_override=0"), "divisor_override is 0, expected 1 to"),
    "sizes of both kinds": (line(f"{SIZED} size=3,3 scale_factor=2"), "one of size and scale_factor"),
    "no size": (line(SIZED), "one of size and scale_factor"),
    "a size beyond memory": (line(f"{SIZED} size=16777216,16777216"), "more than 2\\*\\*40|expected"),
    "a factor beyond memory": (line(f"{SIZED} scale_factor=16000000"), "more than 2\\*\\*40"),
    "a pool's sizes beyond memory": (text(f"%9 = adaptive_max_pool q=%0 size={2**24},{2**24}"), "more than 2\\*\\*40"),
    "no chunks": (text("%9 = chunk x=%0 chunks=0 dim=1 index=0"), "chunks is 0, expected 1 to"),
    "negative chunks": (text("%9 = chunk x=%0 chunks=-2 dim=1 index=0"), "chunks is -2, expected 1 to"),
    "a step of zero": (text("%9 = slice x=%0 dim=1 start=0 end=4 step=0"), "step is 0, expected 1 to"),
    "two open sizes": (text("%9 = reshape x=%0 shape=-1,-1"), "open|one dimension"),
    "a size that is none": (text("%9 = reshape x=%0 shape=(%0.1//),-1"), "no integer|no size"),
    "brackets left open": (text("%9 = reshape x=%0 shape=(%0.1*2,-1"), "no size"),
    "brackets too many": (text("%9 = reshape x=%0 shape=(%0.1*2)),-1"), "no size"),
    "an operation of sizes that is none": (text("%9 = reshape x=%0 shape=(%0.1**2),-1"), "no integer|no size"),
    "brackets without end": (text(f"%9 = expand x=%0 shape={'(' * 40}1{'+1)' * 40},"), "more than 32 brackets"),
    "a size of no register in brackets": (text("%9 = reshape x=%0 shape=(2*%5.0),-1"), "%5 is not there yet"),
    "a size of no dimension": (text("%9 = reshape x=%0 shape=(2*%0.7),-1"), "dimension|range"),
    "a size divided by zero": (text("%9 = reshape x=%0 shape=(2//(%0.0-2)),-1"), "divided by zero"),
    "a size with the rest of zero": (text("%9 = reshape x=%0 shape=(2mod0),-1"), "divided by zero"),
    "a size beyond int64": (text(f"%9 = reshape x=%0 shape=({2**40}*{2**40}),-1"), "beyond 2\\*\\*40"),
    "a sum beyond memory": (text(f"%9 = reshape x=%0 shape=({2**40}+1),-1"), "beyond 2\\*\\*40"),
    "a number beyond memory": (text(f"%9 = reshape x=%0 shape=({2**40 + 1}*1),-1"), "no size"),
    "what does not hold": (text("%9 = holds x=%0 size=(%0.1mod4) equals=0"), "is 2, expected 0"),
    "factors of other depths": (
        text("%9 = matmul_f32 q_a=%0 a_zero_point=0 q_b=%0 b_zero_point=0 multiplier=1.0"),
        "do not go together",
    ),
    "a larger shape beyond memory": (text(f"%9 = expand x=%0 shape={2**32},-1,-1,-1,-1"), "more than 2\\*\\*40"),
    "a larger shape of open sizes": (text("%9 = expand x=%0 shape=-1,2,6,7,5"), "a new dimension has no size to keep"),
    "a larger shape of fewer sizes": (text("%9 = expand x=%0 shape=-1,-1"), "its input has more dimensions"),
    "a larger shape of other sizes": (text("%9 = expand x=%0 shape=2,6,7,6"), "another size|must match"),
    "sizes that overflow": (text(f"%9 = reshape x=%0 shape={2**33},{2**33}"), "more than|invalid|overflow"),
    "a dimension twice": (text("%9 = permute x=%0 dims=0,1,1,2"), "twice|duplicate"),
    "an end before its start": (text("%9 = flatten x=%0 start=2 end=1"), "after its end|come after"),
    "widths that are odd": (line(PAD, "1,0,2,3", "1,0,2"), "not in pairs"),
    "widths that cut all": (line(PAD, "1,0,2,3", "-3,-3"), "cuts away more"),
    "a number for a list": (line(PAD, "1,0,2,3", "1"), "expected a list"),
    "a hole in a list": (line(PAD, "1,0,2,3", "1,,2"), "an empty part"),
}


EMPTY = {
    "a negative size after a zero": ("reshape x=%0 shape=0,(0-5)", "a size is -5|invalid shape dimension -5"),
    "two negative sizes after a zero": ("reshape x=%0 shape=0,(0-5),(0-3)", "a size is -5|invalid shape dimension -5"),
    "sizes beyond memory after a zero": (f"reshape x=%0 shape=0,{2**30},{2**30}", "more than 2\\*\\*40"),
    "a larger shape beyond memory": (f"expand x=%0 shape={2**30},{2**30},-1,-1,-1,-1", "more than 2\\*\\*40"),
    "a size beyond memory": (f"interpolate q=%0 {MEAN} mode=nearest size={2**21},{2**21}", "more than 2\\*\\*40"),
    "widths beyond memory": (f"pad q=%0 widths={2**21},0,{2**21},0 mode=constant fill=7", "more than 2\\*\\*40"),
}


@pytest.mark.parametrize(("row", "message"), EMPTY.values(), ids=list(EMPTY))
def test_sizes_beside_a_zero_are_checked_too(extension: None, row: str, message: str) -> None:
    x, program = integers(0, 3, 4, 4), text(f"%9 = {row}")
    with pytest.raises((ValueError, RuntimeError), match=message):
        reference_plan.run_plan([x], [], program)
    with pytest.raises(ValueError, match=message):
        torch.ops.octet.run_plan([x], [], program, "native")


@pytest.mark.parametrize(
    "row",
    [
        f"interpolate q=%2 {MEAN} mode=nearest scale_factor=1.0",
        f"interpolate q=%2 {MEAN} mode=bilinear scale_factor=1.0 align_corners=False",
        "pad q=%2 widths=0,0 mode=constant fill=7",
        "pad q=%2 widths=0,0,0,0 mode=replicate fill=0",
    ],
)
def test_empty_results_need_no_tables(extension: None, row: str) -> None:
    program = text(f"%2 = expand x=%0 shape=0,1,1,{2**38}", f"%9 = {row}")
    (y,) = torch.ops.octet.run_plan([integers(0, 1, 1, 1)], [], program, "native")
    assert y.shape == (0, 1, 1, 2**38)


def test_empty_products_need_no_batches(extension: None) -> None:
    factors = "q_a=%2 a_zero_point=3 q_b=%2 b_zero_point=200 multiplier=0.5"
    x = torch.empty(1, 1, 1, dtype=torch.uint8)[:, :0]
    program = text(
        f"%2 = expand x=%0 shape={2**38},0,1", f"%3 = expand x=%1 shape={2**38},1,1",
        f"%9 = matmul_f32 {factors.replace('q_b=%2', 'q_b=%3')}", inputs=2,
    )  # fmt: skip
    (y,) = torch.ops.octet.run_plan([x, integers(1, 1, 1)], [], program, "native")
    assert y.shape == (2**38, 0, 1)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(f"adaptive_max_pool q=%0 size={2**24},{2**24},{2**24}", id="windows that tile"),
        pytest.param(
            f"max_pool q=%0 kernel={2**24},1,1 stride=1 padding={2**23},0,0 dilation=1 ceil_mode=False", id="padding"
        ),
    ],
)
def test_pools_of_hostile_sizes_are_refused_or_planned_at_once(extension: None, row: str) -> None:
    """Windows that are made before their number is checked took 1.2 GB; steps through padding, half a minute."""
    start = time.process_time()
    with contextlib.suppress(ValueError):
        torch.ops.octet.run_plan([integers(1, 1, 4096, 1, 1)], [], text(f"%9 = {row}"), "native")
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("mode", "widths", "message"), [("reflect", "3,4", "pads more"), ("circular", "5,0", "goes round")]
)
def test_empty_pads_have_widths_that_fit(extension: None, mode: str, widths: str, message: str) -> None:
    x = integers(0, 3, 4)
    (y,) = torch.ops.octet.run_plan([x], [], text(f"%9 = pad q=%0 widths=3,3 mode={mode} fill=0"), "native")
    assert y.shape == (0, 3, 10)
    with pytest.raises(ValueError, match=message):
        torch.ops.octet.run_plan([x], [], text(f"%9 = pad q=%0 widths={widths} mode={mode} fill=0"), "native")


def tensors(program: str) -> list[Tensor]:
    given = integers(2, 6, 7, 5)
    count = program.split("\n")[1].count("%") if "\n" in program else 1
    real = any(op in program for op in ("quantize x", "attention"))
    return [given.float() if real else given] * count


@pytest.mark.parametrize(("program", "message"), BAD.values(), ids=list(BAD))
def test_bad_text_is_refused_by_its_line(extension: None, program: str, message: str) -> None:
    constants = weights(5, 6, 3, 3)
    for run in (lambda *given: torch.ops.octet.run_plan(*given, ""), reference_plan.run_plan):
        with pytest.raises(ValueError, match=message):
            run(tensors(program), constants, program)


def test_errors_quote_the_line(extension: None) -> None:
    program = line(CONV_LINE, "stride=1,1", "stride=-3,1")
    for run in (lambda *given: torch.ops.octet.run_plan(*given, ""), reference_plan.run_plan):
        with pytest.raises(ValueError, match=r"plan line '%9 = conv_u8s8_u8 .*': stride is -3"):
            run([integers(2, 6, 7, 5)], weights(5, 6, 3, 3), program)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_multipliers_of_layers_are_finite(extension: None, value: float) -> None:
    for row, x, shape in ((CONV_LINE, (2, 6, 7, 5), (5, 6, 3, 3)), (LINEAR_LINE, (3, 6), (5, 6))):
        constants = weights(*shape)
        constants[2][3] = value
        for run in (lambda *given: torch.ops.octet.run_plan(*given, ""), reference_plan.run_plan):
            with pytest.raises(ValueError, match="not finite"):
                run([integers(*x)], constants, text(row))


def test_the_table_has_every_operator_with_all_its_settings() -> None:
    functions: dict[str, Any] = {**OPS, **reference_plan.MOVES, **REALS, **LAYERS, **INDICES, **RECURRENT}
    functions["final_state"] = lambda y, of: None  # which is no function of its operands alone
    for op, settings in plan_check.table().items():
        parameters = dict(inspect.signature(functions[op]).parameters)
        parameters.pop("product", None)  # which is no setting
        free = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        assert free or set(settings) == set(parameters), op
        for name, one in parameters.items():
            if one.kind is not inspect.Parameter.VAR_KEYWORD:
                assert settings[name].optional == (one.default is not inspect.Parameter.empty), (op, name)
    assert set(reference_plan.MOVES) | set(REALS) | set(LAYERS) | set(INDICES) | set(RECURRENT) <= set(
        plan_check.table()
    )


@pytest.mark.parametrize("op", sorted(plan_check.table()))
def test_the_kernels_have_every_operator_of_the_table(extension: None, op: str) -> None:
    with pytest.raises(ValueError, match="has no "):
        torch.ops.octet.run_plan([integers(2, 6)], [], text(f"%9 = {op}"), "")


def locale_of(folder: Path) -> str:
    """A folder of locales that has de_DE.UTF-8, whose decimal point is a comma."""
    if shutil.which("localedef") is None or not Path("/usr/share/i18n/locales/de_DE").exists():
        pytest.skip("localedef and the sources of de_DE are not here (on Debian: apt install locales)")
    made = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(folder / "de_DE.UTF-8")]
    subprocess.run(made, capture_output=True, check=False)  # warnings are an exit status of 1
    if not (folder / "de_DE.UTF-8").exists():
        pytest.skip("localedef made no de_DE.UTF-8")
    return str(folder)


PRINTS = """
import ctypes, locale, sys
sys.path.append({root!r})
locale.setlocale(locale.LC_NUMERIC, "de_DE.UTF-8")
strtod = ctypes.CDLL(None).strtod
strtod.restype = ctypes.c_double
assert strtod(b"0.5", None) == 0.0, "the locale has no decimal comma"
import torch
from quant.kernels import ops, reference_plan
from tests.kernels.test_plan import network
inputs, constants, program = network()
found = torch.ops.octet.run_plan(inputs, constants, program, "")
expected = reference_plan.run_plan(inputs, constants, program)
assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
print("alike")
"""


@pytest.mark.skipif(
    FAST, reason="OCTET_FAST_TESTS=1: a process that imports torch takes most of a minute under emulation"
)
def test_decimal_commas_change_nothing(extension: None, tmp_path: Path) -> None:
    environment = {**os.environ, "LOCPATH": locale_of(tmp_path)}
    child = [sys.executable, "-c", PRINTS.format(root=str(ROOT))]
    done = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "alike", done.stdout + done.stderr


@pytest.mark.skipif(
    FAST, reason="OCTET_FAST_TESTS=1: a process that imports torch takes most of a minute under emulation"
)
def test_edited_texts_run_alike_or_are_refused_by_both(extension: None, tmp_path: Path) -> None:
    """In a process of its own: what a kernel must never do is end it."""
    last = tmp_path / "last"
    code = f"import pathlib, sys; sys.path.append({str(ROOT)!r}); from tests.kernels import plan_mutations; "
    child = [sys.executable, "-c", f"{code}plan_mutations.main(7, 5000, pathlib.Path({str(last)!r}))"]
    done = subprocess.run(child, capture_output=True, text=True, timeout=300, check=False)
    case = last.read_text(encoding="utf-8") if last.exists() else "none began"
    assert done.returncode == 0, f"exit status {done.returncode} at\n{case}\n{done.stderr[-2000:]}"
    assert "case " not in done.stdout, done.stdout[:4000]
    assert "'run'" in done.stdout
    assert "'refused'" in done.stdout


def test_text_survives_the_round_trip() -> None:
    _, _, program = network()
    assert str(reference_plan.parse(program)) == program


def test_the_reference_refuses_without_the_extension() -> None:
    call: Any = ops._without_backend("run_plan")
    with pytest.raises(ValueError, match="expected 0 to 255"):
        call([integers(2, 3)], [], text("%9 = dequantize q=%0 scale=0.5 zero_point=300"), "")
