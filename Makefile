# make demo   a first run: sets up what it needs, trains four methods on the shipped digits, ends with a table and a picture
# make test   all tests            make quick  a minute's worth of them    make lint   ruff and mypy    make setup   the environment
# make docs   the documentation site, into site/                           make notebooks   run the notebooks of docs/ again
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo setup test quick soak lint format docs notebooks clean
.DEFAULT_GOAL := demo

demo: .venv/demo
	@$(BIN)/fedstill demo

setup: .venv/dev

test: .venv/dev
	$(BIN)/python -m pytest -n 2

quick: .venv/dev
	$(BIN)/python -m pytest -n 2 --quick

# the damage done in full (hours); `make soak ONLY="kill gate"` runs some sections
soak: .venv/dev
	$(BIN)/python benchmarks/soak.py $(if $(ONLY),--only $(ONLY))

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

notebooks: .venv/dev
	$(BIN)/python docs/_site/notebooks.py

clean:
	rm -rf .venv fedstill-demo build dist site

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("fedstill needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv .venv

.venv/demo: pyproject.toml constraints.txt | .venv/bin/python
	@echo "setting up .venv (once; torch is large, this takes a minute or two)"
	@$(INSTALL) --editable '.[demo]'
	@touch $@

.venv/dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo "setting up .venv with every extra that the tests need (once)"
	@$(INSTALL) --editable '.[dev]'
	@touch .venv/demo $@
