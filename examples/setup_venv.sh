# shellcheck shell=bash
# Sourced by tests/run.sh, tests/fix.sh and examples/quickstart.sh, which share one virtual environment.
#
#   setup_venv runtime     lmres, editable, with what it needs at run time
#   setup_venv dev         and the test and development tools
#
# Needs Python 3.10 or newer with pip, and on the first call a package index. Versions are those of constraints.txt.
# An environment that fits is reused, also one with more than what is asked for; one that does not is made anew.
#
#   VENV      where it is (default: .venv in the clone)
#   PYTHON    the interpreter it is made with (default: python3, or the first python3.x that is new enough)

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=${VENV:-$ROOT/.venv}
[[ $VENV == /* ]] || VENV=$PWD/$VENV
STAMP=$VENV/lmres-setup.txt

# Another project's modules on the path of every Python would be tested along.
unset PYTHONPATH PYTHONHOME

_say() { printf '%s\n' "$*" >&2; }

_python_version() { # prints MAJOR.MINOR.MICRO; fails where the interpreter does not run or is older than 3.10
    "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3]); sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

_find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 python; do
        if _python_version "$candidate" >/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        if [[ -n ${PYTHON:-} ]]; then
            _say "PYTHON=$PYTHON is not a Python of 3.10 or newer"
            return 1
        fi
    done
    _say "no Python of 3.10 or newer found; name one: PYTHON=/path/to/python3 $0"
    return 1
}

# What an environment was made from. A moved folder, another clone or other versions make it a bad one.
_inputs() {
    printf 'venv %s\nroot %s\npins %s\nhas %s\n' "$VENV" "$ROOT" "$(cat "$ROOT"/{constraints.txt,pyproject.toml} | cksum)" "$1"
}

_venv_runs() {
    local version
    version=$(_python_version "$VENV/bin/python") || return 1
    # One moved from elsewhere still runs, but its scripts name the old folder.
    grep -qsx "venv $VENV" "$STAMP" || [[ ! -e $STAMP ]] || return 1
    [[ -z ${PYTHON:-} || $version == "$(_python_version "$PYTHON")" ]]
}

_make_venv() {
    local python
    python=$(_find_python) || return 1
    # The clone's own .venv and what was made here before may be made anew; anything else is someone's.
    if [[ $VENV != "$ROOT/.venv" && ! -e $STAMP && -n $(ls -A "$VENV" 2>/dev/null) ]]; then
        _say "$VENV is no environment that fits, and was not made here: remove it, or name another one with VENV"
        return 1
    fi
    _say "setting up $VENV with Python $(_python_version "$python") (once; a minute or two, most of it for torch)"
    if "$python" -m venv --clear "$VENV" >/dev/null 2>&1; then
        return 0
    fi
    # Some systems ship Python without ensurepip: the environment then gets its pip from the system's.
    if "$python" -m venv --clear --without-pip "$VENV" &&
        "$python" -m pip --python "$VENV/bin/python" install -qq --no-cache-dir pip; then
        return 0
    fi
    _say "can not make a virtual environment with $python; its venv module and pip are needed"
    return 1
}

_install() { # quiet but for errors, and nothing is written outside of the environment
    "$VENV/bin/python" -m pip install -qq --no-input --no-cache-dir --disable-pip-version-check \
        -c "$ROOT/constraints.txt" "$@"
}

setup_venv() { # runtime | dev
    local wanted=$1 extra=
    _venv_runs || _make_venv || return 1
    if [[ $wanted == dev ]] || grep -qsx "has dev" "$STAMP"; then
        wanted=dev extra="[dev]"
    fi
    if [[ -e $STAMP && $(cat "$STAMP") == "$(_inputs "$wanted")" ]]; then
        return 0
    fi
    rm -f "$STAMP"
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$VENV/bin/python" -m ensurepip >/dev/null || return 1
    # The build tool comes under the constraints too, so it is installed first and used from here.
    if ! { _install setuptools && _install --no-build-isolation -e "$ROOT$extra"; }; then
        _say "installing into $VENV failed, see above"
        return 1
    fi
    _inputs "$wanted" >"$STAMP"
}
