#!/usr/bin/env bash
# Create the certificates for compose.tls.yaml: a new certificate authority, and a certificate and a
# key for each service. The authority's key signs them and is then deleted; to renew, run this again.
#
#   docker/make-certificates.sh
#
# SECRETS         directory of the files `tls_*`; default: docker/secrets
# CLUSTER_PREFIX  first three numbers of the Ray network's addresses; default: 10.213.97
# TLS_DAYS        days until all certificates expire; default: 90
#
# These are read from the environment, else from docker/.env, as Compose does. What must not live
# here: passwords.
set -euo pipefail
cd "$(dirname "$0")"

setting() {  # NAME DEFAULT
  local written=
  if [ -e .env ]; then written=$(sed -n "s/^$1=//p" .env | tail -n 1); fi
  local value=${!1:-${written:-$2}}
  printf '%s' "$value"
}

directory=$(setting SECRETS ./secrets)
prefix=$(setting CLUSTER_PREFIX 10.213.97)
days=$(setting TLS_DAYS 90)

number='(0|[1-9][0-9]?|1[0-9][0-9]|2[0-4][0-9]|25[0-5])'
if ! [[ $prefix =~ ^$number\.$number\.$number$ ]]; then
  echo "CLUSTER_PREFIX $prefix: must be the first three numbers of an IPv4 address; for example 10.213.97" >&2
  exit 2
fi
if ! [[ $days =~ ^[1-9][0-9]{0,2}$ ]]; then
  echo "TLS_DAYS $days: must be a number of days from 1 to 999; for example 90" >&2
  exit 2
fi
if [ ! -d "$directory" ]; then
  echo "SECRETS $directory: is not a directory; make it with: mkdir -m 700 docker/secrets" >&2
  exit 2
fi

umask 077
work=$(mktemp -d "$directory/.tls-XXXXXX")
trap 'rm -rf "$work"' EXIT

key() {  # FILE
  openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"
}

key "$work/authority"
openssl req -x509 -new -key "$work/authority" -days "$days" -out "$work/tls_ca" \
  -config <(printf '%s\n' '[req]' distinguished_name=name prompt=no x509_extensions=is \
    '[name]' CN='gradsweep stack' '[is]' basicConstraints=critical,CA:TRUE,pathlen:0 \
    keyUsage=critical,keyCertSign subjectKeyIdentifier=hash)

certificate() {  # SERVICE USAGE NAME...: for a service with these host names and addresses
  local service=$1 usage=$2 names
  shift 2
  names=$(IFS=, && printf '%s' "$*")
  key "$work/tls_${service}_key"
  openssl req -new -key "$work/tls_${service}_key" -subj "/CN=$service" -out "$work/request"
  openssl x509 -req -in "$work/request" -CA "$work/tls_ca" -CAkey "$work/authority" \
    -set_serial "0x$(openssl rand -hex 16)" -days "$days" -out "$work/tls_${service}_cert" \
    -extfile <(printf '%s\n' basicConstraints=critical,CA:FALSE keyUsage=critical,digitalSignature \
      "extendedKeyUsage=$usage" "subjectAltName=$names" \
      subjectKeyIdentifier=hash authorityKeyIdentifier=keyid) 2> "$work/errors" \
    || { cat "$work/errors" >&2; exit 1; }
}

# Ray's nodes check each other's certificates in both directions, by address. A worker may have any
# address of the workers' range in compose.tls.yaml.
local_names=(DNS:localhost IP:127.0.0.1)
workers=()
for last in {32..62}; do workers+=("IP:$prefix.$last"); done
certificate postgres serverAuth DNS:postgres
certificate mlflow serverAuth DNS:mlflow "${local_names[@]}"
certificate ray_head serverAuth,clientAuth DNS:gcs "IP:$prefix.2" "${local_names[@]}"
certificate ray_worker serverAuth,clientAuth "${workers[@]}" "${local_names[@]}"

# Readable for all, as containers run as other users; the directory's mode excludes other users.
chmod 444 "$work"/tls_*
mv -f "$work"/tls_* "$directory"
openssl x509 -in "$directory/tls_ca" -noout -enddate \
  | sed 's/^notAfter=/The certificates are valid until /'
