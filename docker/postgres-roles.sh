#!/bin/sh
# Create the roles of the tracking server and of the ledgers; PostgreSQL's image runs this once, in a
# new data directory. Each role owns its databases and can connect to no other. What must not live
# here: passwords.
set -eu
psql --no-psqlrc --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname postgres <<'SQL'
\set mlflow `cat /run/secrets/mlflow_db_password`
\set ledger `cat /run/secrets/ledger_db_password`
CREATE ROLE mlflow LOGIN PASSWORD :'mlflow';
CREATE ROLE ledger LOGIN PASSWORD :'ledger';
CREATE DATABASE mlflow OWNER mlflow;
CREATE DATABASE mlflow_auth OWNER mlflow;
CREATE DATABASE ledger OWNER ledger;
REVOKE ALL ON DATABASE mlflow, mlflow_auth, ledger, postgres FROM PUBLIC;
SQL
