#!/usr/bin/env bash
# Run the Transformers tests with other Transformers versions and print a table.
#   scripts/transformers_versions.sh                  every version below
#   scripts/transformers_versions.sh oldest newest    what CI runs
#   scripts/transformers_versions.sh 5.22.2 5.19.0    these
#   TESTS=tests/integration/test_families.py scripts/transformers_versions.sh     every model family: minutes a version
# Each version gets a small environment under build/transformers/ that adds itself in front of the project's own
# packages (.venv, from `make setup`), so only Transformers and what it pins is installed. Logs lie beside it.
set -u
cd "$(dirname "$0")/.."

versions=(5.16.1 5.19.0 5.22.2 5.23.0 5.24.0)
wanted=()
for name in "${@:-all}"; do
    case $name in
        all) wanted+=("${versions[@]}") ;;
        oldest) wanted+=("${versions[0]}") ;;
        newest) wanted+=("${versions[-1]}") ;;
        *) wanted+=("$name") ;;
    esac
done

read -ra tests <<<"${TESTS:-tests/integration/test_transformers.py tests/integration/test_compressed_tensors.py}"

project=.venv/bin/python
[ -x "$project" ] || { echo "no .venv here; run: make setup" >&2; exit 2; }
site=$("$project" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# Makes the environment of one version once; prints its Python.
environment() {
    local folder=build/transformers/$1
    if [ ! -e "$folder/.made" ]; then
        rm -rf "$folder"
        "$project" -m venv --without-pip "$folder" || return
        echo "import site; site.addsitedir('$site')" >"$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
        "$folder/bin/python" -m pip install --quiet "transformers==$1" >"$folder.pip.log" 2>&1 || { cat "$folder.pip.log" >&2; return 1; }
        touch "$folder/.made"
    fi
    echo "$folder/bin/python"
}

mkdir -p build/transformers
failed=0
rows=()
for version in "${wanted[@]}"; do
    start=$SECONDS
    log=build/transformers/$version.log
    if ! python=$(environment "$version"); then
        rows+=("$version|could not be installed|$((SECONDS - start)) s")
        failed=1
        continue
    fi
    found=$("$python" -c 'import transformers; print(transformers.__version__)')
    if [ "$found" != "$version" ]; then
        rows+=("$version|runs Transformers $found instead|$((SECONDS - start)) s")
        failed=1
        continue
    fi
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest -q -p no:cacheprovider "${tests[@]}" >"$log" 2>&1 || failed=1
    rows+=("$version|$(tail -n 1 "$log" | sed 's/ in [0-9.]*s.*//')|$((SECONDS - start)) s")
    grep -E '^(FAILED|ERROR) ' "$log" | sed "s/^/$version: /"
done

printf '%-14s%-50s%s\n' transformers result time
for row in "${rows[@]}"; do
    IFS='|' read -r version result time <<<"$row"
    printf '%-14s%-50s%s\n' "$version" "$result" "$time"
done
exit $failed
