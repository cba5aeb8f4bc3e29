"""Observers, which choose ranges from the values they see, and fake quantisation. README.md says which to take when."""

from quant.observers.base import NoDataSeen, Observer, RangeObserver
from quant.observers.channel_mean import ChannelMean
from quant.observers.entropy import EntropyObserver
from quant.observers.fake_quantize import FakeQuantize, FakeQuantizeBase, ScaleCollapsed
from quant.observers.fixed import FixedObserver
from quant.observers.histogram import HistogramObserver
from quant.observers.lsq import LSQFakeQuantize, LSQPlusFakeQuantize
from quant.observers.minmax import MinMaxObserver
from quant.observers.moving_average import MovingAverageObserver
from quant.observers.mse import MSEObserver
from quant.observers.pact import PACTFakeQuantize
from quant.observers.percentile import PercentileObserver
from quant.observers.registry import (
    AUTO,
    LEARNED,
    OBSERVERS,
    PER_CALL,
    by_hand,
    check_options,
    follows_batches,
    make_learned,
    make_observer,
    names,
    option_names,
    register,
    takes,
    trains,
)

__all__ = [
    "AUTO",
    "LEARNED",
    "OBSERVERS",
    "PER_CALL",
    "ChannelMean",
    "EntropyObserver",
    "FakeQuantize",
    "FakeQuantizeBase",
    "FixedObserver",
    "HistogramObserver",
    "LSQFakeQuantize",
    "LSQPlusFakeQuantize",
    "MSEObserver",
    "MinMaxObserver",
    "MovingAverageObserver",
    "NoDataSeen",
    "Observer",
    "PACTFakeQuantize",
    "PercentileObserver",
    "RangeObserver",
    "ScaleCollapsed",
    "by_hand",
    "check_options",
    "follows_batches",
    "make_learned",
    "make_observer",
    "names",
    "option_names",
    "register",
    "takes",
    "trains",
]
