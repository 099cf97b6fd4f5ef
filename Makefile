# One virtual environment, .venv, made on first use. `make demo`, `make test`, `make lint`, `make bench`.
PYTHON ?= python3
# Installed before the rest, so that another build (TORCH=..., PIP_INDEX_URL=...) can be chosen.
TORCH ?= torch==2.13.0
BIN := .venv/bin
READY := .venv/.ready
# Ranks are processes: more threads in each only fight for the cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Tests wait for processes and deadlines as often as they compute: more workers than cores keep two cores busy.
WORKERS ?= 3

.PHONY: demo test lint bench clean

$(READY): setup.py
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing $(TORCH) and rorqual[dev] into .venv (once)"
	@$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@mkdir -p .venv/src && ln -sfn ../.. .venv/src/rorqual
	@touch $(READY)

# four ranks on this machine: two replicas of the attention, two ranks each; the experts are spread over all four
demo: $(READY)
	@$(BIN)/torchrun --nproc-per-node 4 -m rorqual.launch generate tiny --dp-size 2 --tp-size 2 --dtype float32 --max-tokens 48
	@echo; echo "and as a server, two replicas:"; PATH="$(CURDIR)/$(BIN):$$PATH" bash launch/deploy/demo.sh

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/mypy

test: lint
	@$(BIN)/pytest -q -n $(WORKERS) --dist loadfile

# tokens per second of rorqual and of transformers' generate(), same prompts, same run
bench: $(READY)
	@$(BIN)/python -m rorqual.launch bench throughput --model tiny --dataset random --num-prompts 64 --input-len 128 --output-len 128 \
		--dtype float32 --compare hf

clean:
	@rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
