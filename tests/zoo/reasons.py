"""Why an int8 model may lie below the simulation: computed for any row that does, never by a name.

Each reason is an experiment that could have come out otherwise. `shortfall` says which output lies how deep below;
the others answer with words where they explain it, and with '' where they do not.
"""

from __future__ import annotations

from .trees import EXACT, Likeness

SLACK = 1.5
"""dB that an int8 model may lie below the simulation."""

CLEAR = 45.0
"""dB above which differences do not count: about what a single rounding to 8 bits leaves, as of an embedding's rows or
of an output, which the simulation leaves float."""

MOST = 6.0
"""dB below the simulation that rounding between the layers, luck or new values can be the reason for, however low that
goes."""

OTHER_RANGES = (1.01, 1.02, 1.03, 1.04, 1.05)
"""By which the simulation's ranges are multiplied, to see how many of its dB are luck: no step grows by half a dB, and
every value is rounded otherwise. A deep network with random weights blows the difference up to several dB."""

CHAOS = 6.0
"""dB under which the simulation itself says nothing: rounding decides the outputs of a random network."""


def reached(like: Likeness, path: str) -> float:
    """dB of an output, or the share of its integers that are equal."""
    return like.decibels.get(path, like.equal.get(path, EXACT))


def shortfall(int8: Likeness, simulation: Likeness) -> tuple[str, float]:
    """By how many dB the output that lies deepest below the simulation does so, and its path. Equal integers count
    as well: one in a hundred that differs where the simulation's agree counts as one dB."""
    gaps = {path: min(CLEAR, simulation.decibels[path]) - min(CLEAR, db) for path, db in int8.decibels.items()}
    gaps |= {path: 100 * (simulation.equal[path] - equal) for path, equal in int8.equal.items()}
    path = max(gaps, key=lambda key: gaps[key], default="")
    return path, gaps.get(path, 0.0)


def chaos(simulation: Likeness, path: str) -> str:
    """Whether the simulation says anything."""
    return f"the simulation itself has under {CHAOS:.0f} dB" if simulation.decibels.get(path, EXACT) < CHAOS else ""


def choices(int8: Likeness, simulation: Likeness, path: str) -> str:
    """Whether integers (codes, indices) that the model puts out differ in the batch of `path`, few of them, and the
    simulation's stay no more equal in all batches: what follows from them says nothing."""
    shares = [share for key, share in int8.equal.items() if key.partition("]")[0] == path.partition("]")[0]]
    if not shares or min(shares) == 1 or min(shares) < 0.9 or min(simulation.equal.values()) == 1:
        return ""
    return f"{1 - min(shares):.1%} of its integers fell otherwise, which decide the rest"


def rounding_between(int8: Likeness, all_rounded: Likeness, path: str) -> str:
    """Whether the simulation that rounds between layers too falls as low."""
    limit = reached(all_rounded, path)
    if limit < CHAOS or reached(int8, path) < limit - SLACK:
        return ""
    return f"with all that goes from layer to layer in 8 bits the simulation has {limit:.1f} dB"


def luck(found: float, simulated: list[float]) -> str:
    """Whether the simulation itself falls as low where its ranges are a few hundredths wider."""
    low, high = min(simulated), max(simulated)
    if low < CHAOS or found < low - SLACK:
        return ""
    return f"with ranges up to {max(OTHER_RANGES) - 1:.0%} wider the simulation has from {low:.1f} to {high:.1f} dB"


def attainable(simulation: Likeness, all_rounded: Likeness, path: str) -> float:
    """dB of what rounds no less than an int8 model does: of the simulation that rounds between layers too, unless that
    says nothing."""
    limit, simulated = reached(all_rounded, path), reached(simulation, path)
    return min(CLEAR, simulated if limit < CHAOS else min(limit, simulated))


def new_values(seen: tuple[float, float], informed: tuple[float, float]) -> str:
    """Whether what is lost is lost beyond the ranges, on values that calibration did not bring. Little data ends early,
    above all where each place at which a layer is called has a range of its own, and the simulation one for all.

    Args:
        seen: dB of the int8 model on the batches of its calibration, and what is attainable there.
        informed: of one that was calibrated with the new batches too, on these, and what is attainable there.
    """
    if any(min(CLEAR, int8) < limit - SLACK for int8, limit in (seen, informed)):
        return ""
    return (
        f"on the batches of its calibration it has {seen[0]:.1f} dB of {seen[1]:.1f}, and calibrated with these too "
        f"{informed[0]:.1f} of {informed[1]:.1f} on these"
    )
