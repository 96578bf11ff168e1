#!/bin/sh
# Start a container's program: `mlflow-server`, `ray-head`, `ray-worker`, or any other command.
#
# Secrets are files in /run/secrets, or in $SECRETS. They are copied into files that only this user can
# read, on a file system in memory, where MLflow and PostgreSQL look for them: never into an argument
# or an environment variable. What must not live here: sizes and addresses that a deployment chooses.
set -eu

secret() {  # NAME: its value on standard output
  file=${SECRETS:-/run/secrets}/$1
  if [ ! -s "$file" ]; then
    echo "secret $1: $file is missing or empty; the stack has no default passwords;" \
      "make one as docker/README.md shows" >&2
    exit 2
  fi
  # No character that has a special meaning in a file that the secret is written to.
  if [ "$(wc -w < "$file")" -ne 1 ] || ! grep -Ex '[A-Za-z0-9_-]{16,}' "$file"; then
    echo "secret $1: $file must be one line of at least 16 letters, digits, '-' or '_';" \
      "make one as docker/README.md shows" >&2
    exit 2
  fi
}

private() {  # PATH: write standard input into a file that only this user can read
  mkdir -p "$(dirname "$1")"
  (umask 077 && cat > "$1")
}

case "${1:-}" in
  mlflow-server)
    database=$(secret mlflow_db_password)
    password=$(secret mlflow_password)
    private "$HOME/.pgpass" <<END
postgres:5432:*:mlflow:$database
END
    private "$HOME/auth.ini" <<END
[mlflow]
default_permission = NO_PERMISSIONS
database_uri = postgresql+psycopg2://mlflow@postgres:5432/mlflow_auth
admin_username = sweep
admin_password = $password
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
END
    # The key signs the tokens of a web form; a new one at each start is enough.
    MLFLOW_FLASK_SERVER_SECRET_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    export MLFLOW_FLASK_SERVER_SECRET_KEY MLFLOW_AUTH_CONFIG_PATH="$HOME/auth.ini"
    # One worker process: several would create the first user at the same time.
    exec mlflow server --app-name basic-auth --host 0.0.0.0 --port 5000 --workers 1 \
      --backend-store-uri postgresql+psycopg2://mlflow@postgres:5432/mlflow \
      --serve-artifacts --artifacts-destination /artifacts
    ;;
  ray-head)
    secret ray_token > /dev/null
    password=$(secret mlflow_password)
    private "$HOME/.mlflow/credentials" <<END
[mlflow]
mlflow_tracking_username = sweep
mlflow_tracking_password = $password
END
    # No trial runs here, because this container has the credentials of MLflow.
    exec ray start --head --block --disable-usage-stats --include-dashboard=false \
      --node-ip-address "$(getent hosts "$RAY_HEAD" | cut -d ' ' -f 1)" --port 6379 \
      --num-cpus 0 --num-gpus 0 --object-store-memory "$RAY_OBJECT_STORE_BYTES"
    ;;
  ray-worker)
    secret ray_token > /dev/null
    exec ray start --block --disable-usage-stats --address "$RAY_HEAD:6379" \
      --node-manager-port 8076 --num-cpus "$RAY_WORKER_CPUS" \
      --object-store-memory "$RAY_OBJECT_STORE_BYTES"
    ;;
  *)
    exec "$@"
    ;;
esac
