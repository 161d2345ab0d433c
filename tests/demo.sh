#!/usr/bin/env bash
# The main job on real input: three workers compute the digests of files of this machine; half way one
# is killed and one is asked to stop; every digest is compared with sha256sum's own.
set -euo pipefail
cd "$(dirname "$0")/.."

holdfast=${CARGO_TARGET_DIR:-target}/debug/holdfast
wanted=2500
work=$(mktemp -d)
pids=()

say() { printf '\n== %s\n' "$*"; }
fail() {
  printf 'demo: %s\n' "$*" >&2
  tail -n 5 "$work"/*.log >&2 || true
  exit 1
}
clean_up() {
  kill "${pids[@]}" 2>/dev/null || true
  wait 2>/dev/null || true
  rm -rf "$work"
}
trap clean_up EXIT

# Plain names only, so that the digests can be taken from the export with sed.
say "choosing files: documentation, licences, headers"
for folder in /usr/share/doc /usr/share/common-licenses /usr/include /usr/share /usr/lib /etc; do
  [[ -d $folder ]] || continue
  find "$folder" -xdev -type f -readable -size -512k -regex '[A-Za-z0-9._/+-]+' 2>/dev/null || true
done | awk -v n=$wanted '!seen[$0]++ { print; if (++c == n) exit }' >"$work/files"
count=$(wc -l <"$work/files")
((count >= 2000)) || fail "only $count files found on this machine"

cat >"$work/holdfast.toml" <<'TOML'
[lease]
ttl = "5s"
kill_grace = "500ms"
slack = "200ms"

[worker]
execution_slots = 4

[queues.checksum]
executor = "command"
argv = ["sha256sum", "--", "{input}"]
timeout = "30s"
TOML
export HOLDFAST_CONFIG=$work/holdfast.toml

say "starting a private PostgreSQL"
"$holdfast" dev --ephemeral --no-worker >"$work/url" 2>"$work/dev.log" &
pids+=($!)
for _ in $(seq 600); do
  [[ -s $work/url ]] && break
  kill -0 "${pids[0]}" 2>/dev/null || fail "the database did not start"
  sleep 0.1
done
HOLDFAST_DATABASE_URL=$(head -n 1 "$work/url")
export HOLDFAST_DATABASE_URL

say "starting three workers"
for n in 1 2 3; do
  "$holdfast" worker --health 127.0.0.1:0 2>"$work/worker$n.log" &
  pids+=($!)
done

say "submitting $count files"
started=$(date +%s)
batch=$("$holdfast" submit --lines --queue checksum --title "digests of $count files" --json \
  "$work/files" | sed -E 's/.*"batch":"([^"]+)".*/\1/')
echo "batch $batch"

count_of() { "$holdfast" show "$batch" --json | sed -E "s/.*\"$1\":([0-9]+).*/\1/"; }
(
  while (($(count_of succeeded) < count / 2)); do sleep 0.2; done
  kill -KILL "${pids[1]}"
  kill -TERM "${pids[2]}"
  printf '\n== half way: one worker killed, one asked to stop\n' >&2
) &
saboteur=$!
"$holdfast" watch "$batch" || fail "the batch did not succeed"
wait "$saboteur" || fail "the batch was over before the workers could be ended"
took=$(($(date +%s) - started))

say "exporting, and comparing every digest with sha256sum"
"$holdfast" export "$batch" --output "$work/results.jsonl"
lines=$(wc -l <"$work/results.jsonl")
((lines == count)) || fail "$lines results for $count files"
keys=$(sed -E 's/^\{"key":"([^"]*)".*/\1/' "$work/results.jsonl" | sort | uniq | wc -l)
((keys == count)) || fail "$keys different keys for $count files"
sed -E 's/.*"result":"([0-9a-f]{64})  ([^"]*)\\n".*/\1  \2/' "$work/results.jsonl" >"$work/digests"
sort -k 2 "$work/files" | cmp -s - <(cut -c 67- "$work/digests" | sort) || fail "files are missing"
sha256sum --check --strict --quiet "$work/digests" || fail "a digest is wrong"

# What the worker that is left took back, from its metrics.
address=$(sed -nE 's/.*serving health and metrics.*address=([0-9.]+):([0-9]+).*/\1 \2/p' \
  "$work/worker3.log")
read -r host port <<<"$address"
exec 3<>"/dev/tcp/$host/$port"
printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3
recovered=$(awk '/^holdfast_leases_recovered_total/ { n += $2 } END { print n + 0 }' <&3)
exec 3>&-
again=$(grep -c '"attempt":[2-9]' "$work/results.jsonl" || true)

say "all $count digests are right, every item exactly once"
printf '%-30s %s\n' "items" "$count" "attempts" "$((count + again))" \
  "items taken back after the kill" "$recovered" \
  "seconds" "$took" "items per second" "$((count / (took > 0 ? took : 1)))"
