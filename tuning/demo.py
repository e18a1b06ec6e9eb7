"""`remasker demo`: the whole way on a table of mixed kinds that is made up on the spot."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from remasker.files import TableFileError, read_table, write_bytes, write_table


def make_table(n_rows: int, seed: int = 0) -> pd.DataFrame:
    """Homes and the people in them: numbers, counts, categories, truth values and dates.

    >>> make_table(3).dtypes.map(str).tolist()
    ['float64', 'int64', 'str', 'str', 'bool', 'float64', 'datetime64[us]']
    """
    random = np.random.default_rng(seed)
    means = random.gamma(3.0, 1.0, n_rows)  # what the other columns have in common
    city = np.array(["Oslo", "Rome", "Lima"])[random.choice(3, n_rows, p=[0.3, 0.4, 0.3])]
    dearer = np.select([city == "Oslo", city == "Rome"], [1.6, 1.2], 0.8)
    area = 30 + 22 * means + random.normal(0, 6, n_rows)
    rooms = np.clip(np.rint(area / 24 + random.normal(0, 0.4, n_rows)), 1, None).astype(int)
    owner = random.random(n_rows) < 1 / (1 + np.exp(2.2 - 0.8 * means))
    price = area * dearer * (38 + 4 * owner) * np.exp(random.normal(0, 0.08, n_rows)) / 10
    heating = np.where(city == "Lima", "none", np.where(area > 95, "heat pump", "gas"))
    days = 7300 - 1500 * means + random.normal(0, 400, n_rows)
    built = pd.Timestamp("1990-01-01") + pd.to_timedelta(np.rint(days), unit="D")
    return pd.DataFrame(
        {
            "area": area.round(1),
            "rooms": rooms,
            "city": city,
            "heating": heating,
            "owner": owner,
            "price": price.round(2),
            "built": pd.Series(built).astype("datetime64[us]"),
        }
    )


def run_demo(
    folder: Path, n_rows: int, trials: int, time_budget: str, *, force: bool
) -> Iterator[str]:
    """Yield what there is to say, line by line, while it happens."""
    from remasker import simulate_missing
    from remasker.metrics import accuracy, rmse
    from tuning import tune

    earlier = (folder / "runs" / "gaps" / "run.json").is_file()
    if folder.exists() and any(folder.iterdir()) and not (force or earlier):
        raise TableFileError(f"{folder} exists and is not empty; give another place with -o")
    folder.mkdir(parents=True, exist_ok=True)
    truth = make_table(n_rows)
    write_bytes(truth.to_csv(index=False).encode(), str(folder / "truth.csv"))
    whole = read_table(str(folder / "truth.csv"))
    holed = simulate_missing(whole.frame, "MCAR", ratio=0.2, random_state=0)
    hidden = holed.isna().to_numpy()
    write_table(whole, holed, str(folder / "gaps.csv"))
    yield f"made a table of {n_rows} rows and 7 columns, and hid {hidden.sum()} of its cells"

    yield f"tuning: at most {trials} trials and {time_budget}, selecting and refitting included"
    gaps = read_table(str(folder / "gaps.csv"))
    shutil.rmtree(folder / "runs", ignore_errors=True)
    result = tune(
        gaps,
        name="gaps",
        storage=folder / "runs",
        trials=trials,
        time_budget=time_budget,
        source=str(folder / "gaps.csv"),
    )
    completed = result.imputed
    yield f"error on held-out cells, as far as observed cells can tell: {result.error}"

    yield "how close the filled cells are to the hidden truth:"
    yield f"  {'':<34}{'numbers: RMSE':>14}{'categories: right':>20}"
    for name, table in {
        "mean / most frequent level": _simple(gaps.frame, "mean"),
        "scikit-learn KNNImputer": _simple(gaps.frame, "knn"),
        "scikit-learn IterativeImputer": _simple(gaps.frame, "iterative"),
        "ReMasker": completed,
    }.items():
        error = rmse(whole.frame, table, hidden, convention="numeric")
        right = accuracy(whole.frame, table, hidden)
        yield f"  {name:<34}{error:>14.3f}{right:>20.0%}"
    yield "  (RMSE of each column on the scale of 0 to 1; smaller is closer)"
    yield f"the page about it:    {result.folder}/report.html"
    yield f"the completed table:  {result.folder}/imputed.csv"
    yield f"the exported model:   {result.folder}/model"
    yield f"next: remasker leaderboard {result.folder}; remasker describe {result.folder}/model"


def _simple(frame: pd.DataFrame, method: str) -> pd.DataFrame:
    """The same gaps filled by scikit-learn, categories as codes: what one would do without us."""
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer

    from remasker.table import TableEncoder

    encoder = TableEncoder().fit(frame)
    encoded = encoder.encode(frame)
    values = np.where(encoded.observed, encoded.values, np.nan)
    if method == "mean":
        filled = SimpleImputer().fit_transform(values)
        usual = SimpleImputer(strategy="most_frequent").fit_transform(values)
        filled = np.where(np.array(encoded.n_categories) > 0, usual, filled)
    else:
        make = KNNImputer() if method == "knn" else IterativeImputer(random_state=0)
        filled = make.fit_transform(values)
    top = np.array([n - 1 if n else np.inf for n in encoded.n_categories])
    filled = np.where(np.isfinite(top), np.clip(np.rint(filled), 0, top), filled)
    return encoder.complete(frame, filled)
