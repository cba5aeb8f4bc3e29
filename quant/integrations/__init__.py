"""Callbacks for the trainers of others, a quantizer for transformers, and ranges for loggers.

Each file but the last needs its own package, and nothing here is imported by `quant` unless the model is of that
package.

- `quant.integrations.lightning.QATCallback`, for `lightning` (`pip install octet-quant[lightning]`)
- `quant.integrations.transformers.QATCallback`, for `transformers` (`pip install octet-quant[transformers]`)
- `quant.integrations.transformers_quantizer.OctetConfig`, for `from_pretrained` of `transformers` 5
- `quant.integrations.range_logger.RangeLogger`, for TensorBoard's SummaryWriter, runs of wandb and their like
"""
