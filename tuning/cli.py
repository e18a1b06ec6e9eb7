"""The command line: `remasker fit | impute | simulate | describe | demo`, and what others add.

A command is a parser with ``set_defaults(run=function)``; the function takes the parsed arguments.
Everything heavy (torch, pandas, ray) is imported by the function that needs it, so that `--help`
is instant.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import remasker
from remasker.errors import InvalidConfigError, RemaskerError, nearest
from tuning.impute_cli import add_impute
from tuning.options import (
    KINDS,
    add_column_options,
    add_reading_options,
    column_options,
    literal,
    markers,
    open_table,
    pairs,
    reading_options,
    remember,
    say,
    say_how_good,
)

if TYPE_CHECKING:
    from remasker import ReMaskerImputer

#: Modules with a function ``add_commands(subparsers)``; one that is not installed is left out.
OTHER_COMMANDS = ("tuning.tune_cli", "tuning.cluster")

EXAMPLES = """\
examples:
  remasker describe people.csv                     what is in the table, what would be done
  remasker impute people.csv -o full.csv           fill the gaps; observed cells stay as written
  remasker fit people.csv -o model                 learn from the observed cells, keep the model
  remasker impute new.csv -m model -o -            new rows, to standard output
  remasker impute 'big/*.parquet' -m model -o out/ many files of any size, here or on a cluster
  remasker fit people.csv -o model --exclude price --kinds zip=category --na -999
  remasker simulate full.csv -o gaps.csv --mechanism MAR --ratio 0.3
  remasker tune people.csv --time-budget 10m       search for the best model; all in runs/people
  remasker demo                                    all of it, on a table made up on the spot

