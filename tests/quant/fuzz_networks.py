"""`make fuzz-networks`: modules with random forwards (random_forwards.py), static and in training, held to float.

Of each module the graphs are held first: the prepared model, observing and not rounding, gives what the float model
gives, at the size that it was captured with and at others, state and the caller's arguments included. Then the int8
model, which has seen one size, is compared at all of them: what it is below FLOOR has to be explained by the
simulation, which rounds the same graph in float.

    python tests/quant/fuzz_networks.py --seconds 600            # from a seed of its own
    python tests/quant/fuzz_networks.py --seed 17 --count 1      # one that failed, with its text
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

if __package__ in (None, ""):
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import quant
from quant import forward_state, qat
from quant.static.prepared import record_of
from quant.static.simulation import simulating
from tests.quant.hostile.harness import is_clear
from tests.quant.hostile.pictures import Comparison, picture
from tests.quant.random_forwards import Call, RandomModule, drawn

EXACT, IN_TRAINING = 70.0, 45.0
"""Signal to noise ratio in dB of a graph in float, and of one in training, in which batch norms are folded."""
FLOOR, NEAR = 18.0, 3.0
"""Of an int8 model, and how much below the simulation's it may be where both are below the first."""

CALIBRATION = [(0, 0), (0, 1), (0, 6), (0, 7)]
"""Place of the size in `RandomModule.sizes`, and index of the inputs."""
FRESH = [(0, 10), (0, 11), (1, 12), (2, 13), (3, 14), (0, 15)]
RECIPE = quant.Recipe(default=quant.QConfig(activation_observer="minmax"))


class Wrong(AssertionError):
    """A model of ours does something else than the float model."""


class Refused(Exception):
    """A clear error of ours."""


class Calls:
    """Calls of one module: the same inputs for all models."""

    def __init__(self, module: RandomModule) -> None:
        self.module, self.sizes = module, module.sizes()

    def inputs(self, place: tuple[int, int]) -> Call:
        return self.module.inputs(self.sizes[place[0]], place[1])

    def example(self, model: nn.Module) -> inspect.BoundArguments:
        args, kwargs = self.inputs(CALIBRATION[0])
        return inspect.signature(model.forward).bind(*args, **kwargs)

    def outcome(self, model: nn.Module, place: tuple[int, int]) -> Any:
        """A picture of the output, the arguments after the call, and the drawn buffers."""
        args, kwargs = self.inputs(place)
        output = model(*args, **kwargs)
        buffers = {name: one for name, one in model.named_buffers() if name.rpartition(".")[2].startswith("buffer_")}
        return picture([output, args, kwargs, buffers])


def held(
    calls: Calls, twin: nn.Module, model: nn.Module, places: list[tuple[int, int]], floor: float, what: str
) -> Iterator[Comparison]:
    """The comparisons of calls in a row, up to one that the float model refuses."""
    for place in places:
        try:
            expected = calls.outcome(twin, place)
        except Exception:  # not every size suits every forward, and what it left of its state is another's
            return
        comparison = Comparison(floor)
        found = ours(lambda place=place: calls.outcome(model, place), model, what)  # type: ignore[misc]
        comparison.compare(expected, found)
        yield comparison


def ours(function: Callable[[], Any], model: nn.Module, what: str) -> Any:
    """What a function of ours gives; clear errors are Refused."""
    try:
        return function()
    except quant.NothingQuantized:
        raise Refused("nothing to quantise") from None
    except Exception as error:
        if is_clear(error, model):
            raise Refused(f"{what}: {str(error)[:200]}") from error
        raise Wrong(f"{what}: {type(error).__name__}: {str(error)[:300]}") from error


def exact(
    calls: Calls, twin: nn.Module, model: nn.Module, places: list[tuple[int, int]], floor: float, what: str
) -> None:
    for place, comparison in zip(places, held(calls, twin, model, places, floor, what), strict=False):
        if comparison.differences:
            raise Wrong(f"{what}, sizes {calls.sizes[place[0]]} of {calls.sizes[0]}: {comparison.differences[0]}")


