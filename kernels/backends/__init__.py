"""The kernel libraries behind the dispatch, one file each."""
