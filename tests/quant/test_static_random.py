"""Random networks: each prepares, calibrates, converts, saves, loads and runs, equal to its simulation step by step.

Networks of one kind are drawn operator by operator (random_operators.py), those of the other are put together from the
blocks of real ones (random_blocks.py).
OCTET_RANDOM_NETWORKS says how many of each kind are drawn; `make test-random` draws 500. OCTET_RANDOM_SEED names the
first of the second kind, to draw one that failed again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from quant.kernels import dispatch, use
from quant.kernels.backends.compiled import CompiledBackend
from torch import Tensor, nn

import quant
from quant.ops.registry import real_form
from quant.parity import parity
from quant.runtime import program_runner
from quant.runtime.instructions import FloatCall
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.program_reader import parse
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.shown_programs import programs_of
from quant.runtime.single_steps import call
from quant.runtime.trees import leaves, map_leaves
from quant.static.kept_graph import graph_of
from quant.static.simulation import simulating

from .random_blocks import Draw
from .random_operators import BOTH, DIMS, OUTPUTS, PLACES, STEPS, Choices, built

FAST = os.environ.get("OCTET_FAST_TESTS") == "1"
EXAMPLES = int(os.environ.get("OCTET_RANDOM_NETWORKS", "8" if FAST else "20"))
BLOCKS = int(os.environ.get("OCTET_RANDOM_NETWORKS", "12" if FAST else "40"))
CONFIGS = [
    quant.QConfig(activation_observer="minmax"),
    quant.QConfig(activation_observer="minmax", weight_bits=4),
    quant.QConfig(activation_observer="minmax", per_channel=False, activation_symmetric=True),
    quant.QConfig(activation_observer="histogram", weight_observer="mse"),
]


def _of_choices(choices: Choices) -> Any:
    """A strategy that draws one of them."""
    if isinstance(choices, dict):
        return st.fixed_dictionaries({key: _of_choices(values) for key, values in choices.items()})
    if choices is BOTH:  # which equals (0, 1)
        return st.booleans()
    if isinstance(choices, range):
        return st.integers(choices[0], choices[-1])
    return st.just(choices[0]) if len(choices) == 1 else st.sampled_from(choices)


step = st.one_of(
    *(
        st.tuples(st.just(kind), _of_choices(settings), _of_choices(more), _of_choices(PLACES))
        for kind, settings, more in STEPS
    )
)

network = st.tuples(
    st.lists(step, min_size=2, max_size=9),
    st.sampled_from(DIMS),
    st.sampled_from(OUTPUTS),
    st.booleans(),
    st.sampled_from(CONFIGS),
    st.integers(0, 2**20),
)


def drawn(made: tuple[Any, ...]) -> tuple[nn.Module, tuple[Tensor, ...], quant.QConfig]:
    """The network, inputs for it, and how it is quantised."""
    steps, dims, output, two, config, seed = made
    return *built(steps, dims, output, two, seed), config


def check(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    config: quant.QConfig,
    path: Path,
    others: Sequence[tuple[Tensor, ...]] = (),
) -> str:
    """Take one network through everything; returns "int8", or why it was refused.

    Args:
        inputs: to calibrate on, and to run.
        others: inputs of other shapes, to run planned and step by step.
    """
    with torch.no_grad():
        expected = model(*inputs)
    try:
        prepared = quant.prepare(model, inputs, quant.Recipe(default=config))
    except quant.NothingQuantized:
        return "nothing to quantise"
    with torch.no_grad():
        close(prepared(*inputs), expected, 1e-4)
    with simulating(prepared):
        simulated = prepared(*inputs)
    converted = quant.convert(prepared)
    quant.save(converted, path)
    loaded = quant.load(path, model=model)
    with torch.no_grad():
        got = converted(*inputs)
        assert equal(got, loaded(*inputs))
    larger = tuple(torch.cat([one, one.flip(0)[:1]]) for one in inputs)
    for one in (inputs, larger, *others):
        planned_equals_steps(converted, one)
    assert quant.summary(loaded) == quant.summary(converted)
    assert programs_of(loaded) == programs_of(converted)
    assert all(parse(str(program)) == program for program in programs_of(converted).values())
    named = dict(zip(("x", "ids", "second"), inputs, strict=False))
    for backend in dict.fromkeys((dispatch.current().name, "reference")) if integers(loaded) else ():
        with use(backend):
            wrong = [found for found in parity(prepared, loaded, [named]) if not found.holds]
            assert not wrong, (backend, wrong)
    if not any(isinstance(module, QuantModule) for module in loaded.modules()):
        if not inexact(converted):
            with torch.no_grad(), in_one_layout():
                native = converted(*inputs)
                with use("reference"):
                    close(converted(*inputs), native, 1e-6)
        if not any(isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d)) for module in model.modules()):
            close(got, simulated, 0.1)
    with torch.no_grad():
        assert all(bool(torch.isfinite(leaf).all()) for leaf in leaves(loaded(*larger)))
    return "int8"


def planned_equals_steps(converted: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """To the bit, on one thread and on two: each against as many, as torch's softmax rounds by the sharing."""
    with torch.no_grad(), in_one_layout():
        for threads in (1, 2):
            with on_threads(threads):
                with mock.patch.object(CompiledBackend, "plans", False):
                    steps = converted(*inputs)
                assert equal(converted(*inputs), steps), f"planned, on {threads} threads"


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def equal(found: Any, expected: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(leaves(found), leaves(expected), strict=True))


