"""`remasker tune`, `leaderboard` and `export`, and the part of `remasker fit` that repeats a run.

`tuning.cli` builds the parser and calls `add_commands`; each command sets `run`, a function of the
parsed arguments that returns the exit code. Ray and torch are loaded only when a command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from remasker.errors import ArtifactError, InvalidConfigError
from tuning.options import (
    add_column_options,
    add_reading_options,
    column_options,
    literal,
    markers,
    open_table,
    reading_options,
    remember,
)

#: What a shell reports for a process ended by Ctrl-C.
INTERRUPTED = 130


def add_commands(subparsers: Any) -> None:
    """Add the commands of the search to a parser.

    >>> parser = argparse.ArgumentParser()
    >>> add_commands(parser.add_subparsers())
    >>> parser.parse_args(["tune", "credit.csv", "--trials", "8"]).trials
    8
    """
    tune = subparsers.add_parser(
        "tune",
        help="search for the best model of each table, complete it and export the model",
        description="Search for the best model of each table. Everything goes to STORAGE/NAME: the "
        "model, the completed table, the leaderboard, the record and a page.",
        epilog=(
            "examples:\n"
            "  remasker tune people.csv                            ten minutes, into runs/people\n"
            "  remasker tune people.csv --time-budget 1h --trials 200 --resume   then some more\n"
            "  remasker tune people.csv --na -999 --exclude price --kinds zip=category\n"
            "  remasker tune a.csv b.parquet --storage runs        side by side, a run each\n"
            "  remasker tune people.csv --space width=32,64 --space epochs=50..600 --no-experts\n"
            "  remasker tune people.csv --address auto             on a Ray cluster that runs\n"
            "  remasker tune people.csv --cluster clusters/on-premise.yaml   on one that may not\n"
            "\n"
            "The first limit that is reached ends the search; the time covers everything, also the "
            "last training.\nCtrl-C keeps what there is and says how to go on.\n"
        ),
    )
    tune.add_argument("data", nargs="+", type=Path, metavar="DATA", help="CSV or Parquet file")
    tune.add_argument("--name", help="name of the run (default: the file's name; one table only)")
    tune.add_argument("--trials", type=int, default=40, help="at most so many trials (40)")
    tune.add_argument(
        "--time-budget", default="10m", help="for each table, all in all: 90s, 10m, 1h30m, none"
    )
    tune.add_argument("--storage", default="runs", help="folder of all runs (runs)")
    tune.add_argument("--metric", default="normalised", help="normalised, or the protocol's rmse")
    tune.add_argument(
        "--space",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        help="fix (width=64), choose (width=32,64) or bound (epochs=50..600) a setting; repeatable",
    )
    tune.add_argument("--address", help="a Ray cluster: auto, or ray://host:10001")
    tune.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="a cluster file such as clusters/on-premise.yaml: start it if need be, search there, "
        "bring the runs back",
    )
    tune.add_argument("--cpus-per-trial", type=float, default=1)
    tune.add_argument("--gpus-per-trial", type=float, default=0)
    tune.add_argument("--concurrent", type=int, help="trials side by side (as many as fit)")
    tune.add_argument("--seed", type=int, default=0)
    tune.add_argument(
        "--no-experts", action="store_true", help="pure ReMasker, without the second stage"
    )
    tune.add_argument(
        "--no-refit", action="store_true", help="keep the winner as it was when it was chosen"
    )
    tune.add_argument("--resume", action="store_true", help="continue, or extend, a run")
    tune.add_argument("--verbose", action="store_true", help="show what Ray says")
    add_reading_options(tune)
    add_column_options(tune)
    tune.set_defaults(run=run_tune)

    board = subparsers.add_parser("leaderboard", help="the trials of a run, best first")
    board.add_argument("run_folder", type=Path, metavar="RUN", help="such as runs/credit")
    board.add_argument("--top", type=int, default=10, help="how many (10; 0 for all)")
    board.set_defaults(run=run_leaderboard)

    export = subparsers.add_parser("export", help="copy the model of a run to a place of its own")
    export.add_argument("run_folder", type=Path, metavar="RUN", help="such as runs/credit")
    export.add_argument("-o", "--output", type=Path, required=True, help="folder for the model")
    export.set_defaults(run=run_export)


def run_tune(args: argparse.Namespace) -> int:
    """`remasker tune`."""
    names = [args.name or path.name.split(".")[0] for path in args.data]
    if args.name and len(args.data) > 1:
        raise InvalidConfigError("--name: expected one table with it, got several")
    if len(set(names)) < len(names):
        raise InvalidConfigError(f"two tables share the name {names[0]!r}; tune them one by one")
    if args.cluster is not None:
        from tuning.cluster import run_on_cluster

        words = sys.argv[sys.argv.index("tune") + 1 :]
        return run_on_cluster(args.cluster, words, args.data, Path(args.storage), name=args.name)
    from tuning.api import TuneResult
    from tuning.config import SearchConfig
    from tuning.many import TuneManyError, tune_many

    reading = reading_options(args)
    tables = {name: open_table(str(p), reading) for name, p in zip(names, args.data, strict=True)}
    sources = {name: str(p.absolute()) for name, p in zip(names, args.data, strict=True)}
    budget = None if str(args.time_budget).lower() == "none" else args.time_budget
    options: dict[str, Any] = {
        "trials": args.trials,
        "time_budget": budget,
        "storage": args.storage,
        "metric": args.metric,
        "space": parse_space(args.space) or None,
        "random_state": args.seed,
        "concurrent": args.concurrent,
        "cpus_per_trial": args.cpus_per_trial,
        "gpus_per_trial": args.gpus_per_trial,
        "address": args.address,
        "experts": None if args.no_experts else "auto",
        "refit": not args.no_refit,
        "resume": args.resume,
        "verbose": args.verbose,
    }
    config = SearchConfig(**options)
    _refuse_early(config, names)

    about_tables = {**column_options(args), "sources": sources}
    if args.na:
        # What `--na` names is a gap in a text file already; in others it has still to be said.
        about_tables["missing_values"] = max((markers(args, t) for t in tables.values()), key=len)

    def show(results: dict[str, TuneResult]) -> None:
        for name, result in results.items():
            print(f"{name}: error {result.error}, of {result.error.of}")
            print(f"  written to {result.folder}; the model is {result.folder / 'model'}")

    try:
        with interruptible():
            show(tune_many(tables, **about_tables, **options))
    except TuneManyError as error:
        show(error.results)
        raise
    except KeyboardInterrupt:
        words = [word for word in sys.argv[1:] if word != "--resume"]
        print(
            f"\nstopped; everything is kept in {config.storage}. Continue with:\n"
            f"  remasker {shlex.join([*words, '--resume'])}",
            file=sys.stderr,
        )
        return INTERRUPTED
    return 0


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C is a KeyboardInterrupt here, whatever the program around it makes of it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _refuse_early(config: Any, names: list[str]) -> None:
    """A name that is taken is said before Ray is started."""
    from tuning.folder import check_folder, run_folder

    for name in names:
        check_folder(run_folder(config, name), config)


def run_leaderboard(args: argparse.Namespace) -> int:
    """`remasker leaderboard`: also of a run that is still going on, from its journal."""
    from tuning.export import read_run
    from tuning.journal import read_study, records
    from tuning.selection import leaderboard

    fixed = read_run(args.run_folder)["search"]["fixed"]
    board = leaderboard(records(read_study(args.run_folder), fixed))
    shown = board if args.top == 0 else board.head(args.top)
    print(shown.to_string(index=False))
    return 0


def run_export(args: argparse.Namespace) -> int:
    """`remasker export`."""
    from remasker.imputer import ReMaskerImputer

    model = args.run_folder / "model"
    if not model.is_dir():
        raise ArtifactError(
            f"{args.run_folder} has no model; if its search was stopped, continue it with "
            "`remasker tune … --resume`"
        )
    print(ReMaskerImputer.load(model).save(args.output))
    return 0


def fit_from_run(run: Path, output: Path, data: Path | None = None) -> Path:
    """`remasker fit --from-run RUN [DATA] -o OUTPUT`: train a run's winner again from its record.

    Without `data`, the table is read from where the run read it.
    """
    from remasker.files import TextOptions, read_table
    from tuning.export import read_run, reproduce

    record = read_run(run)["data"]
    source = data or record["source"]
    if source is None:
        raise InvalidConfigError(
            f"{run} was tuned from a table in memory: give the table's file as well"
        )
    table = read_table(str(source), TextOptions(**(record.get("reading") or {})))
    imputer = reproduce(run, table.frame)
    remember(imputer, str(source), table)
    return imputer.save(output)


def parse_space(words: list[str]) -> dict[str, Any]:
    """`--space` as the Python API takes it.

    >>> parse_space(["width=32,64", "epochs=50..600", "masking=copy+uniform"])
    {'width': [32, 64], 'epochs': (50, 600), 'masking': 'copy+uniform'}
    """
    space: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name.strip() or not equals or not value:
            raise InvalidConfigError(f"--space: expected NAME=VALUES, got {word!r}")
        if ".." in value:
            low, _, high = value.partition("..")
            space[name.strip()] = (literal(low), literal(high))
        elif "," in value:
            space[name.strip()] = [literal(part) for part in value.split(",")]
        else:
            space[name.strip()] = literal(value)
    return space
