"""Runs of a model for what one block reads, when the blocks before it are done: these answer from memory.

Blocks that are rounded one after the other each need the inputs that rounded ones before them give. A run of the whole
model for each would take as many times its time as it has blocks. As GPTQ's own code does (Frantar et al.,
arXiv:2210.17323, section 4), what the last rounded block gives is kept; a run then computes two blocks, and ends behind
the second. A model need not be a chain: `BlockRuns` tells which runs may be short, and its caller compares one of them
with a longer one.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from quant.runtime.arguments import copied_together
from quant.runtime.own_forward import computing
from quant.runtime.trees import leaves

LEAST_BYTES = 1 << 28
"""What may be kept of outputs in any case; beyond, as much as the model's parameters take."""


class BlockRuns:
    """Runs a model over the same batches again and again, for one block after the other.

    Args:
        model: in eval mode.
        blocks: dotted names of modules, in the order in which they will be done.
        run: runs the model on the batch of a number.
        batches: their number.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], run: Callable[[int], None], batches: int) -> None:
        self.batches = batches
        self._run = run
        self._modules = {name: model.get_submodule(name) for name in blocks}
        self._calls: dict[str, set[int]] = {name: set() for name in blocks}
        self._has_run = False
        self._done: list[str] = []
        self._given: dict[str, list[Any]] = {}
        self._limit = max(LEAST_BYTES, sum(one.nbytes for one in model.parameters()))

    def finish(self, block: str) -> None:
        """A block has the weights now that it will keep."""
        self._done.append(block)

    def may_end_behind(self, block: str) -> bool:
        """Whether every batch calls the block once, so that a run may end with it; one pass of whole runs tells."""
        return self._has_run and self._calls[block] == {1}

    def may_begin_before(self, block: str) -> bool:
        """Whether a run may begin with what blocks that are done gave."""
        return self.may_end_behind(block) and bool(self._given)

    def whole(self, block: str) -> None:
        """Run all batches; to the end, or to that of the block where no call follows."""
        if not self._has_run:
            self._first()
            return
        ends = block if self.may_end_behind(block) else None
        for index in self._each_kept({}):
            self._until(ends, index)

    def _first(self) -> None:
        """Run all batches to the end, and count the calls of each block."""
        with contextlib.ExitStack() as undo:
            calls = Counter[str]()
            for name, module in self._modules.items():
                undo.callback(module.register_forward_hook(functools.partial(_count, calls, name)).remove)
            for index in range(self.batches):
                self._run(index)
                for name in self._modules:
                    self._calls[name].add(calls[name])
                calls.clear()
        self._has_run = True

    def one_whole(self, block: str) -> None:
        """Run the first batch to the end of the block, by all blocks before it."""
        self._until(block, 0)

    def short(self, block: str) -> Generator[int, None, None]:
        """Run each batch from what done blocks gave to the end of the block; yields the number of each behind it."""
        given = self._given
        for index in self._each_kept(given):
            with self._answering({name: outputs[index] for name, outputs in given.items()}):
                self._until(block, index)
            yield index

    def _until(self, block: str | None, index: int) -> None:
        with contextlib.ExitStack() as undo:
            if block is not None:
                undo.callback(self._modules[block].register_forward_hook(_end).remove)
                undo.enter_context(contextlib.suppress(_End))
            self._run(index)

    def _each_kept(self, given: dict[str, list[Any]]) -> Iterator[int]:
        """The numbers of the batches; what the last done block of each stack gives for them is kept from then on."""
        kept: dict[str, list[Any]] = {}
        with contextlib.ExitStack() as undo:
            for name in self._last_done():
                if name in given:
                    kept[name] = given[name]
                elif self._calls[name] == {1}:
                    outputs = kept[name] = []
                    undo.callback(self._modules[name].register_forward_hook(_keep(outputs)).remove)
            for index in range(self.batches):
                yield index
                if sum(map(_bytes, kept.values())) > self._limit:
                    kept.clear()
                    undo.close()
        self._given = {name: outputs for name, outputs in kept.items() if len(outputs) == self.batches}

    def _last_done(self) -> list[str]:
        """Of each stack the block that was done last."""
        return list({name.rpartition(".")[0]: name for name in self._done}.values())

    @contextlib.contextmanager
    def _answering(self, outputs: dict[str, Any]) -> Iterator[None]:
        """Let blocks up to those of `outputs` give that at once; what others of their stack give is not looked at."""
        stacks = {name.rpartition(".")[0]: name for name in outputs}
        with contextlib.ExitStack() as undo:
            for place, name in enumerate(self._done):
                last = stacks.get(name.rpartition(".")[0])
                if last is None or place > self._done.index(last):
                    continue
                undo.enter_context(computing(self._modules[name], _Answer(outputs[last])))
            yield


class _End(BaseException):
    """Ends a run; no Exception, which a user's function might catch."""


def _end(module: nn.Module, args: Any, output: Any) -> None:
    raise _End


def _count(calls: Counter[str], name: str, module: nn.Module, args: Any, output: Any) -> None:
    calls[name] += 1


def _keep(outputs: list[Any]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if all(leaf is None or isinstance(leaf, (Tensor, int, float)) for leaf in leaves(output)):
            outputs.append(copied_together(output))

    return hook


class _Answer:
    def __init__(self, output: Any) -> None:
        self._output = output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return copied_together(self._output)  # which its reader may change


def _bytes(outputs: list[Any]) -> int:
    return sum(leaf.nbytes for leaf in leaves(outputs) if isinstance(leaf, Tensor))
