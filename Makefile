# Every target does its own set-up: all it needs is Python >= 3.11 with pip, and git.
# `make demo` installs what the server needs, `make test` what its developers need too.

PYTHON ?= python3
VENV ?= .venv
# The one dependency whose default build may bring gigabytes of GPU libraries: the CPU build is
# preferred where the package index has one. `make demo TORCH=torch` takes what the index prefers.
TORCH ?= torch==2.13.0
TEST_WORKERS ?= 2
TESTS ?= tests
DURATIONS ?= 10
BENCH ?= peers
BENCH_ARGS ?= $(if $(filter peers,$(BENCH)),--short)
# A loaded machine must slow tests down, not fail them: one thread per worker, no spinning. A hundred
# servers are started, which should not compile their sources anew each time.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false \
	PYTHONDONTWRITEBYTECODE=

BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
SAY = @printf '\033[1m==> %s\033[0m\n'
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help

.PHONY: help
help: ## show this list
	@printf 'usage: make <target>\n\n'
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 12
	@printf '\nvariables: PYTHON=%s VENV=%s TORCH=%s TEST_WORKERS=%s TESTS=%s\n' \
		'$(PYTHON)' '$(VENV)' '$(TORCH)' '$(TEST_WORKERS)' '$(TESTS)'

.PHONY: demo
demo: $(STAMPS)/runtime ## start a server and hold 8 conversations with it, checking everything
	$(SAY) 'demo: sessions over real sockets against a separate server process'
	@$(BIN)/session-server demo
	$(SAY) 'next: $(BIN)/session-server serve, and open http://127.0.0.1:30000'

.PHONY: serve
serve: $(STAMPS)/runtime ## serve the embedded model
	@$(BIN)/session-server serve

.PHONY: test
test: $(STAMPS)/dev ## everything that must hold: lint, types, contracts, tests
	@$(MAKE) --no-print-directory -j2 lint compiled
	$(SAY) 'test: pytest $(TESTS) on $(TEST_WORKERS) workers'
	@$(TEST_ENV) $(BIN)/python -m pytest $(TESTS) -n $(TEST_WORKERS) --dist loadscope \
		--no-loadscope-reorder --durations $(DURATIONS)

# What tests import is compiled while mypy, which has one thread, takes its minute: without this each
# worker would compile all of it before its first test. What does not import, pytest says itself.
.PHONY: compiled
compiled: $(STAMPS)/dev ## compile what tests import, which `make test` does beside lint
	@$(TEST_ENV) $(BIN)/python -m pytest $(TESTS) --collect-only -qq >/dev/null 2>&1 || true

.PHONY: lint
lint: $(STAMPS)/dev ## style, format, types and import contracts
	$(SAY) 'lint: ruff check'
	@$(BIN)/ruff check .
	$(SAY) 'lint: ruff format'
	@$(BIN)/ruff format --check .
	$(SAY) 'lint: mypy --strict'
	@$(BIN)/mypy && $(BIN)/mypy examples
	$(SAY) 'lint: import contracts'
	@$(BIN)/lint-imports

CONNECTIONS ?= 5000

.PHONY: chaos
chaos: SEED ?= 1
chaos: $(STAMPS)/dev ## five thousand bad connections to one server (CONNECTIONS=, SEED=)
	$(SAY) 'chaos: $(CONNECTIONS) connections through a proxy that mistreats them'
	@$(TEST_ENV) $(BIN)/python -m tests.chaos --connections $(CONNECTIONS) --seed $(SEED)
	$(SAY) 'chaos: 1100 odd sockets and 1024 descriptors'
	@$(TEST_ENV) $(BIN)/python -m tests.chaos.odd_sockets

CYCLES ?= 1000

.PHONY: crashes
crashes: SEED ?= 1
crashes: $(STAMPS)/dev ## a thousand servers killed with kill -9 under sixteen clients (CYCLES=, SEED=)
	$(SAY) 'crashes: $(CYCLES) servers with one store, and clients that remember'
	@$(TEST_ENV) $(BIN)/python -m tests.chaos.crashes --cycles $(CYCLES) --seed $(SEED)

KILLS ?= 200
CUTS ?= 60

