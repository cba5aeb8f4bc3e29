"""Fusion: a captured graph read as steps, with what each computes in and the ranges that values share.

`fuse.py` runs the passes in order: `recognised_steps.py`, `joined_steps.py`, `domains.py` with `float_values.py`, and
`slots.py` with `concat_ranges.py`. The result is a `FusedGraph` (`fused_graph.py`).
"""
