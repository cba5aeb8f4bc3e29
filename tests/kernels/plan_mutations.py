"""Random edits of valid plans, run by the kernels and by the reference.

A kernel that goes wrong may end the process, so `test_plan_text.py` calls `main` in one of its own.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import torch
from quant.kernels import plan_check, reference_plan
from torch import Tensor

from . import fuzzing
from .test_plan import CASES, integers, network, text

NUMBERS = ["-1", "0", "1", "2", "3", "5", "7", "255", "256", "-2", "-7", "16777216", "16777217", "2147483648", "nan",
           "4611686018427387904", "-9223372036854775808", "9223372036854775808", "inf", "-inf", "1e30", "1e-50",
           "1e999", "0.5", "-0.25", "1,5", "", "-", "True", "None", "0x3", "1_0", "+1", " 1", "%0", "$0", "%9", "%0.1",
           "%0.9", "1.", "(%0.0*2)", "(%0.1//%0.0)", "(%0.0-2)",
           "((%0.0+%0.1)mod4)", "(0-1)", "(2", "2,2", "1,1", "0,0", "3,", "1,1,1", "-1,-1", "2,,2", ","]  # fmt: skip
SHAPES = [(2, 6, 7, 5), (2, 5, 6), (3, 6), (6,), (), (0, 6, 7, 5), (2, 0, 7, 5), (2, 6, 0, 5), (0,), (1, 1, 1, 1),
          (2, 6), (2, 6, 7), (2, 3, 4, 5, 6), (1, 6, 1, 1), (5, 6), (6, 1, 3, 3), (5, 6, 3, 3), (5, 6, 0, 3), (0, 6),
          (5, 0), (256,), (6, 256), (5,), (1,)]  # fmt: skip
REALS = "a=%0 b=%0", "x=%0 weight=- bias=- eps=1e-05", "q=%0 k=%0 v=%0 scale=- causal=True"
X = torch.linspace(-3, 3, 60).reshape(2, 5, 6)
EXTRA = {
    "quantize": ([X], [], text("%9 = quantize x=%0 scale=0.02 zero_point=99")),
    "clamp": ([X], [], text("%9 = clamp x=%0 low=-0.5 high=inf")),
    "dequantize": ([integers(2, 6, 7, 5)], [], text("%9 = dequantize q=%0 scale=-0.5 zero_point=1")),
    "add_f32": ([X], [], text(f"%9 = add_f32 {REALS[0]}")),
    "layer_norm": ([X], [], text(f"%9 = layer_norm {REALS[1]}")),
    "group_norm": ([X], [], text("%9 = group_norm x=%0 groups=5 weight=- bias=- eps=1e-05")),
    "number": ([X], [], text("%9 = number_f32 x=%0 by=sub_from number=0.3")),
    "product": ([X], [], text("%9 = binary_f32 a=%0 b=%0 by=mul")),
    "joined": (
        [X],
        [X[0]],
        text("%8 = constant value=$0", "%7 = unsqueeze x=%8 dim=0", "%9 = cat_f32 tensors=%0,%7 dim=0"),
    ),
    "linear_dynamic": (
        [X],
        [integers(5, 6).to(torch.int8), torch.full((5,), 0.01)],
        text("%9 = linear_dynamic x=%0 q_weight=$0 scale=$1 bias=- columns=- bits=8 per_row=True"),
    ),
    "embedding": ([integers(2, 3).long() % 5], [X[0]], text("%9 = embedding x=%0 weight=$0")),
    "table": ([integers(2, 3).long() % 5], [integers(5, 14)], text("%9 = embedding_table x=%0 rows=$0 bits=8 dim=6")),
    "taken": (
        [X, integers(2, 3).long() % 5],
        [],
        text("%9 = index_select x=%0 dim=1 index=%1 negative=True", inputs=2),
    ),
    "added": (
        [X, integers(6).long() % 5, X[:, :, :1].expand(2, 5, 6).contiguous()],
        [],
        text("%9 = index_add x=%0 dim=2 index=%1 source=%2", inputs=3),
    ),
    "scattered": (
        [X, (integers(2, 3, 6) % 5).long(), X],
        [],
        text("%9 = scatter_add x=%0 dim=1 index=%1 source=%2", inputs=3),
    ),
    "recurrent": (
        [X],
        [
            integers(12, 6).to(torch.int8),
            torch.full((12,), 0.01),
            integers(12, 3).to(torch.int8),
            torch.full((12,), 0.01),
        ],
        text(
            "%8 = rnn_dynamic x=%0 h=- c=- q_weight_ih=$0 scale_ih=$1 columns_ih=- bits=8 per_row=True q_weight_hh=$2 "
            "scale_hh=$3 bias_ih=$3 bias_hh=- q_weight_hr=- scale_hr=- mode=lstm reverse=False",
            "%9 = final_state y=%8 of=c",
        ),
    ),
    "recurrent_static": (
        [integers(2, 5, 6)],
        [integers(9, 6).to(torch.int8), torch.full((9,), 0.01), integers(9, 3).to(torch.int8), torch.full((9,), 0.01)],
        text(
            "%9 = rnn_static q_x=%0 x_scale=0.02 x_zero_point=99 h=- c=- q_weight_ih=$0 scale_ih=$1 q_weight_hh=$2 "
            "scale_hh=$3 bias_ih=$3 bias_hh=- h_scale=0.01 h_zero_point=128 q_weight_hr=- scale_hr=- m_scale=1.0 "
            "m_zero_point=0 mode=gru reverse=False quantized=False"
        ),
    ),
    "function": ([X], [], text("%9 = unary_f32 x=%0 by=rsqrt")),
    "sum": ([X], [], text("%9 = reduce_f32 x=%0 by=mean dim=2,0 keepdim=False")),
    "chosen": (
        [integers(2, 1, 6), X, X[0]],
        [],
        text("%9 = where_f32 mask=%0 a=%1 b=%2", inputs=3),
    ),
    "instance_norm": ([X], [], text("%9 = instance_norm x=%0 weight=- bias=- eps=1e-05")),
    "rms_norm": ([X], [], text("%9 = rms_norm x=%0 weight=- eps=1e-05 size=6")),
    "silu": ([X], [], text("%9 = silu x=%0")),
    "softmax": ([X], [], text("%9 = softmax x=%0 logarithm=False")),
    "attention": ([X], [], text(f"%9 = attention {REALS[2]}")),
    "masked": ([X, X[0, :, :5]], [], text(f"%9 = attention {REALS[2][:-4]}False mask=%1", inputs=2)),
}
INEXACT = (
    *("layer_norm", "group_norm", "rms_norm", "instance_norm", "attention", "softmax", "silu", "unary_f32"),
    *("reduce_f32", "linear_dynamic", "embedding_table", "rnn_"),
)
"""Operations of reals that agree within rounding."""
Case = tuple[list[Tensor], list[Tensor], str]


def edit_characters(plan: str, chance: random.Random) -> str:
    place = chance.randrange(len(plan))
    new = chance.choice(["", chance.choice("0123456789-.,=%$ \nexTF_"), plan[place] * 2])
    return plan[:place] + new + plan[place + 1 :]


def edit_lines(plan: str, chance: random.Random) -> str:
    rows = plan.split("\n")
    place, other = chance.randrange(len(rows)), chance.randrange(len(rows))
    how = chance.randrange(4)
    if how == 0:
        rows[place], rows[other] = rows[other], rows[place]
    elif how == 1:
        rows.insert(place, rows[other])
    elif how == 2:
        del rows[place]
    else:
        rows[place] = rows[place].replace("%9", "%8")
    return "\n".join(rows)


def edit_fields(plan: str, chance: random.Random) -> str:
    rows = plan.split("\n")
    row = chance.randrange(1, len(rows))
    words = rows[row].split(" ")
    place = chance.randrange(len(words))
    name, equals, _ = words[place].partition("=")
    how = chance.randrange(10)
    if how == 0:
        del words[place]
    elif how == 1:
        words.append(words[place])
    elif how == 2 and len(words) > 2:
        words[2] = chance.choice(sorted(plan_check.table()))
    elif equals:
        words[place] = f"{name}={chance.choice(NUMBERS)}"
    rows[row] = " ".join(words)
    return "\n".join(rows)


def tensor(chance: random.Random) -> Tensor:
    values = integers(*chance.choice(SHAPES))
    kind = chance.choice([torch.uint8, torch.uint8, torch.int8, torch.int32, torch.float32, torch.int64])
    x = values.to(kind) if kind is not torch.float32 else values.float() / 100 - 1
    if kind is torch.float32 and x.numel() and chance.random() < 0.2:
        x.view(-1)[0] = chance.choice([float("nan"), float("inf")])
    return x.transpose(0, 1) if chance.random() < 0.2 and x.dim() > 1 else x


def mutated(case: Case, chance: random.Random) -> Case:
    inputs, constants, plan = list(case[0]), list(case[1]), case[2]
    for _ in range(chance.choice([1, 1, 2, 3])):
        how = chance.randrange(8)
        if how == 0:
            inputs[chance.randrange(len(inputs))] = tensor(chance)
        elif how == 1 and constants:
            constants[chance.randrange(len(constants))] = tensor(chance)
        elif how == 2 and plan:
            plan = edit_characters(plan, chance)
        elif how == 3:
            plan = edit_lines(plan, chance)
        else:
            plan = edit_fields(plan, chance)
    return inputs, constants, plan


def outcome(call: object, *arguments: object) -> list[Tensor] | Exception:
    try:
        return list(call(*arguments))  # type: ignore[operator]
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        return error


def alike(found: list[Tensor] | Exception, wanted: list[Tensor] | Exception, plan: str) -> bool:
    if isinstance(found, Exception) or isinstance(wanted, Exception):
        return isinstance(found, Exception) and isinstance(wanted, Exception)
    inexact = any(name in plan for name in INEXACT)
    for one, other in itertools.zip_longest(found, wanted):
        if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
            return False
        near = one.dtype == torch.float32 and torch.allclose(one, other, 1e-4, 1e-4, equal_nan=True)
        if inexact and not near and one.dtype == torch.float32:
            return False
        if not inexact and not (torch.equal(one, other) or (near and bool(one.isnan().any()))):
            return False
    return True


def main(seed: int, count: int, last: Path) -> None:
    """`count` cases, of which those that differ are printed; `last` holds the one that runs."""
    fuzzing.limit_memory(1 << 34)
    torch.set_num_threads(1)
    torch.ops.octet.run_plan(*network(), "")
    chance, seen = random.Random(seed), Counter[str]()
    cases = [*CASES.values(), *EXTRA.values(), network()]
    with last.open("w", encoding="utf-8") as file:
        for turn in range(count):
            inputs, constants, plan = mutated(chance.choice(cases), chance)
            file.seek(0)
            file.write(f"{turn}\n{describe(inputs)}\n{describe(constants)}\n{plan}\n")
            file.truncate()
            file.flush()
            found = outcome(torch.ops.octet.run_plan, inputs, constants, plan, "")
            wanted = outcome(reference_plan.run_plan, inputs, constants, plan)
            seen["refused" if isinstance(found, Exception) else "run"] += 1
            if not alike(found, wanted, plan):
                print(f"case {turn} of seed {seed}:\n{plan}\n{describe(inputs)} {describe(constants)}")
                print(f"kernels: {said(found)}\nreference: {said(wanted)}\n")
    print(dict(seen))


def describe(tensors: list[Tensor]) -> list[tuple[object, ...]]:
    return [(tuple(one.shape), str(one.dtype), one.stride()) for one in tensors]


def said(found: list[Tensor] | Exception) -> str:
    return f"{type(found).__name__}: {found}"[:300] if isinstance(found, Exception) else str(found)[:300]
