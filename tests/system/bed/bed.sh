#!/usr/bin/env bash
# Make a machine for the tests: a system's files under a writable layer, and a real systemd.
#
#   bed.sh image DIR TREE SOURCE COMMAND   lay a writable layer DIR over TREE (/: this machine's files),
#                                          copy SOURCE to /usr/src/musterd in there and run COMMAND
#                                          chrooted into it (with this machine's network)
#   bed.sh boot DIR TREE IMAGE GROUP       boot systemd over the layers of IMAGE, in the cgroup GROUP
#
# Both run as root in a mount namespace made for the tests: they mount nothing outside of it, and
# write only to DIR, which has to be on a tmpfs.
set -euo pipefail
shopt -s dotglob nullglob
umask 022

ME=$(readlink -f -- "${BASH_SOURCE[0]}")
USUAL_PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# An overlay lacks what is mounted below its lower directory, so each of these has its own overlay.
PLACES=(/ /usr /opt /srv /home /var /root)
# No test depends on what TREE has installed, configured and stored, such as another musterd.
HIDDEN=(/etc/musterd /opt/musterd /usr/src/musterd '/etc/systemd/*' '/home/*' '/srv/*' '/usr/local/*'
    '/var/lib/*' '/var/log/*')

# layers DIR TREE [IMAGE]: DIR/root is TREE with a writable layer, and with the layers of IMAGE below.
layers() {
    local place name lower
    mkdir -p "$1/root"
    for place in "${PLACES[@]}"; do
        [ "$place" = / ] || { [ "$2" = / ] && mountpoint -q "$place"; } || continue
        name=${place//\//_}
        lower=${2%/}$place
        [ $# -lt 3 ] || lower=$3/$name/upper:$lower
        mkdir -p "$1/$name/upper" "$1/$name/work"
        [ $# -ge 3 ] || hide "$2" "$place" "$1/$name/upper"
        mount -t overlay bed -o "lowerdir=$lower,upperdir=$1/$name/upper,workdir=$1/$name/work" \
            "$1/root$place"
    done
    mount -t tmpfs -o mode=1777 tmp "$1/root/tmp"
    mount -t tmpfs -o mode=755,nosuid,nodev run "$1/root/run"
}

# hide TREE PLACE UPPER: hide the HIDDEN files below PLACE in its layer UPPER. The device 0:0 is an
# overlay's sign for a deleted file, so the files are not read, however large they are.
hide() {
    local tree=${1%/} place=${2%/} pattern path gone IFS=
    for pattern in "${HIDDEN[@]}"; do
        for path in "$tree"$pattern; do
            path=${path#"$tree"}
            case $path in
                /var/lib/apt | /var/lib/dpkg) continue ;; # the list of packages
                "$place"/*) gone=$3${path#"$place"} ;;
                *) continue ;;
            esac
            mkdir -p "${gone%/*}"
            mknod "$gone" c 0 0
        done
    done
}

# forget ROOT: remove the system's human users, and the user of a musterd.
forget() {
    local file gone
    gone=$(awk -F: '$1 == "musterd" || ($3 >= 1000 && $3 < 60000) { print $1 }' "$1"/etc/{passwd,group})
    for file in "$1"/etc/{passwd,group,shadow,gshadow}; do
        [ -e "$file" ] || continue
        awk -F: 'NR == FNR { gone[$1]; next } !($1 in gone)' <(echo "$gone") "$file" > "$file.new"
        cat "$file.new" > "$file"
        rm "$file.new"
    done
}

image() {
    local root=$1/root
    layers "$1" "$2"
    forget "$root"
    mkdir -p "$root/usr/src/musterd"
    tar -C "$3" --exclude='./.venv*' --exclude=./.trees --exclude=./.git --exclude=./build --exclude=./dist \
        --exclude='*.egg-info' --exclude=__pycache__ --exclude='./.*_cache' -cf - . |
        tar -C "$root/usr/src/musterd" --no-same-owner -xf -
    mount --rbind /dev "$root/dev"
    mount -t proc proc "$root/proc"
    if [ "$2" = / ]; then
        # It may be a link to a file in /run, or a mount.
        [ ! -e /etc/resolv.conf ] || cp --remove-destination -L /etc/resolv.conf "$root/etc/resolv.conf"
        chroot "$root" env HOME=/root PATH=$USUAL_PATH sh -euc "$4"
    else
        bash "$(dirname "$ME")/tree.sh" inside "$root" sh -euc "$4"
    fi
    umount -R -l "$root"
}

# tidy ROOT: start only the units that every system has: none that this machine has enabled, and none
# that would touch the kernel, which is shared.
tidy() {
    local etc=$1/etc/systemd unit
    mkdir -p "$etc/system"
    rm -rf "$etc"/system/*.wants "$etc"/system/*.requires "$etc"/user/*.wants "$1"/etc/rc?.d
    rm -f "$1/.dockerenv"
    : > "$1/etc/fstab"
    tr -d - < /proc/sys/kernel/random/uuid > "$1/etc/machine-id"
    for unit in systemd-sysctl systemd-binfmt systemd-modules-load systemd-udevd systemd-udev-trigger \
        systemd-udev-settle systemd-random-seed systemd-networkd systemd-resolved \
        systemd-timesyncd systemd-firstboot systemd-update-utmp systemd-hwdb-update \
        systemd-machine-id-commit console-getty getty@ systemd-remount-fs systemd-pstore; do
        ln -sfn /dev/null "$etc/system/$unit.service"
    done
    for unit in getty.target timers.target systemd-udevd-control.socket systemd-udevd-kernel.socket \
        proc-sys-fs-binfmt_misc.automount dev-hugepages.mount sys-kernel-debug.mount \
        sys-kernel-tracing.mount sys-kernel-config.mount sys-fs-fuse-connections.mount; do
        ln -sfn /dev/null "$etc/system/$unit"
    done
    ln -sfn /lib/systemd/system/multi-user.target "$etc/system/default.target"
    mkdir -p "$etc/journald.conf.d"
    printf '[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\n' > "$etc/journald.conf.d/bed.conf"
}

boot() {
    layers "$1" "$2" "$3"
    tidy "$1/root"
    exec unshare --pid --fork --kill-child --mount --propagation private --uts --ipc --net \
        bash "$ME" enter "$1/root" "$4"
}

# enter ROOT GROUP: move the first process of the new PID namespace into its cgroup, then into a new
# cgroup namespace.
enter() {
    echo 0 > "$2/cgroup.procs"
    exec unshare --cgroup bash "$ME" first "$1"
}

first() {
    local root=$1 node
    mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
    mount -t sysfs -o nosuid,nodev,noexec,ro sysfs "$root/sys"
    mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$root/sys/fs/cgroup"
    # Switches of the whole machine are read-only here, which leaves /proc incomplete. The kernel
    # refuses user namespaces a new /proc unless a complete one is mounted somewhere. A real machine
    # has neither problem.
    mount -t proc -o nosuid,nodev,noexec proc "$root/sys/kernel/debug"
    for node in sys sysrq-trigger; do
        [ -e "$root/proc/$node" ] || continue
        mount --bind "$root/proc/$node" "$root/proc/$node"
        mount -o remount,bind,ro "$root/proc/$node"
    done
    mount -t tmpfs -o mode=755,nosuid dev "$root/dev"
    for node in null:3 zero:5 full:7 random:8 urandom:9; do
        mknod -m 666 "$root/dev/${node%:*}" c 1 "${node#*:}"
    done
    mknod -m 666 "$root/dev/tty" c 5 0
    mkdir "$root/dev/pts" "$root/dev/shm" "$root/dev/mqueue"
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
    mount -t tmpfs -o mode=1777,nosuid,nodev shm "$root/dev/shm"
    ln -s pts/ptmx "$root/dev/ptmx"
    ln -s /proc/self/fd "$root/dev/fd"
    ln -s /proc/self/fd/0 "$root/dev/stdin"
    ln -s /proc/self/fd/1 "$root/dev/stdout"
    ln -s /proc/self/fd/2 "$root/dev/stderr"
    cd "$root"
    mkdir -p .before
    pivot_root . .before
    umount -l /.before
    rmdir /.before
    mount --make-rshared /
    # Containers do not get these: the clock, modules, raw devices, the kernel's log.
    exec setpriv --bounding-set=-sys_time,-sys_module,-sys_rawio,-syslog,-audit_control,-audit_read,-wake_alarm,-block_suspend \
        env -i container=bed PATH=$USUAL_PATH TERM=dumb /lib/systemd/systemd --system
}

command=$1
shift
"$command" "$@"
