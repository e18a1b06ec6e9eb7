"""Several tables at once: a search each, in a process of its own, sharing the slots fairly.

Each search is a Ray task that takes no slot itself, on the driver's node. One that fails, or whose
process dies, leaves the others alone. Who is searching stands in Ray's own memory; each search
reads it every second and takes its part of the slots, so that those of a table that is done go to
the others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from remasker.errors import RemaskerError, make_config
from tuning.api import TuneResult, tune
from tuning.config import SearchConfig
from tuning.folder import run_folder
from tuning.journal import read_study
from tuning.preflight import capacity
from tuning.ray_session import Pulse, ray_session
from tuning.search import cluster_slots, lost_head
from tuning.sharing import forget_names, write_names


class TuneManyError(RemaskerError):
    """Some tables failed; `results` holds the others, `errors` the reasons."""

    def __init__(self, results: dict[str, TuneResult], errors: dict[str, Exception]) -> None:
        self.results, self.errors = results, errors
        name, first = next(iter(errors.items()))
        more = f" (and {len(errors) - 1} more: {', '.join(list(errors)[1:])})"
        super().__init__(
            f"{len(errors)} of {len(errors) + len(results)} tables failed: {name}: {first}"
            f"{more if len(errors) > 1 else ''}"
        )


def tune_many(
    tables: Mapping[str, Any], *, sources: Mapping[str, str] | None = None, **options: Any
) -> dict[str, TuneResult]:
    """Tune several tables, by name, side by side on one machine or cluster; one export each.

    The trials of all tables share the slots evenly. The limits (`trials`, `time_budget`,
    `concurrent`) are those of each table; its time begins when its search does. There are never
    more searches at once than slots or cores of this machine: further tables wait for their turn.
    A table that fails does not stop the others: all failures are gathered in one `TuneManyError`.

    >>> tune_many({})
    {}
    """
    sources = sources or {}
    only_search = {k: v for k, v in options.items() if k in SearchConfig.__dataclass_fields__}
    config: SearchConfig = make_config(SearchConfig, only_search)
    if len(tables) < 2:
        return {
            name: tune(table, name=name, source=sources.get(name), **options)
            for name, table in tables.items()
        }
    key = f"remasker-{secrets.token_hex(8)}"
    results: dict[str, TuneResult] = {}
    errors: dict[str, Exception] = {}
    with (
        ray_session(config),
        Pulse({}, Path(config.storage)) as pulse,
        lost_head(pulse),
        _view(config, tables, results, errors),
    ):
        slots = cluster_slots(config, ray.cluster_resources(), capacity())
        at_once = min(slots, max(2, os.cpu_count() or 2))
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # A process of its own for each: what one leaves behind is no affair of the next.
        alone: dict[str, Any] = {"num_cpus": 0, "max_retries": 0, "max_calls": 1}
        alone["scheduling_strategy"] = here
        driver = ray.remote(**alone)(_one)
        waiting = dict(tables)
        running: dict[ray.ObjectRef, str] = {}
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    name = next(iter(waiting))
                    write_names(key, [*running.values(), name])
                    told = {**options, "name": name, "source": sources.get(name), "sharing": key}
                    running[driver.remote(waiting.pop(name), told)] = name
                done, _ = ray.wait(list(running), timeout=1)
                pulse.check()
                for reference in done:
                    name = running.pop(reference)
                    write_names(key, list(running.values()))
                    try:
                        results[name], said = ray.get(reference)
                        for text in said:
                            warnings.warn(f"{name}: {text}", stacklevel=2)
                    except Exception as error:
                        errors[name] = _cause(error)
        except BaseException:
            if not pulse.lost:
                for reference in running:
                    ray.cancel(reference, force=True)
            raise
        finally:
            if not pulse.lost:
                forget_names(key)
    results = {name: results[name] for name in tables if name in results}
    if errors:
        raise TuneManyError(results, errors)
    return results


def _one(table: Any, options: dict[str, Any]) -> tuple[TuneResult, list[str]]:
    """A search in its own process, and the warnings that nobody would see there."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        result = tune(table, **options)
    return result, [str(one.message) for one in caught if one.category is UserWarning]


def _cause(error: Exception) -> Exception:
    """What was raised there, not that it was raised there."""
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    if isinstance(error, ray.exceptions.WorkerCrashedError):
        return RemaskerError("its process died, by a signal or for lack of memory")
    return error


@contextlib.contextmanager
def _view(
    config: SearchConfig,
    tables: Mapping[str, Any],
    results: Mapping[str, Any],
    errors: Mapping[str, Any],
) -> Iterator[None]:
    """A line per table on a terminal, from the journals."""
    shown = sys.stderr.isatty() if config.progress is None else config.progress
    if not shown:
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    studies: dict[str, Any] = {}

    def line(name: str) -> str:
        if name in results:
            return f"{name}: done, error {results[name].error}"
        if name in errors:
            return f"{name}: failed, {errors[name]}"
        with contextlib.suppress(Exception):
            study = studies.setdefault(name, read_study(Path(run_folder(config, name))))
            states = [trial.state for trial in study.get_trials(deepcopy=False)]
            of = f" of {config.trials}" if config.trials else ""
            return f"{name}: {sum(state.is_finished() for state in states)}{of} trials done"
        return f"{name}: waiting"

    def draw() -> Text:
        return Text("\n".join(line(name) for name in tables))

    with Live(get_renderable=draw, console=Console(file=sys.stderr), refresh_per_second=1):
        yield
