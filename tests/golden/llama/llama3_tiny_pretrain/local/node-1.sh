#!/usr/bin/env bash
# node-1 of 2 of llama/llama3_tiny_pretrain version 1, digest 98594bd6a8259f0b29d139625a8f473d7b54f180b82f5cdfc97b02e1abaf3af0.
# A small Llama 3 on the Python library's source text, on 2 nodes of 2 CPU workers
# Change the recipe and render it again instead of this file. By hand: start every node's
# script, all with the same LAUNCHER_RDZV_ENDPOINT (a free port of this machine).
# shellcheck disable=SC2016  # a recipe's values are plain text
set -euo pipefail

die() {
  echo "node-1.sh: $*" >&2
  exit 2
}

run_dir=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
[ -f "$run_dir/job.json" ] || die "no job.json in $run_dir"

export GLOO_SOCKET_IFNAME=lo
export OMP_NUM_THREADS=1

exec "${LAUNCHER_PYTHON:-python}" \
  -m \
  resilience.agent \
  --config="$run_dir/node.json" \
  --rdzv-endpoint="${LAUNCHER_RDZV_ENDPOINT:-127.0.0.1:29500}" \
  --rdzv-id=llama3-tiny-pretrain-"${LAUNCHER_RUN_ID:-0}" \
  --local-addr=127.0.0.1 \
  --node-name=node-1 \
  --run-dir="$run_dir" \
  --preload=training.preload \
  -- \
  "${LAUNCHER_PYTHON:-python}" \
  -m \
  training \
  --job="$run_dir/job.json" \
  --run-dir="$run_dir" \
  --node-name=node-1
