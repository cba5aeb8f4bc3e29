"""Models that other toolkits quantised, taken over with the integers that they have.

`torch_ao.py` is the door for torch.ao, and `packed_layers.py` reads its packed weights. Dynamic layers are put into a
dynamic conversion (`dynamic_layers.py`). A static model is run once (`recorded_run.py`), its values are lined up with
those of the float model's graph (`matched_values.py`), and the conversion takes their ranges (`static_model.py`).
`remarks.py` says in the report what could not be carried over.

`onnx_module.py` is the door for ONNX files, which become the text of one plan: `onnx_file.py` reads
them, `onnx_operators.py` has a function per operator over the values of `onnx_values.py`, and `onnx_plan.py` writes
the lines.

Nothing of torch.ao is imported: its modules are read by the names in their state_dict, its tensors by their methods.
"""

from quant.migrate.onnx_module import load_onnx
from quant.migrate.torch_ao import from_torch_ao

__all__ = ["from_torch_ao", "load_onnx"]
