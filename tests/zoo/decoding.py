"""Static int8 models that generate text with a cache, and their simulations: what `generate.py` prints.

A model is prepared on one prompt and calibrated by `generate()` itself; the same models are also trained for some
seconds (`train`), since random weights leave many logits nearly equal, so that rounding decides.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import quant
from quant.graph import Kind
from quant.ops.call import called
from quant.runtime.instructions import Instruction
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.programs import RESERVED
from quant.runtime.region import Region
from quant.static.kept_graph import graph_of
from quant.static.simulation import simulating

from .entry import wake
from .language import LLAMA, SOUNDS, T5, WHISPER, WORDS
from .torchvision_ops import import_library

SPECIAL, CLASSES = 3, 4
"""Ids below SPECIAL are the models' own; the next CLASSES say which permutation the words of a text follow."""
FIRST_WORD = SPECIAL + CLASSES
CALIBRATION = 6
"""Calls of `generate()` that ranges come from."""
LENGTHS = (5, 9, 14)
"""Of the prompts that are measured; calibration has others."""

Inputs = dict[str, Tensor]


def successors() -> Tensor:
    """For each class the word that follows each word; int64 (CLASSES, WORDS)."""
    drawn = torch.Generator().manual_seed(0)
    words = torch.arange(WORDS).repeat(CLASSES, 1)
    for row in words:
        row[FIRST_WORD:] = FIRST_WORD + torch.randperm(WORDS - FIRST_WORD, generator=drawn)
    return words


def texts(size: int, length: int) -> tuple[Tensor, Tensor]:
    """Classes (size,), and texts (size, length) whose every word follows from the last by the class's permutation."""
    follow, classes = successors(), torch.randint(CLASSES, (size,))
    words = [torch.randint(FIRST_WORD, WORDS, (size,))]
    while len(words) < length:
        words.append(follow[classes, words[-1]])
    return classes, torch.stack(words, 1)


@dataclass(frozen=True)
class Subject:
    """A model that generates.

    Attributes:
        make: the model, its weights random.
        prompt: (size, length) to what `generate` is given; `classes` and `words` of `texts` are shown in it.
        labels: whether it takes the text to be learned as labels beside its prompt, or in it.
    """

    name: str
    make: Callable[[], nn.Module]
    prompt: Callable[[Tensor, Tensor], Inputs]
    labels: bool

    def draw(self, size: int, length: int) -> Inputs:
        """Random inputs of `generate`."""
        return self.prompt(*texts(size, length))


def _after_class(classes: Tensor, words: Tensor) -> Inputs:
    return {"input_ids": torch.cat([classes[:, None] + SPECIAL, words], 1)}


def _padded(classes: Tensor, words: Tensor) -> Inputs:
    """Prompts of two lengths in one batch, the shorter ones padded at their left."""
    ids = _after_class(classes, words)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1::2, :2] = 0
    ids[1::2, 2] = ids[1::2, 0]  # the class stays the first that is seen
    return {"input_ids": ids * mask, "attention_mask": mask}


def _noise_after_class(classes: Tensor, words: Tensor) -> Inputs:
    return _after_class(classes, torch.randint(FIRST_WORD, WORDS, words.shape))


def _sounds(classes: Tensor, words: Tensor) -> Inputs:
    tones = torch.randn(CLASSES, SOUNDS, 1, generator=torch.Generator().manual_seed(1))
    return {"input_features": tones[classes] + 0.5 * torch.randn(len(words), SOUNDS, 64)}


SUBJECTS = (
    Subject("llama", LLAMA.make, _after_class, labels=False),
    Subject("llama_padded", LLAMA.make, _padded, labels=False),
    Subject("t5", T5.make, _noise_after_class, labels=True),
    Subject("whisper", WHISPER.make, _sounds, labels=True),
)


def build(subject: Subject, seed: int, *, trained: bool) -> nn.Module:
    """The model in eval mode."""
    torch.manual_seed(seed)
    model = subject.make().eval()
    wake(model)
    if trained:
        train(subject, model)
    return model


