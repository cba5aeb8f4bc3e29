"""Cases that fail so far, with the kinds of quantisation that do: each is a fault to be mended, then taken out here.

`python -m hostile.table --not-yet` prints the list; a case that passes and stands here fails its test.
"""

from __future__ import annotations

NOT_YET: dict[str, str] = {
    "an input that requires a gradient": "static qat",
    "a branch on whether gradients are on": "qat",
    "torch.save into memory and torch.load": "static qat",
    "an own object that stands for a tensor by __torch_function__": "static qat",
    "returns objects that hold each other": "static qat",
    "layers dropped at random": "static",
    "a spiking neuron keeps its potential": "static qat",
    "a buffer is made at the first call": "static",
    "the forward replaces one of its own layers at the third call": "static",
    "a global list grows": "static qat",
    "layers run in threads of a pool": "static qat",
    "an f-string of the size names a thing": "static qat",
    "is, in and id of tensors": "static qat",
    "a jagged nested tensor through a layer": "static qat",
    "a CSR matrix from the input's signs": "static qat",
    "a tensor subclass as the input": "static",
    "a layer in bfloat16 between float layers": "static qat",
    "vmap over a layer": "static qat",
    "functional_call with other parameters": "static qat",
    "a compiled submodule": "static qat",
    "torch.cond on values": "static qat",
    "old weight_norm": "qat",
    "pruned weights with their masks": "qat",
    "__getattr__ of the module forwards to a wrapped one": "static qat",
}
