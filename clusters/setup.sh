#!/usr/bin/env bash
# The environment of one node, from the project's own pins. Every cluster file runs it on every node.
#   setup.sh PYTHON_VERSION
# Leaves alone an environment that has the pinned versions already, so `ray up` may be repeated.
# Run by us: into an empty home with Python 3.11 (5.5 minutes on a busy machine, 1.8 GB, CPU build of
# torch), and again (0.7 s, nothing done). The way over uv was not run.
set -euo pipefail
python_version="${1:?usage: setup.sh PYTHON_VERSION, such as 3.11}"
code="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
environment="$HOME/remasker-env"

# The token arrived by rsync; whatever its mode was, only this user reads it from here on.
if [ -f "$HOME/.ray/auth_token" ]; then chmod 700 "$HOME/.ray" && chmod 600 "$HOME/.ray/auth_token"; fi

matches_pins() {
    "$environment/bin/python" - "$code/constraints.txt" "$python_version" <<'PYTHON'
import sys
from importlib.metadata import distributions

pins = dict(line.split("==") for line in open(sys.argv[1]).read().split() if "==" in line)
found = {d.metadata["Name"]: d.version.split("+")[0] for d in distributions()}
wrong = [f"{n} {found[n]} (pinned {v})" for n, v in pins.items() if n in found and found[n] != v]
absent = [name for name in ("ray", "torch", "optuna", "pandas", "remasker") if name not in found]
python = ".".join(map(str, sys.version_info[:2]))
if python != sys.argv[2] or wrong or absent:
    sys.exit(f"remasker: renewing the environment: Python {python}, {wrong}, absent {absent}")
PYTHON
}

if ! { [ -x "$environment/bin/python" ] && matches_pins; }; then
    # Only what this script made may be replaced: never a link, never somebody else's environment.
    if [ -L "$environment" ] || { [ -e "$environment" ] && [ ! -e "$environment/.made-by-remasker" ]; }; then
        echo "remasker: $environment does not have the pinned versions and was not made by setup.sh; install them there or move it away" >&2
        exit 1
    fi
    rm -rf "$environment"
    if command -v "python$python_version" >/dev/null && "python$python_version" -c "import ensurepip"; then
        "python$python_version" -m venv "$environment"
    else # another distribution, another Python: uv brings the one that is asked for
        command -v uv >/dev/null || python3 -m pip install --user --quiet uv
        PATH="$HOME/.local/bin:$PATH" uv venv --seed --python "$python_version" "$environment"
    fi
    touch "$environment/.made-by-remasker"
    # Without a GPU the CPU build of torch does and is gigabytes smaller: export PIP_EXTRA_INDEX_URL
    # with PyTorch's CPU index to get it.
    "$environment/bin/pip" install --quiet -c "$code/constraints.txt" -e "$code[cluster]"
fi

# `ray down`, `ray exec` and `ray attach` look for `ray` on the PATH of an ssh login.
touch "$HOME/.bashrc"
sed -i '/# remasker$/d' "$HOME/.bashrc"
echo "export PATH=\"$environment/bin:\$PATH\" PYTHONPATH=\"$code\" RAY_AUTH_MODE=token # remasker" >>"$HOME/.bashrc"
