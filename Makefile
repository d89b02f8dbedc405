# One command each: setup, demo, test, check, bench. Every target makes its own virtual environment first.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
# One compute thread per process: workers share the cores.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-all test-services test-examples check format soak bench bench-simulator docs clean

setup: $(VENV)/.ready

# torch is installed first and pinned, so that no later requirement pulls another build of it.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

$(VENV)/.demo:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

# Trains a 10 M parameter GPT on real text with 4 local workers, of which one is killed, one leaves and one joins
# while it trains; then compares every loss with that of an undisturbed run.
demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

# Two at a time what can be, in the order of the files, since few long tests would come last otherwise; then, one by
# one, tests that say how long something may take.
test: setup
	scripts/test-packages.sh
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --alone not
	$(BIN)/python -m pytest --alone only

# All tests, and the full product of models, layouts, schedules and recompute: some 20 minutes more.
test-all: test
	$(BIN)/python -m pytest -n 2 -m product

# Launchers against the real services (Slurm, Ray) on this machine; installs what is missing.
test-services: setup
	scripts/test-packages.sh
	scripts/test-services.sh
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[ray]'
	TORCH="$(TORCH)" $(BIN)/python -m pytest -m services

# Every example by its one command, until its stated result. About fifteen minutes on two cores.
test-examples: setup
	scripts/example-packages.sh
	$(BIN)/python -m pytest -m examples -s

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_sizes.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# At least 200 random faults in one job; its weights and ledger must be those of an undisturbed one. Three to ten minutes.
soak: setup
	$(BIN)/python -m varuna.testing.soak $(SOAK)

bench: setup
	$(BIN)/python -m benchmarks

# Predicted against measured steps, emulated and real; the chosen plan against all others. Needs root and quiet.
bench-simulator: setup
	$(BIN)/python -m benchmarks simulator real_steps best_plan

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

# The site, in build/docs; a warning (a link that leads nowhere, say) is an error.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -c docs -W --keep-going -q -b html . build/docs

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
