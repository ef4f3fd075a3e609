"""The ``geoq`` command: calibrations and answers from files, for models in any language, and the demo."""

import argparse
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from geoq import datafiles, state
from geoq.core.assessment import numbers_of
from geoq.core.estimator import GeoQ
from geoq.core.folds import RandomFolds, default_folds
from geoq.core.pairs import Pairs
from geoq.demo import demo
from geoq.planning import propose
from geoq.report import report
from geoq.training.sources import PredictedFolds

PICTURE_FORMATS = (".png", ".pdf", ".svg", ".jpg")
# Exit codes beside 0: a refusal, and queries that are not safe although all of them must be. A wrong command line exits with 2.
REFUSED, NOT_SAFE = 1, 3


def _note(text: object) -> None:
    print(text, file=sys.stderr)


def _imported(name: str) -> Any:
    """The object that ``package.module:name`` names; modules of the present folder are found."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise argparse.ArgumentTypeError(f"{name!r} does not have the form package.module:name.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as exc:
        raise argparse.ArgumentTypeError(f"{name!r} cannot be imported: {exc}.") from exc


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _runs(asked: argparse.Namespace) -> tuple[Any, Any, Any, dict[str, list[str]]]:
    """Inputs, outputs and groups of the file of runs, and the names of inputs and outputs."""
    columns = datafiles.read(asked.data)
    groups = asked.groups and datafiles.chosen(columns, [asked.groups], asked.data)[0]
    last = [name for name in columns if name != groups][-1:]
    outputs = datafiles.chosen(columns, asked.outputs or last, asked.data)
    others = [name for name in columns if name not in outputs and name != groups]
    inputs = datafiles.chosen(columns, asked.inputs or others, asked.data)
    if not inputs:
        raise ValueError(f"{asked.data} has no inputs beside {outputs}; name them with --inputs.")
    _note(f"inputs: {', '.join(inputs)}; outputs: {', '.join(outputs)}")
    y = datafiles.stacked(columns, outputs)
    if len(outputs) == 1 and y.ndim == 2 and columns[outputs[0]].ndim == 1:
        y = y[:, 0]
    names = {"inputs": inputs, "outputs": outputs}
    return datafiles.stacked(columns, inputs), y, columns[groups] if groups else None, names


def _folds(asked: argparse.Namespace) -> int:
    """Write which rows each external training must leave out: the rows that its fold is not trained on."""
    x, y, groups, _ = _runs(asked)
    scheme = RandomFolds(asked.folds) if asked.folds else default_folds()
    splits = Pairs.of(GeoQ(None, lambda *_: abs, folds=scheme), x, y, groups).plan.splits
    columns = {"row": np.arange(len(x))}
    for number, (seen, _) in enumerate(splits, 1):
        columns[f"fold_{number}"] = np.ones(len(x), dtype=int)
        columns[f"fold_{number}"][seen] = 0
    datafiles.write(asked.out, columns)
    print(
        f"{asked.out}: {len(splits)} trainings; number k leaves out the rows with 1 in the column fold_k. Predict all {len(x)} rows with each "
        "of these models, and with the deployed model, which is trained on all rows."
    )
    return 0


def _fit(asked: argparse.Namespace) -> int:
    """Calibrate with given predictions, or with a surrogate and a recipe in Python, and save the calibration."""
    x, y, groups, names = _runs(asked)
    surrogate, recipe = asked.surrogate, asked.train
    if asked.predictions:
        found = datafiles.predictions_of(asked.predictions, names["outputs"], len(x))
        surrogate, recipe = datafiles.tabulated(x, found[0]), PredictedFolds(found[1:])
        if not found[1:]:
            text, recipe = "so the model must never have seen these rows.", None
            _note(f"No predictions of folds are given, {text}")
    elif surrogate is None and recipe is None:
        raise ValueError("no model is given; pass --predictions, or --surrogate and --train.")
    scheme = RandomFolds(asked.folds) if asked.folds else default_folds()
    estimator = GeoQ(surrogate, recipe, quantile=asked.quantile, folds=scheme)
    estimator.fit(x, y, groups=groups, checkpoint=asked.checkpoint, progress=_note)
    state.save(asked.out, estimator, labels=names)
    print(f"{estimator.describe()}\n{asked.out}: saved")
    return 0


def _loaded(
    asked: argparse.Namespace, **files: tuple[str | None, Sequence[str] | None]
) -> tuple[Any, dict[str, Any], dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """The calibration with its names; and by name the columns and the inputs of files of queries, which have files of predictions."""
    estimator, labels = datafiles.load(asked.model, asked.surrogate)
    columns, inputs, predictions = {}, {}, []
    for name, (path, paths) in files.items():
        if path is None:
            continue
        if not isinstance(estimator, GeoQ):
            raise TypeError(f"{asked.model} holds labelled arrays or forecasts; ask it in Python.")
        own = columns[name] = datafiles.read(path)
        schema = estimator.fitted_.schema
        names = labels.get("inputs") or (schema.names if schema else [*own])
        x = inputs[name] = datafiles.stacked(own, datafiles.chosen(own, names, path))
        if (asked.surrogate is None) == (not paths):
            raise ValueError(f"{path} needs either a file of predictions or --surrogate.")
        outputs = labels.get("outputs", ["prediction"])
        predictions += [] if not paths else [datafiles.predictions_of(paths, outputs, len(x))[0]]
    if predictions:
        datafiles.with_predictions(estimator, [*inputs.values()], predictions)
    return estimator, labels, columns, inputs


def _assess(asked: argparse.Namespace) -> int:
    """Write bounds, flags and reasons beside the queries."""
    estimator, labels, found, inputs = _loaded(asked, queries=(asked.queries, asked.predictions))
    answer, columns = estimator.assess(inputs["queries"]), found["queries"]
    names, outputs = labels.get("inputs"), labels.get("outputs")
    for name, part in (("prediction", answer.prediction), ("bound", answer.error_hat)):
        values = numbers_of(part)
        if outputs and values.shape[1:] == (len(outputs),):
            columns |= {f"{name} of {own}": values[:, j] for j, own in enumerate(outputs)}
        else:
            columns[f"{name} of {outputs[0]}" if outputs else name] = values
    safe = numbers_of(answer.safe)
    names = names if names and estimator.fitted_.coordinates.input_shape == (len(names),) else None
    why = [answer.explanation(i, names) or answer.safety(i, names) for i in range(len(answer))]
    columns |= {"safe": safe.astype(int), "support score": numbers_of(answer.support_score)}
    datafiles.write(asked.out, columns | {"reason": np.array(why, dtype=object)})
    print(f"{asked.out}: {int(safe.sum())} of {len(safe)} queries are safe")
    return NOT_SAFE if asked.require_safe and not safe.all() else 0


def _report(asked: argparse.Namespace) -> int:
    """Write a report, with a test and planned queries if they are given."""
    planned = asked.planned, asked.planned_predictions
    files = {"x_test": (asked.test, asked.predictions), "planned": planned}
    estimator, labels, columns, given = _loaded(asked, **files)
    if asked.test is not None:
        outputs = datafiles.chosen(columns["x_test"], labels.get("outputs", []), asked.test)
        y = datafiles.stacked(columns["x_test"], outputs)
        given["y_test"] = y.reshape(len(y), *estimator.fitted_.output_shape)
    report(estimator, asked.out, **given, names=labels.get("inputs"), outputs=labels.get("outputs"))
    print(f"{asked.out}: report on {asked.model}")
    return 0


def _propose(asked: argparse.Namespace) -> int:
    """Write the candidates whose simulation lowers the bounds most."""
    planned = asked.planned, asked.planned_predictions
    files = {"candidates": (asked.candidates, asked.predictions), "queries": planned}
    estimator, _, columns, inputs = _loaded(asked, **files)
    found = propose(estimator, inputs["candidates"], asked.n, queries=inputs.get("queries"))
    chosen = {name: values[found.rows] for name, values in columns["candidates"].items()}
    why = np.array([found.reason(i) for i in range(len(found))], dtype=object)
    datafiles.write(asked.out, chosen | {"row": found.rows, "gain": found.gains, "reason": why})
    print(
        f"{asked.out}: {len(found)} runs; mean bound {found.bound_before:.3g} now, about {found.bound_after:.3g} with them"
    )
    return 0


def _demo(asked: argparse.Namespace) -> int:
    print(demo(asked.picture))
    return 0


def _serve(asked: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; GEOQ_TOKEN in the environment sets a token."""
    app = import_module("geoq.serving.app")
    estimator, labels = datafiles.load(asked.model, asked.surrogate)
    watch = import_module("geoq.monitor").Monitor if asked.monitor else lambda *_, **__: None
    settings = {name: getattr(asked, name) for name in ("host", "port", "megabytes", "seconds")}
    settings |= {"token": os.environ.get("GEOQ_TOKEN"), "names": labels.get("inputs")}
    server = app.server_of(estimator, monitor=watch(estimator, folder=asked.monitor), **settings)
    return int(app.run(server, lambda at: _note(f"{asked.model} is served at {at}")))


