"""Imputers that cannot live beside ours: they run in an environment of their own.

    python -m benchmarks.peers          # makes .peers/ (some minutes), and tries each of them

Tables travel by file. `impute` starts a process of that environment, which runs this same file as a
script; it may take ten minutes, then it is ended and reported as timed out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / ".peers"
#: The plugins of the package `hyperimpute`, by its own names: `baselines.csv` has them too.
PLUGINS = (
    *("hyperimpute", "missforest", "ice", "mice", "miwae", "EM", "gain", "miracle"),
    *("sinkhorn", "softimpute", "mean", "median", "most_frequent"),
)
PEERS = (*PLUGINS, "miceforest")
LIMIT = 600


def set_up() -> None:
    """Make the environment, unless it is there."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    wanted = str(Path(__file__).with_name("peers.txt"))
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", wanted], check=True)


def impute(method: str, table: np.ndarray, seed: int, limit: float = LIMIT) -> np.ndarray:
    """Complete a table of numbers by one of `PEERS`, in a process of its environment."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        raise RuntimeError("no .peers environment; make it with: python -m benchmarks.peers")
    with tempfile.TemporaryDirectory() as folder:
        given, done = Path(folder) / "given.npy", Path(folder) / "done.npy"
        np.save(given, table)
        try:
            ended = subprocess.run(
                [str(python), __file__, method, str(given), str(done), str(seed)],
                capture_output=True,
                text=True,
                timeout=limit,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {limit:g} s") from None
        if ended.returncode:
            lines = ended.stderr.strip().splitlines()
            raise RuntimeError(lines[-1] if lines else f"exit code {ended.returncode}")
        completed: np.ndarray = np.load(done)
    if np.isnan(completed).any():
        raise RuntimeError("left gaps")
    return completed


def _in_their_environment(method: str, given: str, done: str, seed: int) -> None:
    import random
    import warnings

    import pandas as pd
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the generator that they use
    torch.manual_seed(seed)
    table = np.load(given)
    frame = pd.DataFrame(table, columns=[f"c{j}" for j in range(table.shape[1])])
    if method == "miceforest":
        import miceforest

        kernel = miceforest.ImputationKernel(frame, random_state=seed)
        kernel.mice(5, num_threads=1)
        completed = kernel.complete_data(0)
    else:
        from hyperimpute.plugins.imputers import Imputers

        completed = Imputers().get(method, random_state=seed).fit_transform(frame)
    np.save(done, np.asarray(completed, dtype=float))


def main() -> None:
    """Set up, then complete a small table with each peer."""
    set_up()
    random = np.random.default_rng(0)
    truth = random.normal(size=(200, 1)) + 0.3 * random.normal(size=(200, 5))
    hidden = random.random(truth.shape) < 0.2
    for method in PEERS:
        try:
            completed = impute(method, np.where(hidden, np.nan, truth), 0, limit=120)
            said = f"error {np.sqrt(np.mean((completed - truth)[hidden] ** 2)):.3f}"
        except RuntimeError as error:
            said = f"does not run here: {error}"
        print(f"{method:14} {said}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 5:
        method, given, done, seed = sys.argv[1:]
        _in_their_environment(method, given, done, seed=int(seed))
    else:
        main()
