"""The cheapest int8 model that keeps what the user's own metric may not lose, found by measuring.

`run.py` is the verb; `search.py` says in which order models are tried, `candidates.py` what a layer may be, `trials.py`
builds and scores models, `costs.py` times them, `records.py` keeps what was measured, `result.py` is what comes back.
"""

from __future__ import annotations

from quant.autoquant.result import Autoquantized
from quant.autoquant.run import autoquant
from quant.autoquant.trials import Trial

__all__ = ["Autoquantized", "Trial", "autoquant"]