def train(subject: Subject, model: nn.Module, steps: int = 250, length: int = 12) -> float:
    """Teach it which word follows which; returns the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    model.train()
    for _ in range(steps):
        classes, words = texts(32, length)
        inputs = subject.prompt(classes, words)
        labels = words if subject.labels else inputs["input_ids"].clone()
        if "attention_mask" in inputs:
            labels = labels.masked_fill(inputs["attention_mask"] == 0, -100)
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    return float(loss.detach())


def generate(model: nn.Module, inputs: Inputs, tokens: int, **how: Any) -> Tensor:
    """The tokens that `model.generate` adds, (size, tokens)."""
    settings = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens, **how}
    found: Tensor = model.generate(**copy.deepcopy(inputs), **settings)  # type: ignore[operator]
    return found[:, -tokens:]


def static(subject: Subject, model: nn.Module, tokens: int) -> nn.Module:
    """The model prepared on a prompt and calibrated by generating."""
    inputs = subject.draw(2, LENGTHS[0] + 1)
    begin = {} if not subject.labels else {"decoder_input_ids": torch.full((2, 1), 1)}
    prepared = quant.prepare(model, {**inputs, **begin})
    with torch.no_grad():
        for call in range(CALIBRATION):
            generate(prepared, subject.draw(2, LENGTHS[call % len(LENGTHS)] + 1), tokens)
    return prepared


@dataclass
class Row:
    """What is measured of one model with one seed.

    Attributes:
        calls: of each program that ran, by its unit and its kind of call: how many times it ran, native calls in it,
            and what the steps between them are.
        fallbacks: calls that ran outside of programs.
    """

    name: str
    tokens: int = 0
    simulated: int = 0
    floats: int = 0
    beams: int = 0
    sampled: int = 0
    islands: list[str] = field(default_factory=list)
    programs: int = 0
    calls: dict[str, str] = field(default_factory=dict)
    native: Counter[str] = field(default_factory=Counter)
    fallbacks: list[str] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether all tokens are the simulation's, and prefill and step run in programs with native calls."""
        planned = all(self.native[kind] for kind in ("prefill", "step"))
        return self.tokens == self.simulated and planned and not self.fallbacks


def programs_of(model: nn.Module) -> dict[str, ProgramRunner]:
    """Of a converted model, all programs by the names of their modules."""
    found = {}
    for name, module in model.named_modules():
        first = module._modules.get(RESERVED)
        if isinstance(first, ProgramRunner):
            for place, one in enumerate([first, *first.others]):
                found[f"{name or '(model)'}{f'@{place + 1}' if place else ''}"] = one
    return found


