"""`remasker impute`: one table or thousands of files, with a saved model or without one."""

from __future__ import annotations

import argparse
import glob
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remasker.errors import InvalidConfigError, RemaskerError
from tuning.file_jobs import (
    SHARED,
    Outcome,
    Task,
    Tell,
    clear,
    in_processes,
    on_cluster,
    one_by_one,
    progress,
)
from tuning.options import (
    add_column_options,
    add_reading_options,
    column_options,
    markers,
    open_table,
    reading_options,
    say,
    say_how_good,
)

if TYPE_CHECKING:
    from remasker import ReMaskerImputer

#: Endings of the tables in a directory.
ENDINGS = (".parquet", ".csv", ".tsv", ".txt")


def add_impute(commands: Any) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "impute",
        help="fill the gaps of tables",
        description="Fill the gaps of tables, with a saved model or, without --model, with one "
        "that is learned from the table itself. Observed cells are written back exactly as they "
        "were. A saved model knows how to read the columns; with it, Parquet files of any size "
        "stream through a bounded memory, and a text file is read whole.",
        epilog=(
            "examples:\n"
            "  remasker impute people.csv -o full.csv\n"
            "  remasker impute people.csv -o full.csv --exclude price --kinds zip=category\n"
            "  remasker impute new.csv -m model -o new-full.csv\n"
            "  remasker impute new.csv.gz -m model -o new-full.parquet\n"
            "  cat new.csv | remasker impute - -m model -o - | head\n"
            "  remasker impute 'big/*.parquet' -m model -o out/\n"
            "  remasker impute 'big/*.parquet' -m model -o out/ --resume --address auto\n"
            "  remasker impute people.csv -o draws/ --draws 20    multiple imputation\n"
            "\n"
            "Several tables go to a directory, each under its own name, as many at a time as there "
            "are cores.\nA file appears there whole or not at all.\n"
        ),
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        nargs="+",
        help="tables with gaps: files, a directory of them, or a pattern such as 'big/*.parquet'; "
        "- is standard input",
    )
    parser.add_argument(
        "-m",
        "--model",
        metavar="MODEL",
        help="what `fit`, `tune` or `export` wrote (default: learn from the table, keep no model)",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        required=True,
        help="file to write, or a directory for several tables; - is standard output",
    )
    there = parser.add_mutually_exclusive_group()
    there.add_argument("--force", action="store_true", help="replace files that are there")
    there.add_argument(
        "--resume",
        action="store_true",
        help="leave out tables whose output is there: go on with a job that was stopped",
    )
    parser.add_argument(
        "--draws",
        metavar="N",
        type=int,
        help="write N completed tables to the directory OUT, drawn from what the gaps may have "
        "held: analyse all of them and combine the answers with `remasker.pool`",
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="of draws and of learning (default: 0)"
    )
    parser.add_argument(
        "--workers", metavar="N", type=int, help="processes on this machine (default: its cores)"
    )
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="use a Ray cluster, one task per file: auto, or ray://host:10001; " + SHARED,
    )
    add_reading_options(parser)
    add_column_options(parser, "columns, where no model knows them")
    parser.set_defaults(run=impute)


def impute(args: argparse.Namespace) -> None:
    """Fill the gaps of one table or of many."""
    if args.workers is not None and args.workers < 1:
        raise InvalidConfigError(f"--workers: expected a number of at least 1, got {args.workers}")
    if args.draws is not None:
        return draw(args)
    tasks, folder = plan(args.data, args.output)
    if args.address is not None and "-" in (tasks[0].source, tasks[0].target):
        raise InvalidConfigError("-: a cluster reads and writes files; leave --address out")
    if args.model is None:
        return fill_alone(args, tasks, folder)
    _refuse_column_options(args)
    there = refuse_targets(tasks, folder, force=args.force, resume=args.resume)
    imputer = load_model(args.model, markers(args))
    if there:
        say(f"{len(there)} of {len(tasks)} outputs are there already")
    tasks = inspect(imputer, [task for task in tasks if task not in there])
    if not tasks:
        return
    if folder is not None:
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise InvalidConfigError(f"cannot write {folder}: {error.strerror}") from None
    options = reading_options(args)
    workers = min(len(tasks), args.workers or len(os.sched_getaffinity(0)))
    if args.address is not None:
        _finish(tasks, partial(on_cluster, imputer, tasks, options, args.address))
    elif workers > 1:
        _finish(tasks, partial(in_processes, imputer, tasks, options, workers))
    else:
        _finish(tasks, partial(one_by_one, imputer, tasks, options))


