# `make train` runs the quickstart from data to report, `make test` checks the whole house, `make bench` measures speed,
# `make verify-layouts` proves every corner of the layouts equal to one process, `make docs` builds the site of docs/.

PYTHON ?= python3
JOB    := recipes/quickstart_2cpu_bf16.toml
RUN    := runs/quickstart
DATA   := runs/quickstart_data
VENV   := .venv
BIN    := $(VENV)/bin
# The test files that have tests of a mark: pytest reads no others for these.
WAITS  = $(shell grep -rl 'mark\.waits' tests --include='test_*.py')
SERIAL = $(shell grep -rl 'mark\.serial' tests --include='test_*.py')

# A base interpreter that has a new enough torch (a GPU image, say) lends it, with its triton; otherwise constraints.txt
# pins them.
BASE_TORCH := from importlib.metadata import version; v = version("torch").split("."); exit((int(v[0]), int(v[1])) < (2, 11))

.PHONY: torchtitan bridge astra-sim load-records what-if-pairs design-evidence trainer-names wheel lock locked slurm pictures evidence gpu gpu-wheels train test test-slow test-all durations mutants faults megatron docs accuracy check lint types report bench bench-engine bench-peers bench-rivals bench-tuning verify-layouts neutral-commits reading-material reading-table
.DELETE_ON_ERROR:

# Tests start hundreds of processes: where bytecode is not kept, each of them compiles the package again.
test test-slow test-all durations mutants: export PYTHONDONTWRITEBYTECODE =

train: $(RUN)/plan.json
	$(BIN)/moewright train $(JOB) --out $(RUN) --extend

report:
	$(BIN)/moewright report $(RUN)

bench: bench-engine
	$(BIN)/moewright bench search

bench-engine: | $(VENV)/.ready
	$(BIN)/python -m benchmarks.engine

# The engine in turns with other trainers, which are installed under runs/peers.
bench-peers: | $(VENV)/.ready
	$(BIN)/python -m benchmarks.peers

# Other planners on the published runs (minutes), from checkouts of them and the JSON of `moewright validate` with
# `--leave-out publisher`: docs/rivals.md.
bench-rivals: | $(VENV)/.ready
	$(BIN)/python -m benchmarks.rivals $(or $(REPORT),$(error REPORT=FILE, SIMUMAX=DIR, LLM_ANALYSIS=DIR)) \
	    --simumax $(SIMUMAX) --llm-analysis $(LLM_ANALYSIS)

# One GPU in two commands of eight minutes, PART=tests and PART=speed, each of which goes on where it was cut off: OUT/<card>.md.
# A machine without a network takes WHEELS, the folder that `make gpu-wheels` filled, and its own torch, Triton and pytest.
OUT  ?= docs/gpu
PART ?= all
GPU_SITE ?= $(CURDIR)/runs/gpu_site
ifdef WHEELS
gpu: $(GPU_SITE)
	PYTHONPATH=$(CURDIR)/src:$(GPU_SITE) $(PYTHON) -m benchmarks.gpu --out $(OUT) --part $(PART) $(GPU_OPTIONS)

