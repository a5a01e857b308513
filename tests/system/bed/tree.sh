#!/usr/bin/env bash
# Make another Debian in a folder, for the tests: once, by debootstrap, and kept between runs.
#
#   tree.sh make SUITE DIR SOURCE PACKAGE...   put Debian SUITE with these packages into DIR, and into
#                                              /opt/tests a virtual environment with everything that
#                                              the project SOURCE and its tests depend on
#   tree.sh inside DIR COMMAND...              run COMMAND chrooted into DIR, with this machine's
#                                              network, its certificates and its settings of pip
#
# MIRROR is the address to get Debian from; the default is the mirror of this machine's apt.
# The script mounts nothing outside of its own mount namespace. It needs root.
set -euo pipefail

ME=$(readlink -f -- "${BASH_SOURCE[0]}")
USUAL_PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
CERTIFICATES=/etc/ssl/certs/ca-certificates.crt

fail() { echo "tree.sh: $*" >&2; exit 1; }

mirror() {
    local found
    found=${MIRROR:-$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' \
        'Component: main' | grep -v -- -security | head -n 1)} || :
    [ -n "$found" ] || fail "apt knows no mirror of Debian here: give MIRROR=http://HOST/debian"
    echo "$found"
}

# bootstrap SUITE DIR PACKAGE...: an incomplete tree has another name, and is made anew.
bootstrap() {
    local suite=$1 dir=$2 packages script=/usr/share/debootstrap/scripts
    shift 2
    packages=$(IFS=,; echo "$*")
    [ "$(cat "$dir/.packages" 2>/dev/null)" != "$packages" ] || return 0
    echo "making $dir by debootstrap: about two minutes, and kept"
    # A suite newer than this debootstrap is made like unstable.
    if [ -e "$script/$suite" ]; then script=$script/$suite; else script=$script/sid; fi
    rm -rf --one-file-system -- "$dir" "$dir.new"
    mkdir -p "$(dirname "$dir")"
    debootstrap --variant=minbase --include="$packages" "$suite" "$dir.new" "$(mirror)" "$script" \
        > "$dir.log" 2>&1 || { tail -n 20 "$dir.log" >&2; fail "debootstrap failed: all of it is in $dir.log"; }
    echo "$packages" > "$dir.new/.packages"
    mv -T "$dir.new" "$dir"
}

# environment DIR SOURCE: install again when the dependencies of the project have changed.
environment() {
    local dir=$1 source=$2 wanted
    wanted=$(cat "$source/pyproject.toml" "$source/constraints.txt" | sha256sum)
    [ "$(cat "$dir/opt/tests/.made" 2>/dev/null)" != "$wanted" ] || return 0
    echo "installing what the tests need into $dir/opt/tests"
    rm -rf --one-file-system -- "$dir/opt/tests"
    mkdir -p "$dir/opt/tests"
    cp "$source/pyproject.toml" "$source/constraints.txt" "$dir/opt/tests/"
    unshare --mount --propagation private bash "$ME" install "$dir"
    echo "$wanted" > "$dir/opt/tests/.made"
}

install() {
    mount --rbind /dev "$1/dev"
    mount -t proc proc "$1/proc"
    inside "$1" sh -euc '
        cd /opt/tests
        python3 -m venv .
        python3 -c "
import tomllib
project = tomllib.load(open(\"pyproject.toml\", \"rb\"))[\"project\"]
extras = project[\"optional-dependencies\"].values()
print(*project[\"dependencies\"], *(each for extra in extras for each in extra), sep=\"\\n\")
" > requirements.txt
        pip="bin/python -m pip --quiet --disable-pip-version-check"
        $pip install -c constraints.txt "setuptools>=68" wheel
        $pip install -c constraints.txt -r requirements.txt'
}

# Copy this machine's resolver and certificates each time: they may have changed since the tree was made.
inside() {
    local root=$1 settings=() index
    shift
    cp --remove-destination -L /etc/resolv.conf "$root/etc/resolv.conf"
    cp -L "${PIP_CERT:-${SSL_CERT_FILE:-$CERTIFICATES}}" "$root$CERTIFICATES"
    index=${PIP_INDEX_URL:-$(pip config get global.index-url 2>/dev/null || :)}
    [ -z "$index" ] || settings+=("PIP_INDEX_URL=$index")
    for name in http_proxy https_proxy no_proxy; do
        [ -z "${!name:-}" ] || settings+=("$name=${!name}")
    done
    chroot "$root" env -i HOME=/root PATH=$USUAL_PATH LANG=C.UTF-8 PIP_CERT=$CERTIFICATES \
        "${settings[@]}" "$@"
}

make() {
    local suite=$1 dir=$2 source=$3
    shift 3
    [ "$(id -u)" = 0 ] || fail "it takes root to make a tree: sudo make test-$suite"
    bootstrap "$suite" "$dir" "$@"
    environment "$dir" "$source"
}

command=$1
shift
"$command" "$@"
