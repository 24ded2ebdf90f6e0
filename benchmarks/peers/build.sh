#!/usr/bin/env bash
# Build the peers' libraries for this CPU: `benchmarks/peers/build.sh [FOLDER]`, .data/peers by default.
# Takes 3 minutes on 2 cores of a Zen 3: llama.cpp's ggml 1, ik_llama.cpp's 2; 120 MB are downloaded.
# JOBS sets the compile jobs, KEEP=1 keeps the sources and objects in FOLDER/build.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "${1:-$here/../../.data/peers}"
out=$(cd "${1:-$here/../../.data/peers}" && pwd)
work=$out/build
jobs=${JOBS:-$(nproc)}
python=${PYTHON:-python3}
mkdir -p "$work"
echo '*' > "$out/.gitignore"

say() { echo "[${SECONDS} s] $*"; }

# build NAME PACKAGE VERSION GGML_FOLDER CMAKE_OPTION...
build() {
  local name=$1 package=$2 version=$3 ggml=$4 sdist
  shift 4
  sdist=$work/${package//-/_}-$version
  if [ ! -f "$sdist.tar.gz" ]; then
    say "downloading the sdist of $package $version"
    # Not `--no-binary :all:`, which would compile the build tools that pip needs to read the sdist as well.
    "$python" -m pip download --quiet --disable-pip-version-check --no-binary "$package" --no-deps -d "$work" \
      "$package==$version"
  fi
  [ -d "$sdist" ] || tar -xzf "$sdist.tar.gz" -C "$work"
  say "compiling $name"
  cmake -S "$here" -B "$work/$name" -G "Unix Makefiles" -DCMAKE_BUILD_TYPE=Release -DGGML_DIR="$sdist/$ggml" "$@" \
    > "$work/$name.log" 2>&1 || { tail -20 "$work/$name.log"; exit 1; }
  make -C "$work/$name" -j"$jobs" moe >> "$work/$name.log" 2>&1 || { tail -20 "$work/$name.log"; exit 1; }
  cp "$work/$name/libmoe.so" "$out/$name.so"
  echo "$package $version" > "$out/$name.version"
  say "$out/$name.so"
}

say "building into $out with $jobs jobs"
build llama llama-cpp-python 0.3.36 vendor/llama.cpp/ggml
build ik ik-llama-cpp-python 0.1.5 vendor/ik_llama.cpp/ggml -DIK_FORK=ON
[ -n "${KEEP:-}" ] || rm -rf "$work"
say "done"
