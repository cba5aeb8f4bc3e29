"""Weights of a prepared model chosen by what they do to its outputs, layer by layer and block by block.

`learn.py` is the door. `walk.py` goes through a captured module's steps with all calls at once, in float and rounded;
`units.py` says where a block ends; `moments.py` sums up a layer's inputs, `layers.py` solves one layer by them (the
solvers are `quant/rounding/`), `blocks.py` learns the layers of a block together; `checkpoint.py` keeps what is done.
"""

from quant.reconstruction.learn import LayerError, Reconstruction, learn_rounding

__all__ = ["LayerError", "Reconstruction", "learn_rounding"]
