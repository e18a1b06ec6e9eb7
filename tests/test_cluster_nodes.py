"""Nodes that die, are preempted or join during a search, with Ray's own cluster on one machine.

The scenario runs in a process of its own: it needs several nodes, and the other tests share a Ray.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuning.cluster import create_token
from tuning.search import MAX_DEATHS

ROOT = Path(__file__).resolve().parent.parent
NODE = {
    "num_cpus": 1,
    "object_store_memory": 80 * 2**20,
    "include_dashboard": False,
}
#: A dead node is noticed within two seconds, not Ray's fifteen: the search must outlast that.
QUICK = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
#: Small models, trained long enough to be caught at it.
SPACE = {"width": 16, "encoder_depth": 1, "decoder_depth": 1, "batch_size": 64, "epochs": 800}
N_TRIALS = 6


@pytest.mark.slow
def test_a_node_dies_and_another_joins(tmp_path: Path) -> None:
    token = create_token(tmp_path / "auth_token")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
    }
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "runs")],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["preflight"] == []
    assert len(told["too much"]) == 1
    assert "a trial asks for 8 CPU" in told["too much"][0]
    assert len(told["no disk"]) == 1
    assert "MB free" in told["no disk"][0]
    assert len(told["cannot write"]) == 3  # each node says so
    assert told["states"] == ["complete"] * N_TRIALS
    # One that joins is used beside the others, not only in the place of one that died.
    assert told["most at once"] == 3
    assert told["killed while trials ran"]
    # Nodes that are taken away do not count against a trial, workers that die do.
    assert told["nodes preempted"] == MAX_DEATHS + 1
    assert told["preempted"] == ["complete"]
    assert "its worker process died 4 times" in told["worker killed"]


def scenario(storage: Path) -> dict[str, Any]:
    """A search on two nodes; a third joins, one is killed without a word.

    Then a trial whose node is taken away once and again, and one whose worker dies as often.
    """
    import numpy as np
    import pandas as pd
    import ray
    from ray.cluster_utils import Cluster

    from tuning import preflight
    from tuning.api import tune
    from tuning.config import SearchFailedError

    cluster = Cluster(
        initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "_system_config": QUICK}
    )
    nodes = {}

    def add() -> None:
        node = cluster.add_node(**NODE)
        nodes[node.node_id] = node

    add()
    add()
    ray.init(address=cluster.address, log_to_driver=False)
    told: dict[str, Any] = {
        "preflight": preflight.findings(storage, {"CPU": 1, "GPU": 0}, min_free_bytes=1),
        "too much": preflight.findings(storage, {"CPU": 8}, min_free_bytes=1),
        "no disk": preflight.findings(storage, {"CPU": 1}, min_free_bytes=1e18),
        "cannot write": preflight.findings("/proc/nowhere", {"CPU": 1}, min_free_bytes=1),
        "most at once": 0,
        "nodes preempted": 0,
    }
    rng = np.random.default_rng(0)
    size = rng.normal(size=300)
    table = pd.DataFrame({"a": size, "b": 2 * size + 0.1 * rng.normal(size=300), "c": size**2})
    table.loc[rng.random(300) < 0.3, "b"] = np.nan
    options = {"time_budget": None, "early_stopping": False, "space": SPACE, "experts": None}
    options |= {"storage": str(storage), "checkpoint_seconds": 0.5, "refit": False}

    def search(name: str, trials: int) -> tuple[threading.Thread, list[Any]]:
        results: list[Any] = []

        def run() -> None:
            try:
                result = tune(table, name=name, trials=trials, **options)
                results.append(result.leaderboard["state"].tolist())
            except SearchFailedError as error:
                results.append(str(error))

        # Ray adds nodes in the main thread only.
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread, results

    def busy() -> dict[str, int]:
        """The nodes that run a trial, and its process there."""
        actors = ray._private.state.actors().values()
        living = [actor for actor in actors if actor["State"] == "ALIVE"]
        return {a["Address"]["NodeID"]: a["Pid"] for a in living if a["Address"]["NodeID"] in nodes}

    def wait(thread: threading.Thread, what: Callable[[], object]) -> None:
        while thread.is_alive() and not what():
            time.sleep(0.1)

    thread, results = search("nodes", N_TRIALS)
    wait(thread, lambda: len(busy()) == 2)
    add()
    seen: list[dict[str, int]] = [{}]
    wait(thread, lambda: seen.append(busy()) or len(seen[-1]) == 3)
    told["most at once"] = max(map(len, seen))
    doomed = next(iter(seen[-1]))
    told["killed while trials ran"] = thread.is_alive()
    cluster.remove_node(nodes.pop(doomed), allow_graceful=False)
    thread.join()
    (told["states"],) = results

    thread, results = search("preempted", 1)
    for _ in range(MAX_DEATHS + 1):
        wait(thread, busy)
        if thread.is_alive():
            cluster.remove_node(nodes.pop(next(iter(busy()))), allow_graceful=False)
            told["nodes preempted"] += 1
            add()
    thread.join()
    (told["preempted"],) = results

    thread, results = search("killed", 1)
    killed: set[int] = set()
    while thread.is_alive() and len(killed) <= MAX_DEATHS:
        wait(thread, lambda: set(busy().values()) - killed)
        for pid in set(busy().values()) - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    thread.join()
    (told["worker killed"],) = results
    ray.shutdown()
    cluster.shutdown()
    return told


if __name__ == "__main__":
    print(json.dumps(scenario(Path(sys.argv[1]))))
