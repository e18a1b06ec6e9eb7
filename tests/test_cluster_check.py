"""`remasker cluster check`: the shipped files, and files broken in one way each."""

from __future__ import annotations

import argparse
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from remasker.errors import InvalidConfigError
from tuning.cluster import (
    ClusterError,
    add_commands,
    create_token,
    down,
    remote_words,
    run_on_cluster,
)
from tuning.cluster_check import PLACEHOLDER, check, installed

ROOT = Path(__file__).resolve().parent.parent
CLUSTERS = ROOT / "clusters"
RAY_FILES = ("local", "on-premise", "aws", "gcp")
KUBERAY_FILES = ("kuberay-cluster", "kuberay-job")


@pytest.fixture
def token(tmp_path: Path) -> Path:
    return create_token(tmp_path / "ray" / "auth_token")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def filled(name: str, folder: Path) -> Path:
    """A shipped file with its placeholders replaced, as its user would."""
    values = {
        "REPLACE-WITH-SHARED-FOLDER": "/mnt/remasker",
        "REPLACE-WITH-FOLDER-FOR-RUNS": "/runs",
    }
    source = CLUSTERS / name
    text = PLACEHOLDER.sub(lambda found: values.get(found[0], "chosen"), source.read_text())
    path = folder / source.name
    path.write_text(text)
    return path


def broken(name: str, folder: Path, change: Callable[[Any], object]) -> Path:
    path = filled(name, folder)
    documents = list(yaml.safe_load_all(path.read_text()))
    change(documents[0])
    path.write_text(yaml.safe_dump_all(documents))
    return path


def assert_one(findings: list[str], words: str) -> None:
    assert len(findings) == 1, findings
    assert words in findings[0]
    assert_sentence(findings[0])


def assert_sentence(finding: str) -> None:
    assert "\n" not in finding
    assert not re.search(r"[.!?] [A-Z]", finding), finding
    assert len(finding) < 260


@pytest.mark.parametrize("name", [*(f"{n}.yaml" for n in RAY_FILES + KUBERAY_FILES), "slurm.sh"])
def test_shipped_files(name: str, tmp_path: Path, token: Path) -> None:
    """As they are, only placeholders are found, all near the top; filled in, nothing is."""
    findings = check(CLUSTERS / name, token)
    assert findings
    assert all("still says REPLACE-WITH" in finding for finding in findings)
    assert check(filled(name, tmp_path), token) == []
    lines = (CLUSTERS / name).read_text().splitlines()
    placed = [k for k, line in enumerate(lines) if PLACEHOLDER.search(line) and "#  " not in line]
    assert lines[0].startswith("#")
    assert max(placed) < 45
    header = "\n".join(lines[:24])
    for words in ("Change:", "remasker cluster check", "Run by us:"):
        assert words in header, words


@pytest.mark.parametrize("name", ["slurm.sh", "setup.sh"])
def test_shell_scripts_parse(name: str) -> None:
    subprocess.run(["bash", "-n", CLUSTERS / name], check=True)


def set_(path: str, value: Any) -> Callable[[Any], object]:
    """A change: the value at a dotted path; None removes it."""

    def change(config: Any) -> None:
        *parents, last = path.split("/")
        for key in parents:
            config = config[int(key)] if isinstance(config, list) else config[key]
        if value is None:
            del config[last]
        else:
            config[int(last) if isinstance(config, list) else last] = value

    return change


def replace_in(path: str, old: str, new: str) -> Callable[[Any], object]:
    def change(config: Any) -> None:
        commands = config[path]
        assert any(old in command for command in commands)
        config[path] = [command.replace(old, new) for command in commands]

    return change


