#!/bin/sh
# Says what this machine lacks, with the command that installs it; exits 1 if anything is missing.
#
#   check_machine.sh [--packages] [--disk GB] [PYTHON]
#
# PYTHON is the interpreter to build for; empty means python3, or the newest supported python3.N.
# --packages prints only the Debian names of what is missing (for scripts), and exits 0.
# --disk GB checks free space where .venv and build/ go.
# The last line of a good run is `python: /path`, the interpreter that was chosen.
set -u
packages_only=no
disk=0
while [ $# -gt 0 ]; do
  case $1 in
    --packages) packages_only=yes ;;
    --disk) disk=$2; shift ;;
    *) break ;;
  esac
  shift
done
wish=${1:-}
root=$(cd "$(dirname "$0")/.." && pwd)
missing=
refused=no

say() { [ "$packages_only" = yes ] || echo "$@" >&2; }
lack() {  # lack PACKAGE what is wrong
  package=$1; shift
  missing="$missing $package"
  say "missing: $*"
}
refuse() { refused=yes; say "refused: $*"; }

system=${ACC_CHECK_SYSTEM:-$(uname -s)}
machine=${ACC_CHECK_MACHINE:-$(uname -m)}
if [ "$system" != Linux ] || [ "$machine" != x86_64 ]; then
  refuse "this is $system on $machine; acc runs on Linux x86-64 only"
fi

command -v git >/dev/null 2>&1 || lack git "git"
command -v make >/dev/null 2>&1 || lack make "make"
if [ -n "${CXX:-}" ]; then
  command -v "${CXX%% *}" >/dev/null 2>&1 || refuse "CXX is '$CXX', which is no program here"
elif command -v g++ >/dev/null 2>&1; then
  version=$(g++ -dumpversion | cut -d. -f1)
  if [ "${version:-0}" -lt 11 ]; then
    refuse "g++ is $version; 11 or newer is needed: apt-get install g++-11, then CXX=g++-11"
  fi
elif ! command -v clang++ >/dev/null 2>&1; then
  lack g++ "a C++ compiler (g++ 11 or newer)"
fi

supported() {
  "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}
python=
if [ -n "$wish" ]; then
  if ! command -v "$wish" >/dev/null 2>&1; then
    refuse "PYTHON is '$wish', which is no program here"
  elif supported "$wish"; then
    python=$wish
  else
    refuse "$wish is $("$wish" --version 2>&1); Python 3.10 to 3.13 is needed"
  fi
else
  for name in python3 python3.13 python3.12 python3.11 python3.10; do
    if command -v "$name" >/dev/null 2>&1 && supported "$name"; then
      python=$name
      break
    fi
  done
  if [ -z "$python" ]; then
    if command -v python3 >/dev/null 2>&1; then
      refuse "python3 is $(python3 --version 2>&1); Python 3.10 to 3.13 is needed. Install one" \
        "beside it and name it: PYTHON=python3.12"
    else
      lack "python3 python3-venv python3-dev" "python3, 3.10 to 3.13, with its venv and dev packages"
    fi
  fi
fi
if [ -n "$python" ]; then
  number=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
    lack "python$number-venv" "the venv module of $python"
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' \
    >/dev/null 2>&1 || lack "python$number-dev" "Python.h of $python"
fi

if [ "$disk" -gt 0 ]; then
  free=$(df -Pk "$root" | awk 'NR == 2 { print int($4 / 1048576) }')
  if [ "$free" -lt "$disk" ]; then
    refuse "$free GB are free on the disk of $root; $disk GB are needed (torch and its libraries" \
      "5.1, its download 2.8, the build 1). Make room, or clone to a larger disk"
  fi
fi

if [ "$packages_only" = yes ]; then
  echo $missing
  exit 0
fi
if [ -n "$missing" ]; then
  sudo=sudo\ ; [ "$(id -u)" = 0 ] && sudo=
  say "Install it with:"
  say "  ${sudo}apt-get install -y$missing"
fi
[ -z "$missing" ] && [ "$refused" = no ] || exit 1
echo "python: $(command -v "$python")"
