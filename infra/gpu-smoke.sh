#!/usr/bin/env bash
# For whoever has an NVIDIA GPU: does this machine's torch use it, does it compute the same bytes twice, also with weights in shards over
# two GPUs, and where does one preparation run?
# Prints JSON on standard output. Takes a few minutes. In the worker image (with the script mounted) or in a checkout:
#
#   infra/gpu-smoke.sh > gpu.json
#   infra/gpu-smoke.sh --cpu      the same without the GPU's part, on any machine
#
# Nobody has run it on a GPU yet: see infra/README.md.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
python="${PYTHON:-}"
if [[ -z "$python" ]]; then
  if [[ -x "$here/../.venv/bin/python" ]]; then python="$here/../.venv/bin/python"; else python=python3; fi
fi

fail() {
  printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
  exit 1
}

if [[ "${1:-}" == --cpu ]]; then
  gpu=()
else
  command -v nvidia-smi >/dev/null || fail "there is no GPU here: nvidia-smi is not installed" \
    "run this on a machine with an NVIDIA GPU and its driver; --cpu tries all but the GPU"
  gpus="$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader)" ||
    fail "there is no GPU here: nvidia-smi finds none" "is the driver loaded, and was the container given the GPU?"
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    fail "torch does not see the GPU that nvidia-smi sees" "is this torch a CUDA build (the lock file of the worker image is), and is the driver new enough?"
  gpu=(--gpu "$gpus")
fi
exec "$python" "$here/gpu_smoke.py" "${gpu[@]}"
