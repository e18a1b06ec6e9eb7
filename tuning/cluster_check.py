"""What is wrong with a cluster file, found before anything is started: one sentence per finding.

Ray's own schema says whether `ray up` would read the file. It does not say whether the result would
work or be safe, and that is most of what goes wrong: a misspelt provider key, a placeholder, other
versions than the driver's, storage that is not shared, a dashboard that anyone reaches, no token.
Nothing here talks to a network, and no finding repeats a secret.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import re
import shlex
import stat
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from remasker.errors import InvalidConfigError, nearest

PLACEHOLDER = re.compile(r"REPLACE-WITH[A-Z0-9-]*")
LOCALHOST = ("127.0.0.1", "localhost", "::1")
PINNED = ("ray", "torch", "optuna", "remasker")
PIN = re.compile(r"\b(ray|torch|optuna|remasker)(?:\[[^\]]*\])?==([0-9][\w.+]*)")
IMAGE = re.compile(r"(?:^|/)(ray|ray-ml|remasker):v?(\d+\.\d+\.\d+)(?:[.-]py(\d)(\d+))?")
#: What Ray's providers read; the schema lets anything through.
PROVIDER_KEYS = {
    "local": ("head_ip", "worker_ips", "external_head_ip", "coordinator_address"),
    "aws": [
        "region",
        "availability_zone",
        "cache_stopped_nodes",
        "use_internal_ips",
        "security_group",
        "cloudwatch",
        "aws_credentials",
    ],
    "gcp": [
        "region",
        "availability_zone",
        "project_id",
        "cache_stopped_nodes",
        "use_internal_ips",
        "gcp_credentials",
    ],
}
COMMON_KEYS = [
    "type",
    "disable_node_updaters",
    "disable_launch_config_check",
    "foreground_node_launch",
    "worker_liveness_check",
    "worker_rpc_drain",
]
SECRETS = (
    re.compile(r"AKIA[0-9A-Z]{16}"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY"),
    re.compile(r"\b[0-9a-f]{64}\b"),
    re.compile(r"\bgh[pousr]_\w{30,}"),
    re.compile(r"RAY_AUTH_TOKEN=[^$\s]"),
)
SECRET_NAMES = re.compile(r"(?i)(password|passwd|secret_access_key|auth_token|api_key)$")


def check(path: Path, token: Path | None = None) -> list[str]:
    """Every finding about a cluster file; an empty list says that it may be used.

    `token` is where this machine keeps Ray's token, by default ~/.ray/auth_token.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise InvalidConfigError(f"{path}: {error.strerror or error}") from None
    if path.suffix == ".sh":
        return _check_script(text)
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        return [f"not YAML{where}: {getattr(error, 'problem', None) or 'it cannot be parsed'}"]
    if not documents or not all(isinstance(document, dict) for document in documents):
        return ["expected a mapping of settings; start from a file of clusters/"]
    findings = [*_placeholders(documents), *_secrets(documents)]
    if any("apiVersion" in document for document in documents):
        from tuning.kuberay_check import check_kuberay

        return findings + check_kuberay(documents)
    if len(documents) > 1:
        return [*findings, "expected one YAML document, found several"]
    config = documents[0]
    found, prepared = _schema(config)
    findings += [*found, *_provider(config)]
    return [*findings, *_versions(config), *_storage(config), *_safety(config, prepared, token)]


# ---------------------------------------------------------------------- for every kind of file


