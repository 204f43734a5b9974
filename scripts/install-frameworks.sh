#!/bin/sh
# Makes an environment that holds Lightning, accelerate, Ray and trl, with which tests run programs.
#
#   install-frameworks.sh [PYTHON [FOLDER]]
#
# Defaults: .venv/bin/python and .venv-frameworks, both at the repository's root. PYTHON has to be one
# that has this project with torch: everything but the frameworks is taken from there. In that
# environment itself, each process that makes batches would import Lightning, which takes seconds.
# Done already: nothing is touched.
set -eu

packages='lightning==2.6.6 pytorch-lightning==2.6.6 torchmetrics==1.8.2 lightning-utilities==0.15.2
accelerate==1.15.0 psutil==7.2.2 ray==2.60.0 msgpack==1.2.4 protobuf==7.36.2 trl==1.16.0 peft==0.21.2
datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 pandas==3.1.1 pyarrow==26.0.1 httpx==0.28.1 httpcore==1.0.9'

root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-$root/.venv/bin/python}
folder=${2:-$root/.venv-frameworks}
stamp=$folder/installed

if [ -x "$folder/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$packages" ]; then
    exit 0
fi

"$python" -m venv "$folder"
own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$own/project.pth"
# shellcheck disable=SC2086  # one word a package
"$folder/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps $packages
"$folder/bin/python" -W ignore -c 'import lightning.pytorch, accelerate, ray, trl, peft'
printf '%s\n' "$packages" >"$stamp"
