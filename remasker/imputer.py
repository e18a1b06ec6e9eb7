"""`ReMaskerImputer`: the masked autoencoder as a scikit-learn transformer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
from joblib import effective_n_jobs
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_feature_names_in, check_is_fitted

from remasker.artifact import load_artifact, save_artifact
from remasker.containers import as_frame, to_container
from remasker.errors import (
    InvalidConfigError,
    InvalidTableError,
    check_choice,
    check_integer,
    check_number,
)
from remasker.experts import CHUNK_ROWS
from remasker.fitting import (
    N_FOLDS,
    N_MEMBERS,
    below_experts,
    make_ensemble,
    make_plan,
    make_trainer,
    n_stacks,
    train_apart,
    train_here,
)
from remasker.inference import Ensemble
from remasker.model import ModelConfig
from remasker.progress import FitProgress
from remasker.table import EncodedTable, TableEncoder
from remasker.tasks import one_thread, side_by_side
from remasker.training import TrainingConfig, at_hand, resolve_device

PAPER = {
    "encoder_depth": 8,
    "decoder_depth": 4,
    "width": 64,
    "heads": 4,
    "mlp_ratio": 4.0,
    "value_encoding": "shared",
    "linear_skip": False,
    "positions": "sinusoidal",
    "output": "shared_tanh",
    "scaling": "minmax",
    "epochs": 600,
    "batch_size": 64,
    "learning_rate": 1e-3,
    "warmup": 40 / 600,
    "weight_decay": 0.0,
    "clip": 5.0,
    "masking": "uniform",
    "masking_ratio": 0.5,
    "loss": "all",
    "average": 0.0,
    "validation_fraction": 0.0,
    "patience": None,
    "n_members": 1,
    "experts": None,
}


class ReMaskerImputer(TransformerMixin, BaseEstimator):
    """Complete tables with a masked autoencoder.

    Parameters
    ----------
    encoder_depth, decoder_depth, width, heads, mlp_ratio, dropout
        Size of the Transformer.
    value_encoding : {"linear", "shared", "periodic", "piecewise_linear"}
        How a number becomes a token; "shared" is the paper's, the others have weights per column.
    n_bins
        Bins (or frequencies) of the richer encodings.
    linear_skip
        Add a linear map of the visible numbers to the output.
    positions : {"learned", "sinusoidal"}
        Column embeddings.
    output : {"per_column", "shared_tanh"}
        A linear head per column, or the paper's, which cannot leave the range seen in `fit`.
    backbone : {"transformer", "linear", "convolution"}
    masking, masking_ratio
        Which observed cells are hidden while training; see `remasker.masking`.
    loss : {"all", "remasked", "visible"}
    epochs
        Passes over the rows; None chooses by the table's size, fewer where experts follow.
    batch_size, learning_rate, warmup, weight_decay, clip, average
        The optimizer; `warmup` is a share of all steps, `average` the decay of the weight average.
    validation_fraction, patience
        Observed cells set aside to keep the best epoch and, without experts, to calibrate intervals
        and draws; stop after `patience` epochs without improvement (None: never).
    n_members
        Models to average; None: three with experts, two without.
    experts : {"auto", None}
        Whether a second stage of classical experts, weighed per column by cells that neither they
        nor the models have seen, has the last word on point estimates (it takes at least two
        members); None is pure ReMasker.
    scaling : {"standard", "minmax"}
    kinds
        ``{column: kind}`` where the dtype should not decide: "number", "integer", "category",
        "boolean", "datetime", "timedelta" or "ignored".
    exclude
        Columns that come back as they are and are not looked at, such as the target.
    bounds : None, "observed" or {column: (low, high)}
        Limits of imputed values.
    missing_values
        A value, or a list of values, that marks a gap besides NaN, None and NA.
    text : {"ignore", "raise"}
        What to do with free text and identifiers.
    add_indicator
        Append a column ``missingindicator_NAME`` for each column with gaps in `fit`.
    keep_empty_features
        Whether columns without any observed cell in `fit` stay in the result (left missing).
    device : "auto", "cpu", "cuda", "mps"
    n_jobs
        Processes that train models and experts side by side, and threads that complete a long
        table; None is one, -1 as many as there are cores. The result is the same.
    random_state
    verbose
        Show progress.

    Examples
    --------
    >>> table = pd.DataFrame({"a": [1.5, 2.5, None, 4.5], "b": ["x", "y", "x", None]})
    >>> imputer = ReMaskerImputer(epochs=5, width=8, random_state=0, experts=None)
    >>> imputer.fit_transform(table).isna().sum().sum()
    np.int64(0)
    """

    def __init__(
        self,
        *,
        encoder_depth: int = ModelConfig.encoder_depth,
        decoder_depth: int = ModelConfig.decoder_depth,
        width: int = ModelConfig.width,
        heads: int = ModelConfig.heads,
        mlp_ratio: float = ModelConfig.mlp_ratio,
        value_encoding: str = ModelConfig.value_encoding,
        n_bins: int = ModelConfig.n_bins,
        linear_skip: bool = ModelConfig.linear_skip,
        positions: str = ModelConfig.positions,
        output: str = ModelConfig.output,
        backbone: str = ModelConfig.backbone,
        dropout: float = ModelConfig.dropout,
        masking: str = TrainingConfig.masking,
        masking_ratio: float = TrainingConfig.masking_ratio,
        loss: str = TrainingConfig.loss,
        epochs: int | None = TrainingConfig.epochs,
        batch_size: int = TrainingConfig.batch_size,
        learning_rate: float = TrainingConfig.learning_rate,
        warmup: float = TrainingConfig.warmup,
        weight_decay: float = TrainingConfig.weight_decay,
        clip: float = TrainingConfig.clip,
        average: float = TrainingConfig.average,
        patience: int | None = TrainingConfig.patience,
        validation_fraction: float = 0.1,
        n_members: int | None = None,
        experts: str | None = "auto",
        scaling: str = "standard",
        kinds: Mapping[Hashable, str] | None = None,
        exclude: Sequence[Hashable] = (),
        bounds: str | Mapping[Hashable, tuple[Any, Any]] | None = None,
        missing_values: object = np.nan,
        text: str = "ignore",
        add_indicator: bool = False,
        keep_empty_features: bool = True,
        device: str = "auto",
        n_jobs: int | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool | int = False,
    ) -> None:
        self.encoder_depth = encoder_depth
        self.decoder_depth = decoder_depth
        self.width = width
        self.heads = heads
        self.mlp_ratio = mlp_ratio
        self.value_encoding = value_encoding
        self.n_bins = n_bins
        self.linear_skip = linear_skip
        self.positions = positions
        self.output = output
        self.backbone = backbone
        self.dropout = dropout
        self.masking = masking
        self.masking_ratio = masking_ratio
        self.loss = loss
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.warmup = warmup
        self.weight_decay = weight_decay
        self.clip = clip
        self.average = average
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.n_members = n_members
        self.experts = experts
        self.scaling = scaling
        self.kinds = kinds
        self.exclude = exclude
        self.bounds = bounds
        self.missing_values = missing_values
        self.text = text
        self.add_indicator = add_indicator
        self.keep_empty_features = keep_empty_features
        self.device = device
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    @classmethod
    def paper(cls, **overrides: Any) -> Self:
        """The setting of the ReMasker paper (ICLR 2024); `overrides` change single parameters.

        >>> ReMaskerImputer.paper(epochs=100).get_params()["encoder_depth"]
        8
        """
        return cls(**{**PAPER, **overrides})

    # ------------------------------------------------------------------ fitting

    def fit(self, X: Any, y: object = None) -> Self:
        """Learn from the observed cells of `X`; `y` is ignored.

        >>> table = pd.DataFrame({"a": [1.5, 2.5, None, 4.5], "b": [2.0, 3.0, 4.0, 5.5]})
        >>> imputer = ReMaskerImputer(epochs=5, width=8, random_state=0, experts=None).fit(table)
        >>> imputer.feature_names_in_.tolist()
        ['a', 'b']
        """
        model_config, training_config = self._configs()
        frame, container = as_frame(X)
        encoder = TableEncoder(
            kinds=self.kinds,
            exclude=self.exclude,
            bounds=self.bounds,
            missing_values=self.missing_values,
            scaling=self.scaling,
            text=self.text,
            # An array has one dtype for all columns: it says nothing about whole numbers.
            whole_numbers=container != "numpy",
        ).fit(frame)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with one_thread():
            ensemble = self._train(encoder.encode(frame), model_config, training_config, seed)
        gaps = [name for name in frame.columns if encoder.missing(frame[name]).any()]
        self._install(
            encoder,
            ensemble,
            {
                "rows": len(frame),
                "seed": seed,
                "array_input": container == "numpy",
                "indicator_columns": gaps,
            },
        )
        return self

    def _install(
        self, encoder: TableEncoder, ensemble: Ensemble, provenance: dict[str, Any]
    ) -> None:
        """Take over fitted parts: from `fit`, from a file, or from a search."""
        self.encoder_, self.ensemble_, self.provenance_ = encoder, ensemble, provenance
        names = [column.name for column in encoder.columns]
        self.n_features_in_ = len(names)
        self.__dict__.pop("feature_names_in_", None)
        if not provenance["array_input"] and all(isinstance(name, str) for name in names):
            self.feature_names_in_ = np.asarray(names, dtype=object)

    def _configs(self) -> tuple[ModelConfig, TrainingConfig]:
        check_number("validation_fraction", self.validation_fraction, 0.0, 0.5)
        if self.n_members is not None:
            check_integer("n_members", self.n_members, 1)
        if self.n_jobs is not None and (not isinstance(self.n_jobs, Integral) or not self.n_jobs):
            raise InvalidConfigError(
                f"n_jobs: expected a number of processes, -1 for one per core, got {self.n_jobs!r}"
            )
        if self.experts is not None:
            check_choice("experts", self.experts, ("auto",))
        check_choice("device", str(self.device).split(":")[0], ("auto", "cpu", "cuda", "mps"))
        settings = self.get_params(deep=False)
        model_config = ModelConfig(**{f.name: settings[f.name] for f in fields(ModelConfig)})
        training_config = TrainingConfig(
            **{f.name: settings[f.name] for f in fields(TrainingConfig)}
        )
        if self.output == "shared_tanh" and self.scaling != "minmax":
            raise InvalidConfigError(
                f"output 'shared_tanh' needs scaling 'minmax', got {self.scaling!r}"
            )
        return model_config, training_config

    def _train(
        self,
        table: EncodedTable,
        model_config: ModelConfig,
        training_config: TrainingConfig,
        seed: int,
    ) -> Ensemble:
        device = resolve_device(self.device)
        experts = self.experts is not None
        n_members = self.n_members or (N_FOLDS if experts else N_MEMBERS)
        plan = make_plan(table, n_members, self.validation_fraction, experts=experts, seed=seed)
        training_config = below_experts(training_config, plan)
        n_jobs = self._n_jobs(device)
        make = partial(
            make_trainer, table, plan, model_config, training_config, seed=seed, device=device
        )
        numbers = range(n_members if table.observed.any() else 0)
        with FitProgress(bool(self.verbose), n_members) as progress:
            if n_jobs == 1:
                members = train_here(map(make, numbers), progress.epoch)
            else:
                n_epochs = training_config.n_epochs(*table.values.shape)
                with progress.beats(n_epochs) as beats:
                    tasks = [partial(train_apart, make, k, beats[k]) for k in numbers]
                    members = side_by_side(n_jobs)(tasks, len(tasks))
            return make_ensemble(
                table,
                members,
                plan,
                n_experts=n_stacks(table) if experts else 0,
                seed=seed,
                device=device,
                run=side_by_side(n_jobs, progress.count),
            )

    def _n_jobs(self, device: str) -> int:
        return int(effective_n_jobs(self.n_jobs)) if device == "cpu" else 1

    # ------------------------------------------------------------------ imputing

    def transform(self, X: Any) -> Any:
        """Complete `X`, which may hold rows never seen in `fit`; observed cells are untouched.

        >>> table = pd.DataFrame({"a": [1.5, 2.5, None, 4.5], "b": [2.0, 3.0, 4.0, 5.5]})
        >>> imputer = ReMaskerImputer(epochs=5, width=8, random_state=0, experts=None).fit(table)
        >>> new = pd.DataFrame({"a": [3.25, None], "b": [None, 2.5]}, index=["x", "y"])
        >>> full = imputer.transform(new)
        >>> full.loc["x", "a"], full.loc["y", "b"], int(full.isna().sum().sum())
        (np.float64(3.25), np.float64(2.5), 0)
        """
        frame, restore = self._read(X)
        filled = None
        if self._any_model:
            shown = bool(self.verbose) and len(frame) > CHUNK_ROWS
            n_jobs = self._n_jobs(at_hand(self.ensemble_.device))
            with one_thread(), FitProgress(shown, n_models=0) as progress:
                run = side_by_side(n_jobs, progress.count, threads=True)
                filled = self.ensemble_.impute(self.encoder_.encode(frame), run)
        return restore(self._finish(frame, filled))

    def draw(
        self,
        X: Any,
        n_draws: int = 5,
        random_state: int | np.random.RandomState | None = None,
    ) -> list[Any]:
        """Completed tables drawn from the predictive distribution: multiple imputation.

        >>> table = pd.DataFrame({"a": [1.5, 2.5, None, 4.5], "b": [2.0, 3.0, 4.0, 5.5]})
        >>> imputer = ReMaskerImputer(epochs=5, width=8, random_state=0, experts=None).fit(table)
        >>> [len(drawn) for drawn in imputer.draw(table, n_draws=3, random_state=0)]
        [4, 4, 4]
        """
        check_integer("n_draws", n_draws, 1)
        frame, restore = self._read(X)
        if not self._any_model:
            return [restore(self._finish(frame, None)) for _ in range(n_draws)]
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        draws = self.ensemble_.draw(
            self.encoder_.encode(frame), n_draws, np.random.default_rng(seed)
        )
        with one_thread():
            return [restore(self._finish(frame, drawn, drawn=True)) for drawn in draws]

    @one_thread()
    def intervals(self, X: Any, level: float = 0.9) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Lower and upper ends of each missing number, holding the truth with chance `level`.

        One column per modelled numeric column, in its own units; observed cells are their own ends.

        >>> table = pd.DataFrame({"a": [1.5, 2.5, None, 4.5], "b": [2.0, 3.0, 4.0, 5.5]})
        >>> imputer = ReMaskerImputer(epochs=5, width=8, random_state=0, experts=None).fit(table)
        >>> low, high = imputer.intervals(table)
        >>> bool(low.loc[2, "a"] < high.loc[2, "a"])
        True
        """
        check_number("level", level, 0.0, 1.0, open_low=True)
        frame, _ = self._read(X)
        encoded = self.encoder_.encode(frame)
        numeric = [j for j, c in enumerate(self.encoder_.modelled) if not c.categorical]
        names = [self.encoder_.modelled[j].name for j in numeric]
        ends = (
            self.ensemble_.intervals(encoded, level) if self._any_model else (encoded.values,) * 2
        )
        low, high = (self.encoder_.complete(frame, end)[names] for end in ends)
        return low, high

    @one_thread()
    def probabilities(self, X: Any) -> dict[Hashable, pd.DataFrame]:
        """For each categorical column, the chance of every level in every row.

        An observed cell has chance 1 of what it is.

        >>> table = pd.DataFrame({"a": [1.5, 2.5, None, 4.5], "b": ["x", "y", "x", None]})
        >>> imputer = ReMaskerImputer(epochs=5, width=8, random_state=0, experts=None).fit(table)
        >>> imputer.probabilities(table)["b"].round(3).loc[0].to_dict()
        {'x': 1.0, 'y': 0.0}
        """
        frame, _ = self._read(X)
        if not self._any_model:
            return {}
        tables = {}
        for j, chances in self.ensemble_.chances(self.encoder_.encode(frame)).items():
            column = self.encoder_.modelled[j]
            levels = list(column.categories)
            tables[column.name] = pd.DataFrame(chances, index=frame.index, columns=levels)
        return tables

    @property
    def _any_model(self) -> bool:
        return bool(self.ensemble_.members)

    def _read(self, X: Any) -> tuple[pd.DataFrame, Callable[[pd.DataFrame], Any]]:
        check_is_fitted(self)
        frame, container = as_frame(X)
        expected = [column.name for column in self.encoder_.columns]
        by_position = (container == "numpy") or self.provenance_["array_input"]
        if by_position:
            if frame.shape[1] != self.n_features_in_:
                raise InvalidTableError(
                    f"X has {frame.shape[1]} features, but {type(self).__name__} is expecting "
                    f"{self.n_features_in_} features as input"
                )
            if (container == "numpy") != self.provenance_["array_input"]:
                warnings.warn(
                    f"X {'has no' if container == 'numpy' else 'has'} column names, but "
                    f"{type(self).__name__} was fitted "
                    f"{'with' if container == 'numpy' else 'without'} them; columns are taken "
                    "by position",
                    stacklevel=3,
                )
            original = frame.columns
            frame = frame.set_axis(expected, axis=1)
        else:
            self.encoder_.check_columns(frame)

        def restore(completed: pd.DataFrame) -> Any:
            names = dict(zip(expected, expected, strict=True))
            if by_position and container != "numpy":
                names = dict(zip(expected, original, strict=True))
                completed = completed.rename(columns=names)
            ignored = {names[c.name] for c in self.encoder_.columns if not c.modelled}
            return to_container(completed, container, X, ignored)

        return frame, restore

    def _finish(
        self, frame: pd.DataFrame, filled: np.ndarray | None, *, drawn: bool = False
    ) -> pd.DataFrame:
        completed = frame.copy()
        if filled is not None:
            completed = self.encoder_.complete(frame, filled, drawn=drawn)
        if not self.keep_empty_features:
            empty = {c.name for c in self.encoder_.columns if c.reason == "empty"}
            completed = completed[[name for name in completed.columns if name not in empty]]
        if self.add_indicator:
            for name in self.provenance_["indicator_columns"]:
                completed[f"missingindicator_{name}"] = self.encoder_.missing(frame[name])
        return completed

    def get_feature_names_out(self, input_features: object = None) -> np.ndarray:
        """Names of the columns that `transform` returns.

        >>> table = pd.DataFrame({"a": [1.5, 2.5, None, 4.5], "b": [2.0, 3.0, 4.0, 5.5]})
        >>> imputer = ReMaskerImputer(epochs=5, width=8, experts=None, add_indicator=True)
        >>> imputer.fit(table).get_feature_names_out().tolist()
        ['a', 'b', 'missingindicator_a']
        """
        check_is_fitted(self)
        names = list(_check_feature_names_in(self, input_features))
        columns = self.encoder_.columns
        keep = [
            name
            for name, column in zip(names, columns, strict=True)
            if self.keep_empty_features or column.reason != "empty"
        ]
        if self.add_indicator:
            given = dict(zip((c.name for c in columns), names, strict=True))
            keep += [
                f"missingindicator_{given[name]}" for name in self.provenance_["indicator_columns"]
            ]
        return np.asarray(keep, dtype=object)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    # ------------------------------------------------------------------ on disk

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the fitted model to a directory, replacing an older model there.

        >>> import tempfile
        >>> table = pd.DataFrame({"a": [1.5, 2.5, None, 4.5], "b": [2.0, 3.0, 4.0, 5.5]})
        >>> imputer = ReMaskerImputer(epochs=5, width=8, random_state=0, experts=None).fit(table)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = imputer.save(folder + "/model")
        ...     same = ReMaskerImputer.load(path).transform(table)
        >>> same.equals(imputer.transform(table))
        True
        """
        check_is_fitted(self)
        settings = self.get_params(deep=False)
        # These live in the schema; a RandomState or a NaN has no place in JSON.
        for name in ("kinds", "exclude", "bounds", "missing_values", "random_state"):
            del settings[name]
        # And these were of one call.
        for name in ("n_jobs", "verbose"):
            del settings[name]
        return save_artifact(
            path,
            encoder=self.encoder_,
            ensemble=self.ensemble_,
            settings=settings,
            provenance=self.provenance_,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str = "auto") -> Self:
        """Read a model that `save`, `remasker fit` or `remasker tune` wrote.

        Needs neither ray nor optuna, and executes nothing that the file contains.

        >>> ReMaskerImputer.load("no/such/model")
        Traceback (most recent call last):
        remasker.errors.ArtifactError: no/such/model is not a saved model: it has no model.json; ...
        """
        encoder, ensemble, manifest = load_artifact(path, device=resolve_device(device))
        unknown = set(manifest["settings"]) - set(cls._get_param_names())
        settings = {k: v for k, v in manifest["settings"].items() if k not in unknown}
        imputer = cls(
            **{**settings, "device": device},
            bounds=encoder.bounds,
            missing_values=encoder.missing_values or np.nan,
            exclude=tuple(c.name for c in encoder.columns if c.reason == "excluded"),
        )
        imputer._install(encoder, ensemble, manifest["provenance"])
        return imputer
