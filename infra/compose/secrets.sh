#!/usr/bin/env bash
# Makes every secret of the compose file, each in its own file of infra/compose/secrets; what is there already is kept.
# As root, the two keys become those of the images' user, and all else of whoever called sudo, since `docker compose` reads files here too.
# Not as root, give the keys to that user yourself before compose's first start, as it says at its end; for Kubernetes that isn't needed.
set -euo pipefail
umask 077
out="${1:-$(cd "$(dirname "$0")" && pwd)/secrets}"
mkdir -p "$out"
cd "$out"

random() { openssl rand -hex "$1"; }
keep() { # FILE, its content from standard input
  if [[ -e "$1" ]]; then cat >/dev/null; else cat >"$1.new" && mv "$1.new" "$1"; fi
}

for name in postgres_password acclimate_db_password mlflow_db_password grafana_password ray_token; do
  random 32 | tr -d '\n' | keep "$name"
done
for key in log evaluator; do
  [[ -e "$key.pem" ]] || openssl genpkey -algorithm ed25519 -out "$key.pem"
done
for who in platform worker; do
  printf '%s %s' "$(random 10)" "$(random 32)" | keep "s3_$who"
done
read -r platform_id platform_secret <s3_platform || true
read -r worker_id worker_secret <s3_worker || true

keep s3_identities.json <<JSON
{"identities": [
  {"name": "platform", "credentials": [{"accessKey": "$platform_id", "secretKey": "$platform_secret"}],
   "actions": ["Read:acclimate", "Write:acclimate", "List:acclimate"]},
  {"name": "worker", "credentials": [{"accessKey": "$worker_id", "secretKey": "$worker_secret"}],
   "actions": ["Read:acclimate", "Write:acclimate", "List:acclimate"]}
]}
JSON
for who in api dispatcher; do
  keep "$who.env" <<ENV
PGPASSWORD=$(cat acclimate_db_password)
AWS_ACCESS_KEY_ID=$platform_id
AWS_SECRET_ACCESS_KEY=$platform_secret
ENV
done
keep mlflow.env <<ENV
PGPASSWORD=$(cat mlflow_db_password)
ENV
keep worker.env <<ENV
AWS_ACCESS_KEY_ID=$worker_id
AWS_SECRET_ACCESS_KEY=$worker_secret
ENV

# Compose shows these files to the containers as they are, so whoever runs there must be able to read them; the folder is ours alone.
# The two keys are refused by their readers where others may read them.
chmod 0444 ./*_password ray_token s3_identities.json
if [[ "$(id -u)" = 0 ]]; then
  chown "${SUDO_UID:-0}:${SUDO_GID:-0}" . ./*
  chown 10001:10001 log.pem evaluator.pem
else
  echo "for compose, left to do as root: chown 10001:10001 $out/log.pem $out/evaluator.pem" >&2
fi
echo "secrets are in $out; back up log.pem and evaluator.pem: without them nobody can go on with this installation"