@contextmanager
def counting(model: nn.Module) -> Iterator[Counter[str]]:
    """How often each program of a converted model runs to its end."""
    counts: Counter[str] = Counter()
    found = programs_of(model)

    def counted(name: str, runner: ProgramRunner) -> Callable[..., Any]:
        def run_program(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            output = ProgramRunner.run_program(runner, args, kwargs)
            counts[name] += 1
            return output

        return run_program

    for name, runner in found.items():
        runner.__dict__["run_program"] = counted(name, runner)
    try:
        yield counts
    finally:
        for runner in found.values():
            del runner.__dict__["run_program"]


def note_programs(row: Row, q: nn.Module, ran: dict[str, Counter[str]]) -> None:
    """What the programs that ran consist of; `ran` has the counts of prefill and step."""
    found = programs_of(q)
    row.programs = sum(any(counts[name] for counts in ran.values()) for name in found)
    for name, runner in found.items():
        kinds = [kind for kind, counts in ran.items() if counts[name]]
        if not kinds:
            continue
        planned = runner.program.schedule
        inside = sum(region.steps for region in planned.regions)
        single = Counter(_kind(step, runner) for step in planned.steps if not isinstance(step, Region))
        for kind in kinds:
            row.native[kind] += len(planned.regions)
        calls = f"{'+'.join(kinds)}: {len(planned.regions)} native calls of {inside} steps, {single.total()} single"
        row.calls[name] = f"{calls} ({', '.join(f'{count} {kind}' for kind, count in single.most_common())})"


SIZES = {"getattr", "getitem", "size", "numel", "eq", "ne", "lt", "le", "gt", "ge", "floordiv", "guard"}


def _kind(step: Instruction, runner: ProgramRunner) -> str:
    """What a step outside of native calls is."""
    if not step.own:
        return f"int8 {step.kind}"
    node = graph_of(runner).nodes[runner.program.values[step.out].node]
    if node.kind is Kind.MODULE:
        return type(runner.root.get_submodule(node.target)).__name__
    name = node.kind.value if node.kind is Kind.GUARD else called(node, runner.root)
    return "sizes" if name in SIZES and node.meta is None else name


def measure(subject: Subject, seed: int, tokens: int, *, trained: bool, size: int = 2) -> Row:
    """All that the table says of one model."""
    row = Row(f"{subject.name}{' trained' if trained else ''}")
    model = build(subject, seed, trained=trained)
    prepared = static(subject, model, tokens)
    q = quant.convert(prepared)
    row.islands = [entry.name or "(root)" for entry in quant.summary(q) if "island" in entry.detail]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for length in LENGTHS:
            inputs = subject.draw(size, length)
            found, expected = generate(q, inputs, tokens), generate(model, inputs, tokens)
            with simulating(prepared, exact=True):
                simulated = generate(prepared, inputs, tokens)
            row.tokens += found.numel()
            row.simulated += int((found == simulated).sum())
            row.floats += int((found == expected).sum())
        inputs = subject.draw(size, LENGTHS[-1])
        for name, how in (("beams", {"num_beams": 3}), ("sampled", {"do_sample": True})):
            setattr(row, name, _equal(prepared, q, inputs, tokens, how))
        ran = {}
        with counting(q) as ran["prefill"]:
            generate(q, inputs, 1)
        with counting(q) as ran["step"]:
            generate(q, inputs, 4)
        ran["step"] -= ran["prefill"]
        note_programs(row, q, ran)
    row.fallbacks = [str(one.message) for one in said if issubclass(one.category, quant.types.UncapturedCall)]
    row.times = [(_milliseconds(model, inputs), _milliseconds(q, inputs)) for _ in range(5)]
    return row


def _equal(prepared: nn.Module, q: nn.Module, inputs: Inputs, tokens: int, how: dict[str, Any]) -> int:
    """How many tokens the integers and the simulation generate alike, in another way than greedily."""
    torch.manual_seed(0)
    found = generate(q, inputs, tokens, **how)
    torch.manual_seed(0)
    with simulating(prepared, exact=True):
        return int((found == generate(prepared, inputs, tokens, **how)).sum())


def _milliseconds(model: nn.Module, inputs: Inputs, tokens: int = 16) -> float:
    """Per token of one `generate` call, the prefill left out."""
    times = []
    for count in (1, tokens + 1):
        start = time.perf_counter()
        generate(model, inputs, count)
        times.append(time.perf_counter() - start)
    return 1000 * (times[1] - times[0]) / tokens


def together(rows: list[Row]) -> Row:
    """The seeds of one model as one row."""
    one = copy.deepcopy(rows[0])
    for other in rows[1:]:
        for name in ("tokens", "simulated", "floats", "beams", "sampled"):
            setattr(one, name, getattr(one, name) + getattr(other, name))
        one.fallbacks += other.fallbacks
        one.times += other.times
    return one


def markdown(rows: list[Row]) -> str:
    """The table, and below it each model's programs."""
    lines = [
        "| model | programs | islands | tokens | as simulated | as float | ms a token, float | int8 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        floats, integers = (sorted(times)[len(times) // 2] for times in zip(*row.times, strict=True))
        cells = (row.name, row.programs, ", ".join(row.islands), row.tokens, row.simulated, row.floats)
        lines.append("| " + " | ".join(map(str, cells)) + f" | {floats:.1f} | {integers:.1f} |")
    for row in rows:
        lines += ["", f"{row.name}: {row.beams} tokens of beam search and {row.sampled} sampled ones as simulated"]
        lines += [f"- {name}: {what}" for name, what in row.calls.items()]
        lines += [f"- {text}" for text in dict.fromkeys(row.fallbacks)]
    return "\n".join(lines)


def quiet() -> None:
    """Import transformers, and let it keep its advice to itself."""
    library = import_library("transformers")
    library.logging.set_verbosity_error()
