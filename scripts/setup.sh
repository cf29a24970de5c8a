#!/bin/sh
# Makes .venv and builds in place. A second call finds everything done and takes a second.
#
#   setup.sh run|test|lint|tools [PYTHON]
#
# tools: .venv with what tests/cpp needs where it is built without torch.
#
# PYTHON is the interpreter that .venv is made from (default: python3). A supported torch that it
# has, or that .venv has, is kept and built against; otherwise the pinned one is installed.
set -eu
purpose=$1
wish=${2:-}
cd "$(dirname "$0")/.."
venv=.venv
py=$venv/bin/python
requirements=scripts/requirements
started=$(date +%s)
step() { echo "== $* ($(($(date +%s) - started)) s)"; }

# kept_torch PYTHON: 0 and the version on stdout if it has a supported torch
kept_torch() { "$1" scripts/native.py torch 2>/dev/null; }
fingerprint() { cat scripts/setup.sh "$@" | cksum | cut -d' ' -f1; }
done_before() { [ -f "$venv/.acc-$1" ] && [ "$(cat "$venv/.acc-$1")" = "$2" ]; }
mark() { echo "$2" >"$venv/.acc-$1"; }

pip_install() {
  # The downloads are unpacked beside .venv, so that one disk has to have room. Python compiles what
  # it imports by itself, where it may keep that: of 8,900 files less than half, which pip would take
  # 38 s for.
  mkdir -p "$venv/tmp"
  status=0
  lazily=--no-compile
  [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || lazily=
  TMPDIR=$PWD/$venv/tmp "$py" -m pip install --disable-pip-version-check $lazily $cache "$@" || status=$?
  rm -rf "$venv/tmp"
  return $status
}

usable() { [ -x "$py" ] && "$py" -m pip --version >/dev/null 2>&1; }
torch=
if usable; then torch=$(kept_torch "$py") || torch=; fi
need=2
if [ -z "$torch" ] && [ "$purpose" != lint ]; then need=10; fi
python=$(sh scripts/check_machine.sh --disk $need "$wish") || exit 1
python=${python#python: }
cache=
home_free=$(df -Pk "${HOME:-/}" 2>/dev/null | awk 'NR == 2 { print int($4 / 1048576) }')
[ "${home_free:-0}" -ge 12 ] || cache=--no-cache-dir

if ! usable; then
  step "making $venv from $python"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi
if [ "$purpose" != lint ] && [ -z "$torch" ] && kept_torch "$python" >/dev/null; then
  # one line per folder: the torch of that interpreter is seen from .venv, and nothing is copied
  "$python" -c 'import sysconfig
for name in ("purelib", "platlib"): print(sysconfig.get_path(name))' |
    sort -u >"$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base-interpreter.pth"
  torch=$(kept_torch "$py") || torch=
fi

if [ "$purpose" = lint ]; then
  stamp=$(fingerprint $requirements/lint.txt)
  if ! done_before lint "$stamp"; then
    step "installing the linters"
    pip_install -r $requirements/lint.txt
    mark lint "$stamp"
  fi
  exit 0
fi

if [ "$purpose" != run ]; then
  stamp=$(fingerprint $requirements/build.txt $requirements/googletest.txt)
  if ! done_before tools "$stamp"; then
    step "installing what compiles"
    pip_install -r $requirements/build.txt
    if [ ! -f /usr/include/gtest/gtest.h ]; then
      # sources only, so one interpreter's wheel serves all
      pip_install --no-deps --only-binary=:all: --python-version 3.11 --upgrade \
        --target "$venv/googletest" -r $requirements/googletest.txt
    fi
    mark tools "$stamp"
  fi
  [ "$purpose" != tools ] || exit 0
fi

stamp=$(fingerprint $requirements/build.txt $requirements/run.txt $requirements/cuda-*.txt)
if [ -z "$torch" ] || ! done_before run "$stamp-$torch"; then
  if [ -n "$torch" ]; then
    step "keeping torch $torch"
    set -- "torch==${torch%%+*}"
    case $torch in
      *+cpu*) "$py" -c 'import torchvision' 2>/dev/null || echo "note: this torch is a CPU build;" \
        "install the torchvision that matches it for the examples that use it" ;;
      *) set -- "$@" torchvision ;;
    esac
  else
    step "installing torch 2.11.0 (2.8 GB to download, some minutes)"
    set -- torch==2.11.0 torchvision==0.26.0
  fi
  pip_install "$@" -r $requirements/run.txt
  torch=$(kept_torch "$py") || { "$py" scripts/native.py torch; exit 1; }
  headers=$("$py" scripts/native.py cuda-wheels)
  if [ -n "$headers" ] && [ "${ACC_CUDA:-auto}" != 0 ]; then
    # an installed toolkit serves as well, so a version without such packages is no failure here
    # shellcheck disable=SC2086
    pip_install $headers || echo "note: $headers could not be installed; a toolkit is looked for"
  fi
  mark run "$stamp-$torch"
fi

if [ "$purpose" = test ]; then
  stamp=$(fingerprint $requirements/test.txt)
  if ! done_before test "$stamp"; then
    step "installing the test tools"
    pip_install -r $requirements/test.txt
    mark test "$stamp"
  fi
  stamp=$(fingerprint $requirements/ecosystem.txt)
  if ! done_before ecosystem "$stamp-$torch"; then
    step "installing the packages of the stage ecosystem"
    # beside .venv's own, which the other stages are to do with
    rm -rf "$venv/ecosystem"
    # pip would take another version of what these need out of .venv
    "$py" -m pip list --disable-pip-version-check --format=freeze >"$venv/versions.txt"
    pip_install --prefix "$venv/ecosystem" -c "$venv/versions.txt" -r $requirements/ecosystem.txt
    mark ecosystem "$stamp-$torch"
  fi
fi

step "building"
"$py" scripts/native.py develop
stamp=$(fingerprint setup.py scripts/native.py)
if ! done_before link "$stamp-$torch"; then
  step "making torchacc importable from everywhere in $venv"
  pip_install --quiet --no-build-isolation --no-deps --editable .
  mark link "$stamp-$torch"
fi
step "ready"
