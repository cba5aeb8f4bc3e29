"""The int8 layers of a converted model: their integers and ranges, and the calls of kernels.

`quant/static/` chooses the ranges and scales, and builds the layers from float modules.
"""
