#!/usr/bin/env bash
# node-1 of 2 of llama/llama3_tiny_checkpointless_mmap version 1, digest 17716d42b9adb1b804b59da8a28a810a3372871fab622c5cc177fe066cadf952.
# llama3_tiny_checkpointless with its batches made ahead in shared files
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
  --rdzv-id=llama3-tiny-checkpointless-mmap-"${LAUNCHER_RUN_ID:-0}" \
  --local-addr=127.0.0.1 \
  --node-name=node-1 \
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
