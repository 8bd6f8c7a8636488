# Every step of working on Harmony. `make` alone lists them.

PYTHON ?= python3
VENV ?= .venv
# more arguments for pip, e.g. the index of another torch build:
# make venv PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'
PIP_FLAGS ?=
# more arguments for pytest, e.g. -k name; -n 0 runs the tests in one process
PYTEST_FLAGS ?= -n 2

BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest $(PYTEST_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help venv demo test check format schema profiles golden bench-exact bench-executor bench-overhead bench-estimate bench-kinds bench-planner gpu-bench gpu-test clean

help: ## list what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | awk -F '\t' '{ printf "  %-16s %s\n", $$1, $$2 }'

venv: $(READY) ## create the virtual environment in $(VENV)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[planner,executor,hf,dev]'
	touch $@

test: $(READY) ## run the tests that need no GPU
	$(PYTEST)

check: $(READY) ## formatting, lint, types, import rules, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST)

format: $(READY) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schema: $(READY) ## write profiles/*.schema.json
	$(BIN)/python -c "$$SCHEMA"

profiles: $(READY) ## count the models of the library anew, for what-if (minutes)
	$(BIN)/python -m executor.library profiles

golden: $(READY) ## rewrite the golden files of the tests; review them as a diff
	$(PYTEST) -n 0 tests/planner --update-golden

gpu-test: $(READY) ## run the tests that need a GPU, and the slow ones
	$(PYTEST) -n 0 --slow -m 'gpu or slow'

# more arguments, e.g. --model 'hf:llama?...' --minibatch 64 --caps 16GiB,24GiB; --device virtual shows it at work without a GPU
GPU_FLAGS ?= --folder profiles/measured

gpu-bench: $(READY) ## a machine with a GPU measured whole: planned beside measured, the roof, plain PyTorch, FSDP2, by memory
	$(BIN)/python -m tests.bench_gpu $(GPU_FLAGS)

# ---- the demo: a GPT-2 of 29 M parameters in 40 % of the memory that it needs, on one and on two virtual devices

DEMO := build/demo
DEMO_MODEL := hf:gpt2?n_layer=9&n_embd=512&n_head=8&vocab_size=256&seq=128&tie_word_embeddings=false
DEMO_MINIBATCH := 8
DEMO_STEPS := 10
# share of what plain training needs, in percent
DEMO_SHARE := 40
DEMO_RATE := 500MB/s
# speed of the virtual devices relative to this CPU: room for two ranks, their copies and updates on two cores
DEMO_SCALE := 0.4
DEMO_TOLERANCE := 10%
PLANNER := $(BIN)/harmony-planner
EXECUTOR := $(BIN)/harmony-executor

demo: $(READY) ## train a GPT-2 in 40 % of the memory it needs, on 1 and 2 virtual devices, and check the plan
	@mkdir -p $(DEMO)
	@echo '== what plain training needs'
	$(EXECUTOR) run --plain --model '$(DEMO_MODEL)' --data . --minibatch $(DEMO_MINIBATCH) --steps 3 --seed 0 -o $(DEMO)/plain.json
	@echo '== what each layer costs'
	$(EXECUTOR) profile --model '$(DEMO_MODEL)' --data . --microbatches 1,2,4,8 --device virtual -o $(DEMO)/profile.json
	@$(MAKE) --no-print-directory demo-run DEVICES=1
	@$(MAKE) --no-print-directory demo-run DEVICES=2

.PHONY: demo-run
demo-run: PLACE = $(DEMO)/$(DEVICES)
demo-run: FILES = $(PLACE)/schedule.json $(DEMO)/profile.json $(PLACE)/hardware.json
demo-run: MEMORY = $(shell $(BIN)/python -c "$$PLAIN_PEAK" $(DEMO)/plain.json $(DEMO_SHARE))
demo-run:
	@mkdir -p $(PLACE)
	@echo '== on $(DEVICES) virtual device(s) of $(MEMORY) bytes, $(DEMO_SHARE) % of what plain training needs'
	$(EXECUTOR) hardware --device virtual --devices $(DEVICES) --memory $(MEMORY) --h2d $(DEMO_RATE) --d2h $(DEMO_RATE) --peer $(DEMO_RATE) --compute-scale $(DEMO_SCALE) -o $(PLACE)/hardware.json
	$(PLANNER) plan $(DEMO)/profile.json $(PLACE)/hardware.json --minibatch $(DEMO_MINIBATCH) \
		--mode pp --activations recompute -o $(PLACE)/schedule.json
	$(PLANNER) verify $(FILES)
	$(PLANNER) simulate $(FILES) -o $(PLACE)/planned.json
	$(EXECUTOR) run $(PLACE)/schedule.json --data . --device virtual --steps $(DEMO_STEPS) --seed 0 -o $(PLACE)/measured.json
	$(PLANNER) report $(PLACE)/schedule.json --profile $(DEMO)/profile.json --measured $(PLACE)/measured.json --tolerance $(DEMO_TOLERANCE) -o $(PLACE)/report.html
	$(PLANNER) compare $(PLACE)/planned.json $(PLACE)/measured.json --tolerance $(DEMO_TOLERANCE) --picture $(PLACE)/timeline.png --schedule $(PLACE)/schedule.json

# ---- benchmarks

BENCH := build/bench
BENCH_STEPS := 10

# where measured profiles lie beside what another planner found on them
REFERENCE ?= ../shared/reference
# more arguments, e.g. --model bert_96 --devices 4, --memory 24GiB, --baselines
BENCH_FLAGS ?=

bench-planner: $(READY) ## plan the measured profiles in $(REFERENCE): times, bounds, gaps, beside the published planner's
	$(BIN)/python -m planner.bench $(REFERENCE) $(BENCH_FLAGS)

bench-executor: $(READY) ## planned against measured (make demo first): paced within 10 %, unpaced for information
	@test -f $(DEMO)/2/planned.json || { echo 'bench-executor: run make demo first, its schedules are measured here' >&2; exit 2; }
	@mkdir -p $(BENCH)
	@failed=0; for devices in 1 2; do \
		echo "== the demo's schedule on $$devices virtual device(s), median of $(BENCH_STEPS) iterations after the first"; \
		$(EXECUTOR) run $(DEMO)/$$devices/schedule.json --data . --device virtual --steps $$(($(BENCH_STEPS) + 1)) -o $(BENCH)/paced$$devices.json || exit 1; \
		$(PLANNER) compare $(DEMO)/$$devices/planned.json $(BENCH)/paced$$devices.json --tolerance 10% || failed=1; \
		echo "== the same without pacing: what this machine's CPU makes of it, not gated"; \
		$(EXECUTOR) run $(DEMO)/$$devices/schedule.json --data . --device virtual --unpaced --steps 4 -o $(BENCH)/unpaced$$devices.json || exit 1; \
		$(PLANNER) compare $(DEMO)/$$devices/planned.json $(BENCH)/unpaced$$devices.json --tolerance 10% | head -2; \
	done; exit $$failed

bench-overhead: $(READY) ## what replaying costs beside a plain loop on one device where everything stays: at most 3 %
	$(BIN)/python -m tests.bench_overhead

# more arguments, e.g. --model gpt2 --dtype float32
EXACT_FLAGS ?=

bench-exact: $(READY) ## is training by schedule plain training? a table of models, placements and types
	$(BIN)/python -m tests.bench_exact $(EXACT_FLAGS)

KINDS := build/kinds
# memory of the device of each kind of plan, in percent of what plain training needs
KIND_SHARE_recompute := 40
KIND_SHARE_keep := 60
KIND_SHARE_resident := 85
KIND_FLAGS_recompute := --mode pp --activations recompute
KIND_FLAGS_keep := --updates host
KIND_FLAGS_resident :=

bench-estimate: $(READY) ## how far off are estimates? beside the profiles in $(REFERENCE)
	$(BIN)/python -m tests.bench_estimate $(REFERENCE)

bench-kinds: $(READY) ## planned against measured for plans of three kinds (make demo first), within 10 % and in the planned order
	@test -f $(DEMO)/profile.json || { echo 'bench-kinds: run make demo first, its profile is used here' >&2; exit 2; }
	@for kind in recompute keep resident; do $(MAKE) --no-print-directory bench-kind KIND=$$kind || exit 1; done
	@$(BIN)/python -c "$$ORDER" $(KINDS) recompute keep resident

.PHONY: bench-kind
bench-kind: FILES = $(KINDS)/$(KIND).schedule.json $(DEMO)/profile.json $(KINDS)/$(KIND).hardware.json
bench-kind: MEMORY = $(shell $(BIN)/python -c "$$PLAIN_PEAK" $(DEMO)/plain.json $(KIND_SHARE_$(KIND)))
bench-kind:
	@mkdir -p $(KINDS)
	@echo '== $(KIND): on a virtual device of $(MEMORY) bytes, $(KIND_SHARE_$(KIND)) % of what plain training needs'
	$(EXECUTOR) hardware --device virtual --devices 1 --memory $(MEMORY) --h2d $(DEMO_RATE) --d2h $(DEMO_RATE) --peer $(DEMO_RATE) --compute-scale $(DEMO_SCALE) -o $(KINDS)/$(KIND).hardware.json
	$(PLANNER) plan $(DEMO)/profile.json $(KINDS)/$(KIND).hardware.json --minibatch $(DEMO_MINIBATCH) $(KIND_FLAGS_$(KIND)) -o $(KINDS)/$(KIND).schedule.json
	$(PLANNER) simulate $(FILES) -o $(KINDS)/$(KIND).planned.json
	$(EXECUTOR) run $(KINDS)/$(KIND).schedule.json --data . --device virtual --steps $(BENCH_STEPS) --seed 0 -o $(KINDS)/$(KIND).measured.json
	$(PLANNER) compare $(KINDS)/$(KIND).planned.json $(KINDS)/$(KIND).measured.json --tolerance 10%

clean: ## remove what was built, but not the virtual environment
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# ---- what needs a few lines of Python

define SCHEMA
from pathlib import Path
import msgspec
from planner.contract.store import json_schemas
for name, schema in json_schemas().items():
    Path("profiles", name).write_bytes(msgspec.json.format(msgspec.json.encode(schema), indent=1) + b"\n")
endef
export SCHEMA

define ORDER
import sys
from pathlib import Path
from planner.contract.store import load_trace
folder, *kinds = sys.argv[1:]
def seconds(kind, run):
    times = sorted(load_trace(Path(folder, f"{kind}.{run}.json")).iteration_seconds[-9:])
    return times[len(times) // 2]
orders = {run: sorted(kinds, key=lambda kind: seconds(kind, run)) for run in ("planned", "measured")}
print("fastest first,", "; ".join(f"{run}: {', '.join(order)}" for run, order in orders.items()))
sys.exit(orders["planned"] != orders["measured"])
endef
export ORDER

define PLAIN_PEAK
import sys
from planner.contract.store import load_trace
print(load_trace(sys.argv[1]).devices[0].peak_bytes * int(sys.argv[2]) // 100)
endef
export PLAIN_PEAK