.PHONY: replicas
replicas: SEED ?= 1
replicas: $(STAMPS)/dev ## kill, pause and part replicas that share a store (KILLS=, CUTS=, SEED=; needs PostgreSQL)
	$(SAY) 'replicas: $(KILLS) servers and engines killed, under clients that remember'
	@REQUIRE_POSTGRES=1 $(TEST_ENV) $(BIN)/python -m tests.chaos.replicas --kills $(KILLS) --seed $(SEED)
	$(SAY) 'replicas: $(CUTS) times a line is cut, slowed, held or dies'
	@REQUIRE_POSTGRES=1 $(TEST_ENV) $(BIN)/python -m tests.chaos.partitions --cuts $(CUTS) --seed $(SEED)

LIVES ?= 3

.PHONY: torn-disk
torn-disk: SEED ?= 1
torn-disk: $(STAMPS)/dev ## crash, kill and fail a store at every point, on a simulated disk (LIVES=, SEED=; needs a C compiler)
	$(SAY) 'torn-disk: $(LIVES) lives of a store, from seed $(SEED) on'
	@$(TEST_ENV) $(BIN)/python -m tests.disk --lives $(LIVES) --seed $(SEED) --workers $(WORKERS)

.PHONY: load
load: $(STAMPS)/dev ## two thousand idle sockets, two hundred streams, then SIGTERM (wants a quiet machine)
	$(SAY) 'load: 2000 idle sockets, 200 turns that stream, SIGTERM'
	@$(TEST_ENV) $(BIN)/python -m tests.bench.load

SIM := $(BIN)/python -m tests.sim

.PHONY: sim
sim: $(STAMPS)/runtime ## simulate and check every step (SEED=7, SEEDS=0..99, STEPS=, REPLAY=FILE, ARGS=)
	$(SAY) 'sim: the whole server on a fake device, in virtual time'
	@$(SIM) $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) \
		$(if $(STEPS),--steps $(STEPS)) $(if $(REPLAY),--replay $(REPLAY)) $(ARGS)

.PHONY: soak
soak: SEEDS ?= 0..
soak: STEPS ?= 20000000
soak: $(STAMPS)/runtime ## twenty million checked steps of the simulator, on all cores (STEPS=, SEEDS=, REPORT=)
	$(SAY) 'soak: $(STEPS) steps, seeds $(SEEDS)'
	@$(SIM) --seeds $(SEEDS) --steps $(STEPS) $(if $(REPORT),--report $(REPORT))

.PHONY: soak-replicas
soak-replicas: SEEDS ?= 0..
soak-replicas: STEPS ?= 5000000
soak-replicas: $(STAMPS)/dev ## five million steps of replicas that share a simulated database (STEPS=, SEEDS=)
	$(SAY) 'soak-replicas: $(STEPS) steps, seeds $(SEEDS)'
	@$(TEST_ENV) $(BIN)/python -m tests.sim_replicas --seeds $(SEEDS) --steps $(STEPS) --jobs $(WORKERS)

.PHONY: seeded
seeded: $(STAMPS)/dev ## search for every seeded bug with the simulator, and write the table anew
	$(SAY) 'seeded: up to a million steps for each'
	@$(TEST_ENV) $(BIN)/python -m tests.mutants --anew

N ?= 300
WORKERS ?= 2

.PHONY: mutation
mutation: SEED ?= 1
mutation: $(STAMPS)/prove ## run tests on random mutants of the serving code (N=300, SEED=1, WORKERS=2, ARGS=)
	$(SAY) 'mutation: $(N) mutants, seed $(SEED)'
	@$(BIN)/python -m tests.mutation --mutants $(N) --seed $(SEED) --workers $(WORKERS) $(ARGS)

.PHONY: oracle
oracle: $(STAMPS)/dev ## measure how far each family of models is from transformers, and record it
	$(SAY) 'oracle: every family, page size and chunk size'
	@$(TEST_ENV) $(BIN)/python -m tests.oracle

SCHEMAS ?= 1000

