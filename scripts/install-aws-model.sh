#!/bin/sh
# Makes an environment that holds AWS's own model of a HyperPodPyTorchJob, as a judge for tests.
#
#   install-aws-model.sh [PYTHON [FOLDER]]    defaults: python3, .venv-aws at the repository's root
#
# Their package pins pytest, ruff and hydra, so it lives apart from ours, without its
# dependencies but for those that importing the model needs. Done already: nothing is touched.
set -eu

packages='boto3==1.40.0 click==8.1.7 kubernetes==33.1.0 pydantic==2.12.5 PyYAML==6.0.3'
model='sagemaker-hyperpod==3.12.0'

root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-python3}
folder=${2:-$root/.venv-aws}
stamp=$folder/installed
wanted="$packages $model"

if [ -x "$folder/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

"$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
# shellcheck disable=SC2086  # one word a package
pip install $packages
pip install --no-deps "$model"
"$folder/bin/python" -W ignore -c \
    'from sagemaker.hyperpod.training.hyperpod_pytorch_job import HyperPodPytorchJob'
printf '%s\n' "$wanted" >"$stamp"
