"""Callbacks for the trainers of others, and a quantizer for transformers.

Nothing here is imported by `quant`; each file needs its own package.

- `quant.integrations.lightning.QATCallback`, for `lightning` (`pip install octet-quant[lightning]`)
- `quant.integrations.transformers.QATCallback`, for `transformers` (`pip install octet-quant[transformers]`)
- `quant.integrations.transformers_quantizer.OctetConfig`, for `from_pretrained` of `transformers` 5
"""
