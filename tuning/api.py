"""One call from a table to the best model, its imputations and its record."""

from __future__ import annotations

import copy
import datetime
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import ray
from optuna.distributions import BaseDistribution, distribution_to_json, json_to_distribution

from remasker.containers import as_frame
from remasker.delimited import TextTable
from remasker.errors import make_config
from remasker.imputer import ReMaskerImputer
from remasker.table import EncodedTable
from remasker.training import Member
from tuning import export
from tuning.affordable import Budget
from tuning.choice import Choice, choose, outcome
from tuning.config import RunExistsError, SearchConfig
from tuning.folder import check_folder, locked, resumable, run_folder
from tuning.holdout import draw_holdout
from tuning.journal import records
from tuning.live import View
from tuning.ray_session import Pulse, ray_session
from tuning.report import render
from tuning.search import QUESTIONS, search
from tuning.second_stage import SecondStage
from tuning.selection import (
    ErrorReport,
    Selection,
    leaderboard,
)
from tuning.sharing import fair_share, read_names
from tuning.space import make_space
from tuning.trial import TrialData

Space = tuple[dict[str, BaseDistribution], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What a search gives."""

    name: str
    folder: Path
    #: The completed table, of the type that was given.
    imputed: Any
    #: Fitted; an ensemble is one imputer too.
    imputer: ReMaskerImputer
    #: A row per trial, best first.
    leaderboard: pd.DataFrame
    #: Measured on cells that took part in nothing else.
    error: ErrorReport
    selection: Selection

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the model to a directory of your own; `ReMaskerImputer.load` reads it."""
        return self.imputer.save(path)


def tune(
    table: Any,
    *,
    name: str = "table",
    kinds: Mapping[Hashable, str] | None = None,
    exclude: Sequence[Hashable] = (),
    bounds: Any = None,
    missing_values: object = np.nan,
    text: str = "ignore",
    source: str | None = None,
    **options: Any,
) -> TuneResult:
    """Search for the best model of a table; return it with the completed table.

    `options` are those of `SearchConfig`; `kinds`, `exclude`, `bounds`, `missing_values` and `text`
    are those of `ReMaskerImputer`. Everything is also written to `storage`/`name`. `source` is the
    path that the table was read from, for the record and for the format of the imputed table; a
    table of `remasker.files` also keeps its own way of writing.

    >>> tune(pd.DataFrame({"a": [1.0, None]}), trails=3)
    Traceback (most recent call last):
    remasker.errors.InvalidConfigError: unknown setting 'trails'; did you mean 'trials'?
    """
    config: SearchConfig = make_config(SearchConfig, options)
    table_options = {
        "kinds": kinds,
        "exclude": tuple(exclude),
        "bounds": bounds,
        "missing_values": missing_values,
        "text": text,
    }
    return _tune(
        table,
        name,
        config,
        table_options,
        source,
        Budget(config.seconds, second_stage=config.experts is not None),
    )


def _tune(
    table: Any,
    name: str,
    config: SearchConfig,
    table_options: dict[str, Any],
    source: str | None,
    budget: Budget,
) -> TuneResult:
    """Everything that can be refused is refused before anything is started or written."""
    file = table if hasattr(table, "render") and hasattr(table, "frame") else None
    table = table if file is None else file.frame
    frame, encoder, encoded, provenance = export.encode(table, table_options)
    folder = run_folder(config, name)
    space = make_space(config.space, len(encoded))
    check_folder(folder, config)
    with locked(folder), resumable(name, folder):
        record: dict[str, Any] = {
            "name": name,
            "state": "searching",
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": export.versions(),
            "machine": export.machine(),
            "data": _data_record(frame, encoded, table_options, source, file),
            "search": _search_record(config, space),
        }
        if (folder / export.RUN).is_file():
            record, space = _continue(folder, record, config, space)
        seed = record["search"]["random_state"]
        data = TrialData(
            table=encoded,
            holdout=draw_holdout(encoded.observed, seed),
            metric=record["search"]["metric"],
            device=config.trial_device,
            checkpoint_seconds=config.checkpoint_seconds,
        )
        export.write_json(folder / export.RUN, record)
        with (
            ray_session(config),
            Pulse(QUESTIONS | {"sharing": partial(read_names, config.sharing)}, folder) as pulse,
            View(config, name, budget, _mean_error(data)) as view,
        ):
            check_nodes(config)
            study = search(
                data,
                config,
                folder,
                budget,
                pulse,
                space=space,
                seed=seed,
                share=lambda slots: fair_share(slots, pulse["sharing"], name),
                tell=view.tell,
            )
            view.tell("stage", {"text": "choosing the best and completing the table"})
            choice = choose(study, space[1], folder, data, config, budget, view)
        trials = choice.selection.chosen
        provenance |= {"seed": choice.members[0].seed, "run": name, "trials": list(trials)}
        if file is not None:
            # So that `remasker impute` reads other files as this one was read.
            provenance["file"] = {"name": Path(source or name).name, **file.memory}
        imputer = export.assemble(
            encoder,
            data,
            choice.members,
            choice.refitted,
            provenance,
            None if choice.second is None else choice.second.ensemble,
            choice.trust,
        )
        on_all_cores = copy.copy(imputer).set_params(n_jobs=-1)
        result = TuneResult(
            name=name,
            folder=folder,
            imputed=on_all_cores.transform(table),
            imputer=imputer,
            leaderboard=leaderboard(records(study, space[1])),
            error=outcome(data, encoder, choice),
            selection=choice.selection,
        )
        record |= {
            "state": "finished",
            "seconds": round(budget.spent, 1),
            **_choice_record(choice),
            "error": _error_record(result.error),
        }
        _write(result, record, frame, source, file)
    return result


# ---------------------------------------------------------------------- before


def check_nodes(config: SearchConfig) -> None:
    """Ask every node of a cluster before a search; one machine needs no questions."""
    from tuning.preflight import preflight

    if sum(node["Alive"] for node in ray.nodes()) > 1:
        preflight(config.storage, {"CPU": config.cpus_per_trial, "GPU": config.gpus_per_trial})


def _data_record(
    frame: pd.DataFrame,
    encoded: EncodedTable,
    table_options: Mapping[str, Any],
    source: str | None,
    file: Any,
) -> dict[str, Any]:
    return {
        "source": source,
        "fingerprint": export.fingerprint(frame),
        "rows": len(frame),
        "columns": [str(column) for column in frame.columns],
        "missing_cells": int((~encoded.observed).sum()),
        "options": {k: v for k, v in table_options.items() if v is not None},
        "reading": vars(file.options) if isinstance(file, TextTable) else None,
    }


def _search_record(config: SearchConfig, space: Space) -> dict[str, Any]:
    return {
        "random_state": config.random_state,
        "metric": config.metric,
        "trials": config.trials,
        "time_budget": config.time_budget,
        "refit": config.refit,
        "experts": config.experts,
        "max_members": config.max_members,
        "space": {name: distribution_to_json(d) for name, d in space[0].items()},
        "fixed": space[1],
    }


def _continue(
    folder: Path, record: dict[str, Any], config: SearchConfig, space: Space
) -> tuple[dict[str, Any], Space]:
    """A run that goes on keeps its cells, its metric and its space; only the limits are new."""
    old = export.read_run(folder)
    if old["data"]["fingerprint"] != record["data"]["fingerprint"]:
        raise RunExistsError(
            f"{folder} belongs to another table: its contents differ; choose another name"
        )
    stored = {k: json_to_distribution(d) for k, d in old["search"]["space"].items()}
    if config.space is not None and (stored, old["search"]["fixed"]) != space:
        raise RunExistsError(
            f"{folder} searched another space; leave space out to continue it, or choose another "
            "name"
        )
    kept = {key: old["search"][key] for key in ("random_state", "metric", "space", "fixed")}
    record["search"] |= kept
    record["created"] = old["created"]
    return record, (stored, old["search"]["fixed"])


# ---------------------------------------------------------------------- after


def _mean_error(data: TrialData) -> float:
    judge = data.judge(data.holdout.judge)
    return judge.error(judge.losses(judge.baseline()))


def _choice_record(choice: Choice) -> dict[str, Any]:
    second = choice.second
    return {
        "members": [
            {"trial": number, "seed": m.seed, "epochs": m.epochs, "settings": _settings(m)}
            for number, m in zip(choice.selection.chosen, choice.members, strict=True)
        ],
        "selection": vars(choice.selection),
        "second_stage": None
        if second is None
        else {
            "gain": second.gain,
            "refitted": second.refitted,
            **second.effort._asdict(),
            "experts": _weights(second),
        },
        "trust": choice.trust,
        "refitted": choice.n_copies,
    }


def _weights(second: SecondStage) -> list[dict[str, Any]]:
    """What the experts and the model weigh in each column, and what the model adds to them."""
    return [record for experts in second.ensemble.experts for record in experts.weights_table()]


def _settings(member: Member) -> dict[str, Any]:
    return {**vars(member.model_config), **vars(member.training_config)}


def _error_record(error: ErrorReport) -> dict[str, Any]:
    columns = error.columns.reset_index().to_dict(orient="records")
    return {**{k: v for k, v in vars(error).items() if k != "columns"}, "columns": columns}


def _write(
    result: TuneResult,
    record: Mapping[str, Any],
    frame: pd.DataFrame,
    source: str | None,
    file: Any,
) -> None:
    folder = result.folder
    result.imputer.save(folder / export.MODEL)
    ending = "".join(Path(source).suffixes[-2:]) if source else ".csv"
    target = folder / f"imputed{ending or '.csv'}"
    if file is None:
        export.write_table(result.imputed, target)
    else:
        with export.atomic(target) as path:
            path.write_bytes(file.render(result.imputed, str(target)))
    with export.atomic(folder / export.LEADERBOARD) as path:
        result.leaderboard.to_csv(path, index=False)
    completed, _ = as_frame(result.imputed)
    page = render(export.plain(record), result.leaderboard, frame, completed, result.imputer)
    export.write_text(folder / export.REPORT, page)
    # Last: a record that says "finished" means that everything above is there.
    export.write_json(folder / export.RUN, record)
