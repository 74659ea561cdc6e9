#!/usr/bin/env bash
# tools/sysroot.sh FOLDER: Debian 11's C and C++ libraries, for `tools/wheel.py --sysroot FOLDER`, from Debian's packages.
# A wheel that is linked with them runs wherever they or newer ones are. Needs apt and dpkg on a Debian system, not root.
set -euo pipefail
release=bullseye
packages=(libc6 libc6-dev libcrypt1 libcrypt-dev libgcc-10-dev libgcc-s1 libgomp1 libstdc++6 libstdc++-10-dev linux-libc-dev)
out="${1:?"usage: tools/sysroot.sh FOLDER"}"
if [ -e "$out" ]; then
  echo "$out exists: remove it, or name another folder" >&2
  exit 2
fi
mirror="$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Label: Debian' 'Created-By: Packages' | sed -n 1p)"
if [ -z "$mirror" ]; then
  echo "apt knows no mirror of Debian: run this on a Debian system, after apt-get update" >&2
  exit 2
fi

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists/partial,cache/archives/partial,packages,root}
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $release main" > "$work/sources.list"
options=(-qq -o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=- -o "Dir::State::Lists=$work/lists"
  -o "Dir::State::Status=/dev/null" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=)
apt-get "${options[@]}" update
(cd "$work/packages" && apt-get "${options[@]}" download "${packages[@]}")
for package in "$work"/packages/*.deb; do
  dpkg-deb --extract "$package" "$work/root"
done
# The linker takes a link's absolute path for one of this system.
find "$work/root" -lname '/*' | while read -r link; do
  ln -sfn "$(realpath --canonicalize-missing --relative-to "$(dirname "$link")" "$work/root$(readlink "$link")")" "$link"
done
mkdir -p "$(dirname "$out")"
cp -a "$work/root" "$out"
echo "$out: the C and C++ libraries of Debian's $release"