def walk(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every scalar of a nested value as text, with its path.

    >>> list(walk({"a": [1, {"b": "x"}]}))
    [('a[0]', '1'), ('a[1].b', 'x')]
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from walk(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from walk(inner, f"{path}[{index}]")
    elif value is not None:
        yield path, str(value)


def _placeholders(documents: list[Any]) -> list[str]:
    """Each placeholder once, at its first place: anchors repeat it."""
    seen: dict[str, str] = {}
    for document in documents:
        for path, text in walk(document):
            for name in PLACEHOLDER.findall(text):
                seen.setdefault(name, path)
    return [f"{path}: still says {name}; put your own value there" for name, path in seen.items()]


def _secrets(documents: list[Any]) -> list[str]:
    found = []
    for document in documents:
        for path, text in walk(document):
            named = SECRET_NAMES.search(path.split(".")[-1]) and not text.startswith(
                ("~", "/", "$")
            )
            if named or any(pattern.search(text) for pattern in SECRETS):
                found.append(
                    f"{path}: looks like a secret, which everyone who reads this file would have; "
                    "keep it in a file of mode 0600 or in the environment"
                )
    return found


def installed(name: str) -> str | None:
    """The version of a distribution on this machine, without its build; None when absent."""
    try:
        return version(name).split("+")[0]
    except PackageNotFoundError:
        return None


def driver_python() -> str:
    """The Python of this process, as in `3.11`."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def differing(name: str, there: str, where: str) -> list[str]:
    """A finding when a version is not the one of this machine."""
    here = driver_python() if name == "Python" else installed(name)
    if here is None or there.split("+")[0] == here:
        return []
    return [f"{where}: {name} {there} there, {here} here; make them the same"]


def image_versions(image: str, where: str) -> list[str]:
    """Findings about the versions that an image's tag tells.

    >>> image_versions("rayproject/ray:1.9.0-py39", "docker.image")[0].split(";")[0][:36]
    'docker.image: ray 1.9.0 there, 2.60.'
    """
    found = IMAGE.search(image)
    if not found:
        return []
    name, tag, major, minor = found.groups()
    findings = differing("remasker" if name == "remasker" else "ray", tag, where)
    return findings + (differing("Python", f"{major}.{minor}", where) if major else [])


# ---------------------------------------------------------------------- Ray's cluster files


def _schema(config: dict[str, Any]) -> tuple[list[str], dict[str, Any] | None]:
    """What Ray itself says, and the file with Ray's defaults filled in if it can be read."""
    import jsonschema  # type: ignore[import-untyped]
    import ray.autoscaler
    from ray.autoscaler._private.util import prepare_config, validate_config

    provider = config.get("provider")
    if not isinstance(provider, dict) or "type" not in provider:
        return ["provider.type: missing; expected local, aws or gcp"], None
    if provider["type"] not in PROVIDER_KEYS:
        known = ", ".join(PROVIDER_KEYS)
        return [f"provider.type: expected one of {known}, got {provider['type']!r}"], None
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    findings = []
    for error in jsonschema.Draft7Validator(schema).iter_errors(config):
        path = ".".join(map(str, error.absolute_path))
        if error.validator == "additionalProperties":
            known_keys = error.schema.get("properties", {})
            for key in sorted(set(error.instance) - set(known_keys)):
                full = f"{path}.{key}" if path else str(key)
                findings.append(f"{full}: Ray knows no such key{nearest(key, known_keys)}")
        else:
            message = error.message.splitlines()[0]
            findings.append(f"{path}: {message}" if path else message)
    if findings:
        return findings, None
    said = io.StringIO()
    logging.getLogger("ray.autoscaler._private.util").setLevel(logging.WARNING)
    try:
        # Ray prints before it gives up; the sentence below is enough.
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            prepared = prepare_config(copy.deepcopy(config))
            validate_config(prepared)
    except (Exception, SystemExit) as error:
        words = (str(error) or said.getvalue()).strip().splitlines() or [type(error).__name__]
        plain = re.sub(r"\x1b\[[0-9;]*m", "", words[0])
        sentence = re.split(r"(?<=[.!?]) (?=[A-Z])", plain)[0].rstrip(".")
        return [f"Ray refuses the file: {sentence}"], None
    return [], prepared


def _provider(config: dict[str, Any]) -> list[str]:
    provider = config.get("provider")
    kind = provider.get("type") if isinstance(provider, dict) else None
    if kind not in PROVIDER_KEYS:
        return []
    assert isinstance(provider, dict)
    known = [*PROVIDER_KEYS[kind], *COMMON_KEYS]
    findings = [
        f"provider.{key}: Ray's {kind} provider reads no such key{nearest(key, known)}"
        for key in provider
        if key not in known
    ]
    required = {"aws": ["region"], "gcp": ["region", "availability_zone", "project_id"]}
    findings += [
        f"provider.{key}: missing; {kind} needs it"
        for key in required.get(kind, [])
        if not provider.get(key)
    ]
    for rule in (provider.get("security_group") or {}).get("IpPermissions", []):
        open_to_all = any(r.get("CidrIp") == "0.0.0.0/0" for r in rule.get("IpRanges", []))
        if open_to_all and (rule.get("FromPort"), rule.get("ToPort")) != (22, 22):
            findings.append(
                "provider.security_group: opens more than port 22 to the whole internet; "
                "reach the dashboard with `ray dashboard FILE` instead"
            )
    return findings


def _versions(config: dict[str, Any]) -> list[str]:
    findings = []
    metadata = config.get("metadata") or {}
    if "python" not in metadata:
        findings.append(
            f'metadata.python: missing; say which Python the nodes run, such as "{driver_python()}"'
        )
    else:
        findings += differing("Python", str(metadata["python"]), "metadata.python")
    for path, text in walk(config):
        for name, there in PIN.findall(text):
            findings += differing(name, there, path)
        if "image" in path.lower():
            findings += image_versions(text, path)
        setup = re.search(r"setup\.sh\s+(\d\.\d+)", text)
        told = str(metadata.get("python"))
        if setup and told == driver_python() and setup[1] != told:
            findings.append(
                f"{path}: installs Python {setup[1]}, metadata.python says {metadata['python']}; "
                "make them the same"
            )
    return findings + _shipped_pins(config)


def _shipped_pins(config: dict[str, Any]) -> list[str]:
    """The pins that travel with the code, against what this machine runs."""
    findings = []
    for remote, local in (config.get("file_mounts") or {}).items():
        source = Path(str(local)).expanduser()
        if PLACEHOLDER.search(str(local)):
            continue
        if source.name == "auth_token":
            continue  # judged with the token
        if not source.exists():
            findings.append(f"file_mounts.{remote}: there is no {local} to ship")
        elif str(remote).rstrip("/").endswith("/remasker"):
            pins = source / "constraints.txt"
            if not pins.is_file():
                findings.append(
                    f"file_mounts.{remote}: {source.absolute()} holds no constraints.txt; call "
                    "this in the root of the repository"
                )
                continue
            for name, there in PIN.findall(pins.read_text()):
                findings += differing(name, there, str(pins))
    return findings


def _storage(config: dict[str, Any]) -> list[str]:
    storage = (config.get("metadata") or {}).get("storage")
    if storage is None:
        return [
            "metadata.storage: missing; name the folder that every node shares, such as "
            "/mnt/remasker"
        ]
    if PLACEHOLDER.search(str(storage)):
        return []
    if "://" in str(storage):
        return [
            f"metadata.storage: {storage} is a bucket, and a run needs a folder; mount NFS, EFS or "
            "Filestore on every node and copy finished runs to the bucket"
        ]
    if not str(storage).startswith("/"):
        return [f"metadata.storage: expected a full path, the same on every node, got {storage!r}"]
    provider = config.get("provider") or {}
    alone = provider.get("type") == "local" and not provider.get("worker_ips")
    if not alone and re.match(r"/(tmp|var/tmp|dev/shm)(/|$)", str(storage)):
        known = str(storage).startswith("/var/tmp/remasker-hosts/")  # clusters/hosts.py shares it
        if not known:
            return [f"metadata.storage: {storage} is each node's own; name a folder they share"]
    return []


def _safety(
    config: dict[str, Any], prepared: dict[str, Any] | None, token: Path | None
) -> list[str]:
    if prepared is None:
        return []
    findings = []
    has_workers = config["provider"]["type"] != "local" or bool(config["provider"]["worker_ips"])
    kinds = ["head_start_ray_commands", *(["worker_start_ray_commands"] if has_workers else [])]
    for key in kinds:
        commands = " ; ".join(map(str, prepared[key]))
        if "ray start" not in commands:
            findings.append(f"{key}: no `ray start` in it; start from a file of clusters/")
        elif not re.search(r"RAY_AUTH_MODE=['\"]?token", commands.split("ray start")[0]):
            findings.append(
                f"{key}: starts Ray without a token, so whoever reaches it runs code; put `export "
                "RAY_AUTH_MODE=token;` before `ray start`"
            )
    head = " ".join(map(str, prepared["head_start_ray_commands"]))
    host = re.search(r"--dashboard-host[= ]\s*['\"]?([^\s'\"]+)", head)
    if host and host[1] not in LOCALHOST:
        findings.append(
            f"head_start_ray_commands: the dashboard listens on {host[1]}, for everyone; say "
            "`--dashboard-host=127.0.0.1` and reach it with `ray dashboard FILE`"
        )
    if (
        config["provider"]["type"] == "local"
        and has_workers
        and "RAY_enable_autoscaler_v2=0" not in head
    ):
        findings.append(
            "head_start_ray_commands: autoscaler v2 starts no worker on hosts of your own; put "
            "`export RAY_enable_autoscaler_v2=0;` before `ray start`"
        )
    return findings + _token(config, token)


def _token(config: dict[str, Any], token: Path | None) -> list[str]:
    mounts = {str(k): str(v) for k, v in (config.get("file_mounts") or {}).items()}
    if not any(remote.endswith(".ray/auth_token") for remote in mounts):
        return [
            "file_mounts: the token does not reach the nodes; add `~/.ray/auth_token: "
            "~/.ray/auth_token`"
        ]
    return [*token_findings(token or Path("~/.ray/auth_token").expanduser())]


def token_findings(token: Path) -> list[str]:
    """Whether this machine has a token that nobody else reads."""
    if not token.is_file() or not token.read_text().strip():
        return [f"{token}: missing; make a token with `remasker cluster token`"]
    mode = stat.S_IMODE(token.stat().st_mode)
    if mode & 0o077:
        return [
            f"{token}: others may read it (mode {mode:04o}); chmod 600 {shlex.quote(str(token))}"
        ]
    return []


# ---------------------------------------------------------------------- SLURM


def _check_script(text: str) -> list[str]:
    """A batch script: the same questions, asked of its lines."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*#(?!SBATCH)", line)]
    body = "\n".join(lines)
    findings = [
        f"line {text[: text.index(name)].count(chr(10)) + 1}: still says {name}; put your own "
        "value there"
        for name in dict.fromkeys(PLACEHOLDER.findall(body))
    ]
    if any(pattern.search(body) for pattern in SECRETS):
        findings.append("a secret stands in the script; keep it in a file of mode 0600")
    for name, there in PIN.findall(body):
        findings += differing(name, there, "the script")
    if "RAY_AUTH_MODE=token" not in body:
        findings.append("Ray starts without a token; add `export RAY_AUTH_MODE=token`")
    host = re.search(r"--dashboard-host[= ](\S+)", body)
    if host and host[1] not in LOCALHOST:
        findings.append(f"the dashboard listens on {host[1]}, for everyone; use 127.0.0.1")
    if "--storage" not in body:
        findings.append("no --storage: name the folder that every node shares")
    if not text.startswith("#!"):
        findings.append("the first line must name the shell, such as #!/usr/bin/env bash")
    return findings
