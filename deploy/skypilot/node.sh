#!/usr/bin/env bash
# Commands of the nodes of shoal.sky.yaml:
#
#   node.sh cluster                     etcd, a coordinator and parameter servers, until SIGTERM
#   node.sh worker SCRIPT [ARGUMENT...] a launcher with a worker for each GPU, until the job is over
#
# All parts but etcd use mutual TLS, with the certificates in SHOAL_TLS. etcd is reachable only on its node.
# `shoal` and `etcd` must be on PATH.
set -euo pipefail
: "${SHOAL_TLS:?the folder of the certificates}" "${SHOAL_HEAD:?the name of the node of the cluster}"
PORT=${SHOAL_PORT:-7700}
FOLDER=${SHOAL_DIR:-$HOME/shoal}
export SHOAL_TLS SHOAL_COORDINATOR=$SHOAL_HEAD:$PORT

pids=()
part() { # NAME COMMAND...: in the background, with a log of its own
    local name=$1
    shift
    "$@" > "$FOLDER/$name.log" 2>&1 &
    pids+=($!)
}
stop() {
    trap - EXIT TERM INT
    # Newest first: parameter servers and the coordinator need etcd to end in order.
    for ((i = ${#pids[@]} - 1; i >= 0; i--)); do
        kill -TERM "${pids[i]}" 2> /dev/null || true
        wait "${pids[i]}" 2> /dev/null || true
    done
}

# Wait until a coordinator leads: before that, parameter servers and workers would exit. Fail if a part of
# the cluster has ended.
await_leader() {
    local try pid
    for ((try = 0; try < ${SHOAL_AWAIT_S:-900}; try++)); do
        if shoal status > "$FOLDER/status.log" 2>&1; then return; fi
        for pid in "${pids[@]}"; do
            if ! kill -0 "$pid" 2> /dev/null; then
                echo "a part of the cluster has ended; logs are in $FOLDER" >&2
                return 1
            fi
        done
        sleep 1
    done
    echo "no coordinator leads at $SHOAL_COORDINATOR:" >&2
    cat "$FOLDER/status.log" >&2
    return 1
}

cluster() {
    trap stop EXIT
    trap 'exit 143' TERM INT
    local peers="http://127.0.0.1:$((PORT + 2))" clients="http://127.0.0.1:$((PORT + 1))" i
    part etcd etcd --name shoal --data-dir "$FOLDER/etcd" \
        --listen-client-urls "$clients" --advertise-client-urls "$clients" \
        --listen-peer-urls "$peers" --initial-advertise-peer-urls "$peers" --initial-cluster "shoal=$peers" \
        --auto-compaction-mode periodic --auto-compaction-retention 1h
    part coordinator shoal coordinator --etcd "127.0.0.1:$((PORT + 1))" --bind 0.0.0.0 \
        --listen "$PORT" --http "$((PORT + 3))" --advertise "$SHOAL_COORDINATOR"
    await_leader
    for ((i = 0; i < ${PARAMETER_SERVERS:-2}; i++)); do
        part "ps-$i" shoal ps --etcd "127.0.0.1:$((PORT + 1))" --bind 0.0.0.0 --id "ps-$i" \
            --listen "$((PORT + 10 + 2 * i))" --bulk-port "$((PORT + 11 + 2 * i))" \
            --advertise "$SHOAL_HEAD:$((PORT + 10 + 2 * i))"
    done
    # A part that ends is a fault: SkyPilot then restarts the node's task.
    wait -n "${pids[@]}"
    echo "a part of the cluster has ended; logs are in $FOLDER" >&2
    exit 1
}

worker() {
    await_leader
    # At SIGTERM, which a spot node gets before it is reclaimed, workers hand over and leave.
    exec shoal run -n "${SHOAL_WORKERS:-${SKYPILOT_NUM_GPUS_PER_NODE:-1}}" --job "${SHOAL_JOB:?}" --finished-ok \
        --min "${SHOAL_MIN_MEMBERS:?}" --max "${SHOAL_MAX_MEMBERS:?}" "$@"
}

# Only this user may read keys, etcd's data and logs.
umask 077
mkdir -p "$FOLDER"
case ${1:-} in
    cluster) cluster ;;
    worker)
        shift
        if (($# == 0)); then
            echo "usage: node.sh worker SCRIPT [ARGUMENT...]" >&2
            exit 2
        fi
        worker "$@"
        ;;
    *)
        echo "usage: node.sh cluster | node.sh worker SCRIPT [ARGUMENT...]" >&2
        exit 2
        ;;
esac
