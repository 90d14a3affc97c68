#!/usr/bin/env bash
# The demonstration, on a fresh clone with only Python 3.10 or newer and pip: trains a small language model with two
# torchrun agents and one standby on this host, kills a worker, then a whole node, and shows how the run recovers.
#
#   bash examples/quickstart.sh [--steps N] [--folder FOR_THE_LOGS] [--timeout-s LONGEST_WAIT]
#
# The first call sets up .venv (PYTHON and VENV: see examples/setup_venv.sh); the demonstration takes about a minute.
set -euo pipefail

# shellcheck source=examples/setup_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
setup_venv runtime
exec "$VENV/bin/python" "$ROOT/examples/quickstart.py" "$@"
