#!/usr/bin/env bash
# node-0 of 16 of llama/llama3_70b_pretrain_checkpointless version 1, digest f7bf36a61f81ecc0a99ad9af5a4d8eaef573e01c8183c019e90afaa9ea3b072a.
# Llama 3 70B from random weights, recovering from replicas in memory
# Change the recipe and render it again instead of this file. By hand: start every node's
# script, all with the same LAUNCHER_RDZV_ENDPOINT (a free port of this machine).
# shellcheck disable=SC2016  # a recipe's values are plain text
set -euo pipefail

die() {
  echo "node-0.sh: $*" >&2
  exit 2
}

run_dir=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
[ -f "$run_dir/job.json" ] || die "no job.json in $run_dir"

export FI_PROVIDER=efa
export OMP_NUM_THREADS=8

exec "${LAUNCHER_PYTHON:-python}" \
  -m \
  torch.distributed.run \
  --nnodes=16 \
  --nproc-per-node=8 \
  --max-restarts=0 \
  --rdzv-backend=c10d \
  --rdzv-endpoint="${LAUNCHER_RDZV_ENDPOINT:-127.0.0.1:29500}" \
  --rdzv-id=llama3-70b-pretrain-checkpointless-"${LAUNCHER_RUN_ID:-0}" \
  --local-addr=127.0.0.1 \
  -m \
  training \
  --job="$run_dir/job.json" \
  --run-dir="$run_dir" \
  --node-name=node-0
