PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip takes the CPU build of torch for this range where one is at hand; newer ranges pull CUDA builds of several GB.
TORCH := torch>=2.9,<2.14

.PHONY: setup demo train-tiny test test-slow lint format clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet '$(TORCH)' -e '.[all,dev]'
	# Only its chat templates are read, by tests; its own dependencies are not needed for that.
	$(BIN)/python -m pip install --quiet --no-deps 'trl>=1.16,<2'
	touch $@

demo: setup
	$(BIN)/endstop chat smollm2-135m-instruct -p "How do you say thank you in Chinese?" --max-tokens 64 --temperature 0 --stats

# The whole pipeline on two CPU cores: a new run, or the rest of one that was interrupted.
RUN ?= runs/tiny
train-tiny: setup
	$(BIN)/endstop train all --preset tiny --run $(RUN) --resume

# Two test processes with one thread each: threads of several processes that wait for each other are many times slower.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) dist build .pytest_cache .hypothesis .mypy_cache .ruff_cache
