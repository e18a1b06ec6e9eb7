from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import numpy as np
import pandas as pd
import pytest
import sklearn.datasets

from remasker.datasets import load, names
from remasker.errors import InvalidConfigError, RemaskerError
from remasker.metrics import protocol_scale

SHARED = Path(__file__).parents[2] / "shared"

needs_shared_files = pytest.mark.skipif(
    not (SHARED / "data" / "datasets.json").exists(), reason=f"no datasets in {SHARED / 'data'}"
)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without data beside it, and no network."""

    def offline(*_: object, **__: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", offline)
    monkeypatch.setattr(sklearn.datasets, "fetch_california_housing", offline)
    monkeypatch.delenv("REMASKER_DATA", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def download(monkeypatch: pytest.MonkeyPatch, frame: pd.DataFrame) -> dict[str, Any]:
    """Let OpenML answer with `frame`; what it was asked for ends in the returned dictionary."""
    asked: dict[str, Any] = {}

    def answer(**question: object) -> SimpleNamespace:
        asked.update(question)
        return SimpleNamespace(frame=frame)

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", answer)
    return asked


def write_yacht(folder: Path, resistance: float) -> None:
    features = (
        "buoyancy_position prismatic_coef length_displacement beam_draught length_beam froude"
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "yacht.csv").write_text(
        ",".join([*features.split(), "resistance"]) + f"\n1,2,3,4,5,6,{resistance}\n"
    )


# --- the files ------------------------------------------------------------------------------


@needs_shared_files
@pytest.mark.parametrize("name", [name for name in names() if name != "diabetes"])
def test_agrees_with_the_description_of_the_files(name: str) -> None:
    described = json.loads((SHARED / "data" / "datasets.json").read_text())[name]
    dataset = load(name, SHARED / "data")
    table = dataset.table
    assert table.shape == (described["rows"], described["features"])
    assert dataset.target.name == described["target"]
    assert dataset.task == described["task"]
    assert list(table.select_dtypes("category")) == described["categorical"]
    numeric = table.drop(columns=described["categorical"])
    assert all(pd.api.types.is_numeric_dtype(dtype) for dtype in numeric.dtypes)
    assert table.isna().sum().sum() == described["naturally_missing"]
    assert (dataset.target.dtype == "category") == (dataset.task == "classification")
    assert dataset.target.notna().all()


@needs_shared_files
@pytest.mark.parametrize("name", names())
def test_rows_are_those_of_the_frozen_masks(name: str) -> None:
    with np.load(SHARED / "bench" / "masks.npz") as frozen:
        expected = frozen[f"{name}|X"]
    found = protocol_scale(load(name, SHARED / "data").table.dropna())
    np.testing.assert_allclose(found, expected, atol=2e-6)


# --- where they are looked for --------------------------------------------------------------


def test_the_twelve() -> None:
    assert len(names()) == len(set(names())) == 12
    assert names() == sorted(names())


def test_diabetes_needs_no_file(nowhere: Path) -> None:
    dataset = load("diabetes")
    assert dataset.task == "regression"
    assert dataset.table.shape == (442, 10)
    assert dataset.target.iloc[0] == 151
    with pytest.raises(dataclasses.FrozenInstanceError):
        dataset.name = "other"  # type: ignore[misc]


def test_directory_goes_before_environment_before_shared(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_yacht(nowhere / "../shared/data", 3.0)
    assert load("yacht").target.tolist() == [3.0]
    write_yacht(nowhere / "environment", 2.0)
    monkeypatch.setenv("REMASKER_DATA", str(nowhere / "environment"))
    assert load("yacht").target.tolist() == [2.0]
    write_yacht(nowhere / "argument", 1.0)
    assert load("yacht", nowhere / "argument").target.tolist() == [1.0]


def test_question_marks_and_empty_cells_are_gaps_and_none_is_a_word(nowhere: Path) -> None:
    header = ",".join(f"A{number}" for number in range(1, 17))
    (nowhere / "credit.csv").write_text(
        f"{header}\nNA,30.5,0,u,g,w,v,1,t,t,1,f,g,202,0,+\n?,?,0,,g,w,v,1,t,t,1,f,g,202,0,-\n"
    )
    table = load("credit", nowhere).table
    assert (
        table.isna().sum().to_dict() | {"A1": 1, "A2": 1, "A4": 1} == table.isna().sum().to_dict()
    )
    assert table.isna().sum().sum() == 3
    assert list(table["A1"].cat.categories) == ["NA"]
    assert table["A2"].dtype == float


# --- the download ---------------------------------------------------------------------------


def test_download_under_other_spellings_with_more_columns(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = pd.DataFrame(
        {
            "Hour": [0, 1],
            "Temperature(C)": [-5.2, -5.5],
            "Humidity(%)": [37, 38],
            "Wind speed (m/s)": [2.2, 0.8],
            "Visibility (10m)": [2000, 2000],
            "Dew point temperature(C)": [-17.6, -17.6],
            "Solar Radiation (MJ/m2)": [0.0, 0.0],
            "Rainfall(mm)": [0.0, 0.0],
            "Snowfall (cm)": [0.0, 0.0],
            "Seasons": pd.Categorical(["Winter", "Summer"], ["Winter", "Summer", "Never"]),
            "Holiday": ["No Holiday", "Holiday"],
            "Functioning Day": ["Yes", "No"],
            "day": [1, 1],
            "rented_bike_count": [254, 204],
        }
    )
    asked = download(monkeypatch, frame)
    dataset = load("bike")
    assert asked["data_id"] == 46328
    assert list(dataset.table)[:3] == ["rented_bike_count", "hour", "temperature"]
    assert "day" not in dataset.table
    assert dataset.table["wind_speed"].tolist() == [2.2, 0.8]
    assert list(dataset.table["seasons"].cat.categories) == ["Summer", "Winter"]
    assert dataset.target.tolist() == ["Yes", "No"]


def test_download_under_other_names_in_the_same_order(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = pd.DataFrame([[1, 2, 3, 4, 5, 6, 7.5]], columns=[*"uvwxyz", "Residuary.resistance"])
    asked = download(monkeypatch, frame)
    dataset = load("yacht")
    assert asked["data_id"] == 42370
    assert dataset.table["froude"].tolist() == [6]
    assert dataset.target.name == "resistance"
    assert dataset.target.tolist() == [7.5]


@pytest.mark.parametrize("columns", [[*"uvwxyz", "y"], [*"uvw", "Residuary.resistance"]])
def test_download_of_something_else(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, columns: list[str]
) -> None:
    download(monkeypatch, pd.DataFrame([range(len(columns))], columns=columns))
    with pytest.raises(RemaskerError) as error:
        load("yacht")
    assert str(error.value) == (
        "dataset 'yacht': the download has other columns than expected "
        f"({', '.join(columns)}); set REMASKER_DATA to a directory that holds yacht.csv"
    )


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["california", "raisin"])
def test_offline(nowhere: Path, name: str) -> None:
    with pytest.raises(RemaskerError) as error:
        load(name, nowhere)
    assert str(error.value) == (
        f"dataset '{name}': no {name}.csv in {nowhere}, ../shared/data, and the download failed "
        "(<urlopen error no route to host>); connect to the network, or set REMASKER_DATA to a "
        f"directory that holds {name}.csv"
    )


def test_unknown_name() -> None:
    with pytest.raises(InvalidConfigError) as error:
        load("whine")
    assert str(error.value) == (
        "dataset: expected one of bike, california, climate, compressive, credit, diabetes, "
        "letter, obesity, raisin, spam, wine, yacht, got 'whine'; did you mean 'wine'?"
    )


def test_unusable_files(nowhere: Path) -> None:
    with pytest.raises(InvalidConfigError, match="directory: 'no/such' is not a directory"):
        load("yacht", "no/such")
    write_yacht(nowhere, 1.0)
    path = nowhere / "yacht.csv"
    path.write_text(path.read_text().replace("1,2,3", "1,two,3"))
    with pytest.raises(RemaskerError, match="column 'prismatic_coef' must hold numbers"):
        load("yacht", nowhere)
    path.write_text(path.read_text().replace("froude", "speed"))
    with pytest.raises(RemaskerError) as error:
        load("yacht", nowhere)
    assert str(error.value) == (
        f"{path}: expected a column 'froude'; the columns of yacht are buoyancy_position, "
        "prismatic_coef, length_displacement, beam_draught, length_beam, froude, resistance"
    )
