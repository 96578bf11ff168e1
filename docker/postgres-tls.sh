#!/bin/sh
# Start PostgreSQL's image with TLS, for compose.tls.yaml. Over the network the server accepts only
# connections with TLS. What must not live here: passwords, roles.
set -eu

private() {  # PATH: write standard input into a file that only this user can read
  (umask 077 && cat > "$1")
}

# PostgreSQL refuses a key that other users can read, and a mounted secret has its mode on the host.
private /run/postgresql/server.key < /run/secrets/tls_postgres_key
private /run/postgresql/pg_hba.conf <<END
local all all scram-sha-256
hostssl all all all scram-sha-256
END
exec docker-entrypoint.sh postgres -c 'listen_addresses=*' -c ssl=on \
  -c ssl_cert_file=/run/secrets/tls_postgres_cert -c ssl_key_file=/run/postgresql/server.key \
  -c hba_file=/run/postgresql/pg_hba.conf
