# Every target sets up what it needs; nothing has to be installed by hand first.
PYTHON ?= python3
BIN := .venv/bin
# Threads that wait should sleep: on a busy machine spinning ones cost minutes.
export OMP_WAIT_POLICY := passive

.PHONY: demo test lint docs docs-look docs-check format setup bench load memory results results-gpu results-list golden clean

demo: setup  ## Calibrate GeoQ around a small neural surrogate of the Forrester function
	$(BIN)/geoq demo

test: setup  ## Lint, types, tests and doctests, the latter in two processes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

lint: setup  ## Lint and types alone
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: setup  ## The site, with its gallery, in build/site; warnings are errors. Open build/site/index.html
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -q -j 2 -c docs -d build/doctrees . build/site

docs-look:  ## Open every page of build/site as on a phone, with Chromium; a page that is too wide is an error
	$(BIN)/python docs/look.py

docs-check: setup  ## The examples, links, names and words of the documentation
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/test_docs.py tests/test_readme.py

format: setup  ## Rewrite the files in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## The speed figures of benchmarks/results/speed.md
	$(BIN)/python -m benchmarks.costs.speed

memory: setup  ## The memory and file sizes of benchmarks/results/cost.md
	$(BIN)/python -m benchmarks.costs.memory

load: setup  ## A hundred parallel clients of the service on this machine for a minute
	GEOQ_LOAD_SECONDS=60 $(BIN)/pytest -q tests/test_serving.py -k parallel_clients

results: setup  ## Measure again what fits two CPU cores in an hour; finished results are skipped
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,table-bench]"
	$(BIN)/python -m benchmarks.rerun two-cores

results-gpu: setup  ## The rest, on a GPU with 16 cores; ERA5 (a folder) and SIMULATIONS (a file) name the data
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,third-party]"
	$(BIN)/python -m benchmarks.rerun gpu

results-list: setup  ## The commands of both with their minutes; nothing is run
	$(BIN)/python -m benchmarks.rerun two-cores --list
	$(BIN)/python -m benchmarks.rerun gpu --list

golden: setup  ## Store the answers that tests/test_golden.py compares with, after a change on purpose
	$(BIN)/python tests/golden.py

setup: .venv/.ready  ## The virtual environment alone

# constraints.txt pins what a fresh machine installs; pyproject.toml keeps the ranges a user may have.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:  ## Remove the environment and the caches
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
