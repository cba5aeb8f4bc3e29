"""What a converted model consists of and runs by: programs, their values and instructions, the module that runs one.

It stands on `quant.kernels` and on what every part of `quant` speaks of (graph, objects, arguments, names). Capture,
plans and conversion stand on it.
"""
