#!/usr/bin/env bash
# The kernels built for 64-bit Arm by Debian's cross compiler and run under user-mode emulation: NEON beside portable C++.
# Needs g++-aarch64-linux-gnu and qemu-user; without the emulator it stops after compiling, without the compiler it says so.
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=aarch64-linux-gnu-g++ build=build/neon python=.venv/bin/python
if ! command -v "$compiler" > /dev/null; then
    echo "no $compiler here (Debian: g++-aarch64-linux-gnu): NEON is not checked"
    exit 0
fi
mkdir -p "$build"
# Bindings are compiled too and dropped by the linker: nothing here calls them, and there is no Python for Arm.
include="$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
for source in tools/check_levels.cpp src/attar/csrc/{attention,cpu,limits,linear,lookup,matrix,pool,progressive,quantize,rows}.cpp; do
    "$compiler" -std=c++17 -O1 -ffp-contract=off -ffunction-sections -fdata-sections -Wall -Wextra -Werror \
        -Wno-psabi -Wno-maybe-uninitialized -Wno-unknown-pragmas -Wno-attributes -Wno-unused-variable -D_GLIBCXX_ASSERTIONS \
        -isystem "$include" -isystem "$("$python" -m nanobind --include_dir)" \
        -c "$source" -o "$build/$(basename "$source" .cpp).o"
done
"$compiler" -static -Wl,--gc-sections "$build"/*.o -o "$build/check_levels"
if ! command -v qemu-aarch64 > /dev/null; then
    echo "no qemu-aarch64 here (Debian: qemu-user): NEON is compiled, not run"
    exit 0
fi
qemu-aarch64 -cpu max "$build/check_levels" neon
