"""Callbacks for the trainers of others, and a quantizer for transformers.

Each file needs its own package, and nothing here is imported by `quant` unless the model is of that package.

- `quant.integrations.lightning.QATCallback`, for `lightning` (`pip install octet-quant[lightning]`)
- `quant.integrations.transformers.QATCallback`, for `transformers` (`pip install octet-quant[transformers]`)
- `quant.integrations.transformers_quantizer.OctetConfig`, for `from_pretrained` of `transformers` 5
"""
