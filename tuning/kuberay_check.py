"""The fields of KubeRay's `ray.io/v1` that ReMasker's files use, and what must be true of them.

Kubernetes itself checks a file against KubeRay's full definition when it is applied; this finds the
same mistakes, and the unsafe settings that are no mistakes to Kubernetes, without a cluster.
"""

from __future__ import annotations

import re
from typing import Any

from remasker.errors import nearest
from tuning.cluster_check import PLACEHOLDER, differing, image_versions

#: Of KubeRay 1.5 and 1.6.
CLUSTER_FIELDS = [
    "suspend",
    "managedBy",
    "autoscalerOptions",
    "headServiceAnnotations",
    "enableInTreeAutoscaling",
    "authOptions",
    "gcsFaultToleranceOptions",
    "headGroupSpec",
    "rayVersion",
    "workerGroupSpecs",
    "upgradeStrategy",
]
JOB_FIELDS = [
    "activeDeadlineSeconds",
    "backoffLimit",
    "rayClusterSpec",
    "submitterPodTemplate",
    "metadata",
    "clusterSelector",
    "submitterConfig",
    "managedBy",
    "deletionStrategy",
    "entrypoint",
    "runtimeEnvYAML",
    "jobId",
    "submissionMode",
    "entrypointResources",
    "entrypointNumCpus",
    "entrypointNumGpus",
    "ttlSecondsAfterFinished",
    "shutdownAfterJobFinishes",
    "suspend",
    "preRunningDeadlineSeconds",
]
HEAD_FIELDS = [
    "template",
    "headService",
    "enableIngress",
    "rayStartParams",
    "serviceType",
    "resources",
    "labels",
]
WORKER_FIELDS = [
    "groupName",
    "replicas",
    "minReplicas",
    "maxReplicas",
    "idleTimeoutSeconds",
    "rayStartParams",
    "template",
    "scaleStrategy",
    "numOfHosts",
    "suspend",
    "resources",
    "labels",
]
AUTOSCALER_FIELDS = [
    "resources",
    "image",
    "imagePullPolicy",
    "securityContext",
    "idleTimeoutSeconds",
    "upscalingMode",
    "version",
    "env",
    "envFrom",
    "volumeMounts",
]
AUTH_FIELDS = ("mode", "secretName", "enableK8sTokenAuth")


def check_kuberay(documents: list[dict[str, Any]]) -> list[str]:
    """Every finding about the documents of a KubeRay file."""
    ours = [d for d in documents if str(d.get("apiVersion", "")).startswith("ray.io/")]
    if len(ours) != 1:
        return [f"expected one RayCluster or RayJob of ray.io/v1, found {len(ours)}"]
    document = ours[0]
    findings = []
    if document["apiVersion"] != "ray.io/v1":
        findings.append(f"apiVersion: expected ray.io/v1, got {document['apiVersion']!r}")
    kind = document.get("kind")
    if kind not in ("RayCluster", "RayJob"):
        return [*findings, f"kind: expected RayCluster or RayJob, got {kind!r}"]
    metadata = _mapping(document, "metadata")
    if not metadata.get("name"):
        findings.append("metadata.name: missing")
    spec = _mapping(document, "spec")
    protected = any(d.get("kind") == "NetworkPolicy" for d in documents)
    if kind == "RayJob":
        findings += _unknown(spec, JOB_FIELDS, "spec")
        findings += [
            f"spec.{key}: missing" for key in ("entrypoint", "rayClusterSpec") if not spec.get(key)
        ]
        if "--storage" not in str(spec.get("entrypoint", "--storage")):
            findings.append("spec.entrypoint: no --storage; name the folder that every pod shares")
        if spec.get("shutdownAfterJobFinishes") is not True:
            findings.append(
                "spec.shutdownAfterJobFinishes: expected true, or the cluster outlives its search"
            )
        where, cluster = "spec.rayClusterSpec", _mapping(spec, "rayClusterSpec")
    else:
        where, cluster = "spec", spec
    if kind == "RayJob" and not spec.get("rayClusterSpec"):
        return findings
    annotations = _mapping(metadata, "annotations")
    if "remasker/python" in annotations:
        python = str(annotations["remasker/python"])
        findings += differing("Python", python, "metadata.annotations.remasker/python")
    return findings + _cluster(
        cluster, where, annotations.get("remasker/storage"), job=kind == "RayJob", closed=protected
    )


