"""A model on disk: a directory with `model.json` and `weights.safetensors`, and no pickle.

The directory holds a list of members, so that an ensemble is one artifact. It is written beside its
destination and then put in place at once: a crash leaves the old model or the new one.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from remasker.errors import ArtifactError, RemaskerError, make_config
from remasker.experts import Experts
from remasker.inference import Ensemble
from remasker.model import ModelConfig
from remasker.table import TableEncoder
from remasker.training import Member, TrainingConfig

FORMAT = 2
MANIFEST = "model.json"
WEIGHTS = "weights.safetensors"


def save_artifact(
    path: str | os.PathLike[str],
    *,
    encoder: TableEncoder,
    ensemble: Ensemble,
    settings: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> Path:
    """Write a model, replacing an older one at the same place.

    A directory that is not a model is never replaced.
    """
    from safetensors.numpy import save_file

    import remasker

    target = Path(path)
    if target.exists() and not (target / MANIFEST).is_file():
        raise ArtifactError(f"{target} exists and is not a saved model; choose another path")
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "library": remasker.__version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": dict(settings),
        "provenance": dict(provenance),
        "schema": encoder.to_dict(),
        "members": [
            {
                "model": asdict(member.model_config),
                "training": asdict(member.training_config),
                "seed": member.seed,
                "epochs": member.epochs,
                "error": member.error,
            }
            for member in ensemble.members
        ],
    }
    tensors = {"residuals": np.ascontiguousarray(ensemble.residuals, dtype=np.float64)}
    for index, member in enumerate(ensemble.members):
        for name, tensor in member.weights.items():
            tensors[f"{index}.{name}"] = np.ascontiguousarray(tensor.numpy())
    if ensemble.trust is not None:
        tensors["trust"] = ensemble.trust
    manifest["experts"] = []
    for index, experts in enumerate(ensemble.experts):
        arrays, entry = experts.to_tensors()
        manifest["experts"].append(entry)
        tensors |= {f"experts.{index}.{name}": array for name, array in arrays.items()}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ArtifactError(f"cannot write {target}: {error.strerror or error}") from error
    try:
        # mkdtemp makes the directory private; a model is as readable as any other file.
        staging.chmod(0o777 & ~_umask())
        save_file(tensors, staging / WEIGHTS)
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=1, allow_nan=False) + "\n")
        for name in (WEIGHTS, MANIFEST):
            with open(staging / name, "rb") as file:
                os.fsync(file.fileno())
        _put_in_place(staging, target)
    except (OSError, TypeError, ValueError) as error:
        raise ArtifactError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def load_artifact(
    path: str | os.PathLike[str], device: str = "cpu"
) -> tuple[TableEncoder, Ensemble, dict[str, Any]]:
    """Read a model; the third part of the answer is its whole manifest."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    source = Path(path)
    if not (source / MANIFEST).is_file():
        raise ArtifactError(
            f"{source} is not a saved model: it has no {MANIFEST}; give the directory that "
            "save() or `remasker fit -o` wrote"
        )
    try:
        manifest = json.loads((source / MANIFEST).read_text())
        version = manifest["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{source / MANIFEST} is damaged ({error}); save the model again"
        ) from error
    if version != FORMAT:
        raise ArtifactError(
            f"{source} has format {version!r}, this library reads format {FORMAT}; install "
            f"remasker {manifest.get('library', 'of the version that wrote it')} or save it again"
        )
    try:
        tensors = load_file(source / WEIGHTS)
        encoder = TableEncoder.from_dict(manifest["schema"])
        n_categories = tuple(len(column.categories) for column in encoder.modelled)
        members = []
        for index, entry in enumerate(manifest["members"]):
            weights = _below(tensors, f"{index}.")
            member = Member(
                model_config=make_config(ModelConfig, entry["model"]),
                training_config=make_config(TrainingConfig, entry["training"]),
                weights={name: torch.from_numpy(array) for name, array in weights.items()},
                seed=entry["seed"],
                epochs=entry["epochs"],
                error=entry["error"],
            )
            member.build(n_categories)
            members.append(member)
        experts = tuple(
            Experts.from_tensors(_below(tensors, f"experts.{index}."), entry)
            for index, entry in enumerate(manifest["experts"])
        )
        residuals = tensors["residuals"]
        if residuals.shape[0] != len(n_categories):
            raise ValueError(f"residuals of {residuals.shape[0]} columns")
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, RuntimeError) and not isinstance(error, RemaskerError):
            reason = "the weights do not fit the configuration"
        raise ArtifactError(f"{source} is damaged ({reason}); save the model again") from error
    ensemble = Ensemble(
        members=tuple(members),
        n_categories=n_categories,
        residuals=residuals,
        experts=experts,
        trust=tensors.get("trust"),
        device=device,
    )
    return encoder, ensemble, manifest


def _below(tensors: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _put_in_place(staging: Path, target: Path) -> None:
    if not target.exists():
        staging.rename(target)
        return
    if _exchange(staging, target):
        return
    # Elsewhere than on Linux two renames have to do; between them a crash leaves the old model
    # under the name of the staging directory.
    retired = staging.with_name(staging.name + ".old")
    target.rename(retired)
    staging.rename(target)
    shutil.rmtree(retired, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two paths atomically (Linux's renameat2); False where that cannot be done."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    at_working_directory, exchange = -100, 2
    return (
        renameat2(
            at_working_directory, os.fsencode(a), at_working_directory, os.fsencode(b), exchange
        )
        == 0
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
