"""The zoo: architectures of everyone's libraries and of our own, random weights, through int8. `make test-zoo`.

    python tests/zoo/run.py                          # static and training, everything
    python tests/zoo/run.py --only 'hf_|own_moe' --mode static --jobs 2
    python tests/zoo/run.py --out zoo.jsonl          # stopped and started again, it goes on where it was
    python tests/zoo/run.py --mode runner            # in the torch-free runner: the bits of Python, or a named refusal
    python tests/zoo/run.py --mode onnx              # as ONNX files in ONNX Runtime, or a named refusal

Each model runs in a process of its own, so that a crash or a hang is a row. Rows are kept as lines of JSON as they
come; at the end a table in Markdown lies beside them, and the sums are printed. measure.py says what is measured.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is trained, so nothing is to be fetched
sys.path.append(str(Path(__file__).resolve().parents[1]))  # tests/, where `zoo` is a package

from tqdm import tqdm
from zoo import in_runner
from zoo.catalogue import CATALOGUE
from zoo.measure import MODES, measure
from zoo.rows import Key, Limits, Row, computable, compute, kept

TIME_LIMIT = 300
"""Seconds of CPU time for one row. A row computes on one thread, so on a quiet machine these are seconds; on one that
others compute on, seconds say how many they are, not how long the row takes."""


def main() -> int:
    options = _options()
    if "runner" in options.mode and not in_runner.PROGRAM.exists():
        print(f"there is no {in_runner.PROGRAM}: `make runner` compiles it", file=sys.stderr)
        return 2
    names = [name for name in CATALOGUE if re.search(options.only, name)]
    if not names:
        print(f"no architecture's name matches {options.only!r}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(names))
        return 0
    wanted = [(name, mode) for mode in options.mode for name in names]
    rows = {} if options.again else kept(options.out)
    todo = [key for key in wanted if key not in rows]
    todo = computable(todo, training=any(mode == "qat" for _, mode in todo))
    if options.again:
        options.out.unlink(missing_ok=True)

    def measured(key: Key) -> Row:
        return measure(CATALOGUE[key[0]], key[1], speed=options.speed)

    def note(row: Row) -> None:
        rows[row["name"], row["mode"]] = row
        if row["verdict"] != "ok":
            tqdm.write(f"{row['name']} {row['mode']}: {row['verdict'][:160]}", file=sys.stderr)

    compute(todo, measured, options.out, Limits(options.time_limit, options.jobs), note)
    shown = [rows[key] for key in wanted if key in rows]
    table = options.out.with_suffix(".md")
    table.write_text(markdown(shown), encoding="utf-8")
    print(sums(shown))
    print(f"rows: {options.out}, table: {table}")
    return int(any(row["verdict"] != "ok" for row in shown))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="architectures whose name it is found in")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["static", "qat"], help="default: static qat")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, each on one thread")
    parser.add_argument(
        "--out", type=Path, default=Path("build/zoo/results.jsonl"), help="rows that are there are kept"
    )
    parser.add_argument("--again", action="store_true", help="begin anew, without the rows that are there")
    parser.add_argument("--speed", action="store_true", help="also time int8 against float, interleaved; use --jobs 1")
    parser.add_argument(
        "--time-limit", type=int, default=TIME_LIMIT, metavar="SECONDS", help="of CPU time, for one row"
    )
    parser.add_argument("--list", action="store_true", help="print the names and end")
    return parser.parse_args()


def markdown(rows: list[Row]) -> str:
    """The rows as tables, one per mode."""
    parts = []
    for mode in dict.fromkeys(row["mode"] for row in rows):
        of_mode = [row for row in rows if row["mode"] == mode]
        parts += [f"# {mode.capitalize() if mode != 'qat' else 'Training (QAT)'}", "", LEGENDS[mode], ""]
        parts += ["| model | int8 | dB | sim dB | speed | islands | outcome |", "|---|---|---|---|---|---|---|"]
        parts += [_line(row) for row in sorted(of_mode, key=lambda row: row["name"])]
        parts += ["", sums(of_mode), ""]
    return "\n".join(parts)


LEGENDS = {
    "static": "int8: weighted modules in int8 of all. dB: SQNR of the first output against float, on inputs that "
    "calibration has not seen, of two batch sizes; of a detector the mean overlap of its boxes with float's. sim: "
    "the same of a float model whose linear layers and convolutions have int8 weights per channel and uint8 inputs per "
    "tensor. output[0] and output[1] are those of the two batches.",
    "dynamic": "As static; sim has static ranges.",
    "qat": "dB: SQNR of the integers against the trained model in eval mode.",
    "onnx": "ok: ONNX Runtime's outputs are as near to float as the model's, for two batch sizes, with how far they "
    "are from the model's; or the export refuses the model and says which step has no form.",
    "runner": "ok: octet-run gives the bits of Python, for two batch sizes, on one thread and two; or the export "
    "refuses the model and says which step is no part of its one native call.",
}


def _line(row: Row) -> str:
    layers = f"{row['int8']}/{row['weighted']}" if "weighted" in row else ""
    numbers = [row.get(key, row.get(other, "")) for key, other in (("db", "overlap"), ("sim_db", "sim_overlap"))]
    islands = ", ".join(row.get("islands", {}))
    outcome = row["verdict"] + (f" ({row['reason']})" if "reason" in row else "")
    cells = (row["name"], layers, *numbers, row.get("speed", ""), _short(islands), _short(outcome))
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def _short(text: str, length: int = 200) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def sums(rows: list[Row]) -> str:
    """What came out, in a few lines."""
    lines = []
    for mode in dict.fromkeys(row["mode"] for row in rows):
        of_mode = [row for row in rows if row["mode"] == mode]
        kinds = Counter(row["verdict"].partition(":")[0] for row in of_mode)
        layers, integer = (sum(row.get(key, 0) for row in of_mode) for key in ("weighted", "int8"))
        line = f"{mode}: {len(of_mode)} architectures, {kinds['ok']} ok, {kinds['wrong']} wrong, {kinds['fails']} fail"
        if layers:
            line += f"; {100 * integer / layers:.1f} % of {layers} weighted layers in int8"
        refused = sum(row.get("reason", "").startswith("refused") for row in of_mode)
        if mode == "runner":
            line += f"; {kinds['ok'] - refused} with the bits of Python, {refused} refused by name"
        if mode == "onnx":
            same = sum(row.get("apart") == 0 for row in of_mode)
            near = kinds["ok"] - refused - same
            line += f"; {same} with the model's bits, {near} as near to float, {refused} refused by name"
        speeds = sorted(row["speed"] for row in of_mode if "speed" in row)
        if speeds:
            line += f"; median speed {speeds[len(speeds) // 2]}, {sum(speed < 1 for speed in speeds)} slower than float"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
