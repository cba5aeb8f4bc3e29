"""What a converted model runs by: programs, their values and instructions, and the module that runs a program.

Other packages share its vocabulary of calls: nested arguments and outputs (`trees.py`), objects of any class in them
(`objects.py`), the arguments of a module's call (`arguments.py`), the check whether a call was captured
(`matching.py`), and dotted names (`names.py`). It imports `quant.kernels` and nothing else of `quant`.
"""
