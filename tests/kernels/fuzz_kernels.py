"""`make fuzz-kernels`: every operator on every backend and instruction set of this machine, against the reference.

Sums are held bit for bit, and so is every operator whose reference says that it is exact. Operands lie against memory
that must not be read, what is not written is not zero, and large cases have two threads.

    python tests/kernels/fuzz_kernels.py --seconds 600 --seed 1000
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __package__ in (None, ""):
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from quant.kernels import dispatch, ops

from tests.kernels import fuzzing, random_calls
from tests.kernels.fuzzing import Draws, Fuzzer, Wrong
from tests.kernels.plan_mutations import alike

PATH = "tests/kernels/fuzz_kernels.py"


@functools.cache
def changed_arguments(name: str) -> list[int]:
    """Places of the arguments that an operator writes to."""
    schema = torch._C.parse_schema(name + ops.SCHEMAS[name])
    return [
        place for place, one in enumerate(schema.arguments) if one.alias_info is not None and one.alias_info.is_write
    ]


def copied(value: Any) -> Any:
    """An argument that nobody else has; contiguous, as what is written to has to be."""
    if isinstance(value, list):
        return [copied(one) for one in value]
    return random_calls.MEMORY.copy(value) if isinstance(value, Tensor) else value


def outcome(function: Callable[..., Any], arguments: Sequence[Any], changed: Sequence[int]) -> list[Any]:
    """All that a call leaves: its results, and the arguments that it wrote to."""
    given = [copied(one) if place in changed else one for place, one in enumerate(arguments)]
    results = function(*given)
    results = [] if results is None else list(results) if isinstance(results, (tuple, list)) else [results]
    left = [given[place] for place in changed]
    return results + [one for value in left for one in (value if isinstance(value, list) else [value])]


def _same(found: Tensor, expected: Tensor) -> str:
    if torch.equal(found, expected):
        return ""
    if found.is_floating_point() and torch.equal(found.isnan(), expected.isnan()):
        found, expected = found.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0)
        if torch.equal(found, expected):
            return ""
    place = (found != expected).nonzero()[0].tolist()
    count, at = int((found != expected).sum()), tuple(place)
    return f"{count} of {found.numel()} values; at {place} {found[at]}, expected {expected[at]}"


def _near(relative: float, absolute: float, of_largest: float = 0.0) -> Callable[[Tensor, Tensor], str]:
    def compare(found: Tensor, expected: Tensor) -> str:
        if not found.is_floating_point():
            return _same(found, expected)
        one, other = found.double(), expected.double()
        if not torch.equal(one.isfinite(), other.isfinite()):
            return _same(found, expected)
        apart = (one - other).abs().nan_to_num(nan=0.0, posinf=0.0)
        sizes = other.abs().nan_to_num(0.0, 0.0, 0.0)
        largest = float(sizes.max()) if of_largest and sizes.numel() else 0.0
        wrong = apart > absolute + relative * sizes + of_largest * largest
        return f"{int(wrong.sum())} of {found.numel()} values, by {float(apart.max())}" if bool(wrong.any()) else ""

    return compare


def _recurrent(found: Tensor, expected: Tensor) -> str:
    """Gates are functions of reals, whose last bits a rounding of the state may make a step of: few values, little."""
    one, other = found.double(), expected.double()
    if found.dtype == torch.uint8:
        apart = (one - other).abs()
        few = int((apart > 1).sum()) <= 0.02 * found.numel() + 1
        return "" if few else f"{int((apart > 1).sum())} of {found.numel()} values by more than a step"
    if not torch.equal(one.isnan(), other.isnan()):
        return _same(found, expected)
    error = float((one - other).nan_to_num(0.0).norm())
    bound = 0.02 * float(other.nan_to_num(0.0).norm()) + 0.02
    return "" if error <= bound else f"an error of {error}, expected {bound} at most"


def _last_bit(found: Tensor, expected: Tensor) -> str:
    return _near(2.0**-22, 1e-44)(found, expected)


COMPARISONS: dict[str, Callable[[Tensor, Tensor], str]] = {
    "rnn_layer": _recurrent,
    "rnn_layer_static": _recurrent,
    "embedding_bag": _near(1e-4, 1e-4, 1e-6),  # rows of a bag may cancel, in float32
    "batch_statistics": _last_bit,
    "channel_sums": _last_bit,
    "depthwise_f32": _near(1e-5, 1e-43),  # 49 taps, each rounded once or twice
    "attend_byte_cache": _near(1e-4, 1e-30, 1e-5),  # by exponentials, and sums of some hundred products
    "observe_activation": _last_bit,
}
"""Operator -> the comparison of a result, where it is not the bits."""


@functools.cache
def usable() -> set[str]:
    """The backends of this machine."""
    return {name for name, problem in dispatch.available().items() if not problem}


def functions(name: str, draws: Draws) -> list[tuple[str, Callable[..., Any]]]:
    """The implementations of an operator that this machine has; onednn, which is Python, once in eight."""
    overload = getattr(torch.ops.octet, name).default
    if name not in ops.WITH_BACKEND:
        return [] if ops.extension_problem() else [("extension", overload)]
    found: list[tuple[str, Callable[..., Any]]] = []
    if not ops.extension_problem():
        found += [
            (one, lambda *arguments, one=one: overload(*arguments, one)) for one in ops.LIBRARIES if one in usable()
        ]
    rare = draws.one_in(8) and not name.startswith("run_plan")
    method = getattr(dispatch.find("onednn"), name, None) if rare and "onednn" in usable() else None
    return found + ([("onednn", method)] if method else [])


class _Last:
    call: tuple[str, Sequence[Any]] = ("", ())


def check(name: str, draws: Draws, drawn: Callable[[], None] = lambda: None) -> str:
    """One call of an operator, on every backend; the outcome counts comparisons."""
    random_calls.MEMORY.free()
    torch.set_num_threads(1 + draws.below(2))
    implementations = functions(name, draws)
    arguments = random_calls.CALLS[name](draws)
    _Last.call = name, arguments
    drawn()
    changed = changed_arguments(name)
    try:
        expected = outcome(random_calls.reference_of(name), arguments, changed)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise Wrong(f"the reference refuses a valid call: {type(error).__name__}: {error}") from error
    for backend, function in implementations:
        try:
            found = outcome(function, arguments, changed)
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise Wrong(f"{backend} refuses a valid call: {type(error).__name__}: {error}") from error
        differs = difference(name, arguments, found, expected)
        if differs:
            raise Wrong(f"{backend}: {differs}")
    return f"{len(implementations)} backends"


def difference(name: str, arguments: Sequence[Any], found: list[Any], expected: list[Any]) -> str:
    if name.startswith("run_plan"):
        return "" if alike(found, expected, arguments[2]) else "another result than the reference's"
    compare = COMPARISONS.get(name, _same)
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"result {place} is {random_calls.words(one)}, expected {random_calls.words(other)}"
        if told := compare(one, other):
            return f"result {place}: {told}"
    return ""


def fuzzer() -> Fuzzer:
    return Fuzzer(
        PATH, sorted(random_calls.CALLS), check, fuzzing.usable_isas(), lambda: random_calls.described(*_Last.call)
    )


if __name__ == "__main__":
    fuzzing.perturbed()
    sys.exit(fuzzing.main(fuzzer(), __doc__))
