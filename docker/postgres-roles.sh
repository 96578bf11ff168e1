#!/bin/sh
# Create the role of the tracking server; PostgreSQL's image runs this once, in a new data directory.
# The role owns its databases and can connect to no other. What must not live here: passwords.
set -eu
psql --no-psqlrc --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname postgres <<'SQL'
\set mlflow `cat /run/secrets/mlflow_db_password`
CREATE ROLE mlflow LOGIN PASSWORD :'mlflow';
CREATE DATABASE mlflow OWNER mlflow;
CREATE DATABASE mlflow_auth OWNER mlflow;
REVOKE ALL ON DATABASE mlflow, mlflow_auth, postgres FROM PUBLIC;
SQL
