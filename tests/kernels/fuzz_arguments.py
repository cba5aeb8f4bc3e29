"""`make fuzz-arguments`: hostile arguments to every operator of the extension: an error or a result, never a crash.

A valid call (random_calls.py) has one to three of its arguments replaced: by numbers out of every range, tensors of
other dtypes, shapes, layouts and devices, and words that mean nothing. Operators and their arguments are those of
torch's registry. What is refused is refused by a Python error of the usual kinds; a call with a tensor of another
device gives nothing that claims to be on this one.

    python tests/kernels/fuzz_arguments.py --seconds 600 --seed 1000
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __package__ in (None, ""):
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from quant.kernels import in_graphs, ops

from tests.kernels import fuzzing, random_calls
from tests.kernels.fuzzing import Draws, Fuzzer, Wrong

PATH = "tests/kernels/fuzz_arguments.py"

MOST_COPIED = 1 << 24
INTEGERS = (0, 1, -1, 2, 3, 7, 8, 16, 31, 127, 128, 255, 256, -128, -129, 65535, 65536, 2**31 - 1, 2**31, -(2**31),
            2**32, 2**32 - 1, 2**40, 2**61, 2**62, 7905747460161236407, 2**63 - 1, -(2**63), -(2**62), -2)  # fmt: skip
REALS = (1.0, 0.0, -0.0, -1.0, 0.5, math.nan, math.inf, -math.inf, 1e-45, 1e-40, 2.0**-127, 2.0**127, 3.5e38, 1e308,
         -1e308, 5e-324)  # fmt: skip
WORDS = ("", "native", "fbgemm", "qnnpack", "reference", "onednn", "nothing", "lstm", "gru", "rnn_tanh", "rnn_relu",
         "sum", "mean", "max", "x" * 5000, "\x00", "é")  # fmt: skip
DTYPES = (torch.float32, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float64, torch.float16,
          torch.bfloat16, torch.bool, torch.int16, torch.complex64)  # fmt: skip
SHAPES = ((), (0,), (1,), (3,), (256,), (2, 3), (0, 3), (3, 0), (1, 1), (2, 3, 4), (2, 0, 4), (1, 2, 3, 4),
          (2, 3, 4, 5), (0, 3, 4, 5), (1, 1, 2, 3, 4), (1, 1, 1, 1, 1, 2), (2**40, 0), (0, 2**40), (2**31, 0, 2**31),
          (64, 4, 4), (64, 2, 8), (5, 2**16, 0))  # fmt: skip
ERRORS = (ValueError, TypeError, IndexError, RuntimeError, NotImplementedError, MemoryError, OverflowError)


def any_tensor(draws: Draws) -> Tensor:
    """A tensor that nobody asked for."""
    shape, dtype = draws.choice(SHAPES), draws.choice(DTYPES)
    if math.prod(shape) == 0:
        x = torch.empty(shape, dtype=dtype)
    else:
        values = torch.randint(-300, 300, shape, generator=draws.generator())
        x = random_calls.MEMORY.copy(values.to(dtype)) if dtype != torch.bool else values > 0
    return odd(draws, x)


def odd(draws: Draws, x: Tensor) -> Tensor:
    """The same tensor, laid out, held or filled in another way."""
    how = draws.below(16)
    if x.numel() > MOST_COPIED:  # expanded before: to copy it takes for ever
        return x
    try:
        if how == 1 and x.dim() > 1:
            return x.transpose(0, -1)
        if how == 2 and x.dim():
            return x[:1].expand(2**40 if draws.one_in(4) else 3, *x.shape[1:])
        if how == 3:
            return x.to("meta")
        if how == 4:
            return x.to_sparse()
        if how == 5:
            return x.unsqueeze(0)
        if how == 6 and x.dim():
            return x[..., :-1]
        if how == 7 and x.dim():
            return torch.cat([x, x], -1)
        if how == 8 and x.is_floating_point():
            return torch.full_like(x, draws.choice(REALS))
        if how == 9 and x.is_floating_point():
            return x.clone().requires_grad_()
        if how == 10 and x.is_floating_point():
            return torch._neg_view(x)
        if how == 11 and x.dim():
            return x.flatten()
        if how == 12:
            return x.as_strided(x.shape, (0,) * x.dim())
        if how == 13 and not x.is_floating_point() and x.dtype != torch.bool:
            return torch.full_like(
                x, draws.choice((torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max, -1 if x.dtype.is_signed else 255))
            )
        if how == 14:
            return x.to(draws.choice(DTYPES))
        if how == 15 and x.dim():
            return x.narrow(draws.below(x.dim()), 0, 0)
    except (RuntimeError, IndexError, TypeError, MemoryError):  # torch has no such tensor
        return x
    return x


def hostile(draws: Draws, kind: str, valid: Any) -> Any:
    """Another value in an argument's place."""
    if kind.startswith("List["):
        return hostile_list(draws, kind[5:-1], valid if isinstance(valid, list) else [])
    if kind.startswith("Optional") and draws.one_in(3):
        return None if valid is not None else hostile(draws, kind[9:-1], None)
    kind = kind.removeprefix("Optional[").removesuffix("]")
    if kind == "Tensor":
        if draws.one_in(16):
            return None  # which torch takes for a tensor without memory
        return odd(draws, valid) if isinstance(valid, Tensor) and draws.below(3) else any_tensor(draws)
    if kind == "int":
        return draws.choice(INTEGERS)
    if kind == "float":
        return draws.choice(REALS)
    if kind == "bool":
        return bool(draws.below(2))
    if kind == "str" and isinstance(valid, str) and valid.startswith("octet-plan"):
        return hostile_plan(draws, valid)
    assert kind == "str", f"no hostile value of a {kind}"
    return draws.choice(WORDS)


