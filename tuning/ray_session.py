"""A Ray to run on, kept quiet and watched: what it offers, and whether its head still answers."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from remasker.errors import InvalidConfigError
from tuning.config import ClusterLostError, SearchConfig

#: How often the head is asked, in seconds.
BEAT = 1.0
#: A head that takes no connection for so long is lost. Ray ends the whole process after 60 s.
PATIENCE = 15.0
#: How long whoever waits for the cluster may take to notice that it is lost.
NOTICE = 25.0
#: How far Ray's workers give way to others.
NICENESS = "RAY_worker_niceness"


@contextlib.contextmanager
def ray_session(config: SearchConfig) -> Iterator[None]:
    """A Ray to run on: the one this process already has, a cluster, or one of our own.

    Only what was started here is ended here.
    """
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"address": config.address or "local"}
    if options["address"] == "local":
        options["include_dashboard"] = False
        secure_token()
    if not config.verbose:
        options |= {"log_to_driver": False, "logging_level": logging.CRITICAL}
    with quiet_ray(config.verbose):
        try:
            ray.init(**options)
        except ConnectionError as error:
            raise InvalidConfigError(
                f"address: no Ray cluster answers at {config.address!r} ({error}); start one with "
                "`ray start --head`, or leave address out to run on this machine"
            ) from None
    try:
        yield
    finally:
        ray.shutdown()


def secure_token() -> None:
    """Make the token that a Ray of our own asks for, before Ray makes one that others may read."""
    from tuning.cluster import create_token

    asked = os.environ.get("RAY_AUTH_MODE", "token").lower() == "token"
    if asked and not os.environ.get("RAY_AUTH_TOKEN"):
        path = os.environ.get("RAY_AUTH_TOKEN_PATH")
        with contextlib.suppress(OSError):  # a home that cannot be written: Ray says so better
            create_token(Path(path) if path else None)


@contextlib.contextmanager
def quiet_ray(verbose: bool) -> Iterator[None]:
    """Ray Tune without its log lines, its files beside ours, and its change of directory."""
    settings = {
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_GLOBAL_CHECKPOINT_S": "3600",
        "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
        "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
        "RAY_AIR_NEW_OUTPUT": "0",
        # The searcher counts (`JournalSearch.slots`); the default starts one worker at a time.
        "TUNE_MAX_PENDING_TRIALS_PG": "100000",
        # Ray Tune asks the head only for its log; a head that is gone would stop it there.
        "TUNE_STATE_REFRESH_PERIOD": "1000000",
        # Ray's workers give way to everything else (nice 15): beside two busy processes on two
        # cores no trial had begun after 80 s. A search with a time limit takes its fair share.
        NICENESS: os.environ.get(NICENESS, "0"),
        # Ctrl-C stops at once: the journal and the checkpoints are all that is needed to go on.
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
    }
    before = {name: os.environ.get(name) for name in settings}
    loggers = [logging.getLogger(name) for name in ("ray", "ray.tune", "ray.train")]
    levels = [logger.level for logger in loggers]
    os.environ.update(settings)
    if not verbose:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            if not verbose:
                warnings.simplefilter("ignore")
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class HeadLost(BaseException):
    """Passes through Ray Tune untouched: its clean-up would ask the head that is gone."""


class Pulse:
    """Watches the head in one thread, and asks it a few questions again and again in another.

    Ray's own calls wait a minute for a head that is gone and then end the whole process; after a
    restart of the head they end it at once. So nobody else asks, nobody asks without a look
    whether the head takes connections, and the thread that watches never waits for an answer.
    """

    def __init__(self, questions: dict[str, Callable[[], Any]], folder: Path) -> None:
        self.questions, self.folder = questions, folder
        self.address: str = ray.get_runtime_context().gcs_address
        self.answers = {name: ask() for name, ask in questions.items()}
        self.lost, self._seen = False, False
        self._head = head_id(self.address)
        self._fine, self._over = threading.Event(), threading.Event()
        self._fine.set()
        self._threads = [
            threading.Thread(target=loop, daemon=True, name="remasker-pulse")
            for loop in (self._watch, self._ask)
        ]

    def __enter__(self) -> Pulse:
        # A head behind a proxy (ray://) cannot be seen from here.
        self._seen = takes_connections(self.address)
        if self._seen:
            for thread in self._threads:
                thread.start()
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Ray pickles the whole search, and nobody unpickles it.
        return {}

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=5)

    def __getitem__(self, name: str) -> Any:
        return self.answers[name]

    def check(self) -> None:
        """Wait while it is in doubt whether the head lives; raise `HeadLost` if it does not."""
        self._fine.wait()
        if self.lost:
            raise HeadLost

    def gone(self) -> bool:
        """Whether the head is lost; asked when a call of Ray has failed, maybe for that reason."""
        self._fine.wait()
        known = self._seen and self._head is not None
        return self.lost or (known and not self._comes_back())

    def error(self) -> ClusterLostError:
        """What to say then."""
        return ClusterLostError(
            f"the head of the cluster at {self.address} is gone or was restarted, and with it all "
            f"that ran; {self.folder} keeps the finished trials and the checkpoints: start the "
            "cluster again and continue with resume=True"
        )

    def _ask(self) -> None:
        while not self._over.wait(BEAT) and not self.lost:
            if self._fine.is_set() and takes_connections(self.address):
                with contextlib.suppress(Exception):
                    self.answers = {name: ask() for name, ask in self.questions.items()}

    def _watch(self) -> None:
        while not self._over.wait(BEAT / 2):
            if takes_connections(self.address):
                continue
            self._fine.clear()
            self.lost = not self._comes_back()
            self._fine.set()
            if self.lost:
                self._farewell()
                return

    def _comes_back(self) -> bool:
        deadline = time.monotonic() + PATIENCE
        while not self._over.wait(BEAT / 4) and time.monotonic() < deadline:
            if takes_connections(self.address):
                # A head with an outer memory (Redis) keeps its name when it restarts.
                return self._head is not None and head_id(self.address) == self._head
        return False

    def _farewell(self) -> None:
        """Somebody waits inside Ray and will never return: Ray would soon end this process."""
        if not self._over.wait(NOTICE):
            print(self.error(), file=sys.stderr, flush=True)
            os._exit(2)


def takes_connections(address: str) -> bool:
    """Whether somebody listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError):
        return False
    return True


def head_id(address: str) -> str | None:
    """The name that a head gives itself when it first starts."""
    try:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        return str(GcsClient(address=address).cluster_id.hex())
    except Exception:  # a private name: without it, every restart counts as a loss
        return None
