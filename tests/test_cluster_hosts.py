"""A cluster of several hosts, made of namespaces: launched, searched on, damaged, taken down.

The hosts are those of clusters/hosts.py, the cluster file is clusters/on-premise.yaml with its
placeholders filled in. The tests are steps of one story and share the cluster.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow
N_TRIALS = 6
#: Small models that take some seconds each: long enough to be caught at it.
SEARCH = (
    f"--trials {N_TRIALS} --time-budget none --no-experts --space width=16 --space encoder_depth=1 "
    "--space decoder_depth=1 --space batch_size=64 --space epochs=200"
).split()


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hosts", ROOT / "clusters" / "hosts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _reason() -> str:
    """Why this cannot run here, for the report of the tests."""
    if importlib.util.find_spec("tuning.api") is None or not (ROOT / "tuning" / "cli.py").exists():
        return "the search or the command line is not in this tree yet"
    if importlib.util.find_spec("aiohttp") is None:
        return "the job API needs ray[default]: pip install '.[cluster]'"
    if not (Path(sys.executable).parent / "remasker").exists():
        return "remasker is not installed in this environment: pip install -e ."
    return _load().missing() or ""


class Cluster:
    """The hosts, and ways to do things on them."""

    def __init__(self, hosts: ModuleType) -> None:
        self.hosts, self.file, self.log = hosts, hosts.CLUSTER_FILE, Path()

    def run(self, host: str, *words: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.hosts.command(host, list(words)), capture_output=True, text=True, timeout=timeout
        )

    def python(self, host: str, code: str, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = [f"{name}={value}" for name, value in settings.items()]
        return self.run(host, "env", *environment, "python", "-c", code)

    def tune(self, name: str, table: Path) -> subprocess.Popen[bytes]:
        """A search from the operator's machine, in the background."""
        words = [str(table), "--name", name, *SEARCH]
        code = (
            "from pathlib import Path; from tuning.cluster import run_on_cluster\n"
            f"run_on_cluster(Path({str(self.file)!r}), {words!r}, [Path({str(table)!r})], "
            f"Path('/tmp/runs'), name={name!r})"
        )
        self.log = self.hosts.STATE / f"{name}.output"
        with open(self.log, "w") as output:
            return subprocess.Popen(
                self.hosts.command("operator", ["python", "-c", code]),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        """What the last search printed, without Ray's account of its ssh commands."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if "INFO" not in line)[-6000:]

    def trials_on(self, host: str) -> list[str]:
        """The worker processes of a host that run a trial right now."""
        return [line for line in self.hosts.ray_processes(host) if "ray::ImplicitFunc" in line]

    def outside(self, host: str, path: str) -> Path:
        """A file of a host's own, seen from here."""
        return Path(f"/proc/{self.hosts.process_ids(host)[0]}/root{path}")


def wait(what: str, condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.3)


NODES = (
    "import json, ray; ray.init(address='auto', log_to_driver=False)\n"
    "print(json.dumps([n['NodeManagerAddress'] for n in ray.nodes() if n['Alive']]))"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = _reason()
    if reason:
        pytest.skip(f"no hosts of namespaces here: {reason}")
    hosts = _load()
    hosts.up(Path(sys.prefix))
    try:
        cluster = Cluster(hosts)
        for words in (
            ["remasker", "cluster", "token"],
            ["remasker", "cluster", "check", str(cluster.file)],
            ["ray", "up", "--yes", str(cluster.file)],
        ):
            done = cluster.run("operator", *words, timeout=300)
            assert done.returncode == 0, (words, done.stdout[-3000:], done.stderr[-3000:])
        yield cluster
    finally:
        hosts.down()


@pytest.fixture(scope="module")
def table(cluster: Cluster) -> Path:
    rng = np.random.default_rng(0)
    size = rng.normal(size=300)
    frame = pd.DataFrame({"a": size, "b": 2 * size + 0.1 * rng.normal(size=300), "c": size**2})
    frame.loc[rng.random(300) < 0.3, "b"] = np.nan
    path: Path = cluster.hosts.STATE / "table.csv"  # the operator's own; the search ships it
    frame.to_csv(path, index=False)
    return path


def addresses(cluster: Cluster) -> list[str]:
    done = cluster.python("head", NODES, RAY_AUTH_MODE="token")
    found: list[str] = json.loads(done.stdout.strip().splitlines()[-1]) if done.stdout else []
    return sorted(found)


def test_every_host_joins(cluster: Cluster) -> None:
    expected = sorted(cluster.hosts.address(name) for name in ("head", "worker1", "worker2"))
    wait("all nodes", lambda: addresses(cluster) == expected, 180)


def test_hosts_cannot_harm_this_machine(cluster: Cluster) -> None:
    done = cluster.run("head", "touch", str(ROOT / "harm"), "/root/harm", sys.prefix + "/harm")
    assert done.stderr.count("Read-only file system") == 3


def test_without_the_token_nobody_gets_in(cluster: Cluster) -> None:
    head = cluster.hosts.address("head")
    # The dashboard, with the job API, is not even there for other hosts.
    curl = ["curl", "-s", "-m", "5", "-o", "/dev/null", "-w", "%{http_code}"]
    assert cluster.run("outsider", *curl, f"http://{head}:8265/api/version").stdout == "000"
    # The agent of a node is, and asks for the token.
    agent = f"http://{head}:52365/api/job_agent/jobs/"
    assert cluster.run("outsider", *curl, "-X", "POST", "-d", "{}", agent).stdout == "401"
    # Nor does somebody on the head itself get in, who has no token or a wrong one.
    jobs = "http://127.0.0.1:8265/api/jobs/"
    job = ["-X", "POST", "-H", "Content-Type: application/json", "-d", '{"entrypoint": "id"}']
    assert cluster.run("head", *curl, *job, jobs).stdout == "401"
    wrong = ["-H", f"Authorization: Bearer {'0' * 64}"]
    assert cluster.run("head", *curl, *job, *wrong, jobs).stdout == "403"
    # The driver's way in.
    enter = f"import ray; ray.init(address='{head}:6379'); print('in')"
    done = cluster.python("outsider", enter, RAY_AUTH_MODE="disabled")
    assert done.returncode != 0
    assert "in" not in done.stdout.split()
    assert "InvalidAuthToken" in done.stdout + done.stderr
    # With the token it works, so the refusals above are the token's doing.
    submit = 'curl -s -m 20 -H "Authorization: Bearer $(cat ~/.ray/auth_token)" "$@"'
    done = cluster.run("head", "bash", "-c", submit, "-", *job, jobs)
    assert "raysubmit_" in done.stdout


def test_the_token_is_private(cluster: Cluster) -> None:
    token = cluster.outside("operator", "/tmp/home/.ray/auth_token").read_text()
    assert len(token) == 64
    for host in ("operator", "head", "worker1", "worker2"):
        done = cluster.run(host, "stat", "-c", "%a", "/tmp/home/.ray/auth_token")
        assert done.stdout.strip() == "600", host
        for path in cluster.outside(host, "/tmp").rglob("*"):
            if path.is_file() and path.name != "auth_token" and path.stat().st_size < 5e7:
                assert token.encode() not in path.read_bytes(), path
    assert token not in cluster.file.read_text()


def test_storage_that_is_not_shared_is_refused(cluster: Cluster) -> None:
    """Each host has a /tmp of its own."""
    code = (
        "import ray; ray.init(address='auto', log_to_driver=False)\n"
        "from tuning.preflight import findings\n"
        "for folder in ('/tmp/own', %r): print('FOUND', findings(folder, {'CPU': 1}))"
    )
    storage = str(cluster.hosts.STORAGE)
    done = cluster.python("head", code % storage, RAY_AUTH_MODE="token")
    unshared, shared = re.findall(r"FOUND (.*)", done.stdout)
    assert "/tmp/own is not shared" in unshared, done.stderr[-2000:]
    assert shared == "[]"


def finish(cluster: Cluster, search: subprocess.Popen[bytes], name: str) -> dict[str, Any]:
    assert search.wait(timeout=400) == 0, cluster.said()
    assert "$ " in cluster.said()  # the commands are shown
    folder = cluster.outside("operator", f"/tmp/runs/{name}")
    record: dict[str, Any] = json.loads((folder / "run.json").read_text())
    board = pd.read_csv(folder / "leaderboard.csv")
    assert record["state"] == "finished"
    assert len(board) == N_TRIALS
    assert set(board["state"]) <= {"complete", "pruned"}, board
    assert not pd.read_csv(folder / "imputed.csv").isna().any(axis=None)
    return record


def test_a_worker_is_cut_off(cluster: Cluster, table: Path) -> None:
    search = cluster.tune("cut", table)
    wait("a trial on worker1", lambda: cluster.trials_on("worker1") or search.poll() is not None)
    cluster.hosts.cut("worker1")
    assert search.poll() is None, cluster.said()
    finish(cluster, search, "cut")
    assert cluster.hosts.address("worker1") not in addresses(cluster)
    cluster.hosts.heal("worker1")


def test_a_worker_is_killed(cluster: Cluster, table: Path) -> None:
    search = cluster.tune("killed", table)
    wait("a trial on worker2", lambda: cluster.trials_on("worker2") or search.poll() is not None)
    cluster.hosts.kill("worker2")
    assert search.poll() is None, cluster.said()
    finish(cluster, search, "killed")
    assert cluster.hosts.address("worker2") not in addresses(cluster)


def test_down_means_down(cluster: Cluster) -> None:
    # A host that does not answer is not passed over in silence.
    words = ["remasker", "cluster", "down", str(cluster.file)]
    done = cluster.run("operator", *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"may still run on {cluster.hosts.address('worker2')}" in done.stderr
    cluster.hosts.revive("worker2")
    done = cluster.run("operator", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    for host in cluster.hosts.HOSTS:
        assert cluster.hosts.ray_processes(host) == []
    assert os.path.isdir(cluster.hosts.STORAGE / "cut")  # the runs stay
