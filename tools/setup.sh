#!/bin/sh
# Sets up .venv with the locked dependencies of the given extras; returns at once when that is done already.
#
#     PYTHON=python3 sh tools/setup.sh dev,bench
#
# Each extra that is installed has a stamp, .venv/done/<extra>, holding a checksum of what it was made from. While pip
# works the folder is called .venv/underway: a kill at any moment leaves no stamp behind, and the next call builds
# .venv anew, because half a package cannot be told from a whole one.
set -eu

extras=${1:?name the extras to install, for example: dev}
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."

say() { printf 'set-up: %s\n' "$*" >&2; }
stop() { say "$*"; exit 1; }

# An environment knows its own path and interpreter, and works with no other.
place() { printf '%s %s\n' "$(pwd -P)" "$(readlink -f .venv/bin/python)"; }

# The settings of ruff, mypy and pytest are left out: changing those needs no new install.
wanted() { awk '/^\[/ { keep = !/^\[+tool\.(ruff|mypy|pytest)/ } keep' pyproject.toml | cat - constraints.txt | cksum; }

holds() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }
is_here() { [ -x .venv/bin/python ] && holds .venv/done/place "$(place)"; }
is_done() {
    is_here || return
    for extra in $(echo "$extras" | tr , ' '); do
        holds ".venv/done/$extra" "$(wanted)" || return
    done
}

# Installs a package of the system when the user may; otherwise prints the one command that does, and stops.
need_package() { # package, what it is needed for
    # The lists come first: a fresh machine has none.
    by_apt="apt-get update && apt-get install -y $1"
    if ! command -v apt-get >/dev/null; then
        stop "$2 is missing: install it with your system's package manager (Debian calls it $1), then try again"
    elif [ "$(id -u)" = 0 ]; then
        as_root=
    elif sudo -n true 2>/dev/null; then
        as_root='sudo -n'
    elif command -v sudo >/dev/null; then
        stop "$2 is missing: run this, then try again: sudo sh -c '$by_apt'"
    else
        stop "$2 is missing: run this, then try again: su - -c '$by_apt'"
    fi
    say "installing $1, because $2 is missing"
    log=$($as_root env DEBIAN_FRONTEND=noninteractive sh -c "$by_apt" 2>&1 </dev/null) ||
        stop "apt-get could not install $1:
$log"
}

check_python() {
    command -v "$python" >/dev/null ||
        stop "there is no $python: install Python 3.11 or newer, or name one (make PYTHON=...)"
    # Errors are captured: a Python that is interrupted would print where.
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || stop "$python does not run"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        stop "$python is Python $version, and 3.11 or newer is needed: name one (make PYTHON=...)"
}

# An environment that somebody made by hand is used too, if its pip works.
is_usable() {
    [ ! -e .venv/underway ] && [ -x .venv/bin/python ] && .venv/bin/python -m pip --version >/dev/null 2>&1 &&
        { [ ! -e .venv/done ] || is_here; }
}

make_environment() {
    rm -rf .venv # before Python is looked for: with .venv activated, `python3` would be the one in it
    check_python
    "$python" -c 'import ensurepip, venv' 2>/dev/null || need_package "python$version-venv" "Python's venv module"
    say "making .venv with Python $version"
    mkdir -p .venv/underway
    log=$("$python" -m venv .venv 2>&1) || stop "$python could not make .venv:
$log"
}

# Says how far pip is: a line that changes on a terminal, one every ten seconds elsewhere. It runs in the background, where
# an interrupt does not reach it, and ends within a second of pip or of this shell.
show_progress() {
    seconds=0
    while sleep 1 && kill -0 $$ 2>/dev/null && [ -d .venv/underway ]; do
        seconds=$((seconds + 1))
        found=$(grep -c '^Collecting' .venv/pip.log) || found=0
        step=$(grep -E '^ *(Collecting|Downloading|Installing|Building)' .venv/pip.log | tail -n 1 | cut -c 1-60) || step=
        if [ -t 2 ]; then
            printf '\r\033[Kset-up: %s s, %s packages found: %s' "$seconds" "$found" "$step" >&2
        elif [ $((seconds % 10)) = 0 ]; then
            say "$seconds s, $found packages found: $step"
        fi
    done
}

end_progress() {
    kill "$progress" 2>/dev/null || :
    if [ -t 2 ]; then printf '\r\033[K' >&2; fi
}

packages() { ls -A .venv/lib/python*/site-packages; }

install() {
    say "installing the locked dependencies [$extras]; the first time this takes a minute or more"
    if [ -d .venv/done ]; then mv .venv/done .venv/underway; fi
    mkdir -p .venv/underway
    place >.venv/underway/place
    before=$(packages)
    # By variables, because older pips hand only those on to the isolated build, where they pin the build backend; and
    # a relative path, because pip splits them at spaces.
    : >.venv/pip.log
    show_progress 9<&- & # without the lock
    progress=$!
    if ! PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt .venv/bin/python -m pip install \
        --no-input --disable-pip-version-check --progress-bar off --editable ".[$extras]" \
        >.venv/pip.log 2>&1 </dev/null; then
        end_progress
        log=$(tail -n 20 .venv/pip.log)
        # Where pip failed before it touched a package, as it does without a network, what was done still stands.
        if [ "$(packages)" = "$before" ]; then mv .venv/underway .venv/done; fi
        stop "pip could not install the dependencies:
$log"
    fi
    end_progress
    for extra in $(echo "$extras" | tr , ' '); do
        wanted >".venv/underway/$extra"
    done
    mv .venv/underway .venv/done
}

# Spark's driver needs a Java; everything else here does without.
has_java() {
    java=${JAVA_HOME:+$JAVA_HOME/bin/java}
    java=$(command -v "${java:-java}") || return
    version=$("$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p')
    [ "${version:-0}" -ge 17 ]
}
need_java() { has_java || need_package openjdk-17-jre-headless "Java 17"; }

interrupted() {
    if [ -t 2 ]; then printf '\r\033[K' >&2; fi
    say "stopped: the next call goes on"
    if [ -n "${MAKELEVEL-}" ]; then exit 0; fi # make is interrupted, too, and would add a line to any other code
    exit 130
}
trap interrupted INT

case ",$extras," in *,dev,* | *,spark,* | *,all,*) need_java ;; esac
is_done && exit
if command -v flock >/dev/null; then # two calls at once would pull .venv from under each other
    exec 9<pyproject.toml
    flock 9
    is_done && exit
fi
is_usable || make_environment
install
say "done"
