#!/usr/bin/env bash
# Repairs what can be repaired without a person: formatting and lint. tests/run.sh checks.
set -euo pipefail

# shellcheck source=examples/setup_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/../examples/setup_venv.sh"
cd "$ROOT"
setup_venv dev

"$VENV/bin/ruff" format .
"$VENV/bin/ruff" check --fix .
