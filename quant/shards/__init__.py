"""Models that are quantised while they are loaded, so that the float model never stands in memory.

`assembly.py` has a model on the meta device whose layers become int8 as their tensors come; `reader.py` reads tensors
from safetensors files, `load.py` puts both together, and `quant/integrations/transformers_quantizer.py` lets
`from_pretrained` bring the tensors.
"""

from quant.shards.load import load_quantized
from quant.shards.reader import ShardError

__all__ = ["ShardError", "load_quantized"]
