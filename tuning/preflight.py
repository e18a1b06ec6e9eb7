"""Questions asked of every node before a search begins, so that it does not fail an hour later.

Does every node write to the storage and read there what the others wrote? Do all run the same code
on the same versions? Has some node what a trial asks for? Is there room on the disk? Each answer
that is no becomes one sentence with the way out.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from remasker.errors import RemaskerError

#: A node that has not answered by then is taken for lost. A first worker process takes seconds.
ANSWER_SECONDS = 120.0
#: NFS shows a file to another node only after a while; its attribute caches last up to so long.
VISIBLE_SECONDS = 10.0
#: A run's checkpoints and exports are small; with less than this it would still die half-way.
MIN_FREE_BYTES = 500e6
COMPARED = ("Python", "ray", "torch", "optuna", "numpy", "remasker")


class PreflightError(RemaskerError):
    """The cluster is not ready for a search."""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What a node says of itself."""

    host: str
    versions: Mapping[str, str]
    #: Fingerprint of the code that the node would run.
    code: str
    free_bytes: float = 0.0
    #: Why the storage cannot be written there; empty when it can.
    failure: str = ""


def preflight(
    storage: str | os.PathLike[str],
    resources: Mapping[str, float],
    *,
    min_free_bytes: float = MIN_FREE_BYTES,
) -> None:
    """Raise `PreflightError` with the first thing that would spoil a search; needs a running Ray.

    `resources` is what one trial asks for, as in `{"CPU": 1, "GPU": 0}`.
    """
    found = findings(storage, resources, min_free_bytes=min_free_bytes)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise PreflightError(f"{found[0]}{more}")


def findings(
    storage: str | os.PathLike[str],
    resources: Mapping[str, float],
    *,
    min_free_bytes: float = MIN_FREE_BYTES,
) -> list[str]:
    """Everything that would spoil a search, one sentence each."""
    folder = Path(storage).expanduser().absolute()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    found = compare_resources(resources, [node["Resources"] for node in nodes], launchable_nodes())
    probe = folder / f".preflight-{secrets.token_hex(4)}"
    try:
        answers = _ask(nodes, _write, str(probe))
        found += [f"{name} does not answer; `ray status` tells why" for name in _silent(answers)]
        facts = {name: answer for name, answer in answers.items() if answer is not None}
        found += compare_storage(folder, facts)
        if facts and not any(fact.failure for fact in facts.values()):
            seen = _ask([n for n in nodes if _name(n) in facts], _read, str(probe), sorted(facts))
            found += compare_sight(folder, {k: v for k, v in seen.items() if v is not None})
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    found += compare_versions({"the driver": node_facts(), **facts})
    found += compare_disk(folder, facts, min_free_bytes)
    return found


# ---------------------------------------------------------------------- judging: pure functions


def compare_resources(
    wanted: Mapping[str, float],
    nodes: Sequence[Mapping[str, float]],
    launchable: Sequence[Mapping[str, float]] = (),
) -> list[str]:
    """Whether one node has all that a trial asks for; a trial never spans two.

    >>> compare_resources({"CPU": 4}, [{"CPU": 2.0}, {"CPU": 3.0}])[0].split(";")[0]
    'a trial asks for 4 CPU, and no node has that: the nodes have at most 3 CPU'
    >>> compare_resources({"CPU": 4}, [{"CPU": 2.0}], [{"CPU": 16}])
    []
    """
    asked = {name: amount for name, amount in wanted.items() if amount}
    offers = [*nodes, *launchable]
    if any(all(node.get(k, 0) >= v for k, v in asked.items()) for node in offers):
        return []
    text = " and ".join(f"{amount:g} {name}" for name, amount in asked.items())
    most = " and ".join(
        f"{max((node.get(name, 0) for node in offers), default=0):g} {name}" for name in asked
    )
    return [
        f"a trial asks for {text}, and no node has that: the nodes have at most {most}; ask for "
        "less (--cpus-per-trial, --gpus-per-trial) or add a node"
    ]


def compare_versions(facts: Mapping[str, NodeFacts]) -> list[str]:
    """Whether all nodes run the same; the first that differs from the driver is named.

    >>> here = NodeFacts(host="a", versions={"ray": "2.60.0"}, code="x")
    >>> there = NodeFacts(host="b", versions={"ray": "2.59.0"}, code="x")
    >>> compare_versions({"the driver": here, "node b": there})[0].split(";")[0]
    'node b runs ray 2.59.0, the driver 2.60.0'
    """
    (first, reference), *others = facts.items()
    found = []
    for name, fact in others:
        for part, there in fact.versions.items():
            here = reference.versions.get(part, "none")
            # `2.13.0+cpu` and `2.13.0+cu130` are one version for two kinds of machine.
            if there.split("+")[0] != here.split("+")[0]:
                found.append(
                    f"{name} runs {part} {there}, {first} {here}; install constraints.txt on every "
                    "node (clusters/setup.sh does)"
                )
        if fact.code != reference.code:
            found.append(
                f"{name} has other code of remasker than {first}; repeat `ray up` to ship it again"
            )
    return found


