#!/usr/bin/env bash
# Creates .venv and installs requirements/cpu.lock and this checkout into it (make setup).
# Run again, it installs only what changed. pip's own output goes to .venv/setup.log.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}
venv=${VENV:-.venv}
lock=requirements/cpu.lock
torch_index=https://download.pytorch.org/whl/cpu # PyTorch's public index of CPU wheels
log=$venv/setup.log
stamp=$venv/.lock.sha256

fail() {
  echo "setup: error: $*" >&2
  exit 1
}

# What pip is doing, from the end of its log.
progress() {
  tail -1 "$log" | sed -E 's/^Installing collected packages.*/unpacking/; s/^ +//; s/^(.{60}).+/\1.../'
}

# run LABEL COMMAND...: runs quietly, showing that it is alive.
run() {
  local label=$1 start=$SECONDS pid
  shift
  printf '\n$ %s\n' "$*" >>"$log"
  "$@" >>"$log" 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    (((SECONDS - start) % 15 == 0)) || continue
    echo "setup: $label: $(progress), $((SECONDS - start)) s"
  done
  wait "$pid"
}

pip() {
  "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"
}

command -v "$python" >/dev/null || python=python3
command -v "$python" >/dev/null || fail "Python 3.11 not found; install it, or: make setup PYTHON=/path/to/python3.11"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[[ $version == 3.11 ]] ||
  fail "$lock is for Python 3.11, found $version; install 3.11, or: make setup PYTHON=/path/to/python3.11"

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  echo "setup: creating $venv"
  "$python" -m venv "$venv" || fail "could not create $venv (on Debian, install python3.11-venv)"
fi
: >"$log"

sum=$(sha256sum <"$lock")
if [[ $(cat "$stamp" 2>/dev/null) != "$sum" ]]; then
  echo "setup: installing $(wc -l <"$lock") packages into $venv (some minutes)"
  mapfile -t build < <(grep -E '^(setuptools|wheel)==' "$lock")
  torch=$(grep -E '^torch==' "$lock") || fail "$lock does not pin torch"
  run "build tools" pip install --no-deps "${build[@]}" ||
    fail "could not install ${build[*]}; the end of $log says why"
  # torch alone may need PyTorch's index. It is asked only second: where it cannot be
  # reached, pip would retry it for every single package.
  # --no-compile: most modules are never imported, and the others compile when they are.
  run "$torch" pip install --no-deps --no-compile "$torch" ||
    run "$torch from $torch_index" pip install --no-deps --retries 2 --extra-index-url "$torch_index" "$torch" ||
    fail "$torch is neither on the configured package index nor reachable at $torch_index; the end of $log says why"
  run "all packages" pip install --no-deps --no-compile -r "$lock" ||
    fail "could not install $lock; the end of $log says why: $(grep '^ERROR' "$log" | tail -1)"
  echo "$sum" >"$stamp"
fi
run "megappo" pip install --no-deps --no-build-isolation -e . ||
  fail "could not install this checkout; the end of $log says why: $(grep '^ERROR' "$log" | tail -1)"
echo "setup: $venv is ready"
