"""ONNX files with quantised values (QDQ): converted models as files, and files as modules.

`file.py` is both sides' picture of a file: nodes and constants as plain data. It alone needs the package onnx, and only
where a file is read or written.

`load.py` is the door for reading. A file becomes the text of one plan: `load_operators.py` has a function per operator
over the values of `load_values.py`, and `load_plan.py` writes the lines.

`export.py` is the door for writing. `graph_writer.py` holds the nodes so far; `int8_layers.py`, `integer_steps.py` and
`moves.py` write what computes and moves integers, `arithmetic_calls.py`, `layer_calls.py`, `window_calls.py`,
`embedding_calls.py`, `sorting_calls.py` and `places_calls.py` the model's calls in float, which `call.py` reads,
`recurrent_layers.py` and `recurrent_steps.py` what has states, `resizes.py` resizes, and `sizes.py` computes with
sizes, of which `varying_sizes.py` finds those that a capture did not see vary. `returned.py` says which outputs a file
has, `runtimes.py` what the runtimes ask for, `integer_weights.py` what processors do, `export_report.py` prints what
became of each step, and `verify.py` runs the file beside the model; `verify_file.py` does that with a file of some time
ago.

`functions.py` is shared: the functions of one value that ONNX and torch both have.
"""

from quant.onnx.call import WrittenCall, writes_call
from quant.onnx.export import export_onnx
from quant.onnx.export_report import ExportReport, StepDifference, Verification
from quant.onnx.graph_writer import GraphWriter, StepForm
from quant.onnx.integer_steps import KernelStep, writes_kernel
from quant.onnx.load import load_onnx
from quant.onnx.verify_file import verify_onnx

__all__ = [
    "ExportReport",
    "GraphWriter",
    "KernelStep",
    "StepDifference",
    "StepForm",
    "Verification",
    "WrittenCall",
    "export_onnx",
    "load_onnx",
    "verify_onnx",
    "writes_call",
    "writes_kernel",
]
