"""How many samples a second, and how long a request waits: `make bench-throughput`.

Batches of 1, 8 and 32 by all cores: one process whose calls take all threads, one process with a worker a core, a
process a core. Float and int8 take turns of a second. Then requests of one sample come at random (a Poisson process,
its rate a share of what the model could answer at most), and a server with one queue answers: p50 and p99 of what they
wait and take. README.md says how the tables are read.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import display
import numpy as np
import torch
from throughput_workers import CASES, FLOAT, INT8, Answered, Arrangement, Service
from tqdm import tqdm

BATCHES = (1, 8, 32)
SHARE = 0.7
"""Of the most requests that can be answered: what arrives."""


def arrangements(cores: int) -> list[Arrangement]:
    """Those that use all cores, each once."""
    wanted = [Arrangement(1, 1, cores), Arrangement(1, cores, 1), Arrangement(cores, 1, 1)]
    return list(dict.fromkeys(wanted))


def arrivals(rate: float, seconds: float, seed: int = 0) -> list[float]:
    """Times of a Poisson process, `rate` a second: the same for the same arguments."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=max(1, round(rate * seconds)))
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def rate_of(answered: Answered, seconds: float, batch: int) -> float:
    """Samples a second; the request that was begun last counts with the part of it that lay within the round."""
    within = sum(min(1.0, max(0.0, 1 - (done - seconds) / took)) for done, took in answered)
    return within * batch / seconds


@dataclass(frozen=True)
class Rate:
    """Of one model, batch and arrangement: samples a second in each round, and seconds of all calls."""

    samples: list[float]
    calls: list[float]


@dataclass(frozen=True)
class Served:
    """What requests that come at random saw: `rate` a second came, and each took `seconds` from its arrival."""

    who: str
    rate: float
    seconds: list[float]


def most(service: Service, batch: int, seconds: float, rounds: int) -> dict[str, Rate]:
    """What both models answer at most, in turns."""
    rates = {who: Rate([], []) for who in (FLOAT, INT8)}
    for round_ in range(rounds):
        for who in (FLOAT, INT8)[:: 1 if round_ % 2 == 0 else -1]:
            answered = service.run(who, batch, seconds)
            rates[who].samples.append(rate_of(answered, seconds, batch))
            rates[who].calls.extend(took for _, took in answered)
    return rates


def served(service: Service, most_of: dict[str, Rate], seconds: float) -> Iterator[Served]:
    """Both models under the load that float can bear, and int8 under its own."""
    loads = {who: SHARE * float(np.median(rate.samples)) for who, rate in most_of.items()}
    for who, load in ((FLOAT, loads[FLOAT]), (INT8, loads[FLOAT]), (INT8, loads[INT8])):
        answered = service.run(who, 1, seconds, arrivals(load, seconds))
        yield Served(who, load, [took for _, took in answered])


def percentiles(seconds: Sequence[float]) -> list[str]:
    """The median and the 99th percentile, as text."""
    return [display.duration(float(value)) for value in np.percentile(seconds, [50, 99])]


def rate_row(name: str, rates: dict[str, Rate]) -> list[str]:
    """A row of the first table."""
    samples = {who: float(np.median(rate.samples)) for who, rate in rates.items()}
    ratio = np.median([int8 / other for int8, other in zip(rates[INT8].samples, rates[FLOAT].samples, strict=True)])
    return [name, *(f"{samples[who]:.4g}" for who in (FLOAT, INT8)), f"{ratio:.2f}", *percentiles(rates[INT8].calls)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Both tables of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="samples a call (default: 1 8 32)")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="to use (default: all)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="of each model (default: 5)")
    parser.add_argument("--serve", type=float, default=10.0, help="seconds that requests come (default: 10)")
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if re.search(options.only, case)]
    if not cases:
        parser.error(f"no case matches {options.only!r}; there are {', '.join(CASES)}")
    print(f"torch {torch.__version__}, {options.cores} cores; samples a second, and int8's p50 and p99 of a call")
    ways = arrangements(options.cores)
    bar = tqdm(total=len(cases) * len(ways), desc="arrangements", disable=None)
    for case in cases:
        rows, requests = [], []
        for way in ways:
            with closing(Service(case, way)) as service:
                by_batch = {batch: most(service, batch, options.seconds, options.rounds) for batch in options.batches}
                rows += [rate_row(f"{way}, batch {batch}", rates) for batch, rates in by_batch.items()]
                single = by_batch.get(1) or most(service, 1, options.seconds, options.rounds)
                requests += [
                    [f"{way}: {one.who}", f"{one.rate:.4g}", *percentiles(one.seconds), f"{service.memory / 2**20:.0f}"]
                    for one in served(service, single, options.serve)
                ]
            bar.update()
        bar.clear()
        print(f"\n{case}")
        print(display.table(["", FLOAT, INT8, "ratio", "p50", "p99"], rows))
        print(f"\n{case}, served: {SHARE:.0%} of the most requests of one sample")
        print(display.table(["", "a second", "p50", "p99", "MiB"], requests))
    bar.close()


if __name__ == "__main__":
    main()
