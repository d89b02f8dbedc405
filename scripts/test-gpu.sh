#!/usr/bin/env bash
# Tests that need a CUDA device, on a machine that has one and a matching torch (>= 2.11) installed already.
set -euo pipefail
cd "$(dirname "$0")/.."
python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
python -m pytest -m gpu "$@"