$(GPU_SITE): $(WHEELS)
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target $@ $(WHEELS)/*.whl
else
gpu: $(VENV)/.dev
	$(BIN)/python -m benchmarks.gpu --out $(OUT) --part $(PART) $(GPU_OPTIONS)
endif

gpu-wheels: | $(VENV)/.ready
	$(BIN)/python -m benchmarks.gpu.wheels $(or $(WHEELS),$(error WHEELS=DIR, a folder for the wheels))

# ASTRA-sim, from a checkout of it with its submodules, runs the traces of plans; its steps beside the planner's (minutes).
astra-sim: | $(VENV)/.ready
	$(BIN)/python -m benchmarks.astra_sim $(or $(ASTRA_SIM),$(error ASTRA_SIM=DIR, a checkout of ASTRA-sim))

# Forecasts of expert loads beside two naive ones, on records of others and of own runs (seconds).
load-records: | $(VENV)/.ready
	$(BIN)/python -m benchmarks.load_records $(or $(AHEAD),$(error AHEAD=10, records ahead)) \
		$(or $(RECORDS),$(error RECORDS="FILE RUN", printed loads or folders of runs))

# How near tuning comes to the best of a space; every point of it is run.
bench-tuning: | $(VENV)/.ready
	$(BIN)/python -m benchmarks.tuning recipes/tune_bad_start.toml

# Two workers take single-process tests and rank processes side by side; the tests that mostly wait run beside them.
spread  = $(BIN)/pytest -n 2 --dist worksteal -m "$(1) and not waits and not thorough and not serial"
waiting = $(BIN)/pytest -q -m "$(1) and waits and not thorough" $(WAITS)

# What takes seconds comes first; what times the machine runs alone afterwards.
test: lint
	($(BIN)/mypy && $(call waiting,not slow)) & beside=$$!; $(call spread,not slow); tests=$$?; wait $$beside && exit $$tests
	$(BIN)/pytest -m "serial and not slow and not thorough" $(SERIAL)

# Longer proofs of what `make test` has touched upon: CI runs them after it.
test-slow: $(VENV)/.dev
	$(call waiting,slow) & beside=$$!; $(call spread,slow); tests=$$?; wait $$beside && exit $$tests
	$(BIN)/pytest -m "serial and slow and not thorough" $(SERIAL)

# Which tests are slow: tests/durations.tsv, measured on this machine (half an hour).
durations: $(VENV)/.dev
	: > tests/durations.tsv
	$(BIN)/pytest -n 2 --dist worksteal -m "not waits and not thorough and not serial" --write-durations

test-all: check
	$(BIN)/pytest -n 2 --dist worksteal -m "not serial"
	$(BIN)/pytest -m serial $(SERIAL)

# One-line faults of the package, each of which a test that CI runs has to catch; and those that a user's own run sees, or
# `moewright verify` of its job.
mutants: $(VENV)/.dev
	$(BIN)/python tests/mutants/run.py
	PYTHONPATH=tests $(BIN)/python -m mutants.seen

# Mutated inputs for every reader; then cells of the fault matrix, until TRIES of them bit (four of five take 5 CPU seconds,
# those of torchrun 20), or 22 minutes are over, and the page of what held. Started again, it goes on where it stood: tries
# are kept in runs/faults.jsonl.
TRIES ?= 60
faults: $(VENV)/.dev
	$(BIN)/python tests/faults/fuzz.py
	$(BIN)/python tests/faults/tries.py --tries $(TRIES) --jobs 2 --minutes 22 --log runs/faults.jsonl

# Trials on a real Slurm of two nodes on this machine: a job cancelled, a node lost, the tuning killed (minutes; root,
# and Debian's slurm-wlm and munge, which are installed where they are not there).
slurm: $(VENV)/.dev
	{ command -v slurmctld && command -v munged; } || apt-get install -y -qq slurm-wlm munge
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/slurm/run.py

# Every corner of the layouts, and a run that moves between every pair of some (minutes each); `make test` has some.
verify-layouts: $(VENV)/.dev
	$(BIN)/pytest tests/spawn/test_layout_sweep.py tests/spawn/test_checkpoint_layouts.py -m "thorough or not thorough"

# What a trace says of twenty changes of a run, beside the run with each (a quarter of an hour).
what-if-pairs: $(VENV)/.dev
	$(BIN)/python tests/what_if/pairs.py

# Megatron-LM's own code, from a checkout of it in MEGATRON_LM, starts every export (minutes); `make test` uses what it said.
megatron: $(VENV)/.dev
	$(BIN)/python tests/megatron/run.py $(or $(MEGATRON_LM),$(error MEGATRON_LM=DIR, a checkout of Megatron-LM))

# The code of torchtitan, or of Megatron Bridge with Megatron-LM's, from checkouts, starts the best plans of searches (minutes).
torchtitan: $(VENV)/.dev
	$(BIN)/python tests/peers/run.py torchtitan $(or $(COUNT),280) $(or $(TORCHTITAN),$(error TORCHTITAN=DIR, a checkout of torchtitan))

bridge: $(VENV)/.dev
	$(BIN)/python tests/peers/run.py bridge $(or $(COUNT),280) $(or $(BRIDGE),$(error BRIDGE=DIR, a checkout of Megatron-Bridge)) \
		$(or $(MEGATRON_LM),$(error MEGATRON_LM=DIR, a checkout of Megatron-LM))

# Every published run predicted without its publisher, as docs/accuracy.md (minutes).
accuracy: | $(VENV)/.ready
	$(BIN)/python -m docs.tools.accuracy
	$(BIN)/python -m docs.tools.published_runs

# Which options trainers have, from checkouts of them below CHECKOUTS: the tables of the readers; what changed is printed.
trainer-names: | $(VENV)/.ready
	$(BIN)/python -m docs.tools.trainer_names $(or $(CHECKOUTS),$(error CHECKOUTS=DIR, with a checkout a repository))

# The public files of the draws that docs/log tells of, cloned below MATERIAL at their commits; DRAW=11 takes one draw alone.
HOST ?= https://github.com
reading-material: | $(VENV)/.ready
	$(BIN)/python -m docs.tools.reading_material $(or $(MATERIAL),$(error MATERIAL=DIR, a folder for checkouts)) "$(HOST)" "$(DRAW)"

# Commits of public forks that change scripts and nothing of their training, each held beside the one before.
neutral-commits: | $(VENV)/.ready
	$(BIN)/python -m docs.tools.neutral_commits $(or $(MATERIAL),$(error MATERIAL=DIR, a folder for checkouts)) "$(HOST)"

# How the scripts and configurations below MATERIAL are read, a line each; LIST names some of them.
reading-table: | $(VENV)/.ready
	$(BIN)/python -m docs.tools.reading_table $(or $(MATERIAL),$(error MATERIAL=DIR, a folder of checkouts)) $(LIST)

check: lint types

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

# The choices that published runs made, as the planner reads them: after a change of the tables.
evidence: | $(VENV)/.ready
	$(BIN)/python -m docs.tools.measured_choices

# Budgets by the calendar and loss laws beside what their papers print.
design-evidence: $(VENV)/.dev
	$(BIN)/pytest -v -n 0 tests/cost/test_loss_laws.py tests/published/test_loss_ranks.py tests/rules/test_goodput.py tests/rules/test_slow_workers.py tests/rules/test_checkpoint_interval.py

# The pictures of the studio's pages in docs/studio, by a headless chromium; PAGES names some. With TASKS=1 first what people
# do there and on a terminal of 80 columns, whole: every task at three sizes, every page in every state, by axe too (minutes).
pictures: $(VENV)/.dev
	$(if $(TASKS),$(BIN)/pytest -q -m "not serial" tests/browser tests/cli/test_terminal_tasks.py)
	$(BIN)/python -m docs.tools.pictures $(PAGES)

# The wheel, in dist/.
wheel: | $(VENV)/.ready
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

# The site of docs/, in site/; the build asks no other host for anything.
docs: $(VENV)/.docs
	$(BIN)/python -m docs.tools.job_reference
	$(BIN)/python -m docs.tools.command_reference
	$(BIN)/python -m docs.tools.families
	$(BIN)/python -m docs.tools.foreign_sources
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(DATA)/corpus.json: | $(VENV)/.ready
	$(BIN)/moewright data build --out $(DATA)

runs/machine.toml: | $(VENV)/.ready
	$(BIN)/moewright bench machine --nproc 2 --out $@

$(RUN)/plan.json: $(JOB) runs/machine.toml | $(DATA)/corpus.json
	$(BIN)/moewright plan $(JOB) --layout tp1,ep2 --json $@

$(VENV)/constraints.txt: constraints.txt
	if $(PYTHON) -c '$(BASE_TORCH)' 2>/dev/null; then \
	    $(PYTHON) -m venv --system-site-packages $(VENV) && grep -vE '^(torch|triton)==' constraints.txt > $@; \
	else \
	    $(PYTHON) -m venv $(VENV) && cp constraints.txt $@; \
	fi

$(VENV)/.ready: $(VENV)/constraints.txt pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -c $< -e '.[engine,track]'
	touch $@

$(VENV)/.dev: $(VENV)/constraints.txt pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -c $< -e '.[dev]'
	touch $@ $(VENV)/.ready

# Every package of constraints.txt by its hash, and the project without a build that fetches anything.
lock: | $(VENV)/.ready
	$(BIN)/python -m docs.tools.lock

locked:
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	cp constraints.txt $(VENV) && touch $(VENV)/.ready $(VENV)/.dev $(VENV)/.docs

$(VENV)/.docs: $(VENV)/constraints.txt pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -c $< -e '.[docs]'
	touch $@
