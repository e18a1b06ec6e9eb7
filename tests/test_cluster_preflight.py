"""What preflight says; test_cluster_nodes.py and test_cluster_hosts.py ask real nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from remasker.errors import RemaskerError
from tuning.preflight import (
    NodeFacts,
    PreflightError,
    code_fingerprint,
    compare_disk,
    compare_resources,
    compare_sight,
    compare_storage,
    compare_versions,
    node_facts,
)

FOLDER = Path("/mnt/remasker")


def facts(**changes: object) -> NodeFacts:
    settings: dict[str, object] = {
        "host": "a",
        "versions": {"Python": "3.11", "ray": "2.60.0", "torch": "2.13.0+cpu"},
        "code": "abc",
        "free_bytes": 1e12,
    }
    return NodeFacts(**{**settings, **changes})  # type: ignore[arg-type]


def test_alike_nodes_pass() -> None:
    nodes = {"the driver": facts(), "node 1": facts(), "node 2": facts()}
    assert compare_versions(nodes) == []
    assert compare_storage(FOLDER, nodes) == []
    assert compare_disk(FOLDER, nodes, 1e9) == []
    assert compare_sight(FOLDER, {"node 1": [], "node 2": []}) == []


def test_builds_of_one_version_are_alike() -> None:
    gpu = facts(versions={"Python": "3.11", "ray": "2.60.0", "torch": "2.13.0+cu130"})
    assert compare_versions({"the driver": facts(), "node 1": gpu}) == []


@pytest.mark.parametrize(("part", "there"), [("Python", "3.12"), ("ray", "2.9"), ("torch", "2.5")])
def test_other_versions(part: str, there: str) -> None:
    other = facts(versions={**facts().versions, part: there})
    found = compare_versions({"the driver": facts(), "node 1": facts(), "node 2": other})
    assert len(found) == 1
    assert f"node 2 runs {part} {there}, the driver" in found[0]


def test_other_code() -> None:
    found = compare_versions({"the driver": facts(), "node 1": facts(code="xyz")})
    assert found == [
        "node 1 has other code of remasker than the driver; repeat `ray up` to ship it again"
    ]


def test_storage_that_is_not_shared() -> None:
    found = compare_sight(FOLDER, {"node 1": ["node 2"], "node 2": ["node 1"]})
    assert len(found) == 1
    assert "/mnt/remasker is not shared: node 1 does not see what node 2 wrote" in found[0]


def test_storage_that_cannot_be_written() -> None:
    found = compare_storage(FOLDER, {"node 1": facts(), "node 2": facts(failure="read-only")})
    assert len(found) == 1
    assert "node 2 cannot write to /mnt/remasker: read-only" in found[0]


def test_resources_must_be_on_one_node() -> None:
    nodes = [{"CPU": 8.0}, {"CPU": 2.0, "GPU": 1.0}]
    assert compare_resources({"CPU": 2, "GPU": 1}, nodes) == []
    assert compare_resources({"CPU": 2, "GPU": 0}, nodes) == []
    assert len(compare_resources({"CPU": 4, "GPU": 1}, nodes)) == 1
    assert compare_resources({"CPU": 4, "GPU": 1}, nodes, [{"CPU": 4, "GPU": 1}]) == []


def test_a_full_disk() -> None:
    found = compare_disk(FOLDER, {"node 1": facts(free_bytes=3e6)}, 5e8)
    assert found[0].startswith("/mnt/remasker: node 1 finds 3 MB free, a run needs 500 MB")


def test_facts_of_this_machine() -> None:
    here = node_facts()
    assert here.versions["ray"] == "2.60.0"
    assert here.code == code_fingerprint()
    assert issubclass(PreflightError, RemaskerError)
