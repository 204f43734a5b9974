#!/usr/bin/env bash
# Install what tests run against: a Slurm of this machine's own distribution, what a Kubernetes
# API keeps its objects in, a browser that opens reports, and shells.
#
# Debian packages, so root and apt are needed; without them, or where a package cannot be
# had, it says so and exits 0: the tests then skip and name what is missing.
set -euo pipefail

packages=(slurmctld slurmd slurm-client munge etcd-server chromium zsh fish)

missing=()
for package in "${packages[@]}"; do
  # shellcheck disable=SC2016  # dpkg-query expands it
  status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

give_up() {
  echo "install-test-tools: not installed: ${missing[*]}; $1" >&2
  exit 0
}
command -v apt-get >/dev/null || give_up "no apt-get on this machine"
[ "$(id -u)" = 0 ] || give_up "run as root to install them"

# The packages start their services, which have no configuration, wherever this file is absent.
guard=/usr/sbin/policy-rc.d
if [ ! -e "$guard" ]; then
  trap 'rm -f "$guard"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$guard"
  chmod 755 "$guard"
fi

export DEBIAN_FRONTEND=noninteractive
apt=(apt-get -o DPkg::Lock::Timeout=300 -qq -y --no-install-recommends)
log=$(mktemp)
if "${apt[@]}" install "${missing[@]}" >"$log" 2>&1 ||
  { "${apt[@]}" update && "${apt[@]}" install "${missing[@]}"; } >>"$log" 2>&1; then
  rm -f "$log"
  echo "install-test-tools: installed ${missing[*]}"
else
  tail -n 5 "$log" >&2
  rm -f "$log"
  give_up "apt-get failed as above"
fi
