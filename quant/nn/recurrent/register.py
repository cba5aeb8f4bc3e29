"""The one call by which a float class becomes a recurrent layer that quant knows."""

from collections.abc import Callable

from torch import nn

from quant.kernels.recurrent.kind import RecurrentKind
from quant.nn.recurrent.cell import OneStateCell, RecurrentCell, TwoStateCell
from quant.nn.recurrent.sequence import OneStateSequence, RecurrentSequence, TwoStateSequence
from quant.recipe import QConfig
from quant.recurrent_layers import RecurrentClass, add_class, kind_of

KindOf = Callable[[nn.Module], RecurrentKind]


def register_recurrent(
    kind: RecurrentKind | KindOf,
    *,
    sequence: type[nn.Module] | None = None,
    cell: type[nn.Module] | None = None,
    int8_sequence: type[RecurrentSequence] | None = None,
    int8_cell: type[RecurrentCell] | None = None,
) -> None:
    """Quantise modules of a class as recurrent layers of a kind: dynamically, statically and in training.

    Args:
        kind: of `quant.kernels.recurrent`, or what gives the kind of a module where the class alone does not say it.
        sequence, cell: the float classes; `quant/recurrent_layers.py` says what their modules must have.
        int8_sequence, int8_cell: classes of the dynamic int8 layers, where they are to be more than the layer itself.
            None takes those that all kinds share, which cannot be compiled by torch.jit.script.

    Raises:
        ValueError: a class is registered already, or none is named.
    """
    if sequence is None and cell is None:
        raise ValueError("register_recurrent: expected a sequence, a cell or both, got neither")
    of_module: KindOf = (lambda module: kind) if isinstance(kind, RecurrentKind) else kind
    if sequence is not None:
        add_class(RecurrentClass(sequence, False, of_module, int8_sequence or shared_sequence))
    if cell is not None:
        add_class(RecurrentClass(cell, True, of_module, int8_cell or shared_cell))


def shared_sequence(module: nn.Module, qconfig: QConfig) -> RecurrentSequence:
    """The int8 layer of a sequence whose kind brings no class of its own."""
    return (TwoStateSequence if kind_of(module).has_cell else OneStateSequence)(module, qconfig)


def shared_cell(module: nn.Module, qconfig: QConfig) -> RecurrentCell:
    """The same of a cell."""
    return (TwoStateCell if kind_of(module).has_cell else OneStateCell)(module, qconfig)
