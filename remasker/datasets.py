"""The twelve datasets of the paper, by name.

Nothing is shipped but diabetes, which comes with scikit-learn: the others are read from a
directory of CSV files (`NAME.csv`, the target among the columns) or downloaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pandas as pd

from remasker.errors import InvalidConfigError, RemaskerError, nearest

Task: TypeAlias = Literal["classification", "regression"]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A table of features, and the target that its rows are meant to predict.

    Categorical features have the dtype `category`, with sorted categories, and so has the target
    of a classification; everything else is numeric.

    >>> diabetes = load("diabetes")
    >>> diabetes.name, diabetes.task, diabetes.table.shape, diabetes.target.name
    ('diabetes', 'regression', (442, 10), 'target')
    """

    name: str
    table: pd.DataFrame
    target: pd.Series
    task: Task


def names() -> list[str]:
    """The datasets that `load` knows.

    >>> names()[:3]
    ['bike', 'california', 'climate']
    >>> len(names())
    12
    """
    return sorted(_SOURCES)


def load(name: str, directory: str | os.PathLike[str] | None = None) -> Dataset:
    """Read one of the twelve datasets.

    `NAME.csv` is looked for in `directory`, in the directory that the environment variable
    REMASKER_DATA names, and in `../shared/data`; an empty cell or a `?` is a gap (only credit
    has any). Without a file, diabetes comes from scikit-learn (in its original units), and the
    others are downloaded from OpenML (california from where scikit-learn gets it) into
    scikit-learn's data home.

    Written without a network: **the download has been tested against imitations only**. The
    numbers and names on OpenML are taken from public code that uses them. A download may differ
    from the files of the benchmark in the order of rows and in the labels of the target, and
    spam has one row more (4601), so frozen masks belong to the files.

    >>> load("diabetes").table[["age", "sex", "bmi"]].head(2)
        age  sex   bmi
    0  59.0  2.0  32.1
    1  48.0  1.0  21.6
    """
    if name not in _SOURCES:
        raise InvalidConfigError(
            f"dataset: expected one of {', '.join(names())}, got {name!r}{nearest(name, names())}"
        )
    source = _SOURCES[name]
    for folder in _folders(directory):
        path = folder / f"{name}.csv"
        if path.is_file():
            frame = pd.read_csv(path, keep_default_na=False, na_values=["", "?"])
            absent = [column for column in source.columns if column not in frame]
            if absent:
                raise RemaskerError(
                    f"{path}: expected a column {absent[0]!r}; "
                    f"the columns of {name} are {', '.join(source.columns)}"
                )
            return _dataset(name, source, frame[source.columns])
    try:
        frame = source.fetch().frame
    except (OSError, ValueError) as error:  # no network; a refusal by OpenML is a ValueError
        raise RemaskerError(
            f"dataset {name!r}: no {name}.csv in {', '.join(map(str, _folders(directory)))}, and "
            f"the download failed ({error}); connect to the network, or set REMASKER_DATA to a "
            f"directory that holds {name}.csv"
        ) from error
    return _dataset(name, source, _with_our_names(name, source, frame))


@dataclass(frozen=True, kw_only=True)
class _Source:
    task: Task
    features: list[str]
    target: str
    target_there: str  # the target's name where `fetch` gets it
    fetch: Callable[[], Any]
    categorical: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str]:
        return [*self.features, self.target]


def _folders(directory: str | os.PathLike[str] | None) -> list[Path]:
    if directory is not None and not Path(directory).is_dir():
        raise InvalidConfigError(f"directory: {os.fspath(directory)!r} is not a directory")
    candidates = (directory, os.environ.get("REMASKER_DATA"), Path("../shared/data"))
    return [Path(candidate) for candidate in candidates if candidate]


def _dataset(name: str, source: _Source, frame: pd.DataFrame) -> Dataset:
    labels = {*source.categorical}
    if source.task == "classification":
        labels.add(source.target)
    typed = frame.copy()
    for column in source.columns:
        # By way of objects: the categories are then those that occur, in sorted order.
        values = frame[column].astype(object)
        if column in labels:
            typed[column] = values.astype("category")
        elif not pd.api.types.is_numeric_dtype(frame[column].dtype):
            try:
                typed[column] = pd.to_numeric(values)
            except (TypeError, ValueError) as error:
                raise RemaskerError(
                    f"dataset {name!r}: column {column!r} must hold numbers ({error})"
                ) from error
    return Dataset(
        name=name, table=typed[source.features], target=typed[source.target], task=source.task
    )


def _with_our_names(name: str, source: _Source, frame: pd.DataFrame) -> pd.DataFrame:
    """The downloaded columns in our order and under our names; other columns are dropped."""

    def plain(column: object) -> str:  # "Wind speed (m/s)" and "wind_speed" are the same
        return re.sub(r"\(.*?\)|[^a-z0-9]", "", str(column).lower())

    there = {plain(column): column for column in frame.columns}
    found = [there.get(plain(column)) for column in source.features]
    if source.target_there in frame and None in found:
        # Other names altogether: then it must be the same columns in the same order.
        found = [column for column in frame.columns if column != source.target_there]
    if source.target_there not in frame or len(found) != len(source.features):
        raise RemaskerError(
            f"dataset {name!r}: the download has other columns than expected "
            f"({', '.join(map(str, frame.columns))}); set REMASKER_DATA to a directory that "
            f"holds {name}.csv"
        )
    return frame[[*found, source.target_there]].set_axis(source.columns, axis=1)