.PHONY: structured
structured: SEED ?= 1
structured: $(STAMPS)/dev ## answers to a thousand JSON schemas, valid and the same in five ways (SCHEMAS=, SEED=)
	$(SAY) 'structured: $(SCHEMAS) schemas, seed $(SEED)'
	@$(TEST_ENV) $(BIN)/python -m tests.structured --schemas $(SCHEMAS) --seed $(SEED)

SGLANG_TESTS := tests/wire/test_sglang_clients.py tests/web/test_sglang.py tests/protocol/test_sglang.py

FRAMES ?= 1000000
SHOTS ?= 50000

.PHONY: fuzz
fuzz: SEED ?= 1
fuzz: $(STAMPS)/dev ## a million wrong frames into every protocol, fifty thousand to a server (FRAMES=, SHOTS=, SEED=)
	$(SAY) 'fuzz: $(FRAMES) frames into each protocol, $(SHOTS) over sockets, seed $(SEED)'
	@$(TEST_ENV) $(BIN)/python -m tests.fuzz --frames $(FRAMES) --wire $(SHOTS) --seed $(SEED)

.PHONY: observe
observe: $(STAMPS)/dev ## hold metrics, dashboard and alerts against a Prometheus that scrapes (needs prometheus)
	@command -v prometheus promtool >/dev/null || { echo 'install prometheus, which has promtool' >&2; exit 1; }
	$(SAY) 'observe: a server at work, scraped'
	@$(TEST_ENV) $(BIN)/python -m tests.observe

EXAMPLES ?= 100

.PHONY: schemathesis
schemathesis: SEED ?= 1
schemathesis: $(STAMPS)/prove ## hold a server process against its own OpenAPI document (EXAMPLES=, SEED=)
	$(SAY) 'schemathesis: $(EXAMPLES) examples of each operation, seed $(SEED)'
	@$(TEST_ENV) $(BIN)/python -m tests.fuzz.published --examples $(EXAMPLES) --seed $(SEED)

.PHONY: sglang
sglang: $(STAMPS)/dev ## hold the contract of SGLang's sessions against real server processes
	$(SAY) 'sglang: models of every layout'
	@$(TEST_ENV) $(BIN)/python -m pytest $(SGLANG_TESTS)

.PHONY: rewinds
rewinds: export PROVE := 1
rewinds: $(STAMPS)/dev ## change histories on every family, at every residue of the page size
	$(SAY) 'rewinds: every family against transformers, over sockets'
	@$(TEST_ENV) $(BIN)/python -m pytest tests/wire/test_rewinds.py

.PHONY: agents
agents: $(STAMPS)/dev ## measure what loops of agents compute, on every layout of memory
	$(SAY) 'agents: whole conversations over Chat Completions'
	@$(TEST_ENV) $(BIN)/python -m tests.agents

CPUS ?= avx512 avx2 portable

.PHONY: cpus
cpus: $(STAMPS)/dev ## hold models against transformers as CPUs without the best instructions would (CPUS=)
	@for cpu in $(CPUS); do \
		printf '\033[1m==> %s\033[0m\n' "cpus: $$cpu"; \
		SESSION_SERVER_CPU=$$cpu $(TEST_ENV) $(BIN)/python -m pytest tests/oracle tests/runner \
			tests/differential -n $(TEST_WORKERS) || exit 1; \
	done

.PHONY: sanitizers
sanitizers: $(STAMPS)/prove ## run the kernels' tests under ASan, UBSan and TSan (needs g++)
	$(SAY) 'sanitizers: address, undefined behavior, threads'
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(TEST_ENV) $(BIN)/python -m tests.sanitizers

.PHONY: gpu-kernels
gpu-kernels: $(STAMPS)/dev ## compile every kernel for GPUs that are not here: registers, shared memory, spills
	$(SAY) 'gpu-kernels: all specializations for sm_80, sm_90 and sm_100'
	@$(BIN)/python -m tests.gpu.ahead_of_time

BUNDLE ?= gpu-bundle
GPU_PYTHON ?= 3.11
GPU_WHEELS := msgspec llguidance~=1.9 gguf pytest pytest-timeout iniconfig pluggy packaging pygments psutil hypothesis sortedcontainers \
	matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing python-dateutil six
MAX_BUNDLE_MIB := 60

# Only what this target has made is removed: it has a file of this name.
GPU_BUNDLE_MARK := .gpu-bundle

