#!/bin/sh
# Builds on a machine with a GPU and tells in a few minutes what only such a machine can tell.
#
#     OUT=DIR PYTHON=python3 benchmarks/gpu_check.sh [--only PART] [--dry-run]
#
# The parts and what they need: benchmarks/gpu_check.py.
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" benchmarks/gpu_check.py --out "${OUT:?is not set: a folder for results}" "$@"