HEAD, WORKER = "head_start_ray_commands", "worker_start_ray_commands"
BROKEN = {
    "unknown top-level key": (set_("max_wokers", 3), "did you mean 'max_workers'"),
    "wrong type": (set_("max_workers", "many"), "max_workers: 'many' is not of type 'integer'"),
    "no cluster name": (set_("cluster_name", None), "'cluster_name' is a required property"),
    "no provider": (set_("provider", None), "provider.type: missing"),
    "unknown provider": (set_("provider/type", "azur"), "expected one of local, aws, gcp"),
    "unknown provider key": (
        set_("provider/head_ipp", "10.0.0.1"),
        "provider.head_ipp: Ray's local provider reads no such key; did you mean 'head_ip'",
    ),
    "no workers key": (set_("provider/worker_ips", None), "Ray refuses the file"),
    "placeholder": (set_("auth/ssh_user", "REPLACE-WITH-SSH-USER"), "auth.ssh_user: still says"),
    "other Python": (set_("metadata/python", "3.9"), "metadata.python: Python 3.9 there"),
    "Python untold": (set_("metadata/python", None), "metadata.python: missing"),
    "other ray": (
        set_("worker_setup_commands", ["pip install 'ray[default]==2.9.0'"]),
        "worker_setup_commands[0]: ray 2.9.0 there",
    ),
    "other image": (
        set_("docker", {"image": "rayproject/ray:2.9.0", "container_name": "ray"}),
        "docker.image: ray 2.9.0 there",
    ),
    "no storage": (set_("metadata/storage", None), "metadata.storage: missing"),
    "own storage": (set_("metadata/storage", "/tmp/runs"), "/tmp/runs is each node's own"),
    "bucket": (set_("metadata/storage", "s3://bucket/x"), "is a bucket"),
    "relative storage": (set_("metadata/storage", "runs"), "expected a full path"),
    "open dashboard": (
        replace_in(HEAD, "--dashboard-host=127.0.0.1", "--dashboard-host 0.0.0.0"),
        "the dashboard listens on 0.0.0.0",
    ),
    "head without token": (replace_in(HEAD, "RAY_AUTH_MODE=token", ""), f"{HEAD}: starts Ray"),
    "worker without token": (
        replace_in(WORKER, "RAY_AUTH_MODE=token", "RAY_AUTH_MODE=disabled"),
        f"{WORKER}: starts Ray without a token",
    ),
    "autoscaler v2": (
        replace_in(HEAD, "RAY_enable_autoscaler_v2=0", ""),
        "autoscaler v2 starts no worker",
    ),
    "token not shipped": (set_("file_mounts/~/.ray/auth_token", None), ""),
    "token in the file": (
        replace_in(HEAD, "RAY_AUTH_MODE=token", "RAY_AUTH_MODE=token RAY_AUTH_TOKEN=abc"),
        "looks like a secret",
    ),
    "cloud key in the file": (
        set_("worker_setup_commands", ["export AWS_ACCESS_KEY_ID=AKIAABCDEFGHIJKLMNOP"]),
        "worker_setup_commands[0]: looks like a secret",
    ),
    "password": (set_("metadata/password", "hunter2"), "metadata.password: looks like a secret"),
    "no code": (set_("file_mounts/~/data", "/no/such/folder"), ""),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file(case: str, tmp_path: Path, token: Path) -> None:
    change, words = BROKEN[case]
    if case == "token not shipped":
        change, words = (
            lambda config: config["file_mounts"].pop("~/.ray/auth_token"),
            "file_mounts: the token does not reach the nodes",
        )
    if case == "no code":
        change, words = (
            lambda config: config["file_mounts"].update({"~/data": "/no/such/folder"}),
            "there is no /no/such/folder to ship",
        )
    assert_one(check(broken("on-premise.yaml", tmp_path, change), token), words)


def test_secret_is_not_repeated(tmp_path: Path, token: Path) -> None:
    secret = token.read_text()
    change = set_("worker_setup_commands", [f"echo {secret}"])
    findings = check(broken("on-premise.yaml", tmp_path, change), token)
    assert_one(findings, "looks like a secret")
    assert secret not in findings[0]


CLOUD = {
    "aws.yaml": [
        (set_(HEAD, None), "the dashboard listens on 0.0.0.0"),
        (set_("provider/availability_zon", "x"), "did you mean 'availability_zone'"),
        (set_("provider/region", None), "provider.region: missing"),
        (
            set_(
                "provider/security_group",
                {
                    "GroupName": "g",
                    "IpPermissions": [
                        {
                            "FromPort": 8265,
                            "ToPort": 8265,
                            "IpProtocol": "TCP",
                            "IpRanges": [{"CidrIp": "0.0.0.0/0"}],
                        }
                    ],
                },
            ),
            "opens more than port 22",
        ),
        (set_("available_node_types/spot_worker/min_workers", 99), "Ray refuses the file"),
    ],
    "gcp.yaml": [(set_("provider/project_id", None), "provider.project_id: missing")],
}


@pytest.mark.parametrize(
    ("name", "index"), [(name, k) for name, cases in CLOUD.items() for k in range(len(cases))]
)
def test_broken_cloud_file(name: str, index: int, tmp_path: Path, token: Path) -> None:
    change, words = CLOUD[name][index]
    findings = check(broken(name, tmp_path, change), token)
    assert any(words in finding for finding in findings), findings
    for finding in findings:
        assert_sentence(finding)


SPEC = "spec"
KUBERAY = {
    "unknown field": (set_("spec/workerGroupSpec", []), "did you mean 'workerGroupSpecs'"),
    "no token": (set_("spec/authOptions", None), "spec.authOptions: Ray would start without"),
    "other ray": (set_("spec/rayVersion", "2.9.0"), "spec.rayVersion: ray 2.9.0 there"),
    "load balancer": (set_("spec/headGroupSpec/serviceType", "LoadBalancer"), "LoadBalancer opens"),
    "dashboard": (
        set_("spec/headGroupSpec/rayStartParams/dashboard-host", None),
        "the dashboard listens on 0.0.0.0",
    ),
    "storage": (set_("metadata/annotations", {}), "remasker/storage: missing"),
    "unshared": (
        set_(
            "spec/workerGroupSpecs/0/template/spec/volumes/0", {"name": "storage", "emptyDir": {}}
        ),
        "is no volume that pods share",
    ),
    "not mounted": (
        set_("spec/workerGroupSpecs/0/template/spec/containers/0/volumeMounts", []),
        "is not mounted",
    ),
    "replicas": (set_("spec/workerGroupSpecs/0/replicas", 99), "expected 99 to lie between"),
    "version": (set_("apiVersion", "ray.io/v1alpha1"), "expected ray.io/v1"),
    "kind": (set_("kind", "RayService"), "expected RayCluster or RayJob"),
    "image": (
        set_("spec/workerGroupSpecs/0/template/spec/containers/0/image", "rayproject/ray:2.9.0"),
        "image: ray 2.9.0 there",
    ),
    "untagged": (
        set_("spec/workerGroupSpecs/0/template/spec/containers/0/image", "a.b/remasker"),
        "has no version",
    ),
}


@pytest.mark.parametrize("case", KUBERAY)
def test_broken_kuberay_file(case: str, tmp_path: Path) -> None:
    change, words = KUBERAY[case]
    assert_one(check(broken("kuberay-cluster.yaml", tmp_path, change)), words)


def test_job_without_policy(tmp_path: Path) -> None:
    path = filled("kuberay-job.yaml", tmp_path)
    path.write_text(path.read_text().split("\n---\n")[0])
    assert_one(check(path), "add a NetworkPolicy")


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: [1,\nb: 2")
    assert_one(check(path), "not YAML in line 2")
    path.write_text("- 1")
    assert_one(check(path), "expected a mapping")
    with pytest.raises(InvalidConfigError, match="No such file"):
        check(tmp_path / "none.yaml")
    script = filled("slurm.sh", tmp_path)
    script.write_text(script.read_text().replace("RAY_AUTH_MODE=token", ""))
    assert_one(check(script), "without a token")


def test_shipped_pins_are_compared(tmp_path: Path, token: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "constraints.txt").write_text("ray==2.9.0\ntorch==2.13.0\n")
    change = lambda config: config["file_mounts"].update({"~/remasker": str(code)})  # noqa: E731
    assert_one(check(broken("on-premise.yaml", tmp_path, change), token), "ray 2.9.0 there")


# ---------------------------------------------------------------------- token


def test_token_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = create_token(tmp_path / "a" / "auth_token")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    first = path.read_text()
    assert len(first) == 64
    path.chmod(0o644)  # as Ray writes it
    assert_one(check(filled("on-premise.yaml", tmp_path), path), "others may read it (mode 0644)")
    assert create_token(path).read_text() == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert create_token(path, renew=True).read_text() != first


def test_token_is_missing(tmp_path: Path) -> None:
    findings = check(filled("on-premise.yaml", tmp_path), tmp_path / "none")
    assert_one(findings, "make a token with `remasker cluster token`")


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    args = parser.parse_args(["cluster", "check", str(CLUSTERS / "kuberay-job.yaml")])
    assert args.run(args) == 2
    assert len(capsys.readouterr().out.splitlines()) == 3
    args = parser.parse_args(["cluster", "check", str(filled("kuberay-job.yaml", tmp_path))])
    assert args.run(args) == 0


def test_help_needs_no_ray() -> None:
    code = "import sys, tuning.cluster; sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# ---------------------------------------------------------------------- launching, on paper


class Recorder:
    """Stands for the shell: remembers commands, fails those that hold a word."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.commands = failing, []

    def __call__(self, command: Any) -> int:
        line = " ".join(command)
        self.commands.append(line.split("/ray ", 1)[-1] if "/ray " in line[:200] else line)
        return int(any(word in line for word in self.failing))


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file without findings, and a home with a token."""
    monkeypatch.setenv("HOME", str(tmp_path))
    create_token(tmp_path / ".ray" / "auth_token")
    return filled("on-premise.yaml", tmp_path)


def test_search_on_a_cluster(ready: Path, tmp_path: Path) -> None:
    table = tmp_path / "my table.csv"
    table.write_text("a,b\n1,2\n")
    words = [str(table), "--cluster", str(ready), "--trials", "9", "--storage=here"]
    shell = Recorder("ray status")
    assert run_on_cluster(ready, words, [table], tmp_path / "runs", run=shell) == 0
    actions = [command.split()[0] for command in shell.commands]
    assert actions == ["exec", "up", "exec", "rsync-up", "exec", "rsync-down"]
    assert shell.commands[4].endswith(
        "remasker tune '/mnt/remasker/data/my table.csv' --trials 9 --address auto "
        "--storage /mnt/remasker"
    )
    assert "/mnt/remasker/my table/" in shell.commands[5]
    assert (tmp_path / "runs" / "my table").is_dir()
    secret = (tmp_path / ".ray" / "auth_token").read_text()
    assert not any(secret in command for command in shell.commands)


def test_a_cluster_that_is_up_is_not_restarted(ready: Path, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a\n")
    shell = Recorder()
    run_on_cluster(ready, [str(table)], [table], tmp_path, run=shell)
    assert not any(command.startswith("up") for command in shell.commands)


def test_a_failed_search_still_brings_its_run_back(ready: Path, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a\n")
    shell = Recorder("remasker tune")
    with pytest.raises(ClusterError, match="--resume"):
        run_on_cluster(ready, [str(table)], [table], tmp_path, run=shell)
    assert shell.commands[-1].startswith("rsync-down")


def test_refused_before_anything_runs(ready: Path, tmp_path: Path) -> None:
    shell = Recorder()
    with pytest.raises(InvalidConfigError, match="no such file"):
        run_on_cluster(ready, ["t.csv"], [tmp_path / "t.csv"], tmp_path, run=shell)
    with pytest.raises(InvalidConfigError, match=r"REPLACE-WITH.*and \d+ more"):
        run_on_cluster(CLUSTERS / "aws.yaml", [], [], tmp_path, run=shell)
    assert shell.commands == []


def test_down_visits_every_host(ready: Path) -> None:
    shell = Recorder()
    down(ready, run=shell)
    assert [command.split()[0] for command in shell.commands] == ["down", "ssh", "ssh", "ssh"]
    with pytest.raises(ClusterError, match="may still run on chosen"):
        down(ready, run=Recorder("ssh"))


def test_words_for_the_head() -> None:
    words = ["./t.csv", "--address", "x", "--cluster=y", "--space", "width=32"]
    assert remote_words(words, {"t.csv": "/s/t.csv"}) == ["/s/t.csv", "--space", "width=32"]


def test_pins_are_those_of_this_machine() -> None:
    """What the suite runs on is what the nodes will get."""
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    assert pins["ray"] == installed("ray")
    assert pins["torch"] == installed("torch")
