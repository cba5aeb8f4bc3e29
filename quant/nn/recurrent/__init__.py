"""Recurrent layers with int8 weights, and how a class of float layers becomes known (`register_recurrent`).

Every file of this folder is imported here: a class that is registered in one of them is known.
"""

import importlib
import pkgutil

from quant.nn.recurrent.cell import OneStateCell, RecurrentCell, TwoStateCell
from quant.nn.recurrent.direction import Direction, interpreted_steps
from quant.nn.recurrent.gru import GRU, GRUCell
from quant.nn.recurrent.lstm import LSTM, LSTMCell
from quant.nn.recurrent.register import register_recurrent
from quant.nn.recurrent.rnn import RNN, RNNCell
from quant.nn.recurrent.sequence import OneStateSequence, RecurrentSequence, TwoStateSequence

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Direction",
    "GRUCell",
    "LSTMCell",
    "OneStateCell",
    "OneStateSequence",
    "RNNCell",
    "RecurrentCell",
    "RecurrentSequence",
    "TwoStateCell",
    "TwoStateSequence",
    "interpreted_steps",
    "register_recurrent",
]
