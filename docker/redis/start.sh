#!/bin/sh
# Starts Redis with one user for each process and none without a password. Each may use our keys and channels alone;
# no user may change settings, read all keys or end the server. The access list holds hashes of the passwords.
set -eu

hash() { printf '%s' "$1" | sha256sum | cut -d' ' -f1; }
user() { printf 'user %s on #%s %s -@all %s\n' "$1" "$(hash "$2")" "$3" "$4"; }

umask 077
list="${REDIS_FOLDER:-/run/redis}/users.acl"
# Commands that never read or write keys of others, and those of the data types in use.
common="+@connection +@read +@write +@pubsub +@transaction +@scripting +@blocking +time -@admin -@dangerous +info"
# Celery's queues: the console orders work, beat does so each second, the worker takes it.
celery="~control* ~actions* ~analysis* ~pruning* ~_kombu* ~unacked* ~celery* &celery* &/0.*"
ours="resetchannels &slackline* ~slackline*"
# A gateway has no part in sign-ins or jobs. It tells browsers of live topics, not that a session has ended.
live="resetchannels &slackline:config &slackline:command:* &slackline.channels__group__live.* &slackline:pruning:orders ~slackline:telemetry:* ~slackline:fleet:* ~slackline:gateways ~slackline:queue:*
  ~slackline:queue-asked ~slackline:lease:* ~slackline:watched:* ~slackline:command-answer:* ~slackline:pruning:report:* ~slackline:pruning:wake ~slackline:workflows:*"
# Answers of steps that tenants have kept: text, which nobody else may read.
kept="~answers:*"
{
  printf 'user default off\n'
  user gateway "$REDIS_GATEWAY_PASSWORD" "$(echo $live) $kept" "$common"
  user console "$REDIS_CONSOLE_PASSWORD" "$ours $celery" "$common"
  user worker "$REDIS_WORKER_PASSWORD" "$ours $celery" "$common"
  user beat "$REDIS_BEAT_PASSWORD" "resetchannels $celery" "$common"
} >"$list"
exec redis-server --save "" --appendonly no --aclfile "$list" "$@"
