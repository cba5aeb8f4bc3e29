"""What this machine could gain: settings that hold the kernels back, and what a CPU of more instructions would do."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CPU_FOLDER = Path("/sys/devices/system/cpu")
CGROUPS = Path("/sys/fs/cgroup")

WITH_VNNI = (
    "this CPU has no VNNI. One that has takes a third to a quarter of the time for LSTMs, CNNs and transformers "
    "(docs/benchmarks/speed.md, AVX2 without VNNI); here, weights of 7 bits, QConfig(weight_bits=7), take three "
    "quarters of the time of 8 and add a third to the error"
)
WITH_TILES = (
    "this CPU has no AMX. Its tiles take a half to a third of the time for large layers and batches "
    "(docs/benchmarks/speed.md, AMX), and gain nothing for one row at a time"
)
WITH_DOT_PRODUCTS = "this CPU has no dot product of bytes (asimddp), which newer ARM cores multiply int8 with"

OTHER_CPU = {"portable": WITH_VNNI, "avx2": WITH_VNNI, "avxvnni": WITH_TILES, "avx512vnni": WITH_TILES}
OTHER_ARM = {"portable": WITH_DOT_PRODUCTS, "neon": WITH_DOT_PRODUCTS}


def system() -> dict[str, Any]:
    """What the system grants: JSON-ready; None or '' where it does not say."""
    return {"cores": _cores(), "quota": _quota(), "governor": _read(CPU_FOLDER / "cpu0/cpufreq/scaling_governor")}


def gains(findings: Mapping[str, Any]) -> list[str]:
    """A sentence for each thing that could be faster here, what the user can change first.

    Args:
        findings: of `doctor.examine`.
    """
    cpu, environment = findings["cpu"], findings["environment"]
    loaded = not str(cpu["isa_in_use"]).startswith("none")
    found = []
    if not loaded:
        found.append("the compiled kernels are not loaded, so int8 layers run on slower backends: run `quant build`")
    elif cpu["isa"] and cpu["isa_in_use"] != cpu["isa"] and "QUANT_ISA" in environment:
        found.append(f"QUANT_ISA={environment['QUANT_ISA']} holds the kernels below {cpu['isa']}: unset it")
    if cpu["isa_refusal"]:
        found.append(f"the CPU has tiles that are not used: {cpu['isa_refusal']}")
    if "QUANT_BACKEND" in environment:
        found.append(f"QUANT_BACKEND={environment['QUANT_BACKEND']} decides for all layers: unset it, or measure with "
                     "quant.kernels.autotune")  # fmt: skip
    found += _of_threads(findings)
    if findings["system"]["governor"] == "powersave":
        found.append("the CPU's frequency governor is powersave, which is slow to raise the clock: try performance")
    if loaded:
        table = OTHER_ARM if cpu["machine"] in ("aarch64", "arm64") else OTHER_CPU
        if cpu["isa"] in table:
            found.append(table[cpu["isa"]])
    return found


def _of_threads(findings: Mapping[str, Any]) -> list[str]:
    threads, cpus, system = findings["threads"], findings["cpus"], findings["system"]
    granted = min(cpus, system["quota"] or cpus)
    measure = f"`quant bench --threads 1 {max(2, int(granted))}` measures it"
    if threads > granted:
        limit = f"{cpus} CPUs" if granted == cpus else f"{granted:g} CPUs' time, the container's limit"
        most = max(1, int(granted))
        return [f"torch has {threads} threads on {limit}: they wait for each other; set OMP_NUM_THREADS={most}"]
    cores = system["cores"]
    if cores and threads > cores:
        return [f"torch has {threads} threads on {cores} cores: two of a core share its multipliers; {measure}"]
    if threads < int(granted):
        return [f"torch uses {threads} of {granted:g} CPUs: large layers and batches may gain by more; {measure}"]
    return []


def _cores() -> int | None:
    """Cores among the CPUs that this process may use; two threads of a core are two CPUs."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    siblings = {_read(CPU_FOLDER / f"cpu{cpu}/topology/thread_siblings_list") for cpu in usable}
    return len(siblings) if siblings and "" not in siblings else None


def _quota() -> float | None:
    """How many CPUs' time the control group of a container grants; None where it sets no limit."""
    limit = re.fullmatch(r"(\d+) (\d+)", _read(CGROUPS / "cpu.max"))
    if limit is None:  # version 1 of control groups
        limit = re.fullmatch(
            r"(\d+) (\d+)",
            f"{_read(CGROUPS / 'cpu/cpu.cfs_quota_us')} {_read(CGROUPS / 'cpu/cpu.cfs_period_us')}",
        )
    return int(limit[1]) / int(limit[2]) if limit is not None and int(limit[2]) else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