@contextmanager
def in_one_layout() -> Iterator[None]:
    """Let the user's own float calls get contiguous values. Plans and steps may lay a value out differently before
    them, and torch's sums round by the layout: 4e-7 where it was seen."""

    def call_contiguous(instruction: FloatCall, root: nn.Module, args: Any, kwargs: Any) -> Any:
        return call(instruction, root, *map_leaves(contiguous, (args, kwargs)))

    with mock.patch.object(program_runner, "call", call_contiguous):
        yield


def contiguous(leaf: Any) -> Any:
    return leaf.contiguous() if isinstance(leaf, Tensor) else leaf


def integers(converted: nn.Module) -> bool:
    """Whether anything static is computed in integers; else there are dynamic layers, or what is int8 nobody reads."""
    floats = {"call", "guard", "move", "quantize", "dequantize"}
    programs = [module.program for module in converted.modules() if isinstance(module, ProgramRunner)]
    return any(one.kind not in floats for program in programs for one in program.instructions)


def inexact(converted: nn.Module) -> bool:
    """Whether native calls give reals that differ from torch's in their last bits. What is rounded then may fall to the
    other side, and a norm of few values makes any difference of one step: `parity` compares the steps one by one."""
    runners = [module for module in converted.modules() if isinstance(module, ProgramRunner)]
    forms = [real_form(node, one.root) for one in runners for node in graph_of(one).nodes]
    return not all(form.exact for form in forms if form is not None)


def close(got: Any, expected: Any, share: float) -> None:
    """Equal up to a share of the largest value."""
    for one, other in zip(leaves(got), leaves(expected), strict=True):
        assert float((one - other).abs().max()) <= share * (float(other.abs().max()) + 1e-6)


def test_random_networks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize="OCTET_RANDOM_NETWORKS" not in os.environ,  # `make test` draws the same ones each time
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(network)
    def each(made: tuple[Any, ...]) -> None:
        outcomes[check(*drawn(made), tmp_path / "model.q8")] += 1

    each()
    with capsys.disabled():
        refused = sum(count for outcome, count in outcomes.items() if outcome != "int8")
        print(f"\n{outcomes.total()} random networks, {refused / outcomes.total():.1%} refused: {dict(outcomes)}")
    assert outcomes["int8"] > 0.8 * outcomes.total()


def test_random_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`random_blocks` says what is drawn. `make test` draws the same ones each time."""
    first = Random().randrange(2**30) if "OCTET_RANDOM_NETWORKS" in os.environ else 0
    first = int(os.environ.get("OCTET_RANDOM_SEED", first))
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + BLOCKS):
        model, inputs, other = Draw(seed).network()
        config = CONFIGS[0] if seed % 3 else CONFIGS[seed // 3 % len(CONFIGS)]
        try:
            outcomes[check(model, (inputs,), config, tmp_path / "model.q8", [(other,)])] += 1
        except Exception as error:
            told = f"draw {seed - first + 1}, OCTET_RANDOM_SEED={seed}, {config}"
            raise AssertionError(f"{told}\n{model.describe(inputs, other)}") from error
    with capsys.disabled():
        print(f"\n{outcomes.total()} networks of random blocks: {dict(outcomes)}")
    assert outcomes["int8"] > 0.95 * outcomes.total()
