#!/usr/bin/env bash
# install-peers.sh [VENV] [PYTHON]: the systems that benchmarks/recovery.py and goodput.py compare
# with, in an environment of their own (default .venv-peers). A peer that cannot be installed is
# named with its reason, here and later by the benchmarks, which read VENV/peers.txt.
# TORCH_INDEX=... names an index that carries torch's builds without CUDA, where pip's does not.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv-peers} base=${2:-python3}
torch_version=2.13.0

[ -x "$venv/bin/python" ] || "$base" -m venv "$venv"
python=$(cd "$venv/bin" && pwd)/python
scripts/install-torch.sh "$python" "$torch_version" "${TORCH_INDEX:-}"

# What torch is by now stays: no peer may bring another one, or CUDA, in.
words=$(mktemp)
trap 'rm -f "$words"' EXIT
constraint=$venv/constraints.txt
"$python" -W ignore -c 'import torch; print(f"torch=={torch.__version__}")' >"$constraint"
pip=("$python" -m pip --disable-pip-version-check -q install --constraint "$constraint")
"${pip[@]}" "transformers>=5.0,<6" "numpy>=1.26,<3" "xxhash>=3.4,<5"

# try NAME CHECK REQUIREMENT...: one peer, and one line about it.
report=$venv/peers.txt
: >"$report"
try() {
  local name=$1 check=$2
  shift 2
  local state=missing reason
  if ! "${pip[@]}" "$@" >"$words" 2>&1; then
    reason=$(grep -m 1 ERROR "$words" || tail -n 1 "$words")
    reason=${reason%% (from versions:*}
  elif ! "$python" -W ignore -c "$check" >"$words" 2>&1; then
    reason=$(tail -n 1 "$words")
  else
    state=installed reason=$("$python" -m pip --disable-pip-version-check list 2>/dev/null |
      awk -v names=" ${*%%[<>=,]*} " 'index(names, " " $1 " ") { printf "%s %s ", $1, $2 }')
  fi
  printf '%s\t%s\t%s\n' "$name" "$state" "$reason" | tee -a "$report"
}

try torchrun 'import torch.distributed.run, torch.distributed.checkpoint' "torch==$torch_version"
try nvrx 'import nvidia_resiliency_ext.inprocess' \
  "nvidia-resiliency-ext>=0.4.1,<0.8" "nvidia-ml-py>=12.560" "setproctitle>=1.3,<2"
# Not torchft 0.2.0: there the survivors of a killed group die as well, since its DDP asserts that
# the future of a failed all-reduce has a value ("assert fut._fut").
try torchft 'import torchft' "torchft-nightly>=2026.10.26,<2027"
