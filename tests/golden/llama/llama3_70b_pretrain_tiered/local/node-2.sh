#!/usr/bin/env bash
# node-2 of 16 of llama/llama3_70b_pretrain_tiered version 1, digest 2545e97f2311f4c516d477d60a42eaa47114125a348272a7b8082b616af0466d.
# Llama 3 70B from random weights, with checkpoints in memory and in S3
# Know before you start this:
# - this version renders, but cannot run, trainer.kind 'megatron' (it runs: 'torch')
# Change the recipe and render it again instead of this file. By hand: start every node's
# script, all with the same LAUNCHER_RDZV_ENDPOINT (a free port of this machine).
# shellcheck disable=SC2016  # a recipe's values are plain text
set -euo pipefail

die() {
  echo "node-2.sh: $*" >&2
  exit 2
}

run_dir=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
[ -f "$run_dir/job.json" ] || die "no job.json in $run_dir"

export FI_PROVIDER=efa
export OMP_NUM_THREADS=8

# The node's checkpoint daemon runs beside the agent and outlives every worker. Whoever starts this
# script again finds what it leaves. The name is short, as a socket's path has 107 bytes at most.
place=$(printf %s "$run_dir" | sha256sum)
export MEMORYD_DIR=/dev/shm/memoryd-$UID-${place:0:10}-node-2
export MEMORYD_TOKEN_FILE=$run_dir/memoryd.token
# All nodes have one token, the first one's: a link appears whole, and once.
if [ ! -e "$MEMORYD_TOKEN_FILE" ]; then
  new_token=$(mktemp "$run_dir/.memoryd.token.XXXXXX")
  head --bytes=32 /dev/urandom | base64 >"$new_token"
  ln "$new_token" "$MEMORYD_TOKEN_FILE" 2>/dev/null || [ -e "$MEMORYD_TOKEN_FILE" ]
  rm "$new_token"
fi
read -ra peer_ports <<<"${LAUNCHER_PEER_PORTS:-9201 9202 9203 9204 9205 9206 9207 9208 9209 9210 9211 9212 9213 9214 9215 9216}"

# Standard input of what keeps the daemon running: it ends with this script, however that ends.
exec 3> >(exec "${LAUNCHER_PYTHON:-python}" -m launcher.clusters.beside \
  "${LAUNCHER_PYTHON:-python}" \
  -m \
  resilience.tiered.memoryd \
  --dir="$MEMORYD_DIR" \
  --budget-mib=741836 \
  --node=node-2 \
  --token-file="$MEMORYD_TOKEN_FILE" \
  --keep=1 \
  --domains-min=2 \
  --peer-listen=127.0.0.1:"${peer_ports[2]}" \
  --replicas=1 \
  --peer=node-0=127.0.0.1:"${peer_ports[0]}" \
  --peer=node-1=127.0.0.1:"${peer_ports[1]}" \
  --peer=node-3=127.0.0.1:"${peer_ports[3]}" \
  --peer=node-4=127.0.0.1:"${peer_ports[4]}" \
  --peer=node-5=127.0.0.1:"${peer_ports[5]}" \
  --peer=node-6=127.0.0.1:"${peer_ports[6]}" \
  --peer=node-7=127.0.0.1:"${peer_ports[7]}" \
  --peer=node-8=127.0.0.1:"${peer_ports[8]}" \
  --peer=node-9=127.0.0.1:"${peer_ports[9]}" \
  --peer=node-10=127.0.0.1:"${peer_ports[10]}" \
  --peer=node-11=127.0.0.1:"${peer_ports[11]}" \
  --peer=node-12=127.0.0.1:"${peer_ports[12]}" \
  --peer=node-13=127.0.0.1:"${peer_ports[13]}" \
  --peer=node-14=127.0.0.1:"${peer_ports[14]}" \
  --peer=node-15=127.0.0.1:"${peer_ports[15]}" \
  --store=s3://example-bucket/runs \
  --store-every-n-steps=500 \
  --store-waiting-max=1 \
  --store-deadline-s=60 \
  --drain-s=5)
memoryd=$!
"${LAUNCHER_PYTHON:-python}" -m resilience.tiered wait --timeout-s=60 3>&-

# Signals reach the agent once, through this script, and the daemon not at all.
# shellcheck disable=SC2317,SC2329  # called by a signal
ask_to_stop() {
  is_stopping=true
  kill -s TERM "$agent" 2>/dev/null || true
}
trap ask_to_stop TERM INT HUP
setsid "${LAUNCHER_PYTHON:-python}" \
  -m \
  resilience.agent \
  --nnodes=16 \
  --standby-nodes=0 \
  --nproc-per-node=8 \
  --rdzv-endpoint="${LAUNCHER_RDZV_ENDPOINT:-127.0.0.1:29500}" \
  --rdzv-id=llama3-70b-pretrain-tiered-"${LAUNCHER_RUN_ID:-0}" \
  --local-addr=127.0.0.1 \
  --node-name=node-2 \
  --run-dir="$run_dir" \
  --spares=1 \
  --hang-deadline-s=300 \
  --stop-deadline-s=15 \
  --join-deadline-s=120 \
  --restarts-max=10 \
  --restart-window-s=21600 \
  --restarts-without-progress-max=3 \
  --transfer-buffer-mib=32 \
  --warm=program \
  --preload=training.preload \
  -- \
  "${LAUNCHER_PYTHON:-python}" \
  -m \
  training \
  --job="$run_dir/job.json" \
  --run-dir="$run_dir" \
  --node-name=node-2 3>&- &
agent=$!
while :; do
  is_stopping=false status=0
  wait "$agent" || status=$?
  "$is_stopping" || break
done
if [ "$status" = 0 ]; then
  # The job is done, and nobody needs its checkpoints in memory.
  trap '' PIPE
  echo remove >&3 || true
fi
exec 3>&-
wait "$memoryd" || true
exit "$status"