Tables are CSV, TSV or Parquet, gzipped or not; `-` is standard input or output.
`remasker COMMAND --help` explains a command.
"""


class Interrupted(BaseException):
    """Ctrl-C. Not KeyboardInterrupt, on which the estimator keeps what it has: that suits a
    notebook, but a command finishes its work or writes nothing.
    """


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one sentence."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where the help is."""
        found = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if found:
            message += nearest(found[1], re.findall(r"[\w-]+", found[2]))
        say(f"{message}; see `{self.prog} --help`")
        raise SystemExit(2)


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(
        prog="remasker",
        description="Fill the gaps in any table.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"remasker {remasker.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_fit(commands)
    add_impute(commands)
    _add_simulate(commands)
    _add_describe(commands)
    _add_demo(commands)
    for module in OTHER_COMMANDS:
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module).add_commands(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the answer is the exit code."""
    args = build_parser().parse_args(arguments)
    with _warnings_as_sentences():
        try:
            with _interruptible():
                return args.run(args) or 0
        except RemaskerError as error:
            say(_in_words_of_the_shell(str(error)))
            return 2
        except BrokenPipeError:
            # The reader has gone, and Python would complain again on closing standard output.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except Interrupted as stop:
            notes = getattr(stop, "__notes__", None) or ["nothing was written"]
            say(f"interrupted; {notes[0]}")
            return 130
        except MemoryError:
            say("not enough memory for this table; try fewer rows or columns")
            return 2


# ---------------------------------------------------------------------- fit


def _add_fit(commands: Any) -> None:
    parser = commands.add_parser(
        "fit",
        help="learn from a table and save the model",
        description="Learn from the observed cells of a table and save the model.",
        epilog=(
            "examples:\n"
            "  remasker fit people.csv -o model\n"
            "  remasker fit people.csv -o model --exclude price --kinds zip=category --na -999\n"
            "  remasker fit export.csv -o model --sep ';' --decimal , --encoding latin-1\n"
            "  remasker fit people.parquet -o model --epochs 300 --members 3 --set dropout=0.1\n"
            "  remasker fit --from-run runs/people -o model\n"
        ),
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        nargs="?",
        help="the table, with its gaps; - is standard input (with --from-run: the run's own)",
    )
    parser.add_argument("-o", "--output", metavar="MODEL", required=True, help="directory to write")
    parser.add_argument(
        "--from-run",
        metavar="RUN",
        type=Path,
        help="train the winner of a `remasker tune` again, exactly, from the run's record",
    )
    parser.add_argument("--force", action="store_true", help="replace a model that is there")
    add_reading_options(parser)
    add_column_options(parser)
    model = parser.add_argument_group("model")
    model.add_argument("--paper", action="store_true", help="the setting of the ReMasker paper")
    model.add_argument("--epochs", type=int, help="passes over the rows (default: by table size)")
    model.add_argument("--width", type=int, help="width of the Transformer")
    model.add_argument("--members", type=int, help="models to average")
    model.add_argument(
        "--jobs",
        type=int,
        default=-1,
        help="processes that train side by side (default: -1, one per core); same result",
    )
    model.add_argument("--seed", type=int, default=0, help="same seed, same model (default: 0)")
    model.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="any other parameter of ReMaskerImputer, as in --set encoder_depth=4",
    )
    parser.set_defaults(run=fit)


def fit(args: argparse.Namespace) -> None:
    """Fit a model on a table and save it."""
    from remasker.artifact import MANIFEST
    from remasker.files import TableFileError

    target = Path(args.output)
    if target.exists() and not (args.force and (target / MANIFEST).is_file()):
        way_out = "add --force to replace it" if (target / MANIFEST).is_file() else "it is no model"
        raise TableFileError(f"{target} exists; {way_out}")
    if args.from_run is not None:
        from tuning.tune_cli import fit_from_run

        fit_from_run(args.from_run, target, None if args.data is None else Path(args.data))
        say(f"trained the winner of {args.from_run} again; wrote {target}")
        return
    if args.data is None:
        raise InvalidConfigError("DATA: expected a table, got none; see `remasker fit --help`")
    imputer = _make_imputer(args.paper, estimator_settings(args))
    table = open_table(args.data, reading_options(args))
    imputer.missing_values = markers(args, table)
    imputer.fit(table.frame)
    remember(imputer, args.data, table)
    imputer.save(target)
    encoder = imputer.encoder_
    gaps = int(encoder.gaps(table.frame).sum())
    say(
        f"learned from {len(table.frame)} rows and {len(encoder.modelled)} of "
        f"{len(encoder.columns)} columns ({gaps} gaps); wrote {target}"
    )
    say_how_good(imputer)


def estimator_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The parameters of the estimator that the arguments of `fit` give."""
    settings: dict[str, Any] = {
        **column_options(args),
        "random_state": args.seed,
        "n_jobs": args.jobs,
        "verbose": sys.stderr.isatty(),
    }
    for name, value in (
        ("epochs", args.epochs),
        ("width", args.width),
        ("n_members", args.members),
    ):
        if value is not None:
            settings[name] = value
    own = {
        "kinds": "--kinds",
        "exclude": "--exclude",
        "bounds": "--bounds",
        "missing_values": "--na",
        "random_state": "--seed",
        "n_members": "--members",
        "n_jobs": "--jobs",
    }
    for name, text in pairs("--set", args.set).items():
        if name in own:
            raise InvalidConfigError(f"--set {name}: use {own[name]}")
        settings[name] = literal(text)
    return settings


def _make_imputer(paper: bool, settings: dict[str, Any]) -> ReMaskerImputer:
    from remasker import ReMaskerImputer

    known = ReMaskerImputer().get_params()
    for name in settings:
        if name not in known:
            raise InvalidConfigError(f"--set: unknown parameter {name!r}{nearest(name, known)}")
    make = ReMaskerImputer.paper if paper else ReMaskerImputer
    imputer = make(**settings)
    imputer._configs()  # Refuse a bad setting before a large table is read.
    return imputer


# ---------------------------------------------------------------------- simulate


def _add_simulate(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="make gaps in a table, to see how well they can be filled",
        description="Make gaps in a table. MCAR: anywhere; MAR: depending on other columns; MNAR: "
        "depending on the hidden values themselves.",
        epilog=(
            "example:\n"
            "  remasker simulate full.csv -o gaps.csv --mechanism MNAR --ratio 0.2 --columns age\n"
        ),
    )
    parser.add_argument("data", metavar="DATA", help="the table; - is standard input")
    parser.add_argument(
        "-o", "--output", metavar="OUT", required=True, help="file to write; - is standard output"
    )
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--mechanism", choices=("MCAR", "MAR", "MNAR"), default="MAR")
    parser.add_argument("--ratio", type=float, default=0.3, help="share of cells (default: 0.3)")
    parser.add_argument(
        "--columns",
        metavar="COLUMN",
        action="append",
        help="make gaps in this column only; repeat it for more",
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same gaps (default: 0)")
    add_reading_options(parser)
    parser.set_defaults(run=simulate)


def simulate(args: argparse.Namespace) -> None:
    """Make gaps in a table."""
    from remasker import simulate_missing
    from remasker.files import check_target, write_table

    check_target(args.output, force=args.force)
    table = open_table(args.data, reading_options(args))
    holed = simulate_missing(
        table.frame,
        mechanism=args.mechanism,
        ratio=args.ratio,
        columns=args.columns,
        random_state=args.seed,
    )
    made = int(holed.isna().to_numpy().sum() - table.frame.isna().to_numpy().sum())
    write_table(table, holed, args.output)
    say(f"made {made} gaps in {len(holed)} rows ({args.mechanism}, seed {args.seed})")


# ---------------------------------------------------------------------- describe


def _add_describe(commands: Any) -> None:
    parser = commands.add_parser(
        "describe",
        help="what is in a table or a model",
        description="Show the columns of a table, its gaps and what would be done with them; or "
        "the columns, members and provenance of a saved model.",
        epilog="examples:\n  remasker describe people.csv\n  remasker describe model\n",
    )
    parser.add_argument("path", metavar="DATA|MODEL", help="a table (- is standard input) or model")
    add_reading_options(parser)
    parser.add_argument(
        "--kinds", metavar="COLUMN=KIND", action="append", default=[], help=f"one of {KINDS}"
    )
    parser.set_defaults(run=describe)


def describe(args: argparse.Namespace) -> None:
    """Show what is in a table or in a model."""
    from tuning.describe import describe_model, describe_table

    if Path(args.path).is_dir():
        lines = describe_model(args.path)
    else:
        table = open_table(args.path, reading_options(args))
        kinds = pairs("--kinds", args.kinds)
        plain_kinds = {name: kind.partition(":")[0] for name, kind in kinds.items()}
        lines = describe_table(args.path, table, plain_kinds, markers(args, table))
    print("\n".join(lines), flush=True)


# ---------------------------------------------------------------------- demo


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="see it work on a table made up on the spot",
        description="Make a table of mixed kinds, hide some of its cells, tune a model for it, "
        "fill the gaps, and compare with the truth and with simpler ways to fill them.",
    )
    parser.add_argument("-o", "--output", metavar="DIR", default="demo", help="default: ./demo")
    parser.add_argument("--force", action="store_true", help="write into a directory that is there")
    parser.add_argument("--rows", type=int, default=600, help="rows of the table (default: 600)")
    parser.add_argument("--trials", type=int, default=12, help="as in `remasker tune`")
    parser.add_argument("--time-budget", default="150s", help="as in `remasker tune`")
    parser.set_defaults(run=demo)


def demo(args: argparse.Namespace) -> None:
    """Show the whole way on a table of the project's own."""
    from tuning.demo import run_demo

    lines = run_demo(Path(args.output), args.rows, args.trials, args.time_budget, force=args.force)
    for line in lines:
        print(line, flush=True)


# ---------------------------------------------------------------------- speaking


def _in_words_of_the_shell(message: str) -> str:
    """The library's messages name its parameters; here they are options.

    >>> _in_words_of_the_shell("list it in missing_values, or name the column in exclude")
    'list it with --na, or name the column with --exclude'
    """
    message = re.sub(r"kinds=\{'(.*?)': '(\w+)'\}", r"--kinds \1=\2", message)
    for name, option in (("missing_values", "na"), ("exclude", "exclude"), ("kinds", "kinds")):
        message = re.sub(rf"\bin {name}\b", f"with --{option}", message)
        message = re.sub(rf"^{name}\b", f"--{option}", message)
    message = message.replace("resume=True", "--resume")
    return re.sub(r"^bounds\b", "--bounds", message)


@contextlib.contextmanager
def _warnings_as_sentences() -> Iterator[None]:
    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if category is UserWarning:
            say(f"warning: {_in_words_of_the_shell(str(message))}")

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    pressed = False

    def interrupt(*_: Any) -> NoReturn:
        nonlocal pressed
        pressed = True
        raise Interrupted

    before = signal.getsignal(signal.SIGINT)
    # Started in the background, it is ignored, and stays so; other threads may not set it.
    ours = before is not signal.SIG_IGN and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if pressed:  # extensions make an error of their own of it, most while they are imported
            raise Interrupted from error
        raise
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
