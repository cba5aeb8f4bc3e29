"""Models that other toolkits quantised, taken over with the integers that they have.

`torch_ao.py` is the door for torch.ao, and `packed_layers.py` reads its packed weights. Dynamic layers are put into a
dynamic conversion (`dynamic_layers.py`). A static model is run once (`recorded_run.py`), its values are lined up with
those of the float model's graph (`matched_values.py`), and the conversion takes their ranges (`static_model.py`). Of a
program of PT2E the same is read from its graph (`pt2e_program.py`).
`remarks.py` says in the report what could not be carried over.

ONNX files are read by `quant.onnx`.

Nothing of torch.ao is imported: its modules are read by the names in their state_dict, its tensors by their methods.
"""

from quant.migrate.torch_ao import from_torch_ao

__all__ = ["from_torch_ao"]
