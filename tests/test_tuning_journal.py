"""The journal after a kill and on a full disk, and a head that no longer answers."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import optuna
import pytest

from remasker.errors import InvalidConfigError
from tuning import ray_session, search
from tuning.affordable import MANY_TRIALS, FewTrials
from tuning.config import ClusterLostError, StorageError
from tuning.journal import JOURNAL, open_study, read_study
from tuning.ray_session import HeadLost, Pulse


def add(study: optuna.Study, value: float) -> None:
    trial = study.ask({"a": optuna.distributions.FloatDistribution(0, 1)})
    study.tell(trial, value)


def test_half_a_line_is_dropped_and_the_rest_is_kept(tmp_path: Path) -> None:
    add(open_study(tmp_path), 1.0)
    with open(tmp_path / JOURNAL, "ab") as file:
        file.write(b'{"op_code": 4, "wor')
    assert len(read_study(tmp_path).trials) == 1  # a reader is not disturbed, and mends nothing
    assert not (tmp_path / JOURNAL).read_bytes().endswith(b"\n")
    add(open_study(tmp_path), 2.0)
    assert [trial.value for trial in read_study(tmp_path).trials] == [1.0, 2.0]


def test_a_disk_that_is_full_leaves_whole_lines_and_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = open_study(tmp_path)
    add(study, 1.0)
    before = (tmp_path / JOURNAL).read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    trial = study.ask()
    begun = (tmp_path / JOURNAL).read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"No space left on device.*resume=True"):
        study.tell(trial, 2.0)
    monkeypatch.undo()
    # Room again: what was not written does not come later, behind a gap.
    with pytest.raises(StorageError):
        study.tell(trial, 2.0)
    assert (tmp_path / JOURNAL).read_bytes() == begun
    assert begun.startswith(before)
    assert [t.state.name for t in read_study(tmp_path).trials] == ["COMPLETE", "RUNNING"]


def test_reading_writes_nothing(tmp_path: Path) -> None:
    add(open_study(tmp_path), 1.0)
    before = (tmp_path / JOURNAL).read_bytes()
    read_study(tmp_path)
    assert (tmp_path / JOURNAL).read_bytes() == before
    (tmp_path / JOURNAL).write_bytes(b"")
    with pytest.raises(InvalidConfigError, match="without any trial"):
        read_study(tmp_path)


def test_a_sampler_sees_the_best_and_the_latest_of_very_many() -> None:
    study = optuna.create_study()
    values = [float(k % 97) for k in range(MANY_TRIALS)]
    study.add_trials([optuna.trial.create_trial(value=value) for value in values])
    assert len(FewTrials(study)._get_trials()) == MANY_TRIALS
    study.add_trials([optuna.trial.create_trial(value=200.0) for _ in range(MANY_TRIALS)])
    seen = FewTrials(study)._get_trials(deepcopy=False)
    assert len(seen) == MANY_TRIALS
    assert seen[-1].number == 2 * MANY_TRIALS - 1
    assert [t.number for t in seen] == sorted(t.number for t in seen)
    assert sum(t.value < 200 for t in seen) == MANY_TRIALS // 5
    assert FewTrials(study).direction == study.direction


@pytest.mark.slow
def test_a_head_that_takes_no_connections_is_lost_after_a_while(
    one_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_session, "BEAT", 0.05)
    monkeypatch.setattr(ray_session, "PATIENCE", 0.5)
    answers = iter(range(10**6))
    with Pulse({"next": lambda: next(answers)}, tmp_path) as pulse:
        pulse.check()
        first = pulse["next"]
        while pulse["next"] <= first + 1:  # asked again and again
            pulse.check()
        # Away and back, and still the same: no loss.
        monkeypatch.setattr(ray_session, "takes_connections", lambda address: False)
        pulse._over.wait(0.2)
        monkeypatch.undo()
        pulse.check()
        assert not pulse.lost
        monkeypatch.setattr(ray_session, "PATIENCE", 0.5)
        monkeypatch.setattr(ray_session, "takes_connections", lambda address: False)
        pulse._over.wait(2.5)
        with pytest.raises(HeadLost):
            pulse.check()
        assert isinstance(pulse.error(), ClusterLostError)
        assert str(tmp_path) in str(pulse.error())


def test_a_call_that_fails_because_the_head_is_gone_says_so(
    one_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's clean-up may meet the restarted head before anybody has noticed."""
    monkeypatch.setattr(search.ray, "shutdown", lambda: None)
    with Pulse({}, tmp_path) as pulse:
        with pytest.raises(OSError, match="mine"), search.lost_head(pulse):
            raise OSError("mine")
        monkeypatch.setattr(pulse, "_head", "another")
        with pytest.raises(ClusterLostError), search.lost_head(pulse):
            raise OSError("WrongClusterID")
        with pytest.raises(StorageError), search.lost_head(pulse):
            raise StorageError("full")


@pytest.mark.slow
def test_a_question_without_an_answer_does_not_stop_the_watch(
    one_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_session, "BEAT", 0.05)
    monkeypatch.setattr(ray_session, "PATIENCE", 0.2)
    asked, release = iter([lambda: None]), threading.Event()
    with Pulse({"late": lambda: next(asked, release.wait)()}, tmp_path) as pulse:
        pulse._over.wait(0.5)  # by now it waits for an answer
        monkeypatch.setattr(ray_session, "takes_connections", lambda address: False)
        pulse._over.wait(2.5)
        with pytest.raises(HeadLost):
            pulse.check()
        release.set()