def _cluster(
    cluster: dict[str, Any], where: str, storage: object, *, job: bool, closed: bool
) -> list[str]:
    findings = _unknown(cluster, CLUSTER_FIELDS, where)
    options = _mapping(cluster, "autoscalerOptions")
    findings += _unknown(options, AUTOSCALER_FIELDS, f"{where}.autoscalerOptions")
    auth = _mapping(cluster, "authOptions")
    findings += _unknown(auth, AUTH_FIELDS, f"{where}.authOptions")
    if auth.get("mode") != "token":
        findings.append(
            f"{where}.authOptions: Ray would start without a token, so whoever reaches it runs "
            "code; say `authOptions: {mode: token}`"
        )
    if "rayVersion" not in cluster:
        findings.append(f"{where}.rayVersion: missing; say which Ray the image has")
    else:
        findings += differing("ray", str(cluster["rayVersion"]), f"{where}.rayVersion")
    head = _mapping(cluster, "headGroupSpec")
    if not head:
        return [*findings, f"{where}.headGroupSpec: missing"]
    findings += _unknown(head, HEAD_FIELDS, f"{where}.headGroupSpec")
    findings += _dashboard(head, f"{where}.headGroupSpec", job=job, closed=closed)
    if not storage:
        findings.append(
            "metadata.annotations.remasker/storage: missing; name the folder that every pod shares"
        )
    claims = {}
    groups = {f"{where}.headGroupSpec": head}
    for index, group in enumerate(cluster.get("workerGroupSpecs") or []):
        place = f"{where}.workerGroupSpecs[{index}]"
        findings += _unknown(group, WORKER_FIELDS, place)
        if not group.get("groupName"):
            findings.append(f"{place}.groupName: missing")
        low, now, high = (group.get(k) for k in ("minReplicas", "replicas", "maxReplicas"))
        if None not in (low, now, high) and not low <= now <= high:
            findings.append(
                f"{place}.replicas: expected {now} to lie between minReplicas {low} and "
                f"maxReplicas {high}"
            )
        groups[place] = group
    for place, group in groups.items():
        found, claim = _pod(group, place, storage)
        findings += found
        claims[place] = claim
    if storage and len(set(claims.values())) > 1 and None not in claims.values():
        findings.append(f"{where}: head and workers mount different claims at {storage}")
    return findings


def _dashboard(head: dict[str, Any], where: str, *, job: bool, closed: bool) -> list[str]:
    findings = []
    service = head.get("serviceType", "ClusterIP")
    if service != "ClusterIP":
        findings.append(
            f"{where}.serviceType: {service} opens the dashboard beyond the cluster; say ClusterIP "
            "and use `kubectl port-forward`"
        )
    if head.get("enableIngress"):
        findings.append(
            f"{where}.enableIngress: opens the dashboard beyond the cluster; use `kubectl "
            "port-forward`"
        )
    host = _mapping(head, "rayStartParams").get("dashboard-host", "0.0.0.0")
    if job:
        if not closed:
            findings.append(
                f"{where}: every pod of the cluster reaches the dashboard; add a NetworkPolicy as "
                "in clusters/kuberay-job.yaml"
            )
    elif host not in ("127.0.0.1", "localhost"):
        findings.append(
            f"{where}.rayStartParams: the dashboard listens on {host}, for every pod; say "
            "`dashboard-host: 127.0.0.1`"
        )
    return findings


def _pod(group: dict[str, Any], where: str, storage: object) -> tuple[list[str], object]:
    """Findings about a group's pod, and the claim that it mounts at the storage path."""
    spec = _mapping(_mapping(group, "template"), "spec")
    containers = spec.get("containers") or []
    if not containers:
        return [f"{where}.template.spec.containers: missing"], None
    container = containers[0]
    findings = []
    place = f"{where}.template.spec.containers[0]"
    image = str(container.get("image", ""))
    if not image:
        findings.append(f"{place}.image: missing")
    elif not PLACEHOLDER.search(image.rsplit(":")[-1]):
        findings += image_versions(image, f"{place}.image")
        if not re.search(r":[^/]+$", image) or image.endswith(":latest"):
            findings.append(f"{place}.image: {image} has no version; nodes may differ, add a tag")
    for variable in container.get("env") or []:
        if variable.get("name") == "RAY_AUTH_TOKEN" and variable.get("value"):
            findings.append(f"{place}.env: a token stands in the file; KubeRay makes one by itself")
    volumes = {v.get("name"): v for v in spec.get("volumes") or []}
    for mount in container.get("volumeMounts") or []:
        if storage and mount.get("mountPath") == storage:
            volume = volumes.get(mount.get("name"), {})
            claim = _mapping(volume, "persistentVolumeClaim").get("claimName")
            network = volume.get("nfs") or volume.get("csi")
            if claim or network:
                return findings, claim or str(network)
            findings.append(
                f"{place}.volumeMounts: {storage} is no volume that pods share; mount a "
                "ReadWriteMany claim"
            )
            return findings, None
    if storage:
        findings.append(f"{place}.volumeMounts: {storage} is not mounted, so it is not shared")
    return findings, None


def _unknown(value: dict[str, Any], known: list[str] | tuple[str, ...], where: str) -> list[str]:
    return [
        f"{where}.{key}: KubeRay knows no such field{nearest(key, known)}"
        for key in value
        if key not in known
    ]


def _mapping(value: dict[str, Any], key: str) -> dict[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}
