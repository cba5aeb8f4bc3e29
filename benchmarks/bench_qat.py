"""What training for int8 costs and what it reaches (`make bench-qat`).

Cost: a training step of ResNet-18 and MobileNetV2 over float, with torch.ao's in the same run, and memory at the peak.
Accuracy: a CNN and an LSTM on Fashion-MNIST, float, rounded after training, and trained for it, by the loops of the
tutorials; and whether the converted model is the trained one. Exit status 1 where a limit is broken.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import harness
import torch
import training_accuracy as accuracy
import training_cost as cost
from zoo.fetch import DataUnavailable


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; 0 when every verdict is ok."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="time fewer rounds, wider intervals")
    parser.add_argument("--parts", nargs="*", default=["cost", *accuracy.STUDIES], choices=["cost", *accuracy.STUDIES],
                        help="what to measure (default all)")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the trainings (default 0 1 2)")
    parser.add_argument(
        "--fresh", action="store_true", help="train QAT anew, also where an earlier run kept its weights"
    )
    options = parser.parse_args(arguments)
    timed = "cost" in options.parts
    facts = harness.machine([], 1, harness.pin(1) if timed else ())
    print(harness.describe(facts) + "\n")
    costs = []
    if timed:
        start = time.perf_counter()
        costs = cost.measure(list(cost.TIME), cost.QUICK if options.quick else cost.FULL)
        print(f"{cost.table(costs)}\n{cost.LEGEND}\nthis part took {time.perf_counter() - start:.0f} s\n")
    start = time.perf_counter()
    keys = [key for key in accuracy.STUDIES if key in options.parts]
    try:
        accuracy.float_models(keys, options.seeds)
        runs = [accuracy.run(key, seed, fresh=options.fresh) for key in keys for seed in options.seeds]
    except DataUnavailable as error:
        print(f"bench_qat: {error}", file=sys.stderr)
        return 1
    if runs:
        print(f"{accuracy.table(runs)}\nthis part took {time.perf_counter() - start:.0f} s")
    verdicts = [one.verdict for one in costs]
    verdicts += [accuracy.verdict(accuracy.STUDIES[key], [one for one in runs if one.study == key]) for key in keys]
    content = {
        "machine": facts,
        "cost": [{**one.race.to_dict(), "peaks": one.peaks, "verdict": one.verdict} for one in costs],
        "accuracy": [asdict(one) for one in runs],
        "verdicts": verdicts,
    }
    path = harness.save("bench_qat", content)
    print(f"\nraw numbers: {path.relative_to(harness.RESULTS.parents[1])}")
    return 0 if all(one == "ok" for one in verdicts) else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
