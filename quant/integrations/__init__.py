"""Callbacks for the trainers of others. Nothing here is imported by `quant`; each file needs its own package.

- `quant.integrations.lightning.QATCallback`, for `lightning` (`pip install octet-quant[lightning]`)
- `quant.integrations.transformers.QATCallback`, for `transformers` (`pip install octet-quant[transformers]`)
"""
