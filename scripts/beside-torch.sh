#!/bin/sh
# Makes an environment of packages that take torch from another one.
#
#   beside-torch.sh PYTHON FOLDER MODULE PACKAGES BARE
#
# PYTHON has to be one that has torch: a second copy of it would be most of the environment, or BARE,
# whose packages are installed without what they ask for, want an older one. MODULE is imported at
# the end. Done already: nothing is touched.
set -eu

python=$1 folder=$2 module=$3 packages=$4 bare=$5
stamp=$folder/installed
wanted="$packages $bare"

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
pip install --no-deps $bare
# Comes after what is installed here, so that only what is missing is taken from there.
mv "$folder/torch.pth" "$own/torch.pth"
"$folder/bin/python" -W ignore -c "import $module"
printf '%s\n' "$wanted" >"$stamp"
