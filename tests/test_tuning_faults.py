"""Processes that are killed for real, by their ids."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tuning import tune
from tuning.journal import read_study

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
# Long enough to be caught in the act, small enough to end.
SPACE = {"width": 16, "encoder_depth": 1, "decoder_depth": 1, "epochs": 150, "batch_size": 32}
WORDS = ["--no-experts", *(f"--space={name}={value}" for name, value in SPACE.items())]
COMMAND = (
    "import argparse, sys; from tuning.tune_cli import add_commands\n"
    "parser = argparse.ArgumentParser(); add_commands(parser.add_subparsers())\n"
    "args = parser.parse_args(); sys.exit(args.run(args))"
)


@pytest.fixture
def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    size = rng.normal(size=200)
    frame = pd.DataFrame({"a": size, "b": size + 0.2 * rng.normal(size=200), "c": size**2})
    frame.loc[rng.random(200) < 0.3, "b"] = np.nan
    return frame


def wait_for(what: Callable[[], object], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


def descendants(pid: int) -> dict[int, str]:
    """Every process below this one, with its command line."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
            commands[int(entry.name)] = command
    found: dict[int, str] = {}
    for one in parents:
        above = one
        while above in parents:
            above = parents[above]
            if above == pid:
                found[one] = commands[one]
                break
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def states(folder: Path) -> list[str]:
    try:
        return [t.state.name for t in read_study(folder).get_trials(deepcopy=False)]
    except ValueError:
        return []


def test_a_killed_worker_costs_nothing_but_its_last_seconds(
    one_ray: None, table: pd.DataFrame, tmp_path: Path
) -> None:
    killed: list[int] = []

    def kill_one() -> None:
        wait_for(lambda: list((tmp_path / "run" / "trials").glob("*/state.pt")))
        workers = [
            pid for pid, words in descendants(os.getpid()).items() if "ImplicitFunc" in words
        ]
        os.kill(workers[0], signal.SIGKILL)
        killed.append(workers[0])

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    result = tune(
        table,
        name="run",
        trials=4,
        time_budget=None,
        storage=tmp_path,
        space=SPACE,
        early_stopping=False,
        checkpoint_seconds=0.2,
        experts=None,
        progress=False,
    )
    killer.join(timeout=5)
    assert killed
    assert states(tmp_path / "run").count("COMPLETE") == 4
    assert result.imputed.isna().sum().sum() == 0


def test_stopped_by_hand_then_killed_then_completed(table: pd.DataFrame, tmp_path: Path) -> None:
    data, folder = tmp_path / "mine.csv", tmp_path / "runs" / "mine"
    table.to_csv(data, index=False)
    words = ["tune", str(data), "--trials=5", "--time-budget=none", *WORDS]
    words += [f"--storage={folder.parent}", "--concurrent=2"]

    def start(*more: str) -> subprocess.Popen:
        # In a session of its own: a signal reaches it and nobody else.
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words, *more],
            cwd=ROOT,
            start_new_session=True,
            # A background job of a shell ignores Ctrl-C, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    first = start()
    wait_for(lambda: "COMPLETE" in states(folder))
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 130, said
    assert "--resume" in said
    assert "Traceback" not in said
    before = states(folder).count("COMPLETE")

    second = start("--resume")
    wait_for(lambda: states(folder).count("COMPLETE") > before or second.poll() is not None)
    workers = [pid for pid, said in descendants(second.pid).items() if "ImplicitFunc" in said]
    second.kill()
    second.communicate(timeout=60)
    # Ray ends the workers of a driver that is gone; its own processes may take minutes longer.
    wait_for(lambda: not any(alive(pid) for pid in workers), 120)
    assert "RUNNING" in states(folder)
    assert not (folder / "model").exists()

    third = start("--resume")
    out, said = third.communicate(timeout=300)
    assert third.returncode == 0, said
    assert "written to" in out
    assert [s for s in states(folder) if s != "WAITING"].count("RUNNING") == 0
    assert len([s for s in states(folder) if s != "WAITING"]) == 5
    assert (folder / "imputed.csv").exists()
