"""clusters/slurm.sh with stand-ins for SLURM's commands: what it would start, and its token."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "clusters" / "slurm.sh"
SRUN = """#!/bin/sh
case "$*" in *hostname*) echo "127.0.0.9 10.0.0.9"; exit 0;; esac
stat -c %a "$RAY_AUTH_TOKEN_PATH" > "$HOME/mode"
wc -c < "$RAY_AUTH_TOKEN_PATH" > "$HOME/length"
cp "$RAY_AUTH_TOKEN_PATH" "$HOME/seen"
env > "$HOME/environment"
echo "$@" > "$HOME/started"
exit ${FAIL:-0}
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho node1; echo node2\n"}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    text = re.sub(r"REPLACE-WITH[A-Z-]*", str(tmp_path / "storage"), SCRIPT.read_text())
    (tmp_path / "slurm.sh").write_text(text)
    (tmp_path / "remasker-env" / "bin").mkdir(parents=True)
    (tmp_path / "remasker-env" / "bin" / "python").symlink_to(sys.executable)
    return {
        "HOME": str(tmp_path),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "8",
    }


def test_what_it_starts(job: dict[str, str], tmp_path: Path) -> None:
    command = ["bash", str(tmp_path / "slurm.sh"), "data.csv", "--trials", "9"]
    subprocess.run(command, env=job, check=True)
    started = (tmp_path / "started").read_text()
    assert "ray symmetric-run --address 127.0.0.9:24711 --min-nodes 2 --num-cpus=8" in started
    assert started.strip().endswith(
        f"-- remasker tune data.csv --address 127.0.0.9:24711 --storage {tmp_path}/storage "
        "--resume --trials 9"
    )


@pytest.mark.parametrize("code", ["0", "3"])
def test_its_token(job: dict[str, str], tmp_path: Path, code: str) -> None:
    """Private while the job runs, on no command line and in no variable, gone afterwards."""
    command = ["bash", str(tmp_path / "slurm.sh"), "data.csv"]
    done = subprocess.run(command, env={**job, "FAIL": code}, capture_output=True, text=True)
    assert done.returncode == int(code)
    assert (tmp_path / "mode").read_text().strip() == "600"
    assert (tmp_path / "length").read_text().strip() == "64"
    token = (tmp_path / "seen").read_text()
    for text in (done.stdout, done.stderr, (tmp_path / "started").read_text()):
        assert token not in text
    environment = (tmp_path / "environment").read_text()
    assert token not in environment
    assert "RAY_AUTH_MODE=token" in environment
    assert list((tmp_path / ".ray").iterdir()) == []
    assert stat.S_IMODE((tmp_path / ".ray").stat().st_mode) == 0o700


def test_slurm_reads_its_settings() -> None:
    """sbatch stops reading #SBATCH lines at the first command."""
    lines = SCRIPT.read_text().splitlines()
    first = next(k for k, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    assert sum(line.startswith("#SBATCH") for line in lines) >= 8
