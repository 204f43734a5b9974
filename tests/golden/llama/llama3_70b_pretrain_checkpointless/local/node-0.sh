#!/usr/bin/env bash
# node-0 of 16 of llama/llama3_70b_pretrain_checkpointless version 2, digest ee3229fe481e2f246bbaa2c67c19cce8a654f8ba501fd76d899ec8bd1f38ad0e.
# Llama 3 70B from random weights, recovering from replicas in memory
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

export CUDA_DEVICE_MAX_CONNECTIONS=1
export OMP_NUM_THREADS=8
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

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
read -ra peer_ports <<<"${LAUNCHER_PEER_PORTS:-9201 9202 9203 9204 9205 9206 9207 9208 9209 9210 9211 9212 9213 9214 9215 9216}"

exec "${LAUNCHER_PYTHON:-python}" \
  -m \
  resilience.agent \
  --config="$run_dir/node.json" \
  --rdzv-endpoint="${LAUNCHER_RDZV_ENDPOINT:-127.0.0.1:29500,127.0.0.1:29501,127.0.0.1:29502,127.0.0.1:29503,127.0.0.1:29504,127.0.0.1:29505,127.0.0.1:29506,127.0.0.1:29507,127.0.0.1:29508,127.0.0.1:29509,127.0.0.1:29510,127.0.0.1:29511,127.0.0.1:29512,127.0.0.1:29513,127.0.0.1:29514,127.0.0.1:29515}" \
  --rdzv-id=llama3-70b-pretrain-checkpointless-"${LAUNCHER_RUN_ID:-0}" \
  --local-addr=127.0.0.1 \
  --node-name=node-0 \
  --token-file="$token_file" \
  --run-dir="$run_dir" \
  --memoryd=--peer-listen=127.0.0.1:"${peer_ports[0]}" \
  --memoryd=--peer=node-1=127.0.0.1:"${peer_ports[1]}" \
  --memoryd=--peer=node-2=127.0.0.1:"${peer_ports[2]}" \
  --memoryd=--peer=node-3=127.0.0.1:"${peer_ports[3]}" \
  --memoryd=--peer=node-4=127.0.0.1:"${peer_ports[4]}" \
  --memoryd=--peer=node-5=127.0.0.1:"${peer_ports[5]}" \
  --memoryd=--peer=node-6=127.0.0.1:"${peer_ports[6]}" \
  --memoryd=--peer=node-7=127.0.0.1:"${peer_ports[7]}" \
  --memoryd=--peer=node-8=127.0.0.1:"${peer_ports[8]}" \
  --memoryd=--peer=node-9=127.0.0.1:"${peer_ports[9]}" \
  --memoryd=--peer=node-10=127.0.0.1:"${peer_ports[10]}" \
  --memoryd=--peer=node-11=127.0.0.1:"${peer_ports[11]}" \
  --memoryd=--peer=node-12=127.0.0.1:"${peer_ports[12]}" \
  --memoryd=--peer=node-13=127.0.0.1:"${peer_ports[13]}" \
  --memoryd=--peer=node-14=127.0.0.1:"${peer_ports[14]}" \
  --memoryd=--peer=node-15=127.0.0.1:"${peer_ports[15]}" \
  --preload=recipes_training.megatron.trainer \
  --preload=recipes_training.recovery \
  --warm=program \
  -- \
  "${LAUNCHER_PYTHON:-python}" \
  -m \
  recipes_training \
  --job="$run_dir/job.json" \
  --run-dir="$run_dir" \
  --node-name=node-0
