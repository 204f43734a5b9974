#!/bin/sh
# Makes an environment that holds AWS's own agent for HyperPod's operator, as a judge for tests.
#
#   install-aws-agent.sh [PYTHON [FOLDER]]
#
# Defaults: .venv/bin/python and .venv-aws-agent, both at the repository's root. PYTHON has to be
# one that has torch: the package asks for an older one, and a second copy of it would be most of
# the environment, so torch is taken from there. Done already: nothing is touched.
set -eu

packages='fastapi==0.128.0 uvicorn==0.40.0 psutil==7.2.2'
agent='hyperpod-elastic-agent==1.1.3'

root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-$root/.venv/bin/python}
folder=${2:-$root/.venv-aws-agent}
stamp=$folder/installed
wanted="$packages $agent"

if [ -x "$folder/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

"$python" -m venv "$folder"
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$folder/torch.pth"
own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
pip() { "$folder/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
# shellcheck disable=SC2086  # one word a package
pip install $packages
pip install --no-deps "$agent"
# Comes after what is installed here, so that only what is missing is taken from there.
mv "$folder/torch.pth" "$own/torch.pth"
"$folder/bin/python" -W ignore -c 'import hyperpod_elastic_agent.run'
printf '%s\n' "$wanted" >"$stamp"
