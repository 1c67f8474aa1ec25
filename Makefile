# Everything a new machine needs is done by `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests that start processes wait for them: one worker more than cores.
WORKERS ?= 3
# A file's tests share its fixtures.
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
GPU_PYTHON ?= $(BIN)/python
GPU_OUT ?= runs/gpu-day

# Torch releases that `make compat` goes through, one after the other: the oldest supported, one between, the newest.
TORCH ?= 2.7.1 2.10.0 2.13.0
COMPAT := .compat
EXACT := exact_collectives memory_exact estimate_comm estimate_memory same_estimate_every_time

.PHONY: demo test quick lint slow compat gpu docs clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/fsdp2prof record -f -o runs/demo -- $(BIN)/torchrun --nproc-per-node 2 examples/train_tiny_fsdp2.py
	$(BIN)/fsdp2prof analyze run runs/demo
	$(BIN)/fsdp2prof report runs/demo -q
	@echo "That is the report: open it in a browser, or run $(BIN)/fsdp2prof report runs/demo --open."

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The inner loop: every test that imports no torch and needs neither real traces nor a cluster.
quick: lint
	$(PYTEST) --without-torch -m "not slow and not real_data" tests/unit

test: lint
	$(PYTEST) --without-torch tests/unit
	$(PYTEST) --durations 20 --ignore tests/unit

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

compat: $(TORCH:%=compat-%)

compat-%: $(COMPAT)/%/.installed
	$(COMPAT)/$*/bin/python -c 'import sys, torch; print("torch", torch.__version__, "on Python", sys.version)'
	$(COMPAT)/$*/bin/python -m pytest -q -n $(WORKERS) --dist loadfile tests/unit tests/executed $(EXACT:%=tests/integration/test_%.py)

# Some 7 GB each, most of it CUDA libraries that no test needs; `make clean` takes them away.
.PRECIOUS: $(COMPAT)/%/.installed
$(COMPAT)/%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(COMPAT)/$*
	sed 's/^torch==.*/torch==$*/' constraints.txt > $(COMPAT)/$*/constraints.txt
	$(COMPAT)/$*/bin/python -m pip install --quiet --upgrade pip
	$(COMPAT)/$*/bin/python -m pip install --quiet -c $(COMPAT)/$*/constraints.txt -e '.[test]'
	touch $@

# GPU_PYTHON=python3 takes a Python that has torch already, and installs nothing.
gpu: $(filter $(STAMP),$(GPU_PYTHON:$(BIN)/python=$(STAMP)))
	$(GPU_PYTHON) -m benchmarks.gpu_day -o $(GPU_OUT)

# The pages of docs/ as a site, in build/site.
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/python -m mkdocs build --strict -f docs/site/mkdocs.yml

clean:
	rm -rf $(VENV) $(COMPAT) build dist *.egg-info runs
