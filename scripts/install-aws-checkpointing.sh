#!/bin/sh
# Makes an environment that holds AWS's own client of tiered checkpoints, as a judge for tests.
#
#   install-aws-checkpointing.sh [PYTHON [FOLDER]]
#
# Defaults: .venv/bin/python and .venv-aws-tiered, both at the repository's root. PYTHON has to be
# one that has torch: their package does not declare that it needs it, and a second copy of it
# would be most of the environment, so torch is taken from there. Done already: nothing is touched.
set -eu

packages='boto3==1.40.0 requests==2.32.5 tenacity==9.1.2 xxhash==3.6.0'
client='amzn-sagemaker-checkpointing==1.1.3 s3torchconnector==1.5.0 s3torchconnectorclient==1.5.0'

root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-$root/.venv/bin/python}
folder=${2:-$root/.venv-aws-tiered}
stamp=$folder/installed
wanted="$packages $client"

if [ -x "$folder/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

"$python" -m venv "$folder"
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$folder/torch.pth"
own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
pip() { "$folder/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
# shellcheck disable=SC2086  # one word a package
pip install $packages
# shellcheck disable=SC2086
pip install --no-deps $client
# Comes after what is installed here, so that only what is missing is taken from there.
mv "$folder/torch.pth" "$own/torch.pth"
"$folder/bin/python" -W ignore -c \
    'import amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem'
printf '%s\n' "$wanted" >"$stamp"