def fill_alone(args: argparse.Namespace, tasks: Sequence[Task], folder: Path | None) -> None:
    """Learn from one table, complete it, keep no model."""
    if folder is not None or args.address is not None or args.workers is not None:
        raise InvalidConfigError(
            "--model: several tables, a directory, --workers and --address need the model they "
            "have in common; learn it with `remasker fit` or `remasker tune`"
        )
    from remasker.files import write_table
    from remasker.stream import fill

    (task,) = tasks
    if refuse_targets(tasks, folder, force=args.force, resume=args.resume):
        say(f"{task.target} is there already")
        return
    table, imputer = learn(args, task.source)
    completed, filled = fill(imputer, table.frame)
    write_table(table, completed, task.target)
    say(f"{filled}; `remasker fit` keeps such a model, `remasker tune` looks for a better one")
    say_how_good(imputer)


def learn(args: argparse.Namespace, source: str) -> tuple[Any, ReMaskerImputer]:
    """A table, and the default model of it."""
    from remasker import ReMaskerImputer

    table = open_table(source, reading_options(args))
    imputer = ReMaskerImputer(
        **column_options(args),
        missing_values=markers(args, table),
        n_jobs=-1,
        random_state=args.seed,
        verbose=sys.stderr.isatty(),
    )
    return table, imputer.fit(table.frame)


def draw(args: argparse.Namespace) -> None:
    """Write several completed tables of one table with gaps."""
    from remasker.files import read_table, write_table

    if args.draws < 1:
        raise InvalidConfigError(f"--draws: expected a number of at least 1, got {args.draws}")
    if args.resume or args.address is not None or args.workers is not None:
        raise InvalidConfigError("--draws: made at once; leave --resume, --workers, --address out")
    tasks, folder = plan(args.data, args.output.rstrip("/") + "/")
    if len(tasks) > 1 or folder is None:
        raise InvalidConfigError(f"--draws: expected one table, got {len(tasks)}")
    source = tasks[0].source
    name = Path(source.removesuffix(".gz"))
    ending = name.suffix + source[len(str(name)) :]
    width = len(str(args.draws))
    targets = [folder / f"{name.stem}-{k:0{width}}{ending}" for k in range(1, args.draws + 1)]
    refuse_targets(
        [replace(tasks[0], target=str(target)) for target in targets],
        folder,
        force=args.force,
        resume=False,
    )
    if args.model is None:
        table, imputer = learn(args, source)
    else:
        _refuse_column_options(args)
        imputer = load_model(args.model, markers(args))
        table = read_table(
            source,
            reading_options(args),
            columns=imputer.encoder_.columns,
            remembered=imputer.provenance_.get("file"),
        )
    folder.mkdir(exist_ok=True)
    drawn = imputer.draw(table.frame, args.draws, random_state=args.seed)
    for target, completed in zip(targets, drawn, strict=True):
        write_table(table, completed, str(target))
    say(
        f"{args.draws} tables are in {folder}; analyse each, and combine the answers with "
        "remasker.pool"
    )


def _refuse_column_options(args: argparse.Namespace) -> None:
    for option in ("kinds", "exclude", "bounds"):
        if getattr(args, option):
            raise InvalidConfigError(f"--{option}: the model knows the columns; leave it out")
    if args.text != "ignore":
        raise InvalidConfigError("--text: the model knows the columns; leave it out")


def load_model(path: str, more_markers: Sequence[Any] = ()) -> ReMaskerImputer:
    """A saved model, to which more values mean a gap."""
    from remasker import ReMaskerImputer

    imputer = ReMaskerImputer.load(path)
    known = imputer.encoder_.missing_values
    imputer.encoder_.missing_values = [*(known if isinstance(known, list) else []), *more_markers]
    return imputer


