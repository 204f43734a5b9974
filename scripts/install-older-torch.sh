#!/usr/bin/env bash
# Makes an environment with an older torch and all else of ours, for tests/recipes_training/torch/test_torch_older.py.
#
#   install-older-torch.sh [PYTHON [FOLDER]]
#
# Defaults: .venv/bin/python and .venv-torch-older, both at the repository's root. HyperPod's own agent
# takes no torch from 2.12 on. Where no index has a build without CUDA this downloads some 3 GB, so
# nothing runs it by itself. Done already: nothing is touched.
set -euo pipefail

version=2.11.0
root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-$root/.venv/bin/python}
folder=${2:-$root/.venv-torch-older}
stamp=$folder/installed

[ "$(cat "$stamp" 2>/dev/null)" != "$version" ] || exit 0
"$python" -m venv "$folder"
"$root/scripts/install-torch.sh" "$folder/bin/python" "$version"
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# Behind its own packages, so that its torch is the one that is found.
site "$python" >"$(site "$folder/bin/python")/ours.pth"
printf '%s\n' "$version" >"$stamp"
