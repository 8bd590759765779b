#!/usr/bin/env bash
# Lint, format, types and all tests, as CI runs them. Arguments go to pytest:
# bash test.sh tests/config_test.py -k misspelt
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source ./install.sh
install_into_venv test '.[test]'
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/pyrefly check
# -ra (in pyproject.toml) prints every skipped test with its reason.
# Two processes, each with whole files: what a file's tests share is made once. In the
# order of tests/conftest.py: xdist would begin with the files of the most tests.
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
