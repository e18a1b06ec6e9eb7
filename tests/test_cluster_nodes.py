"""Nodes that die and nodes that join during a search, with Ray's own cluster on one machine.

The scenario runs in a process of its own: it needs several nodes, and the other tests share a Ray.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tuning.cluster import create_token

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
SPACE = {"width": 16, "encoder_depth": 1, "decoder_depth": 1, "batch_size": 64, "epochs": 300}
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
    assert told["late node was used"]
    assert told["killed while trials ran"]


def scenario(storage: Path) -> dict[str, Any]:
    """A search on two nodes; one is killed without a word, a third joins."""
    import numpy as np
    import pandas as pd
    import ray
    from ray.cluster_utils import Cluster

    from tuning import preflight
    from tuning.api import tune

    cluster = Cluster(
        initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "_system_config": QUICK}
    )
    doomed = cluster.add_node(**NODE)
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    told: dict[str, Any] = {
        "preflight": preflight.findings(storage, {"CPU": 1, "GPU": 0}, min_free_bytes=1),
        "too much": preflight.findings(storage, {"CPU": 8}, min_free_bytes=1),
        "no disk": preflight.findings(storage, {"CPU": 1}, min_free_bytes=1e18),
        "cannot write": preflight.findings("/proc/nowhere", {"CPU": 1}, min_free_bytes=1),
        "late node was used": False,
        "killed while trials ran": False,
    }
    rng = np.random.default_rng(0)
    size = rng.normal(size=300)
    table = pd.DataFrame({"a": size, "b": 2 * size + 0.1 * rng.normal(size=300), "c": size**2})
    table.loc[rng.random(300) < 0.3, "b"] = np.nan
    options = {"trials": N_TRIALS, "time_budget": None, "early_stopping": False, "space": SPACE}
    options |= {"experts": None}
    results = []

    def search() -> None:
        results.append(tune(table, name="nodes", storage=str(storage), **options))

    def busy() -> set[str]:
        actors = ray._private.state.actors().values()
        return {actor["Address"]["NodeID"] for actor in actors if actor["State"] == "ALIVE"}

    # Ray adds nodes in the main thread only.
    thread = threading.Thread(target=search, daemon=True)
    thread.start()
    while thread.is_alive() and doomed.node_id not in busy():
        time.sleep(0.2)
    time.sleep(1)  # into its training
    told["killed while trials ran"] = thread.is_alive() and doomed.node_id in busy()
    cluster.remove_node(doomed, allow_graceful=False)
    late = cluster.add_node(**NODE).node_id
    while thread.is_alive():
        told["late node was used"] |= late in busy()
        thread.join(0.2)
    (result,) = results
    told["states"] = result.leaderboard["state"].tolist()
    ray.shutdown()
    cluster.shutdown()
    return told


if __name__ == "__main__":
    print(json.dumps(scenario(Path(sys.argv[1]))))
