"""What a model costs on this machine: latency of calls against float, memory, threads, and the time of each step."""

from __future__ import annotations

from quant.benchmark.measure import benchmark
from quant.benchmark.result import Benchmark, Latency, Memory, StepTime, Threads

__all__ = ["Benchmark", "Latency", "Memory", "StepTime", "Threads", "benchmark"]
