#!/usr/bin/env bash
# install-torch.sh PYTHON VERSION [INDEX [ACCELERATOR]]: torch without CUDA packages (cpu) or with
# them (cuda). ACCELERATOR is cuda by default where there is an NVIDIA driver, else cpu. INDEX is a
# further package index, which carries the builds named +cpu or those for one version of CUDA.
set -euo pipefail
python=$1 version=$2 index=${3:-} accelerator=${4:-}
pip=("$python" -m pip --disable-pip-version-check -q install)
[ -z "$index" ] || pip+=(--extra-index-url "$index")

if [ -z "$version" ]; then
  echo "install-torch: the version is empty; give TORCH_VERSION=..." >&2
  exit 2
fi
if [ -z "$accelerator" ]; then
  accelerator=cpu
  ! { command -v nvidia-smi && nvidia-smi -L; } >/dev/null 2>&1 || accelerator=cuda
fi
case $accelerator in
cuda) exec "${pip[@]}" "torch==$version" ;;
cpu) ;;
*)
  echo "install-torch: ACCELERATOR is '$accelerator'; allowed: cpu, cuda" >&2
  exit 2
  ;;
esac
if ! words=$("${pip[@]}" "torch==$version+cpu" 2>&1); then
  if ! grep -q 'No matching distribution' <<<"$words"; then
    printf '%s\n' "$words" >&2
    exit 1
  fi
  echo "note: no package index here carries torch $version+cpu; taking torch $version, which may" \
    "bring CUDA packages along (TORCH_INDEX=... names another index)" >&2
  exec "${pip[@]}" "torch==$version"
fi
