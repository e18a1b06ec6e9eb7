"""`remasker cluster` and `remasker tune … --cluster FILE`: thin over Ray's own commands.

Every command that is run is shown first, so that it can be repeated by hand. What Ray does well
stays Ray's: `ray up`, `exec`, `attach`, `dashboard`, `rsync-up` and `rsync-down`.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from remasker.errors import InvalidConfigError, RemaskerError
from tuning.cluster_check import check, token_findings

#: Options of `remasker tune` that say where it runs: the cluster file answers them.
PLACES = ("--cluster", "--storage", "--address")
#: A Ray process in the list of a host, for `pgrep -f`. The brackets keep it from finding itself.
RAY_PROCESS = r"[r]aylet/raylet|[g]cs/gcs_server|[r]ay::|site-packages/[r]ay/"

Run = Callable[[Sequence[str]], int]


class ClusterError(RemaskerError):
    """A command on the cluster failed."""


def add_commands(subparsers: Any) -> None:
    """Add `remasker cluster check|token|down` to a parser.

    >>> parser = argparse.ArgumentParser()
    >>> add_commands(parser.add_subparsers())
    >>> parser.parse_args(["cluster", "check", "clusters/aws.yaml"]).file
    PosixPath('clusters/aws.yaml')
    """
    cluster = subparsers.add_parser(
        "cluster", help="check a cluster file, make its token, take a cluster down"
    )
    actions = cluster.add_subparsers(dest="cluster_action", required=True, metavar="ACTION")
    checking = actions.add_parser(
        "check", help="what is wrong with a cluster file, one sentence each; starts nothing"
    )
    checking.add_argument(
        "file", type=Path, metavar="FILE", help="such as clusters/on-premise.yaml"
    )
    checking.set_defaults(run=run_check)
    token = actions.add_parser("token", help="make the secret that Ray asks everyone for")
    token.add_argument("--renew", action="store_true", help="replace the one there is")
    token.set_defaults(run=run_token)
    ending = actions.add_parser("down", help="`ray down`, then proof that no Ray process is left")
    ending.add_argument("file", type=Path, metavar="FILE")
    ending.set_defaults(run=run_down)


def run_check(args: argparse.Namespace) -> int:
    """`remasker cluster check FILE`: 0 when nothing was found, 2 otherwise."""
    findings = check(args.file)
    for finding in findings:
        print(finding)
    if not findings:
        print(f"{args.file}: nothing found")
    return 2 if findings else 0


def run_token(args: argparse.Namespace) -> int:
    """`remasker cluster token`: says where the token is, never what it is."""
    print(create_token(renew=args.renew))
    return 0


def run_down(args: argparse.Namespace) -> int:
    """`remasker cluster down FILE`."""
    down(args.file)
    print("down: no Ray process is left")
    return 0


# ---------------------------------------------------------------------- the token


def create_token(path: Path | None = None, *, renew: bool = False) -> Path:
    """A token where Ray looks for it, readable by its owner alone from its first byte on.

    One that is there already is kept, and closed to others if it was open.
    """
    path = path or Path("~/.ray/auth_token").expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_file() and path.read_text().strip() and not renew:
        path.chmod(0o600)
        return path
    # Under another name first: a token is never there by half, and never open.
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    fresh.replace(path)
    return path


# ---------------------------------------------------------------------- a search on a cluster


def show_and_run(command: Sequence[str]) -> int:
    """Print a command as it would be typed, run it, and return its exit code."""
    print(f"$ {shlex.join(command)}", file=sys.stderr, flush=True)
    try:
        return subprocess.run(command).returncode
    except FileNotFoundError:
        raise ClusterError(f"there is no command {command[0]!r} on this machine") from None


def run_on_cluster(
    file: Path,
    words: Sequence[str],
    data: Sequence[Path],
    storage: Path,
    *,
    name: str | None = None,
    run: Run = show_and_run,
) -> int:
    """`remasker tune` on a cluster: ship the tables, search there, bring the runs' folders back.

    `words` is the command line after `tune`. The cluster is started if it does not answer. Its
    storage is the `metadata.storage` of the file; `storage` is the local folder for the results.
    """
    findings = check(file)
    if findings:
        more = f" (and {len(findings) - 1} more: remasker cluster check {file})"
        raise InvalidConfigError(f"{file}: {findings[0]}{more if len(findings) > 1 else ''}")
    config = yaml.safe_load(file.read_text())
    if "provider" not in config:
        raise InvalidConfigError(
            f"{file}: --cluster starts Ray's own cluster files; for Kubernetes follow the file's "
            "first lines"
        )
    for path in data:
        if not path.is_file():
            raise InvalidConfigError(f"{path}: no such file")
    remote = str(config["metadata"]["storage"]).rstrip("/")
    names = [name or path.name.split(".")[0] for path in data]
    shipped = {str(path): f"{remote}/data/{path.name}" for path in data}
    ready = shlex.join(["mkdir", "-p", f"{remote}/data"])

    if run(_ray("exec", file, f"ray status > /dev/null && {ready}")):
        _must(run, _ray("up", file, "--yes"), "the cluster did not start")
        _must(run, _ray("exec", file, ready), f"{remote} cannot be written on the head")
    print(f"dashboard: ray dashboard {shlex.quote(str(file))}", file=sys.stderr)
    for local, there in shipped.items():
        _must(run, _ray("rsync-up", file, local, there), f"{local} did not reach the cluster")
    search = ["remasker", "tune", *remote_words(words, shipped)]
    search += ["--address", "auto", "--storage", remote]
    code = run(_ray("exec", file, shlex.join(search)))
    # Also after a failure: the journal and the finished trials are worth having.
    for run_name in names:
        target = storage / run_name
        target.mkdir(parents=True, exist_ok=True)
        fetched = run(_ray("rsync-down", file, f"{remote}/{run_name}/", f"{target}/"))
        if fetched and not code:
            raise ClusterError(
                f"{run_name} did not come back; it is kept in {remote}/{run_name} on the cluster"
            )
    if code:
        raise ClusterError(
            f"the search ended with exit code {code}; its runs are kept in {remote} there; "
            "continue with the same command and --resume"
        )
    return 0


def remote_words(words: Sequence[str], shipped: dict[str, str]) -> list[str]:
    """The words of a command line as the head needs them: its paths, and no word on the place.

    >>> remote_words(["t.csv", "--cluster", "a.yaml", "--trials=9"], {"t.csv": "/mnt/data/t.csv"})
    ['/mnt/data/t.csv', '--trials=9']
    """
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in PLACES:
            skip = True
        elif word.split("=")[0] not in PLACES:
            kept.append(shipped.get(word) or shipped.get(str(Path(word)), word))
    return kept


def _ray(action: str, file: Path, *words: str) -> list[str]:
    # The `ray` of this very environment: another one may have another version.
    command = str(Path(sys.executable).with_name("ray"))
    style = ["--log-style", "pretty"] if action in ("up", "down", "exec") else []
    return [command, action, *style, str(file), *words]


def _must(run: Run, command: Sequence[str], complaint: str) -> None:
    code = run(command)
    if code:
        raise ClusterError(f"{complaint}: `{shlex.join(command)}` ended with exit code {code}")


# ---------------------------------------------------------------------- down means down


def down(file: Path, *, run: Run = show_and_run) -> None:
    """Take a cluster down and see to it that no Ray process is left.

    On hosts of your own, `ray down` stops Ray on the head alone. The workers' processes would live
    on for a minute, and some of them for ever.
    """
    config = yaml.safe_load(file.read_text())
    if "provider" not in config:
        raise InvalidConfigError(f"{file}: for Kubernetes, `kubectl delete -f {file}`")
    _must(run, _ray("down", file, "--yes"), "the cluster did not go down")
    if config["provider"]["type"] != "local":
        return
    hosts = [config["provider"]["head_ip"], *config["provider"]["worker_ips"]]
    # First without force, so that nothing is cut in half; whatever remains is named and fails.
    stop = (
        'PATH="$HOME/remasker-env/bin:$PATH"; ray stop --grace-period 10; '
        f"ray stop --force > /dev/null; ! pgrep -fa '{RAY_PROCESS}'"
    )
    failed = [host for host in hosts if run([*_ssh(config["auth"], host), stop])]
    if failed:
        raise ClusterError(
            f"Ray may still run on {', '.join(failed)}: the host did not answer, or the processes "
            "above are left; go there and `ray stop --force`"
        )


def _ssh(auth: dict[str, Any], host: str) -> list[str]:
    options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    options += ["-o", "ConnectTimeout=15", "-o", "LogLevel=ERROR", "-o", "BatchMode=yes"]
    if auth.get("ssh_private_key"):
        options += ["-i", os.path.expanduser(auth["ssh_private_key"])]
    if auth.get("ssh_proxy_command"):
        options += ["-o", f"ProxyCommand={auth['ssh_proxy_command']}"]
    return ["ssh", *options, f"{auth['ssh_user']}@{host}"]


__all__ = [
    "ClusterError",
    "add_commands",
    "create_token",
    "down",
    "run_on_cluster",
    "token_findings",
]
