# The commands of the project. `make help` lists them.
#
# quickstart, test, test-full, bench and lint work in a .venv of their own, made on the first call.
# develop builds for PYTHON as it is: no network, no venv.
SHELL := /bin/sh
VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
# the interpreter that .venv is made from; its torch, if it has one, is kept
PYTHON ?=
MAKEFLAGS += --no-print-directory

.PHONY: help quickstart test test-full develop bench lint format clean distclean check-machine

help:
	@echo 'make quickstart               set up, build, train a small network on acc'
	@echo 'make test                     set up, build, run every test (what CI runs)'
	@echo 'make test-full                all OpInfo samples and dtypes, all models of torchvision'
	@echo 'make develop PYTHON=python3   build in place for an interpreter that has torch; no network'
	@echo 'make bench                    benchmarks/run.py --suite host: speed, memory, first steps'
	@echo 'make lint                     clang-format, clang-tidy, ruff, the layout test'
	@echo 'make format                   rewrite sources as clang-format and ruff want them'
	@echo 'make clean                    remove what the build made; distclean: .venv as well'

quickstart:
	@sh scripts/setup.sh run '$(PYTHON)'
	@$(VENV_PYTHON) examples/quickstart.py

test:
	@sh scripts/setup.sh tools '$(PYTHON)'
	@$(VENV_PYTHON) scripts/run_tests.py --set-up '$(PYTHON)' --keep-going

test-full:
	@sh scripts/setup.sh test '$(PYTHON)'
	@$(VENV_PYTHON) scripts/run_tests.py --full --keep-going

develop:
	@$(or $(PYTHON),python3) scripts/native.py develop

bench:
	@sh scripts/setup.sh test '$(PYTHON)'
	@$(VENV_PYTHON) benchmarks/run.py --suite host --threads 1,2 --startup --svg build/benchmarks.svg

lint:
	@sh scripts/setup.sh lint '$(PYTHON)'
	@$(VENV_PYTHON) scripts/lint.py

format:
	@sh scripts/setup.sh lint '$(PYTHON)'
	@$(VENV_PYTHON) scripts/lint.py --fix

check-machine:
	@sh scripts/check_machine.sh '$(PYTHON)'

clean:
	rm -rf build dist *.egg-info torchacc_device/_C*.so torchacc_device/acc_nvrtc torchacc_device/_build_info.py
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