def _from_openml(**dataset: int | str) -> Any:
    from sklearn.datasets import fetch_openml

    return fetch_openml(**dataset, as_frame=True, parser="auto", n_retries=1)


def _california() -> Any:
    from sklearn.datasets import fetch_california_housing

    return fetch_california_housing(as_frame=True)


def _diabetes() -> Any:
    from sklearn.datasets import load_diabetes

    return load_diabetes(as_frame=True, scaled=False)


_SOURCES = {
    "bike": _Source(
        task="classification",
        features=[
            *("rented_bike_count", "hour", "temperature", "humidity", "wind_speed", "visibility"),
            *("dew_point_temperature", "solar_radiation", "rainfall", "snowfall", "seasons"),
            "holiday",
        ],
        categorical=("seasons", "holiday"),
        target="functioning_day",
        target_there="Functioning Day",
        fetch=partial(_from_openml, data_id=46328),  # seoul_bike_sharing_demand_cat
    ),
    "california": _Source(
        task="regression",
        features=[
            *("MedInc", "HouseAge", "AveRooms", "AveBedrms", "Population", "AveOccup"),
            *("Latitude", "Longitude"),
        ],
        target="MedHouseVal",
        target_there="MedHouseVal",
        fetch=_california,
    ),
    "climate": _Source(
        task="classification",
        features=[
            *("vconst_corr", "vconst_2", "vconst_3", "vconst_4", "vconst_5", "vconst_7"),
            *("ah_corr", "ah_bolus", "slm_corr", "efficiency_factor", "tidal_mix_max"),
            *("vertical_decay_scale", "convect_corr", "bckgrnd_vdc1", "bckgrnd_vdc_ban"),
            *("bckgrnd_vdc_eq", "bckgrnd_vdc_psim", "Prandtl"),
        ],
        target="outcome",
        target_there="outcome",
        fetch=partial(_from_openml, data_id=40994),  # climate-model-simulation-crashes
    ),
    "compressive": _Source(
        task="regression",
        features=[
            *("cement", "slag", "fly_ash", "water", "superplasticizer", "coarse_aggregate"),
            *("fine_aggregate", "age"),
        ],
        target="strength",
        target_there="strength",
        fetch=partial(_from_openml, data_id=44959),  # concrete_compressive_strength
    ),
    "credit": _Source(
        task="classification",
        features=[f"A{number}" for number in range(1, 16)],
        categorical=("A1", "A4", "A5", "A6", "A7", "A9", "A10", "A12", "A13"),
        target="A16",
        target_there="class",
        fetch=partial(_from_openml, data_id=29),  # credit-approval
    ),
    "diabetes": _Source(
        task="regression",
        features=["age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6"],
        target="target",
        target_there="target",
        fetch=_diabetes,
    ),
    "letter": _Source(
        task="classification",
        features=[
            *("x_box", "y_box", "width", "high", "onpix", "x_bar", "y_bar", "x2bar", "y2bar"),
            *("xybar", "x2ybr", "xy2br", "x_ege", "xegvy", "y_ege", "yegvx"),
        ],
        target="letter",
        target_there="class",
        fetch=partial(_from_openml, data_id=6),  # letter
    ),
    "obesity": _Source(
        task="classification",
        features=[
            *("Gender", "Age", "Height", "Weight", "family_history_with_overweight", "FAVC"),
            *("FCVC", "NCP", "CAEC", "SMOKE", "CH2O", "SCC", "FAF", "TUE", "CALC", "MTRANS"),
        ],
        categorical=(
            *("Gender", "family_history_with_overweight", "FAVC", "CAEC", "SMOKE", "SCC"),
            *("CALC", "MTRANS"),
        ),
        target="NObesity",
        target_there="NObeyesdad",
        fetch=partial(_from_openml, data_id=46597),  # Estimation_of_Obesity_Levels
    ),
    "raisin": _Source(
        task="classification",
        features=[
            *("Area", "MajorAxisLength", "MinorAxisLength", "Eccentricity", "ConvexArea"),
            *("Extent", "Perimeter"),
        ],
        target="Class",
        target_there="Class",
        fetch=partial(_from_openml, name="Raisin", version=1),
    ),
    "spam": _Source(
        task="classification",
        features=[f"f{number}" for number in range(57)],
        target="spam",
        target_there="class",
        fetch=partial(_from_openml, data_id=44),  # spambase
    ),
    "wine": _Source(
        task="classification",
        features=[
            *("fixed acidity", "volatile acidity", "citric acid", "residual sugar", "chlorides"),
            *("free sulfur dioxide", "total sulfur dioxide", "density", "pH", "sulphates"),
            "alcohol",
        ],
        target="quality",
        target_there="class",
        fetch=partial(_from_openml, data_id=40691),  # wine-quality-red
    ),
    "yacht": _Source(
        task="regression",
        features=[
            *("buoyancy_position", "prismatic_coef", "length_displacement", "beam_draught"),
            *("length_beam", "froude"),
        ],
        target="resistance",
        target_there="Residuary.resistance",
        fetch=partial(_from_openml, data_id=42370),  # yacht_hydrodynamics
    ),
}