.PHONY: gpu-bundle
gpu-bundle: ## a folder to take to a machine with a GPU, for `make gpu-check` there (BUNDLE=, GPU_PYTHON=)
	$(SAY) 'gpu-bundle: sources, and wheels for Python $(GPU_PYTHON), in $(BUNDLE)'
	@test ! -e '$(BUNDLE)' || test -e '$(BUNDLE)/$(GPU_BUNDLE_MARK)' \
		|| { echo '$(BUNDLE) exists and is no bundle of ours: name another with BUNDLE=' >&2; exit 1; }
	@rm -rf '$(BUNDLE)' && mkdir -p '$(BUNDLE)/wheels' && touch '$(BUNDLE)/$(GPU_BUNDLE_MARK)'
	@git archive HEAD | tar -x -C '$(BUNDLE)'
	@$(PYTHON) -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
		--platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_31_x86_64 -d '$(BUNDLE)/wheels' $(GPU_WHEELS)
	@$(PYTHON) -m pip --disable-pip-version-check download -q --only-binary=:all: --python-version $(GPU_PYTHON) \
		--platform manylinux2014_x86_64 -d '$(BUNDLE)/wheels' pydantic
	@size=$$(du -sm '$(BUNDLE)' | cut -f1); echo "$(BUNDLE): $$size MiB"; test "$$size" -le $(MAX_BUNDLE_MIB)

GPU_OUT ?= gpu-check
# Who names no Python means the environment of `make install`, if there is one.
GPU_CHECK_PYTHON = $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))

.PHONY: gpu-check
gpu-check: ## on a machine with a GPU: kernels, graphs, figures, 40 minutes at most (GPU_OUT=, ARGS=, PYTHON=)
	@$(GPU_CHECK_PYTHON) -m tests.gpu.check --out '$(GPU_OUT)' $(ARGS)

.PHONY: cluster
cluster: export PROVE := 1
cluster: $(STAMPS)/ray ## replicas under Ray Serve: sticky, replaced, grown, taken down (installs Ray)
	$(SAY) 'cluster: two replicas, from the command line to the last process'
	@$(TEST_ENV) $(BIN)/python -m pytest tests/deploy

TURNOVERS ?= 3

.PHONY: cluster-kills
cluster-kills: SEED ?= 1
cluster-kills: $(STAMPS)/ray ## kill, replace and scale replicas under Ray Serve (KILLS=, TURNOVERS=, SEED=; needs PostgreSQL)
	$(SAY) 'cluster-kills: $(KILLS) replicas, engines and workers of Ray killed, under 64 conversations'
	@REQUIRE_POSTGRES=1 $(TEST_ENV) $(BIN)/python -m tests.chaos.ray_cluster --kills $(KILLS) --seed $(SEED)
	$(SAY) 'cluster-kills: $(TURNOVERS) times all replicas are replaced, and scaled from 3 to 1 to 3'
	@REQUIRE_POSTGRES=1 $(TEST_ENV) $(BIN)/python -m tests.chaos.ray_cluster --rolling $(TURNOVERS) --seed $(SEED)

.PHONY: everything
everything: export PROVE := 1
everything: test ## make test with every combination of settings

CLIENTS := $(VENV)/clients

.PHONY: clients
clients: $(STAMPS)/dev ## run clients that others wrote, unmodified, against a server (needs Node and libnss3)
	@$(PIP) install --quiet --upgrade --target $(CLIENTS)/agents openai-agents==0.24.0
	@$(PIP) install --quiet --upgrade --target $(CLIENTS)/langchain langchain-openai==1.7.3
	@$(PIP) install --quiet --upgrade --target $(CLIENTS)/litellm litellm==1.106.2 mcp==2.3.0
	@mkdir -p $(CLIENTS)/node $(CLIENTS)/chromium
	@npm install --silent --no-audit --no-fund --prefix $(CLIENTS)/node openai@6.49.0 ws
	@npm install --silent --no-audit --no-fund --prefix $(CLIENTS)/chromium \
		@sparticuz/chromium@147.0.0 puppeteer-core@24.43.1
	$(SAY) 'clients: what others have written, over HTTP and WebSocket'
	@$(TEST_ENV) $(BIN)/python -m tests.clients $(CLIENTS)

