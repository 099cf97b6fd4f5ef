#!/usr/bin/env bash
# Starts a server of the embedded model on a free port, asks it once with curl, and stops it. Needs rorqual in the PATH.
set -euo pipefail
log=$(mktemp)
rorqual serve tiny --nproc 2 --dp-size 2 --dtype float32 --port 0 --max-total-tokens 8192 --disable-access-log 2> "$log" &
server=$!
trap 'kill -9 $server 2> /dev/null || true; rm -f "$log"' EXIT

url=""
for _ in $(seq 600); do
  url=$(sed -n '/listening at [^;]*;/{s/.*listening at \([^;]*\);.*/\1/p;q}' "$log")
  if [ -n "$url" ] && curl -sf "$url/health" > /dev/null; then break; fi
  if ! kill -0 $server 2> /dev/null; then cat "$log" >&2; exit 1; fi
  sleep 0.2
done

ask='{"model": "tiny", "messages": [{"role": "user", "content": "Tell me about the sea."}], "max_tokens": 24, "temperature": 0}'
echo "curl $url/v1/chat/completions -H 'Content-Type: application/json' -d '$ask'"
curl -sf --max-time 60 "$url/v1/chat/completions" -H 'Content-Type: application/json' -d "$ask" || { cat "$log" >&2; exit 1; }
echo

kill -TERM $server
wait $server || { code=$?; cat "$log" >&2; exit $code; }
echo "the server has ended in good order"
