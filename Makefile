# Everything a new machine needs is done by `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
GPU_PYTHON ?= $(BIN)/python
GPU_OUT ?= runs/gpu-day

.PHONY: demo test lint slow gpu clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/fsdp2prof record -f -o runs/demo -- $(BIN)/torchrun --nproc-per-node 2 examples/train_tiny_fsdp2.py
	$(BIN)/fsdp2prof analyze run runs/demo
	$(BIN)/fsdp2prof report runs/demo -f -o runs/demo/report.html
	@echo "The report is at runs/demo/report.html: open it in a browser."

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

# GPU_PYTHON=python3 takes a Python that has torch already, and installs nothing.
gpu: $(filter $(STAMP),$(GPU_PYTHON:$(BIN)/python=$(STAMP)))
	$(GPU_PYTHON) -m benchmarks.gpu_day -o $(GPU_OUT)

clean:
	rm -rf $(VENV) build dist *.egg-info runs
