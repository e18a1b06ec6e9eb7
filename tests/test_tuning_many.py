"""Several searches at once: on one Ray, in one storage, in a process that has work of its own."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tuning import tune, tune_many
from tuning.config import RunExistsError
from tuning.folder import locked
from tuning.journal import read_study
from tuning.many import TuneManyError
from tuning.ray_session import secure_token
from tuning.sharing import fair_share

SPACE = {"width": 8, "encoder_depth": 1, "decoder_depth": 1, "epochs": 40, "batch_size": 32}
OPTIONS = {"time_budget": None, "experts": None, "space": SPACE, "early_stopping": False}


def times(folder: Path) -> list[tuple[float, float]]:
    """When each trial began and ended."""
    trials = [t for t in read_study(folder).get_trials(deepcopy=False) if t.state.is_finished()]
    return [(t.datetime_start.timestamp(), t.datetime_complete.timestamp()) for t in trials]


def at_once(intervals: list[tuple[float, float]]) -> int:
    """How many of them were open at the same time, at most."""
    return max(sum(low <= begin < high for low, high in intervals) for begin, _ in intervals)


@pytest.mark.slow
def test_tables_share_the_slots_and_find_what_each_finds_alone(
    one_ray: None, small_table: pd.DataFrame, tmp_path: Path
) -> None:
    tables = {"one": small_table, "two": small_table.iloc[::-1].head(120)}
    both = tune_many(tables, trials=3, concurrent=1, storage=tmp_path / "both", **OPTIONS)
    assert list(both) == ["one", "two"]
    one, two = times(tmp_path / "both" / "one"), times(tmp_path / "both" / "two")
    assert len(one) == len(two) == 3
    # Two cores, two tables: a core each, at the same time.
    assert at_once(one) == at_once(two) == 1
    assert max(begin for begin, _ in (one[0], two[0])) < min(end for _, end in (one[-1], two[-1]))
    alone = tune(
        tables["two"], name="two", trials=3, concurrent=1, storage=tmp_path / "alone", **OPTIONS
    )
    pd.testing.assert_frame_equal(both["two"].imputed, alone.imputed)
    assert both["two"].selection.chosen == alone.selection.chosen


@pytest.mark.slow
def test_a_table_that_fails_stops_no_other_and_its_slots_are_used(
    one_ray: None, small_table: pd.DataFrame, tmp_path: Path
) -> None:
    broken = pd.DataFrame({"a": [np.nan] * 50, "b": [np.nan] * 50})
    with pytest.raises(TuneManyError, match="1 of 2 tables failed: broken: ") as caught:
        tune_many({"broken": broken, "good": small_table}, trials=6, storage=tmp_path, **OPTIONS)
    assert list(caught.value.errors) == ["broken"]
    assert caught.value.results["good"].imputed.isna().sum().sum() == 0
    assert at_once(times(tmp_path / "good")) == 2


@pytest.mark.slow
def test_a_process_that_uses_ray_keeps_it(
    one_ray: None, small_table: pd.DataFrame, tmp_path: Path
) -> None:
    import ray

    @ray.remote(num_cpus=0)
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def add(self) -> int:
            self.count += 1
            return self.count

    counter = Counter.remote()
    assert ray.get(counter.add.remote()) == 1
    before = dict(os.environ)
    result = tune(small_table, name="mine", trials=2, storage=tmp_path, **OPTIONS)
    assert result.imputed.isna().sum().sum() == 0
    assert dict(os.environ) == before
    assert ray.is_initialized()
    assert ray.get(counter.add.remote()) == 2


def test_a_run_belongs_to_one_process_at_a_time(small_table: pd.DataFrame, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with (
        locked(tmp_path / "mine"),
        pytest.raises(RunExistsError, match="is being run by another process; wait for it"),
    ):
        tune(small_table, name="mine", storage=tmp_path, **OPTIONS)


def test_slots_are_shared_to_the_last_one() -> None:
    for n_slots in range(1, 9):
        for names in (["a"], ["a", "b"], ["a", "b", "c"]):
            shares = [fair_share(n_slots, names, name) for name in names]
            assert sum(shares) == n_slots
            assert max(shares) - min(shares) <= 1


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_token_is_made_before_ray_makes_one_that_others_may_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    secure_token()
    assert mode(token) == 0o600
    assert mode(token.parent) == 0o700
    # One that Ray made earlier is kept, and closed.
    text = token.read_text()
    token.chmod(0o644)
    secure_token()
    assert mode(token) == 0o600
    assert token.read_text() == text
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "elsewhere"))
    secure_token()
    assert mode(tmp_path / "elsewhere") == 0o600
    # Nobody asks for a token.
    token.unlink()
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    secure_token()
    assert not token.exists()
