"""The int8 modules that conversion puts in place of float ones."""

from quant.nn.attention import MultiheadAttention
from quant.nn.embedding import Embedding, EmbeddingBag, TiedEmbedding
from quant.nn.experts import Experts
from quant.nn.linear import Conv1D, Linear
from quant.nn.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from quant.nn.registry import register_int8
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.static_module import StaticQuantModule

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Conv1D",
    "Embedding",
    "EmbeddingBag",
    "Experts",
    "GRUCell",
    "LSTMCell",
    "Linear",
    "MultiheadAttention",
    "QuantModule",
    "RNNCell",
    "StaticQuantModule",
    "TiedEmbedding",
    "register_int8",
]
