"""What a converted model consists of and runs by: programs, their values and instructions, the module that runs one.

Here also stands what every part of `quant` speaks of in calls: nested arguments and outputs (`trees.py`), objects of
any class in them (`objects.py`), the arguments of a module's call (`arguments.py`), whether a call is one that was
captured (`matching.py`), and dotted names (`names.py`). Graphs, capture, plans and conversion stand on this package.
"""
