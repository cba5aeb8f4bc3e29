"""Tensors that end, or begin, where memory does: to read a byte too many ends the process."""

from __future__ import annotations

import ctypes
import mmap
from collections import defaultdict

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


class _Pages:
    """Some pages between two that nobody may touch."""

    def __init__(self, count: int) -> None:
        self.memory = mmap.mmap(-1, (count + 2) * PAGE)
        self.size = count * PAGE
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for guard in (begin, begin + PAGE + self.size):
            if _libc.mprotect(ctypes.c_void_p(guard), PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")


class Guarded:
    """Gives tensors such memory until `free`, which takes all of it back."""

    def __init__(self) -> None:
        self._free: dict[int, list[_Pages]] = defaultdict(list)
        self._used: list[_Pages] = []

    def copy(self, values: Tensor, *, at_end: bool = True) -> Tensor:
        """The same values, contiguous, with a guard right behind them or right before them."""
        size = values.numel() * values.element_size()
        if size == 0:
            return values.contiguous()
        count = 1 << max(0, (size + PAGE - 1) // PAGE - 1).bit_length()
        pages = self._free[count].pop() if self._free[count] else _Pages(count)
        self._used.append(pages)
        offset = PAGE + (pages.size - size if at_end else 0)
        memory = torch.frombuffer(pages.memory, dtype=values.dtype, count=values.numel(), offset=offset)
        return memory.view(values.shape).copy_(values)

    def free(self) -> None:
        for pages in self._used:
            self._free[pages.size // PAGE].append(pages)
        self._used.clear()
