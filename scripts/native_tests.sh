#!/usr/bin/env bash
# The native kernel without Python: write_cases.py's cases through run_cases.cpp.
#   native_tests.sh CASES sanitize            address and undefined-behaviour sanitizers, this machine's kernels
#   native_tests.sh CASES thread              thread sanitizer
#   native_tests.sh CASES emulate-x86         the logic of AVX-VNNI, AVX-512 VNNI and AMX in software (needs libsimde-dev)
#   native_tests.sh CASES emulate-arm         NEON under user-mode emulation (needs g++-aarch64-linux-gnu, qemu-user)
#   native_tests.sh CASES native              as it is, optimised
#   native_tests.sh CASES portable            the portable kernel alone
set -euo pipefail
cases=$1 what=$2
cd "$(dirname "$0")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
common=(csrc/cpu/layer.cpp csrc/cpu/pack.cpp csrc/cpu/threads.cpp csrc/cpu/features.cpp tests/native/run_cases.cpp)
cxx=${CXX:-g++}
flags=(-std=c++20 -ffp-contract=off -Wall -Wextra -Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized -pthread)
avx512=(-mavx2 -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni)
defines=() jobs=()
isa() { # NAME FLAGS...: compile one ISA file, where the compiler knows its flags
  local name=$1
  shift
  if ! "$cxx" "$@" -x c++ -fsyntax-only /dev/null 2>"$out/refused"; then
    echo "$name left out: $(head -n 1 "$out/refused")" >&2
    return
  fi
  "$cxx" "${flags[@]}" "$@" -c "csrc/cpu/isa/$name.cpp" -o "$out/$name.o" &
  jobs+=($!)
  [ "$name" = portable ] || defines+=("-DINT8MOE_$(tr '[:lower:]' '[:upper:]' <<<"$name")")
}
link() {
  for job in "${jobs[@]}"; do wait "$job"; done
  "$cxx" "${flags[@]}" "${defines[@]}" csrc/cpu/dispatch.cpp "${common[@]}" "$out"/*.o -o "$out/run"
}
x86() {
  isa portable
  isa avx2 -mavx2 -mf16c
  isa avxvnni -mavx2 -mf16c -mavxvnni
  isa avx512vnni "${avx512[@]}"
  isa amx "${avx512[@]}" -mamx-tile -mamx-int8
  link
}
case $what in
portable)
  flags+=(-O1)
  isa portable
  link
  "$out/run" "$cases"
  ;;
native)
  flags+=(-O3)
  x86
  "$out/run" "$cases"
  ;;
sanitize)
  flags+=(-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
  x86
  "$out/run" "$cases"
  ;;
thread)
  flags+=(-O1 -g -fsanitize=thread)
  x86
  "$out/run" "$cases"
  ;;
emulate-x86)
  # The vector types are the emulation's, and so is the code: built for the baseline.
  flags+=(-O2 -DSIMDE_NO_NATIVE -include tests/native/emulated/immintrin.h -Itests/native/emulated)
  isa portable
  isa avxvnni
  isa avx512vnni
  isa amx
  link
  "$out/run" "$cases" avxvnni avx512vnni amx
  ;;
emulate-arm)
  cxx=${CXX_ARM:-aarch64-linux-gnu-g++}
  flags+=(-O2 -static)
  isa portable
  isa neon_dotprod -march=armv8.2-a+dotprod
  isa neon_i8mm -march=armv8.2-a+dotprod+i8mm
  link
  qemu-aarch64 -cpu max "$out/run" "$cases"
  ;;
*)
  echo "unknown: $what" >&2
  exit 2
  ;;
esac
