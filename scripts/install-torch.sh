#!/usr/bin/env bash
# install-torch.sh PYTHON VERSION [INDEX]: torch for this machine, without CUDA packages where
# there is no NVIDIA driver. INDEX is a further package index that carries the builds named +cpu.
set -euo pipefail
python=$1 version=$2 index=${3:-}
pip=("$python" -m pip --disable-pip-version-check -q install)
[ -z "$index" ] || pip+=(--extra-index-url "$index")

if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  exec "${pip[@]}" "torch==$version"
fi
if ! words=$("${pip[@]}" "torch==$version+cpu" 2>&1); then
  if ! grep -q 'No matching distribution' <<<"$words"; then
    printf '%s\n' "$words" >&2
    exit 1
  fi
  echo "note: no package index here carries torch $version+cpu; taking torch $version, which may" \
    "bring CUDA packages along (TORCH_INDEX=... names another index)" >&2
  exec "${pip[@]}" "torch==$version"
fi
