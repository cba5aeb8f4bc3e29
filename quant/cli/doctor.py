"""What int8 layers run on here: the CPU, torch, the compiled kernels, and why a backend is missing."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import quant
from quant.cli import gains
from quant.kernels import build, dispatch, ops

CPUINFO = Path("/proc/cpuinfo")
INSTEAD = {
    "gemm_of_safe_pairs": "gemm serves every weight",
    "gemm_of_symmetric": "gemm serves every weight",
    "depthwise": "rows serve it pixel by pixel",
    "winograd": "gemm serves gathered rows",
}
"""What computes where an instruction set has no kernels of a family."""


def examine() -> dict[str, Any]:
    """Every finding, JSON-ready. Nothing here fails where something is missing: what is missing is a finding."""
    in_use = "none, the kernels are not loaded" if ops.extension_problem() else str(torch.ops.octet_native.isa())
    findings: dict[str, Any] = {
        "version": quant.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": {
            "machine": platform.machine(),
            "name": _cpu_field("model name"),
            "isa": best_isa(set((_cpu_field("flags") or _cpu_field("Features")).split())),
            "isa_in_use": f"none: {ops.isa_problem()}" if ops.isa_problem() else in_use,
            "isa_refusal": about_extension("isa_refusal"),
            "kernels": kernels_of(in_use),
        },
        "extension": _extension(),
        "backends": dispatch.available(),
        "default_backend": _default_backend(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("QUANT_")},
        "system": gains.system(),
    }
    return {**findings, "gains": gains.gains(findings)}


def as_text(findings: dict[str, Any]) -> str:
    """The findings as lines for people."""
    cpu = findings["cpu"]
    lines = [
        f"octet-quant  {findings['version']}, Python {findings['python']}",
        f"torch        {findings['torch']}, {findings['threads']} threads on {findings['cpus']} CPUs",
        f"CPU          {cpu['name'] or 'unknown'} ({cpu['machine']})",
        f"ISA          {cpu['isa'] or 'unknown'}, in use: {cpu['isa_in_use']}",
        *([f"  refused    {cpu['isa_refusal']}"] if cpu["isa_refusal"] else []),
        f"kernels      {findings['extension']}",
        *(f"  {family:<18} {table}" for family, table in cpu["kernels"].items()),
        f"backend      {findings['default_backend']}",
    ]
    for name, reason in findings["backends"].items():
        lines.append(f"  {name:<10} {'missing: ' + reason if reason else 'usable'}")
    lines += [f"set          {name}={value}" for name, value in findings["environment"].items()]
    lines += [f"could gain   {sentence}" for sentence in findings["gains"]]
    return "\n".join(lines)


def best_isa(flags: set[str], machine: str = build.host_arch()) -> str:
    """The best instruction set of a CPU with these flags that the kernels know there; '' on another machine."""
    chosen = [one.name for one in build.instruction_sets(machine) if not one.by_request and one.needs <= flags]
    return chosen[-1] if flags else ""


def about_extension(question: str) -> str:
    """What the extension says of itself, '' where there is none or its sources are older than the question."""
    if ops.extension_problem() or not hasattr(torch.ops.octet_native, question):
        return ""
    return str(getattr(torch.ops.octet_native, question)())


def kernels_of(isa: str) -> dict[str, str]:
    """For each family, the instruction set whose kernels `isa` runs, or that it has none and what serves instead."""
    sets = build.instruction_sets(build.host_arch())
    row = next((one for one in sets if one.name == isa), None)
    if row is None:
        return {}
    # The first row that names a table is the one that it was written for.
    owner = {table: one.name for one in reversed(sets) for table in one.kernels.values()}
    return {family: owner[table] if table else f"none: {INSTEAD[family]}" for family, table in row.kernels.items()}


def _cpu_field(name: str) -> str:
    """A field of the first CPU in /proc/cpuinfo, '' where there is none."""
    if not CPUINFO.exists():
        return ""
    for line in CPUINFO.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _extension() -> str:
    problem = ops.extension_problem()
    if problem:
        return f"not loaded: {problem}"
    path = ops.extension_path()
    if build.find_compiler() and build.is_foreign(build.host_target(path)):
        return f"{path}, built from other sources, or for another torch, than are here: run `quant build`"
    return str(path)


def _default_backend() -> str:
    try:
        return dispatch.current().name
    except ValueError as error:
        return f"none: {error}" if ops.isa_problem() else f"none: QUANT_BACKEND: {error}"