def compare_storage(folder: Path, facts: Mapping[str, NodeFacts]) -> list[str]:
    """Whether every node could write."""
    return [
        f"{name} cannot write to {folder}: {fact.failure}; mount the shared folder there and make "
        "it writable"
        for name, fact in facts.items()
        if fact.failure
    ]


def compare_sight(folder: Path, unseen: Mapping[str, Sequence[str]]) -> list[str]:
    """Whether every node saw what the others wrote; one sentence, however many did not."""
    for name, missing in unseen.items():
        if missing:
            return [
                f"{folder} is not shared: {name} does not see what {missing[0]} wrote there; name "
                "a folder that all nodes mount, such as NFS, with --storage"
            ]
    return []


def compare_disk(folder: Path, facts: Mapping[str, NodeFacts], least: float) -> list[str]:
    """Whether there is room."""
    for name, fact in facts.items():
        if not fact.failure and fact.free_bytes < least:
            return [
                f"{folder}: {name} finds {fact.free_bytes / 1e6:.0f} MB free, a run needs "
                f"{least / 1e6:.0f} MB; make room or choose another storage"
            ]
    return []


# ---------------------------------------------------------------------- asking


def node_facts(failure: str = "", free_bytes: float = 0.0) -> NodeFacts:
    """What this process runs on."""
    versions = {"Python": platform.python_version().rsplit(".", 1)[0]}
    for name in COMPARED[1:]:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            # Code on the path of Python, as in a clone, is no distribution.
            versions[name] = _source_version() if name == "remasker" else "none"
    return NodeFacts(
        host=socket.gethostname(),
        versions=versions,
        code=code_fingerprint(),
        free_bytes=free_bytes,
        failure=failure,
    )


def code_fingerprint() -> str:
    """A short hash of the source of `remasker` and `tuning` as this process would import them."""
    import remasker

    digest = hashlib.sha256()
    for package in (Path(remasker.__file__).parent, Path(__file__).parent):
        for path in sorted(package.glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _source_version() -> str:
    import remasker

    return str(remasker.__version__)


def _write(name: str, probe: str) -> NodeFacts:
    """On a node: leave a sign in the storage."""
    try:
        folder = Path(probe)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / name.replace("/", "_"), "w") as file:
            file.write(name)
            file.flush()
            os.fsync(file.fileno())
        return node_facts(free_bytes=shutil.disk_usage(folder).free)
    except OSError as error:
        return node_facts(failure=error.strerror or str(error))


def _read(name: str, probe: str, names: Sequence[str]) -> list[str]:
    """On a node: whose signs are not to be seen."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while True:
        missing = [other for other in names if not _has(Path(probe), other)]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.5)


def _has(folder: Path, name: str) -> bool:
    try:
        os.listdir(folder)  # asks the server anew
        return (folder / name.replace("/", "_")).read_text() == name
    except OSError:
        return False


def _name(node: Mapping[str, Any]) -> str:
    return f"node {node['NodeManagerAddress']}-{node['NodeID'][:6]}"


def _ask(nodes: Sequence[Mapping[str, Any]], question: Any, *words: Any) -> dict[str, Any]:
    """The same question to every node at once; None from those that do not answer."""
    asked = {}
    for node in nodes:
        pinned = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        task = ray.remote(question).options(num_cpus=0, max_retries=0, scheduling_strategy=pinned)
        asked[_name(node)] = task.remote(_name(node), *words)
    deadline = time.monotonic() + ANSWER_SECONDS
    answers: dict[str, Any] = {}
    for name, reference in asked.items():
        try:
            answers[name] = ray.get(reference, timeout=max(0.1, deadline - time.monotonic()))
        except (ray.exceptions.RayError, TimeoutError):
            answers[name] = None
    return answers


def _silent(answers: Mapping[str, Any]) -> list[str]:
    return [name for name, answer in answers.items() if answer is None]


# ---------------------------------------------------------------------- autoscaling


def launchable_nodes() -> list[dict[str, float]]:
    """What each kind of node that the autoscaler may still start would offer."""
    return [dict(kind.resources) for kind in _node_kinds()]


def capacity() -> dict[str, float]:
    """The resources of the cluster when it is fully grown: at least those that it has now.

    A search that asks only `ray.cluster_resources()` would never make an autoscaler start a node.
    """
    now: dict[str, float] = dict(ray.cluster_resources())
    grown: dict[str, float] = {}
    for kind in _node_kinds():
        for name, amount in kind.resources.items():
            grown[name] = grown.get(name, 0.0) + amount * max(0, kind.max_count)
    return {name: max(now.get(name, 0.0), grown.get(name, 0.0)) for name in {*now, *grown}}


def _node_kinds() -> list[Any]:
    """The autoscaler's own account of the kinds of nodes; none without an autoscaler."""
    from ray._private.state import state

    try:
        config = state.get_cluster_config()
    except Exception:  # a private name: without it, a cluster is what it is now
        return []
    return list(config.node_group_configs) if config is not None else []
