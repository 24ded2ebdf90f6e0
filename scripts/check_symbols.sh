#!/usr/bin/env bash
# Two ISA files must share no weak symbol: the linker keeps one copy, and it may be the one that an older CPU cannot run.
# Usage: check_symbols.sh BUILD_FOLDER
set -euo pipefail
build=${1:?usage: check_symbols.sh BUILD_FOLDER}
mapfile -t objects < <(find "$build" -path '*int8moe_isa*' -name '*.o' | sort)
if [ "${#objects[@]}" -lt 1 ]; then
  echo "check_symbols: no ISA objects under $build; build the package first" >&2
  exit 1
fi
weak() { nm --defined-only "$1" | awk '$2 ~ /[WVu]/ {print $3}' | grep -v DW.ref | sort -u || true; }
status=0
for ((i = 0; i < ${#objects[@]}; i++)); do
  for ((j = i + 1; j < ${#objects[@]}; j++)); do
    [ "$(dirname "${objects[i]}")" = "$(dirname "${objects[j]}")" ] || continue
    shared=$(comm -12 <(weak "${objects[i]}") <(weak "${objects[j]}") | c++filt)
    if [ -n "$shared" ]; then
      echo "shared by $(basename "${objects[i]}") and $(basename "${objects[j]}"):"
      echo "$shared"
      status=1
    fi
  done
done
[ "$status" -eq 0 ] && echo "check_symbols: ${#objects[@]} ISA objects, no weak symbol shared"
exit "$status"
