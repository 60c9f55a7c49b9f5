#!/usr/bin/env bash
# Lint, format, types and tests: `uv run scripts/check.sh`.
#   --lint   only lint, format and types
#   --slow   the slow tests too, and those that compile for GPUs (uv sync --extra aot)
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
pyrefly check
case "${1:-}" in
  --lint) ;;
  --slow) pytest -m "not gpu" ;;
  "") pytest ;;
  *) echo "usage: scripts/check.sh [--lint|--slow]" >&2; exit 2 ;;
esac
