"""The int8 layers of a converted model: integers and ranges that conversion has chosen, and the calls of kernels.

How a range or a weight's scale is chosen, and which float module a layer is made of, stands in `quant/static/`.
"""