AXE ?= axe-core@4.14.1

.PHONY: browser
browser: $(STAMPS)/prove ## drive the page in Chromium (CHROMIUM=PATH; needs Node; KEYS= for pytest -k)
	@$(BIN)/python -m tests.browser.chromium
	@mkdir -p $(CLIENTS)/axe
	@npm install --silent --no-audit --no-fund --prefix $(CLIENTS)/axe $(AXE)
	$(SAY) 'browser: the modules of the page that need no document'
	@node --test $(wildcard tests/browser/*.test.mjs)
	$(SAY) 'browser: the page and the dashboard in Chromium'
	@CLIENTS=$(CLIENTS) $(TEST_ENV) $(BIN)/python -m pytest tests/browser $(if $(KEYS),-k '$(KEYS)')

PROOFS ?= everything cpus sanitizers sglang fuzz schemathesis structured oracle agents observe clients browser cluster cluster-kills chaos crashes replicas torn-disk load seeded \
	soak soak-replicas mutation

.PHONY: prove
prove: $(STAMPS)/prove ## all of the above that proves something, and how long each took (PROOFS=)
	@failed=; for proof in $(PROOFS); do \
		began=$$(date +%s); \
		$(MAKE) --no-print-directory $$proof && went=held || { went=FAILED; failed="$$failed $$proof"; }; \
		took="$$took$$(printf '%-12s %s after %d s' $$proof $$went $$(($$(date +%s) - began)))\n"; \
	done; \
	printf '\033[1m==> prove\033[0m\n'"$$took"; test -z "$$failed"

.PHONY: bench
bench: $(STAMPS)/runtime ## measure what a session costs, in ten minutes (BENCH=peers, BENCH_ARGS=--short)
	$(SAY) 'bench: $(BENCH)'
	@$(BIN)/session-server bench $(BENCH) $(BENCH_ARGS)

.PHONY: format
format: $(STAMPS)/dev ## rewrite the sources in house format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: install
install: $(STAMPS)/dev ## the development environment, without running anything

.PHONY: wheel
wheel: $(STAMPS)/runtime ## build dist/*.whl
	@$(PIP) wheel --quiet --no-deps --wheel-dir dist .

.PHONY: clean
clean: ## remove the environment and everything generated
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache

$(STAMPS)/venv:
	$(SAY) 'setup: environment in $(VENV)'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'Python 3.11 or newer is needed; name one with PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	$(SAY) 'setup: $(TORCH)'
	@case '$(TORCH)' in \
		*==*+* | */* ) $(PIP) install --progress-bar on '$(TORCH)' ;; \
		*==* ) $(PIP) install --progress-bar on '$(TORCH)+cpu' 2>/dev/null \
			|| $(PIP) install --progress-bar on '$(TORCH)' ;; \
		* ) $(PIP) install --progress-bar on '$(TORCH)' ;; \
	esac
	@touch $@

KERNELS := $(wildcard session_server/runner/native/CMakeLists.txt session_server/runner/native/src/* \
	session_server/runner/native/src/isa/*)

$(STAMPS)/runtime: $(STAMPS)/torch pyproject.toml $(KERNELS)
	$(SAY) 'setup: session-server and what it needs at run time'
	@$(PIP) install --quiet --editable .
	@touch $@

# Not after `runtime`, which would build the kernels a second time.
$(STAMPS)/dev: $(STAMPS)/torch pyproject.toml $(KERNELS)
	$(SAY) 'setup: session-server, what it needs at run time, and development tools'
	@$(PIP) install --quiet --editable '.[dev]'
	@touch $(STAMPS)/runtime $@

$(STAMPS)/prove: $(STAMPS)/dev pyproject.toml
	$(SAY) 'setup: what make prove needs besides'
	@$(PIP) install --quiet --editable '.[dev,prove]'
	@touch $@

$(STAMPS)/ray: $(STAMPS)/dev pyproject.toml
	$(SAY) 'setup: Ray Serve'
	@$(PIP) install --quiet --editable '.[dev,ray]'
	@touch $@
