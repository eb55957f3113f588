# Two commands are all there is to know: `make demo` and `make test`. Both need Python 3.11 or newer and nothing else.
# All paths are relative and programs run as modules, so that the repository may lie in a folder with a space in its name.

PYTHON ?= python3.11
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet -c constraints.txt
DEMO := estimate --model lstm --seq 10000

.PHONY: demo test lint format notebooks bench bench-smoke clean

# Exit code 1 is an answer too: it does not fit.
demo: .venv/demo.stamp
	@echo 'oomguard $(DEMO)'
	@$(PY) -m oomguard $(DEMO) || [ $$? -eq 1 ]

# The benchmarks as small as can be, then the tests: in two processes, each with whole files of tests, so that fixtures
# that start a browser or a child are made once.
test: lint
	$(PY) benchmarks/run.py --smoke
	$(PY) -m pytest --numprocesses 2 --dist loadfile

lint: .venv/dev.stamp
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: .venv/dev.stamp
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Executes the notebooks and stores them with their outputs. (`make test` executes them too, and stores nothing.)
notebooks: .venv/dev.stamp
	$(PY) notebooks/run.py

# Smaller than the claims are stated, half an hour in all; `benchmarks/run.py --whole` takes hours.
bench: .venv/bench.stamp
	$(PY) benchmarks/run.py

# All of them as small as can be, to see that they work.
bench-smoke: .venv/dev.stamp
	$(PY) benchmarks/run.py --smoke

clean:
	rm -rf .venv build dist oomguard.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/demo.stamp: $(PY) pyproject.toml constraints.txt
	@echo 'Installing oomguard into .venv (the first time it fetches PyTorch, which takes a while)'
	@$(PIP) -e .
	@touch .venv/demo.stamp

.venv/dev.stamp: $(PY) pyproject.toml constraints.txt
	@echo 'Installing oomguard and what its tests need into .venv (the first time it fetches PyTorch, which takes a while)'
	@$(PIP) -e '.[dev]'
	@touch .venv/demo.stamp .venv/dev.stamp

.venv/bench.stamp: .venv/dev.stamp
	@$(PIP) -e '.[dev,bench]'
	@touch .venv/bench.stamp

$(PY):
	@for python in "$(PYTHON)" python3; do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then \
			echo "Making .venv with $$("$$python" --version)"; \
			"$$python" -m venv --clear .venv && exit; \
			rm -rf .venv; exit 1; \
		fi; \
	done; \
	echo "oomguard needs Python 3.11 or newer, but neither $(PYTHON) nor python3 ($$(python3 --version 2>&1)) is one." >&2; \
	echo "Install it, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
	exit 1