def _finish(tasks: Sequence[Task], run: Callable[[Tell], Iterator[Outcome]]) -> None:
    """Show the work, clear away what killed workers left, and sum it up in one sentence."""
    from remasker.stream import Filled

    total, failures, done = Filled(), [], 0
    try:
        with progress(tasks) as tell:
            for task, outcome in run(tell):
                if isinstance(outcome, Exception):
                    failures.append((task, outcome))
                else:
                    total, done = total + outcome, done + 1
    except BaseException as error:
        if len(tasks) > 1:
            error.add_note(f"{done} of {len(tasks)} files are finished; --resume goes on from here")
        raise
    finally:
        clear(tasks)
    if len(tasks) == 1:
        if failures:
            raise failures[0][1]
        say(str(total))
        return
    if failures:
        task, reason = failures[0]
        more = f" (and {len(failures) - 1} files more)" if len(failures) > 1 else ""
        raise RemaskerError(
            f"{_named(task, reason)}{more}; {done} of {len(tasks)} files are finished"
        )
    say(f"{total}, {len(tasks)} files")


def _named(task: Task, reason: RemaskerError) -> str:
    return str(reason) if task.source in str(reason) else f"{task.source}: {reason}"


# ---------------------------------------------------------------------- which files


def plan(data: Sequence[str], output: str) -> tuple[list[Task], Path | None]:
    """The files that `data` names, in order, with where each goes; and the directory, if to one.

    >>> plan(["people.csv"], "full.csv")
    ([Task(source='people.csv', target='full.csv', rows=None)], None)
    """
    found = list(dict.fromkeys(path for name in data for path in _files(name)))
    folder = Path(output)
    to_file = not output.endswith("/") and not folder.is_dir()
    if to_file and len(found) == 1 and found == list(data):
        return [Task(source=found[0], target=output)], None
    if "-" in found:
        raise InvalidConfigError("-: standard input goes to a file or to -, not to a directory")
    if output == "-" or folder.is_file() or (not folder.exists() and _is_table(folder)):
        raise InvalidConfigError(
            f"cannot write {len(found)} tables to {output}: expected a directory, such as out/"
        )
    if not folder.absolute().parent.is_dir():
        raise InvalidConfigError(f"cannot write {output}: there is no directory {folder.parent}")
    sources: dict[str, str] = {}
    for source in found:
        name = Path(source).name
        if name in sources:
            raise InvalidConfigError(
                f"{sources[name]} and {source} would both become {folder / name}; impute them into "
                "two directories"
            )
        sources[name] = source
    return [Task(source=path, target=str(folder / name)) for name, path in sources.items()], folder


def _files(name: str) -> list[str]:
    """The files of a path, a directory or a pattern."""
    if Path(name).is_dir():
        found = [str(path) for path in sorted(Path(name).iterdir()) if _is_table(path)]
        if not found:
            expected = ", ".join(ENDINGS)
            raise InvalidConfigError(
                f"{name} holds no table: expected files that end in {expected}"
            )
        return found
    if glob.has_magic(name) and not Path(name).exists():
        found = sorted(path for path in glob.glob(name, recursive=True) if Path(path).is_file())
        if not found:
            raise InvalidConfigError(f"no file matches {name!r}")
        return found
    return [name]


def _is_table(path: Path) -> bool:
    name = path.name.lower()
    return name.removesuffix(".gz").endswith(ENDINGS) and not name.startswith((".", "_"))


def refuse_targets(
    tasks: Sequence[Task], folder: Path | None, *, force: bool, resume: bool
) -> list[Task]:
    """Refuse, before any work is done, to replace what is there; with `resume` these are done."""
    from remasker.files import TableFileError, check_target

    there = [task for task in tasks if Path(task.target).is_file()]
    if resume and there:
        return there
    if folder is None:
        check_target(tasks[0].target, force=force)
    elif there and not force:
        more = f" (and {len(there) - 1} more)" if len(there) > 1 else ""
        raise TableFileError(
            f"{there[0].target} exists{more}; add --resume to keep what is there and do the rest, "
            "or --force to replace it"
        )
    return []


def inspect(imputer: ReMaskerImputer, tasks: Sequence[Task]) -> list[Task]:
    """Refuse what can be refused by a look at the files' ends; and count their rows."""
    from remasker.stream import count_rows

    if len(tasks) > 1:
        for task in tasks:
            if not Path(task.source).is_file():
                raise InvalidConfigError(f"cannot read {task.source}: no such file")
    return [replace(task, rows=count_rows(imputer, task.source)) for task in tasks]
