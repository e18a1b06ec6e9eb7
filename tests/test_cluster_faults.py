"""Drivers, heads, nodes and disks that fail for real during a search on a cluster of one machine.

Each Ray here is one of its own, `ray start --head` on its own port, ended by its process group.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from remasker.errors import InvalidConfigError
from tuning.cluster import create_token
from tuning.journal import read_study

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
N_TRIALS = 4
#: Long enough to be caught in the act, small enough to end.
SPACE = {"width": 16, "encoder_depth": 1, "decoder_depth": 1, "epochs": 200, "batch_size": 32}
SEARCH = ["--time-budget=none", "--no-experts", f"--trials={N_TRIALS}"]
SEARCH += [f"--space={name}={value}" for name, value in SPACE.items()]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    size = rng.normal(size=200)
    frame = pd.DataFrame({"a": size, "b": size + 0.2 * rng.normal(size=200), "c": size**2})
    frame.loc[rng.random(200) < 0.3, "b"] = np.nan
    path = tmp_path / "mine.csv"
    frame.to_csv(path, index=False)
    return path


class Head:
    """A head with two slots on a port of its own, in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(create_token(folder / "auth_token")),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.drivers: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        words = ["start", "--head", "--block", f"--port={self.port}", "--num-cpus=2"]
        words += ["--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        # A short path: the sockets below it may have no more than 107 characters.
        words += ["--object-store-memory=80000000", f"--temp-dir=/tmp/rm{self.port}"]
        with open(self.folder / "head.log", "ab") as log:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).with_name("ray")), *words],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for(lambda: b"This command will now block" in (self.folder / "head.log").read_bytes())

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
            (self.folder / "head.log").unlink()
            shutil.rmtree(f"/tmp/rm{self.port}", ignore_errors=True)

    def tune(self, table: Path, *more: str) -> subprocess.Popen[str]:
        """`remasker tune` from a process of its own."""
        words = ["tune", str(table), f"--address={self.address}", *SEARCH, *more]
        words += [f"--storage={self.folder / 'runs'}"]
        driver = subprocess.Popen(
            [sys.executable, "-m", "tuning.cli", *words],
            env=self.environment,
            cwd=ROOT,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.drivers.append(driver)
        return driver


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    head = Head(tmp_path)
    head.start()
    yield head
    head.kill()
    for driver in head.drivers:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(what: Callable[[], object], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


def states(folder: Path) -> list[str]:
    try:
        trials = read_study(folder).get_trials(deepcopy=False)
    except InvalidConfigError:
        return []
    return [trial.state.name for trial in trials if trial.state.name != "WAITING"]


def in_flight(folder: Path) -> bool:
    """One trial is done, and another has got so far that it has a checkpoint."""
    return "COMPLETE" in states(folder) and bool(list((folder / "trials").glob("*/state.pt")))


def ended(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str]:
    out, said = process.communicate(timeout=seconds)
    return process.returncode, out + said


def test_the_driver_is_killed_and_another_goes_on(head: Head, table: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    first = head.tune(table)
    wait_for(lambda: in_flight(folder) or first.poll() is not None)
    os.killpg(first.pid, signal.SIGKILL)
    _, said = ended(first)
    before = states(folder)
    assert "RUNNING" in before, said
    done = before.count("COMPLETE")
    finished = {p: p.stat().st_mtime_ns for p in (folder / "trials").glob("*/result.pt")}

    code, said = ended(head.tune(table, "--resume"))
    assert code == 0, said
    assert states(folder) == ["COMPLETE"] * N_TRIALS
    assert len(finished) >= done
    # What was finished was not done twice.
    kept = [p for p, when in finished.items() if p.stat().st_mtime_ns == when]
    assert len(kept) >= done
    assert (folder / "imputed.csv").exists()


@pytest.mark.parametrize("soon", [True, False], ids=["restarted at once", "gone for a while"])
def test_the_head_restarts(head: Head, table: Path, tmp_path: Path, soon: bool) -> None:
    """All that ran is lost, the run's folder is not: one sentence, then `--resume`."""
    folder = tmp_path / "runs" / "mine"
    first = head.tune(table)
    wait_for(lambda: in_flight(folder) or first.poll() is not None)
    head.kill()
    if soon:
        head.start()
    code, said = ended(first, 58)
    assert code == 2, said
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "head of the cluster" in line]
    assert "continue with" in line
    assert str(folder) in line
    assert 0 < states(folder).count("COMPLETE") < N_TRIALS

    if not soon:
        head.start()
    code, said = ended(head.tune(table, "--resume"))
    assert code == 0, said
    assert states(folder) == ["COMPLETE"] * N_TRIALS


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own; full or read-only whenever the test wants it."""
    place = tmp_path / "runs"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("a disk that fills up needs root and the right to mount a tmpfs")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> None:
    with open(place / "filler", "ab") as file, contextlib.suppress(OSError):
        while True:
            os.write(file.fileno(), bytes(2**16))


def close(place: Path) -> None:
    """Read-only for whoever opens a file from now on; the kernel refuses it for open ones."""
    subprocess.run(["mount", "--bind", str(place), str(place)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_the_storage_takes_no_more(
    table: Path, tmp_path: Path, small_disk: Path, trouble: str
) -> None:
    """One error that names the storage, not a failure of every trial; afterwards it goes on."""
    folder = small_disk / "mine"
    words = [sys.executable, "-m", "tuning.cli", "tune", str(table), *SEARCH, "--concurrent=2"]
    words += [f"--storage={small_disk}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    environment.pop("RAY_AUTH_MODE", None)

    def start(*more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*words, *more],
            env=environment,
            cwd=ROOT,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    first = start()
    wait_for(lambda: in_flight(folder) or first.poll() is not None)
    if trouble == "full":
        fill(small_disk)
    else:
        close(small_disk)
    code, said = ended(first)
    assert code == 2, said
    # Ray of its own accord makes a token that everybody may read.
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "cannot be written" in line]
    assert line.startswith(f"remasker: {folder} cannot be written any more")
    assert "--resume" in line
    found = states(folder)
    assert "FAIL" not in found
    assert 0 < found.count("COMPLETE") < N_TRIALS

    if trouble == "full":
        (small_disk / "filler").unlink()
    else:
        subprocess.run(["umount", "--lazy", str(small_disk)], check=True)
    code, said = ended(start("--resume"))
    assert code == 0, said
    assert states(folder) == ["COMPLETE"] * N_TRIALS
    assert (folder / "imputed.csv").exists()
