#!/usr/bin/env bash
# From a fresh clone to a trained agent: makes .venv, installs, runs the main job.
# Arguments go to the program: bash quickstart.sh --config.seed=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source ./install.sh
install_into_venv run .
# exec: Ctrl-C must reach the program itself.
exec .venv/bin/python -m experiments.swe17 \
  --config=experiments/configs/quickstart.py "$@"
