"""A policy of reinforcement learning, before and after: a network that balances a pole, in float, int8 and int4.

    python tutorials/gallery/policy.py [--rounds N] [--out FILE.svg]

The dynamics are those of the classic cart and pole (Barto, Sutton and Anderson 1983, as OpenAI Gym has them), for many
carts at once in numpy. The cross-entropy method finds the weights: draw some, keep the best tenth, draw around their
mean. The policy's ranges come from states of its own episodes. A policy acts on what its own actions led to, so that
an error may grow: what counts is the return, not the error of one output. It ends in asserts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy
import torch
from torch import nn

import quant

OUT = Path(__file__).parents[1] / "out" / "policy.svg"
GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
EDGE, TILT = 2.4, 12 * numpy.pi / 180
LONGEST, HIDDEN, POPULATION = 500, 16, 48

Policy: TypeAlias = Callable[[numpy.ndarray], numpy.ndarray]
"""States (..., 4) -> whether to push to the right (...)."""


def stepped(state: numpy.ndarray, right: numpy.ndarray) -> numpy.ndarray:
    """One step of carts: (..., 4) of position, speed, angle, angular speed; `right` (...) pushes to the right."""
    x, speed, angle, turn = numpy.moveaxis(state, -1, 0)
    force = numpy.where(right, FORCE, -FORCE)
    sine, cosine, mass = numpy.sin(angle), numpy.cos(angle), CART + POLE
    push = (force + POLE * HALF_LENGTH * turn**2 * sine) / mass
    bend = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4 / 3 - POLE * cosine**2 / mass))
    pull = push - POLE * HALF_LENGTH * bend * cosine / mass
    return numpy.stack([x + SECONDS * speed, speed + SECONDS * pull, angle + SECONDS * turn, turn + SECONDS * bend], -1)


def returns(policy: Policy, start: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The steps that each cart stays up, at most LONGEST, and the states that were met, (steps, ...)."""
    state, up, total, met = start, numpy.ones(start.shape[:-1], bool), numpy.zeros(start.shape[:-1]), []
    for _ in range(LONGEST):
        met.append(state)
        state = stepped(state, policy(state))
        up &= (numpy.abs(state[..., 0]) < EDGE) & (numpy.abs(state[..., 2]) < TILT)
        total += up
        if not up.any():
            break
    return total, numpy.stack(met)


def starts(count: int, seed: int) -> numpy.ndarray:
    """States near the upright."""
    return numpy.random.default_rng(seed).uniform(-0.05, 0.05, (count, 4))


def network(weights: numpy.ndarray) -> nn.Sequential:
    """The policy as a module: states (N, 4) -> a score for left and right."""
    model = nn.Sequential(nn.Linear(4, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2)).eval()
    nn.utils.vector_to_parameters(torch.from_numpy(weights).float(), model.parameters())
    for one in model.parameters():
        one.requires_grad_(False)
    return model


def of_module(model: nn.Module) -> Policy:
    """A module as a function of states."""

    def act(state: numpy.ndarray) -> numpy.ndarray:
        with torch.inference_mode():
            scores = model(torch.from_numpy(state.reshape(-1, 4)).float())
        return (scores[:, 1] > scores[:, 0]).numpy().reshape(state.shape[:-1])

    return act


def of_many(weights: numpy.ndarray) -> Policy:
    """As many policies as rows of `weights`, each for its own carts: states (policies, carts, 4)."""
    first, bias, second, last = numpy.split(weights, numpy.cumsum([4 * HIDDEN, HIDDEN, 2 * HIDDEN]), axis=1)
    first, second = first.reshape(-1, HIDDEN, 4), second.reshape(-1, 2, HIDDEN)

    def act(state: numpy.ndarray) -> numpy.ndarray:
        hidden = numpy.tanh(numpy.einsum("pck,phk->pch", state, first) + bias[:, None])
        scores = numpy.einsum("pch,pah->pca", hidden, second) + last[:, None]
        return scores[..., 1] > scores[..., 0]

    return act


def learned(rounds: int) -> tuple[numpy.ndarray, list[float]]:
    """Weights by the cross-entropy method, and the mean return of the best in each round."""
    random = numpy.random.default_rng(0)
    mean, spread, curve = numpy.zeros(7 * HIDDEN + 2), 1.0, []
    for number in range(rounds):
        drawn = mean + spread * random.normal(size=(POPULATION, mean.size))
        state = numpy.broadcast_to(starts(8, seed=number), (POPULATION, 8, 4))
        scores = returns(of_many(drawn), state)[0].mean(1)
        best = numpy.argsort(scores)[-POPULATION // 10 :]
        mean, spread = drawn[best].mean(0), max(0.1, 0.9 * spread)
        curve.append(float(scores[best].mean()))
    return mean, curve


def run(rounds: int = 20, carts: int = 200) -> tuple[Mapping[str, numpy.ndarray], list[float]]:
    """The returns of unseen carts by form of the policy, and the curve of learning."""
    weights, curve = learned(rounds)
    model = network(weights)
    start = starts(carts, seed=1_000_000)
    _, met = returns(of_module(model), starts(16, seed=2_000_000))
    states = torch.from_numpy(met.reshape(-1, 4)).float()
    batches = list(states[:2048].split(256))
    narrow = quant.Recipe({"*": quant.QConfig(weight_bits=4)})
    forms = {
        "float": model,
        "int8": quant.quantize_static(model, batches, progress=False),
        "int4 weights": quant.quantize_static(model, batches, narrow, progress=False),
    }
    found = {name: returns(of_module(one), start)[0] for name, one in forms.items()}
    acts = {name: of_module(one)(states.numpy()) for name, one in forms.items()}
    for name, one in found.items():
        same = 100 * float((acts[name] == acts["float"]).mean())
        print(
            f"{name:12} stays up for {one.mean():.1f} of {LONGEST} steps; acts as float in {same:.2f} % of its states"
        )
    assert found["int8"].mean() >= 0.98 * found["float"].mean()
    return found, curve


def draw(path: Path, found: Mapping[str, numpy.ndarray], curve: Sequence[float]) -> None:
    """Learning, and the returns of each form."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(curve) + 1), curve, color="#444444")
    left.set(title="learning, in float", xlabel="round", ylabel="steps upright", ylim=(0, 1.05 * LONGEST))
    right.bar(list(found), [one.mean() for one in found.values()], color=["#444444", "#1f6f8b", "#c1440e"])
    right.set(title="200 new episodes", ylim=(0, 1.05 * LONGEST))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="of learning (default 20)")
    parser.add_argument("--out", type=Path, default=OUT, help="the plot (default tutorials/out)")
    options = parser.parse_args(arguments)
    found, curve = run(options.rounds)
    assert found["float"].mean() > 0.9 * LONGEST, "the float policy has not learned to balance"
    draw(options.out, found, curve)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
