"""Records a module until the proof succeeds; a module at fault is an island in the next attempt."""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import nn

from quant.capture.first_call import let_register_hooks
from quant.capture.proof import Proof, run
from quant.capture.recorded_modules import Watched
from quant.capture.recorder import Recorder
from quant.capture.scalars import Limit
from quant.capture.undisturbed import disturbed
from quant.capture.unrecordable import said_of
from quant.capture.with_gradients import note_unlike_layers, unlike_in_training, unlike_with_gradients
from quant.runtime.arguments import ONE_MEMORY, Arguments, copied, share_memory, tensors_in
from quant.runtime.names import full_name

MOST_PASSES = 64
"""Limit of attempts: each makes at least one module an island or holds one size, and few models need that many."""


class CaptureError(RuntimeError):
    """The graph does not compute what the model computes, and no island changes that."""


def record(
    watched: Watched,
    module: nn.Module,
    path: str,
    call: Arguments,
    islands: MutableMapping[str, str],
    *,
    training: bool,
) -> Recorder:
    """Record one call of a module and prove the recording.

    Args:
        watched: the model.
        module, path: the module, and its dotted name in the model.
        call: its arguments.
        islands: dotted name -> the reason that a module is an island; new ones are added.
        training: as for `capture`.

    Raises:
        CaptureError: the graph's results are not the module's, whichever modules are islands.
    """
    limits: tuple[Limit, ...] = ()
    for _ in range(MOST_PASSES):
        before = watched.snapshot()
        try:
            recorder = Recorder(module, path, islands, limits, before, training=training)
            try:
                run(watched, recorder, call)
                _refuse_shared_memory(recorder, call)
            except Exception as error:
                watched.put_back(before)
                fails = _where_it_fails(recorder, call)
                if not fails:
                    raise error
                recorder.problems.update(fails)
            watched.changed |= recorder.changed
            new = {name: reason for name, reason in recorder.problems.items() if name not in islands}
            if not new and path not in islands:
                proof = Proof(watched, recorder, call)
                new, limits, whole = proof.problems, (*limits, *proof.limits), not proof.limits
                if not new and whole:
                    new = _unlike(watched, recorder, call)
                new = {_answerable(recorder, name): reason for name, reason in new.items()}
                if not new and whole:
                    new = _undisturbed(watched, recorder, call)
                if not new and whole:
                    return recorder
            elif not new:
                return recorder
        finally:
            watched.put_back(before)
        if new and not watched.has_run:
            # The first call fills caches, torch's too (jagged tensors), so only the second one is representative.
            watched.has_run, limits = True, ()
            let_register_hooks(watched, module, call)
            continue
        islands.update(new)
    raise CaptureError(
        f"{path or type(module).__name__}: {MOST_PASSES} attempts gave no graph that computes what the module does; "
        "quant.register_leaf(its class) runs it as it is"
    )


def _unlike(watched: Watched, recorder: Recorder, call: Arguments) -> dict[str, str]:
    """The modules that behave differently in training, or with gradients, than in a proved recording.

    The first difference hides later ones. So its module becomes an island, and the call is recorded and compared with
    training again: two recordings for each such module, where a proof in between would take a dozen.
    """
    compare = unlike_in_training if recorder.training else unlike_with_gradients
    unlike: dict[str, str] = {}
    one = recorder
    while True:
        new = {_answerable(one, name): reason for name, reason in compare(watched, one, call).items()}
        if one is not recorder:
            one.forget_values()
        if not new or new.keys() <= unlike.keys():
            return unlike
        if recorder.training and not unlike:  # the first recording has the fewest islands, which hide layers
            note_unlike_layers(watched, recorder, call)
        unlike.update(new)
        if recorder.path in unlike or not watched.has_run:
            return unlike
        islands = {**recorder.islands, **unlike}
        watched.put_back(recorder.before)
        one = Recorder(
            recorder.root, recorder.path, islands, recorder.limits, recorder.before, training=recorder.training
        )
        try:
            run(watched, one, call)
        except Exception:  # the next attempt names the module
            return unlike
        if not one.problems.keys() <= islands.keys():
            return unlike


def _answerable(recorder: Recorder, name: str) -> str:
    """The innermost module around the one at fault that can become an island: it is called, and is not one yet.

    The module at fault may only hold methods, or an attribute that its parent's forward writes.
    """
    while name != recorder.path and (name not in recorder.called or name in recorder.islands):
        name = name.rpartition(".")[0]
    return name


def _refuse_shared_memory(recorder: Recorder, call: Arguments) -> None:
    """Make an island of a module that writes to arguments sharing memory, since each is recorded by itself."""
    if any(node.writes for node in recorder.nodes) and share_memory(tensors_in(call)):
        recorder.problem("", ONE_MEMORY)


def _where_it_fails(recorder: Recorder, call: Arguments) -> dict[str, str]:
    """The module whose forward fails only when it is recorded; None where the error is the model's own.

    Pickle, higher-order operators and transforms of torch refuse recorded numbers, or an active function mode.
    """
    args, kwargs = copied(call[0]), copied(call[1])
    recorder.root.__dict__["forward"](*args, **kwargs)  # the model's own error, not chained to ours
    if recorder.failed is None or recorder.failed[0] in recorder.islands:
        return {}
    name, error = recorder.failed
    return {name: f"its forward cannot be recorded ({said_of(error)})"}


def _undisturbed(watched: Watched, recorder: Recorder, call: Arguments) -> dict[str, str]:
    """The module that behaves differently when it is recorded."""
    name = disturbed(watched, recorder, call)
    if name is None:
        return {}
    return {full_name(recorder.path, name): "its forward does something else when it is recorded"}
