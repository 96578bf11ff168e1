#!/bin/sh
# Run once by PostgreSQL's image, when its data directory is new: the tracking server has a role of
# its own, which owns its two databases and nothing else. What must not live here: passwords.
set -eu
psql --no-psqlrc --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname postgres <<'SQL'
\set password `cat /run/secrets/mlflow_db_password`
CREATE ROLE mlflow LOGIN PASSWORD :'password';
CREATE DATABASE mlflow OWNER mlflow;
CREATE DATABASE mlflow_auth OWNER mlflow;
REVOKE ALL ON DATABASE mlflow, mlflow_auth, postgres FROM PUBLIC;
SQL
