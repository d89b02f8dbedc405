#!/usr/bin/env bash
# Debian packages that tests use, if they are not there and this is root; without them those tests are skipped.
set -euo pipefail
if [ -x /usr/sbin/sshd ] || [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    exit 0
fi
apt-get update -qq && apt-get install -y -qq --no-install-recommends openssh-server >/dev/null ||
    echo "openssh-server could not be installed: tests of --hosts are skipped" >&2
