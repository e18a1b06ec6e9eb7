import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest

from remasker import ArtifactError, ReMaskerImputer

TINY = {"width": 8, "encoder_depth": 1, "decoder_depth": 1, "epochs": 2, "random_state": 0}


@pytest.fixture(scope="module")
def table():
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "a": random.normal(size=50),
            "b": random.choice(["x", "y", "z"], size=50),
            "when": pd.Timestamp("2024-01-01", tz="Europe/Rome")
            + pd.to_timedelta(random.integers(1000, size=50), unit="h"),
            "flag": random.random(50) > 0.5,
        }
    )
    frame["flag"] = frame["flag"].astype("boolean")
    return frame.mask(random.random(frame.shape) < 0.2)


@pytest.fixture(scope="module")
def imputer(table, one_stack):
    return ReMaskerImputer(
        **TINY, n_members=2, value_encoding="piecewise_linear", bounds={"a": (-1, None)}
    ).fit(table)


@pytest.fixture
def saved(imputer, tmp_path):
    return imputer.save(tmp_path / "models" / "mine")


def test_save_then_load_in_another_process_gives_the_same(imputer, saved, table, tmp_path):
    table.to_parquet(tmp_path / "table.parquet")
    code = f"""
import pandas as pd, sys
from remasker import ReMaskerImputer
imputer = ReMaskerImputer.load({str(saved)!r})
table = pd.read_parquet({str(tmp_path / "table.parquet")!r})
imputer.transform(table).to_parquet({str(tmp_path / "completed.parquet")!r})
assert not {{"ray", "optuna"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    expected = imputer.transform(table)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "completed.parquet"), expected)


def test_draws_and_intervals_survive_too(imputer, saved, table):
    loaded = ReMaskerImputer.load(saved)
    for ours, theirs in zip(imputer.intervals(table), loaded.intervals(table), strict=True):
        pd.testing.assert_frame_equal(ours, theirs)
    pd.testing.assert_frame_equal(
        imputer.draw(table, n_draws=1, random_state=0)[0],
        loaded.draw(table, n_draws=1, random_state=0)[0],
    )


def test_the_manifest_says_what_it_is(saved):
    assert sorted(os.listdir(saved)) == ["model.json", "weights.safetensors"]
    manifest = json.loads((saved / "model.json").read_text())
    assert manifest["format"] == 2
    assert len(manifest["members"]) == 2
    assert manifest["provenance"]["rows"] == 50
    assert [c["kind"] for c in manifest["schema"]["columns"]] == [
        "number", "category", "datetime", "boolean",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "model.json").unlink(), "is not a saved model: it has no model.json"),
        (lambda p: (p / "model.json").write_text('{"form'), "is damaged .*; save the model again"),
        (lambda p: (p / "weights.safetensors").unlink(), "is damaged .*; save the model again"),
        (lambda p: _truncate(p / "weights.safetensors"), "is damaged .*; save the model again"),
        (lambda p: _edit(p, "format", 99), "has format 99, this library reads format 2; install"),
        (lambda p: _edit(p, "members.0.model.width", 16), "the weights do not fit the config"),
        (lambda p: _edit(p, "members.0.model.widht", 16), "unknown setting 'widht'; did you mean"),
        (lambda p: _edit(p, "members.0.model.width", -1), "is damaged .*; save the model again"),
    ],
)
def test_a_damaged_artifact_says_what_to_do(saved, damage, message):
    damage(saved)
    with pytest.raises(ArtifactError, match=message):
        ReMaskerImputer.load(saved)


def _truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _edit(path, keys, value):
    manifest = json.loads((path / "model.json").read_text())
    *parents, last = keys.split(".")
    place = manifest
    for key in parents:
        place = place[int(key)] if key.isdigit() else place[key]
    place[last] = value
    (path / "model.json").write_text(json.dumps(manifest))


def test_a_model_replaces_a_model_and_nothing_else(imputer, saved, tmp_path):
    imputer.save(saved)
    assert sorted(os.listdir(saved.parent)) == ["mine"]
    (tmp_path / "photos").mkdir()
    with pytest.raises(ArtifactError, match="exists and is not a saved model; choose another path"):
        imputer.save(tmp_path / "photos")


def test_an_unwritable_place_is_one_sentence(imputer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"cannot write .*model"):
        imputer.save(tmp_path / "file" / "model")


@pytest.mark.slow
def test_killed_while_saving_leaves_a_whole_model(saved):
    """A process that saves over and over is killed at an arbitrary moment."""
    code = f"""
from remasker import ReMaskerImputer
imputer = ReMaskerImputer.load({str(saved)!r})
print("ready", flush=True)
while True:
    imputer.save({str(saved)!r})
"""
    for pause in (0.02, 0.11):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(pause)
            process.send_signal(signal.SIGKILL)
        assert ReMaskerImputer.load(saved).provenance_["rows"] == 50


def test_no_pickle_in_the_library():
    import ast
    import pathlib

    import remasker

    for source in pathlib.Path(remasker.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
            assert not {"pickle", "cloudpickle", "dill"} & set(names), source
            # joblib runs processes here; what it reads from files is pickle.
            joblib = {name for name in names if name.split(".")[0] == "joblib"} - {"joblib"}
            assert joblib <= {f"joblib.{n}" for n in ("Parallel", "delayed", "effective_n_jobs")}
            assert not (isinstance(node, ast.Import) and "joblib" in names), source
