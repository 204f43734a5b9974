#!/usr/bin/env bash
# node-1 of 16 of llama/llama3_70b_pretrain_checkpointless version 1, digest a52c0e7c5bb2b9b4d8cb0435796dd6a7324b958656d382c3f56155853878b45a.
# Llama 3 70B from random weights, recovering from replicas in memory
# Know before you start this:
# - this version renders, but cannot run, trainer.kind 'megatron' (it runs: 'torch')
# Change the recipe and render it again instead of this file. By hand: start every node's
# script, all with the same LAUNCHER_RDZV_ENDPOINT (a free port of this machine for each node, as
# 127.0.0.1:PORT with commas between).
# shellcheck disable=SC2016  # a recipe's values are plain text
set -euo pipefail

die() {
  echo "node-1.sh: $*" >&2
  exit 2
}

run_dir=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
[ -f "$run_dir/job.json" ] || die "no job.json in $run_dir"

export FI_PROVIDER=efa
export OMP_NUM_THREADS=8

# Nobody without the run's token gets in. All nodes have one, the first one's: a link appears whole,
# and once.
token_file=$run_dir/run.token
if [ ! -e "$token_file" ]; then
  new_token=$(mktemp "$run_dir/.run.token.XXXXXX")
  head --bytes=32 /dev/urandom | base64 >"$new_token"
  ln "$new_token" "$token_file" 2>/dev/null || [ -e "$token_file" ]
  rm "$new_token"
fi

exec "${LAUNCHER_PYTHON:-python}" \
  -m \
  resilience.agent \
  --config="$run_dir/node.json" \
  --rdzv-endpoint="${LAUNCHER_RDZV_ENDPOINT:-127.0.0.1:29500,127.0.0.1:29501,127.0.0.1:29502,127.0.0.1:29503,127.0.0.1:29504,127.0.0.1:29505,127.0.0.1:29506,127.0.0.1:29507,127.0.0.1:29508,127.0.0.1:29509,127.0.0.1:29510,127.0.0.1:29511,127.0.0.1:29512,127.0.0.1:29513,127.0.0.1:29514,127.0.0.1:29515}" \
  --rdzv-id=llama3-70b-pretrain-checkpointless-"${LAUNCHER_RUN_ID:-0}" \
  --local-addr=127.0.0.1 \
  --node-name=node-1 \
  --token-file="$token_file" \
  --run-dir="$run_dir" \
  --preload=training.preload \
  --warm=program \
  -- \
  "${LAUNCHER_PYTHON:-python}" \
  -m \
  training \
  --job="$run_dir/job.json" \
  --run-dir="$run_dir" \
  --node-name=node-1