def check_static(module: RandomModule) -> str:
    """Prepare, calibrate and convert; returns "ok", or "explained" where rounding makes much of an error."""
    calls, float_model = Calls(module), module.build()
    with torch.no_grad():
        prepared = ours(lambda: quant.prepare(float_model, calls.example(float_model), RECIPE), float_model, "prepare")
        exact(calls, module.build(), prepared, [*CALIBRATION[:2], *FRESH], EXACT, "prepared")
        prepared = calibrated(calls, module)
        q = ours(lambda: quant.convert(prepared), prepared, "convert")
        return compared(calls, module.build(), q, lambda: simulated(calls, module))


def calibrated(calls: Calls, module: RandomModule) -> nn.Module:
    """Prepared, and with the data of one size."""
    model = module.build()
    prepared = quant.prepare(model, calls.example(model), RECIPE)
    for place in CALIBRATION:
        args, kwargs = calls.inputs(place)
        prepared(*args, **kwargs)
    return prepared


def simulated(calls: Calls, module: RandomModule) -> Iterator[Comparison]:
    """The comparisons of the simulation, from the state before any data."""
    prepared = calibrated(calls, module)
    forward_state.put_back(record_of(prepared).state, prepared)
    with simulating(prepared):
        yield from held(calls, module.build(), prepared, FRESH, FLOOR, "simulated")


def compared(calls: Calls, twin: nn.Module, q: nn.Module, simulation: Callable[[], Iterator[Comparison]]) -> str:
    low = [(place, one) for place, one in zip(FRESH, held(calls, twin, q, FRESH, FLOOR, "int8"), strict=False)]
    if not any(one.differences for _, one in low):
        return "ok"
    for (place, one), other in zip(low, simulation(), strict=False):
        kinds = [difference for difference in one.differences if difference.kind != "wrong"]
        if kinds or (one.differences and one.lowest < other.lowest - NEAR):
            told = f"{other.lowest:.1f} dB in the simulation: {(kinds or one.differences)[0]}"
            raise Wrong(f"int8, sizes {calls.sizes[place[0]]} of {calls.sizes[0]}, {told}")
    return "explained"


def check_training(module: RandomModule) -> str:
    """Prepare for training; in training mode without rounding it is the float model."""
    calls, float_model = Calls(module), module.build()
    prepared = ours(
        lambda: quant.prepare_qat(float_model, calls.example(float_model), RECIPE), float_model, "prepare_qat"
    )
    qat.observe_only(prepared)
    exact(calls, module.build().train(), prepared.train(), [*CALIBRATION, *FRESH], IN_TRAINING, "in training")
    return "ok"


CHECKS: dict[str, Callable[[RandomModule], str]] = {"static": check_static, "qat": check_training}


def check(seed: int, kind: str) -> str:
    """Check one module; returns how it went: ok, explained, refused.

    Raises:
        Wrong: with the text of the module.
    """
    module = drawn(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            calls = Calls(module)
            for place in (*CALIBRATION, *FRESH):
                with torch.no_grad():
                    calls.outcome(module.build(), place)
        except Exception:
            if place[0] == 0:
                return "no float model"
        try:
            return CHECKS[kind](module)
        except Refused as refused:
            return f"refused: {refused}"
        except Exception as error:
            raise Wrong(f"--seed {seed} --kind {kind}: {error}\n{module.text}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--count", type=int, default=10**9, help="modules at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first module")
    parser.add_argument("--kind", choices=sorted(CHECKS), action="append")
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    end, outcomes, failed = time.monotonic() + options.seconds, Counter[str](), 0
    for seed in range(options.seed, options.seed + options.count):
        if time.monotonic() > end:
            break
        for kind in options.kind or CHECKS:
            try:
                outcomes[f"{kind}: {check(seed, kind)}"] += 1
            except Wrong as wrong:
                failed += 1
                print(wrong, flush=True)
                if options.traceback:
                    traceback.print_exc()
    for outcome, count in outcomes.most_common():
        print(f"{count:6} {outcome}")
    print(f"{outcomes.total() + failed} checks, {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
