# Every target sets up what it needs: a virtual environment with the exact versions of constraints.txt.
VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: demo test fast check bench clean

demo: $(READY)  ## the main job on embedded data
	$(PYTHON) -m tuning.cli demo

test: $(READY) check  ## everything CI runs
	$(PYTHON) -m pytest

fast: $(READY)  ## what you run while you work: about a minute, no Ray
	$(PYTHON) -m pytest -m "not slow"

check: $(READY)  ## style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(READY)  ## defaults and paper preset against the recorded baselines
	$(PYTHON) -m benchmarks.accuracy

$(READY): pyproject.toml constraints.txt
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
