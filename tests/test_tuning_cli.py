"""The commands of the search, called as `tuning.cli` calls them."""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from remasker.errors import ArtifactError, InvalidConfigError
from remasker.imputer import ReMaskerImputer
from tuning.tune_cli import add_commands, fit_from_run, parse_space

SPACE = ["width=8", "encoder_depth=1", "decoder_depth=1", "epochs=2..3"]


def call(*words: object) -> int:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    args = parser.parse_args([str(word) for word in words])
    code: int = args.run(args)
    return code


@pytest.mark.parametrize("word", ["width", "width=", "=3"])
def test_a_space_that_says_nothing_is_refused(word: str) -> None:
    with pytest.raises(InvalidConfigError):
        parse_space([word])


@pytest.mark.slow
def test_from_a_file_to_a_model_and_back(
    one_ray: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"a": rng.normal(size=120), "id": [f"row {k}" for k in range(120)]})
    table["b"] = table["a"] * 2
    table.loc[rng.random(120) < 0.3, "b"] = np.nan
    data = tmp_path / "mine.csv"
    table.to_csv(data, index=False, sep=";", decimal=",", na_rep="-999")
    words = ["tune", data, "--trials", 2, "--time-budget", "none", "--storage", tmp_path / "runs"]
    words += ["--na", "-999", "--bounds", "b=-1:1"]
    for word in SPACE:
        words += ["--space", word]
    run = tmp_path / "runs" / "mine"
    with pytest.warns(UserWarning, match="identifier"):
        assert call(*words) == 0
    assert str(run) in capsys.readouterr().out
    with pytest.raises(InvalidConfigError, match="already holds a run"):
        call(*words)

    assert call("leaderboard", run) == 0
    assert "complete" in capsys.readouterr().out
    assert call("export", run, "-o", tmp_path / "model") == 0
    exported = ReMaskerImputer.load(tmp_path / "model")
    with pytest.warns(UserWarning, match="identifier"):
        repeated = ReMaskerImputer.load(fit_from_run(run, tmp_path / "again"))
    filled = [model.transform(table)["b"].to_numpy() for model in (exported, repeated)]
    assert np.allclose(*filled, atol=1e-5)
    written = pd.read_csv(run / "imputed.csv", sep=";", decimal=",")
    assert np.allclose(written["b"], filled[0], atol=1e-5)
    assert written["b"][table["b"].isna()].between(-1, 1).all()
    assert written["id"].tolist() == table["id"].tolist()

    (run / "model" / "model.json").unlink()
    with pytest.raises(ArtifactError):
        call("export", run, "-o", tmp_path / "other")
