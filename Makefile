# Every target sets itself up in .venv. It needs Python 3.11 or newer with its headers, a C++17 compiler, and a package index.
# PyPI's torch for Linux brings gigabytes of CUDA libraries. To avoid them, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints-cpu.txt
BUILD_INPUTS := pyproject.toml CMakeLists.txt constraints-cpu.txt src/attar/version.py $(wildcard src/attar/csrc/*)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint soak soak-load soak-api soak-faults soak-invariance soak-schemas soak-speculation soak-fleets sanitize neon test-emulated test-triton gpu-check bench-compressors bench-quality \
  bench-hostile bench-peers bench-serving bench-real real-models test-clients test-suites test-ray docs wheel clean

help:
	@echo "make demo              compress the embedded model, print the cost table, generate text before and after;"
	@echo "                       ask a toy that sees about 100 pictures, before and after"
	@echo "make test              run lint and the tests, but those of test-slow"
	@echo "make test-slow         run the tests that take long, and those that read real models (ATTAR_REAL_MODELS)"
	@echo "make test-suites       run other servers' tests against attar (SUITE=llama.cpp or vllm)"
	@echo "make test-clients      run the field's clients, each in an environment of its own (ONLY=NAMES, ATTAR_REAL_MODELS)"
	@echo "make lint              run ruff, mypy and import-linter"
	@echo "make soak              run the scheduler simulation with 20,000 seeds (about 7 minutes)"
	@echo "make soak-load         load-test a server in eight parts with pass criteria (about an hour)"
	@echo "make soak-api          fuzz the server against its OpenAPI document, 2,000 examples an operation"
	@echo "make soak-faults       raise every fault point a hundred times, at different moments"
	@echo "make soak-invariance   compare 4,000 batches bit for bit with single requests, with one thread and with two"
	@echo "make soak-schemas      judge two suites of schemas whole, 20,000 random schemas, and 2,000 schedules of constraints"
	@echo "make soak-speculation  compare 2,000 random schedules with drafts bit for bit with the same requests without"
	@echo "make soak-fleets       run 10,000 fleets in virtual time, 100 kills of real replicas, 1,000 requests to three models"
	@echo "make sanitize          stress the kernels' threads and run the kernel tests, with sanitizers"
	@echo "make neon              build the kernels for 64-bit Arm and run them under emulation, if Debian's packages exist"
	@echo "make test-emulated     run the kernel tests with AVX-VNNI, AVX-512 and AMX emulated, on any processor with AVX2"
	@echo "make test-triton       run the Triton kernels in the interpreter, then compile them for Hopper GPUs (.venv-triton)"
	@echo "make test-ray          run attar on a Ray cluster of this machine (.venv-ray; PART=short leaves out the long tests)"
	@echo "make gpu-check         OUT=FOLDER: check and time every GPU kernel on this machine; GPU_PYTHON=PYTHON has Triton"
	@echo "make bench-compressors compare KL with llm-compressor (.venv-peers, or PEERS=ENVIRONMENT)"
	@echo "make bench-quality     compare KL at equal bits with AWQ, GPTQ, auto-round, SmoothQuant, SparseGPT, GPTQModel, HQQ,"
	@echo "                       torchao and llama.cpp; also KV caches, bits by layer, injected outliers (many hours)"
	@echo "make bench-hostile     read 20,000 damaged model files: each must be refused or read correctly"
	@echo "make bench-peers       compare speed with llama.cpp and OpenVINO (LLAMACPP=, OPENVINO=ENVIRONMENT; options in BENCH=)"
	@echo "make bench-serving     compare serving with llama.cpp's server and OpenVINO GenAI (options in BENCH=)"
	@echo "make real-models       SCRIPT=FILE: fetch the real models that tests and benches read; without SCRIPT, list them"
	@echo "make bench-real        TABLE=NAME: print a table of figures on the real models; without TABLE, list them"
	@echo "make docs              build the documentation site into build/manual/site, and check it (.venv-docs)"
	@echo "make wheel             build an sdist, a wheel and an abi3 wheel into dist/, and try them (STABLE=PYTHON,"
	@echo "                       SYSROOT=FOLDER; .venv-wheel)"
	@echo "make clean             remove all .venv folders, built peers, build folders and caches"

demo: $(VENV)/.installed-toy
	@$(BIN)/attar demo
	@PYTHONPATH=tools $(BIN)/python -m toy_vision.measure build/toy-vision --pictures 100

# The tests come last, so that their last line ends the output. Each worker has one thread, because two workers share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

test: lint .venv-clients/.installed
	@$(PYTEST) -m "not slow and not real"

test-slow: $(VENV)/.installed-dev .venv-clients/.installed
	@$(PYTEST) -m "slow or real"

# Environments are kept in build/clients. Set up whole, they take some gigabytes.
test-clients: $(VENV)/.installed
	@$(BIN)/python bench/clients.py $(if $(ONLY),--only $(ONLY))

# llama.cpp's tests of its server, or vLLM's of its entrypoints, from their source packages: SUITE=llama.cpp or vllm.
test-suites: $(VENV)/.installed
	@$(BIN)/python bench/suites.py $(or $(SUITE),llama.cpp)

# References are generated, so they need attar; the builder has an environment of its own.
docs: $(VENV)/.installed .venv-docs/.installed
	@$(BIN)/python tools/manual/assemble.py build/manual/pages
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict --clean
	@$(BIN)/python tools/manual/check.py build/manual/site

.venv-docs/.installed: tools/manual/requirements.txt | $(BIN)/python
	@echo "setting up .venv-docs"
	@$(BIN)/python -m venv --clear .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

# Each wheel compiles the kernels from the source archive, and torch is installed anew to try it: some ten minutes.
wheel: .venv-wheel/.installed
	@.venv-wheel/bin/python tools/wheel.py --python $(PYTHON) $(if $(STABLE),--stable $(STABLE)) $(if $(SYSROOT),--sysroot $(SYSROOT))

.venv-wheel/.installed: tools/wheel.txt
	@$(PYTHON) -m venv --clear .venv-wheel
	@.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# The clients' packages would conflict with attar's own. Without this environment their tests skip, and say why.
.venv-clients/.installed: tests/server/clients.txt | $(BIN)/python
	@$(BIN)/python -m venv --clear .venv-clients
	@.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --requirement $< \
	  || echo "the packages of $< cannot be had: their tests will skip"
	@touch $@

# The real scheduler, block pool and prefix cache run through 20,000 random simulations. This takes some seven minutes.
soak: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.scheduling.simulation --seeds 20000

# A server under load, in eight parts with pass criteria. This takes the better part of an hour.
soak-load: $(VENV)/.installed-dev
	@$(BIN)/python bench/soak.py

# Every phase of schemathesis runs. This takes a quarter of an hour.
soak-api: $(VENV)/.installed-dev .venv-clients/.installed
	@TEST_OPENAPI_EXAMPLES=2000 $(BIN)/python -m pytest -p no:xdist -q tests/server/test_openapi.py

# This takes an hour. A fault point that no test reaches is a failed test.
soak-faults: $(VENV)/.installed-dev .venv-clients/.installed
	@TEST_FAULT_MOMENTS=100 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q tests/engine/test_faults.py tests/server/test_faults.py

# This takes some three hours on two cores.
soak-invariance: $(VENV)/.installed-dev
	@for threads in 1 2; do \
	  TEST_INVARIANCE_SEEDS=2000 OMP_NUM_THREADS=$$threads $(BIN)/python -m pytest -p no:xdist -q tests/engine/test_engine.py \
	    -k "company or rounded" || exit 1; \
	done

# The suites lie in ATTAR_TEST_DATA, and their figures are printed. This takes an hour or two. A run that was broken off
# goes on by TEST_RANDOM_SCHEMAS_FIRST and TEST_FORCED_FIRST.
soak-schemas: $(VENV)/.installed-dev
	@TEST_SCHEMA_EVERY=1 $(BIN)/python -m pytest -p no:xdist -q -s tests/text/test_schema_suites.py
	@TEST_RANDOM_SCHEMAS=20000 TEST_FORCED_SEEDS=2000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q \
	  tests/sampling/test_masks.py tests/engine/test_forced.py

# This takes some forty minutes on one core. A schedule that fails is run again by TEST_SPECULATION_FIRST and a count of one.
soak-speculation: $(VENV)/.installed-dev
	@TEST_SPECULATION_SEEDS=2000 TEST_DRAFT_REQUESTS=100000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -q \
	  tests/engine/test_speculation_schedules.py tests/sampling/drafters/test_leaks.py

# This takes half an hour.
soak-fleets: $(VENV)/.installed-dev
	@TEST_FLEETS=10000 $(BIN)/python -m pytest -p no:xdist -q tests/server/replicas/test_fleets.py
	@$(BIN)/python bench/replica_kills.py
	@TEST_SEVERAL_REQUESTS=1000 $(BIN)/python -m pytest -p no:xdist -q tests/server/models/test_several_served.py

sanitize: $(VENV)/.installed-dev
	@tools/sanitize.sh

neon: $(VENV)/.installed-dev
	@tools/check_neon.sh

test-emulated: $(VENV)/.installed-dev
	@tools/emulated.sh

# Triton takes 1 GB, so it has an environment of its own. If it cannot be installed, the target says so and tests nothing.
.venv-triton/.installed: tests/kernels/triton/requirements.txt | $(BIN)/python
	@echo "setting up .venv-triton: a minute or two the first time"
	@$(BIN)/python -m venv --clear .venv-triton
	@{ .venv-triton/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-cpu.txt torch && \
	  .venv-triton/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<; } || true
	@touch $@

# The kernels run interpreted first, then compiled: Triton chooses the mode when it is imported.
test-triton: .venv-triton/.installed
	@if .venv-triton/bin/python -c 'import triton'; then \
	  PYTHONPATH=src OMP_NUM_THREADS=1 TRITON_INTERPRET=1 .venv-triton/bin/python -m pytest -q tests/kernels/triton && \
	  PYTHONPATH=src OMP_NUM_THREADS=1 TRITON_CACHE_DIR=build/triton .venv-triton/bin/python -m pytest -q tests/kernels/triton/test_compile.py; \
	else echo "test-triton: skipped, because Triton could not be installed"; fi

# Ray's packages lie in an environment of their own, which looks through to attar's. PART=short leaves out the long tests.
.venv-ray/.installed: tests/integrations/ray/requirements.txt | $(VENV)/.installed-dev
	@echo "setting up .venv-ray: a minute or two the first time"
	@$(BIN)/python -m venv --clear .venv-ray
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$(.venv-ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/attar.pth
	@.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-cpu.txt --requirement $< \
	  || echo "the packages of $< cannot be had: test-ray will skip"
	@touch $@

test-ray: .venv-ray/.installed
	@if .venv-ray/bin/python -c 'import ray'; then \
	  OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest -p no:xdist -q $(if $(PART),-m "not slow") tests/integrations/ray/cluster; \
	else echo "test-ray: skipped, because Ray could not be installed"; fi

gpu-check:
	@PYTHONPATH=src $(or $(GPU_PYTHON),python3) bench/gpu_check.py $(or $(OUT),build/gpu-check) $(BENCH)

# The peers pin other versions of attar's dependencies, so they have an environment of their own.
bench-compressors: $(VENV)/.installed $(if $(PEERS),,.venv-peers/.installed)
	@$(BIN)/python bench/compressors.py --peers $(or $(PEERS),.venv-peers)/bin/python $(BENCH)

bench-quality: $(VENV)/.installed-dev $(if $(PEERS),,.venv-peers/.installed) .venv-gptqmodel/.installed .venv-hqq/.installed \
  .venv-torchao/.installed .venv-llamacpp/.installed
	@$(BIN)/python bench/lanes.py --peers $(or $(PEERS),.venv-peers)/bin/python $(BENCH)
	@$(BIN)/python bench/lanes.py int4 int3 w4a8kv4 sparse --injected --peers $(or $(PEERS),.venv-peers)/bin/python $(BENCH)
	@$(BIN)/python bench/outliers.py demo build/outliers
	@for model in demo build/outliers; do \
	  $(BIN)/python bench/kv.py --model $$model && \
	  $(BIN)/python bench/allocation.py --model $$model && \
	  $(BIN)/python bench/gguf_peers.py --model $$model --methods gptq gptq+tune guided guided+tune --samples 128 --tokens 65536 || exit 1; \
	done

bench-hostile: $(VENV)/.installed-dev
	@$(BIN)/python bench/hostile.py $(BENCH)

.venv-gptqmodel/.installed .venv-hqq/.installed .venv-torchao/.installed: .venv-%/.installed: bench/peers/%.txt | $(BIN)/python
	@echo "setting up .venv-$*: some minutes the first time"
	@$(BIN)/python -m venv --clear .venv-$*
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint $< torch
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

.venv-peers/.installed: bench/peers/requirements.txt | $(BIN)/python
	@echo "setting up .venv-peers: some minutes the first time"
	@$(BIN)/python -m venv --clear .venv-peers
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --constraint $< torch
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

bench-peers: $(VENV)/.installed $(if $(LLAMACPP),,.venv-llamacpp/.installed) $(if $(OPENVINO),,.venv-openvino/.installed)
	@$(BIN)/python bench/engines.py --llamacpp $(or $(LLAMACPP),.venv-llamacpp)/bin/python \
		--openvino $(or $(OPENVINO),.venv-openvino)/bin/python $(BENCH)

# llama.cpp is built from source for the CPU that it is measured on. Wheels that pip built before may be for another CPU.
.venv-llamacpp/.installed: bench/engines/llamacpp.txt bench/engines/tile_config.h | $(BIN)/python
	@echo "setting up .venv-llamacpp: compiling takes some minutes"
	@$(BIN)/python -m venv --clear .venv-llamacpp
	@CXXFLAGS="-include $(CURDIR)/bench/engines/tile_config.h" CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=ON" \
		.venv-llamacpp/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir \
		--no-binary llama-cpp-python --requirement $<
	@touch $@

# optimum-intel requires torchvision, which no language model needs. pip may install one for another build of torch, and
# transformers then fails.
.venv-openvino/.installed: bench/engines/openvino.txt | $(BIN)/python
	@echo "setting up .venv-openvino: some minutes the first time"
	@$(BIN)/python -m venv --clear .venv-openvino
	@.venv-openvino/bin/python -m pip install --quiet --disable-pip-version-check --constraint $< torch
	@.venv-openvino/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@.venv-openvino/bin/python -m pip uninstall --quiet --yes torchvision
	@touch $@

# This is llama.cpp's server of the release in .venv-llamacpp.
LLAMA_SOURCE := build/engines/src
build/engines/llama-server: bench/engines/llamacpp.txt bench/engines/tile_config.h .venv-llamacpp/.installed $(VENV)/.installed
	@echo "building llama.cpp's server: some ten minutes"
	@rm -rf $(LLAMA_SOURCE) && mkdir -p $(LLAMA_SOURCE)
	@.venv-llamacpp/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(LLAMA_SOURCE) \
		$$(grep '^llama' $<)
	@tar xzf $(LLAMA_SOURCE)/llama_cpp_python-*.tar.gz --strip-components=1 --directory $(LLAMA_SOURCE)
	@CXXFLAGS="-include $(CURDIR)/bench/engines/tile_config.h" $(BIN)/cmake -S $(LLAMA_SOURCE)/vendor/llama.cpp \
		-B $(LLAMA_SOURCE)/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_UI=OFF \
		-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
		-DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_NUMBER=0 -DLLAMA_BUILD_COMMIT=$$(grep '^llama' $<)
	@$(BIN)/cmake --build $(LLAMA_SOURCE)/build --target llama-server
	@cp $(LLAMA_SOURCE)/build/bin/llama-server $@

bench-serving: $(VENV)/.installed .venv-openvino/.installed build/engines/llama-server
	@$(BIN)/python bench/serving.py $(BENCH)

# The script is the user's own. The files that it leaves are checked.
real-models: | $(BIN)/python
	@$(BIN)/python bench/real_models.py $(NAMES) $(if $(SCRIPT),--script $(SCRIPT))

bench-real: $(VENV)/.installed
	@$(BIN)/python bench/real.py $(or $(TABLE),--list) $(BENCH)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attar needs Python 3.11 or newer, and $(PYTHON) is %s: name another with make PYTHON=..." % sys.version.split()[0])'
	@$(PYTHON) -c 'import pathlib, sys, sysconfig; include = sysconfig.get_path("include"); sys.exit(not pathlib.Path(include, "Python.h").exists() and f"{include}/Python.h is missing: install the headers of Python (python3-dev)")'
	@echo "setting up $(VENV): some minutes the first time"
	@$(PYTHON) -m venv $(VENV)

# torch is installed first, because pip must see the pinned build before it resolves packages that depend on torch.
# The extension is built without isolation, so that a second build compiles changed files only.
$(VENV)/.installed: $(BUILD_INPUTS) | $(BIN)/python
	@$(INSTALL) torch
	@$(INSTALL) scikit-build-core nanobind 'cmake>=3.26' ninja
	@$(INSTALL) --no-build-isolation --editable .
	@touch $@

# What the toy that sees needs besides: a demo is to be set up sooner than everything that tests need.
$(VENV)/.installed-toy: $(VENV)/.installed
	@$(INSTALL) pillow safetensors
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-clients .venv-docs .venv-wheel .venv-peers .venv-gptqmodel .venv-hqq .venv-torchao .venv-llamacpp .venv-openvino .venv-triton .venv-ray build/engines build/clients build/suites build/outliers \
  build/sanitize build/neon build/emulated build/triton build/gpu-check build/manual build/cp3* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
