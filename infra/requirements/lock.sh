#!/usr/bin/env bash
# Writes the lock files beside it: each package of the images in one version with the hashes of its files.
# For linux x86_64 and the Python of the images, whatever machine this runs on. Give --upgrade to take newer versions.
set -euo pipefail
cd "$(dirname "$0")/../.."
uv="${UV:-.venv/bin/uv}"

lock() { # FILE SOURCE [OPTION…]
  local file="infra/requirements/$1" source="$2"
  shift 2
  "$uv" pip compile --quiet --no-config --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
    --generate-hashes --only-binary :all: --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
    --output-file "$file" "$@" "$source"
  sed -i "1i # Made by make lock from $source for linux x86_64 and Python 3.11; do not edit." "$file"
}

lock build.txt infra/requirements/build.in "$@"
lock api.txt pyproject.toml --extra server "$@"
# The registry's torch is the CUDA build: the same image serves machines with and without GPUs.
lock worker.txt pyproject.toml --extra all "$@"
