"""From chosen trials to what the user keeps: the fitted imputer and the files of a run.

::

    runs/NAME/
      model/            the artifact, which `remasker impute` and `ReMaskerImputer.load` read
      imputed.csv       the completed table, in the format of the input
      leaderboard.csv   a row per trial
      journal.log       Optuna's journal of the search
      run.json          what was run, on what, how well it did, and how to repeat it
      report.html       the same as a page
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from remasker.containers import as_frame
from remasker.errors import ArtifactError, InvalidTableError
from remasker.imputer import ReMaskerImputer
from remasker.inference import Ensemble
from remasker.table import EncodedTable, TableEncoder
from remasker.tasks import one_thread
from remasker.training import Member, Trainer
from tuning.holdout import draw_holdout
from tuning.second_stage import Effort, two_stages
from tuning.trial import TrialData, joined, read_result, run_trial

RUN, MODEL, LEADERBOARD, REPORT = "run.json", "model", "leaderboard.csv", "report.html"
#: What `tune` passes on to `TableEncoder`.
TABLE_OPTIONS = ("kinds", "exclude", "bounds", "missing_values", "text")


# ---------------------------------------------------------------------- the model


def refit_member(member: Member, table: EncodedTable, device: str = "cpu", copy: int = 0) -> Member:
    """The member's configuration trained on every observed cell, for its best number of epochs.

    Each `copy` has a seed of its own.

    The learning rate keeps its schedule over the whole horizon, so that the weights stop where the
    held-out cells had found them best.

    >>> values = np.random.default_rng(0).normal(size=(40, 2)).astype("float32")
    >>> table = EncodedTable(values=values, observed=values < 1, n_categories=(0, 0))
    >>> from tuning.space import split_settings
    >>> model, training = split_settings({"width": 8, "epochs": 4})
    >>> member = Member(model_config=model, training_config=training, weights={}, seed=0, epochs=2)
    >>> refit_member(member, table).epochs
    2
    """
    seed = member.seed + copy
    trainer = Trainer(table, member.model_config, member.training_config, seed=seed, device=device)
    for report in trainer.epochs():
        if report.epoch >= member.epochs:
            break
    return replace(trainer.member(), epochs=member.epochs, error=member.error)


def assemble(
    encoder: TableEncoder,
    data: TrialData,
    members: Sequence[Member],
    refitted: Sequence[Member] | None,
    provenance: Mapping[str, Any],
    stages: Ensemble | None = None,
    trust: np.ndarray | None = None,
) -> ReMaskerImputer:
    """A fitted imputer from chosen members, or from the two stages that took their place.

    `trust` draws the members' numbers to the column's mean; see `selection.shrinkage`.

    Intervals and draws are calibrated on the judge cells by the members that did not train on them,
    also when refitted ones take their place.
    """
    ensemble = stages or joined(members, data, trust)
    if stages is None:
        ensemble.calibrate(data.table.hide(data.holdout.report), data.holdout.judge)
    if refitted is not None:
        ensemble = replace(ensemble, members=tuple(refitted), _models=[])
    first = members[0]
    known = set(ReMaskerImputer._get_param_names())
    settings = {**vars(first.model_config), **vars(first.training_config)}
    imputer = ReMaskerImputer(
        **{name: value for name, value in settings.items() if name in known},
        n_members=len(ensemble.members),
        experts="auto" if ensemble.experts else None,
        bounds=encoder.bounds,
        exclude=encoder.exclude,
        kinds=encoder.kinds or None,
        missing_values=encoder.missing_values,
        text=encoder.text,
        device=data.device,
        random_state=first.seed,
    )
    imputer._install(encoder, ensemble, dict(provenance))
    return imputer


def encode(
    table: Any, options: Mapping[str, Any]
) -> tuple[pd.DataFrame, TableEncoder, EncodedTable, dict[str, Any]]:
    """The table as a DataFrame, its encoder, as the model sees it, and where it came from.

    >>> frame = pd.DataFrame({"a": [1.5, None], "b": [2.0, 3.0]})
    >>> encode(frame, {})[3]["indicator_columns"]
    ['a']
    """
    frame, container = as_frame(table)
    encoder = TableEncoder(**dict(options), whole_numbers=container != "numpy").fit(frame)
    encoded = encoder.encode(frame)
    if not encoded.observed.any():
        raise InvalidTableError(
            "the table has no column that can be modelled: all are excluded, empty or free text"
        )
    provenance = {
        "rows": len(frame),
        "array_input": container == "numpy",
        "indicator_columns": [n for n in frame.columns if encoder.missing(frame[n]).any()],
    }
    return frame, encoder, encoded, provenance


def reproduce(run: str | os.PathLike[str], table: Any) -> ReMaskerImputer:
    """Train a run's winner again from its record: `remasker fit --from-run RUN`.

    The same cells are held out and the same seeds used, so on the same kind of machine the weights
    are the same; the table must be the run's own.
    """
    record = read_run(run)
    options = _table_options(record)
    frame, encoder, encoded, provenance = encode(table, options)
    if fingerprint(frame) != record["data"]["fingerprint"]:
        raise InvalidTableError(
            f"the table is not the one of {run}: its contents differ; give "
            f"{record['data']['source'] or 'the table that was tuned'}"
        )
    if not record.get("members"):
        raise ArtifactError(f"{run} has not finished: continue it with resume first")
    data = TrialData(
        table=encoded,
        holdout=draw_holdout(encoded.observed, record["search"]["random_state"]),
        metric=record["search"]["metric"],
    )
    members = []
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        for number, entry in enumerate(record["members"]):
            place = Path(folder) / str(number)
            config = {**entry["settings"], "seed": entry["seed"]}
            run_trial(config, data, lambda report: None, place)
            result = read_result(place, entry["settings"], data)
            assert result is not None
            members.append(result.member)
        refitted, stages, second = None, None, record.get("second_stage")
        if second is not None:
            seen = encoded if second["refitted"] else encoded.hide(data.holdout.all)
            effort = Effort(**{name: second[name] for name in Effort._fields if name in second})
            stages = two_stages(seen, members[0], data.device, effort=effort)
        elif record["refitted"]:
            copies = range(int(record["refitted"]))
            refitted = [refit_member(m, encoded, copy=k) for k in copies for m in members]
    provenance |= {"seed": members[0].seed}
    trust = record.get("trust")
    return assemble(
        encoder,
        data,
        members,
        refitted,
        provenance,
        stages,
        None if trust is None else np.array(trust),
    )


def _table_options(record: Mapping[str, Any]) -> dict[str, Any]:
    stored = dict(record["data"]["options"])
    for name in ("kinds", "bounds"):
        if isinstance(stored.get(name), list):
            stored[name] = {key: _pair(value) for key, value in stored[name]}
    if "missing_values" in stored and stored["missing_values"] is None:
        stored["missing_values"] = np.nan
    return stored


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# ---------------------------------------------------------------------- the record


def fingerprint(frame: pd.DataFrame) -> str:
    """A digest of a table's names, dtypes and contents.

    >>> one, other = pd.DataFrame({"a": [1.0, None]}), pd.DataFrame({"a": [1.0, 2.0]})
    >>> fingerprint(one) == fingerprint(one.copy()), fingerprint(one) == fingerprint(other)
    (True, False)
    """
    digest = hashlib.sha256()
    for name in frame.columns:
        series = frame[name]
        digest.update(f"{name!r}:{series.dtype}:{len(series)};".encode())
        try:
            codes = pd.util.hash_pandas_object(series, index=False).to_numpy()
            digest.update(np.ascontiguousarray(codes).tobytes())
        except TypeError:
            digest.update("\n".join(map(repr, series)).encode())
    return digest.hexdigest()


def machine() -> dict[str, Any]:
    """Where this runs.

    >>> machine()["cores"] >= 1
    True
    """
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "host": platform.node(),
    }


def versions() -> dict[str, str]:
    """What this runs on.

    >>> "torch" in versions()
    True
    """
    import remasker

    found = {"remasker": remasker.__version__, "python": platform.python_version()}
    for name in ("torch", "numba", "numpy", "scipy", "pandas", "scikit-learn", "ray", "optuna"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def plain(value: Any) -> Any:
    """A value as JSON can hold it; what is not a finite number becomes None.

    >>> plain({"a": np.float64("nan"), "b": (1, np.int64(2)), "c": {("x", 1): 3}})
    {'a': None, 'b': [1, 2], 'c': [[['x', 1], 3]]}
    """
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: plain(item) for key, item in value.items()}
        return [[plain(key), plain(item)] for key, item in value.items()]
    if isinstance(value, list | tuple | set | np.ndarray | pd.Index):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A record on disk, whole or not at all."""
    write_text(path, json.dumps(plain(content), indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """A text on disk, whole or not at all.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_text(Path(folder) / "a.txt", "whole")
    ...     (Path(folder) / "a.txt").read_text()
    'whole'
    """
    with atomic(path) as temporary:
        temporary.write_text(text)


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, which takes its place when the block succeeds."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"cannot write {path}: {error.strerror or error}") from error
    # Same ending as the target: writers go by it.
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise ArtifactError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def read_run(run: str | os.PathLike[str]) -> dict[str, Any]:
    """The record of a run."""
    path = Path(run) / RUN
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ArtifactError(f"{run} is not a run: it has no {RUN}") from None
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged: {error}") from None
    return record


def write_table(frame: Any, path: Path) -> None:
    """The completed table in the format that the path's ending names: Parquet, or else CSV."""
    frame = as_frame(frame)[0]
    with atomic(path) as temporary:
        if path.suffix in (".parquet", ".pq"):
            frame.to_parquet(temporary, index=False)
        else:
            separator = "\t" if path.suffix == ".tsv" else ","
            frame.to_csv(temporary, index=False, sep=separator)
