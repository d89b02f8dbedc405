#!/usr/bin/env bash
# Real services that tests marked "services" use, from Debian's packages, if they are not there and this is root.
set -euo pipefail
packages=()
command -v slurmctld >/dev/null || packages+=(slurmctld)
command -v slurmd >/dev/null || packages+=(slurmd)
command -v sbatch >/dev/null || packages+=(slurm-client)
command -v munged >/dev/null || packages+=(munge)
if [ "${#packages[@]}" -eq 0 ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "please install ${packages[*]}, or run this as root where there is apt-get" >&2
    exit 1
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
