"""`remasker impute`: one table or thousands of files, here or on a cluster.

Many files are many independent tasks, one process each. A file appears whole or not at all, so a
worker that is killed costs its time and nothing else: its file is done again by another. Ray is
loaded only with `--address`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import glob
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remasker.errors import InvalidConfigError, RemaskerError
from tuning.options import add_reading_options, markers, reading_options, say

if TYPE_CHECKING:
    from remasker import ReMaskerImputer
    from remasker.files import TextOptions
    from remasker.stream import Filled

#: Endings of the tables in a directory.
ENDINGS = (".parquet", ".csv", ".tsv", ".txt")
#: So often a worker may die over the same files before it is more than bad luck.
MAX_DEATHS = 3
SHARED = "the tables and OUT must be on storage that every node of the cluster shares"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One file to fill."""

    source: str
    target: str
    #: None where only reading the file would tell.
    rows: int | None = None


#: A finished task with what was done, or why it could not be.
Outcome = tuple[Task, "Filled | RemaskerError"]
#: Hears how many rows of a task are done.
Tell = Callable[[Task, int], None]


def add_impute(commands: Any) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "impute",
        help="fill the gaps of tables with a saved model",
        description="Fill the gaps of tables with a saved model. Observed cells are written back "
        "exactly as they were; the model knows how to read the columns. Parquet files of any size "
        "stream through a bounded memory; a text file is read whole.",
        epilog=(
            "examples:\n"
            "  remasker impute people.csv -m model -o full.csv\n"
            "  remasker impute new.csv.gz -m model -o new-full.parquet\n"
            "  cat new.csv | remasker impute - -m model -o - | head\n"
            "  remasker impute 'big/*.parquet' -m model -o out/\n"
            "  remasker impute 'big/*.parquet' -m model -o out/ --resume --address auto\n"
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
    parser.add_argument("-m", "--model", metavar="MODEL", required=True, help="what `fit` wrote")
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
        "--workers", metavar="N", type=int, help="processes on this machine (default: its cores)"
    )
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="use a Ray cluster, one task per file: auto, or ray://host:10001; " + SHARED,
    )
    add_reading_options(parser)
    parser.set_defaults(run=impute)


def impute(args: argparse.Namespace) -> None:
    """Fill the gaps of one table or of many."""
    if args.workers is not None and args.workers < 1:
        raise InvalidConfigError(f"--workers: expected a number of at least 1, got {args.workers}")
    tasks, folder = plan(args.data, args.output)
    if args.address is not None and "-" in (tasks[0].source, tasks[0].target):
        raise InvalidConfigError("-: a cluster reads and writes files; leave --address out")
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


def clear(tasks: Sequence[Task]) -> None:
    """Remove what killed workers began to write."""
    for task in tasks:
        target = Path(task.target)
        if task.target != "-":
            for part in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
                part.unlink(missing_ok=True)


# ---------------------------------------------------------------------- three ways to run


def one_by_one(
    imputer: ReMaskerImputer, tasks: Sequence[Task], options: TextOptions, tell: Tell
) -> Iterator[Outcome]:
    """In this process."""
    for task in tasks:
        yield task, _attempt(imputer, task, options, tell)


def _attempt(
    imputer: ReMaskerImputer, task: Task, options: TextOptions, tell: Tell
) -> Filled | RemaskerError:
    """A file that cannot be imputed does not keep the others from it."""
    from remasker.stream import impute_file

    try:
        return impute_file(
            imputer, task.source, task.target, options=options, tell=partial(tell, task)
        )
    except RemaskerError as error:
        return error


