"""Independent tasks: one after the other, or in processes; each on one thread.

What has parts that do not need each other takes a `Run` and does not ask where they run: on a
cluster it is `tuning` that gives one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

import torch
from joblib import Parallel, delayed
from threadpoolctl import threadpool_limits

from remasker.errors import ProcessLostError

Task = Callable[[], Any]
#: (what is done, how many tasks of it are over, how many there are)
Tell = Callable[[str, int, int], None]


class Run(Protocol):
    """Does `total` tasks and returns their results in the tasks' order.

    A task is made when its turn comes, so that what it holds is not in memory before.
    """

    def __call__(self, tasks: Iterable[Task], total: int, doing: str = "") -> list[Any]:
        """`doing` says to people what the tasks are for."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Tables are small: threads that wait for each other cost more than they bring.

    Measured: 308 × 6 cells on two busy cores, 265 CPU seconds with threads and 18 without. It also
    gives sums one order, so that the same seed gives the same weights.

    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(limits=1):
            yield
    finally:
        torch.set_num_threads(before)


def alone(task: Task) -> Any:
    """A task that has others beside it: on one thread.

    >>> alone(lambda: 1)
    1
    """
    with one_thread():
        return task()


def one_by_one(tasks: Iterable[Task], total: int, doing: str = "") -> list[Any]:
    """The plain way to run tasks.

    >>> one_by_one([lambda: 1, lambda: 2], 2)
    [1, 2]
    """
    return [task() for task in tasks]


def side_by_side(
    n_jobs: int, tell: Tell = lambda doing, done, total: None, *, threads: bool = False
) -> Run:
    """Run tasks in so many processes (1: in this one), and tell how many are done.

    With `threads` in this process: for tasks that spend their time in compiled code, and hold so
    much that it had better not travel.

    >>> side_by_side(1)([lambda: 1, lambda: 2], 2)
    [1, 2]
    """

    def run(tasks: Iterable[Task], total: int, doing: str = "") -> list[Any]:
        results = []
        tell(doing, 0, total)
        # Arrays travel as they are: as memory maps they could not be written to.
        prefer = "threads" if threads else "processes"
        parallel = Parallel(n_jobs=n_jobs, prefer=prefer, return_as="generator", max_nbytes=None)
        try:
            for result in parallel(delayed(alone)(task) for task in tasks):
                results.append(result)
                tell(doing, len(results), total)
        except BrokenProcessPool as error:
            raise ProcessLostError(
                f"one of {n_jobs} processes was ended from outside, perhaps for want of memory; "
                "fit again with fewer (n_jobs=1, or --jobs 1)"
            ) from error
        return results

    return run
