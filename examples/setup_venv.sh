# shellcheck shell=bash
# Sourced by tests/run.sh, tests/fix.sh and examples/quickstart.sh, which share one virtual environment.
#
#   setup_venv          lmres, editable, with what it needs at run time
#   setup_venv dev      and the test and development tools
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

# What a good environment was made from: a moved folder, another clone or other versions make it a bad one.
_inputs() { printf 'venv %s\nroot %s\ninputs %s\n' "$VENV" "$ROOT" "$(cat "$ROOT/constraints.txt" "$ROOT/pyproject.toml" | cksum)"; }

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
    if [[ -e $VENV && ! -e $VENV/pyvenv.cfg && -n $(ls -A "$VENV" 2>/dev/null) ]]; then
        _say "$VENV exists and is no virtual environment; name another folder: VENV=... $0"
        return 1
    fi
    _say "setting up $VENV with Python $(_python_version "$python") (once; a minute or two, most of it for torch)"
    if ! "$python" -m venv --clear "$VENV" >/dev/null 2>&1; then
        # Some systems ship Python without ensurepip: the environment then gets its pip from the system's.
        "$python" -m venv --clear --without-pip "$VENV" &&
            "$python" -m pip --python "$VENV/bin/python" install -qq --no-cache-dir pip ||
            { _say "can not make a virtual environment with $python; its venv module and pip are needed"; return 1; }
    fi
}

_install() { # quiet but for errors, and nothing is written outside of the environment
    "$VENV/bin/python" -m pip install -qq --no-input --no-cache-dir --disable-pip-version-check \
        -c "$ROOT/constraints.txt" "$@"
}

setup_venv() {
    local extra=${1:-}
    _venv_runs || _make_venv || return 1
    if [[ -e $STAMP && $(head -n 3 "$STAMP") == "$(_inputs)" ]] &&
        { [[ -z $extra ]] || grep -qx "extra $extra" "$STAMP"; }; then
        return 0
    fi
    if [[ -z $extra ]] && grep -qsx "extra dev" "$STAMP"; then
        extra=dev
    fi
    rm -f "$STAMP"
    # The build tool comes under the constraints too, so it is installed first and used from here.
    if ! { _install setuptools && _install --no-build-isolation -e "$ROOT${extra:+[$extra]}"; }; then
        _say "installing into $VENV failed, see above"
        return 1
    fi
    { _inputs && printf 'extra %s\n' "$extra"; } >"$STAMP"
}
