#!/usr/bin/env bash
# Prints the Secrets that the manifests name, made of a folder that infra/compose/secrets.sh filled (or of the same files, made otherwise):
#
#   infra/compose/secrets.sh FOLDER && infra/kubernetes/secrets.sh FOLDER | kubectl apply --filename -
#
# Each goes to the pods that need it and to no others. With stores of your own, put their passwords and keys into the files first.
set -euo pipefail
from="${1:?usage: infra/kubernetes/secrets.sh FOLDER}"
kubectl="${KUBECTL:-kubectl}"

secret() { # NAME [KEY=FILE…]
  local name="$1" options=()
  shift
  for pair in "$@"; do options+=("--from-file=$pair"); done
  echo ---
  "$kubectl" create secret generic "$name" --namespace acclimate --dry-run=client --output yaml "${options[@]}"
}

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
for who in platform worker; do
  read -r id key <"$from/s3_$who" || true
  printf '%s' "$id" >"$work/$who-id"
  printf '%s' "$key" >"$work/$who-key"
done

secret acclimate-log-key "log.pem=$from/log.pem"
secret acclimate-evaluator-key "evaluator.pem=$from/evaluator.pem"
secret acclimate-database "password=$from/acclimate_db_password"
secret acclimate-mlflow-database "password=$from/mlflow_db_password"
secret acclimate-blobs "access-key-id=$work/platform-id" "secret-access-key=$work/platform-key"
secret acclimate-worker-blobs "access-key-id=$work/worker-id" "secret-access-key=$work/worker-key"
secret acclimate-ray "auth_token=$from/ray_token"
# For components/stores alone.
secret postgres "password=$from/postgres_password"
secret s3-identities "s3_identities=$from/s3_identities.json"
