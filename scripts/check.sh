#!/usr/bin/env bash
# Lint, format, types, documents and tests: `uv run scripts/check.sh`.
#   --lint   only lint, format, types and documents
#   --slow [folders of tests/]   the slow tests too, and those that compile for GPUs (uv sync
#            --extra aot), of all folders or of these: hours in all. .github/workflows/slow.yml runs
#            them every week, docs/log says when they last ran here
set -euo pipefail
tests=(pytest)
case "${1:-}" in
  "") ;;
  --lint) tests=() ;;
  --slow) shift
          tests=(pytest -m "not gpu" "${@/#/tests/}")
          for folder in "$@"; do
            [[ -d "$(dirname "$0")/../tests/$folder" ]] || {
              echo "error: --slow takes folders of tests/: there is no tests/$folder" >&2; exit 2; }
          done ;;
  --help | -h) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *) echo "error: $1 is no flag; there are --lint, --slow and --help" >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
pyrefly check
python scripts/docs.py --check
((${#tests[@]} == 0)) || "${tests[@]}"
