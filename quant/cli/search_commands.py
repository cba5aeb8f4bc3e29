"""`quant sensitivity` and `quant autoquant`: which layers int8 harms, and the best model within what may be lost."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quant.cli.arguments import add_recipe_arguments
from quant.cli.calibrate_command import check_backend
from quant.cli.errors import UserError, one_line, with_type

if TYPE_CHECKING:
    from torch import nn

METRIC_HELP = (
    "a function of a model that returns a number, or a score for each sample, of which more is better; the current "
    "folder is searched"
)


def add_parsers(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The arguments of both."""
    one = verbs.add_parser("sensitivity", help="what each layer costs at the model's output where it alone is int8")
    _add_data(one)
    one.add_argument("--metric", metavar="PACKAGE.MODULE:FUNCTION", help=METRIC_HELP)
    one.add_argument("--out", metavar="FILE.json", help="write every number there")
    one.add_argument("--plot", metavar="FILE.svg", help="draw the layers there")
    two = verbs.add_parser("autoquant", help="the fastest or smallest model that loses no more than a metric may")
    _add_data(two)
    two.add_argument("--metric", required=True, metavar="PACKAGE.MODULE:FUNCTION", help=METRIC_HELP)
    two.add_argument("--max-drop", required=True, type=float, metavar="X", help="what the metric may lose, in its unit")
    two.add_argument("--objective", choices=("latency", "size"), default="latency", help="default: latency")
    two.add_argument(
        "--max-evaluations", type=int, default=30, metavar="N", help="models to score at most (default: 30)"
    )
    two.add_argument("--checkpoint", metavar="FILE", help="keep measurements there, and go on from them after a kill")
    two.add_argument("--out", metavar="FILE", help="write the int8 model there, for `quant.load`")
    two.add_argument("--recipe", metavar="FILE.json", help="write its recipe and every trial there")
    two.add_argument("--plot", metavar="FILE.svg", help="draw every trial there: time or size against the metric")


def _add_data(parser: argparse.ArgumentParser) -> None:
    from quant.calibrate import command

    command.add_data_arguments(parser)
    parser.set_defaults(observer=None)  # the histogram, but for layers with 16-bit activations
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_recipe_arguments(parser)


def sensitivity(options: argparse.Namespace, rest: list[str]) -> int:
    """Print the table, or with --json the numbers; write --out and --plot."""
    import quant
    from quant.cli import files

    outputs = files.writable_outputs(options, out=".json", plot=".svg")
    model, settings = _model_and_settings(options)
    metric = None if options.metric is None else _function(options.metric)
    found = _run(lambda: quant.sensitivity(model, _batches(options), metric, **settings))
    print(found.to_json() if options.json else found)
    if "out" in outputs:
        found.to_json(outputs["out"])
    if "plot" in outputs:
        found.plot(outputs["plot"])
    return files.say_written(options, outputs)


def autoquant(options: argparse.Namespace, rest: list[str]) -> int:
    """Search, print what was chosen and why; write --out, --recipe and --plot."""
    import quant
    from quant.cli import files

    outputs = files.writable_outputs(options, out=None, recipe=".json", plot=".svg")
    model, settings = _model_and_settings(options)
    metric = _function(options.metric)
    found = _run(
        lambda: quant.autoquant(
            model,
            _batches(options),
            metric,
            max_drop=options.max_drop,
            objective=options.objective,
            max_evaluations=options.max_evaluations,
            checkpoint=options.checkpoint,
            **settings,
        )
    )
    print(found.to_json() if options.json else found)
    if "recipe" in outputs:
        found.to_json(outputs["recipe"])
    if "plot" in outputs:
        found.plot(outputs["plot"])
    if "out" in outputs:
        if found.recipe is None:
            raise UserError("--out: the float model is the best within --max-drop, so there is no int8 model to write")
        files.save(found.model, outputs["out"])
    return files.say_written(options, outputs)


def _model_and_settings(options: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    import quant
    from quant.cli import files
    from quant.observers import AUTO

    if options.backend is not None:
        check_backend(options.backend)
    model = files.load_model(options.model, options.weights).eval()

    def made() -> quant.Recipe:
        default = quant.QConfig(
            activation_observer=options.observer or AUTO, activation_options=dict(options.observer_option)
        )
        rules = [(pattern, None) for pattern in options.keep_float]
        return quant.Recipe(rules, default=default, backend=options.backend)

    return model, {"recipe": _run(made), "progress": not options.quiet}


def _batches(options: argparse.Namespace) -> Any:
    from quant.calibrate import command

    return command.read(options)


def _function(name: str) -> Callable[[nn.Module], Any]:
    """The user's metric; an error of its own comes back in one line, with the place."""
    from quant.cli import files

    metric = files.load_function(name, "--metric")

    def evaluate(model: nn.Module) -> Any:
        try:
            return metric(model)
        except Exception as error:
            raise UserError(f"--metric {name!r} failed with {with_type(error)}") from error

    return evaluate


def _run(call: Callable[[], Any]) -> Any:
    from quant.calibrate import CalibrationError

    # DataError, CheckpointError, MetricError, NothingQuantized and RecipeError are ValueErrors.
    try:
        return call()
    except (CalibrationError, TypeError, ValueError, OSError) as error:
        raise UserError(one_line(error)) from error
