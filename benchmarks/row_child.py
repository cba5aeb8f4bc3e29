"""One side of `bench_against.py`: a process that runs the rows of `make bench` with the package of one checkout.

It is started with the import path of that checkout, so that the cases are this checkout's and what is measured is the
other's. A request is a line, the name of a case; the answer is a line of JSON, the seconds of one call and the error.

    python row_child.py serve FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # a safe path leaves the script's own folder out

import harness
import peers
import suite
import torch
from start_child import Clock, import_package

LAP = harness.Effort(seconds=0.06, rounds=3)
OURS = "octet"


def contender(case: suite.Case) -> harness.Contender:
    """Ours of one case, with its error."""
    task = case.build()
    maker = case.makers(task)[OURS]
    [float_model, ours], _ = peers.assemble(task.model, task.probes[0], {"float": peers.torch_float, OURS: maker})
    expected = torch.cat([float_model.predict(probe) for probe in task.probes])
    got = torch.cat([ours.predict(probe) for probe in task.probes])
    return harness.Contender(OURS, ours.call, ours.scope, harness.relative_error(got, expected))


def lap(one: harness.Contender, threads: int) -> dict[str, float]:
    """Seconds of a call, the median of a few samples, and the error."""
    race = harness.race("lap", [one], effort=LAP, clock=harness.clock_for(threads))
    return {"seconds": race.time(OURS).median, "error": one.error or 0.0}


def serve(folder: Path) -> None:
    """A lap for each line of input; a case is built when it is first asked for, and goes when another is."""
    import_package(Clock(), folder)
    threads = int(os.environ["OMP_NUM_THREADS"])
    harness.pin(threads)
    cases = {case.name: case for section in suite.SECTIONS.values() for case in section()}
    name, one = "", None
    for line in sys.stdin:
        if one is None or line.strip() != name:
            name, one = line.strip(), None
            one = contender(cases[name])
        print(json.dumps(lap(one, threads)), flush=True)


def main() -> None:
    """Arguments: see above."""
    warnings.simplefilter("ignore")
    with torch.inference_mode():
        serve(Path(sys.argv[2]))


if __name__ == "__main__":
    main()
