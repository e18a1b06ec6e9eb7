#!/usr/bin/env python3
"""Several hosts on one machine, to try clusters/on-premise.yaml: namespaces with a sshd each.

    sudo python3 clusters/hosts.py up          # operator, head, worker1, worker2, outsider
    sudo python3 clusters/hosts.py run operator -- ray up -y /var/tmp/remasker-hosts/on-premise.yaml
    sudo python3 clusters/hosts.py cut worker1     # its link goes down; `heal worker1`: up
    sudo python3 clusters/hosts.py kill worker2    # every process of that host dies at once
    sudo python3 clusters/hosts.py revive worker2  # the killed host boots again, empty
    sudo python3 clusters/hosts.py processes       # what still runs on each host
    sudo python3 clusters/hosts.py down

Each host has its own network, processes, host name, /tmp and home. The rest of the machine's files
are there to read only, but for /var/tmp/remasker-hosts/storage, which plays the NFS mount: nothing
that runs on a host can harm the machine's files. The bridge lies in the operator's
namespace: no address is added to the machine itself and no packet can leave it. Needs root and
Debian's iproute2, openssh-server, openssh-client, rsync and util-linux.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
STATE = Path("/var/tmp/remasker-hosts")
STORAGE = STATE / "storage"
CLUSTER_FILE = STATE / "on-premise.yaml"
NETWORK = "198.51.100"  # TEST-NET-2: reserved for documentation, routed nowhere
HOSTS = {"operator": 1, "head": 10, "worker1": 11, "worker2": 12, "outsider": 13}
TOOLS = {
    "ip": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "rsync": "rsync",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Process 1 of a host. Bash reaps what daemons leave behind, as an init does.
INIT = r"""
set -e
hostname "$NAME"
mount -t proc proc /proc
mount --bind "$STATE/storage" "$STATE/storage"
mkdir -p /run/sshd "$STATE/.project" && mount --bind "$PROJECT" "$STATE/.project"
# A host may write to its own /tmp and to the shared storage, and to nothing else of this machine.
findmnt -rno TARGET,FSTYPE | while read -r target kind; do
    case "$kind:$target" in
        *:"$STATE/storage" | proc:* | sysfs:* | devpts:* | devtmpfs:* | cgroup*:*) ;;
        *:/dev | *:/dev/*) ;;
        *) mount -o remount,bind,ro "$target" ;;
    esac
done
mount -t tmpfs tmpfs /tmp
chmod 1777 /tmp
if [ ! -e "$PROJECT" ]; then mkdir -p "$PROJECT" && mount --bind "$STATE/.project" "$PROJECT"; fi
mkdir -p /tmp/home/.ssh && chmod 700 /tmp/home /tmp/home/.ssh
sed 's|^root:.*|root:x:0:0:root:/tmp/home:/bin/bash|' /etc/passwd > /tmp/.passwd
mount --bind /tmp/.passwd /etc/passwd
ln -s "$ENVIRONMENT" /tmp/home/remasker-env
if [ "$NAME" = operator ]; then ln -s "$STATE/key" /tmp/home/.ssh/id_ed25519; fi
/usr/sbin/sshd -D -e -f "$STATE/sshd_config" -o ListenAddress=0.0.0.0 &
echo ready
while true; do sleep 3600 & wait $!; done
"""


def address(name: str) -> str:
    """The address of a host on the network of the namespaces."""
    return f"{NETWORK}.{HOSTS[name]}"


def missing() -> str | None:
    """Why hosts cannot be made here, in one sentence; None when they can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    packages = {p for tool, p in TOOLS.items() if not shutil.which(tool, path=SEARCH_PATH)}
    if packages:
        return f"missing Debian packages: apt-get install {' '.join(sorted(packages))}"
    probe = f"rm-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True)
    if made.returncode:
        return f"this machine refuses network namespaces: {made.stderr.strip()}"
    return None


def up(environment: Path) -> None:
    """Make the hosts, their network, their keys and a cluster file that names them."""
    reason = missing()
    if reason:
        sys.exit(reason)
    if STATE.exists():
        down()
    STORAGE.mkdir(parents=True)
    STATE.chmod(0o700)
    for key in ("key", "host_key"):
        _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(STATE / key))
    shutil.copy(STATE / "key.pub", STATE / "authorized_keys")
    (STATE / "sshd_config").write_text(
        f"HostKey {STATE}/host_key\nAuthorizedKeysFile {STATE}/authorized_keys\nPidFile none\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\n"
        "StrictModes no\nMaxStartups 100\nPrintMotd no\n"
    )
    (STATE / "environment").write_text(str(environment))
    _make_network()
    for name in HOSTS:
        _boot(name, environment)
    _write_cluster_file()


def _make_network() -> None:
    for name in HOSTS:
        _call("ip", "netns", "add", f"rm-{name}")
        _call("ip", "-n", f"rm-{name}", "link", "set", "lo", "up")
    operator = ["ip", "-n", "rm-operator"]
    _call(*operator, "link", "add", "br0", "type", "bridge")
    _call(*operator, "address", "add", f"{address('operator')}/24", "dev", "br0")
    _call(*operator, "link", "set", "br0", "up")
    _call(*operator, "route", "add", "default", "dev", "br0")
    for name in HOSTS:
        if name == "operator":
            continue
        host, cable = ["ip", "-n", f"rm-{name}"], f"to-{name}"
        _call(
            *operator, "link", "add", cable, "type", "veth", "peer", "eth0", "netns", f"rm-{name}"
        )
        _call(*operator, "link", "set", cable, "master", "br0", "up")
        _call(*host, "address", "add", f"{address(name)}/24", "dev", "eth0")
        _call(*host, "link", "set", "eth0", "up")
        # Ray finds its own address by asking for a route; without one it binds 127.0.0.1.
        _call(*host, "route", "add", "default", "via", address("operator"))


def _boot(name: str, environment: Path) -> None:
    variables = {
        "PATH": SEARCH_PATH,
        "NAME": name,
        "STATE": str(STATE),
        "PROJECT": str(PROJECT),
        "ENVIRONMENT": str(environment),
    }
    network = ["ip", "netns", "exec", f"rm-{name}"]
    own = ["unshare", "--pid", "--fork", "--mount", "--uts", "--propagation", "private"]
    log_path = STATE / f"{name}.log"
    with open(log_path, "wb") as log:
        outer = subprocess.Popen(
            [*network, *own, "bash", "-c", INIT],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + 20
    while "ready" not in log_path.read_text().splitlines():
        if time.monotonic() > deadline or outer.poll() is not None:
            sys.exit(f"host {name} did not start: {log_path.read_text()}")
        time.sleep(0.05)
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
    (STATE / f"{name}.pid").write_text(children[0])


def _write_cluster_file() -> None:
    """clusters/on-premise.yaml with its placeholders filled in, as a user would."""
    text = (PROJECT / "clusters" / "on-premise.yaml").read_text()
    for placeholder, value in {
        "REPLACE-WITH-HEAD-ADDRESS": address("head"),
        "REPLACE-WITH-WORKER-ADDRESS": address("worker1"),
        "REPLACE-WITH-ANOTHER-WORKER-ADDRESS": address("worker2"),
        "REPLACE-WITH-SSH-USER": "root",
        "REPLACE-WITH-PATH-OF-PRIVATE-KEY": "~/.ssh/id_ed25519",
        "REPLACE-WITH-SHARED-FOLDER": str(STORAGE),
        # The hosts share one machine's cores and memory: each is told to offer little.
        "ray start --head": "ray start --head --num-cpus=1 --object-store-memory=100000000",
        "ray start --address": "ray start --num-cpus=1 --object-store-memory=100000000 --address",
    }.items():
        text = text.replace(placeholder, value)
    CLUSTER_FILE.write_text(text)


def process_ids(name: str) -> list[int]:
    """The processes of a host, seen from outside; process 1 first, none when it is dead."""
    pid = (STATE / f"{name}.pid").read_text() if (STATE / f"{name}.pid").exists() else "none"
    try:
        space = os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == space:
                found.append(int(entry.name))
    return sorted(found, key=lambda found_pid: (found_pid != int(pid), found_pid))


def ray_processes(name: str) -> list[str]:
    """The command lines of every Ray process of a host."""
    lines = []
    for pid in process_ids(name):
        with contextlib.suppress(OSError):
            raw = Path(f"/proc/{pid}/cmdline").read_bytes()
            line = raw.replace(b"\0", b" ").decode(errors="replace").strip()
            if "ray" in line.split("/")[-1] or "/ray/" in line or line.startswith("ray::"):
                lines.append(f"{pid} {line[:120]}")
    return lines


def command(name: str, arguments: list[str]) -> list[str]:
    """What runs `arguments` on a host, with that host's home and an empty environment."""
    pid = (STATE / f"{name}.pid").read_text()
    environment = [
        "HOME=/tmp/home",
        "USER=root",
        "LANG=C.UTF-8",
        f"TERM={os.environ.get('TERM', 'dumb')}",
        f"PATH=/tmp/home/remasker-env/bin:{SEARCH_PATH}",
        f"PYTHONPATH={PROJECT}",
    ]
    enter = ["nsenter", "-t", pid, "-n", "-p", "-m", "-u", "--", "env", "-i", *environment]
    return [*enter, "bash", "-c", 'cd "$0" && exec "$@"', str(PROJECT), *arguments]


def cut(name: str) -> None:
    """Take a host's link down: it lives on, but nobody reaches it."""
    _call("ip", "-n", "rm-operator", "link", "set", f"to-{name}", "down")


def heal(name: str) -> None:
    """Bring a host's link back."""
    _call("ip", "-n", "rm-operator", "link", "set", f"to-{name}", "up")


def kill(name: str) -> None:
    """End every process of a host at once, as a power cut does."""
    pids = process_ids(name)
    if pids:  # the kernel kills the others with process 1
        os.kill(pids[0], signal.SIGKILL)


def revive(name: str) -> None:
    """Boot a killed host again: same address, empty home."""
    if not process_ids(name):
        _boot(name, Path((STATE / "environment").read_text()))


def down() -> None:
    """Remove the hosts, their network and their files."""
    for name in HOSTS:
        kill(name)
    deadline = time.monotonic() + 10
    while any(process_ids(name) for name in HOSTS) and time.monotonic() < deadline:
        time.sleep(0.05)
    for name in HOSTS:
        subprocess.run(["ip", "netns", "delete", f"rm-{name}"], capture_output=True)
    shutil.rmtree(STATE, ignore_errors=True)


def _call(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")


def main() -> None:
    """The command line; `hosts.py --help` shows the top of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    start = actions.add_parser("up")
    start.add_argument("--environment", type=Path, default=PROJECT / ".venv")
    for action in ("down", "processes", "check"):
        actions.add_parser(action)
    for action in ("cut", "heal", "kill", "revive", "run"):
        actions.add_parser(action).add_argument("host", choices=HOSTS)
    actions.choices["run"].add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.action == "up":
        up(given.environment)
        print(f"hosts: {', '.join(f'{name} {address(name)}' for name in HOSTS)}")
        print(f"cluster file: {CLUSTER_FILE}")
    elif given.action == "check":
        sys.exit(missing())
    elif given.action == "processes":
        for name in HOSTS:
            lines = ray_processes(name)
            print(f"{name}: {len(lines)} Ray processes", *lines, sep="\n    ")
    elif given.action == "run":
        arguments = given.arguments[1:] if given.arguments[:1] == ["--"] else given.arguments
        line = command(given.host, arguments)
        os.execvp(line[0], line)
    elif given.action == "down":
        down()
    else:
        {"cut": cut, "heal": heal, "kill": kill, "revive": revive}[given.action](given.host)


if __name__ == "__main__":
    main()
