#!/bin/sh
# Builds docker/Dockerfile as training-recipes:VERSION, VERSION being that of pyproject.toml.
#
#   build-image.sh [NAME=VALUE ...]    build arguments of docker/Dockerfile
#
# An argument whose value is empty is left out, so the Dockerfile's default holds.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/pyproject.toml")
tag=training-recipes:$version

for builder in docker podman buildah none; do
    command -v "$builder" >/dev/null && break
done
if [ "$builder" = none ]; then
    echo "build-image: none of docker, podman and buildah is on PATH; install one of them" >&2
    exit 1
fi

# Each word of "$@" goes to its end as two, or is dropped.
for word in "$@"; do
    shift
    case $word in
    *=) ;;
    *) set -- "$@" --build-arg "$word" ;;
    esac
done
echo "build-image: $builder builds $tag"
exec "$builder" build -f "$root/docker/Dockerfile" -t "$tag" "$@" "$root"
