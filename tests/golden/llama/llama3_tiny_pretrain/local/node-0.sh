#!/usr/bin/env bash
# node-0 of 2 of llama/llama3_tiny_pretrain version 1, digest b1010ab79fdc31d39d2e18ba5d0cc9b6841c53f09cd9a9dd705967e8c6874da7.
# A small Llama 3 on the Python library's source text, on 2 nodes of 2 CPU workers
# Change the recipe and render it again instead of this file. By hand: start every node's
# script, all with the same LAUNCHER_RDZV_ENDPOINT (a free port of this machine for each node, as
# 127.0.0.1:PORT with commas between).
# shellcheck disable=SC2016  # a recipe's values are plain text
set -euo pipefail

die() {
  echo "node-0.sh: $*" >&2
  exit 2
}

run_dir=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
[ -f "$run_dir/job.json" ] || die "no job.json in $run_dir"

export GLOO_SOCKET_IFNAME=lo
export OMP_NUM_THREADS=1

# Nobody without the run's token gets in. All nodes have one, the first one's: a link appears whole,
# and once.
token_file=$run_dir/run.token
if [ ! -e "$token_file" ]; then
  new_token=$(mktemp "$run_dir/.run.token.XXXXXX")
  head --bytes=32 /dev/urandom | base64 >"$new_token"
  ln "$new_token" "$token_file" 2>/dev/null || [ -e "$token_file" ]
  rm "$new_token"
fi

# The agent names the folder of the node's checkpoint daemon.
export MEMORYD_DIR=
export MEMORYD_TOKEN_FILE=$token_file
read -ra peer_ports <<<"${LAUNCHER_PEER_PORTS:-9201 9202}"

exec "${LAUNCHER_PYTHON:-python}" \
  -m \
  resilience.agent \
  --config="$run_dir/node.json" \
  --rdzv-endpoint="${LAUNCHER_RDZV_ENDPOINT:-127.0.0.1:29500,127.0.0.1:29501}" \
  --rdzv-id=llama3-tiny-pretrain-"${LAUNCHER_RUN_ID:-0}" \
  --local-addr=127.0.0.1 \
  --node-name=node-0 \
  --token-file="$token_file" \
  --run-dir="$run_dir" \
  --memoryd=--peer-listen=127.0.0.1:"${peer_ports[0]}" \
  --memoryd=--peer=node-1=127.0.0.1:"${peer_ports[1]}" \
  --preload=recipes_training.preload \
  -- \
  "${LAUNCHER_PYTHON:-python}" \
  -m \
  recipes_training \
  --job="$run_dir/job.json" \
  --run-dir="$run_dir" \
  --node-name=node-0
