#!/usr/bin/env bash
# Fetch PyTorch's own tests of torch.distributed.checkpoint, which our tests run over the tiers.
#
#   install-torch-tests.sh [PYTHON [FOLDER]]
#
# Defaults: .venv/bin/python and .venv-torch-tests, both at the repository's root. No wheel has the
# tests; they are taken from Debian's source package of pytorch, of the version next to PYTHON's torch
# that can be had. Nothing of the system is changed, and root is not needed. Without apt-get, Debian's
# keys or a network it says so and exits 0: the tests then skip. Done already: nothing is touched.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-$root/.venv/bin/python}
folder=${2:-$root/.venv-torch-tests}
keys=/usr/share/keyrings/debian-archive-keyring.gpg
packages='expecttest==0.3.0'

[ ! -e "$folder/version" ] || exit 0
give_up() {
  echo "install-torch-tests: not installed: $1" >&2
  exit 0
}
command -v apt-get >/dev/null || give_up "no apt-get on this machine"
command -v xz >/dev/null || give_up "no xz on this machine"
[ -e "$keys" ] || give_up "$keys is not there"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/source"
mirror=$(sed -n 's/^URIs: *\([^ ]*\).*/\1/p; s/^deb \(\[[^]]*\] \)\?\([^ ]*\).*/\2/p' \
  /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -m 1 '/debian/\?$' || true)
[ -n "$mirror" ] || give_up "no mirror of Debian among apt's sources"
for suite in sid forky trixie; do
  echo "deb-src [signed-by=$keys] $mirror $suite main"
done >"$work/sources"
cat >"$work/apt.conf" <<EOF
Dir::Etc::sourcelist "$work/sources";
Dir::Etc::sourceparts "-";
Dir::State::lists "$work/lists";
Dir::Cache "$work/cache";
APT::Sandbox::User "$(id -un)";
EOF
export APT_CONFIG=$work/apt.conf
apt-get -qq update 2>"$work/log" || give_up "$(tail -n 1 "$work/log")"

# The nearest minor version first, an older one before a newer one.
own=$("$python" -c 'import torch; print(torch.__version__.split(".")[1])')
versions=$(apt-cache showsrc pytorch | sed -n 's/^Version: \(2\.[0-9].*\)/\1/p' | sort -u |
  awk -F. -v own="$own" '{ away = $2 - own; print (away < 0 ? -2 * away - 1 : 2 * away), $0 }' |
  sort -n | cut -d ' ' -f 2)
fetched=
for version in $versions; do
  if (cd "$work/source" && apt-get -qq source --download-only "pytorch=$version") 2>"$work/log"; then
    fetched=$version
    break
  fi
done
[ -n "$fetched" ] || give_up "no source of pytorch can be had: $(tail -n 1 "$work/log")"

new=$folder.new
rm -rf "$new"
mkdir -p "$new"
tar -xJf "$work/source/"pytorch_*.orig.tar.xz -C "$new" --strip-components 1 \
  --wildcards '*/test/distributed/checkpoint'
# What torch.testing imports, and our environment has no use for.
"$python" -m pip --disable-pip-version-check --quiet install --no-deps \
  --target "$new/packages" $packages 2>"$work/log" || give_up "$(tail -n 1 "$work/log")"
printf '%s\n' "$fetched" >"$new/version"
rm -rf "$folder"
mv "$new" "$folder"
echo "install-torch-tests: the tests of pytorch $fetched"
