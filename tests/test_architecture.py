"""Dependencies point down: who may import whom, held by parsing the imports."""

import ast
from pathlib import Path

import pytest

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
    "lanes": set(),
    "kernels": {"lanes"},
    "blocks": {"kernels"},
    "optimizer": {"lanes"},
    "model": {"blocks", "errors"},
    "memory": {"errors", "model"},
    "training": {"errors", "masking", "memory", "model", "optimizer", "table"},
    "progress": {"training"},
    "gaussian_process": set(),
    "expert_models": {"errors", "gaussian_process"},
    "stacking": set(),
    "experts": {"errors", "expert_models", "gaussian_process", "stacking", "table"},
    "expert_fitting": {"expert_models", "experts", "gaussian_process", "stacking", "table"},
    "inference": {"experts", "model", "table", "training"},
    "artifact": {"errors", "experts", "inference", "model", "table", "training"},
    "fitting": {
        "errors", "expert_fitting", "expert_models", "holdout", "inference", "model", "table",
        "training",
    },
    "imputer": {
        "artifact", "containers", "errors", "fitting", "inference", "model", "progress", "table",
        "training",
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
