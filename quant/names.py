"""Dotted names of modules and steps."""


def full_name(*parts: str) -> str:
    """The name of a part of the model by the names of what it is in, outermost first; '' is the root of each."""
    return ".".join(filter(None, parts))
