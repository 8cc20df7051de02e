#!/bin/sh
# Install the system programs that tests drive (tests/support/needs.py) where this user may: as root, or by sudo without a
# password. Where not, say what is missing: those tests skip.
set -u
missing=""
for pair in chromium:chromium bwrap:bubblewrap setpriv:util-linux; do
  command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair#*:}"
done
[ -n "$missing" ] || exit 0

as_root=""
if [ "$(id -u)" != 0 ]; then
  if sudo -n true 2>/dev/null; then as_root="sudo -n"; else as_root=no; fi
fi
if [ "$as_root" = no ] || ! command -v apt-get >/dev/null 2>&1; then
  echo "Not installed:$missing. Tests that need them are skipped; an administrator can install them with the system's package manager (Debian: apt-get install$missing)."
  exit 0
fi
echo "Installing$missing with apt-get (tests of the report and of the Python tool's sandbox; Chromium is about 100 MB)"
# shellcheck disable=SC2086
$as_root env DEBIAN_FRONTEND=noninteractive sh -c "apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null" ||
  echo "apt-get failed: tests that need$missing are skipped"