def in_processes(
    imputer: ReMaskerImputer,
    tasks: Sequence[Task],
    options: TextOptions,
    workers: int,
    tell: Tell,
) -> Iterator[Outcome]:
    """In processes of this machine; when one is killed, the files that were begun begin again."""
    waiting = list(tasks)
    # As plain bytes: torch would hand tensors over through shared memory that dies with a worker.
    shipped = pickle.dumps((imputer, options))
    for _ in range(MAX_DEATHS + 1):
        pool = concurrent.futures.ProcessPoolExecutor(
            min(workers, len(waiting)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(shipped,),
        )
        try:
            futures = {pool.submit(_work, task): task for task in waiting}
            for future in concurrent.futures.as_completed(futures):
                task = futures[future]
                outcome = future.result()
                waiting.remove(task)
                _tell_end(task, outcome, tell)
                yield task, outcome
            return
        except BrokenProcessPool:
            continue
        finally:
            # What is still running when this is left by an exception is of no use to anyone.
            for process in list((pool._processes or {}).values()) if waiting else []:
                process.kill()
            pool.shutdown(cancel_futures=True)
    for task in waiting:
        yield task, _too_many_deaths(task)


_worker: dict[str, Any] = {}


def _begin(shipped: bytes) -> None:
    """Make a new process ready; Ctrl-C is its parent's business, and it ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker["imputer"], _worker["options"] = pickle.loads(shipped)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(task: Task) -> Filled | RemaskerError:
    return _attempt(_worker["imputer"], task, _worker["options"], _silence)


def _silence(task: Task, rows: int) -> None:
    pass


def on_cluster(
    imputer: ReMaskerImputer, tasks: Sequence[Task], options: TextOptions, address: str, tell: Tell
) -> Iterator[Outcome]:
    """On a Ray cluster, a task per file; the model travels with the tasks."""
    import ray

    from tuning.config import SearchConfig
    from tuning.ray_session import ray_session

    # A worker is somewhere else: only whole paths mean the same there.
    places = {
        replace(task, source=os.path.abspath(task.source), target=os.path.abspath(task.target)): (
            task
        )
        for task in tasks
    }
    with ray_session(SearchConfig(address=address)):
        work = ray.remote(num_cpus=1, max_retries=MAX_DEATHS)(impute_on_node)
        shipped = ray.put((imputer, options))
        running = {work.remote(shipped, task): task for task in places}
        while running:
            (finished,), _ = ray.wait(list(running), num_returns=1)
            task = running.pop(finished)
            try:
                outcome = ray.get(finished)
            except ray.exceptions.RayTaskError:
                raise
            except ray.exceptions.RayError:
                outcome = _too_many_deaths(task)
            _tell_end(places[task], outcome, tell)
            yield places[task], outcome


def impute_on_node(shipped: tuple[Any, Any], task: Task) -> Filled | RemaskerError:
    """What a worker of a cluster does."""
    for path in (Path(task.source), Path(task.target).parent):
        if not path.exists():
            return RemaskerError(f"{path} is not on node {os.uname().nodename}; {SHARED}")
    return _attempt(shipped[0], task, shipped[1], _silence)


def _too_many_deaths(task: Task) -> RemaskerError:
    return RemaskerError(
        f"{task.source}: its worker process died {MAX_DEATHS + 1} times, by a signal or for lack "
        "of memory; try --workers 1"
    )


# ---------------------------------------------------------------------- speaking


def _tell_end(task: Task, outcome: Filled | RemaskerError, tell: Tell) -> None:
    rows = task.rows if isinstance(outcome, Exception) else outcome.rows
    tell(task, rows or 0)


@contextlib.contextmanager
def progress(tasks: Sequence[Task]) -> Iterator[Tell]:
    """A bar of rows on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield _silence
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    counts = [task.rows for task in tasks]
    total = None if None in counts else sum(filter(None, counts))
    done: dict[Task, int] = {}
    with Progress(
        "imputing",
        BarColumn(),
        MofNCompleteColumn(),
        "rows",
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    ) as bar:
        shown = bar.add_task("", total=total)

        def tell(task: Task, rows: int) -> None:
            done[task] = rows
            bar.update(shown, completed=sum(done.values()))

        yield tell
