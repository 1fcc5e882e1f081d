#!/usr/bin/env bash
# Writes a CycloneDX bill of materials for each lock file into a folder. The images carry their own in /opt/acclimate/sbom.cdx.json,
# made of what was really installed; this one needs no image.
set -euo pipefail
out="${1:?usage: infra/sbom.sh FOLDER}"
here="$(cd "$(dirname "$0")" && pwd)"
cyclonedx="${CYCLONEDX:-$here/../.venv/bin/cyclonedx-py}"
mkdir -p "$out"
for image in api worker; do
  "$cyclonedx" requirements --pyproject "$here/../pyproject.toml" --output-reproducible --output-format JSON \
    --output-file "$out/$image.cdx.json" "$here/requirements/$image.txt"
done
