#!/usr/bin/env bash
# Lint, format, types, documents and tests: `uv run scripts/check.sh`.
#   --lint   only lint, format, types and documents
#   --slow   the slow tests too, and those that compile for GPUs (uv sync --extra aot)
set -euo pipefail
tests=(pytest)
case "${1:-}" in
  "") ;;
  --lint) tests=() ;;
  --slow) tests=(pytest -m "not gpu") ;;
  --help | -h) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *) echo "error: $1 is no flag; there are --lint, --slow and --help" >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
pyrefly check
python scripts/docs.py --check
((${#tests[@]} == 0)) || "${tests[@]}"