def hostile_list(draws: Draws, kind: str, valid: list[Any]) -> list[Any]:
    how, changed = draws.below(4), list(valid)
    if how == 0 and changed:
        place = draws.below(len(changed))
        changed[place] = hostile(draws, kind, changed[place])
    elif how == 1:
        changed.append(hostile(draws, kind, None))
    elif how == 2 and changed:
        del changed[draws.below(len(changed))]
    else:
        changed = [hostile(draws, kind, None) for _ in range(draws.below(5))]
    return changed


def hostile_plan(draws: Draws, text: str) -> str:
    """A text of which one number is another; other edits are those of plan_mutations.py."""
    words = text.split(" ")
    places = [place for place, word in enumerate(words) if "=" in word]
    if not places:
        return text + "\n"
    place = draws.choice(places)
    name = words[place].partition("=")[0]
    end = "\n" + words[place].partition("\n")[2] if "\n" in words[place] else ""
    words[place] = f"{name}={draws.choice((*INTEGERS, *REALS))}{end}"
    return " ".join(words)


@functools.cache
def operators() -> dict[str, Any]:
    """Name -> schema of every operator that this package defines and that computes here."""
    own = {f"octet::{name}" for name in (*ops.SCHEMAS, *in_graphs.SCHEMAS)}  # tests define others
    known = {
        one.name: one for one in torch._C._jit_get_all_schemas() if one.name.startswith(("octet::", "octet_native::"))
    }
    return {name: known[name] for name in sorted(known) if name in own or name.startswith("octet_native::")}


def _tensors(draws: Draws) -> list[Tensor]:
    return [any_tensor(draws) for _ in range(draws.below(3))]


def _kept_text(draws: Draws) -> list[Any]:
    inputs, constants, program = random_calls.run_plan(draws)
    return [inputs, torch.ops.octet_native.keep_text(constants, program, "")]


