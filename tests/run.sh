#!/usr/bin/env bash
# Checks everything and changes nothing: formatting, lint, types, import rules, then the tests. All of them run, also
# after one has failed; the exit status is 0 only if all passed. Needs Python 3.10 or newer and pip.
#
#   bash tests/run.sh                          everything
#   bash tests/run.sh tests/unit -k policy     the checks, then pytest with just these arguments, serially
#
# Of everything, the tests of real torchrun agents (marked e2e) run last and one at a time, since they wait for real
# processes; the others run on JOBS processes (default 2). The last line counts both.
# PYTHON and VENV: see examples/setup_venv.sh. tests/fix.sh repairs formatting and lint.
set -uo pipefail
trap 'exit 130' INT

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
fi
# shellcheck source=examples/setup_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/../examples/setup_venv.sh"
cd "$ROOT" || exit 1
setup_venv dev || exit 1

export OMP_NUM_THREADS=1
unset XDG_RUNTIME_DIR # state folders of runs then lie in the temporary folder, like all that tests write
failed=()

check() { # NAME COMMAND...
    local name=$1 start=$SECONDS status
    shift
    printf '\n== %s: %s\n' "$name" "${*#"$VENV"/bin/}"
    "$@"
    status=$?
    if ((status)); then
        failed+=("$name")
    fi
    printf '== %s: %s, %d s\n' "$name" "$( ((status)) && printf 'FAILED (%d)' "$status" || printf ok)" $((SECONDS - start))
}

tell_failed() {
    if ((${#failed[@]})); then
        printf '\nFAILED:%s\n' "$(printf ' [%s]' "${failed[@]}")"
    fi
}

check "ruff format" "$VENV/bin/ruff" format --check .
check "ruff check" "$VENV/bin/ruff" check .
check "mypy" "$VENV/bin/mypy"
check "lint-imports" "$VENV/bin/lint-imports" --no-logo

# -v undoes the -q of pyproject.toml: one line a file instead of bare dots. -r names what failed and what was skipped.
pytest=("$VENV/bin/python" -m pytest -v --no-header -rfEs)

if (($#)); then
    tell_failed
    printf '\n== pytest: %s\n' "$*"
    "${pytest[@]}" "$@"
    status=$?
    exit $((status ? status : ${#failed[@]} > 0))
fi

reports=$(mktemp -d "${TMPDIR:-/tmp}/lmres-tests-XXXXXX") || exit 1
trap 'rm -rf "$reports"' EXIT
check "pytest" "${pytest[@]}" -m "not e2e" -n "${JOBS:-2}" --dist loadfile --junitxml="$reports/1.xml"
check "pytest e2e" "${pytest[@]}" -m e2e --junitxml="$reports/2.xml"

tell_failed
# Both closing lines in one, in words that a machine can read too.
printf '\n'
"$VENV/bin/python" - "$reports" <<'PYTHON'
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

suites = [suite for path in Path(sys.argv[1]).glob("*.xml") for suite in ElementTree.parse(path).iter("testsuite")]
total, failures, errors, skipped = (
    sum(int(suite.get(name)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
)
failed = failures + errors
print(f"total: {total - failed - skipped} passed, {failed} failed, {skipped} skipped")
PYTHON
exit $((${#failed[@]} > 0))
