"""Hugging Face's own `generate()` of static int8 models, with cache: its tokens beside those of the simulation.

    python tests/zoo/generate.py                     # every model, random and trained weights, three seeds
    python tests/zoo/generate.py --only t5 --seeds 1

A model is prepared on one prompt and calibrated by `generate()` itself, which shows the prefill, the step and whatever
part of the model it calls alone; `convert` gives each a program. Then it generates greedily from prompts of other
lengths, as do its simulation and float. Random weights leave many logits nearly equal, so that rounding decides; the
same models are also trained for some seconds (`train`), as models are that people use. All is printed as a table in
Markdown; the exit status is 1 where a model's tokens are not those of its simulation or a call is not planned.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is fetched
sys.path.append(str(Path(__file__).resolve().parents[1]))  # tests/, where `zoo` is a package

import torch
from zoo.decoding import SUBJECTS, markdown, measure, quiet, together


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="models whose name it is found in")
    parser.add_argument("--weights", nargs="+", choices=("random", "trained"), default=["random", "trained"])
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    parser.add_argument("--tokens", type=int, default=24, help="to generate from each prompt, default: 24")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        quiet()
    except ImportError as error:
        print(f"left out: {error}; install it with: pip install 'octet-quant[zoo]'", file=sys.stderr)
        return 2
    rows = []
    for subject in SUBJECTS:
        for weights in options.weights if re.search(options.only, subject.name) else ():
            seeds = [
                measure(subject, seed, options.tokens, trained=weights == "trained") for seed in range(options.seeds)
            ]
            rows.append(together(seeds))
            print(f"{rows[-1].name}: {rows[-1].simulated} of {rows[-1].tokens} tokens as simulated", file=sys.stderr)
    print(markdown(rows))
    return int(not all(row.holds for row in rows))


if __name__ == "__main__":
    sys.exit(main())