NATIVE: dict[str, Callable[[Draws], list[Any]]] = {
    "octet_native::before_fork": lambda draws: [],
    "octet_native::after_fork": lambda draws: [],
    "octet_native::isa": lambda draws: [],
    "octet_native::bad_isa_request": lambda draws: [],
    "octet_native::isa_refusal": lambda draws: [],
    "octet_native::default_backend": lambda draws: [],
    "octet_native::packed_count": lambda draws: [],
    "octet_native::plan_count": lambda draws: [],
    "octet_native::plan_bytes": lambda draws: [],
    "octet_native::text_count": lambda draws: [],
    "octet_native::why_not": lambda draws: ["native"],
    "octet_native::route": lambda draws: [random_calls.linear(draws)[2], "native"],
    "octet_native::packed_bytes": lambda draws: [_tensors(draws)],
    "octet_native::all_finite": lambda draws: [random_calls.quantize(draws)[0]],
    "octet_native::keep_text": lambda draws: [*random_calls.run_plan(draws)[1:], ""],
    "octet_native::drop_text": lambda draws: [draws.choice(INTEGERS)],
    "octet_native::run_text": _kept_text,
    "octet_native::time_text": _kept_text,
    "octet::product": lambda draws: [*random_calls.linear(draws)[::2][:2], "onednn"],
    "octet::conv_by_product": lambda draws: [*random_calls.conv(draws), "onednn"],
}
"""Valid arguments of the operators that are not in schemas.inc."""


def valid_call(name: str, draws: Draws) -> list[Any]:
    if name in NATIVE:
        return NATIVE[name](draws)
    own = name.removeprefix("octet::")
    return [*random_calls.CALLS[own](draws), *([draws.choice(("", *ops.LIBRARIES))] if own in ops.WITH_BACKEND else [])]


class _Last:
    call: tuple[str, list[Any]] = ("", [])

    @classmethod
    def words(cls) -> str:
        name, arguments = cls.call
        named = zip(operators()[name].arguments, arguments, strict=True) if name else ()
        return "\n".join([name, *(f"    {one.name}: {random_calls.words(value)[:400]}" for one, value in named)])


def without_negation(value: Any) -> Any:
    if isinstance(value, list):
        return [without_negation(one) for one in value]
    return value.resolve_neg() if isinstance(value, Tensor) else value


def all_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [one for part in value for one in all_tensors(part)] if isinstance(value, (list, tuple)) else []


def read_by(name: str, arguments: Sequence[Any]) -> Sequence[Any]:
    """What a call reads; of a plan, no inputs that it asks for their sizes alone, as a forward may."""
    if name == "octet_native::run_text":  # what text it is does not stand in the call
        return []
    if not name.startswith("octet::run_plan"):
        return arguments
    inputs, constants, program = arguments[:3]
    registers = re.findall(r"%\d+", program.split("\n")[1])
    named = [
        one for one, register in zip(inputs, registers, strict=True) if re.search(rf"[=,]{register}(?![\d.])", program)
    ]
    return [*named, *constants]


def check(name: str, draws: Draws, drawn: Callable[[], None] = lambda: None) -> str:
    """One call; "ran" or "refused"."""
    random_calls.MEMORY.free()
    schema = operators()[name]
    arguments = valid_call(name, draws)
    for _ in range(1 + draws.below(3) if arguments else 0):
        place = draws.below(len(arguments))
        arguments[place] = hostile(draws, str(schema.arguments[place].type), arguments[place])
        if schema.arguments[place].alias_info is not None:  # torch's own fallback ends the process of a negated view
            arguments[place] = without_negation(arguments[place])
    _Last.call = name, arguments
    drawn()
    space, _, own = name.partition("::")
    try:
        results = getattr(getattr(torch.ops, space), own)(*arguments)
    except ERRORS:
        return "refused"
    except Exception as error:
        raise Wrong(f"an unusual error, {type(error).__name__}: {str(error)[:200]}") from error
    elsewhere = any(one.device.type != "cpu" for one in all_tensors(read_by(name, arguments)))
    if elsewhere and any(one.device.type == "cpu" and one.numel() for one in all_tensors(results)):
        raise Wrong("a result on the CPU of an operand that is not there")
    return "ran"


def fuzzer() -> Fuzzer:
    return Fuzzer(PATH, list(operators()), check, ("",), _Last.words)


if __name__ == "__main__":
    fuzzing.perturbed()
    sys.exit(fuzzing.main(fuzzer(), __doc__))
