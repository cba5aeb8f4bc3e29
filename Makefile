# Two commands do all the set-up on a bare Debian 12 with Python 3.11 and g++: `make demo` and `make test`.
# A second run sees by the stamps in .venv that there is nothing left to set up.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Any Python from 3.10 on; the virtual environment is made with it.
PYTHON ?= python3
# Arguments for the program behind a target: `make test ARGS='tests/kernels -k linear'`.
ARGS ?=
# For how many seconds `make coverage` runs the cases of a test function.
ENOUGH ?= inf

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
RESULTS := build/test-results
CORE := build/core/liboctet_core.a
# With the reason of every test that was skipped. Safe path: children that are `python -c` test the package that is
# installed too, and not the one in the folder where they start.
# A process for each core, each on one thread: two that both use all cores wait for each other. Each begins with whole
# files, whose fixtures are made once, and takes from the other's when it is done.
PYTEST := OMP_NUM_THREADS=1 PYTHONSAFEPATH=1 pytest -rs -n auto --dist worksteal
PACKAGES := quant kernels observers calibrate
# Those with a plus between run side by side: each takes one core.
CHECKS := lint types+docs build runner test test-no-compiler test-arm

say := printf '\n--- %s\n'
in_venv := . $(BIN)/activate &&

# No target that `make help` names is a file.
.PHONY: FORCE $(shell sed -nE 's/^([a-z-]+):.*## .*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## What can be asked for
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r name what; do \
	    printf '  make %-18s %s\n' "$$name" "$$what"; done

demo: ## Quantise two trained networks in one call each; print size, latency and accuracy of both
	@# The kernels' core, which is most of what is compiled, needs no torch: it is compiled while torch is fetched. Nothing
	@# is installed that only tests and lint need.
	@[[ -f $(STAMPS)/build ]] || ! command -v "$${CXX:-g++}" >/dev/null || \
	    $(MAKE) --no-print-directory -j2 $(STAMPS)/package core
	@$(MAKE) --no-print-directory $(STAMPS)/build
	@$(say) "running tutorials/demo.py (fetches 33 MB of trained weights and data the first time)"
	@$(in_venv) python tutorials/demo.py $(ARGS)

tutorial: build ## Calibrate a real CNN over a folder, read the report, fix one bad layer: tutorials/README.md
	@$(say) "running tutorials/fix_a_layer.py (fetches 33 MB of trained weights and photos the first time)"
	@$(in_venv) python tutorials/fix_a_layer.py $(ARGS)

tutorial-qat: build ## Train a CNN for int8, an LSTM, and a CNN for 4-bit weights; plots in tutorials/out (half an hour)
	@for name in qat_cnn qat_lstm qat_4bit; do \
	    $(say) "running tutorials/$$name.py (trains the float network the first time)"; \
	    $(in_venv) python tutorials/$$name.py $(ARGS); \
	done

test: build ## All tests, on every backend of this machine
	@$(say) "running the tests"
	@[[ -f kernels/_octet.so ]] || export QUANT_EXTENSION=none; \
	    $(in_venv) $(PYTEST) --junitxml=$(RESULTS)/test.xml $(ARGS)

coverage: build $(STAMPS)/coverage ## Lines and branches of the packages that tests execute, and those they do not: ENOUGH=2 ARGS='tests/calibrate' (hours for all)
	@$(say) "running the tests under coverage.py"
	@# What runs where there are no compiled kernels are lines too: the tests of the kernels run once more without them.
	@# A capture has a trace function of its own in a user's forward, in whose place coverage.py's stays in a third run; some
	@# tests fail by that, which counts for nothing. Others that fail do not keep the report back.
	@$(in_venv) cd build && export OMP_NUM_THREADS=1 PYTHONSAFEPATH=1 COVERAGE_FILE=$(CURDIR)/build/coverage/python; \
	    export COVERAGE_RCFILE=$(CURDIR)/pyproject.toml status=0; mkdir -p coverage; coverage erase; \
	    run() { coverage run -m pytest -q -n 0 -o timeout=3600 --rootdir=.. -c ../pyproject.toml --enough=$(ENOUGH) "$$@" || status=1; }; \
	    run $(addprefix ../,$(if $(ARGS),$(ARGS),tests)); \
	    [[ -n '$(ARGS)' ]] || QUANT_EXTENSION=none run ../tests/kernels; \
	    [[ -n '$(ARGS)' ]] || { kept=$$status; run --keep-tracer ../tests/quant/test_capture*.py; status=$$kept; }; \
	    coverage combine -q; coverage report --skip-covered --show-missing; exit $$status

coverage-kernels: build ## Lines and branches of the C++ that tests, fuzzers and the runner's tests execute: ARGS='--enough 2 --missing' (an hour)
	@$(in_venv) PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 python tests/kernels/cpp_coverage.py $(ARGS)

test-random: build ## 500 random networks of each of two kinds through static quantisation, saving and loading (minutes)
	@$(say) "drawing random networks"
	@$(in_venv) OCTET_RANDOM_NETWORKS=$${OCTET_RANDOM_NETWORKS:-500} $(PYTEST) -n 0 -s -o timeout=3600 tests/quant/test_static_random.py $(ARGS)

test-zoo: build $(STAMPS)/zoo ## 160 architectures with random weights, static and trained for int8: tests/zoo/run.py --help (an hour)
	@$(say) "quantising the zoo (installs some hundred megabytes of model libraries the first time)"
	@$(in_venv) OMP_NUM_THREADS=1 python tests/zoo/run.py $(ARGS)

test-generate: build $(STAMPS)/zoo ## generate() of int8 decoders with cache, beside simulation and float: tests/zoo/generate.py --help (10 minutes)
	@$(say) "generating text with int8 models (installs some hundred megabytes of model libraries the first time)"
	@$(in_venv) OMP_NUM_THREADS=1 python tests/zoo/generate.py $(ARGS)

test-integrations: build $(STAMPS)/integrations ## The tests that need Lightning, transformers or Accelerate, in the environment that holds them (minutes)
	@$(say) "running the tests of integrations (installs some 230 MB of libraries the first time)"
	@[[ -f kernels/_octet.so ]] || export QUANT_EXTENSION=none; \
	    $(in_venv) $(PYTEST) tests/quant/test_integrations.py tests/quant/hostile/test_real_libraries.py \
	    tests/quant/language tests/zoo/test_generate.py tests/zoo/test_slice.py \
	    tests/test_readme.py::test_what_needs_another_library_runs $(ARGS)

golden: build ## Whether 3,000 random networks give the same bytes as in another checkout: ARGS='--against PATH' (10 minutes a side)
	@$(in_venv) python tests/golden/run.py $(ARGS)

test-hostile: build ## Every hostile forward of the catalogue alone and as a child of another model, and the faults users reported
	@$(say) "quantising hostile forwards"
	@$(in_venv) OCTET_HOSTILE_NESTED=1 $(PYTEST) tests/quant/hostile $(ARGS)

test-no-compiler: install ## The tests as on a machine without a compiler, on the reference backend alone
	@$(say) "running the tests without the compiled kernels"
	@# Benchmarks, and tutorials that train, call what the other tests call, for minutes; ranks, the fuzzers' own harness,
	@# and training under torch.compile, call no kernel. What is said of the sources, the harness of the zoo and runs that are
	@# killed and go on are the same with kernels, and so is the Python that looks at a model before a kernel is called: what
	@# hostile forwards and random ones are recorded as, which integers are chosen, what is searched and what is printed.
	@# Files for others, and models of others, are the same bytes too. There is no compiler either, as on a machine that has
	@# none. Of the documentation the README's commands are run, which a new user meets first.
	@# What trainers and models of other libraries call is the same Python as well, and so is training, but for the fake
	@# quantisers that tests/observers has. A test that names the reference or oneDNN calls what it calls with kernels.
	@# Files for the runner are written there too, and read by the one that `make runner` left.
	@[[ ! -x build/octet-run ]] || export OCTET_RUNNER=$(CURDIR)/build; \
	    $(in_venv) QUANT_EXTENSION=none CXX=/nonexistent $(PYTEST) --junitxml=$(RESULTS)/test-no-compiler.xml \
	    $(addprefix --ignore=tests/,test_packaging.py test_typing.py test_imports.py test_architecture.py test_golden.py) \
	    $(addprefix --ignore=tests/,benchmarks zoo/test_harness.py) \
	    $(addprefix --ignore=tests/tutorials/,test_fix_a_layer.py test_qat_tutorials.py test_fashion.py) \
	    $(addprefix --ignore=tests/calibrate/,test_checkpoint.py test_command.py test_distributed.py) \
	    $(addprefix --ignore=tests/,observers/test_distributed.py quant/test_qat_ranks.py) \
	    $(addprefix --ignore=tests/quant/,hostile/test_catalogue.py test_random_forwards.py test_static_random.py) \
	    $(addprefix --ignore=tests/quant/,test_reconstruction.py test_rounding.py test_smoothing.py test_names_decide_nothing.py) \
	    $(addprefix --ignore=tests/quant/,test_altered_files.py test_autoquant.py test_sensitivity.py test_cli_calibrate.py test_cli_shell.py) \
	    $(addprefix --ignore=tests/quant/,test_dynamic_rounding.py test_export_onnx.py test_onnx_calls.py test_qdq.py) \
	    $(addprefix --ignore=tests/quant/,test_from_torch_ao.py test_page.py test_load_without_capture.py) \
	    $(addprefix --ignore-glob=tests/quant/,test_capture*.py test_called_*.py test_first_call*.py test_qat*.py test_onnx*.py) \
	    $(addprefix --ignore=tests/quant/,test_calibration_threads.py test_copying.py test_further.py test_widening.py) \
	    $(addprefix --ignore=tests/quant/,test_benchmark.py test_cli_export.py test_load_onnx.py test_runner_memory.py test_torch_export.py) \
	    $(addprefix --ignore=tests/quant/,test_range_steps.py test_capture_numbers.py test_island_results.py test_block_runs.py test_shared_layers.py) \
	    $(addprefix --ignore=tests/,observers/test_rounding.py quant/hostile/test_reported_tools.py) \
	    $(addprefix --ignore=tests/,quant/language quant/test_integrations.py quant/hostile/test_real_libraries.py zoo/test_generate.py) \
	    -k 'not [reference- and not [onednn-' \
	    --deselect tests/test_readme.py::test_what_needs_another_library_runs \
	    $(addprefix --ignore=tests/,zoo/test_slice.py tutorials/test_gallery.py tutorials/test_demo.py tutorials/test_serving.py tutorials/test_shards.py) \
	    --deselect 'tests/test_readme.py::test_what_it_shows_runs[docs' \
	    --deselect tests/kernels/test_fuzzing.py::test_it_finds_what_is_wrong \
	    --deselect tests/kernels/test_fuzzing.py::test_a_case_that_hangs_ends_with_the_program \
	    --deselect tests/quant/test_qat_where.py::test_compiled_without_a_graph_break $(ARGS)

test-arm: install ## Kernel and dynamic tests on emulated aarch64
	@$(say) "running the kernel and dynamic tests on aarch64, emulated"
	@status=0; $(in_venv) .ci/arm/test --junitxml=$(RESULTS)/test-arm.xml $(ARGS) || status=$$?; \
	    if ((status == 77)); then $(say) "test-arm was skipped, for the reason above"; else exit $$status; fi

lint: install ## Formatting, lint, and links of the documentation that lead out of it or nowhere
	@$(say) "checking format, lint, and the documentation's links"
	@status=0; $(in_venv) { ruff format --check . || status=1; ruff check . || status=1; \
	    python docs/site/links.py || status=1; }; exit $$status

format: install ## Format, and fix what lint can fix by itself
	@$(in_venv) ruff format . && ruff check --fix .

types: install ## Types: mypy, strict, on the packages
	@$(say) "checking types"
	@# Not from here: mypy would take the folder quant/ for the whole package, which has parts in other folders.
	@$(in_venv) cd $(VENV) && mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache

check: install ## What CI runs: lint, types, all tests, with and without the compiled kernels, on aarch64
	@# The root for aarch64 is mostly a download, so it is made beside the tests, and what is compiled for it takes what
	@# they leave of the cores; test-arm waits for both, and says what is wrong with them. Not beside the build: with its
	@# compiler apt may renew the one of this machine.
	@# What the documentation is built with, and the trainers that integrations are for, are installed first, since that
	@# links the package anew, which mypy reads. Without those trainers their tests are skipped, with the reason.
	@rm -rf $(RESULTS); failed=0; table=(); $(MAKE) -k --no-print-directory $(STAMPS)/docs $(STAMPS)/integrations || true; \
	for step in $(CHECKS); do \
	    start=$$SECONDS; verdict=passed; jobs=(); [[ $$step != *+* ]] || jobs=(-k -j2 --output-sync=target); \
	    $(MAKE) --no-print-directory $${jobs[@]} $${step//+/ } || { verdict=FAILED; failed=1; }; \
	    table+=("$$(printf '%-20s %-7s %5d s' $$step $$verdict $$((SECONDS - start)))"); \
	    [[ $$step != build ]] || PYTHON=$(CURDIR)/$(BIN)/python nice -n 19 .ci/arm/test --build-only >/dev/null 2>&1 & \
	done; \
	$(say) "$$(printf 'wall time: %d min %d s' $$((SECONDS / 60)) $$((SECONDS % 60)))"; \
	printf '%s\n' "$${table[@]}"; $(BIN)/python .ci/count $(RESULTS); exit $$failed

bench: build $(STAMPS)/bench ## Time and error against everyone (torch, torchao, ONNX Runtime, OpenVINO), on one thread and two: up to an hour
	@$(in_venv) python benchmarks/bench.py --threads 1 2 $(ARGS)

bench-quick: build $(STAMPS)/bench ## The same in under three minutes: one thread, some cases, nobody who compiles
	@$(in_venv) python benchmarks/bench.py --quick $(ARGS)

bench-dynamic: build $(STAMPS)/bench ## Dynamic quantisation against torch.ao and float: time and error, in one interleaved run
	@$(in_venv) python benchmarks/bench_dynamic.py $(ARGS)

bench-static: build $(STAMPS)/bench ## Static quantisation of trained networks against float, ONNX Runtime and OpenVINO: accuracy
	@$(in_venv) python benchmarks/bench_static.py $(ARGS)

bench-calibration: build ## Calibrating against plain float inference and torch.ao: time, and memory over 100 batches
	@$(in_venv) python benchmarks/bench_calibration.py $(ARGS)

bench-autoquant: build ## quant.autoquant on trained models: budgets on unseen data, time, evaluations; what quant.sensitivity costs
	@$(in_venv) python benchmarks/bench_autoquant.py $(ARGS)

bench-qat: build ## Training for int8: cost of a step against float and torch.ao, accuracy on Fashion-MNIST, parity (half an hour)
	@$(in_venv) python benchmarks/bench_qat.py $(ARGS)

bench-rounding: build ## Weights of 8, 4 and 3 bits after training alone: nearest, GPTQ and AdaRound on trained networks (half an hour)
	@$(in_venv) python benchmarks/bench_rounding.py $(ARGS)

bench-throughput: build ## Samples a second for batches of 1, 8 and 32, and p50 and p99 of requests, by processes and threads (15 minutes)
	@$(in_venv) python benchmarks/bench_throughput.py $(ARGS)

bench-start: build ## Import, prepare, convert, load and first calls, here or against another checkout: ARGS='--against PATH' (minutes)
	@$(in_venv) python benchmarks/bench_start.py $(ARGS)

bench-memory: build ## Memory at the peak of converting and of calls, over the float model's, and of packed weights
	@$(in_venv) python benchmarks/bench_memory.py $(ARGS)

bench-bits: build ## Dynamic layers of 8 and 4 bits: time, error, bytes, share of the memory's bandwidth, on one thread and on two (4 minutes)
	@$(in_venv) python benchmarks/bench_bits.py $(ARGS)

bench-llm: build $(STAMPS)/bench ## Language models: memory of loading into 4 bits; GPTQ, killed and gone on; decode and prefill against the peers (hours; ARGS='--part load': minutes)
	@$(in_venv) python benchmarks/bench_llm.py $(ARGS)

bench-cache: build $(STAMPS)/integrations ## A step of decoding with keys and values as int8 and as reals: time, bytes, error (minutes)
	@$(in_venv) python benchmarks/bench_cache.py $(ARGS)

bench-against: build ## Every row of `make bench`, ours here and in another checkout, in turns: ARGS='PATH --threads 1 2' (5 minutes each)
	@$(in_venv) python benchmarks/bench_against.py $(ARGS)

bench-zoo: build $(STAMPS)/zoo ## Time and error of every architecture of the zoo against float, on one thread (an hour; ARGS=--compiled: hours)
	@$(in_venv) OMP_NUM_THREADS=1 python benchmarks/bench_zoo.py $(ARGS)

bench-outliers: build ## Static int8 against outliers of activations, planted and trained: error, time, cost of calibration (minutes; ARGS=--peers)
	@$(in_venv) OMP_NUM_THREADS=1 python benchmarks/bench_outliers.py $(ARGS)

bench-signal: build $(STAMPS)/bench ## Signal to noise of int8 outputs beside ONNX Runtime, NNCF and torchao: EfficientNet-Lite0, MiniLM, silero-vad, g2p, CNNs (15 minutes)
	@$(in_venv) OMP_NUM_THREADS=1 python benchmarks/bench_signal.py $(ARGS)

bench-onnx-files: build $(STAMPS)/bench ## Int8 ONNX files of ONNX Runtime and NNCF here and in ONNX Runtime: bits, error and time (minutes)
	@$(in_venv) python benchmarks/bench_onnx_files.py $(ARGS)

bench-onnx: build $(STAMPS)/bench ## Our ONNX files in ONNX Runtime and OpenVINO: bits, error, float nodes and time beside ours (minutes)
	@$(in_venv) python benchmarks/bench_onnx.py $(ARGS)

bench-torch-ao: build ## Models of torch.ao (FX, eager, dynamic) taken over: the same integers, error and time beside torch.ao
	@$(in_venv) python benchmarks/bench_torch_ao.py $(ARGS)

bench-runner: build runner ## The torch-free runner beside Python: time of a call, and from a process's start to its first result
	@$(in_venv) python benchmarks/bench_runner.py $(ARGS)

install: $(STAMPS)/install ## The virtual environment, with torch and this package

build: install $(STAMPS)/build ## The compiled kernels, into the checkout

core: $(STAMPS)/venv ## The kernels' core alone, without torch: a static library for C++ programs, kernels/csrc/README.md
	@$(say) "building the core"
	@$(BIN)/python kernels/build.py --core-only --core $(CORE) $(ARGS)

runner: ## octet-run and liboctet, which run saved models without torch and Python; FOR=model.q8 for the operations of that one alone
	@$(say) "building the runner"
	@$(PYTHON) kernels/runner/build.py --out build $(foreach one,$(FOR),--for $(one)) $(ARGS)

runner-wasm: ## octet-run for node, and liboctet.a for programs in WebAssembly; needs Emscripten (Debian: apt install emscripten)
	@$(say) "building the runner for WebAssembly"
	@$(PYTHON) kernels/runner/build.py --cxx em++ --arch wasm32 --threads none --out build/wasm $(ARGS)

fuzz-runner: build ## Altered files into the runner, under AddressSanitizer: ARGS='--count 100000' (compiles for minutes)
	@$(in_venv) python tests/quant/fuzz_runner.py $(ARGS)

fuzz-runner-calls: build ## Sequences of wrong calls of the runner's C API, under sanitizers: ARGS='--count 10000'
	@$(in_venv) python tests/quant/fuzz_runner.py --calls $(ARGS)

fuzz-files: build ## Altered and cut files of every kind that is read: an error that names the file, or a model (OCTET_FUZZ_SECONDS)
	@$(in_venv) python tests/quant/fuzz_files.py $(ARGS)

fuzz-arguments: build ## Hostile arguments to every operator, in processes that may end: ARGS='--seconds 600 --seed 1000'
	@$(in_venv) python tests/kernels/fuzz_arguments.py $(ARGS)

fuzz-kernels: build ## Every operator, backend and instruction set of this machine against the reference (OCTET_FUZZ_SECONDS)
	@$(in_venv) python tests/kernels/fuzz_kernels.py $(ARGS)

fuzz-plans: build ## Random programs of every operation by the kernels and by the interpreter (OCTET_FUZZ_SECONDS)
	@$(in_venv) python tests/kernels/fuzz_plans.py $(ARGS)

sanitize: build ## The compiled kernels in torch under AddressSanitizer and UBSan: tests, fuzzers (compiles for minutes; OCTET_FUZZ_SECONDS)
	@$(in_venv) PYTHONSAFEPATH=1 python tests/kernels/sanitize.py $(ARGS)

fuzz-networks: build ## Modules with random forwards, static and in training, held to float: ARGS='--seconds 600 --seed 1000'
	@$(in_venv) python tests/quant/fuzz_networks.py $(ARGS)

fuzz-kills: build ## Kills, full disks and memory at each moment of what writes files (OCTET_FUZZ_SECONDS; ARGS='--every' for each call)
	@$(in_venv) python tests/quant/fuzz_kills.py $(ARGS)

stress: build ## Int8 models under 64 threads, forks, signals and a million calls: ARGS='--part threads' (OCTET_FUZZ_SECONDS a part)
	@$(in_venv) OMP_NUM_THREADS=1 python tests/quant/stress.py $(ARGS)

stress-runner: build ## The runner under 64 threads and ThreadSanitizer: ARGS='--sanitizer address' (compiles for minutes)
	@$(in_venv) OMP_NUM_THREADS=1 python tests/quant/stress_runner.py $(ARGS)

wheels: $(STAMPS)/wheels ## A wheel with the kernels for every supported torch, into build/wheels: ARGS='--arch aarch64' (15 minutes)
	@$(say) "building a wheel"
	@$(in_venv) python .ci/build_wheels.py $(ARGS)

test-wheels: install ## That wheel in a clean environment for each Python here and each torch, some gigabytes: ARGS='--torch 2.13.0'
	@$(in_venv) python .ci/test_wheels.py $(ARGS)

lock: install ## The developer's packages with their hashes, anew: .ci/requirements-dev.txt
	@$(in_venv) python .ci/lock.py $(ARGS)

docs: $(STAMPS)/docs ## The documentation site, into build/docs: a warning is an error, and so is a link that leads nowhere
	@$(say) "building the documentation"
	@# -a: a page's navigation names pages that are newer than itself.
	@$(in_venv) PYTHONSAFEPATH=1 sphinx-build -q -a -W --keep-going -c docs/site -d build/docs-cache docs build/docs $(ARGS)
	@echo "open build/docs/index.html"

drawings: install ## The pictures of the documentation, anew: drawings by code, charts from the tables of the benchmark pages
	@$(in_venv) python docs/site/drawings.py

architecture: ## The packages, their sizes, who imports whom, and what is against the order
	@$(PYTHON) tests/architecture/run.py $(ARGS)

clean: ## Remove the virtual environment and everything that was built
	rm -rf $(VENV) build dist kernels/_octet.so kernels/_octet.stamp *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	    echo "make: '$(PYTHON)' is missing or older than Python 3.10. On Debian: apt install python3." \
	        "Or name another: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "make: '$(PYTHON)' cannot make a virtual environment. On Debian: apt install python3-venv" >&2; exit 1; }
	@$(say) "making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# What a strict editable install holds, links and a version: with a new or deleted file, or another one, it is made anew.
$(STAMPS)/files: FORCE | $(STAMPS)/venv
	@files=$$(find $(PACKAGES) -name '*.py' | LC_ALL=C sort; grep '^__version__' quant/__init__.py); \
	    [[ -f $@ && $$files == "$$(<$@)" ]] || printf '%s\n' "$$files" >$@

$(STAMPS)/package: pyproject.toml | $(STAMPS)/venv
	@$(say) "installing torch (about 200 MB to download the first time)"
	@$(in_venv) pip install --disable-pip-version-check 'setuptools>=77'
	@$(in_venv) pip install --disable-pip-version-check --no-build-isolation -e . --config-settings editable_mode=strict
	@touch $@

$(STAMPS)/requirements: pyproject.toml | $(STAMPS)/package
	@$(say) "installing the tools (about 90 MB to download the first time)"
	@$(in_venv) pip install --disable-pip-version-check --no-build-isolation -e '.[dev]' \
	    --config-settings editable_mode=strict
	@touch $@

$(STAMPS)/install: $(STAMPS)/requirements $(STAMPS)/linked
	@touch $@

$(STAMPS)/linked: $(STAMPS)/package $(STAMPS)/files setup.py
	@$(say) "linking the package into $(VENV)"
	@$(in_venv) pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e . \
	    --config-settings editable_mode=strict
	@touch $@

# The extra of that name: what the benchmarks compare with, the libraries of the zoo's architectures, and so on.
$(STAMPS)/bench $(STAMPS)/zoo $(STAMPS)/docs $(STAMPS)/integrations $(STAMPS)/wheels $(STAMPS)/coverage: pyproject.toml | $(STAMPS)/install
	@$(say) "installing what 'make $(@F)' and its like need"
	@$(in_venv) pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[$(@F)]' \
	    --config-settings editable_mode=strict
	@touch $@

# Without a compiler there is no stamp, so that the next run looks for one again.
$(STAMPS)/build: $(STAMPS)/package $(STAMPS)/linked kernels/build.py $(shell find kernels/csrc -type f)
	@if command -v "$${CXX:-g++}" >/dev/null || command -v "$${CXX:-clang++}" >/dev/null; then \
	    $(say) "building the kernels" && $(BIN)/python kernels/build.py --core $(CORE) && touch $@; \
	else \
	    $(say) "no C++ compiler, so no compiled kernels: int8 layers run on the slow reference backend" && \
	    echo "    on Debian: apt install g++"; \
	fi
