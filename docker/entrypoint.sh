#!/bin/sh
# Entry point of the image: the role first, further arguments go to its program.
set -eu

role="${1:-help}"
[ $# -gt 0 ] && shift

case "$role" in
  gateway)
    exec python -m api.openai --host 0.0.0.0 --port "${GATEWAY_PORT:-8080}" "$@"
    ;;
  console)
    SLACKLINE_ROLE=console exec uvicorn console.asgi:application --host 0.0.0.0 --port "${CONSOLE_PORT:-8000}" \
      --http console.server:Protocol --ws console.server:WebSocket --ws-max-size 65536 --loop uvloop \
      --log-level warning --no-access-log --no-proxy-headers \
      --ws-per-message-deflate false --timeout-graceful-shutdown 5 "$@"
    ;;
  worker)
    SLACKLINE_ROLE=worker exec celery -A workers.celery:app worker -P prefork -c "${WORKER_CONCURRENCY:-2}" \
      -Q "${WORKER_QUEUES:-control,actions,analysis,pruning}" -l "${LOG_LEVEL:-INFO}" --without-gossip --without-mingle --without-heartbeat "$@"
    ;;
  beat)
    SLACKLINE_ROLE=beat exec celery -A workers.celery:app beat -l "${LOG_LEVEL:-INFO}" -s "$DATA_DIR/celerybeat-schedule" --pidfile= "$@"
    ;;
  engine)
    exec python -m workers.engine --host 0.0.0.0 --port "${ENGINE_PORT:-8100}" "$@"
    ;;
  migrate)
    # Also gateways and consoles need the tables: run this once before they start.
    SLACKLINE_ROLE=manage python manage.py migrate --no-input "$@"
    SLACKLINE_ROLE=manage python manage.py seed_templates
    SLACKLINE_ROLE=manage exec python manage.py grant_database_roles
    ;;
  manage)
    SLACKLINE_ROLE=manage exec python manage.py "$@"
    ;;
  *)
    echo "roles: gateway console worker beat engine migrate manage" >&2
    [ "$role" = help ] || exit 64
    ;;
esac
