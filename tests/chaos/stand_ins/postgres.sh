#!/bin/sh
# The first start of PostgreSQL's public image, as far as the stack relies on it.
set -eu
export POSTGRES_USER="${POSTGRES_USER:-postgres}"
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  # shellcheck disable=SC2086  # several words are meant
  initdb --username "$POSTGRES_USER" --pwfile "$POSTGRES_PASSWORD_FILE" ${POSTGRES_INITDB_ARGS:-}
  echo 'host all all all scram-sha-256' >> "$PGDATA/pg_hba.conf"
  pg_ctl --wait --options "-c listen_addresses=''" start
  PGPASSWORD=$(cat "$POSTGRES_PASSWORD_FILE")
  export PGPASSWORD
  for script in /docker-entrypoint-initdb.d/*.sh; do
    "$script"
  done
  unset PGPASSWORD
  pg_ctl --wait --mode fast stop
fi
exec "$@"
