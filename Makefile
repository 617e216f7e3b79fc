# Two commands: `make verify` (the main job) and `make test`. Both set up .venv/ by themselves.
#
#   PYTHON=...       Python >= 3.11 to start from. One with a CUDA torch >= 2.11 keeps its torch and triton.
#   TORCH_INDEX=...  another wheel index for the CPU build of torch; `pypi` takes PyPI's own wheel
#   JOBS=2           pytest workers, one thread each; what one of them has not begun when another is done is shared
#   ARGS=...         further arguments for the command, e.g. make verify ARGS="--examples 200"

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH_INDEX ?=
JOBS ?= 2
ARGS ?=
VENV := .venv
STAMP := $(VENV)/.stamp

.PHONY: verify test lint setup clean ask-again

verify: $(STAMP)
	$(VENV)/bin/dosa verify $(ARGS)

test: lint
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal \
	  --cov --cov-report=term --cov-fail-under=95 $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

setup: $(STAMP)

# Naming a Python or an index asks for set-up again; that does nothing if it is the one that is there.
ifneq ($(filter command,$(firstword $(origin PYTHON)) $(firstword $(origin TORCH_INDEX))),)
$(STAMP): ask-again
endif

$(STAMP): constraints.txt pyproject.toml tools/bootstrap.py
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; name one: make $(MAKECMDGOALS) PYTHON=..." >&2; exit 2; }
	$(PYTHON) tools/bootstrap.py --venv $(VENV) --torch-index "$(TORCH_INDEX)"

clean:
	rm -rf $(VENV) dist build report.json