def _picture(text: str) -> Path:
    """The path of the picture; raises if a picture cannot be written there."""
    path, ends = Path(text), ", ".join(PICTURE_FORMATS)
    if path.suffix.lower() not in PICTURE_FORMATS or path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is not a picture in an existing folder; choose a file that ends in {ends}."
        )
    return path


# Arguments of several commands.
FILES: dict[str, Any] = {"nargs": "+", "metavar": "FILE"}
RUNS: dict[str, dict[str, Any]] = {
    "--data": {"required": True, "help": "runs, one per row: .csv, .parquet, .npz or .nc"},
    "--outputs": {"type": _names, "help": "columns of the outputs, with commas (the last one)"},
    "--inputs": {"type": _names, "help": "columns of the inputs (all others)"},
    "--groups": {"help": "column of labels; rows with one label are held out together"},
    "--folds": {"type": int, "help": "number of random folds (15 folds of three kinds)"},
}
MODEL: dict[str, dict[str, Any]] = {
    "--surrogate": {"type": _imported, "metavar": "MODULE:NAME", "help": "function predict(x)"},
    "--predictions": FILES
    | {"help": "predictions that were made elsewhere; fit: deployed, fold_1, ..."},
}
PLANNED: dict[str, dict[str, Any]] = {
    "--planned": {"metavar": "FILE", "help": "planned queries, whose bounds matter"},
    "--planned-predictions": FILES | {"help": "predictions that were made elsewhere, at these"},
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="geoq", description="Error bounds for trained surrogate models."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Any, about: str, more: dict[str, Any], out: str = "") -> Any:
        own = commands.add_parser(name, help=about, description=f"{about[:1].upper()}{about[1:]}.")
        own.set_defaults(run=run)
        for argument, settings in more.items():
            own.add_argument(argument, **settings)
        if out:
            own.add_argument("--out", default=out, help=f"file to write ({out})")
        return own.add_argument

    model = {"model": {"help": "file that fit has written"}}
    add = command("demo", _demo, "calibrate bounds for a small network, print and draw them", {})
    add("--picture", type=_picture, default="demo.png", help="file of the picture (demo.png)")
    about = "write which rows each external training must leave out"
    command("folds", _folds, about, RUNS, "folds.csv")
    add = command(
        "fit", _fit, "calibrate bounds and save the calibration", RUNS | MODEL, "model.geoq"
    )
    add("--quantile", type=float, default=0.95, help="quantile level of the bound (0.95)")
    add("--checkpoint", help="folder that keeps finished folds, to continue an interrupted run")
    add("--train", type=_imported, metavar="MODULE:NAME", help="function train(x, y)")
    about = "write bounds, flags and reasons for queries"
    add = command("assess", _assess, about, model | MODEL, "answer.csv")
    add("queries", help="queries, one per row")
    add("--require-safe", action="store_true", help=f"exit with {NOT_SAFE} unless all are safe")
    about = "write which of some candidates to simulate next"
    add = command("propose", _propose, about, model | MODEL | PLANNED, "next.csv")
    add("candidates", help="inputs that could be simulated, one per row")
    add("-n", type=int, default=5, help="number of runs (5)")
    about = "write a report as .html, .md or .json"
    add = command("report", _report, about, model | MODEL | PLANNED, "report.html")
    add("--test", metavar="FILE", help="new runs with their outputs; --predictions are at these")
    about = "answer clients of UM-Bridge and the Open Inference Protocol, and a page of sliders"
    add = command("serve", _serve, about, model)
    add("--surrogate", type=_imported, required=True, metavar="MODULE:NAME", help="the model")
    add("--host", default="127.0.0.1", help="address (this machine alone)")
    add("--port", type=int, default=4242, help="port; 0 takes a free one (4242)")
    add("--monitor", metavar="FOLDER", help="folder of a monitor, which observes all queries")
    add("--megabytes", type=float, default=16, help="largest request (16)")
    add("--seconds", type=float, default=30, help="longest request and answer (30)")
    return parser


def _sentence(exc: BaseException) -> str:
    """An exception as one sentence, with its place in the user's own code."""
    text = " ".join([str(exc) or type(exc).__name__, *getattr(exc, "__notes__", ())])
    frames = [f for f in traceback.extract_tb(exc.__traceback__) if Path(f.filename).is_file()]
    others = sysconfig.get_path("stdlib"), "-packages", str(Path(__file__).parent)
    own = [f for f in frames if not any(place in f.filename for place in others)]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    if not isinstance(exc, ValueError | TypeError | OSError | ImportError):
        text = f"{type(exc).__name__}: {text}"
    return f"{' '.join(text.split())}{place}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``geoq`` command; returns its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: _note(f"warning: {message}")
        try:
            asked = _parser().parse_args(given)
            return int(asked.run(asked))
        except Exception as exc:  # noqa: BLE001 (refusals of all kinds are one sentence)
            _note(f"geoq: {_sentence(exc)}")
            return REFUSED
