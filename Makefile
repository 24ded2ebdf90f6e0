# Two commands need nothing before them: `make demo` and `make test`. Each sets itself up in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
NATIVE := $(wildcard csrc/cpu/*.* csrc/cpu/isa/*.*) CMakeLists.txt pyproject.toml constraints.txt
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: help demo test test-oldest test-gpu symbols check lint format bench setup clean

help:
	@echo "make demo    set up, then explain, quantise, evaluate and generate with the shipped model"
	@echo "make test    set up, then run every test this machine can run"
	@echo "make check   format, lint, types, import directions, symbols, unit and property tests"
	@echo "make bench   time CPU layers beside this machine's limits and PyTorch's own loops"

$(VENV)/.made:
	@echo "making $(VENV) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is too old, needs Python 3.10 or newer"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The package with what running a model needs; compiles the native kernel.
$(VENV)/.run: $(VENV)/.made $(NATIVE)
	@echo "installing int8moe, PyTorch and Transformers, compiling the CPU kernel ..."
	@$(PIP) -e '.[transformers]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing test and lint tools ..."
	@$(PIP) -e '.[dev]'
	@touch $@

setup: $(VENV)/.dev

demo: $(VENV)/.run
	@$(BIN)/python demo/demo.py

test: $(VENV)/.dev
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder tests

# The Transformers tests again, with the oldest version that is supported; `test` runs them with the newest.
test-oldest: $(VENV)/.dev
	@bash scripts/transformers_versions.sh oldest

test-gpu: $(VENV)/.dev
	@$(BIN)/python -m pytest -q -m gpu tests

lint: $(VENV)/.dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/clang-format --dry-run --Werror $(wildcard csrc/cpu/*.h csrc/cpu/*.cpp csrc/cpu/*.inl csrc/cpu/isa/*.cpp)
	@$(BIN)/mypy
	@PATH=$(abspath $(BIN)):$$PATH $(BIN)/lint-imports

format: $(VENV)/.dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@$(BIN)/clang-format -i $(wildcard csrc/cpu/*.h csrc/cpu/*.cpp csrc/cpu/*.inl csrc/cpu/isa/*.cpp)

symbols: $(VENV)/.dev
	@bash scripts/check_symbols.sh build

check: lint symbols
	@$(BIN)/python -m pytest -q -n $(JOBS) tests/unit tests/property

bench: $(VENV)/.run
	@$(BIN)/int8moe bench --backend cpu --shape tiny --shape olmoe --shape qwen3-30b --compare torch-bf16,torch-fp32

clean:
	rm -rf build $(VENV) .demo
