"""Many files to fill: in this process, in several, or on a Ray cluster.

Many files are many independent tasks, one process each. A file appears whole or not at all, so a
worker that is killed costs its time and nothing else: its file is done again by another. Ray is
loaded only for a cluster.
"""

from __future__ import annotations

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

from remasker.errors import RemaskerError

if TYPE_CHECKING:
    from remasker import ReMaskerImputer
    from remasker.files import TextOptions
    from remasker.stream import Filled

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
