"""A step of decoding with keys and values as int8 and as reals (`make bench-cache`).

    python benchmarks/bench_cache.py
    python benchmarks/bench_cache.py --contexts 512 8192 --layers 4 --threads 2

Blocks of the shapes of Llama 3.2 1B as transformers has them, random weights, int4 in groups of 64. Contenders take
turns in one process, with the same random keys and values in their caches. The error is that of the cache alone: of the
float model's logits with it, against those with a float cache.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from typing import Any

import display
import harness
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import quant
from quant.integrations.int8_cache import Int8Cache

LAYERS = 16
"""Of the whole model."""
HEADS, SHARED, WIDTH = 32, 8, 64
EFFORT = harness.Effort(seconds=4.0, rounds=15, patience=1.0)
FLOAT, INT8, INT8_AS_REALS = "float32 cache", "int8 cache, attention of integers", "int8 cache, made reals"


def model_of(layers: int) -> Any:
    """A decoder of a small vocabulary."""
    torch.manual_seed(0)
    size: dict[str, Any] = {"hidden_size": HEADS * WIDTH, "intermediate_size": 8192, "num_hidden_layers": layers}
    heads: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": SHARED}
    return LlamaForCausalLM(LlamaConfig(vocab_size=1024, max_position_embeddings=1 << 17, **size, **heads)).eval()


def filled(cache: Any, layers: int, context: int) -> Any:
    """With random keys and values."""
    g = torch.Generator().manual_seed(context)
    for layer in range(layers):
        cache.update(*(torch.randn(1, SHARED, context, WIDTH, generator=g) for _ in range(2)), layer)
    return cache


def step(model: Any, cache: Any, context: int) -> Tensor:
    """The logits of one token, which is forgotten again."""
    places = torch.tensor([[context]])
    logits: Tensor = model(torch.tensor([[7]]), position_ids=places, cache=cache, use_cache=True).logits
    cache.crop(-1)
    return logits


def bytes_of(cache: Any) -> int:
    """Of keys and values."""
    if isinstance(cache, Int8Cache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def measured(model: Any, q: dict[str, Any], layers: int, context: int, threads: int) -> list[list[str]]:
    """The lines of a row."""
    caches = {name: filled(DynamicCache() if name == FLOAT else Int8Cache(q[name]), layers, context) for name in q}
    expected = step(model, filled(DynamicCache(), layers, context), context)
    error = harness.relative_error(step(model, filled(Int8Cache(model), layers, context), context), expected)
    contenders = [
        harness.Contender(name, lambda name=name, cache=cache: step(q[name], cache, context))  # type: ignore[misc]
        for name, cache in caches.items()
    ]
    race = harness.race(f"context {context}", contenders, effort=EFFORT, clock=harness.clock_for(threads))
    lines = []
    for name, cache in caches.items():
        ratio = race.ratio(FLOAT, name)
        rate = layers / LAYERS / race.time(name).median
        size = f"{bytes_of(cache) * LAYERS / layers / 2**20:.0f} MiB"
        times = f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        lines.append([str(context), name, f"{rate:.1f}", times, size, "" if name == FLOAT else f"{error:.4f}"])
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[512, 2048, 8192], help="tokens that the cache holds"
    )
    parser.add_argument("--layers", type=int, default=4, help="of the model's 16, default: %(default)s")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    options = parser.parse_args(arguments)
    if len(options.threads) > 1:
        given = ["--contexts", *map(str, options.contexts), "--layers", str(options.layers)]
        return harness.in_children(options.threads, given)
    threads: int = options.threads[0]
    print(harness.describe(harness.machine(("transformers",), threads, harness.pin(threads))))
    model = model_of(options.layers)
    recipe = quant.Recipe(default=quant.QConfig(weight_bits=4, group_size=64))
    q = {name: copy.deepcopy(quant.quantize_dynamic(model, recipe)) for name in (FLOAT, INT8, INT8_AS_REALS)}
    q[INT8].set_attn_implementation("octet")
    header = ("context", "who", f"tokens/s of {LAYERS} layers", "float's time over it", "cache", "error")
    with torch.inference_mode():
        for context in options.contexts:
            print(display.table(header, measured(model, q, options.layers, context, threads)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
