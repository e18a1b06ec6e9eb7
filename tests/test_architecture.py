"""Dependencies point down: who may import whom, held by parsing the imports."""

import ast
import inspect
from pathlib import Path

import pytest

import remasker
import tuning

ROOT = Path(__file__).parent.parent

#: Each module with what it may import from this project; everything else is a step upwards.
ALLOWED = {
    "errors": set(),
    "columns": {"errors"},
    "containers": {"errors"},
    "filling": {"columns", "errors"},
    "schema": {"columns"},
    "table": {"columns", "errors", "filling", "schema"},
    "cells": {"errors"},
    "delimited": {"cells", "columns", "errors"},
    "files": {"columns", "delimited", "errors"},
    "masking": {"errors"},
    "holdout": set(),
    "tasks": {"errors"},
    "lanes": set(),
    "kernels": {"lanes"},
    "blocks": {"kernels"},
    "optimizer": {"lanes"},
    "model": {"blocks", "errors"},
    "memory": {"errors", "model"},
    "training": {"errors", "masking", "memory", "model", "optimizer", "table"},
    "progress": {"training"},
    "gaussian_process": set(),
    "trees": {"gaussian_process", "lanes"},
    "expert_models": {"errors", "gaussian_process", "trees"},
    "stacking": set(),
    "experts": {"errors", "expert_models", "gaussian_process", "stacking", "table", "trees"},
    "expert_fitting": {
        "expert_models", "experts", "gaussian_process", "stacking", "table", "tasks", "trees",
    },
    "inference": {"experts", "model", "table", "tasks", "training"},
    "artifact": {"errors", "experts", "inference", "model", "table", "training"},
    "fitting": {
        "expert_fitting", "expert_models", "holdout", "inference", "model", "table", "tasks",
        "training",
    },
    "imputer": {
        "artifact", "containers", "errors", "experts", "fitting", "inference", "model", "progress",
        "table", "tasks", "training",
    },
    "stream": {"delimited", "errors", "files", "imputer"},
    "metrics": {"errors"},
    "pooling": {"errors"},
    "missingness": {"errors", "metrics"},
    "datasets": {"errors"},
}  # fmt: skip


def imports(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def modules(package):
    return sorted(p for p in (ROOT / package).glob("*.py") if p.stem != "__init__")


@pytest.mark.parametrize("path", modules("remasker"), ids=lambda path: path.stem)
def test_the_imputer_depends_downwards_only(path):
    found = imports(path)
    roots = {name.split(".")[0] for name in found}
    assert not roots & {"ray", "optuna", "tuning", "benchmarks"}
    ours = {name.split(".")[1] for name in found if name.startswith("remasker.")}
    assert ours <= ALLOWED[path.stem]


@pytest.mark.parametrize("path", modules("tuning"), ids=lambda path: path.stem)
def test_nothing_imports_the_benchmarks(path):
    assert not any(name.startswith("benchmarks") for name in imports(path))


def test_what_is_public_has_an_example_that_runs():
    without = []
    for name, thing in [(n, getattr(p, n)) for p in (remasker, tuning) for n in p.__all__]:
        if isinstance(thing, type) and issubclass(thing, Exception):
            continue
        examples = {name: thing.__doc__ or ""}
        if isinstance(thing, type):
            for key, member in vars(thing).items():
                function = getattr(member, "__func__", member)
                if inspect.isfunction(function) and not key.startswith("_"):
                    examples[f"{name}.{key}"] = function.__doc__ or ""
            if len(examples) > 1:
                del examples[name]
        without += [key for key, text in examples.items() if ">>>" not in text]
    # A search needs Ray: its export is in tests/test_tuning_search.py.
    assert without == ["TuneResult.export"]
