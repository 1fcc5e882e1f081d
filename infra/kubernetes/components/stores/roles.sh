#!/bin/sh
# Run by postgres once, on an empty volume: an account and a database each for Acclimate and MLflow, neither of which is a superuser.
set -eu
secrets=${SECRETS:-/run/secrets}
for name in acclimate mlflow; do
  password=$(cat "$secrets/${name}_db_password")
  # Over standard input, so that no password is seen in a list of processes.
  psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 --username "${POSTGRES_USER:-postgres}" --dbname postgres <<SQL
\\set password '$password'
CREATE ROLE $name LOGIN PASSWORD :'password';
CREATE DATABASE $name OWNER $name TEMPLATE template0 ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C.UTF-8';
REVOKE ALL ON DATABASE $name FROM PUBLIC;
SQL
done
