"""The folder of a run: whose it is, whether it can be written, who may work in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from remasker.errors import ArtifactError, InvalidConfigError, RemaskerError
from tuning import export
from tuning.config import RunExistsError, SearchConfig, StorageError
from tuning.journal import JOURNAL, TRIALS, read_study
from tuning.search import unwritable

#: What the operating system says of a disk that is full, read-only, broken or gone.
STORAGE_FAILS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}
#: Less free disk than this and a run would die half-way.
MIN_FREE_BYTES = 100e6


def run_folder(config: SearchConfig, name: str) -> Path:
    """Where a run lives.

    >>> run_folder(SearchConfig(storage="/tmp"), "a/b")
    Traceback (most recent call last):
    remasker.errors.InvalidConfigError: name: expected a plain folder name, got 'a/b'
    """
    if not name or name in (".", "..") or os.sep in name or name.startswith("."):
        raise InvalidConfigError(f"name: expected a plain folder name, got {name!r}")
    return Path(config.storage).expanduser().absolute() / name


def check_folder(folder: Path, config: SearchConfig) -> None:
    """Refuse a name that is taken, a path that cannot be written, a disk that is full."""
    if (folder / JOURNAL).exists() and not config.resume:
        raise RunExistsError(
            f"{folder} already holds a run; continue it with resume=True, or choose another name"
        )
    if folder.exists() and not (folder / JOURNAL).exists() and _foreign(folder):
        raise RunExistsError(f"{folder} exists and is not a run; choose another name or storage")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise ArtifactError(
            f"cannot write to {folder}: {error.strerror or error}; choose another storage"
        ) from error
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise ArtifactError(
            f"{folder}: only {free / 1e6:.0f} MB of disk are free, a run needs "
            f"{MIN_FREE_BYTES / 1e6:.0f} MB; choose another storage"
        )


def _foreign(folder: Path) -> bool:
    ours = {".lock", ".ray", export.RUN, TRIALS}
    return any(path.name not in ours for path in folder.iterdir())


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process per run: a second one is told so, not allowed to mix its trials in."""
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunExistsError(
                f"{folder} is being run by another process; wait for it, or choose another name"
            ) from None
        yield


@contextlib.contextmanager
def resumable(name: str, folder: Path) -> Iterator[None]:
    """Say what became of a run that ends early: why it failed, or how to go on with it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RemaskerError):
            raise
        failure = unwritable(folder)
        if isinstance(error, OSError) and error.errno in STORAGE_FAILS:
            failure = StorageError.of(folder, error)
        if failure is None:
            raise
        raise failure from error
    except KeyboardInterrupt:
        done = 0
        with contextlib.suppress(Exception):  # there may be no journal yet
            trials = read_study(folder).get_trials(deepcopy=False)
            done = sum(trial.state.is_finished() for trial in trials)
        raise KeyboardInterrupt(
            f"stopped; {folder} keeps everything ({done} trials finished). Continue with "
            f"tune(table, name={name!r}, storage={str(folder.parent)!r}, resume=True) or "
            f"`remasker tune … --name {name} --storage {folder.parent} --resume`"
        ) from None
