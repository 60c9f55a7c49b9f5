#!/usr/bin/env bash
# Serves a run on a free port, asks for an answer that an expression constrains, and stops the
# server: `scripts/serve_smoke.sh RUN LOG`. The exit code is not 0 where any of it fails.
set -euo pipefail
cd "$(dirname "$0")/.."
uv="python3 -m uv"
port=$(python3 -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
$uv run scripts/serve.py --run_dir="$1" --port="$port" --prefill_chunk=16 --max_batch=8 \
    --context=512 >"$2" 2>&1 &
server=$!
trap 'kill -KILL $server 2>/dev/null || true' EXIT
url=http://127.0.0.1:$port
for _ in $(seq 300); do
  curl -fs "$url/health" >/dev/null && break
  kill -0 $server || { cat "$2"; exit 1; }
  sleep 0.3
done
answer=$(curl -fsS "$url/v1/completions" -H "Content-Type: application/json" \
    -d '{"prompt": "def ", "structured_outputs": {"regex": "[a-z]{8}"}}')
grep -E '"text": ?"[a-z]{8}"' <<<"$answer" || { echo "not a match: $answer" >&2; exit 1; }
kill -TERM $server
wait $server
echo "the server answered, and stopped"
