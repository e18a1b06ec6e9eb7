"""One Ray for all tests of the search: starting it takes longer than most of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest
import torch
from threadpoolctl import threadpool_limits


@pytest.fixture(scope="session", autouse=True)
def one_core() -> Iterator[None]:
    """As the product trains: on a busy machine threads that wait for each other take minutes.

    Nor do Ray's workers wait for others, and "all cores" is one: starting processes takes seconds.
    """
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its name in Ray
    os.environ["LOKY_MAX_CPU_COUNT"] = "1"
    torch.set_num_threads(1)
    with threadpool_limits(limits=1):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever needs Ray waits for its start: that is slow."""
    for item in items:
        if "one_ray" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def one_stack() -> Iterator[None]:
    """Small tables get several stacks of experts; one shows all but their average."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("remasker.fitting.STACK_WORK", 0)
        yield


@pytest.fixture(scope="session")
def one_ray() -> Iterator[None]:
    import ray

    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=100 * 2**20,
        )
    yield
    ray.shutdown()


@pytest.fixture
def small_table() -> pd.DataFrame:
    """Mixed kinds, correlated, with gaps in three columns."""
    rng = np.random.default_rng(0)
    size = rng.normal(size=160)
    frame = pd.DataFrame(
        {
            "size": size,
            "weight": 2 * size + 0.3 * rng.normal(size=160),
            "count": np.round(20 + 5 * size + rng.normal(size=160)),
            "colour": np.where(size + 0.3 * rng.normal(size=160) > 0, "red", "blue"),
        }
    )
    frame.loc[rng.random(160) < 0.25, "weight"] = np.nan
    frame.loc[rng.random(160) < 0.2, "count"] = np.nan
    frame.loc[rng.random(160) < 0.15, "colour"] = None
    return frame
