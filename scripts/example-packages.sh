#!/usr/bin/env bash
# Debian packages with the examples' data, if they are not there and this is root. Without the images the example of
# images is skipped; without WordNet the others read the docstrings of Python's standard library.
set -euo pipefail
if { [ -d /usr/share/datasets/fashion-mnist ] && [ -d /usr/share/wordnet ]; } ||
    [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    exit 0
fi
apt-get update -qq && apt-get install -y -qq --no-install-recommends dataset-fashion-mnist wordnet-base >/dev/null ||
    echo "dataset-fashion-mnist or wordnet-base could not be installed" >&2
