#!/bin/sh
# Tests the host's kernels on ARM's vectors (NEON) where there is no such processor: g++ and clang++
# compile for it and QEMU runs tests/cpp. Needs what make test made, and of Debian
# g++-aarch64-linux-gnu and qemu-user.
#
#     sh scripts/test_neon.sh [TEST ...]
set -eu
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH
build=$PWD/build/tests-neon
for program in cmake ninja aarch64-linux-gnu-g++ qemu-aarch64; do
  if ! command -v "$program" > /dev/null; then
    echo "test_neon.sh: $program is missing; make test brings cmake and ninja, Debian the others" >&2
    exit 1
  fi
done

# What tests call g++ and clang++. Compilers that run elsewhere do not know which processor is meant.
mkdir -p "$build/bin"
compiler() {
  cat > "$build/bin/$1" << END
#!/bin/sh
for argument; do
  shift
  case \$argument in *=native) argument=-mcpu=neoverse-n1 ;; esac
  set -- "\$@" "\$argument"
done
exec $2 "\$@"
END
  chmod +x "$build/bin/$1"
}
compiler g++ "$(command -v aarch64-linux-gnu-g++)"
rm -f "$build/bin/clang++"  # tests do without where there is none
if command -v clang++ > /dev/null; then
  compiler clang++ "$(command -v clang++) --target=aarch64-linux-gnu"
fi

cmake -S . -B "$build" -G Ninja --log-level=NOTICE -DACC_MODULE=OFF -DACC_TESTS=ON \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
  "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu" \
  -DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON \
  -DACC_GTEST_SOURCE="$PWD/.venv/googletest/src/gtest_vendor"
tests=${*:-test_kernels test_reductions test_cuda_kernels test_host_math}
# the names are separate words on purpose
# shellcheck disable=SC2086
cmake --build "$build" --target $tests
PATH=$build/bin:$PATH ctest --test-dir "$build" --output-on-failure --no-tests=error --timeout 3600 \
  -R "^($(echo "$tests" | tr ' ' '|'))(_[0-9])?\$"
